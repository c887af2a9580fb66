"""What the designs of attention's backward pass have in common: the launch, and the work of other kernels around it.

Another kernel computes the sums of out * dout first (row_sums.cu). XLA clears queries that are padding, and converts
dq, which the kernels sum in float32. The kernels add up dq in the order in which blocks of keys come: dq may differ
between runs by rounding. With `deterministic` they add in their own order.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.ffi import compiler, custom_call
from jaxkernels.ffi.attention import blind, launching
from jaxkernels.ffi.attention.launching import LOG2E, WARPGROUP, padded, rows_of_a_head
from jaxkernels.ops.attention.blind import row_sums
from jaxkernels.ops.attention.key_masks import as_segments
from jaxkernels.ops.attention.planning import backward_plan, backward_steps, longest_cta
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    is_known_at_run_time,
    may_see_nothing,
    queries_inside,
    segment_query_blocks,
    segment_query_blocks_in_order,
)

__all__ = [
    "LABEL",
    "QUERY_PIECES",
    "Tiling",
    "busiest_cta",
    "check_parts",
    "choices",
    "enough_parts",
    "has_one_item_each",
    "other_seconds",
    "plan",
    "run",
    "unsupported_bias",
]

LABEL = "attention_backward[cuda]"

#: As in the kernels: staging buffers of a warp that adds to dq.
QUERY_PIECES = 2
# As in the kernels: a producer, two consumers, and the warpgroup of dq.
_WARPGROUPS = 4
# As in row_sums.cu.
_ROWS_OF_SUMS = 64
_THREADS_OF_SUMS = 256


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How a kernel divides the pass.

    Attributes:
      block_q: queries of a step.
      block_kv: keys of an item.
      group_parts: items that share the query heads of a key head.
      num_ctas: CTAs of a cluster, which share an item.
      persistent: whether CTAs have several items each, where they may.
      item_steps: what an item costs beside its steps, in steps.
    """

    block_q: int
    block_kv: int
    group_parts: int
    num_ctas: int
    persistent: bool
    item_steps: float


def unsupported_bias(spec: AttentionSpec) -> str | None:
    """Why the kernels cannot take the spec's bias or dense mask, or None."""
    spec = as_segments(spec)
    given = {"a bias": spec.bias is not None, "a dense mask other than (B|1, 1, 1, S)": spec.mask is not None}
    missing = [name for name, is_given in given.items() if is_given]
    return f"does not handle {', '.join(missing)}" if missing else None


def check_parts(spec: AttentionSpec, group_parts: int) -> None:
    if spec.group_size % group_parts:
        raise ValueError(
            f"{LABEL}: group_parts must divide the {spec.group_size} query heads of a key head; got {group_parts}."
        )


def enough_parts(spec: AttentionSpec, block_kv: int, num_workers: int) -> int:
    """The smallest number of parts of a group that gives each of the workers an item, or all its query heads."""
    parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    items = -(-spec.k.shape[1] // block_kv) * spec.k.shape[0] * spec.k.shape[2]
    return next((n for n in parts if n * items >= num_workers), parts[-1])


def has_one_item_each(spec: AttentionSpec) -> bool:
    """Whether each CTA has one item: in a fixed order it waits for earlier CTAs, and with lengths and segments it is
    known at run time only how long an item takes.
    """
    return spec.deterministic or is_known_at_run_time(spec)


def busiest_cta(spec: AttentionSpec, tiling: Tiling) -> float:
    """The steps of the busiest CTA, for cost models."""
    workers = spec.target.num_sms // tiling.num_ctas
    return longest_cta(_steps(spec, tiling), _streams(spec, tiling), workers, tiling.item_steps)


def other_seconds(spec: AttentionSpec, group_parts: int, copy_bytes: float) -> float:
    """Seconds of the passes of other kernels over out, dout and dq, which move `copy_bytes` bytes/s."""
    batch, num_queries, num_heads, head_dim = spec.q.shape
    num_bytes = batch * num_queries * num_heads * (10 * head_dim + 4 * spec.v.shape[3])
    if group_parts > 1:
        num_bytes += 16 * group_parts * math.prod(spec.k.shape)
    return num_bytes / copy_bytes


def _streams(spec: AttentionSpec, tiling: Tiling) -> int:
    """Key heads of all batch elements, and parts of their groups."""
    return spec.k.shape[0] * spec.k.shape[2] * tiling.group_parts


def _steps(spec: AttentionSpec, tiling: Tiling) -> tuple[int, ...]:
    """The steps of each block of keys, lengths and segments aside."""
    return tuple(n // tiling.group_parts for n in backward_steps(spec, tiling.block_q, tiling.block_kv))


@functools.lru_cache(maxsize=256)
def plan(spec: AttentionSpec, tiling: Tiling) -> np.ndarray:
    """The items of each CTA; of each cluster, as if it were an SM."""
    steps, streams = _steps(spec, tiling), _streams(spec, tiling)
    target = dataclasses.replace(spec.target, num_sms=spec.target.num_sms // tiling.num_ctas)
    return backward_plan(
        dataclasses.replace(spec, target=target),
        steps,
        streams,
        tiling.item_steps,
        is_persistent=tiling.persistent and not has_one_item_each(spec),
    )


def choices(spec: AttentionSpec, group_parts: int) -> dict[str, Any]:
    """The macros that all kernels read."""
    element = launching.ELEMENTS[spec.q.dtype]
    return dict(
        element=element,
        output=element if group_parts == 1 else "Float32",
        head_dim=padded(spec.q.shape[3]),
        value_dim=padded(spec.v.shape[3]),
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        key_lengths=spec.key_lengths,
        segments=spec.segments,
        query_offset=spec.query_offset,
        soft_cap=spec.soft_cap is not None,
        sees_nothing=may_see_nothing(spec),
        in_order=spec.deterministic,
    )


def run(
    spec: AttentionSpec,
    tiling: Tiling,
    compiled: compiler.CompiledKernel,
    smem_bytes: int,
    operands: Sequence[jax.Array],
) -> list[jax.Array]:
    """Launches a kernel; returns [dq, dk, dv], of the operands' shapes and dtypes."""
    named = spec.named("attention_backward", operands)
    q, k, v, dout = (launching.whole_units(x) for x in _without_padding(spec, named))
    products, zeros = _products(spec, q, launching.whole_units(named["out"]), dout)
    sums = _sums(spec, named, products[..., : q.shape[1]])
    items = jnp.asarray(plan(spec, tiling))
    arrays = launching.Arrays(q, k, v, dout, sums, items, absent=5)
    blocks, first_kv_blocks = _segment_blocks(spec, tiling, dict(named))
    extras = [
        named.get("key_lengths"),
        launching.whole_blocks(named.get("query_segments"), tiling.block_q),
        named.get("key_segments"),
        blocks,
        first_kv_blocks,
        launching.query_offset(spec, named),
        blind.gradient_sums(spec, named, dout) if may_see_nothing(spec) else None,
    ]
    extra_buffers = [arrays.add(x) for x in extras]
    aliases = {arrays.add(zeros): 0}
    parts, num_ctas = tiling.group_parts, tiling.num_ctas
    output = k.dtype if parts == 1 else jnp.dtype(jnp.float32)
    apart = lambda x: jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * parts, x.shape[3]), output)
    results = [jax.ShapeDtypeStruct(q.shape, jnp.float32), apart(k), apart(v)]
    if spec.deterministic:
        batch, num_queries, num_heads, _ = q.shape
        per_block = tiling.block_q // 16 * num_ctas
        turns = jnp.zeros((batch, num_heads, -(-num_queries // tiling.block_q) * per_block), jnp.int32)
        aliases[arrays.add(turns)] = len(results)
        results.append(jax.ShapeDtypeStruct(turns.shape, turns.dtype))
    first = len(arrays.operands)
    columns = 128 // output.itemsize
    query_rows, key_rows = tiling.block_q // num_ctas, tiling.block_kv // num_ctas
    dq, dk, dv, *_ = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        results,
        parameters=[
            rows_of_a_head(0, q, query_rows),
            rows_of_a_head(1, k, key_rows),
            rows_of_a_head(2, v, key_rows),
            rows_of_a_head(3, dout, query_rows),
            custom_call.TensorMap(4, box=(1, 1, 1, tiling.block_q)),
            rows_of_a_head(first, results[0], 16, columns=32),
            rows_of_a_head(first + 1, results[1], 16, columns=columns),
            rows_of_a_head(first + 2, results[2], 16, columns=columns),
            custom_call.Pointer(5),
            *map(custom_call.Pointer, extra_buffers),
            custom_call.Pointer(first + 3 if spec.deterministic else 5),
            _problem(spec, tiling, items.shape[1]),
        ],
        grid=(items.shape[0] * num_ctas,),
        block=(_WARPGROUPS * WARPGROUP,),
        cluster=(num_ctas,),
        smem_bytes=smem_bytes,
        input_output_aliases=aliases,
        target=spec.target,
        label="attention_backward",
    )
    return _converted(spec, tiling, (dq, dk, dv))


def _converted(spec: AttentionSpec, tiling: Tiling, results: Sequence[jax.Array]) -> list[jax.Array]:
    """dq, dk and dv of the operands' shapes and dtypes: scaled, without padding, and parts of groups added up."""
    dq, dk, dv = results
    dq = (dq * spec.scale)[..., : spec.q.shape[3]]
    dk, dv = dk[..., : spec.k.shape[3]], dv[..., : spec.v.shape[3]]
    if tiling.group_parts > 1:
        together = lambda x: x.reshape(*x.shape[:2], -1, tiling.group_parts, x.shape[3]).sum(axis=3)
        dk, dv = together(dk), together(dv)
    return [dq.astype(spec.q.dtype), dk.astype(spec.k.dtype), dv.astype(spec.v.dtype)]


def _sums(spec: AttentionSpec, named: Mapping[str, jax.Array], products: jax.Array) -> jax.Array:
    """The logsumexp in base 2 and delta of each query, (2, B, N, T) with T padded to whole units of 16 bytes.

    One array: XLA makes it last, by a kernel of its own. A Triton fusion right before costs 8 to 11 %
    (docs/pallas-kernels.md, "Two speeds").

    Args:
      products: the sums of out * dout.
    """
    lse, delta, _ = row_sums(spec, named, products)
    if spec.query_lengths:  # Padding has no part in gradients.
        is_query = queries_inside(spec, dict(named))[:, None]
        lse, delta = jnp.where(is_query, lse, jnp.inf), jnp.where(is_query, delta, 0)
    return jnp.stack([_whole_rows(lse * LOG2E), _whole_rows(delta)])


def _segment_blocks(
    spec: AttentionSpec, tiling: Tiling, named: dict[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """For each block of keys its blocks of queries; and in a fixed order, for each of these the first block of keys."""
    if not spec.segments:
        return None, None
    if spec.deterministic:
        return segment_query_blocks_in_order(spec, tiling.block_q, tiling.block_kv, named)
    return segment_query_blocks(spec, tiling.block_q, tiling.block_kv, named), None


def _without_padding(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """q, k, v and dout with zeros in place of queries that are padding, which may be NaN. The kernels clear keys."""
    q, k, v, dout = (named[name] for name in ("q", "k", "v", "dout"))
    if spec.query_lengths:
        is_query = queries_inside(spec, dict(named))[:, :, None, None]
        q, dout = jnp.where(is_query, q, 0), jnp.where(is_query, dout, 0)
    return [q, k, v, dout]


def _products(spec: AttentionSpec, q: jax.Array, out: jax.Array, dout: jax.Array) -> list[jax.Array]:
    """The sums of out * dout, (B, N, T) with T padded to whole units of 16 bytes, and zeros for dq in float32.

    XLA would take two kernels; or it would fuse the sums into the stack that reads them, where one thread computes a
    whole sum: then a pass over 16k tokens took 200 us more.
    """
    batch, num_queries, num_heads, _ = q.shape
    row_length, num_blocks = num_queries + -num_queries % 4, -(-num_queries // _ROWS_OF_SUMS)
    compiled = launching.compile_kernel(
        "row_sums",
        frozenset(),
        element=launching.ELEMENTS[spec.q.dtype],
        value_dim=out.shape[3],
        head_dim=q.shape[3],
    )
    return custom_call.launch(
        compiled.cubin,
        compiled.name,
        [out, dout],
        [
            jax.ShapeDtypeStruct((batch, num_heads, row_length), jnp.float32),
            jax.ShapeDtypeStruct(q.shape, jnp.float32),
        ],
        parameters=[
            *map(custom_call.Pointer, range(4)),
            launching.struct(num_queries, num_heads, row_length, num_blocks),
        ],
        grid=(batch * num_heads * num_blocks,),
        block=(_THREADS_OF_SUMS,),
        target=spec.target,
        label="attention_row_sums",
    )


def _whole_rows(x: jax.Array) -> jax.Array:
    """Pads rows of float32 to whole units of 16 bytes."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % 4))) if x.shape[2] % 4 else x


def _problem(spec: AttentionSpec, tiling: Tiling, plan_columns: int) -> np.generic:
    """The kernel's `Problem`."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    return launching.struct(
        num_queries,
        num_keys,
        spec.k.shape[2],
        spec.group_size,
        tiling.group_parts,
        -(-num_keys // tiling.block_kv),
        plan_columns,
        int(spec.window is None),
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        *launching.factors(spec),
        float(spec.scale),
        blind.num_parts(num_queries),
        launching.whole_units_of(spec.v.shape[3]),
    )
