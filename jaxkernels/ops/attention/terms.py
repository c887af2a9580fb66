"""Terms: what hides the logits of an attention (mask terms), and what changes them (score terms).

A term is a frozen dataclass. `AttentionSpec.mask_terms` and `AttentionSpec.score_terms` list those of a spec; the
reference, the kernels and their planning read these lists. A new kind of mask or of score is a new class:

- a mask term says with `visible` which pairs of a query and a key see each other. It may also say which keys a range of
  queries sees, and the other way round: kernels then skip whole blocks;
- a score term says with `change` how a logit changes, and with `slope` what the derivative is.

Queries count from the start of the sequence, keys from the first key.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxkernels.ops.attention.spec import Extras

__all__ = [
    "Band",
    "Bias",
    "DenseMask",
    "Lengths",
    "MaskTerm",
    "Places",
    "ScoreTerm",
    "Segments",
    "SoftCap",
    "group_heads",
    "largest",
    "least",
]


@dataclasses.dataclass(frozen=True)
class Places:
    """Where all logits of an attention are, and the operands that terms read.

    Attributes:
      query: (T, 1) int32, places in the sequence.
      key: (1, S) int32.
      num_kv_heads: K.
      extras: the optional operands.
    """

    query: jax.Array
    key: jax.Array
    num_kv_heads: int
    extras: Extras


class MaskTerm:
    """What hides logits.

    The ranges are half-open. Their ends may be Python numbers, scalars in a kernel or arrays. A range that ends before
    it begins is empty. `keys_seen_by_any` and `queries_that_see_any` may be larger than need be, and must agree: a
    block of queries is in the range of a block of keys exactly if the block of keys is in its range. The ranges of
    `_all` may be smaller than need be. The defaults always hold: every block is visited, and every block is masked.

    Attributes:
      shows_a_key: whether every query sees a key. Otherwise averages are computed for those that see none.
    """

    shows_a_key: bool = False

    def visible(self, query: Any, key: Any) -> Any:
        """Which pairs see each other: int32 arrays of one shape, or that broadcast, to a bool array."""
        raise NotImplementedError

    def visible_pairs(self, places: Places) -> jax.Array:
        """Which pairs of a whole attention see each other: bool, broadcastable to (B, N, T, S)."""
        return self.visible(places.query, places.key)[None, None]

    def keys_seen_by_any(self, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
        """The keys before `key_end` that some query of a range sees."""
        return 0, key_end

    def keys_seen_by_all(self, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
        """The keys before `key_end` that every query of a range sees."""
        return 0, 0

    def queries_that_see_any(self, key_start: Any, key_end: Any, query_start: Any, query_end: Any) -> tuple[Any, Any]:
        """The queries, of those from `query_start` to `query_end`, that see some key of a range."""
        return query_start, query_end

    def queries_that_see_all(self, key_start: Any, key_end: Any, query_start: Any, query_end: Any) -> tuple[Any, Any]:
        """The queries, of those from `query_start` to `query_end`, that see every key of a range."""
        return query_start, query_start


class ScoreTerm:
    """What changes logits."""

    def change(self, logit: Any, query: Any, key: Any) -> Any:
        """The logits after the term: arrays of one shape, or that broadcast."""
        raise NotImplementedError

    def slope(self, logit: Any, query: Any, key: Any) -> Any:
        """The derivative of `change` by the logit, at the logits before the term."""
        raise NotImplementedError

    def apply(
        self, logits: jax.Array, unit: float, visible: jax.Array | None, places: Places
    ) -> tuple[jax.Array, float, jax.Array | None]:
        """`change` and `slope` of a whole attention: logits and unit after the term, and the slope; None for 1.

        Args:
          logits: (B, K, G, T, S), over `unit`.
          visible: which are not masked, or None. What is masked must not make a slope NaN.
        """
        logits = logits * unit if visible is None else jnp.where(visible, logits * unit, 0)
        slope = self.slope(logits, places.query, places.key)
        return self.change(logits, places.query, places.key), 1.0, slope


# Masks.


@dataclasses.dataclass(frozen=True)
class Band(MaskTerm):
    """A causal mask and a local window: query i sees keys i - left <= j <= i + right; None leaves a side open."""

    left: int | None
    right: int | None

    def visible(self, query: Any, key: Any) -> Any:
        sides: list[Any] = []
        if self.right is not None:
            sides.append((query >= key - self.right) if self.right else (key <= query))
        if self.left is not None:
            sides.append(query <= key + self.left)
        return functools.reduce(jnp.logical_and, sides)

    def keys_seen_by_any(self, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
        start = 0 if self.left is None else largest(query_start - self.left, 0)
        return start, key_end if self.right is None else least(query_end + self.right, key_end)

    def keys_seen_by_all(self, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
        start = 0 if self.left is None else largest(query_end - 1 - self.left, 0)
        return start, key_end if self.right is None else least(query_start + self.right + 1, key_end)

    def queries_that_see_any(self, key_start: Any, key_end: Any, query_start: Any, query_end: Any) -> tuple[Any, Any]:
        start = query_start if self.right is None else largest(key_start - self.right, query_start)
        return start, query_end if self.left is None else least(key_end + self.left, query_end)

    def queries_that_see_all(self, key_start: Any, key_end: Any, query_start: Any, query_end: Any) -> tuple[Any, Any]:
        start = query_start if self.right is None else largest(key_end - 1 - self.right, query_start)
        return start, query_end if self.left is None else least(key_start + self.left + 1, query_end)


@dataclasses.dataclass(frozen=True)
class DenseMask(MaskTerm):
    """An array: the operand `mask`."""

    def visible_pairs(self, places: Places) -> jax.Array:
        assert places.extras.mask is not None
        return places.extras.mask


@dataclasses.dataclass(frozen=True)
class Lengths(MaskTerm):
    """Lengths of the sequences: the operands `query_lengths` and `key_lengths`, or one of them."""

    queries: bool
    keys: bool

    def visible_pairs(self, places: Places) -> jax.Array:
        sides = []
        if self.queries:
            assert places.extras.query_lengths is not None
            sides.append((places.query[:, 0] < places.extras.query_lengths[:, None])[:, None, :, None])
        if self.keys:
            assert places.extras.key_lengths is not None
            sides.append((places.key < places.extras.key_lengths[:, None])[:, None, None, :])
        return functools.reduce(jnp.logical_and, sides)


@dataclasses.dataclass(frozen=True)
class Segments(MaskTerm):
    """A query sees the keys of its own segment: the operands `query_segments` and `key_segments`."""

    def visible_pairs(self, places: Places) -> jax.Array:
        query_ids, key_ids = places.extras.query_segments, places.extras.key_segments
        assert query_ids is not None
        assert key_ids is not None
        return (query_ids[:, :, None] == key_ids[:, None, :])[:, None]


# Scores.


@dataclasses.dataclass(frozen=True)
class Bias(ScoreTerm):
    """An array that is added: the operand `bias`."""

    def apply(
        self, logits: jax.Array, unit: float, visible: jax.Array | None, places: Places
    ) -> tuple[jax.Array, float, jax.Array | None]:
        assert places.extras.bias is not None
        return (logits * unit + group_heads(places.extras.bias, places.num_kv_heads)).astype(logits.dtype), 1.0, None


@dataclasses.dataclass(frozen=True)
class SoftCap(ScoreTerm):
    """cap * tanh(logit / cap)."""

    cap: float

    def change(self, logit: Any, query: Any, key: Any) -> Any:
        return self.cap * jnp.tanh(logit / self.cap)

    def slope(self, logit: Any, query: Any, key: Any) -> Any:
        return 1 - jnp.tanh(logit / self.cap) ** 2

    def apply(
        self, logits: jax.Array, unit: float, visible: jax.Array | None, places: Places
    ) -> tuple[jax.Array, float, jax.Array | None]:
        if visible is not None:  # A masked bias may be NaN, and then so would be the slope.
            logits = jnp.where(visible, logits, 0)
        t = jnp.tanh(logits * (unit / self.cap))
        return t, self.cap, 1 - t**2


# What terms are computed with.


def group_heads(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """(B|1, N|1, T|1, S|1) -> (B|1, K|1, G|1, T|1, S|1)."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], num_kv_heads, x.shape[1] // num_kv_heads, *x.shape[2:])


def least(*xs: Any) -> Any:
    """The least of numbers, scalars in a kernel or arrays."""
    return _reduce(min, jnp.minimum, xs)


def largest(*xs: Any) -> Any:
    """The largest of numbers, scalars in a kernel or arrays."""
    return _reduce(max, jnp.maximum, xs)


def _reduce(of_numbers: Callable[..., Any], of_arrays: Callable[..., Any], xs: tuple[Any, ...]) -> Any:
    pick = lambda *pair: (of_numbers if all(isinstance(x, int | np.integer) for x in pair) else of_arrays)(*pair)
    return functools.reduce(pick, xs)
