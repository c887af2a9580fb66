"""A product as plain jnp operations, written apart from the reference backend: tests and benchmarks check with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["plain_matmul"]

_ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: jnp.where(x <= 0, 0, x),  # The gradient of jnp.maximum at 0 is a half.
    "relu_squared": lambda x: jnp.maximum(x, 0) ** 2,
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi).astype(x.dtype) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * jax.lax.erfc(-x / np.sqrt(2).astype(x.dtype)),
}


def plain_matmul(case: MatmulCase, operands: dict[str, Any]) -> jax.Array:
    """`case` as jnp operations in the dtype of the operands."""
    lhs, rhs = operands["lhs"], operands["rhs"]
    out_dtype, precision = jnp.dtype(case.out_dtype or case.dtype), case.dot_precision
    if lhs.dtype != jnp.dtype(case.dtype):  # The operands have been widened: widen the rest too.
        out_dtype, precision = lhs.dtype, None
    wide = jnp.promote_types(lhs.dtype, out_dtype)
    if case.lhs_layout == "km":
        lhs = jnp.swapaxes(lhs, -1, -2)
    turned = lambda x: jnp.swapaxes(x, -1, -2) if case.rhs_layout == "nk" else x
    product = lambda rhs: jnp.matmul(lhs, turned(rhs), precision=precision, preferred_element_type=wide).astype(
        out_dtype
    )
    out = case.alpha * product(rhs)
    if case.bias:
        out = out + operands["bias"].astype(out_dtype)
    out = _ACTIVATIONS[case.activation](out)
    if case.multiplier:
        out = out * operands["multiplier"].astype(out_dtype)
    if case.gate:
        out = out * product(operands["gate"])
    if case.residual:
        out = out + operands["residual"].astype(out_dtype)
    return out
