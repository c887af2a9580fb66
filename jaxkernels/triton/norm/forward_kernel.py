"""The Triton code of norms' forward pass (see `jaxkernels.triton.norm.forward`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.norm.row_kernel import (
    columns_of,
    joined,
    load_parameter,
    load_scale,
    load_tile,
    mean_of,
    rows_of,
    store_tile,
)


@triton.jit
def norm_forward(x, residual, scale, bias, out, sums, mean, rstd, p: tl.constexpr):
    """One program: every num_programs-th tile of a group. Operands and results that a norm lacks are not touched."""
    group = tl.program_id(1)
    for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=p.num_stages):
        row, is_row = rows_of(tile, group, p)
        if p.is_whole:
            center, factor = whole_rows(x, residual, scale, bias, out, sums, group, row, is_row, p)
        else:
            center, factor = statistics(x, residual, row, is_row, p)
            for start in range(0, p.num_features, p.block_features):
                column = columns_of(start, p)
                z = load_sum(x, residual, row, is_row, column, p)
                finish(z, center, factor, scale, bias, out, sums, group, row, is_row, column, p)
        if p.centered:
            tl.store(mean + row[:, None], center, mask=is_row[:, None])
        tl.store(rstd + row[:, None], factor, mask=is_row[:, None])


@triton.jit
def whole_rows(x, residual, scale, bias, out, sums, group, row, is_row, p: tl.constexpr):
    """Mean and reciprocal standard deviation of a tile of whole rows, which is normalized and stored.

    A row has one or two blocks of columns: the second one has the features that the first one lacks.
    """
    BLOCK_FEATURES: tl.constexpr = p.block_features
    BLOCK_REST: tl.constexpr = p.block_rest
    column = columns_of(0, p)
    z = load_sum(x, residual, row, is_row, column, p)
    if BLOCK_REST:
        rest = BLOCK_FEATURES + tl.arange(0, BLOCK_REST)
        z_rest = load_sum(x, residual, row, is_row, rest, p)
    center = is_row[:, None].to(tl.float32) * 0.0
    if p.centered:
        total = tl.sum(z, axis=1)
        if BLOCK_REST:
            total = joined(total, tl.sum(z_rest, axis=1))
        center = mean_of(total, p)
    total = tl.sum(squares(z, center, column, p), axis=1)
    if BLOCK_REST:
        total = joined(total, tl.sum(squares(z_rest, center, rest, p), axis=1))
    factor = inverse_root(total, p)
    finish(z, center, factor, scale, bias, out, sums, group, row, is_row, column, p)
    if BLOCK_REST:
        finish(z_rest, center, factor, scale, bias, out, sums, group, row, is_row, rest, p)
    return center, factor


@triton.jit
def statistics(x, residual, row, is_row, p: tl.constexpr):
    """Mean and reciprocal standard deviation of rows that are read in chunks."""
    BLOCK_ROWS: tl.constexpr = p.block_rows
    BLOCK_FEATURES: tl.constexpr = p.block_features
    center = tl.full((BLOCK_ROWS, 1), 0.0, tl.float32)
    if p.centered:
        total = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
        for start in range(0, p.num_features, p.block_features):
            total += load_sum(x, residual, row, is_row, columns_of(start, p), p)
        center = mean_of(tl.sum(total, axis=1), p)
    total = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
    for start in range(0, p.num_features, p.block_features):
        column = columns_of(start, p)
        total += squares(load_sum(x, residual, row, is_row, column, p), center, column, p)
    return center, inverse_root(tl.sum(total, axis=1), p)


@triton.jit
def load_sum(x, residual, row, is_row, column, p: tl.constexpr):
    """z: x, or the sum rounded to x's dtype."""
    z = load_tile(x, row, is_row, column, p)
    if p.residual:
        z = (z + load_tile(residual, row, is_row, column, p)).to(x.dtype.element_ty).to(tl.float32)
    return z


@triton.jit
def squares(z, center, column, p: tl.constexpr):
    """(z - center)^2, and 0 past the last feature."""
    z = tl.where((column < p.num_features)[None, :], z - center, 0.0)
    return z * z


@triton.jit
def inverse_root(total, p: tl.constexpr):
    """1 / sqrt(mean + eps) of the sum of squares, rounded correctly: (block_rows, 1)."""
    variance = mean_of(total, p) + p.eps
    return tl.div_rn(tl.full(variance.shape, 1.0, tl.float32), tl.sqrt_rn(variance))


@triton.jit
def finish(z, center, factor, scale, bias, out, sums, group, row, is_row, column, p: tl.constexpr):
    """Normalizes, scales and stores a tile."""
    if p.residual:
        store_tile(sums, z, row, is_row, column, p)
    y = (z - center) * factor
    if p.scale:
        y = y * load_scale(scale, group, column, p)
    if p.bias:
        y = y + load_parameter(bias, group, column, p.bias_per_group, p)
    store_tile(out, y, row, is_row, column, p)
