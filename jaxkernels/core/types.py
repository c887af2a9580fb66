"""Types of arrays."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

__all__ = ["SHORT_NAMES", "ArrayType", "short_name"]

#: A dtype's name -> the name as JAX prints it in types, where it differs.
SHORT_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "bool": "b1"}


def short_name(dtype: np.dtype) -> str:
    """The dtype's name as JAX prints it in types: "bf16" for bfloat16."""
    return SHORT_NAMES.get(dtype.name, dtype.name)


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of one operand."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, x: Any) -> ArrayType:
        return cls(tuple(np.shape(x)), jnp.dtype(x.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{short_name(self.dtype)}[{dims}]"
