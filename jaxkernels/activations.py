"""The activations a matmul can apply to its result, by the names the API takes."""

from __future__ import annotations

from collections.abc import Callable

import jax

__all__ = ["ACTIVATIONS"]

#: name -> elementwise function, as `jax.nn` defines it.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_erf": lambda x: jax.nn.gelu(x, approximate=False),
}
