"""Attention in plain JAX: the definition every kernel is measured against.

The logits are masked with the large finite number `jax.nn.dot_product_attention` uses, so that a row
without a single visible key averages the values of all keys. Shapes: B batch, T queries, S keys,
N query heads, K key/value heads, G = N/K, H head dimension, D value head dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.specs import MASKED_LOGIT, AttentionSpec

__all__ = ["Config", "Extras", "attend", "backward", "search_space", "tangent", "visibility"]


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose: XLA fuses as it sees fit."""


def search_space(spec: AttentionSpec) -> tuple[Config, ...]:
    return (Config(),)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Extras:
    """The optional operands, by name.

    Attributes:
      bias: (B|1, N|1, T|1, S|1) floating.
      mask: (B|1, N|1, T|1, S|1) bool, True where a query sees a key.
      query_lengths, key_lengths: (B,) int32.
      query_segments, key_segments: (B, T) and (B, S) int32.
      query_offset: () int32.
    """

    bias: jax.Array | None = None
    mask: jax.Array | None = None
    query_lengths: jax.Array | None = None
    key_lengths: jax.Array | None = None
    query_segments: jax.Array | None = None
    key_segments: jax.Array | None = None
    query_offset: jax.Array | None = None

    @classmethod
    def unpack(cls, spec: AttentionSpec, operands: Sequence[jax.Array]) -> tuple[Extras, tuple[jax.Array, ...]]:
        """Names the optional operands that `spec` announces; returns them and the operands after them."""
        names = spec.extra_names
        return cls(**dict(zip(names, operands))), tuple(operands[len(names) :])

    def pack(self) -> tuple[jax.Array, ...]:
        """The operands that are given, in the order of the primitives."""
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return tuple(value for value in values if value is not None)


def attend(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Returns attention's output, in v's dtype, and the natural logsumexp of the logits, in float32."""
    logits = _logits(spec, q, k, extras)
    lse = jax.nn.logsumexp(logits, axis=-1)
    p = jax.nn.softmax(logits, axis=-1).astype(k.dtype)
    out = jnp.einsum("bkgts,bskd->btkgd", p, v)
    out = out.reshape(*q.shape[:3], v.shape[-1])
    if extras.query_lengths is not None:
        out = jnp.where(_live_queries(q.shape[1], extras)[:, :, None, None], out, 0)
    return out, lse.reshape(lse.shape[0], q.shape[2], q.shape[1])


def backward(
    spec: AttentionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    extras: Extras,
    out: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, ...]:
    """Returns dq, dk, dv (and dbias, where the spec asks for it).

    The probabilities P are computed anew. With dP = dO V^T, delta = rowsum(dO * O), the logits' cotangent is
    dS = P * (dP - delta + dlse), zero where the logits are masked.
    """
    group = lambda x: x.reshape(*x.shape[:2], k.shape[2], spec.group_size, x.shape[-1])
    logits, pull_mask_and_cap = jax.vjp(lambda s: _finish_logits(spec, s, extras), _raw_logits(spec, q, k, extras))
    p = jax.nn.softmax(logits, axis=-1)
    if extras.query_lengths is not None:  # Padded queries gave 0, whatever the values were.
        dout = jnp.where(_live_queries(q.shape[1], extras)[:, :, None, None], dout, 0)
    f32: dict[str, Any] = dict(preferred_element_type=jnp.promote_types(q.dtype, jnp.float32))
    dp = jnp.einsum("btkgd,bskd->bkgts", group(dout), v, **f32)
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1)
    row = (dlse - jnp.swapaxes(delta, 1, 2)).reshape(*p.shape[:4], 1)
    (ds,) = pull_mask_and_cap((p * (dp + row)).astype(logits.dtype))
    dv = jnp.einsum("bkgts,btkgd->bskd", p.astype(v.dtype), group(dout), **f32)
    scaled = (ds * spec.scale).astype(q.dtype)
    dq = jnp.einsum("bkgts,bskh->btkgh", scaled, k, **f32)
    dk = jnp.einsum("bkgts,btkgh->bskh", scaled, group(q), **f32)
    grads = (dq.reshape(q.shape).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))
    if not spec.bias_gradient:
        return grads
    assert extras.bias is not None
    dbias = ds.reshape(ds.shape[0], q.shape[2], *ds.shape[3:])
    summed = tuple(d for d, size in enumerate(extras.bias.shape) if size == 1)
    return *grads, jnp.sum(dbias, axis=summed, keepdims=True).astype(extras.bias.dtype)


def _logits(spec: AttentionSpec, q: jax.Array, k: jax.Array, extras: Extras) -> Float[Array, "B K G T S"]:
    return _finish_logits(spec, _raw_logits(spec, q, k, extras), extras)


def _raw_logits(spec: AttentionSpec, q: jax.Array, k: jax.Array, extras: Extras) -> Float[Array, "B K G T S"]:
    """scale * q k^T + bias, in float32."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], spec.group_size, q.shape[-1])
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum("btkgh,bskh->bkgts", grouped, k, preferred_element_type=dtype) * spec.scale
    if extras.bias is not None:
        logits = (logits + _group_heads(extras.bias, k.shape[2])).astype(dtype)
    return logits


def _finish_logits(spec: AttentionSpec, logits: jax.Array, extras: Extras) -> Float[Array, "B K G T S"]:
    """Soft cap and masks."""
    if spec.soft_cap is not None:
        logits = spec.soft_cap * jnp.tanh(logits / spec.soft_cap)
    visible = visibility(spec, extras)
    if visible is not None:
        logits = jnp.where(_group_heads(visible, spec.k.shape[2]), logits, MASKED_LOGIT)
    return logits.astype(jnp.float32)


def visibility(spec: AttentionSpec, extras: Extras) -> jax.Array | None:
    """Which query sees which key: bool, broadcastable to (B, N, T, S); None where all see all."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    offset = 0 if extras.query_offset is None else extras.query_offset
    i = (jnp.arange(num_queries) + offset)[:, None]
    j = jnp.arange(num_keys)[None, :]
    parts: list[jax.Array] = []
    if extras.mask is not None:
        parts.append(extras.mask)
    if spec.causal:
        parts.append((j <= i)[None, None])
    if spec.window is not None:
        left, right = spec.window
        if left is not None:
            parts.append((i <= j + left)[None, None])
        if right is not None:
            parts.append((i >= j - right)[None, None])
    if extras.query_lengths is not None:
        parts.append(_live_queries(num_queries, extras)[:, None, :, None])
    if extras.key_lengths is not None:
        parts.append((j < extras.key_lengths[:, None])[:, None, None, :])
    if extras.query_segments is not None:
        assert extras.key_segments is not None  # They are given together.
        same = extras.query_segments[:, :, None] == extras.key_segments[:, None, :]
        parts.append(same[:, None])
    if not parts:
        return None
    visible = parts[0]
    for part in parts[1:]:
        visible = jnp.logical_and(visible, part)
    return visible


def _live_queries(num_queries: int, extras: Extras) -> jax.Array:
    """Which queries are inside their sequence: (B, T) bool."""
    assert extras.query_lengths is not None
    offset = 0 if extras.query_offset is None else extras.query_offset
    return (jnp.arange(num_queries) + offset)[None, :] < extras.query_lengths[:, None]


def _group_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """(B|1, N|1, T|1, S|1) -> (B|1, K|1, G|1, T|1, S|1)."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], num_kv_heads, x.shape[1] // num_kv_heads, *x.shape[2:])


def tangent(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, tangents: Sequence[jax.Array]
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Forward mode: returns (out, lse) and their tangents for tangents of q, k, v (and the bias)."""

    def f(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> tuple[jax.Array, jax.Array]:
        return attend(spec, q, k, v, dataclasses.replace(extras, bias=bias[0] if bias else None))

    primals = (q, k, v) if extras.bias is None else (q, k, v, extras.bias)
    return jax.jvp(f, primals, tuple(tangents))
