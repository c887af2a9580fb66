"""Norms' tangent pass in Triton.

Like the forward pass, with two sums over each row. Rows that are not held whole are read twice.
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

VERSION = 1

#: Rows up to here are held whole; longer ones are read in chunks of one of these sizes.
_LONGEST, _CHUNKS = 8192, (4096, 2048)

#: Elements of an array for each thread of a default configuration.
_PER_THREAD = 16


@dataclasses.dataclass(frozen=True)
class Config(problem.Config):
    """Tiles and schedule."""

    label = "norm_tangent[triton]"


def unpreferred(spec: NormSpec) -> str | None:
    """Why a call with backend=None takes XLA: no time of this pass is known."""
    return "was not measured yet"


def search_space(spec: NormSpec) -> Iterator[Config]:
    """All tiles, with a program each, and of a few programs for each SM."""
    return problem.configs(spec, Config, problem.tiles(spec, _LONGEST, _CHUNKS), SCHEDULES)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default."""
    return (Config(*problem.default_tile(spec, _LONGEST, _CHUNKS, _PER_THREAD), *SCHEDULES[0]),)


def run(spec: NormSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dout] (and dsum)."""
    from jaxkernels.triton.norm import tangent_kernel

    named = spec.named("norm_tangent", operands)
    p = Problem.of(spec, config)
    types = {name: operand.type for name, operand in spec.arrays().items()}
    dout, dsum = calls.call_kernel(
        tangent_kernel.norm_tangent,
        optional(named, "x", "scale", "mean", "rstd", "dx", "dresidual", "dscale", "dbias"),
        [types["dout"], types["dsum"] if spec.residual else ABSENT],
        target=spec.target,
        grid=p.grid,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    if spec.returns_x:
        return [dout, named["dx"]]
    return [dout, dsum] if spec.residual else [dout]
