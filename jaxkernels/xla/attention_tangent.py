"""Attention's tangent pass in plain JAX (see `jaxkernels.xla.attention`)."""

from __future__ import annotations

import jax

from jaxkernels.specs import AttentionSpec
from jaxkernels.xla import attention as reference
from jaxkernels.xla.attention import Config, Extras, search_space

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: AttentionSpec) -> str | None:
    return None


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array):
    """Returns [dout, dlse]; the operands end with out, lse, dq, dk, dv (and dbias)."""
    extras, (_, _, *tangents) = Extras.unpack(spec, rest)
    return list(reference.tangent(spec, q, k, v, extras, tangents))
