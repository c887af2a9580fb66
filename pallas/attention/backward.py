"""FlashAttention backward on Hopper tensor cores, in Pallas Mosaic GPU: in one kernel, or in two, which are here.

Algorithm. With P = exp(c S - lse) computed anew from the saved logsumexp, dP = dO V^T and
delta = rowsum(dO * O) - dlse, the logits' gradient is dS = P * (dP - delta), and

    dQ = c dS K          kernel 1: a CTA owns queries and walks the keys, as the forward pass does
    dK = c dS^T Q        kernel 2: a CTA owns keys and walks the queries that see them, for every
    dV = P^T dO                    query head of the group, so that the sum over heads stays in registers

Kernel 2 works on transposed blocks: S^T = K Q^T leaves P^T and dS^T in registers in the layout in which
they are the left operands of the last two products. Both kernels sum in a fixed order: the gradients
are bitwise repeatable. Together they compute 7 products where one kernel needs 5.

Up to head dimension 128 there is one kernel with 5 products (`attention_backward_fused`); where the same bits are asked
for in every run, only up to 64, as above that its order costs more than the two products. It alone handles windows,
lengths, segments and soft cap. For these XLA takes NaN out of padding before the kernel, makes the logsumexp of queries
that see no key infinite, and adds what they have averaged to dV.

Above head dimension 128 the two accumulators of kernel 2 no longer fit one warpgroup's registers. There
both consumers work on the same keys, and one computes dV, the other dK: see `attention_backward_wide`.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B; structure after JAX's attention_mgpu.
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
from jaxtyping import Array, Float

from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.pallas.attention import backward_fused as attention_backward_fused
from jaxkernels.pallas.attention import backward_wide as attention_backward_wide
from jaxkernels.pallas.attention.blocks import (
    BARRIER_BYTES,
    COLUMNS,
    FLOPS_PER_SM,
    LAUNCH_SECONDS,
    LOG2E,
    NUM_CONSUMERS,
    PRODUCER_REGISTERS,
    ROWS,
    TILE,
    features,
    gradient_scale,
    kernel_inputs,
    key_iters,
    keys_inside,
    least_head_multiple,
    mask,
    may_see_nothing,
    pad_heads,
    padded_head_dims,
    queries_inside,
    query_offset,
    round_logit_gradients,
    transforms_of,
    unsupported,
    visible_pairs,
)
from jaxkernels.pallas.attention.delta import row_sums

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "shortlist", "unsupported"]

VERSION = 5

#: Rows of a consumer's tile: queries in kernel 1, keys in kernel 2.
_ROWS_PER_CONSUMER = 64

# The search space: what is tried along each knob, the usual setting first.
_BLOCKS = (64, 128)
_STAGES = (2, 3, 1)
#: Registers of a consumer thread for accumulators, logits and their gradients, of the 240 it has.
_MAX_TILE_REGISTERS = 192
#: What more parts of a group must gain, by the model.
_GAIN_OF_PARTS = 1.05
#: What a step takes beside its products: the elementwise part, for which the tensor cores wait.
_STEP_SECONDS = 0.5e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      dq_block_kv: keys of one pipeline step of the dQ kernel.
      dq_num_stages: slots of its key and value rings.
      dkv_block_q: queries of one pipeline step of the dK, dV kernel.
      dkv_num_stages: slots of its query and output-gradient rings.
      split_outputs: whether its consumers share their keys, one computing dV and the other dK. The kernels are then
        those of `attention_backward_wide`, and the slots of the first hold keys and values in turn, where they are
        equally wide.
      fused: whether that kernel computes dQ too (`attention_backward_fused`).
      multicast: whether, with split outputs, pairs of CTAs load for each other.
      ping_pong: whether, with split outputs, the consumers of a kernel take turns at the tensor cores.
      head_multiple: to multiples of which head dimensions are padded, 64 or, without split outputs, 32; of 32, 64 bytes
        of a row are swizzled together, not 128.
      workspace_bytes: memory in which, with split outputs, dS is kept for the dQ kernel, which then need not compute it
        anew; of one head of keys, if that is more. 0: it is not kept.
      group_parts: in how many parts a group of query heads is dealt with, as if each had keys and values of its own, of
        whose gradients XLA makes sums. Where there are few of these, more SMs then have something to do.
      stores_first: whether in the fused kernel the first block of keys stores each block of dQ's sum, and the others
        wait for that; else the sum begins with zeros. Only where a causal mask, or none, is all there is; with it not
        for groups of query heads, nor more blocks of keys than SMs. In order the first one stores anyway.
    """

    dq_block_kv: int = 64
    dq_num_stages: int = 2
    dkv_block_q: int = 64
    dkv_num_stages: int = 2
    split_outputs: bool = False
    fused: bool = False
    multicast: bool = True
    ping_pong: bool = True
    head_multiple: int = 64
    workspace_bytes: int = 0
    group_parts: int = 1
    stores_first: bool = False

    def __post_init__(self) -> None:
        check_fields("attention_backward[pallas]", self)
        blocks, stages = (self.dq_block_kv, self.dkv_block_q), (self.dq_num_stages, self.dkv_num_stages)
        if any(block % 64 for block in blocks) or min(blocks) <= 0 or min(stages) < 1:
            raise ValueError(
                "attention_backward[pallas]: block sizes must be positive multiples of 64 and stages at least 1; "
                f"got {self}."
            )
        if self.group_parts < 1:
            raise ValueError(f"attention_backward[pallas]: group_parts must be at least 1; got {self}.")
        if self.workspace_bytes < 0:
            raise ValueError(f"attention_backward[pallas]: workspace_bytes must not be negative; got {self}.")
        if self.fused and (self.split_outputs or self.dkv_num_stages < 2):
            raise ValueError(
                "attention_backward[pallas]: fused needs dkv_num_stages of at least 2 and excludes split_outputs; "
                f"got {self}."
            )
        if self.stores_first and not self.fused:
            raise ValueError(f"attention_backward[pallas]: stores_first needs fused; got {self}.")
        if self.head_multiple not in ((64,) if self.split_outputs else (64, 32)):
            raise ValueError(
                f"attention_backward[pallas]: head_multiple must be 64 or, without split_outputs, 32; got {self}."
            )
        is_wider = max(self.dq_block_kv, self.dkv_block_q) > 64
        if self.split_outputs and (is_wider or min(self.dq_num_stages, self.dkv_num_stages) < 2):
            raise ValueError(
                f"attention_backward[pallas]: split_outputs needs blocks of 64 and stages of at least 2; got {self}."
            )


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    head_dim = max(spec.q.shape[3], spec.v.shape[3])
    if head_dim <= 64:
        config = Config(dkv_block_q=128, fused=True, head_multiple=least_head_multiple(spec))
    elif head_dim <= 128:
        is_fused = not spec.deterministic or bool(features(spec))
        config = Config(fused=is_fused, head_multiple=least_head_multiple(spec))
    else:
        dq_stages, dkv_stages = attention_backward_wide.num_stages(spec)
        # Pairs whose blocks of keys differ in length wait for each other; turns then cost less than they gain.
        config = Config(
            dq_num_stages=min(3, dq_stages[-1]),
            dkv_num_stages=min(3, dkv_stages[-1]),
            split_outputs=True,
            multicast=not spec.causal,
            ping_pong=spec.causal,
        )
    return (_with_parts(spec, config),)


def _with_parts(spec: AttentionSpec, config: Config) -> Config:
    """In as few parts as no others are much faster than, by the model.

    Of 8192 tokens, 8 query heads and one key head, 64 SMs would have a block of keys each, and with a causal mask the
    first of these almost twice the average.
    """
    num_parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    configs = [dataclasses.replace(config, group_parts=n) for n in num_parts]
    seconds = [estimate(spec, config) for config in configs]
    chosen = next(config for config, time in zip(configs, seconds) if time < _GAIN_OF_PARTS * min(seconds))
    in_parts = _in_parts(spec, chosen.group_parts)
    stores_first = chosen.fused and attention_backward_fused.stores_first_by_default(in_parts, chosen.dkv_block_q)
    return dataclasses.replace(chosen, stores_first=stores_first)


def _in_parts(spec: AttentionSpec, num_parts: int) -> AttentionSpec:
    """With a head of keys and values for each part of a group of query heads."""
    repeat = lambda x: dataclasses.replace(x, shape=(*x.shape[:2], num_parts * x.shape[2], x.shape[3]))
    return dataclasses.replace(spec, k=repeat(spec.k), v=repeat(spec.v))


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the shortlist, and, for the two kernels, blocks whose tiles fit the registers and whose rings fit shared
    memory.

    A single slot, which nothing can be loaded beside, only where two do not fit. The fused kernel up to head dimension
    128, alone where there is more than a causal mask, also with head dimensions padded to multiples of 32 where that is
    less; above it the consumers that share their keys, too. Each with its groups in the parts that suit it, and the
    fused one, where it can, with dQ's sum begun in both ways.
    """
    for config in itertools.chain(shortlist(spec), (_with_parts(spec, config) for config in _schedules(spec))):
        yield config
        in_parts = _in_parts(spec, config.group_parts)
        if config.fused and not spec.deterministic and attention_backward_fused.can_store_first(in_parts):
            yield dataclasses.replace(config, stores_first=not config.stores_first)


def _schedules(spec: AttentionSpec) -> Iterator[Config]:
    """The search space, with groups as a whole."""
    head_dim, value_dim = padded_head_dims(spec)
    widest = max(head_dim, value_dim)

    def rings(smem_bytes: Callable[[int, int], int], accumulator_columns: int) -> list[tuple[int, int]]:
        found = []
        for block in _BLOCKS:
            fits = [n for n in _STAGES if smem_bytes(block, n) <= spec.target.smem_bytes]
            # float32 accumulators over the 128 threads of a consumer, and for each pair P and dS beside them.
            if _ROWS_PER_CONSUMER * (accumulator_columns + 2 * block) // 128 <= _MAX_TILE_REGISTERS:
                found += [(block, n) for n in fits if n > 1 or 2 not in fits]
        return found

    dq = [] if features(spec) else rings(functools.partial(_dq_smem_bytes, spec), head_dim)
    dkv = rings(functools.partial(_dkv_smem_bytes, spec), head_dim + value_dim)
    for (dq_block_kv, dq_stages), (dkv_block_q, dkv_stages) in itertools.product(dq, dkv):
        yield Config(dq_block_kv, dq_stages, dkv_block_q, dkv_stages)
    if widest <= 128:
        fused_smem_bytes = functools.partial(attention_backward_fused.smem_bytes, head_dim, value_dim)
        for block_q, num_stages in rings(fused_smem_bytes, head_dim + value_dim):
            if num_stages > 1:
                config = Config(dkv_block_q=block_q, dkv_num_stages=num_stages, fused=True)
                yield config
                if least_head_multiple(spec) == 32:
                    yield dataclasses.replace(config, head_multiple=32)
    else:
        dq_stages, dkv_stages = attention_backward_wide.num_stages(spec)
        for dq, dkv, multicast, ping_pong in itertools.product(dq_stages, dkv_stages, (True, False), (True, False)):
            yield Config(
                dq_num_stages=dq, dkv_num_stages=dkv, split_outputs=True, multicast=multicast, ping_pong=ping_pong
            )


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


def estimate(spec: AttentionSpec, config: Config) -> float:
    """The sum of the kernels: steps of all CTAs over the SMs, or the longest CTA's."""
    spec = _in_parts(spec, config.group_parts)
    batch, num_queries, num_heads, _ = spec.q.shape
    num_keys, num_kv_heads = spec.k.shape[1:3]
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    columns = head_dim + value_dim
    keys_per_cta = _ROWS_PER_CONSUMER * (1 if config.split_outputs else NUM_CONSUMERS)

    def kernel(ctas: int, longest: int, flops: float, num_stages: int) -> float:
        step = flops / FLOPS_PER_SM + _STEP_SECONDS * (2 if num_stages == 1 else 1)
        steps = longest * pl.cdiv(ctas, spec.target.num_sms)
        if spec.causal:
            average = min(longest, longest * visible_pairs(spec) + 0.5)
            steps = max(longest, average * ctas / spec.target.num_sms)
        return LAUNCH_SECONDS * max(1.0, ctas / spec.target.num_sms) + steps * step

    if config.fused:  # Five products; float32 sums are read and rounded, and if need be zeroed, by other kernels.
        products = kernel(
            batch * num_kv_heads * pl.cdiv(num_keys, keys_per_cta),
            spec.group_size * pl.cdiv(num_queries, config.dkv_block_q),
            2 * keys_per_cta * config.dkv_block_q * (2 * columns + head_dim),
            config.dkv_num_stages,
        )
        is_zeroed = attention_backward_fused.is_zeroed(spec, stores_first=config.stores_first)
        sums = (10 if is_zeroed else 6) * batch * num_queries * num_heads * head_dim
        return products + sums / (spec.target.memory_bytes_per_s or math.inf)
    # Three products of 128 queries in the one, or one where dS is kept; in the other four.
    rows = NUM_CONSUMERS * _ROWS_PER_CONSUMER
    dq = kernel(
        batch * num_heads * pl.cdiv(num_queries, rows),
        pl.cdiv(num_keys, config.dq_block_kv),
        2 * rows * config.dq_block_kv * (head_dim if config.workspace_bytes else columns + head_dim),
        config.dq_num_stages,
    )
    dkv = kernel(
        batch * num_kv_heads * pl.cdiv(num_keys, keys_per_cta),
        spec.group_size * pl.cdiv(num_queries, config.dkv_block_q),
        2 * keys_per_cta * config.dkv_block_q * 2 * columns,
        config.dkv_num_stages,
    )
    return dq + dkv


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array):
    """Returns [dq, dk, dv]; the operands end with out, lse, dout, dlse."""
    if features(spec) and not (config.fused or config.split_outputs):
        asked = ", ".join(features(spec))
        raise ValueError(f"attention_backward[pallas]: {asked}: needs fused or split_outputs; got {config}.")
    if spec.group_size % config.group_parts:
        raise ValueError(
            f"attention_backward[pallas]: group_parts must divide the {spec.group_size} query heads of a key head; got "
            f"{config}."
        )
    in_parts = _in_parts(spec, config.group_parts)
    if config.stores_first and not attention_backward_fused.can_store_first(in_parts):
        raise ValueError(
            "attention_backward[pallas]: stores_first takes no windows, lengths or segments, and with a causal mask no "
            f"groups of query heads and {spec.target.num_sms} blocks of 128 keys at most; got {config}."
        )
    *given, out, lse, dout, dlse = rest
    extras = dict(zip(spec.extra_names, given))
    is_query = queries_inside(spec, extras) if spec.query_lengths else None
    if is_query is not None:
        q, dout = (jnp.where(is_query[:, :, None, None], x, 0) for x in (q, dout))
    if spec.key_lengths:
        is_key = keys_inside(spec, extras)
        k, v = (jnp.where(is_key[:, :, None, None], x, 0) for x in (k, v))
    zeros = None
    if config.fused:
        head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
        is_zeroed = attention_backward_fused.is_zeroed(spec, stores_first=config.stores_first)
        zeros_dim = head_dim if is_zeroed else None
        sums, zeros = row_sums(pad_heads(out, value_dim), pad_heads(dout, value_dim), zeros_dim)
        sums = sums[:, :, : q.shape[1]]
    else:
        sums = jnp.swapaxes(jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1), 1, 2)
    delta = sums - dlse
    mean_gradient = None
    if spec.query_lengths or may_see_nothing(spec):
        # Whoever sees nothing has no gradients but dV's, P is 0 and so must dS be, whatever was averaged.
        is_blind = lse <= MASKED_LOGIT / 2
        if is_query is not None:
            is_blind |= ~is_query[:, None]
        if may_see_nothing(spec):
            mean_gradient = _mean_gradient(spec, dout, is_blind)
        lse, delta = jnp.where(is_blind, jnp.inf, lse), jnp.where(is_blind, 0, delta)
    if config.group_parts == 1:
        dq, dk, dv = _gradients(spec, config, extras, q, k, v, lse, dout, delta, zeros)
    else:
        k, v = (jnp.repeat(x, config.group_parts, axis=2) for x in (k, v))
        dq, *parts = _gradients(in_parts, config, extras, q, k, v, lse, dout, delta, zeros)
        apart = lambda x: x.reshape(*x.shape[:2], -1, config.group_parts, x.shape[3])
        dk, dv = (apart(x).sum(3, dtype=jnp.float32).astype(x.dtype) for x in parts)
    if mean_gradient is not None:
        dv = (dv.astype(jnp.float32) + mean_gradient).astype(dv.dtype)
    return [dq, dk, dv]


def _mean_gradient(spec: AttentionSpec, dout: jax.Array, is_blind: jax.Array) -> Float[Array, "B 1 K D"]:
    """What queries that see no key, padding aside, add to the gradient of every value: they averaged all of them.

    Args:
      dout: zero in padding.
      is_blind: (B, N, T).
    """
    batch, num_keys, num_kv_heads, value_dim = spec.v.shape
    summed = jnp.where(jnp.swapaxes(is_blind, 1, 2)[..., None], dout.astype(jnp.float32), 0).sum(1)
    return summed.reshape(batch, 1, num_kv_heads, spec.group_size, value_dim).sum(3) / num_keys


def _gradients(
    spec: AttentionSpec, config: Config, extras: dict[str, jax.Array],
    q: jax.Array, k: jax.Array, v: jax.Array, lse: jax.Array, dout: jax.Array, delta: jax.Array,
    zeros: jax.Array | None,
) -> list[jax.Array]:  # fmt: skip
    """dq, dk and dv, to which queries with an infinite logsumexp add nothing; nothing in padding may be NaN.

    Args:
      zeros: for dQ's sum, where the fused kernel begins with them.
    """
    padded_rows = (0, -q.shape[1] % 8)
    rows = lambda x: jnp.pad(x, ((0, 0), (0, 0), padded_rows))
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    tiles = [pad_heads(x, dim) for x, dim in ((q, head_dim), (k, head_dim), (v, value_dim), (dout, value_dim))]
    operands = (*tiles, rows(lse * LOG2E), rows(delta))
    if config.split_outputs:
        grads = attention_backward_wide.gradients(spec, config, extras, *operands)
        return [padded[:, : x.shape[1], :, : x.shape[3]] for padded, x in zip(grads, (q, k, v))]
    padded_q, padded_k, padded_v, _ = tiles
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    params: dict[str, Any] = dict(
        num_threads=NUM_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    if config.fused:
        dq, dk, dv = attention_backward_fused.gradients(
            spec, config.dkv_block_q, config.dkv_num_stages, operands, extras, zeros
        )
        dq = (dq * gradient_scale(spec)).astype(q.dtype)
        return [padded[:, : x.shape[1], :, : x.shape[3]] for padded, x in zip((dq, dk, dv), (q, k, v))]
    inputs = kernel_inputs(extras, config.dkv_block_q, config.dq_block_kv)
    dq = plgpu.kernel(
        functools.partial(_dq_kernel, spec=spec, config=config),
        out_type=like(padded_q),
        grid=(q.shape[2], pl.cdiv(q.shape[1], NUM_CONSUMERS * _ROWS_PER_CONSUMER), q.shape[0]),
        grid_names=("head", "q_block", "batch"),
        **params,
    )(*operands, inputs)
    dk, dv = plgpu.kernel(
        functools.partial(_dkv_kernel, spec=spec, config=config),
        out_type=[like(padded_k), like(padded_v)],
        grid=(k.shape[2], pl.cdiv(k.shape[1], NUM_CONSUMERS * _ROWS_PER_CONSUMER), k.shape[0]),
        grid_names=("kv_head", "kv_block", "batch"),
        **params,
    )(*operands, inputs)
    return [padded[:, : x.shape[1], :, : x.shape[3]] for padded, x in zip((dq, dk, dv), (q, k, v))]


def _dq_kernel(
    q_gmem: Any, k_gmem: Any, v_gmem: Any, dout_gmem: Any, lse_gmem: Any, delta_gmem: Any,
    inputs: dict[str, Any], dq_gmem: Any, *, spec: AttentionSpec, config: Config,
) -> None:  # fmt: skip
    dtype, head_dim, value_dim = q_gmem.dtype, q_gmem.shape[3], v_gmem.shape[3]
    block_q, block_kv = _ROWS_PER_CONSUMER, config.dq_block_kv
    batch, head = lax.axis_index("batch"), lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(spec.group_size))
    # The last block of queries sees the most keys: launch it first.
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
        # Queries before the block's first key see none of it.
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
