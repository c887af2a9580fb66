"""The projection to queries, keys and values by XLA: plain products, beside slices, rotations and concatenations."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxkernels.ops.matmul import cublas
from jaxkernels.ops.matmul.rules import dot_general_op
from jaxkernels.ops.qkv_projection.spec import PARTS, Pairs, QkvProjectionSpec

__all__ = ["VERSION", "Config", "compute", "estimate", "rotate", "rotate_heads", "run", "search_space", "unsupported"]

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
    """Returns the results, in the order of the spec's outputs. The plain product is that of the fastest backend, such
    as the kernel for few rows in decoding: a call that names "xla" does not come here."""
    return compute(spec, *arrays, backend=None)


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
    if (pairs := spec.pairs) is not None:
        turn = lambda part: rotate(part, named["cos"], named["sin"], spec.head_dim, pairs)
        parts[:2] = map(turn, parts[:2])
    return parts


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, head_dim: int, pairs: Pairs) -> jax.Array:
    """`rotate_heads` of heads that lie side by side, (..., T, heads * head_dim)."""
    heads = x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
    return rotate_heads(heads, cos, sin, pairs).reshape(x.shape)


def rotate_heads(x: jax.Array, cos: jax.Array, sin: jax.Array, pairs: Pairs) -> jax.Array:
    """Rotates the pairs of features of heads (..., T, heads, H) by angles whose cosines and sines are (T, H/2). It
    computes in the wider dtype of x and cos."""
    wide = x.astype(jnp.promote_types(x.dtype, cos.dtype))
    cos, sin = cos[:, None], sin[:, None]  # For all heads.
    if pairs == "halves":
        first, second = jnp.split(wide, 2, axis=-1)
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    else:
        first, second = wide[..., 0::2], wide[..., 1::2]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)
    return turned.astype(x.dtype)
