"""Attention's forward pass in plain JAX (see `jaxkernels.xla.attention`)."""

from __future__ import annotations

import jax

from jaxkernels.specs import AttentionSpec
from jaxkernels.xla import attention as reference
from jaxkernels.xla.attention import Config, Extras

__all__ = ["Config", "default_config", "run", "unsupported"]


def unsupported(spec: AttentionSpec) -> str | None:
    return None


def default_config(spec: AttentionSpec) -> Config:
    return Config()


def run(spec: AttentionSpec, config: Config, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array):
    """Returns [out, lse]."""
    extras, _ = Extras.unpack(spec, rest)
    return list(reference.attend(spec, q, k, v, extras))
