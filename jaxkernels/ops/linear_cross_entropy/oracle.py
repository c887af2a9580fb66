"""Linear cross entropy as plain jnp operations, written apart from the reference backend: tests and benchmarks check
with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase

__all__ = ["chunked_losses", "plain_losses"]


def plain_losses(case: LinearCrossEntropyCase, operands: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
    """The loss and the logsumexp of each token, from all logits, which have the dtype of the operands."""
    x, w, labels = operands["x"], operands["w"], operands["labels"]
    ignored = labels == case.ignore_index
    product = jnp.matmul(x, w.T if case.vocab_axis == 0 else w, preferred_element_type=case.rounded_to(x.dtype))
    # XLA would leave out the rounding of a product that is widened at once.
    format = jnp.finfo(product.dtype)
    product = jax.lax.reduce_precision(product, format.nexp, format.nmant)
    logits = product.astype(jnp.promote_types(x.dtype, jnp.float32))
    if case.bias:
        logits = logits + operands["bias"].astype(logits.dtype)
    if case.soft_cap is not None:
        logits = case.soft_cap * jnp.tanh(logits / case.soft_cap)
    target = jax.nn.one_hot(labels, case.vocab, dtype=logits.dtype)
    target = (1 - case.label_smoothing) * target + case.label_smoothing / case.vocab
    lse = jax.nn.logsumexp(logits, axis=-1)
    losses = lse - jnp.sum(target * logits, axis=-1) + case.z_loss * lse**2
    if case.weights:
        losses = losses * operands["weights"].astype(losses.dtype)
    return jnp.where(ignored, 0, losses), jnp.where(ignored, 0, lse)


def chunked_losses(case: LinearCrossEntropyCase, operands: dict[str, Any], chunk: int) -> jax.Array:
    """The losses of `plain_losses`, for so many tokens at a time; the gradient computes the logits again.

    The number of tokens must be a multiple of `chunk`.
    """
    rows = {name: operands[name] for name in ("x", "labels", "weights") if name in operands}
    split = {name: x.reshape(-1, chunk, *x.shape[1:]) for name, x in rows.items()}
    step = jax.checkpoint(lambda rows: plain_losses(case, operands | rows)[0])
    return jax.lax.map(step, split).reshape(operands["labels"].shape)
