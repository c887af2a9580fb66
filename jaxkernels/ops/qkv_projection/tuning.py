"""What projections to queries, keys and values are tuned on."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.qkv_projection.spec import QkvProjectionSpec

__all__ = ["probe"]


def probe(chip: Chip) -> QkvProjectionSpec:
    """A plain projection that every backend should take: large, aligned, bfloat16."""
    dtype = jnp.dtype(jnp.bfloat16)
    angles = ArrayType((1024, 64), jnp.dtype(jnp.float32))
    return QkvProjectionSpec(
        "parts", (1024, 1024, 1024), dtype, 128, chip, "halves", x=ArrayType((1024, 1024), dtype),
        w=ArrayType((1024, 3072), dtype), cos=angles, sin=angles,
    )  # fmt: skip
