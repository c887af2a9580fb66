"""Norms' forward pass in Triton.

Rows are held in registers. Longer rows are read three times (twice for an RMS norm): for the mean, for the variance,
and for the result. All but the first time they come from L2.
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
_LONGEST, _CHUNKS = 16384, (8192, 4096)

#: Elements of an array for each thread of a default configuration.
_PER_THREAD = 16


@dataclasses.dataclass(frozen=True)
class Config(problem.Config):
    """Tiles and schedule."""

    label = "norm_forward[triton]"


def unpreferred(spec: NormSpec) -> str | None:
    """Why a call with backend=None takes XLA, or None.

    On an H100 the kernel takes 0.78 to 0.81 of XLA's time with a residual, and 0.93 to 1.06 without (RMS norms). A norm
    that returns x has a gradient of a kernel, which reads the statistics. XLA then computes them in a pass of its own.
    """
    if not spec.target.is_hopper:
        return f"was not measured on {spec.target.name}"
    if not (spec.residual or spec.returns_x):
        return "is no faster than XLA without a residual or return_x, and XLA fuses the norm"
    return None


def search_space(spec: NormSpec) -> Iterator[Config]:
    """All tiles, with a program each, and of a few programs for each SM."""
    return problem.configs(spec, Config, problem.tiles(spec, _LONGEST, _CHUNKS), SCHEDULES)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default."""
    return (Config(*problem.default_tile(spec, _LONGEST, _CHUNKS, _PER_THREAD), *SCHEDULES[0]),)


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
