"""The Triton code of attention's backward pass for few queries (see `jaxkernels.triton.attention.few_queries`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.ops.attention.spec import MASKED_LOGIT
from jaxkernels.triton.attention.problem import LOG2E as _LOG2E
from jaxkernels.triton.attention.tile_kernel import (
    Extras,
    change,
    load_operand,
    load_rows,
    operand,
    place_of,
    slope,
    store_rows,
    visible,
)

LOG2E = tl.constexpr(_LOG2E)
#: A query that sees no key has a logsumexp below.
BLIND = tl.constexpr(MASKED_LOGIT / 2)


@triton.jit
def attention_few_queries(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, out, dout, lse, dlse,
    dq, dk, dv, p: tl.constexpr,
):  # fmt: skip
    """One program: one part of the keys, one batch element and key head, and all queries of its heads."""
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BK: tl.constexpr = p.block_kv
    BLOCKS: tl.constexpr = (p.num_keys + p.block_kv - 1) // p.block_kv
    SHARE: tl.constexpr = (BLOCKS + p.num_splits - 1) // p.num_splits
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    split = tl.program_id(1)
    batch = tl.program_id(0) // p.num_kv_heads
    kv_head = tl.program_id(0) % p.num_kv_heads
    at = place_of(batch, x, p)
    rows = tl.arange(0, p.block_q)
    query = rows // p.pack
    head = kv_head * p.pack + rows % p.pack
    is_inside = query < p.num_queries
    is_query = is_inside & (query + at.offset < at.query_end)

    # Rows of q, out, dout and dq: row (query, head) lies at query * num_heads + head.
    array_rows = query * p.num_heads + head
    first_row = batch.to(tl.int64) * (p.num_queries * p.num_heads)
    q_tile = load_operand(q + first_row * H, array_rows, H, H, BH, is_query, True, p)
    gradients = load_rows(dout + first_row * D, array_rows, D, D, BD, is_query, True)
    outputs = load_rows(out + first_row * D, array_rows, D, D, BD, is_query, True)
    sums = first_row + head * p.num_queries + query
    logsumexp = tl.load(lse + sums, mask=is_query, other=0.0)
    saw = is_query & (logsumexp > BLIND)
    top = tl.where(saw, logsumexp, float("inf")) * LOG2E
    products_of_rows = tl.sum(outputs.to(tl.float32) * gradients.to(tl.float32), axis=1)
    if p.has_dlse:
        products_of_rows -= tl.load(dlse + sums, mask=is_query, other=0.0)
    shift = tl.where(saw, products_of_rows, 0.0)
    # The output of a query that sees no key is the mean of all values.
    blind = tl.where((is_query & ~saw)[:, None], gradients.to(tl.float32), 0.0)
    dmean = tl.sum(blind, axis=0) / p.num_keys
    dout_tile = operand(gradients, gradients, p)

    k_row = batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head
    dq_acc = tl.full((p.block_q, BH), 0.0, tl.float32)
    # Keys that no query sees are not loaded.
    seen_end = at.key_end
    if p.right is not None:
        seen_end = tl.minimum(seen_end, tl.maximum(p.num_queries + at.offset + p.right, 0))
    block_end = tl.minimum((split + 1) * SHARE, BLOCKS)
    seen_block_end = tl.minimum(block_end, (seen_end + BK - 1) // BK)
    for block in tl.range(split * SHARE, seen_block_end):
        key = block * BK + tl.arange(0, BK)
        is_seen = key < seen_end
        if p.left is not None:
            is_seen = is_seen & (key >= at.offset - p.left)
        k_tile = load_operand(k + k_row * H, key, K_STRIDE, H, BH, is_seen, True, p)
        v_tile = load_operand(v + k_row * D, key, V_STRIDE, D, BD, is_seen, True, p)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=p.precision)
        s = change(products, x, at, head[:, None], query[:, None], key[None, :], p)
        weights = tl.exp2(s * p.unit - top[:, None])
        weights = tl.where(visible(x, at, head[:, None], query[:, None], key[None, :], p, True), weights, 0.0)
        dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision=p.precision)
        dlogits = operand(slope(weights * (dweights - shift[:, None]), s, p), q_tile, p)
        dv_tile = tl.dot(tl.trans(operand(weights, dout_tile, p)), dout_tile, input_precision=p.precision)
        dk_tile = tl.dot(tl.trans(dlogits), q_tile, input_precision=p.precision)
        dq_acc = tl.dot(dlogits, k_tile, dq_acc, input_precision=p.precision)
        dk_tile = tl.where(is_seen[:, None], dk_tile * p.scale, 0.0)
        dv_tile = tl.where(is_seen[:, None], dv_tile, 0.0) + dmean[None, :]
        store_rows(dk + k_row * H, key, dk_tile, K_STRIDE, H, BH, key < p.num_keys, True)
        store_rows(dv + k_row * D, key, dv_tile, V_STRIDE, D, BD, key < p.num_keys, True)
    for block in tl.range(tl.maximum(split * SHARE, seen_block_end), block_end):
        key = block * BK + tl.arange(0, BK)
        dk_tile = tl.full((BK, BH), 0.0, tl.float32)
        dv_tile = tl.broadcast_to(dmean[None, :], (BK, BD))
        store_rows(dk + k_row * H, key, dk_tile, K_STRIDE, H, BH, key < p.num_keys, True)
        store_rows(dv + k_row * D, key, dv_tile, V_STRIDE, D, BD, key < p.num_keys, True)
    part = split.to(tl.int64) * (tl.num_programs(0) // p.num_kv_heads) * (p.num_queries * p.num_heads) + first_row
    store_rows(dq + part * H, array_rows, dq_acc * p.scale, H, H, BH, is_inside, True)
