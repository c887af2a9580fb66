"""Attention's forward pass in plain JAX (see `jaxkernels.ops.attention.reference`)."""

from __future__ import annotations

import jax

from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.reference import Config, search_space
from jaxkernels.ops.attention.spec import AttentionSpec, Extras

__all__ = ["VERSION", "Config", "estimate", "run", "search_space", "unsupported"]

VERSION = 1

#: Bytes that XLA moves for each logit: float32 arrays that its kernels write and read (H200, docs/benchmarks).
_BYTES_OF_LOGIT = 64


def unsupported(spec: AttentionSpec) -> str | None:
    return None


def estimate(spec: AttentionSpec, config: Config) -> float:
    """Seconds: two products, and the logits' way to and from memory."""
    return reference.seconds(spec, bytes_of_logit=_BYTES_OF_LOGIT, num_products=2)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out, lse]."""
    named = spec.named("attention_forward", operands)
    return list(reference.attend(spec, named["q"], named["k"], named["v"], Extras.of(named)))
