"""The error rule: how far a result may be from the reference.

The error of a kernel against a float64 reference may be at most twice the error of the same formula in plain JAX, in
the dtype of the operands. The tests apply the rule to every kernel. A benchmark does not time a result that breaks it.
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
    """The error of a result, divided by the error of plain JAX. A result is accepted up to `ALLOWED`.

    The formula is max|x - reference| / (max|plain - reference| + tolerance max|reference|). The tolerance is an eighth
    of the dtype's ulp, but at least 2^-21. A sum of float32 terms may lose 2^-21 where plain JAX happens to lose less:
    tensor cores truncate their float32 accumulators, and XLA may split the same sum.

    Args:
      distance: max|x - reference|; NaN if x has a NaN or an infinity that the reference lacks.
      plain_distance: max|plain - reference|.
      largest: max|reference|; of a reference of zeros, the maximum of all results.
      dtype: the dtype of the result.
    """
    unit = plain_distance + max(float(jnp.finfo(dtype).eps) / 4, 2.0**-20) * largest / ALLOWED
    return float(distance / unit) if unit else (0.0 if distance == 0 else float("inf"))
