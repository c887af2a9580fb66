"""Projections as plain jnp operations, written apart from the reference backend: benchmarks check with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxkernels.ops.qkv_projection.cases import QkvProjectionCase

__all__ = ["plain_projection"]


def plain_projection(case: QkvProjectionCase, operands: dict[str, Any]) -> tuple[jax.Array, ...]:
    """`case` as one writes it with JAX, the rotation in float32: query, key and value."""
    out = operands["x"] @ operands["w"]
    num_heads, num_kv_heads, head_dim = case.num_heads, case.num_kv_heads, case.head_dim
    parts = jnp.split(out, [num_heads * head_dim, (num_heads + num_kv_heads) * head_dim], axis=-1)
    query, key, value = (part.reshape(*part.shape[:-1], -1, head_dim) for part in parts)
    if case.pairs is None:
        return query, key, value
    cos, sin = (operands[name][:, None] for name in ("cos", "sin"))  # (T, 1, H/2)
    return _rotated(query, cos, sin, case.pairs), _rotated(key, cos, sin, case.pairs), value


def _rotated(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: str) -> jax.Array:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # The two features of a pair are along the last axis, or the one before it.
    axis = -2 if pairs == "halves" else -1
    shape = (2, x.shape[-1] // 2) if pairs == "halves" else (x.shape[-1] // 2, 2)
    first, second = (jnp.take(wide.reshape(*x.shape[:-1], *shape), i, axis=axis) for i in (0, 1))
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)
