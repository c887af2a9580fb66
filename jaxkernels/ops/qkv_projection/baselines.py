"""Another way to project in JAX: one product, and a rotation that XLA fuses."""

from __future__ import annotations

from jaxkernels.core.problems import Baseline, Contender

__all__ = ["BASELINES"]

#: Name -> baseline.
BASELINES: dict[str, Baseline] = {
    "xla": Baseline(lambda problem, chip: None, lambda problem: iter([Contender("xla", problem.case.plain)])),
}
