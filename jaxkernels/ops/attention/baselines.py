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
from jaxkernels.ops.attention import cudnn_limits
from jaxkernels.ops.attention.cases import AttentionCase

__all__ = ["BASELINES", "cudnn_refuses"]

Operands = dict[str, jax.Array]


def _jax_attention(case: AttentionCase, implementation: str, operands: Operands) -> jax.Array:
    """The case as one writes it with JAX.

    What `jax.nn.dot_product_attention` has no argument for becomes a mask. Values narrower than keys are padded.
    """
    operands = dict(operands)
    masks = [operands.pop("mask")] if case.mask else []
    if case.segments:
        queries, keys = operands.pop("query_segment_ids"), operands.pop("key_value_segment_ids")
        masks.append(queries[:, None, :, None] == keys[:, None, None, :])
    is_causal, window = case.causal, case.window
    if _needs_index_mask(case, implementation):
        masks.append(_index_mask(case)[None, None])
        is_causal, window = False, None
    if masks:
        operands["mask"] = functools.reduce(jnp.logical_and, masks)
    if implementation == "cudnn":  # It broadcasts over batch and heads only.
        for name in {"bias", "mask"} & operands.keys():
            operands[name] = jnp.broadcast_to(operands[name], (*operands[name].shape[:2], case.queries, case.keys))
    value_dim = case.value_dim or case.head_dim
    operands["value"] = jnp.pad(operands["value"], ((0, 0),) * 3 + ((0, case.head_dim - value_dim),))
    attention: Callable[..., Any] = jax.nn.dot_product_attention
    out = attention(**operands, is_causal=is_causal, local_window_size=window, implementation=implementation)
    return out[..., :value_dim]


def _needs_index_mask(case: AttentionCase, implementation: str) -> bool:
    """Whether the causal mask and the window must be given as an array."""
    if case.query_offset and (case.causal or case.window is not None):
        return True  # jax.nn counts from the first query and the first key.
    if implementation != "cudnn" or case.window is None:
        return False
    return not cudnn_limits.takes_window(
        causal=case.causal,
        has_lengths=case.query_lengths or case.key_lengths,
        has_bias=case.bias is not None or case.mask is not None or case.segments,
        queries=case.queries,
        keys=case.keys,
    )


def _index_mask(case: AttentionCase) -> jax.Array:
    """(T, S), True where the causal mask and the window show a key."""
    query, key = case.query_offset + jnp.arange(case.queries)[:, None], jnp.arange(case.keys)
    left, right = case.window or (None, None)
    mask = jnp.ones((case.queries, case.keys), bool)
    if left is not None:
        mask &= query - key <= left
    if right is not None:
        mask &= key - query <= right
    return mask & (key <= query) if case.causal else mask


#: XLA's attention writes its logits: beyond this many bytes in float32 it is not tried.
_MAX_LOGITS_BYTES = 12e9


def _jax_nn_refuses(case: AttentionCase) -> str | None:
    if case.soft_cap is not None:
        return "has no soft cap"
    if case.window is not None and None in case.window:
        return f"takes windows with two ends, not {case.window}"
    if case.value_dim is not None and case.value_dim > case.head_dim:
        return f"takes values as wide as keys, or padded to be, not {case.head_dim} and {case.value_dim}"
    return None


#: For at most so many queries or keys, XLA's attention may be as fast as cuDNN's.
_FEW = 64


def _attention_xla_yields(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    if min(problem.case.queries, problem.case.keys) > _FEW and _cudnn_refuses(problem, chip) is None:
        # 5.9 ms against 0.48 on an H200 at D = 128, S = 4096, causal, 2026-11-20.
        return "cuDNN takes this, and is several times as fast"
    return None


def _attention_xla_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    del chip
    logits = 4 * math.prod(problem.case.shape_of("BNTS"))
    if logits > _MAX_LOGITS_BYTES:
        return f"its logits would take {logits / 1e9:.0f} GB"
    return _jax_nn_refuses(problem.case)


def _attention_xla(problem: Problem[AttentionCase]) -> Iterator[Contender]:
    yield Contender("xla", functools.partial(_jax_attention, problem.case, "xla"))


def cudnn_refuses(dtype: str, chip: Chip) -> str | None:
    """Why cuDNN has no attention for the dtype on the chip, or None."""
    return cudnn_limits.unsupported_dtype(dtype) or cudnn_limits.unsupported_chip(chip)


def _cudnn_refuses(problem: Problem[AttentionCase], chip: Chip) -> str | None:
    case = problem.case
    if reason := cudnn_refuses(case.dtype, chip) or _jax_nn_refuses(case):
        return reason
    if reason := cudnn_limits.unsupported_heads(case.head_dim, case.value_dim or case.head_dim, chip):
        return reason
    if reason := cudnn_limits.unsupported_lengths(case.queries, case.keys):
        return reason
    has_bias = case.bias or case.mask or case.segments or _needs_index_mask(case, "cudnn")
    if has_bias and problem.direction == "backward":
        return cudnn_limits.odd_lengths_of_gradients(case.queries, case.keys)
    return None


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
    if case.causal and case.query_offset:
        return "counts its causal mask from the first key"
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
    if case.value_dim not in (None, case.head_dim):
        return f"takes values as wide as keys, not {case.head_dim} and {case.value_dim}"
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
    case = problem.case
    if case.segments or case.query_lengths or case.key_lengths:
        return "takes no segments and no lengths here"
    if case.query_offset and (case.causal or case.window is not None):
        return "counts its causal mask and its window from the first key here"
    if case.value_dim not in (None, case.head_dim):
        return f"takes values as wide as keys here, not {case.head_dim} and {case.value_dim}"
    return needs_cuda(chip) or _jax_nn_refuses(case)


def _attention_tokamax(name: str, implementation: str, problem: Problem[AttentionCase]) -> Iterator[Contender]:
    import tokamax  # pyright: ignore[reportMissingImports]: optional, and not in any extra

    case = problem.case
    function = lambda x: tokamax.dot_product_attention(
        **x, is_causal=case.causal, local_window_size=case.window, implementation=implementation
    )
    yield Contender(name, function)


#: Name -> baseline.
BASELINES: dict[str, Baseline] = {
    "xla": Baseline(_attention_xla_refuses, _attention_xla, _attention_xla_yields),
    "cudnn": Baseline(_cudnn_refuses, _attention_cudnn),
    "jax-pallas": Baseline(_jax_pallas_attention_refuses, _attention_jax_pallas),
    "pallas-triton": Baseline(_pallas_triton_refuses, _attention_pallas_triton),
    "tokamax": Baseline(_tokamax_refuses, functools.partial(_attention_tokamax, "tokamax", "mosaic")),
    "tokamax-triton": Baseline(_tokamax_refuses, functools.partial(_attention_tokamax, "tokamax-triton", "triton")),
}
