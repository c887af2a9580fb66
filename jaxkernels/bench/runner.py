"""From problems to rows: compile, check against the reference, then time, all sides in turns.

Programs are compiled by a pool of threads for some problems at a time, and nothing is timed meanwhile: XLA's autotuner
uses the GPU. A side that is refused, fails or computes something else is recorded with the reason and gets no number.
The sustained regime, which takes longest, is timed of ours and of those baselines that bursts find about the fastest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk
from jaxkernels import dispatch, hardware
from jaxkernels.bench import accuracy
from jaxkernels.bench.baselines import BASELINES, Contender, baseline_names
from jaxkernels.bench.cases import Draw, MatmulCase
from jaxkernels.bench.measure import Call, Clock, Regime, Samples, clock_for, measure, num_rotations
from jaxkernels.bench.results import Row, Side
from jaxkernels.bench.suites import Problem, peak_flops_per_s
from jaxkernels.bench.telemetry import Telemetry

__all__ = ["Settings", "run"]

_Arrays = dict[str, jax.Array]

#: Problems whose programs are compiled, and held, at a time.
_CHUNK = 48

#: See `jaxkernels.bench.measure.measure`.
_BUDGET_SECONDS = {"burst": 0.6, "sustained": 0.7}

#: A baseline this much slower than the fastest is not timed beyond a first look, and not beyond bursts.
_OUTPACED = 1.05
_OUTPACED_IN_BURSTS = 1.02

#: The backend that can everything; the baseline of that name is the same program, or a like one.
_FALLBACK = "xla"

#: JAX takes about this long to launch a program: shorter ones leave gaps, so launching them back to back is no load.
_LAUNCH_SECONDS = 30e-6

#: A reason is cut here: compilers can be wordy.
_REASON_LENGTH = 240


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run compares, and how.

    Attributes:
      device: the device to run on.
      backends: names of ours to time; None: each that supports a problem (xla only where no other does: the baseline of
        that name is the same program).
      baselines: names of the baselines; None: all.
      regimes: which to time, in order.
      clock: None: the one for the device.
      telemetry: entered by the caller.
    """

    device: Any
    telemetry: Telemetry
    backends: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    regimes: tuple[Regime, ...] = ("burst", "sustained")
    clock: Clock | None = None


def run(
    problems: Iterable[tuple[str, Problem]], settings: Settings, status: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """Measures problems, given with the name of their suite; a row for each in each regime, as they come.

    Args:
      problems: (suite, problem) pairs.
      settings: what to compare.
      status: told what is going on.
    """
    problems = list(problems)
    shared: dict[Any, concurrent.futures.Future[Any]] = {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, len(problems), _CHUNK):
            chunk = problems[start : start + _CHUNK]
            status(f"compiling {start + 1} to {start + len(chunk)} of {len(problems)}")
            begin = time.perf_counter()
            plans = [_Plan(suite, problem, settings, pool, shared) for suite, problem in chunk]
            for plan in plans:
                plan.wait()
            for plan in plans:
                plan.fall_back()
            for plan in plans:
                plan.wait()
                plan.seconds["compile"] = (time.perf_counter() - begin) / len(chunk)
            while plans:  # Compiled programs go as soon as their row is done, and with them their device memory.
                plan = plans.pop(0)
                status(f"timing {start + len(chunk) - len(plans)} of {len(problems)}: {plan.problem.shape}")
                yield from plan.rows()


class _Plan:
    """One problem on its way to its rows: what is being compiled for it, then what came of that."""

    def __init__(
        self,
        suite: str,
        problem: Problem,
        settings: Settings,
        pool: concurrent.futures.Executor,
        shared: dict[Any, concurrent.futures.Future[Any]],
    ):
        self.problem = problem
        #: Of the run's time, by what it went into.
        self.seconds: dict[str, float] = {}
        #: What each program took to lower and to compile, on a thread beside others.
        self._programs: dict[str, dict[str, float]] = {}
        self._suite, self._settings = suite, settings
        self._chip = hardware.chip_of(settings.device)
        self._clock = settings.clock or clock_for(settings.device.platform)
        #: Why a side has no number, by its key.
        self._refused: dict[str, str] = {}
        self._contestants: dict[str, _Contestant] = {}

        def submit(work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
            return pool.submit(_on, settings.device, work)

        def submit_once(key: Any, work: Callable[[], Any]) -> concurrent.futures.Future[Any]:
            if key not in shared:
                shared[key] = submit(work)
            return shared[key]

        self._submit = submit
        self._compiling: dict[str, concurrent.futures.Future[_Contestant]] = {}
        self._judge = _Judge(problem, submit, submit_once)
        for contender in self._ours():
            self._compile(contender, is_ours=True)
        for contender in self._baselines():
            self._compile(contender, is_ours=False)

    def _compile(self, contender: Contender, *, is_ours: bool) -> None:
        work = functools.partial(_compile, self.problem, contender, is_ours)
        self._compiling[_key(contender, is_ours=is_ours)] = self._submit(work)

    def _ours(self) -> Iterator[Contender]:
        others = (name for name in dispatch.backend_names() if name != _FALLBACK)
        for name in others if self._settings.backends is None else self._settings.backends:
            yield Contender(name, _our_function(self.problem, name))

    def _baselines(self) -> Iterator[Contender]:
        op = self.problem.op
        names = baseline_names(op) if self._settings.baselines is None else self._settings.baselines
        for name in names:
            baseline = BASELINES[op, name]
            if (reason := baseline.refuses(self.problem, self._chip)) is not None:
                self._refused[name] = reason
                continue
            try:
                yield from baseline.contenders(self.problem)
            except Exception as e:  # Another library's: whatever it raises is its reason.
                self._refused[name] = _reason(e)

    def wait(self) -> None:
        """Collects the programs; what did not compile is refused with the error."""
        self._judge.wait()
        self._programs["reference"] = self._judge.seconds
        compiling, self._compiling = self._compiling, {}
        for key, future in compiling.items():
            if (error := future.exception()) is not None:
                self._refused[key] = _reason(error)
            else:
                self._contestants[key] = future.result()
                self._programs[key] = future.result().seconds
        self._contestants = dict(sorted(self._contestants.items(), key=lambda item: not item[1].is_ours))

    def fall_back(self) -> None:
        """Has the backend that can everything compiled if no other of ours can this, and none was asked for."""
        if self._settings.backends is None and not any(c.is_ours for c in self._contestants.values()):
            self._compile(Contender(_FALLBACK, _our_function(self.problem, _FALLBACK)), is_ours=True)

    def rows(self) -> Iterator[Row]:
        """Checks and times; one row for each regime, or one without sides where nothing can be checked."""
        with jax.default_device(self._settings.device):
            try:
                with self._counted("check"):
                    checked, errors, calls, is_warm = self._check()
            except Exception as e:  # Out of memory, most likely: the next problem may fit.
                self._refused["reference"] = _reason(e)
                yield self._row(self._settings.regimes[0], (), "nothing", is_warm=False)
                return
            with self._counted("look"):
                seconds = self._first_looks(calls)
            timed = self._contenders_within(_OUTPACED, seconds)
            for regime in self._settings.regimes:
                if regime == "sustained" and seconds and min(seconds.values()) < _LAUNCH_SECONDS:
                    continue
                self._settings.telemetry.take()
                with self._counted("time"):
                    known = {key: dataclasses.replace(calls[key], seconds=seconds[key]) for key in timed}
                    samples = self._time(known, regime)
                sides = [
                    Side(
                        name=self._contestants[key].contender.name,
                        is_ours=self._contestants[key].is_ours,
                        seconds=samples[key].median if key in samples else look,
                        samples=samples.get(key),
                        error_ratio=errors[key],
                        kernels=self._contestants[key].kernels,
                    )
                    for key, look in seconds.items()
                    if key in samples or key not in timed
                ]
                yield self._row(regime, tuple(sides), checked, is_warm=is_warm)
                if samples and regime == "burst":
                    seconds |= {key: of_side.median for key, of_side in samples.items()}
                    timed = self._contenders_within(_OUTPACED_IN_BURSTS, seconds)

    def _contenders_within(self, factor: float, seconds: dict[str, float]) -> list[str]:
        """All of ours, and the baselines that take at most `factor` times as long as the fastest of them."""
        theirs = [value for key, value in seconds.items() if not self._contestants[key].is_ours]
        return [
            key for key, value in seconds.items() if self._contestants[key].is_ours or value <= factor * min(theirs)
        ]

    @contextlib.contextmanager
    def _counted(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def _check(self) -> tuple[str, dict[str, float], dict[str, Call], bool]:
        """What was checked, the error ratios of the sides that are right, and the calls to time."""
        judge = self._judge
        operands, cotangent = judge.draw(0)
        verdict = judge.verdict(operands, cotangent)
        copies, is_cold = num_rotations(sum(x.nbytes for x in (*operands.values(), cotangent)))
        sets = [(operands, cotangent), *(judge.draw(seed) for seed in range(1, copies))]
        errors, calls = {}, {}
        for key, contestant in self._contestants.items():
            try:
                arguments = contestant.arguments(operands, cotangent)
                errors[key] = verdict(contestant.results(contestant.program(*arguments)))
                if not errors[key] <= accuracy.ALLOWED:  # NaN is not, either.
                    raise _WrongResultError(f"wrong: {errors[key]:.3g} times as far from the reference as plain JAX")
                rest = [contestant.arguments(*one) for one in sets[1:]]
                calls[key] = Call(contestant.program, [arguments, *rest])
            except Exception as e:
                self._refused[key] = _reason(e)
        return judge.description, errors, calls, not is_cold

    def _first_looks(self, calls: dict[str, Call]) -> dict[str, float]:
        """The median of one round of bursts of each side, alone, so that one that fails does not stop the others."""
        looks = {}
        for key, call in calls.items():
            try:
                looks[key] = self._measure({key: call}, "burst", rounds=1)[key].median
            except Exception as e:
                self._refused[key] = _reason(e)
        return looks

    def _time(self, calls: dict[str, Call], regime: Regime) -> dict[str, Samples]:
        try:
            return self._measure(calls, regime)
        except Exception as e:  # One side's failure spoils the turns: none of this regime counts.
            self._refused[regime] = _reason(e)
            return {}

    def _measure(self, calls: dict[str, Call], regime: Regime, rounds: int | None = None) -> dict[str, Samples]:
        return measure(
            calls,
            regime=regime,
            rounds=rounds,
            budget_s=_BUDGET_SECONDS[regime],
            clock=self._clock,
            probe=self._settings.telemetry.sm_clock,
        )

    def _row(self, regime: Regime, sides: tuple[Side, ...], checked: str, *, is_warm: bool) -> Row:
        problem = self.problem
        seconds, self.seconds = self.seconds, {}  # What has been counted is not counted again in the next regime's row.
        return Row(
            suite=self._suite,
            label=problem.label,
            op=problem.op,
            shape=problem.shape,
            dtype=problem.case.dtype,
            regime=regime,
            flops=problem.flops,
            num_bytes=problem.num_bytes,
            peak_flops_per_s=peak_flops_per_s(problem, self._chip),
            memory_bytes_per_s=self._chip.memory_bytes_per_s,
            is_warm=is_warm,
            sides=sides,
            refused=dict(self._refused),
            checked=checked,
            device=self._settings.telemetry.take(),
            seconds=seconds,
            programs=self._programs,
        )


class _WrongResultError(RuntimeError):
    """A result that breaks the error rule."""


def _our_key(backend: str) -> str:
    """Of a backend's side in a plan: a baseline may bear the same name."""
    return f"jaxkernels {backend}"


def _key(contender: Contender, *, is_ours: bool) -> str:
    return _our_key(contender.name) if is_ours else contender.name


def _reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, NotImplementedError | _WrongResultError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + "..."


def _on[T](device: Any, work: Callable[[], T]) -> T:
    """Works with a default device, which a thread of a pool does not inherit."""
    with jax.default_device(device):
        return work()


def _our_function(problem: Problem, backend: str) -> Callable[[_Arrays], Any]:
    case = problem.case
    if isinstance(case, MatmulCase):
        return functools.partial(case.run, backend=backend)
    return lambda operands: jk.dot_product_attention(**operands, **case.options, backend=backend)


@dataclasses.dataclass(frozen=True)
class _Contestant:
    """A contender, compiled.

    Attributes:
      program: operands -> result, or (what the forward pass saved, cotangent) -> gradients by name.
      forward: operands -> (result, what the backward pass needs); None where the problem is a forward pass.
      kernels: of ours: which kernels it got.
      seconds: what it took to lower and to compile.
    """

    contender: Contender
    is_ours: bool
    program: Callable[..., Any]
    forward: Callable[..., Any] | None
    kernels: tuple[str, ...]
    seconds: dict[str, float]

    def arguments(self, operands: _Arrays, cotangent: jax.Array) -> tuple[Any, ...]:
        """What the timed program is called with."""
        operands = self.contender.prepare(operands)
        if self.forward is None:
            return (operands,)
        out, saved = self.forward(operands)
        return saved, cotangent.astype(out.dtype)

    def results(self, out: Any) -> _Arrays:
        """The result under the names of the reference's."""
        return self.contender.finish({"out": out} if self.forward is None else _as_gradients(out))


def _as_gradients(by_operand: dict[str, Any]) -> dict[str, Any]:
    return {f"d_{name}": gradient for name, gradient in by_operand.items()}


def _compile(problem: Problem, contender: Contender, is_ours: bool) -> _Contestant:
    begin = time.perf_counter()
    with dispatch.recording() as choices:
        lowered_forward, lowered = _lower(problem, contender)
    described = [f"{choice.op}: {choice.backend} {choice.config}, {choice.source}" for choice in choices]
    is_lowered = time.perf_counter()
    forward = None if lowered_forward is None else lowered_forward.compile()
    program = _compiled(lowered, contender)
    seconds = dict(lower=is_lowered - begin, compile=time.perf_counter() - is_lowered)
    return _Contestant(contender, is_ours, program, forward, tuple(described) if is_ours else (), seconds)


def _lower(problem: Problem, contender: Contender) -> tuple[Any | None, Any]:
    """The forward pass that saves what the backward pass needs (None where the problem has none), and what is timed."""
    operands, cotangent = _shapes(problem)
    operands = jax.eval_shape(contender.prepare, operands)
    if problem.direction == "forward":
        return None, jax.jit(contender.function).lower(operands)
    forward = jax.jit(functools.partial(_save, problem, contender.function)).lower(operands)
    out, saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), forward.out_info)
    cotangent = jax.ShapeDtypeStruct(cotangent.shape, out.dtype)
    return forward, jax.jit(lambda pull, cotangent: pull(cotangent)[0]).lower(saved, cotangent)


def _compiled(lowered: Any, contender: Contender) -> Any:
    """The program by the first compiler options that make it what is wanted."""
    for options in contender.compiler_options:
        compiled = lowered.compile(compiler_options=options)
        if not contender.wanted or contender.wanted in (compiled.as_text() or ""):
            return compiled
    raise RuntimeError(f"XLA makes no call of {contender.wanted!r} of it")


def _save(problem: Problem, function: Callable[..., Any], operands: _Arrays) -> tuple[Any, Any]:
    """The forward pass, and the pullback to what is differentiated: a pytree of what was saved."""
    moving = {name: operands[name] for name in _differentiated(problem)}
    return jax.vjp(lambda moving: function(operands | moving), moving)


def _differentiated(problem: Problem) -> tuple[str, ...]:
    """Every operand of a product; query, key and value of an attention."""
    return tuple(problem.case.draws) if isinstance(problem.case, MatmulCase) else ("query", "key", "value")


def _masks(problem: Problem) -> dict[str, np.ndarray]:
    return {} if isinstance(problem.case, MatmulCase) else problem.case.masks(np.random.default_rng(0))


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype))


def _shapes(problem: Problem) -> tuple[dict[str, Any], Any]:
    """Operands and cotangent without values."""
    operands = {name: _struct(x) for name, x in (problem.case.draws | _masks(problem)).items()}
    return operands, _struct(problem.case.out_type)


def _compile_draw(draw: Draw) -> Any:
    """(seed, scale) -> normal random numbers. Only the shape and the dtype of the draw count."""

    def normal(seed: jax.Array, scale: jax.Array) -> jax.Array:
        return (scale * jax.random.normal(jax.random.key(seed), draw.shape, jnp.float32)).astype(draw.dtype)

    return jax.jit(normal).lower(np.uint32(0), np.float32(1)).compile()


#: Plain JAX must round as its dtypes say, although the difference from the reference is taken in the same program. How
#: fast it is does not matter: the autotuner would take most of the time of a run.
_JUDGING = {"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0}


class _Judge:
    """Draws a problem's operands and says how far results are from the reference.

    Args:
      problem: the problem.
      submit: has work done by a thread.
      submit_once: the same, but once in a run for each key: to draw an array and to compare it takes the same program
        for each shape, and compiling these would take longer than all others together.

    Attributes:
      description: which part of a result is held against the reference.
      seconds: what it took to lower and to compile the reference.
    """

    def __init__(
        self,
        problem: Problem,
        submit: Callable[[Callable[[], Any]], concurrent.futures.Future[Any]],
        submit_once: Callable[[Any, Callable[[], Any]], concurrent.futures.Future[Any]],
    ):
        case = problem.case
        self._problem = problem
        self.seconds: dict[str, float] = {}
        self._part = accuracy.part_to_check(case, is_gradient=problem.direction == "backward")
        self.description = self._part.description
        self._masks = _masks(problem)
        self._draws = {**case.draws, "cotangent": case.out_type}
        self._drawing = {
            name: submit_once(("draw", draw.shape, draw.dtype), functools.partial(_compile_draw, draw))
            for name, draw in self._draws.items()
        }
        if problem.direction == "forward":
            self._types = {"out": case.out_type}
        else:
            self._types = _as_gradients({name: case.draws[name] for name in _differentiated(problem)})
        self._comparing = {}
        for name, draw in self._types.items():
            key = ("compare", name, draw.shape, draw.dtype, self.description)
            self._comparing[name] = submit_once(key, functools.partial(self._compile_comparison, name, _struct(draw)))
        self._referring = submit(self._compile_reference)

    def wait(self) -> None:
        """Until everything is compiled or failed: `draw` and `verdict` then raise."""
        concurrent.futures.wait([*self._drawing.values(), *self._comparing.values(), self._referring])

    def draw(self, copy: int) -> tuple[_Arrays, jax.Array]:
        """Operands and cotangent; the masks are always the same."""
        arrays = {
            name: self._drawing[name].result()(np.uint32(copy * len(self._draws) + i), np.float32(draw.scale))
            for i, (name, draw) in enumerate(self._draws.items())
        }
        cotangent = arrays.pop("cotangent")
        return arrays | {name: jnp.asarray(x) for name, x in self._masks.items()}, cotangent

    def verdict(self, operands: _Arrays, cotangent: jax.Array) -> Callable[[_Arrays], float]:
        """The function from a result (or gradients by name) to its error ratio: the worst of its arrays."""
        with jax.enable_x64(True):
            references, plain = jax.block_until_ready(self._referring.result()(operands, cotangent))

        def error_ratio(results: _Arrays) -> float:
            with jax.enable_x64(True):
                distances = {name: self._comparing[name].result()(results[name], references[name]) for name in plain}
            ratios = []
            for name, (plain_distance, largest) in plain.items():
                distance, dtype = float(distances[name]), self._types[name].dtype
                ratios.append(accuracy.error_ratio(distance, float(plain_distance), float(largest), dtype))
            return math.nan if any(map(math.isnan, ratios)) else max(ratios)

        return error_ratio

    def _compile_reference(self) -> Any:
        begin = time.perf_counter()
        with jax.enable_x64(True):
            lowered = jax.jit(self._judge).lower(*_shapes(self._problem))
            self.seconds["lower"] = time.perf_counter() - begin
            compiled = lowered.compile(_JUDGING)
        self.seconds["compile"] = time.perf_counter() - begin - self.seconds["lower"]
        return compiled

    def _compile_comparison(self, name: str, result: jax.ShapeDtypeStruct) -> Any:
        take = lambda x: self._part.of({name: x})[name]

        def compare(x: jax.Array, reference: jax.Array) -> jax.Array:
            return accuracy.largest_difference(take(x), reference)

        with jax.enable_x64(True):
            reference = jax.ShapeDtypeStruct(jax.eval_shape(take, result).shape, np.float64)
            return jax.jit(compare).lower(result, reference).compile(_JUDGING)

    def _judge(self, operands: _Arrays, cotangent: jax.Array) -> tuple[_Arrays, dict[str, tuple[Any, Any]]]:
        """The reference in float64, and of each array: how far plain JAX is from it, and its largest value."""
        part = self._part.of({**operands, "out": cotangent})
        cotangent, case = part.pop("out"), self._part.case
        if isinstance(case, MatmulCase):
            plain = reference = functools.partial(accuracy.plain_matmul, case)
        else:
            plain = lambda operands: accuracy.plain_attention(case, operands)[0]
            reference = functools.partial(accuracy.plain_attention_by_heads, case)
        references = self._results(reference, accuracy.widen(part), accuracy.widen(cotangent))
        approximations = self._results(plain, part, cotangent)
        measured = {
            name: (accuracy.largest_difference(approximations[name], x), jnp.max(jnp.abs(x)))
            for name, x in references.items()
        }
        return references, measured

    def _results(self, function: Callable[..., Any], operands: _Arrays, cotangent: jax.Array) -> _Arrays:
        if self._problem.direction == "forward":
            return {"out": function(operands)}
        return _as_gradients(_save(self._problem, function, operands)[1](cotangent)[0])
