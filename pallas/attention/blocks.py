"""What the attention kernels share: their limits, the padding they ask for, layouts and the mask."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu.utils import memref_ptr
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, nvvm, scf, vector
from jaxtyping import Array, Bool, Int32

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = [
    "BARRIER_BYTES",
    "COLUMNS",
    "FLOPS_PER_SM",
    "LAUNCH_SECONDS",
    "LOG2E",
    "NUM_CONSUMERS",
    "PRODUCER_REGISTERS",
    "RING_BARRIER_BYTES",
    "ROWS",
    "TILE",
    "TRANSFORMS_FLOAT32",
    "balanced_plan",
    "blocks_of",
    "blocks_within",
    "cap",
    "cap_and_slope",
    "cluster_end",
    "count_up",
    "ends_of",
    "features",
    "first_blind",
    "gradient_scale",
    "hide_other_segments",
    "hide_unseen",
    "hides_by_causality_alone",
    "is_known_at_run_time",
    "kernel_inputs",
    "key_iters",
    "keys_inside",
    "keys_seen_by_all",
    "keys_seen_by_any",
    "least_head_multiple",
    "leave_cluster",
    "mask",
    "may_see_nothing",
    "pad_heads",
    "padded_head_dims",
    "planned_offset",
    "queries_inside",
    "queries_that_see_all",
    "queries_that_see_any",
    "query_offset",
    "round_logit_gradients",
    "scale_rows",
    "segment_key_blocks",
    "segment_query_blocks",
    "slot_releases",
    "swizzle_span",
    "transforms_of",
    "unsupported",
    "visible_pairs",
]

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
#: Consumer warpgroups of a CTA; the producer is one more.
NUM_CONSUMERS = 2
#: Registers each producer thread keeps; the consumers share the rest.
PRODUCER_REGISTERS = 24
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most: where JAX emits the
#: pipelines, and where a kernel has rings of its own.
BARRIER_BYTES = 4096
RING_BARRIER_BYTES = 1024
LOG2E = math.log2(math.e)
# Rough figures of an H200 for the cost models: bf16 FLOP/s that one SM can reach, and what it takes to begin and to
# end one CTA's work.
FLOPS_PER_SM = 6.2e12
LAUNCH_SECONDS = 2.0e-6
#: A (rows, columns) tile of 32-bit values in shared memory, as TMA reads it without bank conflicts.
#: (JAX gives the two transforms an abstract method that it never implements.)
TRANSFORMS_FLOAT32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))  # pyright: ignore[reportAbstractUsage]
#: Layouts in registers: an accumulator, and one value for each of its rows or columns.
TILE = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLUMNS = plgpu.Layout.WGMMA.reduce(0)
#: Logits under a soft cap are off by 2^-21 of it (`cap`): by 5e-4.
_LARGEST_CAP = 1000.0
#: Queries or keys. The plan of a longer sequence takes the host minutes, and its items overflow 32 bits.
_MAX_LENGTH = 2**28


def features(spec: AttentionSpec) -> list[str]:
    """What the spec asks for that not every kernel handles, by name."""
    asked = {
        "a local window": spec.window is not None,
        "a soft cap": spec.soft_cap is not None,
        "sequence lengths": spec.query_lengths or spec.key_lengths,
        "segment ids": spec.segments,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def unsupported(spec: AttentionSpec) -> str | None:
    if not spec.target.is_hopper:
        return f"needs a GPU of compute capability 9.0 (Hopper), the target is {spec.target}"
    if spec.q.dtype not in _DTYPES:
        return f"takes bfloat16 or float16, not {spec.q.dtype}"
    operands = {"a bias": spec.bias is not None, "a dense mask": spec.mask is not None}
    if missing := [name for name, is_given in operands.items() if is_given]:
        way_out = "; is_causal, a window, lengths or segments are fast in its place" if spec.mask is not None else ""
        return f"does not handle {', '.join(missing)} yet{way_out}"
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    if spec.soft_cap is not None and spec.soft_cap > _LARGEST_CAP:
        return f"tells logits by 2^-21 of the soft cap, up to {_LARGEST_CAP:g}, got {spec.soft_cap:g}"
    if max(spec.q.shape[3], spec.v.shape[3]) > 256:
        return f"handles head dimensions up to 256, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    if not all(isinstance(size, int) for size in (*spec.q.shape, *spec.k.shape, *spec.v.shape)):
        return "needs static shapes"
    if 0 in (*spec.q.shape, *spec.k.shape, *spec.v.shape):
        return "has no work in an empty attention"
    if (longest := max(spec.q.shape[1], spec.k.shape[1])) > _MAX_LENGTH:
        return f"counts queries and keys in 32 bits and plans each block of them, up to {_MAX_LENGTH}, got {longest}"
    return None


def pad_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """Pads (B, T, N, H) to what TMA tiles: T to a multiple of 8, H to `head_dim`."""
    add = (-x.shape[1] % 8, head_dim - x.shape[3])
    return jnp.pad(x, ((0, 0), (0, add[0]), (0, 0), (0, add[1]))) if any(add) else x


def padded_head_dims(spec: AttentionSpec, multiple: int = 64) -> tuple[int, int]:
    """Head dimensions of queries and of values as the kernels see them."""
    head_dim, value_dim = spec.q.shape[3], spec.v.shape[3]
    return head_dim + -head_dim % multiple, value_dim + -value_dim % multiple


def least_head_multiple(spec: AttentionSpec) -> int:
    """To multiples of which head dimensions are padded: 64, or 32 where that is less and neither exceeds 128."""
    wide = padded_head_dims(spec)
    return 32 if max(wide) <= 128 and padded_head_dims(spec, 32) != wide else 64


def swizzle_span(*columns: int) -> int:
    """How many 16-bit columns of tiles of so many each are swizzled together: 64, or 32 where these are not whole."""
    return math.gcd(64, *columns)


def transforms_of(*columns: int) -> tuple[Any, ...]:
    """Of a (rows, columns) tile of 16-bit values in shared memory, as wgmma and TMA read it without bank conflicts.

    Args:
      columns: the tile's, and those of tiles that it is multiplied by: the operands of a product are swizzled alike.
    """
    span = swizzle_span(*columns)
    return plgpu.TilingTransform((8, span)), plgpu.SwizzleTransform(2 * span)  # pyright: ignore[reportAbstractUsage]


def slot_releases(num_slots: int, num_consumers: int, *, multicast: bool) -> Any:
    """Barriers that all consumers arrive at; in a cluster those of both CTAs, whose producers both write the slot."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers, num_barriers=num_slots)
    return plgpu.Barrier(num_arrivals=num_consumers, num_barriers=num_slots)


def cluster_end(num_consumers: int, *, multicast: bool) -> Any:
    """The neighbour still releases slots of our ring, by barriers in our shared memory: nobody leaves first."""
    if multicast:
        return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=num_consumers + 1)
    return None


def leave_cluster(end: Any) -> None:
    """Waits for the others at `cluster_end`'s barrier, if there are any."""
    if end is not None:
        plgpu.barrier_arrive(end)
        plgpu.barrier_wait(end)


def visible_pairs(spec: AttentionSpec) -> float:
    """The share of (query, key) pairs that a kernel visits: with a causal mask about half of a square."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    if not spec.causal:
        return 1.0
    seen = num_queries * (num_queries + 1) / 2
    if num_queries > num_keys:
        seen -= (num_queries - num_keys) * (num_queries - num_keys + 1) / 2
    return seen / (num_queries * num_keys)


# Which keys queries see, and which queries see keys: half-open ranges, of queries by their place in the sequence. Ends
# may be numbers, scalars in a kernel or arrays outside of it. `key_end` and `query_end` are the lengths. A range that
# ends before it begins is empty.


def _least(*ends: Any) -> Any:
    return functools.reduce(lambda x, y: min(x, y) if _are_numbers(x, y) else jnp.minimum(x, y), ends)


def _largest(*ends: Any) -> Any:
    return functools.reduce(lambda x, y: max(x, y) if _are_numbers(x, y) else jnp.maximum(x, y), ends)


def _are_numbers(*xs: Any) -> bool:
    return all(isinstance(x, int) for x in xs)


def _window(spec: AttentionSpec) -> tuple[int | None, int | None]:
    """How many keys before its own place a query sees, and how many behind it; None: all."""
    left, right = spec.window or (None, None)
    return left, 0 if spec.causal else right


def keys_seen_by_any(spec: AttentionSpec, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
    """The keys that some query of a range sees."""
    left, right = _window(spec)
    start = 0 if left is None else _largest(query_start - left, 0)
    return start, key_end if right is None else _least(query_end + right, key_end)


def keys_seen_by_all(spec: AttentionSpec, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
    """The keys that every query of a range sees."""
    left, right = _window(spec)
    start = 0 if left is None else _largest(query_end - 1 - left, 0)
    return start, key_end if right is None else _least(query_start + right + 1, key_end)


def queries_that_see_any(
    spec: AttentionSpec, key_start: Any, key_end: Any, query_start: Any, query_end: Any
) -> tuple[Any, Any]:
    """The queries, of those from `query_start` to `query_end`, that see some key of a range."""
    left, right = _window(spec)
    start = query_start if right is None else _largest(key_start - right, query_start)
    return start, query_end if left is None else _least(key_end + left, query_end)


def queries_that_see_all(
    spec: AttentionSpec, key_start: Any, key_end: Any, query_start: Any, query_end: Any
) -> tuple[Any, Any]:
    """The queries, of those from `query_start` to `query_end`, that see every key of a range."""
    left, right = _window(spec)
    start = query_start if right is None else _largest(key_end - 1 - right, query_start)
    return start, query_end if left is None else _least(key_start + left + 1, query_end)


def _quotient(x: Any, block: int) -> Any:
    return x // block if isinstance(x, int) or x.ndim else lax.div(x, jnp.int32(block))


def blocks_of(start: Any, end: Any, block: int) -> tuple[Any, Any]:
    """The blocks that have any of a range that does not begin before 0."""
    return _quotient(start, block), _quotient(end + block - 1, block)


def blocks_within(start: Any, end: Any, block: int) -> tuple[Any, Any]:
    """The blocks that lie wholly inside a range that does not begin before 0."""
    return _quotient(start + block - 1, block), _quotient(end, block)


def scale_rows(tile: jax.Array, factors: jax.Array) -> jax.Array:
    """tile * factors[:, None], in `TILE` and `ROWS`; a warp passes over it if all factors of its rows are 1.

    Branches of Pallas take a scalar, which all 128 threads would first have to agree on.
    """
    like_tile = plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=TILE)
    inline: Any = plgpu.inline_mgpu(arg_types=(TILE, ROWS), return_type=like_tile)
    return inline(_scale_rows)(tile, factors)


def _scale_rows(ctx: Any, tile: Any, factors: Any) -> Any:
    """`scale_rows` in MLIR, of a thread's registers."""
    del ctx
    one, all_lanes = mgpu.c(1.0, ir.F32Type.get()), mgpu.c(0xFFFFFFFF, ir.IntegerType.get_signless(32))
    values = [vector.extract(register, [], [0]) for register in factors.registers.flat]
    differ = [arith.cmpf(arith.CmpFPredicate.UNE, value, one) for value in values]
    any_differs = nvvm.vote_sync(all_lanes, functools.reduce(arith.ori, differ), "any")
    unscaled = list(tile.registers.flat)
    branch: Any = scf.IfOp(any_differs, [register.type for register in unscaled], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scaled = tile * factors.broadcast_in_dim(tile.shape, (0,), tile.layout)
        scf.yield_(list(scaled.registers.flat))
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(unscaled)
    registers = np.array(list(branch.results), dtype=object).reshape(tile.registers.shape)
    return mgpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=tile.is_signed)


def count_up(counter: Any, before: Any) -> None:
    """Adds 1 to a counter in global memory; writes to shared memory what it was."""
    inline: Any = plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    inline(_count_up)(counter, before)


def _count_up(ctx: Any, counter: Any, before: Any) -> None:
    """`count_up` in MLIR: one thread counts, and the warpgroup waits for it."""
    del ctx
    one = mgpu.c(1, ir.IntegerType.get_signless(32))
    with mgpu.single_thread(mgpu.ThreadSubset.WARPGROUP):
        # Nothing else is told by it: no order with other accesses.
        relaxed: Any = dict(ordering=llvm.AtomicOrdering.monotonic, syncscope="device")
        memref.store(llvm.atomicrmw(llvm.AtomicBinOp.add, memref_ptr(counter), one, **relaxed), before, [])
    mgpu.warpgroup_barrier()


def num_even_ctas(durations: Collection[float], num_ctas: int) -> int:
    """As many CTAs, at most, as have a use: of items of equal duration as few as end at the same time.

    Of 2048 for 132 CTAs 16 each for 128, which then begin the same sets of heads together, and find each other's blocks
    in L2.
    """
    num_ctas = min(len(durations), num_ctas)
    if len(set(durations)) == 1:
        num_ctas = pl.cdiv(len(durations), pl.cdiv(len(durations), num_ctas))
    return num_ctas


def balanced_plan(
    items: Sequence[tuple[int, float]], num_ctas: int, ctas: Callable[[int], range] | None = None
) -> tuple[np.ndarray, float]:
    """A row for each CTA of a grid: how many items it has, their numbers, and one that stands for none; and how long
    the last CTA takes.

    Each item goes to the CTA that has least to do so far.

    Args:
      items: numbers and durations, in the order in which they are begun.
      num_ctas: how many there are at most (`num_even_ctas`).
      ctas: which of these an item's number may have; what may have one only counts from the beginning.
    """
    num_ctas = num_even_ctas([duration for _, duration in items], num_ctas)
    loads, taken = np.zeros(num_ctas), [list[int]() for _ in range(num_ctas)]
    choices = [ctas(number) if ctas else range(num_ctas) for number, _ in items]
    for (_, duration), choice in zip(items, choices):
        if len(choice) == 1:
            loads[choice[0]] += duration
    for (number, duration), choice in zip(items, choices):
        cta = choice[int(np.argmin(loads[choice.start : choice.stop]))]
        if len(choice) > 1:
            loads[cta] += duration
        taken[cta].append(number)
    plan = np.zeros((num_ctas, 2 + max(map(len, taken))), np.int32)
    for row, numbers in zip(plan, taken):
        row[: 1 + len(numbers)] = len(numbers), *numbers
    return plan, float(loads.max())


def is_known_at_run_time(spec: AttentionSpec) -> bool:
    """Whether arrays tell which blocks are visited."""
    return spec.query_lengths or spec.key_lengths or spec.segments


def hides_by_causality_alone(spec: AttentionSpec) -> bool:
    """Whether nothing but a causal mask hides keys."""
    return not (spec.window or is_known_at_run_time(spec))


def may_see_nothing(spec: AttentionSpec) -> bool:
    """Whether there may be queries, not padding, that see no key."""
    left, _ = _window(spec)
    is_left_behind = left is not None and (spec.query_offset or spec.q.shape[1] - 1 - left >= spec.k.shape[1])
    sees_itself = spec.self_segments and spec.q.shape[1] == spec.k.shape[1] and not spec.query_offset
    return spec.key_lengths or is_left_behind or (spec.segments and not sees_itself)


def first_blind(spec: AttentionSpec, key_end: jax.Array) -> jax.Array:
    """From which place on queries see no key, for the window and the lengths: segments aside."""
    left, _ = _window(spec)
    beyond_keys = jnp.iinfo(jnp.int32).max if left is None else key_end + left
    return jnp.where(key_end <= 0, 0, beyond_keys)


def queries_inside(spec: AttentionSpec, extras: dict[str, jax.Array]) -> Bool[Array, "B T"]:
    """Which queries are not padding."""
    batch, num_queries = spec.q.shape[:2]
    if not spec.query_lengths:
        return jnp.ones((batch, num_queries), bool)
    place = jnp.arange(num_queries, dtype=jnp.int32) + extras.get("query_offset", 0)
    return place < extras["query_lengths"][:, None]


def keys_inside(spec: AttentionSpec, extras: dict[str, jax.Array]) -> Bool[Array, "B S"]:
    """Which keys are not padding."""
    batch, num_keys = spec.k.shape[:2]
    if not spec.key_lengths:
        return jnp.ones((batch, num_keys), bool)
    return jnp.arange(num_keys, dtype=jnp.int32) < extras["key_lengths"][:, None]


def _pairs_of_blocks(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> tuple[Bool[Array, "B Q K"], Bool[Array, "B Q K"]]:
    """Which blocks of queries and of keys may share a segment, and which are of one and the same.

    They may share one where the spans of their ids meet: of documents packed one after the other those are the ones
    that do.
    """

    def spans(ids: jax.Array, is_real: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
        """The least and the largest id of each block; the wrong way round where there is none."""
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
    """Along Y: the first block that meets and the end of these, the first of a run that is one, and the run's end.

    Of several runs, as there are of ids in no order, it is the first block of the first. All reductions are of the same
    arrays, which XLA makes one kernel.
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
    """What the segments leave of the keys, for each block of queries; computed by XLA before the kernel.

    Args:
      extras: the optional operands by name.

    Returns:
      For each block of queries: the first block of keys that may be seen and the end of these; the first of a run of
      blocks in which all ids are those of the queries, and the run's end.
    """
    return jnp.stack(_spans_of_blocks(*_pairs_of_blocks(spec, block_q, block_kv, extras)), axis=2).astype(jnp.int32)


def segment_query_blocks(
    spec: AttentionSpec, block_q: int, block_kv: int, extras: dict[str, jax.Array]
) -> Int32[Array, "B K 4"]:
    """What the segments leave of the queries, for each block of keys: as `segment_key_blocks`."""
    pairs = (jnp.swapaxes(x, 1, 2) for x in _pairs_of_blocks(spec, block_q, block_kv, extras))
    return jnp.stack(_spans_of_blocks(*pairs), axis=2).astype(jnp.int32)


def kernel_inputs(extras: dict[str, jax.Array], block_q: int, block_kv: int) -> dict[str, jax.Array]:
    """The optional operands as kernels read them, by name: the offset in an array, ids padded to whole blocks."""
    inputs = dict(extras)
    if "query_offset" in inputs:
        inputs["query_offset"] = inputs["query_offset"].reshape(1)
    for name, block in (("query_segments", block_q), ("key_segments", block_kv)):
        if name in inputs:
            inputs[name] = jnp.pad(inputs[name], ((0, 0), (0, -inputs[name].shape[1] % block)))
    return inputs


def query_offset(inputs: dict[str, Any]) -> jax.Array:
    """The first query's place in the sequence, for masks that count from its start, in a kernel."""
    return inputs["query_offset"][0] if "query_offset" in inputs else jnp.int32(0)


def ends_of(spec: AttentionSpec, inputs: dict[str, Any], batch: Any, offset: jax.Array) -> tuple[Any, Any]:
    """Where the queries end, a place in the sequence, and the keys, in a kernel."""
    query_end, key_end = spec.q.shape[1] + offset, jnp.int32(spec.k.shape[1])
    if spec.query_lengths:
        query_end = jnp.clip(inputs["query_lengths"][batch], 0, query_end)
    if spec.key_lengths:
        key_end = jnp.clip(inputs["key_lengths"][batch], 0, key_end)
    return query_end, key_end


def planned_offset(spec: AttentionSpec) -> int:
    """The first query's place in plans and models: where queries are a part of the sequence, one in the middle."""
    return max(0, spec.k.shape[1] - spec.q.shape[1]) // 2 if spec.query_offset else 0


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
    key_end: jax.Array | int | None = None,
) -> jax.Array:
    """As `mask`, in any block, and with the window and the lengths too: compares every place.

    Args:
      key_end: how many keys there are, where lengths are given. With keys in rows those beyond it are hidden, too, and
        none if it is None.
    """
    num_keys, columns = spec.k.shape[1], 8
    rows = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 0, layout=TILE)
    column = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 1, layout=TILE)
    left, right = _window(spec)
    # From and up to which of eight columns, counted from the block's first ones, places are seen.
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
        return part

    # Of eight columns a thread has the same two, whichever eight these are: it compares four numbers with constants.
    # (LLVM keeps the numbers of all the columns in registers, throughout the loop, where it sees them.)
    return jnp.concatenate([show(first) for first in range(0, s.shape[1], columns)], axis=1)


def hide_other_segments(s: jax.Array, row_ids: Any, column_ids: Any) -> jax.Array:
    """Hides the logits of rows and columns, queries and keys or the other way round, whose ids differ.

    Takes references to the block's ids.
    """
    columns = 8
    of_rows = lax.broadcast_in_dim(plgpu.load(row_ids, layout=ROWS, optimized=False), (s.shape[0], columns), [0])

    def show(first: int) -> jax.Array:
        ids = plgpu.load(column_ids.at[pl.ds(first, columns)], layout=COLUMNS, optimized=False)
        of_columns = lax.broadcast_in_dim(ids, (s.shape[0], columns), [1])
        return jnp.where(of_rows == of_columns, s[:, first : first + columns], -math.inf)

    return jnp.concatenate([show(first) for first in range(0, s.shape[1], columns)], axis=1)


def round_logit_gradients(ds: jax.Array, spec: AttentionSpec) -> jax.Array:
    """dS in 16 bits. In float16, which ends at 65504, it is scaled before; else what is computed of it, afterwards."""
    return (ds * spec.scale if spec.q.dtype == jnp.float16 else ds).astype(spec.q.dtype)


def gradient_scale(spec: AttentionSpec) -> float:
    """What dS K and dS^T Q of rounded dS lack."""
    return 1.0 if spec.q.dtype == jnp.float16 else spec.scale


def cap(s: jax.Array, spec: AttentionSpec) -> jax.Array:
    """The soft cap of logits that lack their scale, times log2(e): what exp2 takes.

    tanh x is 1 - 2 / (1 + e^2x), off by 2^-21 at most; the chip's own tanh is off by 2^-11, which a cap of some tens
    makes a percent of a probability. 1 / x is the square of rsqrt(x): one instruction, where a division is a dozen.
    """
    return _capped(_inverse(1.0 + jnp.exp2(s * _exponent(spec))), spec)


def cap_and_slope(s: jax.Array, spec: AttentionSpec) -> tuple[jax.Array, jax.Array]:
    """`cap`, and 1 - tanh² x, the cap's derivative by the scaled logits.

    It is 4 e^2x / (1 + e^2x)²: where tanh is almost 1, the difference has no digits left.
    """
    power = jnp.exp2(jnp.minimum(s * _exponent(spec), 60.0))  # Its square is finite; tanh is 1 long before.
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
