"""FlashAttention forward on Hopper tensor cores, in Pallas Mosaic GPU.

Algorithm. A persistent grid walks work items: 64 queries for each consumer, of one head of one batch element. A
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

from jaxkernels.core import hardware
from jaxkernels.core.arguments import check_fields, check_rules
from jaxkernels.ops.attention.planning import forward_plan, forward_steps, longest_cta, too_few_queries
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import (
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
from jaxkernels.pallas.attention import costs
from jaxkernels.pallas.attention.counting import count_up
from jaxkernels.pallas.attention.layouts import ROWS, TILE, scale_rows, swizzle_span, transforms_of
from jaxkernels.pallas.attention.limits import features, least_head_multiple, pad_heads, padded_head_dims, unsupported
from jaxkernels.pallas.attention.logits import LOG2E, change, hide_other_segments, hide_unseen
from jaxkernels.pallas.attention.mean import fill_in_means
from jaxkernels.pallas.attention.rings import RING_BARRIER_BYTES, cluster_end, leave_cluster, slot_releases
from jaxkernels.pallas.names import named_kernel

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "shortlist", "unpreferred", "unsupported",
]  # fmt: skip

VERSION = 7

#: For so many consumers: registers of the producer's threads, of a consumer's, and of these for accumulators, logits
#: and probabilities.
_REGISTERS = {2: (24, 240, 184), 3: (32, 160, 120)}
#: What an item costs beside its steps, in steps.
_ITEM_STEPS = 0.7
#: How far, in powers of two, logits of a row may exceed its m before m follows them: P is at most 2^8, whose sums
#: float32 holds as well.
_MAX_GROWTH = 8.0

#: Queries of a consumer warpgroup in an item.
_BLOCK_Q = 64

# The search space: what is tried along each knob, the usual setting first.
_BLOCK_KVS = (128, 64)
_STAGES = (2, 3, 4)

#: A launch. Times of large problems do not tell it.
_LAUNCH_SECONDS = 4e-6


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      exps_per_sm: exponentials/s of one SM.
      unhidden_2, unhidden_3: with two and three consumers, the share of E^2 / P that is not hidden, where a step's
        exponentials take E seconds and its products P.
      step_seconds: what a step takes beside both.
      item_steps: what an item costs beside its steps, in steps.
      memory_bytes: bytes/s of operands and the output.
    """

    flops_per_sm: float
    exps_per_sm: float
    unhidden_2: float
    unhidden_3: float
    step_seconds: float
    item_steps: float
    memory_bytes: float


#: Fitted to 147 times on an H200, in docs/benchmarks (attention*.json, cuda/attention-forward.json). Attentions that
#: were left out of a fit are estimated with a median error of 2 %; the 90th percentile is 6 %. `unhidden_2` was not
#: fitted.
CONSTANTS = Constants(
    flops_per_sm=7.327e12,
    exps_per_sm=2.776e10,
    unhidden_2=0.7,
    unhidden_3=0.4941,
    step_seconds=1.486e-7,
    item_steps=0.7045,
    memory_bytes=3.31e12,
)


def unpreferred(spec: AttentionSpec) -> str | None:
    return too_few_queries(spec)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_kv: keys and values of one pipeline step, 64 or 128.
      num_stages: slots of the key ring and of the value ring.
      bridge: whether an item's first logits are computed together with the last output of the item before.
      num_consumers: consumer warpgroups of a CTA, 2 or 3.
      head_multiple: to multiples of which head dimensions are padded, 64 or 32; of 32, 64 bytes of a row are swizzled
        together, not 128.
      multicast: whether pairs of CTAs load keys and values for each other, which then come from L2 half as often. Each
        item is of both, and has twice as many queries; only where all see the same keys.
      lazy_rescale: whether the output is rescaled only where the maximum of some row of a warp has grown by more than
        2^8. Few blocks of keys leave little to pass over.
    """

    block_kv: int = 128
    num_stages: int = 2
    bridge: bool = True
    num_consumers: int = 2
    head_multiple: int = 64
    multicast: bool = False
    lazy_rescale: bool = True

    def __post_init__(self) -> None:
        check_fields("attention_forward[pallas]", self)
        rules = {
            "block_kv must be 64 or 128": self.block_kv not in _BLOCK_KVS,
            # A consumer waits for values while others are in use.
            "num_stages must be at least 2": self.num_stages < 2,
            "num_consumers must be 2 or 3": self.num_consumers not in _REGISTERS,
            "head_multiple must be 64 or 32": self.head_multiple not in (64, 32),
        }
        check_rules("attention_forward[pallas]", self, rules)


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

    Items of more than 128 queries only where there are more than 128. Head dimensions up to 128 padded to multiples of
    32 where that is less. Pairs of CTAs in full attention. The shortlist's other way of rescaling.
    """
    usual = shortlist(spec)
    yield from usual
    yield from [dataclasses.replace(config, lazy_rescale=not config.lazy_rescale) for config in usual]
    _, value_dim = padded_head_dims(spec)
    num_queries = spec.q.shape[1]
    for num_consumers, block_kv in itertools.product(_REGISTERS, _BLOCK_KVS):
        # The output and the logits in float32, the probabilities in 16 bits, over the 128 threads of a consumer.
        registers = _BLOCK_Q * (value_dim + block_kv * 3 // 2) // 128
        is_wasteful = num_consumers * _BLOCK_Q > 128 and num_queries <= 128
        if registers > _REGISTERS[num_consumers][2] or is_wasteful:
            continue
        rings = [Config(block_kv, n, num_consumers=num_consumers) for n in _STAGES]
        fits = [config for config in rings if _num_store_slots(spec, config) > 0]
        yield from fits
        if least_head_multiple(spec) == 32:
            yield from [dataclasses.replace(config, head_multiple=32) for config in fits]
        if _sees_all(spec) and num_queries > num_consumers * _BLOCK_Q:
            # At head dimension 256 a bridge leaves no register for the neighbour's barriers.
            changes = dict(multicast=True, bridge=value_dim <= 128)
            yield from [dataclasses.replace(config, **changes) for config in fits]


def _sees_all(spec: AttentionSpec) -> bool:
    return not spec.causal and hides_by_causality_alone(spec)


def _smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Queries, the rings, logsumexps and barriers, and one piece of each consumer's output."""
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    rows = _cta_rows(config)
    per_row = 2 * head_dim + 2 * swizzle_span(value_dim) + 4
    slot = 2 * config.block_kv * (head_dim + value_dim)
    return rows * per_row + config.num_stages * slot + RING_BARRIER_BYTES


def _num_store_slots(spec: AttentionSpec, config: Config) -> int:
    """Pieces of a consumer's output that shared memory has room for, beside the rings; all of them at most."""
    _, value_dim = padded_head_dims(spec, config.head_multiple)
    columns = swizzle_span(value_dim)
    piece = 2 * _cta_rows(config) * columns
    room = spec.target.smem_bytes - (_smem_bytes(spec, config) - piece)
    return min(room // piece, value_dim // columns)


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Steps of all CTAs over the SMs, or of the longest CTA: the products of a step, and the softmax beside them."""
    rows = _cta_rows(config)
    logits = rows * config.block_kv
    products = 2 * logits * sum(padded_head_dims(spec, config.head_multiple)) / constants.flops_per_sm
    exps = logits / constants.exps_per_sm
    unhidden = {2: constants.unhidden_2, 3: constants.unhidden_3}[config.num_consumers]
    step = products + unhidden * exps**2 / products + constants.step_seconds
    num_streams, num_ctas = spec.q.shape[0] * spec.q.shape[2], spec.target.num_sms // _num_ctas(config)
    busiest = longest_cta(_steps(spec, config), num_streams, num_ctas, constants.item_steps)
    num_bytes = sum(x.num_bytes for x in (spec.q, spec.k, spec.v, *spec.results("attention_forward")))
    return _LAUNCH_SECONDS + hardware.soft_max(busiest * step, num_bytes / constants.memory_bytes)


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    return costs.not_estimated(spec, config.head_multiple)


def _steps(spec: AttentionSpec, config: Config) -> tuple[int, ...]:
    return forward_steps(spec, _rows(config), config.block_kv)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out, lse]."""
    if config.multicast and not _sees_all(spec):
        asked = ", ".join((["a causal mask"] if spec.causal else []) + features(spec))
        raise ValueError(f"attention_forward[pallas]: {asked}: needs multicast=False; got {config}.")
    named = spec.named("attention_forward", operands)
    q, k, v = (named[name] for name in ("q", "k", "v"))
    num_queries, head_dim = q.shape[1], v.shape[3]
    padded_head_dim, padded_value_dim = padded_head_dims(spec, config.head_multiple)
    q, k, v = pad_heads(q, padded_head_dim), pad_heads(k, padded_head_dim), pad_heads(v, padded_value_dim)
    batch, _, num_heads, _ = q.shape
    inputs = _inputs(spec, config, v, {name: named[name] for name in spec.extra_names})
    if is_known_at_run_time(spec):
        # The number of the first item that is no worker's own.
        num_workers = min(spec.target.num_sms, _num_items(spec, config))
        plan = jax.new_ref(jnp.full(1, num_workers, jnp.int32))
    else:
        plan = jnp.asarray(_plan(spec, config))
        num_workers = len(plan)
    kernel = plgpu.kernel(
        named_kernel("attention_forward", _kernel, spec=spec, config=config),
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
    """The items of each worker, a CTA or a pair of them."""
    return forward_plan(spec, _steps(spec, config), spec.target.num_sms // _num_ctas(config), _ITEM_STEPS)


def _num_items(spec: AttentionSpec, config: Config) -> int:
    return spec.q.shape[0] * spec.q.shape[2] * pl.cdiv(spec.q.shape[1], _rows(config))


def _num_ctas(config: Config) -> int:
    """That work on an item: a cluster of so many."""
    return 2 if config.multicast else 1


def _cta_rows(config: Config) -> int:
    """Queries of a CTA's share of an item."""
    return config.num_consumers * _BLOCK_Q


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


@dataclasses.dataclass(frozen=True)
class _Gmem:
    """Operands and results in global memory.

    Attributes:
      plan: the items of each worker (`_plan`), or a counter from which workers take numbers of items.
      inputs: those of `_inputs`.
    """

    q: Any
    k: Any
    v: Any
    plan: Any
    inputs: dict[str, Any]
    out: Any
    lse: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Smem:
    """Buffers and barriers of a CTA.

    Attributes:
      number_smem: the number of the next item, where workers take these from a counter; else None, as its barriers.
      cluster_done: None without a cluster.
    """

    q_smem: Any
    k_smem: Any
    v_smem: Any
    out_smem: Any
    lse_smem: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    v_full: Any
    k_empty: Any
    v_empty: Any
    cluster_done: Any
    number_smem: Any
    number_full: Any
    number_empty: Any


def _allocations(spec: AttentionSpec, config: Config, gmem: _Gmem) -> _Smem:
    num_consumers, num_stages = config.num_consumers, config.num_stages
    head_dim, value_dim = gmem.q.shape[3], gmem.v.shape[3]
    tile = lambda *shape: plgpu.SMEM(shape, gmem.q.dtype, transforms=transforms_of(shape[-1]))
    num_store_slots, is_dealt = _num_store_slots(spec, config), is_known_at_run_time(spec)
    return _Smem(
        q_smem=tile(num_consumers, _BLOCK_Q, head_dim),
        k_smem=tile(num_stages, config.block_kv, head_dim),
        v_smem=tile(num_stages, config.block_kv, value_dim),
        # Outputs are staged here and sent out in pieces of one swizzle span.
        out_smem=tile(num_consumers * num_store_slots, _BLOCK_Q, swizzle_span(value_dim)),
        lse_smem=plgpu.SMEM((num_consumers, _BLOCK_Q), jnp.float32),
        # A consumer has queries of its own, and waits for its own only.
        q_full=plgpu.Barrier(num_barriers=num_consumers),
        q_empty=plgpu.Barrier(num_barriers=num_consumers),
        k_full=plgpu.Barrier(num_barriers=num_stages),
        v_full=plgpu.Barrier(num_barriers=num_stages),
        k_empty=slot_releases(num_stages, num_consumers, multicast=config.multicast),
        v_empty=slot_releases(num_stages, num_consumers, multicast=config.multicast),
        cluster_done=cluster_end(num_consumers, multicast=config.multicast),
        number_smem=plgpu.SMEM((1,), jnp.int32) if is_dealt else None,
        number_full=plgpu.Barrier() if is_dealt else None,
        number_empty=plgpu.Barrier(num_arrivals=num_consumers) if is_dealt else None,
    )


def _kernel(*refs: Any, spec: AttentionSpec, config: Config) -> None:
    gmem = _Gmem(*refs)

    def attend(smem: _Smem) -> None:
        warpgroup = lax.axis_index("warpgroup")
        cta = _Cta(spec, config, gmem, smem, query_offset(gmem.inputs), lax.axis_index("worker"))
        pl.when(warpgroup == config.num_consumers)(lambda: _produce(cta))
        pl.when(warpgroup < config.num_consumers)(lambda: _consume(cta, warpgroup))
        leave_cluster(smem.cluster_done)

    pl.run_scoped(attend, _allocations(spec, config, gmem), collective_axes="warpgroup")


@dataclasses.dataclass(frozen=True)
class _Cta:
    """A CTA, and the items that its warpgroups walk.

    Attributes:
      offset: the first query's place in the sequence.
      worker: the CTA's number; a cluster's where CTAs come in pairs.
    """

    spec: AttentionSpec
    config: Config
    gmem: _Gmem
    smem: _Smem
    offset: Any
    worker: Any

    @property
    def is_dealt(self) -> bool:
        """Whether only arrays tell how long items take. The first item is then the worker's own. The others come in the
        order in which workers ask for them."""
        return is_known_at_run_time(self.spec)

    @property
    def skips_blocks(self) -> bool:
        """Whether a consumer passes over blocks at either end of an item's that only other consumers' queries see. A
        bridge leads from an item's very last block to the first of the next."""
        return not self.config.bridge and bool(self.spec.index_terms)

    @property
    def num_items(self) -> int:
        return _num_items(self.spec, self.config)

    def following(self, slot: Any) -> Any:
        return jnp.where(slot == self.config.num_stages - 1, 0, slot + 1)

    def planned_number(self, nth: Any) -> Any:
        """The number of the worker's nth item; behind the last one, some item's."""
        return self.gmem.plan[self.worker, nth + 1]

    def first_item(self) -> tuple[Any, Any]:
        """How many items there are, or None if only a counter tells, and the first one's number."""
        if self.is_dealt:
            return None, self.worker
        return self.gmem.plan[self.worker, 0], self.planned_number(0)

    def for_each_item(self, first: Any, count: Any, body: Any, carry: Any) -> None:
        """Calls `body(nth, (number, carry))`, which returns the next item's number and carry."""
        if self.is_dealt:
            # That the number is in range costs 60 bytes of spills at head dimension 128, if LLVM knows it.
            more = lambda state: lax.optimization_barrier(state[1][0]) < self.num_items
            lax.while_loop(more, lambda state: (state[0] + 1, body(*state)), (jnp.int32(0), (first, carry)))
        else:
            lax.fori_loop(0, count, body, (first, carry))

    def item(self, number: Any, consumer: Any = None) -> _Item:
        """An item; for a consumer that skips blocks, with those that its own queries see."""
        spec, config = self.spec, self.config
        num_heads, num_q_blocks = jnp.int32(spec.q.shape[2]), pl.cdiv(spec.q.shape[1], _rows(config))
        head, q_block = lax.div(number, jnp.int32(num_q_blocks)), lax.rem(number, jnp.int32(num_q_blocks))
        if self.is_dealt and spec.causal:
            q_block = num_q_blocks - 1 - q_block
        q_base = self.q_base_of(q_block)
        if not self.skips_blocks:
            consumer = None
        if hides_by_causality_alone(spec):
            last_rows = _rows(config) if consumer is None else (consumer + 1) * _BLOCK_Q
            num_blocks = key_iters(spec, q_base + last_rows + self.offset, config.block_kv)
            return _Item(lax.div(head, num_heads), lax.rem(head, num_heads), q_base, num_blocks)
        return self._visible_item(lax.div(head, num_heads), lax.rem(head, num_heads), q_base, consumer)

    def q_base_of(self, q_block: Any) -> Any:
        """The first of the CTA's own queries in an item's block of queries."""
        first = q_block * _rows(self.config)
        if self.config.multicast:
            first += lax.axis_index("cluster") * _cta_rows(self.config)
        return first

    def _visible_item(self, batch: Any, head: Any, q_base: Any, consumer: Any) -> _Item:
        """The item at this place, whatever masks there are, with the blocks that its queries see, at least one; or a
        consumer's, at least one of these."""
        spec, config, inputs = self.spec, self.config, self.gmem.inputs
        block_kv = config.block_kv
        query_end, key_end = ends_of(spec, inputs, batch, self.offset)
        start, some_segment, same_segment = q_base + self.offset, None, None
        if spec.segments:
            blocks_gmem, q_block = inputs["segment_blocks"], lax.div(q_base, jnp.int32(_rows(config)))
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
            own = blocks_seen_from(start + consumer * _BLOCK_Q, _BLOCK_Q)
            first_block, end_block = _cut_to(first_block, end_block, *own)
        return _Item(batch, head, q_base, end_block, first_block, key_end, query_end, same_segment)


def _cut_to(first_block: Any, end_block: Any, own_first: Any, own_end: Any) -> tuple[Any, Any]:
    """A consumer's own range of blocks, cut to the item's range; at least one block."""
    own_first = jnp.clip(own_first, first_block, end_block - 1)
    return own_first, jnp.clip(own_end, own_first + 1, end_block)


# The producer.


def _produce(cta: _Cta) -> None:
    """Streams the queries of each item, and its blocks of keys and values from the last one back."""
    plgpu.set_max_registers(_REGISTERS[cta.config.num_consumers][0], action="decrease")
    count, number = cta.first_item()
    cta.for_each_item(number, count, functools.partial(_load_item, cta), jnp.int32(0))


def _load_item(cta: _Cta, nth: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    number, slot = carry
    gmem, smem = cta.gmem, cta.smem
    item, next_number = cta.item(number), None if cta.is_dealt else cta.planned_number(nth + 1)
    kv_head = lax.div(item.head, jnp.int32(cta.spec.group_size))
    load = functools.partial(_load_block, cta, item, kv_head)
    # JAX refuses slices that it sees end beyond the array, as the last block may: hide where they start.
    origin = cta.worker * 0
    load_keys = functools.partial(load, origin, gmem.k, smem.k_smem, smem.k_full, smem.k_empty)
    load_values = functools.partial(load, origin, gmem.v, smem.v_smem, smem.v_full, smem.v_empty)
    if cta.spec.key_lengths:
        load_values = functools.partial(_load_cut_values, cta, item, kv_head, load_values)

    last = item.last_block
    load_keys(last, slot)
    for consumer in range(cta.config.num_consumers):
        rows = (item.batch, pl.ds(item.q_base + consumer * _BLOCK_Q, _BLOCK_Q), item.head)
        plgpu.barrier_wait(smem.q_empty.at[consumer])
        plgpu.copy_gmem_to_smem(gmem.q.at[rows], smem.q_smem.at[consumer], smem.q_full.at[consumer])
    if cta.is_dealt:
        next_number = _take_number(cta)

    def load_step(i: Any, slot: Any) -> Any:
        load_keys(last - i, cta.following(slot))
        load_values(last - i + 1, slot)
        return cta.following(slot)

    slot = lax.fori_loop(1, item.num_blocks, load_step, slot)
    load_values(item.first_block, slot)
    return next_number, cta.following(slot)


def _load_block(
    cta: _Cta, item: _Item, kv_head: Any, origin: Any, gmem: Any, smem: Any, full: Any, empty: Any, block: Any,
    slot: Any,
) -> None:  # fmt: skip
    """Loads a block of keys or of values into a slot of its ring."""
    block_kv = cta.config.block_kv
    plgpu.barrier_wait(empty.at[slot])
    source = gmem.at[item.batch, pl.ds(origin + block * block_kv, block_kv), kv_head]
    shared = ("cluster",) if cta.config.multicast else None
    plgpu.copy_gmem_to_smem(source, smem.at[slot], full.at[slot], collective_axes=shared)


def _load_cut_values(cta: _Cta, item: _Item, kv_head: Any, load_whole: Any, block: Any, slot: Any) -> None:
    """Loads values, none of them from beyond the last key."""
    smem = cta.smem
    is_edge = block == lax.div(item.key_end, jnp.int32(cta.config.block_kv))

    @pl.when(is_edge)
    def _load_edge() -> None:
        plgpu.barrier_wait(smem.v_empty.at[slot])
        edge = cta.gmem.inputs["edge_values"].at[item.batch, :, kv_head]
        plgpu.copy_gmem_to_smem(edge, smem.v_smem.at[slot], smem.v_full.at[slot])

    pl.when(~is_edge)(lambda: load_whole(block, slot))


def _take_number(cta: _Cta) -> Any:
    """The number of the next item, from the counter; the consumers get it, too."""
    plgpu.barrier_wait(cta.smem.number_empty)
    count_up(cta.gmem.plan.at[0], cta.smem.number_smem.at[0])
    plgpu.barrier_arrive(cta.smem.number_full)
    return cta.smem.number_smem[0]


# The consumers.


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """A consumer warpgroup, which has 64 queries of each item.

    What loops carry is a slot of the rings, P of the block in it, the running maxima and the sums of the rows.

    Attributes:
      index: its number.
      no_max: maxima of rows that have seen nothing yet.
      acc_ref: the output of the item under way.
    """

    cta: _Cta
    index: Any
    no_max: jax.Array
    acc_ref: Any

    @property
    def spec(self) -> AttentionSpec:
        return self.cta.spec

    @property
    def config(self) -> Config:
        return self.cta.config

    @property
    def smem(self) -> _Smem:
        return self.cta.smem

    @property
    def dtype(self) -> Any:
        return self.cta.gmem.q.dtype

    @property
    def logits(self) -> Any:
        """An accumulator of logits."""
        return plgpu.ACC((_BLOCK_Q, self.config.block_kv), jnp.float32)

    @property
    def keeps_eighths(self) -> bool:
        """Whether a thread, which has two of eight columns, adds up these alone, and waits for the other threads of its
        row at the item's end only. That is 4 shuffles less a step, between its exponentials and the next product: 1.3 %
        at head dimension 128, 4 % at 256. Of three consumers' 160 registers there are none for it: -3 %."""
        return self.config.num_consumers == 2

    @property
    def masks_places(self) -> bool:
        is_ragged = self.spec.k.shape[1] % self.config.block_kv != 0
        return bool(self.spec.index_terms) or self.spec.key_lengths or is_ragged

    @property
    def last_is_masked(self) -> bool:
        """The last block is masked whenever it may have to be, the others behind a test."""
        return self.masks_places or self.spec.segments

    def first_query(self, item: _Item) -> Any:
        """The place of its first query in the sequence."""
        return item.q_base + self.index * _BLOCK_Q + self.cta.offset


def _consume(cta: _Cta, index: Any) -> None:
    config, smem = cta.config, cta.smem
    plgpu.set_max_registers(_REGISTERS[config.num_consumers][1], action="increase")
    # All slots are free.
    for slot in range(config.num_stages):
        plgpu.barrier_arrive(smem.k_empty.at[slot])
        plgpu.barrier_arrive(smem.v_empty.at[slot])
    plgpu.barrier_arrive(smem.q_empty.at[index])
    if cta.is_dealt:
        plgpu.barrier_arrive(smem.number_empty)
    # Finite: a row that sees nothing of its last blocks has no maximum yet, and -inf - -inf is no number.
    no_max = plgpu.layout_cast(jnp.full((_BLOCK_Q,), jnp.finfo(jnp.float32).min, jnp.float32), ROWS)
    attend = lambda acc_ref: _attend(_Consumer(cta, index, no_max, acc_ref))
    pl.run_scoped(attend, plgpu.ACC((_BLOCK_Q, cta.gmem.v.shape[3]), jnp.float32))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _attend(consumer: _Consumer) -> None:
    cta, bridges = consumer.cta, consumer.config.bridge
    count, number = cta.first_item()
    slot = jnp.int32(0)
    first = _begin(consumer, cta.item(number), slot) if bridges else slot
    run_item = functools.partial(_run_item, consumer, count)
    cta.for_each_item(number, count, run_item, first)


def _run_item(consumer: _Consumer, count: Any, nth: Any, carry: tuple[Any, Any]) -> tuple[Any, Any]:
    number, carry = carry
    cta = consumer.cta
    item = cta.item(number, consumer.index)
    next_number = _taken_number(cta) if cta.is_dealt else cta.planned_number(nth + 1)
    if consumer.config.bridge:
        carry = _walk(consumer, number, item, carry)
        return next_number, _bridge(consumer, nth, number, next_number, count, carry)
    slot = _skip_later_blocks(consumer, number, item, carry)
    carry = _walk(consumer, number, item, _begin(consumer, item, slot))
    slot = _end(consumer, number, carry)
    return next_number, _skip_earlier_blocks(consumer, number, slot)


def _taken_number(cta: _Cta) -> Any:
    plgpu.barrier_wait(cta.smem.number_full)
    number = cta.smem.number_smem[0]
    plgpu.barrier_arrive(cta.smem.number_empty)
    return number


def _skip_later_blocks(consumer: _Consumer, number: Any, item: _Item, slot: Any) -> Any:
    """Passes over the item's last blocks, which only other consumers' queries see; they come first."""
    cta = consumer.cta
    return _skip(cta, cta.item(number).end_block - item.end_block, slot) if cta.skips_blocks else slot


def _skip_earlier_blocks(consumer: _Consumer, number: Any, slot: Any) -> Any:
    """Passes over the item's first blocks, which only other consumers' queries see; they come last."""
    cta = consumer.cta
    if not (cta.skips_blocks and looks_back(consumer.spec)):
        return slot
    again = lambda *args: cta.item(lax.optimization_barrier(number), *args)
    return _skip(cta, again(consumer.index).first_block - again().first_block, slot)


def _skip(cta: _Cta, num_blocks: Any, slot: Any) -> Any:
    """Passes over blocks, once they are there."""
    smem = cta.smem

    def skip_block(_: Any, slot: Any) -> Any:
        for full, empty in ((smem.k_full, smem.k_empty), (smem.v_full, smem.v_empty)):
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_arrive(empty.at[slot])
        return cta.following(slot)

    return lax.fori_loop(0, num_blocks, skip_block, slot)


def _begin(consumer: _Consumer, item: _Item, slot: Any) -> Any:
    """The first logits of an item, on their own."""
    smem, block = consumer.smem, item.last_block
    plgpu.barrier_wait(smem.q_full.at[consumer.index])
    plgpu.barrier_wait(smem.k_full.at[slot])

    @functools.partial(pl.run_scoped, s_ref=consumer.logits)
    def s(s_ref: Any) -> jax.Array:
        _multiply_keys(consumer, s_ref, slot)
        return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

    _release_keys(consumer, item, slot, block)
    s = _changed_and_masked(consumer, s, item, block, maybe=consumer.last_is_masked)
    p, row_sum, row_max = _softmax(consumer, s, consumer.no_max)
    p, row_sum, row_max = lax.optimization_barrier((p, row_sum, row_max))
    plgpu.barrier_wait(smem.v_full.at[slot])
    return slot, p.astype(consumer.dtype), row_max, row_sum


def _walk(consumer: _Consumer, number: Any, item: _Item, carry: Any) -> Any:
    """All blocks but the last, which `_begin` has seen to."""
    spec, config = consumer.spec, consumer.config
    if not hides_by_causality_alone(spec):
        return _walk_edges(consumer, number, carry)
    first_unmasked = 1
    queries_at_once = _BLOCK_Q if consumer.cta.skips_blocks else _rows(config)
    if spec.causal and (spec.query_offset or config.block_kv % queries_at_once):
        last_seen = jnp.minimum(consumer.first_query(item), spec.k.shape[1] - 1)
        num_unmasked = lax.div(last_seen + 1, jnp.int32(config.block_kv))
        first_unmasked = jnp.maximum(1, item.num_blocks - num_unmasked)
        carry = lax.fori_loop(1, first_unmasked, functools.partial(_step, consumer, item, True), carry)
    unmasked_step = functools.partial(_step, consumer, item, False)
    return lax.fori_loop(first_unmasked, item.num_blocks, unmasked_step, carry)


def _walk_edges(consumer: _Consumer, number: Any, carry: Any) -> Any:
    """As `_walk`, with masked blocks at both ends."""
    spec = consumer.spec
    # Computed anew for each block that needs it: no register holds it all the while.
    again = lambda: consumer.cta.item(lax.optimization_barrier(number), consumer.index)
    item = again()
    first_unmasked, end_unmasked = _unmasked_steps(consumer, item)
    num_blocks = item.num_blocks

    def masked_step(i: Any, carry: Any) -> Any:
        return _step(consumer, again(), True, i, carry)

    def unmasked_step(i: Any, carry: Any) -> Any:
        # Which blocks these are matters to terms only. Otherwise it is how many.
        item = again() if spec.terms else _Item(None, None, None, num_blocks)
        return _step(consumer, item, False, i, carry)

    carry = lax.fori_loop(1, first_unmasked, masked_step, carry)
    carry = lax.fori_loop(first_unmasked, end_unmasked, unmasked_step, carry)
    if spec.segments or looks_back(spec):
        carry = lax.fori_loop(end_unmasked, num_blocks, masked_step, carry)
    return carry


def _unmasked_steps(consumer: _Consumer, item: _Item) -> tuple[Any, Any]:
    """The steps after the first one whose blocks all of the consumer's queries see, counted from the last block."""
    first_query = consumer.first_query(item)
    seen = keys_seen_by_all(consumer.spec, first_query, first_query + _BLOCK_Q, item.key_end)
    first, end = blocks_within(*seen, consumer.config.block_kv)
    if item.same_segment is not None:
        first = jnp.maximum(first, item.same_segment[0])
        end = jnp.minimum(end, item.same_segment[1])
    num_blocks = item.num_blocks
    first_unmasked = jnp.clip(item.end_block - end, 1, num_blocks)
    return first_unmasked, jnp.clip(item.end_block - first, first_unmasked, num_blocks)


def _step(consumer: _Consumer, item: _Item, masked: bool, i: Any, carry: Any) -> Any:
    """The logits of the i-th block from the end, and the output of the one before."""
    slot, p, row_max, row_sum = carry
    smem, acc_ref = consumer.smem, consumer.acc_ref
    next_slot = consumer.cta.following(slot)
    block = item.last_block - i

    @functools.partial(pl.run_scoped, s_ref=consumer.logits)
    def result(s_ref: Any) -> Any:
        plgpu.barrier_wait(smem.k_full.at[next_slot])
        s = _multiply(consumer, s_ref, next_slot, p, slot)
        _release_keys(consumer, item, next_slot, block)
        s = _changed_and_masked(consumer, s, item, block, maybe=masked)
        next_p, next_sum, new_max = _softmax(consumer, s, row_max)
        alpha = jnp.exp2(row_max - new_max)
        next_sum = row_sum * _spread(alpha, row_sum.shape) + next_sum
        next_p, next_sum, new_max, alpha = lax.optimization_barrier((next_p, next_sum, new_max, alpha))
        # The next product's values. To wait for them here ends a block of instructions, and so keeps ptxas from moving
        # the wait for this product up before the exponentials.
        plgpu.barrier_wait(smem.v_full.at[next_slot])
        acc = _output(consumer, slot)
        acc_ref[...] = scale_rows(acc, alpha) if consumer.config.lazy_rescale else acc * _spread(alpha, acc.shape)
        return next_slot, next_p.astype(consumer.dtype), new_max, next_sum

    return result


def _end(consumer: _Consumer, number: Any, carry: Any) -> Any:
    """The last output of an item, on its own."""
    slot, p, row_max, row_sum = carry
    normalizer = _stage_lse(consumer, number, row_max, row_sum)
    plgpu.wgmma(consumer.acc_ref, p, consumer.smem.v_smem.at[slot])
    _store(consumer, number, _output(consumer, slot), normalizer)
    return consumer.cta.following(slot)


def _bridge(consumer: _Consumer, nth: Any, number: Any, next_number: Any, count: Any, carry: Any) -> Any:
    """The last output of an item, and the first logits of the next.

    After the last item these are computed from what shared memory holds, and dropped.
    """
    slot, p, row_max, row_sum = carry
    cta, smem, num_items = consumer.cta, consumer.smem, consumer.cta.num_items
    next_slot = cta.following(slot)
    item = cta.item(jnp.minimum(next_number, num_items - 1) if cta.is_dealt else next_number)
    block = item.last_block
    if_any = pl.when(next_number < num_items if cta.is_dealt else nth + 1 < count)
    normalizer = _stage_lse(consumer, number, row_max, row_sum)

    @functools.partial(pl.run_scoped, s_ref=consumer.logits)
    def result(s_ref: Any) -> Any:
        @if_any
        def _wait() -> None:
            plgpu.barrier_wait(smem.q_full.at[consumer.index])
            plgpu.barrier_wait(smem.k_full.at[next_slot])

        s = _multiply(consumer, s_ref, next_slot, p, slot)
        if_any(lambda: _release_keys(consumer, item, next_slot, block))
        s = _changed_and_masked(consumer, s, item, block, maybe=consumer.last_is_masked)
        next_p, next_sum, new_max = lax.optimization_barrier(_softmax(consumer, s, consumer.no_max))
        if_any(lambda: plgpu.barrier_wait(smem.v_full.at[next_slot]))
        acc = _output(consumer, slot)
        next_p = lax.optimization_barrier(next_p.astype(consumer.dtype))
        _store(consumer, number, acc, normalizer)
        return next_slot, next_p, new_max, next_sum

    return result


# Products, softmax, masks.


def _multiply_keys(consumer: _Consumer, s_ref: Any, slot: Any) -> None:
    q_smem, k_smem = consumer.smem.q_smem, consumer.smem.k_smem
    plgpu.wgmma(s_ref, q_smem.at[consumer.index], k_smem.at[slot].transpose((1, 0)))


def _multiply(consumer: _Consumer, s_ref: Any, next_slot: Any, p: jax.Array, slot: Any) -> jax.Array:
    """Adds P V of one block to the output, and returns the logits of the next."""
    _multiply_keys(consumer, s_ref, next_slot)
    plgpu.wgmma(consumer.acc_ref, p, consumer.smem.v_smem.at[slot])
    return plgpu.wgmma_accumulator_load(s_ref, wait_n=1)


def _output(consumer: _Consumer, slot: Any) -> jax.Array:
    acc = plgpu.wgmma_accumulator_load(consumer.acc_ref, wait_n=0)
    plgpu.barrier_arrive(consumer.smem.v_empty.at[slot])
    return acc


def _release_keys(consumer: _Consumer, item: _Item, slot: Any, block: Any) -> None:
    """Releases the keys of a block whose logits are computed; after the item's last one, its queries, too."""
    q_empty = consumer.smem.q_empty
    plgpu.barrier_arrive(consumer.smem.k_empty.at[slot])
    pl.when(block == item.first_block)(lambda: plgpu.barrier_arrive(q_empty.at[consumer.index]))


def _softmax(consumer: _Consumer, s: jax.Array, row_max: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """P, its row sums (of every eighth column, see `keeps_eighths`), and the new maximum."""
    c = 1.0 if consumer.spec.score_terms else consumer.spec.scale * LOG2E
    block_max = s.max(axis=1) * c
    new_max = jnp.maximum(row_max, block_max)
    if consumer.config.lazy_rescale:
        new_max = jnp.where(block_max > row_max + _MAX_GROWTH, block_max, row_max)
    p = jnp.exp2(s * c - _spread(new_max, s.shape))
    if not consumer.keeps_eighths:
        return p, p.sum(axis=1), new_max
    eighths = [p[:, first : first + 8] for first in range(0, consumer.config.block_kv, 8)]
    return p, functools.reduce(jnp.add, eighths), new_max


def _spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def _changed_and_masked(consumer: _Consumer, s: jax.Array, item: _Item, block: Any, *, maybe: bool) -> jax.Array:
    """The logits of a block: changed by score terms, and masked where the mask may touch it."""
    spec, key_start = consumer.spec, lambda: block * consumer.config.block_kv
    if spec.score_terms:
        s = change(s, spec, lambda: (consumer.first_query(item), key_start()))
    if not maybe:
        return s
    if item.same_segment is not None:
        s = _hide_segments(consumer, s, item, block)
    if not consumer.masks_places:
        return s
    key_end = item.key_end if spec.key_lengths else None
    return hide_unseen(s, spec, consumer.first_query(item), key_start(), key_end=key_end)


def _hide_segments(consumer: _Consumer, s: jax.Array, item: _Item, block: Any) -> jax.Array:
    assert item.same_segment is not None
    inputs, block_kv = consumer.cta.gmem.inputs, consumer.config.block_kv
    first, end = item.same_segment
    query_ids = inputs["query_segments"].at[item.batch, pl.ds(item.q_base + consumer.index * _BLOCK_Q, _BLOCK_Q)]
    key_ids = inputs["key_segments"].at[item.batch, pl.ds(block * block_kv, block_kv)]
    differ = functools.partial(hide_other_segments, row_ids=query_ids, column_ids=key_ids)
    return lax.cond((block >= first) & (block < end), lambda s: s, differ, s)


# Results.


def _stage_lse(consumer: _Consumer, number: Any, row_max: jax.Array, row_sum: jax.Array) -> jax.Array:
    """Writes logsumexps to shared memory, which frees their registers; returns 1 / row_sum.

    Of padding and of queries that see no key, 0.
    """
    spec = consumer.spec
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    if consumer.keeps_eighths:
        row_sum = row_sum.sum(axis=1)
    lse = (row_max + jnp.log2(row_sum)) * math.log(2)
    normalizer = 1 / row_sum
    if may_see_nothing(spec):
        is_blind = row_sum == 0
        lse, normalizer = jnp.where(is_blind, MASKED_LOGIT, lse), jnp.where(is_blind, 0.0, normalizer)
    is_query = None
    if spec.query_lengths:
        item = consumer.cta.item(number)
        row = plgpu.broadcasted_iota(jnp.int32, (_BLOCK_Q,), 0, layout=ROWS)
        is_query = row < item.query_end - consumer.first_query(item)
        lse = jnp.where(is_query, lse, MASKED_LOGIT)
    consumer.smem.lse_smem.at[consumer.index][...] = lse
    if is_query is not None:
        normalizer = jnp.where(is_query, normalizer, 0.0)
    return lax.optimization_barrier(normalizer)


def _store(consumer: _Consumer, number: Any, acc: jax.Array, normalizer: jax.Array) -> None:
    """Sends the results of an item on their way, and clears the output."""
    spec, config, gmem, smem = consumer.spec, consumer.config, consumer.cta.gmem, consumer.smem
    # Computed anew: no register holds it all the while.
    item = consumer.cta.item(lax.optimization_barrier(number))
    rows = pl.ds(item.q_base + consumer.index * _BLOCK_Q, _BLOCK_Q)
    columns, num_slots = swizzle_span(acc.shape[1]), _num_store_slots(spec, config)
    for pieces in itertools.batched(range(0, acc.shape[1], columns), num_slots):
        if pieces[0]:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging = [smem.out_smem.at[consumer.index * num_slots + i] for i in range(len(pieces))]
        for first, to in zip(pieces, staging):
            piece = acc[:, first : first + columns]
            factor = _spread(normalizer, piece.shape)
            piece = piece * factor
            if spec.query_lengths:  # Of padding, whatever its queries hold.
                piece = jnp.where(factor == 0, 0.0, piece)
            to[...] = piece.astype(consumer.dtype)
        plgpu.commit_smem()
        for first, staged in zip(pieces, staging):
            to = gmem.out.at[item.batch, rows, item.head, pl.ds(first, columns)]
            plgpu.copy_smem_to_gmem(staged, to, commit_group=False)
        if pieces[0] == 0:
            to = gmem.lse.at[item.batch, item.head, rows]
            plgpu.copy_smem_to_gmem(smem.lse_smem.at[consumer.index], to, commit_group=False)
        plgpu.commit_smem_to_gmem_group()
    consumer.acc_ref[...] = plgpu.layout_cast(jnp.zeros_like(acc), TILE)
