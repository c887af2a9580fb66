"""How long cuDNN's attention takes: the cost model of both passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxkernels.core import hardware
from jaxkernels.cudnn.attention.problem import Config, folds_masks, needs_bias
from jaxkernels.ops.attention.planning import forward_steps, longest_cta
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["Constants", "not_estimated", "seconds"]

#: Queries and keys of a tile of logits. cuDNN does not say what it takes.
_BLOCK = 128
#: Head dimensions above this one have a rate of their own.
_WIDE = 128


@dataclasses.dataclass(frozen=True)
class Constants:
    """The constants of the cost model of a pass.

    Attributes:
      flops_per_sm: FLOP/s of one SM.
      flops_per_sm_wide: the same of head dimensions above 128.
      logits_per_sm: logits/s of one SM: exponentials and what goes with them.
      bias_bytes_per_sm: bytes/s of one SM from a bias.
      item_seconds: beginning and storing 128 queries of a head.
      memory_bytes: bytes/s of operands and results. The backward pass also moves dQ in float32.
      launch_seconds: the launches of a pass.
    """

    flops_per_sm: float
    flops_per_sm_wide: float
    logits_per_sm: float
    bias_bytes_per_sm: float
    item_seconds: float
    memory_bytes: float
    launch_seconds: float


def seconds(spec: AttentionSpec, constants: Constants, *, widths: int, arrays: Iterable[str]) -> float:
    """Seconds of a pass.

    Args:
      widths: the sum of the head dimensions of its products.
      arrays: names of its operands and results.
    """
    types = spec.arrays()
    num_bytes = sum(types[name].type.num_bytes for name in arrays)
    batch, _, num_heads, head_dim = spec.q.shape
    logits = _BLOCK * _BLOCK
    rate = constants.flops_per_sm_wide if head_dim > _WIDE else constants.flops_per_sm
    step = hardware.soft_max(2 * logits * widths / rate, logits / constants.logits_per_sm)
    if needs_bias(spec):
        step += 2 * logits / constants.bias_bytes_per_sm
    steps = forward_steps(spec, _BLOCK, _BLOCK)
    longest = longest_cta(steps, batch * num_heads, spec.target.num_sms, constants.item_seconds / step) * step
    return constants.launch_seconds + hardware.soft_max(longest, num_bytes / constants.memory_bytes)


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    if spec.q.shape[1] < _BLOCK:
        return "cuDNN divides the keys of few queries"
    if spec.query_lengths or spec.key_lengths:
        return "XLA clears padding, and lengths are not known"
    if folds_masks(spec):
        return "XLA makes a bias of masks"
    return "XLA pads values" if spec.v.shape[3] < spec.q.shape[3] else None
