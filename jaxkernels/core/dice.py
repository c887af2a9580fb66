"""Random choices that stay the same for a seed, from which operations draw problems."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = ["LARGEST", "Dice"]

#: The largest dimension that is drawn.
LARGEST = 32768

#: A problem that is too large is redrawn at most so often.
_MAX_ATTEMPTS = 10_000


class Dice:
    """Draws random numbers for one problem.

    The numbers follow from the seed and from the problem's index alone: the problem at an index does not depend on how
    many are drawn. The bit generator is PCG64, and only its uniform numbers are used. NumPy keeps both stable.

    Args:
      seed: the seed of the run.
      index: the index of the problem.
      largest: the largest size.
    """

    def __init__(self, seed: int, index: int, largest: int = LARGEST):
        self.largest = largest
        self._rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(index,))))

    def chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def choose[T](self, weights: Mapping[T, float]) -> T:
        """One of the keys, with a probability in proportion to its weight."""
        left = self._rng.random() * math.fsum(weights.values())
        *others, last = weights
        for value in others:
            left -= weights[value]
            if left < 0:
                return value
        return last

    def size(self, least: int = 1, most: int | None = None) -> int:
        """A log-uniform integer from `least` to `most` (default: `largest`)."""
        most = max(self.largest if most is None else min(most, self.largest), least)
        low, high = math.log(least), math.log(most + 1)
        return min(int(math.exp(low + (high - low) * self._rng.random())), most)

    def until[T](self, draw: Callable[[], T], accepts: Callable[[T], Any]) -> T:
        """Draws until a draw is accepted."""
        for _ in range(_MAX_ATTEMPTS):
            if accepts(drawn := draw()):
                return drawn
        raise AssertionError(f"none of {_MAX_ATTEMPTS} draws was accepted; the last was {drawn}")
