"""From problems to rows: compile, check against the reference, then time, all sides in turns.

Programs are compiled by a pool of threads for some problems at a time, and nothing is timed meanwhile: XLA's autotuner
uses the GPU. A side that is refused, fails or computes something else is recorded with the reason and gets no number.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk
from jaxkernels import dispatch, hardware
from jaxkernels.bench import accuracy
from jaxkernels.bench.baselines import BASELINES, Contender, baseline_names
from jaxkernels.bench.cases import AttentionCase, MatmulCase
from jaxkernels.bench.measure import Call, Clock, Regime, Samples, clock_for, measure, num_rotations
from jaxkernels.bench.results import Row, Side
from jaxkernels.bench.suites import Problem, peak_flops_per_s
from jaxkernels.bench.telemetry import Telemetry

__all__ = ["Settings", "run"]

_Arrays = dict[str, jax.Array]

#: Problems whose programs are compiled, and held, at a time.
_CHUNK = 16

#: No further round of a regime starts on a row after this long.
_BUDGET_SECONDS = {"burst": 1.2, "sustained": 2.5}
_ROUNDS = {"burst": None, "sustained": 2}

#: A baseline this much slower than the fastest is not timed beyond a first look.
_OUTPACED = 1.08

#: JAX takes about this long to launch a program: shorter ones leave gaps, so launching them back to back is no load.
_LAUNCH_SECONDS = 30e-6

#: A reason is cut here: compilers can be wordy.
_REASON_LENGTH = 240


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a run compares, and how.

    Attributes:
      device: the device to run on.
      backends: names of ours to time; None: each that supports a problem (xla only where it is alone: the baseline of
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
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for start in range(0, len(problems), _CHUNK):
            chunk = problems[start : start + _CHUNK]
            status(f"compiling {start + 1} to {start + len(chunk)} of {len(problems)}")
            plans = [_Plan(suite, problem, settings, pool) for suite, problem in chunk]
            for plan in plans:
                plan.wait()
            while plans:  # Compiled programs go as soon as their row is done, and with them their device memory.
                plan = plans.pop(0)
                status(f"timing {start + len(chunk) - len(plans)} of {len(problems)}: {plan.problem.shape}")
                yield from plan.rows()


class _Plan:
    """One problem on its way to its rows: what is being compiled for it, then what came of that."""

    def __init__(self, suite: str, problem: Problem, settings: Settings, pool: concurrent.futures.Executor):
        self.problem = problem
        self._suite, self._settings = suite, settings
        self._chip = hardware.chip_of(settings.device)
        #: Why a side has no number, by its key.
        self._refused: dict[str, str] = {}
        self._contestants: dict[str, _Contestant] = {}
        ours = {_key(contender, is_ours=True): (contender, True) for contender in self._ours()}
        baselines = {_key(contender, is_ours=False): (contender, False) for contender in self._baselines()}
        self._judge = pool.submit(_on, settings.device, lambda: _Judge(problem))
        compiling = {
            key: functools.partial(_compile, problem, contender, is_ours)
            for key, (contender, is_ours) in (ours | baselines).items()
        }
        self._compiling = {key: pool.submit(_on, settings.device, work) for key, work in compiling.items()}

    def _ours(self) -> Iterator[Contender]:
        names = dispatch.backend_names() if self._settings.backends is None else self._settings.backends
        for name in names:
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
        self._judge.exception()  # Waits; `_check` raises it.
        for key, future in self._compiling.items():
            if (error := future.exception()) is not None:
                self._refused[key] = _reason(error)
            else:
                self._contestants[key] = future.result()
        ours = [key for key, contestant in self._contestants.items() if contestant.is_ours]
        xla = _our_key("xla")
        if self._settings.backends is None and xla in ours and len(ours) > 1:
            del self._contestants[xla]

    def rows(self) -> Iterator[Row]:
        """Checks and times; one row for each regime, or one without sides where nothing can be checked."""
        with jax.default_device(self._settings.device):
            try:
                checked, errors, calls, is_warm = self._check()
            except Exception as e:  # Out of memory, most likely: the next problem may fit.
                self._refused["reference"] = _reason(e)
                yield self._row(self._settings.regimes[0], (), "nothing", is_warm=False)
                return
            looks = self._first_looks(calls)
            theirs = [look for key, look in looks.items() if not self._contestants[key].is_ours]
            is_timed = lambda key: self._contestants[key].is_ours or looks[key] <= _OUTPACED * min(theirs)
            timed = {key: calls[key] for key in looks if is_timed(key)}
            for regime in self._settings.regimes:
                if regime == "sustained" and looks and min(looks.values()) < _LAUNCH_SECONDS:
                    continue
                self._settings.telemetry.take()
                samples = self._time(timed, regime)
                sides = [
                    Side(
                        name=self._contestants[key].contender.name,
                        is_ours=self._contestants[key].is_ours,
                        seconds=samples[key].median if key in samples else look,
                        samples=samples.get(key),
                        error_ratio=errors[key],
                        kernels=self._contestants[key].kernels,
                    )
                    for key, look in looks.items()
                    if key in samples or key not in timed
                ]
                yield self._row(regime, tuple(sides), checked, is_warm=is_warm)

    def _check(self) -> tuple[str, dict[str, float], dict[str, Call], bool]:
        """What was checked, the error ratios of the sides that are right, and the calls to time."""
        judge = self._judge.result()
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
            return self._measure(calls, regime, rounds=_ROUNDS[regime])
        except Exception as e:  # One side's failure spoils the turns: none of this regime counts.
            self._refused[regime] = _reason(e)
            return {}

    def _measure(self, calls: dict[str, Call], regime: Regime, rounds: int | None) -> dict[str, Samples]:
        return measure(
            calls,
            regime=regime,
            rounds=rounds,
            budget_s=_BUDGET_SECONDS[regime],
            clock=self._settings.clock or clock_for(self._settings.device.platform),
            probe=self._settings.telemetry.sm_clock,
        )

    def _row(self, regime: Regime, sides: tuple[Side, ...], checked: str, *, is_warm: bool) -> Row:
        problem = self.problem
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
    """

    contender: Contender
    is_ours: bool
    program: Callable[..., Any]
    forward: Callable[..., Any] | None
    kernels: tuple[str, ...]

    def arguments(self, operands: _Arrays, cotangent: jax.Array) -> tuple[Any, ...]:
        """What the timed program is called with."""
        operands = self.contender.prepare(operands)
        return (operands,) if self.forward is None else (self.forward(operands)[1], cotangent)

    def results(self, out: Any) -> _Arrays:
        """The result under the names of the reference's."""
        return self.contender.finish({"out": out} if self.forward is None else _as_gradients(out))


def _as_gradients(by_operand: dict[str, Any]) -> dict[str, Any]:
    return {f"d_{name}": gradient for name, gradient in by_operand.items()}


def _compile(problem: Problem, contender: Contender, is_ours: bool) -> _Contestant:
    operands, cotangent = _shapes(problem)
    operands = jax.eval_shape(contender.prepare, operands)
    forward = None
    with dispatch.recording() as choices:
        if problem.direction == "forward":
            lowered = jax.jit(contender.function).lower(operands)
        else:
            lowered_forward = jax.jit(functools.partial(_save, problem, contender.function)).lower(operands)
            saved = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), lowered_forward.out_info[1])
            lowered = jax.jit(lambda pull, cotangent: pull(cotangent)[0]).lower(saved, cotangent)
            forward = lowered_forward.compile()
    described = [f"{choice.op}: {choice.backend} {choice.config}, {choice.source}" for choice in choices]
    return _Contestant(contender, is_ours, _compiled(lowered, contender), forward, tuple(described) if is_ours else ())


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


def _draw(problem: Problem, key: jax.Array) -> tuple[_Arrays, jax.Array]:
    """Operands and cotangent."""
    draws = problem.case.draws
    *keys, last = jax.random.split(key, len(draws) + 1)
    operands = {name: draw.from_jax(key) for key, (name, draw) in zip(keys, draws.items())}
    return operands, problem.case.out_type.from_jax(last)


def _masks(problem: Problem) -> dict[str, np.ndarray]:
    return {} if isinstance(problem.case, MatmulCase) else problem.case.masks(np.random.default_rng(0))


def _shapes(problem: Problem) -> tuple[dict[str, Any], Any]:
    """Operands and cotangent without values."""
    operands, cotangent = jax.eval_shape(functools.partial(_draw, problem), jax.random.key(0))
    masks = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in _masks(problem).items()}
    return operands | masks, cotangent


#: Plain JAX must round as its dtypes say, although the difference from the reference is taken in the same program. How
#: fast it is does not matter: the autotuner would take most of the time of a run.
_JUDGING = {"xla_allow_excess_precision": False, "xla_gpu_autotune_level": 0}


class _Judge:
    """Draws a problem's operands and says how far results are from the reference; all compiled in the constructor.

    Attributes:
      description: which part of a result is held against the reference.
    """

    def __init__(self, problem: Problem):
        case = problem.case
        self._problem = problem
        self._part = accuracy.part_to_check(case) if isinstance(case, AttentionCase) else None
        self.description = "all" if self._part is None else self._part.description
        self._masks = {name: jnp.asarray(x) for name, x in _masks(problem).items()}
        self._draw = jax.jit(functools.partial(_draw, problem)).lower(jax.random.key(0)).compile()
        operands, cotangent = _shapes(problem)
        with jax.enable_x64(True):
            judging = jax.jit(self._judge).lower(operands, cotangent)
            self._reference = judging.compile(_JUDGING)
            if problem.direction == "forward":
                self._types = {"out": case.out_type}
            else:
                self._types = _as_gradients({name: case.draws[name] for name in _differentiated(problem)})
            results = {name: jax.ShapeDtypeStruct(t.shape, t.dtype) for name, t in self._types.items()}
            references = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in judging.out_info[0].items()}
            self._distances = jax.jit(self._differences).lower(results, references).compile(_JUDGING)

    def draw(self, seed: int) -> tuple[_Arrays, jax.Array]:
        """Operands and cotangent; the masks are always the same."""
        operands, cotangent = self._draw(jax.random.key(seed))
        return operands | self._masks, cotangent

    def verdict(self, operands: _Arrays, cotangent: jax.Array) -> Callable[[_Arrays], float]:
        """The function from a result (or gradients by name) to its error ratio: the worst of its arrays."""
        with jax.enable_x64(True):
            references, plain = self._reference(operands, cotangent)

        def error_ratio(results: _Arrays) -> float:
            with jax.enable_x64(True):
                distances = self._distances(results, references)
            ratios = []
            for name, (plain_distance, largest) in plain.items():
                distance, dtype = float(distances[name]), self._types[name].dtype
                ratios.append(accuracy.error_ratio(distance, float(plain_distance), float(largest), dtype))
            return math.nan if any(map(math.isnan, ratios)) else max(ratios)

        return error_ratio

    def _judge(self, operands: _Arrays, cotangent: jax.Array) -> tuple[_Arrays, dict[str, tuple[Any, Any]]]:
        """The reference in float64, and of each array: how far plain JAX is from it, and its largest value."""
        part = self._take({**operands, "out": cotangent})
        cotangent = part.pop("out")
        if self._part is None:
            case = self._problem.case
            plain = reference = functools.partial(accuracy.plain_matmul, case)
        else:
            case = self._part.case
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

    def _differences(self, results: _Arrays, references: _Arrays) -> _Arrays:
        results = self._take(results)
        return {name: accuracy.largest_difference(results[name], x) for name, x in references.items()}

    def _take(self, arrays: _Arrays) -> _Arrays:
        return arrays if self._part is None else self._part.of(arrays)
