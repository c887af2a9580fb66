"""Linear cross entropy's forward pass in plain JAX (see `jaxkernels.ops.linear_cross_entropy.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.reference import Config, search_space
from jaxkernels.ops.linear_cross_entropy.spec import FORWARD, LinearCrossEntropySpec

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: LinearCrossEntropySpec) -> str | None:
    return None


def run(spec: LinearCrossEntropySpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns the statistics of each token."""
    results = reference.forward(spec, config, spec.named(FORWARD, operands))
    return [results[name] for name in spec.outputs(FORWARD)]
