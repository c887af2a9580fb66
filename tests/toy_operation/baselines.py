"""Other ways to compute it."""

from __future__ import annotations

from jaxkernels.core.problems import PLAIN_JAX

BASELINES = {
    "xla": PLAIN_JAX,
}
