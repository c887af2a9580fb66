"""Attention's backward pass in Triton: two kernels, and a third for the gradient of a bias.

P = exp(S - lse) is computed anew from the saved logsumexp. With dP = dO V^T and delta = rowsum(dO * O) - dlse, the
gradient of the logits is dS = P * (dP - delta), and

    dQ = scale dS K          dK = scale dS^T Q          dV = P^T dO          dbias = the sum of dS

One kernel has a block of keys in each program and sums dK and dV over the queries that see them. The other has a block
of queries and sums dQ. Both sum in registers, in a fixed order: equal operands give equal bits. The kernel of the bias
sums dS over what the bias has not, so that dS is never stored.

XLA computes delta, and with segments the ranges of blocks. It adds to dV what comes from queries that see no key.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691), appendix B.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np

from jaxkernels.core.arguments import check_fields
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.blind import row_sums
from jaxkernels.ops.attention.planning import backward_steps, forward_steps
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import may_see_nothing
from jaxkernels.triton import calls, chips
from jaxkernels.triton.attention import costs
from jaxkernels.triton.attention.costs import Constants
from jaxkernels.triton.attention.problem import (
    Problem,
    check_counts,
    check_tiles,
    optional,
    ranges_of_keys,
    ranges_of_queries,
    unsupported,
)

__all__ = [
    "CONSTANTS", "NUM_COMPARED", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "shortlist", "unsupported",
]  # fmt: skip

VERSION = 3
NUM_COMPARED = costs.NUM_COMPARED

_LABEL = "attention_backward[triton]"
_FLOAT32 = np.dtype(np.float32)

#: Fitted to 121 times of configurations of 13 problems, and to 123 times of other problems, as those of the forward
#: pass. The loss is 2 %, and 5 % of problems that were left out of a fit.
CONSTANTS = Constants(
    logit_exps=0.735,
    step_seconds_16=1.01e-6,
    step_seconds_64=6.77e-7,
    step_seconds_128=8.56e-7,
    byte_seconds=3.12e-11,
    one_stage=1.9,
    two_stages=1.54,
    term_share=0.374,
    wide_tile=1.36,
    program_seconds=4.81e-7,
    stage_seconds=9.12e-7,
    launch_seconds=1e-6,
    eight_warps_seconds=1.5e-6,
)
#: A program of XLA's before the kernels.
_OTHER_SECONDS = 4e-6


class _Tile(NamedTuple):
    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiles and schedules of the two kernels.

    Attributes:
      block_q, block_kv, num_warps, num_stages: of the kernel of dK and dV, which runs through blocks of queries.
      dq_block_q, dq_block_kv, dq_num_warps, dq_num_stages: of the kernel of dQ, which runs through blocks of keys.
      group_parts: parts of a group of query heads. Each has its own dK and dV, which XLA adds up.
      dq_splits: parts of the keys. Each has its own dQ, which XLA adds up.
    """

    block_q: int = 64
    block_kv: int = 128
    num_warps: int = 8
    num_stages: int = 2
    dq_block_q: int = 128
    dq_block_kv: int = 64
    dq_num_warps: int = 8
    dq_num_stages: int = 2
    group_parts: int = 1
    dq_splits: int = 1

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        check_tiles(_LABEL, block_q=self.block_q, block_kv=self.block_kv)
        check_tiles(_LABEL, dq_block_q=self.dq_block_q, dq_block_kv=self.dq_block_kv)
        calls.check_schedule(_LABEL, self.num_warps, self.num_stages)
        calls.check_schedule(_LABEL, self.dq_num_warps, self.dq_num_stages)
        check_counts(_LABEL, group_parts=self.group_parts, dq_splits=self.dq_splits)

    @property
    def keys_tile(self) -> _Tile:
        return _Tile(self.block_q, self.block_kv, self.num_warps, self.num_stages)

    @property
    def queries_tile(self) -> _Tile:
        return _Tile(self.dq_block_q, self.dq_block_kv, self.dq_num_warps, self.dq_num_stages)


def _tiles(*sizes: tuple[int, int, int, int]) -> tuple[_Tile, ...]:
    return tuple(itertools.starmap(_Tile, sizes))


#: Tiles of the kernel of dK and dV, of the kernel of dQ, and of the kernel of the bias. Of equals, the first is taken.
_KEYS_TILES = _tiles(
    (64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3),
    (32, 64, 4, 2), (64, 64, 8, 2), (32, 64, 8, 2), (32, 64, 8, 1), (16, 64, 8, 1), (16, 64, 4, 1), (32, 32, 4, 2),
    (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1),
)  # fmt: skip
_QUERIES_TILES = _tiles(
    (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 32, 8, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 64, 8, 2),
    (64, 32, 8, 2), (64, 32, 8, 1), (64, 16, 8, 1), (64, 16, 4, 1), (32, 32, 4, 2),
    (32, 32, 4, 1), (32, 16, 4, 1), (16, 16, 4, 1),
)  # fmt: skip
_BIAS_TILES = _tiles((64, 64, 4, 1), (64, 64, 8, 1), (64, 32, 8, 1), (32, 32, 4, 1), (16, 16, 4, 1))
#: How many tiles of each kernel, the fastest by the model, are worth measuring.
_MEASURED = 4


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """The fastest tiles of either kernel, by the model, with each other."""
    keys = _fastest(spec, "dkv", _KEYS_TILES)
    queries = _fastest(spec, "dq", _QUERIES_TILES)
    for keys_tile, queries_tile in itertools.product(keys, queries):
        parts = _group_parts(spec, keys_tile), _dq_splits(spec, queries_tile)
        yield Config(*keys_tile, *queries_tile, *parts)


def shortlist(spec: AttentionSpec) -> Iterator[Config]:
    """The first of the search space: tiles that were measured fastest, else those that the model finds fastest."""
    yield from itertools.islice(search_space(spec), 1)


def _fastest(spec: AttentionSpec, kernel: str, tiles: tuple[_Tile, ...]) -> list[_Tile]:
    """Tiles that fit: the one that was measured fastest, then those that the model finds fastest."""
    fitting = [tile for tile in tiles if costs.fits(spec, kernel, tile)] or [tiles[-1]]
    measured = costs.measured_tile(spec, kernel)
    by_time = sorted(fitting, key=lambda tile: (tile != measured, _kernel_seconds(spec, kernel, tile, CONSTANTS)))
    return by_time[:_MEASURED]


def _group_parts(spec: AttentionSpec, tile: _Tile) -> int:
    """The fewest parts of a group that give each SM two programs, if there are so many heads."""
    programs = -(-spec.k.shape[1] // tile.block_kv) * spec.k.shape[0] * spec.k.shape[2]
    parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    return next((n for n in parts if n * programs >= 2 * chips.num_sms(spec.target)), parts[-1])


def _dq_splits(spec: AttentionSpec, tile: _Tile) -> int:
    """Few queries at many keys: the fewest parts of the keys that give each SM a program, of four blocks at least."""
    batch, num_queries, num_heads, _ = spec.q.shape
    programs, parts = -(-num_queries // tile.block_q) * batch * num_heads, 1
    most = -(-spec.k.shape[1] // tile.block_kv) // 4
    while programs * parts < chips.num_sms(spec.target) and 2 * parts <= most:
        parts *= 2
    return parts


def _kernel_seconds(
    spec: AttentionSpec, kernel: str, tile: _Tile, constants: Constants, *, parts: int | None = None
) -> float:
    """Seconds of the kernel "dkv" or "dq". `parts`: of a group, or of the keys; None: as many as a call takes."""
    batch, _, num_heads, _ = spec.q.shape
    operands = costs.bytes_of(spec.q, spec.k, spec.v)
    if kernel == "dkv":
        parts = parts or _group_parts(spec, tile)
        visits = backward_steps(spec, tile.block_q, tile.block_kv)
        heads, num_bytes, combine = spec.k.shape[2], 2 * operands, 0.0
    else:
        parts = parts or _dq_splits(spec, tile)
        visits = forward_steps(spec, tile.block_q, tile.block_kv)
        heads, num_bytes, combine = num_heads, operands + costs.bytes_of(spec.q), costs.combine_seconds(spec, parts)
    programs = len(visits) * batch * heads * parts
    return combine + costs.seconds(
        spec, kernel, tile, constants, programs=programs, visits=visits, parts=parts, num_bytes=num_bytes
    )


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds of both kernels, by the cost model of `jaxkernels.triton.attention.costs`, and of what XLA computes."""
    keys = _kernel_seconds(spec, "dkv", config.keys_tile, constants, parts=config.group_parts)
    queries = _kernel_seconds(spec, "dq", config.queries_tile, constants, parts=config.dq_splits)
    return keys + queries + _other_seconds(spec) + costs.alignment_seconds(spec)


def _other_seconds(spec: AttentionSpec) -> float:
    """What XLA takes for the sums of out * dout, and of dout over queries that see no key, if there may be some."""
    passes = 1.5 if spec.query_lengths or spec.bias is not None or may_see_nothing(spec) else 1.0
    num_bytes = 2 * costs.bytes_of(*spec.results("attention_forward"))
    return passes * (_OTHER_SECONDS + costs.memory_seconds(spec.target, num_bytes))


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    if spec.bias_gradient:
        return "the gradient of a bias has a kernel of its own"
    return costs.not_estimated(spec, config.keys_tile)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv] (and dbias), of the operands' shapes and dtypes."""
    if spec.group_size % config.group_parts:
        raise ValueError(
            f"{_LABEL}: group_parts must divide the {spec.group_size} query heads of a key head; "
            f"got {config.group_parts}."
        )
    named = spec.named("attention_backward", operands)
    lse, delta, mean = row_sums(spec, named)
    dk, dv = _keys_and_values(spec, config, named, lse, delta, mean)
    gradients = [_queries(spec, config, named, lse, delta), dk.astype(spec.k.dtype), dv.astype(spec.v.dtype)]
    return [*gradients, _bias(spec, named, lse, delta)] if spec.bias_gradient else gradients


def _keys_and_values(
    spec: AttentionSpec,
    config: Config,
    named: Mapping[str, jax.Array],
    lse: jax.Array,
    delta: jax.Array,
    mean: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    from jaxkernels.triton.attention import backward_kernel

    tile, parts = config.keys_tile, config.group_parts
    p = Problem.of(spec, tile.block_q, tile.block_kv, over_queries=True)
    apart = lambda x: ArrayType((*x.shape[:2], x.shape[2] * parts, x.shape[3]), x.dtype if parts == 1 else _FLOAT32)
    # On other chips than Hopper, ptxas would spill.
    added = mean if parts == 1 and spec.target.is_hopper else None
    dk, dv = calls.call_kernel(
        backward_kernel.attention_keys_and_values,
        [
            *_common(spec, named),
            ranges_of_queries(spec, p, named),
            named["dout"],
            lse,
            delta,
            lse if added is None else added,
        ],
        [apart(spec.k), apart(spec.v)],
        target=spec.target,
        grid=(-(-spec.k.shape[1] // tile.block_kv) * spec.k.shape[0] * spec.k.shape[2] * parts,),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(p=p, parts=parts, adds_mean=added is not None),
    )
    if parts > 1:
        dk, dv = (x.reshape(*x.shape[:2], -1, parts, x.shape[3]).sum(axis=3) for x in (dk, dv))
    return dk, dv if mean is None or added is not None else dv.astype(_FLOAT32) + mean


def _queries(
    spec: AttentionSpec, config: Config, named: Mapping[str, jax.Array], lse: jax.Array, delta: jax.Array
) -> jax.Array:
    from jaxkernels.triton.attention import backward_kernel

    tile, splits = config.queries_tile, config.dq_splits
    p = Problem.of(spec, tile.block_q, tile.block_kv, num_splits=splits)
    (dq,) = calls.call_kernel(
        backward_kernel.attention_queries,
        [*_common(spec, named), ranges_of_keys(spec, p, named), named["dout"], lse, delta],
        [spec.q if splits == 1 else ArrayType((splits, *spec.q.shape), _FLOAT32)],
        target=spec.target,
        grid=(p.num_blocks * spec.q.shape[0] * spec.q.shape[2], splits),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(p=p),
    )
    return dq if splits == 1 else dq.sum(axis=0).astype(spec.q.dtype)


def _bias(spec: AttentionSpec, named: Mapping[str, jax.Array], lse: jax.Array, delta: jax.Array) -> jax.Array:
    """The gradient of the bias. Of a bias that lacks an axis of queries or of keys, each head's is small: XLA adds up
    over batch and heads what the bias has not.
    """
    from jaxkernels.triton.attention import backward_kernel

    assert spec.bias is not None
    batch, num_queries, num_heads, _ = spec.q.shape
    num_keys = spec.k.shape[1]
    shape, dtype = spec.bias.shape, spec.bias.dtype
    is_tiled = shape[2:] == (num_queries, num_keys)
    if not is_tiled:
        shape, dtype = (batch, num_heads, *shape[2:]), _FLOAT32
    tile = next((tile for tile in _BIAS_TILES if costs.fits(spec, "dbias", tile)), _BIAS_TILES[-1])
    p = Problem.of(spec, tile.block_q, tile.block_kv)
    tiles_q, tiles_kv = p.num_blocks if shape[2] > 1 else 1, -(-num_keys // tile.block_kv) if shape[3] > 1 else 1
    (dbias,) = calls.call_kernel(
        backward_kernel.attention_biases,
        [*_common(spec, named), ranges_of_keys(spec, p, named), named["dout"], lse, delta],
        [ArrayType(shape, dtype)],
        target=spec.target,
        grid=(tiles_q * tiles_kv * shape[0] * shape[1],),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        constants=dict(p=p, batches=batch, shape=shape),
    )
    if not is_tiled:
        lacking = tuple(axis for axis in (0, 1) if spec.bias.shape[axis] == 1)
        dbias = dbias.sum(axis=lacking, keepdims=True)
    return dbias.astype(spec.bias.dtype)


def _common(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """The operands that all kernels take first."""
    return [named["q"], named["k"], named["v"], *optional(spec, named)]
