"""The Triton code of attention's tangent pass (see `jaxkernels.triton.attention.tangent`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.attention.problem import LOG2E as _LOG2E
from jaxkernels.triton.attention.tile_kernel import (
    Extras,
    block_and_rest,
    change,
    load_operand,
    load_pairs,
    operand,
    place_of,
    slope,
    store_rows,
    visible,
    visited,
)

LOG2E = tl.constexpr(_LOG2E)


@triton.jit
def attention_tangent(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, ranges, lse, q_dot,
    k_dot, v_dot, bias_dot, weighted, lse_dot, p: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head. Writes the sum of P S' V + P V', and the sum of P S'."""
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    NUM_BLOCKS: tl.constexpr = p.num_blocks
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BQ: tl.constexpr = p.block_q
    Q_STRIDE: tl.constexpr = p.num_heads * p.head_dim
    O_STRIDE: tl.constexpr = p.num_heads * p.value_dim
    block, rest = block_and_rest(NUM_BLOCKS)
    if p.right is not None:
        block = NUM_BLOCKS - 1 - block  # The longest first.
    batch = rest // p.num_heads
    head = rest % p.num_heads
    at = place_of(batch, x, p)
    query = block * BQ + tl.arange(0, BQ)
    is_query = (query < p.num_queries) & (query + at.offset < at.query_end)
    row = batch.to(tl.int64) * p.num_queries * p.num_heads + head
    q_tile = load_operand(q + row * p.head_dim, query, Q_STRIDE, H, BH, is_query, True, p)
    q_dot_tile = load_operand(q_dot + row * p.head_dim, query, Q_STRIDE, H, BH, is_query, True, p)
    sums = (batch * p.num_heads + head).to(tl.int64) * p.num_queries
    top = tl.load(lse + sums + query, mask=is_query, other=float("inf")) * LOG2E

    first, whole_first, whole_end, end = visited(ranges, batch, block, at, p, False)
    acc = tl.full((BQ, BD), 0.0, tl.float32)
    total = tl.full((BQ,), 0.0, tl.float32)
    if p.has_left_edge:
        acc, total = follow(
            acc, total, q_tile, q_dot_tile, top, k, v, k_dot, v_dot, bias_dot, x, at, head, query, first, whole_first,
            p, True,
        )  # fmt: skip
    else:
        whole_first = first
    acc, total = follow(
        acc, total, q_tile, q_dot_tile, top, k, v, k_dot, v_dot, bias_dot, x, at, head, query, whole_first, whole_end,
        p, False,
    )  # fmt: skip
    if p.has_right_edge:
        acc, total = follow(
            acc, total, q_tile, q_dot_tile, top, k, v, k_dot, v_dot, bias_dot, x, at, head, query, whole_end, end,
            p, True,
        )  # fmt: skip
    store_rows(
        weighted + row * p.value_dim, query, acc, O_STRIDE, D, BD, query < p.num_queries, p.num_queries % p.block_q != 0
    )
    tl.store(lse_dot + sums + query, total, mask=query < p.num_queries)


@triton.jit
def follow(
    acc, total, q_tile, q_dot_tile, top, k, v, k_dot, v_dot, bias_dot, x, at, head, query, first, end, p: tl.constexpr,
    at_edge: tl.constexpr,
):  # fmt: skip
    """Adds blocks of keys and values, and of their tangents."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BK: tl.constexpr = p.block_kv
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    row = at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + head // p.group
    for block in tl.range(first, end):
        key = block * BK + tl.arange(0, BK)
        is_key = key < at.key_end
        k_tile = load_operand(k + row * p.head_dim, key, K_STRIDE, H, BH, is_key, at_edge, p)
        k_dot_tile = load_operand(k_dot + row * p.head_dim, key, K_STRIDE, H, BH, is_key, at_edge, p)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=p.precision)
        s_dot = tl.dot(q_dot_tile, tl.trans(k_tile), input_precision=p.precision)
        s_dot = tl.dot(q_tile, tl.trans(k_dot_tile), s_dot, input_precision=p.precision) * p.scale
        if p.bias_shape is not None:
            BIAS: tl.constexpr = p.bias_shape
            s_dot += load_pairs(bias_dot, BIAS, at, head, query[:, None], key[None, :]).to(tl.float32)
        s = change(products, x, at, head, query[:, None], key[None, :], p)
        weights = tl.exp2(s * p.unit - top[:, None])
        changes = weights * slope(s_dot, s, p)
        if at_edge or p.mask_shape is not None:
            seen = visible(x, at, head, query[:, None], key[None, :], p, at_edge)
            weights = tl.where(seen, weights, 0.0)
            changes = tl.where(seen, changes, 0.0)
        total += tl.sum(changes, axis=1)
        v_tile = load_operand(v + row * p.value_dim, key, V_STRIDE, D, BD, is_key, at_edge, p)
        v_dot_tile = load_operand(v_dot + row * p.value_dim, key, V_STRIDE, D, BD, is_key, at_edge, p)
        acc = tl.dot(operand(changes, v_tile, p), v_tile, acc, input_precision=p.precision)
        acc = tl.dot(operand(weights, v_tile, p), v_dot_tile, acc, input_precision=p.precision)
    return acc, total
