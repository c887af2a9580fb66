"""A kernel that stores the ranges of blocks that attention kernels visit."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false

import triton
import triton.language as tl

from jaxkernels.triton.attention import tile_kernel


@triton.jit
def store_ranges(
    out, p: tl.constexpr, offset: tl.constexpr, query_end: tl.constexpr, key_end: tl.constexpr,
    over_queries: tl.constexpr,
):  # fmt: skip
    """One program for each block."""
    block = tl.program_id(0)
    zero = block * 0
    at = tile_kernel.Place(zero, zero + offset, zero + query_end, zero + key_end)
    ranges = tile_kernel.visited(out, block * 0, block, at, p, over_queries)
    for i in tl.static_range(4):
        tl.store(out + 4 * block + i, ranges[i])
