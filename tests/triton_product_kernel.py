"""A Triton kernel for tests of how kernels are called: one tile of a product, scaled, and the sums of its rows."""

import triton
import triton.language as tl


@triton.jit
def scaled(x, p: tl.constexpr):
    return x * p.scale


@triton.jit
def product(lhs, rhs, out, sums, p: tl.constexpr):
    """out = scale * lhs @ rhs and sums = out's rows added up: (block, block) arrays, and (block,)."""
    row, column = tl.arange(0, p.block)[:, None], tl.arange(0, p.block)[None]
    at = row * p.block + column
    acc = scaled(tl.dot(tl.load(lhs + at), tl.load(rhs + at)), p)
    tl.store(out + at, acc.to(out.dtype.element_ty))
    tl.store(sums + tl.arange(0, p.block), tl.sum(acc, 1))
