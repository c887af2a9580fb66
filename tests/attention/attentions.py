"""Shared by the tests of the attention kernels."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["extra_types"]


def extra_types(spec: AttentionSpec) -> list[ArrayType]:
    """The types of the integer operands that follow q, k and v, in order."""
    (batch, queries), keys = spec.q.shape[:2], spec.k.shape[1]
    shapes = dict(
        query_lengths=(batch,),
        key_lengths=(batch,),
        query_segments=(batch, queries),
        key_segments=(batch, keys),
        query_offset=(),
    )
    return [ArrayType(shapes[name], jnp.dtype(jnp.int32)) for name in spec.extra_names]
