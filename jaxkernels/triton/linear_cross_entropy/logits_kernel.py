"""The Triton code of linear cross entropy: what lies between its products.

A program has the logits of one token.
"""

# Triton compiles these functions; pyright does not know its types of values in kernels.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.functions import tanh

#: The base of the logarithms is 2 in the GPU's instructions: log2(e).
LOG2E = tl.constexpr(1.4426950408889634)

#: Maxima are kept between these, so that logits may be infinite: the difference of two infinities is no number.
LEAST, MOST = tl.constexpr(-3e38), tl.constexpr(3e38)


@triton.jit
def logits_forward(logits, bias, labels, lse, label_logit, logit_sum, p: tl.constexpr):
    """The statistics."""
    row = tl.program_id(0)
    statistics(logits, bias, labels, lse, label_logit, logit_sum, row, False, p)


@triton.jit
def logits_fused(logits, bias, labels, weights, lse, label_logit, logit_sum, g, p: tl.constexpr):
    """The statistics, and the cotangent of the logits for the losses times their weights. g may lie in the logits."""
    row = tl.program_id(0)
    total = statistics(logits, bias, labels, lse, label_logit, logit_sum, row, True, p)
    weight = tl.load(weights + row)
    d_lse = weight
    if p.z_loss != 0.0:
        d_lse = weight * (1 + 2 * p.z_loss * total)
    d_label = -(1 - p.label_smoothing) * weight
    d_sum = -p.label_smoothing / p.vocab_size * weight
    cotangent(logits, bias, labels, g, row, total, d_lse, d_label, d_sum, p)


@triton.jit
def logits_backward(logits, bias, labels, lse, d_lse, d_label_logit, d_logit_sum, g, p: tl.constexpr):
    """The cotangent of the logits for those of the statistics. g may lie in the logits."""
    row = tl.program_id(0)
    d_sum = 0.0
    if p.logit_sum:
        d_sum = tl.load(d_logit_sum + row)
    total, of_lse, of_label = tl.load(lse + row), tl.load(d_lse + row), tl.load(d_label_logit + row)
    cotangent(logits, bias, labels, g, row, total, of_lse, of_label, d_sum, p)


@triton.jit
def logits_tangent(logits, bias, labels, lse, dlogits, dbias, d_lse, d_label_logit, d_logit_sum, p: tl.constexpr):
    """The tangents of the statistics for those of the logits before bias and soft cap."""
    BLOCK: tl.constexpr = p.block_vocab
    row = tl.program_id(0)
    zero = tl.zeros((BLOCK,), tl.float32)
    of_lse, of_label, of_sum = zero, zero, zero
    label, total = tl.load(labels + row), tl.load(lse + row)
    for start in range(0, p.vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = load_logits(logits, bias, row, column, p)
        change = slope(z, p) * load_change(dlogits, dbias, row, column, p)
        change = tl.where(column < p.vocab_size, change, 0.0)
        of_lse += tl.exp2((z - total) * LOG2E) * change
        of_label += tl.where(column == label, change, 0.0)
        of_sum += change
    tl.store(d_lse + row, tl.sum(of_lse, axis=0))
    tl.store(d_label_logit + row, tl.sum(of_label, axis=0))
    if p.logit_sum:
        tl.store(d_logit_sum + row, tl.sum(of_sum, axis=0))


@triton.jit
def statistics(logits, bias, labels, lse, label_logit, logit_sum, row, again: tl.constexpr, p: tl.constexpr):
    """Stores a token's statistics; returns the logsumexp. Each lane has a maximum and a sum of its own.

    Args:
      again: whether the logits are read again.
    """
    BLOCK: tl.constexpr = p.block_vocab
    # The logit is read before anything is written over it.
    label = tl.load(labels + row)
    is_inside = (label >= 0) & (label < p.vocab_size)
    picked = load_logits(logits, bias, row, tl.where(is_inside, label, 0), p)
    tl.store(label_logit + row, tl.where(is_inside, picked, 0.0))

    top = tl.full((BLOCK,), LEAST, tl.float32)
    total, sums = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for start in range(0, p.vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = load_logits(logits, bias, row, column, p, again)
        higher = tl.minimum(tl.maximum(top, z), MOST)
        total = total * tl.exp2((top - higher) * LOG2E) + tl.exp2((z - higher) * LOG2E)
        top = higher
        if p.logit_sum:
            sums += tl.where(column < p.vocab_size, z, 0.0)
    highest = tl.max(top, axis=0)
    found = highest + tl.log(tl.sum(total * tl.exp2((top - highest) * LOG2E), axis=0))
    tl.store(lse + row, found)
    if p.logit_sum:
        tl.store(logit_sum + row, tl.sum(sums, axis=0))
    return found


@triton.jit
def cotangent(logits, bias, labels, g, row, total, d_lse, d_label, d_sum, p: tl.constexpr):
    """Stores the cotangent of a token's logits.

    Args:
      total: the logsumexp.
      d_lse, d_label, d_sum: the cotangents of the statistics.
    """
    BLOCK: tl.constexpr = p.block_vocab
    label = tl.load(labels + row)
    for start in range(0, p.vocab_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = load_logits(logits, bias, row, column, p)
        change = d_lse * tl.exp2((z - total) * LOG2E) + tl.where(column == label, d_label, 0.0)
        if p.logit_sum:
            change += d_sum
        places = g + row.to(tl.int64) * p.vocab_size + column
        rounded = (change * slope(z, p)).to(g.dtype.element_ty)
        tl.store(places, rounded, mask=column < p.vocab_size, cache_modifier=".cs")


@triton.jit
def load_change(pointer, bias, row, column, p: tl.constexpr, again: tl.constexpr = False):
    """A product with the bias added, in float32; minus infinity past the last class.

    Args:
      again: whether they are read again, and should stay in L2.
    """
    inside = column < p.vocab_size
    places = pointer + row.to(tl.int64) * p.vocab_size + column
    if again:
        z = tl.load(places, mask=inside, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
    else:
        z = tl.load(places, mask=inside, other=float("-inf"), eviction_policy="evict_first").to(tl.float32)
    if p.bias:
        z += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    return z


@triton.jit
def load_logits(pointer, bias, row, column, p: tl.constexpr, again: tl.constexpr = False):
    """Logits, in float32; minus infinity past the last class."""
    z = load_change(pointer, bias, row, column, p, again)
    if p.soft_cap is not None:
        z = tl.where(column < p.vocab_size, p.soft_cap * tanh(z / p.soft_cap), float("-inf"))
    return z


@triton.jit
def slope(z, p: tl.constexpr):
    """The derivative of the soft cap where it is z."""
    found = 1.0
    if p.soft_cap is not None:
        found = 1 - (z / p.soft_cap) * (z / p.soft_cap)
    return found
