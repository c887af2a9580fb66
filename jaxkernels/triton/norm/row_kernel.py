"""What the Triton kernels of norms share: reading and writing tiles of rows.

A tile has rows along its first axis and features along its second. Past the end of rows and features it holds zeros.
"""

# Triton compiles these functions; pyright does not know its types of values in kernels.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rows_of(tile, group, p: tl.constexpr):
    """The rows of a tile: their indices among all rows, and whether they are in the group. Both are (block_rows,)."""
    BLOCK: tl.constexpr = p.block_rows
    row = tile * BLOCK + tl.arange(0, BLOCK)
    return group.to(tl.int64) * p.num_rows + row, row < p.num_rows


@triton.jit
def columns_of(start, p: tl.constexpr):
    BLOCK: tl.constexpr = p.block_features
    return start + tl.arange(0, BLOCK)


@triton.jit
def load_raw(pointer, row, is_row, column, p: tl.constexpr):
    """(block_rows, columns) in the array's dtype."""
    inside = is_row[:, None] & (column < p.num_features)[None, :]
    return tl.load(pointer + row[:, None] * p.num_features + column[None, :], mask=inside, other=0.0)


@triton.jit
def load_tile(pointer, row, is_row, column, p: tl.constexpr):
    """(block_rows, columns) float32."""
    return load_raw(pointer, row, is_row, column, p).to(tl.float32)


@triton.jit
def store_tile(pointer, values, row, is_row, column, p: tl.constexpr):
    inside = is_row[:, None] & (column < p.num_features)[None, :]
    places = pointer + row[:, None] * p.num_features + column[None, :]
    tl.store(places, values.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_parameter(pointer, group, column, per_group: tl.constexpr, p: tl.constexpr):
    """A scale or a bias, or its tangent, of the group: (1, block_features) float32."""
    first = pointer
    if per_group:
        first = pointer + group.to(tl.int64) * p.num_features
    return tl.load(first + column, mask=column < p.num_features, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_scale(scale, group, column, p: tl.constexpr):
    """The factor of the normalized rows."""
    return load_parameter(scale, group, column, p.scale_per_group, p) + p.scale_offset


@triton.jit
def load_statistics(mean, rstd, row, is_row, p: tl.constexpr):
    """Mean (0 for an RMS norm) and reciprocal standard deviation of each row, as (block_rows, 1)."""
    center = is_row[:, None].to(tl.float32) * 0.0
    if p.centered:
        center = tl.load(mean + row, mask=is_row, other=0.0)[:, None]
    return center, tl.load(rstd + row, mask=is_row, other=0.0)[:, None]


@triton.jit
def mean_of(total, p: tl.constexpr):
    """The mean over the features, from the sum of a tile over its second axis: (block_rows, 1)."""
    return tl.div_rn(total, tl.full(total.shape, p.num_features, tl.float32))[:, None]


@triton.jit
def joined(first, rest):
    """The sum of two sums over a row, (1,) each. They become scalars, which have no layout.

    The sum of two vectors has one layout. Triton would move all the numbers that one of them is the sum of into it.
    """
    return tl.full(first.shape, 0.0, tl.float32) + (tl.sum(first, axis=0) + tl.sum(rest, axis=0))
