"""Specs as plain values, for JSON, and back."""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import SHORT_NAMES, ArrayType

__all__ = ["describe", "restore"]

_ENUMS: dict[str, type[enum.Enum]] = {"Precision": jax.lax.Precision, "DotAlgorithmPreset": jax.lax.DotAlgorithmPreset}
_DTYPES = {short: name for name, short in SHORT_NAMES.items()}


def describe(spec: Any) -> dict[str, Any] | None:
    """A spec's fields as plain values, without its target. None if it has no such form (a size that is not known yet).

    A field with its default is left out: if a field is added to a spec later, older descriptions stay valid.
    """
    try:
        return {
            field.name: _plain(value)
            for field in dataclasses.fields(spec)
            if field.name != "target" and not _is_default(value := getattr(spec, field.name), field)
        }
    except TypeError:
        return None


def restore[S](kind: Callable[..., S], values: dict[str, Any], target: Chip) -> S:
    """The spec that was described.

    Args:
      kind: the class of the spec.
      values: its description.
      target: the chip.

    Raises:
      ValueError: the values describe no spec of this class, or not all of it.
    """
    hints = _hints(kind)
    try:
        fields = {name: jnp.dtype(x) if hints[name] is np.dtype else _restored(x) for name, x in values.items()}
        spec = kind(**fields, target=target)
        has_arrays = all(isinstance(x, ArrayType) for name, x in fields.items() if hints[name] is ArrayType)
        if has_arrays and describe(spec) == values:
            return spec
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"{values} do not describe a {kind.__qualname__}: {e}") from e
    raise ValueError(f"{values} do not describe all of a {kind.__qualname__}")


#: The types of a class's fields, which take long to look up.
_hints = functools.cache(typing.get_type_hints)


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        if any(isinstance(item, str) and "." not in item for item in value):
            raise ValueError(f"{value} is a jax.lax.DotAlgorithm, which is not read back")
        return tuple(map(_restored, value))
    if not isinstance(value, str):
        return value
    if found := re.fullmatch(r"(\w+)\[([\d,]*)\]", value):
        dtype, sizes = found.groups()
        return ArrayType(tuple(map(int, filter(None, sizes.split(",")))), jnp.dtype(_DTYPES.get(dtype, dtype)))
    name, dot, member = value.partition(".")
    return _ENUMS[name][member] if dot else value


def _is_default(value: Any, field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING and value == field.default


def _plain(value: Any) -> Any:
    """A value of a spec for JSON. Raises TypeError where it has no stable form."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, ArrayType):
        if not all(isinstance(size, int) for size in value.shape):
            raise TypeError(f"{value} has a symbolic size")
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, np.dtype):
        return value.name
    # The scalar types of a `jax.lax.DotAlgorithm`, numpy's or jax.numpy's.
    if (isinstance(value, type) and issubclass(value, np.generic)) or isinstance(
        getattr(value, "dtype", None), np.dtype
    ):
        return np.dtype(value).name
    raise TypeError(f"{value!r} has no form in JSON")
