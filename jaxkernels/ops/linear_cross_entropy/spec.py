"""A linear cross entropy as kernels see it: one frozen, hashable description per kernel call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from jaxkernels.core.hardware import Chip
from jaxkernels.core.operands import Operand, Spec
from jaxkernels.core.types import ArrayType

__all__ = ["BACKWARD", "FORWARD", "FUSED", "TANGENT", "LinearCrossEntropySpec"]

#: The kernels of the operation.
FORWARD, TANGENT, BACKWARD, FUSED = (
    f"linear_cross_entropy_{kernel}" for kernel in ("forward", "tangent", "backward", "fused")
)


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropySpec(Spec):
    """Statistics of logits = soft_cap(x w + bias), a row of V logits for each token, and their derivatives.

    The statistics of a token are lse, the natural logsumexp of its logits, label_logit, the logit of its label (0 if
    the label is not in [0, V)), and with `logit_sum` the sum of its logits. The loss of a token is

        lse - (1 - label_smoothing) * label_logit - label_smoothing * logit_sum / V + z_loss * lse^2.

    The four kernels:

    - forward: the statistics;
    - tangent: the tangents of the statistics;
    - backward: the gradients of the operands, for cotangents of the statistics;
    - fused: the statistics, and the gradients of the sum of all losses times their weights. They are not rounded to the
      operands' dtype: they are still to be multiplied by the cotangent of the sum.

    Attributes:
      x: (..., d), the tokens.
      w: (d, V), or (V, d) if `vocab_axis` is 0; x's dtype.
      logits_dtype: the dtype to which a product x w is rounded. What follows is computed in float32 at least.
      bias: type of the bias (V,), or None.
      vocab_axis: the axis of w that has the vocabulary.
      soft_cap: c: logits become c * tanh(logits / c), after the bias; None: they stay.
      logit_sum: whether the sum of the logits is a statistic.
      label_smoothing, z_loss: of the kernel fused.
      gradients: the operands whose gradients the kernels backward and fused return.
      precision: of the products, as in `jax.lax.dot_general`.
      target: the chip.
    """

    batch_axis = "t0"

    x: ArrayType
    w: ArrayType
    logits_dtype: np.dtype
    target: Chip
    bias: ArrayType | None = None
    vocab_axis: int = 1
    soft_cap: float | None = None
    logit_sum: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    gradients: tuple[str, ...] = ()
    precision: Any = None

    @property
    def linear_names(self) -> tuple[str, ...]:
        """Names of the operands of the logits, which have derivatives."""
        return ("x", "w") if self.bias is None else ("x", "w", "bias")

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what the forward kernel returns."""
        return ("lse", "label_logit", "logit_sum") if self.logit_sum else ("lse", "label_logit")

    @property
    def num_tokens(self) -> int:
        return math.prod(self.x.shape[:-1])

    @property
    def vocab_size(self) -> int:
        return self.w.shape[self.vocab_axis]

    @property
    def wide(self) -> np.dtype:
        """The dtype of statistics and of sums: float32, or float64 of float64 operands."""
        return jnp.promote_types(self.x.dtype, jnp.float32)

    @property
    def without_losses(self) -> Self:
        """The spec of a kernel that does not see the losses."""
        return dataclasses.replace(self, label_smoothing=0.0, z_loss=0.0)

    def inputs(self, kernel: str) -> tuple[str, ...]:
        after = {
            FORWARD: (),
            TANGENT: ("lse", *(f"d{name}" for name in self.linear_names)),
            BACKWARD: ("lse", *(f"d{name}" for name in self.statistics)),
            FUSED: ("weights",),
        }
        return (*self.linear_names, "labels", *after[kernel])

    def outputs(self, kernel: str) -> tuple[str, ...]:
        return {
            FORWARD: self.statistics,
            TANGENT: tuple(f"d{name}" for name in self.statistics),
            BACKWARD: tuple(f"d{name}" for name in self.gradients),
            FUSED: (*self.statistics, *(f"wide_d{name}" for name in self.gradients)),
        }[kernel]

    def arrays(self) -> Mapping[str, Operand]:
        """Labels are t0, t1, ... of the tokens' axes, and v of the vocabulary. One device holds d whole."""
        tokens = tuple(f"t{i}" for i in range(self.x.ndim - 1))
        per_token = lambda dtype, draw=None: Operand(ArrayType(self.x.shape[:-1], jnp.dtype(dtype)), tokens, draw=draw)
        # Every label is there, far from the one before.
        labels = lambda: (
            (np.arange(self.num_tokens) * 7919 % self.vocab_size).astype(np.int32).reshape(self.x.shape[:-1])
        )
        arrays = dict(
            x=Operand(self.x, (*tokens, None)),
            w=Operand(self.w, ("v", None) if self.vocab_axis == 0 else (None, "v")),
            labels=per_token(np.int32, labels),
            weights=per_token(self.wide),
        )
        if self.bias is not None:
            arrays["bias"] = Operand(self.bias, ("v",))
        arrays |= dict.fromkeys(self.statistics, per_token(self.wide))
        for name in self.linear_names:
            wide = ArrayType(arrays[name].type.shape, self.wide)
            arrays |= {f"d{name}": arrays[name], f"wide_d{name}": dataclasses.replace(arrays[name], type=wide)}
        return arrays | {f"d{name}": arrays[name] for name in self.statistics}
