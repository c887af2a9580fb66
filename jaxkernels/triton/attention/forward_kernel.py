"""The Triton code of attention's forward pass (see `jaxkernels.triton.attention.forward`)."""

# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

import triton
import triton.language as tl

from jaxkernels.ops.attention.spec import MASKED_LOGIT
from jaxkernels.triton.attention.tile_kernel import (
    Extras,
    Parts,
    block_and_rest,
    change,
    changed,
    load_bias,
    load_parts,
    load_rows,
    operand,
    part_of,
    place_of,
    products_of,
    store_rows,
    visible,
    visited,
)

#: The logsumexp of a query that sees no key.
BLIND = tl.constexpr(MASKED_LOGIT)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def attention_forward(
    q, k, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, ranges, out, lse,
    p: tl.constexpr,
):  # fmt: skip
    """One program: a tile of rows, the keys that they see or one part of them, one batch element and set of heads."""
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    NUM_BLOCKS: tl.constexpr = p.num_blocks
    NUM_SETS: tl.constexpr = p.num_heads // p.pack
    BQ: tl.constexpr = p.block_q
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    MD: tl.constexpr = p.main_d
    RD: tl.constexpr = p.rest_d
    block, head_set = block_and_rest(NUM_BLOCKS)
    if p.right is not None:
        block = NUM_BLOCKS - 1 - block  # The longest first.
    batch = head_set // NUM_SETS
    first_head = (head_set % NUM_SETS) * p.pack
    split = tl.program_id(1)
    at = place_of(batch, x, p)
    rows = block * BQ + tl.arange(0, BQ)
    query = rows // p.pack
    head = first_head + rows % p.pack
    ALL_ROWS: tl.constexpr = (p.num_queries * p.pack) % p.block_q == 0  # No tile has rows without a query.
    ALL_LIVE: tl.constexpr = ALL_ROWS and not p.query_lengths
    is_query = query < p.num_queries

    # Rows of q, out and lse: row (query, head) lies at query * num_heads + head.
    array_rows = query * p.num_heads + head
    q_base = q + batch.to(tl.int64) * (p.num_queries * p.num_heads * p.head_dim)
    is_live = is_query & (query + at.offset < at.query_end)
    q_tile = load_parts(q_base, array_rows, H, H, p.main_h, p.rest_h, is_live, not ALL_LIVE, p)

    kv_head = first_head // p.group
    if p.has_one_block:
        acc, total, top = attend_to_one_block(q_tile, k, v, x, at, head, kv_head, query, p)
    else:
        first, whole_first, whole_end, end = visited(ranges, batch, block, at, p, False)
        if p.num_splits > 1:
            first, whole_first, whole_end, end = part_of(split, first, whole_first, whole_end, end, p)
        top = tl.full((BQ,), float("-inf"), tl.float32)
        total = tl.full((BQ,), 0.0, tl.float32)
        acc = Parts(tl.full((BQ, MD), 0.0, tl.float32), tl.full((BQ, RD), 0.0, tl.float32) if RD > 0 else total)
        if p.has_left_edge:
            acc, total, top = attend(
                acc, total, top, q_tile, k, v, x, at, head, kv_head, query, first, whole_first, p, True
            )
        else:
            whole_first = first
        acc, total, top = attend(
            acc, total, top, q_tile, k, v, x, at, head, kv_head, query, whole_first, whole_end, p, False
        )
        if p.has_right_edge:
            acc, total, top = attend(
                acc, total, top, q_tile, k, v, x, at, head, kv_head, query, whole_end, end, p, True
            )

    saw = is_live
    if p.may_be_blind or not ALL_LIVE:
        saw = saw & (total != 0)  # A sum that is no number was seen.
        total = tl.where(saw, total, 1.0)
    acc, rest = acc.main * (1.0 / total)[:, None], acc.rest
    if RD > 0:
        rest = rest * (1.0 / total)[:, None]
    logsumexp = (top + tl.log2(total)) * LN2
    if p.may_be_blind:
        if p.num_splits > 1:
            logsumexp = tl.where(saw, logsumexp, float("-inf"))
        else:
            logsumexp = tl.where(saw, logsumexp, BLIND)
            if tl.max((is_live & ~saw).to(tl.int32), axis=0) > 0:
                BK: tl.constexpr = min(p.block_kv, 64)  # A larger block spills registers.
                mean = mean_of_values(v, at, kv_head, p, BK, 0, MD)
                acc = tl.where(saw[:, None], acc, mean[None, :])
                if RD > 0:
                    mean = mean_of_values(v, at, kv_head, p, BK, MD, RD)
                    rest = tl.where(saw[:, None], rest, mean[None, :])
    if not ALL_LIVE:
        acc = tl.where(is_live[:, None], acc, 0.0)
        if RD > 0:
            rest = tl.where(is_live[:, None], rest, 0.0)
    part = split.to(tl.int64) * (tl.num_programs(0) // (NUM_BLOCKS * NUM_SETS)) + batch
    out_base = out + part * (p.num_queries * p.num_heads * p.value_dim)
    if RD > 0:
        store_rows(out_base, array_rows, acc, D, MD, MD, is_query, not ALL_ROWS)
        store_rows(out_base + MD, array_rows, rest, D, D - MD, RD, is_query, not ALL_ROWS)
    else:
        store_rows(out_base, array_rows, acc, D, D, MD, is_query, not ALL_ROWS)
    lse_place = lse + (part * p.num_heads + head) * p.num_queries + query
    if ALL_ROWS:
        tl.store(lse_place, logsumexp)
    else:
        tl.store(lse_place, logsumexp, mask=is_query)


@triton.jit
def attend(
    acc, total, top, q_tile, k, v, x, at, head, kv_head, query, first, end, p: tl.constexpr,
    at_edge: tl.constexpr,
):  # fmt: skip
    """Adds blocks of keys and values to the running softmax.

    Args:
      acc, total: sums of exp2(logit - top) times values, and without them, of logits in base 2.
      top: the largest logit so far, in base 2.
      at_edge: whether pairs may be masked.
    """
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    BK: tl.constexpr = p.block_kv
    k_base = k + (at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head) * p.head_dim
    v_base = v + (at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head) * p.value_dim
    K_STRIDE: tl.constexpr = p.num_kv_heads * p.head_dim
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    main, rest = acc.main, acc.rest
    for block in tl.range(first, end):
        key = block * BK + tl.arange(0, BK)
        k_tile = load_parts(k_base, key, K_STRIDE, H, p.main_h, p.rest_h, key < at.key_end, at_edge, p)
        s = change(products_of(q_tile, k_tile, p.rest_h, p), x, at, head[:, None], query[:, None], key[None, :], p)
        if at_edge or p.mask_shape is not None:
            s = tl.where(visible(x, at, head[:, None], query[:, None], key[None, :], p, at_edge), s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1) * p.unit)
        weights, shift = weights_of(s, new_top, p, at_edge)
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, axis=1)
        v_tile = load_parts(v_base, key, V_STRIDE, D, p.main_d, p.rest_d, key < at.key_end, at_edge, p)
        weights = operand(weights, v_tile.main, p)
        main = tl.dot(weights, v_tile.main, main * fade[:, None], input_precision=p.precision)
        if p.rest_d > 0:
            rest = tl.dot(weights, v_tile.rest, rest * fade[:, None], input_precision=p.precision)
        top = new_top
    return Parts(main, rest), total, top


@triton.jit
def attend_to_one_block(q_tile, k, v, x, at, head, kv_head, query, p: tl.constexpr):
    """What `attend` returns for all keys, which are one block. All loads are under way before the first product."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    AT_EDGE: tl.constexpr = p.has_left_edge or p.has_right_edge
    kv_row = at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head
    key = tl.arange(0, p.block_kv)
    is_key = key < p.num_keys
    k_tile = load_parts(k + kv_row * H, key, p.num_kv_heads * H, H, p.main_h, p.rest_h, is_key, p.is_ragged, p)
    v_tile = load_parts(v + kv_row * D, key, p.num_kv_heads * D, D, p.main_d, p.rest_d, is_key, p.is_ragged, p)
    bias = load_bias(x, at, head[:, None], query[:, None], key[None, :], p)
    seen = visible(x, at, head[:, None], query[:, None], key[None, :], p, AT_EDGE)
    v_main, v_rest = v_tile.main, v_tile.rest
    if p.key_lengths:  # The load does not wait for the length.
        v_main = tl.where((key < at.key_end)[:, None], v_main, 0.0)
        if p.rest_d > 0:
            v_rest = tl.where((key < at.key_end)[:, None], v_rest, 0.0)
    s = changed(products_of(q_tile, k_tile, p.rest_h, p), bias, p)
    if AT_EDGE or p.mask_shape is not None:
        s = tl.where(seen, s, float("-inf"))
    top = tl.max(s, axis=1) * p.unit
    weights, _ = weights_of(s, top, p, AT_EDGE)
    total = tl.sum(weights, axis=1)
    weights = operand(weights, v_main, p)
    main = tl.dot(weights, v_main, input_precision=p.precision)
    rest = tl.dot(weights, v_rest, input_precision=p.precision) if p.rest_d > 0 else total
    return Parts(main, rest), total, top


@triton.jit
def weights_of(s, top, p: tl.constexpr, at_edge: tl.constexpr):
    """Returns exp2(s * p.unit - shift) and the shift: `top`, or 0 where no key was seen.

    Args:
      s: logits.
      top: the row's largest logit so far, in base 2. An unchanged one fades by exactly 1: rounding would add up over
        the blocks.
    """
    shift = top
    if at_edge or p.may_be_blind:
        shift = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp2(s * p.unit - shift[:, None]), shift


@triton.jit
def combine_parts(
    outs, lses, v, bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset, out, lse,
    p: tl.constexpr,
):  # fmt: skip
    """One program: a query of a head. The softmax over the logsumexps of the parts of the keys weighs their outputs.

    Args:
      outs: (parts, B, T, N, D) float32.
      lses: (parts, B, N, T), minus infinity where a query sees no key of the part.
    """
    x = Extras(bias, mask, query_lengths, key_lengths, query_segments, key_segments, query_offset)
    D: tl.constexpr = p.value_dim
    BD: tl.constexpr = p.block_d
    PARTS: tl.constexpr = p.block_splits
    ROWS: tl.constexpr = p.num_queries * p.num_heads
    row, batch = block_and_rest(ROWS)  # Row (query, head) is query * num_heads + head.
    query = row // p.num_heads
    head = row % p.num_heads
    at = place_of(batch, x, p)
    is_live = query + at.offset < at.query_end

    split = tl.arange(0, PARTS)
    part = split.to(tl.int64) * (tl.num_programs(0) // ROWS) + batch
    lse_rows = (part * p.num_heads + head) * p.num_queries + query
    logsumexps = tl.load(lses + lse_rows, mask=split < p.num_splits, other=float("-inf"))
    top = tl.max(logsumexps, axis=0)
    weights = tl.exp(logsumexps - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weights, axis=0)
    columns = tl.arange(0, BD)
    places = (part * ROWS + row)[:, None] * D + columns[None, :]
    is_inside = (split < p.num_splits)[:, None] & (columns < D)[None, :]
    values = tl.load(outs + places, mask=is_inside, other=0.0)
    combined = tl.sum(values * weights[:, None], axis=0)
    divisor = tl.where(total == 0, 1.0, total)
    logsumexp = top + tl.log(divisor)
    combined = combined / divisor
    if total == 0:
        logsumexp = BLIND
        combined = tl.zeros((BD,), tl.float32)
        if is_live:
            combined = mean_of_values(v, at, head // p.group, p, 16, 0, BD)  # A larger block spills registers.
    first_row = batch.to(tl.int64) * ROWS
    tl.store(out + (first_row + row) * D + columns, combined.to(out.dtype.element_ty), mask=columns < D)
    tl.store(lse + first_row + head * p.num_queries + query, logsumexp)


@triton.jit
def mean_of_values(v, at, kv_head, p: tl.constexpr, BK: tl.constexpr, first: tl.constexpr, block: tl.constexpr):
    """The mean of all values of a head, in `block` columns from `first` on. It adds up blocks of BK keys. Padding
    counts, but for what is not finite.
    """
    SIZE: tl.constexpr = p.value_dim - first if p.value_dim - first < block else block
    V_STRIDE: tl.constexpr = p.num_kv_heads * p.value_dim
    v_base = v + (at.batch.to(tl.int64) * p.num_keys * p.num_kv_heads + kv_head) * p.value_dim + first
    total = tl.full((block,), 0.0, tl.float32)
    for start in tl.range(0, p.num_keys, BK):
        key = start + tl.arange(0, BK)
        values = load_rows(v_base, key, V_STRIDE, SIZE, block, key < p.num_keys, True).to(tl.float32)
        is_counted = (key < at.key_end)[:, None] | (tl.abs(values) < float("inf"))
        total += tl.sum(tl.where(is_counted, values, 0.0), axis=0)
    return total / p.num_keys
