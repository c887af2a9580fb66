"""What is to be computed: one frozen, hashable description per kernel call.

A spec says everything a backend may ask before it runs (shapes, dtypes, layouts, epilogue, masks, the
chip) and nothing about how: that is the backend's `Config`. Specs describe one device's share: under
a mesh they are made from the local shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.hardware import Chip

__all__ = ["MASKED_LOGIT", "Activation", "ArrayType", "AttentionSpec", "DimensionNumbers", "Gemm", "MatmulSpec"]

#: What a masked logit of an attention counts as, jax.nn's choice: finite, so that a query that sees no key averages all
#: values, and no row of probabilities is NaN. To rounding it is the logsumexp of such a query, too.
MASKED_LOGIT = float(-0.7 * np.finfo(np.float32).max)

#: As `jax.lax.dot_general` takes them: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

#: The activations of a product's epilogue: keys of `jaxkernels.epilogue.ACTIVATIONS`.
Activation = Literal["relu", "silu", "gelu", "gelu_erf"]

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float64": "f64", "bool": "b1"}


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """Shape and dtype of one operand."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, x: Any) -> ArrayType:
        return cls(tuple(np.shape(x)), jnp.dtype(x.dtype))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{_SHORT.get(self.dtype.name, self.dtype.name)}[{dims}]"


def free_dims(ndim: int, contracting: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of an operand that are neither contracted nor batched, in order."""
    return tuple(d for d in range(ndim) if d not in contracting and d not in batch)


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A dot_general seen as `batch` products of an (m, k) by a (k, n) matrix.

    Attributes:
      batch: number of products, None where there is no batch dimension (operands of rank 2).
      m, n, k: sizes.
      lhs_layout: "mk" or "km": how the left operand lies in memory, last letter contiguous.
      rhs_layout: "kn" or "nk".
      lhs_perm, rhs_perm: transposition needed to get there, None where a reshape is enough.
    """

    batch: int | None
    m: int
    n: int
    k: int
    lhs_layout: str
    rhs_layout: str
    lhs_perm: tuple[int, ...] | None
    rhs_perm: tuple[int, ...] | None


@dataclasses.dataclass(frozen=True)
class MatmulSpec:
    """out = activation(alpha * dot_general(lhs, rhs) + bias) + residual.

    Attributes:
      lhs, rhs: the operands.
      dimension_numbers: as in `jax.lax.dot_general`.
      out_dtype: dtype of the result; kernels accumulate in float32 whatever it is.
      precision: as in `jax.lax.dot_general`, or None.
      alpha: factor of the product, applied to what was accumulated before it is rounded.
      bias: type of the bias (one vector over the rhs's free dimension), or None.
      activation: a name from `jaxkernels.epilogue`, or None.
      residual: type of the residual (shape of the result), or None.
      save_preactivation: also return alpha * dot_general(lhs, rhs) + bias, which the gradient needs.
      target: the chip.
    """

    lhs: ArrayType
    rhs: ArrayType
    dimension_numbers: DimensionNumbers
    out_dtype: np.dtype
    target: Chip
    precision: Any = None
    alpha: float = 1.0
    bias: ArrayType | None = None
    activation: Activation | None = None
    residual: ArrayType | None = None
    save_preactivation: bool = False

    @property
    def fused(self) -> bool:
        """Whether there is an epilogue."""
        return self.bias is not None or self.activation is not None or self.residual is not None

    @functools.cached_property
    def lhs_free(self) -> tuple[int, ...]:
        (contracting, _), (batch, _) = self.dimension_numbers
        return free_dims(self.lhs.ndim, contracting, batch)

    @functools.cached_property
    def rhs_free(self) -> tuple[int, ...]:
        (_, contracting), (_, batch) = self.dimension_numbers
        return free_dims(self.rhs.ndim, contracting, batch)

    @functools.cached_property
    def out_shape(self) -> tuple[int, ...]:
        _, (lhs_batch, _) = self.dimension_numbers
        return (
            *(self.lhs.shape[d] for d in (*lhs_batch, *self.lhs_free)),
            *(self.rhs.shape[d] for d in self.rhs_free),
        )

    @functools.cached_property
    def gemm(self) -> Gemm:
        (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = self.dimension_numbers
        # The order in which several contracting dimensions form k is free: take the lhs's own.
        order = np.argsort(lhs_contracting, kind="stable") if lhs_contracting else []
        lhs_k = tuple(lhs_contracting[i] for i in order)
        rhs_k = tuple(rhs_contracting[i] for i in order)
        lhs_layout, lhs_perm = _layout(lhs_batch, {"m": self.lhs_free, "k": lhs_k}, ("mk", "km"))
        rhs_layout, rhs_perm = _layout(rhs_batch, {"n": self.rhs_free, "k": rhs_k}, ("nk", "kn"))
        size = lambda array, dims: math.prod(array.shape[d] for d in dims)
        return Gemm(
            batch=size(self.lhs, lhs_batch) if lhs_batch else None,
            m=size(self.lhs, self.lhs_free),
            n=size(self.rhs, self.rhs_free),
            k=size(self.lhs, lhs_contracting),
            lhs_layout=lhs_layout,
            rhs_layout=rhs_layout,
            lhs_perm=lhs_perm,
            rhs_perm=rhs_perm,
        )

    def fold(self, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Reshapes the operands to the matrices of `gemm` (with a leading batch axis if it has one)."""
        g = self.gemm
        lead = () if g.batch is None else (g.batch,)
        sizes = {"m": g.m, "n": g.n, "k": g.k}
        if g.lhs_perm is not None:
            lhs = jnp.transpose(lhs, g.lhs_perm)
        if g.rhs_perm is not None:
            rhs = jnp.transpose(rhs, g.rhs_perm)
        return (
            lhs.reshape(*lead, *(sizes[axis] for axis in g.lhs_layout)),
            rhs.reshape(*lead, *(sizes[axis] for axis in g.rhs_layout)),
        )

    def unfold(self, out: jax.Array) -> jax.Array:
        """Reshapes a (batch?, m, n) result to the shape of the dot_general."""
        return out.reshape(self.out_shape)

    def __str__(self) -> str:
        g = self.gemm
        batch = "" if g.batch is None else f" batch={g.batch}"
        text = "" if self.alpha == 1 else f"{self.alpha:.4g} * "
        text += f"{self.lhs} . {self.rhs} -> {_SHORT.get(self.out_dtype.name, self.out_dtype.name)}"
        text += f" (m={g.m} n={g.n} k={g.k}{batch} {g.lhs_layout},{g.rhs_layout})"
        extras = [
            *(["bias"] if self.bias else []),
            *([self.activation] if self.activation else []),
            *(["residual"] if self.residual else []),
        ]
        return text + (" + " + ", ".join(extras) if extras else "")


def _layout(
    batch: tuple[int, ...], groups: dict[str, tuple[int, ...]], layouts: tuple[str, str]
) -> tuple[str, tuple[int, ...] | None]:
    """Finds the layout an operand already has, or the transposition that gives it the first one."""
    natural = tuple(range(len(batch) + sum(map(len, groups.values()))))
    perms = {layout: (*batch, *groups[layout[0]], *groups[layout[1]]) for layout in layouts}
    for layout, perm in perms.items():
        if perm == natural:
            return layout, None
    return layouts[0], perms[layouts[0]]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
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
      deterministic: equal operands must give equal bits in every run.
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
    deterministic: bool = False

    @property
    def group_size(self) -> int:
        """Query heads for each key/value head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def extra_names(self) -> tuple[str, ...]:
        """Names of the optional operands that are given, in the order they follow q, k and v."""
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

    def __str__(self) -> str:
        text = f"q {self.q} k {self.k} v {self.v} scale={self.scale:.4g}"
        flags = {
            "causal": self.causal,
            f"window={self.window}": self.window is not None,
            f"soft_cap={self.soft_cap}": self.soft_cap is not None,
            f"bias {self.bias}": self.bias is not None,
            f"mask {self.mask}": self.mask is not None,
            "query_lengths": self.query_lengths,
            "key_lengths": self.key_lengths,
            "segments": self.segments,
            "self_segments": self.self_segments,
            "query_offset": self.query_offset,
            "deterministic": self.deterministic,
        }
        return " ".join([text, *(name for name, given in flags.items() if given)])
