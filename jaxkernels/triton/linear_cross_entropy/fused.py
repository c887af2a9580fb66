"""Linear cross entropy's fused pass with a Triton kernel (see `jaxkernels.triton.linear_cross_entropy.problem`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.linear_cross_entropy.spec import FUSED, LinearCrossEntropySpec
from jaxkernels.triton.linear_cross_entropy import passes
from jaxkernels.triton.linear_cross_entropy.problem import (
    VERSION,
    Config,
    search_space,
    shortlist,
    unpreferred,
    unsupported,
)

__all__ = ["VERSION", "Config", "run", "search_space", "shortlist", "unpreferred", "unsupported"]


def run(spec: LinearCrossEntropySpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    return passes.run(FUSED, spec, config, operands)
