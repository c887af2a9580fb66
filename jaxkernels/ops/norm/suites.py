"""Norms that are timed, each suite with the source of its shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxkernels.core.problems import Problem, Suite, both_ways
from jaxkernels.ops.norm.cases import NormCase

__all__ = ["SUITES"]


def _llm() -> Iterator[Problem]:
    for features, residual in itertools.product((1024, 2048, 4096, 5120, 8192, 16384), (False, True)):
        yield from both_ways(NormCase((16384,), features, residual=residual))
    for features in (1024, 4096, 12288):
        yield from both_ways(NormCase((16384,), features, centered=True, bias=True))


def _norm_smoke() -> Iterator[Problem]:
    case = NormCase((64,), 256, dtype="float32")
    yield from both_ways(case)
    yield from both_ways(NormCase((64,), 200, residual=True, dtype="float32"))
    yield from both_ways(NormCase((64,), 256, centered=True, bias=True, dtype="float32"))


#: In the order in which they run.
SUITES: tuple[Suite, ...] = (
    Suite("norm-smoke", "norm", "our own: small enough for any machine", tuple(_norm_smoke()), is_small=True),
    Suite("norm-llm", "norm", "widths of language models, 16384 tokens; layer norms as GPT-3 (arXiv:2005.14165)",
          tuple(_llm())),
)  # fmt: skip
