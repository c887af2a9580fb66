"""Operands to measure a kernel on, made from its spec alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import _jax, dispatch
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec

__all__ = ["first_heads", "make"]

Cut = Callable[[Sequence[Any]], list[Any]]

#: Of attention's passes: what follows q, k, v and the optional operands, and what they return.
_AFTER = {"attention_forward": (), "attention_backward": ("out", "lse", "dout", "dlse")}
_RESULTS = {"attention_forward": ("out", "lse"), "attention_backward": ("q", "k", "v")}


def make(op: str, spec: Any, device: Any) -> tuple[jax.Array, ...]:
    """Returns the operands of an operation's kernel, on a device: the same ones every time.

    Floating ones are from N(0, 1). Sequence lengths are spread over the upper half
    of what is possible, segments are eight of equal length, one in eight places of a mask is hidden.
    """
    if op == "matmul":
        return _random([t for t in (spec.lhs, spec.rhs, spec.bias, spec.residual) if t is not None], device)
    if op not in _AFTER:
        raise NotImplementedError(f"tuning: there is no rule for the operands of {op!r}. Add one to {__name__}.")
    operands = (*_random([spec.q, spec.k, spec.v], device), *_extras(spec, device))
    if op == "attention_forward":
        return operands
    # The backward pass also takes the forward pass's results, and their cotangents.
    choice = dispatch.choose("attention_forward", spec, None)
    run = dispatch.load("attention_forward", choice.backend).run
    with _jax.ignore_x64(operands):
        out, lse = jax.jit(lambda *xs: run(spec, choice.config, *xs))(*operands)
    return *operands, out, lse, *_random([ArrayType.of(out), ArrayType.of(lse)], device, seed=1)


def first_heads(op: str, spec: Any) -> tuple[Any, Cut, Cut]:
    """The part of an attention that belongs to the first batch element and key head, as a smaller attention.

    The reference in plain JAX holds all logits at once: that of a long sequence with many heads does not fit a chip.

    Returns:
      The smaller spec, and what cuts its part out of the operands and out of the results. Another operation, or an
      attention whose results add up over heads, is left whole.
    """
    if not isinstance(spec, AttentionSpec) or spec.bias_gradient:
        return spec, list, list

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
    return small, cut_all(("q", "k", "v", *spec.extra_names, *_AFTER[op])), cut_all(_RESULTS[op])


def _random(types: list[ArrayType], device: Any, seed: int = 0) -> tuple[jax.Array, ...]:
    # The device's own generator: quick to compile, and to draw a gigabyte.
    draw = lambda: [_draw(jax.random.key(16 * seed + i, impl="rbg"), array) for i, array in enumerate(types)]
    return tuple(jax.jit(draw, out_shardings=jax.sharding.SingleDeviceSharding(device))())


def _draw(key: jax.Array, array: ArrayType) -> jax.Array:
    if jnp.issubdtype(array.dtype, jnp.bool_):
        return jax.random.bernoulli(key, 7 / 8, array.shape)
    if jnp.issubdtype(array.dtype, jnp.integer):
        return jax.random.randint(key, array.shape, 0, 8).astype(array.dtype)
    return jax.random.normal(key, array.shape, jnp.float32).astype(array.dtype)


def _extras(spec: AttentionSpec, device: Any) -> tuple[jax.Array, ...]:
    """The optional operands, in their order."""
    batch, num_queries, num_keys = spec.q.shape[0], spec.q.shape[1], spec.k.shape[1]
    spread = lambda length: np.minimum(np.arange(batch) * math.ceil(length / 2) // batch + length // 2 + 1, length)
    segment = lambda length: np.tile(np.arange(length) * 8 // length, (batch, 1))
    made: dict[str, Callable[[], Any]] = {
        "bias": lambda: _random([a for a in (spec.bias,) if a], device, seed=2)[0],
        "mask": lambda: _random([a for a in (spec.mask,) if a], device, seed=3)[0],
        "query_lengths": lambda: spread(num_queries).astype(np.int32),
        "key_lengths": lambda: spread(num_keys).astype(np.int32),
        "query_segments": lambda: segment(num_queries).astype(np.int32),
        "key_segments": lambda: segment(num_keys).astype(np.int32),
        "query_offset": lambda: np.int32(0),
    }
    return tuple(jax.device_put(made[name](), device) for name in spec.extra_names)
