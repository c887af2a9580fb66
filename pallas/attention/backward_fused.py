"""FlashAttention backward in one kernel, up to head dimension 128: dQ, dK and dV from five products a block.

Roles. A persistent grid processes work items. An item has 128 keys of one head, and the queries of every query head of
the group that see them. There are four warpgroups:

- two consumers take half of the keys each. Their blocks are transposed, so that P^T and dS^T are in registers, as the
  next products need their left operands;
- the third computes dQ, which sums over keys, from the dS^T of both consumers;
- the fourth, the producer, issues all copies.

    consumer c   S^T = K_c Q^T, P^T = exp2(c S^T - lse), dP^T = V_c dO^T, dS^T = P^T * (dP^T - delta),
                 dV_c += P^T dO, dK_c += dS^T Q; dS^T goes to shared memory as well
    dQ           dQ = dS K of the whole block, in float32, through shared memory to
    producer     which has TMA add it to the sum in memory, and loads Q, dO, lse and delta through two rings

    keys   [0, 64)    consumer 0: dS^T --+-- shared memory --> dQ warpgroup --> staging --> TMA reduce-add
           [64, 128)  consumer 1: dS^T --+   (a ring)

The rings continue across items: while the consumers store dK and dV through staging buffers, the producer loads the
next item's keys, values and first queries. Items are assigned to CTAs before the launch.

A consumer's dK product of one block of queries overlaps with the logits of the next block. P is kept only in 16 bits,
as the products read it. With P in float32 as well, or with two more products in flight, there are not enough registers,
and ptxas then serialises all products.

The order of dQ's sum. By default TMA adds blocks in the order in which they are ready, and the last bits of the sum may
differ from run to run. With `spec.deterministic`, blocks of keys add in their own order: a semaphore for each block of
queries counts the additions. The first block of keys stores, so no zeros are needed. All items process their queries
from the last, which every block of keys sees. So each block of keys waits at its first step, and then stays one step
behind the previous one.

Zero-filling dQ in a separate kernel costs one extra write and one extra read of dQ. That matters if items have few
steps. The first block of keys can then store without a fixed order, too (`stores_first`): the producers of the other
blocks wait for its semaphore before they add. The plan puts first blocks on the first CTAs (`_plan_behind_the_first`).

The order of items. At any time all CTAs should work on the same few blocks of queries: then Q and dO are read from
memory once, and dQ is read and written once. CTAs begin with as many streams (a stream is a head of a batch element) as
there are CTAs for. With a causal mask, blocks of keys see different numbers of queries. CTAs that begin together at the
last queries then end one after the other. Their next items are from other streams, the longest first. If there are
groups of query heads, or more blocks of keys than SMs, these next items process their queries from first to last:

    keys of block 0   at the queries of block  7 6 5 4 3 2 1 0 | 6 7                time -->
                  1                            7 6 5 4 3 2 | 4 5 6 7
                  2                            7 6 5 4 | 2 3 4 5 6 7
                  3                            7 6 | 0 1 2 3 4 5 6 7

With a group of query heads, the steps visit one block of queries of every head, then the next block, for the same
reason: CTAs have different numbers of steps, and in head-by-head order they would soon be at different heads. With a
window all CTAs have equally many steps at different queries, so the order is head by head.

Masks. With a causal mask, a window, lengths and segments, a block of keys visits one range of query blocks. Steps at an
edge of the range are masked. There is one loop for masked and unmasked steps, because ptxas serialises the products of
two loops. If the first block of keys does not visit all blocks of queries, dQ's sum begins with zeros. The blocks of
keys that visit a block of queries are consecutive in any case, so each can compute its turn. With a soft cap, P times
the slope of the cap is kept in 16 bits, beside P.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B; dQ's own warpgroup after FlashAttention-3's own warp
(Shah et al. 2024, arXiv:2407.08608), section 3.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkernels.core.arguments import check_fields
from jaxkernels.ops.attention.planning import (
    alternates,
    backward_plan,
    backward_steps,
    balanced_plan,
    in_sets,
    num_even_ctas,
    numbered,
)
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    blocks_of,
    blocks_within,
    ends_of,
    hides_by_causality_alone,
    is_known_at_run_time,
    kernel_inputs,
    keys_seen_by_any,
    looks_back,
    queries_that_see_all,
    queries_that_see_any,
    query_offset,
    segment_query_blocks,
    segment_query_blocks_in_order,
)
from jaxkernels.pallas.attention import backward, costs, limits
from jaxkernels.pallas.attention.costs import Constants
from jaxkernels.pallas.attention.delta import row_sums
from jaxkernels.pallas.attention.layouts import COLUMNS, TRANSFORMS_FLOAT32, swizzle_span, transforms_of
from jaxkernels.pallas.attention.limits import features, least_head_multiple, pad_heads, padded_head_dims
from jaxkernels.pallas.attention.logits import (
    LOG2E,
    change_and_slope,
    gradient_scale,
    hide_other_segments,
    hide_unseen,
    round_logit_gradients,
)
from jaxkernels.pallas.attention.rings import RING_BARRIER_BYTES
from jaxkernels.pallas.names import named_kernel

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "can_store_first", "estimate", "gradients", "is_zeroed",
    "not_estimated", "run", "search_space", "shortlist", "smem_bytes", "unsupported",
]  # fmt: skip

VERSION = 2

#: Fitted to 50 times on an H200 (docs/benchmarks/attention*.json). Attentions that were left out of a fit are estimated
#: with a median error of 1 %; the 90th percentile is 4 %. `step_seconds` and `launch_seconds` were not fitted.
CONSTANTS = Constants(
    flops_per_sm=6.815e12,
    logits_per_sm=4.093e10,
    step_seconds=3e-7,
    item_steps=1.61,
    copy_bytes=3.196e12,
    launch_seconds=5e-6,
)

#: Keys of a consumer warpgroup; `_KEYS` are the keys of a CTA.
_KEYS_PER_CONSUMER = 64
_NUM_CONSUMERS = 2
_KEYS = _NUM_CONSUMERS * _KEYS_PER_CONSUMER
_DQ_WARPGROUP = _NUM_CONSUMERS
_PRODUCER_WARPGROUP = _NUM_CONSUMERS + 1
#: Registers of a thread of a consumer, of the dQ warpgroup, and of the producer. All 512 threads start with 128.
_REGISTERS = (208, 64, 32)
#: Rows of dQ in one product.
_DQ_ROWS = 64
#: The cost of an item in addition to its steps, in steps.
_ITEM_STEPS = 2.0
#: With more steps than this in an item, on average, two things no longer gain: a persistent grid at head dimension 64,
#: and `stores_first` at any head dimension.
_MANY_STEPS = 24
#: `stores_first` is the default only if zero-filling dQ's sum would take at least this long.
_ZEROS_SECONDS = 10e-6

# The search space: the values of each knob, the usual one first.
_BLOCKS = (64, 128)
_STAGES = (2, 3)
#: Registers of a consumer thread for accumulators, logits and their gradients, of the 208 it has.
_MAX_TILE_REGISTERS = 192


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_q: queries of a step.
      num_stages: slots of the rings of queries, output gradients and dS^T.
      head_multiple: head dimensions are padded to multiples of this, 64 or 32. With 32, swizzle spans are 64 bytes
        instead of 128.
      group_parts: the number of parts of a group of query heads. Each part has its own copy of keys and values, and XLA
        sums the gradients of the parts. With few key heads, more SMs then have work.
      stores_first: whether the first block of keys stores each block of dQ's sum, and the others wait for that.
        Otherwise the sum begins with zeros. Requires full attention, or a causal mask without groups of query heads and
        with at most as many blocks of keys as SMs. With `spec.deterministic` the first block stores in any case.
    """

    block_q: int = 64
    num_stages: int = 2
    head_multiple: int = 64
    group_parts: int = 1
    stores_first: bool = False

    def __post_init__(self) -> None:
        check_fields("attention_backward[pallas]", self)
        if self.block_q % 64 or self.block_q <= 0 or self.num_stages < 2 or self.group_parts < 1:
            raise ValueError(
                "attention_backward[pallas]: block_q must be a positive multiple of 64, num_stages at least 2 and "
                f"group_parts at least 1; got {self}."
            )
        if self.head_multiple not in (64, 32):
            raise ValueError(f"attention_backward[pallas]: head_multiple must be 64 or 32; got {self}.")


def unsupported(spec: AttentionSpec) -> str | None:
    if (reason := limits.unsupported(spec)) is not None:
        return reason
    if max(dims := (spec.q.shape[3], spec.v.shape[3])) > 128:
        return f"has registers for head dimensions up to 128, got {dims[0]} and {dims[1]}"
    return None


def shortlist(spec: AttentionSpec) -> tuple[Config, ...]:
    """The default. Empty if `backward_two_kernels` is faster: above head dimension 64 with `spec.deterministic`.

    There the fixed order costs more than the two additional products of `backward_two_kernels`.
    """
    is_narrow = max(spec.q.shape[3], spec.v.shape[3]) <= 64
    if spec.deterministic and not is_narrow and not features(spec):
        return ()
    return (_suited(spec, Config(128 if is_narrow else 64, head_multiple=least_head_multiple(spec))),)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields the shortlist, and blocks whose tiles fit the registers and whose rings fit shared memory.

    Each has head dimensions padded to multiples of 64, and of 32 if that is less padding; the parts of groups that the
    model prefers; and, if possible, both values of `stores_first`.
    """
    for config in itertools.chain(shortlist(spec), (_suited(spec, config) for config in _tilings(spec))):
        yield config
        if not spec.deterministic and can_store_first(backward.in_parts(spec, config.group_parts)):
            yield dataclasses.replace(config, stores_first=not config.stores_first)


def _tilings(spec: AttentionSpec) -> Iterator[Config]:
    """Tilings that fit, without parts of groups."""
    columns = sum(padded_head_dims(spec))
    for block_q, num_stages in itertools.product(_BLOCKS, _STAGES):
        # float32 accumulators over the 128 threads of a consumer, and for each pair P and dS beside them.
        registers = _KEYS_PER_CONSUMER * (columns + 2 * block_q) // 128
        fits = smem_bytes(*padded_head_dims(spec), block_q, num_stages) <= spec.target.smem_bytes
        if fits and registers <= _MAX_TILE_REGISTERS:
            for head_multiple in dict.fromkeys((64, least_head_multiple(spec))):
                yield Config(block_q, num_stages, head_multiple)


def _suited(spec: AttentionSpec, config: Config) -> Config:
    """The tiling, with the parts of groups and the value of `stores_first` that the model prefers."""
    config = backward.with_parts(spec, config, estimate)
    in_parts = backward.in_parts(spec, config.group_parts)
    return dataclasses.replace(config, stores_first=_stores_first_by_default(in_parts, config.block_q))


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """The five products; and the other kernels, which read and round the float32 sums, and zero-fill them if needed."""
    in_parts = backward.in_parts(spec, config.group_parts)
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    products = costs.kernel_seconds(
        in_parts,
        constants,
        steps=backward_steps(in_parts, config.block_q, _KEYS),
        num_streams=in_parts.k.shape[0] * in_parts.k.shape[2],
        tile=(config.block_q, _KEYS),
        columns=3 * head_dim + 2 * value_dim,
        num_stages=config.num_stages,
    )
    bytes_of_dq = 10 if is_zeroed(in_parts, stores_first=config.stores_first) else 6
    others = costs.other_seconds(spec, constants, bytes_of_dq=bytes_of_dq, group_parts=config.group_parts)
    return products + others


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    return costs.not_estimated(spec, config.head_multiple)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv]; the operands end with out, lse, dout, dlse."""
    if config.stores_first and not can_store_first(backward.in_parts(spec, config.group_parts)):
        raise ValueError(
            "attention_backward[pallas]: stores_first needs a spec without windows, lengths and segments; with a "
            "causal mask it also needs one query head for each key head, and at most "
            f"{spec.target.num_sms} blocks of 128 keys; got {config}."
        )
    given = backward.Given.of(spec, operands, config.group_parts)
    head_dim, value_dim = padded_head_dims(spec, config.head_multiple)
    zeros_dim = head_dim if is_zeroed(spec, stores_first=config.stores_first) else None
    sums, zeros = row_sums(pad_heads(given.out, value_dim), pad_heads(given.dout, value_dim), zeros_dim)

    def kernels(in_parts: AttentionSpec, padded: backward.Operands) -> list[jax.Array]:
        dq, dk, dv = gradients(in_parts, config, padded, given.extras, zeros)
        return [(dq * gradient_scale(spec)).astype(spec.q.dtype), dk, dv]

    return backward.gradients(
        given,
        sums[:, :, : spec.q.shape[1]],
        kernels,
        config.head_multiple,
    )


def smem_bytes(head_dim: int, value_dim: int, block_q: int, num_stages: int) -> int:
    """Shared memory: keys and values; the rings of queries, output gradients and dS^T; dQ's staging buffer; and each
    consumer's staging buffer for a piece of dK or dV, one swizzle span wide."""
    columns = head_dim + value_dim
    ring = num_stages * (block_q * (2 * columns + 8) + 2 * _KEYS * block_q)
    buffers = 2 * _KEYS * columns + ring + 4 * block_q * head_dim
    return buffers + 2 * _KEYS * swizzle_span(head_dim, value_dim) + RING_BARRIER_BYTES


def _num_store_slots(most_bytes: int, head_dim: int, value_dim: int, block_q: int, num_stages: int) -> int:
    """The staging buffers of a consumer that fit into `most_bytes`, at most one for each piece of dK and dV."""
    columns = swizzle_span(head_dim, value_dim)
    room = most_bytes - smem_bytes(head_dim, value_dim, block_q, num_stages)
    return max(1, min(1 + room // (2 * _KEYS * columns), (head_dim + value_dim) // columns))


def gradients(
    spec: AttentionSpec,
    config: Config,
    operands: backward.Operands,
    extras: dict[str, jax.Array],
    zeros: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns dq / `gradient_scale` in float32, dk and dv, of padded operands.

    Args:
      extras: the optional operands by name.
      zeros: float32 zeros of q's shape if `is_zeroed`, else None.
    """
    block_q, num_stages = config.block_q, config.num_stages
    q, k, v = operands[:3]
    like = lambda x, dtype=None: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype)
    inputs = _inputs(spec, block_q, extras)
    plan = jnp.asarray(_plan(spec, block_q, zeros is not None))
    run = plgpu.kernel(
        named_kernel(
            "attention_backward",
            _kernel,
            spec=spec,
            block_q=block_q,
            num_stages=num_stages,
            is_zeroed=zeros is not None,
        ),
        out_type=[*([like(q, jnp.float32)] if zeros is None else []), like(k), like(v)],
        grid=(len(plan),),
        grid_names=("cta",),
        num_threads=_PRODUCER_WARPGROUP + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    *others, lse, delta = operands
    # The statistics are one array, made by a concatenation. XLA compiles it with its own emitter, never with Triton,
    # and it is the last kernel before this one. After a Triton or Mosaic kernel, which also sets the largest shared
    # memory, this kernel would take 8 to 11 % longer (docs/pallas-kernels.md, "Two speeds").
    arguments = *others, jnp.stack([lse, -delta]), plan, inputs
    if zeros is None:
        return run(*arguments)
    dq = jax.new_ref(zeros)
    dk, dv = run(*arguments, dq)
    return dq[...], dk, dv


def can_store_first(spec: AttentionSpec) -> bool:
    """Whether the first block of keys can store dQ: it visits all queries, and all items run from the last query."""
    return hides_by_causality_alone(spec) and not _alternates(spec)


def is_zeroed(spec: AttentionSpec, *, stores_first: bool) -> bool:
    """Whether dQ's sum begins with zeros. With a fixed order: if the first block of keys may not visit all queries."""
    return not (stores_first or (spec.deterministic and hides_by_causality_alone(spec)))


def _stores_first_by_default(spec: AttentionSpec, block_q: int) -> bool:
    """True if zero-filling is slow relative to the steps, or if there is a single block of keys (then no CTA waits)."""
    zeros = 4 * math.prod(spec.q.shape) / (spec.target.memory_bytes_per_s or math.inf)
    gains = zeros >= _ZEROS_SECONDS and not _has_many_steps(spec, block_q)
    return can_store_first(spec) and not spec.deterministic and (gains or spec.k.shape[1] <= _KEYS)


def _inputs(spec: AttentionSpec, block_q: int, extras: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The optional operands of the kernel, with the ranges of segments."""
    inputs = kernel_inputs(extras, block_q, _KEYS)
    if spec.segments and spec.deterministic:
        blocks, inputs["first_kv_block"] = segment_query_blocks_in_order(spec, block_q, _KEYS, extras)
        inputs["segment_blocks"] = blocks
    elif spec.segments:
        inputs["segment_blocks"] = segment_query_blocks(spec, block_q, _KEYS, extras)
    return inputs


def _steps(spec: AttentionSpec, block_q: int) -> tuple[int, ...]:
    return backward_steps(spec, block_q, _KEYS)


def _alternates(spec: AttentionSpec) -> bool:
    return alternates(spec, pl.cdiv(spec.k.shape[1], _KEYS))


def _has_many_steps(spec: AttentionSpec, block_q: int) -> bool:
    steps = _steps(spec, block_q)
    return sum(steps) > _MANY_STEPS * len(steps)


def _has_one_item_each(spec: AttentionSpec, block_q: int) -> bool:
    """Whether the grid has a CTA for each item, instead of a persistent grid.

    - With a fixed order, blocks of keys wait for the earlier ones of their stream.
    - With lengths and segments, durations are known at run time only. CTAs with consecutive items of equal total work
      miss L2 too often (head dimension 128, 8 documents in 8192 tokens: 816 us instead of 526).
    - At head dimension 64 a persistent grid gains up to 5 % if items have few steps, and loses up to 2 % if they have
      many.
    """
    if spec.deterministic or is_known_at_run_time(spec):
        return True
    return max(spec.q.shape[3], spec.v.shape[3]) <= 64 and _has_many_steps(spec, block_q)


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, block_q: int, is_zeroed: bool) -> np.ndarray:
    """The items of each CTA (`balanced_plan`)."""
    num_streams, steps = spec.k.shape[0] * spec.k.shape[2], _steps(spec, block_q)
    has_one_item = _has_one_item_each(spec, block_q)
    if not (has_one_item or is_zeroed):
        return _plan_behind_the_first(num_streams, steps, spec.target.num_sms)
    return backward_plan(spec, steps, num_streams, _ITEM_STEPS, is_persistent=not has_one_item)


def _plan_behind_the_first(num_streams: int, steps: Sequence[int], num_sms: int) -> np.ndarray:
    """A plan in which the first block of keys stores, and the others wait for it before they add.

    First blocks are on the first CTAs. The other blocks of a stream are on the same or later CTAs. So if a waiting CTA
    is resident, the CTA that it waits for is resident, too. The number of CTAs with first blocks is about the smallest
    with which they do not end last. A set has one stream for each of these CTAs, so that waits are short.
    """
    durations = [n + _ITEM_STEPS for n in steps]
    num_ctas = num_even_ctas(num_streams * durations, num_sms)
    first_in_a_cta = max(1, int(num_streams * sum(durations) / num_ctas // durations[0]))

    def plan(num_first_ctas: int) -> tuple[np.ndarray, float]:
        def ctas(number: int) -> range:
            stream, kv_block = divmod(number // 2, len(steps))
            return _ctas_that_may_have(stream, kv_block, num_first_ctas, num_ctas)

        items = in_sets(num_streams, len(steps), num_first_ctas)
        return balanced_plan(numbered(items, steps, _ITEM_STEPS), num_ctas, ctas)

    fewest = min(num_ctas, pl.cdiv(num_streams, first_in_a_cta))
    plans = [plan(n) for n in range(fewest, min(fewest + 2, num_ctas) + 1)]
    return min(plans, key=lambda plan: plan[1])[0]


def _ctas_that_may_have(stream: int, kv_block: int, num_first_ctas: int, num_ctas: int) -> range:
    """The CTA of a stream's first block of keys; for the other blocks that CTA and all later ones."""
    begin = stream % num_first_ctas
    return range(begin, begin + 1 if kv_block == 0 else num_ctas)


@dataclasses.dataclass(frozen=True)
class _Item:
    """A work item: 128 keys of a head, and the blocks of queries of each query head of the group that see any of them.

    Attributes:
      batch, kv_head, kv_block: the position of its keys.
      end_block: the end of the visited blocks of queries.
      num_blocks: the number of visited blocks of a query head.
      first_unmasked, end_unmasked: the range of blocks that need no mask, counted from the last block.
      key_end: the number of keys of the batch element.
      is_upward: whether blocks are visited from the first to the last.
    """

    batch: Any
    kv_head: Any
    kv_block: Any
    end_block: Any
    num_blocks: Any
    first_unmasked: Any
    end_unmasked: Any
    key_end: Any
    is_upward: Any

    @property
    def kv_base(self) -> Any:
        return self.kv_block * _KEYS

    @property
    def is_first(self) -> Any:
        """Whether it has the first block of keys."""
        return self.kv_block == 0


@dataclasses.dataclass(frozen=True)
class _Gmem:
    """Operands and results in global memory.

    Attributes:
      statistics: lse and -delta.
      plan: the items of each CTA (`_plan`).
      inputs: the optional operands (`_inputs`).
      dq: dQ's sum, in float32.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    statistics: Any
    plan: Any
    inputs: dict[str, Any]
    dq: Any
    dk: Any
    dv: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Smem:
    """Buffers and barriers of a CTA."""

    k_smem: Any
    v_smem: Any
    q_smem: Any
    dout_smem: Any
    lse_smem: Any
    minus_delta_smem: Any
    ds_smem: Any
    dq_smem: Any
    out_smem: Any
    kv_full: Any
    kv_empty: Any
    q_full: Any
    dout_full: Any
    q_empty: Any
    dout_empty: Any
    ds_full: Any
    ds_empty: Any
    dq_full: Any
    dq_empty: Any


def _allocations(spec: AttentionSpec, gmem: _Gmem, block_q: int, num_stages: int) -> _Smem:
    head_dim, value_dim = gmem.q.shape[3], gmem.v.shape[3]
    num_store_slots = _num_store_slots(spec.target.smem_bytes, head_dim, value_dim, block_q, num_stages)
    tile = lambda *shape: plgpu.SMEM(shape, gmem.q.dtype, transforms=transforms_of(shape[-1]))
    rows = plgpu.SMEM((num_stages, block_q), jnp.float32)
    ring = lambda num_arrivals: plgpu.Barrier(num_arrivals=num_arrivals, num_barriers=num_stages)
    ds_transforms = transforms_of(block_q, head_dim)
    return _Smem(
        k_smem=tile(_KEYS, head_dim),
        v_smem=tile(_KEYS, value_dim),
        q_smem=tile(num_stages, block_q, head_dim),
        dout_smem=tile(num_stages, block_q, value_dim),
        lse_smem=rows,
        minus_delta_smem=rows,
        ds_smem=plgpu.SMEM((num_stages, _KEYS, block_q), gmem.q.dtype, transforms=ds_transforms),
        dq_smem=plgpu.SMEM((block_q, head_dim), jnp.float32, transforms=TRANSFORMS_FLOAT32),
        out_smem=tile(_NUM_CONSUMERS * num_store_slots, _KEYS_PER_CONSUMER, swizzle_span(head_dim, value_dim)),
        kv_full=plgpu.Barrier(num_arrivals=2),
        kv_empty=plgpu.Barrier(num_arrivals=_NUM_CONSUMERS),
        # lse is loaded with the queries, delta with the output gradients.
        q_full=ring(2),
        dout_full=ring(2),
        q_empty=ring(_NUM_CONSUMERS),
        dout_empty=ring(_NUM_CONSUMERS),
        ds_full=ring(_NUM_CONSUMERS),
        ds_empty=ring(1),
        dq_full=plgpu.Barrier(),
        dq_empty=plgpu.Barrier(),
    )


def _kernel(*refs: Any, spec: AttentionSpec, block_q: int, num_stages: int, is_zeroed: bool) -> None:
    gmem = _Gmem(*refs)
    offset, index = query_offset(gmem.inputs), lax.axis_index("cta")
    (batch, num_queries, num_heads, _), num_kv_blocks = spec.q.shape, pl.cdiv(spec.k.shape[1], _KEYS)
    others_wait = not (spec.deterministic or is_zeroed or num_kv_blocks == 1)
    added: Any = None
    if spec.deterministic or others_wait:
        num_counters = batch * num_heads * pl.cdiv(num_queries, block_q)
        added = pl.get_global(plgpu.SemaphoreType.REGULAR((num_counters,)))

    def work(smem: _Smem) -> None:
        cta = _Cta(spec, block_q, num_stages, is_zeroed, others_wait, gmem, smem, added, offset, index)
        warpgroup = lax.axis_index("warpgroup")
        pl.when(warpgroup == _PRODUCER_WARPGROUP)(lambda: _produce(cta))
        pl.when(warpgroup == _DQ_WARPGROUP)(lambda: _sum_queries(cta))
        pl.when(warpgroup < _NUM_CONSUMERS)(lambda: _consume(cta, warpgroup))

    pl.run_scoped(work, _allocations(spec, gmem, block_q, num_stages), collective_axes="warpgroup")


@dataclasses.dataclass(frozen=True)
class _Cta:
    """A CTA, and its items.

    Attributes:
      is_zeroed: whether dQ's sum begins with zeros.
      others_wait: whether other blocks of keys wait until the first one has stored.
      added: a semaphore for each block of queries, which counts additions; None if no CTA waits.
      offset: the first query's position in the sequence.
      index: the CTA's number.
    """

    spec: AttentionSpec
    block_q: int
    num_stages: int
    is_zeroed: bool
    others_wait: bool
    gmem: _Gmem
    smem: _Smem
    added: Any
    offset: Any
    index: Any

    @property
    def num_q_blocks(self) -> int:
        return pl.cdiv(self.spec.q.shape[1], self.block_q)

    @property
    def cuts_keys(self) -> bool:
        """Whether a block may have keys past the last one."""
        return self.spec.key_lengths or self.spec.k.shape[1] % _KEYS != 0

    @property
    def masks_places(self) -> bool:
        return bool(self.spec.index_terms) or self.cuts_keys

    def is_cut(self, kv_base: Any, key_end: Any) -> Any:
        """Whether some keys of a block are beyond the end of the keys. All of its steps are masked then."""
        return kv_base + _KEYS > key_end

    def following(self, slot: Any) -> Any:
        return jnp.where(slot == self.num_stages - 1, 0, slot + 1)

    def previous(self, slot: Any) -> Any:
        return jnp.where(slot == 0, self.num_stages - 1, slot - 1)

    def for_each_item(self, run: Callable[[Any, Any], Any], carry: Any) -> Any:
        if _has_one_item_each(self.spec, self.block_q):
            return run(0, carry)
        return lax.fori_loop(0, self.gmem.plan[self.index, 0], run, carry)

    def item(self, nth: Any) -> _Item:
        spec, block_q, offset, inputs = self.spec, self.block_q, self.offset, self.gmem.inputs
        num_q_blocks, num_kv_blocks = self.num_q_blocks, pl.cdiv(spec.k.shape[1], _KEYS)
        entry = self.gmem.plan[self.index, nth + 1]
        number, is_upward = lax.div(entry, jnp.int32(2)), lax.rem(entry, jnp.int32(2)) != 0
        stream, kv_block = lax.div(number, jnp.int32(num_kv_blocks)), lax.rem(number, jnp.int32(num_kv_blocks))
        batch, kv_head = lax.div(stream, jnp.int32(spec.k.shape[2])), lax.rem(stream, jnp.int32(spec.k.shape[2]))
        kv_base = kv_block * _KEYS
        query_end, key_end = ends_of(spec, inputs, batch, offset)
        seeing = queries_that_see_any(spec, kv_base, jnp.minimum(kv_base + _KEYS, key_end), offset, query_end)
        first_block, end_block = blocks_of(seeing[0] - offset, seeing[1] - offset, block_q)
        seeing = queries_that_see_all(spec, kv_base, kv_base + _KEYS, offset, num_q_blocks * block_q + offset)
        first_whole, end_whole = blocks_within(seeing[0] - offset, seeing[1] - offset, block_q)
        if not (looks_back(spec) or spec.query_lengths):
            end_block = end_whole = num_q_blocks
        if spec.segments:
            first, end, first_of_one, end_of_one = (inputs["segment_blocks"][batch, kv_block, i] for i in range(4))
            first_block, end_block = jnp.maximum(first_block, first), jnp.minimum(end_block, end)
            first_whole, end_whole = jnp.maximum(first_whole, first_of_one), jnp.minimum(end_whole, end_of_one)
        num_blocks = jnp.maximum(end_block - first_block, 0)
        if spec.key_lengths:
            num_blocks = jnp.where(kv_base < key_end, num_blocks, 0)
        first_unmasked, end_unmasked = end_block - end_whole, end_block - first_whole
        if self.cuts_keys:
            end_unmasked = jnp.where(self.is_cut(kv_base, key_end), 0, end_unmasked)
        return _Item(batch, kv_head, kv_block, end_block, num_blocks, first_unmasked, end_unmasked, key_end, is_upward)

    def place(self, item: _Item, step: Any) -> tuple[Any, Any]:
        """The head of a step in its group, and its block of queries, counted from the last."""
        group = self.spec.group_size
        if group == 1:
            head, i = 0, step
        elif self.spec.window is None:
            head, i = lax.rem(step, jnp.int32(group)), lax.div(step, jnp.int32(group))
        else:
            head, i = lax.div(step, item.num_blocks), lax.rem(step, item.num_blocks)
        if _alternates(self.spec):
            i = jnp.where(item.is_upward, item.num_blocks - 1 - i, i)
        return head, i

    def queries(self, item: _Item, step: Any) -> tuple[Any, Any]:
        """The query head of a step, and its block of queries."""
        head, i = self.place(item, step)
        return item.kv_head * self.spec.group_size + head, item.end_block - 1 - i

    def counter(self, item: _Item, step: Any) -> Any:
        """The semaphore that counts the additions to a step's block of dQ."""
        head, q_block = self.queries(item, step)
        return self.added.at[(item.batch * self.spec.q.shape[2] + head) * self.num_q_blocks + q_block]

    def rank(self, item: _Item, step: Any) -> Any:
        """The number of blocks of keys that add to a step's block of dQ before this one."""
        if hides_by_causality_alone(self.spec):
            return item.kv_block
        _, q_block = self.queries(item, step)
        query = q_block * self.block_q + self.offset
        first, _ = blocks_of(*keys_seen_by_any(self.spec, query, query + self.block_q, self.spec.k.shape[1]), _KEYS)
        if self.spec.segments:
            first = jnp.maximum(first, self.gmem.inputs["first_kv_block"][item.batch, q_block])
        return item.kv_block - first


# The producer: loads, and adds dQ to its sum by TMA.


def _produce(cta: _Cta) -> None:
    plgpu.set_max_registers(_REGISTERS[2], action="decrease")
    plgpu.barrier_arrive(cta.smem.dq_empty)
    cta.for_each_item(functools.partial(_copy_item, cta), jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _copy_item(cta: _Cta, nth: Any, slot: Any) -> Any:
    gmem, smem, is_deterministic = cta.gmem, cta.smem, cta.spec.deterministic
    item = cta.item(nth)
    num_steps = cta.spec.group_size * item.num_blocks
    plgpu.barrier_wait(smem.kv_empty)
    keys = (item.batch, pl.ds(item.kv_base, _KEYS), item.kv_head)
    plgpu.copy_gmem_to_smem(gmem.k.at[keys], smem.k_smem, smem.kv_full)
    plgpu.copy_gmem_to_smem(gmem.v.at[keys], smem.v_smem, smem.kv_full)

    def load_and_add(step: Any, slot: Any) -> Any:
        adding = step - cta.num_stages
        pl.when(step < num_steps)(lambda: _load(cta, item, step, slot))
        pl.when(adding >= 0)(lambda: _add(cta, item, adding))
        if is_deterministic:
            plgpu.wait_smem_to_gmem(1)
            pl.when(adding > 0)(lambda: _announce(cta, item, adding - 1))
        elif cta.others_wait:
            is_awaited = item.is_first & (adding > 0)
            pl.when(is_awaited)(lambda: _announce_when_added(cta, item, adding - 1, 1))
        return cta.following(slot)

    # `num_stages` additional steps end at the slot that follows the last step.
    slot = lax.fori_loop(0, num_steps + cta.num_stages, load_and_add, slot)
    if is_deterministic:
        plgpu.wait_smem_to_gmem(0)
        pl.when(num_steps > 0)(lambda: _announce(cta, item, num_steps - 1))
    elif cta.others_wait:
        pl.when(item.is_first)(lambda: _announce_when_added(cta, item, num_steps - 1, 0))
    return slot


def _load(cta: _Cta, item: _Item, step: Any, slot: Any) -> None:
    """Loads a step's queries and output gradients, with lse and delta."""
    gmem, smem = cta.gmem, cta.smem
    head, q_block = cta.queries(item, step)
    batch, rows = item.batch, pl.ds(q_block * cta.block_q, cta.block_q)
    plgpu.barrier_wait(smem.q_empty.at[slot])
    plgpu.copy_gmem_to_smem(gmem.q.at[batch, rows, head], smem.q_smem.at[slot], smem.q_full.at[slot])
    lse, minus_delta = (gmem.statistics.at[i, batch, head, rows] for i in range(2))
    plgpu.copy_gmem_to_smem(lse, smem.lse_smem.at[slot], smem.q_full.at[slot])
    plgpu.barrier_wait(smem.dout_empty.at[slot])
    plgpu.copy_gmem_to_smem(gmem.dout.at[batch, rows, head], smem.dout_smem.at[slot], smem.dout_full.at[slot])
    plgpu.copy_gmem_to_smem(minus_delta, smem.minus_delta_smem.at[slot], smem.dout_full.at[slot])


def _add(cta: _Cta, item: _Item, step: Any) -> None:
    """Adds a step's dQ to the sum."""
    smem = cta.smem
    head, q_block = cta.queries(item, step)
    to = cta.gmem.dq.at[item.batch, pl.ds(q_block * cta.block_q, cta.block_q), head]
    if cta.others_wait:
        stored = cta.counter(item, step)
        pl.when(~item.is_first)(lambda: plgpu.semaphore_wait(stored, 1, decrement=False, memory_scope="gpu"))
    plgpu.barrier_wait(smem.dq_full)
    if cta.is_zeroed:
        plgpu.copy_smem_to_gmem(smem.dq_smem, to, reduction_op="add")
    else:
        pl.when(item.is_first)(lambda: plgpu.copy_smem_to_gmem(smem.dq_smem, to))
        pl.when(~item.is_first)(lambda: plgpu.copy_smem_to_gmem(smem.dq_smem, to, reduction_op="add"))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(smem.dq_empty)


def _announce(cta: _Cta, item: _Item, step: Any) -> None:
    """Signals the next block of keys, or all others, that a step's dQ is in the sum."""
    plgpu.semaphore_signal(cta.counter(item, step), memory_scope="gpu")


def _announce_when_added(cta: _Cta, item: _Item, step: Any, num_pending: int) -> None:
    plgpu.wait_smem_to_gmem(num_pending)
    _announce(cta, item, step)


# The dQ warpgroup.


def _sum_queries(cta: _Cta) -> None:
    """Computes dQ of each step from the dS of both consumers."""
    plgpu.set_max_registers(_REGISTERS[1], action="decrease")
    smem, block_q, head_dim = cta.smem, cta.block_q, cta.gmem.q.shape[3]
    for slot in range(cta.num_stages):
        plgpu.barrier_arrive(smem.ds_empty.at[slot])

    item: Any = cta.item(0) if cta.spec.deterministic else None  # With a fixed order a CTA has one item.

    def multiply(step: Any, slot: Any) -> Any:
        plgpu.barrier_wait(smem.ds_full.at[slot])
        plgpu.barrier_wait(smem.dq_empty)
        width = swizzle_span(head_dim)
        for row, column in itertools.product(range(0, block_q, _DQ_ROWS), range(0, head_dim, width)):
            rows, columns = pl.ds(row, _DQ_ROWS), pl.ds(column, width)
            ds = smem.ds_smem.at[slot, :, rows].transpose((1, 0))
            smem.dq_smem.at[rows, columns][...] = _product((_DQ_ROWS, width), ds, smem.k_smem.at[:, columns])
        plgpu.barrier_arrive(smem.ds_empty.at[slot])
        if cta.spec.deterministic:
            # This warpgroup waits for its turn, so that the producer can go on with its loads.
            turn, rank = cta.counter(item, step), cta.rank(item, step)
            plgpu.semaphore_wait(turn, rank, decrement=False, memory_scope="gpu")
        plgpu.commit_smem()
        plgpu.barrier_arrive(smem.dq_full)
        return cta.following(slot)

    num_blocks = cta.for_each_item(lambda nth, n: n + cta.item(nth).num_blocks, jnp.int32(0))
    lax.fori_loop(0, cta.spec.group_size * num_blocks, multiply, jnp.int32(0))


# The consumers: dK and dV of 64 keys each.


@dataclasses.dataclass(frozen=True)
class _Work:
    """A consumer's share of an item.

    Attributes:
      consumer: the number of the consumer.
      keys: the slice of its keys among the CTA's keys.
      dk_ref, dv_ref: accumulators.
    """

    cta: _Cta
    consumer: Any
    keys: Any
    item: _Item
    key_start: Any
    dk_ref: Any
    dv_ref: Any

    def spread(self, row: jax.Array) -> jax.Array:
        """Broadcasts a value of each query to all keys."""
        return lax.broadcast_in_dim(row, (_KEYS_PER_CONSUMER, self.cta.block_q), [1])


def _consume(cta: _Cta, consumer: Any) -> None:
    smem = cta.smem
    plgpu.set_max_registers(_REGISTERS[0], action="increase")
    keys = pl.ds(consumer * _KEYS_PER_CONSUMER, _KEYS_PER_CONSUMER)
    plgpu.barrier_arrive(smem.kv_empty)
    # All slots are free, except for the last slot of queries: the first step releases it.
    for slot in range(cta.num_stages):
        if slot < cta.num_stages - 1:
            plgpu.barrier_arrive(smem.q_empty.at[slot])
        plgpu.barrier_arrive(smem.dout_empty.at[slot])

    accumulator = lambda columns: plgpu.ACC((_KEYS_PER_CONSUMER, columns), jnp.float32)
    head_dim, value_dim = cta.gmem.q.shape[3], cta.gmem.v.shape[3]

    def consume_item(nth: Any, slot: Any) -> Any:
        run = functools.partial(_accumulate, cta, consumer, keys, nth, slot)
        return pl.run_scoped(run, accumulator(head_dim), accumulator(value_dim))

    cta.for_each_item(consume_item, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _accumulate(cta: _Cta, consumer: Any, keys: Any, nth: Any, slot: Any, dk_ref: Any, dv_ref: Any) -> Any:
    """Processes an item in a consumer."""
    item = cta.item(nth)
    work = _Work(cta, consumer, keys, item, item.kv_base + consumer * _KEYS_PER_CONSUMER, dk_ref, dv_ref)
    plgpu.barrier_wait(cta.smem.kv_full)
    slot = lax.fori_loop(0, cta.spec.group_size * item.num_blocks, functools.partial(_multiply_add, work), slot)
    plgpu.wgmma_wait(0)
    plgpu.barrier_arrive(cta.smem.kv_empty)
    # The item is computed again, so that it takes no registers during the loop.
    _store(work, cta.item(lax.optimization_barrier(nth)))
    return slot


def _multiply_add(work: _Work, step: Any, slot: Any) -> Any:
    """A step: computes S, P, dP and dS, and adds to dV and dK."""
    cta, smem = work.cta, work.cta.smem
    my_k, my_v = smem.k_smem.at[work.keys], smem.v_smem.at[work.keys]
    shape = (_KEYS_PER_CONSUMER, cta.block_q)
    plgpu.barrier_wait(smem.q_full.at[slot])
    meanwhile = functools.partial(_free_queries_before, cta, slot)
    s = _product(shape, my_k, smem.q_smem.at[slot].transpose((1, 0)), meanwhile)
    # A barrier wait ends a basic block, so later loads are not moved before it.
    plgpu.barrier_wait(smem.dout_full.at[slot])
    s = _hide_edges(work, s, step)
    p, weights = _probabilities(work, s, plgpu.load(smem.lse_smem.at[slot], layout=COLUMNS), step)
    plgpu.wgmma(work.dv_ref, p, smem.dout_smem.at[slot])
    # With 64 queries the accumulator starts at -delta, so delta takes no registers: 1 % faster. With 128 queries a
    # thread would have 64 registers to set: 4 % slower.
    minus_delta = lambda: work.spread(plgpu.load(smem.minus_delta_smem.at[slot], layout=COLUMNS))
    begins_with_delta = cta.block_q == 64
    initial = minus_delta() if begins_with_delta else None
    dp = _product(shape, my_v, smem.dout_smem.at[slot].transpose((1, 0)), initial=initial)
    plgpu.barrier_wait(smem.ds_empty.at[slot])
    if not begins_with_delta:
        dp = dp + minus_delta()
    ds = round_logit_gradients(weights.astype(jnp.float32) * dp, cta.spec)
    plgpu.barrier_arrive(smem.dout_empty.at[slot])
    smem.ds_smem.at[slot, work.keys][...] = ds
    plgpu.commit_smem()
    plgpu.barrier_arrive(smem.ds_full.at[slot])
    plgpu.wgmma(work.dk_ref, ds, smem.q_smem.at[slot])
    return cta.following(slot)


def _free_queries_before(cta: _Cta, slot: Any) -> None:
    """Releases the queries of the previous step. Its dK product is the last one before the product just issued."""
    plgpu.wgmma_wait(1)
    plgpu.barrier_arrive(cta.smem.q_empty.at[cta.previous(slot)])


def _hide_edges(work: _Work, s: jax.Array, step: Any) -> jax.Array:
    """Masks S^T if the step is at an edge of the visible range."""
    cta, item, spec = work.cta, work.item, work.cta.spec
    if not (cta.masks_places or spec.segments):
        return s
    _, i = cta.place(item, step)
    is_masked = i >= item.end_unmasked
    if looks_back(spec) or spec.segments:
        is_masked |= i < item.first_unmasked
    return lax.cond(is_masked, lambda s: _hide(work, s, i), lambda s: s, s)


def _hide(work: _Work, s: jax.Array, i: Any) -> jax.Array:
    cta, item, inputs = work.cta, work.item, work.cta.gmem.inputs
    q_start = (item.end_block - 1 - i) * cta.block_q
    if cta.spec.segments:
        key_ids = inputs["key_segments"].at[item.batch, pl.ds(work.key_start, _KEYS_PER_CONSUMER)]
        query_ids = inputs["query_segments"].at[item.batch, pl.ds(q_start, cta.block_q)]
        s = hide_other_segments(s, key_ids, query_ids)
    if not cta.masks_places:
        return s
    last = item.key_end if cta.cuts_keys else None
    return hide_unseen(s, cta.spec, q_start + cta.offset, work.key_start, keys_in_rows=True, key_end=last)


def _probabilities(work: _Work, s: jax.Array, lse: jax.Array, step: Any) -> tuple[jax.Array, jax.Array]:
    """Returns P, and P times the slope of the score terms (the factor of dP - delta in dS)."""
    cta, spec, dtype = work.cta, work.cta.spec, work.cta.gmem.q.dtype
    if not spec.score_terms:
        scaled = s * (spec.scale * LOG2E)
        p = lax.optimization_barrier(jnp.exp2(scaled - work.spread(lse)).astype(dtype))
        return p, p
    starts = lambda: (cta.queries(work.item, step)[1] * cta.block_q + cta.offset, work.key_start)
    logits, slope = change_and_slope(s, spec, starts, keys_in_rows=True)
    p = jnp.exp2(logits - work.spread(lse))
    if cta.masks_places or spec.segments:
        p = jnp.where(s == -math.inf, 0.0, p)
    return lax.optimization_barrier((p.astype(dtype), (p * slope).astype(dtype)))


def _store(work: _Work, item: _Item) -> None:
    """Stores dV and dK, through staging buffers of one swizzle span each."""
    cta, consumer, spec = work.cta, work.consumer, work.cta.spec
    head_dim, value_dim = cta.gmem.q.shape[3], cta.gmem.v.shape[3]
    span = swizzle_span(head_dim, value_dim)
    num_slots = _num_store_slots(spec.target.smem_bytes, head_dim, value_dim, cta.block_q, cta.num_stages)
    keys = pl.ds(item.kv_base + consumer * _KEYS_PER_CONSUMER, _KEYS_PER_CONSUMER)
    outputs = (work.dv_ref[...], cta.gmem.dv), (work.dk_ref[...] * gradient_scale(spec), cta.gmem.dk)
    pieces = [
        (acc[:, first : first + span], out_gmem.at[item.batch, keys, item.kv_head, pl.ds(first, span)])
        for acc, out_gmem in outputs
        for first in range(0, acc.shape[1], span)
    ]
    for some in itertools.batched(pieces, num_slots):
        staging = [cta.smem.out_smem.at[consumer * num_slots + i] for i in range(len(some))]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for smem, (piece, _) in zip(staging, some):
            smem[...] = piece.astype(cta.gmem.q.dtype)
        plgpu.commit_smem()
        for smem, (_, to) in zip(staging, some):
            plgpu.copy_smem_to_gmem(smem, to)


def _product(
    shape: tuple[int, int],
    lhs: Any,
    rhs: Any,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    initial: jax.Array | None = None,
) -> jax.Array:
    """lhs @ rhs, plus `initial` if given. `meanwhile` is called between issuing and waiting (without `initial`)."""
    if initial is not None:
        accumulate: Any = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, lhs, rhs))
        return accumulate(plgpu.ACC.init(initial))

    def multiply(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, lhs, rhs)
        meanwhile()
        return plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))
