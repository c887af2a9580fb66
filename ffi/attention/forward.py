"""Attention's forward pass on Hopper tensor cores, in CUDA C++ (forward.cu says how it works).

The Tensor Memory Accelerator reads q, k and v as they are: any lengths, and head dimensions that are multiples of 8.
Other head dimensions are padded first.
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

from jaxkernels.core.arguments import check_fields, check_rules, check_smem
from jaxkernels.ffi import compiler, custom_call, handler
from jaxkernels.ffi.attention import blind, launching
from jaxkernels.ffi.attention.launching import ATOM, STAGING_BYTES, WARPGROUP, padded
from jaxkernels.ops.attention import tensor_cores
from jaxkernels.ops.attention.key_masks import as_segments, operands_as_segments
from jaxkernels.ops.attention.planning import forward_plan, forward_steps, longest_cta, too_few_queries
from jaxkernels.ops.attention.spec import MASKED_LOGIT, AttentionSpec
from jaxkernels.ops.attention.visibility import keys_in_reach, may_see_nothing, segment_key_blocks

__all__ = [
    "CONSTANTS",
    "VERSION",
    "Config",
    "Constants",
    "compile_forward",
    "estimate",
    "not_estimated",
    "run",
    "search_space",
    "shortlist",
    "unpreferred",
    "unsupported",
]

VERSION = 1

_LABEL = "attention_forward[cuda]"

#: Queries of a consumer, as in forward.cu.
_WGMMA_M = 64
#: Registers of a consumer's thread for logits, weights and outputs, by the number of consumers. With more it spills.
_REGISTERS = {1: 208, 2: 208, 3: 130}
#: Three consumers have no registers for a soft cap or segments. With a bias alone they have so many.
_REGISTERS_WITH_BIAS = 150
#: Registers of a logit with its weight, and other registers, by the number of terms among soft cap, segment ids and
#: bias, and whether a bias is one of them. Fitted to the configurations that spill.
_REGISTERS_OF_TERMS = {
    (0, False): (1.5, 0),
    (1, False): (1.5, 32),
    (2, False): (1.75, 20),
    (1, True): (2.25, 0),
    (2, True): (2.25, 8),
    (3, True): (2.25, 16),
}
#: The kernel divides a bias by the scale.
_LEAST_SCALE = 1e-30
#: Rows of all heads, which the kernel counts in 32 bits.
_MAX_ROWS = 2**31

#: Bytes/s of a bias, and the launch of a copy of it.
_BIAS_BYTES, _COPY_SECONDS = 3.8e12, 2e-6
#: What a bias adds to a step for each pair of query and key, with up to two and with three consumers: of
#: B4 S4096 N32 H64 on an H200.
_BIAS_SECONDS = {1: 23e-12, 2: 23e-12, 3: 20e-12}
#: The kernel that looks for queries without keys.
_MEANS_SECONDS = 2e-6
#: With a mask of keys: XLA's kernels that make segments of it and ranges of blocks, and the means. B45 T9 S1420 N1 H128
#: takes 12.1 us on an H200, 3.6 us without.
_KEY_MASK_SECONDS = 8e-6

#: Blocks of keys without the factor `Constants.other_block_kv`.
_USUAL_BLOCK_KVS = (64, 128)


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      exps_per_sm: exponentials/s of one SM.
      launch_seconds: a launch.
      step_seconds: what a step takes beside its products and exponentials.
      item_steps: what an item costs beside its steps, in steps. The plan of the kernel uses it, too.
      exposed_exps: with one consumer, the share of a step's exponentials that takes time. It exceeds 1 because the
        rest of the softmax counts here.
      unhidden_2, unhidden_3: with two and three consumers, the share of E^2 / P that is not hidden, where a step's
        exponentials take E seconds and its products P.
      other_block_kv: factor of the time of products and exponentials if block_kv is neither 64 nor 128.
    """

    flops_per_sm: float
    exps_per_sm: float
    launch_seconds: float
    step_seconds: float
    item_steps: float
    exposed_exps: float
    unhidden_2: float
    unhidden_3: float
    other_block_kv: float


#: Fitted to 47 rows of attention-train on an H200, from which the model differs by 3 % in the median
#: (docs/cuda-attention.md). These rows do not tell `exposed_exps`, `unhidden_3` and `other_block_kv`: they come from 40
#: earlier measurements.
CONSTANTS = Constants(
    flops_per_sm=8.55e12,
    exps_per_sm=44.4e9,
    launch_seconds=2.0e-6,
    step_seconds=0.395e-6,
    item_steps=1.05,
    exposed_exps=1.5,
    unhidden_2=0.70,
    unhidden_3=0.5,
    other_block_kv=1.12,
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Tiling and schedule.

    Attributes:
      block_kv: keys and values of one step, a multiple of 16 up to 256.
      num_stages: slots of the ring of keys and of the ring of values.
      num_consumers: warpgroups that multiply; each has 64 queries of an item.
      takes_turns: whether consumers issue their products in turn, so that the softmax of one runs beside the products
        of another.
      lazy_rescale: whether the output is rescaled only if the maximum of some row of a warp has grown by more than 2^8.
      num_polynomials: of each 8 exponentials of a thread, so many are computed on the FMA units.
    """

    block_kv: int = 128
    num_stages: int = 2
    num_consumers: int = 2
    takes_turns: bool = True
    lazy_rescale: bool = False
    num_polynomials: int = 0

    def __post_init__(self) -> None:
        check_fields(_LABEL, self)
        rules = {
            "block_kv must be a multiple of 16 from 16 to 256": self.block_kv % 16 or not 16 <= self.block_kv <= 256,
            "num_stages must be at least 2": self.num_stages < 2,
            "num_consumers must be 1, 2 or 3": self.num_consumers not in _REGISTERS,
            "num_polynomials must be from 0 to 7": not 0 <= self.num_polynomials < 8,
        }
        check_rules(_LABEL, self, rules)

    @property
    def rows(self) -> int:
        """Queries of an item."""
        return self.num_consumers * _WGMMA_M


def unsupported(spec: AttentionSpec) -> str | None:
    spec = as_segments(spec)
    refusal = f"does not handle {', '.join(f'the term {term}' for term in spec.terms)}" if spec.terms else None
    if reason := tensor_cores.unsupported(spec, operands=refusal or _unsupported_bias(spec), cap_bits=22):
        return reason
    batch, num_queries, num_heads, _ = spec.q.shape
    if (count := batch * num_heads * num_queries) >= _MAX_ROWS:
        return f"counts rows of all heads in 32 bits, and there are {count}"
    return handler.missing()


def _unsupported_bias(spec: AttentionSpec) -> str | None:
    if spec.bias is not None and spec.bias.dtype != spec.q.dtype:
        return f"takes a bias of the queries' dtype {spec.q.dtype}, not {spec.bias.dtype}"
    if _has_bias(spec) and 0 < spec.scale < _LEAST_SCALE:
        return f"takes a bias or a dense mask with a scale of at least {_LEAST_SCALE}, not {spec.scale}"
    if spec.mask is not None and spec.soft_cap is not None:  # The cap of minus infinity is a number.
        return "does not handle a dense mask other than (B|1, 1, 1, S) with a soft cap"
    pairs = (spec.q.shape[1], spec.k.shape[1])
    if _has_bias(spec) and _bias_shape(spec)[2:] != pairs:
        return f"takes a bias or a dense mask with a value for each of {pairs} pairs, not {_bias_shape(spec)}"
    return None


def _has_bias(spec: AttentionSpec) -> bool:
    """Whether the kernel gets a bias: the spec's, a dense mask that is no mask of keys, or both."""
    return spec.bias is not None or spec.mask is not None


def _bias_shape(spec: AttentionSpec) -> tuple[int, ...]:
    """The shape of bias and dense mask together. Sizes may be symbolic, which numpy does not broadcast."""
    shapes = [x.shape for x in (spec.bias, spec.mask) if x is not None]
    return tuple(next((size for size in sizes if size != 1), 1) for sizes in zip(*shapes))


def _bias_unit(spec: AttentionSpec) -> int:
    """Bytes that rows of the kernel's bias are a multiple of. TMA copies units of 16. The kernel copies units of 8 or 4
    itself. XLA makes a bias of whole units out of a dense mask, and of an odd number of 16-bit columns.
    """
    row_bytes = 2 * spec.k.shape[1]
    if spec.mask is not None or row_bytes % 4:
        return 16
    return math.gcd(row_bytes, 16)


def _bias_columns(spec: AttentionSpec) -> int:
    """The columns that the kernel gets. If XLA has to copy the bias, it leaves out the keys that are behind the band of
    all queries.
    """
    columns = spec.k.shape[1]
    if _bias_unit(spec) < 16:
        return columns
    return launching.whole_units_of(keys_in_reach(spec) if columns % 8 else columns)


def _bias(spec: AttentionSpec, named: Mapping[str, jax.Array]) -> jax.Array | None:
    """What the kernel adds to the logits: (B|1, N|1, T, columns), minus infinity where the dense mask hides a pair."""
    if not _has_bias(spec):
        return None
    bias, columns = named.get("bias"), _bias_columns(spec)
    trim = lambda x: x[..., :columns]
    if spec.mask is not None:
        shown = jnp.zeros((), spec.q.dtype) if bias is None else trim(bias)
        bias = jnp.where(trim(named["mask"]), shown, jnp.asarray(-jnp.inf, spec.q.dtype))
    assert bias is not None
    return jnp.pad(trim(bias), ((0, 0), (0, 0), (0, 0), (0, max(0, columns - bias.shape[3]))))


def unpreferred(spec: AttentionSpec) -> str | None:
    """Not chosen unasked before it has been measured beside the Pallas kernel."""
    spec = as_segments(spec)
    terms = dict(window=spec.window, segments=spec.segments, query_lengths=spec.query_lengths, bias=_has_bias(spec))
    unmeasured = [name for name, given in (terms | dict(soft_cap=spec.soft_cap)).items() if given]
    if unmeasured:
        return f"is taken only where it was measured fastest: its speed with {', '.join(unmeasured)} is not known yet"
    return too_few_queries(spec)


def _bias_stages(spec: AttentionSpec, config: Config) -> int:
    """Blocks of a bias in shared memory: two if they fit."""
    if not _has_bias(spec):
        return 0
    return 2 if _smem_bytes(spec, config, 2) <= spec.target.smem_bytes else 1


def smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Dynamic shared memory: queries, the rings, staging buffers and barriers."""
    return _smem_bytes(spec, config, _bias_stages(spec, config))


def _smem_bytes(spec: AttentionSpec, config: Config, bias_stages: int) -> int:
    head_dim, value_dim = padded(spec.q.shape[3]), padded(spec.v.shape[3])
    boxes = lambda size: -(-size // ATOM)
    row_bytes = 2 * ATOM * boxes(head_dim)
    queries = config.rows * row_bytes
    biases = bias_stages * config.rows * 2 * ATOM * boxes(config.block_kv)
    slot = config.block_kv * (row_bytes + 2 * ATOM * boxes(value_dim))
    barriers = 8 * (4 * config.num_stages + 2 * config.num_consumers * (1 + max(1, bias_stages)))
    storage = queries + biases + config.num_stages * slot + 4 * config.num_consumers * STAGING_BYTES + barriers
    return storage + -storage % 1024


def _fits(spec: AttentionSpec, config: Config) -> bool:
    num_others, has_bias = spec.segments + (spec.soft_cap is not None), _has_bias(spec)
    of_a_logit, of_terms = _REGISTERS_OF_TERMS[num_others + has_bias, has_bias]
    # A thread has half of a row of outputs, and of logits.
    registers = padded(spec.v.shape[3]) / 2 + config.block_kv / 2 * of_a_logit + of_terms
    most = _REGISTERS[config.num_consumers]
    if config.num_consumers == 3 and (num_others or has_bias):
        most = 0 if num_others else _REGISTERS_WITH_BIAS
    return (
        smem_bytes(spec, config) <= spec.target.smem_bytes
        and registers <= most
        and (config.num_consumers == 1 or config.rows - _WGMMA_M < spec.q.shape[1])
    )


#: Keys of a step, with three consumers and with fewer.
_BLOCK_KVS = {3: (128, 96, 160, 64, 192), 2: (128, 176, 160, 192, 96, 80, 64, 112, 48, 32), 1: (128, 64, 32)}


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields blocks of keys that fit registers and shared memory, each with as many stages as fit, up to 4; of each the
    usual schedule first.
    """
    spec = as_segments(spec)
    # Turns gain where exponentials are half of the work; rare rescaling gains where products are most of it.
    is_narrow = spec.q.shape[3] <= 64
    schedules = list(itertools.product((is_narrow, not is_narrow), (not is_narrow, is_narrow)))
    tiles = [(num_consumers, block_kv) for num_consumers in (2, 3, 1) for block_kv in _BLOCK_KVS[num_consumers]]
    for num_consumers, block_kv in tiles:
        for takes_turns, lazy_rescale in schedules:
            if takes_turns and num_consumers == 1:
                continue
            stages = [Config(block_kv, n, num_consumers, takes_turns, lazy_rescale) for n in (4, 3, 2)]
            config = next((config for config in stages if _fits(spec, config)), None)
            if config is None:
                continue
            yield config
            if is_narrow and not lazy_rescale:
                for num_polynomials in (1, 2):
                    yield dataclasses.replace(config, num_polynomials=num_polynomials)


def shortlist(spec: AttentionSpec) -> Iterator[Config]:
    """Yields, of each size of tiles, the usual schedule."""
    seen = set()
    for config in search_space(spec):
        tile = (config.block_kv, config.num_consumers)
        if tile not in seen:
            seen.add(tile)
            yield config


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds of the kernel: steps of all CTAs over the SMs, or of the longest CTA. With a mask of keys also those of
    XLA's kernels before it.
    """
    spec, given = as_segments(spec), spec
    batch, _, num_heads, _ = spec.q.shape
    steps = _steps(spec, config)
    busiest = longest_cta(steps, batch * num_heads, spec.target.num_sms, constants.item_steps)
    seconds = busiest * _step_seconds(spec, config, constants)
    if _has_bias(spec):
        num_bytes = 2 * math.prod(_bias_shape(spec)[:3]) * _bias_columns(spec)
        share = sum(steps) * config.rows * config.block_kv / (spec.q.shape[1] * spec.k.shape[1])
        seconds = max(seconds, min(share, 1.0) * num_bytes / _BIAS_BYTES) + _MEANS_SECONDS
        if spec.mask is not None or _bias_columns(spec) != spec.k.shape[1]:
            seconds += _COPY_SECONDS + 2 * num_bytes / _BIAS_BYTES
    if spec is not given:
        seconds += _KEY_MASK_SECONDS
    return constants.launch_seconds + seconds


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    return launching.not_estimated(as_segments(spec))


def _step_seconds(spec: AttentionSpec, config: Config, constants: Constants) -> float:
    pairs = config.rows * config.block_kv
    products = 2 * pairs * (padded(spec.q.shape[3]) + padded(spec.v.shape[3])) / constants.flops_per_sm
    exps = pairs / constants.exps_per_sm
    others = constants.step_seconds
    if _has_bias(spec):
        others += pairs * _BIAS_SECONDS[config.num_consumers]
    if config.num_consumers < 2:  # Nothing runs beside the softmax of the only consumer.
        return products + constants.exposed_exps * exps + others
    unhidden = {2: constants.unhidden_2, 3: constants.unhidden_3}[config.num_consumers]
    seconds = products + unhidden * exps**2 / products
    factor = 1.0 if config.block_kv in _USUAL_BLOCK_KVS else constants.other_block_kv
    return seconds * factor + others


def _steps(spec: AttentionSpec, config: Config) -> tuple[int, ...]:
    return forward_steps(spec, config.rows, config.block_kv)


@functools.lru_cache(maxsize=256)
def _plan(spec: AttentionSpec, config: Config) -> np.ndarray:
    """The items of each CTA."""
    return forward_plan(spec, _steps(spec, config), spec.target.num_sms, CONSTANTS.item_steps)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [out (B, T, N, D), lse (B, N, T) float32]."""
    spec, arguments = operands_as_segments("attention_forward", spec, operands)
    way_out = "Use fewer stages or a smaller block_kv."
    check_smem(_LABEL, spec.target, config, smem_bytes(spec, config), way_out)
    named = spec.named("attention_forward", arguments)
    value_dim = spec.v.shape[3]
    q, k, v = (launching.whole_units(named[name]) for name in ("q", "k", "v"))
    plan = jnp.asarray(_plan(spec, config))
    arrays = launching.Arrays(q, k, v, plan, absent=3)
    blocks = segment_key_blocks(spec, config.rows, config.block_kv, dict(named)) if spec.segments else None
    extras = [
        *(named.get(name) for name in ("query_lengths", "key_lengths", "query_segments")),
        launching.whole_blocks(named.get("key_segments"), config.block_kv),
        blocks,
        launching.query_offset(spec, named),
    ]
    extra_buffers = [arrays.add(x) for x in extras]
    bias = _bias(spec, named)
    bias_buffer, bias_map = arrays.add(bias), launching.rows_of_a_head(0, q, _WGMMA_M)
    if bias is not None and _bias_unit(spec) == 16:
        bias_map = custom_call.TensorMap(bias_buffer, box=(1, 1, _WGMMA_M, ATOM), swizzle="128B")
    batch, num_queries, num_heads, _ = q.shape
    results = [
        jax.ShapeDtypeStruct((batch, num_queries, num_heads, v.shape[3]), v.dtype),
        jax.ShapeDtypeStruct((batch, num_heads, num_queries), jnp.float32),
    ]
    out_buffer, lse_buffer = len(arrays.operands), len(arrays.operands) + 1
    compiled = compile_forward(spec, config)
    out, lse = custom_call.launch(
        compiled.cubin,
        compiled.name,
        arrays.operands,
        results,
        parameters=[
            launching.rows_of_a_head(0, q, _WGMMA_M),
            launching.rows_of_a_head(1, k, config.block_kv),
            launching.rows_of_a_head(2, v, config.block_kv),
            launching.rows_of_a_head(out_buffer, results[0], 16),
            bias_map,  # Without one that TMA copies it stands for none.
            custom_call.Pointer(bias_buffer),
            custom_call.Pointer(lse_buffer),
            custom_call.Pointer(3),
            *map(custom_call.Pointer, extra_buffers),
            _problem(spec, config, plan.shape[1]),
        ],
        grid=(plan.shape[0],),
        block=((config.num_consumers + 1) * WARPGROUP,),
        smem_bytes=smem_bytes(spec, config),
        target=spec.target,
        label="attention_forward",
    )
    if may_see_nothing(spec) or _has_bias(spec):  # A bias of minus infinity hides keys, too.
        out = blind.with_means(spec, named, v, out, lse, are_anywhere=spec.segments or _has_bias(spec))
    return [out[..., :value_dim], lse]


def _problem(spec: AttentionSpec, config: Config, plan_columns: int) -> np.generic:
    """The kernel's `Problem`."""
    num_queries, num_keys = spec.q.shape[1], spec.k.shape[1]
    return launching.struct(
        num_queries,
        num_keys,
        spec.q.shape[2],
        spec.group_size,
        -(-num_queries // config.rows),
        plan_columns,
        launching.reach(spec.band.left),
        launching.reach(spec.band.right),
        *launching.factors(spec),
        float(1 / spec.scale) if _has_bias(spec) else 0.0,
        *(_bias_shape(spec)[:2] if _has_bias(spec) else (1, 1)),
    )


def compile_forward(spec: AttentionSpec, config: Config) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: lengths and numbers of heads are not part of it."""
    choices: dict[str, Any] = dict(
        element=launching.ELEMENTS[spec.q.dtype],
        head_dim=padded(spec.q.shape[3]),
        value_dim=padded(spec.v.shape[3]),
        block_kv=config.block_kv,
        num_stages=config.num_stages,
        num_consumers=config.num_consumers,
        takes_turns=config.takes_turns,
        lazy_rescale=config.lazy_rescale,
        num_polynomials=config.num_polynomials,
        has_left=spec.band.left is not None,
        has_right=spec.band.right is not None,
        is_ragged=spec.k.shape[1] % config.block_kv != 0,
        query_lengths=spec.query_lengths,
        key_lengths=spec.key_lengths,
        segments=spec.segments,
        query_offset=spec.query_offset,
        soft_cap=spec.soft_cap is not None,
        bias_stages=_bias_stages(spec, config),
        bias_unit=_bias_unit(spec) if _has_bias(spec) else 16,
        masked_logit=f"{MASKED_LOGIT!r}f",
        smem_bytes=smem_bytes(spec, config),
    )
    try:
        columns = frozenset({choices["block_kv"], choices["value_dim"]})
        return launching.compile_kernel("forward", columns, **choices)
    except compiler.CompileError as e:
        e.add_note(f"{_LABEL}: compiled for {spec} with {config}. Use a smaller block_kv, or leave config out.")
        raise
