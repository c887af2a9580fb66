"""The projection to queries, keys and values by XLA: plain products, beside slices, rotations and concatenations."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from jaxkernels.ops.matmul import cublas, tensor_cores
from jaxkernels.ops.matmul.rules import dot_general_op
from jaxkernels.ops.qkv_projection.spec import PARTS, Pairs, QkvProjectionSpec

__all__ = ["VERSION", "Config", "compute", "estimate", "rotate", "run", "search_space", "split_heads", "unsupported"]

VERSION = 0


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
    return cublas.estimate(spec.product, None) + tensor_cores.pass_seconds(spec.target, num_bytes)


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
    angles = (named["cos"], named["sin"]) if spec.pairs is not None else None
    parts = split_heads(out, spec.sizes, spec.head_dim, angles, spec.pairs)
    return [part.reshape(*part.shape[:-2], size) for part, size in zip(parts, spec.sizes)]


def split_heads(
    x: jax.Array,
    sizes: tuple[int, int, int],
    head_dim: int,
    angles: tuple[jax.Array, jax.Array] | None,
    pairs: Pairs | None,
) -> list[jax.Array]:
    """Returns heads of query, key and value, (..., T, heads, H), of columns that lie side by side. With angles (cos,
    sin), queries and keys are rotated."""
    heads = x.reshape(*x.shape[:-1], x.shape[-1] // head_dim, head_dim)
    parts = jnp.split(heads, (sizes[0] // head_dim, (sizes[0] + sizes[1]) // head_dim), axis=-2)
    if angles is not None and pairs is not None:
        parts[:2] = (rotate_heads(part, *angles, pairs) for part in parts[:2])
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
