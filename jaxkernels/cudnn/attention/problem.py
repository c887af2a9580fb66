"""What both passes share: the limits, the masks, and the operands as cuDNN takes them.

cuDNN applies the causal mask, lengths and a causal window by itself. XLA makes a bias of every other mask, of the size
of the logits of a head or of all heads, with a large negative number where a query does not see a key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from jaxkernels.cudnn import calls
from jaxkernels.ops.attention import cudnn_limits, reference
from jaxkernels.ops.attention.spec import AttentionSpec, Extras
from jaxkernels.ops.attention.terms import Band, Bias
from jaxkernels.ops.attention.visibility import first_blind, keys_inside, may_see_nothing, queries_inside

__all__ = ["Config", "Inputs", "folds_masks", "masks_of", "needs_bias", "pad_heads", "search_space", "unsupported"]

#: What is added to a masked logit, JAX's choice. cuDNN's softmax subtracts such numbers from each other: it must stay
#: far from the largest number of the dtype.
_MASKED_BIAS = {"bfloat16": -(2.0**41), "float16": -(2.0**15)}


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose: cuDNN's heuristics choose the kernel."""


def search_space(spec: AttentionSpec) -> tuple[Config, ...]:
    return (Config(),)


def unsupported(spec: AttentionSpec) -> str | None:
    """Why neither pass can compute the spec, or None."""
    dtypes = {spec.q.dtype, spec.k.dtype, spec.v.dtype} | ({spec.bias.dtype} if spec.bias is not None else set())
    if reason := cudnn_limits.unsupported_chip(spec.target) or cudnn_limits.unsupported_dtype(spec.q.dtype.name):
        return reason
    if len(dtypes) > 1:
        return f"takes operands of one dtype, not {', '.join(sorted(str(dtype) for dtype in dtypes))}"
    if any(not isinstance(term, Bias) for term in spec.score_terms):
        return "has no soft cap and no score terms of your own"
    if spec.deterministic:
        return "promises no fixed order of its sums: XLA asks for one by a flag for whole programs only"
    if spec.scale <= 0:
        return f"needs a positive scale, got {spec.scale}"
    if reason := spec.unsupported_sizes() or cudnn_limits.unsupported_lengths(spec.q.shape[1], spec.k.shape[1]):
        return reason
    return cudnn_limits.unsupported_heads(spec.q.shape[3], spec.v.shape[3], spec.target) or calls.missing()


def masks_of(spec: AttentionSpec) -> calls.Masks:
    """The masks that cuDNN applies by itself."""
    is_causal = spec.band.right == 0 and not spec.query_offset
    has_lengths = spec.query_lengths or spec.key_lengths
    left = spec.band.left
    takes_window = cudnn_limits.takes_window(
        causal=is_causal,
        has_lengths=has_lengths,
        has_bias=spec.bias is not None or spec.mask is not None or spec.segments or bool(spec.own_masks),
        queries=spec.q.shape[1],
        keys=spec.k.shape[1],
    )
    return calls.Masks(is_causal, left + 1 if left is not None and takes_window else None, has_lengths)


def folds_masks(spec: AttentionSpec) -> bool:
    """Whether some mask becomes a bias."""
    masks, band = masks_of(spec), spec.band
    applies_band = masks.is_causal and (band.left is None or masks.window is not None)
    if not applies_band and band != Band(None, None):
        return True
    return spec.mask is not None or spec.segments or bool(spec.own_masks)


def needs_bias(spec: AttentionSpec) -> bool:
    """Whether cuDNN gets a bias."""
    return spec.bias is not None or folds_masks(spec)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The operands of both passes as cuDNN takes them.

    Attributes:
      masks: the masks that cuDNN applies.
      q, k, v: without NaN in padding; v as wide as q and k.
      bias: (B|1, N|1, T, S), the bias and the masks that cuDNN does not apply, or None.
      lengths: of queries and of keys, (B,) int32 each, at least 1; nothing if the masks have no lengths.
      is_blind: (B|1, N|1, T), the queries that see no key, padding too; None if every query sees a key.
      is_query, is_key: (B, T) and (B, S), what is no padding; None if there are no lengths.
    """

    masks: calls.Masks
    q: Float[Array, "B T N H"]
    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K H"]
    bias: Float[Array, "#B #N T S"] | None
    lengths: tuple[Int32[Array, " B"], ...]
    is_blind: Bool[Array, "#B #N T"] | None
    is_query: Bool[Array, "B T"] | None
    is_key: Bool[Array, "B S"] | None

    @classmethod
    def of(cls, spec: AttentionSpec, named: Mapping[str, jax.Array]) -> Self:
        extras = Extras.of(named)
        visible = reference.visibility(spec, extras) if folds_masks(spec) else None
        q, k, v = reference.without_padding(extras, named["q"], named["k"], named["v"])
        return cls(
            masks=masks_of(spec),
            q=q,
            k=k,
            v=pad_heads(v, spec.q.shape[3]),
            bias=_bias(spec, named.get("bias"), visible),
            lengths=_lengths(spec, named),
            is_blind=_blind(spec, named, visible),
            is_query=queries_inside(spec, dict(named)) if spec.query_lengths else None,
            is_key=keys_inside(spec, dict(named)) if spec.key_lengths else None,
        )


def pad_heads(x: Float[Array, "B T N D"], head_dim: int) -> Float[Array, "B T N H"]:
    """Pads the last axis with zeros."""
    add = head_dim - x.shape[3]
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, add))) if add else x


def _bias(spec: AttentionSpec, bias: jax.Array | None, visible: jax.Array | None) -> jax.Array | None:
    """The bias with the masks in it. cuDNN broadcasts it over batch and heads only."""
    if visible is not None:
        masked = jnp.asarray(_MASKED_BIAS[spec.q.dtype.name], spec.q.dtype)
        bias = jnp.where(visible, jnp.zeros((), spec.q.dtype) if bias is None else bias, masked)
    if bias is None:
        return None
    return jnp.broadcast_to(bias, (*bias.shape[:2], spec.q.shape[1], spec.k.shape[1]))


def _lengths(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The lengths of queries and of keys. A sequence of length 0 counts as 1: what it gets is overwritten."""
    if not (spec.query_lengths or spec.key_lengths):
        return ()
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    queries, keys = (jnp.full(spec.q.shape[:1], size, jnp.int32) for size in (num_queries, num_keys))
    if spec.query_lengths:
        queries = named["query_lengths"] - named.get("query_offset", 0)
    if spec.key_lengths:
        keys = named["key_lengths"]
    return jnp.clip(queries, 1, num_queries), jnp.clip(keys, 1, num_keys)


def _blind(spec: AttentionSpec, named: Mapping[str, jax.Array], visible: jax.Array | None) -> jax.Array | None:
    """Which queries see no key: from the masks that XLA computes, else from the lengths and the window."""
    if not (spec.query_lengths or may_see_nothing(spec)):
        return None
    if visible is not None:
        is_blind = ~visible.any(axis=-1)
        return jnp.broadcast_to(is_blind, (*is_blind.shape[:2], spec.q.shape[1]))
    place = jnp.arange(spec.q.shape[1], dtype=jnp.int32) + named.get("query_offset", 0)
    key_end = jnp.full(spec.q.shape[:1], spec.k.shape[1], jnp.int32)
    if spec.key_lengths:
        key_end = jnp.clip(named["key_lengths"], 0, key_end)
    is_blind = place >= first_blind(spec, key_end)[:, None]
    return (is_blind | ~queries_inside(spec, dict(named)))[:, None]
