"""Other ways to compute an attention in JAX: XLA, cuDNN, JAX's own Pallas kernels and tokamax's."""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Baseline, Contender, Problem, needs_cuda
from jaxkernels.ops.attention.cases import AttentionCase

__all__ = ["BASELINES", "cudnn_refuses"]

Operands = dict[str, jax.Array]


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
    return needs_cuda(chip)


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


def _pallas_triton_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    case = problem.case
    if reason := _jax_nn_refuses(case) or needs_cuda(chip):
        return reason
    if case.window or case.segments or case.bias or case.mask or case.query_lengths or case.key_lengths:
        return "has no mask but the causal one, and no bias"
    if case.heads != case.kv_heads:
        return f"takes as many key heads as query heads, not {case.kv_heads} and {case.heads}"
    if case.queries % 128 or case.keys % 128 or case.queries != case.keys:
        return f"needs equal lengths in steps of 128, not {case.queries} and {case.keys}"
    return None


def _attention_pallas_triton(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    """JAX's Pallas kernels in their lowering to Triton, with their own tiles and with larger ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as lib

    case = problem.case
    tiles = {"": lib.BlockSizes.get_default(), " 64x64": lib.BlockSizes(64, 64, 64, 64, 64, 64)}
    for label, sizes in tiles.items():
        function = lambda x, sizes=sizes: lib.mha(
            x["query"], x["key"], x["value"], None, 1 / math.sqrt(case.head_dim), case.causal, sizes
        )
        yield Contender(f"pallas-triton{label}", function)


def _tokamax_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    if problem.case.segments:
        return "takes no segments here"
    return needs_cuda(chip) or _jax_nn_refuses(problem.case)


def _attention_tokamax(name: str, implementation: str, problem: Problem[AttentionCase]) -> Iterator[Contender]:
    import tokamax  # pyright: ignore[reportMissingImports]: optional, and not in any extra

    case = problem.case
    function = lambda x: tokamax.dot_product_attention(
        **x, is_causal=case.causal, local_window_size=case.window, implementation=implementation
    )
    yield Contender(name, function)


#: Name -> baseline.
BASELINES: dict[str, Baseline] = {
    "xla": Baseline(_attention_xla_refuses, _attention_xla),
    "cudnn": Baseline(_cudnn_refuses, _attention_cudnn),
    "jax-pallas": Baseline(_jax_pallas_attention_refuses, _attention_jax_pallas),
    "pallas-triton": Baseline(_pallas_triton_refuses, _attention_pallas_triton),
    "tokamax": Baseline(_tokamax_refuses, functools.partial(_attention_tokamax, "tokamax", "mosaic")),
    "tokamax-triton": Baseline(_tokamax_refuses, functools.partial(_attention_tokamax, "tokamax-triton", "triton")),
}
