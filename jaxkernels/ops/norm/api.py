"""RMS norm and layer norm: the public functions, and what they accept."""

from __future__ import annotations

from typing import Any, Literal, overload

from jaxtyping import Array, ArrayLike

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.arguments import as_flag, as_floating, as_number
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.rules import forward_op
from jaxkernels.ops.norm.spec import NormSpec

__all__ = ["layer_norm", "rms_norm"]


@overload
def rms_norm(
    x: ArrayLike, scale: ArrayLike | None = None, *, residual: None = None,
    return_x: Literal[False] = False, eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def rms_norm(
    x: ArrayLike, scale: ArrayLike | None = None, *, residual: None = None,
    return_x: Literal[True], eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def rms_norm(
    x: ArrayLike, scale: ArrayLike | None = None, *, residual: ArrayLike, return_x: bool = False,
    eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def rms_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    return_x: bool = False,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Divides each row by its root mean square: RMS norm over the last axis.

    out = z / sqrt(mean(z^2) + eps) * (scale + scale_offset), with z = x + residual. z is rounded to x's dtype, then
    everything is computed in float32 (float64 for a float64 x) and rounded once, to x's dtype.

    Args:
      x: (..., F), F at least 1; any floating dtype of 16 bits or more.
      scale: (F,), floating; its dtype may differ from x's. None: no scale, and `scale_offset` is not used.
      residual: x's shape and dtype; added before the norm. The sum is then returned, too.
      return_x: whether to return x, too, if there is no residual. If the program goes on with this x, the backward
        kernel adds its gradient. Otherwise the gradient of x is the sum of two, which XLA adds in a pass of its own.
      eps: added to the mean square; not negative, known at trace time.
      scale_offset: added to the scale, known at trace time: 1 for models whose parameter is scale - 1 (Gemma).
      backend: name of the backend that must run it, or None for the fastest that can.

    Returns:
      out (..., F) in x's dtype; with a residual (out, x + residual), both in x's dtype; with return_x (out, x).

      The result with a residual equals `s = x + residual; rms_norm(s), s`: the norm reads the rounded sum, as in
      vLLM and Liger Kernel. The parameter is multiplied in float32, as in flax; Hugging Face's Llama rounds the
      normalized row to x's dtype first. A row with a NaN or an infinity becomes NaN where jnp's expression does.

    Raises:
      ValueError: shapes, dtypes, eps, scale_offset or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in x, scale and residual. A named backend other than "xla"
    refuses second derivatives and Taylor series (`jax.experimental.jet`). The gradient saves z and one float32 number
    for each row.

    Sharding: on a mesh all axes stay sharded. If features are sharded, XLA computes the norm, with one sum over the
    shards of a row.

    References: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    return _norm("rms_norm", x, scale, None, residual, return_x, eps, scale_offset, backend, centered=False)


@overload
def layer_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *, residual: None = None,
    return_x: Literal[False] = False, eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> Array: ...  # fmt: skip


@overload
def layer_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *, residual: None = None,
    return_x: Literal[True], eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


@overload
def layer_norm(
    x: ArrayLike, scale: ArrayLike | None = None, bias: ArrayLike | None = None, *, residual: ArrayLike,
    return_x: bool = False, eps: float = 1e-6, scale_offset: float = 0.0, backend: str | None = None,
) -> tuple[Array, Array]: ...  # fmt: skip


def layer_norm(
    x: ArrayLike,
    scale: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    residual: ArrayLike | None = None,
    return_x: bool = False,
    eps: float = 1e-6,
    scale_offset: float = 0.0,
    backend: str | None = None,
) -> Array | tuple[Array, Array]:
    """Gives each row mean 0 and variance 1: layer norm over the last axis.

    out = (z - mean(z)) / sqrt(var(z) + eps) * (scale + scale_offset) + bias, with z = x + residual and
    var(z) = mean((z - mean(z))^2), computed in two steps: rows far from 0 lose no precision. z is rounded to x's dtype,
    then everything is computed in float32 (float64 for a float64 x) and rounded once, to x's dtype.

    Args:
      x: (..., F), F at least 1; any floating dtype of 16 bits or more.
      scale: (F,), floating; its dtype may differ from x's. None: no scale, and `scale_offset` is not used.
      bias: (F,), floating; its dtype may differ from x's. None: no bias.
      residual: x's shape and dtype; added before the norm. The sum is then returned, too.
      return_x: whether to return x, too, if there is no residual. If the program goes on with this x, the backward
        kernel adds its gradient. Otherwise the gradient of x is the sum of two, which XLA adds in a pass of its own.
      eps: added to the variance; not negative, known at trace time.
      scale_offset: added to the scale, known at trace time: 1 for models whose parameter is scale - 1.
      backend: name of the backend that must run it, or None for the fastest that can.

    Returns:
      out (..., F) in x's dtype; with a residual (out, x + residual), both in x's dtype; with return_x (out, x).

      The result with a residual equals `s = x + residual; layer_norm(s), s`: the norm reads the rounded sum. A row
      with a NaN or an infinity becomes NaN.

    Raises:
      ValueError: shapes, dtypes, eps, scale_offset or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in x, scale, bias and residual. A named backend other than
    "xla" refuses second derivatives and Taylor series (`jax.experimental.jet`). The gradient saves z and two float32
    numbers for each row.

    Sharding: on a mesh all axes stay sharded. If features are sharded, XLA computes the norm, with two sums over the
    shards of a row.

    References: Ba et al. 2016, arXiv:1607.06450.
    """
    return _norm("layer_norm", x, scale, bias, residual, return_x, eps, scale_offset, backend, centered=True)


def _norm(
    name: str, x: Any, scale: Any, bias: Any, residual: Any, return_x: Any, eps: Any, scale_offset: Any,
    backend: str | None, *, centered: bool,
) -> Array | tuple[Array, Array]:  # fmt: skip
    op = f"{name}[{backend or 'auto'}]"
    dispatch.check_backend(name, backend)
    x = as_floating(op, "x", x)
    if x.ndim == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x must have shape (..., F) with F at least 1; got {x.shape}.")
    operands = dict(x=x)
    if residual is not None:
        operands["residual"] = as_floating(op, "residual", residual)
        if (operands["residual"].shape, operands["residual"].dtype) != (x.shape, x.dtype):
            got = ArrayType.of(operands["residual"])
            raise ValueError(f"{op}: residual must have the shape and dtype of x, {ArrayType.of(x)}; got {got}.")
    for parameter, value in (("scale", scale), ("bias", bias)):
        if value is not None:
            operands[parameter] = as_floating(op, parameter, value)
            got = operands[parameter].shape
            if got != x.shape[-1:]:
                raise ValueError(f"{op}: {parameter} must have shape {x.shape[-1:]} for x {x.shape}; got {got}.")
    eps = as_number(op, "eps", eps, "The kernels are compiled for one eps.")
    if eps < 0:
        raise ValueError(f"{op}: eps must not be negative; got {eps}.")
    offset = as_number(op, "scale_offset", scale_offset, "Add a traced number to the scale.")
    returns_x = as_flag(op, "return_x", return_x, "It decides what is returned.") and residual is None
    operands = {name: value[None] for name, value in operands.items()}  # One group: vmap makes several.
    spec = NormSpec(
        x=ArrayType.of(operands["x"]),
        target=hardware.host(),
        eps=eps,
        centered=centered,
        scale=ArrayType.of(operands["scale"]) if scale is not None else None,
        bias=ArrayType.of(operands["bias"]) if bias is not None else None,
        scale_offset=offset if scale is not None else 0.0,
        residual=residual is not None,
        returns_x=returns_x,
    )
    out, *others = forward_op(spec, operands, backend=backend)
    return out[0] if residual is None and not returns_x else (out[0], others[0][0])
