"""The public function."""

from __future__ import annotations

import jax

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from toy_operation.rules import scale_rows_op
from toy_operation.spec import ScaleRowsSpec

__all__ = ["scale_rows"]


def scale_rows(x: jax.Array, s: jax.Array, *, backend: str | None = None) -> jax.Array:
    """x * s[:, None], for x (M, N) and s (M,)."""
    if x.ndim != 2 or s.shape != x.shape[:1]:
        raise ValueError(f"scale_rows: s must have shape {x.shape[:1]} for x {x.shape}; got {s.shape}.")
    dispatch.check_backend("scale_rows", backend)
    spec = ScaleRowsSpec(ArrayType.of(x), ArrayType.of(s), hardware.host())
    return scale_rows_op(spec, dict(x=x, s=s), backend=backend)
