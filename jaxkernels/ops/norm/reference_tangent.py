"""The tangent pass of norms in plain JAX (see `jaxkernels.ops.norm.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.norm import reference
from jaxkernels.ops.norm.reference import Config, search_space
from jaxkernels.ops.norm.spec import NormSpec

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: NormSpec) -> str | None:
    return None


def run(spec: NormSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dout] (and dsum)."""
    results = reference.tangent(spec, spec.named("norm_tangent", operands))
    return [results[name] for name in spec.outputs("norm_tangent")]
