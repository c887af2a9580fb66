"""What norms are tuned on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm import reference
from jaxkernels.ops.norm.spec import NormSpec

__all__ = ["operands", "probe"]


def operands(kernel: str, spec: NormSpec, device: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """The operands of a pass on a device: the same ones every time. Statistics are those of x."""
    drawn = [name for name in spec.inputs(kernel) if name not in spec.statistics_names]
    made = spec.draw(drawn, device, seed)
    if kernel != "norm_forward":
        made |= jax.jit(lambda x: reference.statistics(spec, x))(made["x"])
    return spec.pack(kernel, made)


def probe(chip: Chip) -> NormSpec:
    """A plain norm that every backend should take: large, aligned, bfloat16."""
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    return NormSpec(array(1, 4096, 4096), chip, eps=1e-6, scale=array(1, 4096))
