"""Planted bugs: a named part of a module is replaced by a faulty version."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["Fault"]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A faulty version of a named part.

    Attributes:
      part: "module:function", "module:constant" or "module:Class.method".
      make: makes the faulty version of the right one. For a property, it takes and returns the property.
    """

    part: str
    make: Callable[[Any], Any]

    @property
    def module(self) -> str:
        return self.part.partition(":")[0]

    @property
    def name(self) -> str:
        return self.part.rpartition(":")[2].rpartition(".")[2]

    def right(self, module: Any) -> Any:
        """The part as it is in a module. Raises AttributeError if there is none."""
        return inspect.getattr_static(self._owner(module), self.name)

    def plant(self, module: Any) -> None:
        """Puts the faulty version into a module."""
        setattr(self._owner(module), self.name, self.make(self.right(module)))

    def _owner(self, module: Any) -> Any:
        *classes, _ = self.part.partition(":")[2].split(".")
        return functools.reduce(getattr, classes, module)
