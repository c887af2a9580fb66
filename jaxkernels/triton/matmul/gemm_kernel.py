"""The matmul kernel in Triton; `jaxkernels.triton.matmul.gemm` describes and calls it.

A program computes work items. An item is one tile (block_m x block_n) of the result of one batch element, over one part
of k. Sizes, strides and the epilogue are constants of the kernel (`p`, a `gemm.Params`): Triton knows which addresses
are multiples of 16 bytes and leaves out the code of parts that a product does not have.

Tiles are numbered strip by strip. A strip is `strip` rows of tiles, numbered down its columns, so that programs that
run at the same time share operands in L2:

    strip = 2    0  2  4  6
                 1  3  5  7
                 8  9 10 11    (the last strip may be narrower)

Loads of rows and columns need no mask. The last tile ends where the result does: it may overlap the one before, and
both store the same values there. A dimension shorter than the tile wraps around (index modulo size), and is stored
under a mask. Past the end of k, both operands are loaded as zeros.
"""

# Functions here are compiled by Triton. What pyright knows of Python does not hold: a parameter annotated tl.constexpr
# has the attributes of its value.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

__all__ = ["gemm", "gemm_and_preactivation"]


@triton.jit
def gemm(lhs, rhs, bias, multiplier, residual, out, p: tl.constexpr):
    """out = activation(alpha * lhs @ rhs + bias) * multiplier + residual.

    An absent operand is not read; any pointer will do.
    """
    _walk_items(lhs, rhs, bias, multiplier, residual, out, out, p)


@triton.jit
def gemm_and_preactivation(lhs, rhs, bias, multiplier, residual, out, preactivation, p: tl.constexpr):
    """As `gemm`, and preactivation = alpha * lhs @ rhs + bias."""
    _walk_items(lhs, rhs, bias, multiplier, residual, out, preactivation, p)


@triton.jit
def _walk_items(lhs, rhs, bias, multiplier, residual, out, preactivation, p: tl.constexpr):
    """Computes every num_programs-th item. Triton fuses this loop with the loop over k: loads run ahead of stores."""
    if p.num_programs < p.num_items:
        for item in tl.range(tl.program_id(0), p.num_items, p.num_programs, flatten=True):
            _run_item(item, lhs, rhs, bias, multiplier, residual, out, preactivation, p)
    else:
        _run_item(tl.program_id(0), lhs, rhs, bias, multiplier, residual, out, preactivation, p)


@triton.jit
def _run_item(item, lhs, rhs, bias, multiplier, residual, out, preactivation, p: tl.constexpr):
    """Multiplies and stores one tile over one part of k."""
    BLOCK_M: tl.constexpr = p.block_m
    BLOCK_N: tl.constexpr = p.block_n
    M: tl.constexpr = p.m
    N: tl.constexpr = p.n
    part, batch, m_idx, n_idx = _place(item, p)
    row = _first(m_idx, BLOCK_M, M)
    column = _first(n_idx, BLOCK_N, N)
    acc = _multiply(lhs, rhs, part, batch, row, column, p)
    _finish(acc, bias, multiplier, residual, out, preactivation, part, batch, row, column, 0, p)


@triton.jit
def _place(item, p: tl.constexpr):
    """The part of k, the batch element, and the tile's row and column, of an item."""
    tile = item % (p.m_tiles * p.n_tiles)
    product = item // (p.m_tiles * p.n_tiles)
    m_idx, n_idx = _tile_of(tile, p)
    return product // p.batch, product % p.batch, m_idx, n_idx


@triton.jit
def _tile_of(tile, p: tl.constexpr):
    """Row and column of a tile in the order of strips."""
    first_row = tile // (p.strip * p.n_tiles) * p.strip
    within = tile % (p.strip * p.n_tiles)
    if p.m_tiles % p.strip == 0:
        return first_row + within % p.strip, within // p.strip
    num_rows = tl.minimum(p.m_tiles - first_row, p.strip)
    return first_row + within % num_rows, within // num_rows


@triton.jit
def _multiply(lhs, rhs, part, batch, row, column, p: tl.constexpr):
    """The product of a tile's rows and columns over one part of k, in float32."""
    BLOCK_M: tl.constexpr = p.block_m
    BLOCK_N: tl.constexpr = p.block_n
    BLOCK_K: tl.constexpr = p.block_k
    M: tl.constexpr = p.m
    N: tl.constexpr = p.n
    ks = _widened(tl.arange(0, BLOCK_K), p)
    lhs_block = _lines(BLOCK_M, M, p)[:, None] * p.lhs_stride_m + ks[None, :] * p.lhs_stride_k
    rhs_block = ks[:, None] * p.rhs_stride_k + _lines(BLOCK_N, N, p)[None, :] * p.rhs_stride_n
    lhs_begin = batch.to(tl.int64) * (p.m * p.k) + row.to(tl.int64) * p.lhs_stride_m
    rhs_begin = batch.to(tl.int64) * (p.k * p.n) + column.to(tl.int64) * p.rhs_stride_n
    LHS_UNIT: tl.constexpr = p.lhs_unit
    RHS_UNIT: tl.constexpr = p.rhs_unit
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in tl.range(0, p.k_iters):
        k = (part * p.k_iters + step) * BLOCK_K
        # Loops that are fused lose what Triton knows of numbers from before the loop.
        a_ptrs = lhs + tl.multiple_of(lhs_begin + k.to(tl.int64) * p.lhs_stride_k, LHS_UNIT) + lhs_block
        b_ptrs = rhs + tl.multiple_of(rhs_begin + k.to(tl.int64) * p.rhs_stride_k, RHS_UNIT) + rhs_block
        if p.masks_k:
            is_inside = ks < p.k - k
            a = tl.load(a_ptrs, mask=is_inside[None, :], other=0.0)
            b = tl.load(b_ptrs, mask=is_inside[:, None], other=0.0)
        else:
            a = tl.load(a_ptrs)
            b = tl.load(b_ptrs)
        acc = tl.dot(_rounded(a, p), _rounded(b, p), acc, input_precision=p.input_precision)
    return acc


@triton.jit
def _rounded(x, p: tl.constexpr):
    """Rounds float32 to the nearest TF32 number, if that is what tensor cores take: they cut the lower bits off."""
    if x.dtype == tl.float32 and p.input_precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    else:
        return x


@triton.jit
def _finish(
    acc, bias, multiplier, residual, out, preactivation, part, batch, row, column, FIRST: tl.constexpr, p: tl.constexpr
):
    """Applies the epilogue to a tile's products and stores the results, in pieces of p.piece_n columns.

    Pieces need fewer registers, and less shared memory to rearrange what threads store.

    Args:
      acc: products of the tile's columns from FIRST on.
    """
    HEIGHT: tl.constexpr = acc.shape[0]
    WIDTH: tl.constexpr = acc.shape[1]
    if p.piece_n < WIDTH:
        left, right = tl.split(tl.permute(tl.reshape(acc, (HEIGHT, 2, WIDTH // 2)), (0, 2, 1)))
        MIDDLE: tl.constexpr = FIRST + WIDTH // 2
        _finish(left, bias, multiplier, residual, out, preactivation, part, batch, row, column, FIRST, p)
        _finish(right, bias, multiplier, residual, out, preactivation, part, batch, row, column, MIDDLE, p)
    else:
        _finish_piece(acc, bias, multiplier, residual, out, preactivation, part, batch, row, column, FIRST, p)


@triton.jit
def _finish_piece(
    x, bias, multiplier, residual, out, preactivation, part, batch, row, column, FIRST: tl.constexpr, p: tl.constexpr
):
    """Applies the epilogue to products of the tile's columns from FIRST on, and stores the results."""
    HEIGHT: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    ACTIVATION: tl.constexpr = p.activation
    OUT_UNIT: tl.constexpr = p.out_unit
    rows = _widened(tl.arange(0, HEIGHT), p)
    columns = _widened(FIRST + tl.arange(0, WIDTH), p)
    is_inside = _is_inside(rows, columns, p)
    piece = rows[:, None] * p.n + columns[None, :]
    begin = row.to(tl.int64) * p.n + column
    in_batch = tl.multiple_of(batch.to(tl.int64) * (p.m * p.n) + begin, OUT_UNIT)
    in_part = tl.multiple_of((part * p.batch + batch).to(tl.int64) * (p.m * p.n) + begin, OUT_UNIT)
    if p.alpha != 1.0:
        x = x * p.alpha
    if p.has_bias:
        x += tl.load(bias + column + columns, mask=columns < p.n, other=0.0).to(tl.float32)[None, :]
    if p.saves_preactivation:
        tl.store(preactivation + in_batch + piece, x.to(preactivation.dtype.element_ty), mask=is_inside)
    x = _activated(x, ACTIVATION)
    if p.has_multiplier:
        x *= tl.load(multiplier + in_batch + piece, mask=is_inside, other=0.0).to(tl.float32)
    if p.has_residual:
        x += tl.load(residual + in_batch + piece, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + in_part + piece, x.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _is_inside(rows, columns, p: tl.constexpr):
    """Which elements of a tile the result has. Triton drops the mask if all tiles are whole."""
    if p.m < p.block_m and p.n < p.block_n:
        return (rows < p.m)[:, None] & (columns < p.n)[None, :]
    elif p.m < p.block_m:
        return (rows < p.m)[:, None]
    elif p.n < p.block_n:
        return (columns < p.n)[None, :]
    else:
        return tl.full((1, 1), True, tl.int1)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """activation(x), of float32. NaN stays NaN."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)
    elif ACTIVATION == "relu_squared":
        return tl.where(x < 0, 0.0, x * x)
    elif ACTIVATION == "silu":
        return x / (1 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        # (1 + tanh(y)) / 2 is 1 / (1 + exp(-2 y)), here with y = sqrt(2 / pi) (x + 0.044715 x^3).
        return x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACTIVATION == "gelu_erf":
        return 0.5 * x * (1 + tl.math.erf(x * 0.7071067811865476))
    else:
        return x


# Indices and offsets. They have 64 bits only if an array has more elements than 32 bits count.


@triton.jit
def _lines(BLOCK: tl.constexpr, SIZE: tl.constexpr, p: tl.constexpr):
    """Rows (or columns) of a tile, from its first one on. A dimension shorter than the tile is repeated."""
    lines = _widened(tl.arange(0, BLOCK), p)
    if SIZE < BLOCK:
        return lines % SIZE
    else:
        return lines


@triton.jit
def _first(index, BLOCK: tl.constexpr, SIZE: tl.constexpr):
    """The first row (or column) of a tile. The last tile ends where the result does, and may overlap the one before."""
    if SIZE < BLOCK:
        return index * 0
    elif SIZE % BLOCK == 0:
        return index * BLOCK
    else:
        return tl.minimum(index * BLOCK, SIZE - BLOCK)


@triton.jit
def _widened(index, p: tl.constexpr):
    return index.to(tl.int64) if p.is_wide else index
