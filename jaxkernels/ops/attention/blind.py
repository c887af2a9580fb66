"""Queries that see no key, for backends: their output is the mean of all values of their head, as in `jax.nn`."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["mean_gradient", "mean_of_values"]


def mean_gradient(spec: AttentionSpec, dout: jax.Array, is_blind: jax.Array) -> Float[Array, "B 1 K D"]:
    """The contribution of queries that see no key to dV, equal for all values: their output is the mean of the values.

    Args:
      dout: zero for padding.
      is_blind: (B, N, T).
    """
    batch, num_keys, num_kv_heads, value_dim = spec.v.shape
    summed = jnp.where(jnp.swapaxes(is_blind, 1, 2)[..., None], dout.astype(jnp.float32), 0).sum(1)
    return summed.reshape(batch, 1, num_kv_heads, spec.group_size, value_dim).sum(3) / num_keys


def mean_of_values(spec: AttentionSpec, v: jax.Array, extras: Mapping[str, jax.Array]) -> Float[Array, "B 1 N D"]:
    """The mean of all values of each query head's key head, in float32. Padding counts, but for what is not finite.

    Args:
      v: the values, or their tangents.
      extras: the optional operands by name.
    """
    v = v.astype(jnp.float32)
    if spec.key_lengths:
        is_key = (jnp.arange(v.shape[1]) < extras["key_lengths"][:, None])[:, :, None, None]
        v = jnp.where(is_key | jnp.isfinite(v), v, 0)
    return jnp.repeat(v.mean(axis=1, keepdims=True), spec.group_size, axis=2)
