"""An attention as kernels see it: one frozen, hashable description per kernel call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np

from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import Operand, Spec
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.terms import (
    Band,
    Bias,
    DenseMask,
    Lengths,
    MaskTerm,
    ScoreTerm,
    Segments,
    SoftCap,
)

__all__ = ["MASKED_LOGIT", "AttentionSpec", "Extras"]

#: What a masked logit of an attention counts as, jax.nn's choice: finite, so that a query that sees no key averages all
#: values, and no row of probabilities is NaN. To rounding it is the logsumexp of such a query, too.
MASKED_LOGIT = float(-0.7 * np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class AttentionSpec(Spec):
    """out, lse = softmax(mask(soft_cap(scale * q k^T + bias))) v for batches of grouped heads.

    Attributes:
      q: (B, T, N, H); k: (B, S, K, H); v: (B, S, K, D), N a multiple of K.
      scale: factor of the logits.
      causal: query i sees keys j <= i (+ query offset).
      window: (left, right): query i sees keys i - left <= j <= i + right; None leaves a side open.
      soft_cap: logits become soft_cap * tanh(logits / soft_cap), before the masks.
      bias: its type, broadcastable to (B, N, T, S), or None.
      mask: type of a boolean mask, broadcastable to (B, N, T, S), or None.
      query_lengths, key_lengths: whether int32 (B,) lengths are given.
      segments: whether int32 segment ids (B, T) and (B, S) are given.
      self_segments: whether one array was given for both, so that a query is in the segment of the key in its place.
      query_offset: whether an int32 () offset is added to the query's index in `causal` and `window`
        and taken off the query lengths (the shard's place in the sequence, under a mesh).
      bias_gradient: the backward pass returns the bias's gradient.
      lse_gradient: the logsumexp has a cotangent; without it, the operand `dlse` of the backward pass is zero.
      drops_lse: the program does not use the logsumexp of the forward pass: it is no result, and not saved for a
        derivative. Kernels return it anyway.
      deterministic: equal operands must give equal bits in every run.
      terms: mask terms and score terms beside those that the fields above stand for, in the order in which they apply.
      target: the chip.
    """

    q: ArrayType
    k: ArrayType
    v: ArrayType
    scale: float
    target: Chip
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    bias: ArrayType | None = None
    mask: ArrayType | None = None
    query_lengths: bool = False
    key_lengths: bool = False
    segments: bool = False
    self_segments: bool = False
    query_offset: bool = False
    bias_gradient: bool = False
    lse_gradient: bool = False
    drops_lse: bool = False
    deterministic: bool = False
    terms: tuple[MaskTerm | ScoreTerm, ...] = ()

    @property
    def band(self) -> Band:
        """The causal mask and the window; open on both sides without them."""
        left, right = self.window or (None, None)
        return Band(left, 0 if self.causal else right)

    @property
    def own_masks(self) -> tuple[MaskTerm, ...]:
        """The mask terms of `terms`."""
        return tuple(term for term in self.terms if isinstance(term, MaskTerm))

    @property
    def index_terms(self) -> tuple[MaskTerm, ...]:
        """The mask terms that read no operand."""
        band = () if self.band == Band(None, None) else (self.band,)
        return band + self.own_masks

    @property
    def mask_terms(self) -> tuple[MaskTerm, ...]:
        """All that hides logits."""
        terms: list[MaskTerm] = [DenseMask()] if self.mask is not None else []
        terms += self.index_terms
        if self.query_lengths or self.key_lengths:
            terms.append(Lengths(self.query_lengths, self.key_lengths))
        return (*terms, Segments()) if self.segments else tuple(terms)

    @property
    def score_terms(self) -> tuple[ScoreTerm, ...]:
        """All that changes logits, in order; masks come after it."""
        terms: list[ScoreTerm] = [] if self.bias is None else [Bias()]
        if self.soft_cap is not None:
            terms.append(SoftCap(self.soft_cap))
        return (*terms, *(term for term in self.terms if isinstance(term, ScoreTerm)))

    @property
    def group_size(self) -> int:
        """Query heads for each key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def planned_offset(self) -> int:
        """The first query's position in plans, cost models and measurements.

        If queries are a part of the sequence, it is the last part, which sees the most keys: the shard of a sequence
        that takes longest, or a full cache.
        """
        return max(0, self.k.shape[1] - self.q.shape[1]) if self.query_offset else 0

    def unsupported_sizes(self) -> str | None:
        """Why no kernel has these sizes, or None."""
        sizes = (*self.q.shape, *self.k.shape, *self.v.shape)
        if not all(isinstance(size, int) for size in sizes):
            return "needs static shapes"
        return "has no work in an empty attention" if 0 in sizes else None

    @property
    def depends_on_query_index(self) -> bool:
        """Whether a shard must know where in the sequence its queries lie."""
        return bool(self.index_terms or self.terms) or self.query_lengths

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the optional operands that are given, in the order in which they follow q, k and v."""
        given = {
            "bias": self.bias is not None,
            "mask": self.mask is not None,
            "query_lengths": self.query_lengths,
            "key_lengths": self.key_lengths,
            "query_segments": self.segments,
            "key_segments": self.segments,
            "query_offset": self.query_offset,
        }
        return tuple(name for name, is_given in given.items() if is_given)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the operands that have a derivative; that of "q" is "dq"."""
        return ("q", "k", "v") if self.bias is None else ("q", "k", "v", "bias")

    def inputs(self, kernel: str) -> tuple[str, ...]:
        """q, k, v, the optional operands, then what the pass needs: tangents, or cotangents."""
        after = {
            "attention_forward": (),
            "attention_tangent": ("out", "lse", *(f"d{name}" for name in self.linear_names)),
            "attention_backward": ("out", "lse", "dout", "dlse"),
        }
        return ("q", "k", "v", *self.extra_names, *after[kernel])

    def outputs(self, kernel: str) -> tuple[str, ...]:
        gradients = ("dq", "dk", "dv", "dbias") if self.bias_gradient else ("dq", "dk", "dv")
        return {
            "attention_forward": ("out", "lse"),
            "attention_tangent": ("dout", "dlse"),
            "attention_backward": gradients,
        }[kernel]

    def used(self, kernel: str) -> tuple[str, ...]:
        return ("out",) if kernel == "attention_forward" and self.drops_lse else self.outputs(kernel)

    def arrays(self) -> Mapping[str, Operand]:
        q, k, v = self.q, self.k, self.v
        (batch, num_queries, num_heads, _), num_keys, num_kv_heads = q.shape, k.shape[1], k.shape[2]
        # With one key/value head for all, it stays whole and every shard of the query heads uses it.
        heads = "n" if num_kv_heads in (1, num_heads) else "n g"
        rows, logits = ("b", "t", heads, None), ("b", heads, "t", None)
        kv = ("b", None, None if num_kv_heads == 1 and num_heads > 1 else "n", None)
        int32 = lambda *shape: ArrayType(shape, np.dtype(np.int32))
        # Lengths are spread over the upper half of what is possible; segments are eight of equal length.
        lengths = lambda longest: (
            lambda: np.minimum(np.arange(batch) * math.ceil(longest / 2) // batch + longest // 2 + 1, longest).astype(
                np.int32
            )
        )
        segments = lambda length: lambda: np.tile(np.arange(length) * 8 // length, (batch, 1)).astype(np.int32)
        arrays = dict(
            q=Operand(q, rows),
            k=Operand(k, kv),
            v=Operand(v, kv),
            query_lengths=Operand(int32(batch), ("b",), draw=lengths(num_queries)),
            key_lengths=Operand(int32(batch), ("b",), draw=lengths(num_keys)),
            query_segments=Operand(int32(batch, num_queries), ("b", "t"), draw=segments(num_queries)),
            key_segments=Operand(int32(batch, num_keys), ("b", None), draw=segments(num_keys)),
            query_offset=Operand(int32(), (), draw=lambda: np.array(self.planned_offset, np.int32)),
            out=Operand(ArrayType((*q.shape[:3], v.shape[3]), v.dtype), rows),
            lse=Operand(ArrayType((batch, num_heads, num_queries), np.dtype(np.float32)), ("b", heads, "t")),
        )
        if self.bias is not None:
            arrays["bias"] = Operand(self.bias, logits, broadcasts=True)
        if self.mask is not None:
            arrays["mask"] = Operand(self.mask, logits, broadcasts=True)
        arrays |= {f"d{name}": arrays[name] for name in (*self.linear_names, "out", "lse")}
        if not self.lse_gradient:
            zeros = lambda: np.zeros(arrays["lse"].type.shape, np.float32)
            arrays["dlse"] = dataclasses.replace(arrays["lse"], draw=zeros)
        return arrays

    @property
    def factor_sizes(self) -> Mapping[str, int]:
        return {} if self.k.shape[2] in (1, self.q.shape[2]) else {"g": self.group_size}


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
    def of(cls, operands: Mapping[str, Any]) -> Self:
        """Those among a kernel's operands."""
        return cls(**{field.name: operands.get(field.name) for field in dataclasses.fields(cls)})

    @property
    def given(self) -> dict[str, jax.Array]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}
