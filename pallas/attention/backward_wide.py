"""FlashAttention backward above head dimension 128, in Pallas Mosaic GPU: two kernels whose consumers share the work.

Above head dimension 128 the registers of one warpgroup cannot hold the accumulators of dK and dV. In the first kernel
two consumers work on the same 64 keys and divide the products:

    consumer 0    S^T = K Q^T     P^T = exp2(c S^T - lse)        dV += P^T dO
                                         |  shared memory
    consumer 1    dP^T = V dO^T          P^T * (dP^T - delta)    dK += dS^T Q

A consumer issues the last product of a step together with the first product of the next step, and waits for both.
While the products of one consumer run, the other computes exponentials or dS. The consumers can take turns at the
tensor cores (`ping_pong`, the default with a causal mask):

    consumer 0    dV_0 S_1 | P_1 ....  . | dV_1 S_2 | P_2 ....
    consumer 1             | dK_0 dP_1   | dS_1 ..  | dK_1 dP_2

In the second kernel each of two consumers computes dQ of 64 queries, in a loop over the keys:

    dQ += dS K (of the previous step), dP = dO V^T, S = Q K^T   in its turn
    P = exp2(c S - lse), dS = P * (dP - delta)                  in the other consumer's turn

Queries and output gradients take more than half of shared memory. If keys and values are equally wide, they share one
ring, V_0 K_0 V_1 K_1 ... Values are released after a third of a step, and the block after the keys is needed a step
later. So three slots are enough to load a step ahead.

Together the kernels compute seven products; a fused kernel needs five. S and dP are computed twice.

Two neighbouring CTAs can form a cluster and load for each other (`multicast`, the default without a causal mask). In
the first kernel they have 64 keys each, and share queries and output gradients. In the second they share keys and
values. Without clusters a CTA of the first kernel reads 64 KB for every 2048 cycles of products at head dimension 256:
for all SMs together this is more than the bandwidth of L2.

With a window, lengths or segments, both kernels visit only blocks that may be visible, and mask the blocks at edges.
The CTAs of a cluster release each other's slots, so they must visit the same blocks: all that either of them needs.
With a soft cap, consumer 0 sends P times the cap's slope to consumer 1, which is all that dS needs.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    blocks_of,
    blocks_within,
    ends_of,
    hides_by_causality_alone,
    kernel_inputs,
    key_iters,
    keys_seen_by_all,
    keys_seen_by_any,
    queries_that_see_all,
    queries_that_see_any,
    query_offset,
    segment_key_blocks,
    segment_query_blocks,
)
from jaxkernels.pallas.attention import backward, costs
from jaxkernels.pallas.attention.costs import Constants
from jaxkernels.pallas.attention.layouts import COLUMNS, ROWS, TILE, transforms_of
from jaxkernels.pallas.attention.limits import padded_head_dims, unsupported
from jaxkernels.pallas.attention.logits import (
    LOG2E,
    Starts,
    change_and_slope,
    gradient_scale,
    hide_other_segments,
    hide_unseen,
    mask,
    round_logit_gradients,
)
from jaxkernels.pallas.attention.rings import (
    NUM_CONSUMERS,
    PRODUCER_REGISTERS,
    RING_BARRIER_BYTES,
    cluster_end,
    leave_cluster,
    slot_releases,
)
from jaxkernels.pallas.names import named_kernel

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "gradients", "not_estimated", "num_stages",
    "run", "search_space", "shortlist", "unsupported",
]  # fmt: skip

VERSION = 2

#: Fitted to 25 times on an H200 (docs/benchmarks/attention*.json). Attentions that were left out of a fit are estimated
#: with a median error of 1 %; the 90th percentile is 3 %. Seconds and `logits_per_sm` were not fitted.
CONSTANTS = Constants(
    flops_per_sm=7.843e12,
    logits_per_sm=4e10,
    step_seconds=3e-7,
    item_steps=2.824,
    copy_bytes=2.705e12,
    launch_seconds=5e-6,
)

#: Rows of a consumer's tile: keys in the first kernel, queries in the second.
_ROWS_PER_CONSUMER = 64
#: Queries of a step of the first kernel, keys of a step of the second.
_BLOCK = 64
_CONSUMER_REGISTERS = 240
#: Buffers through which consumer 0 of the first kernel sends P to consumer 1.
_NUM_P_SLOTS = 2
#: More slots than this do not help.
_MAX_STAGES = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Schedule.

    Attributes:
      dq_num_stages: slots of the rings of keys and values in the dQ kernel. Equally wide keys and values alternate in
        one ring.
      dkv_num_stages: slots of the rings of queries and output gradients in the other kernel.
      multicast: whether pairs of CTAs load for each other.
      ping_pong: whether the consumers of a kernel take turns at the tensor cores.
      group_parts: the number of parts of a group of query heads. Each part has its own copy of keys and values, and XLA
        sums the gradients of the parts. With few key heads, more SMs then have work.
    """

    dq_num_stages: int = 3
    dkv_num_stages: int = 2
    multicast: bool = True
    ping_pong: bool = True
    group_parts: int = 1

    def __post_init__(self) -> None:
        check_fields("attention_backward[pallas]", self)
        if min(self.dq_num_stages, self.dkv_num_stages) < 2 or self.group_parts < 1:
            raise ValueError(
                "attention_backward[pallas]: dq_num_stages and dkv_num_stages must be at least 2 and group_parts at "
                f"least 1; got {self}."
            )


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    if not _is_wide(spec):
        return ()
    dq_stages, dkv_stages = num_stages(spec)
    # With a causal mask the CTAs of a cluster would differ in length and wait for each other; turns gain there.
    config = Config(
        min(3, dq_stages[-1]), min(3, dkv_stages[-1]), multicast=not spec.causal, ping_pong=spec.causal
    )  # fmt: skip
    return (backward.with_parts(spec, config, estimate),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the shortlist, and above head dimension 128 all schedules whose rings fit shared memory.

    Each has the parts of groups that the model prefers. At smaller head dimensions the other designs are faster.
    """
    yield from shortlist(spec)
    if _is_wide(spec):
        for schedule in itertools.product(*num_stages(spec), (True, False), (True, False)):
            yield backward.with_parts(spec, Config(*schedule), estimate)


def _is_wide(spec: AttentionSpec) -> bool:
    return max(spec.q.shape[3], spec.v.shape[3]) > 128


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """The sum of the two kernels: the first for 128 queries of a CTA, the other for 64 keys."""
    return costs.two_kernels_seconds(
        spec,
        constants,
        group_parts=config.group_parts,
        head_multiple=64,
        dq_tile=(NUM_CONSUMERS * _ROWS_PER_CONSUMER, _BLOCK),
        dkv_tile=(_BLOCK, _ROWS_PER_CONSUMER),
        dq_num_stages=config.dq_num_stages,
        dkv_num_stages=config.dkv_num_stages,
    )


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    return costs.not_estimated(spec, 64)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv]; the operands end with out, lse, dout, dlse."""
    given = backward.Given.of(spec, operands, config.group_parts)
    kernels = lambda in_parts, padded: gradients(in_parts, config, padded, given.extras)
    return backward.gradients(given, backward.add_up(given), kernels)


def num_stages(spec: AttentionSpec) -> tuple[list[int], list[int]]:
    """The possible numbers of slots (of 64 rows) in the dQ kernel and in the other kernel, the smallest first."""
    columns = sum(padded_head_dims(spec))
    room = spec.target.smem_bytes - RING_BARRIER_BYTES
    # Besides the rings, the dQ kernel has queries, output gradients, lse and delta of both consumers. The other kernel
    # has keys, values and the buffers of P.
    dq_room = room - NUM_CONSUMERS * _ROWS_PER_CONSUMER * (2 * columns + 8)
    dkv_room = room - _ROWS_PER_CONSUMER * 2 * (columns + _NUM_P_SLOTS * _ROWS_PER_CONSUMER)
    dq_slot = _ROWS_PER_CONSUMER * columns * (1 if _is_square(spec) else 2)
    dkv_slot = _ROWS_PER_CONSUMER * (2 * columns + 8)
    return (
        list(range(_min_dq_stages(spec), min(dq_room // dq_slot, _MAX_STAGES) + 1)),
        list(range(2, min(dkv_room // dkv_slot, _MAX_STAGES) + 1)),
    )


def _min_dq_stages(spec: AttentionSpec) -> int:
    """The slots that are in use at once: keys, and the keys and values of the next block."""
    return 3 if _is_square(spec) else 2


def _is_square(spec: AttentionSpec) -> bool:
    """Whether keys and values are equally wide, and so share one ring."""
    head_dim, value_dim = padded_head_dims(spec)
    return head_dim == value_dim


def gradients(
    spec: AttentionSpec, config: Config, operands: backward.Operands, extras: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq, dk, dv of padded operands.

    Args:
      extras: the optional operands by name.
    """
    if config.dq_num_stages < _min_dq_stages(spec):
        raise ValueError(
            "attention_backward[pallas]: dq_num_stages must be at least 3 if keys and values are equally wide, because "
            f"they share a ring; got {config}."
        )
    q, k, v, *_ = operands
    inputs = _inputs(spec, config, extras)
    num_ctas = _num_ctas(config)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params: dict[str, Any] = dict(
        cluster=(num_ctas,),
        cluster_names=("cluster",),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )
    (dq,) = plgpu.kernel(
        named_kernel("attention_dq", _dq_kernel, spec=spec, config=config),
        out_type=[like(q)],
        grid=(q.shape[2], pl.cdiv(spec.q.shape[1], num_ctas * NUM_CONSUMERS * _ROWS_PER_CONSUMER), q.shape[0]),
        grid_names=("head", "q_block", "batch"),
        **params,
    )(*operands, inputs)
    dk, dv = plgpu.kernel(
        named_kernel("attention_dkv", _dkv_kernel, spec=spec, config=config),
        out_type=[like(k), like(v)],
        grid=(k.shape[2], pl.cdiv(spec.k.shape[1], num_ctas * _ROWS_PER_CONSUMER), k.shape[0]),
        grid_names=("kv_head", "kv_block", "batch"),
        **params,
    )(*operands, inputs)
    return dq, dk, dv


def _inputs(spec: AttentionSpec, config: Config, extras: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The optional operands of the kernels, with the ranges of segments."""
    rows = _num_ctas(config) * _ROWS_PER_CONSUMER
    inputs = kernel_inputs(extras, NUM_CONSUMERS * rows, rows)
    if spec.segments:
        inputs["key_blocks"] = segment_key_blocks(spec, NUM_CONSUMERS * rows, _BLOCK, extras)
        inputs["query_blocks"] = segment_query_blocks(spec, _BLOCK, rows, extras)
    return inputs


@dataclasses.dataclass(frozen=True)
class _Range:
    """The blocks from `first` to `end` (at least one) that any row of a cluster sees. Its CTAs visit the same blocks.

    Attributes:
      clear: first and end of the blocks that need no mask in a consumer; None: `mask` decides.
    """

    first: Any
    end: Any
    clear: tuple[Any, Any] | None = None

    @classmethod
    def intersection(cls, seen: Any, clear: Any, segments: list[Any], num_blocks: int) -> _Range:
        """Intersects the ranges of positions and lengths with the ranges of segments (four numbers, or none)."""
        (first, end), (first_clear, end_clear) = seen, clear
        if segments:
            first, end = jnp.maximum(first, segments[0]), jnp.minimum(end, segments[1])
            first_clear, end_clear = jnp.maximum(first_clear, segments[2]), jnp.minimum(end_clear, segments[3])
        first = jnp.minimum(first, num_blocks - 1)
        return cls(first, jnp.maximum(end, first + 1), (first_clear, end_clear))

    def hide(self, s: jax.Array, block: Any, mask: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """Masks a block that is not in `clear`."""
        assert self.clear is not None
        return lax.cond((block >= self.clear[0]) & (block < self.clear[1]), lambda s: s, mask, s)


def _queries_of_keys(spec: AttentionSpec, config: Config, inputs: dict[str, Any], batch: Any, start: Any) -> _Range:
    """The blocks of queries for a CTA's keys in the first kernel. The cluster's keys begin at `start`."""
    block_q, rows = _BLOCK, _num_ctas(config) * _ROWS_PER_CONSUMER
    num_blocks = pl.cdiv(spec.q.shape[1], block_q)
    offset = query_offset(inputs)
    if hides_by_causality_alone(spec):
        first = jnp.int32(0)
        if spec.causal:
            # Queries before the cluster's first key see none of its keys.
            first = jnp.minimum(lax.div(jnp.maximum(start - offset, 0), jnp.int32(block_q)), num_blocks - 1)
        return _Range(first, num_blocks)
    query_end, key_end = ends_of(spec, inputs, batch, offset)
    any_start, any_end = queries_that_see_any(spec, start, jnp.minimum(start + rows, key_end), offset, query_end)
    any_end = jnp.where(start < key_end, any_end, offset)
    # Padding queries, behind the array or behind their length, contribute nothing and need no mask.
    my_start = start + lax.axis_index("cluster") * _ROWS_PER_CONSUMER
    all_start, all_end = queries_that_see_all(
        spec, my_start, my_start + _ROWS_PER_CONSUMER, offset, num_blocks * block_q + offset
    )
    kv_block = lax.div(start, jnp.int32(rows))
    segments = [inputs["query_blocks"][batch, kv_block, i] for i in range(4)] if spec.segments else []
    return _Range.intersection(
        blocks_of(any_start - offset, any_end - offset, block_q),
        blocks_within(all_start - offset, all_end - offset, block_q),
        segments,
        num_blocks,
    )


def _keys_of_queries(
    spec: AttentionSpec, config: Config, inputs: dict[str, Any], batch: Any, start: Any, consumer: Any
) -> _Range:
    """The blocks of keys for a consumer's queries in the second kernel. The cluster's queries begin at `start`."""
    block_kv, rows = _BLOCK, _num_ctas(config) * NUM_CONSUMERS * _ROWS_PER_CONSUMER
    offset = query_offset(inputs)
    if hides_by_causality_alone(spec):
        return _Range(0, key_iters(spec, start + rows + offset, block_kv))
    query_end, key_end = ends_of(spec, inputs, batch, offset)
    q_block, start = lax.div(start, jnp.int32(rows)), start + offset
    end = jnp.minimum(start + rows, query_end)
    any_start, any_end = keys_seen_by_any(spec, start, end, key_end)
    any_end = jnp.where(start < end, any_end, 0)
    my_start = start + (lax.axis_index("cluster") * NUM_CONSUMERS + consumer) * _ROWS_PER_CONSUMER
    clear = keys_seen_by_all(spec, my_start, my_start + _ROWS_PER_CONSUMER, key_end)
    segments = [inputs["key_blocks"][batch, q_block, i] for i in range(4)] if spec.segments else []
    return _Range.intersection(
        blocks_of(any_start, any_end, block_kv),
        blocks_within(*clear, block_kv),
        segments,
        pl.cdiv(spec.k.shape[1], block_kv),
    )


def _probabilities(
    s: jax.Array,
    lse: jax.Array,
    spec: AttentionSpec,
    spread: Callable[[jax.Array], jax.Array],
    starts: Starts,
    *,
    keys_in_rows: bool,
) -> tuple[jax.Array, jax.Array]:
    """Returns P, and P times the slope of the score terms (the factor of dP - delta in dS)."""
    if not spec.score_terms:
        p = jnp.exp2(s * (spec.scale * LOG2E) - spread(lse))
        return p, p
    logits, slope = change_and_slope(s, spec, starts, keys_in_rows=keys_in_rows)
    p = jnp.where(s == -math.inf, 0.0, jnp.exp2(logits - spread(lse)))
    return p, p * slope


def _num_ctas(config: Config) -> int:
    """The number of CTAs in a cluster."""
    return 2 if config.multicast else 1


def _following(slot: Any, num_slots: int) -> Any:
    return jnp.where(slot == num_slots - 1, 0, slot + 1)


@dataclasses.dataclass(frozen=True)
class _Turns:
    """A consumer's turns at the tensor cores. Without barriers (no `ping_pong`) it never waits."""

    barriers: Any
    consumer: Any

    def give_first(self) -> None:
        """Gives consumer 0 the first turn."""
        pl.when(self.consumer == NUM_CONSUMERS - 1)(self.pass_on)

    def wait(self) -> None:
        if self.barriers is not None:
            plgpu.barrier_wait(self.barriers.at[self.consumer])

    def pass_on(self) -> None:
        if self.barriers is not None:
            plgpu.barrier_arrive(self.barriers.at[NUM_CONSUMERS - 1 - self.consumer])


@dataclasses.dataclass(frozen=True)
class _Gmem:
    """Operands in global memory. lse is in base 2; `inputs` are the optional operands (`_inputs`)."""

    q: Any
    k: Any
    v: Any
    dout: Any
    lse: Any
    delta: Any
    inputs: dict[str, Any]


def _tile(dtype: Any, *shape: int) -> Any:
    """A swizzled buffer of 16-bit values in shared memory."""
    return plgpu.SMEM(shape, dtype, transforms=transforms_of(shape[-1]))


def _shared(config: Config) -> tuple[str, ...] | None:
    """The axis along which CTAs load for each other."""
    return ("cluster",) if config.multicast else None


# The first kernel: dK and dV of 64 keys.


@dataclasses.dataclass(frozen=True)
class _DkvSmem:
    """Buffers and barriers of the first kernel. `turn` and `cluster_done` may be None."""

    k_smem: Any
    v_smem: Any
    q_smem: Any
    dout_smem: Any
    lse_smem: Any
    delta_smem: Any
    p_smem: Any
    k_full: Any
    v_full: Any
    q_full: Any
    dout_full: Any
    q_empty: Any
    dout_empty: Any
    p_full: Any
    p_empty: Any
    v_read: Any
    turn: Any
    cluster_done: Any


@dataclasses.dataclass(frozen=True)
class _DkvOutputs:
    """Results of the first kernel in global memory."""

    dk: Any
    dv: Any


@dataclasses.dataclass(frozen=True)
class _DkvItem:
    """The work of a CTA in the first kernel: 64 keys of one head from `kv_base`, and the queries that see them.

    Attributes:
      visited: the visited blocks of queries, the same for each head of the group.
      q_iters: the number of visited blocks of one head.
      steps: the number of visited blocks of all heads of the group.
    """

    spec: AttentionSpec
    config: Config
    gmem: _Gmem
    outputs: _DkvOutputs
    smem: _DkvSmem
    turns: _Turns
    batch: Any
    kv_head: Any
    kv_base: Any
    offset: Any
    visited: _Range
    q_iters: Any
    steps: Any

    @property
    def keys(self) -> tuple[Any, Any, Any]:
        return self.batch, pl.ds(self.kv_base, _ROWS_PER_CONSUMER), self.kv_head

    @property
    def logits(self) -> Any:
        """An accumulator of S^T or dP^T."""
        return plgpu.ACC((_ROWS_PER_CONSUMER, _BLOCK), jnp.float32)

    def spread(self, x: jax.Array) -> jax.Array:
        """Broadcasts one value for each query."""
        return lax.broadcast_in_dim(x, (_ROWS_PER_CONSUMER, _BLOCK), [1])

    def queries(self, q_idx: Any) -> Any:
        return pl.ds((self.visited.first + q_idx) * _BLOCK, _BLOCK)

    def following(self, slot: Any) -> Any:
        return _following(slot, self.config.dkv_num_stages)


def _dkv_kernel(*refs: Any, spec: AttentionSpec, config: Config) -> None:
    """Computes dK and dV of 64 keys: consumer 0 dV, consumer 1 dK."""
    gmem, outputs = _Gmem(*refs[:7]), _DkvOutputs(*refs[7:])

    def walk_queries(**smem: Any) -> None:
        warpgroup = lax.axis_index("warpgroup")
        item = _dkv_item(spec, config, gmem, outputs, _DkvSmem(**smem), warpgroup)
        pl.when(warpgroup == NUM_CONSUMERS)(lambda: _load_queries(item))
        pl.when(warpgroup == 0)(lambda: _compute_dv(item))
        pl.when(warpgroup == 1)(lambda: _compute_dk(item))
        leave_cluster(item.smem.cluster_done)

    pl.run_scoped(walk_queries, **_dkv_allocations(spec, config, gmem), collective_axes="warpgroup")


def _dkv_allocations(spec: AttentionSpec, config: Config, gmem: _Gmem) -> dict[str, Any]:
    """The fields of `_DkvSmem`."""
    head_dim, value_dim = gmem.q.shape[3], gmem.v.shape[3]
    block_q, block_kv, num_slots = _BLOCK, _ROWS_PER_CONSUMER, config.dkv_num_stages
    tile = functools.partial(_tile, gmem.q.dtype)
    rows = plgpu.SMEM((num_slots, block_q), jnp.float32)
    return dict(
        k_smem=tile(block_kv, head_dim),
        v_smem=tile(block_kv, value_dim),
        q_smem=tile(num_slots, block_q, head_dim),
        dout_smem=tile(num_slots, block_q, value_dim),
        lse_smem=rows,
        delta_smem=rows,
        p_smem=tile(_NUM_P_SLOTS, block_kv, block_q),
        k_full=plgpu.Barrier(),
        v_full=plgpu.Barrier(),
        # lse is loaded with the queries, delta with the output gradients.
        q_full=plgpu.Barrier(num_arrivals=2, num_barriers=num_slots),
        dout_full=plgpu.Barrier(num_arrivals=2, num_barriers=num_slots),
        # Only consumer 1 releases queries: it reads them last, after it has waited for P of consumer 0.
        q_empty=slot_releases(num_slots, 1, multicast=config.multicast),
        dout_empty=slot_releases(num_slots, NUM_CONSUMERS, multicast=config.multicast),
        p_full=plgpu.Barrier(num_barriers=_NUM_P_SLOTS),
        p_empty=plgpu.Barrier(num_barriers=_NUM_P_SLOTS),
        v_read=plgpu.Barrier(),
        turn=plgpu.Barrier(num_barriers=NUM_CONSUMERS) if config.ping_pong else None,
        cluster_done=cluster_end(NUM_CONSUMERS, multicast=config.multicast),
    )


def _dkv_item(
    spec: AttentionSpec, config: Config, gmem: _Gmem, outputs: _DkvOutputs, smem: _DkvSmem, warpgroup: Any
) -> _DkvItem:
    kv_head, batch = lax.axis_index("kv_head"), lax.axis_index("batch")
    cluster_base = lax.axis_index("kv_block") * (_num_ctas(config) * _ROWS_PER_CONSUMER)
    kv_base = cluster_base + lax.axis_index("cluster") * _ROWS_PER_CONSUMER
    offset = query_offset(gmem.inputs)
    visited = _queries_of_keys(spec, config, gmem.inputs, batch, cluster_base)
    q_iters = visited.end - visited.first
    return _DkvItem(
        spec, config, gmem, outputs, smem, _Turns(smem.turn, warpgroup), batch, kv_head, kv_base, offset,
        visited, q_iters, spec.group_size * q_iters,
    )  # fmt: skip


def _load_queries(item: _DkvItem) -> None:
    """The producer: loads keys and values once, then queries and output gradients of each head of the group."""
    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    gmem, smem, batch = item.gmem, item.smem, item.batch
    plgpu.copy_gmem_to_smem(gmem.k.at[item.keys], smem.k_smem, smem.k_full)
    plgpu.copy_gmem_to_smem(gmem.v.at[item.keys], smem.v_smem, smem.v_full)
    rings = (
        (gmem.q, smem.q_smem, gmem.lse, smem.lse_smem, smem.q_full, smem.q_empty),
        (gmem.dout, smem.dout_smem, gmem.delta, smem.delta_smem, smem.dout_full, smem.dout_empty),
    )

    def load_head(g: Any, slot: Any) -> Any:
        head = item.kv_head * item.spec.group_size + g

        def load(i: Any, slot: Any) -> Any:
            queries = item.queries(i)
            for tile_gmem, tile_smem, row_gmem, row_smem, full, empty in rings:
                plgpu.barrier_wait(empty.at[slot])
                plgpu.copy_gmem_to_smem(
                    tile_gmem.at[batch, queries, head],
                    tile_smem.at[slot],
                    full.at[slot],
                    collective_axes=_shared(item.config),
                )
                plgpu.copy_gmem_to_smem(row_gmem.at[batch, head, queries], row_smem.at[slot], full.at[slot])
            return item.following(slot)

        return lax.fori_loop(0, item.q_iters, load, slot)

    lax.fori_loop(0, item.spec.group_size, load_head, jnp.int32(0))


def _begin_consumer(item: _DkvItem) -> None:
    """Raises the register limit, and releases all slots of output gradients for this consumer."""
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    for slot in range(item.config.dkv_num_stages):
        plgpu.barrier_arrive(item.smem.dout_empty.at[slot])


def _compute_dv(item: _DkvItem) -> None:
    """Consumer 0: computes S^T and P^T, sends P^T to consumer 1, and computes dV."""
    _begin_consumer(item)
    value_dim = item.gmem.v.shape[3]
    pl.run_scoped(
        functools.partial(_accumulate_dv, item), plgpu.ACC((_ROWS_PER_CONSUMER, value_dim), jnp.float32)
    )  # fmt: skip


def _accumulate_dv(item: _DkvItem, dv_ref: Any) -> None:
    smem, turns = item.smem, item.turns

    def multiply(p: jax.Array, slot: Any) -> None:
        plgpu.barrier_wait(smem.dout_full.at[slot])
        plgpu.wgmma(dv_ref, p, smem.dout_smem.at[slot])

    def multiply_keys(s_ref: Any, slot: Any) -> None:
        plgpu.barrier_wait(smem.q_full.at[slot])
        plgpu.wgmma(s_ref, smem.k_smem, smem.q_smem.at[slot].transpose((1, 0)))

    def first_step(s_ref: Any) -> jax.Array:
        turns.wait()
        multiply_keys(s_ref, jnp.int32(0))
        turns.pass_on()
        return _hand_over_p(item, s_ref, jnp.int32(0), jnp.int32(0), jnp.int32(0))

    def step(_: Any, carry: Any) -> Any:
        """Computes P of this step, and adds the previous step's P^T dO to dV."""
        p, slot, q_idx, p_slot = carry
        next_slot, p_slot = item.following(slot), _following(p_slot, _NUM_P_SLOTS)
        q_idx = jnp.where(q_idx == item.q_iters - 1, 0, q_idx + 1)

        def next_p(s_ref: Any) -> jax.Array:
            turns.wait()
            multiply(p, slot)
            multiply_keys(s_ref, next_slot)
            turns.pass_on()
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(smem.dout_empty.at[slot])
            return _hand_over_p(item, s_ref, next_slot, q_idx, p_slot)

        return pl.run_scoped(next_p, item.logits), next_slot, q_idx, p_slot

    plgpu.barrier_wait(smem.k_full)
    carry = pl.run_scoped(first_step, item.logits), jnp.int32(0), jnp.int32(0), jnp.int32(0)
    p, slot, _, _ = lax.fori_loop(1, item.steps, step, carry)
    turns.wait()
    multiply(p, slot)
    turns.pass_on()
    dv = plgpu.wgmma_accumulator_load(dv_ref, wait_n=0)
    plgpu.barrier_arrive(smem.dout_empty.at[slot])
    # When consumer 1 has read the values, their buffer becomes the staging buffer.
    plgpu.barrier_wait(smem.v_read)
    _store_rows_of_keys(item, dv, smem.v_smem, item.outputs.dv)


def _hand_over_p(item: _DkvItem, s_ref: Any, slot: Any, q_idx: Any, p_slot: Any) -> jax.Array:
    """Returns P^T. Sends P^T, times the slope of a soft cap, to consumer 1."""
    smem, dtype = item.smem, item.gmem.q.dtype
    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
    lse = plgpu.load(smem.lse_smem.at[slot], layout=COLUMNS)
    block = item.visited.first + q_idx
    s = _hide_in_rows_of_keys(item, s, block)
    starts = lambda: (block * _BLOCK + item.offset, item.kv_base)
    p, weights = _probabilities(s, lse, item.spec, item.spread, starts, keys_in_rows=True)
    p, weights = p.astype(dtype), weights.astype(dtype)
    plgpu.barrier_wait(smem.p_empty.at[p_slot])
    smem.p_smem.at[p_slot][...] = weights
    plgpu.barrier_arrive(smem.p_full.at[p_slot])
    return p


def _hide_in_rows_of_keys(item: _DkvItem, s: jax.Array, block: Any) -> jax.Array:
    """Masks S^T of a block of queries."""
    spec, block_q, inputs = item.spec, _BLOCK, item.gmem.inputs
    query_start = block * block_q + item.offset
    if item.visited.clear is None:
        return mask(s, spec, query_start, item.kv_base, keys_in_rows=True)

    def hide(s: jax.Array) -> jax.Array:
        if spec.segments:
            key_ids = inputs["key_segments"].at[item.batch, pl.ds(item.kv_base, _ROWS_PER_CONSUMER)]
            query_ids = inputs["query_segments"].at[item.batch, pl.ds(block * block_q, block_q)]
            s = hide_other_segments(s, key_ids, query_ids)
        return hide_unseen(s, spec, query_start, item.kv_base, keys_in_rows=True)

    return item.visited.hide(s, block, hide)


def _compute_dk(item: _DkvItem) -> None:
    """Consumer 1: computes dP^T, dS^T and dK. Consumer 0 has the first turn."""
    _begin_consumer(item)
    item.turns.pass_on()
    for slot in range(item.config.dkv_num_stages):
        plgpu.barrier_arrive(item.smem.q_empty.at[slot])
    for p_slot in range(_NUM_P_SLOTS):
        plgpu.barrier_arrive(item.smem.p_empty.at[p_slot])
    head_dim = item.gmem.q.shape[3]
    pl.run_scoped(
        functools.partial(_accumulate_dk, item), plgpu.ACC((_ROWS_PER_CONSUMER, head_dim), jnp.float32)
    )  # fmt: skip


def _accumulate_dk(item: _DkvItem, dk_ref: Any) -> None:
    smem, turns = item.smem, item.turns

    def multiply(ds: jax.Array, slot: Any) -> None:
        plgpu.barrier_wait(smem.q_full.at[slot])
        plgpu.wgmma(dk_ref, ds, smem.q_smem.at[slot])

    def multiply_values(dp_ref: Any, slot: Any) -> jax.Array:
        """Issues dP^T. Returns delta, which is read before: when the product ends, all warps have read it."""
        plgpu.barrier_wait(smem.dout_full.at[slot])
        delta = plgpu.load(smem.delta_smem.at[slot], layout=COLUMNS)
        plgpu.wgmma(dp_ref, smem.v_smem, smem.dout_smem.at[slot].transpose((1, 0)))
        return delta

    def first_step(dp_ref: Any) -> jax.Array:
        turns.wait()
        delta = multiply_values(dp_ref, jnp.int32(0))
        turns.pass_on()
        return _ds_of_keys(item, dp_ref, delta, jnp.int32(0), jnp.int32(0))

    def step(_: Any, carry: Any) -> Any:
        """Computes dS of this step, and adds the previous step's dS^T Q to dK."""
        ds, slot, p_slot = carry
        next_slot, p_slot = item.following(slot), _following(p_slot, _NUM_P_SLOTS)

        def next_ds(dp_ref: Any) -> jax.Array:
            turns.wait()
            multiply(ds, slot)
            delta = multiply_values(dp_ref, next_slot)
            turns.pass_on()
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(smem.q_empty.at[slot])
            return _ds_of_keys(item, dp_ref, delta, next_slot, p_slot)

        return pl.run_scoped(next_ds, item.logits), next_slot, p_slot

    plgpu.barrier_wait(smem.v_full)
    carry = pl.run_scoped(first_step, item.logits), jnp.int32(0), jnp.int32(0)
    ds, slot, _ = lax.fori_loop(1, item.steps, step, carry)
    plgpu.barrier_arrive(smem.v_read)
    turns.wait()
    multiply(ds, slot)
    turns.pass_on()
    dk = plgpu.wgmma_accumulator_load(dk_ref, wait_n=0)
    plgpu.barrier_arrive(smem.q_empty.at[slot])
    # Consumer 0 no longer reads the keys: it computed its last logits before its last P.
    _store_rows_of_keys(item, dk * gradient_scale(item.spec), smem.k_smem, item.outputs.dk)


def _ds_of_keys(item: _DkvItem, dp_ref: Any, delta: jax.Array, slot: Any, p_slot: Any) -> jax.Array:
    """Waits for P^T and dP^T. Returns dS^T in 16 bits."""
    spec, smem = item.spec, item.smem
    plgpu.barrier_wait(smem.p_full.at[p_slot])
    p = plgpu.load(smem.p_smem.at[p_slot], layout=TILE)
    plgpu.barrier_arrive(smem.p_empty.at[p_slot])
    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=0)
    plgpu.barrier_arrive(smem.dout_empty.at[slot])
    return round_logit_gradients(p.astype(jnp.float32) * (dp - item.spread(delta)), spec)


def _store_rows_of_keys(item: _DkvItem, acc: jax.Array, staging: Any, out_gmem: Any) -> None:
    if item.spec.key_lengths:
        # Rows past the last key were computed from zero keys, and their P has no upper bound.
        _, key_end = ends_of(item.spec, item.gmem.inputs, item.batch, item.offset)
        row = plgpu.broadcasted_iota(jnp.int32, acc.shape, 0, layout=TILE)
        acc = jnp.where(row < key_end - item.kv_base, acc, 0.0)
    staging[...] = acc.astype(item.gmem.q.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(staging, out_gmem.at[item.keys])
    plgpu.wait_smem_to_gmem(0)


# The second kernel: dQ of 64 queries for each consumer.


@dataclasses.dataclass(frozen=True)
class _DqSmem:
    """Buffers and barriers of the second kernel. `turn` and `cluster_done` may be None.

    If keys and values are equally wide, keys share the ring of the values, and the ring of keys is None.
    """

    q_smem: Any
    dout_smem: Any
    lse_smem: Any
    delta_smem: Any
    v_smem: Any
    k_smem: Any
    q_full: Any
    v_full: Any
    v_empty: Any
    k_full: Any
    k_empty: Any
    turn: Any
    cluster_done: Any

    def with_one_ring(self) -> _DqSmem:
        return dataclasses.replace(self, k_smem=self.v_smem, k_full=self.v_full, k_empty=self.v_empty)


@dataclasses.dataclass(frozen=True)
class _DqItem:
    """The work of a CTA in the second kernel: queries of one head from `q_base`, and the keys that they see.

    Attributes:
      visited: blocks of keys.
    """

    spec: AttentionSpec
    config: Config
    gmem: _Gmem
    dq_gmem: Any
    smem: _DqSmem
    batch: Any
    head: Any
    kv_head: Any
    q_base: Any
    offset: Any
    visited: _Range

    @property
    def has_one_ring(self) -> bool:
        return _is_square(self.spec)

    @property
    def logits(self) -> Any:
        """An accumulator of S or dP."""
        return plgpu.ACC((_ROWS_PER_CONSUMER, _BLOCK), jnp.float32)

    def following(self, slot: Any) -> Any:
        return _following(slot, self.config.dq_num_stages)

    def keys_of(self, v_slot: Any) -> Any:
        """The slot of a block's keys: in one ring the slot after its values, in two rings the same slot."""
        return self.following(v_slot) if self.has_one_ring else v_slot

    def next_values(self, v_slot: Any) -> Any:
        return self.following(self.keys_of(v_slot))


@dataclasses.dataclass(frozen=True)
class _DqConsumer:
    """A consumer of the second kernel.

    Attributes:
      my_q: its first query.
      lse, delta: those of its queries.
    """

    item: _DqItem
    index: Any
    turns: _Turns
    my_q: Any
    lse: jax.Array
    delta: jax.Array

    def spread(self, x: jax.Array) -> jax.Array:
        """Broadcasts one value for each query."""
        return lax.broadcast_in_dim(x, (_ROWS_PER_CONSUMER, _BLOCK), [0])


def _dq_kernel(*refs: Any, spec: AttentionSpec, config: Config) -> None:
    """dQ of 64 queries for each consumer."""
    gmem, dq_gmem = _Gmem(*refs[:7]), refs[7]

    def walk_keys(**buffers: Any) -> None:
        smem = _DqSmem(**buffers)
        if _is_square(spec):
            smem = smem.with_one_ring()
        warpgroup = lax.axis_index("warpgroup")
        item = _dq_item(spec, config, gmem, dq_gmem, smem, warpgroup)
        pl.when(warpgroup == NUM_CONSUMERS)(lambda: _load_keys(item))
        pl.when(warpgroup < NUM_CONSUMERS)(lambda: _compute_dq(item, warpgroup))
        leave_cluster(smem.cluster_done)

    pl.run_scoped(walk_keys, **_dq_allocations(spec, config, gmem), collective_axes="warpgroup")


def _dq_allocations(spec: AttentionSpec, config: Config, gmem: _Gmem) -> dict[str, Any]:
    """The fields of `_DqSmem`."""
    head_dim, value_dim = gmem.q.shape[3], gmem.v.shape[3]
    block_q, num_slots, is_square = _ROWS_PER_CONSUMER, config.dq_num_stages, _is_square(spec)
    tile = functools.partial(_tile, gmem.q.dtype)
    rows = plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32)
    return dict(
        q_smem=tile(NUM_CONSUMERS, block_q, head_dim),
        dout_smem=tile(NUM_CONSUMERS, block_q, value_dim),
        lse_smem=rows,
        delta_smem=rows,
        v_smem=tile(num_slots, _BLOCK, value_dim),
        k_smem=None if is_square else tile(num_slots, _BLOCK, head_dim),
        # Each consumer waits for its own queries only.
        q_full=plgpu.Barrier(num_arrivals=4, num_barriers=NUM_CONSUMERS),
        v_full=plgpu.Barrier(num_barriers=num_slots),
        v_empty=slot_releases(num_slots, NUM_CONSUMERS, multicast=config.multicast),
        k_full=None if is_square else plgpu.Barrier(num_barriers=num_slots),
        k_empty=None if is_square else slot_releases(num_slots, NUM_CONSUMERS, multicast=config.multicast),
        turn=plgpu.Barrier(num_barriers=NUM_CONSUMERS) if config.ping_pong else None,
        cluster_done=cluster_end(NUM_CONSUMERS, multicast=config.multicast),
    )


def _dq_item(spec: AttentionSpec, config: Config, gmem: _Gmem, dq_gmem: Any, smem: _DqSmem, warpgroup: Any) -> _DqItem:
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(spec.group_size))
    # The last block of queries sees the most keys, so it is launched first.
    q_block = lax.axis_index("q_block")
    q_block = lax.axis_size("q_block") - 1 - q_block if spec.causal else q_block
    cta_rows = NUM_CONSUMERS * _ROWS_PER_CONSUMER
    cluster_base = q_block * (_num_ctas(config) * cta_rows)
    q_base = cluster_base + lax.axis_index("cluster") * cta_rows
    offset = query_offset(gmem.inputs)
    visited = _keys_of_queries(spec, config, gmem.inputs, batch, cluster_base, warpgroup)
    return _DqItem(spec, config, gmem, dq_gmem, smem, batch, head, kv_head, q_base, offset, visited)


def _load_keys(item: _DqItem) -> None:
    """The producer: loads the consumers' queries and output gradients once, then keys and values."""
    plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
    gmem, smem, batch, head = item.gmem, item.smem, item.batch, item.head
    for consumer in range(NUM_CONSUMERS):
        queries = pl.ds(item.q_base + consumer * _ROWS_PER_CONSUMER, _ROWS_PER_CONSUMER)
        full = smem.q_full.at[consumer]
        for source, buffer in ((gmem.dout, smem.dout_smem), (gmem.q, smem.q_smem)):
            plgpu.copy_gmem_to_smem(source.at[batch, queries, head], buffer.at[consumer], full)
        for source, buffer in ((gmem.lse, smem.lse_smem), (gmem.delta, smem.delta_smem)):
            plgpu.copy_gmem_to_smem(source.at[batch, head, queries], buffer.at[consumer], full)

    def load(block: Any, v_slot: Any) -> Any:
        keys = (batch, pl.ds(block * _BLOCK, _BLOCK), item.kv_head)
        for source, buffer, full, empty, slot in (
            (gmem.v, smem.v_smem, smem.v_full, smem.v_empty, v_slot),
            (gmem.k, smem.k_smem, smem.k_full, smem.k_empty, item.keys_of(v_slot)),
        ):
            plgpu.barrier_wait(empty.at[slot])
            shared = _shared(item.config)
            plgpu.copy_gmem_to_smem(source.at[keys], buffer.at[slot], full.at[slot], collective_axes=shared)
        return item.next_values(v_slot)

    lax.fori_loop(item.visited.first, item.visited.end, load, jnp.int32(0))


def _compute_dq(item: _DqItem, index: Any) -> None:
    plgpu.set_max_registers(_CONSUMER_REGISTERS, action="increase")
    smem, head_dim = item.smem, item.gmem.q.shape[3]
    my_q = item.q_base + index * _ROWS_PER_CONSUMER
    # All slots are free.
    for slot in range(item.config.dq_num_stages):
        plgpu.barrier_arrive(smem.v_empty.at[slot])
        if not item.has_one_ring:
            plgpu.barrier_arrive(smem.k_empty.at[slot])
    turns = _Turns(smem.turn, index)
    turns.give_first()
    plgpu.barrier_wait(smem.q_full.at[index])
    lse = plgpu.load(smem.lse_smem.at[index], layout=ROWS)
    delta = plgpu.load(smem.delta_smem.at[index], layout=ROWS)
    consumer = _DqConsumer(item, index, turns, my_q, lse, delta)
    pl.run_scoped(
        functools.partial(_accumulate_dq, consumer), plgpu.ACC((_ROWS_PER_CONSUMER, head_dim), jnp.float32)
    )  # fmt: skip


def _accumulate_dq(consumer: _DqConsumer, dq_ref: Any) -> None:
    item, smem, turns = consumer.item, consumer.item.smem, consumer.turns

    def multiply(ds: jax.Array, v_slot: Any) -> None:
        plgpu.wgmma(dq_ref, ds, smem.k_smem.at[item.keys_of(v_slot)])

    def first_step(dp_ref: Any, s_ref: Any) -> jax.Array:
        turns.wait()
        _multiply_block(consumer, dp_ref, s_ref, jnp.int32(0))
        return _ds_of_queries(consumer, dp_ref, s_ref, jnp.int32(0), jnp.int32(item.visited.first))

    def step(block: Any, carry: Any) -> Any:
        """Computes dS of this block, and adds the previous block's dS K to dQ."""
        ds, v_slot = carry
        next_slot = item.next_values(v_slot)

        def multiply_both(dp_ref: Any, s_ref: Any) -> jax.Array:
            turns.wait()
            multiply(ds, v_slot)
            _multiply_block(consumer, dp_ref, s_ref, next_slot)
            plgpu.wgmma_wait(2)
            plgpu.barrier_arrive(smem.k_empty.at[item.keys_of(v_slot)])
            return _ds_of_queries(consumer, dp_ref, s_ref, next_slot, block)

        return pl.run_scoped(multiply_both, item.logits, item.logits), next_slot

    carry = pl.run_scoped(first_step, item.logits, item.logits), jnp.int32(0)
    ds, v_slot = lax.fori_loop(item.visited.first + 1, item.visited.end, step, carry)
    turns.wait()
    multiply(ds, v_slot)
    turns.pass_on()
    dq = plgpu.wgmma_accumulator_load(dq_ref, wait_n=0)
    plgpu.barrier_arrive(smem.k_empty.at[item.keys_of(v_slot)])
    staging = smem.q_smem.at[consumer.index]
    staging[...] = (dq * gradient_scale(item.spec)).astype(item.gmem.q.dtype)
    plgpu.commit_smem()
    queries = pl.ds(consumer.my_q, _ROWS_PER_CONSUMER)
    plgpu.copy_smem_to_gmem(staging, item.dq_gmem.at[item.batch, queries, item.head])
    plgpu.wait_smem_to_gmem(0)


def _multiply_block(consumer: _DqConsumer, dp_ref: Any, s_ref: Any, v_slot: Any) -> None:
    """Issues dP and S of a block, and passes the turn to the other consumer."""
    item, smem = consumer.item, consumer.item.smem
    # Descriptors are computed for every block again, so that they take no registers between blocks.
    mine = lax.optimization_barrier(consumer.index)
    plgpu.barrier_wait(smem.v_full.at[v_slot])
    plgpu.wgmma(dp_ref, smem.dout_smem.at[mine], smem.v_smem.at[v_slot].transpose((1, 0)))
    plgpu.barrier_wait(smem.k_full.at[item.keys_of(v_slot)])
    plgpu.wgmma(s_ref, smem.q_smem.at[mine], smem.k_smem.at[item.keys_of(v_slot)].transpose((1, 0)))
    consumer.turns.pass_on()


def _ds_of_queries(consumer: _DqConsumer, dp_ref: Any, s_ref: Any, v_slot: Any, block: Any) -> jax.Array:
    """Waits for dP and S. Returns dS in 16 bits."""
    item, spec = consumer.item, consumer.item.spec
    plgpu.wgmma_wait(1)
    plgpu.barrier_arrive(item.smem.v_empty.at[v_slot])
    s = plgpu.wgmma_accumulator_load(s_ref, wait_n=0)
    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=None)
    s = _hide_in_rows_of_queries(consumer, s, block)
    starts = lambda: (consumer.my_q + item.offset, block * _BLOCK)
    _, weights = _probabilities(s, consumer.lse, spec, consumer.spread, starts, keys_in_rows=False)
    return round_logit_gradients(weights * (dp - consumer.spread(consumer.delta)), spec)


def _hide_in_rows_of_queries(consumer: _DqConsumer, s: jax.Array, block: Any) -> jax.Array:
    """Masks S of a block of keys."""
    item, spec, inputs = consumer.item, consumer.item.spec, consumer.item.gmem.inputs
    if item.visited.clear is None:
        return mask(s, spec, consumer.my_q + item.offset, block * _BLOCK)

    def hide(s: jax.Array) -> jax.Array:
        if spec.segments:
            query_ids = inputs["query_segments"].at[item.batch, pl.ds(consumer.my_q, _ROWS_PER_CONSUMER)]
            key_ids = inputs["key_segments"].at[item.batch, pl.ds(block * _BLOCK, _BLOCK)]
            s = hide_other_segments(s, query_ids, key_ids)
        key_end = ends_of(spec, inputs, item.batch, item.offset)[1] if spec.key_lengths else None
        return hide_unseen(s, spec, consumer.my_q + item.offset, block * _BLOCK, key_end=key_end)

    return item.visited.hide(s, block, hide)
