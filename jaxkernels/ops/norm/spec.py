"""A norm as kernels see it: one frozen, hashable description per kernel call."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import Operand, Spec
from jaxkernels.core.types import ArrayType

__all__ = ["NormSpec"]


@dataclasses.dataclass(frozen=True)
class NormSpec(Spec):
    """out = (z - mean(z)) / sqrt(mean((z - mean(z))^2) + eps) * (scale + scale_offset) + bias, with z = x + residual.

    The means are over the last axis. An RMS norm takes 0 for mean(z). z is rounded to x's dtype before it is
    normalised; everything after it is computed in float32 at least and rounded once.

    G groups have a scale and a bias of their own; they come from vmap.

    Attributes:
      x: (G, ..., F). In the tangent and the backward pass it is z.
      target: the chip.
      eps: added to the mean square.
      centered: whether the mean is subtracted (layer norm).
      scale: type of the scale, (1, F) or (G, F), or None.
      bias: type of the bias, (1, F) or (G, F), or None.
      scale_offset: added to the scale.
      residual: whether a residual is given. Then z is a result of the forward pass, the sum.
      returns_x: whether x is returned as the sum, without a residual: the backward pass takes its cotangent, if it has
        one. Then nothing else is added to the gradient of x.
      sum_gradient: whether the backward pass takes the cotangent of z.
      scale_gradient, bias_gradient: whether the backward pass returns these.
    """

    batch_axis = "g"

    x: ArrayType
    target: Chip
    eps: float
    centered: bool = False
    scale: ArrayType | None = None
    bias: ArrayType | None = None
    scale_offset: float = 0.0
    residual: bool = False
    returns_x: bool = False
    sum_gradient: bool = False
    scale_gradient: bool = False
    bias_gradient: bool = False

    @property
    def num_features(self) -> int:
        return self.x.shape[-1]

    @property
    def wide(self) -> np.dtype:
        """The dtype of the statistics and of what is computed with them."""
        return np.dtype(np.float64 if self.x.dtype == np.float64 else np.float32)

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Of scale and bias, those that are given."""
        return tuple(name for name in ("scale", "bias") if getattr(self, name) is not None)

    @property
    def statistics_names(self) -> tuple[str, ...]:
        """What the forward pass saves of each row."""
        return ("mean", "rstd") if self.centered else ("rstd",)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the operands that have a derivative; that of "x" is "dx"."""
        return ("x", *(["residual"] if self.residual else []), *self.parameter_names)

    def inputs(self, kernel: str) -> tuple[str, ...]:
        if kernel == "norm_forward":
            return self.linear_names
        saved = ("x", *self.parameter_names, *self.statistics_names)
        if kernel == "norm_tangent":
            return (*saved, *(f"d{name}" for name in self.linear_names))
        return (*saved, "dout", *(["dsum"] if self.sum_gradient else []))

    def outputs(self, kernel: str) -> tuple[str, ...]:
        sums = ("sum",) if self.residual or self.returns_x else ()
        if kernel == "norm_forward":
            return ("out", *sums, *self.statistics_names)
        if kernel == "norm_tangent":
            return ("dout", *(f"d{name}" for name in sums))
        gradients = dict(dscale=self.scale_gradient, dbias=self.bias_gradient)
        return ("dx", *(name for name, is_wanted in gradients.items() if is_wanted))

    def arrays(self) -> Mapping[str, Operand]:
        rows = ("g", *(f"r{i}" for i in range(self.x.ndim - 2)))
        like_x = Operand(self.x, (*rows, "f"))
        statistics = Operand(ArrayType(self.x.shape[:-1], self.wide), rows)
        arrays = dict.fromkeys(("x", "residual", "out", "sum"), like_x)
        arrays |= {name: Operand(getattr(self, name), ("g", "f"), broadcasts=True) for name in self.parameter_names}
        arrays |= {f"d{name}": operand for name, operand in arrays.items()}
        return arrays | dict.fromkeys(self.statistics_names, statistics)

    @property
    def may_scatter(self) -> bool:
        """No: where features are sharded, each shard has the statistics of whole rows, which are no sums to scatter."""
        return False
