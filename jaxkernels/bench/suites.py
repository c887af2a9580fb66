"""What is timed: one table of suites, each with the source of its shapes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from jaxkernels.core.cases import Case, Direction
from jaxkernels.core.errors import InputError
from jaxkernels.core.hardware import Chip
from jaxkernels.models.config import PRESETS
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["OPS", "SUITES", "Op", "Problem", "Suite", "parse_shape", "peak_flops_per_s", "select"]

Op = str
OPS: tuple[Op, ...] = (MatmulCase.kind, AttentionCase.kind, "train")


@dataclasses.dataclass(frozen=True)
class Problem[C: Case]:
    """One line of a suite.

    Attributes:
      case: what is computed.
      direction: "forward", or "backward": the gradients alone, from what the forward pass saved. Of a product they are
        those of every operand, of an attention those of query, key and value.
      label: what the shape is, where it has a name.
    """

    case: C
    direction: Direction = "forward"
    label: str = ""

    @property
    def op(self) -> Op:
        return self.case.kind

    def key(self, suite: str) -> tuple[str, ...]:
        """What makes it the same in two runs, as `Row.problem`."""
        return suite, self.shape, self.case.dtype

    @property
    def shape(self) -> str:
        """The case in a few words, without its dtype: sizes, then what is not plain."""
        return self.case.description + (" backward" if self.direction == "backward" else "")

    @property
    def flops(self) -> float:
        """FLOPs the work needs: two for each multiply-add, whatever a kernel computes again."""
        return self.case.flops if self.direction == "forward" else self.case.gradient_flops

    @property
    def num_bytes(self) -> int:
        """Bytes that must cross the memory bus: each operand and each result once."""
        return self.case.num_bytes(self.direction)

    @property
    def num_exps(self) -> float:
        """Exponentials the work needs, in either direction."""
        return self.case.num_exps


@dataclasses.dataclass(frozen=True)
class Suite:
    """A named list of problems.

    Attributes:
      name, op: e.g. "gemm-square", "gemm".
      source: where the shapes come from.
      problems: the problems; none for training, whose problem is the preset itself.
      is_small: a CPU finishes it in seconds.
    """

    name: str
    op: Op
    source: str
    problems: tuple[Problem, ...] = ()
    is_small: bool = False


def _square() -> Iterator[Problem]:
    for size in (256, 512, 1000, 1024, 1536, 2048, 4096, 8192, 16384):
        yield Problem(MatmulCase(size, size, size))


#: width, hidden width of the feed-forward block, query heads, key/value heads, vocabulary; heads have 128 dimensions.
_LLAMA_3 = {"8B": (4096, 14336, 32, 8, 128256), "70B": (8192, 28672, 64, 8, 128256)}


def _llm() -> Iterator[Problem]:
    for model, (width, hidden, heads, kv_heads, vocabulary) in _LLAMA_3.items():
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
    width, hidden, heads, kv_heads, _ = _LLAMA_3["8B"]
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


def _both_ways(*cases: AttentionCase) -> Iterator[Problem]:
    for case, direction in itertools.product(cases, ("forward", "backward")):
        yield Problem(case, direction)


def _attention(
    tokens: int, length: int, head_dim: int, *, group_size: int = 1, width: int = 2048, **options: Any
) -> AttentionCase:
    heads = width // head_dim
    return AttentionCase(tokens // length, length, length, heads, heads // group_size, head_dim, **options)


def _attention_train() -> Iterator[Problem]:
    for head_dim, group_size, causal in itertools.product((64, 128, 256), (1, 8), (True, False)):
        for length in (512, 1024, 2048, 4096, 8192, 16384):
            yield from _both_ways(_attention(16384, length, head_dim, group_size=group_size, causal=causal))


def _attention_decode() -> Iterator[Problem]:
    for batch, length in ((1, 16384), (8, 8192), (64, 4096)):
        yield Problem(AttentionCase(batch, 1, length, 32, 8, 128), label="Llama 3 8B")
        yield Problem(AttentionCase(batch, 1, length, 64, 8, 128), label="Llama 3 70B")


def _gemm_smoke() -> Iterator[Problem]:
    yield Problem(MatmulCase(256, 256, 256, dtype="float32"))
    yield Problem(MatmulCase(512, 512, 512, dtype="float32"))
    yield Problem(MatmulCase(256, 384, 320, dtype="float32", rhs_layout="nk"))
    yield Problem(MatmulCase(255, 129, 193, dtype="bfloat16"))
    for direction in ("forward", "backward"):
        yield Problem(MatmulCase(256, 384, 128, dtype="float32", bias=True, activation="gelu"), direction)
    yield Problem(MatmulCase(256, 384, 128, dtype="float32", activation="silu", gate=True))
    yield Problem(MatmulCase(64, 96, 128, dtype="float32", batch=(4,)))


def _attention_smoke() -> Iterator[Problem]:
    case = functools.partial(AttentionCase, dtype="float32")
    yield from _both_ways(case(2, 256, 256, 4, 4, 64, causal=True), case(2, 256, 256, 8, 1, 32))
    yield Problem(case(1, 512, 512, 2, 2, 64, causal=True, window=(63, 0)))
    yield Problem(case(2, 256, 256, 4, 2, 32, causal=True, segments=True, documents=8))
    yield Problem(case(2, 128, 128, 4, 4, 32, bias="1NTS"))
    yield Problem(case(4, 1, 512, 8, 2, 64))


_LLAMA_3_PAPER = "Grattafiori et al. 2024, arXiv:2407.21783, table 3"
_FA2_PAPER = "16,384 tokens, width 2048, as Dao 2023, arXiv:2307.08691, section 4.1"

#: name -> suite, in the order they run.
SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite("gemm-smoke", "gemm", "our own: small enough for any machine", tuple(_gemm_smoke()), is_small=True),
        Suite("gemm-square", "gemm", "powers of two, and sizes between them", tuple(_square())),
        Suite("gemm-llm", "gemm", f"{_LLAMA_3_PAPER}; gate and up as one matrix", tuple(_llm())),
        Suite("gemm-decode", "gemm", f"{_LLAMA_3_PAPER}; a batch of single tokens", tuple(_decode())),
        Suite("gemm-odd", "gemm", "rows that are not a multiple of 16 bytes; GPT-2's vocabulary", tuple(_odd())),
        Suite("gemm-batched", "gemm", "our own: one product for each head or sequence", tuple(_batched())),
        Suite("gemm-epilogue", "gemm", f"GPT-2, GPT-3 (arXiv:2005.14165, table 2.1), {_LLAMA_3_PAPER}",
              tuple(_epilogue())),
        Suite("gemm-fp32", "gemm", "the ways XLA multiplies float32 on tensor cores, and without", tuple(_fp32())),
        Suite("attention-smoke", "attention", "our own: small enough for any machine", tuple(_attention_smoke()),
              is_small=True),
        Suite("attention-train", "attention", f"{_FA2_PAPER}; also with 8 query heads a key head",
              tuple(_attention_train())),
        Suite("attention-heads", "attention", "head dimension 96, as Phi-3 mini (arXiv:2404.14219, section 2)",
              tuple(_both_ways(*(_attention(16384, length, 96, width=3072, causal=causal)
                                 for causal in (True, False) for length in (1024, 4096))))),
        Suite("attention-window", "attention", "window of 1024, as Gemma 3 (arXiv:2503.19786, section 2)",
              tuple(_both_ways(*(_attention(16384, 16384, head_dim, causal=True, window=(1023, 0))
                                 for head_dim in (64, 128, 256))))),
        Suite("attention-segments", "attention",
              "8 documents packed into 8192 tokens: of lengths 1 : 2 : ... : 8, causal, and of one length, full",
              tuple(_both_ways(*(_attention(16384, 8192, head_dim, segments=True, documents=8, **kind)
                                 for kind in (dict(causal=True), dict(equal_documents=True))
                                 for head_dim in (64, 128))))),
        Suite("attention-bias", "attention", "a bias for each head and pair, as T5 (arXiv:1910.10683, section 2.1)",
              tuple(_both_ways(*(_attention(16384, length, 64, bias="1NTS") for length in (1024, 4096))))),
        Suite("attention-decode", "attention", f"{_LLAMA_3_PAPER}; one new token", tuple(_attention_decode())),
        *(Suite(f"train-{name}", "train", preset.source, is_small=name == "tiny") for name, preset in PRESETS.items()),
    )
}  # fmt: skip


def select(op: Op, names: list[str], *, has_gpu: bool) -> tuple[list[Suite], list[str]]:
    """The suites of a run, and the names of those left out because they were not asked for and need a GPU.

    Without names: all but the smallest where there is a GPU, else the smallest alone.

    Raises:
      InputError: a name is unknown or of another operation.
    """
    known = {suite.name: suite for suite in SUITES.values() if suite.op == op}
    for name in names:
        if name not in known:
            raise InputError(f"bench: unknown suite {name!r}; {op} has {', '.join(known)}.")
    if names:
        return [known[name] for name in dict.fromkeys(names)], []
    if has_gpu:
        return [suite for suite in known.values() if not suite.is_small], []
    return [s for s in known.values() if s.is_small], [s.name for s in known.values() if not s.is_small]


_CASES: dict[Op, type[Case]] = {case.kind: case for case in (MatmulCase, AttentionCase)}


def parse_shape(op: Op, text: str) -> Problem:
    """A problem from the command line: "4096x4096x4096:nt", "4x4096x16x128:causal:backward".

    Raises:
      InputError: the text is not of the operation's form.
    """
    if op not in _CASES:
        raise InputError(f"bench: {op} takes no --shapes; choose presets with --suite.")
    sizes_text, *words = text.split(":")
    refusal = InputError(f"bench: a shape of {op} is {_CASES[op].form}; got {text!r}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes_text):
        raise refusal
    dtypes = [word for word in words if word in ("bfloat16", "float16", "float32")]
    rest = [word for word in words if word not in dtypes and word != "backward"]
    sizes = [int(size) for size in sizes_text.split("x")]
    try:
        case = _CASES[op].parse(sizes, dict(dtype=dtypes[-1]) if dtypes else {}, rest)
    except ValueError as e:
        raise InputError(f"bench: {e}; got {text!r}.") from e
    if case is None:
        raise refusal
    return Problem(case, "backward" if "backward" in words else "forward")


#: Products on tensor cores that each multiplication of a float32 algorithm is made of. None: XLA makes fewer than the
#: name says (154 TFLOP/s at 8192^3 on an H200, where nine would allow 110), and how many is not known.
_PASSES: dict[str, int | None] = {
    "TF32_TF32_F32": 1,
    "TF32_TF32_F32_X3": 3,
    "BF16_BF16_F32_X3": 3,
    "BF16_BF16_F32_X6": 6,
    "BF16_BF16_F32_X9": None,
}


def peak_flops_per_s(problem: Problem, chip: Chip) -> float | None:
    """The chip's rate for the problem's arithmetic, None where it is not known.

    That is the rate of its dtype, or of the float32 precision it asks for: the ordinary units for HIGHEST, the tensor
    cores over the number of products for a `jax.lax.DotAlgorithmPreset`, and TF32 where it asks for none.
    """
    case = problem.case
    if jnp.dtype(case.dtype) != jnp.float32:
        return chip.bf16_flops_per_s
    precision = case.precision or "TF32_TF32_F32"
    if precision not in _PASSES:
        return chip.fp32_flops_per_s
    passes = _PASSES[precision]
    peak = chip.bf16_flops_per_s if precision.startswith("BF16") else chip.tf32_flops_per_s
    return None if peak is None or passes is None else peak / passes
