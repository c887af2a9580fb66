"""Shared by the tests of the projection to queries, keys and values: specs, operands and the error rule."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from numerics import assert_accurate, by_number, plain_and_exact

from jaxkernels.core import hardware
from jaxkernels.core.cases import random_array
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.qkv_projection import reference
from jaxkernels.ops.qkv_projection.spec import Pairs, QkvProjectionSpec, Wanted

__all__ = ["H200", "assert_right", "make_spec", "random_operands"]

H200 = hardware.lookup("NVIDIA H200")
KERNEL = "qkv_projection"


def make_spec(
    wanted: Wanted,
    lead: tuple[int, ...],
    features: int,
    heads: tuple[int, int, int],
    *,
    pairs: Pairs | None = None,
    dtype: str = "bfloat16",
    target: hardware.Chip = H200,
) -> QkvProjectionSpec:
    """A kernel of the projection; `heads` are numbers of heads of queries, of keys, and their features."""
    num_heads, num_kv_heads, head_dim = heads
    sizes = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
    array = lambda *shape: ArrayType(shape, jnp.dtype(dtype))
    angles = ArrayType((lead[-1], head_dim // 2), jnp.dtype(jnp.float32))
    types = dict(x=array(*lead, features), w=array(features, sum(sizes)), cos=angles, sin=angles)
    types |= {name: array(*lead, size) for name, size in zip(("query", "key", "value"), sizes)}
    spec = QkvProjectionSpec(wanted, sizes, jnp.dtype(dtype), head_dim, target, pairs)
    return dataclasses.replace(spec, **{name: types[name] for name in spec.inputs(KERNEL)})


def random_operands(spec: QkvProjectionSpec) -> list[np.ndarray]:
    """The same ones for equal specs. Angles are angles."""
    rng = np.random.default_rng(0)
    named = {name: random_array(rng, t.shape, t.dtype) for name, t in _types(spec).items()}
    if "cos" in named:
        named["cos"], named["sin"] = np.cos(named["cos"]), np.sin(named["cos"])
    return list(named.values())


def assert_right(spec: QkvProjectionSpec, results: Any) -> None:
    """Holds what a kernel returned of `random_operands` to the error rule."""
    assert_accurate(by_number(results), *_expected(spec))


def _types(spec: QkvProjectionSpec) -> dict[str, ArrayType]:
    arrays = spec.arrays()
    return {name: arrays[name].type for name in spec.inputs(KERNEL)}


@functools.lru_cache(maxsize=2)
def _expected(spec: QkvProjectionSpec) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The results in plain JAX: in the spec's dtypes, and in float64."""
    run = functools.partial(reference.compute, backend="xla")
    wide = dataclasses.replace(spec, dtype=jnp.dtype(jnp.float64))
    return plain_and_exact(run, spec, wide, random_operands(spec))
