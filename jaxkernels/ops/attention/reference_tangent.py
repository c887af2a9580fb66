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


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dout, dlse]."""
    named = spec.named("attention_tangent", operands)
    tangents = [named[f"d{name}"] for name in spec.linear_names]
    return list(reference.tangent(spec, named["q"], named["k"], named["v"], Extras.of(named), tangents))
