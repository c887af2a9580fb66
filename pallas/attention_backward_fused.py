"""FlashAttention backward in one kernel, up to head dimension 128: dQ, dK and dV from five products a block.

Roles. A CTA owns 128 keys of one head and walks the queries that see them, the last first, for every query head of the
group. Two consumer warpgroups take half of the keys each and work on transposed blocks, so that P^T and dS^T are in
registers what the next products want on the left; a third computes dQ, which sums over keys, from both; a fourth issues
all copies. None waits for another's arithmetic:

    consumer c   S^T = K_c Q^T, P^T = exp2(c S^T - lse), dP^T = V_c dO^T, dS^T = P^T * (dP^T - delta),
                 dV_c += P^T dO, dK_c += dS^T Q; dS^T goes to shared memory as well
    dQ           dQ = dS K of the whole block, in float32, through shared memory to
    producer     which has TMA add it to the sum in memory, and loads Q, dO, lse and delta through two rings

    keys   [0, 64)    consumer 0: dS^T --+-- shared memory --> dQ warpgroup --> staging --> TMA reduce-add
           [64, 128)  consumer 1: dS^T --+   (two buffers)

A consumer's dK of one block of queries runs on beside its logits of the next. P is kept in 16 bits alone, as the
products read it: with it in float32 as well, or with two more products in flight, the registers do not suffice, and
ptxas then waits for every single wgmma.

The order of dQ's sum. TMA adds what comes, and the sum's last bits may differ from run to run. With
`spec.deterministic` blocks of keys add in their own order: a semaphore for each block of queries counts what has been
added. The first stores, and nothing need be zeroed. All walk queries from the last, which every block of keys sees:
whoever comes later is one step behind and stays there.

A causal mask, a window, lengths and segments leave a block of keys one range of blocks of queries. Steps that an edge
of it touches are masked, in the same loop: of two, ptxas serialises the products. With gaps, blocks of queries that the
first block of keys does not visit, dQ's sum begins with zeros; those who visit one of them follow one on the other in
any case, so that each knows its turn. A soft cap's slope multiplies P, which is then kept twice, in 16 bits both.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B; dQ's own warpgroup after FlashAttention-3's own warp
(Shah et al. 2024, arXiv:2407.08608), section 3.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.pallas.attention_blocks import (
    COLUMNS,
    LOG2E,
    RING_BARRIER_BYTES,
    TRANSFORMS,
    TRANSFORMS_FLOAT32,
    blocks_of,
    blocks_within,
    cap_and_slope,
    hide_other_segments,
    hide_unseen,
    hides_by_causality_alone,
    kernel_inputs,
    keys_seen_by_any,
    queries_that_see_all,
    queries_that_see_any,
    query_offset,
    segment_query_blocks,
)
from jaxkernels.specs import AttentionSpec

__all__ = ["gradients", "smem_bytes"]

#: Keys of a consumer warpgroup, and of a CTA.
_KEYS_PER_CONSUMER = 64
_NUM_CONSUMERS = 2
_KEYS = _NUM_CONSUMERS * _KEYS_PER_CONSUMER
_DQ_WARPGROUP = _NUM_CONSUMERS
_PRODUCER_WARPGROUP = _NUM_CONSUMERS + 1
#: Registers of a thread: consumers', the dQ warpgroup's, the producer's. All 512 threads have 128 each at first.
_REGISTERS = (208, 64, 32)
#: Rows and columns of dQ that are computed at once.
_DQ_PART = 64
#: Heads (and batches) whose blocks of keys are worked on side by side, at most: 132 CTAs have 16 blocks of each, whose
#: queries L2 then holds once. In order, 8 blocks: so many steps are the last ones behind.
_STREAMS = 8
_STREAMS_IN_ORDER = 16


def smem_bytes(head_dim: int, value_dim: int, block_q: int, num_stages: int) -> int:
    """Keys and values, the rings of queries and output gradients, two blocks of dS^T, and dQ's staging buffer."""
    columns = head_dim + value_dim
    ring = num_stages * block_q * (2 * columns + 8)
    return 2 * _KEYS * columns + ring + 2 * 2 * _KEYS * block_q + 4 * block_q * head_dim + RING_BARRIER_BYTES


def gradients(
    spec: AttentionSpec,
    block_q: int,
    num_stages: int,
    operands: tuple[jax.Array, ...],
    extras: dict[str, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq / scale in float32, dk and dv of padded operands.

    Args:
      operands: q, k, v, dout, lse in base 2, infinite where a query adds nothing, and delta.
      extras: the optional operands by name.
    """
    q, k, v = operands[:3]
    like = lambda x, dtype=None: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    num_streams = spec.k.shape[0] * spec.k.shape[2]
    most = _STREAMS_IN_ORDER if spec.deterministic else _STREAMS
    together = next(n for n in range(most, 0, -1) if num_streams % n == 0)
    is_zeroed = _is_zeroed(spec)
    run = plgpu.kernel(
        functools.partial(_kernel, spec=spec, block_q=block_q, num_stages=num_stages),
        out_type=[*([] if is_zeroed else [like(q, jnp.float32)]), like(k), like(v)],
        grid=(num_streams // together, pl.cdiv(spec.k.shape[1], _KEYS), together),
        grid_names=("group", "kv_block", "stream"),
        num_threads=_PRODUCER_WARPGROUP + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    inputs = _inputs(spec, block_q, extras)
    if not is_zeroed:
        return run(*operands, inputs)
    dq = jax.new_ref(jnp.zeros(q.shape, jnp.float32))
    dk, dv = run(*operands, inputs, dq)
    return dq[...], dk, dv


def _is_zeroed(spec: AttentionSpec) -> bool:
    """Whether dQ's sum begins with zeros: else the first block of keys, which then visits all queries, stores."""
    return not (spec.deterministic and hides_by_causality_alone(spec))


def _inputs(spec: AttentionSpec, block_q: int, extras: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """What the kernel reads beside its operands, by name."""
    inputs = kernel_inputs(extras, block_q, _KEYS)
    if spec.segments:
        first, end, *same_segment = jnp.moveaxis(segment_query_blocks(spec, block_q, _KEYS, extras), 2, 0)
        if spec.deterministic:
            # So that those who visit a block of queries follow one on the other, and each knows how many come before.
            first, end = lax.cummin(first, axis=1, reverse=True), lax.cummax(end, axis=1)
            q_block = jnp.arange(pl.cdiv(spec.q.shape[1], block_q), dtype=jnp.int32)
            inputs["first_kv_block"] = jnp.sum(end[:, None, :] <= q_block[:, None], axis=2, dtype=jnp.int32)
        inputs["segment_blocks"] = jnp.stack([first, end, *same_segment], axis=2)
    return inputs


def _kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, dout_gmem: Any, lse_gmem: Any, delta_gmem: Any, inputs: dict[str, Any],
    dq_gmem: Any, dk_gmem: Any, dv_gmem: Any, *, spec: AttentionSpec, block_q: int, num_stages: int,
) -> None:  # fmt: skip
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    num_keys, num_heads, group = spec.k.shape[1], spec.q.shape[2], spec.group_size
    stream = lax.axis_index("group") * lax.axis_size("stream") + lax.axis_index("stream")
    batch, kv_head = lax.div(stream, jnp.int32(spec.k.shape[2])), lax.rem(stream, jnp.int32(spec.k.shape[2]))
    kv_block = lax.axis_index("kv_block")
    kv_base = kv_block * _KEYS
    offset = query_offset(inputs)
    num_q_blocks = pl.cdiv(spec.q.shape[1], block_q)
    key_end = jnp.clip(inputs["key_lengths"][batch], 0, num_keys) if spec.key_lengths else num_keys
    query_end = spec.q.shape[1] + offset
    if spec.query_lengths:
        query_end = jnp.minimum(inputs["query_lengths"][batch], query_end)
    # Blocks of queries that see any of these keys, and those that see all and need no mask.
    seeing = queries_that_see_any(spec, kv_base, jnp.minimum(kv_base + _KEYS, key_end), offset, query_end)
    first_block, end_block = blocks_of(seeing[0] - offset, seeing[1] - offset, block_q)
    seeing = queries_that_see_all(spec, kv_base, kv_base + _KEYS, offset, num_q_blocks * block_q + offset)
    first_whole, end_whole = blocks_within(seeing[0] - offset, seeing[1] - offset, block_q)
    looks_back = spec.window is not None and spec.window[0] is not None
    if not (looks_back or spec.query_lengths):
        end_block = end_whole = num_q_blocks
    if spec.segments:
        first, end, first_of_one, end_of_one = (inputs["segment_blocks"][batch, kv_block, i] for i in range(4))
        first_block, end_block = jnp.maximum(first_block, first), jnp.minimum(end_block, end)
        first_whole, end_whole = jnp.maximum(first_whole, first_of_one), jnp.minimum(end_whole, end_of_one)
    q_iters = jnp.maximum(end_block - first_block, 0)
    is_cut = spec.key_lengths or num_keys % _KEYS != 0
    if spec.key_lengths:
        q_iters = jnp.where(kv_base < key_end, q_iters, 0)
    # Counted from the last block.
    first_unmasked, end_unmasked = end_block - end_whole, end_block - first_whole
    if is_cut:
        end_unmasked = jnp.where(kv_base + _KEYS > key_end, 0, end_unmasked)
    masks_places = spec.causal or spec.window is not None or is_cut
    num_steps = group * q_iters
    added: Any = None
    if spec.deterministic:
        added = pl.get_global(plgpu.SemaphoreType.REGULAR((spec.q.shape[0] * num_heads * num_q_blocks,)))
    following = lambda slot: jnp.where(slot == num_stages - 1, 0, slot + 1)
    # A step's place: a head of the group, and the i-th block of its queries from the last.
    start = jnp.int32(0), jnp.int32(0)

    def advance(place: Any) -> Any:
        head_in_group, i = place
        is_last = i == q_iters - 1
        return jnp.where(is_last, head_in_group + 1, head_in_group), jnp.where(is_last, 0, i + 1)

    def queries_of(place: Any) -> tuple[Any, Any]:
        """The head, and the block of its queries."""
        return kv_head * group + place[0], end_block - 1 - place[1]

    def counter_of(place: Any) -> Any:
        """The semaphore that counts what has been added to a block of dQ."""
        head, q_block = queries_of(place)
        return (batch * num_heads + head) * num_q_blocks + q_block

    def rank_of(place: Any) -> Any:
        """How many blocks of keys add to a block of dQ before this one."""
        if hides_by_causality_alone(spec):
            return kv_block
        _, q_block = queries_of(place)
        query = q_block * block_q + offset
        first, _ = blocks_of(*keys_seen_by_any(spec, query, query + block_q, num_keys), _KEYS)
        if spec.segments:
            first = jnp.maximum(first, inputs["first_kv_block"][batch, q_block])
        return kv_block - first

    def scope(
        k_smem: Any,
        v_smem: Any,
        q_smem: Any,
        dout_smem: Any,
        lse_smem: Any,
        delta_smem: Any,
        ds_smem: Any,
        dq_smem: Any,
        kv_full: Any,
        q_full: Any,
        dout_full: Any,
        q_empty: Any,
        dout_empty: Any,
        ds_full: Any,
        ds_empty: Any,
        dq_full: Any,
        dq_empty: Any,
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _PRODUCER_WARPGROUP)
        def _copy() -> None:
            plgpu.set_max_registers(_REGISTERS[2], action="decrease")
            plgpu.barrier_arrive(dq_empty)
            keys = (batch, pl.ds(kv_base, _KEYS), kv_head)
            plgpu.copy_gmem_to_smem(k_gmem.at[keys], k_smem, kv_full)
            plgpu.copy_gmem_to_smem(v_gmem.at[keys], v_smem, kv_full)

            def load(place: Any, slot: Any) -> None:
                head, q_block = queries_of(place)
                rows = pl.ds(q_block * block_q, block_q)
                plgpu.barrier_wait(q_empty.at[slot])
                plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], q_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_gmem.at[batch, head, rows], lse_smem.at[slot], q_full.at[slot])
                plgpu.barrier_wait(dout_empty.at[slot])
                plgpu.copy_gmem_to_smem(dout_gmem.at[batch, rows, head], dout_smem.at[slot], dout_full.at[slot])
                plgpu.copy_gmem_to_smem(delta_gmem.at[batch, head, rows], delta_smem.at[slot], dout_full.at[slot])

            def add(place: Any) -> None:
                """Adds a step's dQ to the sum."""
                head, q_block = queries_of(place)
                to = dq_gmem.at[batch, pl.ds(q_block * block_q, block_q), head]
                plgpu.barrier_wait(dq_full)
                if _is_zeroed(spec):
                    plgpu.copy_smem_to_gmem(dq_smem, to, reduction_op="add")
                else:
                    pl.when(kv_block == 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem, to))
                    pl.when(kv_block > 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem, to, reduction_op="add"))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(dq_empty)

            def announce(counter: Any) -> None:
                """Tells the next block of keys that a step's dQ is in the sum."""
                plgpu.semaphore_signal(added.at[counter], memory_scope="gpu")

            def load_and_add(step: Any, carry: Any) -> Any:
                slot, loading, adding, last = carry
                pl.when(step < num_steps)(lambda: load(loading, slot))
                is_adding = step >= num_stages
                pl.when(is_adding)(lambda: add(adding))
                if spec.deterministic:
                    plgpu.wait_smem_to_gmem(1)
                    pl.when(step > num_stages)(lambda: announce(last))
                    last = counter_of(adding)
                adding = tuple(jnp.where(is_adding, new, old) for new, old in zip(advance(adding), adding))
                return following(slot), advance(loading), adding, last

            carry = jnp.int32(0), start, start, jnp.int32(0)
            *_, last = lax.fori_loop(0, num_steps + num_stages, load_and_add, carry)
            plgpu.wait_smem_to_gmem(0)
            if spec.deterministic:
                pl.when(num_steps > 0)(lambda: announce(last))

        @pl.when(warpgroup == _DQ_WARPGROUP)
        def _sum_queries() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            for buffer in range(2):
                plgpu.barrier_arrive(ds_empty.at[buffer])

            def multiply(_: Any, carry: Any) -> Any:
                place, buffer = carry
                plgpu.barrier_wait(ds_full.at[buffer])
                plgpu.barrier_wait(dq_empty)
                for row, column in itertools.product(range(0, block_q, _DQ_PART), range(0, head_dim, _DQ_PART)):
                    rows, columns = pl.ds(row, _DQ_PART), pl.ds(column, _DQ_PART)
                    ds = ds_smem.at[buffer, :, rows].transpose((1, 0))
                    dq_smem.at[rows, columns][...] = _product((_DQ_PART, _DQ_PART), ds, k_smem.at[:, columns])
                plgpu.barrier_arrive(ds_empty.at[buffer])
                if spec.deterministic:
                    counter, rank = counter_of(place), rank_of(place)
                    plgpu.semaphore_wait(added.at[counter], rank, decrement=False, memory_scope="gpu")
                plgpu.commit_smem()
                plgpu.barrier_arrive(dq_full)
                return advance(place), 1 - buffer

            lax.fori_loop(0, num_steps, multiply, (start, jnp.int32(0)))

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            consumer = warpgroup
            my_keys = pl.ds(consumer * _KEYS_PER_CONSUMER, _KEYS_PER_CONSUMER)
            my_k, my_v, key_start = k_smem.at[my_keys], v_smem.at[my_keys], kv_base + consumer * _KEYS_PER_CONSUMER
            # All slots are free but the last one of queries, which the first step frees.
            for slot in range(num_stages):
                if slot < num_stages - 1:
                    plgpu.barrier_arrive(q_empty.at[slot])
                plgpu.barrier_arrive(dout_empty.at[slot])

            def free_queries_before(slot: Any) -> None:
                """Of the step before, whose dK is the product behind the one just issued."""
                plgpu.wgmma_wait(1)
                plgpu.barrier_arrive(q_empty.at[jnp.where(slot == 0, num_stages - 1, slot - 1)])

            plgpu.barrier_wait(kv_full)

            def accumulate(dk_ref: Any, dv_ref: Any) -> None:
                shape = (_KEYS_PER_CONSUMER, block_q)
                spread = lambda row: lax.broadcast_in_dim(row, shape, [1])

                def hide(s: jax.Array, i: Any) -> jax.Array:
                    q_start = (end_block - 1 - i) * block_q
                    if spec.segments:
                        key_ids = inputs["key_segments"].at[batch, pl.ds(key_start, _KEYS_PER_CONSUMER)]
                        query_ids = inputs["query_segments"].at[batch, pl.ds(q_start, block_q)]
                        s = hide_other_segments(s, key_ids, query_ids, -math.inf)
                    if not masks_places:
                        return s
                    last = key_end if is_cut else None
                    return hide_unseen(s, spec, q_start + offset, key_start, keys_in_rows=True, key_end=last)

                def probabilities(s: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
                    """P, and what dP - delta is multiplied by: P, times the slope of the cap."""
                    if spec.soft_cap is None:
                        p = lax.optimization_barrier(jnp.exp2(s * (spec.scale * LOG2E) - spread(lse)).astype(dtype))
                        return p, p
                    capped, slope = cap_and_slope(s, spec)
                    p = jnp.exp2(capped - spread(lse))
                    if masks_places or spec.segments:
                        p = jnp.where(s == -math.inf, 0.0, p)
                    return lax.optimization_barrier((p.astype(dtype), (p * slope).astype(dtype)))

                def step(_: Any, carry: Any) -> Any:
                    i, slot, buffer = carry
                    plgpu.barrier_wait(q_full.at[slot])
                    meanwhile = functools.partial(free_queries_before, slot)
                    s = _product(shape, my_k, q_smem.at[slot].transpose((1, 0)), meanwhile)
                    # To wait for a barrier ends a block of instructions: what comes after is not loaded before.
                    plgpu.barrier_wait(dout_full.at[slot])
                    if masks_places or spec.segments:
                        is_masked = i >= end_unmasked
                        if looks_back or spec.segments:
                            is_masked |= i < first_unmasked
                        s = lax.cond(is_masked, lambda s: hide(s, i), lambda s: s, s)
                    p, weights = probabilities(s, plgpu.load(lse_smem.at[slot], layout=COLUMNS))
                    plgpu.wgmma(dv_ref, p, dout_smem.at[slot])
                    dp = _product(shape, my_v, dout_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(ds_empty.at[buffer])
                    delta = plgpu.load(delta_smem.at[slot], layout=COLUMNS)
                    ds = (weights.astype(jnp.float32) * (dp - spread(delta))).astype(dtype)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    ds_smem.at[buffer, my_keys][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_full.at[buffer])
                    plgpu.wgmma(dk_ref, ds, q_smem.at[slot])
                    return jnp.where(i == q_iters - 1, 0, i + 1), following(slot), 1 - buffer

                *_, buffer = lax.fori_loop(0, num_steps, step, (jnp.int32(0), jnp.int32(0), jnp.int32(0)))
                plgpu.wgmma_wait(0)
                # The buffers of keys become the staging buffers of dK: the dQ warpgroup must be done with the last dS.
                plgpu.barrier_wait(ds_empty.at[1 - buffer])
                keys = (batch, pl.ds(key_start, _KEYS_PER_CONSUMER), kv_head)
                for acc, staging, out_gmem in ((dk_ref[...] * spec.scale, my_k, dk_gmem), (dv_ref[...], my_v, dv_gmem)):
                    staging[...] = acc.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(staging, out_gmem.at[keys])
                plgpu.wait_smem_to_gmem(0)

            accumulator = lambda columns: plgpu.ACC((_KEYS_PER_CONSUMER, columns), jnp.float32)
            pl.run_scoped(accumulate, accumulator(head_dim), accumulator(value_dim))

    tile = lambda *shape: plgpu.SMEM(shape, dtype, transforms=TRANSFORMS)
    rows = plgpu.SMEM((num_stages, block_q), jnp.float32)
    ring = lambda num_arrivals: plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages)
    pl.run_scoped(
        scope,
        tile(_KEYS, head_dim),
        tile(_KEYS, value_dim),
        tile(num_stages, block_q, head_dim),
        tile(num_stages, block_q, value_dim),
        rows,
        rows,
        tile(2, _KEYS, block_q),
        plgpu.SMEM((block_q, head_dim), jnp.float32, transforms=TRANSFORMS_FLOAT32),
        plgpu.Barrier(num_arrivals=2),
        ring(2),
        ring(2),
        ring(_NUM_CONSUMERS),
        ring(_NUM_CONSUMERS),
        plgpu.Barrier(num_arrivals=_NUM_CONSUMERS, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(),
        plgpu.Barrier(),
        collective_axes="warpgroup",
    )


def _product(shape: tuple[int, int], lhs: Any, rhs: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """lhs @ rhs in a fresh accumulator; `meanwhile` is done before it is waited for."""

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, lhs, rhs)
        meanwhile()
        return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
