"""jaxkernels' attention as the `attention_fn` of Flax's attention layers, in NNX and in Linen.

nnx.MultiHeadAttention(..., attention_fn=attention_fn)
linen.MultiHeadDotProductAttention(..., attention_fn=make_attention_fn(backend="pallas"))
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.nnx.nn import dtypes
from jaxtyping import Array, Float

import jaxkernels as jk

__all__ = ["attention_fn", "linen_attention_fn", "make_attention_fn", "nnx_attention_fn"]


def attention_fn(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K D"],
    bias: Array | None = None,
    mask: Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
    promote_dtype: Callable[..., Any] = dtypes.promote_dtype,
    is_causal: bool = False,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    backend: str | None = None,
) -> Float[Array, "*B T N D"]:
    """Computes attention in place of `flax.nnx.dot_product_attention` or `flax.linen.dot_product_attention`.

    It takes the parameters of both: Linen passes those that the signature names.

    Args:
      query, key, value: any batch dimensions, or none; N a multiple of K (grouped heads, also for Linen).
      bias, mask: broadcastable to (*B, N, T, S); a mask of any dtype, where nonzero means seen (Flax
        makes float32 masks of 0 and 1).
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: there is no dropout on the weights;
        see Raises.
      dtype, promote_dtype: the operands are promoted to `dtype` (default: their common one) first.
      precision: as `jax.lax.Precision`; see Raises. For 16-bit operands every setting gives the same.
      module: where the attention weights are to be sown; see Raises.
      is_causal: query i sees keys j <= i.
      force_fp32_for_softmax: the softmax is computed in float32 in any case.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: see Raises.
      backend: name of the backend that must run it, or None for the fastest that can.

    Returns:
      The output, (*B, T, N, D), in the promoted dtype.

    Raises:
      ValueError: shapes are wrong, or dropout_rate is not in [0, 1).
      NotImplementedError: dropout on the weights, sown weights, an einsum of the caller's own, or more
        than the default precision for float32: the weights are never formed as an array, and the
        products are the kernel's. Or the named backend cannot compute this.

    Differentiability: as `jaxkernels.dot_product_attention`.
    """
    op = f"attention_fn[{backend or 'auto'}]"
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"{op}: dropout_rate must be in [0, 1); got {dropout_rate!r}.")
    if dropout_rate > 0.0 and not deterministic:
        raise NotImplementedError(
            f"{op}: there is no dropout on attention weights; got dropout_rate={dropout_rate} and deterministic=False. "
            "Set dropout_rate=0 and put a Dropout layer after the attention, or use Flax's own attention_fn."
        )
    if module is not None:
        raise NotImplementedError(
            f"{op}: the attention weights are never formed, so they cannot be sown; got a module to sow them in. "
            "Leave sow_weights=False, or use Flax's own attention_fn."
        )
    for name, einsum in (
        ("einsum_dot_general", einsum_dot_general),
        ("qk_attn_weights_einsum", qk_attn_weights_einsum),
        ("attn_weights_value_einsum", attn_weights_value_einsum),
    ):
        if einsum is not None:
            raise NotImplementedError(
                f"{op}: the products are the kernel's own; got {name}={einsum!r}. Use Flax's own attention_fn with it."
            )
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    if query.dtype == jnp.float32 and precision not in (None, "default", jax.lax.Precision.DEFAULT):
        raise NotImplementedError(
            f"{op}: float32 is multiplied at JAX's default precision; got precision={precision!r}. "
            "Set jax_default_matmul_precision instead, or use Flax's own attention_fn."
        )
    if not (query.ndim == key.ndim == value.ndim >= 3 and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]):
        raise ValueError(
            f"{op}: query, key and value must have the same batch dimensions, (*B, length, heads, features); "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    batch = query.shape[:-3]
    flat = lambda x: x.reshape(-1, *x.shape[-3:])
    out = jk.dot_product_attention(
        flat(query),
        flat(key),
        flat(value),
        bias=None if bias is None else _flat_batch(op, "bias", bias, batch),
        mask=None if mask is None else _flat_batch(op, "mask", mask.astype(bool), batch),
        is_causal=is_causal,
        backend=backend,
    )
    return out.reshape(*batch, *out.shape[1:])


#: The same function under the names of the layers it is for.
nnx_attention_fn = linen_attention_fn = attention_fn


def make_attention_fn(backend: str | None = None) -> Callable[..., Array]:
    """Returns `attention_fn` with its backend fixed, for layers, which have no argument for it."""
    return functools.partial(attention_fn, backend=backend)


def _flat_batch(op: str, name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """Folds the batch dimensions of a bias or mask, (*B, N|1, T|1, S|1), into one; 1 where all of them are."""
    num_logits_dims = 3
    x = x.reshape((1,) * (len(batch) + num_logits_dims - x.ndim) + x.shape)
    lead = x.shape[:-num_logits_dims]
    if len(lead) > len(batch) or any(size not in (1, full) for size, full in zip(lead, batch)):
        raise ValueError(f"{op}: {name} must be broadcastable to the batch dimensions {batch}; got {x.shape}.")
    if math.prod(lead) > 1:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-num_logits_dims:]))
    return x.reshape(-1, *x.shape[-num_logits_dims:])
