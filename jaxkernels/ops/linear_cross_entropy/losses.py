"""The loss of each token as a function of its logits' statistics, and its derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import jax

from jaxkernels.ops.linear_cross_entropy.spec import LinearCrossEntropySpec

__all__ = ["cotangents", "token_losses"]


def token_losses(spec: LinearCrossEntropySpec, statistics: Mapping[str, jax.Array], vocab_size: int) -> jax.Array:
    """The loss of each token, by the formula in `LinearCrossEntropySpec`."""
    lse = statistics["lse"]
    loss = lse - (1 - spec.label_smoothing) * statistics["label_logit"]
    if spec.label_smoothing:
        loss = loss - spec.label_smoothing / vocab_size * statistics["logit_sum"]
    return loss + spec.z_loss * lse**2 if spec.z_loss else loss


def cotangents(
    spec: LinearCrossEntropySpec, lse: jax.Array, weights: jax.Array, vocab_size: int
) -> dict[str, jax.Array]:
    """The cotangents of the statistics for the sum of the losses times their weights."""
    found = dict(
        dlse=weights * (1 + 2 * spec.z_loss * lse) if spec.z_loss else weights,
        dlabel_logit=-(1 - spec.label_smoothing) * weights,
    )
    if spec.logit_sum:
        found["dlogit_sum"] = -spec.label_smoothing / vocab_size * weights
    return found
