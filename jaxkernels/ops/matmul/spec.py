"""A product as kernels see it: one frozen, hashable description per kernel call."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import times
from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import GIVEN, Operand, Spec
from jaxkernels.core.types import ArrayType, short_name

__all__ = ["Activation", "DimensionNumbers", "GatedTangentSpec", "Gemm", "MatmulSpec", "PairSpec", "free_dims"]

#: As `jax.lax.dot_general` takes them: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)).
DimensionNumbers = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

#: The activations of a product's epilogue: keys of `jaxkernels.ops.matmul.epilogue.ACTIVATIONS`.
Activation = Literal["relu", "relu_squared", "silu", "gelu", "gelu_erf"]


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
class MatmulSpec(Spec):
    """out = activation(alpha * dot_general(lhs, rhs) + bias) * multiplier + residual.

    With a pre-activation as operand, the results are the gradients of activation(preactivation) * multiplier instead.
    The product is the cotangent: out = product * multiplier * activation'(preactivation), and
    dmultiplier = product * activation(preactivation). Bias and residual are absent then.

    Attributes:
      lhs, rhs: the operands.
      dimension_numbers: as in `jax.lax.dot_general`.
      out_dtype: dtype of the result; kernels accumulate in float32 whatever it is.
      precision: as in `jax.lax.dot_general`, or None.
      alpha: factor of the product, applied to what was accumulated before it is rounded.
      bias: type of the bias (one vector over the rhs's free dimension), or None.
      activation: a name from `jaxkernels.ops.matmul.epilogue`, or None.
      multiplier, residual: types of arrays of the result's shape, or None.
      save_preactivation: also return alpha * dot_general(lhs, rhs) + bias, which the gradient needs.
      preactivation: type of an array of the result's shape, or None; with a multiplier only.
      adds_apart: whether XLA would add the residual in a pass of its own. In a program of its own the product adds the
        residual in cuBLAS. In the training steps that were profiled it did not.
      copied: names of operands and of the result that are copied in passes of their own around a product by XLA or
        Triton, because `jk.scan_layers` has them in arrays for all layers.
      cotangent: "lhs" or "rhs" if the product is a gradient, that is the cotangent, and it had odd rows where the
        gradient was traced (`has_odd_rows`).
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
    multiplier: ArrayType | None = None
    residual: ArrayType | None = None
    save_preactivation: bool = False
    preactivation: ArrayType | None = None
    adds_apart: bool = False
    copied: tuple[str, ...] = ()
    cotangent: Literal["lhs", "rhs"] | None = None

    def inputs(self, kernel: str) -> tuple[str, ...]:
        optional = {name: getattr(self, name) for name in ("bias", "multiplier", "residual", "preactivation")}
        return ("lhs", "rhs", *(name for name, array in optional.items() if array is not None))

    def outputs(self, kernel: str) -> tuple[str, ...]:
        if self.is_gradient:
            return ("out", "dmultiplier")
        return ("out", "preactivation") if self.save_preactivation else ("out",)

    def arrays(self) -> Mapping[str, Operand]:
        """Labels are b, m, n and k with a number: as many as there are batch, free and contracting dimensions."""
        (lhs_k, rhs_k), (lhs_b, rhs_b) = self.dimension_numbers
        lhs = [f"m{d}" for d in range(self.lhs.ndim)]
        rhs = [f"n{d}" for d in range(self.rhs.ndim)]
        for letter, pairs in (("b", zip(lhs_b, rhs_b)), ("k", zip(lhs_k, rhs_k))):
            for i, (d, e) in enumerate(pairs):
                lhs[d] = rhs[e] = f"{letter}{i}"
        axes = (*(lhs[d] for d in (*lhs_b, *self.lhs_free)), *(rhs[d] for d in self.rhs_free))
        out = Operand(ArrayType(self.out_shape, self.out_dtype), axes)
        arrays = dict(lhs=Operand(self.lhs, tuple(lhs)), rhs=Operand(self.rhs, tuple(rhs)), out=out)
        arrays |= dict(preactivation=out, dmultiplier=out)
        if self.bias is not None:
            arrays["bias"] = Operand(self.bias, axes[-1:])
        for name in ("multiplier", "residual", "preactivation"):
            if (array := getattr(self, name)) is not None:
                arrays[name] = Operand(array, axes)
        return arrays

    @property
    def is_gradient(self) -> bool:
        """Whether the results are gradients of a gated activation."""
        return self.preactivation is not None

    @property
    def margin(self) -> float | None:
        """Zero where XLA takes one kernel more: the time of that kernel is certain. The usual one for an outer product:
        XLA fuses it with other work, so its time alone is no measure. An outer product of a gated layer has no margin:
        a comparison times both halves of the layer (`tuning.beside`)."""
        if self.gemm.k == 1 and not self.has_other_half:
            return times.MARGIN
        return 0.0 if self.adds_apart or self.copied or self.is_gradient else None

    @property
    def has_other_half(self) -> bool:
        """Whether it is half of a gated layer: the multiplier is most likely another product of the lhs."""
        return self.multiplier is not None and not self.is_gradient

    @property
    def xla_may_merge(self) -> bool:
        """XLA computes both outer products of a gated layer in one kernel."""
        return self.gemm.k == 1 and self.has_other_half

    @property
    def shared(self) -> Literal["lhs", "rhs"] | None:
        """A cotangent with odd rows. Most programs compute the gradients of both operands from it."""
        return self.cotangent if self.cotangent is not None and self.has_odd_rows(self.cotangent) else None

    @property
    def alone(self) -> Self:
        return self if self.cotangent is None else dataclasses.replace(self, cotangent=None)

    def has_odd_rows(self, name: Literal["lhs", "rhs"]) -> bool:
        """Whether an operand has 16-bit numbers, and rows that are no multiple of 16 bytes. Most kernels then need a
        copy with padded rows."""
        array: ArrayType = getattr(self, name)
        if not (jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize == 2):
            return False
        row = getattr(self.gemm, (self.gemm.lhs_layout if name == "lhs" else self.gemm.rhs_layout)[1])
        return isinstance(row, int) and row * array.dtype.itemsize % 16 != 0

    @property
    def may_scatter(self) -> bool:
        return not self.fused

    @property
    def product(self) -> Self:
        """The product alone, times alpha."""
        return dataclasses.replace(
            self, bias=None, activation=None, multiplier=None, residual=None, preactivation=None,
            save_preactivation=False, adds_apart=False,
        )  # fmt: skip

    @property
    def fused(self) -> bool:
        """Whether there is an epilogue."""
        parts = (self.bias, self.activation, self.multiplier, self.residual)
        return any(part is not None for part in parts)

    @property
    def elementwise(self) -> Literal["multiplier", "residual"] | None:
        """The operand of the result's shape, for kernels that take one of them."""
        if self.multiplier is not None:
            return "multiplier"
        return "residual" if self.residual is not None else None

    @property
    def elementwise_type(self) -> ArrayType | None:
        """The type of `elementwise`."""
        return self.residual if self.multiplier is None else self.multiplier

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
        if self.lhs == GIVEN:
            return super().__str__()
        g = self.gemm
        batch = "" if g.batch is None else f" batch={g.batch}"
        text = "" if self.alpha == 1 else f"{self.alpha:.4g} * "
        text += f"{self.lhs} . {self.rhs} -> {short_name(self.out_dtype)}"
        text += f" (m={g.m} n={g.n} k={g.k}{batch} {g.lhs_layout},{g.rhs_layout})"
        extras = [
            *(["bias"] if self.bias else []),
            *([self.activation] if self.activation else []),
            *(["multiplier"] if self.multiplier else []),
            *(["residual"] if self.residual else []),
            *(["gradients"] if self.is_gradient else []),
            *([f"shared {self.shared}"] if self.shared else []),
        ]
        return text + (" + " + ", ".join(extras) if extras else "")


@dataclasses.dataclass(frozen=True)
class _LinearSpec(MatmulSpec):
    """A linear function of lhs that multiplies by rhs, and more."""

    @property
    def plain(self) -> MatmulSpec:
        """The product lhs @ rhs alone."""
        return MatmulSpec(self.lhs, self.rhs, self.dimension_numbers, self.out_dtype, self.target, self.precision)


@dataclasses.dataclass(frozen=True)
class GatedTangentSpec(_LinearSpec):
    """out = h_dot @ rhs, where h_dot is the tangent of h = gate_activation(preactivation) * multiplier.

    Attributes:
      lhs: the tangent of the pre-activation.
      multiplier_dot: the tangent of the multiplier.
      at_preactivation, at_multiplier: the point of the derivative.
      gate_activation: the activation of h, or None.
    """

    gate_activation: Activation | None = None
    multiplier_dot: ArrayType = GIVEN
    at_preactivation: ArrayType = GIVEN
    at_multiplier: ArrayType = GIVEN

    def inputs(self, kernel: str) -> tuple[str, ...]:
        return ("lhs", "rhs", "multiplier_dot", "at_preactivation", "at_multiplier")

    def arrays(self) -> Mapping[str, Operand]:
        arrays = dict(super().arrays())
        like_lhs = self.inputs("")[2:]
        return arrays | {name: Operand(getattr(self, name), arrays["lhs"].axes) for name in like_lhs}

    @property
    def gate(self) -> MatmulSpec:
        """The epilogue h, of a product that makes the pre-activation."""
        return dataclasses.replace(self.plain, activation=self.gate_activation, multiplier=GIVEN)


@dataclasses.dataclass(frozen=True)
class PairSpec(_LinearSpec):
    """out = lhs @ rhs and other_out = lhs @ other_rhs, of two matrices of one shape.

    Attributes:
      other_rhs: the type of the second matrix.
    """

    other_rhs: ArrayType = GIVEN

    def inputs(self, kernel: str) -> tuple[str, ...]:
        return ("lhs", "rhs", "other_rhs")

    def outputs(self, kernel: str) -> tuple[str, ...]:
        return ("out", "other_out")

    def arrays(self) -> Mapping[str, Operand]:
        arrays = dict(super().arrays())
        return arrays | dict(other_rhs=Operand(self.other_rhs, arrays["rhs"].axes), other_out=arrays["out"])


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
