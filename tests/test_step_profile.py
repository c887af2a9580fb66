"""Where a training step goes: kernels of a trace in groups and by name."""

from __future__ import annotations

import concurrent.futures
import multiprocessing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from jax.profiler import ProfileData

import jaxkernels as jk
from jaxkernels.bench import step_profile
from jaxkernels.bench.step_profile import GROUPS, breakdown, groups_of_hlo
from jaxkernels.core.errors import InputError

#: A program as XLA prints it, cut down to an instruction of each kind.
HLO = """
HloModule jit__step, is_scheduled=true

%fused_copy (param_0: bf16[16,8,64], param_1: s32[]) -> bf16[8,64] {
  %param_0 = bf16[16,8,64]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %constant_1 = s32[] constant(15)
  %subtract.1 = s32[] subtract(%constant_1, %param_1)
  %dynamic-slice.1 = bf16[1,8,64]{2,1,0} dynamic-slice(%param_0, %subtract.1), dynamic_slice_sizes={1,8,64}
  ROOT %bitcast.1 = bf16[8,64]{1,0} bitcast(%dynamic-slice.1)
}

%fused_norm (param_0.1: bf16[8,64]) -> f32[8] {
  %param_0.1 = bf16[8,64]{1,0} parameter(0)
  %convert.1 = f32[8,64]{1,0} convert(%param_0.1), metadata={op_name="jit(_step)/jvp()/checkpoint/norm/mul"}
  ROOT %reduce.1 = f32[8]{0} reduce(%convert.1), dimensions={1}, to_apply=%add
}

%fused_add (param_0.2: bf16[8,64]) -> bf16[8,64] {
  %param_0.2 = bf16[8,64]{1,0} parameter(0)
  ROOT %add.1 = bf16[8,64]{1,0} add(%param_0.2, %param_0.2), metadata={op_name="jit(_step)/normalised/add"}
}

%fused_product (param_0.3: bf16[16,8,64]) -> (bf16[8,64], bf16[8,64]) {
  %param_0.3 = bf16[16,8,64]{2,1,0} parameter(0)
  %dynamic-slice.2 = bf16[1,8,64]{2,1,0} dynamic-slice(%param_0.3), dynamic_slice_sizes={1,8,64}
  ROOT %custom-call.9 = (bf16[8,64]{1,0}, bf16[8,64]{1,0}) custom-call(%dynamic-slice.2), custom_call_target="x"
}

ENTRY %main (p: bf16[8,64]) -> bf16[8,64] {
  %p = bf16[8,64]{1,0} parameter(0)
  %loop_slice_fusion.2 = bf16[8,64]{1,0} fusion(%p), kind=kLoop, calls=%fused_copy
  %fusion-start.3 = ((bf16[16,8,64]{2,1,0}, s32[]), bf16[8,64]{1,0}, u32[]) fusion-start(%p), calls=%fused_copy
  %input_reduce_fusion = f32[8]{0} fusion(%p), kind=kInput, calls=%fused_norm
  %loop_add_fusion.1 = bf16[8,64]{1,0} fusion(%p), kind=kLoop, calls=%fused_add
  %dynamic_slice_fusion.4 = (bf16[8,64]{1,0}, bf16[8,64]{1,0}) fusion(%p), kind=kCustom, calls=%fused_product
  %custom-call.1 = bf16[8,64]{1,0} custom-call(%p), metadata={op_name="jit(_step)/jvp()/attention/mpmd_map"}
  %custom-call.2 = bf16[8,64]{1,0} custom-call(%p), metadata={op_name="jit(_step)/jvp()/mpmd_map"}
  %custom-call.3 = bf16[8,64]{1,0} custom-call(%p), metadata={op_name="jit(_step)/jvp()/norm/triton_kernel_call"}
  %cublas-gemm.1 = bf16[8,64]{1,0} custom-call(%p), custom_call_target="__cublas$lt$matmul"
  %all-reduce-start.1 = bf16[8,64]{1,0} all-reduce-start(%p), to_apply=%add
  ROOT %copy.7 = bf16[8,64]{0,1} copy(%p)
}
"""

INSTRUCTIONS = {
    "loop_slice_fusion.2": "copies",
    "fusion-start.3": "copies",
    "input_reduce_fusion": "norms",
    "loop_add_fusion.1": "elementwise",
    "dynamic_slice_fusion.4": "products",
    "custom-call.1": "attention",
    "custom-call.2": "products",
    "custom-call.3": "norms",
    "cublas-gemm.1": "products",
    "all-reduce-start.1": "collectives",
    "copy.7": "copies",
}

#: Kernels without an instruction -> their group.
NAMES = {
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>(Params)": "products",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3": "attention",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "collectives",
    "MemcpyD2D": "copies",
    "wrapped_transpose_3": "copies",
    "loop_multiply_fusion_77": "elementwise",
    "unknown": "other",
}


def trace(*lines: tuple[str, list[tuple[str, str | None, float, float]]], plane: str = "/device:GPU:0") -> ProfileData:
    """A trace of lines of (kernel, instruction, begin and duration in microseconds)."""
    kernels = sorted({kernel for _, events in lines for kernel, *_ in events})
    text = [f'planes {{ name: "{plane}" stat_metadata {{ key: 1 value {{ id: 1 name: "hlo_op" }} }}']
    for i, kernel in enumerate(kernels, 1):
        text.append(f'event_metadata {{ key: {i} value {{ id: {i} name: "{kernel}" }} }}')
    for i, (name, events) in enumerate(lines, 1):
        text.append(f'lines {{ id: {i} name: "{name}" timestamp_ns: 5000')
        for kernel, instruction, begin, duration in events:
            stat = "" if instruction is None else f'stats {{ metadata_id: 1 str_value: "{instruction}" }}'
            number = kernels.index(kernel) + 1
            times = f"offset_ps: {round(begin * 1e6)} duration_ps: {round(duration * 1e6)}"
            text.append(f"events {{ metadata_id: {number} {times} {stat} }}")
        text.append("}")
    return ProfileData.from_text_proto("\n".join([*text, "}"]))


def test_instructions_have_groups():
    groups = groups_of_hlo(HLO)
    assert {name: groups[name] for name in INSTRUCTIONS} == INSTRUCTIONS
    assert groups["loop_add_fusion_1"] == "elementwise"  # The name of its kernel.


def test_kernels_without_an_instruction_are_grouped_by_name():
    events = [(name, None, float(i), 1.0) for i, name in enumerate(NAMES)]
    found = breakdown(trace(("Stream #1(Compute)", events)), 1, {})
    expected = dict.fromkeys(GROUPS, 0.0)
    for group in NAMES.values():
        expected[group] += 1e-6
    assert found.groups == pytest.approx(expected, abs=1e-12)


def test_own_kernels_are_grouped_by_name():
    """A custom call would be a product."""
    kernels = {"norm_forward": "norms", "logits_fused": "elementwise", "jaxkernels::attention_forward": "attention"}
    for kernel, group in kernels.items():
        found = breakdown(
            trace(("Stream #1(Compute)", [(kernel, "triton_kernel_call.1", 0.0, 1.0)])),
            1,
            {"triton_kernel_call.1": "products"},
        )
        assert {name for name, seconds in found.groups.items() if seconds} == {group}


def test_times_are_of_one_step():
    """Two steps: what overlaps counts in each group, but the device is not idle then."""
    step = lambda begin: [
        ("_kernel_3", "custom-call.1", begin, 4.0),
        ("nvjet_hsh", "cublas-gemm.1", begin + 4, 3.0),
        ("loop_add_fusion_1", None, begin + 8, 2.0),
    ]
    copies = [("MemcpyD2D", "loop_add_fusion.1", 5.0, 1.0), ("MemcpyD2D", "loop_add_fusion.1", 25.0, 1.0)]
    lines = [("Stream #13(Compute)", step(0.0) + step(20.0)), ("Stream #14(MemcpyD2D)", copies)]
    found = breakdown(trace(*lines, ("XLA Ops", step(0.0))), 2, groups_of_hlo(HLO))
    assert found.seconds == pytest.approx(15e-6)
    microseconds = {group: seconds * 1e6 for group, seconds in found.groups.items() if seconds}
    assert microseconds == pytest.approx(
        dict(attention=4.0, products=3.0, elementwise=2.0, copies=1.0, idle=(30 - 2 * 9) / 2)
    )
    by_name = {kernel.name: (kernel.group, kernel.seconds * 1e6, kernel.count) for kernel in found.kernels}
    assert by_name == {
        "custom-call: _kernel": ("attention", pytest.approx(4.0), 1.0),
        "cublas-gemm: nvjet_hsh": ("products", pytest.approx(3.0), 1.0),
        "loop_add_fusion": ("elementwise", pytest.approx(2.0), 1.0),
        "loop_add_fusion: MemcpyD2D": ("copies", pytest.approx(1.0), 1.0),
    }
    assert [kernel.seconds for kernel in found.kernels] == sorted((k.seconds for k in found.kernels), reverse=True)


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("attention_forward_mosaic_gpu_kernel", "attention"),
        ("jaxkernels::attention_backward_wide", "attention"),
        ("cudnn::fusion::compute_dot_do_o_specialized", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true>(float)", "attention"),
        ("void cudnn::fusion::convert_dq_to_16bits<true>(float)", "attention"),
        ("norm_backward", "norms"),
        ("matmul_mosaic_gpu_kernel", "products"),
        ("jaxkernels::few_rows", "products"),
        ("nvjet_sm90_tst_128x160_64x5_2x1_v_bz_NNT", "products"),
        ("loop_add_fusion_3", "elementwise"),
    ],
)
def test_kernels_of_cuda_graphs_are_grouped_by_their_names(kernel, group):
    """A CUDA graph's kernels have no instruction in a trace."""
    found = breakdown(trace(("Stream #1", [(kernel, "command_buffer", 0.0, 1.0)])), 1, {})
    assert [(one.group, one.name.startswith("command_buffer")) for one in found.kernels] == [(group, False)]


def test_trace_without_a_gpu_is_refused():
    with raises_exactly(
        InputError, "bench: --profile found no kernels in the trace. It needs a GPU, and CUPTI of jax[cuda13]."
    ):
        breakdown(trace(("Stream #1", [("unknown", None, 0.0, 1.0)]), plane="/host:CPU"), 1, {})


def _profile_of_a_program() -> step_profile.Breakdown:
    """Attention and a product, in a loop as in a model."""

    def f(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            with jax.named_scope("attention"):
                y = jk.dot_product_attention(x, x, x, is_causal=True)
            product = jk.matmul(y.reshape(-1, 1024), jnp.ones((1024, 1024), x.dtype))
            return jnp.tanh(product).reshape(x.shape), None

        return jax.lax.scan(body, x, None, length=8)[0]

    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 2048, 16, 64)), jnp.bfloat16)
    step = jax.jit(f).lower(x).compile()
    jax.block_until_ready(step(x))
    return step_profile.profile(lambda: [step(x) for _ in range(3)], 3, step.as_text())


@pytest.mark.gpu
def test_kernels_of_a_program_are_found_on_a_gpu():
    """Each kernel has its group, and their sum is about the whole."""
    # A process that has traced cannot use JAX's CUPTI recorder afterwards, as other tests do.
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as other_process:
        found = other_process.submit(_profile_of_a_program).result()
    for group in ("products", "attention", "elementwise"):
        assert found.groups[group] > 0, found
    assert found.groups["other"] == 0, found
    assert sum(found.groups.values()) == pytest.approx(found.seconds, rel=0.1)
    assert sum(kernel.count for kernel in found.kernels if kernel.group == "attention") == pytest.approx(8)
