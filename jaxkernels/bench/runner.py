"""Makes rows of problems: compiles, checks against the reference, then times all sides in turns.

A pool of threads compiles the programs of a group of problems. Nothing is timed while XLA autotunes, because that uses
the GPU. A side that is not supported, fails or is wrong is recorded with the reason, and not timed. The sustained
regime takes longest. It times our sides, and the baselines that are about the fastest in bursts.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.bench import accuracy, lowering
from jaxkernels.bench.losses import auto_side, is_below
from jaxkernels.bench.lowering import AUTO, Lowered, Workers
from jaxkernels.bench.results import Row, Side, TimedKernel
from jaxkernels.bench.suites import baselines_of, peak_flops_per_s
from jaxkernels.bench.telemetry import Telemetry
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.cases import Case, Draw, by_name, result_types
from jaxkernels.core.measure import Call, Clock, Regime, Samples, clock_for, measure, num_rotations
from jaxkernels.core.problems import Contender, Problem
from jaxkernels.tuning import tuner

__all__ = ["Settings", "Turn", "our_key", "run"]

_Arrays = dict[str, jax.Array]

#: Threads that lower and compile programs. Python lowers in one thread at a time: more threads wait for each other.
_THREADS = min(os.cpu_count() or 1, 16)

#: See `jaxkernels.core.measure.measure`.
_BUDGET_SECONDS = {"burst": 0.5, "sustained": 0.7}

#: A baseline slower than the fastest by more than these factors is timed in the first look only, or in bursts only.
_OUTPACED = 1.05
_OUTPACED_IN_BURSTS = 1.02

#: The backend that supports every problem. The baseline of that name is the same program, or nearly the same.
_FALLBACK = "xla"

#: JAX takes about this long to launch a program. Shorter programs leave gaps, so they put no sustained load on the GPU.
_LAUNCH_SECONDS = 30e-6

#: A longer reason is cut: messages of compilers can be long.
_REASON_LENGTH = 240


#: Kinds of work with the device: compiling programs that XLA may autotune; comparing backends, checking and timing.
Turn = Literal["autotuning", "timing"]
_Turns = Callable[[Turn], contextlib.AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of a run.

    Attributes:
      device: the device to run on.
      backends: our backends to time. None: each that supports a problem; xla only if no other does, because the
        baseline of that name is the same program. Beside auto, None: each where auto loses.
      baselines: names of the baselines; None: all.
      regimes: the regimes to time, in order.
      clock: None: the default clock of the device.
      program_clock: the clock of programs of several calls, which are timed where auto lost. None: the clock of
        comparisons on a GPU; on other devices they are not timed.
      telemetry: a context that the caller has entered.
      processes: the number of processes that lower our kernels while others are timed; 0: this process lowers them.
      auto: whether `backend=None` is a side, named "auto". The backends beside it then show what else could have been
        chosen: one that is the same program as auto's, or is slower than another of them, is not timed further.
      turn: a context for each kind of work, where other processes share the device.
      chunk: the number of problems whose programs are compiled, and kept in memory, at the same time.
    """

    device: Any
    telemetry: Telemetry
    backends: tuple[str, ...] | None = None
    baselines: tuple[str, ...] | None = None
    regimes: tuple[Regime, ...] = ("burst", "sustained")
    clock: Clock | None = None
    program_clock: Clock | None = None
    processes: int = 0
    auto: bool = False
    turn: _Turns = lambda kind: contextlib.nullcontext()
    chunk: int = 24


def run(
    problems: Iterable[tuple[str, Problem]], settings: Settings, status: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """Measures problems, and yields a row for each problem and regime.

    Args:
      problems: (suite, problem) pairs.
      settings: the sides to compare.
      status: called with a description of the current step.
    """
    problems = list(problems)
    chip = hardware.chip_of(settings.device)
    shared: dict[Any, concurrent.futures.Future[Any]] = {}
    with contextlib.ExitStack() as stack:
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=_THREADS)
        # An interrupt ends the run at once, without waiting for programs that are being compiled.
        stack.callback(pool.shutdown, wait=False, cancel_futures=True)
        at_once = () if _others_follow(settings) else _our_backends(settings)
        ours = [dict.fromkeys(at_once) for _ in problems]
        if at_once and settings.processes and Workers.can_serve(chip):
            workers = stack.enter_context(Workers(settings.processes, chip))
            ours = [{name: workers.start(p, name) for name in names} for (_, p), names in zip(problems, ours)]
        for start in range(0, len(problems), settings.chunk):
            chunk = problems[start : start + settings.chunk]
            status(f"compiling {start + 1} to {start + len(chunk)} of {len(problems)}")
            of_chunk = ours[start : start + settings.chunk]
            begin = time.perf_counter()
            plans = [_Plan(*work, started, settings, pool, shared) for work, started in zip(chunk, of_chunk)]
            if settings.auto:
                concurrent.futures.wait([pool.submit(_on, settings.device, plan.compile_ahead) for plan in plans])
            for plan in plans:
                plan.wait()
            for plan in plans:
                plan.seconds["compile"] = (time.perf_counter() - begin) / len(chunk)
            begin = time.perf_counter()
            status(f"choosing {start + 1} to {start + len(chunk)} of {len(problems)}")
            for plan in plans:
                plan.choose()
            for plan in plans:
                plan.fall_back()
            for plan in plans:
                plan.wait()
            for plan in plans:
                plan.seconds["choose"] = (time.perf_counter() - begin) / len(chunk)
            while plans:  # Dropping a plan frees its programs and their device memory.
                plan = plans.pop(0)
                status(f"timing {start + len(chunk) - len(plans)} of {len(problems)}: {plan.problem.shape}")
                yield from plan.rows()
            if settings.auto:  # Random problems share few programs: keeping all of a long run would fill the memory.
                shared.clear()


@dataclasses.dataclass(frozen=True)
class _Checked:
    """The sides of a problem whose results are right.

    Attributes:
      part: the part of a result that was compared with the reference.
      errors: side -> error ratio.
      calls: side -> call, to be timed.
      is_warm: whether the operands stay in the L2 cache.
    """

    part: str
    errors: dict[str, float]
    calls: dict[str, Call]
    is_warm: bool


class _Plan:
    """One problem: its programs while they are compiled, then the compiled programs, then its rows."""

    def __init__(
        self,
        suite: str,
        problem: Problem,
        ours: Mapping[str, Callable[[], Lowered] | None],
        settings: Settings,
        pool: concurrent.futures.Executor,
        shared: dict[Any, concurrent.futures.Future[Any]],
    ):
        self.problem = problem
        #: Phase -> seconds of the run's time.
        self.seconds: dict[str, float] = {}
        #: Side -> the seconds of lowering and compiling, on one of several threads.
        self._programs: dict[str, dict[str, float]] = {}
        self._suite, self._settings = suite, settings
        self._chip = hardware.chip_of(settings.device)
        self._clock = settings.clock or clock_for(settings.device.platform)
        #: Key of a side -> the reason why it is not timed.
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
        self._judge = _Judge(problem, submit_once, shares_reference=not settings.auto)
        #: Baselines that are compiled if no other is: name -> the reason.
        self._yielding: dict[str, str] = {}
        for contender in self._baselines():
            self._compile(contender)
        for name, started in ours.items():
            self._compile_ours(name, started)

    def _compile(self, contender: Contender) -> None:
        lower, turn = functools.partial(lowering.lower, self.problem, contender), self._settings.turn
        self._compiling[contender.name] = self._submit(functools.partial(_compile, contender, False, lower, turn))

    def _compile_ours(self, name: str, started: Callable[[], Lowered] | None = None) -> None:
        """Compiles a backend's kernel. A worker lowers it if `started` is given; else this process does."""
        contender = Contender(name, lowering.our_function(self.problem, name))
        lower = started or functools.partial(lowering.lower, self.problem, contender)
        work = functools.partial(_compile, contender, True, lower, self._settings.turn)
        self._compiling[our_key(name)] = self._submit(work)

    def _baselines(self) -> Iterator[Contender]:
        known = baselines_of(self.problem.op)
        names = tuple(known) if self._settings.baselines is None else self._settings.baselines
        for name in names:
            if (reason := known[name].refuses(self.problem, self._chip)) is not None:
                self._refused[name] = reason
            elif (reason := known[name].yields(self.problem, self._chip)) is not None:
                self._yielding[name] = self._refused[name] = reason
            else:
                yield from self._contenders(name)

    def _contenders(self, name: str) -> Iterator[Contender]:
        try:
            yield from baselines_of(self.problem.op)[name].contenders(self.problem)
        except Exception as e:  # The baseline is another library, which may raise anything.
            self._refused[name] = _reason(e)

    def wait(self) -> None:
        """Waits for the programs. A side that did not compile is refused with the error."""
        self._judge.wait()
        self._programs["reference"] = self._judge.seconds
        compiling, self._compiling = self._compiling, {}
        for key, future in compiling.items():
            if (error := future.exception()) is not None:
                self._refused[key] = _reason(error)
            else:
                self._contestants[key] = future.result()
                self._programs[key] = future.result().seconds
        order = lambda item: (not item[1].is_ours, item[0] != _AUTO_KEY)
        self._contestants = dict(sorted(self._contestants.items(), key=order))
        if _AUTO_KEY in compiling:
            self._share_program()
        self._drop_repeats()

    def _share_program(self) -> None:
        """Makes auto and the baseline "xla" one program, which is timed once, if XLA gets the same program for both.

        XLA's autotuner may take other kernels when it compiles the same program again, and the times of one short
        program in two turns differ by up to 20 %. Neither is a property of a side.
        """
        auto, xla = self._contestants.get(_AUTO_KEY), self._contestants.get(_FALLBACK)
        if auto is None or xla is None or {kernel.backend for kernel in auto.timed} != {_FALLBACK}:
            return
        with jax.default_device(self._settings.device):
            lowered = [lowering.lower(self.problem, side.contender) for side in (auto, xla)]
        if lowering.are_same(*lowered):
            self._contestants[_AUTO_KEY] = dataclasses.replace(auto, program=xla.program, forward=xla.forward)

    def _drop_repeats(self) -> None:
        """Drops our backends whose program is auto's."""
        if (auto := self._contestants.get(_AUTO_KEY)) is None:
            return
        for key, contestant in list(self._contestants.items()):
            if key != _AUTO_KEY and contestant.is_ours and _chosen(contestant) == _chosen(auto):
                del self._contestants[key]
                self._refused[key] = "auto is the same program"

    def compile_ahead(self) -> None:
        """Compiles what `choose` will compare. Errors are left to it."""
        turn = lambda backend: self._settings.turn("autotuning") if backend == _FALLBACK else contextlib.nullcontext()
        with contextlib.suppress(Exception):
            contender = Contender(AUTO, lowering.our_function(self.problem, AUTO))
            lowering.compile_ahead(self.problem, contender, self._chip, turn)

    def choose(self) -> None:
        """Compiles the backend that `backend=None` takes. It may measure, so this process compiles nothing else."""
        if self._settings.auto:
            self._compile_ours(AUTO)
            self.wait()

    def fall_back(self) -> None:
        """Compiles the xla backend if none of ours supports the problem, and no backend was named.

        If no baseline compiled, also compiles those that yield to others.
        """
        if self._settings.backends is None and not any(c.is_ours for c in self._contestants.values()):
            self._compile_ours(_FALLBACK)
        if all(c.is_ours for c in self._contestants.values()):
            for name in self._yielding:
                del self._refused[name]
                for contender in self._contenders(name):
                    self._compile(contender)

    def rows(self) -> Iterator[Row]:
        """Checks and times. Yields a row for each regime, or one row without sides if the check fails.

        If auto loses, it is also timed in a program of several calls, beside the fastest baseline. If it loses or
        fails, our other backends are timed afterwards, as often as the sides before.
        """
        rows = self._checked_rows()
        if _others_follow(self._settings) and any(map(_is_lost, rows)):
            rows = self._with_others([self._in_program(row) for row in rows])
        yield from rows

    def _in_program(self, row: Row) -> Row:
        """The row of a short problem that auto lost, with the seconds of auto and the fastest baseline in a program of
        several calls; any other row as it is. It also is if only one call fits into memory.
        """
        auto, baseline, clock = auto_side(row), row.fastest_baseline, self._settings.program_clock
        if row.regime != "burst" or auto is None or baseline is None or not is_below(row):
            return row
        if clock is None and self._settings.device.platform in hardware.GPU_PLATFORMS:
            clock = tuner.queue_clock(self._settings.device)
        if clock is None or auto.seconds >= tuner.SHORT_SECONDS:
            return row
        try:
            with jax.default_device(self._settings.device), self._counted("in a program"):
                seconds = self._seconds_in_program((_AUTO_KEY, baseline.name), clock)
        except Exception as e:  # The row stands without them.
            return dataclasses.replace(row, refused=row.refused | {"in a program": _reason(e)})
        key_of = lambda side: our_key(side.name) if side.is_ours else side.name
        sides = tuple(dataclasses.replace(side, in_program=seconds.get(key_of(side))) for side in row.sides)
        return dataclasses.replace(row, sides=sides)

    def _seconds_in_program(self, keys: Sequence[str], clock: Clock) -> dict[str, float]:
        """Key of a side -> the seconds of one call in a program of several; empty if only one call fits."""
        made = sum(x.num_bytes for x in self._judge.types.values())
        with self._settings.turn("autotuning"):
            first = self._judge.draw(0)
            given = sum(x.nbytes for x in jax.tree.leaves(first))
            num_calls = tuner.num_calls_of(given, made)
            if num_calls == 1:
                return {}
            copies = max(num_rotations(given)[0] // num_calls, 1) * num_calls
            sets = [first, *(self._judge.draw(seed) for seed in range(1, copies))]
            calls = {}
            for key in keys:
                contestant = self._contestants[key]
                lowered = lowering.lower(self.problem, contestant.contender, num_calls)
                arguments = [contestant.arguments(*one) for one in sets]
                groups = [tuple(arguments[i : i + num_calls]) for i in range(0, copies, num_calls)]
                calls[key] = Call(_compiled(lowered.program, contestant.contender), groups)
                jax.block_until_ready(calls[key].function(*groups[0]))
        with self._settings.turn("timing"):
            samples = measure(calls, regime="burst", budget_s=_BUDGET_SECONDS["burst"], clock=clock)
        return {key: of_side.median / num_calls for key, of_side in samples.items()}

    def _with_others(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, with our other backends as further sides."""
        known, refused_before = set(self._contestants), dict(self._refused)
        with self._counted("choose"):
            for name in _our_backends(self._settings):
                self._compile_ours(name)
            self.wait()
        self._contestants = {key: x for key, x in self._contestants.items() if key not in known}
        counts = {row.regime: len(side.samples.round_medians) for row in rows for side in row.sides if side.samples}
        found = {row.regime: row for row in self._checked_rows(counts)} if self._contestants else {}
        of_others = {key: reason for key, reason in self._refused.items() if refused_before.get(key) != reason}
        order = lambda side: (not side.is_ours, side.name != AUTO)
        joined = []
        for row in rows:
            sides, seconds = row.sides, collections.Counter(row.seconds)
            if (other := found.get(row.regime)) is not None:
                sides = tuple(sorted((*row.sides, *other.sides), key=order))
                seconds.update(other.seconds)
            refused = row.refused | of_others
            joined.append(dataclasses.replace(row, sides=sides, refused=refused, seconds=dict(seconds)))
        return joined

    def _checked_rows(self, counts: Mapping[str, int] | None = None) -> list[Row]:
        """Checks beside other processes, then times alone. `counts`: how many rounds to time in each regime."""
        with jax.default_device(self._settings.device):
            try:
                with self._settings.turn("autotuning"), self._counted("check"):
                    checked = self._check()
            except Exception as e:  # Most likely out of memory: the next problem may fit.
                self._refused["reference"] = _reason(e)
                return [self._row(self._settings.regimes[0], (), "nothing", is_warm=False)]
            with self._settings.turn("timing"):
                return list(self._rows(checked, counts or {}))

    def _rows(self, checked: _Checked, counts: Mapping[str, int]) -> Iterator[Row]:
        with self._counted("look"):
            seconds = self._first_looks(checked.calls)
        timed = self._contenders_within(_OUTPACED, seconds)
        for regime in self._settings.regimes:
            if regime == "sustained" and seconds and min(seconds.values()) < _LAUNCH_SECONDS:
                continue
            self._settings.telemetry.take()
            with self._counted("time"):
                known = {key: dataclasses.replace(checked.calls[key], seconds=seconds[key]) for key in timed}
                samples = self._time(known, regime, counts.get(regime))
            sides = [
                Side(
                    name=self._contestants[key].contender.name,
                    is_ours=self._contestants[key].is_ours,
                    seconds=samples[key].median if key in samples else look,
                    samples=samples.get(key),
                    error_ratio=checked.errors[key],
                    kernels=self._contestants[key].kernels,
                    timed=self._contestants[key].timed,
                )
                for key, look in seconds.items()
                if key in samples or key not in timed
            ]
            yield self._row(regime, tuple(sides), checked.part, is_warm=checked.is_warm)
            if samples and regime == "burst":
                seconds |= {key: of_side.median for key, of_side in samples.items()}
                timed = self._contenders_within(_OUTPACED_IN_BURSTS, seconds)

    def _contenders_within(self, factor: float, seconds: dict[str, float]) -> list[str]:
        """All our sides, and the baselines that take at most `factor` times as long as the fastest baseline.

        Beside auto, our other sides are held against the fastest of them in the same way.
        """

        def fastest(*, is_ours: bool) -> float:
            alike = (key for key in seconds if self._contestants[key].is_ours == is_ours and key != _AUTO_KEY)
            return min((seconds[key] for key in alike), default=math.inf)

        allowed = {False: factor * fastest(is_ours=False), True: math.inf}
        if self._settings.auto:
            allowed[True] = factor * fastest(is_ours=True)
        return [
            key
            for key, value in seconds.items()
            if key == _AUTO_KEY or value <= allowed[self._contestants[key].is_ours]
        ]

    @contextlib.contextmanager
    def _counted(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def _check(self) -> _Checked:
        judge = self._judge
        operands, cotangent = judge.draw(0)
        verdict = judge.verdict(operands, cotangent)
        copies, is_cold = num_rotations(sum(x.nbytes for x in jax.tree.leaves((operands, cotangent))))
        sets = [(operands, cotangent), *(judge.draw(seed) for seed in range(1, copies))]
        errors, calls = {}, {}
        for key, contestant in self._contestants.items():
            try:
                arguments = contestant.arguments(operands, cotangent)
                errors[key] = verdict(contestant.results(self.problem.case, contestant.program(*arguments)))
                if not errors[key] <= accuracy.ALLOWED:  # Also true of NaN.
                    raise _WrongResultError(f"wrong: {errors[key]:.3g} times as far from the reference as plain JAX")
                rest = [contestant.arguments(*one) for one in sets[1:]]
                calls[key] = Call(contestant.program, [arguments, *rest])
            except Exception as e:
                self._refused[key] = _reason(e)
        jax.block_until_ready([call.operands for call in calls.values()])
        return _Checked(judge.description, errors, calls, is_warm=not is_cold)

    def _first_looks(self, calls: dict[str, Call]) -> dict[str, float]:
        """The median of one round of bursts for each side. Sides run alone: a failure does not stop the others."""
        looks = {}
        for key, call in calls.items():
            try:
                looks[key] = self._measure({key: call}, "burst", rounds=1)[key].median
            except Exception as e:
                self._refused[key] = _reason(e)
        return looks

    def _time(self, calls: dict[str, Call], regime: Regime, rounds: int | None) -> dict[str, Samples]:
        try:
            return self._measure(calls, regime, rounds)
        except Exception as e:  # A side failed, so the turns are incomplete: this regime is dropped.
            self._refused[regime] = _reason(e)
            return {}

    def _measure(self, calls: dict[str, Call], regime: Regime, rounds: int | None = None) -> dict[str, Samples]:
        auto, xla = (self._contestants[key] if key in calls else None for key in (_AUTO_KEY, _FALLBACK))
        are_one = auto is not None and xla is not None and auto.program is xla.program
        samples = measure(
            {key: call for key, call in calls.items() if not (are_one and key == _AUTO_KEY)},
            regime=regime,
            rounds=rounds,
            budget_s=_BUDGET_SECONDS[regime] if rounds is None else math.inf,
            clock=self._clock,
            probe=self._settings.telemetry.sm_clock,
        )
        return samples | ({_AUTO_KEY: samples[_FALLBACK]} if are_one else {})

    def _row(self, regime: Regime, sides: tuple[Side, ...], checked: str, *, is_warm: bool) -> Row:
        problem = self.problem
        seconds, self.seconds = self.seconds, {}  # The next regime's row does not count this time again.
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
            num_exps=problem.num_exps,
            exps_per_s=self._chip.exps_per_s,
            device=self._settings.telemetry.take(),
            seconds=seconds,
            programs=self._programs,
            kinds=problem.kinds,
        )


def _our_backends(settings: Settings) -> tuple[str, ...]:
    """The backends that are timed by their names. The side `auto` is compiled after them."""
    names = settings.backends
    if names is None:
        names = tuple(name for name in dispatch.backend_names() if name != _FALLBACK)
    return names


def _others_follow(settings: Settings) -> bool:
    """Whether our backends beside auto are timed only where auto loses."""
    return settings.auto and settings.backends is None


def _is_lost(row: Row) -> bool:
    """Whether auto is slower than the best baseline, or was not timed."""
    return auto_side(row) is None or is_below(row)


class _WrongResultError(RuntimeError):
    """A result that breaks the error rule."""


def our_key(backend: str) -> str:
    """The key of a backend's side. It differs from the key of a baseline with the same name."""
    return f"jaxkernels {backend}"


_AUTO_KEY = our_key(AUTO)


def _reason(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    if not isinstance(error, NotImplementedError | _WrongResultError):
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= _REASON_LENGTH else text[:_REASON_LENGTH] + "..."


def _on[T](device: Any, work: Callable[[], T]) -> T:
    """Calls `work` with a default device, which the threads of a pool do not inherit."""
    with jax.default_device(device):
        return work()


@dataclasses.dataclass(frozen=True)
class _Contestant:
    """A compiled contender.

    Attributes:
      program: operands -> result, or (residuals, cotangent) -> gradients by name.
      forward: operands -> (result, residuals for the backward pass); None if the problem is a forward pass.
      kernels: the kernels chosen for our operations; empty for a baseline.
      timed: those in `program`, in a form that can be read back.
      seconds: the seconds of lowering, waiting and compiling.
    """

    contender: Contender
    is_ours: bool
    program: Callable[..., Any]
    forward: Callable[..., Any] | None
    kernels: tuple[str, ...]
    timed: tuple[TimedKernel, ...]
    seconds: dict[str, float]

    def arguments(self, operands: _Arrays, cotangent: Any) -> tuple[Any, ...]:
        """The arguments of the timed program."""
        operands = self.contender.prepare(operands)
        if self.forward is None:
            return (operands,)
        out, saved = self.forward(operands)
        return saved, jax.tree.map(lambda ct, x: ct.astype(x.dtype), cotangent, out)

    def results(self, case: Case, out: Any) -> _Arrays:
        """The results, with the names that the reference uses."""
        return self.contender.finish(by_name(case, out) if self.forward is None else _as_gradients(out))


def _as_gradients(by_operand: dict[str, Any]) -> dict[str, Any]:
    return {f"d_{name}": gradient for name, gradient in by_operand.items()}


def _chosen(contestant: _Contestant) -> list[str]:
    """The kernels and their configurations, without where the choice comes from."""
    return [kernel.rpartition(", ")[0] for kernel in contestant.kernels]


def _compile(contender: Contender, is_ours: bool, lower: Callable[[], Lowered], turn: _Turns) -> _Contestant:
    begin = time.perf_counter()
    lowered = lower()
    # XLA autotunes its products. Other kernels are custom calls to it: only the names of their parts may have the word.
    may_autotune = any(
        x is not None and "stablehlo.dot_general" in x.as_text() for x in (lowered.forward, lowered.program)
    )
    with turn("autotuning") if may_autotune else contextlib.nullcontext():
        compiling = time.perf_counter()
        forward = None if lowered.forward is None else lowered.forward.compile()
        program = _compiled(lowered.program, contender)
        ended = time.perf_counter()
    seconds = dict(lower=lowered.seconds, wait=max(compiling - begin - lowered.seconds, 0.0), compile=ended - compiling)
    kernels, timed = (lowered.kernels, lowered.timed) if is_ours else ((), ())
    return _Contestant(contender, is_ours, program, forward, kernels, timed, seconds)


def _compiled(lowered: Any, contender: Contender) -> Any:
    """Compiles with the first compiler options that give a program with the wanted call."""
    for options in contender.compiler_options:
        compiled = lowered.compile(compiler_options=options)
        if not contender.wanted or contender.wanted in (compiled.as_text() or ""):
            return compiled
    raise RuntimeError(f"XLA compiles it without a call of {contender.wanted!r}")


def _compile_draw(draw: Draw) -> Any:
    """(seed, scale) -> normal random numbers, with the shape and dtype of the draw."""

    def normal(seed: jax.Array, scale: jax.Array) -> jax.Array:
        return (scale * jax.random.normal(jax.random.key(seed), draw.shape, jnp.float32)).astype(draw.dtype)

    return jax.jit(normal).lower(np.uint32(0), np.float32(1)).compile()


#: Compiler options of the check. Plain JAX must round to its dtypes, although the same program subtracts the reference.
#: The autotuner is off, because the speed of the check does not matter and autotuning would take most of a run. It
#: stays on if an algorithm is given (`precision="BF16_BF16_F32_X3"`): XLA's choices then differ in their error, and the
#: check must use the one that users get.
_JUDGING = {"xla_allow_excess_precision": False}
_UNTUNED = {"xla_gpu_autotune_level": 0}


class _Judge:
    """Draws a problem's operands and computes the error of results.

    Args:
      problem: the problem.
      submit_once: submits work to a thread, once in a run for each key. Drawing and comparing arrays takes one program
        for each shape. An attention has one reference for both directions and for any mask. Compiling them anew for
        each problem would take most of a run.
      shares_reference: whether other problems of the run may have the same reference in the other direction. If not,
        the reference of a forward pass has no gradients: that compiles faster.

    Attributes:
      description: the part of a result that is compared with the reference.
      types: the results by name: arrays or gradients.
      seconds: the seconds of lowering and compiling the reference.
    """

    def __init__(
        self,
        problem: Problem,
        submit_once: Callable[[Any, Callable[[], Any]], concurrent.futures.Future[Any]],
        *,
        shares_reference: bool,
    ):
        case = problem.case
        self._problem = problem
        self.seconds: dict[str, float] = {}
        self._part = case.part_to_check(is_gradient=problem.direction == "backward")
        self.description = self._part.description
        #: The part's case, for the reference: its mask is an operand.
        self._case = self._part.case.for_reference()
        self._masks = lowering.masks(problem)
        self._draws = {**case.draws, **result_types(case)}  # A result's name stands for its cotangent.
        self._drawing = {
            name: submit_once(("draw", draw.shape, draw.dtype), functools.partial(_compile_draw, draw))
            for name, draw in self._draws.items()
        }
        if problem.direction == "forward":
            self.types = result_types(case)
        else:
            self.types = _as_gradients({name: case.draws[name] for name in case.moving})
        self._comparing = {}
        for name, draw in self.types.items():
            key = ("compare", name, draw.shape, draw.dtype, self.description)
            self._comparing[name] = submit_once(
                key, functools.partial(self._compile_comparison, name, lowering.struct(draw))
            )
        self._has_gradients = problem.direction == "backward" or (shares_reference and case.one_reference)
        self._taking = None
        if self._part.slices:
            key = ("take", dataclasses.replace(self._part, case=self._case), *(x.shape for x in self._draws.values()))
            self._taking = submit_once(key, self._compile_taking)
        self._referring = submit_once(("reference", self._case, self._has_gradients), self._compile_reference)

    def wait(self) -> None:
        """Waits until all programs are compiled. If one failed, `draw` or `verdict` raises its error."""
        taking = [] if self._taking is None else [self._taking]
        concurrent.futures.wait([*self._drawing.values(), *taking, *self._comparing.values(), self._referring])

    def draw(self, copy: int) -> tuple[_Arrays, Any]:
        """Random operands and cotangent. The masks are the same in every copy."""
        arrays = {
            name: self._drawing[name].result()(np.uint32(copy * len(self._draws) + i), np.float32(draw.scale))
            for i, (name, draw) in enumerate(self._draws.items())
        }
        cotangent = self._take_cotangent(arrays)
        return arrays | {name: jnp.asarray(x) for name, x in self._masks.items()}, cotangent

    def _take_cotangent(self, arrays: dict[str, Any]) -> Any:
        """Takes the cotangents out of named arrays: an array, or a tuple."""
        first, *others = (arrays.pop(name) for name in result_types(self._problem.case))
        return (first, *others) if others else first

    def verdict(self, operands: _Arrays, cotangent: Any) -> Callable[[_Arrays], float]:
        """Returns a function from results (or gradients by name) to the largest error ratio of their arrays."""
        part = operands | by_name(self._problem.case, cotangent)
        if self._taking is not None:
            part = self._taking.result()(part)
        part = self._part.case.with_masks(part)
        with jax.enable_x64(True):
            references, plain = jax.block_until_ready(self._referring.result()(part))
        largest_of_all = max(float(largest) for _, largest in plain.values())

        def error_ratio(results: _Arrays) -> float:
            with jax.enable_x64(True):
                distances = {name: x.result()(results[name], references[name]) for name, x in self._comparing.items()}
            ratios = []
            for name, distance in distances.items():
                (plain_distance, largest), dtype = plain[name], self.types[name].dtype
                # Zeros have no size of their own: with one key, gradients of queries are sums that cancel.
                size = float(largest) or largest_of_all
                ratios.append(accuracy.error_ratio(float(distance), float(plain_distance), size, dtype))
            return math.nan if any(map(math.isnan, ratios)) else max(ratios)

        return error_ratio

    def _compile_reference(self) -> Any:
        begin, case = time.perf_counter(), self._problem.case
        part = jax.eval_shape(self._part.of, self._shapes())
        part = self._part.case.with_masks(part)
        with jax.enable_x64(True):
            lowered = jax.jit(self._judge).lower(part)
            self.seconds["lower"] = time.perf_counter() - begin
            is_algorithm = case.precision in jax.lax.DotAlgorithmPreset.__members__
            compiled = lowered.compile(_JUDGING if is_algorithm else _JUDGING | _UNTUNED)
        self.seconds["compile"] = time.perf_counter() - begin - self.seconds["lower"]
        return compiled

    def _shapes(self) -> _Arrays:
        operands, cotangent = lowering.shapes(self._problem)
        return operands | by_name(self._problem.case, cotangent)

    def _compile_taking(self) -> Any:
        return jax.jit(self._part.of).lower(self._shapes()).compile()

    def _compile_comparison(self, name: str, result: jax.ShapeDtypeStruct) -> Any:
        take = lambda x: self._part.of({name: x})[name]

        def compare(x: jax.Array, reference: jax.Array) -> jax.Array:
            return accuracy.largest_difference(take(x), reference)

        with jax.enable_x64(True):
            reference = jax.ShapeDtypeStruct(jax.eval_shape(take, result).shape, np.float64)
            return jax.jit(compare).lower(result, reference).compile(_JUDGING | _UNTUNED)

    def _judge(self, part: _Arrays) -> tuple[_Arrays, dict[str, tuple[Any, Any]]]:
        """The reference in float64; for each array the error of plain JAX, and the largest value."""
        case, part = self._case, dict(part)
        cotangent = self._take_cotangent(part)
        references = self._results(case.reference, accuracy.widen(part), accuracy.widen(cotangent))
        approximations = self._results(case.plain, part, cotangent)
        measured = {
            name: (accuracy.largest_difference(approximations[name], x), jnp.max(jnp.abs(x)))
            for name, x in references.items()
        }
        return references, measured

    def _results(self, function: Callable[..., Any], operands: _Arrays, cotangent: Any) -> _Arrays:
        if not self._has_gradients:
            return by_name(self._case, function(operands))
        out, pull = lowering.save(self._problem, function, operands)
        return by_name(self._case, out) | _as_gradients(pull(cotangent)[0])
