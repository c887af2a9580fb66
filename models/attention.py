"""jaxkernels' attention as the `attention_fn` of Flax's attention layers, in NNX and in Linen.

nnx.MultiHeadAttention(..., attention_fn=attention_fn)
linen.MultiHeadDotProductAttention(..., attention_fn=make_attention_fn(backend="pallas"))

Causal attention is fast if the kernel knows that it is causal. A mask array that is computed under `jit` does not tell.

fast, NNX:    layer(x, is_causal=True)
fast, Linen:  MultiHeadDotProductAttention(..., attention_fn=make_attention_fn(is_causal=True)), then layer(x)
fast, both:   a causal mask that is a concrete array, made outside of `jit`: its values are recognised
slow, both:   layer(x, mask=make_causal_mask(tokens)) under `jit`: XLA runs it
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.nnx.nn import dtypes
from jax.core import Tracer
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
    force_fp32_for_softmax: bool | None = None,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    backend: str | None = None,
) -> Float[Array, "*B T N D"]:
    """Computes attention in place of `flax.nnx.dot_product_attention` or `flax.linen.dot_product_attention`.

    It takes the parameters of both; Linen passes the parameters that the signature names. Some calls need the attention
    weights as an array, or other arithmetic than the kernels have. Without a named backend, these run Flax's function.

    Args:
      query, key, value: any batch dimensions, or none; N a multiple of K (grouped heads, also for Linen).
      bias, mask: broadcastable to (*B, N, T, S). A mask has any dtype; nonzero means visible (Flax makes float32 masks
        of 0 and 1). A concrete mask that is exactly causal is replaced by `is_causal`. A traced mask is not, and the
        fast kernels do not support masks.
      broadcast_dropout, dropout_rng, dropout_rate, deterministic: dropout on the weights runs Flax's function.
      dtype, promote_dtype: the operands are first promoted to `dtype` (default: their common dtype).
      precision: as `jax.lax.Precision`. It makes no difference for 16-bit operands. For float32, more than the default
        runs Flax's function.
      module: the module in which Flax's function sows the attention weights.
      is_causal: query i sees keys j <= i.
      force_fp32_for_softmax: the kernels compute the softmax in float32 in any case. Linen's layers always pass this
        argument. So if Flax's function runs, it is Linen's if an argument of Linen is given, else NNX's.
      einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: products given by the caller run Flax's
        function.
      backend: the backend that must run it. None: the fastest that supports the call, else Flax's function.

    Returns:
      The output, (*B, T, N, D), in the promoted dtype.

    Raises:
      ValueError: shapes are wrong, or dropout_rate is not in [0, 1).
      NotImplementedError: a backend is named, and the call needs Flax's function: dropout on the weights, sown weights,
        an einsum of the caller, operands that are not floating-point, or more than the default precision for float32.

    Differentiability: as `jaxkernels.dot_product_attention`, or as Flax's function if that runs.
    """
    op = f"attention_fn[{backend or 'auto'}]"
    if not 0.0 <= dropout_rate < 1.0:
        raise ValueError(f"{op}: dropout_rate must be in the range [0, 1); got {dropout_rate!r}.")
    given = (query, key, value)
    query, key, value = promote_dtype(given, dtype=dtype)
    own_einsums = dict(
        einsum_dot_general=einsum_dot_general,
        qk_attn_weights_einsum=qk_attn_weights_einsum,
        attn_weights_value_einsum=attn_weights_value_einsum,
    )
    own_einsums = {name: einsum for name, einsum in own_einsums.items() if einsum is not None}
    reason = None
    if dropout_rate > 0.0 and not deterministic:
        reason = f"the kernels have no dropout on attention weights; got {dropout_rate=} and {deterministic=}"
    elif module is not None:
        reason = "the kernels do not store the attention weights, so they cannot be sown; got a module to sow them in"
    elif own_einsums:
        name, einsum = next(iter(own_einsums.items()))
        reason = f"the kernels compute the products themselves; got {name}={einsum!r}"
    elif not jnp.issubdtype(query.dtype, jnp.floating):
        reason = f"operands must be floating-point; got {query.dtype}"
    elif query.dtype == jnp.float32 and precision not in (None, "default", jax.lax.Precision.DEFAULT):
        reason = f"float32 is multiplied at JAX's default precision; got {precision=}"
    if reason is not None and backend is not None:
        raise NotImplementedError(f"{op}: {reason}. Use backend=None, which runs Flax's function in this case.")
    if reason is not None:
        options: dict[str, Any] = dict(
            broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng, dropout_rate=dropout_rate,
            deterministic=deterministic, dtype=dtype, precision=precision, module=module,
        )  # fmt: skip
        if own_einsums or force_fp32_for_softmax is not None or isinstance(module, linen.Module):
            if is_causal:
                causal = jnp.tri(query.shape[-3], key.shape[-3], dtype=bool)
                mask = causal if mask is None else jnp.logical_and(mask, causal)
            options |= own_einsums | dict(force_fp32_for_softmax=bool(force_fp32_for_softmax))
            return linen.dot_product_attention(query, key, value, bias, mask, **options)
        options |= dict(promote_dtype=promote_dtype, is_causal=is_causal)
        return nnx.dot_product_attention(*given, bias, mask, **options)
    if not (query.ndim == key.ndim == value.ndim >= 3 and query.shape[:-3] == key.shape[:-3] == value.shape[:-3]):
        raise ValueError(
            f"{op}: query, key and value must have the same batch dimensions, (*B, length, heads, features); "
            f"got {query.shape}, {key.shape} and {value.shape}."
        )
    if mask is not None and _is_causal_mask(mask, query.shape[-3], key.shape[-3]):
        mask, is_causal = None, True
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


#: The same function, named after the layers that use it.
nnx_attention_fn = linen_attention_fn = attention_fn


def make_attention_fn(backend: str | None = None, *, is_causal: bool = False) -> Callable[..., Array]:
    """Returns `attention_fn` with fixed values of arguments that layers do not pass.

    Args:
      backend: the backend that must run it. None: the fastest that supports the call, else Flax's function.
      is_causal: whether every call is causal. Linen's layers have masks only, so this is their way to causal attention
        without a mask; other masks still apply. It is for self-attention on whole sequences. A call with different
        numbers of queries and keys, as in decoding with a cache, raises ValueError.
    """
    if not is_causal:
        return functools.partial(attention_fn, backend=backend)

    # Linen reads the signature: the layer must see every parameter of `attention_fn`.
    @functools.wraps(attention_fn)
    def causal_attention_fn(query: Array, key: Array, *args: Any, **kwargs: Any) -> Array:
        if query.ndim >= 3 and key.ndim >= 3 and query.shape[-3] != key.shape[-3]:
            raise ValueError(
                f"attention_fn[{backend or 'auto'}]: is_causal=True needs as many queries as keys; "
                f"got {query.shape[-3]} and {key.shape[-3]}. Use make_attention_fn() and a mask."
            )
        return attention_fn(query, key, *args, **{**kwargs, "is_causal": True, "backend": backend})

    return causal_attention_fn


def _is_causal_mask(mask: Any, num_queries: int, num_keys: int) -> bool:
    """Whether the mask makes exactly the keys j <= i visible to query i. False if the mask is traced."""
    if isinstance(mask, Tracer) or mask.shape[-2:] != (num_queries, num_keys):
        return False
    if isinstance(mask, np.ndarray):
        return bool(np.all(mask.astype(bool) == np.tri(num_queries, num_keys, dtype=bool)))
    if not mask.is_fully_addressable:
        return False
    with jax.ensure_compile_time_eval():  # The mask may be a constant of a program that is being traced.
        return bool(_equals_causal(mask))


@jax.jit
def _equals_causal(mask: jax.Array) -> jax.Array:
    return jnp.all(mask.astype(bool) == jnp.tri(*mask.shape[-2:], dtype=bool))


def _flat_batch(op: str, name: str, x: Array, batch: tuple[int, ...]) -> Array:
    """Folds the batch dimensions of a bias or mask, (*B, N|1, T|1, S|1), into one; into 1 if all are 1."""
    num_logits_dims = 3
    x = x.reshape((1,) * (len(batch) + num_logits_dims - x.ndim) + x.shape)
    lead = x.shape[:-num_logits_dims]
    if len(lead) > len(batch) or any(size not in (1, full) for size, full in zip(lead, batch)):
        raise ValueError(f"{op}: {name} must be broadcastable to the batch dimensions {batch}; got {x.shape}.")
    if math.prod(lead) > 1:
        x = jnp.broadcast_to(x, (*batch, *x.shape[-num_logits_dims:]))
    return x.reshape(-1, *x.shape[-num_logits_dims:])
