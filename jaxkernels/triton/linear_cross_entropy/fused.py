"""Linear cross entropy's fused pass with a Triton kernel (see `jaxkernels.triton.linear_cross_entropy.problem`)."""

from __future__ import annotations

import functools

from jaxkernels.ops.linear_cross_entropy.spec import FUSED
from jaxkernels.triton.linear_cross_entropy import passes
from jaxkernels.triton.linear_cross_entropy.problem import (
    VERSION,
    Config,
    search_space,
    shortlist,
    unpreferred,
    unsupported,
)

__all__ = ["VERSION", "Config", "run", "search_space", "shortlist", "unpreferred", "unsupported"]

run = functools.partial(passes.run, FUSED)
