"""The Triton code of attention's backward pass (see `jaxkernels.triton.attention.backward`).

In every kernel, `lse` is infinite for queries that have no part in the gradients of their pairs: padding and queries
that see no key. Their weights are then zero.
"""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.triton.attention.tile_kernel import (
    LOG2E,
    Extras,
    add_tile_of_queries,
    block_and_rest,
    change,
    load_operand,
    operand,
    part_of,
    place_of,
    slope,
    store_rows,
    visible,
    visited,
)


@triton.jit
def attention_keys_and_values(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, ranges, dout, lse,
    delta, mean, dk, dv, p: tl.constexpr, parts: tl.constexpr, adds_mean: tl.constexpr,
):  # fmt: skip
    """dk and dv of a block of keys, over the queries that see them, of one part of a group of query heads.

    `mean` is what queries that see no key add to dv, if `adds_mean`.
    """
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BK: tl.constexpr = p.block_kv
    HEADS: tl.constexpr = p.group // parts
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    DK_STRIDE: tl.constexpr = p.num_kv_heads * parts * p.head_dim
    DV_STRIDE: tl.constexpr = p.num_kv_heads * parts * p.value_dim
    block, rest = block_and_rest((p.num_keys + p.block_kv - 1) // p.block_kv)
    batch = rest // (p.num_kv_heads * parts)
    kv_part = rest % (p.num_kv_heads * parts)
    kv_head = kv_part // parts
    first_head = kv_head * p.group + (kv_part % parts) * HEADS
    at = place_of(batch, x, p)

    key = block * BK + tl.arange(0, BK)
    is_key = key < at.key_end
    k_row = batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head
    k_tile = load_operand(k + k_row * p.head_dim, key, K_STRIDE, H, BH, is_key, True, p)
    v_tile = load_operand(v + k_row * p.value_dim, key, V_STRIDE, D, BD, is_key, True, p)
    first, whole_first, whole_end, end = visited(ranges, batch, block, at, p, True)
    if not p.has_left_edge:
        whole_first = first
    dk_acc = tl.full((BK, BH), 0.0, tl.float32)
    dv_acc = tl.full((BK, BD), 0.0, tl.float32)
    for i in range(HEADS):
        head = first_head + i
        if p.has_left_edge:
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, x, at, head, key, first, whole_first, p, True
            )
        dk_acc, dv_acc = add_queries(
            dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, x, at, head, key, whole_first, whole_end, p, False
        )
        if p.has_right_edge:
            dk_acc, dv_acc = add_queries(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, x, at, head, key, whole_end, end, p, True
            )
    dk_acc = tl.where(is_key[:, None], dk_acc * p.scale, 0.0)
    dv_acc = tl.where(is_key[:, None], dv_acc, 0.0)
    if adds_mean:
        columns = tl.arange(0, BD)
        dv_acc += tl.load(mean + (batch * p.num_kv_heads + kv_head) * D + columns, mask=columns < D, other=0.0)[None, :]
    dk_row = batch.to(tl.int64) * p.num_keys * p.num_kv_heads * parts + kv_part
    # The mask is not needed, but without it ptxas spills 72 bytes at head dimension 128 on Hopper.
    store_rows(dk + dk_row * p.head_dim, key, dk_acc, DK_STRIDE, H, BH, key < p.num_keys, True)
    store_rows(dv + dk_row * p.value_dim, key, dv_acc, DV_STRIDE, D, BD, key < p.num_keys, True)


@triton.jit
def add_queries(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, x, at, head, key, first, end, p: tl.constexpr,
    at_edge: tl.constexpr,
):  # fmt: skip
    """Adds blocks of queries of one head to dk / scale and dv. Tiles of logits have keys in rows."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BQ: tl.constexpr = p.block_q
    Q_STRIDE: tl.constexpr = p.num_heads * p.head_dim
    O_STRIDE: tl.constexpr = p.num_heads * p.value_dim
    row = at.batch.to(tl.int64) * p.num_queries * p.num_heads + head
    q_base, dout_base = q + row * p.head_dim, dout + row * p.value_dim
    sums = (at.batch * p.num_heads + head).to(tl.int64) * p.num_queries
    for block in tl.range(first, end):
        query = block * BQ + tl.arange(0, BQ)
        is_query = (query < p.num_queries) & (query + at.offset < at.query_end)
        q_tile = load_operand(q_base, query, Q_STRIDE, H, BH, is_query, at_edge, p)
        dout_tile = load_operand(dout_base, query, O_STRIDE, D, BD, is_query, at_edge, p)
        if at_edge:
            top = tl.load(lse + sums + query, mask=is_query, other=float("inf"))
            shift = tl.load(delta + sums + query, mask=is_query, other=0.0)
        else:
            top = tl.load(lse + sums + query)
            shift = tl.load(delta + sums + query)
        products = tl.dot(k_tile, tl.trans(q_tile), input_precision=p.precision)
        s = change(products, x, at, head, query[None, :], key[:, None], p)
        weights = tl.exp2(s * p.unit - (top * LOG2E)[None, :])
        if at_edge or p.mask_shape is not None:
            weights = tl.where(visible(x, at, head, query[None, :], key[:, None], p, at_edge), weights, 0.0)
        dk_acc, dv_acc, _ = add_tile_of_queries(dk_acc, dv_acc, weights, s, q_tile, dout_tile, v_tile, shift, p)
    return dk_acc, dv_acc


@triton.jit
def attention_queries(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, ranges, dout, lse,
    delta, dq, p: tl.constexpr,
):  # fmt: skip
    """dq of a block of queries of one head: of all keys, or of one part of them."""
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
    dout_tile = load_operand(dout + row * p.value_dim, query, O_STRIDE, D, BD, is_query, True, p)
    sums = (batch * p.num_heads + head).to(tl.int64) * p.num_queries
    top = tl.load(lse + sums + query, mask=is_query, other=float("inf")) * LOG2E
    shift = tl.load(delta + sums + query, mask=is_query, other=0.0)

    first, whole_first, whole_end, end = visited(ranges, batch, block, at, p, False)
    if p.num_splits > 1:
        first, whole_first, whole_end, end = part_of(tl.program_id(1), first, whole_first, whole_end, end, p)
    if not p.has_left_edge:
        whole_first = first
    acc = tl.full((BQ, BH), 0.0, tl.float32)
    if p.has_left_edge:
        acc = add_keys(acc, q_tile, dout_tile, top, shift, k, v, x, at, head, query, first, whole_first, p, True)
    acc = add_keys(acc, q_tile, dout_tile, top, shift, k, v, x, at, head, query, whole_first, whole_end, p, False)
    if p.has_right_edge:
        acc = add_keys(acc, q_tile, dout_tile, top, shift, k, v, x, at, head, query, whole_end, end, p, True)
    part = tl.program_id(1).to(tl.int64) * (tl.num_programs(0) // NUM_BLOCKS) * p.num_queries
    store_rows(
        dq + (part + row) * p.head_dim,
        query,
        acc * p.scale,
        Q_STRIDE,
        H,
        BH,
        query < p.num_queries,
        p.num_queries % p.block_q != 0,
    )


@triton.jit
def add_keys(
    acc, q_tile, dout_tile, top, shift, k, v, x, at, head, query, first, end, p: tl.constexpr, at_edge: tl.constexpr
):
    """Adds blocks of keys to dq / scale."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BK: tl.constexpr = p.block_kv
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    row = at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + head // p.group
    k_base, v_base = k + row * p.head_dim, v + row * p.value_dim
    for block in tl.range(first, end):
        key = block * BK + tl.arange(0, BK)
        is_key = key < at.key_end
        k_tile = load_operand(k_base, key, K_STRIDE, H, BH, is_key, at_edge, p)
        v_tile = load_operand(v_base, key, V_STRIDE, D, BD, is_key, at_edge, p)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=p.precision)
        dlogits = gradient_of_logits(
            products, dout_tile, v_tile, top, shift, x, at, head, query[:, None], key[None, :], p, at_edge
        )
        acc = tl.dot(operand(dlogits, k_tile, p), k_tile, acc, input_precision=p.precision)
    return acc


@triton.jit
def gradient_of_logits(
    products, dout_tile, v_tile, top, shift, x, at, head, query, key, p: tl.constexpr, at_edge: tl.constexpr
):
    """The gradient of scale * q k^T + bias, for a tile with queries in rows. `top` is in base 2."""
    s = change(products, x, at, head, query, key, p)
    weights = tl.exp2(s * p.unit - top[:, None])
    if at_edge or p.mask_shape is not None:
        weights = tl.where(visible(x, at, head, query, key, p, at_edge), weights, 0.0)
    dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision=p.precision)
    return slope(weights * (dweights - shift[:, None]), s, p)


@triton.jit
def attention_biases(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, ranges, dout, lse,
    delta, dbias, p: tl.constexpr, batches: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of the bias.

    A program sums over the axes that the result, of `shape`, has not: all `batches`, all heads, all blocks of queries
    or of keys. So the sum stays on the chip, and its order is fixed.
    """
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    BQ: tl.constexpr = p.block_q
    BK: tl.constexpr = p.block_kv
    NUM_Q: tl.constexpr = p.num_blocks
    NUM_KV: tl.constexpr = (p.num_keys + p.block_kv - 1) // p.block_kv
    TILES_Q: tl.constexpr = NUM_Q if shape[2] > 1 else 1
    TILES_KV: tl.constexpr = NUM_KV if shape[3] > 1 else 1
    first_q, rest = block_and_rest(TILES_Q)
    first_kv, index = rest % TILES_KV, rest // TILES_KV
    first_batch, num_batches = index // shape[1], 1
    first_head, num_heads = index % shape[1], 1
    num_q, num_kv = 1, 1
    if shape[0] == 1:
        num_batches = batches
    if shape[1] == 1:
        num_heads = p.num_heads
    if shape[2] == 1:
        num_q = NUM_Q
    if shape[3] == 1:
        num_kv = NUM_KV
    acc = tl.full((BQ, BK), 0.0, tl.float32)
    for i in range(num_batches):
        batch = first_batch + i
        at = place_of(batch, x, p)
        for j in range(num_heads):
            for block in range(num_q):
                q_block = first_q + block
                first, _, _, end = visited(ranges, batch, q_block, at, p, False)
                low, high = tl.maximum(first, first_kv), tl.minimum(end, first_kv + num_kv)
                acc = add_pairs(acc, q, k, v, dout, lse, delta, x, at, first_head + j, q_block, low, high, p)
    query = first_q * BQ + tl.arange(0, BQ)
    key = first_kv * BK + tl.arange(0, BK)
    row = (first_batch * shape[1] + first_head).to(tl.int64) * shape[2]
    if shape[2] == 1 and shape[3] == 1:
        tl.store(dbias + row, tl.sum(tl.sum(acc, axis=1), axis=0).to(dbias.dtype.element_ty))
    elif shape[2] == 1:
        tl.store(dbias + row * shape[3] + key, tl.sum(acc, axis=0).to(dbias.dtype.element_ty), mask=key < shape[3])
    elif shape[3] == 1:
        tl.store(dbias + row + query, tl.sum(acc, axis=1).to(dbias.dtype.element_ty), mask=query < shape[2])
    else:
        inside = (query < shape[2])[:, None] & (key < shape[3])[None, :]
        pointers = dbias + (row + query)[:, None] * shape[3] + key[None, :]
        tl.store(pointers, acc.to(dbias.dtype.element_ty), mask=inside)


@triton.jit
def add_pairs(acc, q, k, v, dout, lse, delta, x, at, head, q_block, first, end, p: tl.constexpr):
    """Adds the gradients of logits of a block of queries and some blocks of keys, one tile on the other."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BH: tl.constexpr = p.block_h
    BD: tl.constexpr = p.block_d
    BQ: tl.constexpr = p.block_q
    BK: tl.constexpr = p.block_kv
    Q_STRIDE: tl.constexpr = p.num_heads * p.head_dim
    O_STRIDE: tl.constexpr = p.num_heads * p.value_dim
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    row = at.batch.to(tl.int64) * p.num_queries * p.num_heads + head
    k_row = at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + head // p.group
    sums = (at.batch * p.num_heads + head).to(tl.int64) * p.num_queries
    query = q_block * BQ + tl.arange(0, BQ)
    is_query = (query < p.num_queries) & (query + at.offset < at.query_end)
    top = tl.load(lse + sums + query, mask=is_query, other=float("inf")) * LOG2E
    shift = tl.load(delta + sums + query, mask=is_query, other=0.0)
    q_tile = load_operand(q + row * p.head_dim, query, Q_STRIDE, H, BH, is_query, True, p)
    dout_tile = load_operand(dout + row * p.value_dim, query, O_STRIDE, D, BD, is_query, True, p)
    for block in tl.range(first, end):
        key = block * BK + tl.arange(0, BK)
        is_key = key < at.key_end
        k_tile = load_operand(k + k_row * p.head_dim, key, K_STRIDE, H, BH, is_key, True, p)
        v_tile = load_operand(v + k_row * p.value_dim, key, V_STRIDE, D, BD, is_key, True, p)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=p.precision)
        acc += gradient_of_logits(
            products, dout_tile, v_tile, top, shift, x, at, head, query[:, None], key[None, :], p, True
        )
    return acc
