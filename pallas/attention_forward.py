"""FlashAttention forward on Hopper tensor cores, in Pallas Mosaic GPU.

Algorithm. One CTA owns `block_q` queries for each of two consumer warpgroups, of one head of one batch
element. A producer warpgroup streams blocks of keys and values through two rings of shared memory
slots; a consumer keeps its queries in shared memory and the running maximum m, sum l and output in
registers (online softmax, base-2 exponentials with the scale folded in):

    S = Q K^T        wgmma, fp32 accumulators
    m' = max(m, rowmax(c S)), P = exp2(c S - m'), l = exp2(m - m') l + rowsum(P)
    O = exp2(m - m') O + P V      wgmma with P in registers: S's layout is P's operand layout

The two consumers take turns: while one is in its softmax the other has the tensor cores (ping-pong by
`turn`). With a causal mask the blocks beyond the diagonal are not visited, only blocks that touch it
are masked, and the longest rows of work are launched first. Head dimensions are padded to multiples
of 64 by XLA, lengths to multiples of 8; beyond these TMA reads zeros and drops what it would write.

    warpgroup 0  consumer: queries [0, block_q)         warpgroup 2  producer
    warpgroup 1  consumer: queries [block_q, 2 block_q)

Source: FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608); structure after JAX's attention_mgpu.
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
from jax import lax

from jaxkernels.pallas.attention_blocks import (
    BARRIER_BYTES,
    FLOPS_PER_SM,
    LAUNCH_SECONDS,
    NUM_CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    TILE,
    TRANSFORMS,
    key_iters,
    mask,
    pad_heads,
    padded_head_dims,
    query_offset,
    unsupported,
    visible_pairs,
)
from jaxkernels.specs import AttentionSpec

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 1

# The search space: what is tried along each knob, the usual setting first.
_BLOCK_QS = (64, 128)
_BLOCK_KVS = (128, 64, 192)
_STAGES = (2, 3, 4, 1)
#: Registers of a consumer thread for accumulators, logits and probabilities, of the 240 it has.
_MAX_TILE_REGISTERS = 208
#: One step's wait for the other consumer's turn: 128 keys at head dimension 128 take 1.7 us on an H200 (637 TFLOP/s),
#: 1.35 us of which are the products.
_TURN_SECONDS = 0.4e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_q: queries of one consumer warpgroup.
      block_kv: keys and values of one pipeline step.
      num_stages: slots of the key ring and of the value ring.
    """

    block_q: int = 64
    block_kv: int = 128
    num_stages: int = 2

    def __post_init__(self) -> None:
        if self.block_q % 64 or self.block_kv % 64 or self.num_stages < 1:
            raise ValueError(
                "attention_forward[pallas]: block_q and block_kv must be multiples of 64 and num_stages at least 1; "
                f"got {self}."
            )


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    # Two stages of 128 keys fill shared memory at head dimension 128; at 256 the blocks must halve.
    return (Config(block_kv=128 if max(spec.q.shape[3], spec.v.shape[3]) <= 128 else 64),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the blocks whose tiles fit the registers and whose rings fit shared memory.

    A single slot, which nothing can be loaded beside, only where two do not fit; no more slots than blocks of keys.
    Blocks of 128 queries only where there are more than 128, of 192 keys only where there are more than 128.
    """
    _, value_dim = padded_head_dims(spec)
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    for block_q, block_kv in itertools.product(_BLOCK_QS, _BLOCK_KVS):
        # The output and the logits in float32, the probabilities in 16 bits, over the 128 threads of a consumer.
        registers = block_q * (value_dim + block_kv * 3 // 2) // 128
        wasteful = (block_q > 64 and num_queries <= 128) or (block_kv > 128 and num_keys <= 128)
        if registers > _MAX_TILE_REGISTERS or wasteful:
            continue
        rings = [Config(block_q, block_kv, n) for n in _STAGES if n <= max(2, pl.cdiv(num_keys, block_kv))]
        fits = [config for config in rings if _smem_bytes(spec, config) <= spec.target.smem_bytes]
        yield from [config for config in fits if config.num_stages > 1] or fits


def _smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Both consumers' queries (and output, where it cannot take their place), the rings, the logsumexps."""
    head_dim, value_dim = padded_head_dims(spec)
    columns = head_dim + (0 if head_dim == value_dim else value_dim)
    per_consumer = config.block_q * (2 * columns + 4)
    slot = 2 * config.block_kv * (head_dim + value_dim)
    return NUM_CONSUMERS * per_consumer + config.num_stages * slot + BARRIER_BYTES


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Steps of all CTAs over the SMs, or the longest CTA's; the products of a step, and waiting for the turn."""
    batch, num_queries, num_heads, _ = spec.q.shape
    rows = NUM_CONSUMERS * config.block_q
    ctas = batch * num_heads * pl.cdiv(num_queries, rows)
    longest = pl.cdiv(spec.k.shape[1], config.block_kv)
    step = 2 * rows * config.block_kv * sum(padded_head_dims(spec)) / FLOPS_PER_SM + _TURN_SECONDS
    if config.num_stages == 1:
        step += _TURN_SECONDS  # Nor is anything loaded beside it.
    # With a mask, half a step more than the visible share: blocks on the diagonal are visited whole.
    average = min(longest, longest * visible_pairs(spec) + (0.5 if spec.causal else 0.0))
    steps = (
        max(longest, average * ctas / spec.target.num_sms)
        if spec.causal
        else (longest * pl.cdiv(ctas, spec.target.num_sms))
    )
    return LAUNCH_SECONDS * max(1.0, ctas / spec.target.num_sms) + steps * step


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *extras: jax.Array):
    """Returns [out, lse]."""
    num_queries, head_dim = q.shape[1], v.shape[3]
    q, k, v = pad_heads(q), pad_heads(k), pad_heads(v)
    batch, _, num_heads, _ = q.shape
    queries_per_cta = NUM_CONSUMERS * config.block_q
    num_q_blocks = pl.cdiv(num_queries, queries_per_cta)
    kernel = plgpu.kernel(
        functools.partial(_kernel, spec=spec, config=config),
        out_type=[
            jax.ShapeDtypeStruct((*q.shape[:3], v.shape[3]), v.dtype),
            # Whole blocks: Mosaic clips a store of contiguous bytes at the end of the array, not of the row.
            jax.ShapeDtypeStruct((batch, num_heads, num_q_blocks * queries_per_cta), jnp.float32),
        ],
        grid=(num_heads, num_q_blocks, batch),
        grid_names=("head", "q_block", "batch"),
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    out, lse = kernel(q, k, v, *(x.reshape(1) for x in extras))
    return [out[:, :num_queries, :, :head_dim], jnp.swapaxes(lse[:, :, :num_queries], 1, 2)]


def _kernel(q_gmem: Any, k_gmem: Any, v_gmem: Any, *refs: Any, spec: AttentionSpec, config: Config) -> None:
    *offset_gmem, out_gmem, lse_gmem = refs
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = config.block_q, config.block_kv
    num_stages = min(config.num_stages, pl.cdiv(spec.k.shape[1], block_kv))

    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(spec.group_size))
    # The last block of queries sees the most keys: launch it first.
    num_q_blocks = lax.axis_size("q_block")
    q_block = num_q_blocks - 1 - lax.axis_index("q_block") if spec.causal else lax.axis_index("q_block")
    q_base = q_block * (NUM_CONSUMERS * block_q)
    offset = query_offset(offset_gmem)
    kv_iters = key_iters(spec, q_base + NUM_CONSUMERS * block_q + offset, block_kv)

    def scope(q_smem: Any, out_smem: Any, lse_smem: Any, q_full: Any, turn: Any) -> None:
        consumer = lax.axis_index("warpgroup")
        my_q = q_base + consumer * block_q
        rows = (batch, pl.ds(my_q, block_q), head)
        my_q_smem, my_lse_smem = q_smem.at[consumer], lse_smem.at[consumer]
        my_out_smem = my_q_smem if out_smem is None else out_smem.at[consumer]

        def take_turns() -> None:
            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(turn)

        def attend(walk_keys: Any) -> None:
            plgpu.copy_gmem_to_smem(q_gmem.at[rows], my_q_smem, q_full.at[consumer])
            plgpu.barrier_wait(q_full.at[consumer])
            acc = plgpu.layout_cast(jnp.zeros((block_q, value_dim), jnp.float32), TILE)
            row_max = plgpu.layout_cast(jnp.full((block_q,), -jnp.inf, jnp.float32), ROWS)
            row_sum = plgpu.layout_cast(jnp.zeros((block_q,), jnp.float32), ROWS)
            # Consumer 1 starts half a step late, and consumer 0 waits for it at the end.
            pl.when(consumer == 1)(take_turns)
            acc, row_max, row_sum = walk_keys((acc, row_max, row_sum))
            pl.when(consumer == 0)(take_turns)

            out = acc * lax.broadcast_in_dim(1 / row_sum, acc.shape, [0])
            my_out_smem[...] = out.astype(dtype)
            my_lse_smem[...] = (row_max + jnp.log2(row_sum)) * math.log(2)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(my_out_smem, out_gmem.at[rows], commit_group=False)
            plgpu.copy_smem_to_gmem(my_lse_smem, lse_gmem.at[batch, head, pl.ds(my_q, block_q)], commit_group=False)
            plgpu.commit_smem_to_gmem_group()
            plgpu.wait_smem_to_gmem(0)

        def step(
            indices: Any, k_smem: Any, v_smem: Any, k_full: Any, v_full: Any, k_empty: Any, v_empty: Any, carry: Any
        ) -> Any:
            acc, row_max, row_sum = carry
            (kv_idx,) = indices
            plgpu.barrier_wait(k_full)

            def scores(s_ref: Any) -> jax.Array:
                plgpu.wgmma(s_ref, my_q_smem, k_smem.transpose((1, 0)))
                take_turns()  # Our product is in the queue: the other may issue its own.
                return s_ref[...]

            s = pl.run_scoped(scores, plgpu.ACC((block_q, block_kv), jnp.float32))
            plgpu.barrier_arrive(k_empty)
            s = mask(s, spec, my_q + offset, kv_idx * block_kv)

            c = spec.scale * math.log2(math.e)
            new_max = jnp.maximum(row_max, s.max(axis=1) * c)
            alpha = jnp.exp2(row_max - new_max)
            p = jnp.exp2(s * c - lax.broadcast_in_dim(new_max, s.shape, [0]))
            acc = acc * lax.broadcast_in_dim(alpha, acc.shape, [0])
            row_sum = row_sum * alpha + p.sum(axis=1)
            p = p.astype(dtype)
            acc, row_sum, new_max, p = lax.optimization_barrier((acc, row_sum, new_max, p))

            plgpu.barrier_arrive(turn)
            plgpu.barrier_wait(v_full)
            plgpu.barrier_wait(turn)  # Softmax is done: wait until the tensor cores are free.
            acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p, v_smem))(plgpu.ACC.init(acc))
            plgpu.barrier_arrive(v_empty)
            return acc, new_max, row_sum

        kv_spec = lambda columns: plgpu.BlockSpec(
            (None, block_kv, None, columns), lambda i: (batch, i, kv_head, 0), transforms=TRANSFORMS
        )
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(kv_iters,),
            in_specs=[kv_spec(head_dim), kv_spec(value_dim)],
            max_concurrent_steps=num_stages,
            memory_registers=PRODUCER_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=NUM_CONSUMERS,
            manual_produced_barriers=True,
            manual_consumed_barriers=True,
            compute_context=attend,
        )(k_gmem, v_gmem)

    tile = lambda columns: plgpu.SMEM((NUM_CONSUMERS, block_q, columns), dtype, transforms=TRANSFORMS)
    pl.run_scoped(
        scope,
        q_smem=tile(head_dim),
        out_smem=None if head_dim == value_dim else tile(value_dim),  # The queries' buffer serves twice.
        lse_smem=plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
        q_full=plgpu.Barrier(num_barriers=NUM_CONSUMERS),
        turn=plgpu.Barrier(num_arrivals=NUM_CONSUMERS),
        collective_axes="warpgroup",
    )
