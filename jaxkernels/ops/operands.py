"""How the public functions read their array arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

__all__ = ["as_array"]


def as_array(op: str, name: str, x: Any, *, floating: bool = False) -> jax.Array:
    """Returns argument `name` of `op` as a JAX array; raises ValueError where it is none, or not floating."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{op}: {name} must be an array; got {type(x).__name__}.") from e
    if floating and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} must have a floating dtype; got {x.dtype}. Cast it with .astype.")
    return x
