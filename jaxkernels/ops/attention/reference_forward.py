"""Attention's forward pass in plain JAX (see `jaxkernels.ops.attention.reference`)."""

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
    """Returns [out, lse]."""
    named = spec.named("attention_forward", operands)
    return list(reference.attend(spec, named["q"], named["k"], named["v"], Extras.of(named)))
