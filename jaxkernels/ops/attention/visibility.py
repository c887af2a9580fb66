"""The ranges of key and query blocks that an attention kernel visits, and the blocks that it must mask.

The ranges come from the terms of the spec (`jaxkernels.ops.attention.terms`), from the lengths, and from the segments.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.terms import largest, least

__all__ = [
    "blind_are_scattered",
    "blocks_of",
    "blocks_within",
    "ends_of",
    "first_blind",
    "hides_by_causality_alone",
    "is_known_at_run_time",
    "kernel_inputs",
    "key_iters",
    "keys_in_reach",
    "keys_inside",
    "keys_seen_by_all",
    "keys_seen_by_any",
    "looks_back",
    "may_see_nothing",
    "queries_inside",
    "queries_that_see_all",
    "queries_that_see_any",
    "query_offset",
    "segment_key_blocks",
    "segment_query_blocks",
    "segment_query_blocks_in_order",
]


def keys_seen_by_any(spec: AttentionSpec, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
    """The range of keys that some query of a range sees."""
    ranges = [term.keys_seen_by_any(query_start, query_end, key_end) for term in spec.index_terms]
    return _intersection(ranges) if ranges else (0, key_end)


def keys_in_reach(spec: AttentionSpec) -> int:
    """How many of the first keys some query may see. All, if the position of the queries is known at run time only."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    return num_keys if spec.query_offset else keys_seen_by_any(spec, 0, num_queries, num_keys)[1]


def keys_seen_by_all(spec: AttentionSpec, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
    """The range of keys that every query of a range sees."""
    ranges = [term.keys_seen_by_all(query_start, query_end, key_end) for term in spec.index_terms]
    return _intersection(ranges) if ranges else (0, key_end)


def queries_that_see_any(
    spec: AttentionSpec, key_start: Any, key_end: Any, query_start: Any, query_end: Any
) -> tuple[Any, Any]:
    """The queries, of those from `query_start` to `query_end`, that see some key of a range."""
    ranges = [term.queries_that_see_any(key_start, key_end, query_start, query_end) for term in spec.index_terms]
    return _intersection(ranges) if ranges else (query_start, query_end)


def queries_that_see_all(
    spec: AttentionSpec, key_start: Any, key_end: Any, query_start: Any, query_end: Any
) -> tuple[Any, Any]:
    """The queries, of those from `query_start` to `query_end`, that see every key of a range."""
    ranges = [term.queries_that_see_all(key_start, key_end, query_start, query_end) for term in spec.index_terms]
    return _intersection(ranges) if ranges else (query_start, query_end)


def _intersection(ranges: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    starts, ends = zip(*ranges)
    return largest(*starts), least(*ends)


def _quotient(x: Any, block: int) -> Any:
    return x // block if isinstance(x, int) or x.ndim else lax.div(x, jnp.int32(block))


def blocks_of(start: Any, end: Any, block: int) -> tuple[Any, Any]:
    """The blocks that overlap a range. The range must not begin before 0."""
    return _quotient(start, block), _quotient(end + block - 1, block)


def blocks_within(start: Any, end: Any, block: int) -> tuple[Any, Any]:
    """The blocks wholly inside a range. The range must not begin before 0."""
    return _quotient(start + block - 1, block), _quotient(end, block)


def is_known_at_run_time(spec: AttentionSpec) -> bool:
    """Whether the visited blocks depend on arrays, and so are known at run time only."""
    return spec.query_lengths or spec.key_lengths or spec.segments


def hides_by_causality_alone(spec: AttentionSpec) -> bool:
    """Whether there is no mask, or a causal mask only."""
    return not (spec.window or is_known_at_run_time(spec) or spec.own_masks)


def looks_back(spec: AttentionSpec) -> bool:
    """Whether the first keys may be masked for later queries."""
    return spec.band.left is not None or bool(spec.own_masks)


def may_see_nothing(spec: AttentionSpec) -> bool:
    """Whether queries other than padding may see no key."""
    left = spec.band.left
    is_left_behind = left is not None and (spec.query_offset or spec.q.shape[1] - 1 - left >= spec.k.shape[1])
    sees_itself = spec.self_segments and spec.q.shape[1] == spec.k.shape[1] and not spec.query_offset
    if not all(term.shows_a_key for term in spec.own_masks):
        return True
    return spec.mask is not None or spec.key_lengths or is_left_behind or (spec.segments and not sees_itself)


def blind_are_scattered(spec: AttentionSpec) -> bool:
    """Whether queries that see no key may be anywhere, instead of all from `first_blind` on."""
    return spec.segments or bool(spec.own_masks)


def first_blind(spec: AttentionSpec, key_end: jax.Array) -> jax.Array:
    """The position from which on queries see no key, by the window and the lengths (segments are ignored)."""
    left = spec.band.left
    beyond_keys = jnp.iinfo(jnp.int32).max if left is None else key_end + left
    return jnp.where(key_end <= 0, 0, beyond_keys)


def queries_inside(spec: AttentionSpec, extras: dict[str, jax.Array]) -> Bool[Array, "B T"]:
    """True for queries that are not padding."""
    batch, num_queries = spec.q.shape[:2]
    if not spec.query_lengths:
        return jnp.ones((batch, num_queries), bool)
    place = jnp.arange(num_queries, dtype=jnp.int32) + extras.get("query_offset", 0)
    return place < extras["query_lengths"][:, None]


def keys_inside(spec: AttentionSpec, extras: dict[str, jax.Array]) -> Bool[Array, "B S"]:
    """True for keys that are not padding."""
    batch, num_keys = spec.k.shape[:2]
    if not spec.key_lengths:
        return jnp.ones((batch, num_keys), bool)
    return jnp.arange(num_keys, dtype=jnp.int32) < extras["key_lengths"][:, None]


def _pairs_of_blocks(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """Two masks of (query block, key block) pairs: blocks may share a segment; both are wholly in the same segment.

    Blocks may share a segment if the ranges of their ids overlap. For documents packed one after the other this is
    exact.
    """

    def spans(ids: jax.Array, is_real: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """The smallest and the largest id of each block. In a block of padding, smallest > largest."""
        info = jnp.iinfo(jnp.int32)

        def blocks(filler: int) -> jax.Array:
            filled = jnp.where(is_real, ids, filler)
            padded = jnp.pad(filled, ((0, 0), (0, -ids.shape[1] % block)), constant_values=filler)
            return padded.reshape(ids.shape[0], -1, block)

        return blocks(int(info.max)).min(2), blocks(int(info.min)).max(2)

    query_spans = spans(extras["query_segments"], queries_inside(spec, extras), block_q)
    key_spans = spans(extras["key_segments"], keys_inside(spec, extras), block_kv)
    least_query, largest_query = (x[:, :, None] for x in query_spans)
    least_key, largest_key = (x[:, None, :] for x in key_spans)
    meets = (least_key <= largest_query) & (largest_key >= least_query)
    is_one = (least_query == largest_query) & (least_key == largest_key) & (least_key == least_query)
    return meets, is_one


def _spans_of_blocks(meets: Bool[Array, "B X Y"], is_one: Bool[Array, "B X Y"]) -> list[Int32[Array, "B X"]]:
    """Along Y: first and end of the blocks in `meets`; first and end of a run of blocks in `is_one`.

    If `is_one` has several runs (ids in no order), the result is the first block of the first run. All reductions read
    the same arrays, so XLA fuses them into one kernel.
    """
    num_blocks = meets.shape[2]
    block = jnp.arange(num_blocks, dtype=jnp.int32)
    span = lambda marked: (
        jnp.where(marked, block, num_blocks).min(axis=2),
        jnp.where(marked, block + 1, 0).max(axis=2),
    )
    first_of_one, end_of_one = span(is_one)
    is_run = is_one.sum(axis=2, dtype=jnp.int32) == end_of_one - first_of_one
    return [*span(meets), first_of_one, jnp.where(is_run, end_of_one, jnp.minimum(first_of_one + 1, num_blocks))]


def segment_key_blocks(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> Int32[Array, "B Q 4"]:
    """The range of key blocks for each block of queries, from the segment ids. XLA computes it before the kernel runs.

    Args:
      extras: the optional operands by name.

    Returns:
      For each block of queries: first and end of the key blocks that may be visible; first and end of a run of key
      blocks that need no mask, because all their ids equal the one id of the queries.
    """
    return jnp.stack(_spans_of_blocks(*_pairs_of_blocks(spec, block_q, block_kv, extras)), axis=2).astype(jnp.int32)


def segment_query_blocks(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> Int32[Array, "B K 4"]:
    """The range of query blocks for each block of keys, like `segment_key_blocks`."""
    pairs = (jnp.swapaxes(x, 1, 2) for x in _pairs_of_blocks(spec, block_q, block_kv, extras))
    return jnp.stack(_spans_of_blocks(*pairs), axis=2).astype(jnp.int32)


def segment_query_blocks_in_order(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> tuple[Int32[Array, "B K 4"], Int32[Array, "B Q"]]:
    """`segment_query_blocks`, widened so that consecutive blocks of keys visit each block of queries; and the first one
    that does. A block of keys then knows how many others add to a block of dQ before it.
    """
    first, end, *same_segment = jnp.moveaxis(segment_query_blocks(spec, block_q, block_kv, extras), 2, 0)
    first, end = _without_gaps(first, end)
    q_block = jnp.arange(-(-spec.q.shape[1] // block_q), dtype=jnp.int32)
    first_kv_block = jnp.sum(end[:, None, :] <= q_block[:, None], axis=2, dtype=jnp.int32)
    return jnp.stack([first, end, *same_segment], axis=2), first_kv_block


def _without_gaps(first: jax.Array, end: jax.Array) -> tuple[jax.Array, jax.Array]:
    return lax.cummin(first, axis=1, reverse=True), lax.cummax(end, axis=1)


def kernel_inputs(extras: dict[str, jax.Array], block_q: int, block_kv: int) -> dict[str, jax.Array]:
    """The optional operands as kernels read them: the offset in an array, ids padded to whole blocks."""
    inputs = dict(extras)
    if "query_offset" in inputs:
        inputs["query_offset"] = inputs["query_offset"].reshape(1)
    for name, block in (("query_segments", block_q), ("key_segments", block_kv)):
        if name in inputs:
            inputs[name] = jnp.pad(inputs[name], ((0, 0), (0, -inputs[name].shape[1] % block)))
    return inputs


def query_offset(inputs: dict[str, Any]) -> jax.Array:
    """The position of the first query in the sequence. Called in a kernel."""
    return inputs["query_offset"][0] if "query_offset" in inputs else jnp.int32(0)


def ends_of(spec: AttentionSpec, inputs: dict[str, Any], batch: Any, offset: jax.Array) -> tuple[Any, Any]:
    """The ends of queries (a position in the sequence) and of keys. Called in a kernel."""
    query_end, key_end = spec.q.shape[1] + offset, jnp.int32(spec.k.shape[1])
    if spec.query_lengths:
        query_end = jnp.clip(inputs["query_lengths"][batch], 0, query_end)
    if spec.key_lengths:
        key_end = jnp.clip(inputs["key_lengths"][batch], 0, key_end)
    return query_end, key_end


def key_iters(spec: AttentionSpec, queries_end: jax.Array, block_kv: int) -> Any:
    """The number of key blocks that the queries before `queries_end` see. `queries_end` includes the offset."""
    num_keys = spec.k.shape[1]
    if not spec.causal:
        return -(-num_keys // block_kv)
    return lax.div(jnp.minimum(queries_end, num_keys) + (block_kv - 1), jnp.int32(block_kv))
