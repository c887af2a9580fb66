"""What benchmarks time: problems in suites, and the other ways to compute a problem that they are compared with."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxkernels.core.cases import Case, Direction
from jaxkernels.core.hardware import Chip

__all__ = ["PLAIN_JAX", "Baseline", "Contender", "Problem", "Suite", "both_ways", "needs_cuda"]


@dataclasses.dataclass(frozen=True)
class Problem[C: Case]:
    """One line of a suite.

    Attributes:
      case: what is computed.
      direction: "forward", or "backward": the gradients alone, from what the forward pass saved. Of a product they are
        those of every operand, of an attention those of query, key and value.
      label: what the shape is, where it has a name.
      kinds: the groups in which a summary of random problems counts it.
    """

    case: C
    direction: Direction = "forward"
    label: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def op(self) -> str:
        return self.case.kind

    def key(self, suite: str) -> tuple[str, ...]:
        """What makes it the same in two runs, as `Row.problem`."""
        return suite, self.shape, self.case.dtype

    @property
    def shape(self) -> str:
        """The case in a few words, without its dtype: sizes, then what is not plain."""
        return self.case.description + (" backward" if self.direction == "backward" else "")

    @property
    def flops(self) -> float:
        """FLOPs the work needs: two for each multiply-add, whatever a kernel computes again."""
        return self.case.flops if self.direction == "forward" else self.case.gradient_flops

    @property
    def num_bytes(self) -> int:
        """Bytes that must cross the memory bus: each operand and each result once."""
        return self.case.num_bytes(self.direction)

    @property
    def num_exps(self) -> float:
        """Exponentials the work needs, in either direction."""
        return self.case.num_exps


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named list of problems.

    Attributes:
      name, op: e.g. "gemm-square", "gemm".
      source: where the shapes come from.
      problems: the problems; none for training, whose problem is the preset itself.
      is_small: a CPU finishes it in seconds.
    """

    name: str
    op: str
    source: str
    problems: tuple[Problem, ...] = ()
    is_small: bool = False


def both_ways(*cases: Case) -> Iterator[Problem]:
    """The forward and the backward pass of each case."""
    for case in cases:
        yield Problem(case, "forward")
        yield Problem(case, "backward")


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute a problem.

    Attributes:
      name: as rows show it: the baseline's name, and the variant where there are several.
      function: operands -> result, of the problem's forward pass.
      prepare: operands as the function wants them, not timed.
      finish: turns its result, or its gradients by name, into the problem's: not timed either.
      compiler_options: XLA's, as `jax.jit` takes them; alternatives in order.
      wanted: text that the compiled program must hold, or the next compiler options are tried; "": anything will do.
    """

    name: str
    function: Callable[[dict[str, jax.Array]], Any]
    prepare: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = lambda operands: operands
    finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda results: results
    compiler_options: tuple[dict[str, Any], ...] = ({},)
    wanted: str = ""


@dataclasses.dataclass(frozen=True)
class Baseline:
    """A named alternative.

    Attributes:
      refuses: why it cannot take a problem on a chip, or None. What only compiling shows need not be said here.
      contenders: its variants for a problem it does not refuse; the fastest counts.
      yields: why it is timed only if no other baseline compiles, or None.
    """

    refuses: Callable[[Problem[Any], Chip], str | None]
    contenders: Callable[[Problem[Any]], Iterator[Contender]]
    yields: Callable[[Problem[Any], Chip], str | None] = lambda problem, chip: None


#: The problem in plain JAX, which XLA compiles.
PLAIN_JAX = Baseline(lambda problem, chip: None, lambda problem: iter([Contender("xla", problem.case.plain)]))


def needs_cuda(chip: Chip) -> str | None:
    """Why a library for CUDA devices cannot serve the chip, or None."""
    return None if chip.platform == "cuda" else f"runs on cuda devices, this is {chip}"
