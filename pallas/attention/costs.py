"""The cost models of the attention kernels: steps of the busiest CTA, and what runs beside them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jaxkernels.ops.attention.planning import backward_steps, forward_steps, longest_cta
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.attention.visibility import is_known_at_run_time, may_see_nothing
from jaxkernels.pallas.attention.backward import in_parts
from jaxkernels.pallas.attention.limits import padded_head_dims

__all__ = ["Constants", "kernel_seconds", "not_estimated", "other_seconds", "two_kernels_seconds"]


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model of a backward pass.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      logits_per_sm: logits/s of one SM: the arithmetic between the products, for which the tensor cores wait.
      step_seconds: what a step takes beside both. Without a second slot in the ring it counts twice: loads and products
        do not overlap.
      item_steps: what an item costs beside its steps, in steps.
      copy_bytes: bytes/s of the passes over out, dout and dq.
      launch_seconds: all launches of the pass.
    """

    flops_per_sm: float
    logits_per_sm: float
    step_seconds: float
    item_steps: float
    copy_bytes: float
    launch_seconds: float


def kernel_seconds(
    spec: AttentionSpec,
    constants: Constants,
    *,
    steps: Sequence[int],
    num_streams: int,
    tile: tuple[int, int],
    columns: int,
    num_stages: int,
) -> float:
    """Estimates a kernel of a backward pass.

    Args:
      steps: of each item of a stream.
      num_streams: heads whose items are `steps`, of all batch elements.
      tile: queries and keys of a step.
      columns: the columns of all products of a step together.
      num_stages: slots of the ring.
    """
    logits = math.prod(tile)
    seconds = 2 * logits * columns / constants.flops_per_sm + logits / constants.logits_per_sm
    seconds += constants.step_seconds * (2 if num_stages == 1 else 1)
    return longest_cta(steps, num_streams, spec.target.num_sms, constants.item_steps) * seconds


def two_kernels_seconds(
    spec: AttentionSpec,
    constants: Constants,
    *,
    group_parts: int,
    head_multiple: int,
    dq_tile: tuple[int, int],
    dkv_tile: tuple[int, int],
    dq_num_stages: int,
    dkv_num_stages: int,
) -> float:
    """Estimates a pass with a kernel for dQ, of three products, and one for dK and dV, of four.

    Args:
      group_parts: parts of a group.
      head_multiple: to multiples of which head dimensions are padded.
      dq_tile, dkv_tile: queries and keys of a step of each kernel.
      dq_num_stages, dkv_num_stages: slots of their rings.
    """
    parts = in_parts(spec, group_parts)
    head_dim, value_dim = padded_head_dims(spec, head_multiple)
    dq = kernel_seconds(
        parts,
        constants,
        steps=forward_steps(parts, *dq_tile),
        num_streams=parts.q.shape[0] * parts.q.shape[2],
        tile=dq_tile,
        columns=2 * head_dim + value_dim,
        num_stages=dq_num_stages,
    )
    dkv = kernel_seconds(
        parts,
        constants,
        steps=backward_steps(parts, *dkv_tile),
        num_streams=parts.k.shape[0] * parts.k.shape[2],
        tile=dkv_tile,
        columns=2 * (head_dim + value_dim),
        num_stages=dkv_num_stages,
    )
    return dq + dkv + other_seconds(spec, constants, bytes_of_dq=0, group_parts=group_parts)


def other_seconds(spec: AttentionSpec, constants: Constants, *, bytes_of_dq: int, group_parts: int) -> float:
    """Estimates the passes beside the kernels: rowsum(out * dout), the conversion of dq, and the sums of parts.

    Args:
      bytes_of_dq: bytes moved for each element of dq.
      group_parts: parts of a group, whose gradients of keys and values are added.
    """
    batch, num_queries, num_heads, head_dim = spec.q.shape
    num_bytes = batch * num_queries * num_heads * (bytes_of_dq * head_dim + 4 * spec.v.shape[3])
    if group_parts > 1:
        num_bytes += 2 * (group_parts + 1) * (math.prod(spec.k.shape) + math.prod(spec.v.shape))
    return constants.launch_seconds + num_bytes / constants.copy_bytes


def not_estimated(spec: AttentionSpec, head_multiple: int) -> str | None:
    """Which part of the time of a pass the estimate leaves out, or None."""
    if is_known_at_run_time(spec):
        return "lengths or segments decide at run time how long items take"
    if padded_head_dims(spec, head_multiple) != (spec.q.shape[3], spec.v.shape[3]):
        return "XLA pads the head dimensions"
    if spec.deterministic:
        return "blocks of keys wait for each other"
    return "XLA looks for queries that see no key" if may_see_nothing(spec) else None
