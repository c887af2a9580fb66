"""Measures the configurations of one kernel call, and stores the fastest.

There are two rounds. The first has the default, and the configurations that the cost model ranks best; if it gives
several the same time, the first of them. The second has the neighbours of the fastest: configurations that differ from
it in one knob. In each round a pool of threads compiles all configurations. Then their results are compared with the
reference, and the correct ones are timed in turns (`jaxkernels.core.measure`).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxkernels.core import dispatch, hardware, registry
from jaxkernels.core.arguments import positive_number, positive_whole
from jaxkernels.core.cases import Cut
from jaxkernels.core.errors import first_line
from jaxkernels.core.kernel_op import tracing, usual_promotion
from jaxkernels.core.measure import Call, MeasureError, QueueClock, num_rotations
from jaxkernels.core.measure import measure as bench_measure
from jaxkernels.core.types import ArrayType

__all__ = [
    "SHORT_SECONDS", "Candidate", "Measure", "Result", "TuningError", "check_settings", "compare", "compile_to_compare",
    "device_for", "each", "num_calls_of", "queue_clock", "tune",
]  # fmt: skip

# The errors of a wrong kernel are as large as the results. Rounding errors are below a hundredth of them.
_MAX_RMS_ERROR = 0.03
_MAX_ERROR = 0.1
#: After this share of the budget no further candidate is compiled, so that the others can still be measured.
_COMPILE_SHARE = 0.5

#: The policy of kernels that are measured. The caller's policy applies to the program being lowered only.
_INSIDE = dispatch.Policy(use_winners=False)

#: One measurement at a time: two would slow each other down.
_measuring = threading.Lock()
#: What a comparison does on the device -> a context for it, where other processes share the device: "drawing" operands
#: and first launches, while others may draw and autotune, or "timing", alone.
_turn: Callable[[str], contextlib.AbstractContextManager[None]] = lambda work: contextlib.nullcontext()


#: (operation, spec, backend, configuration) -> a program that was compiled before the comparison that takes it.
_ready: dict[tuple[str, Any, str, Any], Callable[..., Any]] = {}

#: A comparison measures for so long after all is compiled, and at most for so many rounds.
_BRIEF_SECONDS, _BRIEF_ROUNDS = 0.3, 15

#: Of more candidates, a comparison first makes one round. Those within this factor of the fastest share the rest.
_FEW, _HEAT = 4, 1.3

#: On a GPU, a comparison of kernels that are estimated to take at most so many seconds times programs of so many calls.
#: A program of one call takes 3 us longer than its kernels, and 7 us with cuDNN. Calls of one program follow each other
#: within 1 us. The operands of all calls together have at most so many bytes, and so do their results.
SHORT_SECONDS, _CALLS, _OPERAND_BYTES, _RESULT_BYTES = 1e-4, 8, 2**30, 2**28

#: Of kernels that take at least so many seconds, those within this factor of the fastest count as equal, and the first
#: preferred one is taken: in training they run at the power limit, and in short turns all share one clock.
#: Under a load of its own, `cuda` took 0.97 to 1.02 of XLA's time, and 0.89 to 0.95 of Triton's: six products of the
#: preset 1b on an H100.
_LONG_SECONDS, _TIE = 1e-4, 1.02

#: Shorter kernels of ours must be faster than XLA by so many seconds: the clock resolves no less.
_SHORT_TIE = 5e-8

#: XLA's autotuner takes one of several kernels for a product, and may take another one in the next compilation. Its
#: clock includes pauses between kernels: of six compilations of 1622 x 9984 x 128 on an H200, five took Triton's kernel
#: (18.2 us), one cuBLASLt's (14.9 us). So cuBLASLt, in a fixed algorithm, is taken instead of XLA if it takes at most
#: `_TIE` times as long, and at least so many seconds. Shorter kernels of XLA are fused with what surrounds them.
_FIXED_SECONDS = 5e-6


class TuningError(RuntimeError):
    """An operation could not be measured on this device."""


class Samples(Protocol):
    """The measurement of a call."""

    @property
    def median(self) -> float: ...


#: Candidates that are being compiled.
_Compiling = list[tuple["Candidate", concurrent.futures.Future[Callable[..., Any]]]]

#: A function like `jaxkernels.core.measure.measure`.
Measure = Callable[..., Mapping[str, Samples]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A configuration that was tried.

    Attributes:
      backend, config: the backend and its configuration.
      estimate: the cost model's time in seconds; None if the design has no cost model.
      seconds: the measured time, or None.
      reason: the reason why it was not measured, or None.
    """

    backend: str
    config: Any
    estimate: float | None
    seconds: float | None = None
    reason: str | None = None

    def __str__(self) -> str:
        if self.seconds is None:
            return f"{self.backend}  {self.config}  {self.reason}"
        estimate = "" if self.estimate is None else f", estimated {self.estimate * 1e6:.1f}"
        return f"{self.backend}  {self.config}  {self.seconds * 1e6:.1f} us{estimate}"


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of `tune`.

    Attributes:
      op, spec, backend: the arguments of `tune`.
      candidates: all candidates: the measured ones, fastest first, then the others.
      seconds: the time that tuning took.
    """

    op: str
    spec: Any
    backend: str | None
    candidates: tuple[Candidate, ...]
    seconds: float

    @property
    def winner(self) -> Candidate | None:
        """The fastest candidate; None if none was measured, or if there is only one configuration."""
        first = next(iter(self.candidates), None)
        return None if first is None or first.seconds is None else first

    def __str__(self) -> str:
        if not self.candidates:
            return f"{self.op}  {self.spec}\n  there is only one configuration"
        marks = ["->" if candidate is self.winner else "  " for candidate in self.candidates]
        lines = [f"  {mark} {candidate}" for mark, candidate in zip(marks, self.candidates)]
        head = f"{self.op}  {self.spec}  (tuned in {self.seconds:.1f} s)"
        return "\n".join(
            [head, *lines, *(["     no candidate is correct; the default is used"] if self.winner is None else [])]
        )


def device_for(chip: hardware.Chip) -> Any | None:
    """A device of this process with this chip, or None."""
    try:
        devices = jax.local_devices(backend=chip.platform)
    except RuntimeError:  # JAX does not have this platform here.
        return None
    return next((device for device in devices if hardware.chip_of(device) == chip), None)


def check_settings(label: str, top: Any, budget_s: Any) -> None:
    """Raises ValueError if `top` or `budget_s` is not valid in `tune`."""
    positive_whole(label, "top", top, "It counts configurations.")
    positive_number(label, "budget_s", budget_s, "It is the seconds for one operation.")


def tune(
    op: str,
    spec: Any,
    backend: str | None = None,
    *,
    top: int = 8,
    budget_s: float = 15.0,
    measure: Measure = bench_measure,
) -> Result:
    """Measures the best few configurations for a spec, and stores the fastest of each backend and the fastest backend.

    Args:
      op: the operation's name in `dispatch.REGISTRY`.
      spec: the spec of the kernel. Its target must be a device of this process.
      backend: the backend to tune; None: all that support the spec.
      top: configurations of one backend in the first round; the second round measures half as many.
      budget_s: seconds after which no further configuration is started. The defaults are measured in any case.
      measure: a function that times calls, like `jaxkernels.core.measure.measure`.

    Returns:
      All candidates. A candidate that does not compile, or is wrong, has the reason.

    Raises:
      NotImplementedError: this process does not have the device, or the named backend does not support the spec.
      TuningError: there is not enough memory for the operands and the reference.
      ValueError: an argument is out of range, or no backend has this name.
    """
    check_settings("tune", top, budget_s)
    dispatch.check(op, spec, backend)
    device = device_for(spec.target)
    if device is None:
        raise NotImplementedError(f"tune: needs a device of this process to measure on; got {spec.target}.")
    backends = dispatch.usable_backends(op, spec, backend)
    begin = time.monotonic()
    if sum(len(dispatch.search_space(op, name, spec)) for name in backends) <= 1:
        return Result(op, spec, backend, (), 0.0)
    with _measuring, dispatch.policy(_INSIDE):
        try:
            trial = _Trial(op, spec, device, begin, budget_s, measure)
        except jax.errors.JaxRuntimeError as e:
            raise TuningError(f"tune: cannot make operands and reference for {op}  {spec}: {_first_line(e)}") from e
        for name in backends:
            trial.add(name, _ranked(op, name, spec, top))
        trial.run()
        best = trial.best()
        if best is not None:
            neighbours = _neighbours(best.config, dispatch.search_space(op, best.backend, spec))
            trial.add(best.backend, _by_estimate(op, best.backend, spec, neighbours), limit=-(-top // 2))
            trial.run()
        result = Result(op, spec, backend, trial.candidates(), time.monotonic() - begin)
    for name in backends:
        winner = next((c for c in result.candidates if c.backend == name and c.seconds is not None), None)
        if winner is not None and winner.seconds is not None and len(dispatch.search_space(op, name, spec)) > 1:
            dispatch.store_winner(op, name, spec, winner.config, winner.seconds)
    if backend is None and len(backends) > 1 and result.winner is not None and result.winner.seconds is not None:
        dispatch.store_fastest(op, result.winner.backend, spec, result.winner.seconds)
    return result


def compare(op: str, spec: Any, backends: Sequence[str], *, measure: Measure | None = None) -> None:
    """Measures backends once, each in the configuration that a call gets, and stores the fastest. If long kernels are
    about as fast, it stores the first of them; if short ones are, XLA. Of some backends it measures several
    configurations (`dispatch.contenders`), and stores the fastest of them, too.

    It is brief, as it runs while a program is compiled, and checks no results. On a GPU it uses the clock that needs no
    profiler.

    Args:
      op, spec: the operation and the spec of the kernel. Its target must be a device of this process.
      backends: backends that can run the spec, in order of preference.
      measure: a function that times calls, like `jaxkernels.core.measure.measure`; None: that one.

    Raises:
      TuningError: none could be measured. The message has the reason.
    """
    device = device_for(spec.target)
    contenders = {name: dispatch.contenders(op, name, spec) for name in backends}
    try:
        # The operands and the clock's own work come from the host.
        with _measuring, dispatch.policy(_INSIDE), jax.transfer_guard("allow"), jax.disable_jit(False):
            if measure is None:
                clock = queue_clock(device) if spec.target.platform in hardware.GPU_PLATFORMS else None
                measure = functools.partial(bench_measure, rounds=_BRIEF_ROUNDS, clock=clock)
            trial = _Trial(op, spec, device, time.monotonic(), _BRIEF_SECONDS, measure, is_brief=True)
            for name, configs in contenders.items():
                trial.add(name, configs)
            trial.run()
    except Exception as e:  # Most likely there is not enough memory. The program can run nevertheless.
        raise TuningError(f"compare: cannot measure {op}  {spec}: {_first_line(e)}") from e
    measured = [x for x in trial.candidates() if x.seconds is not None]
    fastest = {x.backend: x for x in reversed(measured)}
    seconds = {name: x.seconds for name, x in fastest.items() if x.seconds is not None}
    reasons = [f"{candidate.backend} {candidate.reason}" for candidate in trial.candidates() if candidate.reason]
    # A backend that does not compile is not the fastest. One that has not enough memory now may be.
    has_memory = not any("RESOURCE_EXHAUSTED" in reason for reason in reasons)
    if not seconds or not has_memory:
        raise TuningError(f"compare: cannot measure {op}  {spec}: {'; '.join(reasons)}")
    taken = _first_of_equal(
        op, spec, [x for x in backends if x in seconds], seconds, are_pairs=trial.calls.shared is not None
    )
    config = fastest[taken].config if len(contenders[taken]) > 1 else None
    dispatch.store_compared(op, taken, spec, backends, seconds[taken], config)


def compare_in(turn: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
    """Sets the contexts of comparisons' work on the device: "drawing" for operands and first launches, and "timing"."""
    global _turn
    _turn = turn


def _first_of_equal(
    op: str, spec: Any, backends: Sequence[str], seconds: Mapping[str, float], *, are_pairs: bool = False
) -> str:
    """Returns the fastest backend, or another one that is about as fast: XLA or cuBLASLt if the kernels are short, else
    the first preferred one.

    With `are_pairs`, each of two calls had half of the copy of the operand that they share. That holds in a program if
    the kernel that shares the operand there has the same backend. But a comparison knows one of both kernels. So
    cuBLASLt is also taken if it loses less than the other half of the copy, unless XLA is the fastest.
    """
    least = min(seconds.values())
    rule = _rule(op, "shared_seconds") if are_pairs else None
    other_half = 0.0 if rule is None else rule(op, spec) / 2
    if other_half and seconds.get("xla", math.inf) > least >= seconds.get("cublaslt", math.inf) - other_half:
        return "cublaslt"
    if least < _LONG_SECONDS:
        if not seconds.get("xla", math.inf) <= least + _SHORT_TIE:
            return min(backends, key=lambda x: seconds[x])
        is_as_fast = _FIXED_SECONDS <= seconds.get("cublaslt", math.inf) <= least * _TIE
        return "cublaslt" if is_as_fast else "xla"
    equal = [x for x in backends if seconds[x] <= least * _TIE]
    preferred = (x for x in equal if dispatch.load(op, x).unpreferred(spec) is None)
    return next(preferred, equal[0])


def compile_to_compare(
    op: str, spec: Any, backend: str, config: Any, operands: Sequence[jax.ShapeDtypeStruct], results: Sequence[Any]
) -> None:
    """Compiles a program that `compare` will time: several threads can do that for several comparisons.

    Args:
      op, spec: as in `compare`.
      backend, config: a backend, in the configuration that a call gets.
      operands, results: their types.
    """
    if _beside(op, spec) is not None:
        return  # The program depends on comparisons that come before.
    device = device_for(spec.target)
    if (op, spec, backend, config) not in _ready:
        program = _program(op, spec, backend, config, device, operands, results, _calls(op, spec, operands))
        _ready[op, spec, backend, config] = program


@dataclasses.dataclass(frozen=True)
class _Calls:
    """The calls of a program that a comparison times.

    Attributes:
      number: how many there are.
      shared: the place of an operand that the second of two calls has from the first; None: each call has its own.
    """

    number: int = 1
    shared: int | None = None


def _calls(op: str, spec: Any, operands: Iterable[Any]) -> _Calls:
    """The calls of the program that a comparison times for each candidate."""
    if spec.target.platform not in hardware.GPU_PLATFORMS:
        return _Calls()
    names = dispatch.usable_backends(op, spec)
    estimates = [_estimate(op, name, spec, dispatch.default_config(op, name, spec)) for name in names]
    sizes = [ArrayType.of(x).num_bytes for x in operands]
    made = sum(x.num_bytes for x in spec.results(op))
    if min(filter(None, estimates), default=math.inf) <= SHORT_SECONDS:
        return _Calls(num_calls_of(sum(sizes), made))
    if spec.shared is None:
        return _Calls()
    place = spec.inputs(op).index(spec.shared)
    added = sum(sizes) - sizes[place] + made
    return _Calls(2, place) if added <= _OPERAND_BYTES else _Calls()


def num_calls_of(given: int, made: int) -> int:
    """How many calls the program of short kernels has, by the bytes of the operands and results of one call."""
    return min(_CALLS, max(1, min(_OPERAND_BYTES // max(given, 1), _RESULT_BYTES // max(made, 1))))


def _program(
    op: str,
    spec: Any,
    backend: str,
    config: Any,
    device: Any,
    operands: Sequence[Any],
    results: Sequence[Any],
    calls: _Calls = _Calls(),
    used: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run,
) -> Callable[..., Any]:
    """A compiled kernel: a function of its operands. With several calls, the program takes a set of operands for each
    call. A thread does not have the policy of the thread that started it. `used`: see `_Trial`.
    """
    sharding = jax.sharding.SingleDeviceSharding(device)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in operands]
    run = _timed(op, spec, used(functools.partial(dispatch.load(op, backend).run, spec, config)))
    with dispatch.policy(_INSIDE), tracing([*structs, *results]):
        if calls.number == 1:
            return jax.jit(run).lower(*structs).compile()
        return jax.jit(each(run, calls.shared)).lower(*[structs] * calls.number).compile()


def _timed(op: str, spec: Any, run: Callable[..., Any]) -> Callable[..., list[Any]]:
    """A function of a kernel's operands that returns what the program uses."""
    used = spec.used(op)
    named = lambda outs: zip(spec.outputs(op), jax.tree.leaves(outs), strict=True)
    return lambda *operands: [out for name, out in named(run(*operands)) if name in used]


def each(function: Callable[..., Any], shared: int | None = None) -> Callable[..., list[Any]]:
    """A function of several sets of operands: calls `function` with each, and returns all results.

    Args:
      function: a function of the operands.
      shared: the place of the operand that the second call of each pair takes from the first; None: each call has its
        own operands.
    """
    # A barrier between the calls would keep XLA from fusing what it fuses in a program of one call.
    one = jax.jit(function)

    def calls(*sets: Sequence[Any]) -> list[Any]:
        given = lambda i, place: sets[i - i % 2 if place == shared else i][place]
        return [one(*(given(i, place) for place in range(len(operands)))) for i, operands in enumerate(sets)]

    return calls


def queue_clock(device: Any) -> QueueClock:
    """The clock of comparisons on a GPU."""
    from jaxkernels.pallas import timer

    return QueueClock(timer.reader(device))


def _estimate(op: str, backend: str, spec: Any, config: Any) -> float | None:
    return dispatch.load(op, backend).estimate(spec, config)


def _by_estimate(op: str, backend: str, spec: Any, configs: Iterable[Any]) -> list[Any]:
    return sorted(configs, key=lambda config: _estimate(op, backend, spec, config) or 0.0)


def _ranked(op: str, backend: str, spec: Any, top: int) -> list[Any]:
    """The default, then the best by the cost model. All but the first of nearly equal estimates come last."""
    configs = [dispatch.default_config(op, backend, spec)]
    ordered = _by_estimate(op, backend, spec, dispatch.search_space(op, backend, spec))
    kinds = {f"{_estimate(op, backend, spec, config) or 0.0:.2e}": config for config in reversed(ordered)}
    representatives = [config for config in ordered if config in kinds.values()]
    rest = [config for config in ordered if config not in kinds.values()]
    configs += [config for config in [*representatives, *rest] if config not in configs]
    return configs[:top]


def _neighbours(config: Any, space: Iterable[Any]) -> list[Any]:
    """The configurations of the same design that differ from `config` in one field."""
    values = dataclasses.astuple(config)
    distance = lambda other: sum(a != b for a, b in zip(values, dataclasses.astuple(other)))
    return [other for other in space if type(other) is type(config) and distance(other) == 1]


def _rule(kernel: str, name: str) -> Callable[..., Any] | None:
    """A function of the module `tuning` of the kernel's operation, or None if it has none of this name."""
    return getattr(registry.part(registry.operation_of(kernel), "tuning"), name, None)


def _operands(kernel: str, spec: Any, device: Any) -> tuple[jax.Array, ...]:
    """The kernel's operands on a device: as the spec draws them, unless its operation has a rule."""
    if (rule := _rule(kernel, "operands")) is not None:
        return rule(kernel, spec, device)
    return spec.pack(kernel, spec.draw(spec.inputs(kernel), device))


def _beside(kernel: str, spec: Any) -> Any | None:
    """What its operation computes in one program with the kernel, in a comparison."""
    rule = _rule(kernel, "beside")
    return None if rule is None else rule(kernel, spec)


def _part_to_check(kernel: str, spec: Any) -> tuple[Any, Cut, Cut]:
    """The part of the problem whose results are compared: all of it, unless its operation has a rule."""
    rule = _rule(kernel, "part_to_check")
    return spec.part(kernel, {}) if rule is None else rule(kernel, spec)


class _Trial:
    """The candidates of one spec: compiled, checked and timed in batches."""

    def __init__(
        self,
        op: str,
        spec: Any,
        device: Any,
        begin: float,
        budget_s: float,
        measure: Measure,
        *,
        is_brief: bool = False,
    ):
        """`is_brief`: results are not checked, and the budget is for measurements alone."""
        self._op, self._spec, self._measure, self._is_brief = op, spec, measure, is_brief
        self._budget_s = budget_s
        self._end, self._end_of_compiling = begin + budget_s, begin + budget_s * _COMPILE_SHARE
        self._device = device
        self._tried: dict[tuple[str, Any], Candidate] = {}
        self._new: list[Candidate] = []
        with _turn("drawing"), jax.default_device(device), usual_promotion():
            self._operands = _operands(op, spec, device)
            #: A kernel -> the function that is timed. A comparison adds what the operation computes beside the kernel.
            self._used: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda run: run
            if is_brief and (beside := _beside(op, spec)) is not None:
                operands_of_both, self._used = beside
                self._operands = operands_of_both(self._operands)
            run, config = dispatch.load(op, "xla").run, dispatch.default_config(op, "xla", spec)
            timed = _timed(op, spec, self._used(functools.partial(run, spec, config)))
            self._types = jax.eval_shape(timed, *self._operands)
            if not is_brief:
                small, cut_operands, cut_results = _part_to_check(op, spec)
                of_part = _timed(op, small, functools.partial(run, small, config))
                reference = jax.jit(lambda *xs: of_part(*cut_operands(xs)))
                with tracing([*self._operands, *self._types]):
                    self._expected = jax.block_until_ready(reference(*self._operands))
                self._errors = jax.jit(lambda xs, ys: [_errors(x, y) for x, y in zip(cut_results(xs), ys, strict=True)])
            num_bytes = sum(ArrayType.of(x).num_bytes for x in (*self._operands, *self._types))
            self.calls = _calls(op, spec, self._operands) if is_brief else _Calls()
            num_calls = self.calls.number
            count = max(num_rotations(num_bytes)[0], num_calls)
            rotated: list[tuple[Any, ...]] = [self._operands]
            for i in range(1, count):
                shared = self.calls.shared if i % 2 else None
                rotated.append(tuple(x if j == shared else jnp.copy(x) for j, x in enumerate(rotated[-1])))
            jax.block_until_ready(rotated)
            #: What a launch takes, and the next ones.
            self._arguments: list[tuple[Any, ...]] = rotated
            if num_calls > 1:
                starts = range(0, count - num_calls + 1, num_calls)
                self._arguments = [tuple(map(list, rotated[start : start + num_calls])) for start in starts]

    def add(self, backend: str, configs: Sequence[Any], limit: int | None = None) -> None:
        """Queues configurations that were not tried yet."""
        new = [config for config in configs if (backend, config) not in self._tried][:limit]
        for config in new:
            candidate = Candidate(backend, config, _estimate(self._op, backend, self._spec, config))
            self._tried[backend, config] = candidate
            self._new.append(candidate)

    def run(self) -> None:
        """Compiles, checks and times the queued configurations."""
        new, self._new = self._new, []
        compiling = self._compile(new)
        with _turn("drawing"):
            fits = self._fitting(compiling)
        with _turn("timing"):
            self._time(fits)

    def _time(self, fits: Mapping[Candidate, Callable[..., Any]]) -> None:
        calls = {_name(c): Call(compiled, self._arguments) for c, compiled in fits.items()}
        if not calls:
            return
        left = self._budget_s if self._is_brief else max(self._end - time.monotonic(), 0.0)
        try:
            samples = self._samples(calls, left)
        except MeasureError as e:
            for candidate in fits:
                self._settle(candidate, reason=f"not measured: {e}")
            return
        for candidate in fits:
            self._settle(candidate, seconds=samples[_name(candidate)].median / self.calls.number)

    def _samples(self, calls: Mapping[str, Call], budget_s: float) -> Mapping[str, Samples]:
        if not self._is_brief or len(calls) <= _FEW:
            return self._measure(calls, regime="burst", budget_s=budget_s)
        begin = time.monotonic()
        first = self._measure(calls, regime="burst", rounds=1, budget_s=budget_s)
        least = min(sample.median for sample in first.values())
        near = {
            name: dataclasses.replace(call, seconds=first[name].median)
            for name, call in calls.items()
            if first[name].median <= _HEAT * least
        }
        left = max(budget_s - (time.monotonic() - begin), 0.0)
        return {**first, **self._measure(near, regime="burst", budget_s=left)}

    def candidates(self) -> tuple[Candidate, ...]:
        """All candidates: the fastest first, those without a time last."""
        return tuple(sorted(self._tried.values(), key=lambda c: float("inf") if c.seconds is None else c.seconds))

    def best(self) -> Candidate | None:
        first = next(iter(self.candidates()), None)
        return None if first is None or first.seconds is None else first

    def _settle(self, candidate: Candidate, **found: Any) -> None:
        self._tried[candidate.backend, candidate.config] = dataclasses.replace(candidate, **found)

    def _compile(self, candidates: list[Candidate]) -> _Compiling:
        """Compiles candidates. All are compiled before any is timed, because XLA's autotuning uses the device."""
        tried_before = len(self._tried) > len(candidates)
        defaults = {dispatch.default_config(self._op, c.backend, self._spec) for c in candidates}

        def compile_one(candidate: Candidate) -> Callable[..., Any]:
            is_certain = self._is_brief or (not tried_before and candidate.config in defaults)
            if not is_certain and time.monotonic() > (self._end if tried_before else self._end_of_compiling):
                raise TimeoutError("out of time")
            kernel = (self._op, self._spec, candidate.backend, candidate.config)
            ready = _ready.pop(kernel, None) if self._is_brief else None
            if ready is not None:
                return ready
            # XLA's autotuning uses the device.
            with _turn("drawing") if candidate.backend == "xla" else contextlib.nullcontext():
                return _program(*kernel, self._device, self._operands, self._types, self.calls, self._used)

        with concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, len(candidates) or 1)) as pool:
            return [(candidate, pool.submit(compile_one, candidate)) for candidate in candidates]

    def _fitting(self, compiling: _Compiling) -> dict[Candidate, Callable[..., Any]]:
        """The correct candidates, each launched once."""
        fits = {}
        for candidate, future in compiling:
            try:
                compiled = future.result()
                results = jax.block_until_ready(jax.tree.leaves(compiled(*self._arguments[0])))
                wrong = None if self._is_brief else self._compare(results)
            except Exception as e:  # A candidate that fails must not stop the others.
                self._settle(candidate, reason=f"dropped: {_first_line(e)}")
                continue
            if wrong is None:
                fits[candidate] = compiled
            else:
                self._settle(candidate, reason=f"dropped: {wrong}")
        # The error of a future holds this frame, and so the operands.
        future = None
        compiling.clear()
        return fits

    def _compare(self, results: list[jax.Array]) -> str | None:
        """The reason why the results are wrong, or None."""
        types = [ArrayType.of(x) for x in results]
        expected = [ArrayType.of(x) for x in self._types]
        if types != expected:
            return f"returns {', '.join(map(str, types))}, not {', '.join(map(str, expected))}"
        for i, errors in enumerate(self._errors(results, self._expected)):
            rms, largest = map(float, errors)
            if not (rms <= _MAX_RMS_ERROR and largest <= _MAX_ERROR):
                return f"result {i} is wrong: errors of {rms:.2g} of its size on average, {largest:.2g} of its maximum"
        return None


def _name(candidate: Candidate) -> str:
    return f"{candidate.backend} {candidate.config}"


def _errors(result: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Errors relative to the expected values: root mean square and maximum; infinite if NaN positions differ."""
    x, y = result.astype(jnp.float32), expected.astype(jnp.float32)
    same = (x == y) | (jnp.isnan(x) & jnp.isnan(y))
    error = jnp.where(same, 0.0, jnp.abs(x - y))
    error = jnp.where(jnp.isnan(error), jnp.inf, error)
    size = jnp.where(jnp.isfinite(y), jnp.abs(y), 0.0)
    tiny = jnp.finfo(jnp.float32).tiny
    rms = lambda z: jnp.sqrt(jnp.mean(z * z))
    return rms(error) / (rms(size) + tiny), jnp.max(error) / (jnp.max(size) + tiny)


def _first_line(error: Exception) -> str:
    return first_line(error)[:200]
