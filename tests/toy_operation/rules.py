"""The primitive and its derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkernels.core.kernel_op import KernelOp
from toy_operation.spec import ScaleRowsSpec

__all__ = ["scale_rows_op"]

scale_rows_op = KernelOp("scale_rows", "toy_scale_rows", multiple_results=False)


def _x_transpose(ct: jax.Array, x: Any, s: jax.Array, *, static: ScaleRowsSpec, **params: Any) -> jax.Array:
    return scale_rows_op.bind(static, dict(x=ct, s=s), **params)


def _s_transpose(ct: jax.Array, x: jax.Array, s: Any, **params: Any) -> jax.Array:
    return jnp.sum(ct * x, axis=1)


ad.defbilinear(scale_rows_op.primitive, _x_transpose, _s_transpose)
