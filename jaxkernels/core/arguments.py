"""Checks of what a caller gives, by its declared type: a wrong one is named before anything uses it."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import _jax
from jaxkernels.core.hardware import Chip

__all__ = [
    "as_array", "as_flag", "as_floating", "as_number", "as_precision", "check_fields", "check_rules", "check_smem",
    "is_whole", "positive_number", "positive_whole",
]  # fmt: skip


def check_fields(label: str, instance: Any) -> None:
    """Raises ValueError unless each field of a dataclass is a value of its annotation.

    Args:
      label: what messages begin with, as "matmul[cuda]".
      instance: a dataclass of int, bool, Literal, None and unions of these. An int is not a bool.
    """
    for name, kinds in _kinds(type(instance)).items():
        value = getattr(instance, name)
        if not any(_is(value, kind) for kind in kinds):
            expected = " or ".join(_named(kind) for kind in kinds)
            raise ValueError(f"{label}: {name} must be {expected}; got {value!r}. Leave it out for the default.")


def check_rules(label: str, instance: Any, rules: Mapping[str, Any]) -> None:
    """Raises ValueError for the first broken rule.

    Args:
      label: what messages begin with, as "matmul[cuda]".
      instance: the configuration that messages show.
      rules: each rule in words, and whether it is broken.
    """
    for rule, is_broken in rules.items():
        if is_broken:
            raise ValueError(f"{label}: {rule}; got {instance}.")


def check_smem(label: str, chip: Chip, config: Any, smem_bytes: int, way_out: str) -> None:
    """Raises ValueError if a configuration's block needs more shared memory than the chip has."""
    if smem_bytes > chip.smem_bytes:
        raise ValueError(
            f"{label}: a block has at most {chip.smem_bytes} bytes of shared memory on {chip.name}; "
            f"got {config}, which needs {smem_bytes}. {way_out}"
        )


def is_whole(value: Any) -> bool:
    """Whether it is an int; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive_whole(label: str, name: str, value: Any, way_out: str) -> None:
    """Raises ValueError unless the argument is an int of at least 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{label}: {name} must be a positive int; got {name}={value!r}. {way_out}")


def positive_number(label: str, name: str, value: Any, way_out: str) -> None:
    """Raises ValueError unless the argument is a positive int or float. Infinity is one, NaN is not."""
    if not (is_whole(value) or isinstance(value, float)) or math.isnan(value) or value <= 0:
        raise ValueError(f"{label}: {name} must be a positive number; got {name}={value!r}. {way_out}")


@functools.cache
def _kinds(cls: type) -> dict[str, tuple[Any, ...]]:
    """The alternatives that each field's annotation allows: types, literal values (in tuples), NoneType."""
    hints = typing.get_type_hints(cls)
    return {field.name: tuple(_alternatives(hints[field.name])) for field in dataclasses.fields(cls)}


def _alternatives(hint: Any) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [kind for one in typing.get_args(hint) for kind in _alternatives(one)]
    return [typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else hint]


def _is(value: Any, kind: Any) -> bool:
    if isinstance(kind, tuple):
        return any(type(value) is type(known) and value == known for known in kind)
    return is_whole(value) if kind is int else isinstance(value, kind)


def _named(kind: Any) -> str:
    if isinstance(kind, tuple):
        return " or ".join(f'"{known}"' if isinstance(known, str) else repr(known) for known in kind)
    names: dict[Any, str] = {int: "an int", bool: "True or False", type(None): "None"}
    return names.get(kind) or str(kind.__name__)


# Arguments of the public functions: arrays, and numbers and flags that must be known when a program is traced.


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


def as_floating(op: str, name: str, x: Any) -> jax.Array:
    """Returns argument `name` of `op` as a JAX array; raises ValueError unless it has a float dtype of 16 bits."""
    x = as_array(op, name, x, floating=True)
    if x.dtype.itemsize < 2:  # JAX promotes these to nothing.
        raise ValueError(
            f"{op}: {name} must have a floating dtype of 16 bits or more; got {x.dtype}. Cast it with .astype."
        )
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


def as_precision(op: str, precision: Any) -> Any:
    """Returns argument `precision` of `op` in lax's own form (`_jax.canonical_precision`)."""
    try:
        return _jax.canonical_precision(precision)
    except ValueError:
        raise ValueError(
            f"{op}: precision must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithmPreset, or the "
            f"name of one; got {precision!r}."
        ) from None


def _known(x: Any) -> np.ndarray:
    """The value of an argument; of one that is traced, or of no shape, None."""
    try:
        return np.asarray(x)
    except (TypeError, ValueError):  # Tracers included.
        return np.asarray(None)
