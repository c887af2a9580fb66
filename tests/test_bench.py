"""`jaxkernels bench` and `report`: suites, baselines, what may be timed, files, tables, pictures and messages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from matplotlib.image import imread
from rich.console import Console
from rich.status import Status
from rich.text import Text
from typer.testing import CliRunner, Result

import jaxkernels as jk
from jaxkernels import cli
from jaxkernels.bench import accuracy, lowering, plots, report, results, runner, suites, training
from jaxkernels.bench.lowering import Lowered, Workers
from jaxkernels.bench.results import Results, Row, Side
from jaxkernels.bench.step_profile import GROUPS, Breakdown, KernelTime
from jaxkernels.bench.telemetry import Reading, Telemetry
from jaxkernels.cli import bench as bench_cli
from jaxkernels.core import dispatch, hardware, measure
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Samples, Visit
from jaxkernels.core.problems import Baseline, Contender, Problem
from jaxkernels.models.config import PRESETS
from jaxkernels.ops.attention import baselines as attention_baselines
from jaxkernels.ops.attention import reference_backward
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.matmul import baselines as matmul_baselines
from jaxkernels.ops.matmul import reference as xla_matmul
from jaxkernels.ops.matmul import suites as matmul_suites
from jaxkernels.ops.matmul.cases import MatmulCase
from jaxkernels.ops.norm.cases import NormCase
from jaxkernels.tuning import ahead

SUITES = suites.all_suites()

DATA = pathlib.Path(__file__).parent / "data"
#: `jaxkernels bench gemm --regime burst --json ...` on a machine with two CPU cores.
SMOKE = DATA / "gemm-smoke.json"
H200 = hardware.lookup("NVIDIA H200")
SMALL = Problem(MatmulCase(32, 48, 40, dtype="float32"))


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    """Programs here run a few times: most of their time would go into optimising them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# Suites.


def test_every_suite_names_its_source_and_repeats_no_problem():
    for name, suite in SUITES.items():
        assert (suite.name, suite.op) == (name, name.split("-")[0])
        assert suite.source
        assert bool(suite.problems) == (suite.op != "train")
        keys = [(problem.shape, problem.case.dtype) for problem in suite.problems]
        assert len(set(keys)) == len(keys)
        assert all(problem.op == suite.op for problem in suite.problems)


def test_suites_hold_what_they_are_named_for():
    sizes = lambda name: {(p.case.m, p.case.n, p.case.k) for p in SUITES[name].problems}
    assert {(16384,) * 3, (1000,) * 3} <= sizes("gemm-square")
    assert {(8192, 6144, 4096), (16384, 57344, 8192), (2048, 128256, 8192), (8192, 128256, 16384)} <= sizes("gemm-llm")
    assert {p.shape.split()[-1] for p in SUITES["gemm-llm"].problems} == {"nn", "nt", "tn"}
    assert {m for m, _, _ in sizes("gemm-decode")} == {1, 2, 4, 8, 16, 32, 64}
    assert {k % 8 for _, _, k in sizes("gemm-odd")} == {n % 8 for _, n, _ in sizes("gemm-odd")} == set(range(8))
    train = [p.case for p in SUITES["attention-train"].problems]
    assert {(c.head_dim, c.heads // c.kv_heads, c.causal) for c in train} == {
        (h, g, causal) for h in (64, 128, 256) for g in (1, 8) for causal in (True, False)
    }
    assert all(c.batch * c.keys == 16384 and c.heads * c.head_dim == 2048 for c in train)


@pytest.mark.parametrize(
    ("problem", "flops", "num_bytes"),
    [
        (Problem(MatmulCase(3, 5, 7)), 2 * 105, 2 * (21 + 35 + 15)),
        (Problem(MatmulCase(3, 5, 7, bias=True), "backward"), 4 * 105, 2 * (2 * (21 + 35 + 5) + 15)),
        (Problem(MatmulCase(3, 5, 7, batch=(2,), gate=True)), 8 * 105, 2 * 2 * (21 + 35 + 35 + 15)),
        (Problem(AttentionCase(2, 8, 8, 4, 2, 16, causal=True)), 4 * 2 * 4 * 32 * 16, 2 * (1024 + 2 * 512 + 1024)),
        (
            Problem(AttentionCase(2, 8, 8, 4, 2, 16), "backward"),
            2.5 * 4 * 2 * 4 * 64 * 16,
            2 * (2 * (1024 + 2 * 512) + 2 * 1024) + 4 * 64,
        ),
        # Windows and documents: each query's own keys, counted by hand.
        (Problem(AttentionCase(1, 4, 4, 1, 1, 16, causal=True, window=(1, 0))), 4 * (1 + 2 + 2 + 2) * 16, 2 * 4 * 64),
        (Problem(AttentionCase(1, 6, 6, 1, 1, 16, segments=True, documents=2)), 4 * (4 + 16) * 16, 2 * 4 * 96),
        # Causal masks of other than squares, counted by hand.
        (Problem(AttentionCase(1, 2, 4, 1, 1, 16, causal=True)), 4 * (1 + 2) * 16, 2 * 2 * (32 + 64)),
        (
            Problem(AttentionCase(1, 2, 4, 1, 1, 16, causal=True, alignment="bottom_right")),
            4 * (3 + 4) * 16,
            2 * 2 * (32 + 64),
        ),
    ],
)
def test_work_is_counted(problem, flops, num_bytes):
    assert (problem.flops, problem.num_bytes) == (flops, num_bytes)


@pytest.mark.parametrize(("equal", "lengths"), [(False, [1, 2, 3, 4, 5, 6, 7, 8]), (True, [4, 5, 4, 5, 4, 5, 4, 5])])
def test_documents_have_the_lengths_that_are_counted(equal, lengths):
    case = AttentionCase(2, 36, 36, 1, 1, 16, segments=True, documents=8, equal_documents=equal)
    ids = case.operands()["query_segment_ids"]
    assert np.bincount(ids[1]).tolist() == lengths
    assert case.pairs == 2 * np.sum(np.square(lengths))


@pytest.mark.parametrize("documents", [0, 2])
def test_documents_of_one_sequence_are_timed_with_one_array_of_ids(documents):
    case = AttentionCase(1, 32, 32, 1, 1, 16, segments=True, documents=documents)
    operands, cotangent = lowering.shapes(Problem(case, "backward"))
    function = lowering.our_function(Problem(case), "xla")
    backward = lambda operands, cotangent: lowering.save(Problem(case, "backward"), function, operands)[1](cotangent)
    choices = jk.explain(backward, operands, cotangent).choices
    assert [choice.spec.self_segments for choice in choices] == [documents > 0] * 2


def test_peak_is_that_of_the_arithmetic():
    peak = lambda **options: suites.peak_flops_per_s(Problem(MatmulCase(8, 8, 8, **options)), H200)
    assert peak() == peak(dtype="float16") == 989.4e12
    assert peak(dtype="float32") == 494.7e12
    assert peak(dtype="float32", precision="HIGHEST") == 66.9e12
    assert peak(dtype="float32", precision="BF16_BF16_F32_X3") == 989.4e12 / 3
    assert peak(dtype="float32", precision="BF16_BF16_F32_X9") is None
    assert suites.peak_flops_per_s(SMALL, hardware.host()) is None


@pytest.mark.parametrize(
    ("op", "text", "problem"),
    [
        ("gemm", "8x16x24", Problem(MatmulCase(8, 16, 24))),
        ("gemm", "8x16x24:nt:float16", Problem(MatmulCase(8, 16, 24, rhs_layout="nk", dtype="float16"))),
        ("gemm", "2x8x16x24:tn:backward", Problem(MatmulCase(8, 16, 24, batch=(2,), lhs_layout="km"), "backward")),
        ("attention", "2x8x4x16:causal", Problem(AttentionCase(2, 8, 8, 4, 4, 16, causal=True))),
        ("attention", "2x8x9x4x2x16:float32", Problem(AttentionCase(2, 8, 9, 4, 2, 16, dtype="float32"))),
    ],
)
def test_shapes_are_read(op, text, problem):
    assert suites.parse_shape(op, text) == problem


_GEMM_FORM = "bench: a shape of gemm is MxNxK or BxMxNxK, then any of :nt :tn :tt :DTYPE :backward; got "


@pytest.mark.parametrize(
    ("op", "text", "message"),
    [
        ("gemm", "8x16", _GEMM_FORM + "'8x16'."),
        ("gemm", "8x16x0", _GEMM_FORM + "'8x16x0'."),
        ("gemm", "8x16x24:causal", _GEMM_FORM + "'8x16x24:causal'."),
        ("attention", "2x8x8x3x2x16", "bench: query heads must be a multiple of key/value heads; got '2x8x8x3x2x16'."),
        ("train", "2x8", "bench: train takes no --shapes; choose presets with --suite."),
    ],
)
def test_wrong_shapes(op, text, message):
    with raises_exactly(InputError, message):
        suites.parse_shape(op, text)


def test_without_names_the_machine_decides():
    names = lambda op, has_gpu: [suite.name for suite in suites.select(op, [], has_gpu=has_gpu)[0]]
    assert names("gemm", False) == ["gemm-smoke"]
    assert names("train", False) == ["train-tiny"]
    assert "gemm-smoke" not in names("gemm", True)
    assert {"gemm-square", "gemm-fp32"} <= set(names("gemm", True))
    assert [suite.name for suite in suites.select("gemm", ["gemm-odd"], has_gpu=False)[0]] == ["gemm-odd"]


_SAMPLE = [
    pytest.param(problem, id=f"{suite.name}-{problem.shape}".replace(" ", "-"))
    for suite in SUITES.values()
    for problem in dict.fromkeys((*suite.problems[:1], *suite.problems[-1:]))
]


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize("name", [name for name in dispatch.backend_names() if name != "xla"])
@pytest.mark.parametrize("problem", _SAMPLE)
def test_suites_lower_for_cuda(name, problem):
    """Each backend takes a problem, or says itself why not."""
    operands, cotangent = lowering.shapes(problem)
    function = lowering.our_function(problem, name)

    def program(operands: dict[str, Any], cotangent: Any) -> Any:
        backward = lambda: lowering.save(problem, function, operands)[1](cotangent)
        return function(operands) if problem.direction == "forward" else backward()

    with dispatch.recording() as choices, contextlib.suppress(NotImplementedError):
        jax.jit(program).trace(operands, cotangent).lower(lowering_platforms=("cuda",))
        assert choices
    assert {choice.backend for choice in choices} <= {name}


# Timing and checking.


class FakeClock:
    """A clock: every launch runs, and takes `seconds` of its result."""

    rests = (0.0, 0.0)

    def __init__(self, seconds: Callable[[Any], float] = lambda result: 1e-3):
        self._seconds = seconds

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        times = []
        for visit in visits:
            times.append([self._seconds(jax.block_until_ready(launch())) for launch in visit.launches()])
            visit.probe()
        return times

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return self._seconds(launch())


class NoTelemetry:
    """A chip at rest, or with the clock rates given."""

    reason = None

    def __init__(self, *clocks: float):
        self._clocks = list(clocks)

    def sm_clock(self) -> float | None:
        return self._clocks.pop(0) if self._clocks else None

    def joules(self) -> None:
        return None

    def take(self) -> Reading | None:
        return None


def settings(**options: Any) -> runner.Settings:
    defaults = dict(telemetry=NoTelemetry(), regimes=("burst",), clock=FakeClock())
    return runner.Settings(device=jax.devices("cpu")[0], **(defaults | options))


def rows(problem: Problem = SMALL, **options: Any) -> list[Row]:
    return list(runner.run([("suite", problem)], settings(**options)))


@pytest.mark.parametrize(("direction", "num_programs"), [("forward", 1), ("backward", 2)])
def test_what_xla_may_autotune_is_compiled_in_a_turn(direction, num_programs, monkeypatch):
    """The baseline has a product of XLA; so may the comparison's program of the backend xla."""
    begun, programs, with_turn = [], [], set()

    @contextlib.contextmanager
    def turn(kind: str) -> Iterator[None]:
        begun.append(kind)
        yield

    def compile_kernels(program, chip, turn):
        programs.append(str(program))
        contexts = {backend: turn(backend) for backend in ("cuda", "triton", "xla")}
        with_turn.update(name for name, x in contexts.items() if not isinstance(x, contextlib.nullcontext))
        with turn("xla"):
            pass

    monkeypatch.setattr(ahead, "compile_kernels", compile_kernels)
    (row,) = rows(Problem(MatmulCase(32, 48, 40), direction), backends=(), auto=True, turn=turn)
    assert ("auto", True) in {(side.name, side.is_ours) for side in row.sides}
    assert len(programs) == num_programs
    of_matmul = [name for program in programs for name in re.findall("jk_[a-z_]+", program)]
    assert len(of_matmul) == (3 if direction == "backward" else 1)
    # The baseline takes one turn, the comparison one for each program, auto one (here it takes XLA), and the check one.
    assert begun == ["autotuning"] * (3 + num_programs) + ["timing"]
    assert with_turn == {"xla"}


def test_programs_without_products_are_compiled_at_any_time():
    problem, kinds = Problem(NormCase((64,), 128)), []

    @contextlib.contextmanager
    def turn(kind: str) -> Iterator[None]:
        kinds.append(kind)
        yield

    (row,) = rows(problem, turn=turn)
    assert row.sides
    assert kinds == ["autotuning", "timing"]  # The first one is that of the check.


@pytest.mark.parametrize("auto", [False, True])
def test_reference_of_a_drawn_forward_pass_has_no_gradients(auto, monkeypatch):
    """The rows of a suite share one reference for both directions. Drawn problems have none in common."""
    references, judge = [], runner._Judge._judge

    def judging(self, part):
        results, measured = judge(self, part)
        references.append(set(measured))
        return results, measured

    monkeypatch.setattr(runner._Judge, "_judge", judging)
    (row,) = rows(Problem(AttentionCase(1, 16, 16, 2, 2, 32)), auto=auto, backends=("xla",))
    assert row.sides
    assert row.checked == "all"
    (names,) = references
    assert names == ({"out"} if auto else {"out", "d_query", "d_key", "d_value"})


def test_a_row_has_every_side_and_every_reason():
    (row,) = rows()
    assert [(side.name, side.is_ours) for side in row.sides] == [("xla", True), ("xla", False)]
    assert (row.suite, row.op, row.shape, row.regime, row.checked) == ("suite", "gemm", "32x48x40 nn", "burst", "all")
    assert row.ratio(row.ours[0]) == 1
    assert row.refused["cublaslt"] == "runs on cuda devices, this is cpu"
    assert row.refused["jax-pallas"] == "needs a GPU of compute capability 9.0 (Hopper), this is cpu"
    assert "jaxkernels pallas" in row.refused
    assert row.ours[0].kernels == (f"matmul: xla {xla_matmul.Config()}, default",)
    assert 0 < row.ours[0].error_ratio <= 2
    assert row.is_warm
    assert row.flags == ("warm",)


@pytest.mark.parametrize(
    ("problem", "is_same"),
    [
        (SMALL, True),
        (Problem(MatmulCase(32, 48, 40, bias=True, residual=True)), True),
        (Problem(MatmulCase(32, 48, 40, activation="gelu")), True),
        (Problem(MatmulCase(16, 24, 20, batch=(3,), rhs_layout="nk"), "backward"), True),
        # JAX transposes the gradient of rhs, and has the two products of a gate in another order.
        (Problem(MatmulCase(32, 48, 40), "backward"), False),
        (Problem(MatmulCase(32, 48, 40, activation="silu", gate=True)), False),
    ],
    ids=lambda value: getattr(value, "shape", ""),
)
def test_auto_is_the_program_of_the_baseline_if_xla_gets_the_same(problem, is_same, monkeypatch):
    seen, drop = [], runner._Plan._drop_repeats
    monkeypatch.setattr(runner._Plan, "_drop_repeats", lambda plan: (seen.append(plan._contestants), drop(plan)))
    (row,) = rows(problem, backends=(), auto=True)
    contestants = seen[-1]
    auto, xla = contestants["jaxkernels auto"], contestants["xla"]
    assert (auto.program is xla.program) == is_same
    assert (auto.forward is xla.forward) == (is_same or problem.direction == "forward")
    sides = {(side.name, side.is_ours): side for side in row.sides}
    assert sides.keys() == {("auto", True), ("xla", False)}
    assert (sides["auto", True].samples is sides["xla", False].samples) == is_same
    assert all(side.error_ratio <= 2 for side in row.sides)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "problem",
    [
        Problem(MatmulCase(32, 48, 40, bias=True, activation="gelu", residual=True), "backward"),
        Problem(MatmulCase(32, 48, 40, activation="silu", gate=True), "backward"),
        Problem(MatmulCase(16, 24, 20, batch=(3,), rhs_layout="nk")),
        Problem(AttentionCase(2, 24, 24, 4, 2, 16, dtype="float32", causal=True), "backward"),
        Problem(AttentionCase(2, 24, 24, 4, 2, 16, causal=True, window=(5, 0))),
        Problem(AttentionCase(2, 24, 24, 4, 2, 16, causal=True, segments=True, documents=3), "backward"),
        Problem(AttentionCase(2, 24, 24, 4, 2, 16, dtype="float32", bias="1NTS"), "backward"),
        Problem(AttentionCase(2, 24, 24, 4, 2, 24, value_dim=16, causal=True), "backward"),
        Problem(AttentionCase(2, 5, 24, 4, 2, 16, causal=True, alignment="bottom_right")),
        Problem(AttentionCase(2, 5, 24, 4, 2, 16, window=(7, 3), alignment="bottom_right"), "backward"),
        Problem(AttentionCase(2, 24, 40, 4, 2, 16, key_lengths=True, shortest=0.5)),
        Problem(AttentionCase(2, 24, 40, 4, 2, 16, dtype="float32", causal=True, mask="B1TS"), "backward"),
    ],
    ids=lambda problem: problem.shape,
)
def test_baselines_compute_the_problem(problem):
    (row,) = rows(problem)
    assert [(side.name, side.is_ours) for side in row.sides] == [("xla", True), ("xla", False)]


@pytest.fixture
def wrong_backend(registry, monkeypatch) -> str:
    """A backend whose products are too large by a thousandth, and to the eye right."""
    module = types.ModuleType("backend_wrong")
    vars(module).update({name: value for name, value in vars(xla_matmul).items() if not name.startswith("__")})
    module.run = lambda spec, config, *xs: xla_matmul.run(spec, config, *xs) * 1.001
    monkeypatch.setitem(sys.modules, "backend_wrong", module)
    registry["matmul", "wrong"] = dispatch.Entry(("backend_wrong",))
    return "wrong"


def test_a_wrong_kernel_gets_no_number(wrong_backend):
    (row,) = rows(backends=("wrong", "xla"))
    assert [side.name for side in row.ours] == ["xla"]
    reason = row.refused["jaxkernels wrong"]
    assert reason.startswith("wrong: ")
    assert reason.endswith(" times as far from the reference as plain JAX")
    assert float(reason.split()[1]) > 100


@pytest.mark.parametrize(("error", "is_right"), [(1e-8, True), (1e-3, False)])
def test_zeros_may_have_rounding_errors(error, is_right, registry, monkeypatch):
    """With one key, the gradients of queries and keys are sums that cancel; plain JAX finds exact zeros."""

    def run(spec: Any, config: Any, *xs: jax.Array) -> list[jax.Array]:
        dq, *others = reference_backward.run(spec, config, *xs)
        return [dq + error, *others]

    module = types.ModuleType("backend_noisy")
    vars(module).update({name: value for name, value in vars(reference_backward).items() if not name.startswith("__")})
    module.run = run
    monkeypatch.setitem(sys.modules, "backend_noisy", module)
    registry["attention_forward", "noisy"] = registry["attention_forward", "xla"]
    registry["attention_backward", "noisy"] = dispatch.Entry(("backend_noisy",))
    problem = Problem(AttentionCase(1, 8, 1, 2, 1, 16, dtype="float32"), "backward")
    (row,) = rows(problem, backends=("noisy", "xla"))
    assert [side.name for side in row.ours] == (["noisy", "xla"] if is_right else ["xla"])


def test_nan_is_wrong(monkeypatch):
    poisoned = Contender("poisoned", lambda x: jnp.where(jnp.arange(48) == 7, jnp.nan, x["lhs"] @ x["rhs"]))
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, lambda problem: iter([poisoned])))
    (row,) = rows()
    assert row.refused["poisoned"] == "wrong: nan times as far from the reference as plain JAX"
    assert row.fastest_baseline is None
    assert row.ratio(row.ours[0]) is None


def test_a_result_of_another_shape_or_dtype_is_no_result(monkeypatch):
    for function in (lambda x: (x["lhs"] @ x["rhs"])[:-1], lambda x: (x["lhs"] @ x["rhs"]).astype(jnp.bfloat16)):
        odd = Contender("odd", function)
        monkeypatch.setitem(
            matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, lambda problem, c=odd: iter([c]))
        )
        assert rows()[0].refused["odd"].startswith("TypeError: ")


def test_a_baseline_that_fails_is_recorded(monkeypatch):
    def contenders(problem: Problem) -> Iterator[Contender]:
        yield Contender("untraceable", lambda x: x["nothing"])
        raise ImportError("no such library")

    monkeypatch.setitem(matmul_baselines.BASELINES, "cublaslt", Baseline(lambda *_: None, contenders))
    (row,) = rows()
    assert row.refused["untraceable"] == "KeyError: 'nothing'"
    assert row.refused["cublaslt"] == "ImportError: no such library"
    assert row.ours


def test_compiler_options_are_tried_until_the_program_is_what_is_wanted(monkeypatch):
    options = (dict(xla_cpu_enable_fast_math=False), dict(xla_cpu_enable_fast_math=True))
    contender = Contender("forced", lambda x: x["lhs"] @ x["rhs"], compiler_options=options, wanted="no such call")
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, lambda problem: iter([contender])))
    assert rows()[0].refused["forced"] == "RuntimeError: XLA compiles it without a call of 'no such call'"
    contender = dataclasses.replace(contender, wanted="dot")
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, lambda problem: iter([contender])))
    assert rows()[0].fastest_baseline.name == "forced"


def test_options_that_force_cublaslt_are_known_to_this_jaxlib():
    for options in matmul_baselines._CUBLASLT:
        jax.jit(lambda x: x @ x, compiler_options=options)(jnp.ones((4, 4)))


def test_a_slow_baseline_is_looked_at_once(monkeypatch):
    def contenders(problem: Problem) -> Iterator[Contender]:
        product = lambda x: x["lhs"] @ x["rhs"]
        yield Contender("fast", product)
        widen = lambda results: {name: x.astype(jnp.float32) for name, x in results.items()}
        yield Contender("slow", lambda x: product(x).astype(jnp.float16), finish=widen)

    monkeypatch.setattr(accuracy, "ALLOWED", 1e6)  # Rounded to 16 bits, the slow one is not right.
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, contenders))
    (row,) = rows(clock=FakeClock(lambda x: 1e-2 if x.dtype == jnp.float16 else 1e-3))  # Ten times as slow.
    slow = next(side for side in row.sides if side.name == "slow")
    assert (slow.samples, slow.seconds) == (None, 1e-2)
    assert row.fastest_baseline.name == "fast"


def test_short_kernels_have_no_sustained_row():
    assert [row.regime for row in rows(regimes=("burst", "sustained"))] == ["burst", "sustained"]
    assert [row.regime for row in rows(regimes=("burst", "sustained"), clock=FakeClock(lambda x: 2e-5))] == ["burst"]


def test_clocks_that_drift_between_sides_are_flagged():
    """The first looks at two sides, then three rounds of both."""
    steady = [1980.0, 1980.0] + [1980.0, 1950.0] * 3
    (row,) = rows(telemetry=NoTelemetry(*steady))
    assert row.flags == ("warm",)
    (row,) = rows(telemetry=NoTelemetry(*steady[:2], *[1980.0, 1900.0] * 3))
    assert row.flags == ("warm", "clocks xla 1980, xla (baseline) 1900 MHz")


def test_large_attentions_are_checked_in_part(monkeypatch):
    monkeypatch.setattr("jaxkernels.ops.attention.cases._MAX_LOGITS", 2 * 24 * 24 * 2)
    problem = Problem(AttentionCase(3, 24, 24, 6, 3, 16, causal=True, bias="1NTS"))
    (row,) = rows(problem)
    assert row.checked == "the last 1 of 3 batch rows, the last 4 of 6 heads"
    assert row.ours

    def spoilt(problem: Problem) -> Iterator[Contender]:
        """Wrong in the last head of the last row only, which is in the part."""
        right = next(attention_baselines._attention_xla(problem))
        spoil = lambda results: {name: x.at[-1, :, -1].mul(1.1) for name, x in results.items()}
        yield dataclasses.replace(right, finish=spoil)

    monkeypatch.setitem(attention_baselines.BASELINES, "xla", Baseline(lambda *_: None, spoilt))
    assert rows(problem)[0].refused["xla"].startswith("wrong: ")


def test_large_products_are_checked_in_part(monkeypatch):
    problem = Problem(MatmulCase(130, 48, 40, batch=(2,), lhs_layout="km", dtype="float32"))
    monkeypatch.setattr("jaxkernels.ops.matmul.cases._MAX_FLOPS", problem.flops / 4)
    (row,) = rows(problem)
    assert row.checked == "one of 5 rows"
    assert row.ours
    monkeypatch.setattr("jaxkernels.ops.matmul.cases._MAX_FLOPS", 1)
    assert rows(problem)[0].checked == "one of 61 rows"
    assert rows(dataclasses.replace(problem, direction="backward"))[0].checked == "all"

    def spoilt(problem: Problem) -> Iterator[Contender]:
        """Wrong in the last row of the last product only, which is in the part."""
        right = next(matmul_baselines._gemm_xla(problem))
        yield dataclasses.replace(right, finish=lambda results: {"out": results["out"].at[-1, -1].mul(1.1)})

    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, spoilt))
    assert rows(problem)[0].refused["xla"].startswith("wrong: ")


def test_the_sustained_regime_takes_what_bursts_find_fastest(monkeypatch):
    seconds = {(32, 48): 1.0e-3, (1, 32, 48): 1.01e-3, (1, 1, 32, 48): 1.04e-3}

    def contenders(problem: Problem) -> Iterator[Contender]:
        for ndim, name in enumerate(("first", "near", "far")):
            widen = lambda x, ndim=ndim: (x["lhs"] @ x["rhs"])[(None,) * ndim]
            yield Contender(name, widen, finish=lambda results: {"out": results["out"].reshape(32, 48)})

    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, contenders))
    burst, sustained = rows(regimes=("burst", "sustained"), clock=FakeClock(lambda x: seconds[x.shape]))
    timed = lambda row: [side.name for side in row.sides if side.samples is not None]
    assert timed(burst) == ["xla", "first", "near", "far"]
    assert timed(sustained) == ["xla", "first", "near"]
    far = next(side for side in sustained.sides if side.name == "far")
    assert (far.samples, far.seconds) == (None, 1.04e-3)


def test_reference_by_heads_is_the_reference():
    case = AttentionCase(2, 24, 40, 6, 2, 16, causal=True, bias="1NTS", mask="B1TS", dtype="float32")
    operands = case.operands()
    np.testing.assert_allclose(case.reference(operands), case.plain(operands), atol=2e-6)


# Programs that other processes lower.


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(1, hardware.host()) as pool:
        yield pool


@pytest.mark.parametrize(
    "problem",
    [SMALL, Problem(AttentionCase(2, 24, 24, 4, 2, 16, dtype="float32", causal=True), "backward")],
    ids=lambda problem: problem.shape,
)
def test_what_a_worker_lowers_is_the_program(workers, problem):
    there = workers.start(problem, "xla")()
    here = lowering.lower(problem, Contender("xla", lowering.our_function(problem, "xla")))
    assert there.kernels == here.kernels
    assert there.seconds > 0
    operands = {name: jnp.asarray(x) for name, x in problem.case.operands().items()}

    def result(lowered: Lowered) -> Any:
        if lowered.forward is None:
            return lowered.program.compile()(operands)
        out, saved = lowered.forward.compile()(operands)
        return lowered.program.compile()(saved, out)

    for a, b in zip(jax.tree.leaves(result(there)), jax.tree.leaves(result(here)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_what_a_worker_refuses_is_refused_as_here(workers):
    problem = Problem(MatmulCase(32, 48, 40))
    with pytest.raises(NotImplementedError) as here:
        lowering.lower(problem, Contender("pallas", lowering.our_function(problem, "pallas")))
    with raises_exactly(NotImplementedError, str(here.value)):
        workers.start(problem, "pallas")()
    with pytest.raises(RuntimeError, match=r"^ValueError: matmul: unknown backend='none'"):
        workers.start(SMALL, "none")()


@pytest.mark.parametrize(("name", "target"), [("pallas", "mosaic_gpu"), ("cuda", jk.ffi.TARGET)])
def test_a_worker_lowers_for_the_chip_it_does_not_have(name, target):
    with Workers(1, H200) as pool:
        problem = Problem(MatmulCase(256, 512, 384))
        exported = pool.start(problem, name)()
    (kernel,) = exported.kernels
    assert kernel.startswith(f"matmul: {name} {'gemm.' * (name == 'cuda')}Config(")
    assert target in exported.program.as_text()


def test_a_worker_lowers_cudnns_custom_calls():
    with Workers(1, H200) as pool:
        exported = pool.start(Problem(AttentionCase(1, 64, 64, 2, 2, 64), "backward"), "cudnn")()
    assert [kernel.partition(" C")[0] for kernel in exported.kernels] == [
        "attention_forward: cudnn",
        "attention_backward: cudnn",
    ]
    assert "__cudnn$fmhaSoftmaxBackward" in exported.program.as_text()


def test_chips_that_workers_cannot_know():
    assert Workers.can_serve(H200)
    assert Workers.can_serve(hardware.host())
    assert not Workers.can_serve(dataclasses.replace(H200, num_sms=100))
    assert not Workers.can_serve(dataclasses.replace(H200, name="NVIDIA X1"))
    assert not Workers.can_serve(hardware.host("tpu"))


def test_workers_that_die_are_done_without():
    with Workers(1, hardware.host()) as pool:
        pool._pool.submit(os._exit, 1)
        assert pool.start(SMALL, "xla")().kernels == (f"matmul: xla {xla_matmul.Config()}, default",)


def test_rows_are_the_same_with_workers():
    (row,) = rows(processes=1, backends=("xla",))
    assert [(side.name, side.is_ours) for side in row.sides] == [("xla", True), ("xla", False)]
    assert set(row.programs["jaxkernels xla"]) == {"lower", "wait", "compile"}


def test_a_row_says_what_it_took():
    burst, sustained = rows(regimes=("burst", "sustained"))
    assert set(burst.seconds) == {"compile", "choose", "check", "look", "time"}
    assert set(sustained.seconds) == {"time"}
    assert burst.programs == sustained.programs
    assert set(burst.programs) == {"reference", "jaxkernels xla", "xla"}


# Baselines on the chip they are for.


@pytest.mark.parametrize(
    ("name", "problem", "reason"),
    [
        ("jax-pallas", Problem(MatmulCase(4096, 4096, 4096)), None),
        ("jax-pallas", Problem(MatmulCase(64, 4096, 4096, dtype="float16")), None),
        ("jax-pallas", Problem(MatmulCase(64, 64, 64, rhs_layout="nk")), "multiplies two row-major matrices only"),
        ("jax-pallas", Problem(MatmulCase(64, 64, 64, bias=True)), "has no epilogue"),
        (
            "jax-pallas",
            Problem(MatmulCase(4095, 4096, 4096)),
            "needs m in steps of 64, n of 128 and k of 64, not 4095, 4096, 4096",
        ),
        (
            "jax-pallas",
            Problem(MatmulCase(64, 64, 64, dtype="float32")),
            "multiplies 16-bit operands to the same dtype, not float32 to float32",
        ),
        ("cudnn", Problem(AttentionCase(2, 64, 64, 4, 2, 64, causal=True, window=(9, 0))), None),
        ("cudnn", Problem(AttentionCase(2, 64, 64, 4, 2, 64, dtype="float32")), "computes in 16 bits, not in float32"),
        ("cudnn", Problem(AttentionCase(2, 64, 64, 4, 2, 192, value_dim=128)), None),
        (
            "cudnn",
            Problem(AttentionCase(2, 64, 64, 4, 2, 68)),
            "needs a head dimension of at most 256, in steps of 8, not 68",
        ),
        (
            "cudnn",
            Problem(AttentionCase(2, 63, 64, 4, 2, 64, window=(9, 9)), "backward"),
            "needs even lengths for gradients with a bias or a mask, not 63 and 64",
        ),
        ("cudnn", Problem(AttentionCase(2, 63, 63, 4, 2, 64, window=(9, 0), causal=True), "backward"), None),
        (
            "xla",
            Problem(AttentionCase(2, 64, 64, 4, 2, 64, value_dim=128)),
            "takes values as wide as keys, or padded to be, not 64 and 128",
        ),
        (
            "pallas-triton",
            Problem(AttentionCase(2, 128, 128, 4, 4, 192, value_dim=128)),
            "takes values as wide as keys, not 192 and 128",
        ),
        (
            "jax-pallas",
            Problem(AttentionCase(1, 128, 256, 4, 2, 64, causal=True, alignment="bottom_right")),
            "counts its causal mask from the first key",
        ),
        ("xla", Problem(AttentionCase(8, 1, 4096, 32, 8, 128)), None),
        (
            "xla",
            Problem(AttentionCase(1, 16384, 16384, 16, 16, 128, dtype="float32")),
            "its logits would take 17 GB",
        ),
        ("jax-pallas", Problem(AttentionCase(1, 128, 128, 4, 2, 64, causal=True)), None),
        (
            "jax-pallas",
            Problem(AttentionCase(1, 128, 128, 4, 2, 64, causal=True), "backward"),
            "has no causal gradient",
        ),
        ("jax-pallas", Problem(AttentionCase(1, 128, 128, 4, 2, 256)), "its tilings fit heads of 64 and 128, not 256"),
        (
            "jax-pallas",
            Problem(AttentionCase(1, 128, 128, 4, 2, 64, bias="1NTS")),
            "has no mask but the causal one, and no bias",
        ),
        ("pallas-triton", Problem(AttentionCase(1, 128, 128, 4, 4, 64, causal=True), "backward"), None),
        (
            "pallas-triton",
            Problem(AttentionCase(1, 128, 128, 4, 2, 64)),
            "takes as many key heads as query heads, not 2 and 4",
        ),
        (
            "pallas-triton",
            Problem(AttentionCase(1, 100, 100, 4, 4, 64)),
            "needs equal lengths in steps of 128, not 100 and 100",
        ),
        (
            "pallas-triton",
            Problem(AttentionCase(1, 128, 128, 4, 4, 64, key_lengths=True)),
            "has no mask but the causal one, and no bias",
        ),
    ],
)
def test_baselines_state_their_limits(name, problem, reason):
    assert suites.baselines_of(problem.op)[name].refuses(problem, H200) == reason
    if reason is None:
        assert list(suites.baselines_of(problem.op)[name].contenders(problem))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (AttentionCase(1, 4096, 4096, 16, 16, 128), "cuDNN takes this, and is several times as fast"),
        (AttentionCase(1, 8, 4096, 16, 16, 128), None),
        (AttentionCase(1, 4096, 8, 16, 16, 128), None),
        (AttentionCase(1, 4096, 4096, 16, 16, 128, dtype="float32"), None),
    ],
)
def test_xla_attention_yields_to_cudnn(case, reason):
    assert attention_baselines.BASELINES["xla"].yields(Problem(case), H200) == reason


@pytest.mark.parametrize("fails", [False, True])
def test_a_baseline_that_yields_is_timed_if_no_other_compiles(fails, monkeypatch):
    xla = dataclasses.replace(matmul_baselines.BASELINES["xla"], yields=lambda *_: "cublaslt takes this")
    other = Contender("cublaslt", lambda x: x["nothing"] if fails else x["lhs"] @ x["rhs"])
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", xla)
    monkeypatch.setitem(
        matmul_baselines.BASELINES, "cublaslt", Baseline(lambda *_: None, lambda problem: iter([other]))
    )
    (row,) = rows()
    assert row.fastest_baseline.name == ("xla" if fails else "cublaslt")
    assert row.refused.get("xla") == (None if fails else "cublaslt takes this")


@pytest.mark.parametrize("m", [64, 128, 4096])
def test_jax_matmul_has_tilings_that_divide(m):
    labels = [label for label, _ in matmul_baselines._pallas_matmul_configs(MatmulCase(m, 4096, 4096))]
    assert labels[0] == {64: "64x256", 128: "128x256", 4096: "128x256 cluster"}[m]


# Telemetry.


class Nvml:
    """The functions of pynvml that are used, for one GPU."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0

    class NVMLError(Exception):
        pass

    def __init__(self, clocks: list[int]):
        self._clocks, self.looks = clocks, 0
        self.handle: object = None

    def nvmlInit(self) -> None:  # noqa: N802
        pass

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.handle = "closed"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        self.handle = f"index {index}"
        return self.handle

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        self.handle = uuid
        return uuid

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        assert (handle, kind) == (self.handle, self.NVML_CLOCK_SM)
        self.looks += 1
        if self.looks == 3:
            raise self.NVMLError("busy")
        return self._clocks[self.looks % len(self._clocks)]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:  # noqa: N802
        return 512_500

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:  # noqa: N802
        assert kind == self.NVML_TEMPERATURE_GPU
        return 41

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.159"


def test_the_chip_is_sampled_while_it_is_measured():
    nvml = Nvml([1980, 1800, 1500])
    with Telemetry(0, nvml) as telemetry:
        while nvml.looks < 8:
            pass
        reading = telemetry.take()
        assert telemetry.driver() == "580.159"
        assert telemetry.limits() == dict(power_limit_w=700.0, max_sm_clock_mhz=1980.0)
    assert nvml.handle == "closed"
    assert (reading.sm_clock_min_mhz, reading.sm_clock_max_mhz) == (1500, 1980)
    assert (reading.power_w, reading.power_max_w, reading.temperature_c) == (512.5, 512.5, 41)


@pytest.mark.parametrize(
    ("visible", "handle"), [("", "index 1"), ("5,7", "index 7"), ("GPU-a, GPU-b", "GPU-b"), ("3", "index 1")]
)
def test_the_sampled_gpu_is_the_one_that_is_used(monkeypatch, visible, handle):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    nvml = Nvml([1980])
    Telemetry(1, nvml)
    assert nvml.handle == handle


def test_without_nvml_nothing_is_sampled(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Telemetry(0) as telemetry:
        assert telemetry.reason == 'nvidia-ml-py is not installed: pip install "jaxkernels[bench]"'
        assert (telemetry.sm_clock(), telemetry.take(), telemetry.driver(), telemetry.limits()) == (
            None,
            None,
            None,
            {},
        )


def test_stand_in_has_the_names_of_pynvml():
    pynvml = pytest.importorskip("pynvml")
    names = [name for name in vars(Nvml) if not name.startswith("_")]
    assert [name for name in names if not hasattr(pynvml, name)] == []


# Results.


def samples(*milliseconds: float) -> Samples:
    return Samples.of([[ms / 1e3] for ms in milliseconds])


def row(**changes: Any) -> Row:
    """8192^3 in 2 ms against 2.1 ms of cuBLASLt and 2.2 of XLA, on an H200."""
    side = lambda name, is_ours, seconds: Side(name, is_ours, seconds, Samples.of([[seconds]]), 0.9)
    values = dict(
        suite="gemm-square", label="", op="gemm", shape="8192x8192x8192 nn", dtype="bfloat16", regime="burst",
        flops=1.09951e12, num_bytes=3 * 2 * 8192**2, peak_flops_per_s=989.4e12, memory_bytes_per_s=4.8e12,
        is_warm=False, sides=(side("pallas", True, 2e-3), side("xla", False, 2.2e-3), side("cublaslt", False, 2.1e-3)),
        refused={"jax-pallas": "has no epilogue"}, checked="all",
        device=Reading(1755.0, 1700.0, 1980.0, 690.0, 700.0, 45.0),
    )  # fmt: skip
    return Row(**(values | changes))


def test_a_line_has_the_form_of_the_documentation():
    r = row()
    assert results.line(r, r.ours[0]) == (
        "gemm 8192x8192x8192 nn bfloat16 pallas | 2,000.0 us | 549.8 TFLOP/s | 55.6% of peak | 1.050 x cublaslt "
        "| error 0.90 | burst"
    )


def test_limits_are_those_of_the_chip():
    r = row()
    assert r.limits == pytest.approx((1.09951e12 / 989.4e12, 6 * 8192**2 / 4.8e12))
    assert r.share_of_limit(r.ours[0]) == r.share_of_peak(r.ours[0]) == pytest.approx(0.5557, abs=1e-4)
    moved = row(num_bytes=6_000_000_000)
    assert moved.share_of_limit(moved.ours[0]) == pytest.approx(0.625)
    assert row(peak_flops_per_s=None).share_of_limit(r.ours[0]) is None


def test_json_round_trip(tmp_path):
    lost = tuple(dataclasses.replace(side, in_program=side.seconds / 2) for side in row().sides)
    whole = Results(dict(device="H200"), (row(), row(regime="sustained", device=None, tokens=7), row(sides=lost)))
    results.save(whole, tmp_path / "new" / "a.json")
    assert results.load(tmp_path / "new" / "a.json") == whole


def test_a_real_file_is_read_and_written_as_it_was(tmp_path):
    results.save(results.load(SMOKE), tmp_path / "copy.json")
    assert (tmp_path / "copy.json").read_text() == SMOKE.read_text()


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}")
    with raises_exactly(InputError, f"bench: {path} is not a benchmark of schema 1; its schema is None."):
        results.load(path)
    path.write_text("{")
    with pytest.raises(InputError, match=r"^bench: .* cannot be read: "):
        results.load(path)


def test_compare_tells_what_moved_from_noise():
    """p10 to p90 of the old run: 1.9 to 2.1 ms."""
    old = samples(1.9, 2.0, 2.1)
    sides = lambda times: (Side("pallas", True, times.median, times, 1.0),)
    verdict = lambda *ms: (
        results.compare(Results({}, (row(sides=sides(old)),)), Results({}, (row(sides=sides(samples(*ms))),)))[
            0
        ].verdict
    )
    assert verdict(1.7, 1.75, 1.8) == "faster"
    assert verdict(1.8, 1.85, 1.95) == "noise"
    assert verdict(2.2, 2.3, 2.4) == "slower"


def test_compare_matches_problem_regime_and_side():
    old, new = Results({}, (row(),)), Results({}, (row(regime="sustained"), row(), row(dtype="float16")))
    changes = results.compare(old, new)
    assert [(c.row.regime, c.side.name, c.factor) for c in changes] == [
        ("burst", "pallas", 1), ("burst", "xla", 1), ("burst", "cublaslt", 1)
    ]  # fmt: skip


# Tables and pictures.

ENVIRONMENT = dict(
    command="jaxkernels bench gemm", date="2026-11-20T21:00:00+00:00", device="NVIDIA H200", driver="580.159",
    versions=dict(jax="0.11.2"), commit="0123456789abcdef",
)  # fmt: skip

TABLE = """\
| shape | dtype | fastest baseline | pallas |
| --- | --- | --- | --- |
| 8192x8192x8192 nn | bfloat16 | cublaslt 523.6 | 549.8 (1.05 x, 56% of limit) |
| 64x4096x4096 nn (decode) | bfloat16 | cublaslt 2,857 GB/s | 3,000 GB/s (1.05 x, 62% of limit) |
| geometric mean |  |  | 1.050 x |

TFLOP/s, burst; x: ratio to the fastest baseline. NVIDIA H200, driver 580.159, jax 0.11.2, 2026-11-20, \
commit 0123456789ab; data: gemm.json, by `jaxkernels bench gemm`.
"""


@pytest.fixture
def documents(tmp_path, monkeypatch) -> pathlib.Path:
    """A checkout with a README of one table, and the results for it beside figures of another kind."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs" / "benchmarks"
    decode = row(shape="64x4096x4096 nn", label="decode", flops=2.1e9, num_bytes=6_000_000_000)
    results.save(Results(ENVIRONMENT, (row(), decode)), folder / "gemm.json")
    (folder / "speed-floors.json").write_text('{"rows": {}}')
    (tmp_path / "README.md").write_text("# a\n<!-- benchmark: gemm-square -->\nold\n<!-- end -->\nb\n")
    return tmp_path


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def refusal(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 1
    return result.stderr


@pytest.mark.parametrize(("ending", "exit_code"), [(KeyboardInterrupt(), 0), (RuntimeError("gone"), 1)], ids=repr)
def test_a_run_that_ends_early_keeps_its_rows(ending, exit_code, tmp_path, monkeypatch):
    whole = runner.run

    def run(*arguments):
        yield next(whole(*arguments))
        raise ending

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(bench_cli, "_SAVE_SECONDS", 0.0)
    path = tmp_path / "a.json"
    result = invoke("bench", "gemm", "--shapes", "32x48x40:float32", "--regime", "burst", "--json", path)
    assert result.exit_code == exit_code, result.output
    assert [row.shape for row in results.load(path).rows] == ["32x48x40 nn"]


def test_a_run_goes_on_where_it_was_cut_off(tmp_path):
    path = tmp_path / "a.json"
    shapes = ["--shapes", "32x48x40:float32", "--shapes", "33x48x40:float32", "--shapes", "34x48x40:float32"]
    bench = lambda *arguments: invoke("bench", "gemm", *arguments, "--regime", "burst", "--json", path)
    assert bench(*shapes[:4], "--resume").exit_code == 0  # There is none yet.
    before = results.load(path)
    result = bench(*shapes, "--resume")
    assert result.exit_code == 0, result.output
    assert "resuming after 1 rows" in result.stdout
    assert "2 problems are left" in result.stdout
    after = results.load(path)
    assert [r.shape for r in after.rows] == ["32x48x40 nn", "33x48x40 nn", "34x48x40 nn"]
    assert after.rows[0] == before.rows[0]
    assert after.rows[1].seconds != before.rows[1].seconds
    assert after.environment["command"].count(" && ") == 1
    assert len(after.environment["resumed"]) == 1
    assert after.environment["date"] == before.environment["date"]
    assert after.environment["seconds"] > before.environment["seconds"]
    # Rows of other problems are kept.
    assert bench("--shapes", "35x48x40:float32", "--resume").exit_code == 0
    assert results.load(path).rows[:3] == after.rows


def test_what_no_run_can_go_on_with(tmp_path):
    path = tmp_path / "a.json"
    goes_on = ("--shapes", "32x48x40", "--regime", "burst", "--resume")
    assert refusal("bench", "gemm", *goes_on) == (
        "error: bench: --resume needs a --json file with rows of an operation; got no --json.\n"
    )
    assert "got train, whose suites have one row each." in refusal("bench", "train", "--resume", "--json", path)
    where = dict(command="b", date="2026-11-23", device="NVIDIA H200", commit=None, versions=dict(jax="0.12.0"))
    results.save(Results(where | dict(commit="abc+"), (row(op="attention"),)), path)
    assert refusal("bench", "gemm", *goes_on, "--json", path) == (
        f"error: bench: {path} has rows of attention, not of gemm. Choose another file with --json.\n"
    )
    for changes, message in (
        ({}, "the same commit as the earlier run; got None, before it was abc"),
        (
            dict(commit="abc", versions=dict(jax="0.12.1")),
            "the same jax as the earlier run; got 0.12.1, before it was 0.12.0",
        ),
    ):
        with pytest.raises(InputError, match=message):
            results.resumed(results.load(path), where | changes, ())
    assert results.resumed(Results(where, ()), where, ()).rows == ()


def test_report_writes_tables_and_checks_them(documents):
    assert refusal("report", "--check") == "error: report: out of date: README.md. Run `jaxkernels report`.\n"
    assert "old" in (documents / "README.md").read_text()
    result = invoke("report")
    assert (result.exit_code, result.stdout) == (0, "README.md: written\n")
    assert (documents / "README.md").read_text() == (f"# a\n<!-- benchmark: gemm-square -->\n{TABLE}<!-- end -->\nb\n")
    result = invoke("report", "--check")
    assert (result.exit_code, result.stdout) == (0, "every table is up to date\n")


def test_summary_has_a_line_for_each_suite(documents):
    (documents / "README.md").write_text("<!-- benchmark: all -->\n<!-- end -->\n")
    assert invoke("report").exit_code == 0
    assert (documents / "README.md").read_text() == (
        "<!-- benchmark: all -->\n"
        "| suite | backend | burst | sustained |\n"
        "| --- | --- | --- | --- |\n"
        "| gemm-square | pallas | 1.050 (1.05 to 1.05, of 2) | - |\n"
        "\n"
        "Ratio to the fastest baseline: geometric mean (least to most, of the number of rows).\n"
        "<!-- end -->\n"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "<!-- benchmark: gemm-odd -->\n<!-- end -->\n",
            "report: no results of suite 'gemm-odd' in docs/benchmarks; there are: gemm-square.",
        ),
        (
            "<!-- benchmark: gemm-square sustained -->\n<!-- end -->\n",
            "report: gemm.json: no rows of gemm-square in the regime sustained.",
        ),
        (
            "<!-- benchmark: gemm-square cold -->\n<!-- end -->\n",
            "report: README.md: a table is `SUITE` or `SUITE REGIME`; got 'gemm-square cold'.",
        ),
        (
            "<!-- benchmark: gemm-square -->\n",
            "report: README.md opens 1 tables and closes 0. Close each with <!-- end -->.",
        ),
        (
            "<!-- benchmark: gemm-square -->\n<!-- benchmark: gemm-square -->\n<!-- end -->\n",
            "report: README.md opens 2 tables and closes 1. Close each with <!-- end -->.",
        ),
    ],
)
def test_tables_that_cannot_be_written(documents, text, message):
    (documents / "README.md").write_text(text)
    assert refusal("report", "README.md") == f"error: {message}\n"


def test_a_row_in_two_files_is_refused(documents):
    results.save(Results(ENVIRONMENT, (row(),)), documents / "docs/benchmarks/newer.json")
    assert refusal("report") == (
        "error: report: gemm-square 8192x8192x8192 nn bfloat16 burst is in gemm.json and in newer.json. "
        "Keep one of them.\n"
    )


def test_a_suite_may_be_of_several_files(tmp_path):
    """Its table has the suite's order, and gives the number of rows of each run."""
    run = lambda commit, *rows: Results(ENVIRONMENT | dict(commit=commit), rows)
    results.save(run("1" * 40, row(), row(regime="sustained")), tmp_path / "a.json")
    results.save(run("2" * 40, row(shape="2048x2048x2048 nn"), row(shape="16384x16384x16384 nn")), tmp_path / "b.json")
    library = report.Library(tmp_path)
    text = report.render("<!-- benchmark: gemm-square -->\n<!-- end -->\n", library, where="README.md")
    assert re.findall(r"^\| (\d+)x", text, re.MULTILINE) == ["2048", "8192", "16384"]
    of_runs = re.findall(r"(\d) rows: [^`]*commit (\d)\d*; data: (\w\.json), by `[^`]*`\.", text)
    assert of_runs == [("2", "2", "b.json"), ("1", "1", "a.json")]
    assert "of 3)" in report.summary(library)


def test_training_steps_have_a_table_of_their_own():
    step = row(
        suite="train-124m", op="train", shape="124m 32x1024", tokens=32768, memory_bytes_per_s=None,
        sides=(
            Side("auto", True, 0.066, samples(66.0, 66.0, 66.0), 0.0),
            Side("xla", False, 0.106, samples(106.0, 106.0, 106.0), 0.0),
            Side("cudnn", False, 0.0675, samples(67.5, 67.5, 67.5), 0.0),
        ),
        flops=2.6e13,
    )  # fmt: skip
    text = report.table([report.Found(step, pathlib.Path("train.json"), Results(ENVIRONMENT, (step,)))])
    assert "| preset | dtype | xla (baseline) | cudnn (baseline) | auto |" in text
    assert "| 66.0 ms, 496,485 tokens/s, MFU 39.8% (1.02 x) |" in text
    assert "x: ratio to the fastest baseline." in text


def test_tables_of_a_real_run_name_every_problem():
    found = results.load(SMOKE)
    text = report.table([report.Found(each, SMOKE, found) for each in found.rows])
    for problem in SUITES["gemm-smoke"].problems:
        assert f"| {problem.shape} | {problem.case.dtype} | xla " in text


def test_pictures_are_drawn_of_each_suite_and_regime(tmp_path):
    paths = plots.plot(Results(ENVIRONMENT, (row(), row(regime="sustained"), row(sides=()))), tmp_path / "plots")
    assert [path.name for path in paths] == [
        f"gemm-square-{regime}-{kind}.png" for regime in ("burst", "sustained") for kind in ("bars", "roofline")
    ]
    for path in paths:
        pixels = imread(path)
        assert min(pixels.shape[:2]) > 150
        assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20


def test_attentions_have_a_roofline_of_exponentials():
    """As many TFLOP/s at 4 D FLOPs an exponential forward, and 10 D backward."""
    rows = []
    for problem in (
        Problem(AttentionCase(1, 512, 512, 4, 4, 64)),
        Problem(AttentionCase(1, 512, 512, 4, 4, 64, causal=True), "backward"),
    ):
        rows.append(row(flops=problem.flops, num_exps=problem.num_exps, exps_per_s=H200.exps_per_s))
    of_bytes, of_exps = plots._roofline(rows, "").axes
    assert of_bytes.get_xlabel().startswith("FLOP per byte")
    assert [tick.get_text() for tick in of_exps.get_xticklabels()] == ["256", "640"]
    together, in_turns = (line.get_xydata() for line in of_exps.get_lines())
    np.testing.assert_allclose(together[:, 1], np.minimum(989.4, 4.18 * together[:, 0]))
    np.testing.assert_allclose(1 / in_turns[:, 1], 1 / 989.4 + 1 / (4.18 * in_turns[:, 0]))


# The command.


def test_bench_from_end_to_end(tmp_path, monkeypatch):
    arguments = ["bench", "gemm", "--shapes", "32x48x40:float32", "--shapes", "33x48x40", "--regime", "burst"]
    first = invoke(*arguments, "--json", tmp_path / "a.json", "--plot", tmp_path / "plots")
    assert first.exit_code == 0, first.output
    assert "gemm 32x48x40 nn float32 xla | " in first.stdout
    assert "gemm 33x48x40 nn bfloat16 xla | " in first.stdout
    assert (tmp_path / "plots" / "shapes-burst-bars.png").exists()
    written = results.load(tmp_path / "a.json")
    assert [r.shape for r in written.rows] == ["32x48x40 nn", "33x48x40 nn"]
    assert written.environment["clock"] == "wall clock"
    assert written.environment["versions"]["jax"] == jax.__version__
    # As if it had taken a hundred times as long before.
    values = json.loads((tmp_path / "a.json").read_text())
    for side in values["rows"][0]["sides"]:
        for name in ("median", "p10", "p90"):
            side["samples"][name] *= 100
    (tmp_path / "b.json").write_text(json.dumps(values))
    second = invoke(*arguments, "--backend", "pallas", "--backend", "xla", "--compare", tmp_path / "b.json")
    assert second.exit_code == 0, second.output
    assert re.search(
        r"gemm 33x48x40 nn bfloat16 \| burst \| jaxkernels pallas: .*runs on cuda devices only", second.stdout
    )
    moved = [text for text in second.stdout.splitlines() if "| faster, " in text]
    assert {text.split(" | ")[0] for text in moved} >= {
        "gemm 32x48x40 nn float32 xla", "gemm 32x48x40 nn float32 xla (baseline)"
    }  # fmt: skip


def test_messages_keep_their_brackets_and_a_bench_that_times_nothing_fails(registry, monkeypatch):
    """The console must not take them for its markup."""
    reason = 'needs more: pip install "jaxkernels[cuda13]" [/] (4096, [128])'
    monkeypatch.setattr(xla_matmul, "unsupported", lambda spec: reason)
    result = invoke("bench", "gemm", "--shapes", "32x48x40:float32", "--regime", "burst", "--backend", "xla")
    assert f"jaxkernels xla: matmul[xla]: {reason}. " in result.stdout
    assert result.exit_code == 1
    assert result.stderr == "error: bench: none of our kernels was timed in 1 rows; see the reasons above.\n"


@pytest.mark.parametrize("update", ["[/] [128]", "4x128 [red]"])
def test_spinner_of_a_bench_keeps_brackets(update, monkeypatch):
    shown = []

    def run(work: Any, settings: Any, status: Callable[[Any], None]) -> Iterator[Row]:
        status(update)
        yield row()

    def show(status: Status, text: Any) -> None:
        shown.append(Text.from_markup(text) if isinstance(text, str) else text)

    monkeypatch.setattr(Status, "update", show)
    monkeypatch.setattr(runner, "run", run)
    assert invoke("bench", "gemm", "--shapes", "32x48x40:float32").exit_code == 0
    assert [text.plain for text in shown] == [update]


def test_wrong_results_fail_the_command(wrong_backend):
    result = invoke("bench", "gemm", "--shapes", "32x48x40:float32", "--regime", "burst", "--backend", "wrong")
    assert result.exit_code == 1
    assert "none of our kernels was timed: " in result.stdout
    assert "1 rows have wrong results of our kernels; see above" in result.stdout


@pytest.fixture
def tiny_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training steps of a model that takes seconds, each launched once."""
    model = dataclasses.replace(PRESETS["tiny"].model, num_layers=1, embed_dim=32, mlp_dim=32)
    tiny = dataclasses.replace(PRESETS["tiny"], model=model, batch_size=2, sequence_length=16)
    monkeypatch.setitem(PRESETS, "tiny", tiny)
    monkeypatch.setattr(training, "_LAUNCH_SECONDS", 0)
    monkeypatch.setattr(training, "_RESTS", (0, 0))
    monkeypatch.setattr(measure, "_SUSTAINED_LAUNCHES", (1, 1))
    monkeypatch.setattr(measure, "_WARM_SECONDS", 0)


ONE_STEP = training.Plan((training.Setting(False, "none"),), steps=1)


def training_rows(plan: training.Plan = ONE_STEP, **changes: Any) -> list[Row]:
    return list(training.run([("train-tiny", "tiny")], settings(clock=None, **changes), plan=plan))


@pytest.mark.usefixtures("tiny_steps")
def test_training_rows():
    """Without cuDNN the baseline is XLA's attention."""
    burst, step = training_rows(backends=("auto", "pallas"), regimes=("burst", "sustained"))
    assert (burst.regime, step.regime) == ("burst", "sustained")
    assert [(side.name, side.is_ours, side.setting) for side in step.sides] == [
        ("xla", False, "unrolled:none"), ("auto", True, "unrolled:none"),
    ]  # fmt: skip
    assert step.sides[1].error_ratio == 0
    assert step.sides[1].memory_bytes > 16 * training.training_config("tiny", platform="cpu").model.num_params
    assert (step.sides[1].joules, burst.sides[1].joules) == (None, None)
    assert step.refused["cudnn"] == "computes in 16 bits, not in float32"
    assert attention_baselines.cudnn_refuses("bfloat16", H200) is None
    assert step.tokens == 2 * 16
    assert step.refused["jaxkernels pallas unrolled:none"].startswith("NotImplementedError: ")
    assert "tokens/s" in results.line(step, step.ours[0])
    assert " tiny 2x16 float32 auto unrolled:none | " in results.line(step, step.ours[0])
    assert " x xla unrolled:none | " in results.line(step, step.ours[0])
    assert set(burst.seconds) == {"compile", "check", "look", "time"}
    assert set(step.seconds) == {"time"}


@pytest.mark.usefixtures("tiny_steps")
def test_each_side_is_timed_at_its_fastest_setting(monkeypatch, tmp_path):
    """The sides may differ in it. All settings are in the file, and the ratio is of the best to the best."""
    fastest = {"xla": "scan:full", "auto": "unrolled:none"}
    look = lambda program, count: 0.001 if fastest[program.way.name] == str(program.setting) else 1.0
    monkeypatch.setattr(training._Program, "seconds", look)
    plan = training.Plan((training.Setting(True, "full"), training.Setting(False, "none")), steps=1)
    (row,) = training_rows(plan, regimes=("sustained",))
    timed = {side.name: side.setting for side in row.sides if side.samples is not None}
    assert timed == fastest
    assert [side.name for side in row.ours] == ["auto"]
    assert row.fastest_baseline is not None
    assert row.fastest_baseline.setting == "scan:full"
    slower = {(side.name, side.setting): side.seconds for side in row.sides if side.samples is None}
    assert slower == {("xla", "unrolled:none"): 1.0, ("auto", "scan:full"): 1.0}
    saved = Results(ENVIRONMENT, (row,))
    results.save(saved, tmp_path / "train.json")
    (loaded,) = results.load(tmp_path / "train.json").rows
    assert [(side.setting, side.memory_bytes) for side in loaded.sides] == [
        (side.setting, side.memory_bytes) for side in row.sides
    ]
    table = report.table([report.Found(loaded, tmp_path, saved)])
    assert "scan:full" in table
    assert "unrolled:none" in table


@pytest.mark.usefixtures("tiny_steps")
def test_setting_that_does_not_fit_leaves_the_others(monkeypatch):
    trainer = training.Trainer

    def limited(config: Any, *args: Any) -> Any:
        if config.model.remat == "none":
            raise InputError("train: out of memory: a step needs 9 GB.")
        return trainer(config, *args)

    monkeypatch.setattr(training, "Trainer", limited)
    plan = training.Plan((training.Setting(True, "full"), training.Setting(True, "none")), steps=1)
    (row,) = training_rows(plan, regimes=("sustained",))
    assert [(side.name, side.setting) for side in row.sides] == [("xla", "scan:full"), ("auto", "scan:full")]
    for key in ("xla scan:none", "jaxkernels auto scan:none"):
        assert row.refused[key] == "InputError: train: out of memory: a step needs 9 GB."


@pytest.mark.usefixtures("tiny_steps")
@pytest.mark.parametrize("wrong", ["loss", "grad_norm"])
def test_step_with_a_wrong_loss_or_gradient_is_not_timed(wrong, monkeypatch):
    call = training._Program.__call__

    def changed(self: Any) -> dict[str, jax.Array]:
        measured = call(self)
        return measured | {wrong: measured[wrong] * (1.02 if self.way.is_ours else 1)}

    monkeypatch.setattr(training._Program, "__call__", changed)
    (row,) = training_rows(regimes=("sustained",))
    assert row.ours == ()
    assert row.refused["jaxkernels auto unrolled:none"].startswith("wrong: its first loss is ")


@pytest.mark.usefixtures("tiny_steps")
def test_traced_steps_are_kept_and_shown_side_by_side(monkeypatch, tmp_path):
    def breakdown(program: Any) -> Breakdown:
        groups = dict.fromkeys(GROUPS, 0.0) | dict(products=0.002 if program.way.is_ours else 0.003)
        return Breakdown(0.004, groups, (KernelTime("nvjet", "products", 0.002, 3.0),))

    monkeypatch.setattr(training._Program, "breakdown", breakdown)
    burst, row = training_rows(dataclasses.replace(ONE_STEP, profile=True), regimes=("burst", "sustained"))
    assert [side.breakdown for side in burst.sides] == [None, None]
    found = Results(ENVIRONMENT, (row,))
    results.save(found, tmp_path / "train.json")
    (loaded,) = results.load(tmp_path / "train.json").rows
    assert [side.breakdown for side in loaded.sides] == [side.breakdown for side in row.sides]
    shown = Console(file=io.StringIO(), width=100)
    bench_cli._breakdowns(found, shown)
    lines = shown.file.getvalue().splitlines()
    cells = lambda name: next([c.strip() for c in line.split("│")[2:-1]] for line in lines if f"│ {name} " in line)
    assert cells("products") == ["3.00", "2.00"]
    assert cells("step") == ["4.00", "4.00"]
    assert "       2.000 ms     3.0 launches  products     nvjet" in lines


@pytest.mark.usefixtures("tiny_steps")
def test_trace_that_fails_keeps_the_times(monkeypatch):
    (row,) = training_rows(dataclasses.replace(ONE_STEP, profile=True), regimes=("sustained",))
    assert row.ours[0].breakdown is None
    assert row.refused["jaxkernels auto --profile"].startswith("bench: --profile found no kernels in the trace. ")


def test_settings_of_training():
    names = lambda preset: [str(setting) for setting in training.Plan().settings(preset)]
    assert names("124m") == ["unrolled:none", "scan:dots_and_attention"]
    assert names("1b") == ["scan:dots_and_attention", "unrolled:none"]
    assert names("8b") == ["scan:attention"]
    assert str(training.Setting.parse("scan:dots")) == "scan:dots"


def test_energy_of_a_step_is_that_of_the_counter():
    counter = itertools.count(100.0, 50.0)
    telemetry = types.SimpleNamespace(joules=lambda: next(counter))
    launched = []
    assert training._joules(telemetry, lambda: launched.append(jnp.zeros(()))) == 50.0
    assert len(launched) == 1
    assert training._joules(types.SimpleNamespace(joules=lambda: None), lambda: None) is None


@pytest.mark.usefixtures("tiny_steps")
def test_training_steps_are_also_held_against_another_attention(monkeypatch):
    """cuDNN's, with XLA's products; here JAX's own stands in for it."""
    monkeypatch.setattr(training, "cudnn_refuses", lambda dtype, chip: None)
    traced = []

    def attention(*operands: jax.Array, is_causal: bool) -> jax.Array:
        traced.append(is_causal)
        return jax.nn.dot_product_attention(*operands, is_causal=is_causal)

    assert training.BASELINES["cudnn"].keywords == {"implementation": "cudnn"}
    monkeypatch.setitem(training.BASELINES, "cudnn", attention)
    (step,) = training_rows(regimes=("sustained",))
    assert [(side.name, side.is_ours) for side in step.sides] == [("cudnn", False), ("auto", True)]
    assert step.sides[1].error_ratio < 0.01
    assert traced
    assert all(traced)


def test_rows_thin_out_a_suite(monkeypatch):
    select = functools.partial(bench_cli._work, "gemm", ["gemm-square"], [])
    taken = lambda rows: [p.shape for _, p in select(rows, None, settings(), None)]
    assert taken(3) == ["256x256x256 nn", "1024x1024x1024 nn", "4096x4096x4096 nn"]
    assert len(taken(100)) == len(taken(None)) == 9


def test_a_pattern_chooses_rows():
    """The pattern matches the shape, the dtype and the name."""
    select = functools.partial(bench_cli._work, "gemm", ["gemm-square", "gemm-llm"], [], None)
    taken = lambda match: {p.label for _, p in select(match, settings(), None)}
    assert taken("^16384x8192.*70B o") == {"Llama 3 70B o", "Llama 3 70B o, dgrad"}
    assert [p.shape for _, p in select("^1024x", settings(), None)] == ["1024x1024x1024 nn"]


def test_suites_are_listed():
    result = invoke("bench", "attention", "--suite", "list")
    assert result.exit_code == 0
    assert [text.split()[0] for text in result.stdout.splitlines()] == [
        name for name, suite in SUITES.items() if suite.op == "attention"
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["conv"], "bench: unknown operation 'conv'; use one of gemm, qkv, attention, norm, lce, train."),
        (["train", "--suite", "gemm-odd"], "bench: unknown suite 'gemm-odd'; train has train-tiny, train-124m, "
         "train-350m, train-1b, train-8b."),
        (["gemm", "--backend", "cublas"], "bench: unknown backend 'cublas'; use one of "
         f"{', '.join(dispatch.backend_names())}."),
        (["gemm", "--baseline", "cudnn"], "bench: unknown baseline 'cudnn'; use one of xla, cublaslt, jax-pallas."),
        (["gemm", "--regime", "hot"], "bench: unknown regime 'hot'; use one of burst, sustained."),
        (["train", "--baseline", "tokamax"], "bench: unknown baseline 'tokamax'; use one of cudnn, xla."),
        (["gemm", "--profile"], "bench: --profile is for train; got gemm. Leave it out."),
        (
            ["train", "--profile"],
            "bench: --profile needs a CUDA GPU; this machine has cpu. Leave it out.",
        ),
        (["train", "--steps", "0"], "bench: --steps must be at least 1; got 0."),
        (["gemm", "--steps", "3"], "bench: --steps is for train; got gemm. Leave it out."),
        (["gemm", "--setting", "scan:none"], "bench: --setting is for train; got gemm. Leave it out."),
        (
            ["train", "--setting", "scan"],
            "bench: --setting must be scan:REMAT or unrolled:REMAT, where REMAT is one of none, dots_and_attention, "
            "dots, attention, full; got 'scan'.",
        ),
        (["gemm", "--rows", "0"], "bench: --rows must be at least 1; got 0."),
        (
            ["gemm", "--suite", "gemm-smoke", "--match", "H(128"],
            "bench: --match 'H(128' is not a regular expression: missing ), unterminated subpattern at position 1.",
        ),
        (
            ["gemm", "--suite", "gemm-smoke", "--match", "H128"],
            f"bench: --match 'H128' matches none of {len(SUITES['gemm-smoke'].problems)} rows. The first row is "
            f"{SUITES['gemm-smoke'].problems[0].shape}.",
        ),
        (
            ["train", "--suite", "train-tiny", "--match", "x"],
            "bench: --match selects rows of an operation; a suite of train has one row only.",
        ),
    ],
)  # fmt: skip
def test_what_bench_refuses(arguments, message):
    assert refusal("bench", *arguments) == f"error: {message}\n"


def test_large_suites_are_named_where_there_is_no_gpu(monkeypatch):
    smoke = dataclasses.replace(SUITES["gemm-smoke"], problems=(SMALL,))
    monkeypatch.setattr(matmul_suites, "SUITES", (smoke, *matmul_suites.SUITES[1:]))
    result = invoke("bench", "gemm", "--regime", "burst")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == (
        "no GPU: only gemm-smoke runs, timed by the host's clock. Select others with --suite: gemm-square, "
        "gemm-llm, gemm-decode, gemm-odd, gemm-batched, gemm-epilogue, gemm-fp32."
    )
