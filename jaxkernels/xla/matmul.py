"""Matmul by `jax.lax.dot_general`, the epilogue as the jnp expression a user would write."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxkernels.epilogue import apply_epilogue
from jaxkernels.specs import MatmulSpec

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose: XLA tunes its own matmuls."""


def unsupported(spec: MatmulSpec) -> str | None:
    return None


def search_space(spec: MatmulSpec) -> tuple[Config, ...]:
    return (Config(),)


def run(spec: MatmulSpec, config: Config, lhs: jax.Array, rhs: jax.Array, *epilogue: jax.Array):
    """Returns the product, or [out] / [out, preactivation] when the spec has an epilogue."""
    # A result narrower than the operands is computed at their width, then rounded.
    dtypes = (lhs.dtype, rhs.dtype, spec.out_dtype)
    is_8_bit = lambda dtype: jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
    # 8-bit floats promote with nothing, not even each other.
    wide = jnp.float32 if any(map(is_8_bit, dtypes)) else functools.reduce(jnp.promote_types, dtypes)
    if spec.alpha != 1:  # Scaled in float32 at least.
        wide = jnp.promote_types(wide, jnp.float32)
    out = jax.lax.dot_general(lhs, rhs, spec.dimension_numbers, precision=spec.precision, preferred_element_type=wide)
    if spec.alpha != 1:
        out = spec.alpha * out
    out = out.astype(spec.out_dtype)
    return out if not spec.fused else apply_epilogue(spec, out, *epilogue)
