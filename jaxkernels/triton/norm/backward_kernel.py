"""The Triton code of norms' backward pass (see `jaxkernels.triton.norm.backward`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.norm.row_kernel import (
    columns_of,
    load_raw,
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
    group = tl.program_id(1)
    share = (group.to(tl.int64) * p.num_programs + tl.program_id(0)) * p.num_features
    if p.is_whole:
        whole_rows(x, scale, mean, rstd, out_grad, sum_grad, x_grad, scale_parts, bias_parts, group, share, p)
    else:
        rows_in_chunks(x, scale, mean, rstd, out_grad, sum_grad, x_grad, scale_parts, bias_parts, group, share, p)


@triton.jit
def whole_rows(
    x, scale, mean, rstd, out_grad, sum_grad, x_grad, scale_parts, bias_parts, group, share, p: tl.constexpr,
):  # fmt: skip
    """Tiles of whole rows, in one or two blocks of columns: the second one has the features that the first one lacks.

    The sums over rows have the shape of a tile until the loop ends: each thread adds what it has itself. A reduction
    over rows in the loop would cross warps, through shared memory with bank conflicts.
    """
    BLOCK_ROWS: tl.constexpr = p.block_rows
    BLOCK_FEATURES: tl.constexpr = p.block_features
    BLOCK_REST: tl.constexpr = p.block_rest
    column = columns_of(0, p)
    of_scale = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
    of_bias = tl.full((BLOCK_ROWS, BLOCK_FEATURES), 0.0, tl.float32)
    if BLOCK_REST:
        rest = BLOCK_FEATURES + tl.arange(0, BLOCK_REST)
        of_scale_rest = tl.full((BLOCK_ROWS, BLOCK_REST), 0.0, tl.float32)
        of_bias_rest = tl.full((BLOCK_ROWS, BLOCK_REST), 0.0, tl.float32)

    # The first tile's loads. In the loop, those of the next tile are in flight while one is computed.
    if p.loads_ahead:
        row, is_row = rows_of(tl.program_id(0), group, p)
        next_center, next_factor = load_statistics(mean, rstd, row, is_row, p)
        next_x = load_raw(x, row, is_row, column, p)
        next_dy = load_raw(out_grad, row, is_row, column, p)
        if p.sum_gradient:
            next_dz = load_raw(sum_grad, row, is_row, column, p)
        if BLOCK_REST:
            next_x_rest = load_raw(x, row, is_row, rest, p)
            next_dy_rest = load_raw(out_grad, row, is_row, rest, p)
            if p.sum_gradient:
                next_dz_rest = load_raw(sum_grad, row, is_row, rest, p)

    for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=1):
        row, is_row = rows_of(tile, group, p)
        if p.tiles_to_l2:
            ahead = tile + p.tiles_to_l2 * p.num_programs
            read_into_l2(x, ahead, group, p)
            read_into_l2(out_grad, ahead, group, p)
            if p.sum_gradient:
                read_into_l2(sum_grad, ahead, group, p)
        if p.loads_ahead:
            center, factor, raw_x, raw_dy = next_center, next_factor, next_x, next_dy
            if p.sum_gradient:
                raw_dz = next_dz
            next_row, is_next = rows_of(tile + p.num_programs, group, p)
            next_center, next_factor = load_statistics(mean, rstd, next_row, is_next, p)
            next_x = load_raw(x, next_row, is_next, column, p)
            next_dy = load_raw(out_grad, next_row, is_next, column, p)
            if p.sum_gradient:
                next_dz = load_raw(sum_grad, next_row, is_next, column, p)
            if BLOCK_REST:
                raw_x_rest, raw_dy_rest = next_x_rest, next_dy_rest
                next_x_rest = load_raw(x, next_row, is_next, rest, p)
                next_dy_rest = load_raw(out_grad, next_row, is_next, rest, p)
                if p.sum_gradient:
                    raw_dz_rest = next_dz_rest
                    next_dz_rest = load_raw(sum_grad, next_row, is_next, rest, p)
        else:
            center, factor = load_statistics(mean, rstd, row, is_row, p)
            raw_x = load_raw(x, row, is_row, column, p)
            raw_dy = load_raw(out_grad, row, is_row, column, p)
            if p.sum_gradient and not p.reads_twice:
                raw_dz = load_raw(sum_grad, row, is_row, column, p)
            if BLOCK_REST:
                raw_x_rest = load_raw(x, row, is_row, rest, p)
                raw_dy_rest = load_raw(out_grad, row, is_row, rest, p)
                if p.sum_gradient and not p.reads_twice:
                    raw_dz_rest = load_raw(sum_grad, row, is_row, rest, p)

        # The means over each row.
        dy = raw_dy.to(tl.float32)
        normalized = (raw_x.to(tl.float32) - center) * factor
        v = scaled(dy, scale, group, column, p)
        along = tl.sum(normalized * v, axis=1)
        shift = tl.sum(v, axis=1)
        if BLOCK_REST:
            dy_rest = raw_dy_rest.to(tl.float32)
            normalized_rest = (raw_x_rest.to(tl.float32) - center) * factor
            v_rest = scaled(dy_rest, scale, group, rest, p)
            along = joined(along, tl.sum(normalized_rest * v_rest, axis=1))
            shift = joined(shift, tl.sum(v_rest, axis=1))
        along, shift = mean_of(along, p), mean_of(shift, p)

        # The gradient of z, and the sums over rows.
        if p.reads_twice:
            dy = load_again(out_grad, row, is_row, column, p)
            normalized = (load_again(x, row, is_row, column, p) - center) * factor
            v = scaled(dy, scale, group, column, p)
        dx = gradient(v, normalized, along, shift, factor, p)
        if p.sum_gradient:
            if p.reads_twice:
                raw_dz = load_raw(sum_grad, row, is_row, column, p)
            dx += raw_dz.to(tl.float32)
        store_tile(x_grad, dx, row, is_row, column, p)
        of_scale += dy * normalized
        of_bias += dy
        if BLOCK_REST:
            if p.reads_twice:
                dy_rest = load_again(out_grad, row, is_row, rest, p)
                normalized_rest = (load_again(x, row, is_row, rest, p) - center) * factor
                v_rest = scaled(dy_rest, scale, group, rest, p)
            dx_rest = gradient(v_rest, normalized_rest, along, shift, factor, p)
            if p.sum_gradient:
                if p.reads_twice:
                    raw_dz_rest = load_raw(sum_grad, row, is_row, rest, p)
                dx_rest += raw_dz_rest.to(tl.float32)
            store_tile(x_grad, dx_rest, row, is_row, rest, p)
            of_scale_rest += dy_rest * normalized_rest
            of_bias_rest += dy_rest

    if p.scale_gradient:
        store_share(scale_parts + share, of_scale, column, p)
        if BLOCK_REST:
            store_share(scale_parts + share, of_scale_rest, rest, p)
    if p.bias_gradient:
        store_share(bias_parts + share, of_bias, column, p)
        if BLOCK_REST:
            store_share(bias_parts + share, of_bias_rest, rest, p)


@triton.jit
def joined(first, rest):
    """The sum of two sums over a row, (1,) each. They become scalars, which have no layout.

    The sum of two vectors has one layout. Triton would move all the numbers that one of them is the sum of into it.
    """
    return tl.full(first.shape, 0.0, tl.float32) + (tl.sum(first, axis=0) + tl.sum(rest, axis=0))


@triton.jit
def read_into_l2(pointer, tile, group, p: tl.constexpr):
    """Starts to read a tile from memory into L2, if there is such a tile. One thread asks for all of it."""
    row = tile * p.block_rows
    num_bytes = tl.minimum(p.num_rows - row, p.block_rows) * (p.num_features * pointer.dtype.element_ty.itemsize)
    first = pointer + (group.to(tl.int64) * p.num_rows + row) * p.num_features
    tl.inline_asm_elementwise(
        """{
            .reg .pred asks;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 asks, thread, 0;
            setp.gt.and.s32 asks, $2, 0, asks;
            @asks cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [first.to(tl.int64), num_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_again(pointer, row, is_row, column, p: tl.constexpr):
    """As `load_tile`, for the last time. The compiler must not take the values of the first time from registers."""
    inside = is_row[:, None] & (column < p.num_features)[None, :]
    places = pointer + row[:, None] * p.num_features + column[None, :]
    return tl.load(places, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def store_share(parts, sums_of_rows, column, p: tl.constexpr):
    """The program's share of a sum over rows."""
    tl.store(parts + column, tl.sum(sums_of_rows, axis=0), mask=column < p.num_features)


@triton.jit
def rows_in_chunks(
    x, scale, mean, rstd, out_grad, sum_grad, x_grad, scale_parts, bias_parts, group, share, p: tl.constexpr,
):  # fmt: skip
    """Tiles whose rows are read twice, in chunks: for the means, and for the result."""
    for tile in tl.range(tl.program_id(0), p.num_tiles, p.num_programs, num_stages=p.num_stages):
        row, is_row = rows_of(tile, group, p)
        center, factor = load_statistics(mean, rstd, row, is_row, p)
        along, shift = sums(x, out_grad, scale, center, factor, group, row, is_row, p)
        for start in range(0, p.num_features, p.block_features):
            column = columns_of(start, p)
            dy = load_tile(out_grad, row, is_row, column, p)
            normalized = (load_tile(x, row, is_row, column, p) - center) * factor
            v = scaled(dy, scale, group, column, p)
            dx = gradient(v, normalized, along, shift, factor, p)
            if p.sum_gradient:
                dx += load_tile(sum_grad, row, is_row, column, p)
            store_tile(x_grad, dx, row, is_row, column, p)
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
def gradient(v, normalized, along, shift, factor, p: tl.constexpr):
    """The gradient of z that comes from the norm."""
    change = v - normalized * along
    if p.centered:
        change = change - shift
    return change * factor


@triton.jit
def add_share(parts, values, column, tile, p: tl.constexpr):
    """Adds to the program's share; the first tile begins it. It stays in L2."""
    is_column = column < p.num_features
    before = tl.load(parts + column, mask=is_column & (column * 0 + tile >= p.num_programs), other=0.0)
    tl.store(parts + column, before + values, mask=is_column)
