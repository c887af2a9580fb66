"""`jaxkernels bench --random`: the draw, the side of `backend=None`, losses, summaries and messages."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from matplotlib.image import imread
from test_bench import ENVIRONMENT, H200, FakeClock, invoke, refusal, row, rows, samples, settings

from jaxkernels.bench import losses, lowering, plots, random_rows, report, results, runner
from jaxkernels.bench.lowering import Workers
from jaxkernels.bench.results import Results, Row, Side
from jaxkernels.core import dispatch
from jaxkernels.core.dice import LARGEST, Dice
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Call, Visit
from jaxkernels.core.problems import Baseline, Contender, Problem
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.attention.oracle import visible_keys
from jaxkernels.ops.matmul import baselines as matmul_baselines
from jaxkernels.ops.matmul import reference as xla_matmul
from jaxkernels.ops.matmul.cases import MatmulCase
from jaxkernels.tuning import tuner

SMALL = Problem(MatmulCase(32, 48, 40, dtype="float32"))
MANY = 2000


@pytest.fixture(autouse=True)
def _compile_quickly() -> Iterator[None]:
    """Programs here run a few times: most of their time would go into optimising them."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def products() -> list[Problem]:
    return random_rows.problems("gemm", MANY, seed=1)


@pytest.fixture(scope="module")
def attentions() -> list[Problem]:
    return random_rows.problems("attention", MANY, seed=1)


# The draw.

FIRST = {
    "gemm": [
        "20x20080x8x198 tn bfloat16",
        "23520x6112x640 tt bfloat16",
        "67x64x6976 nn bias gelu backward bfloat16",
        "3852x3104x16 nn bias residual bfloat16",
        "848x7134x17500 nn bias gelu float16",
        "192x768x128 tt bfloat16",
        "8x16x45 tn bfloat16",
        "2x2347x16x152 nn backward bfloat16",
    ],
    "attention": [
        "B2 S1 N30/3 H80 causal mask B11S float16",
        "B1 S3391 N1 H112 full bias 11TS bfloat16",
        "B1 T20 S4049 N8/1 H128 full key lengths from 50% bfloat16",
        "B7 S9 N12/2 H96 full 7 documents backward float16",
        "B5 T39 S11066 N24/4 H128 full bias BNTS backward float16",
        "B6 T98 S91 N48/3 H112 causal backward bfloat16",
        "B3 T1 S2 N3 H96 full key lengths from 50% bfloat16",
        "B46 S10883 N2 H64 causal 3 equal documents bfloat16",
    ],
}


@pytest.mark.parametrize("op", FIRST)
def test_a_seed_always_gives_the_same_problems(op):
    """If this fails, the draw has changed, and older files of random rows cannot be resumed or compared."""
    drawn = random_rows.problems(op, len(FIRST[op]), seed=0)
    assert [(problem.label, f"{problem.shape} {problem.case.dtype}") for problem in drawn] == [
        (f"#{i}", text) for i, text in enumerate(FIRST[op])
    ]


@pytest.mark.parametrize("op", FIRST)
def test_a_problem_does_not_depend_on_how_many_are_drawn(op):
    assert random_rows.problems(op, 3, seed=7) == random_rows.problems(op, 9, seed=7)[:3]
    assert random_rows.problems(op, 3, seed=8) != random_rows.problems(op, 3, seed=7)


def share(problems: list[Problem], holds: Callable[[Any], bool]) -> float:
    return float(np.mean([holds(problem) for problem in problems]))


def has_odd_rows(case: MatmulCase) -> bool:
    return any(draw.shape[-1] * 2 % 16 for draw in (*case.draws.values(), case.out_type))


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (lambda p: p.case.m <= 64, 1 / 5),
        (lambda p: p.direction == "backward", 4 / 5 / 8),
        (lambda p: has_odd_rows(p.case), 1 / 4),
        (lambda p: (p.case.lhs_layout, p.case.rhs_layout) == ("mk", "kn"), 1 / 4 + 3 / 16),
        (lambda p: (p.case.lhs_layout, p.case.rhs_layout) == ("mk", "nk"), 3 / 16),
        (lambda p: (p.case.lhs_layout, p.case.rhs_layout) == ("km", "kn"), 3 / 16),
        (lambda p: (p.case.lhs_layout, p.case.rhs_layout) == ("km", "nk"), 3 / 16),
        (lambda p: bool(p.case.batch), 1 / 6),
        (lambda p: p.case.shared_rhs, 7 / 16 / 18),
        (lambda p: p.case.bias, 1 / 8),
        (lambda p: p.case.residual, 1 / 12),
        (lambda p: p.case.gate, 1 / 24),
        (lambda p: p.case.activation is not None, 1 / 8),
        (lambda p: p.case.dtype == "float16", 1 / 4),
    ],
)
def test_products_have_the_shares_that_are_documented(products, holds, expected):
    """Within four standard errors."""
    assert share(products, holds) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / MANY) ** 0.5)


@pytest.mark.parametrize(
    ("holds", "expected"),
    [
        (lambda p: p.direction == "backward", 2 / 5),
        (lambda p: p.case.heads == p.case.kv_heads, 1 / 3),
        (lambda p: (p.case.head_dim, p.case.value_dim) == (192, 128), 1 / 16),
        (lambda p: p.case.head_dim in (72, 80, 96, 112, 160), 5 / 16),
        (lambda p: p.case.head_dim in (64, 128), 1 / 2),
        (lambda p: p.case.causal, 4 / 5 / 2 + 1 / 10),
        (lambda p: p.case.documents > 0, 4 / 5 / 10),
        (lambda p: p.case.window is not None, 4 / 5 / 10),
        (lambda p: p.case.mask is not None, 4 / 5 / 10),
        (lambda p: p.case.bias is not None, 4 / 5 / 10),
        (lambda p: p.case.key_lengths, 4 / 5 / 10 + 1 / 20),
        (lambda p: p.case.dtype == "float16", 1 / 4),
    ],
)
def test_attentions_have_the_shares_that_are_documented(attentions, holds, expected):
    """Within four standard errors."""
    assert share(attentions, holds) == pytest.approx(expected, abs=4 * (expected * (1 - expected) / MANY) ** 0.5)


def test_sizes_are_log_uniform(products, attentions):
    """n of products has as many values in each factor of 8, but for the few that the limits exclude."""
    bins = collections.Counter(min(int(np.log2(p.case.n)) // 3, 4) for p in products if has_odd_rows(p.case))
    assert max(bins.values()) < 2 * min(bins.values())
    for of_both in ([p.case.k for p in products], [p.case.keys for p in attentions]):
        assert min(of_both) < 10
        assert max(of_both) > LARGEST / 2
        assert max(of_both) <= LARGEST


def test_problems_are_within_the_limits(products, attentions):
    assert max(p.flops for p in products) <= 4e12
    assert max(p.flops for p in attentions) <= 2e12
    assert max(p.num_bytes for p in (*products, *attentions)) <= 2e9
    for p in attentions:
        case = p.case
        assert case.heads <= 128
        assert case.heads // case.kv_heads <= 64
        assert case.heads // case.kv_heads * case.queries * case.keys <= 2**30
        assert case.window is None or case.keys >= case.queries
        assert case.documents <= case.keys
        assert case.alignment == "top_left" or (case.causal and case.keys > case.queries)


def test_products_decode_few_tokens_and_some_are_one_row(products):
    ms = {p.case.m for p in products if "decoding" in p.kinds}
    assert max(ms) <= 64
    assert 1 in ms


def test_new_queries_on_a_cache_see_all_keys_before_them(attentions):
    several = [p.case for p in attentions if "decoding" in p.kinds and p.case.alignment == "bottom_right"]
    assert len(several) > MANY / 20
    assert {case.queries for case in several} >= set(range(2, 9))
    case = dataclasses.replace(several[0], batch=1, heads=1, kv_heads=1, queries=3, keys=5)
    assert np.array(visible_keys(case, {}))[0, 0].sum(axis=1).tolist() == [3, 4, 5]


@pytest.mark.parametrize("letters", ["B1TS", "11TS", "B11S"])
def test_every_query_sees_a_key_of_a_mask(letters):
    for case in (
        AttentionCase(3, 9, 4, 2, 2, 16, mask=letters, causal=True),
        AttentionCase(3, 4, 9, 2, 2, 16, mask=letters, causal=True, alignment="bottom_right"),
        AttentionCase(3, 5, 1, 2, 2, 16, mask=letters),
    ):
        assert np.array(visible_keys(case, case.operands())).any(axis=-1).all()


def test_lengths_are_between_the_shortest_and_the_whole():
    operands = AttentionCase(3, 8, 20, 2, 2, 16, query_lengths=True, key_lengths=True, shortest=0.5).operands()
    assert operands["query_seq_lengths"].tolist() == [8, 6, 4]
    assert operands["key_value_seq_lengths"].tolist() == [10, 15, 20]


@pytest.mark.parametrize("op", FIRST)
def test_different_problems_have_different_names(op):
    by_name = collections.defaultdict(set)
    for problem in random_rows.problems(op, 500, seed=3, largest=128):
        by_name[problem.shape, problem.case.dtype].add((problem.case, problem.direction))
    assert all(len(problems) == 1 for problems in by_name.values())


@pytest.mark.parametrize("op", FIRST)
def test_kinds_are_of_the_problem(op):
    for problem in random_rows.problems(op, 100, seed=2):
        assert problem.direction in problem.kinds
        assert problem.case.dtype in problem.kinds
        assert len({"decoding", "few tiles", "many tiles"} & {*problem.kinds}) == 1


def test_dice_choose_by_weight():
    dice = [Dice(0, i) for i in range(MANY)]
    found = collections.Counter(die.choose({"a": 3, "b": 1, "c": 0}) for die in dice)
    assert found["c"] == 0
    assert found["a"] / MANY == pytest.approx(3 / 4, abs=0.04)
    assert {die.size(3, 5) for die in dice} == {3, 4, 5}
    with pytest.raises(AssertionError, match="none of 10000 draws was accepted; the last was 1"):
        dice[0].until(lambda: 1, lambda x: x == 2)


# The side of `backend=None`.


@pytest.fixture
def other_backend(registry, monkeypatch) -> Callable[..., None]:
    """Adds the backend "other" before or behind xla: with other results, so that a clock can tell them apart."""

    def add(*, is_first: bool) -> None:
        module = types.ModuleType("backend_other")
        vars(module).update({name: value for name, value in vars(xla_matmul).items() if not name.startswith("__")})
        module.run = lambda spec, config, *xs: xla_matmul.run(spec, config, *xs) * jnp.float32(1 + 2**-22)
        monkeypatch.setitem(sys.modules, "backend_other", module)
        entry = dispatch.Entry(("backend_other",))
        kept = {key: value for key, value in registry.items() if key[0] != "matmul" or key[1] == "xla"}
        registry.clear()
        registry.update({("matmul", "other"): entry} | kept if is_first else kept | {("matmul", "other"): entry})
        dispatch.load.cache_clear()

    return add


def test_auto_is_what_a_call_without_a_backend_takes(other_backend):
    other_backend(is_first=True)
    (found,) = rows(auto=True, backends=("other",))
    assert [side.name for side in found.ours] == ["auto"]
    assert found.ours[0].kernels == (f"matmul: other {xla_matmul.Config()}, default",)
    assert found.refused["jaxkernels other"] == "auto is the same program"
    other_backend(is_first=False)
    (found,) = rows(auto=True, backends=("other",))
    assert [side.name for side in found.ours] == ["auto", "other"]
    assert found.ours[0].kernels == (f"matmul: xla {xla_matmul.Config()}, default",)


def test_xla_is_not_a_side_beside_auto():
    (found,) = rows(auto=True)
    assert [(side.name, side.is_ours) for side in found.sides] == [("auto", True), ("xla", False)]
    (found,) = rows(auto=True, backends=("xla",))
    assert found.refused["jaxkernels xla"] == "auto is the same program"


def test_a_loss_stays_if_the_other_backends_fail(other_backend, monkeypatch):
    other_backend(is_first=False)
    monkeypatch.setattr(lowering, "are_same", lambda one, other: False)
    clock = clock_of(monkeypatch, auto=6e-3, other=2e-3, xla=5e-3)
    check, checks = runner._Plan._check, []

    def fail_later(plan: Any) -> Any:
        checks.append(plan)
        if len(checks) > 1:
            raise RuntimeError("out of memory")
        return check(plan)

    monkeypatch.setattr(runner._Plan, "_check", fail_later)
    (found,) = rows(auto=True, clock=clock)
    assert len(checks) == 2
    assert losses.auto_ratio(found) == pytest.approx(5 / 6)
    assert [side.name for side in found.sides] == ["auto", "xla"]
    assert found.refused["reference"] == "RuntimeError: out of memory"


def test_a_loss_is_not_timed_twice(other_backend, monkeypatch):
    """A second ratio in place of the first would hide losses: noise would have to show each of them twice."""
    other_backend(is_first=False)
    monkeypatch.setattr(lowering, "are_same", lambda one, other: False)
    clock = clock_of(monkeypatch, auto=6e-3, other=2e-3, xla=5e-3)
    measured, measure = [], runner._Plan._measure

    def record(plan: Any, calls: dict[str, Any], *args: Any, **options: Any) -> Any:
        measured.append({*calls})
        return measure(plan, calls, *args, **options)

    monkeypatch.setattr(runner._Plan, "_measure", record)
    rows(auto=True, clock=clock)
    both = {"jaxkernels auto", "xla"}
    assert [names for names in measured if len(names) > 1] == [both]
    assert measured[-1] == {"jaxkernels other"}


def test_other_backends_are_timed_where_auto_fails(other_backend, monkeypatch):
    other_backend(is_first=False)
    monkeypatch.setattr(dispatch, "choose", functools.partial(_choose_named, dispatch.choose))
    (found,) = rows(auto=True)
    assert "jaxkernels auto" in found.refused
    assert {side.name for side in found.ours} == {"xla", "other"}


@pytest.mark.parametrize(("seconds", "both"), [(6e-5, True), (4e-5, False), (1.1e-4, False)])
def test_short_losses_are_timed_in_programs_of_several_calls(seconds, both, other_backend, monkeypatch):
    other_backend(is_first=True)
    clock = clock_of(monkeypatch, auto=seconds, other=seconds, xla=5e-5)
    looks = []

    class ProgramClock(FakeClock):
        def times(self, visits: Sequence[Visit]) -> list[list[float]]:
            looks.extend(len(launch()) for visit in visits for launch in visit.launches())
            return [[8e-5 * (1 + i)] * visit.count for i, visit in enumerate(visits)]

    monkeypatch.setattr(tuner, "num_calls_of", lambda given, made: 4)
    (found,) = rows(auto=True, clock=clock, program_clock=ProgramClock())
    assert {side.name for side in found.sides if side.in_program} == ({"auto", "xla"} if both else set())
    if both:
        assert set(looks) == {4}
        assert losses.in_program_ratio(found) == pytest.approx(2)
        assert losses.loss(found).endswith("; in a program of several calls 2.000 x xla")


def test_gradients_are_timed_in_programs_of_several_calls(other_backend, monkeypatch):
    """Each call has arguments of its own, and the results are those of a program of one call."""
    other_backend(is_first=True)
    clock = clock_of(monkeypatch, auto=6e-5, other=6e-5, xla=5e-5)
    timed, program_clock, gradients = runner.measure, FakeClock(), []

    def measure(calls: Mapping[str, Call], *, clock: FakeClock, **options: Any) -> dict[str, Any]:
        if clock is not program_clock:
            return timed(calls, clock=clock, **options)
        for call in calls.values():
            (arguments,) = call.operands
            gradients.append(call.function(*arguments))
        return {name: types.SimpleNamespace(median=1.0) for name in calls}

    monkeypatch.setattr(tuner, "num_calls_of", lambda given, made: 2)
    monkeypatch.setattr(runner, "num_rotations", lambda num_bytes: (1, True))
    monkeypatch.setattr(runner, "measure", measure)
    problem = dataclasses.replace(SMALL, direction="backward")
    (found,) = rows(problem, auto=True, clock=clock, program_clock=program_clock)
    assert {side.name: side.in_program for side in found.sides if side.in_program} == {"auto": 0.5, "xla": 0.5}
    of_auto, of_xla = gradients
    assert len(of_auto) == len(of_xla) == 2
    for name in ("lhs", "rhs"):
        assert not np.array_equal(of_auto[0][name], of_auto[1][name])
        for ours, theirs in zip(of_auto, of_xla):
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5)


def test_a_loss_stays_if_its_program_of_several_calls_fails(other_backend, monkeypatch):
    other_backend(is_first=True)
    clock = clock_of(monkeypatch, auto=6e-5, other=6e-5, xla=5e-5)
    monkeypatch.setattr(tuner, "each", lambda function: 1 / 0)
    monkeypatch.setattr(tuner, "num_calls_of", lambda given, made: 4)
    (found,) = rows(auto=True, clock=clock, program_clock=FakeClock())
    assert losses.auto_ratio(found) == pytest.approx(5 / 6)
    assert found.refused["in a program"] == "ZeroDivisionError: division by zero"


def _choose_named(
    choose: Callable[..., Any], op: str, spec: Any, backend: str | None, *args: Any, **options: Any
) -> Any:
    if backend is None:
        raise RuntimeError("no choice")
    return choose(op, spec, backend, *args, **options)


def clock_of(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> FakeClock:
    """A clock that knows how long each side takes."""
    names: dict[int, str] = {}
    compile_side = runner._compile

    def compile_and_remember(contender: Contender, *args: Any) -> Any:
        made = compile_side(contender, *args)
        names[id(made.program)] = contender.name
        return made

    class Clock(FakeClock):
        def times(self, visits: Sequence[Visit]) -> list[list[float]]:
            return [[seconds[names[id(visit.function)]]] * visit.count for visit in visits]

    monkeypatch.setattr(runner, "_compile", compile_and_remember)
    return Clock()


def test_slow_sides_of_ours_are_looked_at_once_beside_auto(other_backend, registry, monkeypatch):
    other_backend(is_first=False)
    registry["matmul", "third"] = registry["matmul", "other"]
    clock = clock_of(monkeypatch, auto=3e-3, other=2e-3, third=4e-3, xla=5e-3)
    timed = lambda found: {side.name for side in found.sides if side.samples is not None}
    (found,) = rows(auto=True, backends=("other", "third"), clock=clock)
    assert timed(found) == {"auto", "other", "xla"}
    assert next(side.seconds for side in found.sides if side.name == "third") == 4e-3
    (found,) = rows(clock=clock)
    assert timed(found) == {"other", "third", "xla"}


@pytest.mark.parametrize(("seconds", "others"), [(5.1e-3, []), (5.2e-3, ["other"])])
def test_other_backends_are_timed_where_auto_loses(seconds, others, other_backend, monkeypatch):
    other_backend(is_first=False)
    monkeypatch.setattr(lowering, "are_same", lambda one, other: False)  # Equal programs are timed once.
    clock = clock_of(monkeypatch, auto=seconds, other=2e-3, xla=5e-3)
    (found,) = rows(auto=True, clock=clock)
    assert [side.name for side in found.ours] == ["auto", *others]
    text = losses.loss(found)
    assert text is not None
    assert ("would have won: other 2.500 x" in text) == bool(others)
    assert found.seconds["check"] > 0


@pytest.mark.parametrize(
    "problem", [Problem(MatmulCase(256, 512, 384), d) for d in ("forward", "backward")], ids=lambda p: p.shape
)
def test_a_worker_chooses_as_a_call_does(problem):
    """Though `jax.export` would refuse the custom call of most backends unasked."""
    with Workers(1, H200) as pool:
        there = pool.start(problem, lowering.AUTO)().kernels
    with dispatch.recording() as choices:
        operands, cotangent = lowering.shapes(problem)
        function = lowering.our_function(problem, lowering.AUTO)

        def program(operands: Any, cotangent: Any) -> Any:
            if problem.direction == "forward":
                return function(operands)
            return lowering.save(problem, function, operands)[1](cotangent)

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("JAXKERNELS_TARGET", H200.name)
            jax.jit(program).trace(operands, cotangent).lower(lowering_platforms=("cuda",))
    assert there[-len(choices) :] == lowering._described(choices)
    assert not there[0].startswith("matmul: xla")


def test_a_worker_takes_what_an_export_passes_over(other_backend, registry):
    other_backend(is_first=True)
    registry["matmul", "other"] = dataclasses.replace(registry["matmul", "other"], is_exportable=False)
    for name in (lowering.AUTO, "other"):
        (kernel,) = lowering._export(SMALL, name, "cpu").kernels
        assert kernel.startswith("matmul: other ")


@pytest.mark.parametrize(("auto", "compiled"), [(False, 3), (True, 6)])
def test_programs_of_earlier_random_problems_are_not_kept(auto, compiled, monkeypatch):
    """A run of two chunks compiles the draws of lhs, rhs and the cotangent once, or once for each chunk."""
    drawn = []
    compile_draw = runner._compile_draw
    monkeypatch.setattr(runner, "_compile_draw", lambda draw: drawn.append(draw) or compile_draw(draw))
    assert len(list(runner.run([("a", SMALL), ("b", SMALL)], settings(auto=auto, backends=("xla",), chunk=1)))) == 2
    assert len(drawn) == compiled


# Losses.


def random_row(label: str, kinds: tuple[str, ...], **milliseconds: float) -> Row:
    """A row of a 2 ms peer "cublaslt" beside sides of ours."""
    sides = tuple(
        Side(name, name != "cublaslt", ms / 1e3, samples(ms, ms, ms), 1.0, (f"matmul: {name} Config({ms:g}), default",))
        for name, ms in {**milliseconds, "cublaslt": 2.0}.items()
    )
    return row(suite="gemm-random-0", label=label, shape=f"{label} nn", kinds=kinds, sides=sides)


def test_a_loss_names_what_would_have_won():
    assert losses.loss(random_row("1", (), auto=1.9, triton=1.0)) is None
    assert losses.loss(random_row("1", (), triton=1.0)) is None
    assert losses.loss(random_row("1", (), auto=2.5, pallas=1.8, triton=1.6)) == (
        "auto took auto Config(2.5), default: 0.800 x cublaslt; would have won: triton 1.250 x "
        "(triton Config(1.6), default)"
    )
    assert losses.loss(random_row("1", (), auto=2.5, pallas=2.2, triton=2.6)) == (
        "auto took auto Config(2.5), default: 0.800 x cublaslt; fastest: cublaslt (a peer), then ours: pallas 0.909 x "
        "(pallas Config(2.2), default)"
    )
    assert losses.loss(random_row("1", (), auto=2.5)) == (
        "auto took auto Config(2.5), default: 0.800 x cublaslt; fastest: cublaslt (a peer)"
    )


def test_the_summary_counts_losses_that_programs_of_several_calls_do_not_show():
    in_program = lambda row, auto, peer: dataclasses.replace(
        row,
        sides=tuple(
            dataclasses.replace(side, in_program=dict(auto=auto, cublaslt=peer).get(side.name)) for side in row.sides
        ),
    )
    found = [
        in_program(random_row("#0", (), auto=2.5), 2.0, 1.95),
        in_program(random_row("#1", (), auto=2.5), 2.0, 1.93),
        in_program(random_row("#2", (), auto=2.01), 2.0, 2.0),  # It is not below 0.97.
        random_row("#3", (), auto=2.5),
    ]
    line = "Rows below 0.97 that were also timed in programs of several calls: 2. Of these, not below 0.97 there: 1.\n"
    assert line in losses.table(found)
    assert "several calls" not in losses.table(found[3:])


def test_another_backend_may_be_better_though_auto_wins():
    assert losses.has_better(random_row("1", (), auto=1.9, triton=1.8))
    assert not losses.has_better(random_row("1", (), auto=1.9, triton=1.88))
    assert not losses.has_better(random_row("1", (), auto=1.9))
    assert not losses.has_better(random_row("1", (), triton=1.8))


ROWS = (
    random_row("#0", ("decoding",), auto=2.5),
    random_row("#1", ("decoding", "odd rows"), auto=2.0),
    random_row("#2", ("odd rows",), auto=1.0),
    random_row("#3", (), auto=2.08),
    random_row("#4", ("decoding",), triton=1.0),
)

TABLE = """\
| kind | rows | geometric mean | least | most | below 0.97 | below 0.95 |
| --- | --- | --- | --- | --- | --- | --- |
| all | 4 | 1.114 | 0.800 | 2.000 | 50.0% | 25.0% |
| decoding | 2 | 0.894 | 0.800 | 1.000 | 50.0% | 50.0% |
| odd rows | 2 | 1.414 | 1.000 | 2.000 | 0.0% | 0.0% |

Ratio of `backend=None` to the fastest peer. Rows without a peer, or without auto: 1.
Rows in which another backend of ours is more than 3 % faster than auto: 0.

```
below 0.5        0
0.5 to 0.7       0
0.7 to 0.8       0
0.8 to 0.9       1  ##################################################
0.9 to 0.95      0
0.95 to 0.97     1  ##################################################
0.97 to 1        0
1 to 1.03        1  ##################################################
1.03 to 1.05     0
1.05 to 1.1      0
1.1 to 1.2       0
1.2 to 1.5       0
1.5 to 2         0
2 to 4           1  ##################################################
from 4           0
```

The 2 lowest ratios:

- #0 #0 nn bfloat16: `auto took auto Config(2.5), default: 0.800 x cublaslt; fastest: cublaslt (a peer)`
- #3 #3 nn bfloat16: `auto took auto Config(2.08), default: 0.962 x cublaslt; fastest: cublaslt (a peer)`
"""


def test_report_writes_the_summary_of_random_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    readme = tmp_path / "README.md"
    readme.write_text("<!-- random: gemm-random.json -->\n<!-- end -->\n")
    assert invoke("report").exit_code == 0
    assert readme.read_text() == "<!-- random: gemm-random.json -->\nNot measured yet.\n<!-- end -->\n"
    results.save(Results(ENVIRONMENT, ROWS), folder / "gemm-random.json")
    assert refusal("report", "--check") == "error: report: out of date: README.md. Run `jaxkernels report`.\n"
    assert invoke("report").exit_code == 0
    assert readme.read_text().startswith(f"<!-- random: gemm-random.json -->\n{TABLE}\nNVIDIA H200, driver 580.159, ")
    assert invoke("report", "--check").exit_code == 0
    results.save(Results(ENVIRONMENT, (row(),)), folder / "gemm-random.json")
    assert refusal("report") == (
        "error: report: docs/benchmarks/gemm-random.json has no random rows. Measure some with "
        "`jaxkernels bench --random`.\n"
    )


def test_the_summary_of_suites_has_no_random_rows(tmp_path):
    results.save(Results(ENVIRONMENT, (*ROWS, row())), tmp_path / "a.json")
    text = report.summary(report.Library(tmp_path))
    assert "gemm-square" in text
    assert "random" not in text


def test_rows_without_a_ratio_have_no_summary():
    assert losses.table(ROWS[4:]) == "No row has both a time of auto and of a peer.\n"
    assert plots._histogram(ROWS[4:], "") is None


def test_a_histogram_is_drawn_of_random_rows(tmp_path):
    (path,) = plots.plot(Results(ENVIRONMENT, ROWS), tmp_path)
    assert path.name == "gemm-random-0-burst-histogram.png"
    pixels = imread(path)
    assert len(np.unique(pixels.reshape(-1, pixels.shape[-1]), axis=0)) > 20
    drawn = plots._histogram(ROWS, "").axes[0].patches
    assert [int(bar.get_height()) for bar in drawn] == [count for _, count in losses.histogram(ROWS)]


def test_names_of_random_suites():
    assert random_rows.suite_name("gemm", 3) == "gemm-random-3"
    assert random_rows.suite_name("attention", 3, 128) == "attention-random-3-to-128"
    assert random_rows.is_random("gemm-random-3")
    assert random_rows.is_random("attention-random-3-to-128")
    assert not random_rows.is_random("gemm-square")


# The command.


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("op", FIRST)
def test_random_from_end_to_end(op, tmp_path):
    path = tmp_path / "a.json"
    command = ("bench", op, "--largest", "128", "--seed", "5", "--json", path, "--plot", tmp_path)
    first = invoke(*command, "--random", "2")
    assert first.exit_code == 0, first.output
    found = results.load(path)
    drawn = random_rows.problems(op, 4, seed=5, largest=128)
    suite = f"{op}-random-5-to-128"
    assert [(r.suite, r.label, r.shape, r.regime, r.kinds) for r in found.rows] == [
        (suite, p.label, p.shape, "burst", p.kinds) for p in drawn[:2]
    ]
    for each in found.rows:
        auto = losses.auto_side(each)
        assert auto.kernels
        assert all(": xla " in kernel for kernel in auto.kernels)
    assert f"{suite}, burst: ratio of auto to the fastest baseline" in first.stdout
    assert "0.97 to 1 " in first.stdout
    assert (tmp_path / f"{suite}-burst-histogram.png").exists()
    more = invoke(*command, "--random", "4", "--resume")
    assert more.exit_code == 0, more.output
    assert "resuming after 1 rows" in more.stdout
    after = results.load(path)
    assert [r.shape for r in after.rows] == [p.shape for p in drawn]
    assert after.rows[0] == found.rows[0]


def test_a_loss_is_printed_below_its_row(monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *arguments: iter([random_row("#0", (), auto=2.5, triton=1.0)]))
    result = invoke("bench", "gemm", "--random", "1")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    place = next(i for i, text in enumerate(lines) if text.startswith("    auto took "))
    assert lines[place].endswith("; would have won: triton 2.000 x (triton Config(1), default)")
    assert " triton | " in lines[place - 1]


def test_a_row_without_auto_says_why(registry, monkeypatch):
    monkeypatch.setattr(xla_matmul, "unsupported", lambda spec: "is away")
    baseline = Contender("xla", lambda x: x["lhs"] @ x["rhs"])
    monkeypatch.setitem(matmul_baselines.BASELINES, "xla", Baseline(lambda *_: None, lambda problem: iter([baseline])))
    result = invoke("bench", "gemm", "--random", "1", "--largest", "128")
    assert result.exit_code == 1
    assert "none of our kernels was timed: " in result.stdout
    assert "jaxkernels auto: " in result.stdout


def test_a_pattern_chooses_random_rows_by_kind(monkeypatch):
    measured = []

    def run(work, settings, status):
        measured.extend(problem for _, problem in work)
        yield random_row("#0", (), auto=2.5)

    monkeypatch.setattr(runner, "run", run)
    assert invoke("bench", "gemm", "--random", "40", "--match", "odd rows").exit_code == 0
    assert 0 < len(measured) < 40
    assert all("odd rows" in problem.kinds for problem in measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["gemm", "--random", "3", "--suite", "gemm-odd"],
            "bench: --random draws its own problems; got --suite gemm-odd too. Leave out --random or --suite.",
        ),
        (
            ["gemm", "--random", "3", "--shapes", "8x8x8"],
            "bench: --random draws its own problems; got --shapes 8x8x8 too. Leave out --random or --shapes.",
        ),
        (
            ["gemm", "--random", "3", "--rows", "2"],
            "bench: --rows shortens suites; got --rows 2 with --random. Give --random fewer rows.",
        ),
        (["gemm", "--random", "0"], "bench: --random must be at least 1; got 0."),
        (["gemm", "--random", "3", "--seed", "-1"], "bench: --seed must be at least 0; got -1."),
        (["gemm", "--random", "3", "--largest", "100"], "bench: --largest must be from 128 to 32768; got 100."),
        (
            ["gemm", "--seed", "3"],
            "bench: --seed needs --random; got --seed 3 without it. Add --random N, or leave --seed out.",
        ),
        (
            ["gemm", "--largest", "256"],
            "bench: --largest needs --random; got --largest 256 without it. Add --random N, or leave --largest out.",
        ),
        (["train", "--random", "3"], "bench: train takes no --random; use gemm or attention."),
        (["gemm", "--random", "3", "--processes", "0"], "bench: --processes must be at least 1; got 0."),
        (
            ["gemm", "--processes", "3"],
            "bench: --processes needs --random; got --processes 3 without it. Add --random N, or leave --processes "
            "out.",
        ),
    ],
)
def test_what_random_refuses(arguments, message):
    assert refusal("bench", *arguments) == f"error: {message}\n"


def test_only_operations_with_random_problems_take_random():
    with raises_exactly(InputError, "bench: train takes no --random; use gemm or attention."):
        random_rows.problems("train", 1, seed=0)


def test_rows_of_older_files_have_no_kinds(tmp_path):
    path = tmp_path / "a.json"
    results.save(Results(ENVIRONMENT, (row(),)), path)
    values = json.loads(path.read_text())
    del values["rows"][0]["kinds"]
    pathlib.Path(path).write_text(json.dumps(values))
    assert results.load(path).rows == (row(),)
