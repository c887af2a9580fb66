"""The problems that `jaxkernels bench lce` times."""

from __future__ import annotations

from collections.abc import Iterator

from jaxkernels.core.problems import Problem, Suite, both_ways
from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase
from jaxkernels.ops.suite_sources import LLAMA_3, LLAMA_3_PAPER

__all__ = ["SUITES"]


def _models() -> Iterator[Problem]:
    """What a training step computes, for 16,384 or 32,768 tokens."""
    width, *_, vocab = LLAMA_3["8B"]
    yield Problem(LinearCrossEntropyCase(16384, width, vocab, step=True), label="Llama 3 8B")
    yield Problem(LinearCrossEntropyCase(16384, width, vocab, step=True, vocab_axis=1), label="Llama 3 8B")
    yield Problem(LinearCrossEntropyCase(32768, 768, 50304, step=True), label="GPT-2")
    yield Problem(LinearCrossEntropyCase(16384, 2048, 50304, step=True), label="GPT-2's vocabulary")
    yield Problem(LinearCrossEntropyCase(4096, 2304, 256000, step=True, soft_cap=30.0), label="Gemma 2 2B")


def _losses() -> Iterator[Problem]:
    """A loss for each token, and its gradients with logits computed again."""
    yield from both_ways(
        LinearCrossEntropyCase(8192, 4096, 128256),
        LinearCrossEntropyCase(32768, 768, 50304),
    )


def _smoke() -> Iterator[Problem]:
    yield Problem(LinearCrossEntropyCase(256, 64, 512, dtype="float32", step=True))
    yield from both_ways(LinearCrossEntropyCase(255, 64, 511, dtype="float32"))


#: In the order in which they run.
SUITES: tuple[Suite, ...] = (
    Suite("lce-smoke", "lce", "our own: small enough for any machine", tuple(_smoke()), is_small=True),
    Suite("lce-step", "lce", f"{LLAMA_3_PAPER}; GPT-2; Gemma 2 (arXiv:2408.00118)", tuple(_models())),
    Suite("lce-tokens", "lce", f"{LLAMA_3_PAPER}; GPT-2; a loss for each token", tuple(_losses())),
)
