"""The Triton code of attention's backward pass for few queries (see `jaxkernels.triton.attention.few_queries`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.attention.tile_kernel import (
    Extras,
    change,
    gradient_of_mean,
    load_gradient_rows,
    load_operand,
    operand,
    place_of,
    slope,
    store_rows,
    visible,
)


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
    rows = load_gradient_rows(tl.arange(0, p.block_q), q, out, dout, lse, dlse, at, kv_head, p)
    first_row = batch.to(tl.int64) * (p.num_queries * p.num_heads)
    dmean = gradient_of_mean(rows, p)

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
        products = tl.dot(rows.q, tl.trans(k_tile), input_precision=p.precision)
        s = change(products, x, at, rows.head[:, None], rows.query[:, None], key[None, :], p)
        weights = tl.exp2(s * p.unit - rows.top[:, None])
        weights = tl.where(visible(x, at, rows.head[:, None], rows.query[:, None], key[None, :], p, True), weights, 0.0)
        dweights = tl.dot(rows.dout, tl.trans(v_tile), input_precision=p.precision)
        dlogits = operand(slope(weights * (dweights - rows.shift[:, None]), s, p), rows.q, p)
        dv_tile = tl.dot(tl.trans(operand(weights, rows.dout, p)), rows.dout, input_precision=p.precision)
        dk_tile = tl.dot(tl.trans(dlogits), rows.q, input_precision=p.precision)
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
    store_rows(dq + part * H, rows.places, dq_acc * p.scale, H, H, BH, rows.is_inside, True)
