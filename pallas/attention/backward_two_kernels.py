"""FlashAttention backward in two kernels whose sums are in a fixed order, in Pallas Mosaic GPU.

    dQ = c dS K          kernel 1: a CTA has a block of queries and loops over the keys, as in the forward pass
    dK = c dS^T Q        kernel 2: a CTA has a block of keys and loops over the queries that see them, for each
    dV = P^T dO                    query head of the group; the sum over heads stays in registers

Kernel 2 computes transposed blocks: with S^T = K Q^T, P^T and dS^T are in registers in the layout of left operands, as
the last two products need. Together the kernels compute 7 products; `backward_fused` needs 5. They are the default with
`spec.deterministic` for head dimensions from 65 to 128. There the fixed order of the fused kernel's sum costs more than
the two products.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B; structure after JAX's attention_mgpu.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import kernel_inputs, key_iters, query_offset
from jaxkernels.pallas.attention import backward, costs, limits
from jaxkernels.pallas.attention.costs import Constants
from jaxkernels.pallas.attention.layouts import COLUMNS, ROWS, TILE, transforms_of
from jaxkernels.pallas.attention.limits import features, least_head_multiple, padded_head_dims
from jaxkernels.pallas.attention.logits import LOG2E, gradient_scale, mask, round_logit_gradients
from jaxkernels.pallas.attention.rings import BARRIER_BYTES, NUM_CONSUMERS, PRODUCER_REGISTERS
from jaxkernels.pallas.names import named_kernel

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space", "shortlist",
    "unsupported",
]  # fmt: skip

VERSION = 2

#: Those of `backward_wide`, which has the same structure. No times of this design are known.
CONSTANTS = Constants(
    flops_per_sm=7.843e12,
    logits_per_sm=4e10,
    step_seconds=3e-7,
    item_steps=2.824,
    copy_bytes=2.705e12,
    launch_seconds=5e-6,
)

#: Rows of a consumer's tile: queries in kernel 1, keys in kernel 2.
_ROWS_PER_CONSUMER = 64

# The search space: the values of each knob, the usual one first.
_BLOCKS = (64, 128)
_STAGES = (2, 3, 1)
#: Registers of a consumer thread for accumulators, logits and their gradients, of the 240 it has.
_MAX_TILE_REGISTERS = 192


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      dq_block_kv: keys of one pipeline step of the dQ kernel.
      dq_num_stages: slots of its key and value rings.
      dkv_block_q: queries of one pipeline step of the dK, dV kernel.
      dkv_num_stages: slots of its query and output-gradient rings.
      head_multiple: head dimensions are padded to multiples of this, 64 or 32. With 32, swizzle spans are 64 bytes
        instead of 128.
      group_parts: the number of parts of a group of query heads. Each part has its own copy of keys and values, and XLA
        sums the gradients of the parts. With few key heads, more SMs then have work.
    """

    dq_block_kv: int = 64
    dq_num_stages: int = 2
    dkv_block_q: int = 64
    dkv_num_stages: int = 2
    head_multiple: int = 64
    group_parts: int = 1

    def __post_init__(self) -> None:
        check_fields("attention_backward[pallas]", self)
        blocks, stages = (self.dq_block_kv, self.dkv_block_q), (self.dq_num_stages, self.dkv_num_stages)
        if any(block % 64 for block in blocks) or min(blocks) <= 0 or min(*stages, self.group_parts) < 1:
            raise ValueError(
                "attention_backward[pallas]: block sizes must be positive multiples of 64, stages and group_parts at "
                f"least 1; got {self}."
            )
        if self.head_multiple not in (64, 32):
            raise ValueError(f"attention_backward[pallas]: head_multiple must be 64 or 32; got {self}.")


def unsupported(spec: AttentionSpec) -> str | None:
    if (reason := limits.unsupported(spec)) is not None:
        return reason
    if asked := features(spec):
        return f"does not handle {', '.join(asked)}"
    if not _fits_registers(sum(dims := padded_head_dims(spec)), _BLOCKS[0]):
        return f"has registers for head dimensions that sum up to 256, got {dims[0]} and {dims[1]} with padding"
    return None


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    """The default with `spec.deterministic`, for head dimensions from 65 to 128. Otherwise empty."""
    if not spec.deterministic or not 64 < max(spec.q.shape[3], spec.v.shape[3]) <= 128:
        return ()
    return (backward.with_parts(spec, Config(head_multiple=least_head_multiple(spec)), estimate),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the shortlist, and blocks whose tiles fit the registers and whose rings fit shared memory.

    A ring has a single slot only if two do not fit, because loads and products then do not overlap. Each configuration
    has the parts of groups that the model prefers.
    """
    yield from shortlist(spec)
    head_dim, value_dim = padded_head_dims(spec)
    dq = _rings(spec, functools.partial(_dq_smem_bytes, spec), head_dim)
    dkv = _rings(spec, functools.partial(_dkv_smem_bytes, spec), head_dim + value_dim)
    for (dq_block_kv, dq_stages), (dkv_block_q, dkv_stages) in itertools.product(dq, dkv):
        config = Config(dq_block_kv, dq_stages, dkv_block_q, dkv_stages)
        yield backward.with_parts(spec, config, estimate)


def _rings(spec: AttentionSpec, smem_bytes: Callable[[int, int], int], columns: int) -> list[tuple[int, int]]:
    """Blocks and stages of a kernel whose accumulators have `columns` columns."""
    found = []
    for block in _BLOCKS:
        fits = [n for n in _STAGES if smem_bytes(block, n) <= spec.target.smem_bytes]
        if _fits_registers(columns, block):
            found += [(block, n) for n in fits if n > 1 or 2 not in fits]
    return found


def _fits_registers(columns: int, block: int) -> bool:
    """Whether a thread's share of the float32 accumulators, of P and of dS fits into registers."""
    return _ROWS_PER_CONSUMER * (columns + 2 * block) // 128 <= _MAX_TILE_REGISTERS


def _dq_smem_bytes(spec: AttentionSpec, block_kv: int, num_stages: int) -> int:
    """Both consumers' queries and output gradients with lse and delta, and the rings of keys and values."""
    columns = sum(padded_head_dims(spec))
    resident = NUM_CONSUMERS * _ROWS_PER_CONSUMER * (2 * columns + 8)
    return resident + num_stages * 2 * block_kv * columns + BARRIER_BYTES


def _dkv_smem_bytes(spec: AttentionSpec, block_q: int, num_stages: int) -> int:
    """The consumers' keys and values, and the rings of queries and output gradients with lse and delta."""
    columns = sum(padded_head_dims(spec))
    resident = NUM_CONSUMERS * _ROWS_PER_CONSUMER * 2 * columns
    return resident + num_stages * block_q * (2 * columns + 8) + BARRIER_BYTES


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """The sum of the two kernels."""
    rows = NUM_CONSUMERS * _ROWS_PER_CONSUMER
    return costs.two_kernels_seconds(
        spec,
        constants,
        group_parts=config.group_parts,
        head_multiple=config.head_multiple,
        dq_tile=(rows, config.dq_block_kv),
        dkv_tile=(config.dkv_block_q, rows),
        dq_num_stages=config.dq_num_stages,
        dkv_num_stages=config.dkv_num_stages,
    )


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    return costs.not_estimated(spec, config.head_multiple)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv]; the operands end with out, lse, dout, dlse."""
    if (reason := unsupported(spec)) is not None:
        raise NotImplementedError(f"attention_backward[pallas]: backward_two_kernels {reason}.")
    given = backward.Given.of(spec, operands, config.group_parts)
    kernels = lambda in_parts, padded: _gradients(in_parts, config, padded, given.extras)
    return backward.gradients(given, backward.add_up(given), kernels, config.head_multiple)


def _gradients(
    spec: AttentionSpec, config: Config, operands: backward.Operands, extras: dict[str, jax.Array]
) -> list[jax.Array]:
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params: dict[str, Any] = dict(
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    inputs = kernel_inputs(extras, config.dkv_block_q, config.dq_block_kv)
    rows = NUM_CONSUMERS * _ROWS_PER_CONSUMER
    (batch, num_queries, num_heads, _), (num_keys, num_kv_heads) = spec.q.shape, spec.k.shape[1:3]
    dq = plgpu.kernel(
        named_kernel("attention_dq", _dq_kernel, spec=spec, config=config),
        out_type=like(operands.q),
        grid=(num_heads, pl.cdiv(num_queries, rows), batch),
        grid_names=("head", "q_block", "batch"),
        **params,
    )(*operands, inputs)
    dk, dv = plgpu.kernel(
        named_kernel("attention_dkv", _dkv_kernel, spec=spec, config=config),
        out_type=[like(operands.k), like(operands.v)],
        grid=(num_kv_heads, pl.cdiv(num_keys, rows), batch),
        grid_names=("kv_head", "kv_block", "batch"),
        **params,
    )(*operands, inputs)
    return [dq, dk, dv]


def _dq_kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, dout_gmem: Any, lse_gmem: Any, delta_gmem: Any,
    inputs: dict[str, Any], dq_gmem: Any, *, spec: AttentionSpec, config: Config,
) -> None:  # fmt: skip
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = _ROWS_PER_CONSUMER, config.dq_block_kv
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(spec.group_size))
    # The last block of queries sees the most keys, so it is launched first.
    q_block = lax.axis_index("q_block")
    q_block = lax.axis_size("q_block") - 1 - q_block if spec.causal else q_block
    q_base = q_block * (NUM_CONSUMERS * block_q)
    offset = query_offset(inputs)
    kv_iters = key_iters(spec, q_base + NUM_CONSUMERS * block_q + offset, block_kv)

    def scope(q_smem: Any, dout_smem: Any, lse_smem: Any, delta_smem: Any, full: Any) -> None:
        consumer = lax.axis_index("warpgroup")
        my_q = q_base + consumer * block_q
        queries = pl.ds(my_q, block_q)
        q_smem, dout_smem = q_smem.at[consumer], dout_smem.at[consumer]
        lse_smem, delta_smem = lse_smem.at[consumer], delta_smem.at[consumer]

        def accumulate(walk_keys: Any) -> None:
            my_full = full.at[consumer]
            plgpu.copy_gmem_to_smem(q_gmem.at[batch, queries, head], q_smem, my_full)
            plgpu.copy_gmem_to_smem(dout_gmem.at[batch, queries, head], dout_smem, my_full)
            plgpu.copy_gmem_to_smem(lse_gmem.at[batch, head, queries], lse_smem, my_full)
            plgpu.copy_gmem_to_smem(delta_gmem.at[batch, head, queries], delta_smem, my_full)
            plgpu.barrier_wait(my_full)
            lse = plgpu.load(lse_smem, layout=ROWS)
            delta = plgpu.load(delta_smem, layout=ROWS)
            dq = plgpu.layout_cast(jnp.zeros((block_q, head_dim), jnp.float32), TILE)
            dq, _, _ = walk_keys((dq, lse, delta))
            q_smem[...] = (dq * gradient_scale(spec)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem, dq_gmem.at[batch, queries, head])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, k_smem: Any, v_smem: Any, k_empty: Any, v_empty: Any, carry: Any) -> Any:
            dq, lse, delta = carry
            (kv_idx,) = indices
            s = _product((block_q, block_kv), q_smem, k_smem.transpose((1, 0)))
            s = mask(s, spec, my_q + offset, kv_idx * block_kv)
            p = jnp.exp2(s * (spec.scale * LOG2E) - lax.broadcast_in_dim(lse, s.shape, [0]))
            dp = _product((block_q, block_kv), dout_smem, v_smem.transpose((1, 0)))
            plgpu.barrier_arrive(v_empty)
            ds = round_logit_gradients(p * (dp - lax.broadcast_in_dim(delta, dp.shape, [0])), spec)
            dq = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, ds, k_smem))(plgpu.ACC.init(dq))
            plgpu.barrier_arrive(k_empty)
            return dq, lse, delta

        kv_spec = lambda columns: plgpu.BlockSpec(
            (None, block_kv, None, columns), lambda i: (batch, i, kv_head, 0), transforms=transforms_of(columns)
        )
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(kv_iters,),
            in_specs=[kv_spec(head_dim), kv_spec(value_dim)],
            max_concurrent_steps=min(config.dq_num_stages, pl.cdiv(spec.k.shape[1], block_kv)),
            memory_registers=PRODUCER_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=NUM_CONSUMERS,
            manual_consumed_barriers=True,
            compute_context=accumulate,
        )(k_gmem, v_gmem)

    tile = lambda columns: plgpu.SMEM((NUM_CONSUMERS, block_q, columns), dtype, transforms=transforms_of(columns))
    pl.run_scoped(
        scope,
        q_smem=tile(head_dim),
        dout_smem=tile(value_dim),
        lse_smem=plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
        delta_smem=plgpu.SMEM((NUM_CONSUMERS, block_q), jnp.float32),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=NUM_CONSUMERS),
        collective_axes="warpgroup",
    )


def _dkv_kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, dout_gmem: Any, lse_gmem: Any, delta_gmem: Any,
    inputs: dict[str, Any], dk_gmem: Any, dv_gmem: Any, *, spec: AttentionSpec, config: Config,
) -> None:  # fmt: skip
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = config.dkv_block_q, _ROWS_PER_CONSUMER
    batch, kv_head = lax.axis_index("batch"), lax.axis_index("kv_head")
    group = spec.group_size
    kv_base = lax.axis_index("kv_block") * (NUM_CONSUMERS * block_kv)
    offset = query_offset(inputs)
    q_iters = pl.cdiv(spec.q.shape[1], block_q)
    first = jnp.int32(0)
    if spec.causal:
        # Queries before the first key of the block see none of its keys.
        first = lax.div(jnp.maximum(kv_base - offset, 0), jnp.int32(block_q))
        q_iters = jnp.maximum(q_iters - first, 0)

    def scope(k_smem: Any, v_smem: Any, kv_full: Any) -> None:
        consumer = lax.axis_index("warpgroup")
        keys = (batch, pl.ds(kv_base + consumer * block_kv, block_kv), kv_head)
        k_smem, v_smem, kv_full = k_smem.at[consumer], v_smem.at[consumer], kv_full.at[consumer]

        def accumulate(walk_queries: Any) -> None:
            plgpu.copy_gmem_to_smem(k_gmem.at[keys], k_smem, kv_full)
            plgpu.copy_gmem_to_smem(v_gmem.at[keys], v_smem, kv_full)
            plgpu.barrier_wait(kv_full)
            zeros = lambda columns: plgpu.layout_cast(jnp.zeros((block_kv, columns), jnp.float32), TILE)
            dk, dv = walk_queries((zeros(head_dim), zeros(value_dim)))
            store(dk * gradient_scale(spec), k_smem, dk_gmem)
            store(dv, v_smem, dv_gmem)
            plgpu.wait_smem_to_gmem(0)

        def store(acc: jax.Array, staging: Any, out_gmem: Any) -> None:
            staging[...] = acc.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out_gmem.at[keys])

        def step(indices: Any, q_smem: Any, dout_smem: Any, lse_smem: Any, delta_smem: Any, carry: Any) -> Any:
            _, q_idx = indices
            shape = (block_kv, block_q)
            s = _product(shape, k_smem, q_smem.transpose((1, 0)))
            s = mask(s, spec, (first + q_idx) * block_q + offset, keys[1].start, keys_in_rows=True)
            lse, delta = plgpu.load(lse_smem, layout=COLUMNS), plgpu.load(delta_smem, layout=COLUMNS)
            p = jnp.exp2(s * (spec.scale * LOG2E) - lax.broadcast_in_dim(lse, shape, [1]))
            p16 = p.astype(dtype)
            dk, dv = carry
            dv = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, p16, dout_smem))(plgpu.ACC.init(dv))
            dp = _product(shape, v_smem, dout_smem.transpose((1, 0)))
            ds = round_logit_gradients(p * (dp - lax.broadcast_in_dim(delta, shape, [1])), spec)
            dk = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, ds, q_smem))(plgpu.ACC.init(dk))
            return dk, dv

        query_head = lambda g: kv_head * group + g
        tile_spec = lambda columns: plgpu.BlockSpec(
            (None, block_q, None, columns),
            lambda g, i: (batch, first + i, query_head(g), 0),
            transforms=transforms_of(columns),
        )
        row_spec = plgpu.BlockSpec((None, None, block_q), lambda g, i: (batch, query_head(g), first + i))
        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(group, q_iters),
            in_specs=[tile_spec(head_dim), tile_spec(value_dim), row_spec, row_spec],
            max_concurrent_steps=min(config.dkv_num_stages, group * pl.cdiv(spec.q.shape[1], block_q)),
            memory_registers=PRODUCER_REGISTERS,
            wg_axis="warpgroup",
            num_compute_wgs=NUM_CONSUMERS,
            compute_context=accumulate,
        )(q_gmem, dout_gmem, lse_gmem, delta_gmem)

    tiles = lambda columns: plgpu.SMEM((NUM_CONSUMERS, block_kv, columns), dtype, transforms=transforms_of(columns))
    pl.run_scoped(
        scope,
        k_smem=tiles(head_dim),
        v_smem=tiles(value_dim),
        kv_full=plgpu.Barrier(num_arrivals=2, num_barriers=NUM_CONSUMERS),
        collective_axes="warpgroup",
    )


def _product(shape: tuple[int, int], lhs: Any, rhs: Any) -> jax.Array:
    """lhs @ rhs in a fresh accumulator."""

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, lhs, rhs)
        return acc_ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
