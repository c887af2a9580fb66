"""Linear cross entropy's fused pass in plain JAX (see `jaxkernels.ops.linear_cross_entropy.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.reference import Config, search_space
from jaxkernels.ops.linear_cross_entropy.spec import FUSED, LinearCrossEntropySpec

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: LinearCrossEntropySpec) -> str | None:
    return None


def run(spec: LinearCrossEntropySpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns the statistics of each token, and the gradients that the spec asks for."""
    results = reference.fused(spec, config, spec.named(FUSED, operands))
    return [results[name] for name in spec.outputs(FUSED)]
