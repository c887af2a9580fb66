"""Matmul by `jax.lax.dot_general`, the epilogue as the jnp expression a user would write."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.ops.matmul.cublas import CONSTANTS, Constants, estimate, not_estimated
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import MatmulSpec

__all__ = [
    "CONSTANTS", "VERSION", "Config", "Constants", "estimate", "not_estimated", "run", "search_space",
    "unsupported",
]  # fmt: skip

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose: XLA tunes its own matmuls."""


def unsupported(spec: MatmulSpec) -> str | None:
    return None


def _promote(x: np.dtype, y: np.dtype) -> np.dtype:
    """As JAX, which promotes floats of 8 bits and integers of 4 to nothing, not even each other."""
    is_settled = x == y and jnp.issubdtype(x, jnp.integer)
    return x if is_settled else jnp.promote_types(_promotable(x), _promotable(y))


def _promotable(dtype: np.dtype) -> np.dtype:
    """The dtype, or a wider one that JAX promotes."""
    if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1:
        return jnp.dtype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.dtype(jnp.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int8)
    return dtype


def _is_tiny_float(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8


def search_space(spec: MatmulSpec) -> tuple[Config, ...]:
    return (Config(),)


def run(spec: MatmulSpec, config: Config, *arrays: jax.Array):
    """Returns the product, or the results as a list when the spec has an epilogue."""
    operands = spec.named("matmul", arrays)
    lhs, rhs = operands["lhs"], operands["rhs"]
    # A result narrower than the operands is computed at their width, then rounded.
    wide = functools.reduce(_promote, (lhs.dtype, rhs.dtype, spec.out_dtype))
    width = max(lhs.dtype.itemsize, rhs.dtype.itemsize)
    if width > wide.itemsize:  # Integers to a float: bfloat16 of int32.
        wide = jnp.dtype(f"float{8 * width}")
    if spec.alpha != 1:  # Scaled in float32 at least.
        wide = jnp.promote_types(wide, jnp.float32)
    # XLA's CPU and GPU backends refuse a product of 4-bit floats with a result of another width.
    lhs, rhs = (x.astype(wide) if _is_tiny_float(x.dtype) else x for x in (lhs, rhs))
    out = jax.lax.dot_general(lhs, rhs, spec.dimension_numbers, precision=spec.precision, preferred_element_type=wide)
    if spec.alpha != 1:
        out = spec.alpha * out
    if jnp.iscomplexobj(out) and not jnp.issubdtype(spec.out_dtype, jnp.complexfloating):
        out = out.real  # The cotangent of a real operand beside a complex one.
    out = out.astype(spec.out_dtype)
    return out if not spec.fused else apply_epilogue(spec, out, operands)
