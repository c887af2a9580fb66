"""An attention as Triton kernels see it: sizes, terms and tiles, all known when a kernel is compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    blocks_of,
    blocks_within,
    is_known_at_run_time,
    keys_in_reach,
    keys_seen_by_all,
    keys_seen_by_any,
    queries_that_see_all,
    queries_that_see_any,
    segment_key_blocks,
    segment_query_blocks,
)
from jaxkernels.triton import calls

__all__ = [
    "LOG2E",
    "GradientConfig",
    "Problem",
    "aligned_shape",
    "check_counts",
    "check_tiles",
    "gradient_operands",
    "head_parts",
    "is_loaded_at_once",
    "key_ranges",
    "optional",
    "padded",
    "query_ranges",
    "ranges_of_keys",
    "ranges_of_queries",
    "unsupported",
    "with_aligned_rows",
]

LOG2E = math.log2(math.e)

#: A load of a thread.
_ALIGNED_BYTES = 16
#: Head dimension -> keys of a small tile: with more, ptxas spills.
_FEW_KEYS = {128: 64, 256: 32}
#: Keys and values that a program loads at once, without a loop, through the registers of four warps.
_ONE_BLOCK_BYTES = 2**15
#: The same limit for 16-bit tiles of up to 16 rows. At this limit, ptxas delays the last loads until registers are
#: free.
_ONE_BLOCK_BYTES_OF_SHORT = 2**17
#: Tiles with one block of keys and at most so many rows have one block of columns, whatever the head dimension. On an
#: H200, 14 queries and keys with 72 dimensions take 1.92 us instead of 1.95, nine keys with 160 take 3.17 instead of
#: 3.55; with 32 rows, 2.43 instead of 2.30.
_ROWS_OF_WHOLE_HEADS = 16

#: Float32 is multiplied in TF32, as XLA does by default. Exactly, if there are at most so many pairs of a query and a
#: key: there XLA, too, is exact.
FLOAT32_PRECISION = "tf32"
_PAIRS_IN_FLOAT32 = 64 * 64

#: Head dimensions up to this one are divided into two blocks of columns on every chip.
_WIDEST_OF_TWO = 128

_DTYPES = tuple(jnp.dtype(dtype) for dtype in (jnp.bfloat16, jnp.float16, jnp.float32))
#: Kernels count the elements of a batch element in 32 bits.
_MOST_ELEMENTS = 2**31
#: The optional operands, in the order in which kernels take them.
_OPTIONAL = (
    "bias", "mask", "query_lengths", "key_lengths", "query_segments", "key_segments", "query_offset",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GradientConfig:
    """Tile and schedule of a kernel that computes all gradients.

    Attributes:
      block_q: queries of all heads of a key head in a tile.
      block_kv: keys in a tile.
      num_warps: warps of a program.
      num_stages: tiles in flight of those that pass through a program.
      num_splits: parts of what passes through.
    """

    block_q: int = 64
    block_kv: int = 64
    num_warps: int = 4
    num_stages: int = 2
    num_splits: int = 1

    def __post_init__(self) -> None:
        label = "attention_backward[triton]"
        check_fields(label, self)
        check_tiles(label, block_q=self.block_q, block_kv=self.block_kv)
        calls.check_schedule(label, self.num_warps, self.num_stages)
        check_counts(label, num_splits=self.num_splits)


@dataclasses.dataclass(frozen=True)
class Problem:
    """What a kernel is compiled for.

    Attributes:
      num_queries, num_keys, num_heads, num_kv_heads, head_dim, value_dim: sizes.
      block_q, block_kv: rows of a tile of logits, and its columns. A row is a query of one head.
      block_h, block_d: head dimensions, rounded up to powers of two.
      main_h, rest_h, main_d, rest_d: the same in two powers of two that have less padding, as the forward pass takes
        them. The second one is 0 where one is as good.
      pack: how many heads share a tile: row r of a set of heads is query r // pack of its head r % pack.
      unit: factor that takes what `logits` returns to logits in base 2. It is positive.
      factor: what a product q k^T is multiplied by before that.
      scale: factor of the logits.
      soft_cap: logits are soft_cap * tanh(logit / soft_cap), or None.
      bias_shape, mask_shape: of the operands with aligned rows, or None.
      left, right: query i sees the keys from i - left to i + right; None leaves a side open.
      query_lengths, key_lengths, segments, query_offset: whether these operands are given.
      is_ragged: whether the last block of keys is not whole.
      has_one_block: whether all keys are one block, small enough to be loaded at once.
      has_left_edge, has_right_edge: whether blocks before, and behind, those that need no mask are visited. They are
        blocks of keys, or with `over_queries` blocks of queries.
      may_be_blind: whether queries may see no key, or none in a part of the keys; or only logits that are minus
        infinity.
      num_splits: parts of the keys, each a result by itself.
      has_dlse: whether the logsumexp has a cotangent.
      precision: how tl.dot multiplies float32; with "tf32", operands are rounded first.
    """

    num_queries: int
    num_keys: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_q: int
    block_kv: int
    block_h: int
    block_d: int
    main_h: int
    rest_h: int
    main_d: int
    rest_d: int
    pack: int
    unit: float
    factor: float
    scale: float
    soft_cap: float | None
    bias_shape: tuple[int, ...] | None
    mask_shape: tuple[int, ...] | None
    left: int | None
    right: int | None
    query_lengths: bool
    key_lengths: bool
    segments: bool
    query_offset: bool
    is_ragged: bool
    has_one_block: bool
    has_left_edge: bool
    has_right_edge: bool
    may_be_blind: bool
    num_splits: int
    has_dlse: bool
    precision: str

    @classmethod
    def of(
        cls,
        spec: AttentionSpec,
        block_q: int,
        block_kv: int,
        *,
        pack: int = 1,
        num_splits: int = 1,
        over_queries: bool = False,
    ) -> Problem:
        (_, num_queries, num_heads, head_dim), (_, num_keys, num_kv_heads, value_dim) = spec.q.shape, spec.v.shape
        # The logit's factor is applied with the exponential's subtraction, unless something comes in between.
        factor, unit = 1.0, spec.scale * LOG2E
        if spec.bias is not None or spec.soft_cap is not None or spec.scale <= 0:
            factor, unit = spec.scale, LOG2E
        if spec.soft_cap is not None:
            factor, unit = spec.scale / spec.soft_cap, spec.soft_cap * LOG2E
        band, at_run_time = spec.band, is_known_at_run_time(spec)
        is_ragged = bool(num_keys % block_kv)
        before, behind, is_last_ragged = (
            (band.right, band.left, bool(num_queries % block_q)) if over_queries else (band.left, band.right, is_ragged)
        )
        has_one_block = num_splits == 1 and num_keys <= block_kv and is_loaded_at_once(spec, block_q, block_kv)
        # In a small tile, the loads and products of a second block of columns cost more than they save.
        is_small = has_one_block and block_q <= _ROWS_OF_WHOLE_HEADS
        (main_h, rest_h), (main_d, rest_d) = (
            (padded(size), 0) if is_small else head_parts(size, spec.target) for size in (head_dim, value_dim)
        )
        return cls(
            num_queries=num_queries,
            num_keys=num_keys,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            block_q=block_q,
            block_kv=block_kv,
            block_h=padded(head_dim),
            block_d=padded(value_dim),
            main_h=main_h,
            rest_h=rest_h,
            main_d=main_d,
            rest_d=rest_d,
            pack=pack,
            unit=unit,
            factor=factor,
            scale=spec.scale,
            soft_cap=spec.soft_cap,
            bias_shape=None if spec.bias is None else aligned_shape(spec.bias, spec),
            mask_shape=None if spec.mask is None else aligned_shape(spec.mask, spec),
            left=band.left,
            right=band.right,
            query_lengths=spec.query_lengths,
            key_lengths=spec.key_lengths,
            segments=spec.segments,
            query_offset=spec.query_offset,
            is_ragged=is_ragged,
            has_one_block=has_one_block,
            has_left_edge=before is not None or spec.segments,
            has_right_edge=behind is not None or is_last_ragged or at_run_time,
            may_be_blind=bool(band.left is not None or at_run_time or spec.bias or spec.mask or num_splits > 1),
            num_splits=num_splits,
            has_dlse=spec.lse_gradient,
            precision="ieee" if num_queries * num_keys <= _PAIRS_IN_FLOAT32 else FLOAT32_PRECISION,
        )

    @property
    def num_blocks(self) -> int:
        """Tiles along the rows of a set of heads."""
        return -(-self.num_queries * self.pack // self.block_q)

    @property
    def block_splits(self) -> int:
        """Parts of the keys, rounded up to a power of two."""
        return 1 << (self.num_splits - 1).bit_length()

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.num_heads // self.num_kv_heads


def is_loaded_at_once(spec: AttentionSpec, block_q: int, block_kv: int) -> bool:
    """Whether a block of all keys and a block of all values are small enough to be loaded at once, without a loop."""
    sizes, size = (spec.k.shape[3], spec.v.shape[3]), spec.k.dtype.itemsize
    if block_q <= _ROWS_OF_WHOLE_HEADS and size == 2:
        return block_kv * sum(map(padded, sizes)) * size <= _ONE_BLOCK_BYTES_OF_SHORT
    return block_kv * sum(sum(head_parts(x, spec.target)) for x in sizes) * size <= _ONE_BLOCK_BYTES


def padded(size: int) -> int:
    """A head dimension as kernels with one block of columns compute with it."""
    return max(16, 1 << (size - 1).bit_length())


def head_parts(head_dim: int, chip: Chip) -> tuple[int, int]:
    """Two powers of two for a head dimension: 64 and 16 for 72, not 128. The second one is 0 where it saves nothing.
    Triton's tiles, and tl.dot, take powers of two from 16 on.

    On other chips than Hopper, heads of more than 128 dimensions are one block. There, queries are in registers, and
    ptxas spills up to 380 bytes of two blocks (192, tiles of 64 rows and eight warps).
    """
    whole = padded(head_dim)
    if whole > _WIDEST_OF_TWO and not chip.is_hopper:
        return whole, 0
    main = whole // 2
    rest = padded(head_dim - main)
    return (main, rest) if main + rest < whole else (whole, 0)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why no Triton kernel can compute a pass of this attention, or None."""
    if reason := calls.unsupported_chip(spec.target):
        return reason
    if spec.q.dtype not in _DTYPES or not spec.q.dtype == spec.k.dtype == spec.v.dtype:
        return f"takes bfloat16, float16 or float32, of one dtype, not {spec.q.dtype}, {spec.k.dtype}, {spec.v.dtype}"
    if spec.terms:
        return f"does not handle terms of your own: {', '.join(map(str, spec.terms))}"
    if max(spec.q.shape[3], spec.v.shape[3]) > 256:
        return f"handles head dimensions up to 256, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    arrays = {name: x.shape for name, x in (("q", spec.q), ("k", spec.k), ("v", spec.v))}
    if reason := spec.unsupported_sizes():
        return reason
    arrays |= {name: aligned_shape(x, spec) for name, x in (("bias", spec.bias), ("mask", spec.mask)) if x is not None}
    for name, shape in arrays.items():
        if math.prod(shape[1:]) >= _MOST_ELEMENTS:
            return f"counts the elements of a batch element in 32 bits, {name} has {math.prod(shape[1:])}"
    return calls.missing()


def optional(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The optional operands as kernels take them. For those not given stands q, which is not read as such."""
    given = {name: with_aligned_rows(x, spec) if name in ("bias", "mask") else x for name, x in named.items()}
    return [given.get(name, named["q"]) for name in _OPTIONAL]


def gradient_operands(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The operands of a kernel that computes all gradients."""
    return [
        *(named[name] for name in ("q", "k", "v")),
        *optional(spec, named),
        *(named[name] for name in ("out", "dout", "lse")),
        # Without a cotangent `dlse` is zero, and not read: XLA would launch a kernel to fill it with zeros.
        named["dlse"] if spec.lse_gradient else named["lse"],
    ]


def with_aligned_rows(x: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The rows of a bias or a mask in whole 16 bytes: padded with zeros, and without the end that no query sees."""
    size = aligned_shape(x, spec)[3]
    x = x[..., :size]
    add = size - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, add))) if add else x


def aligned_shape(x: jax.Array | ArrayType, spec: AttentionSpec) -> tuple[int, int, int, int]:
    """The shape with whole 16 bytes in each row. From other rows Triton loads value by value, with an address each:
    ptxas then spills 500 bytes of registers, and the forward pass took ten times as long. If few keys are seen, rows
    stay as they are: padding is a launch of XLA's, and the tiles are small. Of rows that are copied, the copy leaves
    out the keys that are behind the causal mask or the window of all queries.
    """
    batch, heads, queries, keys = x.shape
    seen, widest = min(keys, keys_in_reach(spec)), max(spec.q.shape[3], spec.v.shape[3])
    limit, few = next((limit, few) for limit, few in _FEW_KEYS.items() if widest <= limit)
    unit = _ALIGNED_BYTES // x.dtype.itemsize
    # With more dimensions ptxas spills 8 to 12 bytes where keys behind these few are in the tile.
    if keys % unit == 0 or (seen if limit <= _WIDEST_OF_TWO else keys) <= few:
        return batch, heads, queries, keys
    return batch, heads, queries, seen + -seen % unit


# Which blocks a kernel visits.


def key_ranges(spec: AttentionSpec, p: Problem, named: Mapping[str, jax.Array]) -> Int32[Array, "b blocks 4"]:
    """For each tile along the rows, the blocks of keys that it visits: the first, the first and the end of those that
    need no mask, and the end. The batch axis has size 1 where all elements have the same ranges.
    """
    offset = named.get("query_offset", 0)
    first_row = jnp.arange(p.num_blocks, dtype=jnp.int32) * p.block_q
    last_row = jnp.minimum(first_row + p.block_q, p.num_queries * p.pack) - 1
    start, end = first_row // p.pack + offset, last_row // p.pack + 1 + offset
    start, end, key_end = _per_batch(p, named, start, end)
    any_keys = keys_seen_by_any(spec, start, end, key_end)
    all_keys = keys_seen_by_all(spec, start, end, key_end)
    if p.query_lengths:  # Padding alone visits nothing; beside others it is not masked: it is set to zero at the end.
        query_end = named["query_lengths"][:, None]
        any_keys = any_keys[0], jnp.where(start < query_end, any_keys[1], 0)
    spans = None
    if p.segments:
        spans = segment_key_blocks(spec, p.block_q // p.pack, p.block_kv, _ids(named))
    return _ranges(any_keys, all_keys, p.block_kv, spans, p.num_blocks)


def query_ranges(spec: AttentionSpec, p: Problem, named: Mapping[str, jax.Array]) -> Int32[Array, "b blocks 4"]:
    """For each block of keys, the blocks of queries that it visits, like `key_ranges`. `pack` must be 1."""
    offset = named.get("query_offset", 0)
    start = jnp.arange(-(-p.num_keys // p.block_kv), dtype=jnp.int32) * p.block_kv
    end = jnp.minimum(start + p.block_kv, p.num_keys)
    start, end, key_end = _per_batch(p, named, start, end)
    query_end = jnp.asarray(p.num_queries + offset, jnp.int32)
    if p.query_lengths:
        query_end = jnp.clip(named["query_lengths"], 0, query_end)[:, None]
    see_any = queries_that_see_any(spec, start, end, offset, query_end)
    see_all = queries_that_see_all(spec, start, end, offset, query_end)
    visited = start < key_end
    see_any = see_any[0] - offset, jnp.where(visited, see_any[1] - offset, 0)
    see_all = see_all[0] - offset, see_all[1] - offset
    spans = segment_query_blocks(spec, p.block_q, p.block_kv, _ids(named)) if p.segments else None
    return _ranges(see_any, see_all, p.block_q, spans, start.shape[1])


def ranges_of_keys(spec: AttentionSpec, p: Problem, named: Mapping[str, jax.Array]) -> jax.Array:
    """The table of `key_ranges` as an operand of a kernel. Without segments kernels compute the ranges: q stands for
    the table, and is not read as such. To make the table takes XLA a kernel, which short kernels would wait for.
    """
    return key_ranges(spec, p, named) if p.segments else named["q"]


def ranges_of_queries(spec: AttentionSpec, p: Problem, named: Mapping[str, jax.Array]) -> jax.Array:
    """The table of `query_ranges`, likewise."""
    return query_ranges(spec, p, named) if p.segments else named["q"]


def _per_batch(p: Problem, named: Mapping[str, Any], start: Any, end: Any) -> tuple[Any, Any, Any]:
    """Ranges with a batch axis, and the end of keys."""
    key_end = jnp.full((1, 1), p.num_keys, jnp.int32)
    if p.key_lengths:
        key_end = jnp.clip(named["key_lengths"], 0, p.num_keys)[:, None]
    return start[None], end[None], key_end


def _ids(named: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: named[name] for name in _OPTIONAL[2:] if name in named}


def _ranges(
    some: tuple[Any, Any], every: tuple[Any, Any], block: int, spans: jax.Array | None, num_rows: int
) -> Int32[Array, "b blocks 4"]:
    """Ranges of elements -> ranges of blocks, within the spans that segments leave."""
    inside = lambda pair: (jnp.maximum(pair[0], 0), jnp.maximum(pair[1], 0))
    first, end = blocks_of(*inside(some), block)
    whole_first, whole_end = blocks_within(*inside(every), block)
    if spans is not None:
        first, end = jnp.maximum(first, spans[..., 0]), jnp.minimum(end, spans[..., 1])
        whole_first, whole_end = jnp.maximum(whole_first, spans[..., 2]), jnp.minimum(whole_end, spans[..., 3])
    first = jnp.minimum(first, end)
    whole_first = jnp.clip(whole_first, first, end)
    whole_end = jnp.clip(whole_end, whole_first, end)
    ranges = jnp.stack(jnp.broadcast_arrays(first, whole_first, whole_end, end), axis=-1).astype(jnp.int32)
    return jnp.broadcast_to(ranges, (ranges.shape[0], num_rows, 4))


def check_counts(label: str, **counts: int) -> None:
    """Raises ValueError unless each count is positive."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{label}: {name} must be positive; got {count}.")


def check_tiles(label: str, **sizes: int) -> None:
    """Raises ValueError unless each size is a power of two of at least 16."""
    for name, size in sizes.items():
        if size < 16 or size & (size - 1):
            raise ValueError(f"{label}: {name} must be a power of two of at least 16; got {size}.")
