"""Attention in plain JAX: the definition every kernel is measured against.

The logits are masked with the large finite number `jax.nn.dot_product_attention` uses, so that a row
without a single visible key averages the values of all keys. Shapes: B batch, T queries, S keys,
N query heads, K key/value heads, G = N/K, H head dimension, D value head dimension.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec, Extras
from jaxkernels.ops.attention.terms import Places, group_heads

__all__ = [
    "Config", "attend", "backward", "search_space", "seconds", "tangent", "visibility", "with_finite_padding",
    "without_padding",
]  # fmt: skip


#: Float32 logits up to here are chosen for their speed. Of 96 attentions with more than a quarter of this, XLA was the
#: fastest way for none (H200).
_MOST_LOGITS_BYTES = 2**28
#: A kernel's launch on a GPU.
_LAUNCH_SECONDS = 1.8e-6
#: The share of launches that is left with one query: products become sums, and XLA fuses some with the softmax.
_ONE_QUERY = 0.7
#: Launches of a gradient with one key: XLA sums over queries and the heads of a group. The gradient of 51 queries of
#: three heads takes 8.5 us on an H200, that of one query of one head 2.5 us.
_LAUNCHES_OF_SUMS = 4


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose: XLA fuses as it sees fit."""


def search_space(spec: AttentionSpec) -> tuple[Config, ...]:
    return (Config(),)


def seconds(
    spec: AttentionSpec, *, bytes_of_logit: float, passes_of_queries: float, passes_of_keys: float, num_products: int
) -> float:
    """How long a pass takes by XLA on a GPU. Infinitely long where the logits, which XLA holds all at once, are so many
    that nobody should get them unasked.

    A product is a launch. With several key heads, XLA also transposes an operand of each. With one key, products and
    softmax are elementwise: one kernel computes all, but for the sums over queries in the gradients of key and value.

    Args:
      bytes_of_logit: bytes that are moved for each logit.
      passes_of_queries: how often arrays of the size of the queries are read or written.
      passes_of_keys: the same of arrays of the size of the keys.
      num_products: products of the logits' size by the head dimension.
    """
    (batch, num_queries, num_heads, head_dim), (num_keys, num_kv_heads) = spec.q.shape, spec.k.shape[1:3]
    logits = batch * num_heads * num_queries * num_keys
    if 4 * logits > _MOST_LOGITS_BYTES:
        return math.inf
    launches = num_products * (2 if num_kv_heads > 1 else 1) * (_ONE_QUERY if num_queries == 1 else 1)
    if num_keys == 1:
        is_gradient = num_products > 2
        has_sums = is_gradient and num_queries * spec.group_size > 1
        launches = _LAUNCHES_OF_SUMS if has_sums else 1
    num_bytes = bytes_of_logit * logits + passes_of_queries * spec.q.num_bytes + passes_of_keys * spec.k.num_bytes
    by_memory = num_bytes / (spec.target.memory_bytes_per_s or math.inf)
    by_products = 2 * num_products * logits * head_dim / (0.5 * (spec.target.bf16_flops_per_s or math.inf))
    return _LAUNCH_SECONDS * launches + by_memory + by_products


def attend(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras
) -> tuple[Float[Array, "B T N D"], Float[Array, "B N T"]]:
    """Returns attention's output, in v's dtype, and the natural logsumexp of the logits, in float32."""
    p, lse = _Logits.of(spec, q, k, extras).softmax()
    _, _, v = without_padding(extras, q, k, v)
    p = p.astype(k.dtype)
    if spec.q.shape[1] == 1:  # XLA's CPU backend multiplies one row faster from the right, by a factor of 1.3.
        out = jnp.moveaxis(_dot("bskd,bkgts->bkdgt", v, p, None), 2, -1)
    else:
        out = _dot("bkgts,bskd->bkgtd", p, v, None)
    out = _without_padded_queries(extras, _heads_last(out))
    return out, lse.reshape(lse.shape[0], q.shape[2], q.shape[1])


def backward(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, dout: jax.Array, dlse: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns dq, dk, dv (and dbias, where the spec asks for it).

    The probabilities P are computed anew. With dP = dO V^T and delta = rowsum(P * dP), the logits' cotangent is
    dS = P * (dP - delta + dlse), zero where the logits are masked. The kernels take delta = rowsum(dO * O), which is
    the same but for O's rounding. If one P is nearly 1, dP - delta nearly cancels, and that rounding is all it leaves.
    """
    q, k, v = without_padding(extras, q, k, v)
    grouped = _heads_first(q, k.shape[2])
    douts = _heads_first(_without_padded_queries(extras, dout), k.shape[2])
    logits = _Logits.of(spec, q, k, extras)
    p, _ = logits.softmax()
    wide = _wide(q)
    dp = _dot("bkgtd,bskd->bkgts", douts, v, wide)
    delta = jnp.sum(p * dp, axis=-1, keepdims=True)
    ds = logits.chain(p * (dp - delta + dlse.reshape(*p.shape[:4], 1)))
    # Tensor cores take both operands in one dtype. A CPU multiplies in float32: rounding there loses what jax.nn keeps.
    scaled = (ds * spec.scale).astype(wide if spec.target.platform == "cpu" else q.dtype)
    dq = _heads_last(_dot("bkgts,bskh->bkgth", scaled, k, wide))
    dk = jnp.swapaxes(_dot("bkgts,bkgth->bksh", scaled, grouped, wide), 1, 2)
    dv = jnp.swapaxes(_dot("bkgts,bkgtd->bksd", p.astype(v.dtype), douts, wide), 1, 2)
    grads = (dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype))
    if not spec.bias_gradient:
        return grads
    assert extras.bias is not None
    dbias = ds.reshape(ds.shape[0], q.shape[2], *ds.shape[3:])
    summed = tuple(d for d, size in enumerate(extras.bias.shape) if size == 1)
    return *grads, jnp.sum(dbias, axis=summed, keepdims=True).astype(extras.bias.dtype)


def tangent(
    spec: AttentionSpec, q: jax.Array, k: jax.Array, v: jax.Array, extras: Extras, tangents: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Forward mode: returns the tangents of out and lse for tangents of q, k, v (and the bias)."""
    q, k, v = without_padding(extras, q, k, v)
    if spec.target.platform == "cpu":  # XLA's CPU backend fuses a product with zeros into the next loop, wrongly.
        tangents = jax.lax.optimization_barrier(list(tangents))
    q_dot, k_dot, v_dot = without_padding(extras, *tangents[:3])
    logits = _Logits.of(spec, q, k, extras)
    wide = _wide(q)
    raw_dot = (_products(q_dot, k) + _products(q, k_dot)) * spec.scale
    if extras.bias is not None:
        raw_dot = raw_dot + group_heads(tangents[3], k.shape[2]).astype(raw_dot.dtype)
    logits_dot = logits.chain(raw_dot).astype(jnp.float32)
    p, _ = logits.softmax()
    lse_dot = jnp.sum(p * logits_dot, axis=-1, keepdims=True)
    p_dot = p * (logits_dot - lse_dot)
    out_dot = _dot("bkgts,bskd->bkgtd", p_dot.astype(k.dtype), v, wide)
    out_dot += _dot("bkgts,bskd->bkgtd", p.astype(k.dtype), v_dot, wide)
    out_dot = _without_padded_queries(extras, _heads_last(out_dot).astype(v.dtype))
    return out_dot, lse_dot.reshape(lse_dot.shape[0], q.shape[2], q.shape[1])


@dataclasses.dataclass(frozen=True)
class _Logits:
    """The logits of all queries and keys, and what their derivatives need.

    Attributes:
      masked: (B, K, G, T, S), float32: the logits after the score terms, over `unit`; MASKED_LOGIT where masked.
      unit: the scale or the soft cap, or 1; not negative.
      visible: which of them are not masked; None if all are visible.
      slope: the derivative of the score terms; None where it is 1.
    """

    masked: jax.Array
    unit: float
    visible: jax.Array | None
    slope: jax.Array | None

    @classmethod
    def of(cls, spec: AttentionSpec, q: jax.Array, k: jax.Array, extras: Extras) -> _Logits:
        logits, unit, slope = _products(q, k), spec.scale, None
        visible = visibility(spec, extras)
        if visible is not None:
            visible = group_heads(visible, k.shape[2])
        for term in spec.score_terms:
            logits, unit, factor = term.apply(logits, unit, visible, _places(spec, extras))
            slope = factor if slope is None else slope if factor is None else slope * factor
        if unit < 0:
            logits, unit = -logits, -unit
        if visible is not None:
            if unit < 2.0**-60:  # Too small to keep unit * MASKED_LOGIT out of sight.
                logits, unit = logits * unit, 1.0
            logits = jnp.where(visible, logits, MASKED_LOGIT)
        return cls(logits.astype(jnp.float32), unit, visible, slope)

    def softmax(self) -> tuple[jax.Array, jax.Array]:
        """Softmax and natural logsumexp along the last axis; their derivatives pass the maximum by."""
        top = jax.lax.stop_gradient(jnp.max(self.masked, axis=-1, keepdims=True, initial=-jnp.inf))
        # Not unit * masked - unit * top: XLA computes fma(unit, masked, -unit * top), which rounds once. Beyond 1e8 the
        # largest logit would be hundreds away from itself, and its exponential zero or infinite.
        p = jnp.exp(self.unit * (self.masked - top))
        total = jnp.sum(p, axis=-1, keepdims=True)
        largest = jnp.where(top == MASKED_LOGIT, top, self.unit * top)
        # All logits minus infinity, or one plus infinity: that is the logsumexp, while p is NaN.
        lse = jnp.where(_is_finite(largest), largest + jnp.log(total), largest)
        return p / total, lse[..., 0]

    def chain(self, x: jax.Array) -> jax.Array:
        """Takes tangents of the logits from before the score terms to after the masks; cotangents the other way."""
        if self.slope is not None:
            x = x * self.slope
        return x if self.visible is None else jnp.where(self.visible, x, 0)


def _products(q: jax.Array, k: jax.Array) -> Float[Array, "B K G T S"]:
    """q k^T, in float32 at least."""
    return _dot("bkgth,bskh->bkgts", _heads_first(q, k.shape[2]), k, _wide(q))


def _wide(q: jax.Array) -> Any:
    return jnp.promote_types(q.dtype, jnp.float32)


def _dot(subscripts: str, lhs: jax.Array, rhs: jax.Array, dtype: Any) -> jax.Array:
    """An einsum that leaves its operands in their order, unlike `jnp.einsum`, which may transpose all logits for it.

    The result has batch axes first, then the axes that only lhs has, then those that only rhs has.
    """
    operands, result = subscripts.split("->")
    left, right = operands.split(",")
    shared = [x for x in left if x in right]
    batch = [x for x in shared if x in result]
    contracted = [x for x in shared if x not in result]
    places = lambda names: (tuple(map(left.index, names)), tuple(map(right.index, names)))
    return jax.lax.dot_general(lhs, rhs, (places(contracted), places(batch)), preferred_element_type=dtype)


def _heads_first(x: jax.Array, num_kv_heads: int) -> Float[Array, "B K G T H"]:
    """From (B, T, N, H)."""
    x = x.reshape(*x.shape[:2], num_kv_heads, x.shape[2] // num_kv_heads, x.shape[3])
    return jnp.transpose(x, (0, 2, 3, 1, 4))


def _heads_last(x: jax.Array) -> jax.Array:
    """(B, K, G, T, H) -> (B, T, N, H)."""
    x = jnp.transpose(x, (0, 3, 1, 2, 4))
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def without_padding(extras: Extras, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v, or their tangents, with zeros for padding: a product of a NaN and a probability of 0 is NaN.

    Values keep what is finite, for queries that see no key: they get the mean of all values, as in jax.nn.
    """
    q = _without_padded_queries(extras, q)
    if extras.key_lengths is not None:
        k = jnp.where(_are_keys(k.shape[1], extras.key_lengths), k, 0)
        v = with_finite_padding(v, extras.key_lengths)
    return q, k, v


def with_finite_padding(v: jax.Array, key_lengths: jax.Array) -> jax.Array:
    """The values, with zeros for what is not finite in padding."""
    return jnp.where(_are_keys(v.shape[1], key_lengths) | _is_finite(v), v, 0)


def _are_keys(num_keys: int, key_lengths: jax.Array) -> jax.Array:
    """Which keys are inside their sequence: (B, S, 1, 1) bool."""
    return (jnp.arange(num_keys)[None, :] < key_lengths[:, None])[:, :, None, None]


def _is_finite(x: jax.Array) -> jax.Array:
    """As `jnp.isfinite`. XLA fuses a comparison with products and sums on a GPU, but not its operation `is-finite`."""
    return jnp.abs(x) < jnp.inf


def _without_padded_queries(extras: Extras, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    if extras.query_lengths is None:
        return x
    return jnp.where(_live_queries(x.shape[1], extras)[:, :, None, None], x, 0)


def visibility(spec: AttentionSpec, extras: Extras) -> jax.Array | None:
    """Which query sees which key: bool, broadcastable to (B, N, T, S); None where all see all."""
    parts = [term.visible_pairs(_places(spec, extras)) for term in spec.mask_terms]
    return functools.reduce(jnp.logical_and, parts) if parts else None


def _places(spec: AttentionSpec, extras: Extras) -> Places:
    offset = 0 if extras.query_offset is None else extras.query_offset
    query = (jnp.arange(spec.q.shape[1]) + offset)[:, None]
    return Places(query, jnp.arange(spec.k.shape[1])[None, :], spec.k.shape[2], extras)


def _live_queries(num_queries: int, extras: Extras) -> jax.Array:
    """Which queries are inside their sequence: (B, T) bool."""
    assert extras.query_lengths is not None
    offset = 0 if extras.query_offset is None else extras.query_offset
    return (jnp.arange(num_queries) + offset)[None, :] < extras.query_lengths[:, None]
