"""Linear cross entropy's backward pass in plain JAX (see `jaxkernels.ops.linear_cross_entropy.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.reference import Config, search_space
from jaxkernels.ops.linear_cross_entropy.spec import BACKWARD, LinearCrossEntropySpec

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: LinearCrossEntropySpec) -> str | None:
    return None


def run(spec: LinearCrossEntropySpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns the gradients that the spec asks for."""
    results = reference.backward(spec, config, spec.named(BACKWARD, operands))
    return [results[name] for name in spec.outputs(BACKWARD)]
