"""FlashAttention forward on Hopper tensor cores, in Pallas Mosaic GPU.

Algorithm. A persistent grid walks work items: two times `block_q` queries of one head of one batch element. A
producer warpgroup streams their queries, and blocks of keys and values, through rings of shared memory slots that
never stop: it is already loading the next item while this one is finished. Two consumer warpgroups take half of the
queries each, and keep a running maximum m, sum l and output O in registers (online softmax, base-2 exponentials
with the scale folded in). For a block of keys K_j and of values V_j:

    S = Q K_j^T        wgmma, fp32 accumulators
    m' = max(m, rowmax(c S)), P_j = exp2(c S - m'), l = exp2(m - m') l + rowsum(P_j)
    O = exp2(m - m') O + P_j V_j      wgmma with P in registers: S's layout is P's operand layout

To rescale O costs its whole time, as no product of a consumer runs beside it. With `lazy_rescale` m' is m unless the
row's maximum exceeds that by more than 8, and a warp none of whose rows has another m, as most often in all but an
item's first blocks, passes over it.

Of one consumer the products of two blocks are in flight at once, and its softmax runs beside the older one's. The other
consumer's products fill what gaps there are: the two fall into step by themselves, and turns would cost 2 %.

    consumer 0   softmax 0 | Q K_1  P_0 V_0 .            | Q K_2  P_1 V_1 .            |
                           |         . softmax 1 ....... |         . softmax 2 ....... |
    consumer 1         softmax 0 ...... | Q K_1  P_0 V_0 .            | Q K_2  P_1 V_1 .
                                        |         . softmax 1 ....... |         . softmax 2

The item's last P V is in flight together with the next item's first Q K^T (`bridge`). Results leave through staging
buffers by TMA, which nobody waits for before the next item's results.

With a causal mask, a window, lengths or segments, blocks that none of an item's queries sees are neither loaded nor
visited, and those that only other consumers' queries see a consumer passes over, unless there is a bridge. Blocks are
walked from the last one back: those at either end that a mask touches have loops of their own, and only these are
masked. Lengths and offsets are read in the kernel; what segments leave of the keys XLA tells before, a range of blocks
for each item. A query that sees no key has a sum of 0; it averages all values, which a kernel of its own
fills in (`mean`). Items come head by head, so that all CTAs read the same keys and values,
the longest of a head first; which CTA does which is planned before the launch, so that all end together. Where arrays
of lengths or segments tell how long they are, CTAs ask for one after the other, by a counter in global memory.
Head dimensions are padded to multiples of 64 by XLA, or of 32, lengths to multiples of 8; beyond these TMA reads zeros
and drops what it would write.

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.pallas.attention.layouts import ROWS, TILE, scale_rows, swizzle_span, transforms_of
from jaxkernels.pallas.attention.limits import features, least_head_multiple, pad_heads, padded_head_dims, unsupported
from jaxkernels.pallas.attention.logits import LOG2E, change, hide_other_segments, hide_unseen
from jaxkernels.pallas.attention.mean import fill_in_means
from jaxkernels.pallas.attention.planning import FLOPS_PER_SM, LAUNCH_SECONDS, balanced_plan, count_up, planned_offset
from jaxkernels.pallas.attention.rings import RING_BARRIER_BYTES, cluster_end, leave_cluster, slot_releases
from jaxkernels.pallas.attention.visibility import (
    blocks_of,
    blocks_within,
    ends_of,
    hides_by_causality_alone,
    is_known_at_run_time,
    kernel_inputs,
    key_iters,
    keys_seen_by_all,
    keys_seen_by_any,
    looks_back,
    may_see_nothing,
    query_offset,
    segment_key_blocks,
)

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 7

#: For so many consumers: registers of the producer's threads, of a consumer's, and of these for accumulators, logits
#: and probabilities.
_REGISTERS = {2: (24, 240, 184), 3: (32, 160, 120)}
#: What an item costs beside its steps, in steps.
_ITEM_STEPS = 0.7
#: How far, in powers of two, logits of a row may exceed its m before m follows them: P is at most 2^8, whose sums
#: float32 holds as well.
_MAX_GROWTH = 8.0

# The search space: what is tried along each knob, the usual setting first.
_BLOCK_QS = (64, 128)
_BLOCK_KVS = (128, 64, 192)
_STAGES = (2, 3, 4)
#: What a step takes beside its products: 128 keys at head dimension 128 take 1.7 us on an H200 (637 TFLOP/s), 1.35 us
#: of which are the products.
_STEP_SECONDS = 0.4e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_q: queries of one consumer warpgroup.
      block_kv: keys and values of one pipeline step.
      num_stages: slots of the key ring and of the value ring.
      num_q_slots: items whose queries are in shared memory: with one, the next item's are loaded once this one's last
        logits are computed.
      bridge: whether an item's first logits are computed together with the last output of the item before.
      num_consumers: consumer warpgroups of a CTA, 2 or 3.
      head_multiple: to multiples of which head dimensions are padded, 64 or 32; of 32, 64 bytes of a row are swizzled
        together, not 128.
      multicast: whether pairs of CTAs load keys and values for each other, which then come from L2 half as often. Each
        item is of both, and has twice as many queries; only where all see the same keys.
      lazy_rescale: whether the output is rescaled only where the maximum of some row of a warp has grown by more than
        2^8. Few blocks of keys leave little to pass over.
    """

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2
    num_q_slots: int = 1
    bridge: bool = True
    num_consumers: int = 2
    head_multiple: int = 64
    multicast: bool = False
    lazy_rescale: bool = True

    def __post_init__(self) -> None:
        check_fields("attention_forward[pallas]", self)
        rules = {
            "block_q and block_kv must be positive multiples of 64": (
                self.block_q % 64 or self.block_kv % 64 or min(self.block_q, self.block_kv) <= 0
            ),
            # A consumer waits for values while others are in use.
            "num_stages must be at least 2 and num_q_slots at least 1": self.num_stages < 2 or self.num_q_slots < 1,
            "num_consumers must be 2 or 3": self.num_consumers not in _REGISTERS,
            "head_multiple must be 64 or 32": self.head_multiple not in (64, 32),
        }
        for rule, is_broken in rules.items():
            if is_broken:
                raise ValueError(f"attention_forward[pallas]: {rule}; got {self}.")


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    head_dim = max(spec.q.shape[3], spec.v.shape[3])
    multiple = least_head_multiple(spec)
    if head_dim <= 64:
        # Three consumers hide the exponentials better; of short sequences and of documents their items leave more
        # undone: 8 documents of 1024 take 366 us for 477. Up to 2048 keys the test whether to rescale costs 1 to 3 %.
        is_short = spec.segments or (spec.causal and spec.k.shape[1] <= 1024)
        common: dict[str, Any] = dict(head_multiple=multiple, lazy_rescale=spec.k.shape[1] > 2048)
        if is_short:
            return (Config(**common),)
        return (Config(num_stages=3, bridge=False, num_consumers=3, **common),)
    whole = Config(num_stages=3 if max(padded_head_dims(spec, multiple)) < 128 else 2, head_multiple=multiple)
    if spec.v.shape[3] <= 128 and _num_store_slots(spec, whole) > 0:
        return (whole,)
    # Two stages of 128 keys fill shared memory at head dimension 192 with values of 128; at 256 the blocks must halve.
    # Beside a mask the products would wait for each other without the bridge (ptxas serialises them).
    return (Config(block_kv=64, bridge=spec.causal or not hides_by_causality_alone(spec)),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the shortlist, and the blocks whose tiles fit the registers and whose rings fit shared memory.

    A second slot for queries beside the usual rings. Items of more than 128 queries and blocks of 192 keys only where
    there are more than 128. Head dimensions up to 128 padded to multiples of 32 where that is less. Pairs of
    CTAs in full attention. The shortlist's other way of rescaling.
    """
    usual = shortlist(spec)
    yield from usual
    yield from [dataclasses.replace(config, lazy_rescale=not config.lazy_rescale) for config in usual]
    _, value_dim = padded_head_dims(spec)
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    for num_consumers, block_q, block_kv in itertools.product(_REGISTERS, _BLOCK_QS, _BLOCK_KVS):
        # The output and the logits in float32, the probabilities in 16 bits, over the 128 threads of a consumer.
        registers = block_q * (value_dim + block_kv * 3 // 2) // 128
        wasteful = (num_consumers * block_q > 128 and num_queries <= 128) or (block_kv > 128 and num_keys <= 128)
        if registers > _REGISTERS[num_consumers][2] or wasteful:
            continue
        rings = [Config(block_q, block_kv, n, num_consumers=num_consumers) for n in _STAGES]
        fits = [config for config in rings if _num_store_slots(spec, config) > 0]
        yield from fits
        if least_head_multiple(spec) == 32:
            yield from [dataclasses.replace(config, head_multiple=32) for config in fits]
        if _sees_all(spec) and num_queries > num_consumers * block_q:
            # At head dimension 256 a bridge leaves no register for the neighbour's barriers.
            changes = dict(multicast=True, bridge=value_dim <= 128)
            yield from [dataclasses.replace(config, **changes) for config in fits]
        more_queries = [dataclasses.replace(config, num_q_slots=2) for config in fits[:1]]
        yield from [config for config in more_queries if _num_store_slots(spec, config) > 0]


def _sees_all(spec: AttentionSpec) -> bool:
    return not spec.causal and hides_by_causality_alone(spec)


def _smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Queries, the rings, logsumexps and barriers, and one piece of each consumer's output."""
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    rows = _cta_rows(config)
    per_row = 2 * head_dim * config.num_q_slots + 2 * swizzle_span(value_dim) + 4
    slot = 2 * config.block_kv * (head_dim + value_dim)
    return rows * per_row + config.num_stages * slot + RING_BARRIER_BYTES


def _num_store_slots(spec: AttentionSpec, config: Config) -> int:
    """Pieces of a consumer's output that shared memory has room for, beside the rings; all of them at most."""
    _, value_dim = padded_head_dims(spec, config.head_multiple)
    columns = swizzle_span(value_dim)
    piece = 2 * _cta_rows(config) * columns
    room = spec.target.smem_bytes - (_smem_bytes(spec, config) - piece)
    return min(room // piece, value_dim // columns)


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Steps of all CTAs over the SMs, or the longest CTA's; the products of a step and what is beside them."""
    batch, num_queries, num_heads, _ = spec.q.shape
    rows = _cta_rows(config)
    ctas = _num_ctas(config) * batch * num_heads * pl.cdiv(num_queries, _rows(config))
    steps = _steps(spec, config)
    flops = 2 * rows * config.block_kv * sum(padded_head_dims(spec, config.head_multiple))
    seconds = flops / FLOPS_PER_SM + _STEP_SECONDS
    if min(steps) == max(steps):
        busiest = steps[0] * pl.cdiv(ctas, spec.target.num_sms)
    else:
        busiest = max(*steps, sum(steps) / len(steps) * ctas / spec.target.num_sms)
    return LAUNCH_SECONDS * max(1.0, ctas / spec.target.num_sms) + busiest * seconds


def _steps(spec: AttentionSpec, config: Config) -> list[int]:
    """For each block of queries: how many blocks of keys it visits, lengths and segments aside."""
    num_queries, num_keys, rows = spec.q.shape[1], spec.k.shape[1], _rows(config)
    offset = planned_offset(spec)
    steps = []
    for start in range(offset, offset + num_queries, rows):
        first, end = blocks_of(*keys_seen_by_any(spec, start, start + rows, num_keys), config.block_kv)
        steps.append(max(end - first, 1))
    return steps


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array):
    """Returns [out, lse]."""
    if config.multicast and not _sees_all(spec):
        asked = ", ".join((["a causal mask"] if spec.causal else []) + features(spec))
        raise ValueError(f"attention_forward[pallas]: {asked}: needs multicast=False; got {config}.")
    num_queries, head_dim = q.shape[1], v.shape[3]
    padded_head_dim, padded_value_dim = padded_head_dims(spec, config.head_multiple)
    q, k, v = pad_heads(q, padded_head_dim), pad_heads(k, padded_head_dim), pad_heads(v, padded_value_dim)
    batch, _, num_heads, _ = q.shape
    inputs = _inputs(spec, config, v, dict(zip(spec.extra_names, extras)))
    if is_known_at_run_time(spec):
        # The number of the first item that is no worker's own.
        num_workers = min(spec.target.num_sms, _num_items(spec, config))
        plan = jax.new_ref(jnp.full(1, num_workers, jnp.int32))
    else:
        plan = jnp.asarray(_plan(spec, config))
        num_workers = len(plan)
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config),
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype),
            # Whole blocks: Mosaic clips a store of contiguous bytes at the end of the array, not of the row.
            jax.ShapeDtypeStruct((batch, num_heads, num_queries + -num_queries % _rows(config)), jnp.float32),
        ],
        grid=(num_workers,),
        grid_names=("worker",),
        cluster=(_num_ctas(config),) if config.multicast else (),
        cluster_names=("cluster",) if config.multicast else (),
        num_threads=config.num_consumers + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            # Rows are reduced among the four threads that hold them.
            reduction_scratch_bytes=0,
        ),
    )
    out, lse = kernel(q, k, v, plan, inputs)
    if may_see_nothing(spec):
        out = fill_in_means(spec, out, lse, v, inputs)
    return [out[:, :num_queries, :, :head_dim], lse[:, :, :num_queries]]


def _inputs(spec: AttentionSpec, config: Config, v: jax.Array, extras: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What the kernel reads beside q, k, v and the plan, by name."""
    inputs = kernel_inputs(extras, _rows(config), config.block_kv)
    if spec.segments:
        inputs["segment_blocks"] = segment_key_blocks(spec, _rows(config), config.block_kv, extras)
    if spec.key_lengths:
        # The values of the block in which the keys end, zero from there on: 0 P is not 0 where padding is NaN.
        key_end = jnp.clip(extras["key_lengths"], 0, spec.k.shape[1])[:, None]
        row = key_end // config.block_kv * config.block_kv + jnp.arange(config.block_kv)
        edge = jnp.take_along_axis(v, row[:, :, None, None], axis=1, mode="clip")
        inputs["edge_values"] = jnp.where((row < key_end)[:, :, None, None], edge, 0)
    return inputs


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, config: Config) -> np.ndarray:
    """The items of each worker, a CTA or a pair of them (`balanced_plan`); an item's number is head * num_q_blocks +
    q_block, heads of all batch elements counted.

    They come head by head, the longest first; but a third of the blocks of queries, those that see least, are kept for
    the end and even out what is left.
    """
    batch, _, num_heads, _ = spec.q.shape
    heads, steps = batch * num_heads, _steps(spec, config)
    num_q_blocks = len(steps)
    num_last = num_q_blocks // 3 if spec.causal else 0
    items = [(q, head) for head in range(heads) for q in reversed(range(num_last, num_q_blocks))]
    items += [(q, head) for q in reversed(range(num_last)) for head in range(heads)]
    numbered = [(head * num_q_blocks + q_block, steps[q_block] + _ITEM_STEPS) for q_block, head in items]
    return balanced_plan(numbered, spec.target.num_sms // _num_ctas(config))[0]


def _num_items(spec: AttentionSpec, config: Config) -> int:
    return spec.q.shape[0] * spec.q.shape[2] * pl.cdiv(spec.q.shape[1], _rows(config))


def _num_ctas(config: Config) -> int:
    """That work on an item: a cluster of so many."""
    return 2 if config.multicast else 1


def _cta_rows(config: Config) -> int:
    """Queries of a CTA's share of an item."""
    return config.num_consumers * config.block_q


def _rows(config: Config) -> int:
    """Queries of a work item."""
    return _num_ctas(config) * _cta_rows(config)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A work item: queries of a head, and the blocks of keys to visit, which are those that they see any of.

    Attributes:
      batch, head: whose.
      q_base: the first query.
      end_block, first_block: one behind the last block, which is the first one visited, and the last one visited.
      key_end, query_end: how many keys there are, and where the queries end, places in the sequence both.
      same_segment: the first, and one behind the last, of blocks in which all ids are those of the queries.
    """

    batch: Any
    head: Any
    q_base: Any
    end_block: Any
    first_block: Any = 0
    key_end: Any = None
    query_end: Any = None
    same_segment: tuple[Any, Any] | None = None

    @property
    def num_blocks(self) -> Any:
        return self.end_block if isinstance(self.first_block, int) else self.end_block - self.first_block

    @property
    def last_block(self) -> Any:
        return self.end_block - 1


def _kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, plan_gmem: Any, *refs: Any, spec: AttentionSpec, config: Config
) -> None:
    extras, out_gmem, lse_gmem = refs
    num_consumers = config.num_consumers
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = config.block_q, config.block_kv
    num_stages, num_q_slots = config.num_stages, config.num_q_slots
    # Outputs are staged in shared memory and sent out in pieces of one swizzle span.
    store_columns = swizzle_span(value_dim)
    num_pieces, num_store_slots = value_dim // store_columns, _num_store_slots(spec, config)
    tile = lambda *shape: plgpu.SMEM(shape, dtype, transforms=transforms_of(shape[-1]))
    # Without these an item's blocks are all those up to its last one.
    is_plain = hides_by_causality_alone(spec)
    shared = ("cluster",) if config.multicast else None
    # Only arrays tell how long items take: the first is the worker's own, the others come in the order in which workers
    # ask for them.
    is_dealt = is_known_at_run_time(spec)
    # Whether a consumer passes over blocks at either end of an item's that only other consumers' queries see. A bridge
    # leads from an item's very last block to the first of the next.
    skips_blocks = not config.bridge and bool(spec.index_terms)

    def _attend(
        q_smem: Any,
        k_smem: Any,
        v_smem: Any,
        out_smem: Any,
        lse_smem: Any,
        q_full: Any,
        q_empty: Any,
        k_full: Any,
        v_full: Any,
        k_empty: Any,
        v_empty: Any,
        cluster_done: Any,
        number_smem: Any,
        number_full: Any,
        number_empty: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")
        offset = query_offset(extras)
        worker = lax.axis_index("worker")
        num_q_blocks, num_items = pl.cdiv(spec.q.shape[1], _rows(config)), _num_items(spec, config)
        # Of the item behind the last one, some item's.
        planned_number = lambda nth: plan_gmem[worker, nth + 1]

        def for_each_item(first: Any, count: Any, body: Any, carry: Any) -> None:
            """Calls `body(nth, (number, carry))`, which returns the next item's number and carry."""
            if is_dealt:
                # That the number is in range costs 60 bytes of spills at head dimension 128, if LLVM knows it.
                more = lambda state: lax.optimization_barrier(state[1][0]) < num_items
                lax.while_loop(more, lambda state: (state[0] + 1, body(*state)), (jnp.int32(0), (first, carry)))
            else:
                lax.fori_loop(0, count, body, (first, carry))

        def item_of(number: Any, consumer: Any = None) -> _Item:
            """An item; for a consumer that skips blocks, with those that its own queries see."""
            num_heads = jnp.int32(spec.q.shape[2])
            head, q_block = lax.div(number, jnp.int32(num_q_blocks)), lax.rem(number, jnp.int32(num_q_blocks))
            if is_dealt and spec.causal:
                q_block = num_q_blocks - 1 - q_block
            q_base = q_block * _rows(config)
            if config.multicast:
                q_base += lax.axis_index("cluster") * _cta_rows(config)
            if not skips_blocks:
                consumer = None
            if is_plain:
                last_rows = _rows(config) if consumer is None else (consumer + 1) * block_q
                num_blocks = key_iters(spec, q_base + last_rows + offset, block_kv)
                return _Item(lax.div(head, num_heads), lax.rem(head, num_heads), q_base, num_blocks)
            return visible_item(lax.div(head, num_heads), lax.rem(head, num_heads), q_base, consumer)

        def visible_item(batch: Any, head: Any, q_base: Any, consumer: Any) -> _Item:
            """The item at this place, whatever masks there are, with the blocks that its queries see, at least one; or
            a consumer's, at least one of these."""
            query_end, key_end = ends_of(spec, extras, batch, offset)
            start, some_segment, same_segment = q_base + offset, None, None
            if spec.segments:
                blocks_gmem, q_block = extras["segment_blocks"], lax.div(q_base, jnp.int32(_rows(config)))
                numbers = tuple(blocks_gmem[batch, q_block, i] for i in range(4))
                some_segment, same_segment = numbers[:2], numbers[2:]
            last_block = pl.cdiv(spec.k.shape[1], block_kv) - 1
            if spec.key_lengths:  # That of the last key: in blocks behind it values may be NaN.
                last_block = lax.div(jnp.maximum(key_end - 1, 0), jnp.int32(block_kv))

            def blocks_seen_from(start: Any, num_queries: int) -> tuple[Any, Any]:
                end = jnp.minimum(start + num_queries, query_end)
                first_block, end_block = blocks_of(*keys_seen_by_any(spec, start, end, key_end), block_kv)
                if some_segment is not None:
                    first_block = jnp.maximum(first_block, some_segment[0])
                    end_block = jnp.minimum(end_block, some_segment[1])
                elif spec.query_lengths:  # Padding has the one block that all have; of segments it has none.
                    end_block = jnp.where(end > start, end_block, 0)
                first_block = jnp.minimum(first_block, last_block)
                return first_block, jnp.maximum(end_block, first_block + 1)

            first_block, end_block = blocks_seen_from(start, _rows(config))
            if consumer is not None:
                own_first, own_end = blocks_seen_from(start + consumer * block_q, block_q)
                first_block = jnp.clip(own_first, first_block, end_block - 1)
                end_block = jnp.clip(own_end, first_block + 1, end_block)
            return _Item(batch, head, q_base, end_block, first_block, key_end, query_end, same_segment)

        following = lambda slot: jnp.where(slot == num_stages - 1, 0, slot + 1)
        q_slot_of = lambda nth, consumer: lax.rem(nth, jnp.int32(num_q_slots)) * num_consumers + consumer

        @pl.when(warpgroup == num_consumers)
        def _produce() -> None:
            plgpu.set_max_registers(_REGISTERS[num_consumers][0], action="decrease")

            def load_cut_values(item: _Item, kv_head: Any, load_whole: Any, block: Any, slot: Any) -> None:
                """Loads values, none of them from beyond the last key."""
                is_edge = block == lax.div(item.key_end, jnp.int32(block_kv))

                @pl.when(is_edge)
                def _load_edge() -> None:
                    plgpu.barrier_wait(v_empty.at[slot])
                    edge = extras["edge_values"].at[item.batch, :, kv_head]
                    plgpu.copy_gmem_to_smem(edge, v_smem.at[slot], v_full.at[slot])

                pl.when(~is_edge)(lambda: load_whole(block, slot))

            def take_number() -> Any:
                plgpu.barrier_wait(number_empty)
                count_up(plan_gmem.at[0], number_smem.at[0])
                plgpu.barrier_arrive(number_full)
                return number_smem[0]

            def load_item(nth: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                number, slot = carry
                item, next_number = item_of(number), None if is_dealt else planned_number(nth + 1)
                kv_head = lax.div(item.head, jnp.int32(spec.group_size))
                # JAX refuses slices that it sees end beyond the array, as the last block may: hide where they start.
                origin = worker * 0

                def load(gmem: Any, smem: Any, full: Any, empty: Any, block: Any, slot: Any) -> None:
                    plgpu.barrier_wait(empty.at[slot])
                    source = gmem.at[item.batch, pl.ds(origin + block * block_kv, block_kv), kv_head]
                    plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot], collective_axes=shared)

                load_keys = functools.partial(load, k_gmem, k_smem, k_full, k_empty)
                load_values = functools.partial(load, v_gmem, v_smem, v_full, v_empty)
                if spec.key_lengths:
                    load_values = functools.partial(load_cut_values, item, kv_head, load_values)

                last = item.last_block
                load_keys(last, slot)
                for consumer in range(num_consumers):
                    q_slot = q_slot_of(nth, consumer)
                    rows = (item.batch, pl.ds(item.q_base + consumer * block_q, block_q), item.head)
                    plgpu.barrier_wait(q_empty.at[q_slot])
                    plgpu.copy_gmem_to_smem(q_gmem.at[rows], q_smem.at[q_slot], q_full.at[q_slot])
                if is_dealt:
                    next_number = take_number()

                def load_step(i: Any, slot: Any) -> Any:
                    load_keys(last - i, following(slot))
                    load_values(last - i + 1, slot)
                    return following(slot)

                slot = lax.fori_loop(1, item.num_blocks, load_step, slot)
                load_values(item.first_block, slot)
                return next_number, following(slot)

            count, number = (None, worker) if is_dealt else (plan_gmem[worker, 0], planned_number(0))
            for_each_item(number, count, load_item, jnp.int32(0))

        @pl.when(warpgroup < num_consumers)
        def _consume() -> None:
            plgpu.set_max_registers(_REGISTERS[num_consumers][1], action="increase")
            consumer = warpgroup
            c = 1.0 if spec.score_terms else spec.scale * LOG2E
            spread = lambda x, shape: lax.broadcast_in_dim(x, shape, [0])
            # A thread has two of eight columns. What it adds up of these alone waits for the other threads of its row
            # until the item's end: 4 shuffles less a step, between its exponentials and the next product: 1.3 % at head
            # dimension 128, 4 % at 256. Of three consumers' 160 registers there are none for it: -3 %.
            keeps_eighths = num_consumers == 2

            # All slots are free.
            for slot in range(num_stages):
                plgpu.barrier_arrive(k_empty.at[slot])
                plgpu.barrier_arrive(v_empty.at[slot])
            for slot in range(num_q_slots):
                plgpu.barrier_arrive(q_empty.at[slot * num_consumers + consumer])
            if is_dealt:
                plgpu.barrier_arrive(number_empty)

            def taken_number() -> Any:
                plgpu.barrier_wait(number_full)
                number = number_smem[0]
                plgpu.barrier_arrive(number_empty)
                return number

            def multiply_keys(s_ref: Any, nth: Any, slot: Any) -> None:
                plgpu.wgmma(s_ref, q_smem.at[q_slot_of(nth, consumer)], k_smem.at[slot].transpose((1, 0)))

            def probabilities(s: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
                """P, its row sums (of every eighth column, see below), and the new maximum."""
                block_max = s.max(axis=1) * c
                new_max = jnp.maximum(row_max, block_max)
                if config.lazy_rescale:
                    new_max = jnp.where(block_max > row_max + _MAX_GROWTH, block_max, row_max)
                p = jnp.exp2(s * c - spread(new_max, s.shape))
                if not keeps_eighths:
                    return p, p.sum(axis=1), new_max
                eighths = [p[:, first : first + 8] for first in range(0, block_kv, 8)]
                return p, functools.reduce(jnp.add, eighths), new_max

            def hide(s: jax.Array, item: _Item, block: Any, *, maybe: bool) -> jax.Array:
                """The logits of a block: changed by score terms, and masked where the mask may touch it."""
                first_query = lambda: item.q_base + consumer * block_q + offset
                if spec.score_terms:
                    s = change(s, spec, lambda: (first_query(), block * block_kv))
                if not maybe:
                    return s
                if item.same_segment is not None:
                    s = hide_segments(s, item, block)
                if not masks_places:
                    return s
                key_end = item.key_end if spec.key_lengths else None
                return hide_unseen(s, spec, first_query(), block * block_kv, key_end=key_end)

            def hide_segments(s: jax.Array, item: _Item, block: Any) -> jax.Array:
                assert item.same_segment is not None
                first, end = item.same_segment
                query_ids = extras["query_segments"].at[item.batch, pl.ds(item.q_base + consumer * block_q, block_q)]
                key_ids = extras["key_segments"].at[item.batch, pl.ds(block * block_kv, block_kv)]
                differ = functools.partial(hide_other_segments, row_ids=query_ids, column_ids=key_ids)
                return lax.cond((block >= first) & (block < end), lambda s: s, differ, s)

            # The last block is masked whenever it may have to be, the others behind a test.
            is_ragged = spec.k.shape[1] % block_kv != 0
            masks_places = bool(spec.index_terms) or spec.key_lengths or is_ragged
            last_is_masked = masks_places or spec.segments
            # Finite: a row that sees nothing of its last blocks has no maximum yet, and -inf - -inf is no number.
            no_max = plgpu.layout_cast(jnp.full((block_q,), jnp.finfo(jnp.float32).min, jnp.float32), ROWS)

            def release_keys(nth: Any, item: _Item, slot: Any, block: Any) -> None:
                """The logits of a block are computed: of the item's last one, its queries are not needed any more."""
                plgpu.barrier_arrive(k_empty.at[slot])
                pl.when(block == item.first_block)(lambda: plgpu.barrier_arrive(q_empty.at[q_slot_of(nth, consumer)]))

            def begin(nth: Any, item: _Item, slot: Any) -> Any:
                """The first logits of an item, on their own."""
                block = item.last_block
                plgpu.barrier_wait(q_full.at[q_slot_of(nth, consumer)])
                plgpu.barrier_wait(k_full.at[slot])

                @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                def s(s_ref: Any) -> jax.Array:
                    multiply_keys(s_ref, nth, slot)
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

                release_keys(nth, item, slot, block)
                p, row_sum, row_max = probabilities(hide(s, item, block, maybe=last_is_masked), no_max)
                p, row_sum, row_max = lax.optimization_barrier((p, row_sum, row_max))
                plgpu.barrier_wait(v_full.at[slot])
                return slot, p.astype(dtype), row_max, row_sum

            def skip(num_blocks: Any, slot: Any) -> Any:
                """Passes over blocks, once they are there."""

                def skip_block(_: Any, slot: Any) -> Any:
                    for full, empty in ((k_full, k_empty), (v_full, v_empty)):
                        plgpu.barrier_wait(full.at[slot])
                        plgpu.barrier_arrive(empty.at[slot])
                    return following(slot)

                return lax.fori_loop(0, num_blocks, skip_block, slot)

            def attend(acc_ref: Any) -> None:
                def multiply(s_ref: Any, nth: Any, next_slot: Any, p: jax.Array, slot: Any) -> jax.Array:
                    """Adds P V of one block to the output, and returns the logits of the next."""
                    multiply_keys(s_ref, nth, next_slot)
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                    return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)

                def output(slot: Any) -> jax.Array:
                    acc = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return acc

                def step(nth: Any, item: _Item, masked: bool, i: Any, carry: Any) -> Any:
                    """The logits of the i-th block from the end, and the output of the one before."""
                    slot, p, row_max, row_sum = carry
                    next_slot = following(slot)
                    block = item.last_block - i

                    @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                    def result(s_ref: Any) -> Any:
                        plgpu.barrier_wait(k_full.at[next_slot])
                        s = multiply(s_ref, nth, next_slot, p, slot)
                        release_keys(nth, item, next_slot, block)
                        next_p, next_sum, new_max = probabilities(hide(s, item, block, maybe=masked), row_max)
                        alpha = jnp.exp2(row_max - new_max)
                        next_sum = row_sum * spread(alpha, row_sum.shape) + next_sum
                        next_p, next_sum, new_max, alpha = lax.optimization_barrier((next_p, next_sum, new_max, alpha))
                        # The next product's values. To wait for them here ends a block of instructions, and so keeps
                        # ptxas from moving the wait for this product up before the exponentials.
                        plgpu.barrier_wait(v_full.at[next_slot])
                        acc = output(slot)
                        acc_ref[...] = scale_rows(acc, alpha) if config.lazy_rescale else acc * spread(alpha, acc.shape)
                        return next_slot, next_p.astype(dtype), new_max, next_sum

                    return result

                def walk(nth: Any, number: Any, item: _Item, carry: Any) -> Any:
                    """All blocks but the last, which `begin` has seen to."""
                    if not is_plain:
                        return walk_edges(nth, number, carry)
                    first_unmasked = 1
                    if spec.causal and (spec.query_offset or block_kv % (block_q if skips_blocks else _rows(config))):
                        last_seen = jnp.minimum(item.q_base + consumer * block_q + offset, spec.k.shape[1] - 1)
                        num_unmasked = lax.div(last_seen + 1, jnp.int32(block_kv))
                        first_unmasked = jnp.maximum(1, item.num_blocks - num_unmasked)
                        carry = lax.fori_loop(1, first_unmasked, functools.partial(step, nth, item, True), carry)
                    return lax.fori_loop(
                        first_unmasked, item.num_blocks, functools.partial(step, nth, item, False), carry
                    )

                def walk_edges(nth: Any, number: Any, carry: Any) -> Any:
                    """As `walk`, with masked blocks at both ends."""
                    # Computed anew for each block that needs it: no register holds it all the while.
                    again = lambda: item_of(lax.optimization_barrier(number), consumer)
                    item = again()
                    first_query = item.q_base + consumer * block_q + offset
                    seen = keys_seen_by_all(spec, first_query, first_query + block_q, item.key_end)
                    first, end = blocks_within(*seen, block_kv)
                    if item.same_segment is not None:
                        first = jnp.maximum(first, item.same_segment[0])
                        end = jnp.minimum(end, item.same_segment[1])
                    num_blocks = item.num_blocks
                    first_unmasked = jnp.clip(item.end_block - end, 1, num_blocks)
                    end_unmasked = jnp.clip(item.end_block - first, first_unmasked, num_blocks)

                    def masked_step(i: Any, carry: Any) -> Any:
                        return step(nth, again(), True, i, carry)

                    def unmasked_step(i: Any, carry: Any) -> Any:
                        # Which blocks these are matters to terms only. Otherwise it is how many.
                        item = again() if spec.terms else _Item(None, None, None, num_blocks)
                        return step(nth, item, False, i, carry)

                    carry = lax.fori_loop(1, first_unmasked, masked_step, carry)
                    carry = lax.fori_loop(first_unmasked, end_unmasked, unmasked_step, carry)
                    if spec.segments or looks_back(spec):
                        carry = lax.fori_loop(end_unmasked, num_blocks, masked_step, carry)
                    return carry

                def end(number: Any, carry: Any) -> Any:
                    """The last output of an item, on its own."""
                    slot, p, row_max, row_sum = carry
                    normalizer = stage_lse(number, row_max, row_sum)
                    plgpu.wgmma(acc_ref, p, v_smem.at[slot])
                    store(number, output(slot), normalizer)
                    return following(slot)

                def bridge(nth: Any, number: Any, next_number: Any, carry: Any) -> Any:
                    """The last output of an item, and the first logits of the next.

                    After the last item these are computed from what shared memory holds, and dropped.
                    """
                    slot, p, row_max, row_sum = carry
                    next_slot = following(slot)
                    item = item_of(jnp.minimum(next_number, num_items - 1) if is_dealt else next_number)
                    block = item.last_block
                    if_any = pl.when(next_number < num_items if is_dealt else nth + 1 < count)
                    normalizer = stage_lse(number, row_max, row_sum)

                    @functools.partial(pl.run_scoped, s_ref=plgpu.ACC((block_q, block_kv), jnp.float32))
                    def result(s_ref: Any) -> Any:
                        @if_any
                        def _wait() -> None:
                            plgpu.barrier_wait(q_full.at[q_slot_of(nth + 1, consumer)])
                            plgpu.barrier_wait(k_full.at[next_slot])

                        s = multiply(s_ref, nth + 1, next_slot, p, slot)
                        if_any(lambda: release_keys(nth + 1, item, next_slot, block))
                        s = hide(s, item, block, maybe=last_is_masked)
                        next_p, next_sum, new_max = lax.optimization_barrier(probabilities(s, no_max))
                        if_any(lambda: plgpu.barrier_wait(v_full.at[next_slot]))
                        acc = output(slot)
                        next_p = lax.optimization_barrier(next_p.astype(dtype))
                        store(number, acc, normalizer)
                        return next_slot, next_p, new_max, next_sum

                    return result

                def stage_lse(number: Any, row_max: jax.Array, row_sum: jax.Array) -> jax.Array:
                    """Writes logsumexps to shared memory, which frees their registers; returns 1 / row_sum.

                    Of padding and of queries that see no key, 0.
                    """
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    if keeps_eighths:
                        row_sum = row_sum.sum(axis=1)
                    lse = (row_max + jnp.log2(row_sum)) * math.log(2)
                    normalizer = 1 / row_sum
                    if may_see_nothing(spec):
                        is_blind = row_sum == 0
                        lse, normalizer = jnp.where(is_blind, MASKED_LOGIT, lse), jnp.where(is_blind, 0.0, normalizer)
                    is_query = None
                    if spec.query_lengths:
                        item = item_of(number)
                        row = plgpu.broadcasted_iota(jnp.int32, (block_q,), 0, layout=ROWS)
                        is_query = row < item.query_end - (item.q_base + consumer * block_q + offset)
                        lse = jnp.where(is_query, lse, MASKED_LOGIT)
                    lse_smem.at[consumer][...] = lse
                    if is_query is not None:
                        normalizer = jnp.where(is_query, normalizer, 0.0)
                    return lax.optimization_barrier(normalizer)

                def store(number: Any, acc: jax.Array, normalizer: jax.Array) -> None:
                    """Sends the results of an item on their way, and clears the output."""
                    # Computed anew: no register holds it all the while.
                    item = item_of(lax.optimization_barrier(number))
                    rows = pl.ds(item.q_base + consumer * block_q, block_q)
                    for first in range(0, num_pieces, num_store_slots):
                        pieces = range(first, min(first + num_store_slots, num_pieces))
                        if first:
                            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        staging = [out_smem.at[consumer * num_store_slots + i] for i in range(len(pieces))]
                        for i, smem in zip(pieces, staging):
                            piece = acc[:, i * store_columns : (i + 1) * store_columns]
                            factor = spread(normalizer, piece.shape)
                            piece = piece * factor
                            if spec.query_lengths:  # Of padding, whatever its queries hold.
                                piece = jnp.where(factor == 0, 0.0, piece)
                            smem[...] = piece.astype(dtype)
                        plgpu.commit_smem()
                        for i, smem in zip(pieces, staging):
                            to = out_gmem.at[item.batch, rows, item.head, pl.ds(i * store_columns, store_columns)]
                            plgpu.copy_smem_to_gmem(smem, to, commit_group=False)
                        if first == 0:
                            to = lse_gmem.at[item.batch, item.head, rows]
                            plgpu.copy_smem_to_gmem(lse_smem.at[consumer], to, commit_group=False)
                        plgpu.commit_smem_to_gmem_group()
                    acc_ref[...] = plgpu.layout_cast(jnp.zeros_like(acc), TILE)

                def run_item(nth: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
                    number, carry = carry
                    item = item_of(number, consumer)
                    next_number = taken_number() if is_dealt else planned_number(nth + 1)
                    if not config.bridge:
                        carry = skip(item_of(number).end_block - item.end_block, carry) if skips_blocks else carry
                        carry = begin(nth, item, carry)
                    carry = walk(nth, number, item, carry)
                    if config.bridge:
                        return next_number, bridge(nth, number, next_number, carry)
                    slot = end(number, carry)
                    if skips_blocks and looks_back(spec):
                        again = lambda *args: item_of(lax.optimization_barrier(number), *args)
                        slot = skip(again(consumer).first_block - again().first_block, slot)
                    return next_number, slot

                count, number = (None, worker) if is_dealt else (plan_gmem[worker, 0], planned_number(0))
                slot = jnp.int32(0)
                first = begin(jnp.int32(0), item_of(number), slot) if config.bridge else slot
                for_each_item(number, count, run_item, first)

            pl.run_scoped(attend, plgpu.ACC((block_q, value_dim), jnp.float32))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        leave_cluster(cluster_done)

    numbers = [plgpu.SMEM((1,), jnp.int32), plgpu.Barrier(), plgpu.Barrier(num_arrivals=num_consumers)]
    pl.run_scoped(
        _attend,
        tile(num_q_slots * num_consumers, block_q, head_dim),
        tile(num_stages, block_kv, head_dim),
        tile(num_stages, block_kv, value_dim),
        tile(num_consumers * num_store_slots, block_q, store_columns),
        plgpu.SMEM((num_consumers, block_q), jnp.float32),
        # A consumer has queries of its own, and waits for its own only.
        plgpu.Barrier(num_barriers=num_q_slots * num_consumers),
        plgpu.Barrier(num_barriers=num_q_slots * num_consumers),
        plgpu.Barrier(num_barriers=num_stages),
        plgpu.Barrier(num_barriers=num_stages),
        slot_releases(num_stages, num_consumers, multicast=config.multicast),
        slot_releases(num_stages, num_consumers, multicast=config.multicast),
        cluster_end(num_consumers, multicast=config.multicast),
        *(numbers if is_dealt else [None] * len(numbers)),
        collective_axes="warpgroup",
    )
