"""The tuner, `autotune` and `with tuning()`: on fake backends whose times are known."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import h200, needs_aot
from errors import raises_exactly
from typer.testing import CliRunner, Result

import jaxkernels as jk
from jaxkernels import cli
from jaxkernels.bench import random_rows
from jaxkernels.bench.lowering import kernels_of
from jaxkernels.cli import tune as tune_cli
from jaxkernels.core import cases, dispatch, hardware, winners
from jaxkernels.core.dispatch import Entry
from jaxkernels.core.measure import Call, MeasureError
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import tuning as attention_tuning
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul import tuning as matmul_tuning
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.tuning import ahead, tuner
from jaxkernels.tuning import autotune as autotune_lib

CPU = hardware.host()
A = np.ones((5, 7), np.float32)
B = np.ones((7, 3), np.float32)
Q = np.ones((2, 5, 4, 8), np.float32)
BLOCKS = (64, 128, 192, 256)
H200 = hardware.lookup("NVIDIA H200")


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64
    depth: int = 1


@dataclasses.dataclass
class Lab:
    """Fake backends for products and attentions, and a stopwatch that knows how long their configurations take.

    Attributes:
      microseconds: of a backend's configuration.
      broken, wrong: configurations that do not compile, or compute something else.
      measured: the names of the calls of each measurement.
      runs: (operation, configuration) of every kernel traced.
    """

    microseconds: Callable[[str, Any], float] = lambda backend, config: 2.0 if backend == "xla" else 1.0
    broken: set[Any] = dataclasses.field(default_factory=set)
    wrong: set[Any] = dataclasses.field(default_factory=set)
    measured: list[list[str]] = dataclasses.field(default_factory=list)
    runs: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    estimate: Callable[[Any], float] = lambda config: config.block * 1e-6

    def measure(
        self, calls: Mapping[str, Call], *, regime: str, budget_s: float, rounds: int | None = None
    ) -> dict[str, Any]:
        assert regime == "burst"
        assert budget_s >= 0
        self.measured.append(list(calls))
        for call in calls.values():
            call.function(*call.operands[0])  # They run: what cannot be called cannot be timed.
        return {name: types.SimpleNamespace(median=lab_seconds(self, name)) for name in calls}


SPACE = tuple(Config(block, depth) for block in BLOCKS for depth in (1, 2, 3))


@pytest.fixture
def lab(registry, monkeypatch, tmp_path) -> Lab:
    """Backend "fake" stands before the others, for products and for both passes of attention."""
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(winners, "_memo", {})
    lab = Lab()
    others = dict(registry)
    registry.clear()
    for op in ("matmul", "attention_forward", "attention_backward"):
        reference = importlib.import_module(others[op, "xla"].designs[0])

        def run(spec: Any, config: Config, *xs: jax.Array, op: str = op, reference: Any = reference) -> Any:
            lab.runs.append((op, config))
            if config in lab.broken:
                raise ValueError(f"{op}[fake]: {config} does not compile\nand more")
            outs = reference.run(spec, reference.Config(), *xs)
            return jax.tree.map(lambda x: 1.5 * x, outs) if config in lab.wrong else outs

        module = types.ModuleType(f"backend_fake_{op}")
        module.Config = Config
        module.VERSION = 1
        module.unsupported = lambda spec: None
        module.search_space = lambda spec: SPACE
        module.estimate = lambda spec, config: lab.estimate(config)
        module.run = run
        monkeypatch.setitem(sys.modules, module.__name__, module)
        registry[op, "fake"] = Entry((module.__name__,))
    registry.update(others)
    tune = tuner.tune

    def stopwatch(*args: Any, **options: Any) -> tuner.Result:
        # A busy machine compiles for longer than the usual budget.
        options["budget_s"] = 1000.0 if options.get("budget_s", 15.0) == 15.0 else options["budget_s"]
        return tune(*args, **{"measure": lab.measure} | options)

    monkeypatch.setattr(autotune_lib, "tune", stopwatch)
    monkeypatch.setattr(tuner, "tune", stopwatch)
    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare, measure=lab.measure))
    return lab


def make_spec(m: int = 5, target: hardware.Chip = CPU) -> MatmulSpec:
    numbers = (((1,), (0,)), ((), ()))
    return MatmulSpec(ArrayType.of(A[:m]), ArrayType.of(B), numbers, A.dtype, target)


def attention_spec(**options: Any) -> AttentionSpec:
    array = lambda length, heads, dim: ArrayType((2, length, heads, dim), jnp.dtype(jnp.float32))
    return AttentionSpec(array(6, 4, 8), array(9, 2, 8), array(9, 2, 16), scale=0.3, target=CPU, **options)


# The tuner.


def test_fastest_configuration_wins_and_is_kept(lab):
    """The model does not rank it among the best. The second round finds it, as a neighbour of the first's winner."""
    lab.microseconds = lambda backend, config: 10 + abs(config.block - 192) + config.depth * -1.0
    assert dispatch.default_config("matmul", "fake", make_spec()) == Config(64, 1)
    result = tuner.tune("matmul", make_spec(), "fake", top=4)
    assert result.winner is not None
    assert (result.winner.backend, result.winner.config) == ("fake", Config(192, 3))
    assert result.winner.seconds == pytest.approx(7e-6)
    first, second = lab.measured
    # One of each kind that the model tells apart; then neighbours of the best, half as many.
    assert first == [f"fake {Config(block, 1)}" for block in BLOCKS]
    assert second == [f"fake {Config(192, depth)}" for depth in (2, 3)]
    choice = dispatch.choose("matmul", make_spec(), "fake")
    assert (choice.config, choice.source) == (Config(192, 3), "tuned")


def test_default_is_measured_whatever_the_model_says(lab):
    dispatch.load("matmul", "fake").designs[0].shortlist = lambda spec: (Config(256, 3),)
    tuner.tune("matmul", make_spec(), "fake", top=2)
    assert lab.measured[0] == [f"fake {Config(256, 3)}", f"fake {Config(64, 1)}"]


def test_backends_compete_where_none_is_named(lab):
    spec = make_spec()
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 9.0 - config.depth
    result = tuner.tune("matmul", spec)
    assert result.winner is not None
    assert result.winner.backend == "xla"
    choice = dispatch.choose("matmul", spec, None)
    assert (choice.backend, choice.source) == ("xla", "tuned")
    assert choice.passed_over[0] == ("fake", "measured slower than xla")
    # The best configuration of each backend is stored, too, for calls that name it.
    assert dispatch.choose("matmul", spec, "fake").source == "tuned"


def test_the_fastest_of_what_is_exported(lab, registry):
    """A backend that `jax.export` refuses is skipped, even if it is the fastest; the next is not reported as slower."""
    others = {key: entry for key, entry in registry.items() if key != ("matmul", "fake")}
    (module,) = registry["matmul", "fake"].designs
    registry.clear()
    registry.update(
        {("matmul", "refused"): Entry((module,), is_exportable=False), ("matmul", "fake"): Entry((module,))}
    )
    registry.update(others)
    seconds = {"refused": 5.0, "fake": 6.0, "xla": 9.0}
    lab.microseconds = lambda backend, config: seconds[backend] - (config.depth / 10 if config else 0)
    spec = make_spec()
    tuner.tune("matmul", spec)
    at_home, exported = dispatch.choose("matmul", spec, None), dispatch.choose("matmul", spec, None, is_exported=True)
    assert (at_home.backend, at_home.source) == ("refused", "tuned")
    assert (exported.backend, exported.config, exported.source) == ("fake", Config(64, 3), "tuned")
    ((name, reason),) = exported.passed_over
    assert (name, reason.partition(":")[0]) == ("refused", "jax.export takes its custom call with disabled_checks only")
    assert dispatch.choose("matmul", spec, "refused", is_exported=True).backend == "refused"
    # A winner that is exported stays one.
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    exported = dispatch.choose("matmul", spec, None, is_exported=True)
    assert exported.backend == "xla"
    assert exported.passed_over[:2] == (("refused", reason), ("fake", "measured slower than xla"))


@pytest.mark.parametrize("is_comparison", [False, True])
@pytest.mark.parametrize("drops_lse", [False, True])
def test_attention_is_timed_without_a_logsumexp_that_is_not_used(drops_lse, is_comparison, lab, monkeypatch):
    """XLA leaves out the work for it, and computes the output in fewer kernels."""
    numbers = []

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        numbers.extend(len(call.function(*call.operands[0])) for call in calls.values())
        return lab.measure(calls, regime=options["regime"], budget_s=options["budget_s"])

    spec = attention_spec(drops_lse=drops_lse)
    if is_comparison:
        tuner.compare("attention_forward", spec, ["fake", "xla"], measure=measure)
        assert dispatch.compared("attention_forward", spec, ["fake", "xla"]) is not None
    else:
        lab.wrong = {Config(64, 2)}
        result = tuner.tune("attention_forward", spec, measure=measure)
        assert [str(x.config) for x in result.candidates if "wrong" in (x.reason or "")] == [str(Config(64, 2))]
    assert {*numbers} == {2 - drops_lse}


def test_candidates_are_traced_as_in_programs(lab, monkeypatch):
    """On any thread, candidates are traced without `jax_enable_x64`, which would change the kernels."""
    module, seen = dispatch.load("matmul", "fake").designs[0], []
    run = module.run
    monkeypatch.setattr(module, "run", lambda *args: (seen.append(jax.config.jax_enable_x64), run(*args))[1])
    jax.config.update("jax_enable_x64", True)
    try:
        result = tuner.tune("matmul", make_spec(), "fake", top=2)
    finally:
        jax.config.update("jax_enable_x64", False)
    assert result.winner is not None
    assert set(seen) == {False}


def test_candidates_that_fail_are_dropped_with_their_reason(lab):
    lab.microseconds = lambda backend, config: config.block  # The smaller the faster.
    lab.broken, lab.wrong = {Config(64, 1)}, {Config(128, 1)}
    result = tuner.tune("matmul", make_spec(), "fake", top=4)
    assert result.winner is not None
    assert result.winner.config == Config(192, 1)
    reasons = {c.config: c.reason for c in result.candidates if c.seconds is None}
    assert reasons[Config(64, 1)] == f"dropped: matmul[fake]: {Config(64, 1)} does not compile"
    assert (
        reasons[Config(128, 1)]
        == "dropped: result 0 is wrong: errors of 0.5 of its size on average, 0.5 of its maximum"
    )
    assert all(str(Config(128, 1)) not in name for names in lab.measured for name in names)


@pytest.mark.parametrize("where", ["one element", "NaN"])
def test_error_in_one_place_is_seen(where, lab, monkeypatch):
    """One wrong result of 90,000 hardly changes the average error."""
    module = dispatch.load("matmul", "fake").designs[0]
    right = module.run

    def run(spec: Any, config: Any, *xs: jax.Array) -> jax.Array:
        out = right(spec, config, *xs)
        return out if config == Config(64, 1) else out.at[17, 23].set(jnp.nan if where == "NaN" else 100.0)

    module.run = run
    square = ArrayType((300, 300), jnp.dtype(jnp.float32))
    spec = dataclasses.replace(make_spec(), lhs=square, rhs=square)
    result = tuner.tune("matmul", spec, "fake", top=3)
    assert [c.config for c in result.candidates if c.seconds is not None] == [Config(64, 1)]
    assert all("is wrong" in (c.reason or "") for c in result.candidates[1:])


def test_nothing_is_kept_where_nothing_is_right(lab, tmp_path):
    lab.wrong = set(SPACE)
    result = tuner.tune("matmul", make_spec(), "fake", top=2)
    assert result.winner is None
    assert "no candidate is correct; the default is used" in str(result)
    assert list(tmp_path.iterdir()) == []
    assert dispatch.choose("matmul", make_spec(), "fake").source == "default"


def test_measurement_that_fails_is_a_reason(lab):
    def measure(calls: Any, **options: Any) -> Any:
        raise MeasureError("measure: 3 kernels were recorded for 2 launches, not a multiple.")

    result = tuner.tune("matmul", make_spec(), "fake", top=1, measure=measure)
    assert result.winner is None
    assert result.candidates[0].reason == (
        "not measured: measure: 3 kernels were recorded for 2 launches, not a multiple."
    )


def test_budget_ends_compiling_but_for_the_default(lab, monkeypatch):
    """A clock that jumps: the time is over as soon as the first candidate has begun."""
    now = iter([0.0, *[100.0] * 1000])
    monkeypatch.setattr(tuner.time, "monotonic", lambda: next(now))
    result = tuner.tune("matmul", make_spec(), "fake", top=3, budget_s=20)
    assert result.winner is not None
    assert result.winner.config == Config(64, 1)
    assert {c.reason for c in result.candidates[1:]} == {"dropped: out of time"}


def test_same_cache_same_choice(lab, monkeypatch):
    """Later measurements do not change the winner, until its backend is tuned by name."""
    lab.microseconds = lambda backend, config: -config.block + 1000.0
    tuner.tune("matmul", make_spec(), "fake")
    first = dispatch.choose("matmul", make_spec(), "fake").config
    monkeypatch.setattr(winners, "_memo", {})
    lab.microseconds = lambda backend, config: float(config.block)
    assert dispatch.choose("matmul", make_spec(), "fake").config == first
    assert jk.autotune(lambda a, b: jk.matmul(a, b, backend="fake"), A, B).num_kept == 1


def test_real_stopwatch_measures_on_this_machine(lab):
    """End to end with the bench's own method, and operations that really take longer."""
    module = dispatch.load("matmul", "fake").designs[0]
    right = module.run

    def run(spec: Any, config: Config, *xs: jax.Array) -> jax.Array:
        out = right(spec, config, *xs)
        # The larger the block, the more work.
        work = jax.lax.fori_loop(0, config.block * 20, lambda i, x: jnp.sin(x + 1), jnp.ones((1000,)))
        return out + 0 * jnp.sum(work)

    module.run = run
    module.search_space = lambda spec: (Config(64), Config(256))
    module.estimate = lambda spec, config: 1.0 / config.block
    assert dispatch.default_config("matmul", "fake", make_spec()) == Config(256)
    result = tuner.tune("matmul", make_spec(), "fake", measure=tuner.bench_measure)
    assert result.winner is not None
    assert result.winner.config == Config(64)


def test_refusals_of_the_tuner(lab):
    h200 = hardware.lookup("NVIDIA H200")
    message = "tune: needs a device of this process to measure on; got NVIDIA H200 (compute capability 9.0)."
    with raises_exactly(NotImplementedError, message):
        tuner.tune("matmul", make_spec(target=h200))
    with raises_exactly(ValueError, "tune: top must be a positive int; got top=0. It counts configurations."):
        tuner.tune("matmul", make_spec(), top=0, budget_s=20.0)
    message = (
        "attention_tangent[fake]: no such kernel in this backend. "
        'Use backend=None (chooses by itself) or backend="xla".'
    )
    with raises_exactly(NotImplementedError, message):
        tuner.tune("attention_tangent", attention_spec(), "fake")


def test_result_is_a_table(lab):
    lab.microseconds = lambda backend, config: {64: 3.0, 128: 1.0}[config.block]
    lab.broken = {Config(192, 1)}
    result = tuner.tune("matmul", make_spec(), "fake", top=3)
    lines = str(result).splitlines()
    assert re.fullmatch(
        r"matmul  f32\[5,7\] \. f32\[7,3\] -> f32 \(m=5 n=3 k=7 mk,kn\)  \(tuned in \d+\.\d s\)", lines[0]
    )
    assert lines[1] == f"  -> fake  {Config(128, 1)}  1.0 us, estimated 128.0"
    assert lines[-1] == f"     fake  {Config(192, 1)}  dropped: matmul[fake]: {Config(192, 1)} does not compile"


# Operands made from the spec.


BIAS, MASK = (ArrayType((1, 4, 6, 9), jnp.dtype(dtype)) for dtype in (jnp.float32, jnp.bool_))
ALL = dict(causal=True, bias=BIAS, mask=MASK, query_lengths=True, key_lengths=True, segments=True, query_offset=True)


def reference(op: str, spec: AttentionSpec, made: Any) -> list[np.ndarray]:
    module = dispatch.load(op, "xla").designs[0]
    return list(map(np.asarray, jax.jit(lambda *xs: module.run(spec, module.Config(), *xs))(*made)))


def test_lengths_and_segments_are_sensible():
    spec = attention_spec(query_lengths=True, key_lengths=True, segments=True)
    *_, query_lengths, key_lengths, query_segments, key_segments = attention_tuning.operands(
        "attention_forward", spec, jax.devices("cpu")[0]
    )
    assert all(3 <= length <= 6 for length in query_lengths.tolist())
    assert all(4 <= length <= 9 for length in key_lengths.tolist())
    assert query_segments.shape == (2, 6)
    assert key_segments[1].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("op", ["attention_forward", "attention_backward"])
def test_attention_operands_and_their_first_heads(op):
    """With every optional operand. The first heads give the same numbers as that part of the whole."""
    spec = attention_spec(**ALL)
    made = attention_tuning.operands(op, spec, jax.devices("cpu")[0])
    whole = reference(op, spec, made)
    assert all(np.isfinite(out).all() for out in whole)
    small, cut_operands, cut_results = attention_tuning.part_to_check(op, spec)
    assert (small.q.shape, small.k.shape, small.group_size) == ((1, 6, 2, 8), (1, 9, 1, 8), 2)
    part = cut_operands([np.asarray(x) for x in made])
    for x, y in zip(reference(op, small, part), cut_results(whole), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_decoding_is_tuned_with_a_full_cache():
    """An offset of zero hides nearly all keys from the queries."""
    made = attention_tuning.operands("attention_forward", attention_spec(**ALL), jax.devices("cpu")[0])
    assert [int(x) for x in made if x.shape == ()] == [9 - 6]


def test_operands_are_the_same_every_time():
    cpu = jax.devices("cpu")[0]
    first, second = (tuner._operands("matmul", make_spec(), cpu) for _ in range(2))
    assert [x.shape for x in first] == [(5, 7), (7, 3)]
    for x, y in zip(first, second, strict=True):
        np.testing.assert_array_equal(x, y)


def test_operands_are_random_numbers():
    """Beyond the pool's length, too. No array has the rows of another one, or its own rows again."""
    cpu, shape = jax.devices("cpu")[0], (3000, 512)
    types = [ArrayType(shape, jnp.dtype(dtype)) for dtype in ("float32", "bfloat16", "int32", "bool")]
    x, y, integers, booleans = (np.asarray(a, np.float32) for a in cases.random_on_device(types, cpu))
    assert [abs(a.mean()) < 0.01 and abs(a.std() - 1) < 0.01 for a in (x, y)] == [True, True]
    assert (set(np.unique(integers)), set(np.unique(booleans))) == ({*range(8)}, {0, 1})
    assert abs(booleans.mean() - 7 / 8) < 0.01
    rows = np.concatenate([x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)])
    assert len(np.unique(rows.astype(np.float32), axis=0)) == len(rows)
    (other,) = cases.random_on_device(types[:1], cpu, seed=1)
    assert not np.any(np.all(np.asarray(other)[:100] == x[:100], axis=1))


def test_attention_is_checked_and_tuned(lab):
    lab.microseconds = lambda backend, config: 500.0 - config.block
    lab.wrong = {Config(128, 1)}
    result = tuner.tune("attention_backward", attention_spec(causal=True), "fake", top=2)
    assert [c.config for c in result.candidates if c.reason is not None] == [Config(128, 1)]
    assert result.winner is not None
    assert dispatch.choose("attention_backward", attention_spec(causal=True), "fake").config == result.winner.config


# autotune.


def test_autotune_tunes_every_operation_of_a_program(lab):
    """Under jit, with gradients: each different kernel once, and none the second time."""

    @jax.jit
    def step(a: jax.Array, b: jax.Array, q: jax.Array) -> Any:
        loss = lambda a, b, q: jnp.sum(jk.matmul(a, b) + jk.matmul(a, b)) + jnp.sum(jk.dot_product_attention(q, q, q))
        return jax.value_and_grad(loss, (0, 2))(a, b, q)

    lab.microseconds = lambda backend, config: 100.0 if backend == "xla" else 50.0 - config.depth
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (A, B, Q)]
    report = jk.autotune(step, *abstract, top=2, budget_s=100)
    ops = [result.op for result in report.results]
    assert sorted(set(ops)) == ["attention_backward", "attention_forward", "matmul"]
    assert len({(result.op, result.spec) for result in report.results}) == len(ops) == 4
    choices = jk.explain(step, *abstract).choices
    assert {(c.backend, c.source) for c in choices} == {("fake", "tuned")}
    for result in report.results:
        assert f"  -> {result.winner}" in str(report)
        assert result.winner.config.depth == 2
    again = jk.autotune(step, *abstract)
    assert (again.results, again.num_kept) == ((), len(ops))
    assert str(again) == f"{len(ops)} already tuned, or with only one configuration"


def test_autotune_keeps_to_the_backend_that_is_named(lab):
    lab.microseconds = lambda backend, config: 1.0 if backend == "xla" else 2.0
    report = jk.autotune(lambda a, b: jk.matmul(a, b, backend="fake"), A, B)
    assert {c.backend for c in report.results[0].candidates} == {"fake"}
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"


def test_autotune_has_nothing_to_do(lab):
    assert str(jk.autotune(jnp.sin, A)) == "no jaxkernels operation in this program"
    f = lambda a, b: jk.matmul(a, b, backend="xla")
    assert str(jk.autotune(f, A, B)) == "1 already tuned, or with only one configuration"
    assert lab.measured == []
    with raises_exactly(ValueError, "autotune: f must be a function; got None. Pass its arguments after it."):
        jk.autotune(None, A, B)


@pytest.mark.parametrize("label", ["autotune", "tuning", "tune"])
@pytest.mark.parametrize("top", ["8", None, 0, -1, 1.5, True, float("nan")])
def test_top_must_be_a_positive_int(lab, label, top):
    with raises_exactly(ValueError, f"{label}: top must be a positive int; got top={top!r}. It counts configurations."):
        _with_settings(label, top=top)


@pytest.mark.parametrize("label", ["autotune", "tuning", "tune"])
@pytest.mark.parametrize("budget_s", ["8", None, 0, -1.5, True, float("nan"), -float("inf")])
def test_budget_must_be_a_positive_number(lab, label, budget_s):
    message = (
        f"{label}: budget_s must be a positive number; got budget_s={budget_s!r}. It is the seconds for one operation."
    )
    with raises_exactly(ValueError, message):
        _with_settings(label, budget_s=budget_s)


def _with_settings(label: str, **settings: Any) -> None:
    if label == "autotune":
        jk.autotune(lambda a, b: jk.matmul(a, b, backend="fake"), A, B, **settings)
    elif label == "tune":
        tuner.tune("matmul", make_spec(), **settings)
    else:
        with jk.tuning(**settings):
            pass


def test_autotune_goes_on_where_one_operation_cannot_be_tuned(lab, monkeypatch):
    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\ndetails")

    monkeypatch.setattr(attention_tuning, "operands", fail)
    f = lambda a, b, q: (jk.dot_product_attention(q, q, q), jk.matmul(a, b))
    report = jk.autotune(f, A, B, Q, top=1)
    assert [result.op for result in report.results] == ["matmul"]
    ((what, reason),) = report.failures
    assert what == "attention_forward  q f32[2,5,4,8] k f32[2,5,4,8] v f32[2,5,4,8] scale=0.3536 drops_lse"
    assert reason == f"tune: cannot make operands and reference for {what}: RESOURCE_EXHAUSTED: out of memory"
    assert f"{what}\n  not tuned: {reason}" in str(report)


# The context manager.


def used(lab: Lab, f: Callable[[], Any]) -> list[Any]:
    """Configurations of the kernels that are lowered while f runs, the last one for each measurement aside."""
    with dispatch.recording() as choices:
        f()
    return [(choice.config, choice.source) for choice in choices]


def test_tuning_measures_what_is_lowered_inside(lab):
    lab.microseconds = lambda backend, config: 100.0 if backend == "xla" else 10.0 - config.depth
    f = jax.jit(jk.matmul)
    assert used(lab, lambda: f(A, B)) == [(Config(64, 1), "default")]
    assert lab.measured == []
    with jk.tuning():
        assert used(lab, lambda: f(A, B)) == [(Config(64, 3), "tuned")]
        assert len(lab.measured) == 2
        assert used(lab, lambda: f(A, B)) == []
    # Equal settings, the same program; and outside it is the one it was, until JAX forgets it.
    with jk.tuning():
        assert used(lab, lambda: f(A, B)) == []
    assert used(lab, lambda: f(A, B)) == []
    jax.clear_caches()
    assert used(lab, lambda: f(A, B)) == [(Config(64, 3), "tuned")]
    assert len(lab.measured) == 2


def test_tuning_off_ignores_the_winners(lab):
    dispatch.store_winner("matmul", "fake", make_spec(), Config(256, 2), 1e-6)
    f = jax.jit(lambda a, b: jk.matmul(a, b, backend="fake"))
    assert used(lab, lambda: f(A, B)) == [(Config(256, 2), "tuned")]
    with jk.tuning(False):
        assert used(lab, lambda: f(A, B)) == [(Config(64, 1), "default")]
        with jk.tuning():
            assert used(lab, lambda: f(A, B)) == [(Config(256, 2), "tuned")]
    assert lab.measured == []


def test_tuning_reaches_eager_calls_and_lowering_ahead_of_time(lab):
    lab.microseconds = lambda backend, config: 10.0 - config.depth
    with jk.tuning():
        np.testing.assert_array_equal(jk.matmul(A, B, backend="fake"), np.full((5, 3), 7))
        eager = len(lab.measured)
        assert eager == 2
        jax.jit(jax.grad(lambda a: jk.matmul(a, B, backend="fake").sum())).lower(A).compile()
        assert len(lab.measured) > eager


def test_tuning_leaves_alone_what_is_lowered_for_another_machine(lab):
    with jk.tuning():
        (choice,) = jk.explain(jk.matmul, A, B, platform="cuda").choices
    assert (choice.backend, choice.source) == ("fake", "default")
    assert lab.measured == []


def test_tuning_takes_the_default_where_it_cannot_measure(lab, monkeypatch):
    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(tuner, "_operands", fail)
    with jk.tuning(), pytest.warns(UserWarning, match=r"out of memory\. The default configuration stays\."):
        assert jk.matmul(A, B)[0, 0] == 7


def test_threads_that_lower_at_once_measure_once(lab):
    lab.microseconds = lambda backend, config: 10.0 - config.depth
    barrier = threading.Barrier(3)
    results: list[Any] = []

    def work() -> None:
        with jk.tuning():
            barrier.wait()
            results.append(used(lab, lambda: jax.jit(lambda a, b: jk.matmul(a, b, backend="fake"))(A, B)))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[(Config(64, 3), "tuned")]] * 3
    assert len(lab.measured) == 2


def test_tuning_measures_the_shards_of_an_auto_mesh(lab, meshes):
    """XLA's partitioner asks for the kernel of one shard while it compiles."""
    lab.microseconds = lambda backend, config: 10.0 - config.depth
    shard = jax.NamedSharding(meshes.auto, jax.P("x", None))
    whole = jax.device_put(np.ones((16, 7), np.float32), shard)
    with jk.tuning():
        out = jax.jit(lambda a, b: jk.matmul(a, b, backend="fake"))(whole, B)
    np.testing.assert_array_equal(out, np.full((16, 3), 7))
    entries = winners.entries(CPU)
    assert [entry["key"]["spec"]["lhs"] for entry in entries] == ["f32[4,7]"]


def test_tuning_under_shard_map_and_vmap(lab, meshes):
    lab.microseconds = lambda backend, config: 10.0 - config.depth
    f = jax.shard_map(
        jax.vmap(lambda a: jk.matmul(a, B, backend="fake")),
        mesh=meshes.auto,
        in_specs=jax.P("x"),
        out_specs=jax.P("x"),
    )
    with jk.tuning():
        np.testing.assert_array_equal(jax.jit(f)(np.ones((4, 5, 7), np.float32)), np.full((4, 5, 3), 7))
    assert len(winners.entries(CPU)) == 1


def test_refusals_of_the_context_manager(monkeypatch):
    with (
        raises_exactly(ValueError, "tuning: enabled must be True or False; got 4. Pass top and budget_s by keyword."),
        jk.tuning(4),
    ):
        pass
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    message = (
        "tuning: must run in a single process, because each process would choose its own kernels; got 4 processes. "
        "Tune in one process first, with a JAXKERNELS_CACHE_DIR that all share, and run the program without jk.tuning."
    )
    with raises_exactly(NotImplementedError, message), jk.tuning():
        pass
    with jk.tuning(False):
        pass


def test_results_are_the_same_bits_with_and_without(lab):
    """Same configuration, same bits, wherever the configuration comes from."""
    x = np.random.default_rng(0).standard_normal((5, 7), np.float32)
    with jk.tuning(False):
        default = jk.matmul(x, B)
    tuned = [jax.jit(lambda a: jk.matmul(a, B))(x) for _ in range(2)]
    np.testing.assert_array_equal(default, tuned[0])
    np.testing.assert_array_equal(tuned[0], tuned[1])


# Calls that name no backend.


@pytest.fixture
def estimates(lab, monkeypatch) -> dict[str, float]:
    """Estimates of the two backends that run here: close."""
    monkeypatch.setenv("JAXKERNELS_AUTOTUNE", "1")
    estimates = dict(fake=1.0e-5, xla=1.3e-5)
    of = lambda op, spec, names: {name: estimates[name] for name in names if name in estimates}
    monkeypatch.setattr(dispatch, "_estimates", of)
    monkeypatch.setattr(autotune_lib, "_failed", set())
    return estimates


@pytest.mark.parametrize("fastest", ["fake", "xla"])
def test_backends_with_close_estimates_are_measured_once(lab, estimates, fastest):
    lab.microseconds = lambda backend, config: 5.0 if backend == fastest else 6.0
    before = jk.explain(jk.matmul, A, B)
    assert [choice.backend for choice in before.choices] == ["fake"]
    assert lab.measured == []  # It runs nothing.
    with dispatch.recording() as choices:
        for f in (jax.jit(jk.matmul), jax.jit(lambda a, b: jk.matmul(a, b))):
            f(A, B)
    assert lab.measured == [["fake Config(block=64, depth=1)", "xla Config()"]]
    assert [(choice.backend, choice.source) for choice in choices] == [(fastest, "compared")] * 2
    assert winners.entries(CPU) == []  # It is no result of tuning.
    jax.clear_caches()
    after = jk.explain(jk.matmul, A, B)
    assert [choice.backend for choice in after.choices] == [fastest]
    assert ("not fake: measured slower than xla" in str(after)) == (fastest == "xla")
    assert "not xla" not in str(after)


def test_another_process_takes_what_was_measured(lab, estimates, monkeypatch):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    monkeypatch.setattr(winners, "_memo", {})
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    assert len(lab.measured) == 1


def test_tune_goes_on_after_a_comparison(lab, estimates):
    """A comparison measures one configuration of each backend."""
    lab.microseconds = lambda backend, config: 5.5 if backend == "xla" else 6.0 - config.depth
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert not dispatch.is_tuned("matmul", make_spec(), None)
    jk.autotune(jk.matmul, A, B)
    assert dispatch.choose("matmul", make_spec(), None).config == Config(64, 3)


def _named() -> Any:
    return dispatch.choose("matmul", make_spec(), "fake")


def _exported() -> Any:
    return dispatch.choose("matmul", make_spec(), None, is_exported=True)


def _partitioned() -> Any:
    return dispatch.choose("matmul", make_spec(), None, is_partitioned=True)


def _without_winners() -> Any:
    with jk.tuning(False):
        return dispatch.choose("matmul", make_spec(), None)


def _not_comparing() -> Any:
    with jk.comparing(False):
        return dispatch.choose("matmul", make_spec(), None)


def _in_a_loop() -> Any:
    """Alone, XLA would not copy."""
    return dispatch.choose("matmul", dataclasses.replace(make_spec(), copied=("lhs",)), None)


def _elsewhere() -> Any:
    chip = hardware.lookup("NVIDIA H200")
    return dispatch.choose("matmul", dataclasses.replace(make_spec(), target=chip), None)


@pytest.mark.parametrize(
    "choose", [_named, _exported, _partitioned, _without_winners, _not_comparing, _in_a_loop, _elsewhere]
)
def test_what_is_not_measured(choose, lab, estimates):
    assert choose().backend == "fake"
    assert lab.measured == []
    assert dispatch.choose("matmul", make_spec(m=4), None).backend == "fake"
    assert len(lab.measured) == 1


def test_backends_far_apart_are_not_measured(lab, estimates):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    estimates["xla"] = 1.71e-5
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    estimates["xla"] = 1.69e-5
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    assert len(lab.measured) == 1


@pytest.mark.parametrize(
    ("far", "fake", "xla", "taken"),
    [
        (111.0, 113.0, 110.0, "far"),
        (113.0, 111.0, 110.0, "fake"),
        (113.0, 113.0, 110.0, "xla"),
        (98.0, 97.0, 96.0, "xla"),  # Short.
        (98.0, 96.0, 96.06, "fake"),
        (98.0, 96.0, 96.04, "xla"),
        (96.0, 96.1, 98.0, "far"),
    ],
)
def test_the_first_of_about_equal_long_kernels_is_taken_and_xla_of_short_ones(
    far, fake, xla, taken, lab, estimates, registry, tmp_path
):
    others = dict(registry)
    registry.clear()
    registry["matmul", "far"] = others["matmul", "fake"]
    registry.update(others)
    estimates["far"] = 1e-5
    times = dict(far=far, fake=fake, xla=xla)
    lab.microseconds = lambda backend, config: times[backend]
    assert dispatch.choose("matmul", make_spec(), None).backend == taken
    (stored,) = (json.loads(path.read_text()) for path in tmp_path.glob("tuning/*/matmul-compared/*.json"))
    assert stored["seconds"] == pytest.approx(times[taken] * 1e-6)


@pytest.mark.parametrize(
    ("cuda", "cublaslt", "xla", "taken"),
    [
        (12.0, 10.19, 10.0, "cublaslt"),
        (12.0, 10.21, 10.0, "xla"),
        (10.0, 10.19, 10.04, "cublaslt"),
        (10.0, 10.1, 10.06, "cuda"),
        (12.0, 10.0, 10.1, "cublaslt"),
        (6.0, 5.01, 5.0, "cublaslt"),
        (6.0, 4.99, 4.98, "xla"),
    ],
)
def test_cublaslt_is_taken_where_xla_is_as_fast(cuda, cublaslt, xla, taken):
    """XLA may take another kernel in the next compilation."""
    seconds = {name: time * 1e-6 for name, time in dict(cuda=cuda, cublaslt=cublaslt, xla=xla).items()}
    assert tuner._first_of_equal("matmul", make_spec(), list(seconds), seconds) == taken


def gradient_spec(m: int, n: int, k: int, cotangent: str | None = "lhs", chip: hardware.Chip = H200) -> MatmulSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    numbers = (((1,), (0,)), ((), ()))
    return MatmulSpec(array(m, k), array(k, n), numbers, jnp.dtype(jnp.bfloat16), chip, cotangent=cotangent)


@pytest.mark.parametrize(
    ("pallas", "cublaslt", "xla", "are_pairs", "taken"),
    [
        (95.0, 117.0, 200.0, True, "cublaslt"),
        (95.0, 121.0, 200.0, True, "pallas"),
        (95.0, 117.0, 200.0, False, "pallas"),
        (150.0, 170.0, 200.0, True, "cublaslt"),
        (170.0, 160.0, 150.0, True, "xla"),
    ],
)
def test_gradients_take_cublaslt_if_they_then_share_the_copy_of_the_cotangent(pallas, cublaslt, xla, are_pairs, taken):
    """Half of the copy takes 25 us here."""
    spec = gradient_spec(19525, 265, 2605)
    half = matmul_tuning.shared_seconds("matmul", spec) / 2
    assert 22e-6 < half < 26e-6
    seconds = {name: time * 1e-6 for name, time in dict(pallas=pallas, cublaslt=cublaslt, xla=xla).items()}
    assert tuner._first_of_equal("matmul", spec, list(seconds), seconds, are_pairs=are_pairs) == taken


def test_an_unpreferred_backend_wins_no_tie(lab, estimates, monkeypatch):
    monkeypatch.setattr(
        sys.modules["backend_fake_matmul"], "unpreferred", lambda spec: "cuBLAS is faster", raising=False
    )
    estimates["xla"] = 1.0e-5
    lab.microseconds = lambda backend, config: 111.0 if backend == "xla" else 110.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"


def test_kernels_that_take_long_are_not_measured(lab, estimates):
    estimates |= dict(fake=0.11, xla=0.12)
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert lab.measured == []
    estimates |= dict(fake=0.09, xla=0.1)
    dispatch.choose("matmul", make_spec(), None)
    assert len(lab.measured) == 1


@pytest.mark.parametrize("error", [RuntimeError("cannot schedule new futures after interpreter shutdown"), KeyError(1)])
def test_a_comparison_fails_no_program(error, lab, estimates, monkeypatch):
    def fail(work: Any) -> Any:
        raise error

    monkeypatch.setattr(autotune_lib, "_in_a_thread", fail)
    with pytest.warns(UserWarning, match="compare: cannot measure matmul .*Estimates choose the backend"):
        assert dispatch.choose("matmul", make_spec(), None).backend == "fake"


@pytest.mark.parametrize("option", ["jax_numpy_rank_promotion", "jax_numpy_dtype_promotion", "jax_disable_jit"])
def test_comparisons_do_not_depend_on_options(option, lab, estimates, monkeypatch):
    """Kernels may promote, and are compiled."""
    module = sys.modules["backend_fake_matmul"]
    run = module.run
    promoting = lambda spec, config, *xs: run(spec, config, *xs) + jnp.zeros(1, jnp.float16) + jnp.zeros(3)
    monkeypatch.setattr(module, "run", promoting)
    lab.microseconds = lambda backend, config: 6.0 if backend == "xla" else 5.0
    before = getattr(jax.config, option)
    jax.config.update(
        option, {"jax_numpy_rank_promotion": "raise", "jax_numpy_dtype_promotion": "strict"}.get(option, True)
    )
    try:
        choice = dispatch.choose("matmul", make_spec(), None)
    finally:
        jax.config.update(option, before)
    assert (choice.backend, choice.source) == ("fake", "compared")
    assert [name.split()[0] for name in lab.measured[0]] == ["fake", "xla"]


def test_a_failed_candidate_holds_no_operands(lab, estimates, monkeypatch):
    kept: list[weakref.ref[Any]] = []
    operands = tuner._operands

    def draw(*args: Any) -> Any:
        arrays = operands(*args)
        kept.extend(map(weakref.ref, arrays))
        return arrays

    monkeypatch.setattr(tuner, "_operands", draw)
    lab.broken = {Config()}
    gc.disable()
    try:
        dispatch.choose("matmul", make_spec(), None)
        assert [ref() for ref in kept] == [None] * 2
    finally:
        gc.enable()


def test_what_was_measured_can_be_ignored(lab, estimates):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    f = jax.jit(jk.matmul)
    f(A, B)
    with dispatch.recording() as choices, jk.comparing(False):
        f(A, B)
    assert [choice.backend for choice in choices] == ["fake"]
    with jk.comparing(False):
        assert jk.explain(jk.matmul, A, B).choices[0].backend == "fake"
    assert jk.explain(jk.matmul, A, B).choices[0].backend == "xla"
    with raises_exactly(ValueError, "comparing: enabled must be True or False; got 1."), jk.comparing(1):
        pass


def test_nothing_is_measured_in_several_processes(lab, estimates, monkeypatch):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    # Each process may have another cache.
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert dispatch.choose("matmul", make_spec(m=4), None).backend == "fake"
    assert len(lab.measured) == 1


def test_comparisons_can_be_switched_off(lab, estimates, monkeypatch):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    monkeypatch.setenv("JAXKERNELS_AUTOTUNE", "0")
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert lab.measured == []
    with jk.comparing():
        assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    # Programs outside the block take the fastest backend, too.
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    assert dispatch.choose("matmul", make_spec(m=4), None).backend == "fake"
    assert len(lab.measured) == 1
    monkeypatch.setenv("JAXKERNELS_AUTOTUNE", "")
    assert dispatch.choose("matmul", make_spec(m=4), None).backend == "xla"
    monkeypatch.delenv("JAXKERNELS_AUTOTUNE")
    assert dispatch.choose("matmul", make_spec(m=3), None).backend == "xla"
    assert len(lab.measured) == 3
    monkeypatch.setenv("JAXKERNELS_AUTOTUNE", "off")
    message = "JAXKERNELS_AUTOTUNE: must be 1 (measure backends whose estimates are close) or 0 (do not); got 'off'."
    with raises_exactly(ValueError, message):
        dispatch.choose("matmul", make_spec(), None)


@pytest.mark.parametrize("key", ["backend", "versions"])
def test_a_damaged_comparison_is_made_again(key, lab, estimates, monkeypatch, tmp_path):
    dispatch.choose("matmul", make_spec(), None)
    (path,) = tmp_path.glob("tuning/*/matmul-compared/*.json")
    entry = json.loads(path.read_text())
    entry["winner"][key] = "new"
    path.write_text(json.dumps(entry))
    monkeypatch.setattr(winners, "_memo", {})
    with pytest.warns(UserWarning, match="ignored"):
        assert dispatch.choose("matmul", make_spec(), None).source == "compared"
    assert len(lab.measured) == 2
    assert json.loads(path.read_text())["winner"]["backend"] == "fake"


def test_a_comparison_does_not_count_for_other_versions(lab, estimates):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    sys.modules["backend_fake_matmul"].VERSION += 1
    lab.microseconds = lambda backend, config: 5.0 if backend == "fake" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert len(lab.measured) == 2


def test_a_backend_that_fails_is_not_chosen(lab, estimates):
    lab.broken = {Config()}
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"


def test_a_backend_without_memory_does_not_lose(lab, estimates, monkeypatch):
    def fail(spec: Any, config: Any, *xs: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "run", fail)
    with pytest.warns(UserWarning, match="fake dropped: RESOURCE_EXHAUSTED: out of memory. Estimates choose"):
        assert dispatch.choose("matmul", make_spec(), None).source == "default"
    assert dispatch.compared("matmul", make_spec(), ["fake", "xla"]) is None


def test_the_configuration_that_a_call_gets_is_measured(lab, estimates):
    lab.microseconds = lambda backend, config: dict(xla=5.0).get(backend, 6.0 if config == Config() else 1.0)
    dispatch.store_winner("matmul", "fake", make_spec(), Config(192, 2), 1e-6)
    choice = dispatch.choose("matmul", make_spec(), None)
    assert (choice.backend, choice.config, choice.source) == ("fake", Config(192, 2), "tuned")
    assert lab.measured == [["fake Config(block=192, depth=2)", "xla Config()"]]


def lab_seconds(lab: Lab, name: str) -> float:
    backend, text = name.split(" ", 1)
    return lab.microseconds(backend, next((c for c in SPACE if str(c) == text), None)) * 1e-6


def _names(*configs: Config) -> list[str]:
    return [f"fake {config}" for config in configs]


#: The default, and the next two by the estimates.
_THREE = (Config(64, 1), Config(64, 2), Config(64, 3))


def test_several_configurations_of_a_backend_are_compared(lab, estimates, monkeypatch):
    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "NUM_COMPARED", 3, raising=False)
    lab.microseconds = lambda backend, config: dict(xla=5.0).get(backend) or {2: 4.0}.get(config.depth, 6.0)
    choice = dispatch.choose("matmul", make_spec(), None)
    assert lab.measured == [[*_names(*_THREE), "xla Config()"]]
    assert (choice.backend, choice.config, choice.source) == ("fake", Config(64, 2), "compared")
    assert dispatch.choose("matmul", make_spec(), "fake").config == Config()  # It was not tuned.
    assert _not_comparing().config == Config()
    monkeypatch.setattr(winners, "_memo", {})
    assert dispatch.choose("matmul", make_spec(), None).config == Config(64, 2)  # From the disk.
    assert len(lab.measured) == 1


def test_of_many_configurations_those_near_the_fastest_are_measured_longer(lab, estimates, monkeypatch):
    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "NUM_COMPARED", 6, raising=False)
    looks, measured = [], lab.measure

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        looks.append((sorted(calls), options.get("rounds"), {call.seconds for call in calls.values()}))
        return measured(calls, **options)

    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare.func, measure=measure))
    lab.microseconds = lambda backend, config: dict(xla=5.0).get(backend) or config.depth * 2.0 + config.block / 64
    choice = dispatch.choose("matmul", make_spec(), None)
    assert (choice.backend, choice.config) == ("fake", Config(64, 1))
    (everything, one, unknown), (near, rounds, seconds) = looks
    assert (len(everything), one, unknown) == (7, 1, {None})
    assert rounds is None
    assert near == sorted(name for name in everything if lab_seconds(lab, name) <= 1.3 * 3e-6)
    assert len(near) < 7
    assert seconds == {lab_seconds(lab, name) for name in near}


def test_configurations_of_the_only_backend_are_compared(lab, estimates, monkeypatch):
    del estimates["xla"]
    assert dispatch.choose("matmul", make_spec(), None).source == "default"
    assert not lab.measured  # There is nothing to compare.
    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "NUM_COMPARED", 3, raising=False)
    lab.microseconds = lambda backend, config: float(config.depth == 1) + 4.0
    before = _elsewhere()
    assert (before.close, before.config) == (("fake",), Config())
    assert "close, but not compared by measurements: fake" in str(before)
    assert dispatch.choose("matmul", make_spec(), None).config == Config(64, 2)
    assert lab.measured == [_names(*_THREE)]


@pytest.mark.parametrize(
    ("shortlist", "compared"),
    [
        (lambda spec: [Config(64, 2), Config(192, 1)], (Config(64, 2), Config(192, 1))),
        (lambda spec: [Config(64, 2)], (Config(64, 2),)),
        (lambda spec: [Config(63, 2)], (Config(64, 1),)),  # It is not in the search space.
        (None, _THREE),
    ],
)
def test_a_long_kernel_is_compared_in_configurations_of_its_shortlist(shortlist, compared, lab, estimates, monkeypatch):
    design = sys.modules["backend_fake_matmul"]
    monkeypatch.setattr(design, "NUM_COMPARED", 3, raising=False)
    if shortlist is not None:
        monkeypatch.setattr(design, "shortlist", shortlist, raising=False)
    lab.estimate = lambda config: 2e-4 + config.depth * 1e-6 + config.block * 1e-7
    dispatch.choose("matmul", make_spec(), None)
    assert lab.measured == [[*_names(*compared), "xla Config()"]]


def test_a_tuned_configuration_has_no_contenders(lab, estimates, monkeypatch):
    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "NUM_COMPARED", 3, raising=False)
    dispatch.store_winner("matmul", "fake", make_spec(), Config(192, 2), 1e-6)
    dispatch.choose("matmul", make_spec(), None)
    assert lab.measured == [[*_names(Config(192, 2)), "xla Config()"]]


def test_a_compared_configuration_that_is_damaged_is_measured_again(lab, estimates, monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["backend_fake_matmul"], "NUM_COMPARED", 3, raising=False)
    lab.microseconds = lambda backend, config: dict(xla=5.0).get(backend, 4.0)
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    (path,) = tmp_path.glob("tuning/*/*-compared*/*.json")
    entry = json.loads(path.read_text())
    entry["winner"]["config"]["block"] = 77
    path.write_text(json.dumps(entry))
    monkeypatch.setattr(winners, "_memo", {})
    with pytest.warns(UserWarning, match="Config\\(block=77, depth=1\\) is not in the search space of this spec"):
        assert dispatch.choose("matmul", make_spec(), None).config == Config()
    assert len(lab.measured) == 2


def test_a_backend_that_is_always_compared_needs_no_estimate(lab, estimates, registry, monkeypatch):
    registry["matmul", "xla"] = dataclasses.replace(registry["matmul", "xla"], is_always_compared=True)
    del estimates["xla"]
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    assert lab.measured == [["fake Config(block=64, depth=1)", "xla Config()"]]


def test_a_comparison_does_not_count_for_other_backends(lab, estimates, registry):
    """After new estimates, others are close."""
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "xla"
    estimates["xla"] = 1.0
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    # The first of the order has no estimate: it is taken, as without comparisons.
    estimates["xla"] = estimates.pop("fake")
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    assert len(lab.measured) == 1


def test_what_was_not_measured_is_told(lab, estimates, registry):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    others = dict(registry)
    registry.clear()
    registry["matmul", "far"] = others["matmul", "fake"]
    registry.update(others)
    estimates["far"] = 4e-5
    choice = dispatch.choose("matmul", make_spec(), None)
    assert choice.backend == "xla"
    reasons = dict(choice.passed_over)
    assert (reasons["far"], reasons["fake"]) == ("estimated at 40 us: not measured", "measured slower than xla")


def test_kernels_inside_of_a_candidate_are_not_compared(lab, estimates, monkeypatch):
    """A backend may call an operation of ours. To measure it meanwhile would wait for the lock of the measurement."""
    seen = []
    module = sys.modules["backend_fake_matmul"]
    run = module.run

    def nested(spec: Any, config: Any, *xs: Any) -> Any:
        seen.append(dispatch.choose("matmul", make_spec(m=3), None).source)
        return run(spec, config, *xs)

    monkeypatch.setattr(module, "run", nested)
    assert dispatch.choose("matmul", make_spec(), None).source == "compared"
    jk.autotune(jk.matmul, A[:4], B)
    assert {*seen} == {"default"}


def test_programs_are_compiled_before_they_are_compared(lab, estimates, monkeypatch):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    compiled, threads = [], set()
    program = tuner._program

    def recorded(op: str, spec: Any, backend: str, *args: Any) -> Any:
        compiled.append(backend)
        threads.add(threading.current_thread())
        return program(op, spec, backend, *args)

    monkeypatch.setattr(tuner, "_program", recorded)
    traced = jax.jit(lambda a, b: jk.matmul(a, b) + jk.matmul(a, b)).trace(A, B)
    with jk.comparing(False):
        ahead.compile_kernels(traced.jaxpr, CPU)
    assert compiled == []
    ahead.compile_kernels(traced.jaxpr, CPU)
    assert sorted(compiled) == ["fake", "xla"]
    assert lab.measured == []
    with dispatch.recording() as choices:
        traced.lower()
    assert {(choice.backend, choice.source) for choice in choices} == {("xla", "compared")}
    assert len(lab.measured) == 1
    assert len(compiled) == 2
    assert threading.main_thread() not in threads
    ahead.compile_kernels(jax.jit(lambda a, b: jk.matmul(a, b) - 1).trace(A, B).jaxpr, CPU)  # It was compared.
    assert len(compiled) == 2
    assert tuner._ready == {}


def test_a_program_that_does_not_compile_ahead_is_compiled_again(lab, estimates, monkeypatch):
    lab.broken = {Config()}
    traced = jax.jit(jk.matmul).trace(A, B)
    ahead.compile_kernels(traced.jaxpr, CPU)
    with dispatch.recording() as choices:
        traced.lower()
    assert [choice.backend for choice in choices] == ["xla"]


def test_a_comparison_runs_its_kernels_in_a_turn(lab, estimates, monkeypatch):
    """It compiles before. Others may draw their operands, and launch for the first time, beside it."""
    events, program = [], tuner._program
    monkeypatch.setattr(tuner, "_turn", tuner._turn)

    @contextlib.contextmanager
    def turn(work: str) -> Iterator[None]:
        events.append(work)
        yield
        events.append("ends")

    def compiled(*args: Any) -> Any:
        run = program(*args)
        events.append("compiled")
        return lambda *xs: (events.append("launched"), run(*xs))[1]

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        events.append("measured")
        return lab.measure(calls, **options)

    tuner.compare_in(turn)
    monkeypatch.setattr(tuner, "_program", compiled)
    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare.func, measure=measure))
    assert dispatch.choose("matmul", make_spec(), None).source == "compared"
    measured = events.index("measured")
    # XLA may autotune while it compiles: the second candidate does so in a turn of its own.
    begin, compiling, end = events[:2], events[2:6], events[6:measured]
    assert (begin, end) == (["drawing", "ends"], ["drawing", "launched", "launched", "ends", "timing"])
    assert sorted(compiling) == ["compiled", "compiled", "drawing", "ends"]
    assert "compiled" in compiling[compiling.index("drawing") : compiling.index("ends")]
    assert set(events[measured:-1]) == {"measured", "launched"}
    assert events[-1] == "ends"


def test_results_count_for_the_cache(lab, estimates, monkeypatch):
    """As in benchmarks: operands that exceed the cache together with the results are rotated."""
    counted = []
    monkeypatch.setattr(tuner, "num_rotations", lambda num_bytes: (counted.append(num_bytes), (1, False))[1])
    dispatch.choose("matmul", make_spec(), None)
    assert counted == [A.nbytes + B.nbytes + 4 * A.shape[0] * B.shape[1]]


@pytest.mark.parametrize("is_compiled_ahead", [False, True])
def test_short_kernels_are_compared_in_programs_of_several_calls(is_compiled_ahead, lab, estimates, monkeypatch):
    monkeypatch.setattr(tuner, "_calls", lambda op, spec, operands: tuner._Calls(4))
    looks, stored = {}, []

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        for name, call in calls.items():
            results = call.function(*call.operands[0])
            looks[name] = len(call.operands), len(call.operands[0]), len(results)
            a, b = call.operands[0][0]
            for result in jax.tree.leaves(results):
                np.testing.assert_allclose(result, a @ b, rtol=1e-5)
        return lab.measure(calls, **options)

    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare.func, measure=measure))
    monkeypatch.setattr(tuner, "num_rotations", lambda num_bytes: (11, True))
    monkeypatch.setattr(dispatch, "store_compared", lambda *args: stored.append(args))
    if is_compiled_ahead:
        ahead.compile_kernels(jax.jit(jk.matmul).trace(A, B).jaxpr, CPU)
    dispatch.choose("matmul", make_spec(), None)
    # Eleven sets of operands: two launches of four, and three that are left over.
    assert looks == {"fake Config(block=64, depth=1)": (2, 4, 4), "xla Config()": (2, 4, 4)}
    ((_, backend, _, _, seconds, _),) = stored
    assert (backend, seconds) == ("fake", 1e-6 / 4)


def gated_spec(k: int = 7, chip: hardware.Chip = CPU, **options: Any) -> MatmulSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    types = dict(multiplier=array(488, 64), activation="silu") | options
    return MatmulSpec(array(488, k), array(k, 64), (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), chip, **types)


@pytest.mark.parametrize(("of_other", "num_fake"), [("fake", 4), ("xla", 1)])
def test_a_gated_product_is_compared_beside_its_other_half(of_other, num_fake, lab, estimates, monkeypatch):
    """The other half has the backend that a program takes for it."""
    spec, seen = gated_spec(), []

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        assert len(lab.runs) == num_fake  # Also in the program of XLA, and once for the types of the results.
        for call in calls.values():
            lhs, rhs, other = (np.asarray(x, np.float32) for x in call.operands[0])
            out = np.asarray(call.function(*call.operands[0])[0], np.float32)
            np.testing.assert_allclose(out, jax.nn.silu(lhs @ rhs) * (lhs @ other), rtol=0.03, atol=0.03)
        seen.extend(calls)
        return lab.measure(calls, **options)

    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare.func, measure=measure))
    dispatch.store_compared("matmul", of_other, spec.product, ["fake", "xla"], 1e-6)
    ahead.compile_kernels(jax.jit(_gated).trace(*(jnp.zeros(x.shape, x.dtype) for x in _gated_types(spec))).jaxpr, CPU)
    lab.runs.clear()
    assert dispatch.choose("matmul", spec, None).source == "compared"
    assert seen == ["fake Config(block=64, depth=1)", "xla Config()"]


def _gated(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jk.matmul(x, w, activation="silu", multiplier=jk.matmul(x, v))


def _gated_types(spec: MatmulSpec) -> tuple[ArrayType, ...]:
    return spec.lhs, spec.rhs, spec.rhs


@needs_aot
@pytest.mark.parametrize("k", [64, 1])
def test_xla_merges_the_halves_of_a_gated_product_that_is_compared(k, monkeypatch):
    """As in a program of users: it computes one product with the columns of both."""
    spec = gated_spec(k, H200)
    other_half = types.SimpleNamespace(backend="xla", config=dispatch.default_config("matmul", "xla", spec.product))
    monkeypatch.setattr(dispatch, "choose", lambda op, spec, backend: other_half)
    operands_of_both, used = matmul_tuning.beside("matmul", spec)
    operands = operands_of_both([spec.lhs, spec.rhs, spec.multiplier])
    assert operands == _gated_types(spec)
    plain = jax.jit(lambda x, w, v: jax.nn.silu(x @ w) * (x @ v))
    config = dispatch.default_config("matmul", "xla", spec)
    compared = tuner._program("matmul", spec, "xla", config, h200(), operands, spec.results("matmul"), used=used)
    sharding = jax.sharding.SingleDeviceSharding(h200())
    users = plain.lower(*(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands)).compile()
    kernels = lambda program: sorted(re.findall(r"calls=%([a-z_]+)", program.as_text().partition("ENTRY")[2]))
    assert kernels(compared) == kernels(users)
    assert ("concatenate(" in compared.as_text()) == (k > 1)


def test_xla_is_compared_if_it_may_merge_an_outer_product(lab, estimates):
    estimates["xla"] = 1e-3
    for spec in (gated_spec(2), gated_spec(1, multiplier=None)):
        assert dispatch.choose("matmul", spec, None).backend == "fake"
    assert lab.measured == []
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    assert dispatch.choose("matmul", gated_spec(1), None).backend == "xla"
    assert lab.measured == [["fake Config(block=64, depth=1)", "xla Config()"]]


def test_a_program_that_is_compared_has_all_its_calls(lab):
    spec, types_of = make_spec(), lambda *arrays: [ArrayType.of(x) for x in arrays]
    compile_calls = functools.partial(
        tuner._program, "matmul", spec, "xla", dispatch.default_config("matmul", "xla", spec), jax.devices()[0],
        types_of(A, B), spec.results("matmul"),
    )  # fmt: skip
    one, many = compile_calls(), compile_calls(tuner._Calls(3))
    assert len(many.input_shardings[0]) == 3  # Each call has operands of its own.
    count = lambda program: len(re.findall(r" (?:dot|custom-call)\(", program.as_text()))
    assert count(many) == 3 * count(one) > 0


def test_a_gradient_that_shares_its_cotangent_is_tuned_as_the_product_alone(lab, estimates):
    """`jk.autotune` measures each product alone. A comparison does not, and has an entry of its own."""
    alone, shared = (gradient_spec(5, 3, 7, cotangent, CPU) for cotangent in (None, "lhs"))
    aligned = gradient_spec(5, 3, 8, "lhs", CPU)
    assert [spec.shared for spec in (alone, shared, aligned)] == [None, "lhs", None]
    dispatch.store_compared("matmul", "xla", shared, ["fake", "xla"], 1e-6)
    dispatch.store_compared("matmul", "xla", aligned, ["fake", "xla"], 1e-6)
    compared = lambda spec: dispatch.compared("matmul", spec, ["fake", "xla"])
    assert [compared(spec) for spec in (alone, shared, aligned, aligned.alone)] == [None, "xla", "xla", "xla"]
    tuner.tune("matmul", alone)
    choices = [dispatch.choose("matmul", spec, None) for spec in (alone, shared)]
    assert [(x.backend, x.source) for x in choices] == [("fake", "tuned")] * 2
    assert choices[0].config == choices[1].config
    assert dispatch.is_tuned("matmul", shared, None)


@pytest.mark.parametrize("shared", [0, 1])
def test_every_second_call_that_is_compared_shares_an_operand(shared):
    """As the gradients of both operands share the cotangent, and so its copy with padded rows."""
    spec = gradient_spec(5, 3, 7, ["lhs", "rhs"][shared], CPU)
    config, types = dispatch.default_config("matmul", "xla", spec), [spec.lhs, spec.rhs]
    program = tuner._program(
        "matmul", spec, "xla", config, jax.devices("cpu")[0], types, spec.results("matmul"), tuner._Calls(4, shared)
    )
    rng = np.random.default_rng(0)
    sets = [[rng.standard_normal(x.shape).astype(x.dtype) for x in types] for _ in range(4)]
    for i, (out,) in enumerate(program(*sets)):
        given = [np.float32(sets[i - i % 2 if place == shared else i][place]) for place in range(2)]
        np.testing.assert_allclose(np.float32(out), given[0] @ given[1], rtol=0.02, atol=0.02)


@needs_aot
@pytest.mark.parametrize("name", ["cuda", "pallas"])
def test_pairs_copy_the_shared_operand_once(name):
    counts = []
    for shared in (None, 0):
        spec = gradient_spec(19525, 265, 2605)
        config = dispatch.default_config("matmul", name, spec)
        program = tuner._program(
            "matmul", spec, name, config, h200(), [spec.lhs, spec.rhs], spec.results("matmul"), tuner._Calls(2, shared)
        )
        entry = program.as_text().partition("ENTRY")[2]
        counts.append(len(re.findall(r" (?:fusion|custom-call|copy|pad)\(", entry)))
    assert counts[0] - counts[1] == 1


def test_pairs_hold_the_shared_operand_once(lab, estimates, monkeypatch):
    monkeypatch.setattr(tuner, "_calls", lambda op, spec, operands: tuner._Calls(2, 0 if spec.shared else None))
    seen = []

    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        for call in calls.values():
            ((first, second), *_) = call.operands
            seen.append([x is y for x, y in zip(first, second, strict=True)])
        return lab.measure(calls, **options)

    tuner.compare("matmul", gradient_spec(5, 3, 7, "lhs", CPU), ["fake", "xla"], measure=measure)
    tuner.compare("matmul", gradient_spec(5, 3, 7, None, CPU), ["fake", "xla"], measure=measure)
    assert seen == [[True, False]] * 2 + [[False, False]] * 2


@needs_aot
def test_xla_fuses_in_a_program_of_several_calls_what_it_fuses_in_one_of_one_call():
    """With a barrier between the calls, XLA of JAX 0.11 added the residual in a kernel of its own."""
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.float16))
    spec = MatmulSpec(
        array(15767, 128), array(128, 128), (((1,), (0,)), ((), ())), jnp.dtype(jnp.float16), H200,
        residual=array(15767, 128),
    )  # fmt: skip
    operands = spec.pack("matmul", {name: x.type for name, x in spec.arrays().items()})
    config, results = dispatch.default_config("matmul", "xla", spec), spec.results("matmul")
    counts = []
    for num_calls in (1, 4):
        program = tuner._program("matmul", spec, "xla", config, h200(), operands, results, tuner._Calls(num_calls))
        entry = program.as_text().partition("ENTRY")[2]
        counts.append(len(re.findall(r" (?:fusion|custom-call|copy|transpose)\(", entry)))
    one, many = counts
    assert many == 4 * one > 0


@pytest.mark.parametrize(
    ("m", "n", "k", "chip", "calls", "of_gradient"),
    [
        (64, 64, 64, H200, 8, 8),
        (64, 4096, 4095, H200, 8, 8),
        (64, 16384, 8192, H200, 3, 3),  # Four sets of operands are more than 1 GiB.
        (16384, 8192, 64, H200, 1, 1),  # Eight results are 2 GiB.
        (8192, 8192, 8192, H200, 1, 1),  # It is long, and its rows are aligned.
        (8192, 8192, 8191, H200, 1, 2),
        (8192, 768, 50257, H200, 1, 2),  # The cotangent counts once.
        (65536, 16384, 8191, H200, 1, 1),  # The second result has 2 GiB.
        (64, 64, 63, CPU, 1, 1),
    ],
)
def test_how_many_calls_a_program_has_that_is_compared(m, n, k, chip, calls, of_gradient):
    for cotangent, expected in ((None, calls), ("lhs", of_gradient)):
        spec = gradient_spec(m, n, k, cotangent, chip)
        found = tuner._calls("matmul", spec, [spec.lhs, spec.rhs])
        assert found.number == expected
        assert (found.shared is not None) == (expected != calls)


def test_a_comparison_works_under_a_transfer_guard(lab, estimates, monkeypatch):
    def measure(calls: Mapping[str, Call], **options: Any) -> dict[str, Any]:
        np.asarray(jax.device_put(np.zeros(1, np.int32), jax.devices("cpu")[0]))  # As the clock of a GPU does.
        return lab.measure(calls, **options)

    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare.func, measure=measure))
    jax.config.update("jax_transfer_guard", "disallow_explicit")
    try:
        assert dispatch.choose("matmul", make_spec(), None).source == "compared"
    finally:
        jax.config.update("jax_transfer_guard", "allow")


def test_estimates_choose_if_nothing_can_be_measured(lab, estimates, monkeypatch):
    def fail(*args: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(tuner, "_operands", fail)
    match = r"compare: cannot measure matmul  f32.*: RESOURCE_EXHAUSTED: out of memory\. Estimates choose the backend\."
    with pytest.warns(UserWarning, match=match):
        assert dispatch.choose("matmul", make_spec(), None).backend == "fake"
    # Programs do not wait for a second attempt.
    assert dispatch.choose("matmul", make_spec(), None).backend == "fake"


def test_estimates_choose_if_the_clock_fails(lab, estimates, monkeypatch):
    def busy(*args: Any, **options: Any) -> Any:
        raise MeasureError("measure: another profiler records the device")

    monkeypatch.setattr(tuner, "compare", functools.partial(tuner.compare, measure=busy))
    with pytest.warns(UserWarning, match=r"fake not measured: measure: another profiler .*; xla not measured: "):
        assert dispatch.choose("matmul", make_spec(), None).backend == "fake"


def test_threads_that_choose_at_once_measure_once(lab, estimates):
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    barrier = threading.Barrier(3)
    chosen: list[str] = []

    def work() -> None:
        barrier.wait()
        chosen.append(dispatch.choose("matmul", make_spec(), None).backend)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (chosen, len(lab.measured)) == (["xla"] * 3, 1)


def test_backends_are_measured_inside_other_programs(lab, estimates, meshes):
    """While XLA's partitioner asks for the kernel of a shard, and under vmap and grad."""
    lab.microseconds = lambda backend, config: 5.0 if backend == "xla" else 6.0
    x = np.ones((2, 5, 7), np.float32)
    total = lambda a, b: jax.vmap(jk.matmul, (0, None))(a, b).sum()
    with dispatch.recording() as choices:
        gradient = jax.jit(jax.grad(total))(x, B)
    np.testing.assert_array_equal(gradient, np.full(x.shape, 3))
    assert choices
    assert {choice.backend for choice in choices} == {"xla"}
    shard = jax.NamedSharding(meshes.auto, jax.P("x", None))
    whole = jax.device_put(np.ones((16, 7), np.float32), shard)
    before = len(lab.measured)
    np.testing.assert_array_equal(jax.jit(jk.matmul)(whole, B), np.full((16, 3), 7))
    assert len(lab.measured) == before + 1
    of_shard = dataclasses.replace(make_spec(), lhs=ArrayType((4, 7), jnp.dtype(jnp.float32)))
    assert dispatch.compared("matmul", of_shard, ["fake", "xla"]) == "xla"


@pytest.mark.gpu
def test_close_backends_are_measured_on_this_gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("JAXKERNELS_AUTOTUNE")
    monkeypatch.setattr(winners, "_memo", {})
    monkeypatch.setattr(dispatch, "CLOSE", 1000.0)
    x, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((520, 136), (136, 264)))
    q = jnp.ones((2, 77, 4, 64), jnp.bfloat16)
    with dispatch.recording() as choices:
        y = jax.jit(jk.matmul)(x, w)
        jax.jit(jax.grad(lambda q: jk.dot_product_attention(q, q, q, is_causal=True).astype(jnp.float32).sum()))(q)
    np.testing.assert_array_equal(y, np.full((520, 264), 136))
    assert {choice.op for choice in choices} == {"matmul", "attention_forward", "attention_backward"}
    stored = [json.loads(path.read_text()) for path in tmp_path.glob("tuning/*/*-compared/*.json")]
    stored = {entry["key"]["op"]: entry for entry in stored}
    for choice in choices:
        assert choice.source == "compared"
        assert len(choice.estimates) > 2
        assert stored[choice.op]["winner"]["backend"] == choice.backend
        # Other workers' kernels run between ours on the same GPU.
        longest = 0.1 if "PYTEST_XDIST_WORKER" in os.environ else 1e-3
        assert 1e-6 < stored[choice.op]["seconds"] < longest


# The command.


def invoke(*args: str) -> Result:
    return CliRunner().invoke(cli.app, ["tune", *args])


def refusal(*args: str) -> str:
    result = invoke(*args)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def test_command_refuses_in_one_line():
    known = ", ".join(dispatch.backend_names())
    assert (
        refusal("gemm", "--shapes=64x64x64") == "error: tune: needs a CUDA GPU to measure on; this machine has cpu.\n"
    )
    assert refusal("gemm") == (
        "error: tune: no shapes are given. Name shapes with --shapes, or a suite with --suite, or draw some with "
        "--random.\n"
    )
    assert refusal("gemm", "--suite=gemm-smoke", "--seed=3") == (
        "error: tune: --seed needs --random; got --seed 3 without it. Add --random N, or leave it out.\n"
    )
    assert refusal("norm", "--random=3") == "error: tune: norm takes no --random; use gemm or attention.\n"
    assert refusal("gemm", "--random=3", "--minutes=0.1") == (
        "error: tune: --minutes must be at least the budget of one kernel, 15 s; got 0.1. Use more minutes or a "
        "smaller --budget.\n"
    )
    assert refusal("gemm", "--shapes=64x64x64", "--backend=cublas") == (
        f"error: tune: unknown backend 'cublas'; use one of {known}, or leave --backend out to tune all.\n"
    )
    assert "64x64" in refusal("gemm", "--shapes=64x64")
    assert "no-such-suite" in refusal("attention", "--suite=no-such-suite")
    assert refusal("conv", "--shapes=64x64x64") == (
        "error: tune: unknown operation 'conv'; use one of gemm, qkv, attention, norm, lce.\n"
    )


@contextlib.contextmanager
def measurable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The command finds a chip it takes, which this process has."""
    gpu = dataclasses.replace(CPU, platform="cuda")
    monkeypatch.setattr(tune_cli.hardware, "chip_of", lambda device: gpu)
    monkeypatch.setattr(tuner, "device_for", lambda chip: jax.devices("cpu")[0])
    monkeypatch.setattr(hardware, "host", lambda platform="cpu": gpu)
    yield


def test_command_tunes_shapes_and_writes_a_table(lab, monkeypatch, tmp_path):
    lab.microseconds = lambda backend, config: 100.0 if backend == "xla" else 10.0 - config.depth
    table = tmp_path / "table.json"
    with measurable(monkeypatch):
        result = invoke(
            "gemm", "--shapes=64x32x48:nt:float32,64x64x32", f"--table={table}", "--backend=fake", "--top=2"
        )
        assert result.exit_code == 0, result.output
        assert result.stdout.count("-> fake  Config(block=64, depth=2)") == 2
        assert "m=64 n=32 k=48 mk,nk" in result.stdout
        again = invoke("gemm", "--shapes=64x64x32", "--backend=fake")
        assert again.stdout.endswith("already tuned, or there is only one configuration\n")
        lab.measured.clear()
        assert invoke("gemm", "--shapes=64x64x32", "--backend=fake", "--force").exit_code == 0
        assert lab.measured
    monkeypatch.setattr(winners, "_TABLES", tmp_path)
    winners._from_table.cache_clear()
    assert len(winners._from_table(table)) == 2


def test_command_goes_on_from_a_table_where_time_ended(lab, monkeypatch, tmp_path):
    """Each run is on a machine that has kept nothing but the table, and has the time for two kernels."""
    table, tuned = tmp_path / "table.json", tuner.tune
    for run, (num_tuned, num_left) in enumerate([(2, 3), (2, 1), (1, 0), (0, 0)]):
        now = [0.0]

        def tune(*args: Any, now: list[float] = now, **options: Any) -> tuner.Result:
            now[0] += 20.0
            return tuned(*args, **options)

        monkeypatch.setattr(tuner, "tune", tune)
        monkeypatch.setattr(tune_cli.time, "monotonic", lambda now=now: now[0])
        monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / f"machine-{run}"))
        monkeypatch.setattr(winners, "_memo", {})
        with measurable(monkeypatch):
            shapes = ",".join(f"{m}x32x48:float32" for m in (8, 16, 24, 32, 40))
            result = invoke(
                "gemm", f"--shapes={shapes}", f"--table={table}", "--backend=fake", "--top=1", "--minutes=0.65",
                "--budget=15",
            )  # fmt: skip
        assert result.exit_code == 0, result.output
        assert result.stdout.count("-> fake") == num_tuned
        assert ("kernels are left" in result.stdout) == (num_left > 0)
        assert not num_left or f"{num_left} kernels are left. The same command measures them.\n" in result.stdout
        assert len(json.loads(table.read_text())) == 5 - num_left


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("{}", "it is no list"),
        ("[1]", "it holds something that is no entry"),
        ('[{"key": {}, "winner": {}, "seconds": 1}]', "it holds something that is no entry"),
        ('[{"key": {"device": "cpu"}, "winner": 3, "seconds": 1}]', "it holds no configuration"),
        (
            '[{"key": {"device": "cpu", "num_sms": 0, "op": "../../x", "backend": "y", "version": 1}, "winner": {}, '
            '"seconds": 1}]',
            "it holds something that is no entry",
        ),
    ],
)
def test_command_refuses_a_table_that_is_none(text, reason, lab, monkeypatch, tmp_path):
    table = tmp_path / "table.json"
    table.write_text(text)
    with measurable(monkeypatch):
        message = refusal("gemm", "--shapes=8x8x8", f"--table={table}", "--backend=fake")
    assert message == f"error: tune: {table} is no table of winners: {reason}. Name another file, or delete it.\n"
    assert table.read_text() == text


def test_command_draws_the_problems_of_bench(lab, monkeypatch):
    found = []
    monkeypatch.setattr(
        tuner, "tune", lambda op, spec, *_, **__: found.append(spec) or tuner.Result(op, spec, None, (), 0.0)
    )
    with measurable(monkeypatch):
        assert invoke("gemm", "--random=3", "--seed=5", "--backend=fake").exit_code == 0
    problems = random_rows.problems("gemm", 3, 5)
    expected = dict.fromkeys(spec for problem in problems for _, spec in kernels_of(problem, "fake"))
    assert found == list(expected)


def test_command_tunes_all_passes_of_attention(lab, monkeypatch):
    """The forward pass as it is without a gradient, and as it is with one."""
    found = []

    def tune(op: str, spec: Any, backend: str | None, **options: Any) -> tuner.Result:
        found.append((op, spec.causal, spec.drops_lse, options))
        return tuner.Result(op, spec, backend, (), 0.0)

    monkeypatch.setattr(tuner, "tune", tune)
    with measurable(monkeypatch):
        result = invoke("attention", "--shapes=2x8x16x4x2x16:causal:float32", "--top=3", "--budget=7")
    assert result.exit_code == 0, result.output
    options = dict(top=3, budget_s=7.0)
    assert found == [
        ("attention_forward", True, True, options),
        ("attention_forward", True, False, options),
        ("attention_backward", True, False, options),
    ]


def test_command_fails_where_a_kernel_cannot_be_tuned(lab, monkeypatch):
    lab.wrong = set(SPACE)
    with measurable(monkeypatch):
        result = invoke("gemm", "--shapes=8x8x8", "--backend=fake", "--top=1")
    assert result.exit_code == 1
    assert result.stderr == "error: tune: 1 kernels could not be tuned; see the reasons above.\n"
    assert "no candidate is correct; the default is used" in result.stdout
