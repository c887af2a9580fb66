"""Functions for the Triton code of any operation."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """The hyperbolic tangent. Near zero a polynomial keeps its relative error below 1e-6."""
    square = x * x
    near = x * (1 + square * (-0.33333334 + square * (0.13333334 - 0.053968254 * square)))
    far = 1 - 2 / (tl.exp2(2.8853900817779268 * x) + 1)
    return tl.where(square < 0.01, near, far)
