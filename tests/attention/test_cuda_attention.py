"""The CUDA attention kernels: what they refuse, and their configurations compiled for Hopper without spilled registers.

How they compute is tested on an emulator (test_cuda_attention_emulated.py) and, on a GPU, in test_attention.py.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from attentions import H200, draw, make_spec

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.ffi.attention import backward, backward_wide, forward
from jaxkernels.ops.attention import key_masks, planning, reference
from jaxkernels.ops.attention.spec import AttentionSpec

KERNELS = ("attention_forward", "attention_backward")
TERMS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(window=(100, 20)),
    "lengths": dict(query_lengths=True, key_lengths=True, causal=True),
    "segments": dict(segments=True, causal=True),
    "soft-cap": dict(soft_cap=30.0),
    "all": dict(
        window=(100, 0), segments=True, query_lengths=True, key_lengths=True, soft_cap=30.0, query_offset=True
    ),
}  # fmt: skip
#: The forward pass takes all of these. The backward pass takes the mask of keys only.
BIASES = {
    "bias": dict(bias=(1, 8, 4000, 4000)),
    "bias-of-4-byte-rows": dict(bias=(1, 8, 4002, 4002), length=4002),
    "bias-of-8-byte-rows": dict(bias=(1, 8, 4004, 4004), length=4004, causal=True),
    "mask": dict(mask=(2, 1, 4000, 4000), causal=True),
    "mask-of-keys": dict(mask=(2, 1, 1, 4000)),
    "bias-and-all": dict(
        bias=(2, 8, 4000, 4000), window=(100, 0), segments=True, query_lengths=True, key_lengths=True, soft_cap=30.0
    ),
}  # fmt: skip
HEADS = [(32, 32), (64, 64), (72, 72), (80, 80), (96, 96), (112, 112), (128, 128), (192, 128), (256, 256)]


def spec_of(head_dim: int = 128, value_dim: int | None = None, length: int = 4000, **options: Any) -> AttentionSpec:
    return with_bias_of_16_bits(make_spec(2, length, length, 8, 2, head_dim, value_dim, dtype="bfloat16", **options))


def with_bias_of_16_bits(spec: AttentionSpec) -> AttentionSpec:
    return dataclasses.replace(spec, bias=spec.bias and dataclasses.replace(spec.bias, dtype=spec.q.dtype))


def design_of(kernel: str, spec: AttentionSpec) -> ModuleType:
    """The one design that takes the spec."""
    (design,) = dispatch.load(kernel, "cuda").supporting(spec)
    return design


def compile_kernel(kernel: str, spec: AttentionSpec, config: Any) -> Any:
    design = design_of(kernel, spec)
    return design.compile_forward(spec, config) if design is forward else design.compile_backward(spec, config)


@pytest.mark.sampled(one_in=24)
@pytest.mark.parametrize("terms", TERMS)
@pytest.mark.parametrize(("head_dim", "value_dim"), HEADS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_defaults_compile_without_spills(kernel, head_dim, value_dim, terms):
    """The compiler refuses spills and serialised products."""
    spec = spec_of(head_dim, value_dim, **TERMS[terms])
    compile_kernel(kernel, spec, dispatch.default_config(kernel, "cuda", spec))


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("terms", BIASES)
@pytest.mark.parametrize(("head_dim", "value_dim"), HEADS, ids=str)
def test_search_space_with_a_bias_compiles_without_spills(head_dim, value_dim, terms):
    spec = spec_of(head_dim, value_dim, **BIASES[terms])
    configs, spec = dispatch.search_space("attention_forward", "cuda", spec), key_masks.as_segments(spec)
    assert all(forward.smem_bytes(spec, config) <= H200.smem_bytes for config in configs)
    default = dispatch.default_config("attention_forward", "cuda", spec)
    assert default in configs
    for config in {default, *configs[:: max(1, len(configs) // 6)]}:
        forward.compile_forward(spec, config)


@pytest.mark.parametrize(
    ("bias", "in_order"), [((1, 8, 256, 256), True), ((4, 8, 256, 256), False), ((1, 1, 256, 256), False)]
)
def test_batch_elements_that_share_a_bias_follow_each_other(bias, in_order):
    spec = make_spec(4, 256, 256, 8, 8, 64, bias=bias)
    count, *numbers = planning.forward_plan(spec, (4, 4), 1, 1.0)[0].tolist()
    numbers = numbers[:count]  # Padding follows.
    assert sorted(numbers) == list(range(64))
    heads = [number // 2 for number in numbers[::2]]
    assert heads[:6] == ([0, 8, 16, 24, 1, 9] if in_order else [0, 1, 2, 3, 4, 5])


@pytest.mark.sampled(one_in=160)
@pytest.mark.parametrize("index", range(40))
@pytest.mark.parametrize("terms", ["full", "causal", "all"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("kernel", KERNELS)
def test_search_space_compiles_without_spills(kernel, head_dim, terms, index):
    spec = spec_of(head_dim, **TERMS[terms])
    for config in dispatch.search_space(kernel, "cuda", spec)[index::40]:
        compile_kernel(kernel, spec, config)


@pytest.mark.parametrize("kernel", KERNELS)
def test_search_space_fits_shared_memory_and_is_never_empty(kernel):
    for head_dim, value_dim in HEADS:
        for options in TERMS.values():
            for length in (1, 100, 5000):
                spec = spec_of(head_dim, value_dim, length, **options)
                design = design_of(kernel, spec)
                configs = list(design.search_space(spec))
                assert configs
                assert all(design.smem_bytes(spec, config) <= H200.smem_bytes for config in configs)
                assert all(0 < design.estimate(spec, config) < 10 for config in configs)


@pytest.mark.parametrize(
    ("kernel", "options", "reason"),
    [
        ("attention_forward", dict(dtype="float32"), "takes bfloat16 or float16, not float32"),
        (
            "attention_forward", dict(bias=(1, 1, 24, 40)),
            "takes a bias of the queries' dtype bfloat16, not float32",
        ),
        (
            "attention_forward", dict(mask=(1, 4, 1, 40)),
            "takes a bias or a dense mask with a value for each of (24, 40) pairs, not (1, 4, 1, 40)",
        ),
        (
            "attention_forward", dict(mask=(1, 1, 24, 1)),
            "takes a bias or a dense mask with a value for each of (24, 40) pairs, not (1, 1, 24, 1)",
        ),
        (
            "attention_forward", dict(mask=(1, 1, 24, 40), soft_cap=30.0),
            "does not handle a dense mask other than (B|1, 1, 1, S) with a soft cap",
        ),
        (
            "attention_forward", dict(mask=(1, 1, 24, 40), scale=1e-31),
            "takes a bias or a dense mask with a scale of at least 1e-30, not 1e-31",
        ),
        ("attention_backward", dict(bias=(1, 1, 24, 40)), "does not handle a bias"),
        ("attention_backward", dict(mask=(1, 1, 24, 40)), "does not handle a dense mask other than (B|1, 1, 1, S)"),
        ("attention_forward", dict(head_dim=264), "handles head dimensions up to 256, got 264 and 264"),
        ("attention_forward", dict(scale=-1.0), "needs a positive scale, got -1.0"),
        (
            "attention_forward", dict(soft_cap=5000.0),
            "soft_cap must be at most 1000: the kernel's tanh resolves 2^-22 of the cap; got 5000",
        ),
        (
            "attention_forward", dict(target=hardware.lookup("NVIDIA A100-SXM4-80GB")),
            "needs a GPU of compute capability 9.0 (Hopper), the target is NVIDIA A100-SXM4-80GB "
            "(compute capability 8.0)",
        ),
        ("attention_backward", dict(head_dim=264), "handles head dimensions up to 256, got 264 and 264"),
    ],
)  # fmt: skip
def test_refusals(kernel, options, reason):
    spec = make_spec(**dict(dtype="bfloat16") | options)
    assert dispatch.load(kernel, "cuda").unsupported(spec) == reason


def test_each_head_dimension_has_one_design_of_the_backward_pass():
    narrow, wide = spec_of(128), spec_of(128, 136)
    assert backward_wide.unsupported(narrow) == "handles head dimensions above 128, got 128 and 128"
    assert backward.unsupported(wide) == "handles head dimensions up to 128, got 128 and 136"
    assert (design_of(KERNELS[1], narrow), design_of(KERNELS[1], wide)) == (backward, backward_wide)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forward.Config(block_kv=72), "forward[cuda]: block_kv must be a multiple of 16 from 16 to 256"),
        (lambda: forward.Config(num_stages=1), "forward[cuda]: num_stages must be at least 2"),
        (lambda: forward.Config(num_consumers=4), "forward[cuda]: num_consumers must be 1, 2 or 3"),
        (lambda: forward.Config(num_polynomials=8), "forward[cuda]: num_polynomials must be from 0 to 7"),
        (lambda: backward.Config(block_q=96), "backward[cuda]: block_q must be 64 or 128"),
        (lambda: backward.Config(num_stages=1), "backward[cuda]: num_stages must be at least 2"),
        (lambda: backward.Config(group_parts=0), "backward[cuda]: group_parts must be positive"),
        (lambda: backward_wide.Config(num_stages=1), "backward[cuda]: num_stages must be at least 2"),
        (lambda: backward_wide.Config(output_stages=0), "backward[cuda]: output_stages must be positive"),
        (lambda: backward_wide.Config(logit_stages=0), "backward[cuda]: logit_stages must be positive"),
    ],
)  # fmt: skip
def test_configurations_that_are_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(f"attention_{message}; got Config(")):
        make()


def test_rings_that_do_not_fit_are_refused():
    spec = spec_of()
    operands = [jnp.zeros(x.shape, x.dtype) for x in (spec.q, spec.k, spec.v)]
    with pytest.raises(ValueError, match=r"^attention_forward\[cuda\]: a block has at most 232448 bytes"):
        forward.run(spec, forward.Config(128, 5), *operands)
    with pytest.raises(ValueError, match=r"^attention_backward\[cuda\]: group_parts must divide the 4 query heads"):
        backward.run(spec, backward.Config(group_parts=3))
    with pytest.raises(ValueError, match=r"^attention_backward\[cuda\]: a block has at most 232448 bytes"):
        backward_wide.run(spec_of(256), backward_wide.Config(3))


def test_calls_lower_for_cuda():
    """On a machine without a GPU, also under transforms."""
    attention = lambda q, k, v: jk.dot_product_attention(q, k, v, is_causal=True, backend="cuda")
    loss = lambda *xs: attention(*xs).astype(jnp.float32).sum()
    one = [jax.ShapeDtypeStruct((2, 300, 4, 96), jnp.bfloat16)] * 3
    many = [jax.ShapeDtypeStruct((3, 2, 300, 4, 96), jnp.bfloat16)] * 3
    for f, operands, count in (
        (attention, one, 1),
        (jax.grad(loss, (0, 1, 2)), one, 3),
        (jax.vmap(attention), many, 1),
    ):
        text = jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count(f"@{jk.ffi.TARGET}(") == count


def test_plan_gives_each_item_to_one_block():
    spec = dataclasses.replace(spec_of(causal=True), target=dataclasses.replace(H200, num_sms=7))
    config = forward.Config(128, 2)
    plan = forward._plan(spec, config)
    items = np.concatenate([row[1 : 1 + row[0]] for row in plan])
    assert sorted(items) == list(range(2 * 8 * -(-4000 // config.rows)))


WIDE = pytest.mark.parametrize(
    ("head_dim", "value_dim", "options"),
    [
        (256, 256, dict(causal=True)),
        (256, 256, {}),
        (192, 128, dict(causal=True)),
        (160, 160, dict(window=(100, 20), key_lengths=True)),
        (256, 256, dict(segments=True, soft_cap=20.0)),
    ],
    ids=str,
)


@pytest.mark.gpu
@WIDE
def test_forward_of_wide_heads(head_dim, value_dim, options):
    spec = spec_of(head_dim, value_dim, 1000, **options)
    check_forward(spec, dispatch.default_config("attention_forward", "cuda", spec))


@pytest.mark.gpu
@WIDE
def test_gradients_of_wide_heads(head_dim, value_dim, options):
    """In each configuration."""
    spec = spec_of(head_dim, value_dim, 1000, **options)
    operands = spec.pack("attention_backward", draw(spec))
    for config in backward_wide.search_space(spec):
        gradients = jax.jit(functools.partial(backward_wide.run, spec, config))(*operands)
        check_gradients(spec, gradients, operands)


@pytest.mark.gpu
@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_configurations_agree_with_the_reference(head_dim, causal, index):
    spec = spec_of(head_dim, length=1000, causal=causal)
    configs = list(forward.search_space(spec))
    for config in configs[index :: len(configs) // 3]:
        check_forward(spec, config)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("length", [1000, 1001, 1002, 1004], ids=lambda length: f"rows of {2 * length} bytes")
def test_biases_in_each_way_to_copy_them(length, batches, causal):
    """By TMA, by TMA after XLA has padded the rows, and by warps. With one to three consumers."""
    spec = spec_of(64, length=length, bias=(batches, 8, length, length), causal=causal)
    configs = list(forward.search_space(spec))
    for config in {config.num_consumers: config for config in configs}.values():
        check_forward(spec, config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [dict(causal=True), {}, dict(window=(200, 0)), dict(segments=True, causal=True, key_lengths=True)],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_gradients_in_order_have_the_same_bits(head_dim, options):
    """With a chip full of blocks, which begin and end in a different order in each run."""
    spec = spec_of(head_dim, length=2000, deterministic=True, **options)
    operands = spec.pack("attention_backward", draw(spec))
    config = dispatch.default_config("attention_backward", "cuda", spec)
    design = design_of("attention_backward", spec)
    gradients = jax.jit(lambda *xs: design.run(spec, config, *xs))
    first = [np.asarray(x).tobytes() for x in gradients(*operands)]
    for _ in range(20):
        assert [np.asarray(x).tobytes() for x in gradients(*operands)] == first
    check_gradients(spec, gradients(*operands), operands)


_SANITIZED = """
import functools
from test_cuda_attention import TERMS, design_of, draw, make_spec, with_bias_of_16_bits
from jaxkernels.core import dispatch

def run(kernel, head_dim, keys=136, **options):
    spec = with_bias_of_16_bits(make_spec(2, 200, keys, 4, 2, head_dim, dtype="bfloat16", **options))
    config = dispatch.default_config(kernel, "cuda", spec)
    # One by one, the operations of XLA beside the kernel would be more modules to patch.
    compiled = jax.jit(functools.partial(design_of(kernel, spec).run, spec, config))
    return compiled(*spec.pack(kernel, draw(spec)))

steps = {}
for dim in (64, 128):
    for keys in (136, 138, 140):
        of_bias = dict(keys=keys, bias=(1, 4, 200, keys))
        steps[f"attention_forward {dim} bias of {keys}"] = functools.partial(run, "attention_forward", dim, **of_bias)
for dim in (64, 128, 256):
    for terms in ("causal", "all"):
        for kernel in ("attention_forward", "attention_backward"):
            steps[f"{kernel} {dim} {terms}"] = functools.partial(run, kernel, dim, **TERMS[terms])
        in_order = dict(TERMS[terms], deterministic=True)
        steps[f"in_order {dim} {terms}"] = functools.partial(run, "attention_backward", dim, **in_order)
"""
_STEPS = [
    f"{run} {dim} {terms}"
    for run in ("attention_forward", "attention_backward", "in_order")
    for dim in (64, 128, 256)
    for terms in ("causal", "all")
]
_STEPS += [f"attention_forward {dim} bias of {keys}" for dim in (64, 128) for keys in (136, 138, 140)]


@pytest.mark.gpu
@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool, step):
    sanitizer.assert_finds_nothing_else(tool, _SANITIZED, (step,) if tool == "memcheck" else ("planted", step))


def check_gradients(spec: AttentionSpec, gradients: Any, operands: Any) -> None:
    expected = dispatch.load("attention_backward", "xla").run(spec, reference.Config(), *operands)
    for x, y in zip(gradients, expected, strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=3e-2, atol=1e-2 * max(1.0, np.abs(y).max()))


def check_forward(spec: AttentionSpec, config: forward.Config) -> None:
    operands = spec.pack("attention_forward", draw(spec))
    out, lse = jax.jit(lambda *xs: forward.run(spec, config, *xs))(*operands)
    exact, exact_lse = dispatch.load("attention_forward", "xla").run(spec, reference.Config(), *operands)
    np.testing.assert_allclose(np.asarray(lse), np.asarray(exact_lse), rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(exact, np.float32), rtol=2e-2, atol=2e-2)
