"""Operations as named arrays: what their kernels read and write, and what follows from the names.

A spec names every array of its operation, and says in which order a kernel takes and returns them. From that follow
the packing of a primitive's operands, the types of its results, its rule under vmap, its factors on a mesh, the
operands that it is tuned on, and its text.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import jax
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.core.cases import Cut, random_on_device
from jaxkernels.core.sharding import Factors, Label
from jaxkernels.core.types import ArrayType

__all__ = ["GIVEN", "Operand", "Spec"]


class _Given(ArrayType):
    def __str__(self) -> str:
        return "given"


#: Stands for the type of an operand that is given, where its type is not known or not wanted.
GIVEN = _Given((), np.dtype(bool))


@dataclasses.dataclass(frozen=True)
class Operand:
    """An array that kernels of an operation read or write.

    Attributes:
      type: its shape and dtype.
      axes: a label for each axis, as an einsum's (see `jaxkernels.core.sharding`); None: one device holds it whole.
      broadcasts: whether an axis of size 1 stands for all of its label's size.
      draw: makes values to tune on; None: random numbers of the dtype.
    """

    type: ArrayType
    axes: tuple[Label, ...]
    broadcasts: bool = False
    draw: Callable[[], np.ndarray] | None = None

    @property
    def labels(self) -> tuple[Label, ...]:
        """The axes that may be split over a mesh; None for the others."""
        return tuple(
            None if self.broadcasts and size == 1 else label for size, label in zip(self.type.shape, self.axes)
        )

    def place(self, label: str) -> int | None:
        """The index of the axis with this label, or None."""
        return self.axes.index(label) if label in self.axes else None


class Spec:
    """What one kernel call computes: a frozen, hashable dataclass.

    Fields that hold an `ArrayType` are types of the operands of their name. The other fields are the chip and what is
    static. A primitive carries its spec without the types, which its operands have.

    Attributes:
      target: the chip; any where the spec is not for a kernel.
      batch_axis: label of the axis that takes in the axes of vmap.
    """

    batch_axis: ClassVar[str] = "b"
    target: hardware.Chip

    # What a subclass defines.

    def inputs(self, kernel: str) -> tuple[str, ...]:
        """Names of a kernel's operands, in order. They do not depend on types."""
        raise NotImplementedError

    def outputs(self, kernel: str) -> tuple[str, ...]:
        """Names of a kernel's results, in order. They do not depend on types."""
        raise NotImplementedError

    def arrays(self) -> Mapping[str, Operand]:
        """Every array that a kernel of the operation reads or writes, by name."""
        raise NotImplementedError

    @property
    def factor_sizes(self) -> Mapping[str, int]:
        """Sizes of the minor factors of compound labels."""
        return {}

    @property
    def margin(self) -> float | None:
        """By how much a backend must be estimated to be faster than XLA, in place of `jaxkernels.core.times.MARGIN`."""
        return None

    @property
    def xla_may_merge(self) -> bool:
        """Whether XLA may compute it in one kernel with the operation that makes an operand, and so take much less time
        than estimated. A comparison then has XLA, whatever its estimate."""
        return False

    @property
    def shared(self) -> str | None:
        """An operand that another kernel of the program most likely has, too, and of which both share a copy. None if
        there is none. A comparison times pairs of calls that share it."""
        return None

    @property
    def alone(self) -> Self:
        """The same kernel without an operand that is `shared`: what `jk.autotune` measures."""
        return self

    @property
    def may_scatter(self) -> bool:
        """Whether a sum over shards may leave each shard with a slice of the result."""
        return True

    def used(self, kernel: str) -> tuple[str, ...]:
        """Names of the results that the program uses, in order. Kernels are timed without the others: XLA leaves out
        the work for them where it computes the kernel itself."""
        return self.outputs(kernel)

    # What follows.

    @property
    def typed_fields(self) -> tuple[str, ...]:
        """The fields that hold types of operands, in order."""
        fields = dataclasses.fields(self)  # pyright: ignore[reportArgumentType]
        return tuple(field.name for field in fields if isinstance(getattr(self, field.name), ArrayType))

    # Every eager call asks for it. The cache is bounded, and a spec holds no arrays.
    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def untyped(self) -> Self:
        """The spec without its operands' types and without its chip."""
        return self._replace(target=hardware.host(), **dict.fromkeys(self.typed_fields, GIVEN))

    def typed(self, kernel: str, types: Sequence[ArrayType], target: hardware.Chip | None = None) -> Self:
        """The spec with the types of a kernel's operands, for a chip or for none."""
        named = self.named(kernel, types)
        return self._replace(target=target or hardware.host(), **{name: named[name] for name in self.typed_fields})

    def named[T](self, kernel: str, values: Sequence[T]) -> dict[str, T]:
        """Names what is in the order of a kernel's operands."""
        return dict(zip(self.inputs(kernel), values, strict=True))

    def pack[T](self, kernel: str, named: Mapping[str, T]) -> tuple[T, ...]:
        """Puts what is named into the order of a kernel's operands."""
        return tuple(named[name] for name in self.inputs(kernel))

    def results(self, kernel: str) -> list[ArrayType]:
        """Types of a kernel's results."""
        arrays = self.arrays()
        return [arrays[name].type for name in self.outputs(kernel)]

    def factors(self, kernel: str) -> Factors:
        """How a kernel's work may be split over a mesh."""
        arrays = self.arrays()
        labels = lambda names: tuple(arrays[name].labels for name in names)
        return Factors(
            labels(self.inputs(kernel)), labels(self.outputs(kernel)), self.factor_sizes, scatter=self.may_scatter
        )

    def draw(self, names: Sequence[str], device: Any, seed: int = 0) -> dict[str, jax.Array]:
        """Values of these arrays on a device, to tune on: the same ones every time."""
        arrays = self.arrays()
        drawn = [name for name in names if arrays[name].draw is None]
        random = dict(zip(drawn, random_on_device([arrays[name].type for name in drawn], device, seed)))
        made = {name: jax.device_put(draw(), device) for name in names if (draw := arrays[name].draw) is not None}
        return {name: (random | made)[name] for name in names}

    def part(self, kernel: str, sizes: Mapping[str, int]) -> tuple[Self, Cut, Cut]:
        """The first part of the problem, in which some factors have other sizes.

        Args:
          kernel: the kernel whose arrays are cut.
          sizes: factor -> its size in the part.

        Returns:
          The spec of the part, and what cuts its arrays out of the operands and out of the results that are used.
        """
        arrays = self.arrays()

        def stop(label: Label) -> int | None:
            factors = (label or "").split()
            if not factors or factors[0] not in sizes:
                return None
            return sizes[factors[0]] * math.prod(self.factor_sizes[minor] for minor in factors[1:])

        slices = {name: tuple(slice(stop(label)) for label in operand.labels) for name, operand in arrays.items()}
        smaller = lambda name: ArrayType(
            tuple(len(range(size)[cut]) for size, cut in zip(arrays[name].type.shape, slices[name])),
            arrays[name].type.dtype,
        )
        cut = lambda names: lambda xs: [x[slices[name]] for name, x in zip(names, xs, strict=True)]
        part = self._replace(**{name: smaller(name) for name in self.typed_fields})
        return part, cut(self.inputs(kernel)), cut(self.used(kernel))

    def __str__(self) -> str:
        """The operands with their types, then the static fields that have not their default."""
        words = [f"{name} {getattr(self, name)}" for name in self.typed_fields]
        for field in dataclasses.fields(self):  # pyright: ignore[reportArgumentType]
            value = getattr(self, field.name)
            if field.name == "target" or isinstance(value, ArrayType) or value == field.default:
                continue
            text = f"{value:.4g}" if isinstance(value, float) else value
            words.append(field.name if value is True else f"{field.name}={text}")
        return " ".join(words)

    def _replace(self, **changes: Any) -> Self:
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]
