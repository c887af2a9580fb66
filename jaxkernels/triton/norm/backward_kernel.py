"""The Triton code of norms' backward pass (see `jaxkernels.triton.norm.backward`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.norm.row_kernel import (
    columns_of,
    load_scale,
    load_statistics,
    load_tile,
    mean_of,
    rows_of,
    store_tile,
)


@triton.jit
def norm_backward(x, scale, mean, rstd, out_grad, sum_grad, x_grad, scale_parts, bias_parts, p: tl.constexpr):
    """One program: every num_programs-th tile of a group, and its share of the sums over rows.

    The shares, (num_groups, num_programs, F) float32, are added up by XLA. Operands and results that a norm lacks are
    not touched.
    """
    BLOCK_FEATURES: tl.constexpr = p.block_features
    group = tl.program_id(1)
    share = (group.to(tl.int64) * p.num_programs + tl.program_id(0)) * p.num_features
    if p.is_whole:
        column = columns_of(0, p)
        is_column = column < p.num_features
        of_scale = tl.full((BLOCK_FEATURES,), 0.0, tl.float32)
        of_bias = tl.full((BLOCK_FEATURES,), 0.0, tl.float32)
        for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=p.num_stages):
            row, is_row = rows_of(tile, group, p)
            center, factor = load_statistics(mean, rstd, row, is_row, p)
            dy = load_tile(out_grad, row, is_row, column, p)
            normalized = (load_tile(x, row, is_row, column, p) - center) * factor
            v = scaled(dy, scale, group, column, p)
            along = mean_of(tl.sum(normalized * v, axis=1), p)
            shift = mean_of(tl.sum(v, axis=1), p)
            finish(v, normalized, along, shift, factor, sum_grad, x_grad, row, is_row, column, p)
            if p.scale_gradient:
                of_scale += tl.sum(dy * normalized, axis=0)
            if p.bias_gradient:
                of_bias += tl.sum(dy, axis=0)
        if p.scale_gradient:
            tl.store(scale_parts + share + column, of_scale, mask=is_column)
        if p.bias_gradient:
            tl.store(bias_parts + share + column, of_bias, mask=is_column)
    else:
        for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=p.num_stages):
            row, is_row = rows_of(tile, group, p)
            center, factor = load_statistics(mean, rstd, row, is_row, p)
            along, shift = sums(x, out_grad, scale, center, factor, group, row, is_row, p)
            for start in range(0, p.num_features, p.block_features):
                column = columns_of(start, p)
                dy = load_tile(out_grad, row, is_row, column, p)
                normalized = (load_tile(x, row, is_row, column, p) - center) * factor
                v = scaled(dy, scale, group, column, p)
                finish(v, normalized, along, shift, factor, sum_grad, x_grad, row, is_row, column, p)
                if p.scale_gradient:
                    add_share(scale_parts + share, tl.sum(dy * normalized, axis=0), column, tile, p)
                if p.bias_gradient:
                    add_share(bias_parts + share, tl.sum(dy, axis=0), column, tile, p)
            # The next tile's threads may read what others have written here.
            tl.debug_barrier()


@triton.jit
def scaled(dy, scale, group, column, p: tl.constexpr):
    """The gradient of the normalized rows."""
    v = dy
    if p.scale:
        v = dy * load_scale(scale, group, column, p)
    return v


@triton.jit
def sums(x, out_grad, scale, center, factor, group, row, is_row, p: tl.constexpr):
    """The means of normalized * v and of v, of rows that are read in chunks."""
    BLOCK_ROWS: tl.constexpr = p.block_rows
    BLOCK_FEATURES: tl.constexpr = p.block_features
    products = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
    total = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
    for start in range(0, p.num_features, p.block_features):
        column = columns_of(start, p)
        v = scaled(load_tile(out_grad, row, is_row, column, p), scale, group, column, p)
        products += (load_tile(x, row, is_row, column, p) - center) * factor * v
        total += v
    return mean_of(tl.sum(products, axis=1), p), mean_of(tl.sum(total, axis=1), p)


@triton.jit
def finish(v, normalized, along, shift, factor, sum_grad, x_grad, row, is_row, column, p: tl.constexpr):
    """Stores the gradient of z."""
    change = v - normalized * along
    if p.centered:
        change = change - shift
    dx = change * factor
    if p.sum_gradient:
        dx = dx + load_tile(sum_grad, row, is_row, column, p)
    store_tile(x_grad, dx, row, is_row, column, p)


@triton.jit
def add_share(parts, values, column, tile, p: tl.constexpr):
    """Adds to the program's share; the first tile begins it. It stays in L2."""
    is_column = column < p.num_features
    before = tl.load(parts + column, mask=is_column & (column * 0 + tile >= p.num_programs), other=0.0)
    tl.store(parts + column, before + values, mask=is_column)
