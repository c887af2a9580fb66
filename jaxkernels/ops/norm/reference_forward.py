"""The forward pass of norms in plain JAX (see `jaxkernels.ops.norm.reference`)."""

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
    """Returns [out, sum (if a residual is given), mean (of a layer norm), rstd]."""
    results = reference.forward(spec, spec.named("norm_forward", operands))
    return [results[name] for name in spec.outputs("norm_forward")]
