"""The Triton code of attention's backward pass for few keys (see `jaxkernels.triton.attention.few_keys`)."""

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
        rows = block * BQ + tl.arange(0, BQ)
        query = rows // p.pack
        head = kv_head * p.pack + rows % p.pack
        is_inside = query < p.num_queries
        is_query = is_inside & (query + at.offset < at.query_end)
        # Rows of q, out, dout and dq: row (query, head) lies at query * num_heads + head.
        array_rows = query * p.num_heads + head
        q_tile = load_operand(q + first_row * H, array_rows, H, H, BH, is_query, True, p)
        gradients = load_rows(dout + first_row * D, array_rows, D, D, BD, is_query, True)
        outputs = load_rows(out + first_row * D, array_rows, D, D, BD, is_query, True)
        sums = first_row + head * p.num_queries + query
        logsumexp = tl.load(lse + sums, mask=is_query, other=0.0)
        saw = is_query & (logsumexp > BLIND)
        top = tl.where(saw, logsumexp, float("inf")) * LOG2E
        shift = tl.sum(outputs.to(tl.float32) * gradients.to(tl.float32), axis=1)
        if p.has_dlse:
            shift -= tl.load(dlse + sums, mask=is_query, other=0.0)
        shift = tl.where(saw, shift, 0.0)
        if p.may_be_blind:
            # The output of a query that sees no key is the mean of all values.
            blind = tl.where((is_query & ~saw)[:, None], gradients.to(tl.float32), 0.0)
            dmean += tl.sum(blind, axis=0) / p.num_keys
        dout_tile = operand(gradients, gradients, p)
        # Tiles of logits have keys in rows.
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=p.precision)
        s = change(products, x, at, head[None, :], query[None, :], key[:, None], p)
        weights = tl.exp2(s * p.unit - top[None, :])
        weights = tl.where(visible(x, at, head[None, :], query[None, :], key[:, None], p, True), weights, 0.0)
        dv_acc = tl.dot(operand(weights, dout_tile, p), dout_tile, dv_acc, input_precision=p.precision)
        dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision=p.precision)
        dlogits = operand(slope(weights * (dweights - shift[None, :]), s, p), q_tile, p)
        dk_acc = tl.dot(dlogits, q_tile, dk_acc, input_precision=p.precision)
        dq_tile = tl.dot(tl.trans(dlogits), k_tile, input_precision=p.precision)
        store_rows(dq + first_row * H, array_rows, dq_tile * p.scale, H, H, BH, is_inside, True)
    dk_acc = tl.where(is_key[:, None], dk_acc * p.scale, 0.0)
    dv_acc = tl.where(is_key[:, None], dv_acc, 0.0) + dmean[None, :]
    part_row = part.to(tl.int64) * (tl.num_programs(0) // p.num_kv_heads) * (p.num_keys * p.num_kv_heads) + k_row
    store_rows(dk + part_row * H, key, dk_acc, K_STRIDE, H, BH, key < p.num_keys, True)
    store_rows(dv + part_row * D, key, dv_acc, V_STRIDE, D, BD, key < p.num_keys, True)
