"""Linear cross entropies for the tests, and what they are compared with."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase
from jaxkernels.ops.linear_cross_entropy.oracle import plain_losses
from jaxkernels.ops.linear_cross_entropy.reference import Config

__all__ = ["CASES", "CHUNKED", "EVERYTHING", "cotangents", "ours", "plain"]

#: Several chunks of the tokens of `CASES`, the last of them filled up.
CHUNKED = Config(chunk=150)

EVERYTHING: dict[str, Any] = dict(
    bias=True, weights=True, soft_cap=3.0, label_smoothing=0.1, z_loss=1e-2, ignore_index=-100
)

CASES = (
    LinearCrossEntropyCase(400, 24, 50),
    LinearCrossEntropyCase(400, 24, 50, vocab_axis=1, dtype="float16"),
    LinearCrossEntropyCase(400, 24, 50, dtype="float32"),
    LinearCrossEntropyCase(400, 24, 50, logits_dtype="float32"),
    LinearCrossEntropyCase(400, 24, 50, bias=True, dtype="float32", vocab_axis=1),
    LinearCrossEntropyCase(400, 24, 50, weights=True),
    LinearCrossEntropyCase(400, 24, 50, soft_cap=2.0, dtype="float16"),
    LinearCrossEntropyCase(400, 24, 50, label_smoothing=0.2, vocab_axis=1),
    LinearCrossEntropyCase(400, 24, 50, z_loss=1e-3, dtype="float16"),
    LinearCrossEntropyCase(400, 24, 50, ignore_index=7),
    LinearCrossEntropyCase(400, 24, 50, lead=(5, 80), dtype="float32"),
    LinearCrossEntropyCase(1, 24, 50),
    LinearCrossEntropyCase(3, 1, 1, dtype="float32"),
    LinearCrossEntropyCase(400, 24, 50, lead=(4, 100), **EVERYTHING),
    LinearCrossEntropyCase(400, 24, 50, vocab_axis=1, dtype="float16", **EVERYTHING),
    LinearCrossEntropyCase(400, 24, 50, dtype="float32", **EVERYTHING),
)


def ours(case: LinearCrossEntropyCase, reduction: str, operands: dict[str, Any], **options: Any) -> Any:
    """The losses and the logsumexp for the reduction "none", else the reduced loss."""
    run = functools.partial(case.run, operands, **(dict(backend="xla", config=CHUNKED) | options))
    return run(return_logsumexp=True) if reduction == "none" else run(reduction=reduction)


def plain(case: LinearCrossEntropyCase, reduction: str, operands: dict[str, Any]) -> Any:
    """What `ours` returns, from all logits at once."""
    losses, lse = plain_losses(case, operands)
    if reduction == "none":
        return losses, lse
    if reduction == "sum":
        return jnp.sum(losses)
    weights = operands["weights"].astype(losses.dtype) if case.weights else jnp.ones_like(losses)
    return jnp.sum(losses) / jnp.sum(jnp.where(operands["labels"] == case.ignore_index, 0, weights))


def cotangents(case: LinearCrossEntropyCase, reduction: str) -> Any:
    """Random cotangents of the results."""
    rng = np.random.default_rng(1)
    draw = lambda shape: np.asarray(rng.standard_normal(shape), np.float32)
    return (draw(case.shape), draw(case.shape)) if reduction == "none" else draw(())
