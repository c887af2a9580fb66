"""The benchmark suites of the operation."""

from __future__ import annotations

from jaxkernels.core.problems import Suite, both_ways
from toy_operation.cases import ScaleRowsCase

SUITES = (Suite("scale-rows-smoke", "scale-rows", "made up", tuple(both_ways(ScaleRowsCase(64, 32))), is_small=True),)
