"""Attention's tangent pass in plain JAX (see `jaxkernels.ops.attention.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.reference import Config, search_space
from jaxkernels.ops.attention.spec import AttentionSpec, Extras

__all__ = ["VERSION", "Config", "run", "search_space", "unsupported"]

VERSION = 1


def unsupported(spec: AttentionSpec) -> str | None:
    return None


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array):
    """Returns [dout, dlse]; the operands end with out, lse, dq, dk, dv (and dbias)."""
    extras, (_, _, *tangents) = Extras.unpack(spec, rest)
    return list(reference.tangent(spec, q, k, v, extras, tangents))
