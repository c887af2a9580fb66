"""Attention as plain jnp operations, written apart from the reference backend: tests and benchmarks check with it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxkernels.ops.attention.cases import AttentionCase

__all__ = ["plain_attention", "plain_attention_by_heads", "visible_keys"]

_MASKED = float(-0.7 * np.finfo(np.float32).max)  # As jax.nn's: finite, so that a row without keys is a mean.


def plain_attention(case: AttentionCase, operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """`case` with every array of logits spelled out: (out, lse)."""
    q, k, v = operands["query"], operands["key"], operands["value"]
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    group_size = case.heads // case.kv_heads
    k, v = jnp.repeat(k, group_size, axis=2), jnp.repeat(v, group_size, axis=2)
    logits = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=dtype) / np.sqrt(case.head_dim).astype(dtype)
    if case.bias is not None:
        logits = logits + operands["bias"].astype(dtype)
    if case.soft_cap is not None:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    logits = jnp.where(visible_keys(case, operands), logits, _MASKED)
    lse = jax.nn.logsumexp(logits, axis=-1)
    out = jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(logits, axis=-1).astype(k.dtype), v)
    if case.query_lengths:
        is_real = np.arange(case.queries) < operands["query_seq_lengths"][:, None]
        out = jnp.where(is_real[:, :, None, None], out, 0)
    return out, jnp.moveaxis(lse, 1, 2)


def plain_attention_by_heads(case: AttentionCase, operands: dict[str, Any]) -> jax.Array:
    """The output of `plain_attention`, one head after the other: one head's logits in memory at a time."""
    one = dataclasses.replace(case, heads=1, kv_heads=1)
    head_axis = dict(query=2, key=2, value=2, bias=1, mask=1)

    @jax.checkpoint
    def head(n: jax.Array) -> jax.Array:
        of_head = dict(operands)
        for name, axis in head_axis.items():
            if name in operands and operands[name].shape[axis] > 1:
                group_size = case.heads // operands[name].shape[axis]
                of_head[name] = jax.lax.dynamic_slice_in_dim(operands[name], n // group_size, 1, axis)
        return plain_attention(one, of_head)[0][:, :, 0]

    return jnp.moveaxis(jax.lax.map(head, jnp.arange(case.heads)), 0, 2)


def visible_keys(case: AttentionCase, operands: dict[str, Any]) -> jax.Array:
    """Which query sees which key: (B, N, T, S) bool."""
    i, j = np.arange(case.queries)[:, None], np.arange(case.keys)[None, :]
    visible = jnp.ones(case.shape_of("BNTS"), bool)
    place = i + (case.keys - case.queries if case.alignment == "bottom_right" else 0)
    if case.causal:
        visible &= j <= place
    if case.window is not None:
        left, right = case.window
        visible &= place - j <= (case.keys + case.queries if left is None else left)
        visible &= j - place <= (case.keys + case.queries if right is None else right)
    if case.mask is not None:
        visible &= operands["mask"]
    if case.query_lengths:
        visible &= i < operands["query_seq_lengths"][:, None, None, None]
    if case.key_lengths:
        visible &= j < operands["key_value_seq_lengths"][:, None, None, None]
    if case.segments:
        of_queries, of_keys = operands["query_segment_ids"], operands["key_value_segment_ids"]
        visible &= of_queries[:, None, :, None] == of_keys[:, None, None, :]
    return visible
