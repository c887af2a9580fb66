"""Attention's backward pass on Hopper tensor cores above head dimension 128, in one CUDA C++ kernel (backward_wide.cu
says how it works). gradients.py has the launch and the work around it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from jaxkernels.core.arguments import check_fields, check_rules, check_smem
from jaxkernels.ffi import compiler
from jaxkernels.ffi.attention import forward, gradients, launching
from jaxkernels.ffi.attention.launching import ATOM, STAGING_BYTES, padded
from jaxkernels.ops.attention.key_masks import as_segments, operands_as_segments
from jaxkernels.ops.attention.spec import AttentionSpec

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

VERSION = 0

# As in backward_wide.cu: queries of a step, keys of a CTA, CTAs of a cluster, and slots of descriptions.
_BLOCK_Q = 64
_KEYS = 64
_NUM_CTAS = 2
_BLOCK_KV = _NUM_CTAS * _KEYS
_STEP_STAGES = 4
_ITEM_STAGES = 2


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model.

    Attributes:
      smem_bytes: bytes/s that the shared memory of one SM moves. It limits this kernel, not the tensor cores.
      launch_seconds: the launches of the kernel and of the passes around it.
      item_steps: what an item costs beside its steps, in steps. The plan of the kernel uses it, too.
      in_order: factor of the kernel's time if blocks of keys add to dQ in their order, because they wait for each
        other.
      copy_bytes: bytes/s of the passes over dq, out and dout.
    """

    smem_bytes: float
    launch_seconds: float
    item_steps: float
    in_order: float
    copy_bytes: float


#: `smem_bytes` is set by two rows of D = 256 on an H200, which the model then meets within 1 %: 0.90 of 128 bytes a
#: cycle at 1.6 GHz. The others are those of backward.py.
CONSTANTS = Constants(smem_bytes=1.845e11, launch_seconds=5.0e-6, item_steps=2.0, in_order=1.15, copy_bytes=3.5e12)


@dataclasses.dataclass(frozen=True)
class Config:
    """Schedule.

    Attributes:
      num_stages: slots of the ring of queries.
      output_stages: slots of the ring of dout.
      logit_stages: slots of the ring of dS.
      group_parts: items that share the query heads of a key head; XLA adds up what they have.
      persistent: whether there are as many CTAs as SMs; else each pair of CTAs has one block of 128 keys. With lengths,
        segments or `spec.deterministic` it has in any case.
    """

    num_stages: int = 2
    output_stages: int = 1
    logit_stages: int = 1
    group_parts: int = 1
    persistent: bool = True

    def __post_init__(self) -> None:
        check_fields(gradients.LABEL, self)
        rules = {
            "num_stages must be at least 2": self.num_stages < 2,
            "output_stages must be positive": self.output_stages < 1,
            "logit_stages must be positive": self.logit_stages < 1,
            "group_parts must be positive": self.group_parts < 1,
        }
        check_rules(gradients.LABEL, self, rules)


def unsupported(spec: AttentionSpec) -> str | None:
    if reason := gradients.unsupported_bias(spec) or forward.unsupported(spec):
        return reason
    if max(spec.q.shape[3], spec.v.shape[3]) <= 128:
        return f"handles head dimensions above 128, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    return None


def unpreferred(spec: AttentionSpec) -> str | None:
    return "is taken only where it was measured fastest: on an H200 it was timed in two rows only"


def smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Dynamic shared memory: keys, values, the rings, P, dS, staging buffers, lse, delta and barriers."""
    head_boxes, value_boxes = (-(-padded(x.shape[3]) // ATOM) for x in (spec.q, spec.v))
    box = 2 * ATOM * _KEYS  # 64 keys or 64 queries.
    other_keys = -(-head_boxes // _NUM_CTAS)
    queries, outputs = head_boxes * config.num_stages, value_boxes * config.output_stages
    tiles = head_boxes + other_keys + value_boxes + queries + outputs + _NUM_CTAS * config.logit_stages
    staging = 4 * (1 + gradients.QUERY_PIECES) * STAGING_BYTES
    sums = 4 * _BLOCK_Q * (config.num_stages + config.output_stages)
    descriptions = _STEP_STAGES * 4 * 4 + _ITEM_STAGES * 4 * 12
    rings = config.num_stages + config.output_stages + config.logit_stages + _STEP_STAGES + _ITEM_STAGES + 3
    storage = tiles * box + staging + sums + descriptions + 2 * 8 * rings
    return storage + -storage % 1024


def _fits(spec: AttentionSpec, config: Config) -> bool:
    return smem_bytes(spec, config) <= spec.target.smem_bytes


def search_space(spec: AttentionSpec) -> Iterator[Config]:
    """Yields numbers of slots that fit, and the parts of a group that fill the chip.

    Two slots of dout and of dS come first: with them, copies and dQ run ahead. At head dimension 256 they do not fit.
    """
    spec = as_segments(spec)
    enough = gradients.enough_parts(spec, _BLOCK_KV, spec.target.num_sms // _NUM_CTAS)
    persistent = [False] if gradients.has_one_item_each(spec) else [True, False]
    for stages in itertools.product((2, 3), (2, 1), (2, 1)):
        for switches in itertools.product(sorted({1, enough}), persistent):
            config = Config(*stages, *switches)
            if _fits(spec, config):
                yield config


def _step_bytes(spec: AttentionSpec) -> int:
    """What a step moves through the shared memory of a CTA.

    With D and V columns, in units of 64 rows of 16 bits: S and dP read both operands (2 D + 2 V), dV and dK one each
    (V + D). Queries and dout arrive (D + V). dQ reads dS and keys (2 D), and adds half of its columns, written and read
    in float32 (2 D). P is written and read once. dS is written, sent and received.
    """
    head_dim, value_dim = padded(spec.q.shape[3]), padded(spec.v.shape[3])
    tile = 2 * _BLOCK_Q * _KEYS
    return 2 * _BLOCK_Q * (8 * head_dim + 4 * value_dim) + 5 * tile


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds of `run`: steps of all CTAs over the SMs, or of the longest CTA, and the passes of other kernels."""
    spec = as_segments(spec)
    busiest = gradients.busiest_cta(spec, _tiling(config, constants.item_steps))
    in_order = constants.in_order if spec.deterministic else 1.0
    others = gradients.other_seconds(spec, config.group_parts, constants.copy_bytes)
    return constants.launch_seconds + busiest * _step_bytes(spec) / constants.smem_bytes * in_order + others


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None. It has the sums, zeros and conversion of dq."""
    return launching.not_estimated(as_segments(spec))


def _tiling(config: Config, item_steps: float) -> gradients.Tiling:
    return gradients.Tiling(_BLOCK_Q, _BLOCK_KV, config.group_parts, _NUM_CTAS, config.persistent, item_steps)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv], of the operands' shapes and dtypes."""
    spec, arguments = operands_as_segments("attention_backward", spec, operands)
    gradients.check_parts(spec, config.group_parts)
    check_smem(gradients.LABEL, spec.target, config, smem_bytes(spec, config), "Use fewer stages.")
    compiled = compile_backward(spec, config)
    return gradients.run(spec, _tiling(config, CONSTANTS.item_steps), compiled, smem_bytes(spec, config), arguments)


def compile_backward(spec: AttentionSpec, config: Config) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: lengths and numbers of heads are not part of it."""
    choices = gradients.choices(spec, config.group_parts) | dict(
        num_stages=config.num_stages,
        output_stages=config.output_stages,
        logit_stages=config.logit_stages,
        smem_bytes=smem_bytes(spec, config),
    )
    halves = [half for name in ("head_dim", "value_dim") for half in (min(choices[name], 128), choices[name] - 128)]
    columns = frozenset({_BLOCK_Q, ATOM, *(half for half in halves if half > 0)})
    try:
        return launching.compile_kernel("backward_wide", columns, **choices)
    except compiler.CompileError as e:
        e.add_note(f"{gradients.LABEL}: compiled for {spec} with {config}. Leave config out.")
        raise
