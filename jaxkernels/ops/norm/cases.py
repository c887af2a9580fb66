"""Norms as data, for the tests' tables and the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jaxkernels.core.cases import Case, Direction, Draw, Size
from jaxkernels.ops.norm.api import layer_norm, rms_norm
from jaxkernels.ops.norm.oracle import plain_norm

__all__ = ["CASE", "NormCase"]


@dataclasses.dataclass(frozen=True)
class NormCase(Case):
    """A norm over the last axis.

    Attributes:
      rows: the axes before the last.
      features: the last axis.
      centered: a layer norm, else an RMS norm.
      scale, bias, residual: whether these are given. An RMS norm has no bias.
      dtype: x's and the residual's.
      parameter_dtype: of scale and bias; None: x's.
      eps, scale_offset: as the public functions take them.
      size: "small", or "real" for sizes that only a GPU computes in reasonable time.
    """

    kind: ClassVar[str] = "norm"
    form: ClassVar[str] = "RxF, then any of :layer :residual :DTYPE :backward"

    rows: tuple[int, ...]
    features: int
    centered: bool = False
    scale: bool = True
    bias: bool = False
    residual: bool = False
    dtype: str = "bfloat16"
    parameter_dtype: str | None = None
    eps: float = 1e-6
    scale_offset: float = 0.0
    size: Size = "small"

    @property
    def id(self) -> str:
        return "-".join(["x".join(map(str, (*self.rows, self.features))), self.dtype, *self._words])

    @property
    def description(self) -> str:
        return " ".join(["x".join(map(str, (*self.rows, self.features))), *self._words])

    @property
    def _words(self) -> list[str]:
        words = ["layer" if self.centered else "rms"]
        words += [] if self.scale else ["unscaled"]
        words += ["bias"] * self.bias + ["residual"] * self.residual
        words += [f"parameters_{self.parameter_dtype}"] if self.parameter_dtype else []
        words += [f"eps_{self.eps:g}"] if self.eps != 1e-6 else []
        return words + ([f"offset_{self.scale_offset:g}"] if self.scale_offset else [])

    @property
    def draws(self) -> dict[str, Draw]:
        """x, and residual, scale and bias where the case has them."""
        of_rows, of_features = Draw((*self.rows, self.features), self.dtype), (self.features,)
        parameter = Draw(of_features, self.parameter_dtype or self.dtype)
        given = dict(residual=self.residual, scale=self.scale, bias=self.bias)
        types = dict(residual=of_rows, scale=parameter, bias=parameter)
        return {"x": of_rows} | {name: types[name] for name, is_given in given.items() if is_given}

    @property
    def out_type(self) -> Draw:
        return self.draws["x"]

    @property
    def further_out_types(self) -> dict[str, Draw]:
        """The sum, if a residual is given."""
        return {"sum": self.out_type} if self.residual else {}

    def cotangents(self, seed: int = 1) -> Any:
        """For out, or for (out, sum)."""
        rng = np.random.default_rng(seed)
        out, *others = (draw.from_numpy(rng) for draw in (self.out_type, *self.further_out_types.values()))
        return (out, *others) if others else out

    def run(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> Any:
        """The case by this package: out, or (out, sum)."""
        options: dict[str, Any] = dict(eps=self.eps, scale_offset=self.scale_offset, backend=backend)
        return (layer_norm if self.centered else rms_norm)(**operands, **options)

    @classmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> NormCase | None:
        if len(sizes) != 2 or not {*words} <= {"layer", "residual"}:
            return None
        is_layer = "layer" in words
        rows, features = sizes
        return cls((rows,), features, centered=is_layer, bias=is_layer, residual="residual" in words, **options)

    @property
    def moving(self) -> tuple[str, ...]:
        """All but the residual, whose gradient is x's."""
        return tuple(name for name in self.draws if name != "residual")

    @property
    def flops(self) -> int:
        """For each element: square and add, multiply by two factors; subtract the mean, whose sum adds; the others."""
        of_element = 4 + 2 * self.centered + self.bias + self.residual
        return of_element * math.prod(self.rows) * self.features

    @property
    def gradient_flops(self) -> float:
        """Twice the forward pass's: two products and two sums for each."""
        return 2 * self.flops

    def num_bytes(self, direction: Direction) -> int:
        """Both directions read x, or the sum. The backward pass reads a cotangent of each result."""
        array = self.out_type.num_bytes
        parameters = sum(draw.num_bytes for name, draw in self.draws.items() if name in ("scale", "bias"))
        if direction == "forward":
            return (4 if self.residual else 2) * array + parameters
        statistics = math.prod(self.rows) * 4 * (1 + self.centered)
        return (4 if self.residual else 3) * array + 2 * parameters + statistics

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> Any:
        return self.run(operands, backend=backend)

    def letters(self, name: str, num_axes: int) -> str:
        return "f" if name in ("scale", "bias") else "r".rjust(num_axes - 1) + "f"

    def plain(self, operands: dict[str, Any]) -> Any:
        return plain_norm(self, operands)


CASE = NormCase
