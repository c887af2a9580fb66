"""The gated feed-forward layer: the public function `gated_mlp`, and its derivative."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.arguments import as_floating, as_precision
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.api import check_activation, matmul
from jaxkernels.ops.matmul.rules import gated_tangent_op, matmul_op, pair_op
from jaxkernels.ops.matmul.spec import Activation, GatedTangentSpec, MatmulSpec, PairSpec

__all__ = ["gated_mlp"]

#: Each weight with its bias.
_BIASES = dict(w_gate="b_gate", w_up="b_up", w_down="b_down")


def gated_mlp(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    w_down: ArrayLike,
    *,
    activation: Activation | None = "silu",
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    precision: Any = None,
    backend: str | None = None,
) -> Array:
    """Computes the gated feed-forward layer of a transformer in three products.

    out = (activation(x @ w_gate + b_gate) * (x @ w_up + b_up)) @ w_down + b_down + residual, each part where given.
    With activation="silu" it is SwiGLU, with "gelu" GEGLU (Shazeer 2020, arXiv:2002.05202). The activation and the
    multiplication are the epilogue of the second product. Their gradients are the epilogue of the product that the
    backward pass begins with. So no elementwise pass over arrays of the hidden size is left.

    Args:
      x: shape (..., d), a float dtype of 16 bits or more, as all arrays. Different dtypes are promoted as jnp does.
      w_gate, w_up: shape (d, f).
      w_down: shape (f, e).
      activation: "relu", "relu_squared" (max(x, 0)^2; So et al. 2021, arXiv:2109.08668), "silu", "gelu" (tanh
        approximation, as `jax.nn.gelu`), "gelu_erf" (exact), or None.
      b_gate, b_up: shape (f,); b_down: shape (e,).
      residual: array of the result's shape; added last.
      precision: as in `jnp.matmul`. For 16-bit operands every setting gives the same result.
      backend: name of the backend that must compute all products, or None for the fastest that can, of each product.

    Returns:
      Array of shape (..., e) and of the promoted dtype.

    Raises:
      ValueError: shapes, dtypes, activation or backend name are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in all arrays. The forward pass saves x @ w_gate + b_gate,
    x @ w_up + b_up and their gated product. Policies of `jaxkernels.checkpoint_policies` see four products.

    Sharding: as of `jaxkernels.matmul`. If f is sharded in all weights, one sum over the mesh follows the last product.
    """
    op = f"gated_mlp[{backend or 'auto'}]"
    dispatch.check_backend("gated_mlp", backend)
    given = dict(x=x, w_gate=w_gate, w_up=w_up, w_down=w_down)
    given |= dict(b_gate=b_gate, b_up=b_up, b_down=b_down, residual=residual)
    xs = {name: as_floating(op, name, array) for name, array in given.items() if array is not None}
    dtype = jnp.result_type(*xs.values())
    xs = {name: _jax.convert(array, dtype, weak_type=False) for name, array in xs.items()}
    check_activation(op, activation)
    _check_shapes(op, {name: array.shape for name, array in xs.items()})
    options = _Options(activation, as_precision(op, precision), backend)
    return _gated_mlp_of_any_arrays(options, xs)


def _check_shapes(op: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
    for name in _BIASES:
        if len(shapes[name]) != 2:
            raise ValueError(f"{op}: {name} must be a matrix; got shape {shapes[name]}.")
    if not shapes["x"]:
        raise ValueError(f"{op}: x must have at least one dimension; got a scalar.")
    d, f = shapes["w_gate"]
    e = shapes["w_down"][1]
    expected = dict(
        x=("(..., d)", (*shapes["x"][:-1], d)),
        w_up=("(d, f)", (d, f)),
        w_down=("(f, e)", (f, e)),
        b_gate=("(f,)", (f,)),
        b_up=("(f,)", (f,)),
        b_down=("(e,)", (e,)),
        residual=("(..., e)", (*shapes["x"][:-1], e)),
    )
    for name, (letters, shape) in expected.items():
        if name in shapes and shapes[name] != shape:
            weights = f"w_gate (d, f) = {shapes['w_gate']}"
            weights += f" and w_down (f, e) = {shapes['w_down']} say" if "e" in letters else " says"
            raise ValueError(f"{op}: {name} must have shape {letters} = {shape}, as {weights}; got {shapes[name]}.")


@dataclasses.dataclass(frozen=True)
class _Options:
    activation: Activation | None
    precision: Any
    backend: str | None

    def product(self, xs: Mapping[str, jax.Array], x: jax.Array, weight: str, **epilogue: Any) -> jax.Array:
        """x times a weight, with its bias if there is one."""
        return matmul(
            x, xs[weight], bias=xs.get(_BIASES[weight]), precision=self.precision, backend=self.backend, **epilogue
        )

    def gate(self, xs: Mapping[str, jax.Array], up: jax.Array) -> list[jax.Array]:
        """The hidden array, and the pre-activation of the gate."""
        options: dict[str, Any] = dict(activation=self.activation, save_preactivation=True)
        return self._with_operand(xs, xs["x"], "w_gate", "multiplier", up, **options)

    def down(self, xs: Mapping[str, jax.Array], hidden: jax.Array) -> jax.Array:
        """The result of the layer. In a transformer a norm follows, and XLA would add the residual there."""
        if "residual" not in xs:
            return self.product(xs, hidden, "w_down")
        return self._with_operand(xs, hidden, "w_down", "residual", xs["residual"], adds_apart=True)[0]

    def _with_operand(
        self, xs: Mapping[str, jax.Array], x: jax.Array, weight: str, name: str, operand: jax.Array, **options: Any
    ) -> list[jax.Array]:
        """The results of x times a weight, with its bias if there is one, and an operand of the result's shape."""
        operands, bias = {"lhs": x, "rhs": xs[weight], name: operand}, _BIASES[weight]
        if bias in xs:
            operands["bias"] = xs[bias]
        types = {of: ArrayType.of(array) for of, array in operands.items()}
        spec = MatmulSpec(
            **types, dimension_numbers=_last_by_first(x), out_dtype=x.dtype, target=hardware.host(),
            precision=self.precision, **options,
        )  # fmt: skip
        return matmul_op(spec, operands, backend=self.backend)


def _last_by_first(x: jax.Array) -> Any:
    """The dimension numbers of x times a matrix."""
    return ((x.ndim - 1,), (0,)), ((), ())


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gated_mlp(options: _Options, xs: dict[str, jax.Array]) -> jax.Array:
    up = options.product(xs, xs["x"], "w_up")
    hidden = options.product(xs, xs["x"], "w_gate", activation=options.activation, multiplier=up)
    return options.down(xs, hidden)


@functools.partial(_gated_mlp.defjvp, symbolic_zeros=True)
def _gated_mlp_jvp(options: _Options, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (xs,), (dots,) = primals, tangents
    moving = {name: dot for name, dot in dots.items() if not isinstance(dot, SymbolicZero)}
    jvp = functools.partial(_jvp, xs, moving)
    up, up_dot = jvp(lambda xs: options.product(xs, xs["x"], "w_up"), ("w_up", "b_up"))
    (hidden, preactivation), gate_dots = jvp(lambda xs: options.gate(xs, up), ("w_gate", "b_gate"))
    preactivation_dot = None if gate_dots is None else gate_dots[1]
    if "x" in moving:
        spec = PairSpec(
            ArrayType.of(xs["x"]), ArrayType.of(xs["w_gate"]), _last_by_first(xs["x"]), up.dtype, hardware.host(),
            precision=options.precision, other_rhs=ArrayType.of(xs["w_up"]),
        )  # fmt: skip
        operands = dict(lhs=moving["x"], rhs=xs["w_gate"], other_rhs=xs["w_up"])
        dots = pair_op(spec, operands, backend=options.backend)
        preactivation_dot, up_dot = _sum(preactivation_dot, dots[0]), _sum(up_dot, dots[1])
    out, out_dot = jvp(lambda xs: options.down(xs, hidden), ("w_down", "b_down", "residual"))
    if up_dot is not None or preactivation_dot is not None:
        spec = GatedTangentSpec(
            ArrayType.of(preactivation), ArrayType.of(xs["w_down"]), _last_by_first(preactivation), out.dtype,
            hardware.host(), precision=options.precision, gate_activation=options.activation,
            multiplier_dot=ArrayType.of(up), at_preactivation=ArrayType.of(preactivation),
            at_multiplier=ArrayType.of(up),
        )  # fmt: skip
        operands = dict(
            lhs=jnp.zeros_like(preactivation) if preactivation_dot is None else preactivation_dot,
            rhs=xs["w_down"],
            multiplier_dot=jnp.zeros_like(up) if up_dot is None else up_dot,
            at_preactivation=preactivation,
            at_multiplier=up,
        )
        out_dot = _sum(out_dot, *gated_tangent_op(spec, operands, backend=options.backend))
    return out, jnp.zeros_like(out) if out_dot is None else out_dot


def _sum(x: jax.Array | None, y: jax.Array) -> jax.Array:
    return y if x is None else x + y


# Inside a jit, vmap gives NumPy arrays to a custom_jvp as they are, which it refuses. A jit takes them.
_gated_mlp_of_any_arrays = jax.jit(_gated_mlp, static_argnums=0, inline=True)


def _jvp(
    xs: dict[str, jax.Array], moving: Mapping[str, jax.Array], function: Callable[..., Any], names: Sequence[str]
) -> tuple[Any, Any]:
    """The results of a function of some arrays, and their tangents; None if no array moves."""
    varying = {name: xs[name] for name in names if name in moving}
    if not varying:
        return function(xs), None
    return jax.jvp(lambda some: function(xs | some), (varying,), ({name: moving[name] for name in varying},))
