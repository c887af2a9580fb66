"""Norms' forward pass in Triton.

Rows are held in registers, in one or two blocks of columns. Longer rows are read three times (twice for an RMS norm):
for the mean, for the variance, and for the result. All but the first time they come from L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls
from jaxkernels.triton.norm import problem
from jaxkernels.triton.norm.problem import ABSENT, SCHEDULES, Problem, optional, unsupported

__all__ = ["VERSION", "Config", "run", "search_space", "shortlist", "unpreferred", "unsupported"]

VERSION = 2

#: Rows up to here are held whole; longer ones are read in chunks of one of these sizes.
_LONGEST, _CHUNKS = 16384, (8192, 4096)

#: Elements of a thread of a default configuration at most. With many of them, a sum over a row crosses few warps.
_PER_THREAD = 48

#: Elements of a thread of a default configuration with chunks.
_PER_THREAD_OF_CHUNKS = 16

#: Features from which on a layer norm was measured to be faster than XLA's.
_FEWEST_OF_LAYER = 4096


@dataclasses.dataclass(frozen=True)
class Config(problem.BlocksConfig):
    """Tiles and schedule."""

    label = "norm_forward[triton]"


def unpreferred(spec: NormSpec) -> str | None:
    """Why a call with backend=None takes XLA, or None.

    With a residual, the kernel takes 0.73 to 0.82 of XLA's time. A norm that returns x has a gradient of a kernel. It
    reads the statistics, which XLA computes in a pass of its own. XLA needs several passes for a layer norm.
    """
    if not spec.target.is_hopper:
        return f"was not measured on {spec.target.name}"
    if spec.residual or spec.returns_x or (spec.centered and spec.num_features >= _FEWEST_OF_LAYER):
        return None
    return "has no residual and returns no x, and XLA may fuse the norm with what computes x"


def search_space(spec: NormSpec) -> Iterator[Config]:
    """All tiles, with a program each, and of a few programs for each SM; whole rows also in two blocks of columns."""
    yield from problem.configs(spec, Config, problem.tiles(spec, _LONGEST, _CHUNKS), SCHEDULES)
    first, rest = problem.blocks(spec.num_features)
    if rest and spec.num_features <= _LONGEST:
        sizes = [(1, first, num_warps) for num_warps in (2, 4, 8, 16)]
        yield from problem.configs(spec, Config, sizes, SCHEDULES, block_rest=rest)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default."""
    if spec.num_features > _LONGEST:
        tile = problem.default_tile(spec, _LONGEST, _CHUNKS, _PER_THREAD_OF_CHUNKS)
        return (Config(*tile, *SCHEDULES[0]),)
    first, rest = problem.blocks(spec.num_features)
    block_rows = problem.rows_of_tile(spec, first, rest)
    elements = block_rows * (first + rest)
    num_warps = next((n for n in (2, 4, 8) if elements <= 32 * n * _PER_THREAD), 16)
    return (Config(block_rows, first, num_warps, *SCHEDULES[0], rest),)


def run(spec: NormSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out, sum (if a residual is given or x is returned), mean (of a layer norm), rstd]."""
    from jaxkernels.triton.norm import forward_kernel

    named = spec.named("norm_forward", operands)
    p = Problem.of(spec, config)
    types = {name: operand.type for name, operand in spec.arrays().items()}
    names = ("out", "sum", "mean", "rstd")
    outputs = spec.outputs("norm_forward")
    written = [name for name in outputs if name != "sum" or spec.residual]
    results = calls.call_kernel(
        forward_kernel.norm_forward,
        optional(named, "x", "residual", "scale", "bias"),
        [types[name] if name in written else ABSENT for name in names],
        target=spec.target,
        grid=p.grid,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    found: dict[str, jax.Array] = dict(zip(names, results))
    if spec.returns_x:
        found["sum"] = named["x"]
    return [found[name] for name in outputs]
