"""Norms as plain jnp operations, written apart from the reference backend: tests and benchmarks check with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxkernels.ops.norm.cases import NormCase

__all__ = ["plain_norm"]


def plain_norm(case: NormCase, operands: dict[str, Any]) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`case` as one writes it with JAX, the statistics in float32: out, or (out, sum) with a residual."""
    z = operands["x"] + operands["residual"] if case.residual else operands["x"]
    wide = z.astype(jnp.promote_types(z.dtype, jnp.float32))
    if case.centered:
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    out = wide / jnp.sqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + case.eps)
    if "scale" in operands:
        out = out * (operands["scale"].astype(wide.dtype) + case.scale_offset)
    if "bias" in operands:
        out = out + operands["bias"].astype(wide.dtype)
    out = out.astype(z.dtype)
    return (out, z) if case.residual else out
