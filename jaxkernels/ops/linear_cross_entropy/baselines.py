"""Other ways to compute a linear cross entropy in JAX: stored logits, optax's function, and tokamax's."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Baseline, Contender, Problem
from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase, with_gradients

__all__ = ["BASELINES"]

Operands = dict[str, jax.Array]


def _stored(problem: Problem[LinearCrossEntropyCase]) -> Iterator[Contender]:
    """All logits in the operands' dtype, the loss in float32; a comparison selects the label's logit."""
    yield Contender("stored", problem.case.plain)


def _optax_refuses(problem: Problem[LinearCrossEntropyCase], chip: Chip) -> str | None:
    case = problem.case
    if case.soft_cap or case.label_smoothing or case.z_loss or case.bias or case.weights or case.lead:
        return "is written here for plain losses only"
    return None


def _optax(problem: Problem[LinearCrossEntropyCase]) -> Iterator[Contender]:
    case = problem.case

    def losses(operands: Operands) -> jax.Array:
        w = operands["w"]
        logits = operands["x"] @ (w.T if case.vocab_axis == 0 else w)
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), operands["labels"])

    total = lambda operands: jnp.sum(losses(operands))
    yield Contender("optax", (lambda operands: with_gradients(total, operands)) if case.step else losses)


def _tokamax_refuses(problem: Problem[LinearCrossEntropyCase], chip: Chip) -> str | None:
    if importlib.util.find_spec("tokamax") is None:
        return "tokamax is not installed"
    return _optax_refuses(problem, chip) or (None if problem.case.step else "returns the sum of the losses only")


def _tokamax(problem: Problem[LinearCrossEntropyCase]) -> Iterator[Contender]:
    import tokamax  # pyright: ignore[reportMissingImports]: optional, and not in any extra

    case = problem.case
    for implementation in ("chunked_xla", "mosaic_gpu"):

        def total(operands: Operands, implementation: str = implementation) -> Any:
            w = operands["w"].T if case.vocab_axis == 0 else operands["w"]
            return tokamax.linear_softmax_cross_entropy_loss(
                operands["x"], operands["labels"], w, reduction="sum", implementation=implementation
            )

        yield Contender(f"tokamax {implementation}", lambda operands, total=total: with_gradients(total, operands))


#: Name -> baseline.
BASELINES: dict[str, Baseline] = {
    "stored": Baseline(lambda problem, chip: None, _stored),
    "optax": Baseline(_optax_refuses, _optax),
    "tokamax": Baseline(_tokamax_refuses, _tokamax),
}
