"""Linear cross entropies as data, for the tests' tables and the benchmarks' suites."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.cases import Case, Direction, Draw, Operands
from jaxkernels.ops.linear_cross_entropy.api import Reduction, linear_cross_entropy
from jaxkernels.ops.linear_cross_entropy.oracle import chunked_losses, plain_losses

__all__ = ["CASE", "LinearCrossEntropyCase", "with_gradients"]

#: The float64 reference holds so many logits at a time: 1 GiB.
_MAX_REFERENCE_LOGITS = 2**27


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyCase(Case):
    """The losses of tokens, or their sum with its gradients.

    Attributes:
      tokens, embed_dim, vocab: T, d and V.
      vocab_axis: 1: w is (d, V); 0: w is (V, d).
      step: the result is that of `with_gradients`: what a training step computes.
      dtype: of x, w and the bias.
      bias, weights: whether they are given.
      soft_cap, label_smoothing, z_loss, ignore_index: as in `linear_cross_entropy`. A fifth of the tokens are ignored.
      logits_dtype: as in `linear_cross_entropy`.
      lead: the tokens' axes, if there are several; their product is `tokens`.
    """

    kind: ClassVar[str] = "lce"
    form: ClassVar[str] = "TxDxV (tokens, width, vocabulary), then any of :step :dv :DTYPE :backward"

    tokens: int
    embed_dim: int
    vocab: int
    vocab_axis: Literal[0, 1] = 0
    step: bool = False
    dtype: str = "bfloat16"
    bias: bool = False
    weights: bool = False
    soft_cap: float | None = None
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ignore_index: int | None = None
    logits_dtype: str | None = None
    lead: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.description.replace(" ", "-") + f"-{self.dtype}"

    @property
    def description(self) -> str:
        words = [f"{self.tokens}x{self.embed_dim}x{self.vocab}", *(["dv"] if self.vocab_axis else [])]
        words += ["value and gradients"] * self.step + ["bias"] * self.bias + ["weights"] * self.weights
        words += [f"cap {self.soft_cap:g}"] if self.soft_cap else []
        words += [f"smoothing {self.label_smoothing:g}"] if self.label_smoothing else []
        words += [f"z {self.z_loss:g}"] if self.z_loss else []
        words += ["ignore"] * (self.ignore_index is not None)
        words += [f"logits {self.logits_dtype}"] if self.logits_dtype else []
        return " ".join([*words, *(["lead " + "x".join(map(str, self.lead))] if self.lead else [])])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the labels."""
        return self.lead or (self.tokens,)

    @property
    def draws(self) -> dict[str, Draw]:
        """x, w, and bias and weights where the case has them; logits have a standard deviation of 2."""
        w_shape = (self.embed_dim, self.vocab) if self.vocab_axis else (self.vocab, self.embed_dim)
        draws = dict(
            x=Draw((*self.shape, self.embed_dim), self.dtype),
            w=Draw(w_shape, self.dtype, scale=2 / math.sqrt(self.embed_dim)),
        )
        if self.bias:
            draws["bias"] = Draw((self.vocab,), self.dtype)
        if self.weights:
            draws["weights"] = Draw(self.shape, "float32")
        return draws

    @property
    def out_type(self) -> Draw:
        """The losses; of a step, rows of the gradients of x and of w, and a row with the mean loss."""
        if self.step:
            return Draw((self.tokens + self.vocab + 1, self.embed_dim), self.dtype)
        return Draw(self.shape, "float32")

    @property
    def moving(self) -> tuple[str, ...]:
        return ("x", "w")

    @property
    def flops(self) -> int:
        """The FLOPs of one product, or of the three products of a step."""
        return (3 if self.step else 1) * 2 * self.tokens * self.embed_dim * self.vocab

    @property
    def gradient_flops(self) -> float:
        """The FLOPs of two products: computing the logits again does not count."""
        return 4 * self.tokens * self.embed_dim * self.vocab

    @property
    def num_exps(self) -> float:
        return self.tokens * self.vocab

    @classmethod
    def parse(
        cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]
    ) -> LinearCrossEntropyCase | None:
        if len(sizes) != 3 or not {*words} <= {"step", "dv"}:
            return None
        return cls(*sizes, step="step" in words, vocab_axis=1 if "dv" in words else 0, **options)

    def rounded_to(self, dtype: Any) -> Any:
        """The dtype of the logits, for operands of this dtype: those of the case, or widened ones."""
        return self.logits_dtype if self.logits_dtype and dtype == jnp.dtype(self.dtype) else dtype

    def num_bytes(self, direction: Direction) -> int:
        operands = sum(draw.num_bytes for draw in self.draws.values())
        is_gradient = direction == "backward" and not self.step
        return (2 * operands if is_gradient else operands) + self.out_type.num_bytes

    def masks(self, rng: np.random.Generator) -> Operands:
        """The labels."""
        labels = rng.integers(0, self.vocab, self.shape, dtype=np.int32)
        if self.ignore_index is not None:
            labels[rng.random(self.shape) < 0.2] = self.ignore_index
        return dict(labels=labels)

    def run(
        self, operands: Mapping[str, Any], *, backend: str | None = None, reduction: Reduction = "none", **more: Any
    ) -> Any:
        """The case by this package."""
        return linear_cross_entropy(
            **operands,
            vocab_axis=self.vocab_axis,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            logits_soft_cap=self.soft_cap,
            logits_dtype=self.logits_dtype,
            reduction=reduction,
            backend=backend,
            **more,
        )

    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> jax.Array:
        if not self.step:
            return self.run(operands, backend=backend)
        return with_gradients(lambda operands: self.run(operands, backend=backend, reduction="sum"), operands)

    def letters(self, name: str, num_axes: int) -> str:
        return "".rjust(num_axes)

    def plain(self, operands: dict[str, Any]) -> jax.Array:
        losses = lambda operands: plain_losses(self, operands)[0]
        if not self.step:
            return losses(operands)
        return with_gradients(lambda operands: jnp.sum(losses(operands)), operands)

    def reference(self, operands: dict[str, Any]) -> jax.Array:
        """In chunks: all logits in float64 would not fit a chip."""
        if self.lead:
            return self.plain(operands)
        # The largest divisor of the tokens below the limit.
        most = max(_MAX_REFERENCE_LOGITS // self.vocab, 1)
        chunk = next(size for size in range(min(self.tokens, most), 0, -1) if self.tokens % size == 0)
        losses = lambda operands: chunked_losses(self, operands, chunk)
        if not self.step:
            return losses(operands)
        return with_gradients(lambda operands: jnp.sum(losses(operands)), operands)


def with_gradients(total: Any, operands: Mapping[str, Any]) -> jax.Array:
    """A sum of losses and its gradients as one array: rows of dx, rows of dw, and a row with the mean loss.

    Args:
      total: operands -> the sum.
      operands: with x (T, d), w (V, d) or (d, V), and labels (T,).
    """
    x, w = operands["x"], operands["w"]
    f = lambda x, w: total({**operands, "x": x, "w": w})
    value, (dx, dw) = jax.value_and_grad(f, (0, 1))(x, w)
    mean = jnp.broadcast_to(value / x.shape[0], (1, x.shape[1])).astype(dx.dtype)
    return jnp.concatenate([dx, dw.T if w.shape[0] == x.shape[1] else dw, mean])


CASE = LinearCrossEntropyCase
