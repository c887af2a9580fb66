"""What it is tuned on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.core.cases import Cut, random_on_device, whole
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from toy_operation.spec import ScaleRowsSpec


def operands(kernel: str, spec: ScaleRowsSpec, device: Any) -> tuple[jax.Array, ...]:
    return random_on_device([spec.x, spec.s], device)


def part_to_check(kernel: str, spec: ScaleRowsSpec) -> tuple[ScaleRowsSpec, Cut, Cut]:
    return whole(spec)


def probe(chip: Chip) -> ScaleRowsSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.float32))
    return ScaleRowsSpec(array(64, 32), array(64), chip)
