"""Shared by the tests of the attention kernels."""

from __future__ import annotations

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["extra_types"]


def extra_types(spec: AttentionSpec) -> list[ArrayType]:
    """The types of the optional operands that follow q, k and v, in order."""
    arrays = spec.arrays()
    return [arrays[name].type for name in spec.extra_names]
