"""Attention's backward pass in plain JAX (see `jaxkernels.ops.attention.reference`)."""

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
    """Returns [dq, dk, dv] (and dbias)."""
    named = spec.named("attention_backward", operands)
    q, k, v, dout, dlse = (named[name] for name in ("q", "k", "v", "dout", "dlse"))
    return list(reference.backward(spec, q, k, v, Extras.of(named), dout, dlse))
