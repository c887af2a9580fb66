"""Logits in registers: how kernels mask them, how score terms change them, and the gradient of both."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.pallas.attention.layouts import COLUMNS, ROWS, TILE

__all__ = [
    "LOG2E",
    "change",
    "change_and_slope",
    "gradient_scale",
    "hide_other_segments",
    "hide_unseen",
    "mask",
    "round_logit_gradients",
]

LOG2E = math.log2(math.e)

type Starts = Callable[[], tuple[Any, Any]]


def mask(
    s: jax.Array,
    spec: AttentionSpec,
    query_start: jax.Array | int,
    key_start: jax.Array | int,
    *,
    keys_in_rows: bool = False,
) -> jax.Array:
    """Sets the logits of masked pairs to -inf, if the block has any.

    Args:
      s: logits of a block of queries and a block of keys.
      query_start: position of the block's first query in the sequence.
      key_start: index of the block's first key.
      keys_in_rows: whether s is (keys, queries) instead of (queries, keys). Rows past the last key are then not masked:
        they affect no other row, and are not stored.
    """
    key_axis = 0 if keys_in_rows else 1
    num_keys, block_kv = spec.k.shape[1], s.shape[key_axis]
    if not spec.causal and (num_keys % block_kv == 0 or keys_in_rows):
        return s
    # The first query of the block sees the fewest keys.
    last_seen = jnp.minimum(query_start, num_keys - 1) if spec.causal else num_keys - 1
    hide = functools.partial(
        hide_unseen, spec=spec, query_start=query_start, key_start=key_start, keys_in_rows=keys_in_rows
    )
    return lax.cond(key_start + (block_kv - 1) > last_seen, hide, lambda s: s, s)


def hide_unseen(
    s: jax.Array,
    spec: AttentionSpec,
    query_start: jax.Array | int,
    key_start: jax.Array | int,
    *,
    keys_in_rows: bool = False,
    key_end: jax.Array | int | None = None,
) -> jax.Array:
    """Like `mask`, but for any block, with all mask terms and key lengths. Compares every position.

    Args:
      key_end: the number of keys, if lengths are given. With keys in rows, rows past it are masked, too; none if it is
        None.
    """
    num_keys, columns = spec.k.shape[1], 8
    rows = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 0, layout=TILE)
    column = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 1, layout=TILE)
    left, right = spec.band.left, spec.band.right
    first_row, first_column = (key_start, query_start) if keys_in_rows else (query_start, key_start)
    places = (rows + first_row, column + first_column) if spec.own_masks else None
    # In each group of eight columns: the first and the last visible column, counted from the block's first column.
    seen_from = seen_until = None
    if keys_in_rows:
        rows += key_start
        ahead = rows - query_start - column
        seen_from = None if right is None else ahead - right if right else ahead
        seen_until = None if left is None else ahead + left
        if key_end is not None:
            ahead = jnp.zeros_like(rows) if seen_from is None else seen_from
            seen_from = jnp.where(rows < key_end, ahead, s.shape[1])
    else:
        last_seen = None
        if right is not None:
            last_seen = rows + (query_start + right if right else query_start)
        if key_end is None and num_keys % s.shape[1]:
            key_end = num_keys
        if key_end is not None:
            last_seen = jnp.full_like(rows, key_end - 1) if last_seen is None else jnp.minimum(last_seen, key_end - 1)
        if last_seen is not None:
            seen_until = last_seen - key_start - column
        if left is not None:
            seen_from = rows + (query_start - left - key_start) - column

    def show(first: int) -> jax.Array:
        part = s[:, first : first + columns]
        if seen_from is not None:
            part = jnp.where(seen_from <= first, part, -math.inf)
        if seen_until is not None:
            part = jnp.where(first <= seen_until, part, -math.inf)
        if places is not None:
            row, column = places[0], places[1] + first
            query, key = (column, row) if keys_in_rows else (row, column)
            for term in spec.own_masks:
                part = jnp.where(term.visible(query, key), part, -math.inf)
        return part

    # A thread has the same two columns of every group of eight, so it compares four numbers with constants. (If the
    # indices of all columns were computed, LLVM would keep them in registers throughout the loop.)
    return jnp.concatenate([show(first) for first in range(0, s.shape[1], columns)], axis=1)


def hide_other_segments(s: jax.Array, row_ids: Any, column_ids: Any) -> jax.Array:
    """Masks the logits whose row and column have different segment ids.

    Rows are queries and columns keys, or vice versa. `row_ids` and `column_ids` refer to the ids of the block.
    """
    columns = 8
    of_rows = lax.broadcast_in_dim(plgpu.load(row_ids, layout=ROWS, optimized=False), (s.shape[0], columns), [0])

    def show(first: int) -> jax.Array:
        ids = plgpu.load(column_ids.at[pl.ds(first, columns)], layout=COLUMNS, optimized=False)
        of_columns = lax.broadcast_in_dim(ids, (s.shape[0], columns), [1])
        return jnp.where(of_rows == of_columns, s[:, first : first + columns], -math.inf)

    return jnp.concatenate([show(first) for first in range(0, s.shape[1], columns)], axis=1)


def round_logit_gradients(ds: jax.Array, spec: AttentionSpec) -> jax.Array:
    """Rounds dS to 16 bits. In float16 (at most 65504) it is scaled first; else `gradient_scale` applies afterwards."""
    return (ds * spec.scale if spec.q.dtype == jnp.float16 else ds).astype(spec.q.dtype)


def gradient_scale(spec: AttentionSpec) -> float:
    """The factor by which dS K and dS^T Q must still be multiplied."""
    return 1.0 if spec.q.dtype == jnp.float16 else spec.scale


def change(s: jax.Array, spec: AttentionSpec, starts: Starts) -> jax.Array:
    """Logits after the score terms, times log2(e), for exp2.

    Args:
      s: (queries, keys), without the scale.
      starts: returns the position of the block's first query in the sequence, and the index of its first key. It is
        called only if a term needs them.
    """
    if _caps_only(spec):
        return _cap(s, spec)
    logits, (query, key) = s * spec.scale, _places(s, *starts(), keys_in_rows=False)
    for term in spec.score_terms:
        logits = term.change(logits, query, key)
    return logits * LOG2E


def change_and_slope(
    s: jax.Array, spec: AttentionSpec, starts: Starts, *, keys_in_rows: bool
) -> tuple[jax.Array, jax.Array]:
    """`change` of masked logits, and its derivative by the scaled logits."""
    if _caps_only(spec):
        return _cap_and_slope(s, spec)
    hidden = s == -math.inf
    logits, (query, key) = jnp.where(hidden, 0.0, s * spec.scale), _places(s, *starts(), keys_in_rows=keys_in_rows)
    slope = jnp.ones_like(s)
    for term in spec.score_terms:
        slope *= term.slope(logits, query, key)
        logits = term.change(logits, query, key)
    return jnp.where(hidden, -math.inf, logits * LOG2E), slope


def _caps_only(spec: AttentionSpec) -> bool:
    return spec.soft_cap is not None and len(spec.score_terms) == 1


def _places(s: jax.Array, query_start: Any, key_start: Any, *, keys_in_rows: bool) -> tuple[jax.Array, jax.Array]:
    """The position of each logit's query in the sequence, and the index of its key."""
    rows, columns = (plgpu.broadcasted_iota(jnp.int32, s.shape, axis, layout=TILE) for axis in (0, 1))
    query, key = (columns, rows) if keys_in_rows else (rows, columns)
    return query + query_start, key + key_start


def _cap(s: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The soft cap of unscaled logits, times log2(e), for exp2.

    tanh x is computed as 1 - 2 / (1 + e^2x), with an error of at most 2^-21. The chip's own tanh has an error of 2^-11:
    with a cap of some tens that is a percent of a probability. 1 / y is rsqrt(y)²: one special instruction, where a
    division takes a dozen instructions.
    """
    return _capped(_inverse(1.0 + jnp.exp2(s * _exponent(spec))), spec)


def _cap_and_slope(s: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """`_cap`, and its derivative by the scaled logits, 1 - tanh² x.

    The derivative is computed as 4 e^2x / (1 + e^2x)², because 1 - tanh² has no digits left if tanh is almost 1.
    """
    power = jnp.exp2(jnp.minimum(s * _exponent(spec), 60.0))  # Keeps the square finite; tanh is 1 long before.
    inverse = _inverse(1.0 + power)
    return _capped(inverse, spec), 4.0 * power * (inverse * inverse)


def _exponent(spec: AttentionSpec) -> float:
    """2x log2(e) over the logit."""
    assert spec.soft_cap is not None
    return 2.0 * LOG2E * spec.scale / spec.soft_cap


def _inverse(x: jax.Array) -> jax.Array:
    root = lax.rsqrt(x)
    return root * root


def _capped(inverse: jax.Array, spec: AttentionSpec) -> jax.Array:
    assert spec.soft_cap is not None
    most = spec.soft_cap * LOG2E
    return most - (2.0 * most) * inverse
