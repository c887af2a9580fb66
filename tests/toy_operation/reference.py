"""The operation in plain JAX."""

from __future__ import annotations

import dataclasses

import jax

from toy_operation.spec import ScaleRowsSpec

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def unsupported(spec: ScaleRowsSpec) -> str | None:
    return None


def search_space(spec: ScaleRowsSpec) -> tuple[Config, ...]:
    return (Config(),)


def run(spec: ScaleRowsSpec, config: Config, x: jax.Array, s: jax.Array) -> jax.Array:
    return x * s[:, None]
