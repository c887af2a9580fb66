"""What products are tuned on."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["probe"]


def probe(chip: Chip) -> MatmulSpec:
    """A plain product that every backend should take: large, aligned, bfloat16."""
    square = ArrayType((1024, 1024), jnp.dtype(jnp.bfloat16))
    return MatmulSpec(square, square, (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), chip)
