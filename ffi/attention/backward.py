"""Attention's backward pass on Hopper tensor cores up to head dimension 128, in one CUDA C++ kernel (backward.cu says
how it works). gradients.py has the launch and the work around it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from jaxkernels.core.arguments import check_fields, check_rules
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

VERSION = 2

# As in backward.cu.
_BLOCK_KV = 128
_CONSUMERS = 2


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
        check_fields(gradients.LABEL, self)
        rules = {
            "block_q must be 64 or 128": self.block_q not in (64, 128),
            "num_stages must be at least 2": self.num_stages < 2,
            "group_parts must be positive": self.group_parts < 1,
        }
        check_rules(gradients.LABEL, self, rules)


def unsupported(spec: AttentionSpec) -> str | None:
    if reason := gradients.unsupported_bias(spec) or forward.unsupported(spec):
        return reason
    if max(spec.q.shape[3], spec.v.shape[3]) > 128:
        return f"handles head dimensions up to 128, got {spec.q.shape[3]} and {spec.v.shape[3]}"
    return None


def unpreferred(spec: AttentionSpec) -> str | None:
    if spec.key_lengths:
        return None  # XLA clears padding before the Pallas kernel: it took 1.2 times as long (docs/cuda-attention.md).
    return "is taken only where it was measured fastest: on an H200 it has 0.97 to 1.00 of the Pallas kernel's speed"


def smem_bytes(spec: AttentionSpec, config: Config) -> int:
    """Dynamic shared memory: keys, values, the rings, dS, staging buffers, lse, delta and barriers."""
    boxes = [2 * ATOM * -(-padded(x.shape[3]) // ATOM) for x in (spec.q, spec.v)]
    rows = _BLOCK_KV + config.num_stages * config.block_q
    logits = config.num_stages * 2 * _BLOCK_KV * config.block_q
    staging = 4 * (_CONSUMERS + gradients.QUERY_PIECES) * STAGING_BYTES
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
    spec = as_segments(spec)
    enough = gradients.enough_parts(spec, _BLOCK_KV, spec.target.num_sms)
    persistent = [False] if gradients.has_one_item_each(spec) else [True, False]
    for block_q, num_stages, group_parts in itertools.product((128, 64), (2, 3), sorted({1, enough})):
        for switches in itertools.product(persistent, (False, True)):
            config = Config(block_q, num_stages, group_parts, *switches)
            if _fits(spec, config):
                yield config


def estimate(spec: AttentionSpec, config: Config, constants: Constants = CONSTANTS) -> float:
    """Seconds of `run`: steps of all CTAs over the SMs, or of the longest CTA, and the passes of other kernels."""
    spec = as_segments(spec)
    columns = 3 * padded(spec.q.shape[3]) + 2 * padded(spec.v.shape[3])
    step_seconds = {64: constants.step_seconds_64, 128: constants.step_seconds_128}[config.block_q]
    seconds = 2 * config.block_q * _BLOCK_KV * columns / constants.flops_per_sm + step_seconds
    busiest = gradients.busiest_cta(spec, _tiling(config, constants.item_steps))
    in_order = constants.in_order if spec.deterministic else 1.0
    others = gradients.other_seconds(spec, config.group_parts, constants.copy_bytes)
    return constants.launch_seconds + busiest * seconds * in_order + others


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None. It has the sums, zeros and conversion of dq."""
    return launching.not_estimated(as_segments(spec))


def _tiling(config: Config, item_steps: float) -> gradients.Tiling:
    return gradients.Tiling(config.block_q, _BLOCK_KV, config.group_parts, 1, config.persistent, item_steps)


def run(spec: AttentionSpec, config: Config, *operands: jax.Array) -> list[jax.Array]:
    """Returns [dq, dk, dv], of the operands' shapes and dtypes."""
    spec, arguments = operands_as_segments("attention_backward", spec, operands)
    gradients.check_parts(spec, config.group_parts)
    if not _fits(spec, config):
        raise ValueError(
            f"{gradients.LABEL}: a block has at most {spec.target.smem_bytes} bytes of shared memory on "
            f"{spec.target.name}; "
            "block_q=128 needs head dimensions up to 64 and no soft cap, early_gradients needs block_q=64, head "
            "dimensions up to 96 and no soft cap; "
            f"got {config}, which needs {smem_bytes(spec, config)} bytes. Use fewer stages or block_q=64."
        )
    compiled = compile_backward(spec, config)
    return gradients.run(spec, _tiling(config, CONSTANTS.item_steps), compiled, smem_bytes(spec, config), arguments)


def compile_backward(spec: AttentionSpec, config: Config) -> compiler.CompiledKernel:
    """Compiles the kernel that serves the spec: lengths and numbers of heads are not part of it."""
    choices = gradients.choices(spec, config.group_parts) | dict(
        block_q=config.block_q,
        num_stages=config.num_stages,
        early_gradients=config.early_gradients,
        smem_bytes=smem_bytes(spec, config),
    )
    try:
        head_dim = choices["head_dim"]
        pieces = {min(head_dim, 64), head_dim - 64 if head_dim > 64 else head_dim}
        columns = frozenset({choices["block_q"], head_dim, choices["value_dim"], *pieces})
        return launching.compile_kernel("backward", columns, **choices)
    except compiler.CompileError as e:
        e.add_note(f"{gradients.LABEL}: compiled for {spec} with {config}. Use block_q=64, or leave config out.")
        raise
