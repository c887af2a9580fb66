"""Attention's forward pass in Triton: FlashAttention-2 with ranges of blocks.

A program has a tile of rows and runs through the blocks of keys that its rows see. It keeps the largest logit, the sum
of the weights and the weighted sum of the values. Blocks inside of all masks are visited by a loop without masks. With
segments, XLA computes before the kernel which blocks these are.

Where there are few queries (decoding), the query heads of a key head share a tile, and the keys are divided among
several programs. A second kernel combines their results.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691); Flash-Decoding (Dao et al. 2023).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

import jax
import numpy as np

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.planning import forward_steps
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.triton import calls, chips
from jaxkernels.triton.attention import costs
from jaxkernels.triton.attention.costs import Constants, not_estimated
from jaxkernels.triton.attention.problem import (
    Problem,
    check_counts,
    check_tiles,
    is_loaded_at_once,
    optional,
    padded,
    ranges_of_keys,
    unsupported,
)

__all__ = [
    "CONSTANTS", "NUM_COMPARED", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "shortlist", "unsupported",
]  # fmt: skip

VERSION = 4
NUM_COMPARED = costs.NUM_COMPARED

_LABEL = "attention_forward[triton]"


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedule.

    Attributes:
      block_q: rows of a tile.
      block_kv: keys of a block.
      num_warps: warps of a program.
      num_stages: blocks of keys and values in flight.
      pack: how many query heads of a key head share a tile.
      num_splits: parts of the keys.
    """

    block_q: int = 128
    block_kv: int = 64
    num_warps: int = 4
    num_stages: int = 2
    pack: int = 1
    num_splits: int = 1

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        check_tiles(_LABEL, block_q=self.block_q, block_kv=self.block_kv)
        calls.check_schedule(_LABEL, self.num_warps, self.num_stages)
        check_counts(_LABEL, pack=self.pack, num_splits=self.num_splits)


#: Fitted to 446 times of configurations of 38 problems, and to 197 times of other problems, on an H200 and an H100. The
#: fit weighs times, and the loss if the least estimate is taken: 4 % on average, and 5 % of problems that were left out
#: of a fit.
CONSTANTS = Constants(
    logit_exps=0.343,
    step_seconds_16=7.27e-7,
    step_seconds_64=5.59e-7,
    step_seconds_128=1.26e-6,
    byte_seconds=1.99e-11,
    one_stage=1.6,
    two_stages=1.76,
    term_share=0.223,
    wide_tile=1.81,
    program_seconds=6.99e-7,
    stage_seconds=5.34e-7,
    launch_seconds=1e-6,
    eight_warps_seconds=3.32e-7,
)

#: Parts times columns that one warp combines.
_ELEMENTS_OF_WARP = 2048

#: (block_q, block_kv, num_warps, num_stages). Of equals, the first is taken.
_TILES = (
    (128, 128, 8, 3),
    (128, 128, 8, 2),
    (128, 64, 8, 3),
    (128, 64, 8, 2),
    (128, 64, 4, 3),
    (128, 64, 4, 2),
    (128, 32, 8, 2),
    (128, 32, 4, 3),
    (64, 128, 4, 2),
    (64, 64, 4, 3),
    (64, 64, 4, 2),
    (64, 32, 4, 2),
    (64, 64, 8, 2),
    (64, 32, 8, 2),
    (32, 64, 4, 2),
    (32, 32, 4, 2),
    (16, 512, 4, 1),
    (16, 256, 4, 1),
    (16, 128, 4, 3),
    (16, 64, 4, 3),
    (16, 32, 4, 2),
    (16, 32, 4, 1),
    (64, 16, 4, 1),
    (32, 16, 4, 1),
    (16, 16, 1, 1),
    (16, 16, 4, 1),
)

#: Columns of keys and values up to which ptxas does not spill if a program loads all keys at once. With more columns,
#: how many elements of keys and values: without and with a bias, a mask or a soft cap.
_NARROW, _ELEMENTS_OF_WIDE = 128, (57344, 40960)

#: One warp waits for no other. It may compute a tile of up to so many rows, or one of many tiles.
_ROWS_OF_ONE_WARP = 16
#: With more rows and fewer programs than SMs, one warp takes 0.74 to 1.5 times as long as four. Four are the default.
_ROWS_OF_ONE_BY_DEFAULT, _ONE_WARP_SECONDS = 8, 3e-8


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Tiles that fit shared memory and registers; parts of the keys where there are few programs."""
    for tile in itertools.starmap(Config, _TILES):
        if not costs.fits(spec, "forward", tile) or (costs.holds_all_keys(tile) and not _is_one_block(spec, tile)):
            continue
        packs = {1, costs.packed_heads(spec, tile)}
        for pack in sorted(packs, reverse=spec.q.shape[1] < 2 * tile.block_q):
            packed = dataclasses.replace(tile, pack=pack)
            if costs.is_filled(spec.q.shape[1] * pack, tile.block_q) and _shares_warps(spec, packed):
                for num_splits in _splits(spec, packed):
                    yield dataclasses.replace(packed, num_splits=num_splits)


def _is_one_block(spec: AttentionSpec, tile: Config) -> bool:
    """Whether the tile holds all keys, a tile with half as many does not, and ptxas does not spill."""
    num_keys, columns = spec.k.shape[1], padded(spec.q.shape[3]) + padded(spec.v.shape[3])
    has_terms = spec.bias is not None or spec.mask is not None or spec.soft_cap is not None
    most = math.inf if columns <= _NARROW else _ELEMENTS_OF_WIDE[has_terms]
    is_filled = tile.block_kv < 2 * num_keys <= 2 * tile.block_kv
    return is_filled and num_keys * columns <= most and is_loaded_at_once(spec, tile.block_q, tile.block_kv)


def _shares_warps(spec: AttentionSpec, config: Config, most: int = _ROWS_OF_ONE_WARP) -> bool:
    """Whether a tile of more than `most` rows is not left to one warp, unless there are many."""
    is_small = spec.q.shape[1] * config.pack <= most
    return config.num_warps > 1 or is_small or _programs(spec, config) >= chips.num_sms(spec.target)


def _splits(spec: AttentionSpec, config: Config) -> Iterable[int]:
    if spec.q.shape[1] > 64:
        return (1,)  # The parts' results would be as large as the keys.
    return costs.splits(spec, _programs(spec, config), -(-spec.k.shape[1] // config.block_kv), per_sm=8)


def shortlist(spec: AttentionSpec) -> Iterator[Config]:
    """The tile that was measured fastest for problems like this one, or else the search space."""
    tile = costs.measured_tile(spec, "forward")
    for config in search_space(spec):
        is_measured = tile == (config.block_q, config.block_kv, config.num_warps, config.num_stages)
        if tile is None or (is_measured and config.pack == 1):
            yield config


def _programs(spec: AttentionSpec, config: Config) -> int:
    batch, num_queries, num_heads, _ = spec.q.shape
    return -(-num_queries * config.pack // config.block_q) * batch * (num_heads // config.pack) * config.num_splits


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds, by the cost model of `jaxkernels.triton.attention.costs`."""
    kernel = costs.seconds(
        spec,
        "forward",
        config,
        constants,
        programs=_programs(spec, config),
        visits=forward_steps(spec, max(1, config.block_q // config.pack), config.block_kv),
        parts=config.num_splits,
        num_bytes=costs.bytes_of(spec.q, *spec.results("attention_forward")) + costs.bytes_of_keys(spec),
    )
    if not _shares_warps(spec, config, _ROWS_OF_ONE_BY_DEFAULT):
        kernel += _ONE_WARP_SECONDS
    return kernel + costs.combine_seconds(spec, config.num_splits) + costs.alignment_seconds(spec)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out (B, T, N, D), lse (B, N, T) float32]."""
    from jaxkernels.triton.attention import forward_kernel

    if spec.group_size % config.pack:
        raise ValueError(
            f"{_LABEL}: pack must divide the {spec.group_size} query heads of a key head; got {config.pack}."
        )
    if spec.segments and config.block_q % config.pack:
        raise ValueError(f"{_LABEL}: with segments, pack must divide block_q={config.block_q}; got {config.pack}.")
    named = spec.named("attention_forward", operands)
    p = Problem.of(spec, config.block_q, config.block_kv, pack=config.pack, num_splits=config.num_splits)
    batch, _, num_heads, _ = spec.q.shape
    out, lse = spec.results("attention_forward")
    if config.num_splits > 1:
        out = ArrayType((config.num_splits, *out.shape), np.dtype(np.float32))
        lse = ArrayType((config.num_splits, *lse.shape), lse.dtype)
    extras = optional(spec, named)
    results = calls.call_kernel(
        forward_kernel.attention_forward,
        [named["q"], named["k"], named["v"], *extras, ranges_of_keys(spec, p, named)],
        [out, lse],
        target=spec.target,
        grid=(p.num_blocks * batch * num_heads // config.pack, config.num_splits),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    if config.num_splits > 1:
        results = calls.call_kernel(
            forward_kernel.combine_parts,
            [*results, named["v"], *extras],
            spec.results("attention_forward"),
            target=spec.target,
            grid=(batch * spec.q.shape[1] * num_heads,),
            num_warps=1 if p.block_splits * p.block_d <= _ELEMENTS_OF_WARP else 4,
            num_stages=1,
            constants=dict(p=p),
        )
    return list(results)
