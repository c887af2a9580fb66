"""The SGEMM ladder: C = alpha A B + beta C in float32 on CUDA cores, one kernel file for each step.

    c = sgemm(a, b, rung=10)

`ladder` has the table of rungs, docs/sgemm.md the explanations.
"""

from jaxkernels.ffi.sgemm.ladder import RUNGS, Config, Rung, choose, estimate, lookup, search_space, sgemm

__all__ = ["RUNGS", "Config", "Rung", "choose", "estimate", "lookup", "search_space", "sgemm"]
