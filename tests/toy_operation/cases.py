"""The operation's problems as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from jaxkernels.core.cases import Case, Direction, Draw
from toy_operation.api import scale_rows

__all__ = ["CASE", "ScaleRowsCase"]


@dataclasses.dataclass(frozen=True)
class ScaleRowsCase(Case):
    """x (m, n) times s (m,)."""

    kind: ClassVar[str] = "scale-rows"
    form: ClassVar[str] = "MxN, then any of :DTYPE :backward"

    m: int
    n: int
    dtype: str = "float32"

    @property
    def id(self) -> str:
        return f"{self.m}x{self.n}-{self.dtype}"

    @property
    def description(self) -> str:
        return f"{self.m}x{self.n}"

    @property
    def draws(self) -> dict[str, Draw]:
        return dict(x=Draw((self.m, self.n), self.dtype), s=Draw((self.m,), self.dtype))

    @property
    def out_type(self) -> Draw:
        return Draw((self.m, self.n), self.dtype)

    @property
    def moving(self) -> tuple[str, ...]:
        return ("x", "s")

    @property
    def flops(self) -> int:
        return self.m * self.n

    @property
    def gradient_flops(self) -> float:
        return 3 * self.flops

    @classmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> ScaleRowsCase | None:
        return None if len(sizes) != 2 or words else cls(*sizes, **options)

    def num_bytes(self, direction: Direction) -> int:
        operands = sum(draw.num_bytes for draw in self.draws.values())
        return (operands if direction == "forward" else 2 * operands) + self.out_type.num_bytes

    def run(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        return scale_rows(operands["x"], operands["s"], backend=backend)

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        return self.run(operands, backend=backend)

    def letters(self, name: str, num_axes: int) -> str:
        return "mn"[:num_axes]

    def plain(self, operands: dict[str, Any]) -> jax.Array:
        return operands["x"] * operands["s"][:, None]


CASE = ScaleRowsCase
