"""Attentions that are timed, each suite with the source of its shapes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

from jaxkernels.core.problems import Problem, Suite, both_ways
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.suite_sources import LLAMA_3_PAPER

__all__ = ["SUITES"]

_FA2_PAPER = "16,384 tokens, width 2048, as Dao 2023, arXiv:2307.08691, section 4.1"


def _attention(
    tokens: int, length: int, head_dim: int, *, group_size: int = 1, width: int = 2048, **options: Any
) -> AttentionCase:
    heads = width // head_dim
    return AttentionCase(tokens // length, length, length, heads, heads // group_size, head_dim, **options)


def _attention_train() -> Iterator[Problem]:
    for head_dim, group_size, causal in itertools.product((64, 128, 256), (1, 8), (True, False)):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            yield from both_ways(_attention(16384, length, head_dim, group_size=group_size, causal=causal))


def _attention_decode() -> Iterator[Problem]:
    for batch, length in ((1, 16384), (8, 8192), (64, 4096)):
        yield Problem(AttentionCase(batch, 1, length, 32, 8, 128), label="Llama 3 8B")
        yield Problem(AttentionCase(batch, 1, length, 64, 8, 128), label="Llama 3 70B")


def _attention_smoke() -> Iterator[Problem]:
    case = functools.partial(AttentionCase, dtype="float32")
    yield from both_ways(case(2, 256, 256, 4, 4, 64, causal=True), case(2, 256, 256, 8, 1, 32))
    yield Problem(case(1, 512, 512, 2, 2, 64, causal=True, window=(63, 0)))
    yield Problem(case(2, 256, 256, 4, 2, 32, causal=True, segments=True, documents=8))
    yield Problem(case(2, 128, 128, 4, 4, 32, bias="1NTS"))
    yield Problem(case(4, 1, 512, 8, 2, 64))


#: In the order in which they run.
SUITES: tuple[Suite, ...] = (
    Suite("attention-smoke", "attention", "our own: small enough for any machine", tuple(_attention_smoke()),
          is_small=True),
    Suite("attention-train", "attention", f"{_FA2_PAPER}; also with 8 query heads a key head",
          tuple(_attention_train())),
    Suite("attention-heads", "attention", "head dimension 96, as Phi-3 mini (arXiv:2404.14219, section 2)",
          tuple(both_ways(*(_attention(16384, length, 96, width=3072, causal=causal)
                             for causal in (True, False) for length in (1024, 4096))))),
    Suite("attention-window", "attention", "window of 1024, as Gemma 3 (arXiv:2503.19786, section 2)",
          tuple(both_ways(*(_attention(16384, 16384, head_dim, causal=True, window=(1023, 0))
                             for head_dim in (64, 128, 256))))),
    Suite("attention-segments", "attention",
          "8 documents packed into 8192 tokens: of lengths 1 : 2 : ... : 8, causal, and of one length, full",
          tuple(both_ways(*(_attention(16384, 8192, head_dim, segments=True, documents=8, **kind)
                             for kind in (dict(causal=True), dict(equal_documents=True))
                             for head_dim in (64, 128))))),
    Suite("attention-bias", "attention", "a bias for each head and pair, as T5 (arXiv:1910.10683, section 2.1)",
          tuple(both_ways(*(_attention(16384, length, 64, bias="1NTS") for length in (1024, 4096))))),
    Suite("attention-decode", "attention", f"{LLAMA_3_PAPER}; one new token", tuple(_attention_decode())),
)  # fmt: skip
