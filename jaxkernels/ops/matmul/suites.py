"""Products that are timed, each suite with the source of its shapes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from jaxkernels.core.problems import Problem, Suite
from jaxkernels.ops.matmul.cases import MatmulCase
from jaxkernels.ops.suite_sources import LLAMA_3, LLAMA_3_PAPER

__all__ = ["SUITES"]


def _square() -> Iterator[Problem]:
    for size in (256, 512, 1000, 1024, 1536, 2048, 4096, 8192, 16384):
        yield Problem(MatmulCase(size, size, size))


def _llm() -> Iterator[Problem]:
    for model, (width, hidden, heads, kv_heads, vocabulary) in LLAMA_3.items():
        matrices = {  # input features, output features
            "qkv": (width, 128 * (heads + 2 * kv_heads)),
            "o": (128 * heads, width),
            "gate-up": (width, 2 * hidden),
            "down": (hidden, width),
            "unembedding": (width, vocabulary),
        }
        for tokens, (name, (inputs, outputs)) in itertools.product((2048, 8192, 16384), matrices.items()):
            label = f"Llama 3 {model} {name}"
            yield Problem(MatmulCase(tokens, outputs, inputs), label=label)
            yield Problem(MatmulCase(tokens, inputs, outputs, rhs_layout="nk"), label=f"{label}, dgrad")
            yield Problem(MatmulCase(inputs, outputs, tokens, lhs_layout="km"), label=f"{label}, wgrad")


def _decode() -> Iterator[Problem]:
    width, hidden, heads, kv_heads, _ = LLAMA_3["8B"]
    matrices = {
        "qkv": (width, 128 * (heads + 2 * kv_heads)),
        "o": (128 * heads, width),
        "gate-up": (width, 2 * hidden),
        "down": (hidden, width),
    }
    for (name, (inputs, outputs)), tokens in itertools.product(matrices.items(), (1, 2, 4, 8, 16, 32, 64)):
        yield Problem(MatmulCase(tokens, outputs, inputs), label=f"Llama 3 8B {name}")


def _odd() -> Iterator[Problem]:
    yield Problem(MatmulCase(4095, 4097, 4093))
    yield Problem(MatmulCase(4095, 4097, 4093, rhs_layout="nk"))
    yield Problem(MatmulCase(4095, 4097, 4093, lhs_layout="km"))
    for rest in range(1, 8):  # Rows of one operand that are not a multiple of 16 bytes.
        yield Problem(MatmulCase(4096, 4096, 4096 + rest))
        yield Problem(MatmulCase(4096, 4096 + rest, 4096))
    label = "GPT-2 unembedding"
    yield Problem(MatmulCase(8192, 50257, 768, rhs_layout="nk"), label=label)
    yield Problem(MatmulCase(8192, 768, 50257), label=f"{label}, dgrad")
    yield Problem(MatmulCase(50257, 768, 8192, lhs_layout="km"), label=f"{label}, wgrad")


def _batched() -> Iterator[Problem]:
    for batch, m, n, k in ((16, 1024, 1024, 1024), (64, 512, 512, 512), (128, 1024, 1024, 128), (128, 1024, 128, 1024)):
        yield Problem(MatmulCase(m, n, k, batch=(batch,)))
    yield Problem(MatmulCase(1024, 1024, 128, batch=(128,), rhs_layout="nk"), label="logits of attention")
    yield Problem(MatmulCase(1023, 511, 767, batch=(24,)))
    yield Problem(MatmulCase(2048, 4096, 4096, batch=(4,), shared_rhs=True), label="tokens by sequence")


def _epilogue() -> Iterator[Problem]:
    cases = {
        "GPT-3 2.7B up": MatmulCase(8192, 10240, 2560, bias=True, activation="gelu"),
        "up, width 4096, no gate": MatmulCase(8192, 14336, 4096, bias=True, activation="gelu"),
        "Llama 3 8B down": MatmulCase(8192, 4096, 14336, residual=True),
        "GPT-2 down": MatmulCase(8192, 768, 3072, bias=True, residual=True),
        "Llama 3 8B gate and up": MatmulCase(8192, 14336, 4096, activation="silu", gate=True),
    }
    for (label, case), direction in itertools.product(cases.items(), ("forward", "backward")):
        yield Problem(case, direction, label)


def _fp32() -> Iterator[Problem]:
    precisions = ("HIGHEST", "TF32_TF32_F32", "BF16_BF16_F32_X3", "BF16_BF16_F32_X9")
    for precision, size in itertools.product(precisions, (1024, 2048, 4096, 8192)):
        yield Problem(MatmulCase(size, size, size, dtype="float32", precision=precision))


def _gemm_smoke() -> Iterator[Problem]:
    yield Problem(MatmulCase(256, 256, 256, dtype="float32"))
    yield Problem(MatmulCase(512, 512, 512, dtype="float32"))
    yield Problem(MatmulCase(256, 384, 320, dtype="float32", rhs_layout="nk"))
    yield Problem(MatmulCase(255, 129, 193, dtype="bfloat16"))
    for direction in ("forward", "backward"):
        yield Problem(MatmulCase(256, 384, 128, dtype="float32", bias=True, activation="gelu"), direction)
    yield Problem(MatmulCase(256, 384, 128, dtype="float32", activation="silu", gate=True))
    yield Problem(MatmulCase(64, 96, 128, dtype="float32", batch=(4,)))


#: In the order in which they run.
SUITES: tuple[Suite, ...] = (
    Suite("gemm-smoke", "gemm", "our own: small enough for any machine", tuple(_gemm_smoke()), is_small=True),
    Suite("gemm-square", "gemm", "powers of two, and sizes between them", tuple(_square())),
    Suite("gemm-llm", "gemm", f"{LLAMA_3_PAPER}; gate and up as one matrix", tuple(_llm())),
    Suite("gemm-decode", "gemm", f"{LLAMA_3_PAPER}; a batch of single tokens", tuple(_decode())),
    Suite("gemm-odd", "gemm", "rows that are not a multiple of 16 bytes; GPT-2's vocabulary", tuple(_odd())),
    Suite("gemm-batched", "gemm", "our own: one product for each head or sequence", tuple(_batched())),
    Suite("gemm-epilogue", "gemm", f"GPT-2, GPT-3 (arXiv:2005.14165, table 2.1), {LLAMA_3_PAPER}",
          tuple(_epilogue())),
    Suite("gemm-fp32", "gemm", "the ways XLA multiplies float32 on tensor cores, and without", tuple(_fp32())),
)  # fmt: skip
