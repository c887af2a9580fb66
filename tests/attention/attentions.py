"""Shared by the tests of the attention kernels."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.core import hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import reference
from jaxkernels.ops.attention.spec import AttentionSpec, Extras

__all__ = ["H200", "draw", "extra_types", "extras_of", "make_spec"]

H200 = hardware.lookup("NVIDIA H200")


def extra_types(spec: AttentionSpec) -> list[ArrayType]:
    """The types of the optional operands that follow q, k and v, in order."""
    arrays = spec.arrays()
    return [arrays[name].type for name in spec.extra_names]


def make_spec(
    batch: int = 2, queries: int = 24, keys: int = 40, heads: int = 4, kv_heads: int = 2, head_dim: int = 16,
    value_dim: int | None = None, *, dtype: str = "float32", bias: tuple[int, ...] | None = None,
    mask: tuple[int, ...] | None = None, scale: float = 0.3, target: hardware.Chip = H200, **options: Any,
) -> AttentionSpec:  # fmt: skip
    array = lambda *shape: ArrayType(shape, jnp.dtype(dtype))
    return AttentionSpec(
        array(batch, queries, heads, head_dim),
        array(batch, keys, kv_heads, head_dim),
        array(batch, keys, kv_heads, value_dim or head_dim),
        scale=scale,
        target=target,
        bias=None if bias is None else ArrayType(bias, jnp.dtype(jnp.float32)),
        mask=None if mask is None else ArrayType(mask, jnp.dtype(bool)),
        **options,
    )


def draw(spec: AttentionSpec, seed: int = 0) -> dict[str, jax.Array]:
    """Operands of all passes. Lengths include 0 and all; segments are in order; padding is NaN."""
    rng = np.random.default_rng(seed)
    batch, queries, keys = spec.q.shape[0], spec.q.shape[1], spec.k.shape[1]
    lengths = lambda longest, first: np.resize([first, longest, 0, longest // 2], batch)
    special = dict(
        query_lengths=lambda: lengths(queries, queries // 3),
        key_lengths=lambda: lengths(keys, keys // 4),
        query_segments=lambda: np.sort(rng.integers(0, 4, (batch, queries)), axis=1),
        key_segments=lambda: np.sort(rng.integers(0, 4, (batch, keys)), axis=1),
        query_offset=lambda: 7,
        mask=lambda: rng.random(spec.mask.shape) < 0.4 if spec.mask else None,
    )
    values = {
        name: jnp.asarray(special.get(name, lambda shape=x.type.shape: rng.normal(size=shape))(), x.type.dtype)
        for name, x in spec.arrays().items()
        if name in (*spec.inputs("attention_backward"), *spec.inputs("attention_tangent"))
    }
    if spec.query_lengths and not spec.query_offset:
        is_query = np.arange(queries) < np.asarray(values["query_lengths"])[:, None]
        for name in ("q", "dq", "dout"):
            values[name] = jnp.where(is_query[:, :, None, None], values[name], jnp.nan)
    if spec.key_lengths:
        is_key = np.arange(keys) < np.asarray(values["key_lengths"])[:, None]
        for name in ("k", "v", "dk", "dv"):
            values[name] = jnp.where(is_key[:, :, None, None], values[name], jnp.nan)
    out, lse = reference.attend(spec, values["q"], values["k"], values["v"], extras_of(spec, values))
    return values | dict(out=out, lse=lse)


def extras_of(spec: AttentionSpec, values: dict[str, jax.Array]) -> Extras:
    return Extras.of({name: values[name] for name in spec.extra_names})
