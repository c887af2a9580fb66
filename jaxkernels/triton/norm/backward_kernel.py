"""The Triton code of norms' backward pass (see `jaxkernels.triton.norm.backward`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.norm.row_kernel import (
    columns_of,
    joined,
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

    `add_shares` adds up the shares, (num_groups, num_programs, F) float32. Operands and results that a norm lacks are
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
            if p.sum_gradient and not p.loads_late:
                raw_dz = load_raw(sum_grad, row, is_row, column, p)
            if BLOCK_REST:
                raw_x_rest = load_raw(x, row, is_row, rest, p)
                raw_dy_rest = load_raw(out_grad, row, is_row, rest, p)
                if p.sum_gradient and not p.loads_late:
                    raw_dz_rest = load_raw(sum_grad, row, is_row, rest, p)

        # The means over each row.
        dy = raw_dy.to(tl.float32)
        normalized = (raw_x.to(tl.float32) - center) * factor
        v = scaled(dy, scale, group, column, p)
        products, total = normalized * v, v
        if BLOCK_REST:
            dy_rest = raw_dy_rest.to(tl.float32)
            normalized_rest = (raw_x_rest.to(tl.float32) - center) * factor
            v_rest = scaled(dy_rest, scale, group, rest, p)
            if BLOCK_REST == BLOCK_FEATURES:
                products += normalized_rest * v_rest
                total += v_rest
        along, shift = sums_of_rows(products, total, p)
        if BLOCK_REST != 0 and BLOCK_REST != BLOCK_FEATURES:
            along_rest, shift_rest = sums_of_rows(normalized_rest * v_rest, v_rest, p)
            along, shift = joined(along, along_rest), joined(shift, shift_rest)
        along, shift = mean_of(along, p), mean_of(shift, p)

        # The gradient of z, and the sums over rows.
        if p.converts_twice:
            dy = again(raw_dy).to(tl.float32)
            normalized = (again(raw_x).to(tl.float32) - center) * factor
            v = scaled(dy, scale, group, column, p)
        dx = gradient(v, normalized, along, shift, factor, p)
        if p.sum_gradient:
            if p.loads_late:
                raw_dz = load_raw(sum_grad, row, is_row, column, p)
            dx += raw_dz.to(tl.float32)
        store_tile(x_grad, dx, row, is_row, column, p)
        of_scale += dy * normalized
        of_bias += dy
        if BLOCK_REST:
            if p.converts_twice:
                dy_rest = again(raw_dy_rest).to(tl.float32)
                normalized_rest = (again(raw_x_rest).to(tl.float32) - center) * factor
                v_rest = scaled(dy_rest, scale, group, rest, p)
            dx_rest = gradient(v_rest, normalized_rest, along, shift, factor, p)
            if p.sum_gradient:
                if p.loads_late:
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
def read_into_l2(pointer, tile, group, p: tl.constexpr):
    """Starts to read a tile from memory into L2, if there is such a tile. One thread asks for all of it.

    The address is computed in the instruction's own block, so the loop carries no address of a tile ahead in registers.
    """
    row = tile * p.block_rows
    row_bytes: tl.constexpr = p.num_features * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    num_bytes = tl.minimum(p.num_rows - row, p.block_rows) * row_bytes
    first = (group * p.num_rows + row).to(tl.int32)
    tl.inline_asm_elementwise(
        """{
            .reg .pred asks;
            .reg .b32 thread;
            .reg .b64 address;
            mov.u32 thread, %tid.x;
            setp.eq.u32 asks, thread, 0;
            setp.gt.and.s32 asks, $2, 0, asks;
            mad.wide.u32 address, $3, $4, $1;
            @asks cp.async.bulk.prefetch.L2.global [address], $2;
            mov.u32 $0, 0;
        }""",
        "=r,l,r,r,r",
        [pointer.to(tl.int64), num_bytes, first, row_bytes],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def sums_of_rows(products, total, p: tl.constexpr):
    """Both sums of a tile over its second axis, in one exchange between warps. An RMS norm does not need the second."""
    if p.centered:
        return tl.reduce((products, total), 1, add_both)
    along = tl.sum(products, axis=1)
    return along, along


@triton.jit
def add_both(a, b, c, d):
    return a + c, b + d


@triton.jit
def again(raw):
    """The same values. The compiler does not know that they are the same, so it converts them a second time.

    So float32 values take registers only while they are used. Between, the row takes as many bytes as in memory.
    """
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [raw], dtype=raw.dtype, is_pure=False, pack=32 // raw.dtype.primitive_bitwidth
    )


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


@triton.jit
def add_shares(scale_parts, bias_parts, scale_grad, bias_grad, p: tl.constexpr):
    """One program: a block of columns of the gradient of scale (index 0 along the third axis) or of bias."""
    which = tl.program_id(2)
    if p.scale_shares:
        add_columns(scale_parts, scale_grad, which == 0, p.scale_shares, p.scale_groups, p)
    if p.bias_shares:
        add_columns(bias_parts, bias_grad, which == p.num_sums - 1, p.bias_shares, p.bias_groups, p)


@triton.jit
def add_columns(parts, grad, is_asked, SHARES: tl.constexpr, GROUPS: tl.constexpr, p: tl.constexpr):
    """The sum of a group's shares. Most often all of them are in flight at once."""
    BLOCK_SHARES: tl.constexpr = p.block_shares
    BLOCK_COLUMNS: tl.constexpr = p.block_columns
    group = tl.program_id(1)
    if is_asked & (group < GROUPS):
        column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        is_column = column < p.num_features
        total = tl.full((BLOCK_SHARES, BLOCK_COLUMNS), 0.0, tl.float32)
        for start in range(0, SHARES, BLOCK_SHARES):
            share = start + tl.arange(0, BLOCK_SHARES)
            places = (group * SHARES + share).to(tl.int64)[:, None] * p.num_features + column[None, :]
            total += tl.load(parts + places, mask=(share < SHARES)[:, None] & is_column[None, :], other=0.0)
        sums = tl.sum(total, axis=0).to(grad.dtype.element_ty)
        tl.store(grad + group * p.num_features + column, sums, mask=is_column)
