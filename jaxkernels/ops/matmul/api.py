"""Matrix products: the public functions `matmul` and `dot_general`, and what they accept."""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.arguments import as_array, as_number, as_precision
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.epilogue import ACTIVATIONS
from jaxkernels.ops.matmul.rules import dot_general_op, matmul_op
from jaxkernels.ops.matmul.spec import Activation, DimensionNumbers, MatmulSpec

__all__ = ["check_activation", "dot_general", "matmul"]


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    alpha: float = 1.0,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    multiplier: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Array:
    """Multiplies two matrices, or batches of them, and applies an epilogue to the product.

    out = activation(alpha * (a @ b) + bias) * multiplier + residual, each part where given. `a` and `b` are combined as
    `jnp.matmul` does: vectors are promoted to matrices and lose the added axis again, leading axes are
    batches and broadcast. Products of 16-bit operands are accumulated, and multiplied by alpha, in float32.

    Args:
      a: left operand, shape (..., m, k) or (k,); any real dtype.
      b: right operand, shape (..., k, n) or (k,). Operands of different dtypes are promoted as jnp does.
      alpha: factor of the product, a real number that is not traced; other than 1 for floating operands only.
      bias: shape (n,), floating; added to every row.
      activation: "relu", "relu_squared" (max(x, 0)^2; So et al. 2021, arXiv:2109.08668), "silu", "gelu" (tanh
        approximation, as `jax.nn.gelu`), "gelu_erf" (exact), or None.
      multiplier: array of the result's shape, floating: the other half of a gated layer, as in
        `matmul(x, w_gate, activation="silu", multiplier=matmul(x, w_up))`.
      residual: array of the result's shape, floating; added last.
      out_dtype: dtype of the result; default: the promoted dtype of `a` and `b`, weak if both are weakly typed.
      precision: as in `jnp.matmul`. For 16-bit operands every setting gives the same result.
      backend: name of the backend that must run it, or None for the fastest that can.
      config: a configuration of the named backend, an instance of its module's `Config` (such as
        `jaxkernels.ffi.matmul.gemm.Config(num_stages=1)` for "cuda"); default: the fastest that was measured, else
        the one that its cost model chooses. Gradients choose their own.

    Returns:
      Array of shape (..., m, n) and dtype `out_dtype`.

    Raises:
      ValueError: shapes, dtypes, alpha, activation, backend name or config are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in all five arrays. With an activation or a multiplier
    the forward pass saves the pre-activation in `out_dtype`. For an `out_dtype` wider than the operands the
    cotangent keeps its width. `jaxkernels.checkpoint_policies` has `dots_saveable` and its like for `jax.checkpoint`:
    JAX's own do not know this function.

    Sharding: on a mesh the result is sharded as the operands' free dimensions are; contracted
    dimensions that are sharded are summed over the mesh before bias and activation.
    """
    op = f"matmul[{backend or 'auto'}]"
    dispatch.check_backend("matmul", backend)
    a, b = as_array(op, "a", a), as_array(op, "b", b)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension; got a scalar. Multiply with * instead.")
    try:
        dtype = jnp.result_type(a, b)
    except ValueError as e:  # TypePromotionError: two different 8-bit floats, or strict promotion.
        raise ValueError(
            f"{op}: a and b have no common dtype; got {a.dtype} and {b.dtype}. Cast them with .astype."
        ) from e
    is_weak = out_dtype is None and all(jax.typeof(x).weak_type for x in (a, b))
    a, b = (_jax.convert(x, dtype, weak_type=is_weak) for x in (a, b))
    out_dtype = _out_dtype(op, out_dtype, dtype)
    k_b = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != k_b:
        raise ValueError(
            f"{op}: a and b must agree in k, a's last and b's {'only' if b.ndim == 1 else 'second last'} dimension; "
            f"got a {a.shape} and b {b.shape}."
        )
    check_activation(op, activation)
    if a.ndim > 2 and b.ndim > 2:
        try:
            batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise ValueError(
                f"{op}: the batch dimensions of a and b must broadcast; got a {a.shape} and b {b.shape}."
            ) from None
        a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    elif b.ndim > 2:  # One matrix or vector times a batch: dot_general would put the batch after m.
        a = jnp.broadcast_to(a, (*b.shape[:-2], *a.shape))
    num_batch = b.ndim - 2 if b.ndim > 2 else 0
    lead = tuple(range(num_batch))
    numbers = (((a.ndim - 1,), (b.ndim - 2 if b.ndim > 1 else 0,)), (lead, lead))
    spec = MatmulSpec(
        ArrayType.of(a), ArrayType.of(b), numbers, out_dtype, hardware.host(),
        precision=as_precision(op, precision), alpha=_alpha(op, alpha, dtype),
    )  # fmt: skip
    operands = dict(lhs=a, rhs=b)
    if bias is None and activation is None and multiplier is None and residual is None:
        return dot_general_op(spec, operands, backend=backend, config=config)

    if bias is not None:
        bias = as_array(op, "bias", bias, floating=True)
        if b.ndim == 1:
            raise ValueError(f"{op}: bias needs columns to add to; got a vector b {b.shape}. Add the bias outside.")
        if bias.shape != b.shape[-1:]:
            raise ValueError(
                f"{op}: bias must have shape (n,) = {b.shape[-1:]}, one value for each column; got {bias.shape}."
            )
        operands["bias"] = bias
        spec = dataclasses.replace(spec, bias=ArrayType.of(bias))
    for name, x, verb in (("multiplier", multiplier, "multiply by"), ("residual", residual, "add")):
        if x is None:
            continue
        x = as_array(op, name, x, floating=True)
        if x.shape != spec.out_shape:
            raise ValueError(
                f"{op}: {name} must have the result's shape {spec.out_shape}; got {x.shape}. "
                f"Broadcast it with jnp.broadcast_to, or {verb} it outside."
            )
        operands[name] = x
        spec = dataclasses.replace(spec, **{name: ArrayType.of(x)})
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: bias, activation, multiplier and residual need a floating out_dtype; got {out_dtype}. "
            "Apply them to the result."
        )
    spec = dataclasses.replace(spec, activation=activation)
    return matmul_op(spec, operands, backend=backend, config=config)[0]


def check_activation(op: str, activation: Any) -> None:
    """Raises ValueError unless it is None or the name of an activation."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: unknown activation={activation!r}; use one of {known}, or None.")


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Array:
    """General product of two arrays over chosen dimensions: a drop-in for `jax.lax.dot_general`.

    The result has the batch dimensions, then the lhs's free ones, then the rhs's. Flax layers take the
    function as their `dot_general`, and `lambda: dot_general` as their `dot_general_cls`.

    Args:
      lhs, rhs: the operands, any rank.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), sequences of ints.
      precision: as in `jax.lax.dot_general`. For 16-bit operands every setting gives the same result.
      preferred_element_type: dtype of the result; default: what `jax.lax.dot_general` returns.
      out_sharding: on a mesh with Explicit axes, the result's `PartitionSpec` or `NamedSharding`;
        needed where both operands are sharded along contracting dimensions.
      backend: name of the backend that must run it, or None for the fastest that can.
      config: a configuration of the named backend, an instance of its module's `Config` (such as
        `jaxkernels.ffi.matmul.gemm.Config(num_stages=1)` for "cuda"); default: the fastest that was measured, else
        the one that its cost model chooses. Gradients choose their own.

    Returns:
      The product, with shape and dtype of `jax.lax.dot_general`.

    Raises:
      ValueError: shapes, dimension numbers, backend name or config are wrong.
      JAX's ShardingTypeError: as from `jax.lax.dot_general`, where the result's sharding is ambiguous.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in both operands. `jaxkernels.checkpoint_policies` has
    `dots_saveable` and its like for `jax.checkpoint`: JAX's own do not know this function.

    One result differs from lax's on purpose. With complex operands and a real `preferred_element_type`, lax drops
    the operands' imaginary parts. Here the product is complex, and its real part is returned.

    Layouts: contracting over the first or the last dimension of either operand costs no copy. Where
    batch, free and contracting dimensions interleave, XLA transposes the operand first.
    """
    op = f"dot_general[{backend or 'auto'}]"
    dispatch.check_backend("dot_general", backend)
    lhs, rhs = as_array(op, "lhs", lhs), as_array(op, "rhs", rhs)
    numbers = _check_dimension_numbers(op, lhs, rhs, dimension_numbers)
    precision = as_precision(op, precision)
    # lax's own rule decides the dtype, and on a mesh the sharding (or that it is ambiguous).
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    try:
        like: Any = jax.make_jaxpr(product)(lhs, rhs).out_avals[0]
    except TypeError as e:  # The dtypes; a mistake in the sharding has an error class of its own.
        raise ValueError(f"{op}: {e}") from e
    types = ArrayType.of(lhs), ArrayType.of(rhs)
    spec = MatmulSpec(*types, numbers, jnp.dtype(like.dtype), hardware.host(), precision=precision)
    _, explicit = _jax.explicit_axes_of(lhs, rhs)
    result_specs = (like.sharding.spec,) if explicit else ()
    operands = dict(lhs=lhs, rhs=rhs)
    out = dot_general_op(spec, operands, backend=backend, config=config, result_specs=result_specs)
    return out if out_sharding is None and not explicit else jax.sharding.reshard(out, like.sharding)


def _check_dimension_numbers(op: str, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> DimensionNumbers:
    try:
        (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
        dims = [tuple(map(operator.index, group)) for group in (lhs_k, rhs_k, lhs_b, rhs_b)]
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), "
            f"each a sequence of ints; got {dimension_numbers!r}."
        ) from None
    lhs_k, rhs_k, lhs_b, rhs_b = dims
    for name, array, groups in (("lhs", lhs, (lhs_k, lhs_b)), ("rhs", rhs, (rhs_k, rhs_b))):
        used = [d for group in groups for d in group]
        if len(set(used)) != len(used) or any(not 0 <= d < array.ndim for d in used):
            raise ValueError(
                f"{op}: dimension_numbers must name distinct dimensions of {name}, 0 to {array.ndim - 1}; got "
                f"contracting {groups[0]} and batch {groups[1]} for {name} {array.shape}."
            )
    for kind, left, right in (("contracting", lhs_k, rhs_k), ("batch", lhs_b, rhs_b)):
        if [lhs.shape[d] for d in left] != [rhs.shape[d] for d in right]:
            raise ValueError(
                f"{op}: {kind} dimensions must have the same sizes in lhs and rhs; got dimensions {left} of "
                f"lhs {lhs.shape} and {right} of rhs {rhs.shape}."
            )
    return (lhs_k, rhs_k), (lhs_b, rhs_b)


def _out_dtype(op: str, out_dtype: Any, dtype: np.dtype) -> np.dtype:
    """The dtype of a product of `dtype` operands; None asks for theirs."""
    if out_dtype is None:
        return dtype
    try:
        requested = jax.dtypes.canonicalize_dtype(out_dtype)
    except (TypeError, ValueError):  # A ValueError where it is that of random keys.
        raise ValueError(f"{op}: out_dtype must be a dtype; got {out_dtype!r}.") from None
    if not (jnp.issubdtype(requested, jnp.number) or requested == jnp.bool_):
        raise ValueError(f"{op}: out_dtype must be one of numbers; got {requested}.")
    for kind, name in ((jnp.floating, "floating"), (jnp.complexfloating, "complex")):
        if jnp.issubdtype(dtype, kind) and not jnp.issubdtype(requested, kind):
            raise ValueError(
                f"{op}: out_dtype must be {name}, as the operands are ({dtype}); got {requested}. "
                "Cast the result with .astype."
            )
    return requested


def _alpha(op: str, alpha: Any, dtype: np.dtype) -> float:
    """The factor of a product of `dtype` operands."""
    value = as_number(op, "alpha", alpha, "Multiply the result instead.")
    if value != 1 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{op}: alpha={alpha!r} needs floating operands; got {dtype}. Cast them with .astype, or multiply the "
            "result instead."
        )
    return value
