"""The projections that `jaxkernels bench qkv` times."""

from __future__ import annotations

from collections.abc import Iterator

from jaxkernels.core.problems import Problem, Suite, both_ways
from jaxkernels.ops.qkv_projection.cases import QkvProjectionCase
from jaxkernels.ops.suite_sources import LLAMA_3, LLAMA_3_PAPER

__all__ = ["SUITES"]


def _models() -> Iterator[Problem]:
    """Batches as the presets of `jaxkernels train` have them."""
    yield from both_ways(
        QkvProjectionCase(32, 1024, 768, 12, 12, 64),
        QkvProjectionCase(32, 1024, 1024, 16, 16, 64),
        QkvProjectionCase(16, 2048, 2048, 32, 8, 64),
    )
    for width, _, num_heads, num_kv_heads, _ in LLAMA_3.values():
        yield from both_ways(QkvProjectionCase(4, 4096, width, num_heads, num_kv_heads, 128))
    width, _, num_heads, num_kv_heads, _ = LLAMA_3["8B"]
    yield from both_ways(QkvProjectionCase(4, 4096, width, num_heads, num_kv_heads, 128, pairs="neighbours"))


def _smoke() -> Iterator[Problem]:
    yield from both_ways(
        QkvProjectionCase(2, 24, 32, 4, 2, 16, dtype="float32"),
        QkvProjectionCase(2, 24, 32, 2, 2, 16, pairs="neighbours", dtype="float32"),
        QkvProjectionCase(1, 24, 32, 2, 1, 16, pairs=None, dtype="float32"),
    )


#: In the order in which they run.
SUITES: tuple[Suite, ...] = (
    Suite("qkv-smoke", "qkv", "our own: small enough for any machine", tuple(_smoke()), is_small=True),
    Suite("qkv-llm", "qkv", f"GPT-2, GPT-3 Medium, Llama 3.2 1B; {LLAMA_3_PAPER}", tuple(_models())),
)
