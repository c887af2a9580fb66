"""Another way to compute a norm in JAX: jnp's expression, which XLA fuses."""

from __future__ import annotations

from jaxkernels.core.problems import PLAIN_JAX, Baseline

__all__ = ["BASELINES"]

#: Name -> baseline.
BASELINES: dict[str, Baseline] = {"xla": PLAIN_JAX}
