"""How the public functions read their array arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["as_array", "as_flag", "as_number"]


def as_array(op: str, name: str, x: Any, *, floating: bool = False) -> jax.Array:
    """Returns argument `name` of `op` as a JAX array; raises ValueError where it is none, or not floating."""
    try:
        x = jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as e:
        got = type(x).__name__ + (f" of {x.dtype}" if isinstance(x, np.ndarray) else "")
        raise ValueError(f"{op}: {name} must be an array that JAX takes; got {got}.") from e
    if floating and not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{op}: {name} must have a floating dtype; got {x.dtype}. Cast it with .astype.")
    return x


def as_number(op: str, name: str, x: Any, way_out: str) -> float:
    """Returns argument `name` of `op` as a number; raises ValueError where it is traced, not real or not finite."""
    value = _known(x)
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.ndim != 0 or not is_real or not np.isfinite(value):
        raise ValueError(f"{op}: {name} must be a finite real number known at trace time; got {x!r}. {way_out}")
    return float(value)


def as_flag(op: str, name: str, x: Any, way_out: str) -> bool:
    """Returns argument `name` of `op` as a bool; raises ValueError where it is traced, or neither true nor false."""
    value = _known(x)
    if value.ndim != 0 or value.dtype.kind not in "bi" or value not in (0, 1):
        raise ValueError(f"{op}: {name} must be True or False, known at trace time; got {x!r}. {way_out}")
    return bool(value)


def _known(x: Any) -> np.ndarray:
    """The value of an argument; of one that is traced, or of no shape, None."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError):  # Tracers included.
        return np.asarray(None)
