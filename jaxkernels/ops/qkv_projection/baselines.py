"""Another way to project in JAX: one product, and a rotation that XLA fuses."""

from __future__ import annotations

from jaxkernels.core.problems import PLAIN_JAX, Baseline

__all__ = ["BASELINES"]

#: Name -> baseline.
BASELINES: dict[str, Baseline] = {"xla": PLAIN_JAX}
