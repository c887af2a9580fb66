"""The Triton code of norms' tangent pass (see `jaxkernels.triton.norm.tangent`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.norm.row_kernel import (
    columns_of,
    load_parameter,
    load_scale,
    load_statistics,
    load_tile,
    mean_of,
    rows_of,
    store_tile,
)


@triton.jit
def norm_tangent(
    x, scale, mean, rstd, x_dot, residual_dot, scale_dot, bias_dot, out_dot, sum_dot, p: tl.constexpr,
):  # fmt: skip
    """One program: every num_programs-th tile of a group. Operands and results that a norm lacks are not touched."""
    BLOCK_ROWS: tl.constexpr = p.block_rows
    BLOCK_FEATURES: tl.constexpr = p.block_features
    group = tl.program_id(1)
    for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=p.num_stages):
        row, is_row = rows_of(tile, group, p)
        center, factor = load_statistics(mean, rstd, row, is_row, p)
        if p.is_whole:
            column = columns_of(0, p)
            v = load_change(x_dot, residual_dot, row, is_row, column, p)
            normalized = (load_tile(x, row, is_row, column, p) - center) * factor
            along = mean_of(tl.sum(normalized * v, axis=1), p)
            shift = mean_of(tl.sum(v, axis=1), p)
            finish(
                v, normalized, along, shift, factor, scale, scale_dot, bias_dot, out_dot, sum_dot, group, row, is_row,
                column, p,
            )  # fmt: skip
        else:
            products = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
            total = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
            for start in range(0, p.num_features, p.block_features):
                column = columns_of(start, p)
                v = load_change(x_dot, residual_dot, row, is_row, column, p)
                products += (load_tile(x, row, is_row, column, p) - center) * factor * v
                total += v
            along = mean_of(tl.sum(products, axis=1), p)
            shift = mean_of(tl.sum(total, axis=1), p)
            for start in range(0, p.num_features, p.block_features):
                column = columns_of(start, p)
                v = load_change(x_dot, residual_dot, row, is_row, column, p)
                normalized = (load_tile(x, row, is_row, column, p) - center) * factor
                finish(
                    v, normalized, along, shift, factor, scale, scale_dot, bias_dot, out_dot, sum_dot, group, row,
                    is_row, column, p,
                )  # fmt: skip


@triton.jit
def load_change(x_dot, residual_dot, row, is_row, column, p: tl.constexpr):
    """The tangent of z."""
    v = load_tile(x_dot, row, is_row, column, p)
    if p.residual:
        v += load_tile(residual_dot, row, is_row, column, p)
    return v


@triton.jit
def finish(
    v, normalized, along, shift, factor, scale, scale_dot, bias_dot, out_dot, sum_dot, group, row, is_row, column,
    p: tl.constexpr,
):  # fmt: skip
    """Stores the tangents of a tile."""
    if p.residual:
        store_tile(sum_dot, v, row, is_row, column, p)
    change = v - normalized * along
    if p.centered:
        change = change - shift
    y = change * factor
    if p.scale:
        y = y * load_scale(scale, group, column, p)
        y = y + normalized * load_parameter(scale_dot, group, column, p.scale_per_group, p)
    if p.bias:
        y = y + load_parameter(bias_dot, group, column, p.bias_per_group, p)
    store_tile(out_dot, y, row, is_row, column, p)
