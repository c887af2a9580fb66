"""What products are tuned on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core.cases import Cut, random_on_device, whole
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["operands", "part_to_check", "probe"]


def operands(kernel: str, spec: MatmulSpec, device: Any) -> tuple[jax.Array, ...]:
    """The operands of the kernel on a device, from N(0, 1): the same ones every time."""
    del kernel
    return random_on_device([t for t in (spec.lhs, spec.rhs, spec.bias, spec.residual) if t is not None], device)


def part_to_check(kernel: str, spec: MatmulSpec) -> tuple[MatmulSpec, Cut, Cut]:
    """All of it."""
    del kernel
    return whole(spec)


def probe(chip: Chip) -> MatmulSpec:
    """A plain product that every backend should take: large, aligned, bfloat16."""
    square = ArrayType((1024, 1024), jnp.dtype(jnp.bfloat16))
    return MatmulSpec(square, square, (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), chip)
