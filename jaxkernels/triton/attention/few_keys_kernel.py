"""The Triton code of attention's backward pass for few keys (see `jaxkernels.triton.attention.few_keys`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.attention.tile_kernel import (
    Extras,
    add_tile_of_queries,
    change,
    gradient_of_mean,
    load_gradient_rows,
    load_operand,
    place_of,
    store_rows,
    visible,
)


@triton.jit
def attention_few_keys(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, out, dout, lse, dlse,
    dq, dk, dv, p: tl.constexpr, parts: tl.constexpr,
):  # fmt: skip
    """One program: all keys of one batch element and key head, and one part of the queries of its heads."""
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BQ: tl.constexpr = p.block_q
    BK: tl.constexpr = p.block_kv
    BLOCKS: tl.constexpr = p.num_blocks
    SHARE: tl.constexpr = (BLOCKS + parts - 1) // parts
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    part = tl.program_id(1)
    batch = tl.program_id(0) // p.num_kv_heads
    kv_head = tl.program_id(0) % p.num_kv_heads
    at = place_of(batch, x, p)
    key = tl.arange(0, BK)
    is_key = key < at.key_end
    k_row = batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head
    k_tile = load_operand(k + k_row * H, key, K_STRIDE, H, BH, is_key, True, p)
    v_tile = load_operand(v + k_row * D, key, V_STRIDE, D, BD, is_key, True, p)
    first_row = batch.to(tl.int64) * (p.num_queries * p.num_heads)
    dk_acc = tl.full((BK, BH), 0.0, tl.float32)
    dv_acc = tl.full((BK, BD), 0.0, tl.float32)
    dmean = tl.full((BD,), 0.0, tl.float32)
    for block in tl.range(part * SHARE, tl.minimum((part + 1) * SHARE, BLOCKS)):
        rows = load_gradient_rows(block * BQ + tl.arange(0, BQ), q, out, dout, lse, dlse, at, kv_head, p)
        if p.may_be_blind:
            dmean += gradient_of_mean(rows, p)
        head, query = rows.head[None, :], rows.query[None, :]
        products = tl.dot(k_tile, tl.trans(rows.q), input_precision=p.precision)
        s = change(products, x, at, head, query, key[:, None], p)
        weights = tl.exp2(s * p.unit - rows.top[None, :])
        weights = tl.where(visible(x, at, head, query, key[:, None], p, True), weights, 0.0)
        dk_acc, dv_acc, dlogits = add_tile_of_queries(
            dk_acc, dv_acc, weights, s, rows.q, rows.dout, v_tile, rows.shift, p
        )
        dq_tile = tl.dot(tl.trans(dlogits), k_tile, input_precision=p.precision)
        store_rows(dq + first_row * H, rows.places, dq_tile * p.scale, H, H, BH, rows.is_inside, True)
    dk_acc = tl.where(is_key[:, None], dk_acc * p.scale, 0.0)
    dv_acc = tl.where(is_key[:, None], dv_acc, 0.0) + dmean[None, :]
    part_row = part.to(tl.int64) * (tl.num_programs(0) // p.num_kv_heads) * (p.num_keys * p.num_kv_heads) + k_row
    store_rows(dk + part_row * H, key, dk_acc, K_STRIDE, H, BH, key < p.num_keys, True)
    store_rows(dv + part_row * D, key, dv_acc, V_STRIDE, D, BD, key < p.num_keys, True)
