"""What a matmul can do to its result, in plain JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxkernels.ops.matmul.spec import Activation, MatmulSpec

__all__ = ["ACTIVATIONS", "apply_epilogue"]

#: Name -> elementwise function, in terms of `jax.nn`.
ACTIVATIONS: dict[Activation, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "relu_squared": lambda x: jnp.square(jax.nn.relu(x)),
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
}


def apply_epilogue(spec: MatmulSpec, out: jax.Array, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
    """Adds bias, activation, multiplier and residual, of a kernel's named operands, to a product, in its dtype.

    For a spec of gradients, it returns those of the gated activation. The product is their cotangent.
    """
    if spec.is_gradient:
        gate = dataclasses.replace(spec, preactivation=None)
        gated = lambda preactivation, multiplier: apply_epilogue(gate, preactivation, dict(multiplier=multiplier))[0]
        point = (operands[name].astype(out.dtype) for name in ("preactivation", "multiplier"))
        return list(jax.vjp(gated, *point)[1](out))
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
