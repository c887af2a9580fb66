"""Attention's backward pass in Triton for few queries: one kernel computes all gradients.

The queries of all heads that share a key head are the rows of one tile. So a program has the whole sum over queries of
dK and dV of its keys, and stores them at once. It sums dQ over its keys. Where there are few programs, the keys are
divided among several: XLA adds up their dQ, in a fixed order.

The kernel computes delta itself, and what queries that see no key add to dV. Short sequences need one launch instead of
the three of `jaxkernels.triton.attention.backward`, and many keys are read once instead of twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import jax
import numpy as np

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.triton import calls, chips
from jaxkernels.triton.attention import costs, problem
from jaxkernels.triton.attention.problem import GradientConfig, Problem, gradient_operands

__all__ = ["NUM_COMPARED", "VERSION", "Config", "estimate", "run", "search_space", "unsupported"]

VERSION = 1
NUM_COMPARED = costs.NUM_COMPARED

_LABEL = "attention_backward[triton]"
#: Rows of tiles. With 32, four warps share 16 rows twice.
_ROWS = (16, 64, 128)


@dataclasses.dataclass(frozen=True)
class Config(GradientConfig):
    """Tile and schedule.

    Attributes:
      block_q: rows of the tile, at least the queries times the query heads of a key head.
      block_kv: keys of a block.
      num_warps: warps of a program.
      num_stages: blocks of keys and values in flight.
      num_splits: parts of the keys.
    """


#: (block_kv, num_warps, num_stages). Of equals, the first is taken.
_SCHEDULES = (
    (128, 8, 2), (64, 4, 3), (64, 4, 2), (64, 8, 2), (32, 4, 3), (32, 4, 2), (32, 8, 2), (16, 4, 1), (16, 8, 1),
)  # fmt: skip


#: The time of a step, fitted by eye to 85 times of 8 problems on an H200: with 32 keys of head dimension 128 in three
#: stages, and how much longer it is with fewer stages, with eight warps, with 128 rows, and for each other program of
#: the SM. Before the first step: with four warps, and with eight.
_STEP_SECONDS, _STEP_ELEMENTS = 1.2e-6, 32 * 256
_SHALLOW, _EIGHT_WARPS, _TALL, _BESIDE = 1.6, 1.45, 1.25, 0.25
_LAUNCH_SECONDS = 2.5e-6, 3.5e-6
#: Adding up the parts of dQ: a kernel of XLA's, and for each part.
_SUM_SECONDS, _PART_SECONDS = 1e-6, 7e-9
#: The share of a step that zeros take for keys that no query sees.
_UNSEEN = 0.17


def _rows(spec: AttentionSpec) -> int:
    return spec.q.shape[1] * spec.group_size


def _seen(spec: AttentionSpec) -> int:
    """How many keys are loaded: of the others no query sees one. Offset and lengths are not known."""
    num_queries, num_keys, right = spec.q.shape[1], spec.k.shape[1], spec.band.right
    return num_keys if right is None or spec.query_offset else min(num_keys, max(num_queries + right, 0))


def unsupported(spec: AttentionSpec) -> str | None:
    """Why this design cannot compute the spec, or None."""
    if reason := problem.unsupported(spec):
        return reason
    if spec.bias_gradient:
        return "has no gradient of a bias in the kernel for few queries"
    if _rows(spec) > _ROWS[-1]:
        return f"takes up to {_ROWS[-1]} queries of all heads of a key head in one tile, got {_rows(spec)}"
    if not _fitting(spec):
        return f"has no tile for {_rows(spec)} queries of head dimensions {spec.q.shape[3]} and {spec.v.shape[3]}"
    return None


def _fitting(spec: AttentionSpec) -> list[Config]:
    """Tiles that fit, the least that has room for all rows."""
    block_q = next(block for block in _ROWS if block >= _rows(spec))
    tiles = (Config(block_q, *schedule) for schedule in _SCHEDULES)
    return [tile for tile in tiles if costs.fits(spec, "few_queries", tile)]


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Tiles that fit; parts of the keys where there are few programs."""
    for tile in _fitting(spec):
        num_blocks, programs = -(-spec.k.shape[1] // tile.block_kv), spec.k.shape[0] * spec.k.shape[2]
        for num_splits in costs.splits(spec, programs, num_blocks, per_sm=4):
            yield dataclasses.replace(tile, num_splits=num_splits)


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Seconds: steps that wait for their products and loads, or the memory."""
    chip, work = spec.target, costs.work_of("few_queries", spec)
    programs = spec.k.shape[0] * spec.k.shape[2] * config.num_splits
    blocks = -(-spec.k.shape[1] // (config.block_kv * config.num_splits))
    seen = min(blocks, -(-_seen(spec) // config.block_kv))  # The first parts have all keys that queries see.
    steps = seen + _UNSEEN * (blocks - seen)
    resident = costs.resident(spec, work, config)
    beside = min(resident, -(-programs // chips.num_sms(chip))) - 1
    step = _STEP_SECONDS * math.sqrt(config.block_kv * work.streamed / _STEP_ELEMENTS)
    step *= (_SHALLOW if config.num_stages < 3 else 1) * (_EIGHT_WARPS if config.num_warps > 4 else 1)
    step *= (_TALL if config.block_q > 64 else 1) * (1 + _BESIDE * beside)
    waves = -(-programs // (chips.num_sms(chip) * resident))
    loaded = _seen(spec) / spec.k.shape[1]
    num_bytes = 4 * costs.bytes_of(spec.q) + (1 + loaded) * costs.bytes_of(spec.k, spec.v)
    seconds = _LAUNCH_SECONDS[config.num_warps > 4] + max(waves * steps * step, costs.memory_seconds(chip, num_bytes))
    seconds += costs.alignment_seconds(spec)
    if config.num_splits == 1:
        return seconds
    num_elements = math.prod(spec.q.shape)
    return seconds + costs.sum_seconds(chip, config.num_splits, num_elements, _SUM_SECONDS, _PART_SECONDS)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv], of the operands' shapes and dtypes."""
    from jaxkernels.triton.attention import few_queries_kernel

    if _rows(spec) > config.block_q:
        raise ValueError(
            f"{_LABEL}: block_q must be at least the {spec.q.shape[1]} queries times {spec.group_size} heads of a key "
            f"head; got {config.block_q}."
        )
    named = spec.named("attention_backward", operands)
    p = Problem.of(spec, config.block_q, config.block_kv, pack=spec.group_size, num_splits=config.num_splits)
    dq = spec.q
    if config.num_splits > 1:
        dq = ArrayType((config.num_splits, *dq.shape), np.dtype(np.float32))
    dq, dk, dv = calls.call_kernel(
        few_queries_kernel.attention_few_queries,
        gradient_operands(spec, named),
        [dq, spec.k, spec.v],
        target=spec.target,
        grid=(spec.k.shape[0] * spec.k.shape[2], config.num_splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    return [dq if config.num_splits == 1 else dq.sum(axis=0).astype(spec.q.dtype), dk, dv]
