"""What the Triton kernels of attention share: a tile of rows, of keys, of logits.

A tile of logits has a place for each pair of a row and a key. Rows are queries, and where heads are packed, queries of
several heads. Helpers take indices that broadcast to the tile: rows as (block_q, 1) and keys as (1, block_kv), or both
the other way round where keys are the rows of a product.
"""

# Triton compiles these functions; pyright does not know its types of values in kernels.
# pyright: basic, reportArgumentType=false, reportOperatorIssue=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportReturnType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxkernels.ops.attention.spec import MASKED_LOGIT
from jaxkernels.triton.attention.problem import LOG2E as _LOG2E
from jaxkernels.triton.functions import tanh

LOG2E = tl.constexpr(_LOG2E)
#: A query that sees no key has a logsumexp below.
BLIND_BELOW = tl.constexpr(MASKED_LOGIT / 2)


class Extras(NamedTuple):
    """Pointers to the optional operands. Those that are not given are not read."""

    bias: Any
    mask: Any
    query_lengths: Any
    key_lengths: Any
    query_segments: Any
    key_segments: Any
    query_offset: Any


class Place(NamedTuple):
    """Where the tiles of a program are.

    Attributes:
      batch: index of the batch element.
      offset: position of the first query in its sequence.
      query_end: position from which on queries are padding.
      key_end: index from which on keys are padding.
    """

    batch: Any
    offset: Any
    query_end: Any
    key_end: Any


class Parts(NamedTuple):
    """A tile of heads with its columns in one or two blocks. `rest` is not used if there is one."""

    main: Any
    rest: Any


class GradientRows(NamedTuple):
    """A tile of queries of all heads of a key head in the backward pass: row r is query r // p.pack of head r % p.pack.

    Attributes:
      query, head: their indices.
      is_inside: whether a row has a query. The last rows of the last tile may have none.
      places: of rows in q, out, dout and dq of the batch element.
      q, dout: operands of products; `gradients`: dout before.
      is_blind: which rows have a query that sees no key.
      top: the logsumexp in base 2, infinite for rows that have no part in the gradients of pairs.
      shift: delta, zero for those rows.
    """

    query: Any
    head: Any
    is_inside: Any
    places: Any
    q: Any
    gradients: Any
    dout: Any
    is_blind: Any
    top: Any
    shift: Any


@triton.jit
def place_of(batch, extras, p: tl.constexpr):
    """The place of a program that works on a batch element."""
    offset = batch * 0
    if p.query_offset:
        offset = tl.load(extras.query_offset)
    query_end = offset + p.num_queries
    if p.query_lengths:
        query_end = tl.minimum(query_end, tl.load(extras.query_lengths + batch))
    key_end = batch * 0 + p.num_keys
    if p.key_lengths:
        key_end = tl.minimum(key_end, tl.load(extras.key_lengths + batch))
    return Place(batch, offset, query_end, key_end)


@triton.jit
def block_and_rest(num_blocks: tl.constexpr):
    """Which of `num_blocks` blocks a program has, and the index of the heads that it belongs to. Both are in the first
    axis of the grid: the others have at most 65,535 programs.
    """
    program = tl.program_id(0)
    return program % num_blocks, program // num_blocks


@triton.jit
def visited(ranges, batch, block, at, p: tl.constexpr, over_queries: tl.constexpr):
    """The first block that is visited, the first and the end of those that need no mask, and the end.

    A tile of rows visits blocks of keys. With `over_queries`, a block of keys visits blocks of queries. Indices and
    lengths give the ranges. With segments they are in a table.
    """
    if p.segments:
        if over_queries:
            row = batch * ((p.num_keys + p.block_kv - 1) // p.block_kv) + block
        else:
            row = batch * p.num_blocks + block
        first = tl.load(ranges + 4 * row)
        whole_first = tl.load(ranges + 4 * row + 1)
        whole_end = tl.load(ranges + 4 * row + 2)
        end = tl.load(ranges + 4 * row + 3)
    elif over_queries:
        start = block * p.block_kv - at.offset
        stop = tl.minimum((block + 1) * p.block_kv, p.num_keys) - at.offset
        size = tl.maximum(at.query_end - at.offset, 0)
        if p.key_lengths:
            size = tl.where(start + at.offset < at.key_end, size, 0)
        first, whole_first, whole_end, end = _blocks_in_band(start, stop, p.right, p.left, size, p.block_q)
    else:
        start = block * p.block_q // p.pack + at.offset
        stop = (tl.minimum((block + 1) * p.block_q, p.num_queries * p.pack) - 1) // p.pack + 1 + at.offset
        size = tl.maximum(at.key_end, 0)
        if p.query_lengths:  # Padding alone visits nothing; beside others it is set to zero at the end.
            size = tl.where(start < at.query_end, size, 0)
        first, whole_first, whole_end, end = _blocks_in_band(start, stop, p.left, p.right, size, p.block_kv)
    return first, whole_first, whole_end, end


@triton.jit
def part_of(split, first, whole_first, whole_end, end, p: tl.constexpr):
    """The part of the blocks from `visited` that is a program's, of p.num_splits."""
    share = (end - first + p.num_splits - 1) // p.num_splits
    first = first + split * share
    end = tl.minimum(end, first + share)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)
    return first, whole_first, whole_end, end


@triton.jit
def _blocks_in_band(start, stop, before: tl.constexpr, behind: tl.constexpr, size, block: tl.constexpr):
    """What `visited` returns, for the places from `start` to before `stop`. A place sees the `size` indices from
    `before` before it to `behind` behind it; None leaves a side open.
    """
    first, whole_first = start * 0, start * 0
    whole_end, end = size // block, (size + block - 1) // block
    if before is not None:
        first = tl.maximum(start - before, 0) // block
        whole_first = (tl.maximum(stop - 1 - before, 0) + block - 1) // block
    if behind is not None:
        end = (tl.minimum(tl.maximum(stop + behind, 0), size) + block - 1) // block
        whole_end = tl.minimum(tl.maximum(start + 1 + behind, 0), size) // block
    first = tl.minimum(first, end)
    whole_first = tl.minimum(tl.maximum(whole_first, first), end)
    whole_end = tl.minimum(tl.maximum(whole_end, whole_first), end)
    return first, whole_first, whole_end, end


@triton.jit
def load_rows(
    base, rows, stride: tl.constexpr, size: tl.constexpr, block: tl.constexpr, is_inside, checks: tl.constexpr
):
    """Loads rows of an array: (rows, block). Columns from `size` on are zero.

    Args:
      base: pointer to the first row.
      rows: (n,) indices.
      stride: elements from a row to the next.
      is_inside: (n,) which rows to load, if `checks`; zeros for the others.
    """
    columns = tl.arange(0, block)
    pointers = base + rows[:, None] * stride + columns[None, :]
    if checks and size == block:
        values = tl.load(pointers, mask=is_inside[:, None], other=0.0)
    elif checks:
        values = tl.load(pointers, mask=is_inside[:, None] & (columns < size)[None, :], other=0.0)
    elif size == block:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(columns < size)[None, :], other=0.0)
    return values


@triton.jit
def operand(x, like, p: tl.constexpr):
    """Values as an operand of a product, in the dtype of another tile. Float32 is rounded to the nearest TF32 number:
    tensor cores cut the lower bits off.
    """
    x = x.to(like.dtype)
    if x.dtype == tl.float32 and p.precision == "tf32":
        bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        x = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
def load_operand(
    base, rows, stride: tl.constexpr, size: tl.constexpr, block: tl.constexpr, is_inside, checks: tl.constexpr,
    p: tl.constexpr,
):  # fmt: skip
    """Loads rows of an array as an operand of products."""
    values = load_rows(base, rows, stride, size, block, is_inside, checks)
    return operand(values, values, p)


@triton.jit
def load_parts(
    base, rows, stride: tl.constexpr, size: tl.constexpr, main: tl.constexpr, rest: tl.constexpr, is_inside,
    checks: tl.constexpr, p: tl.constexpr,
):  # fmt: skip
    """`load_operand` for heads in two blocks of columns, `main` and `rest`; in one if `rest` is 0."""
    if rest > 0:
        first = load_operand(base, rows, stride, main, main, is_inside, checks, p)
        second = load_operand(base + main, rows, stride, size - main, rest, is_inside, checks, p)
    else:
        first = load_operand(base, rows, stride, size, main, is_inside, checks, p)
        second = first
    return Parts(first, second)


@triton.jit
def products_of(rows, columns, rest: tl.constexpr, p: tl.constexpr):
    """The products of the heads of two tiles: (rows, columns)."""
    products = tl.dot(rows.main, tl.trans(columns.main), input_precision=p.precision)
    if rest > 0:
        products = tl.dot(rows.rest, tl.trans(columns.rest), products, input_precision=p.precision)
    return products


@triton.jit
def load_gradient_rows(rows, q, out, dout, lse, dlse, at, kv_head, p: tl.constexpr):
    """Loads a tile of queries of all heads of a key head, with what the backward pass needs of each."""
    H: tl.constexpr = p.head_dim
    D: tl.constexpr = p.value_dim
    query = rows // p.pack
    head = kv_head * p.pack + rows % p.pack
    is_inside = query < p.num_queries
    is_query = is_inside & (query + at.offset < at.query_end)
    # Rows of q, out, dout and dq: row (query, head) lies at query * num_heads + head.
    places = query * p.num_heads + head
    first_row = at.batch.to(tl.int64) * (p.num_queries * p.num_heads)
    q_tile = load_operand(q + first_row * H, places, H, H, p.block_h, is_query, True, p)
    gradients = load_rows(dout + first_row * D, places, D, D, p.block_d, is_query, True)
    outputs = load_rows(out + first_row * D, places, D, D, p.block_d, is_query, True)
    sums = first_row + head * p.num_queries + query
    logsumexp = tl.load(lse + sums, mask=is_query, other=0.0)
    saw = is_query & (logsumexp > BLIND_BELOW)
    top = tl.where(saw, logsumexp, float("inf")) * LOG2E
    shift = tl.sum(outputs.to(tl.float32) * gradients.to(tl.float32), axis=1)
    if p.has_dlse:
        shift -= tl.load(dlse + sums, mask=is_query, other=0.0)
    shift = tl.where(saw, shift, 0.0)
    dout_tile = operand(gradients, gradients, p)
    return GradientRows(query, head, is_inside, places, q_tile, gradients, dout_tile, is_query & ~saw, top, shift)


@triton.jit
def gradient_of_mean(rows, p: tl.constexpr):
    """What the queries of a tile that see no key add to the gradient of each value: their output is the mean of all."""
    blind = tl.where(rows.is_blind[:, None], rows.gradients.to(tl.float32), 0.0)
    return tl.sum(blind, axis=0) / p.num_keys


@triton.jit
def store_rows(
    base, rows, values, stride: tl.constexpr, size: tl.constexpr, block: tl.constexpr, is_inside, checks: tl.constexpr
):  # fmt: skip
    """Stores the first `size` columns of (rows, block) values; only the rows that are inside, if `checks`."""
    columns = tl.arange(0, block)
    pointers = base + rows[:, None] * stride + columns[None, :]
    values = values.to(base.dtype.element_ty)
    if checks:
        tl.store(pointers, values, mask=is_inside[:, None] & (columns < size)[None, :])
    elif size == block:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(columns < size)[None, :])


@triton.jit
def load_pairs(base, shape: tl.constexpr, at, head, query, key):
    """Values of a bias or a mask of this shape at pairs of a query and a key. An axis of size 1 stands for any size."""
    if shape[0] > 1:
        base += at.batch.to(tl.int64) * (shape[1] * shape[2] * shape[3])
    places = head * 0
    if shape[1] > 1:
        places += head * (shape[2] * shape[3])
    if shape[2] > 1:
        places = places + query * shape[3]
    if shape[3] > 1:
        places = places + key
    if shape[2] > 1 and shape[3] > 1:
        return tl.load(base + places, mask=(query < shape[2]) & (key < shape[3]), other=0)
    elif shape[2] > 1:
        return tl.load(base + places, mask=query < shape[2], other=0)
    elif shape[3] > 1:
        return tl.load(base + places, mask=key < shape[3], other=0)
    else:
        return tl.load(base + places)


@triton.jit
def change(products, x, at, head, query, key, p: tl.constexpr):
    """Logits over p.unit, from products of queries and keys: scale, bias and soft cap.

    Args:
      x, at: the program's `Extras` and `Place`.
      head, query, key: indices that broadcast to the tile.
    """
    return changed(products, load_bias(x, at, head, query, key, p), p)


@triton.jit
def load_bias(x, at, head, query, key, p: tl.constexpr):
    """Values of the bias at pairs of a query and a key. Without a bias they are not read."""
    bias = query
    if p.bias_shape is not None:
        BIAS: tl.constexpr = p.bias_shape
        bias = load_pairs(x.bias, BIAS, at, head, query, key)
    return bias


@triton.jit
def changed(products, bias, p: tl.constexpr):
    """What `change` returns, with the values of the bias loaded."""
    s = products
    if p.factor != 1.0 and p.bias_shape is None:
        s = s * p.factor
    if p.bias_shape is not None:
        s = s * p.scale + bias.to(tl.float32)
        if p.soft_cap is not None:
            s = s / p.soft_cap
    if p.soft_cap is not None:
        s = tanh(s)
    return s


@triton.jit
def slope(gradient, s, p: tl.constexpr):
    """Takes a gradient of the logits to before the soft cap.

    Args:
      s: what `change` returned.
    """
    if p.soft_cap is not None:
        gradient = gradient * (1 - s * s)
    return gradient


@triton.jit
def visible(x, at, head, query, key, p: tl.constexpr, at_edge: tl.constexpr):
    """Which pairs of a query and a key see each other. Rows past the last query count as queries.

    Args:
      query: index, without the offset.
      at_edge: whether the tile may have masked pairs besides those of the dense mask.
    """
    seen = key == key
    if p.mask_shape is not None:
        MASK: tl.constexpr = p.mask_shape
        seen = seen & (load_pairs(x.mask, MASK, at, head, query, key) != 0)
    if at_edge:
        position = query + at.offset
        if p.is_ragged or p.key_lengths:
            seen = seen & (key < at.key_end)
        if p.right is not None:
            seen = seen & (key <= position + p.right)
        if p.left is not None:
            seen = seen & (key >= position - p.left)
        if p.segments:
            queries = tl.load(x.query_segments + at.batch * p.num_queries + query, mask=query < p.num_queries, other=0)
            keys = tl.load(x.key_segments + at.batch * p.num_keys + key, mask=key < p.num_keys, other=0)
            seen = seen & (queries == keys)
    return seen


@triton.jit
def add_tile_of_queries(dk_acc, dv_acc, weights, s, q_tile, dout_tile, v_tile, shift, p: tl.constexpr):
    """Adds a tile of queries to dk / scale and dv. Tiles of logits have keys in rows.

    Args:
      s: what `change` returned.

    Returns:
      Both sums, and the gradient of the logits as an operand of products.
    """
    dv_acc = tl.dot(operand(weights, dout_tile, p), dout_tile, dv_acc, input_precision=p.precision)
    dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision=p.precision)
    dlogits = operand(slope(weights * (dweights - shift[None, :]), s, p), q_tile, p)
    dk_acc = tl.dot(dlogits, q_tile, dk_acc, input_precision=p.precision)
    return dk_acc, dv_acc, dlogits
