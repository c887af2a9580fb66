"""What `doctor` asks the backends for."""

from __future__ import annotations

import jax.numpy as jnp

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from toy_operation.spec import ScaleRowsSpec


def probe(chip: Chip) -> ScaleRowsSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.float32))
    return ScaleRowsSpec(array(64, 32), array(64), chip)
