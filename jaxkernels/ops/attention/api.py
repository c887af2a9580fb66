"""Scaled dot-product attention: the public function `dot_product_attention`, and what it accepts."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.arguments import as_array, as_flag, as_floating, as_number
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.rules import forward_op
from jaxkernels.ops.attention.spec import AttentionSpec, Extras

__all__ = ["dot_product_attention"]


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None, return_residual: Literal[False] = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[False] = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None, return_residual: Literal[True],
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[False] = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None, return_residual: Literal[False] = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: Literal[True], alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def dot_product_attention(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, bias: ArrayLike | None = None, mask: ArrayLike | None = None, *,
    scale: ArrayLike | None = None, is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None, key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None, return_residual: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None, key_value_segment_ids: ArrayLike | None = None,
    return_lse: bool = False, alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False, backend: str | None = None,
) -> Array | tuple[Array, Array]: ...  # fmt: skip


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    logits_soft_cap: float | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    return_lse: bool = False,
    alignment: Literal["top_left", "bottom_right"] = "top_left",
    deterministic: bool = False,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Scaled dot-product attention: a drop-in for `jax.nn.dot_product_attention`, and a superset of it.

    out = softmax(mask(soft_cap(scale * query key^T + bias))) value, for each head, computed in float32
    from the first product to the last. Parameters up to `return_residual` mean what they mean in
    jax.nn; those after it are ours.

    B is the batch, T and S the query and key lengths, N the query heads, K the key/value heads (N a
    multiple of K; query head n uses key/value head n // (N / K)), H the head dimension of queries and
    keys, D that of the values. T and S may differ.

    Args:
      query: (B, T, N, H) or (T, N, H); any floating dtype of 16 bits or more.
      key: (B, S, K, H) or (S, K, H); the query's dtype. Three dimensions stand for a batch of 1, as for the query.
      value: (B, S, K, D) or (S, K, D); the query's dtype. The result has B if the query has it.
      bias: added to the scaled logits; up to 4 dimensions, broadcastable to (B, N, T, S), with 1 or N
        heads; floating, likewise.
      mask: True where a query sees a key; bool, same shapes as `bias`.
      scale: factor of the logits, finite in float32; default 1 / sqrt(H). If it is traced, it has a gradient, and XLA
        computes everything in float32: the kernels are compiled for one scale.
      is_causal: query i sees keys j <= i.
      query_seq_lengths: (B,) int32; queries from there on are padding, their output is 0.
      key_value_seq_lengths: (B,) int32; keys and values from there on are padding and not seen.
      local_window_size: (left, right): query i sees keys i - left <= j <= i + right; an int for both
        sides; None leaves a side open. Known at trace time, as `is_causal` is: give what is traced as a mask.
      implementation: jax.nn's name for the backend: "xla", "cudnn" or None.
      return_residual: also return jax.nn's residual: the logsumexp in the key's dtype, without gradient.
      logits_soft_cap: c, from 2^-126 to 2^100: logits become c * tanh(logits / c), after the bias, before the masks.
      query_segment_ids: (B, T) or (T,) int32; given together with `key_value_segment_ids`, (B, S) or
        (S,): a query sees only the keys of its own segment. Give one and the same array where both have the same ids:
        every query then sees a key, and nothing is computed for those that see none.
      return_lse: also return the natural logsumexp of the masked logits: float32, differentiable.
      alignment: what `is_causal` and `local_window_size` count from where T != S: "top_left", the first query and
        the first key, or "bottom_right", the last of both, as for new queries on a cache of keys (T <= S).
      deterministic: whether equal operands must give equal bits in every run. The output does without it, too, but on
        the backend "cudnn"; the fastest backward pass adds up the query's gradient in whatever order its parts come.
      backend: name of the backend that must run it, or None for the fastest that can.

    Returns:
      Output (B, T, N, D) or (T, N, D), in the value's dtype; with `return_residual` or `return_lse` also
      the logsumexp, (B, T, N) or (T, N).

      A query that sees no key gets the mean of all S values, those behind `key_value_seq_lengths` too, as in
      jax.nn (masked logits are a large finite number), unless `query_seq_lengths` makes it padding. Values behind
      `key_value_seq_lengths` that are not finite count as 0 there.

      Otherwise padding does not reach a result, a gradient or a tangent, and may be NaN or infinite. jax.nn returns NaN
      for NaN in padding.

    Raises:
      ValueError: shapes, dtypes, window, soft cap or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in query, key, value and bias (of every
    broadcast shape), through the output and through the logsumexp. A named backend other than "xla"
    refuses what its kernels lack: forward mode, second derivatives and Taylor series (`jax.experimental.jet`).
    `checkify` reports a NaN in a result.

    Under `jax.checkpoint`, the output and the logsumexp can be saved by name: see `jaxkernels.checkpoint_policies`.

    Sharding: on a mesh, batch, heads and queries stay sharded; keys are gathered along S.

    References: Vaswani et al. 2017, arXiv:1706.03762; Dao 2023 (FlashAttention-2), arXiv:2307.08691, for
    the logsumexp and the backward pass; grouped heads: Ainslie et al. 2023, arXiv:2305.13245.
    """
    op = f"dot_product_attention[{backend or implementation or 'auto'}]"
    dispatch.check_backend("dot_product_attention", backend)
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(
            f'{op}: implementation must be "xla", "cudnn" or None; got {implementation!r}. Name other kernels with '
            "backend=."
        )
    if implementation is not None and backend not in (None, implementation):
        raise ValueError(f"{op}: implementation={implementation!r} and backend={backend!r} disagree. Give one of them.")
    is_causal = as_flag(op, "is_causal", is_causal, "Give what is traced as a mask.")
    deterministic = as_flag(op, "deterministic", deterministic, "It chooses the kernel.")
    return_lse = as_flag(op, "return_lse", return_lse, "It decides how many results there are.")
    return_residual = as_flag(op, "return_residual", return_residual, "It decides how many results there are.")
    if return_residual and return_lse:
        raise ValueError(f"{op}: return_residual and return_lse are two forms of one result. Give one of them.")
    backend = backend or implementation

    q, k, v, batched = _heads(op, query, key, value)
    dtype = q.dtype
    extras = _extras(
        op, q, k, batched, bias=bias, mask=mask,
        query_lengths=("query_seq_lengths", query_seq_lengths),
        key_lengths=("key_value_seq_lengths", key_value_seq_lengths),
        query_segments=("query_segment_ids", query_segment_ids),
        key_segments=("key_value_segment_ids", key_value_segment_ids),
    )  # fmt: skip
    if isinstance(scale, Tracer):
        q, k, v = _scaled(op, q, k, v, scale, backend)
        scale = 1.0
    window = _window(op, local_window_size, (q.shape[1], k.shape[1]))
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f'{op}: alignment must be "top_left" or "bottom_right"; got {alignment!r}.')
    if alignment == "bottom_right" and q.shape[1] != k.shape[1] and (is_causal or window is not None):
        extras = _aligned_at_the_end(op, extras, q.shape[1], k.shape[1])

    spec = AttentionSpec(
        q=ArrayType.of(q),
        k=ArrayType.of(k),
        v=ArrayType.of(v),
        bias=None if extras.bias is None else ArrayType.of(extras.bias),
        mask=None if extras.mask is None else ArrayType.of(extras.mask),
        target=hardware.host(),
        scale=_scale(op, scale, q.shape[3]),
        causal=is_causal,
        window=window,
        soft_cap=_soft_cap(op, logits_soft_cap),
        query_lengths=extras.query_lengths is not None,
        key_lengths=extras.key_lengths is not None,
        segments=extras.query_segments is not None,
        self_segments=query_segment_ids is not None and query_segment_ids is key_value_segment_ids,
        query_offset=extras.query_offset is not None,
        drops_lse=not (return_lse or return_residual),
        deterministic=deterministic,
    )
    out, lse = forward_op(spec, dict(q=q, k=k, v=v, **extras.given), backend=backend)
    out, lse = out.astype(dtype), jnp.swapaxes(lse, 1, 2)
    if not batched:
        out, lse = out[0], lse[0]
    if return_lse:
        return out, lse
    if return_residual:
        return out, jax.lax.stop_gradient(lse.astype(dtype))
    return out


def _heads(op: str, query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array, bool]:
    """q, k and v as arrays with a batch, whose shapes and dtypes fit; and whether the query came with a batch."""
    q, k, v = (as_floating(op, name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    if q.ndim not in (3, 4):
        raise ValueError(f"{op}: query must have shape (B, T, N, H) or (T, N, H); got {q.shape}.")
    batched = q.ndim == 4
    for name, x, head in (("key", k, "H"), ("value", v, "D")):
        if x.ndim not in (3, 4):
            raise ValueError(f"{op}: {name} must have shape (B, S, K, {head}) or (S, K, {head}); got {x.shape}.")
        if x.dtype != q.dtype:
            raise ValueError(
                f"{op}: {name} must have the query's dtype {q.dtype}; got {x.dtype}. Cast it with .astype."
            )
    q, k, v = (x[None] if x.ndim == 3 else x for x in (q, k, v))
    batch, _, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2]
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"{op}: key must have the query's batch {batch} and head dimension {head_dim}; got key {k.shape} for "
            f"query {q.shape}."
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"{op}: value must have the key's batch, length and heads {k.shape[:3]}; got value {v.shape}.")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(
            f"{op}: the query heads must be a multiple of the key/value heads; got {num_heads} and {num_kv_heads}."
        )
    return q, k, v, batched


def _extras(
    op: str, q: jax.Array, k: jax.Array, batched: bool, *, bias: Any, mask: Any, **integers: tuple[str, Any]
) -> Extras:
    """The optional operands; `integers` are (argument's name, value) of those that are int32."""
    batch, num_queries, num_heads, _ = q.shape
    num_keys = k.shape[1]
    shapes = dict(query_lengths=(batch,), key_lengths=(batch,))
    shapes |= dict(query_segments=(batch, num_queries), key_segments=(batch, num_keys))
    logits = (batch, num_heads, num_queries, num_keys)
    extras = Extras(
        bias=_logits_shaped(op, "bias", bias, logits),
        mask=_logits_shaped(op, "mask", mask, logits),
        **{
            name: _integers(op, argument, x, shapes[name], batched or len(shapes[name]) == 1)
            for name, (argument, x) in integers.items()
        },
    )
    if (extras.query_segments is None) != (extras.key_segments is None):
        given, missing = ("query", "key_value") if extras.key_segments is None else ("key_value", "query")
        raise ValueError(f"{op}: {given}_segment_ids needs {missing}_segment_ids too; got None.")
    return extras


def _scaled(
    op: str, q: jax.Array, k: jax.Array, v: jax.Array, scale: Tracer, backend: str | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q times a traced scale, k and v: all in float32 at least."""
    if backend not in (None, "xla"):
        raise NotImplementedError(
            f"{op}: scale is a constant of the kernels; got {scale!r}. Give a number known at trace time, or use "
            'backend="xla".'
        )
    is_real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.ndim != 0 or not is_real:
        raise ValueError(f"{op}: scale must be a real number; got {scale!r}. Multiply the query by it.")
    # Rounded to 16 bits, the scaled query would move each logit by up to 2^-9 of itself.
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = (x.astype(wide) for x in (q, k, v))
    return q * scale.astype(wide), k, v


def _scale(op: str, scale: Any, head_dim: Any) -> float:
    """The factor of the logits; None is 1 / sqrt(H)."""
    if scale is not None:
        scale = as_number(op, "scale", scale, "None is 1 / sqrt(H).")
        if abs(scale) > float(jnp.finfo(jnp.float32).max):
            raise ValueError(f"{op}: scale must be finite in float32; got {scale!r}. None is 1 / sqrt(H).")
        return scale
    if not isinstance(head_dim, int) or head_dim == 0:  # Symbolic, in a program for jax.export.
        raise ValueError(
            f"{op}: scale must be given where the head dimension has no 1 / sqrt(H); got scale=None for H = "
            f"{head_dim}. Give a number."
        )
    return 1 / math.sqrt(head_dim)


def _soft_cap(op: str, soft_cap: Any) -> float | None:
    if soft_cap is None:
        return None
    value = as_number(op, "logits_soft_cap", soft_cap, "None turns it off.")
    if value <= 0:
        raise ValueError(f"{op}: logits_soft_cap must be positive; got {soft_cap!r}. None turns it off.")
    if not 2.0**-126 <= value <= 2.0**100:  # Beyond, logits / cap is infinite or flushed to zero.
        raise ValueError(
            f"{op}: logits_soft_cap must be from 2^-126 to 2^100, for float32's division by it; got "
            f"{soft_cap!r}. None turns it off."
        )
    return value


def _aligned_at_the_end(op: str, extras: Extras, num_queries: Any, num_keys: Any) -> Extras:
    """Lets the last query have the place of the last key."""
    if num_queries > num_keys:
        raise ValueError(
            f'{op}: alignment="bottom_right" needs no more queries than keys; got {num_queries} and {num_keys}. '
            "Pass the mask itself."
        )
    offset = jnp.int32(num_keys - num_queries)
    # A query's place in the sequence is now another than its index, which the lengths are about.
    lengths = extras.query_lengths
    lengths = None if lengths is None else jnp.minimum(lengths, num_queries) + offset
    return dataclasses.replace(extras, query_offset=offset, query_lengths=lengths)


def _logits_shaped(op: str, name: str, x: Any, shape: tuple[int, ...]) -> jax.Array | None:
    """A bias or a mask as a 4-dimensional array whose dimensions are 1 or those of the logits."""
    if x is None:
        return None
    x = as_floating(op, name, x) if name == "bias" else as_array(op, name, x)
    if name == "mask" and x.dtype != jnp.bool_:
        raise ValueError(
            f"{op}: mask must be bool, True where a query sees a key; got {x.dtype}. "
            "Pass an additive mask as bias, a 0/1 mask as mask.astype(bool)."
        )
    if x.ndim > 4 or any(size not in (1, full) for size, full in zip(x.shape[::-1], shape[::-1])):
        raise ValueError(f"{op}: {name} must be broadcastable to (B, N, T, S) = {shape}; got {x.shape}.")
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _integers(op: str, name: str, x: Any, shape: tuple[int, ...], batched: bool = True) -> jax.Array | None:
    if x is None:
        return None
    x = as_array(op, name, x)
    if x.dtype != jnp.int32:
        raise ValueError(f"{op}: {name} must be int32; got {x.dtype}. Cast it with .astype(jnp.int32).")
    expected = shape if batched else shape[1:]
    if x.shape != expected:
        raise ValueError(f"{op}: {name} must have shape {expected}; got {x.shape}.")
    return x.reshape(shape)


def _window(op: str, window: Any, lengths: Sequence[Any]) -> tuple[int | None, int | None] | None:
    """Both sides, None where they hide nothing in sequences of these lengths."""
    if window is None:
        return None
    try:
        pair = window if isinstance(window, Sequence) else (window, window)
        sides = tuple(None if side is None else operator.index(side) for side in pair)
    except TypeError:  # Tracers included.
        sides = ()
    if len(sides) != 2 or any(side is not None and side < 0 for side in sides):
        raise ValueError(
            f"{op}: local_window_size must be an int or a pair (left, right) of ints >= 0 or None, known at trace "
            f"time; got {window!r}. Give what is traced as a mask."
        )
    longest = max(lengths) if all(isinstance(n, int) for n in lengths) else math.inf
    left, right = (None if s is None or s >= longest - 1 else s for s in sides)
    return None if left is None and right is None else (left, right)
