"""Queries that see no key, for backends: their output is the mean of all values of their head, as in `jax.nn`."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from jaxkernels.ops.attention.reference import with_finite_padding
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import may_see_nothing, queries_inside

__all__ = ["mean_gradient", "mean_of_values", "row_sums"]


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
        v = with_finite_padding(v, extras["key_lengths"])
    return jnp.repeat(v.mean(axis=1, keepdims=True), spec.group_size, axis=2)


def row_sums(
    spec: AttentionSpec, named: Mapping[str, jax.Array], products: Float32[Array, "B N T"] | None = None
) -> tuple[Float32[Array, "B N T"], Float32[Array, "B N T"], Float32[Array, "B 1 K D"] | None]:
    """What a backward pass needs of each query, and what queries that see no key add to dV (None if none may).

    Args:
      named: the operands of `attention_backward` by name.
      products: the sums of out * dout, if a kernel has computed them; those of padding may be no numbers.

    Returns:
      The logsumexp, infinite for queries that see no key: their weights are zero. Delta, the sum of out * dout less the
      logsumexp's cotangent; zero for these queries. Padding counts as zeros in delta.
    """
    dout, lse = named["dout"].astype(jnp.float32), named["lse"]
    if products is None:
        products = jnp.swapaxes(jnp.sum(named["out"].astype(jnp.float32) * dout, axis=-1), 1, 2)
    if spec.query_lengths:
        is_query = queries_inside(spec, dict(named))
        products = jnp.where(is_query[:, None], products, 0)
        dout = jnp.where(is_query[:, :, None, None], dout, 0)
    delta = products - named["dlse"]
    if not (spec.query_lengths or spec.bias is not None or may_see_nothing(spec)):
        return lse, delta, None
    is_blind = lse <= MASKED_LOGIT / 2
    mean = mean_gradient(spec, dout, is_blind)
    return jnp.where(is_blind, jnp.inf, lse), jnp.where(is_blind, 0, delta), mean
