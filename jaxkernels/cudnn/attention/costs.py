"""How long cuDNN's attention takes: the cost model of both passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from jaxkernels.core import hardware
from jaxkernels.cudnn.attention.problem import Config, folds_masks, masks_of, needs_bias
from jaxkernels.ops.attention.planning import forward_steps, longest_cta
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["Constants", "not_estimated", "seconds"]

#: Queries and keys of a tile of logits. cuDNN does not say what it takes.
_BLOCK = 128
#: Head dimensions above this one have a rate of their own.
_WIDE = 128
#: How much slower a bias is loaded if its rows are no whole number of 16 bytes.
_UNALIGNED_BIAS = 3.0
#: A pass of XLA over an operand.
_LAUNCH_SECONDS = 2e-6


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


def seconds(
    spec: AttentionSpec, constants: Constants, *, widths: int, arrays: Iterable[str], divides_keys: bool = False
) -> float:
    """Seconds of a pass.

    Args:
      widths: the sum of the head dimensions of its products.
      arrays: names of its operands and results.
      divides_keys: whether the keys of a single query are divided among SMs, as in the forward pass.
    """
    types = spec.arrays()
    num_bytes = sum(types[name].type.num_bytes for name in arrays)
    head_dim = spec.q.shape[3]
    logits = _BLOCK * _BLOCK
    rate = constants.flops_per_sm_wide if head_dim > _WIDE else constants.flops_per_sm
    step = hardware.soft_max(2 * logits * widths / rate, logits / constants.logits_per_sm)
    if needs_bias(spec):
        is_aligned = 2 * spec.k.shape[1] % 16 == 0
        step += 2 * logits / constants.bias_bytes_per_sm * (1 if is_aligned else _UNALIGNED_BIAS)
    item_steps = constants.item_seconds / step
    longest = _longest(spec, item_steps, divides_keys=divides_keys) * step
    seconds = constants.launch_seconds + hardware.soft_max(longest, num_bytes / constants.memory_bytes)
    for is_padded, names in ((spec.query_lengths, "q"), (spec.key_lengths, "kv")):
        if is_padded:  # XLA clears the padding: it reads and writes the operand.
            padded = sum(types[name].type.num_bytes for name in names)
            seconds += _LAUNCH_SECONDS + 2 * padded / constants.memory_bytes
    return seconds


def _longest(spec: AttentionSpec, item_steps: float, *, divides_keys: bool) -> float:
    """The steps of the busiest SM.

    With one query, the heads of a group share a tile. cuDNN also divides its keys among SMs, except with a bias or with
    lengths.
    """
    steps = forward_steps(_skipped(spec), _BLOCK, _BLOCK)
    batch, num_queries, num_heads, _ = spec.q.shape
    if num_queries > 1 or not divides_keys:
        return longest_cta(steps, batch * num_heads, spec.target.num_sms, item_steps)
    streams = batch * spec.k.shape[2]
    if needs_bias(spec) or spec.query_lengths or spec.key_lengths:
        return longest_cta(steps, streams, spec.target.num_sms, item_steps)
    return max(1, streams * steps[0] / spec.target.num_sms) + item_steps


def _skipped(spec: AttentionSpec) -> AttentionSpec:
    """The spec with only those masks for which cuDNN skips blocks. It computes blocks that a bias masks."""
    masks = masks_of(spec)
    window = spec.window if masks.window is not None else None
    return dataclasses.replace(spec, causal=masks.is_causal, window=window, query_offset=False, terms=())


def not_estimated(spec: AttentionSpec, config: Config) -> str | None:
    """Which part of the time of `run` the estimate leaves out, or None."""
    if spec.q.shape[1] < _BLOCK:
        return "cuDNN divides the keys of few queries"
    if spec.query_lengths or spec.key_lengths:
        return "XLA clears padding, and lengths are not known"
    if folds_masks(spec):
        return "XLA makes a bias of masks"
    return "XLA pads values" if spec.v.shape[3] < spec.q.shape[3] else None
