"""Attention's backward pass in Triton for few keys: one kernel computes all gradients.

All keys of a key head are one block, which stays on the chip. A program passes through the queries of all heads that
share the key head. It has the whole sum over keys of their dQ, and stores it at once. It sums dK and dV over its
queries. Where there are few programs, the queries are divided among several: XLA adds up their dK and dV, in a fixed
order.

The kernel computes delta itself, and what queries that see no key add to dV. Short sequences need one launch instead of
the three of `jaxkernels.triton.attention.backward`, and queries and their gradients are read once instead of twice.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.triton import calls, chips
from jaxkernels.triton.attention import costs, problem
from jaxkernels.triton.attention.problem import GradientConfig, Problem, gradient_operands

__all__ = ["NUM_COMPARED", "VERSION", "Config", "estimate", "run", "search_space", "unsupported"]

VERSION = 1
NUM_COMPARED = costs.NUM_COMPARED

_LABEL = "attention_backward[triton]"


@dataclasses.dataclass(frozen=True)
class Config(GradientConfig):
    """Tile and schedule.

    Attributes:
      block_q: queries of all heads of a key head in a tile.
      block_kv: keys of the tile, at least all keys.
      num_warps: warps of a program.
      num_stages: tiles of queries, outputs and their gradients in flight.
      num_splits: parts of the queries.
    """


#: Keys of a tile, warps -> the padded head dimension up to which it is -> the most rows. With more, ptxas spills.
_MOST_ROWS: dict[tuple[int, int], dict[int, int]] = {
    (16, 4): {64: 64, 128: 32, 256: 16},
    (64, 4): {64: 32},
    (64, 8): {128: 64},
    (128, 8): {64: 64},
}
_MOST_KEYS = 128
_ROWS, _STAGES = (64, 32, 16), (3, 2)

#: The time of a step, fitted to 208 times of 15 problems on an H200 (docs/triton.md): with 10 kB to load in three
#: stages, and for each logit; how many times as long it is with two stages, with eight warps, and how much longer for
#: each other program of the SM, and for a tile of a bias and of a dense mask.
_STEP_SECONDS, _STEP_BYTES, _LOGIT_SECONDS = 1.23e-6, 1e4, 6e-12
_TWO_STAGES, _EIGHT_WARPS, _BESIDE, _TERM = 1.11, 1.38, 0.55, 0.54
#: Before the first step: with four warps, and with eight.
_LAUNCH_SECONDS = 2.0e-6, 4.1e-6
#: Adding up the parts of dK and dV: kernels of XLA's, and for each part.
_SUM_SECONDS, _PART_SECONDS = 1.15e-6, 1.4e-8


def _rows(spec: AttentionSpec) -> int:
    return spec.q.shape[1] * spec.group_size


def unsupported(spec: AttentionSpec) -> str | None:
    """Why this design cannot compute the spec, or None."""
    if reason := problem.unsupported(spec):
        return reason
    if spec.bias_gradient:
        return "has no gradient of a bias in the kernel for few keys"
    if spec.q.dtype.itemsize > 2:
        return f"takes bfloat16 or float16 in the kernel for few keys, not {spec.q.dtype}"
    if not spec.target.is_hopper:
        return f"needs a Hopper GPU in the kernel for few keys: on others ptxas spills its tiles, got {spec.target}"
    if spec.k.shape[1] > _MOST_KEYS:
        return f"takes up to {_MOST_KEYS} keys in one tile, got {spec.k.shape[1]}"
    if not _fitting(spec):
        return f"has no tile for {spec.k.shape[1]} keys of head dimensions {spec.q.shape[3]} and {spec.v.shape[3]}"
    return None


def _fitting(spec: AttentionSpec) -> list[Config]:
    """Tiles that fit: of those that have room for all keys, the ones with the fewest."""
    found = [tile for tile in _tiles(spec) if costs.is_filled(_rows(spec), tile.block_q)]
    work, most_bytes = costs.work_of("few_keys", spec), chips.smem_bytes(spec.target)
    found = [tile for tile in found if costs.shared_bytes(spec, work, tile) <= most_bytes]
    fewest = min((tile.block_kv for tile in found), default=0)
    return [tile for tile in found if tile.block_kv == fewest]


def _tiles(spec: AttentionSpec) -> Iterator[Config]:
    """Tiles with room for all keys, for which ptxas does not spill."""
    widest = max(problem.padded(spec.q.shape[3]), problem.padded(spec.v.shape[3]))
    for block_q, ((block_kv, num_warps), most), num_stages in itertools.product(_ROWS, _MOST_ROWS.items(), _STAGES):
        most_rows = next((rows for limit, rows in most.items() if widest <= limit), 0)
        is_wide = widest > 128 or (widest > 64 and block_kv > 16)
        if is_wide and _has_terms(spec):
            most_rows //= 2
        if num_stages < 3 and (widest > 128 or (widest > 64 and block_q > 32)):
            continue
        if block_kv >= spec.k.shape[1] and block_q <= most_rows:
            yield Config(block_q, block_kv, num_warps, num_stages)


def _has_terms(spec: AttentionSpec) -> bool:
    """Whether a mask, a bias or a soft cap takes registers beside the logits."""
    return bool(spec.mask_terms or spec.score_terms)


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Tiles that fit; parts of the queries where there are few programs."""
    for tile in _fitting(spec):
        num_blocks, programs = -(-_rows(spec) // tile.block_q), spec.k.shape[0] * spec.k.shape[2]
        for num_splits in costs.splits(spec, programs, num_blocks, per_sm=8):
            yield dataclasses.replace(tile, num_splits=num_splits)


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Seconds: steps that wait for their products and loads, or the memory."""
    chip, work = spec.target, costs.work_of("few_keys", spec)
    programs = spec.k.shape[0] * spec.k.shape[2] * config.num_splits
    num_sms, resident = chips.num_sms(chip), costs.resident(spec, work, config)
    waves, beside = -(-programs // (num_sms * resident)), min(resident, -(-programs // num_sms)) - 1
    steps = -(-_rows(spec) // (config.block_q * config.num_splits)) * waves
    loaded = config.block_q * work.streamed * spec.q.dtype.itemsize
    step = _STEP_SECONDS * math.sqrt(loaded / _STEP_BYTES) + _LOGIT_SECONDS * config.block_q * config.block_kv
    step *= (_TWO_STAGES if config.num_stages < 3 else 1) * (_EIGHT_WARPS if config.num_warps > 4 else 1)
    step *= (1 + _BESIDE * beside) * (1 + _TERM * costs.terms_with_rows(spec))
    terms = [x for x in (spec.bias, spec.mask) if x is not None]
    num_bytes = 4 * costs.bytes_of(spec.q) + 2 * costs.bytes_of(spec.k, spec.v) + costs.bytes_of(*terms)
    seconds = hardware.soft_max(steps * step, costs.memory_seconds(chip, num_bytes))
    seconds += _LAUNCH_SECONDS[config.num_warps > 4]
    seconds += costs.alignment_seconds(spec)
    if config.num_splits == 1:
        return seconds
    num_elements = math.prod(spec.k.shape) + math.prod(spec.v.shape)
    return seconds + costs.sum_seconds(chip, config.num_splits, num_elements, _SUM_SECONDS, _PART_SECONDS)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv], of the operands' shapes and dtypes."""
    from jaxkernels.triton.attention import few_keys_kernel

    if spec.k.shape[1] > config.block_kv:
        raise ValueError(
            f"{_LABEL}: block_kv must be at least the {spec.k.shape[1]} keys; got {config.block_kv}. For more keys use "
            "a config of jaxkernels.triton.attention.backward."
        )
    named = spec.named("attention_backward", operands)
    p = Problem.of(spec, config.block_q, config.block_kv, pack=spec.group_size)
    parts = config.num_splits
    apart = lambda x: x if parts == 1 else ArrayType((parts, *x.shape), np.dtype(np.float32))
    dq, dk, dv = calls.call_kernel(
        few_keys_kernel.attention_few_keys,
        gradient_operands(spec, named),
        [spec.q, apart(spec.k), apart(spec.v)],
        target=spec.target,
        grid=(spec.k.shape[0] * spec.k.shape[2], parts),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p, parts=parts),
    )
    if parts > 1:
        dk, dv = (x.sum(axis=0).astype(y.dtype) for x, y in ((dk, spec.k), (dv, spec.v)))
    return [dq, dk, dv]
