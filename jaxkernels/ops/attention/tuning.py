"""What the passes of attention are tuned on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import _jax, dispatch
from jaxkernels.core.cases import Cut, random_on_device, whole
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["operands", "part_to_check", "probe"]

#: What follows q, k, v and the optional operands, and what the passes return.
_AFTER = {"attention_forward": (), "attention_backward": ("out", "lse", "dout", "dlse")}
_RESULTS = {"attention_forward": ("out", "lse"), "attention_backward": ("q", "k", "v")}


def operands(kernel: str, spec: AttentionSpec, device: Any) -> tuple[jax.Array, ...]:
    """The operands of a pass on a device: the same ones every time.

    Floating ones are from N(0, 1). Sequence lengths are spread over the upper half of what is possible, segments are
    eight of equal length, one in eight places of a mask is hidden.
    """
    given = (*random_on_device([spec.q, spec.k, spec.v], device), *_extras(spec, device))
    if kernel == "attention_forward":
        return given
    # The backward pass also takes the forward pass's results, and their cotangents.
    choice = dispatch.choose("attention_forward", spec, None)
    run = dispatch.load("attention_forward", choice.backend).run
    with _jax.ignore_x64(given):
        out, lse = jax.jit(lambda *xs: run(spec, choice.config, *xs))(*given)
    return *given, out, lse, *random_on_device([ArrayType.of(out), ArrayType.of(lse)], device, seed=1)


def part_to_check(kernel: str, spec: AttentionSpec) -> tuple[AttentionSpec, Cut, Cut]:
    """The part of an attention that belongs to the first batch element and key head, as a smaller attention.

    The reference in plain JAX holds all logits at once: that of a long sequence with many heads does not fit a chip.

    Returns:
      The smaller spec, and what cuts its part out of the operands and out of the results. An attention
      whose results add up over heads is left whole.
    """
    if spec.bias_gradient:
        return whole(spec)

    def cut(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
        if name in ("k", "v"):
            return slice(1), slice(None), slice(1)
        if name in ("bias", "mask", "lse", "dlse"):
            return slice(1), slice(spec.group_size)
        return (slice(1), slice(None), slice(spec.group_size))[: len(shape)]

    def smaller(name: str) -> ArrayType | None:
        array = getattr(spec, name)
        return array and ArrayType(np.empty(array.shape, bool)[cut(name, array.shape)].shape, array.dtype)

    cut_all = lambda names: lambda xs: [x[cut(name, x.shape)] for name, x in zip(names, xs, strict=True)]
    small = dataclasses.replace(spec, **{name: smaller(name) for name in ("q", "k", "v", "bias", "mask")})
    return small, cut_all(("q", "k", "v", *spec.extra_names, *_AFTER[kernel])), cut_all(_RESULTS[kernel])


def _extras(spec: AttentionSpec, device: Any) -> tuple[jax.Array, ...]:
    """The optional operands, in their order."""
    batch, num_queries, num_keys = spec.q.shape[0], spec.q.shape[1], spec.k.shape[1]
    spread = lambda length: np.minimum(np.arange(batch) * math.ceil(length / 2) // batch + length // 2 + 1, length)
    segment = lambda length: np.tile(np.arange(length) * 8 // length, (batch, 1))
    made: dict[str, Callable[[], Any]] = {
        "bias": lambda: random_on_device([a for a in (spec.bias,) if a], device, seed=2)[0],
        "mask": lambda: random_on_device([a for a in (spec.mask,) if a], device, seed=3)[0],
        "query_lengths": lambda: spread(num_queries).astype(np.int32),
        "key_lengths": lambda: spread(num_keys).astype(np.int32),
        "query_segments": lambda: segment(num_queries).astype(np.int32),
        "key_segments": lambda: segment(num_keys).astype(np.int32),
        "query_offset": lambda: np.int32(0),
    }
    return tuple(jax.device_put(made[name](), device) for name in spec.extra_names)


def probe(chip: Chip) -> AttentionSpec:
    """A plain attention that every backend should take: large, aligned, bfloat16, causal."""
    heads = ArrayType((2, 1024, 8, 128), jnp.dtype(jnp.bfloat16))
    return AttentionSpec(heads, heads, heads, scale=1.0, target=chip, causal=True)
