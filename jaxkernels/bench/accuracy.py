"""The rule for how far a result may be from a reference.

A kernel may be at most twice as far from a reference in float64 as the same formula in plain JAX and the operands' own
dtype is. The tests hold every kernel to it, and a benchmark times nothing that breaks it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["ALLOWED", "error_ratio", "largest_difference", "widen"]

#: The largest `error_ratio` that is accepted.
ALLOWED = 2.0


def widen(operands: Any) -> Any:
    """The floating-point operands in float64 (under `jax.enable_x64`)."""
    return jax.tree.map(lambda x: x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x, operands)


def largest_difference(x: jax.Array, reference: jax.Array) -> jax.Array:
    """max|x - reference|, NaN if either has a NaN or an infinity (under `jax.enable_x64`)."""
    return jnp.max(jnp.abs(x.astype(reference.dtype) - reference))


def error_ratio(distance: float, plain_distance: float, largest: float, dtype: Any) -> float:
    """How far a result is from the reference, in units of how far plain JAX is; at most `ALLOWED` is right.

    max|x - reference| / (max|plain - reference| + a little of the largest value). That little is an eighth of the
    dtype's ulp, and for float32 the 2^-21 that a sum of float32 terms may lose where plain JAX happens to lose less:
    tensor cores truncate their float32 accumulators, while XLA may split the same sum.

    Args:
      distance: max|x - reference|; NaN where x has a NaN or an infinity that the reference lacks.
      plain_distance: max|plain - reference|.
      largest: max|reference|.
      dtype: the result's.
    """
    unit = plain_distance + max(float(jnp.finfo(dtype).eps) / 4, 2.0**-20) * largest / ALLOWED
    return float(distance / unit) if unit else (0.0 if distance == 0 else float("inf"))
