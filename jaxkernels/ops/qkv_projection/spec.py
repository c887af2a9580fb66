"""The projection to queries, keys and values as kernels see it: one frozen, hashable description per kernel call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import GIVEN, Operand, Spec
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = ["PARTS", "Pairs", "QkvProjectionSpec", "Wanted"]

#: The parts of the projection, in the order of their columns in w.
PARTS = ("query", "key", "value")

_ARRAYS = ("x", "w", *PARTS, "cos", "sin")

#: Which two features of a head are rotated as a pair: i and i + H/2, or 2 i and 2 i + 1.
Pairs = Literal["halves", "neighbours"]

#: What a kernel returns. Each of the three is linear in both of the others.
Wanted = Literal["parts", "x", "w"]


@dataclasses.dataclass(frozen=True)
class QkvProjectionSpec(Spec):
    """One of three products of x, w, and the parts query, key and value (p: the parts side by side).

    - "parts": p = x @ w. If `pairs` is given, the first `num_rotated` columns of p are then rotated by cos and sin.
    - "x": x = p @ w^T.
    - "w": w = x^T @ p, summed over all rows.

    Attributes:
      wanted: what is computed.
      sizes: columns of query, key and value.
      dtype: dtype of all arrays but cos and sin. These are float32, or float64 beside float64.
      head_dim: features of a head.
      pairs: how features are paired for the rotation, or None.
      precision: as in `jax.lax.dot_general`, or None.
      x: type (..., rows, features), or None.
      w: type (features, columns of all parts), or None.
      query, key, value: types (..., rows, columns of the part), or None.
      cos, sin: types (rows, head_dim / 2), or None.
      target: the chip.
    """

    wanted: Wanted
    sizes: tuple[int, int, int]
    dtype: np.dtype
    head_dim: int
    target: Chip
    pairs: Pairs | None = None
    precision: Any = None
    x: ArrayType | None = None
    w: ArrayType | None = None
    query: ArrayType | None = None
    key: ArrayType | None = None
    value: ArrayType | None = None
    cos: ArrayType | None = None
    sin: ArrayType | None = None

    def inputs(self, kernel: str) -> tuple[str, ...]:
        if self.wanted == "x":
            return (*PARTS, "w")
        if self.wanted == "w":
            return ("x", *PARTS)
        return ("x", "w") if self.pairs is None else ("x", "w", "cos", "sin")

    def outputs(self, kernel: str) -> tuple[str, ...]:
        return PARTS if self.wanted == "parts" else (self.wanted,)

    def arrays(self) -> Mapping[str, Operand]:
        """Labels are m with a number for dimensions of the rows, and d for the features. No device has a part of the
        columns."""
        lead = tuple(f"m{i}" for i in range(len(self.lead)))
        array = lambda *shape: ArrayType(shape, self.dtype)
        arrays = dict(
            x=Operand(array(*self.lead, self.num_features), (*lead, "d")),
            w=Operand(array(self.num_features, self.num_columns), ("d", None)),
        )
        arrays |= {name: Operand(array(*self.lead, size), (*lead, None)) for name, size in zip(PARTS, self.sizes)}
        if self.cos is not None and self.sin is not None:
            arrays |= dict(cos=Operand(self.cos, (lead[-1], None)), sin=Operand(self.sin, (lead[-1], None)))
        return arrays

    def of(self, wanted: Wanted) -> QkvProjectionSpec:
        """The spec of another of the three products, without a rotation."""
        other = dataclasses.replace(self, wanted=wanted, pairs=None, **dict.fromkeys(_ARRAYS))
        return dataclasses.replace(other, **dict.fromkeys(other.inputs(""), GIVEN))

    @property
    def num_columns(self) -> int:
        """The number of columns of query, key and value."""
        return sum(self.sizes)

    @property
    def num_rotated(self) -> int:
        """Columns that are rotated: those of queries and keys, or none."""
        return 0 if self.pairs is None else self.sizes[0] + self.sizes[1]

    @property
    def num_features(self) -> int:
        """Features of a row of x."""
        if self.w is not None:
            return self.w.shape[0]
        assert self.x is not None
        return self.x.shape[-1]

    @property
    def lead(self) -> tuple[int, ...]:
        """The dimensions of the rows."""
        given = self.query if self.x is None else self.x
        assert given is not None
        return given.shape[:-1]

    @functools.cached_property
    def product(self) -> MatmulSpec:
        """The product of the kernel, as if the parts were one array."""
        last, num_rows = len(self.lead), tuple(range(len(self.lead)))
        array = lambda *shape: ArrayType(shape, self.dtype)
        x, w = array(*self.lead, self.num_features), array(self.num_features, self.num_columns)
        parts = array(*self.lead, self.num_columns)
        lhs, rhs, contracting = {
            "parts": (x, w, ((last,), (0,))),
            "x": (parts, w, ((last,), (1,))),
            "w": (x, parts, (num_rows, num_rows)),
        }[self.wanted]
        return MatmulSpec(lhs, rhs, (contracting, ((), ())), self.dtype, self.target, self.precision)
