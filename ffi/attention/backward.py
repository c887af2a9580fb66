"""Attention's backward pass on Hopper tensor cores, in one CUDA C++ kernel (backward.cu says how it works).

Another kernel computes the sums of out * dout first (row_sums.cu). XLA clears padding, and converts dq, which the
kernel sums in float32. The kernel adds up dq in the
order in which blocks of keys come: dq may differ between runs by rounding. With `deterministic` they add in their own
order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core.arguments import check_fields
from jaxkernels.ffi import compiler, custom_call
from jaxkernels.ffi.attention import forward, launching
from jaxkernels.ffi.attention.launching import ATOM, LOG2E, STAGING_BYTES, WARPGROUP, padded, rows_of_a_head
from jaxkernels.ops.attention.blind import row_sums
from jaxkernels.ops.attention.planning import backward_plan, backward_steps, longest_cta
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import (
    is_known_at_run_time,
    keys_inside,
    queries_inside,
    segment_query_blocks,
    segment_query_blocks_in_order,
)

__all__ = [
    "CONSTANTS",
    "VERSION",
    "Config",
    "Constants",
    "compile_backward",
    "estimate",
    "not_estimated",
    "run",
    "search_space",
    "unpreferred",
    "unsupported",
]

VERSION = 2

_LABEL = "attention_backward[cuda]"

# As in backward.cu.
_BLOCK_KV = 128
_CONSUMERS = 2
_QUERY_PIECES = 2
# As in row_sums.cu.
_ROWS_OF_SUMS = 64
_THREADS_OF_SUMS = 256


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      launch_seconds: the launches of the kernel and of the passes around it.
      step_seconds_64, step_seconds_128: what a step of 64 and of 128 queries takes beside its products.
      item_steps: what an item costs beside its steps, in steps. The plan of the kernel uses it, too.
      in_order: factor of the kernel's time if blocks of keys add to dQ in their order, because they wait for each
        other.
      copy_bytes: bytes/s of the passes over dq, out and dout.
    """

    flops_per_sm: float
    launch_seconds: float
    step_seconds_64: float
    step_seconds_128: float
    item_steps: float
    in_order: float
    copy_bytes: float


#: From six measurements on an H200 (docs/cuda-attention.md). `in_order` is a guess, after our Pallas kernel.
CONSTANTS = Constants(
    flops_per_sm=6.2e12,
    launch_seconds=5.0e-6,
    step_seconds_64=0.42e-6,
    step_seconds_128=0.55e-6,
    item_steps=2.0,
    in_order=1.15,
    copy_bytes=3.5e12,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_q: queries of a step, 64 or 128.
      num_stages: slots of the ring of queries and of the ring of dout.
      group_parts: items that share the query heads of a key head; XLA adds up what they have.
      persistent: whether there are as many CTAs as SMs; else each block of keys has its own. With lengths, segments or
        `spec.deterministic` it has in any case.
      early_gradients: whether dP is multiplied beside the exponentials, not after them. Registers suffice for it with
        block_q=64, head dimensions up to 96 and no soft cap.
    """

    block_q: int = 64
    num_stages: int = 2
    group_parts: int = 1
    persistent: bool = True
    early_gradients: bool = False

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        rules = {
            "block_q must be 64 or 128": self.block_q not in (64, 128),
            "num_stages must be at least 2": self.num_stages < 2,
            "group_parts must be positive": self.group_parts < 1,
        }
        for rule, is_broken in rules.items():
            if is_broken:
                raise ValueError(f"{_LABEL}: {rule}; got {self}.")


def unsupported(spec: AttentionSpec) -> str | None:
    if reason := forward.unsupported(spec):
        return reason
    if max(spec.q.shape[3], spec.v.shape[3]) > 128:
        return f"handles head dimensions up to 128, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    return None


def unpreferred(spec: AttentionSpec) -> str | None:
    return "is taken only where it was measured fastest: on an H200 it has 0.97 to 1.00 of the Pallas kernel's speed"


def smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Dynamic shared memory: keys, values, the rings, dS, staging buffers, lse, delta and barriers."""
    boxes = [2 * ATOM * -(-padded(x.shape[3]) // ATOM) for x in (spec.q, spec.v)]
    rows = _BLOCK_KV + config.num_stages * config.block_q
    logits = config.num_stages * 2 * _BLOCK_KV * config.block_q
    staging = 4 * (_CONSUMERS + _QUERY_PIECES) * STAGING_BYTES
    sums = 4 * config.num_stages * (2 * config.block_q + 2 * 4)
    barriers = 8 * (4 * config.num_stages + 4 + 2 * config.num_stages)
    storage = rows * sum(boxes) + logits + staging + sums + barriers
    return storage + -storage % 1024


def _fits(spec: AttentionSpec, config: Config) -> bool:
    widest = max(padded(spec.q.shape[3]), padded(spec.v.shape[3]))
    is_plain = spec.soft_cap is None
    return (
        smem_bytes(spec, config) <= spec.target.smem_bytes
        and (config.block_q == 64 or (widest <= 64 and is_plain))
        and (not config.early_gradients or (config.block_q == 64 and widest <= 96 and is_plain))
    )


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields blocks of queries that fit, with one to three stages, and the parts of a group that fill the chip."""
    parts = [n for n in range(1, spec.group_size + 1) if spec.group_size % n == 0]
    ctas = -(-spec.k.shape[1] // _BLOCK_KV) * spec.k.shape[0] * spec.k.shape[2]
    enough = next((n for n in parts if n * ctas >= spec.target.num_sms), parts[-1])
    persistent = [False] if _has_one_item_each(spec) else [True, False]
    for block_q, num_stages, group_parts in itertools.product((128, 64), (2, 3), sorted({1, enough})):
        for switches in itertools.product(persistent, (False, True)):
            config = Config(block_q, num_stages, group_parts, *switches)
            if _fits(spec, config):
                yield config


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds of `run`: steps of all CTAs over the SMs, or of the longest CTA, and the passes of other kernels."""
    batch, num_queries, num_heads, head_dim = spec.q.shape
    steps = _steps(spec, config)
    flops = 2 * config.block_q * _BLOCK_KV * (3 * padded(head_dim) + 2 * padded(spec.v.shape[3]))
    step_seconds = {64: constants.step_seconds_64, 128: constants.step_seconds_128}[config.block_q]
    seconds = flops / constants.flops_per_sm + step_seconds
    busiest = longest_cta(steps, _streams(spec, config), spec.target.num_sms, constants.item_steps)
    rows = batch * num_queries * num_heads
    num_bytes = rows * (10 * head_dim + 4 * spec.v.shape[3])
    if config.group_parts > 1:
        num_bytes += 16 * config.group_parts * math.prod(spec.k.shape)
    in_order = constants.in_order if spec.deterministic else 1.0
    return constants.launch_seconds + busiest * seconds * in_order + num_bytes / constants.copy_bytes


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None. It has the sums, zeros and conversion of dq."""
    return launching.not_estimated(spec)


def _streams(spec: AttentionSpec, config: Config) -> int:
    """Key heads of all batch elements, and parts of their groups."""
    return spec.k.shape[0] * spec.k.shape[2] * config.group_parts


@functools.lru_cache(maxsize=1024)
def _steps(spec: AttentionSpec, config: Config) -> tuple[int, ...]:
    """The steps of each block of keys, lengths and segments aside."""
    return tuple(n // config.group_parts for n in backward_steps(spec, config.block_q, _BLOCK_KV))


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv], of the operands' shapes and dtypes."""
    if spec.group_size % config.group_parts:
        raise ValueError(
            f"{_LABEL}: group_parts must divide the {spec.group_size} query heads of a key head; "
            f"got {config.group_parts}."
        )
    if not _fits(spec, config):
        raise ValueError(
            f"{_LABEL}: a block has at most {spec.target.smem_bytes} bytes of shared memory on {spec.target.name}; "
            "block_q=128 needs head dimensions up to 64 and no soft cap, early_gradients needs block_q=64, head "
            "dimensions up to 96 and no soft cap; "
            f"got {config}, which needs {smem_bytes(spec, config)} bytes. Use fewer stages or block_q=64."
        )
    named = spec.named("attention_backward", operands)
    q, k, v, dout = (launching.whole_units(x) for x in _without_padding(spec, named))
    products, zeros = _products(spec, q, launching.whole_units(named["out"]), dout)
    lse, delta, mean = row_sums(spec, named, products[..., : q.shape[1]])
    if spec.query_lengths:  # Padding has no part in gradients.
        is_query = queries_inside(spec, dict(named))[:, None]
        lse, delta = jnp.where(is_query, lse, jnp.inf), jnp.where(is_query, delta, 0)
    # One array: XLA makes it last, by a kernel of its own. A Triton fusion right before costs 8 to 11 %
    # (docs/pallas-kernels.md, "Two speeds").
    sums = jnp.stack([_whole_rows(lse * LOG2E), _whole_rows(delta)])
    plan = jnp.asarray(_plan(spec, config))
    arrays = launching.Arrays(q, k, v, dout, sums, plan, absent=5)
    blocks, first_kv_blocks = _segment_blocks(spec, config, dict(named))
    extras = [
        *(named.get(name) for name in ("key_lengths", "query_segments", "key_segments")),
        blocks,
        first_kv_blocks,
        named["query_offset"].reshape(1) if spec.query_offset else None,
    ]
    extra_buffers = [arrays.add(x) for x in extras]
    aliases = {arrays.add(zeros): 0}
    parts = config.group_parts
    output = k.dtype if parts == 1 else jnp.dtype(jnp.float32)
    apart = lambda x: jax.ShapeDtypeStruct((*x.shape[:2], x.shape[2] * parts, x.shape[3]), output)
    results = [jax.ShapeDtypeStruct(q.shape, jnp.float32), apart(k), apart(v)]
    if spec.deterministic:
        batch, num_queries, num_heads, _ = q.shape
        turns = jnp.zeros((batch, num_heads, -(-num_queries // config.block_q) * config.block_q // 16), jnp.int32)
        aliases[arrays.add(turns)] = len(results)
        results.append(jax.ShapeDtypeStruct(turns.shape, turns.dtype))
    first = len(arrays.operands)
    columns = 128 // output.itemsize
    compiled = compile_backward(spec, config)
    dq, dk, dv, *_ = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        results,
        parameters=[
            rows_of_a_head(0, q, config.block_q),
            rows_of_a_head(1, k, _BLOCK_KV),
            rows_of_a_head(2, v, _BLOCK_KV),
            rows_of_a_head(3, dout, config.block_q),
            custom_call.TensorMap(4, box=(1, 1, 1, config.block_q)),
            rows_of_a_head(first, results[0], 16, columns=32),
            rows_of_a_head(first + 1, results[1], 16, columns=columns),
            rows_of_a_head(first + 2, results[2], 16, columns=columns),
            custom_call.Pointer(5),
            *map(custom_call.Pointer, extra_buffers),
            custom_call.Pointer(first + 3 if spec.deterministic else 5),
            _problem(spec, config, plan.shape[1]),
        ],
        grid=(plan.shape[0],),
        block=((_CONSUMERS + 2) * WARPGROUP,),
        smem_bytes=smem_bytes(spec, config),
        input_output_aliases=aliases,
        target=spec.target,
        label="attention_backward",
    )
    dq = (dq * spec.scale)[..., : spec.q.shape[3]]
    dk, dv = dk[..., : spec.k.shape[3]], dv[..., : spec.v.shape[3]]
    if parts > 1:
        together = lambda x: x.reshape(*x.shape[:2], -1, parts, x.shape[3]).sum(axis=3)
        dk, dv = together(dk), together(dv)
    if mean is not None:
        dv = dv.astype(jnp.float32) + mean
    return [dq.astype(spec.q.dtype), dk.astype(spec.k.dtype), dv.astype(spec.v.dtype)]


def _has_one_item_each(spec: AttentionSpec) -> bool:
    """Whether each CTA has one item: in a fixed order it waits for earlier CTAs, and with lengths and segments it is
    known at run time only how long an item takes.
    """
    return spec.deterministic or is_known_at_run_time(spec)


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, config: Config) -> np.ndarray:
    """The items of each CTA."""
    is_persistent = config.persistent and not _has_one_item_each(spec)
    steps, streams = _steps(spec, config), _streams(spec, config)
    return backward_plan(spec, steps, streams, CONSTANTS.item_steps, is_persistent=is_persistent)


def _segment_blocks(
    spec: AttentionSpec, config: Config, named: dict[str, jax.Array]
) -> tuple[jax.Array | None, jax.Array | None]:
    """For each block of keys its blocks of queries; and in a fixed order, for each of these the first block of keys."""
    if not spec.segments:
        return None, None
    if spec.deterministic:
        return segment_query_blocks_in_order(spec, config.block_q, _BLOCK_KV, named)
    return segment_query_blocks(spec, config.block_q, _BLOCK_KV, named), None


def _without_padding(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> list[jax.Array]:
    """q, k, v and dout with zeros in place of padding, which may be NaN."""
    q, k, v, dout = (named[name] for name in ("q", "k", "v", "dout"))
    if spec.query_lengths:
        is_query = queries_inside(spec, dict(named))[:, :, None, None]
        q, dout = jnp.where(is_query, q, 0), jnp.where(is_query, dout, 0)
    if spec.key_lengths:
        is_key = keys_inside(spec, dict(named))[:, :, None, None]
        k, v = jnp.where(is_key, k, 0), jnp.where(is_key, v, 0)
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


def _problem(spec: AttentionSpec, config: Config, plan_columns: int) -> np.generic:
    """The kernel's `Problem`."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    return launching.struct(
        num_queries,
        num_keys,
        spec.k.shape[2],
        spec.group_size,
        config.group_parts,
        -(-num_keys // _BLOCK_KV),
        plan_columns,
        int(spec.window is None),
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        *launching.factors(spec),
        float(spec.scale),
    )


def compile_backward(spec: AttentionSpec, config: Config) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: lengths and numbers of heads are not part of it."""
    element = launching.ELEMENTS[spec.q.dtype]
    choices: dict[str, Any] = dict(
        element=element,
        output=element if config.group_parts == 1 else "Float32",
        head_dim=padded(spec.q.shape[3]),
        value_dim=padded(spec.v.shape[3]),
        block_q=config.block_q,
        num_stages=config.num_stages,
        early_gradients=config.early_gradients,
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        key_lengths=spec.key_lengths,
        segments=spec.segments,
        query_offset=spec.query_offset,
        soft_cap=spec.soft_cap is not None,
        in_order=spec.deterministic,
        smem_bytes=smem_bytes(spec, config),
    )
    try:
        head_dim = choices["head_dim"]
        pieces = {min(head_dim, 64), head_dim - 64 if head_dim > 64 else head_dim}
        columns = frozenset({choices["block_q"], head_dim, choices["value_dim"], *pieces})
        return launching.compile_kernel("backward", columns, **choices)
    except compiler.CompileError as e:
        e.add_note(f"{_LABEL}: compiled for {spec} with {config}. Use block_q=64, or leave config out.")
        raise
