"""The spec of the operation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import Operand, Spec
from jaxkernels.core.types import ArrayType

__all__ = ["ScaleRowsSpec"]


@dataclasses.dataclass(frozen=True)
class ScaleRowsSpec(Spec):
    """out[i, j] = x[i, j] * s[i]."""

    batch_axis = "m"

    x: ArrayType
    s: ArrayType
    target: Chip

    def inputs(self, kernel: str) -> tuple[str, ...]:
        return ("x", "s")

    def outputs(self, kernel: str) -> tuple[str, ...]:
        return ("out",)

    def arrays(self) -> Mapping[str, Operand]:
        rows = Operand(self.x, ("m", "n"))
        return dict(x=rows, s=Operand(self.s, ("m",)), out=rows)
