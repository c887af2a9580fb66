"""Queries that see no key, for backends: their output is the mean of all values of their head, as in `jax.nn`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["mean_gradient"]


def mean_gradient(spec: AttentionSpec, dout: jax.Array, is_blind: jax.Array) -> Float[Array, "B 1 K D"]:
    """The contribution of queries that see no key to dV, equal for all values: their output is the mean of the values.

    Args:
      dout: zero for padding.
      is_blind: (B, N, T).
    """
    batch, num_keys, num_kv_heads, value_dim = spec.v.shape
    summed = jnp.where(jnp.swapaxes(is_blind, 1, 2)[..., None], dout.astype(jnp.float32), 0).sum(1)
    return summed.reshape(batch, 1, num_kv_heads, spec.group_size, value_dim).sum(3) / num_keys
