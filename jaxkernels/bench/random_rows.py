"""Random problems for `jaxkernels bench --random`.

The module `random_problems` of each operation (`jaxkernels/ops/<op>/random_problems.py`) draws them, and states how
often each kind is drawn. The problem at an index follows from the seed, the index and the largest
size alone.
"""

from __future__ import annotations

import dataclasses
import re
from types import ModuleType

from jaxkernels.bench.suites import kinds, registry_name
from jaxkernels.core import registry
from jaxkernels.core.dice import LARGEST, Dice
from jaxkernels.core.errors import InputError
from jaxkernels.core.problems import Problem

__all__ = ["is_random", "problems", "suite_name"]

_NAME = re.compile(r"\w+-random-\d+(-to-\d+)?")


def suite_name(op: str, seed: int, largest: int = LARGEST) -> str:
    """The suite of rows in JSON: all rows of a seed, however many are drawn."""
    return f"{op}-random-{seed}" + (f"-to-{largest}" if largest != LARGEST else "")


def is_random(suite: str) -> bool:
    """Whether a suite holds random problems."""
    return _NAME.fullmatch(suite) is not None


def problems(op: str, count: int, seed: int, largest: int = LARGEST, *, command: str = "bench") -> list[Problem]:
    """The first problems of a seed, labelled with their index.

    Args:
      op: the operation's name on the command line.
      count: the number of problems.
      seed: the seed.
      largest: the largest size.
      command: who asks, for messages.

    Raises:
      InputError: the operation has no random problems.
    """
    if (module := _module(op)) is None:
        known = [name for name in kinds() if _module(name) is not None]
        raise InputError(f"{command}: {op} takes no --random; use {' or '.join(known)}.")
    drawn = (module.draw(Dice(seed, index, largest)) for index in range(count))
    return [dataclasses.replace(problem, label=f"#{index}") for index, problem in enumerate(drawn)]


def _module(op: str) -> ModuleType | None:
    name = registry_name(op)
    return None if name is None else registry.part(name, "random_problems")
