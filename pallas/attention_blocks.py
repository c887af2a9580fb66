"""What the attention kernels share: their limits, the padding they ask for, layouts and the mask."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.specs import AttentionSpec

__all__ = [
    "BARRIER_BYTES",
    "COLUMNS",
    "FLOPS_PER_SM",
    "LAUNCH_SECONDS",
    "NUM_CONSUMERS",
    "PRODUCER_REGISTERS",
    "ROWS",
    "TILE",
    "TRANSFORMS",
    "TRANSFORMS_FLOAT32",
    "hide_unseen",
    "key_iters",
    "mask",
    "pad_heads",
    "padded_head_dims",
    "query_offset",
    "unsupported",
    "visible_pairs",
]

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
#: Consumer warpgroups of a CTA; the producer is one more.
NUM_CONSUMERS = 2
#: Registers each producer thread keeps; the consumers share the rest.
PRODUCER_REGISTERS = 24
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most.
BARRIER_BYTES = 4096
# Rough figures of an H200 for the cost models: bf16 FLOP/s that one SM can reach, and what it takes to begin and to
# end one CTA's work.
FLOPS_PER_SM = 6.2e12
LAUNCH_SECONDS = 2.0e-6
#: A (rows, columns) tile of 16-bit values in shared memory, as wgmma and TMA read it without bank conflicts.
#: (JAX gives the two transforms an abstract method that it never implements.)
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
#: The same of 32-bit values.
TRANSFORMS_FLOAT32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
#: Layouts in registers: an accumulator, and one value for each of its rows or columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def unsupported(spec: AttentionSpec) -> str | None:
    if not spec.target.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), the target is {spec.target}"
    if spec.q.dtype not in _DTYPES:
        return f"takes bfloat16 or float16, not {spec.q.dtype}"
    features = {
        "a bias": spec.bias is not None,
        "a dense mask": spec.mask is not None,
        "a local window": spec.window is not None,
        "a soft cap": spec.soft_cap is not None,
        "sequence lengths": spec.query_lengths or spec.key_lengths,
        "segment ids": spec.segments,
    }
    if missing := [name for name, asked in features.items() if asked]:
        return f"does not handle {', '.join(missing)} yet"
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    if max(spec.q.shape[3], spec.v.shape[3]) > 256:
        return f"handles head dimensions up to 256, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    if not all(isinstance(size, int) for size in (*spec.q.shape, *spec.k.shape, *spec.v.shape)):
        return "needs static shapes"
    if 0 in (*spec.q.shape, *spec.k.shape, *spec.v.shape):
        return "has no work in an empty attention"
    return None


def pad_heads(x: jax.Array) -> jax.Array:
    """Pads (B, T, N, H) to what TMA tiles: T to a multiple of 8, H to one of 64."""
    add = (-x.shape[1] % 8, -x.shape[3] % 64)
    return jnp.pad(x, ((0, 0), (0, add[0]), (0, 0), (0, add[1]))) if any(add) else x


def padded_head_dims(spec: AttentionSpec) -> tuple[int, int]:
    """Head dimensions of queries and of values as the kernels see them."""
    head_dim, value_dim = spec.q.shape[3], spec.v.shape[3]
    return head_dim + -head_dim % 64, value_dim + -value_dim % 64


def visible_pairs(spec: AttentionSpec) -> float:
    """The share of (query, key) pairs that a kernel visits: with a causal mask about half of a square."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    if not spec.causal:
        return 1.0
    seen = num_queries * (num_queries + 1) / 2
    if num_queries > num_keys:
        seen -= (num_queries - num_keys) * (num_queries - num_keys + 1) / 2
    return seen / (num_queries * num_keys)


def query_offset(offset_gmem: list[Any]) -> jax.Array:
    """The first query's place in the sequence, for masks that count from its start."""
    return offset_gmem[0][0] if offset_gmem else jnp.int32(0)


def key_iters(spec: AttentionSpec, queries_end: jax.Array, block_kv: int) -> Any:
    """How many blocks of keys the queries before `queries_end` (offset included) see any of."""
    num_keys = spec.k.shape[1]
    if not spec.causal:
        return -(-num_keys // block_kv)
    return lax.div(jnp.minimum(queries_end, num_keys) + (block_kv - 1), jnp.int32(block_kv))


def mask(
    s: jax.Array,
    spec: AttentionSpec,
    query_start: jax.Array | int,
    key_start: jax.Array | int,
    *,
    keys_in_rows: bool = False,
) -> jax.Array:
    """Sets the logits of keys a query does not see to -inf, in the blocks that have any.

    Args:
      s: logits of a block of queries and one of keys.
      query_start: place in the sequence of the block's first query.
      key_start: index of the block's first key.
      keys_in_rows: whether s is (keys, queries) rather than (queries, keys). Its rows beyond the last key
        are then left as they are: each is on its own, and none is stored.
    """
    key_axis = 0 if keys_in_rows else 1
    num_keys, block_kv = spec.k.shape[1], s.shape[key_axis]
    if not spec.causal and (num_keys % block_kv == 0 or keys_in_rows):
        return s
    # The block's first query sees the fewest keys.
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
) -> jax.Array:
    """As `mask`, in any block: compares every place."""
    num_keys, columns = spec.k.shape[1], 8
    rows = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 0, layout=TILE)
    column = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 1, layout=TILE)
    if keys_in_rows:
        unseen_until = rows + (key_start - query_start) - column
        is_seen = lambda first: unseen_until <= first
    else:
        last_seen = rows + query_start if spec.causal else jnp.full_like(rows, num_keys - 1)
        if spec.causal and num_keys % s.shape[1]:
            last_seen = jnp.minimum(last_seen, num_keys - 1)
        seen_until = last_seen - key_start - column
        is_seen = lambda first: first <= seen_until
    # Of eight columns a thread has the same two, whichever eight these are: it compares four numbers with constants.
    # (LLVM keeps the numbers of all the columns in registers, throughout the loop, where it sees them.)
    tiles = [
        jnp.where(is_seen(first), s[:, first : first + columns], -jnp.inf) for first in range(0, s.shape[1], columns)
    ]
    return jnp.concatenate(tiles, axis=1)
