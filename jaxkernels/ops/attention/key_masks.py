"""Dense masks that hide keys from all queries alike, (B|1, 1, 1, S), as segments: for kernels that have segments.

All queries are in segment 1. The keys that they see are, too, and the others are in segment 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["as_segments", "operands_as_segments"]


def as_segments(spec: AttentionSpec) -> AttentionSpec:
    """The spec with a mask of keys as segments; others as they are."""
    if spec.mask is None or spec.mask.shape[1:3] != (1, 1) or spec.segments:
        return spec
    return dataclasses.replace(spec, mask=None, segments=True, self_segments=False)


def operands_as_segments(
    kernel: str, spec: AttentionSpec, operands: Sequence[jax.Array]
) -> tuple[AttentionSpec, list[jax.Array]]:
    """The spec as `as_segments` has it, and the operands that a kernel takes with it."""
    changed = as_segments(spec)
    if changed is spec:
        return spec, list(operands)
    named = dict(spec.named(kernel, operands))
    (batch, num_queries), num_keys = spec.q.shape[:2], spec.k.shape[1]
    named["key_segments"] = jnp.broadcast_to(named.pop("mask")[:, 0, 0], (batch, num_keys)).astype(jnp.int32)
    named["query_segments"] = jnp.ones((batch, num_queries), jnp.int32)
    return changed, [named[name] for name in changed.inputs(kernel)]
