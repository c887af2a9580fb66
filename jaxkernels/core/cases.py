"""What tests and benchmarks compute: the parts that the cases of every operation have in common."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.types import ArrayType

__all__ = [
    "Case", "Cut", "Direction", "Draw", "Operands", "Part", "Size", "by_name", "random_array", "random_on_device",
    "result_types",
]  # fmt: skip

Size = Literal["small", "real"]
Direction = Literal["forward", "backward"]
Operands = dict[str, np.ndarray]
#: Takes a part of each of some arrays.
Cut = Callable[[Sequence[Any]], list[Any]]


def random_array(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> np.ndarray:
    """Normal random numbers, drawn in float32 and rounded to `dtype`."""
    return (scale * rng.standard_normal(shape, dtype=np.float32)).astype(jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True)
class Draw:
    """An operand of normal random numbers: its shape, dtype and standard deviation."""

    shape: tuple[int, ...]
    dtype: str
    scale: float = 1.0

    def from_numpy(self, rng: np.random.Generator) -> np.ndarray:
        return random_array(rng, self.shape, self.dtype, self.scale)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


class Case(abc.ABC):
    """A problem of one operation, as data: a frozen dataclass with the sizes as fields.

    Attributes:
      kind: the operation's name on the command line of the benchmarks.
      form: how a shape is written there.
      one_reference: whether one compiled reference serves the forward pass, the gradients and every mask.
      dtype: the operands' dtype.
      precision: the float32 algorithm that the case asks for, or None.
    """

    kind: ClassVar[str]
    form: ClassVar[str]
    one_reference: ClassVar[bool] = False

    dtype: str
    precision: str | None = None

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """The case in a few words, without its dtype."""

    @property
    @abc.abstractmethod
    def draws(self) -> dict[str, Draw]:
        """The floating operands by name."""

    @property
    @abc.abstractmethod
    def out_type(self) -> Draw:
        """The result, or the first of several."""

    @property
    def further_out_types(self) -> dict[str, Draw]:
        """The other results by name."""
        return {}

    @property
    @abc.abstractmethod
    def moving(self) -> tuple[str, ...]:
        """Names of the operands whose gradients a benchmark computes."""

    @property
    @abc.abstractmethod
    def flops(self) -> int:
        """Operations that the forward pass needs."""

    @property
    @abc.abstractmethod
    def gradient_flops(self) -> float:
        """Operations that the gradients need."""

    @property
    def num_exps(self) -> float:
        """Exponentials that either direction needs."""
        return 0

    @abc.abstractmethod
    def num_bytes(self, direction: Direction) -> int:
        """Bytes that must cross the memory bus: each operand and each result once."""

    @classmethod
    @abc.abstractmethod
    def parse(cls, sizes: Sequence[int], options: Mapping[str, Any], words: Sequence[str]) -> Self | None:
        """The case of a shape on the command line, or None if the text has not the form."""

    def masks(self, rng: np.random.Generator) -> Operands:
        """The operands that are no numbers to compute with."""
        del rng
        return {}

    def operands(self, seed: int = 0) -> Operands:
        """All operands by name."""
        rng = np.random.default_rng(seed)
        return {name: draw.from_numpy(rng) for name, draw in self.draws.items()} | self.masks(rng)

    @abc.abstractmethod
    def forward(self, operands: dict[str, jax.Array], *, backend: str | None = None) -> Any:
        """The result that a benchmark times, by this package; a tuple if there are several (`result_types`)."""

    @abc.abstractmethod
    def letters(self, name: str, num_axes: int) -> str:
        """A letter for each axis of an operand or of the result, as `Part.slices` uses them."""

    def part_to_check(self, *, is_gradient: bool = False) -> Part:
        """The part of a result that a reference has time and memory for. All, if the operation says nothing else."""
        del is_gradient
        return Part(self)

    def for_reference(self) -> Self:
        """The case that the reference computes; its masks may be operands."""
        return self

    def with_masks(self, operands: dict[str, Any]) -> dict[str, Any]:
        """The operands of `for_reference`'s case, from those of this one: arrays or their types."""
        return operands

    @abc.abstractmethod
    def plain(self, operands: dict[str, Any]) -> Any:
        """The result in plain JAX, in the operands' dtype."""

    def reference(self, operands: dict[str, Any]) -> Any:
        """The result of `plain`, computed in as little memory as a check in float64 needs."""
        return self.plain(operands)


def result_types(case: Case) -> dict[str, Draw]:
    """The results of a case by name, "out" first."""
    return {"out": case.out_type, **case.further_out_types}


def by_name(case: Case, results: Any) -> dict[str, Any]:
    """Names what `Case.forward` returns, an array or a tuple, or its cotangents."""
    return dict(zip(result_types(case), results if isinstance(results, tuple) else (results,), strict=True))


@dataclasses.dataclass(frozen=True)
class Part:
    """What is checked of a result.

    Attributes:
      case: the part, as a case of its own.
      description: for the record: "all", or which part.
      slices: (letter, slice) of each axis that is not taken whole.
    """

    case: Any
    description: str = "all"
    slices: tuple[tuple[str, slice], ...] = ()

    def of(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """The part of operands, results or gradients ("d_query"); axes of length 1, which broadcast, stay."""
        slices, taken = dict(self.slices), {}
        for name, x in arrays.items():
            letters = self.case.letters(name.removeprefix("d_"), x.ndim)
            taken[name] = x[
                tuple(slices.get(y, slice(None)) if size > 1 else slice(None) for y, size in zip(letters, x.shape))
            ]
        return taken


#: Random numbers of a kind that arrays on a device take their values from: a prime number, so that no rows of equal
#: arrays repeat at short distances.
_POOL = 1_048_573
#: Two arrays begin so many numbers apart.
_APART = 65_537


def random_on_device(types: Sequence[ArrayType], device: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    """Random arrays on a device: the same ones every time.

    Floating ones are from N(0, 1), integers from 0 to 7, seven of eight booleans are True. They repeat a pool of about
    a million numbers. One program makes all of them. Compiled for an H200, it takes a sixth of the time of a program
    that draws them.
    """
    pools = {kind: _pool(kind, device) for kind in dict.fromkeys(map(_kind, types))}

    def take(pools: dict[str, jax.Array]) -> list[jax.Array]:
        found = []
        for i, array in enumerate(types):
            places = jax.lax.iota(jnp.uint32, math.prod(array.shape)) + np.uint32((16 * seed + i) * _APART % _POOL)
            found.append(pools[_kind(array)][places % np.uint32(_POOL)].reshape(array.shape).astype(array.dtype))
        return found

    return tuple(jax.jit(take, out_shardings=jax.sharding.SingleDeviceSharding(device))(pools))


def _kind(array: ArrayType) -> str:
    kinds = {"bool": jnp.bool_, "integer": jnp.integer}
    return next((name for name, kind in kinds.items() if jnp.issubdtype(array.dtype, kind)), "floating")


@functools.cache
def _pool(kind: str, device: Any) -> jax.Array:
    # The device's own generator is quick to compile.
    key, shape = jax.random.key(0, impl="rbg"), (_POOL,)
    draws = dict(
        bool=lambda: jax.random.bernoulli(key, 7 / 8, shape),
        integer=lambda: jax.random.randint(key, shape, 0, 8, jnp.int32),
        floating=lambda: jax.random.normal(key, shape, jnp.float32),
    )
    return jax.jit(draws[kind], out_shardings=jax.sharding.SingleDeviceSharding(device))()
