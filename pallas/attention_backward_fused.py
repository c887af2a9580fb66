"""FlashAttention backward in one kernel, up to head dimension 128: dQ, dK and dV from five products a block.

Roles. A CTA owns 128 keys of one head and walks the queries that see them, the last first, for every query head of the
group. Two consumer warpgroups take half of the keys each and work on transposed blocks, so that P^T and dS^T are in
registers what the next products want on the left; a third computes dQ, which sums over keys, from both; none of the
three waits for another's arithmetic:

    producer     Q, dO, lse and delta of a block of queries, through two rings
    consumer c   S^T = K_c Q^T, P^T = exp2(c S^T - lse), dP^T = V_c dO^T, dS^T = P^T * (dP^T - delta),
                 dV_c += P^T dO, dK_c += dS^T Q; dS^T goes to shared memory as well
    dQ           dQ = dS K of the whole block, in float32, which TMA adds to the sum in memory

    keys   [0, 64)    consumer 0: dS^T --+-- shared memory --> dQ warpgroup --> staging --> TMA reduce-add
           [64, 128)  consumer 1: dS^T --+   (two buffers)

The order of dQ's sum. Blocks of keys add in their own order, so that the bits are the same in every run: a semaphore
for each block of queries counts what has been added. The first stores, and nothing need be zeroed. All walk queries
from the last, which every block of keys sees: whoever comes later is one step behind and stays there. CTAs of
neighbouring blocks of keys are launched several heads apart. With `any_order` nobody waits.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B; dQ's own warpgroup after FlashAttention-3's own warp
(Shah et al. 2024, arXiv:2407.08608), section 3.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.pallas.attention_blocks import (
    COLUMNS,
    TILE,
    TRANSFORMS,
    TRANSFORMS_FLOAT32,
    query_offset,
)
from jaxkernels.specs import AttentionSpec

__all__ = ["KEYS", "gradients", "smem_bytes"]

#: Keys of a consumer warpgroup, and of a CTA.
_KEYS_PER_CONSUMER = 64
_NUM_CONSUMERS = 2
KEYS = _NUM_CONSUMERS * _KEYS_PER_CONSUMER
_DQ_WARPGROUP = _NUM_CONSUMERS
_PRODUCER_WARPGROUP = _NUM_CONSUMERS + 1
#: Registers of a thread: consumers', the dQ warpgroup's, the producer's. All 512 threads have 128 each at first.
_REGISTERS = (208, 72, 24)
#: Rows and columns of dQ that are computed at once.
_DQ_PART = 64
#: Heads (and batches) whose blocks of keys are worked on side by side, at most.
_STREAMS = 8
_LOG2E = math.log2(math.e)
#: What barriers and the alignment of buffers to 1 KB add to the buffers' own bytes, at most.
_BARRIER_BYTES = 1024


def smem_bytes(head_dim: int, value_dim: int, block_q: int, num_stages: int) -> int:
    """Keys and values, the rings of queries and output gradients, two blocks of dS^T, and dQ's staging buffer."""
    columns = head_dim + value_dim
    ring = num_stages * block_q * (2 * columns + 8)
    return 2 * KEYS * columns + ring + 2 * 2 * KEYS * block_q + 4 * block_q * head_dim + _BARRIER_BYTES


def gradients(
    spec: AttentionSpec, block_q: int, num_stages: int, any_order: bool, operands: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq / scale in float32, dk and dv of padded operands: q, k, v, dout, lse in base 2, delta, and extras."""
    q, k, v = operands[:3]
    like = lambda x, dtype=None: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    streams = spec.k.shape[0] * spec.k.shape[2]
    together = next(n for n in range(_STREAMS, 0, -1) if streams % n == 0)
    sums = jax.new_ref(jnp.zeros(q.shape, jnp.float32)) if any_order else None
    results = plgpu.kernel(
        functools.partial(_kernel, spec=spec, block_q=block_q, num_stages=num_stages, any_order=any_order),
        out_type=[*([] if any_order else [like(q, jnp.float32)]), like(k), like(v)],
        grid=(streams // together, pl.cdiv(spec.k.shape[1], KEYS), together),
        grid_names=("group", "kv_block", "stream"),
        num_threads=_PRODUCER_WARPGROUP + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands, *([] if sums is None else [sums]))
    return results if sums is None else (sums[...], *results)


def _kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, dout_gmem: Any, lse_gmem: Any, delta_gmem: Any, *refs: Any,
    spec: AttentionSpec, block_q: int, num_stages: int, any_order: bool,
) -> None:  # fmt: skip
    *offset_gmem, dq_gmem, dk_gmem, dv_gmem = refs
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    num_keys, num_heads, group = spec.k.shape[1], spec.q.shape[2], spec.group_size
    stream = lax.axis_index("group") * lax.axis_size("stream") + lax.axis_index("stream")
    batch, kv_head = lax.div(stream, jnp.int32(spec.k.shape[2])), lax.rem(stream, jnp.int32(spec.k.shape[2]))
    kv_block = lax.axis_index("kv_block")
    kv_base = kv_block * KEYS
    offset = query_offset(offset_gmem)
    # Blocks of queries that see any of these keys, and of them those that see all; the former are the last ones.
    num_q_blocks = pl.cdiv(spec.q.shape[1], block_q)
    q_iters = num_unmasked = jnp.int32(num_q_blocks)
    if spec.causal:
        from_block = lambda key: jnp.clip(num_q_blocks - lax.div(key - offset, jnp.int32(block_q)), 0, num_q_blocks)
        q_iters = from_block(jnp.maximum(kv_base, offset))
        num_unmasked = from_block(jnp.maximum(kv_base + KEYS - 1, offset) + (block_q - 1))
    if num_keys % KEYS:
        num_unmasked = jnp.where(kv_base + KEYS > num_keys, 0, num_unmasked)
    has_masked = spec.causal or num_keys % KEYS != 0
    added: Any = None
    if not any_order:
        added = pl.get_global(plgpu.SemaphoreType.REGULAR((spec.q.shape[0] * num_heads * num_q_blocks,)))
    following = lambda slot: jnp.where(slot == num_stages - 1, 0, slot + 1)

    def walk(step: Any, carry: Any, *, told_masked: bool = False) -> Any:
        """Calls step(head, q_block, carry) for every block of queries of every head of the group.

        With `told_masked` it is step(head, q_block, masked, carry).
        """

        def walk_head(head_in_group: Any, carry: Any) -> Any:
            head = kv_head * group + head_in_group
            of = lambda *masked: lambda i, carry: step(head, num_q_blocks - 1 - i, *masked, carry)
            if not (told_masked and has_masked):
                return lax.fori_loop(0, q_iters, of(*([False] if told_masked else [])), carry)
            carry = lax.fori_loop(0, num_unmasked, of(False), carry)
            return lax.fori_loop(num_unmasked, q_iters, of(True), carry)

        return lax.fori_loop(0, group, walk_head, carry)

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
    ) -> None:
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == _PRODUCER_WARPGROUP)
        def _produce() -> None:
            plgpu.set_max_registers(_REGISTERS[2], action="decrease")
            keys = (batch, pl.ds(kv_base, KEYS), kv_head)
            plgpu.copy_gmem_to_smem(k_gmem.at[keys], k_smem, kv_full)
            plgpu.copy_gmem_to_smem(v_gmem.at[keys], v_smem, kv_full)

            def load(head: Any, q_block: Any, slot: Any) -> Any:
                rows = pl.ds(q_block * block_q, block_q)
                plgpu.barrier_wait(q_empty.at[slot])
                plgpu.copy_gmem_to_smem(q_gmem.at[batch, rows, head], q_smem.at[slot], q_full.at[slot])
                plgpu.copy_gmem_to_smem(lse_gmem.at[batch, head, rows], lse_smem.at[slot], q_full.at[slot])
                plgpu.barrier_wait(dout_empty.at[slot])
                plgpu.copy_gmem_to_smem(dout_gmem.at[batch, rows, head], dout_smem.at[slot], dout_full.at[slot])
                plgpu.copy_gmem_to_smem(delta_gmem.at[batch, head, rows], delta_smem.at[slot], dout_full.at[slot])
                return following(slot)

            walk(load, jnp.int32(0))

        @pl.when(warpgroup == _DQ_WARPGROUP)
        def _sum_queries() -> None:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            for buffer in range(2):
                plgpu.barrier_arrive(ds_empty.at[buffer])
            plgpu.barrier_wait(kv_full)

            def announce(place: Any) -> None:
                """Tells the next block of keys that what was added at a place is there."""
                plgpu.wait_smem_to_gmem(0)
                plgpu.semaphore_signal(added.at[place], memory_scope="gpu")

            def add(head: Any, q_block: Any, carry: Any) -> Any:
                buffer, last_place = carry
                place = (batch * num_heads + head) * num_q_blocks + q_block
                if added is not None:
                    plgpu.semaphore_wait(added.at[place], kv_block, decrement=False, memory_scope="gpu")
                plgpu.barrier_wait(ds_full.at[buffer])
                if added is None:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                else:
                    pl.when(last_place >= 0)(lambda: announce(last_place))
                for row, column in itertools.product(range(0, block_q, _DQ_PART), range(0, head_dim, _DQ_PART)):
                    rows, columns = pl.ds(row, _DQ_PART), pl.ds(column, _DQ_PART)
                    ds = ds_smem.at[buffer, :, rows].transpose((1, 0))
                    dq_smem.at[rows, columns][...] = _product((_DQ_PART, _DQ_PART), ds, k_smem.at[:, columns])
                plgpu.barrier_arrive(ds_empty.at[buffer])
                plgpu.commit_smem()
                to = dq_gmem.at[batch, pl.ds(q_block * block_q, block_q), head]
                if added is None:
                    plgpu.copy_smem_to_gmem(dq_smem, to, reduction_op="add")
                else:
                    pl.when(kv_block == 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem, to))
                    pl.when(kv_block > 0)(lambda: plgpu.copy_smem_to_gmem(dq_smem, to, reduction_op="add"))
                return 1 - buffer, place

            _, last_place = walk(add, (jnp.int32(0), jnp.int32(-1)))
            if added is None:
                plgpu.wait_smem_to_gmem(0)
            else:
                pl.when(last_place >= 0)(lambda: announce(last_place))

        @pl.when(warpgroup < _NUM_CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            consumer = warpgroup
            my_keys = pl.ds(consumer * _KEYS_PER_CONSUMER, _KEYS_PER_CONSUMER)
            my_k, my_v, key_start = k_smem.at[my_keys], v_smem.at[my_keys], kv_base + consumer * _KEYS_PER_CONSUMER
            for slot in range(num_stages):
                plgpu.barrier_arrive(q_empty.at[slot])
                plgpu.barrier_arrive(dout_empty.at[slot])
            plgpu.barrier_wait(kv_full)

            def accumulate(dk_ref: Any, dv_ref: Any) -> None:
                shape = (_KEYS_PER_CONSUMER, block_q)
                spread = lambda row: lax.broadcast_in_dim(row, shape, [1])

                def step(head: Any, q_block: Any, masked: bool, carry: Any) -> Any:
                    slot, buffer = carry
                    plgpu.barrier_wait(q_full.at[slot])
                    s = _product(shape, my_k, q_smem.at[slot].transpose((1, 0)))
                    # To wait for a barrier ends a block of instructions: what comes after is not loaded before.
                    plgpu.barrier_wait(dout_full.at[slot])
                    if masked:
                        s = _hide(s, spec, q_block * block_q + offset, key_start)
                    lse = plgpu.load(lse_smem.at[slot], layout=COLUMNS)
                    p = lax.optimization_barrier(jnp.exp2(s * (spec.scale * _LOG2E) - spread(lse)).astype(dtype))
                    plgpu.wgmma(dv_ref, p, dout_smem.at[slot])
                    dp = _product(shape, my_v, dout_smem.at[slot].transpose((1, 0)))
                    plgpu.barrier_wait(ds_empty.at[buffer])
                    delta = plgpu.load(delta_smem.at[slot], layout=COLUMNS)
                    ds = (p.astype(jnp.float32) * (dp - spread(delta))).astype(dtype)
                    plgpu.barrier_arrive(dout_empty.at[slot])
                    ds_smem.at[buffer, my_keys][...] = ds
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ds_full.at[buffer])
                    plgpu.wgmma(dk_ref, ds, q_smem.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(q_empty.at[slot])
                    return following(slot), 1 - buffer

                _, buffer = walk(step, (jnp.int32(0), jnp.int32(0)), told_masked=True)
                # The buffers of keys become the staging buffers of dK: the dQ warpgroup must be done with both dS.
                plgpu.barrier_wait(ds_empty.at[buffer])
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
        tile(KEYS, head_dim),
        tile(KEYS, value_dim),
        tile(num_stages, block_q, head_dim),
        tile(num_stages, block_q, value_dim),
        rows,
        rows,
        tile(2, KEYS, block_q),
        plgpu.SMEM((block_q, head_dim), jnp.float32, transforms=TRANSFORMS_FLOAT32),
        plgpu.Barrier(num_arrivals=2),
        ring(2),
        ring(2),
        ring(_NUM_CONSUMERS),
        ring(_NUM_CONSUMERS),
        plgpu.Barrier(num_arrivals=_NUM_CONSUMERS, num_barriers=2),
        plgpu.Barrier(num_barriers=2),
        collective_axes="warpgroup",
    )


def _hide(s: jax.Array, spec: AttentionSpec, query_start: Any, key_start: Any) -> jax.Array:
    """Sets the logits, keys in rows, of keys that a query does not see or that there are not to -inf."""
    columns = 8
    rows = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 0, layout=TILE) + key_start
    column = plgpu.broadcasted_iota(jnp.int32, (s.shape[0], columns), 1, layout=TILE)
    unseen_until = rows - query_start - column if spec.causal else jnp.zeros_like(rows)
    if spec.k.shape[1] % KEYS:
        unseen_until = jnp.where(rows < spec.k.shape[1], unseen_until, s.shape[1])
    tiles = [
        jnp.where(unseen_until <= first, s[:, first : first + columns], -jnp.inf)
        for first in range(0, s.shape[1], columns)
    ]
    return jnp.concatenate(tiles, axis=1)


def _product(shape: tuple[int, int], lhs: Any, rhs: Any) -> jax.Array:
    """lhs @ rhs in a fresh accumulator."""

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, lhs, rhs)
        return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
