"""What a kernel of the operation computes."""

from __future__ import annotations

import dataclasses

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType

__all__ = ["ScaleRowsSpec"]


@dataclasses.dataclass(frozen=True)
class ScaleRowsSpec:
    """out[i, j] = x[i, j] * s[i]."""

    x: ArrayType
    s: ArrayType
    target: Chip

    def __str__(self) -> str:
        return f"{self.x} * {self.s}"
