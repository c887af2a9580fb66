"""The suites of all operations and of training, and shapes from the command line."""

from __future__ import annotations

import re

import jax.numpy as jnp

from jaxkernels.core import registry
from jaxkernels.core.cases import Case
from jaxkernels.core.errors import InputError
from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Baseline, Problem, Suite
from jaxkernels.models.config import PRESETS

__all__ = ["all_suites", "baselines_of", "kinds", "parse_shape", "peak_flops_per_s", "registry_name", "select"]


def _cases() -> dict[str, tuple[str, type[Case]]]:
    """The name of an operation on the command line -> its name in the registry and its cases."""
    found = {name: registry.part(name, "cases") for name in registry.OPERATIONS}
    return {module.CASE.kind: (name, module.CASE) for name, module in found.items() if module is not None}


def kinds() -> tuple[str, ...]:
    """The names that `jaxkernels bench` takes: operations, and "train"."""
    return *_cases(), "train"


def registry_name(op: str) -> str | None:
    """The name in the registry of an operation, by its name on the command line; None for training."""
    return _cases()[op][0] if op in _cases() else None


def all_suites() -> dict[str, Suite]:
    """Name -> suite, in the order in which they run."""
    parts = [registry.part(name, "suites") for name, _ in _cases().values()]
    suites = [suite for part in parts if part is not None for suite in part.SUITES]
    suites += [Suite(f"train-{n}", "train", preset.source, is_small=n == "tiny") for n, preset in PRESETS.items()]
    return {suite.name: suite for suite in suites}


def baselines_of(op: str) -> dict[str, Baseline]:
    """Name -> baseline of an operation; none for training, whose baselines are in `jaxkernels.bench.training`."""
    name = registry_name(op)
    part = None if name is None else registry.part(name, "baselines")
    return {} if part is None else part.BASELINES


def select(op: str, names: list[str], *, has_gpu: bool) -> tuple[list[Suite], list[str]]:
    """The suites of a run, and the names of the suites that are left out for lack of a GPU.

    Named suites are taken in any case. Without names, a machine with a GPU takes all but the smallest suites, and a
    machine without a GPU takes the smallest only.

    Raises:
      InputError: a name is unknown or belongs to another operation.
    """
    known = {suite.name: suite for suite in all_suites().values() if suite.op == op}
    for name in names:
        if name not in known:
            raise InputError(f"bench: unknown suite {name!r}; {op} has {', '.join(known)}.")
    if names:
        return [known[name] for name in dict.fromkeys(names)], []
    if has_gpu:
        return [suite for suite in known.values() if not suite.is_small], []
    return [s for s in known.values() if s.is_small], [s.name for s in known.values() if not s.is_small]


def parse_shape(op: str, text: str) -> Problem:
    """A problem from the command line: "4096x4096x4096:nt", "4x4096x16x128:causal:backward".

    Raises:
      InputError: the text does not have the operation's form.
    """
    cases = _cases()
    if op not in cases:
        raise InputError(f"bench: {op} takes no --shapes; choose presets with --suite.")
    _, case_type = cases[op]
    sizes_text, *words = text.split(":")
    refusal = InputError(f"bench: a shape of {op} is {case_type.form}; got {text!r}.")
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", sizes_text):
        raise refusal
    dtypes = [word for word in words if word in ("bfloat16", "float16", "float32")]
    rest = [word for word in words if word not in dtypes and word != "backward"]
    sizes = [int(size) for size in sizes_text.split("x")]
    try:
        case = case_type.parse(sizes, dict(dtype=dtypes[-1]) if dtypes else {}, rest)
    except ValueError as e:
        raise InputError(f"bench: {e}; got {text!r}.") from e
    if case is None:
        raise refusal
    return Problem(case, "backward" if "backward" in words else "forward")


#: Float32 algorithm -> tensor core products for each multiplication. None: not known, because XLA computes fewer than
#: the name says (154 TFLOP/s at 8192^3 on an H200; nine products would allow 110).
_PASSES: dict[str, int | None] = {
    "TF32_TF32_F32": 1,
    "TF32_TF32_F32_X3": 3,
    "BF16_BF16_F32_X3": 3,
    "BF16_BF16_F32_X6": 6,
    "BF16_BF16_F32_X9": None,
}


def peak_flops_per_s(problem: Problem, chip: Chip) -> float | None:
    """The chip's peak rate for the problem's arithmetic; None if it is not known.

    For 16-bit dtypes it is the rate of bf16. For float32 it depends on the precision: for HIGHEST the rate of the
    float32 units; for a `jax.lax.DotAlgorithmPreset` the rate of the tensor cores, divided by the number of products;
    without a precision the rate of TF32.
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
