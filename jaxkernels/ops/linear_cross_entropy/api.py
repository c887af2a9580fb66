"""The loss of a linear layer's logits: the public function `linear_cross_entropy`, and what it accepts."""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.arguments import as_array, as_flag, as_number, as_precision, is_whole
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy.losses import token_losses
from jaxkernels.ops.linear_cross_entropy.rules import forward_op, total_loss
from jaxkernels.ops.linear_cross_entropy.spec import LinearCrossEntropySpec

__all__ = ["Reduction", "linear_cross_entropy"]

Reduction = Literal["none", "sum", "mean"]
_REDUCTIONS = ("none", "sum", "mean")


@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, bias: ArrayLike | None = None, weights: ArrayLike | None = None,
    vocab_axis: Literal[0, 1] = 1, ignore_index: int | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logits_soft_cap: float | None = None, logits_dtype: Any = None, reduction: Reduction = "none",
    return_logsumexp: Literal[False] = False, precision: Any = None, backend: str | None = None, config: Any = None,
) -> Array: ...  # fmt: skip


@overload
def linear_cross_entropy(
    x: ArrayLike, w: ArrayLike, labels: ArrayLike, *, bias: ArrayLike | None = None, weights: ArrayLike | None = None,
    vocab_axis: Literal[0, 1] = 1, ignore_index: int | None = None, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logits_soft_cap: float | None = None, logits_dtype: Any = None, reduction: Reduction = "none",
    return_logsumexp: Literal[True], precision: Any = None, backend: str | None = None, config: Any = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def linear_cross_entropy(
    x: ArrayLike,
    w: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    vocab_axis: Literal[0, 1] = 1,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    logits_dtype: Any = None,
    reduction: Reduction = "none",
    return_logsumexp: bool = False,
    precision: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Array | tuple[Array, Array]:
    """Computes the cross entropy of labels and a linear layer's logits, without storing all logits.

    logits = soft_cap(x w + bias), V for each token. The loss of a token, in nats, is

        logsumexp(logits) - sum(target * logits) + z_loss * logsumexp(logits)^2,

    where target is 1 - label_smoothing for the label, plus label_smoothing / V for every class (as
    `optax.smooth_labels`). Memory holds the logits of one chunk of tokens at a time.

    Args:
      x: (..., d): a row for each token; floating, of 16 bits or more.
      w: (d, V), or (V, d) if `vocab_axis` is 0, as an embedding is; x's dtype.
      labels: (...), integers.
      bias: (V,), floating; added to the logits.
      weights: (...), floating: factors of the losses.
      vocab_axis: the axis of w that has the vocabulary.
      ignore_index: tokens with this label have a loss of 0 and no gradient, even if their x is NaN. None: there are
        none.
      label_smoothing: from 0 to 1.
      z_loss: coefficient of the squared logsumexp, which keeps it near 0.
      logits_soft_cap: c > 0: logits become c * tanh(logits / c), after the bias.
      logits_dtype: the dtype to which the product x w is rounded: x's (the default), or float32, which takes twice
        the memory traffic of 16 bits. What follows is computed in float32 in either case.
      reduction: "none": a loss for each token. "sum": the sum of the losses. "mean": the sum divided by the sum of the
        weights of all tokens that are not ignored (without weights: by their number). It is NaN if that is 0.
      return_logsumexp: also return the natural logsumexp of each token's logits; 0 for ignored tokens.
      precision: of the products, as in `jnp.matmul`. For 16-bit operands every setting gives the same result.
      backend: name of the backend that must run it, or None for the fastest that can.
      config: a configuration of the named backend: `jaxkernels.ops.linear_cross_entropy.reference.Config(chunk=2048)`
        for "xla". Default: the fastest that was measured, else a chunk whose logits take at most 1 GiB.

    Returns:
      The losses (...) or their sum or mean, in float32 (float64 if x is). With `return_logsumexp` also the logsumexp,
      (...), of the same dtype.

      The loss of a token is NaN, and so are the gradients, if its label is not in [0, V) and not `ignore_index`.

    Raises:
      ValueError: shapes, dtypes, an option, backend name or config are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in x, w, bias and weights, and through the logsumexp. With
    the reduction "sum" or "mean" and without `return_logsumexp`, the gradients are computed along with the loss: value
    and gradient take three products. Otherwise the backward pass computes the logits again, a fourth product. Second
    derivatives are computed in plain JAX.

    Sharding: on a mesh, tokens stay sharded, and so does the vocabulary; d is gathered. The gradient of w is summed
    over the shards of the tokens once. Shards of the vocabulary exchange three or four numbers for each token; value
    and gradient then take four products.

    References: PaLM (Chowdhery et al. 2022, arXiv:2204.02311) for the z-loss; Wijmans et al. 2024, arXiv:2411.09009,
    for losses without stored logits; Hsu et al. 2024, arXiv:2410.10989, for gradients computed along with the loss.
    """
    op = f"linear_cross_entropy[{backend or 'auto'}]"
    dispatch.check_backend("linear_cross_entropy", backend)
    x, w, labels = _operands(op, x, w, labels, vocab_axis)
    is_single = x.ndim == 1
    if is_single:
        x, labels = x[None], labels[None]
    vocab_size = w.shape[vocab_axis]
    if bias is not None:
        bias = as_array(op, "bias", bias, floating=True)
        if bias.shape != (vocab_size,):
            raise ValueError(f"{op}: bias must have shape (V,) = {(vocab_size,)}; got {bias.shape}.")
    if weights is not None:
        weights = as_array(op, "weights", weights, floating=True)
        shape = () if is_single else labels.shape
        if weights.shape != shape:
            raise ValueError(f"{op}: weights must have the labels' shape {shape}; got {weights.shape}.")
    if ignore_index is not None and not (is_whole(ignore_index) and -(2**31) <= ignore_index < 2**31):
        raise ValueError(
            f"{op}: ignore_index must be an int of 32 bits or None; got {ignore_index!r}. Use weights instead."
        )
    if not (isinstance(reduction, str) and reduction in _REDUCTIONS):
        known = ", ".join(map(repr, _REDUCTIONS))
        raise ValueError(f"{op}: unknown reduction={reduction!r}; use one of {known}.")
    returns_logsumexp = as_flag(op, "return_logsumexp", return_logsumexp, "It decides how many results there are.")
    label_smoothing = as_number(op, "label_smoothing", label_smoothing, "It is compiled into the kernel.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"{op}: label_smoothing must be from 0 to 1; got {label_smoothing}.")

    spec = LinearCrossEntropySpec(
        x=ArrayType.of(x),
        w=ArrayType.of(w),
        bias=None if bias is None else ArrayType.of(bias),
        logits_dtype=_logits_dtype(op, logits_dtype, x.dtype),
        target=hardware.host(),
        vocab_axis=vocab_axis,
        soft_cap=_soft_cap(op, logits_soft_cap),
        logit_sum=label_smoothing != 0,
        label_smoothing=label_smoothing,
        z_loss=as_number(op, "z_loss", z_loss, "It is compiled into the kernel."),
        precision=as_precision(op, precision),
    )
    ignored = None if ignore_index is None else labels == ignore_index
    if ignored is not None:  # A product of a NaN and a gradient of 0 is NaN.
        x, labels = jnp.where(ignored[..., None], 0, x), jnp.where(ignored, 0, labels)
    is_label = (labels >= 0) & (labels < vocab_size)
    factors = jnp.ones_like(labels, spec.wide) if weights is None else weights.astype(spec.wide).reshape(labels.shape)
    if ignored is not None:
        factors = jnp.where(ignored, 0, factors)
    operands = dict(x=x, w=w, labels=labels) | ({} if bias is None else dict(bias=bias))

    if reduction == "mean":
        has_all = weights is None and ignored is None
        factors = factors / (math.prod(labels.shape) if has_all else jnp.sum(factors))
    factors = jnp.where(is_label, factors, jnp.nan)
    if reduction != "none" and not returns_logsumexp:
        return total_loss(spec, backend, config, operands | dict(weights=factors))
    plain = spec.without_losses
    statistics = dict(zip(spec.statistics, forward_op(plain, operands, backend=backend, config=config)))
    losses = token_losses(spec, statistics, vocab_size) * factors
    lse = statistics["lse"] if ignored is None else jnp.where(ignored, 0, statistics["lse"])
    if is_single:
        losses, lse = losses[0], lse[0]
    losses = losses if reduction == "none" else jnp.sum(losses)
    return (losses, lse) if returns_logsumexp else losses


def _operands(op: str, x: Any, w: Any, labels: Any, vocab_axis: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, w and labels as arrays whose shapes and dtypes fit; labels as int32."""
    x, w = as_array(op, "x", x, floating=True), as_array(op, "w", w, floating=True)
    labels = as_array(op, "labels", labels)
    if not is_whole(vocab_axis) or vocab_axis not in (0, 1):
        raise ValueError(f"{op}: vocab_axis must be 0 or 1; got {vocab_axis!r}.")
    if x.dtype.itemsize < 2:
        raise ValueError(f"{op}: x must have at least 16 bits; got {x.dtype}. Cast it with .astype.")
    if w.dtype != x.dtype:
        raise ValueError(f"{op}: w must have x's dtype {x.dtype}; got {w.dtype}. Cast it with .astype.")
    if x.ndim == 0:
        raise ValueError(f"{op}: x must have shape (..., d); got a scalar.")
    form = "(V, d)" if vocab_axis == 0 else "(d, V)"
    if w.ndim != 2 or w.shape[1 - vocab_axis] != x.shape[-1]:
        raise ValueError(
            f"{op}: w must have shape {form} with d = {x.shape[-1]}, x's last dimension; got {w.shape}. "
            "Set vocab_axis to the axis of w that has the vocabulary."
        )
    if w.shape[vocab_axis] == 0:
        raise ValueError(f"{op}: w must have at least one class; got {w.shape}.")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"{op}: labels must be integers; got {labels.dtype}.")
    if labels.shape != x.shape[:-1]:
        raise ValueError(f"{op}: labels must have shape {x.shape[:-1]}, that of x without d; got {labels.shape}.")
    return x, w, _as_int32(labels)


def _as_int32(labels: jax.Array) -> jax.Array:
    """Labels beyond 32 bits become the largest or the smallest number: they are in no vocabulary either way."""
    given, least, most = jnp.iinfo(labels.dtype), -(2**31), 2**31 - 1
    if given.max > most:
        labels = jnp.clip(labels, max(int(given.min), least), most)
    return labels.astype(jnp.int32)


def _logits_dtype(op: str, logits_dtype: Any, dtype: np.dtype) -> np.dtype:
    try:
        chosen = dtype if logits_dtype is None else jnp.dtype(logits_dtype)
    except TypeError:
        chosen = None
    allowed = [dtype, jnp.promote_types(dtype, jnp.float32)]
    if chosen not in allowed:
        names = " or ".join(dict.fromkeys(map(str, allowed)))
        raise ValueError(f"{op}: logits_dtype must be {names} for x of {dtype}; got {logits_dtype!r}.")
    return jnp.dtype(chosen)


def _soft_cap(op: str, soft_cap: Any) -> float | None:
    if soft_cap is None:
        return None
    cap = as_number(op, "logits_soft_cap", soft_cap, "It is compiled into the kernel.")
    if cap <= 0:
        raise ValueError(f"{op}: logits_soft_cap must be positive; got {cap:g}. Leave it out for logits without a cap.")
    return cap
