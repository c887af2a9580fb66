"""Norms' backward pass in Triton.

A few programs for each SM compute dx of their rows, and a share of the sums over rows that the gradients of scale and
bias are. XLA adds up the shares in a second pass. The order of all additions is fixed: equal operands give equal bits.

A program that holds whole rows keeps its share in registers. With longer rows, it adds to its share in memory, which
stays in L2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls
from jaxkernels.triton.norm import problem
from jaxkernels.triton.norm.problem import ABSENT, Problem, optional, unpreferred, unsupported

__all__ = ["VERSION", "Config", "run", "search_space", "shortlist", "unpreferred", "unsupported"]

VERSION = 1

#: Rows up to here are held whole; longer ones are read in chunks of one of these sizes.
_LONGEST, _CHUNKS = 8192, (4096, 2048)

#: (programs_per_sm, num_stages).
_SCHEDULES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2), (1, 3), (2, 3))

#: Elements of an array for each thread of a default configuration.
_PER_THREAD = 8


@dataclasses.dataclass(frozen=True)
class Config(problem.Config):
    """Tiles and schedule."""

    label = "norm_backward[triton]"

    programs_per_sm: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.programs_per_sm == 0:
            raise ValueError(
                f"{self.label}: programs_per_sm must be positive; got 0. Each program writes a share of sums."
            )


def search_space(spec: NormSpec) -> Iterator[Config]:
    """All tiles, with one or a few programs for each SM."""
    return problem.configs(spec, Config, problem.tiles(spec, _longest(spec), _CHUNKS), _SCHEDULES)


def shortlist(spec: NormSpec) -> tuple[Config, ...]:
    """The default: on Hopper with loads of the next tile under way, for which smaller chips lack registers."""
    tile = problem.default_tile(spec, _longest(spec), _CHUNKS, _PER_THREAD)
    usual = Config(*tile, 2, 2)
    return (usual if spec.target.is_hopper and problem.fits(spec, usual) else Config(*tile, 2, 1),)


def _longest(spec: NormSpec) -> int:
    """In float32, rows of the same bytes: longer ones spill registers on chips without room for tiles in flight."""
    return 2 * _LONGEST // spec.x.dtype.itemsize


def run(spec: NormSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dx] (and dscale, dbias)."""
    from jaxkernels.triton.norm import backward_kernel

    named = spec.named("norm_backward", operands)
    p = Problem.of(spec, config)
    shares = ArrayType((p.num_groups, p.num_programs, p.num_features), np.dtype(np.float32))
    dx, of_scale, of_bias = calls.call_kernel(
        backward_kernel.norm_backward,
        optional(named, "x", "scale", "mean", "rstd", "dout", "dsum"),
        [spec.x, shares if spec.scale_gradient else ABSENT, shares if spec.bias_gradient else ABSENT],
        target=spec.target,
        grid=p.grid,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        constants=dict(p=p),
    )
    grads = [dx]
    for shares, parameter, is_wanted in (
        (of_scale, spec.scale, spec.scale_gradient),
        (of_bias, spec.bias, spec.bias_gradient),
    ):
        if is_wanted:
            assert parameter is not None
            axes = (0, 1) if parameter.shape[0] == 1 else (1,)
            grads.append(jnp.sum(shares, axis=axes).reshape(parameter.shape).astype(parameter.dtype))
    return grads
