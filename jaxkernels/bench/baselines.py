"""What the kernels are held against: the other ways to compute a problem that JAX offers in this process."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.bench.suites import Op, Problem
from jaxkernels.core.hardware import Chip
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["BASELINES", "Baseline", "Contender", "baseline_names", "cudnn_refuses"]

Operands = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    Attributes:
      name: as rows show it: the baseline's name, and the variant where there are several.
      function: operands -> result, of the problem's forward pass.
      prepare: operands as the function wants them, not timed.
      finish: turns its result, or its gradients by name, into the problem's: not timed either.
      compiler_options: XLA's, as `jax.jit` takes them; alternatives in order.
      wanted: text that the compiled program must hold, or the next compiler options are tried; "": anything will do.
    """

    name: str
    function: Callable[[Operands], Any]
    prepare: Callable[[Operands], Operands] = lambda operands: operands
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda results: results
    compiler_options: tuple[dict[str, Any], ...] = ({},)
    wanted: str = ""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A named alternative.

    Attributes:
      refuses: why it cannot take a problem on a chip, or None. What only compiling shows need not be said here.
      contenders: its variants for a problem it does not refuse; the fastest counts.
    """

    refuses: Callable[[Problem[Any], Chip], str | None]
    contenders: Callable[[Problem[Any]], Iterator[Contender]]


def baseline_names(op: Op) -> tuple[str, ...]:
    return tuple(name for of_op, name in BASELINES if of_op == op)


def _needs_cuda(chip: Chip) -> str | None:
    return None if chip.platform == "cuda" else f"runs on cuda devices, this is {chip}"


# Products.

_JAX_ACTIVATIONS: dict[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}


def _jax_matmul(case: MatmulCase, operands: Operands) -> jax.Array:
    """The case as one writes it with JAX: a dot_general, and an epilogue for XLA to fuse."""

    def product(rhs: jax.Array) -> jax.Array:
        if case.shared_rhs:
            return jnp.matmul(operands["lhs"], rhs, precision=case.dot_precision, preferred_element_type=case.out_dtype)
        return jax.lax.dot_general(
            operands["lhs"], rhs, case.contraction, case.dot_precision, preferred_element_type=case.out_dtype
        )

    out = product(operands["rhs"])
    if case.alpha != 1:
        out *= case.alpha
    if case.bias:
        out += operands["bias"].astype(out.dtype)
    out = _JAX_ACTIVATIONS[case.activation](out)
    if case.gate:
        out *= product(operands["gate"])
    return out + operands["residual"].astype(out.dtype) if case.residual else out


#: XLA's autotuner times all it has, as it does by itself (at level 4), but does not check each one's result: we check
#: that of the chosen one, and a run is shorter by a third.
_AUTOTUNED = dict(xla_gpu_autotune_level=2)


def _gemm_xla(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    yield Contender("xla", functools.partial(_jax_matmul, problem.case), compiler_options=(_AUTOTUNED,))


#: cuBLASLt for every product. The first set takes the other code generators out of the choice, the second names the
#: one library; XLA has replaced the first by the second, and not every product arrives there both ways.
_CUBLASLT = tuple(
    options | _AUTOTUNED | dict(xla_gpu_gemm_rewrite_size_threshold=0)
    for options in (
        dict(xla_gpu_enable_cublaslt=True, xla_gpu_enable_triton_gemm=False),
        dict(xla_gpu_experimental_autotune_backends="CUBLASLT"),
    )
)


def _gemm_cublaslt(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    function = functools.partial(_jax_matmul, problem.case)
    yield Contender("cublaslt", function, compiler_options=_CUBLASLT, wanted="__cublas$lt$")


def _pallas_matmul_configs(case: MatmulCase) -> Iterator[tuple[str, Any]]:
    """Tilings of JAX's Hopper matmul that divide the problem, for large and for small ones."""
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as lib

    dims = lib.MatmulDimension
    for tile_m, tile_n, cluster in ((128, 128, dims.M), (128, 128, None), (64, 128, None), (64, 64, None)):
        config = lib.TuningConfig(
            tile_m=tile_m, tile_n=tile_n, tile_k=64, max_concurrent_steps=4, epi_tile_m=64, epi_tile_n=64,
            grid_minor_dim=dims.M, grid_tile_width=8, wg_dimension=dims.N, cluster_dimension=cluster,
        )  # fmt: skip
        if case.m % (tile_m * (2 if cluster is not None else 1)) == 0 and case.n % (2 * tile_n) == 0:
            yield f"{tile_m}x{2 * tile_n}" + (" cluster" if cluster is not None else ""), config


def _jax_pallas_matmul_refuses(problem: Problem[MatmulCase], chip: Chip) -> str | None:
    case = problem.case
    if not chip.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), this is {chip}"
    if case.dtype not in ("bfloat16", "float16") or case.out_dtype not in (None, case.dtype):
        return f"multiplies 16-bit operands to the same dtype, not {case.dtype} to {case.out_dtype or case.dtype}"
    if (case.lhs_layout, case.rhs_layout) != ("mk", "kn") or case.batch:
        return "multiplies two row-major matrices only"
    if case.alpha != 1 or case.bias or case.activation or case.residual or case.gate:
        return "has no epilogue"
    if problem.direction == "backward":
        return "has no gradient"
    if case.m % 64 or case.n % 128 or case.k % 64:
        return f"needs m in steps of 64, n of 128 and k of 64, not {case.m}, {case.n}, {case.k}"
    return None


def _gemm_jax_pallas(problem: Problem[MatmulCase]) -> Iterator[Contender]:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as lib

    # The largest tiling that fits, with its cluster: the others only serve what it cannot divide.
    for label, config in list(_pallas_matmul_configs(problem.case))[:1]:
        function = lambda x, config=config: lib.matmul(x["lhs"], x["rhs"], None, config)
        yield Contender(f"jax-pallas {label}", function)


# Attentions.


def _jax_attention(case: AttentionCase, implementation: str, operands: Operands) -> jax.Array:
    """The case as one writes it with JAX: what `jax.nn.dot_product_attention` has no argument for becomes a mask."""
    operands = dict(operands)
    if case.segments:
        queries, keys = operands.pop("query_segment_ids"), operands.pop("key_value_segment_ids")
        operands["mask"] = queries[:, None, :, None] == keys[:, None, None, :]
    attention: Callable[..., Any] = jax.nn.dot_product_attention
    return attention(**operands, is_causal=case.causal, local_window_size=case.window, implementation=implementation)


#: XLA's attention writes its logits: beyond this many bytes in float32 it is not tried.
_MAX_LOGITS_BYTES = 12e9


def _jax_nn_refuses(case: AttentionCase) -> str | None:
    if case.soft_cap is not None:
        return "has no soft cap"
    if case.window is not None and None in case.window:
        return f"takes windows with two ends, not {case.window}"
    if case.value_dim not in (None, case.head_dim):
        return f"takes values as wide as keys, not {case.head_dim} and {case.value_dim}"
    return None


def _attention_xla_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    if problem.case.queries > 1 and _cudnn_refuses(problem, chip) is None:
        # 5.9 ms against 0.48 on an H200 at D = 128, S = 4096, causal, 2026-11-20.
        return "cuDNN takes this, and is several times as fast"
    logits = 4 * math.prod(problem.case.shape_of("BNTS"))
    if logits > _MAX_LOGITS_BYTES:
        return f"its logits would take {logits / 1e9:.0f} GB"
    return _jax_nn_refuses(problem.case)


def _attention_xla(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    yield Contender("xla", functools.partial(_jax_attention, problem.case, "xla"))


def cudnn_refuses(dtype: str, chip: Chip) -> str | None:
    """Why cuDNN has no attention for the dtype on the chip, or None."""
    if dtype not in ("bfloat16", "float16"):
        return f"computes in 16 bits, not in {dtype}"
    return _needs_cuda(chip)


def _cudnn_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    return cudnn_refuses(problem.case.dtype, chip) or _jax_nn_refuses(problem.case)


def _attention_cudnn(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    yield Contender("cudnn", functools.partial(_jax_attention, problem.case, "cudnn"))


def _jax_pallas_attention_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    case = problem.case
    if not chip.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), this is {chip}"
    if case.dtype not in ("bfloat16", "float16"):
        return f"computes in 16 bits, not in {case.dtype}"
    if (
        case.window
        or case.soft_cap
        or case.segments
        or case.bias
        or case.mask
        or case.query_lengths
        or case.key_lengths
    ):
        return "has no mask but the causal one, and no bias"
    if problem.direction == "backward" and case.causal:
        return "has no causal gradient"
    if case.head_dim % 64 or case.head_dim > 128 or case.value_dim not in (None, case.head_dim):
        return f"its tilings fit heads of 64 and 128, not {case.head_dim}"
    if case.queries % 128 or case.keys % 128:
        return f"needs lengths in steps of 128, not {case.queries} and {case.keys}"
    return None


def _attention_jax_pallas(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as lib

    case = problem.case
    scale = 1 / math.sqrt(case.head_dim)
    # It computes softmax(q k^T) v in float16 and nothing else: the scale goes into the queries before, and out of their
    # gradient after; bfloat16 is as many bits.
    dtype = jnp.dtype(case.dtype)
    scaled = lambda x, to: (x.astype(jnp.float32) * scale).astype(to)
    prepare = lambda x: {
        name: scaled(y, jnp.float16) if name == "query" else y.astype(jnp.float16) for name, y in x.items()
    }
    finish = lambda results: {
        name: scaled(x, dtype) if name == "d_query" else x.astype(dtype) for name, x in results.items()
    }
    backward: dict[str, Any] = dict(block_q_dkv=64, block_kv_dkv=64, block_q_dq=64, block_kv_dq=64)
    # The faster of two, or within 2 % of it, in every row of attention-train that was tried: H200, 2026-11-21.
    block_kv = 256 if case.head_dim == 64 and not case.causal and case.keys % 256 == 0 else 128
    config = lib.TuningConfig(
        block_q=64,
        block_kv=block_kv,
        max_concurrent_steps=2,
        causal=case.causal,
        **(backward if problem.direction == "backward" else {}),
    )
    function = lambda x: lib.attention(x["query"], x["key"], x["value"], config)
    yield Contender(f"jax-pallas 64x{block_kv} float16", function, prepare, finish)


def _tokamax_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    if problem.case.segments:
        return "takes no segments here"
    return _needs_cuda(chip) or _jax_nn_refuses(problem.case)


def _attention_tokamax(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    import tokamax  # pyright: ignore[reportMissingImports]: optional, and not in any extra

    case = problem.case
    function = lambda x: tokamax.dot_product_attention(
        **x, is_causal=case.causal, local_window_size=case.window, implementation="mosaic"
    )
    yield Contender("tokamax", function)


#: (operation, name) -> baseline.
BASELINES: dict[tuple[Op, str], Baseline] = {
    ("gemm", "xla"): Baseline(lambda problem, chip: None, _gemm_xla),
    ("gemm", "cublaslt"): Baseline(lambda problem, chip: _needs_cuda(chip), _gemm_cublaslt),
    ("gemm", "jax-pallas"): Baseline(_jax_pallas_matmul_refuses, _gemm_jax_pallas),
    ("attention", "xla"): Baseline(_attention_xla_refuses, _attention_xla),
    ("attention", "cudnn"): Baseline(_cudnn_refuses, _attention_cudnn),
    ("attention", "jax-pallas"): Baseline(_jax_pallas_attention_refuses, _attention_jax_pallas),
    ("attention", "tokamax"): Baseline(_tokamax_refuses, _attention_tokamax),
}
