"""What a matmul can do to its result, in plain JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import jax

from jaxkernels.ops.matmul.spec import Activation, MatmulSpec

__all__ = ["ACTIVATIONS", "apply_epilogue", "gate_gradients", "gated"]

#: Name -> elementwise function, as `jax.nn` defines it.
ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
}


def apply_epilogue(spec: MatmulSpec, out: jax.Array, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Adds bias, activation, multiplier and residual, of a kernel's named operands, to a product, in its dtype.

    Of a spec of gradients: those of the gated activation, whose cotangent is the product.
    """
    if spec.is_gradient:
        return list(gate_gradients(spec, out, operands["preactivation"], operands["multiplier"]))
    if spec.bias is not None:
        out = out + operands["bias"].astype(out.dtype)
    preactivation = out
    if spec.activation is not None:
        out = ACTIVATIONS[spec.activation](out)
    if spec.multiplier is not None:
        out = out * operands["multiplier"].astype(out.dtype)
    if spec.residual is not None:
        out = out + operands["residual"].astype(out.dtype)
    return [out, preactivation] if spec.save_preactivation else [out]


def gated(spec: MatmulSpec, preactivation: jax.Array, multiplier: jax.Array) -> jax.Array:
    """activation(preactivation) * multiplier, in the pre-activation's dtype."""
    activated = preactivation if spec.activation is None else ACTIVATIONS[spec.activation](preactivation)
    return activated * multiplier.astype(activated.dtype)


def gate_gradients(
    spec: MatmulSpec, cotangent: jax.Array, preactivation: jax.Array, multiplier: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The gradients of `gated` by its two operands, in the cotangent's dtype."""
    dtype = cotangent.dtype
    function = functools.partial(gated, spec)
    return jax.vjp(function, preactivation.astype(dtype), multiplier.astype(dtype))[1](cotangent)
