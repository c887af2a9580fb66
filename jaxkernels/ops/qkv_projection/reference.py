"""The projection to queries, keys and values by XLA: plain products, beside slices, rotations and concatenations."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxkernels.ops.matmul import cublas
from jaxkernels.ops.matmul.rules import dot_general_op
from jaxkernels.ops.qkv_projection.spec import PARTS, Pairs, QkvProjectionSpec

__all__ = ["VERSION", "Config", "compute", "estimate", "rotate", "run", "search_space", "unsupported"]

VERSION = 0

#: The share of the memory's bandwidth that XLA's elementwise kernels reach, and the time of their launch.
_COPY_SHARE, _LAUNCH_SECONDS = 0.896, 1.5e-6


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def unsupported(spec: QkvProjectionSpec) -> str | None:
    return None


def search_space(spec: QkvProjectionSpec) -> tuple[Config, ...]:
    return (Config(),)


def estimate(spec: QkvProjectionSpec, config: Config) -> float:
    """Seconds: cuBLAS's product, and a kernel that reads and writes the parts."""
    num_bytes = 2 * math.prod(spec.lead) * spec.num_columns * spec.dtype.itemsize
    rate = _COPY_SHARE * (spec.target.memory_bytes_per_s or math.inf)
    return cublas.estimate(spec.product, None) + _LAUNCH_SECONDS + num_bytes / rate


def run(spec: QkvProjectionSpec, config: Config, *arrays: jax.Array) -> list[jax.Array]:
    """Returns the results, in the order of the spec's outputs."""
    return compute(spec, *arrays, backend="xla")


def compute(spec: QkvProjectionSpec, *arrays: jax.Array, backend: str | None) -> list[jax.Array]:
    """The kernel with plain products of a backend."""
    named = spec.named("qkv_projection", arrays)
    if spec.wanted != "parts":
        named["parts"] = jnp.concatenate([named[name] for name in PARTS], axis=-1)
    lhs, rhs = {"parts": ("x", "w"), "x": ("parts", "w"), "w": ("x", "parts")}[spec.wanted]
    out = dot_general_op.bind(spec.product, dict(lhs=named[lhs], rhs=named[rhs]), backend=backend)
    if spec.wanted != "parts":
        return [out]
    query, key, _ = spec.sizes
    parts = jnp.split(out, (query, query + key), axis=-1)
    if spec.pairs is not None:
        turn = lambda part: rotate(part, named["cos"], named["sin"], spec.head_dim, spec.pairs)
        parts[:2] = map(turn, parts[:2])
    return parts


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, head_dim: int, pairs: Pairs) -> jax.Array:
    """Rotates the pairs of features of each head of x, (..., T, heads * head_dim), by angles whose cosines and sines
    are (T, head_dim / 2). It computes in the wider dtype of x and cos."""
    half, wide = head_dim // 2, jnp.promote_types(x.dtype, cos.dtype)
    axis, split = (-2, (2, half)) if pairs == "halves" else (-1, (half, 2))
    heads = x.astype(wide).reshape(*x.shape[:-1], x.shape[-1] // head_dim, *split)
    first, second = (jax.lax.index_in_dim(heads, i, axis, keepdims=False) for i in (0, 1))
    cos, sin = cos[:, None], sin[:, None]  # For all heads.
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)
