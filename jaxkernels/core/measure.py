"""How long calls take: sides in turns, in two regimes, by the device's own clock.

>>> measure({"ours": Call(f, [operands]), "theirs": Call(g, [operands])}, regime="burst")
{"ours": Samples(...), "theirs": Samples(...)}

On a CUDA device a time is the sum of the durations of the kernels that one call launches, as CUPTI records them: what
the host does in between is not in it, nor are copies and fills that are no kernels. Elsewhere it is wall-clock time
until the result is ready. `QueueClock` needs no profiler.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from jaxkernels.core import hardware

__all__ = [
    "REGIMES", "Call", "Clock", "CuptiClock", "MeasureError", "QueueClock", "Regime", "Samples", "Visit", "WallClock",
    "clock_for", "measure", "num_rotations", "ratio",
]  # fmt: skip

#: "burst": a few launches after a pause, at the clocks of a cool chip. "sustained": launches back to back, at the
#: clocks that the power limit leaves.
Regime = Literal["burst", "sustained"]
REGIMES: tuple[Regime, ...] = ("burst", "sustained")

#: Launches of one side in one round of a burst: as many as fill _BURST_SECONDS[0], between the numbers here; fewer of
#: long kernels, so that a burst ends after _BURST_SECONDS[1], but at least _FEW.
_BURST_LAUNCHES = (12, 50)
_BURST_SECONDS = (3e-3, 20e-3)
_FEW = 3

#: The chip rests before a burst for this many times the burst's length, so that power and temperature fall back.
_REST = 3

#: Uncounted at the start of the sustained regime, all sides together, and at the start of each later turn, which comes
#: from another side's load; counted in each turn. Turns are short because the power limit does not hold the clock
#: still: it wandered between 1155 and 1560 MHz within one load (H200, 8192 x 6144 x 4096), and moved ratios of three
#: rounds of 52 ms by 14 %.
_WARM_SECONDS, _TURN_SECONDS, _COUNTED_SECONDS = 0.3, 0.005, 0.015

#: One turn's counted launches in the sustained regime: at least and at most.
_SUSTAINED_LAUNCHES = (1, 1000)

#: Rounds when the caller does not say: at least and at most, and the standard error of a ratio at which bursts end.
_ROUNDS = {"burst": (5, 15), "sustained": (5, 15)}
_SETTLED = 0.003

#: The larger L2 cache of the chips we know, twice: H100 and H200 have 50 MB (NVIDIA H100 Tensor Core GPU Architecture).
_CACHE_BYTES = 2 * 50_000_000

#: Copies of small operands are not multiplied beyond this: they then stay warm in the cache.
_MAX_ROTATIONS = 256


class MeasureError(RuntimeError):
    """The device's record of a measurement does not add up to one time for each launch."""


@dataclasses.dataclass(frozen=True)
class Call:
    """What is timed.

    Attributes:
      function: a compiled or jitted function of arrays.
      operands: one or more tuples of arguments; launches take them in turn, so that together they can exceed the cache.
      seconds: about how long a launch takes, where that is known: the call is then not warmed up again.
    """

    function: Callable[..., Any]
    operands: Sequence[tuple[Any, ...]]
    seconds: float | None = None

    def __post_init__(self) -> None:
        if not self.operands:
            raise ValueError("Call: operands must hold at least one tuple of arguments; got none.")


@dataclasses.dataclass(frozen=True)
class Samples:
    """The times of one side, in seconds.

    Attributes:
      median, p10, p90: of all launches counted.
      count: launches counted.
      round_medians: the median of each round, in the order measured: sides share rounds, so drift cancels in the
        quotient of two sides' rounds (see `ratio`).
      probed: what `probe` returned in each round while the launches were under way.
    """

    median: float
    p10: float
    p90: float
    count: int
    round_medians: tuple[float, ...]
    probed: tuple[float, ...] = ()

    @classmethod
    def of(cls, rounds: Sequence[Sequence[float]], probed: Sequence[float] = ()) -> Samples:
        """Sums up the times of each round."""
        times = sorted(itertools.chain.from_iterable(rounds))
        # "inclusive": the percentiles of what was measured, never beyond its ends.
        deciles = statistics.quantiles(times, n=10, method="inclusive") if len(times) > 1 else times * 9
        return cls(
            median=statistics.median(times),
            p10=deciles[0],
            p90=deciles[8],
            count=len(times),
            round_medians=tuple(map(statistics.median, rounds)),
            probed=tuple(probed),
        )

    def divided(self, count: int) -> Samples:
        """The times of one of `count` equal parts of each launch."""
        return dataclasses.replace(
            self,
            median=self.median / count,
            p10=self.p10 / count,
            p90=self.p90 / count,
            round_medians=tuple(seconds / count for seconds in self.round_medians),
        )

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median


def ratio(ours: Samples, theirs: Samples) -> float:
    """How many times as fast `ours` is: the median over shared rounds of their time over ours."""
    return statistics.median(b / a for a, b in zip(ours.round_medians, theirs.round_medians, strict=True))


@dataclasses.dataclass(frozen=True)
class Visit:
    """Launches of one side that follow each other.

    Attributes:
      function: what is launched; visits with the same function launch the same kernels.
      launches: makes an iterator that starts one launch at each step.
      count: how many there are.
      probe: called while they are under way.
      rest: seconds to wait before them.
    """

    function: Callable[..., Any]
    launches: Callable[[], Iterator[Callable[[], Any]]]
    count: int
    probe: Callable[[], None]
    rest: float = 0.0


class Clock(Protocol):
    """Runs launches and says how long each took."""

    #: Seconds to rest before a burst, at least and at most.
    rests: tuple[float, float]

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        """Makes the visits one after the other, each when the one before has ended; the seconds of their launches."""
        ...

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        """About how long one launch takes, to know how many to make: cheap, and with the host's part in it."""
        ...


class CuptiClock:
    """Durations of the kernels on a CUDA device, as the driver's CUPTI library records them.

    JAX ships the recorder with Mosaic GPU (`jax.experimental.mosaic.gpu.profiler`). Its own `measure` keeps the
    results of all launches alive and cannot change operands between them, so the recorder is used directly.

    To start and to stop it takes time, in which the chip cools: visits share one record as soon as the kernels of every
    function in it are known, from a record that held nothing else.
    """

    rests = (0.01, 0.06)

    def __init__(self, recorder: Any = None):
        if recorder is None:
            from jax.experimental.mosaic.gpu import profiler

            if profiler.mosaic_gpu_lib is None:
                raise MeasureError("measure: this jaxlib has no CUPTI recorder. Install jax[cuda13] or jax[cuda12].")
            recorder = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        self._recorder = recorder
        #: function -> how often a launch runs each kernel.
        self._kernels: dict[Callable[..., Any], collections.Counter[str]] = {}

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        if all(visit.function in self._kernels for visit in visits):
            record = self._record(visits)
            if len(record) == self._num_kernels(visits):
                return self._split(record, visits)
            # XLA may put a program into a CUDA graph after some launches: what was a copy can be a kernel there.
            for visit in visits:
                self._kernels.pop(visit.function, None)
        times = []
        for visit in visits:
            record = self._record([visit])
            if visit.function not in self._kernels:
                self._kernels[visit.function] = _kernels(record, visit.count)
            times += self._split(record, [visit])
        return times

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return _host_seconds(launch)

    def _record(self, visits: Sequence[Visit]) -> list[tuple[str, float]]:
        """The (kernel, milliseconds) of all visits, in the order of their launches."""
        result = None
        self._recorder._cupti_init()
        try:
            for visit in visits:
                time.sleep(visit.rest)
                for launch in visit.launches():
                    # The previous result's memory is free for the next one: its kernels are ahead in the same stream.
                    result = launch()
                visit.probe()
                jax.block_until_ready(result)
        finally:
            timings = self._recorder._cupti_get_timings(True)
        return timings

    def _num_kernels(self, visits: Sequence[Visit]) -> int:
        return sum(visit.count * self._kernels[visit.function].total() for visit in visits)

    def _split(self, record: Sequence[tuple[str, float]], visits: Sequence[Visit]) -> list[list[float]]:
        """Seconds of each launch of each visit, the sum of its kernels."""
        if len(record) != (expected := self._num_kernels(visits)):
            raise MeasureError(f"measure: {len(record)} kernels were recorded where {expected} ran.")
        times, position = [], 0
        for visit in visits:
            end = position + self._num_kernels([visit])
            times.append(_times_of(record[position:end], self._kernels[visit.function], visit.count))
            position = end
        return times


def _times_of(record: Sequence[tuple[str, float]], kernels: collections.Counter[str], count: int) -> list[float]:
    """Seconds of each of `count` launches. XLA may run kernels of a launch side by side: their order in a record may
    change. Those of one name are in the order of the launches.
    """
    by_name = collections.defaultdict[str, list[float]](list)
    for name, milliseconds in record:
        by_name[name].append(milliseconds)
    for name in dict.fromkeys([*kernels, *by_name]):
        expected, found = kernels[name] * count, len(by_name[name])
        if found != expected:
            raise MeasureError(f"measure: kernel {name} was recorded {found} times where it ran {expected} times.")
    columns = zip(*(by_name[name][i::times] for name, times in kernels.items() for i in range(times)))
    return [math.fsum(column) / 1e3 for column in columns]


def _kernels(record: Sequence[tuple[str, float]], count: int) -> collections.Counter[str]:
    """How often each of `count` launches runs each kernel."""
    names = collections.Counter(name for name, _ in record)
    for name, found in names.items():
        if found % count:
            raise MeasureError(
                f"measure: kernel {name} was recorded {found} times for {count} launches, not a multiple."
            )
    if not names:
        raise MeasureError(f"measure: no kernels were recorded for {count} launches.")
    return collections.Counter({name: found // count for name, found in names.items()})


class WallClock:
    """The host's clock, around each call until its result is ready.

    Args:
      rests: seconds to rest before a burst, at least and at most.
    """

    def __init__(self, rests: tuple[float, float] = (0.0, 0.0)):
        self.rests = rests

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        return [self._times(visit) for visit in visits]

    def _times(self, visit: Visit) -> list[float]:
        times = []
        time.sleep(visit.rest)
        for launch in visit.launches():
            begin = time.perf_counter()
            jax.block_until_ready(launch())
            times.append(time.perf_counter() - begin)
        visit.probe()
        return times

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return _host_seconds(launch)


#: Launches between two readings of a `QueueClock`. JAX lets 32 computations of a device be in flight. With more
#: launches, a busy host is late more often.
_QUEUED = 6

#: A visit has at most so many pairs of readings, and times no further launches.
_READINGS = 3

#: The device waits for so many nanoseconds before the launches: at first and at most.
_WAITS = (2_000_000, 8_000_000)

#: Waits become longer if less than so many seconds were left of one when the last launch was in the queue.
_LEFT_SECONDS = 2e-5


class QueueClock:
    """The device's clock before and after launches that wait in its queue.

    The host puts a kernel that waits and then reads the clock, a few launches, and a second reading into the queue.
    While the device waits, the host is ahead of it. So the time between the readings is that of the launches, with the
    pauses between their kernels.

    A busy host may be late, and the device then waits for it between launches. That makes times longer, never shorter:
    the least time of a visit counts for all its launches. The clock is for bursts: it makes no more than 18 launches of
    a visit, so that a comparison is brief.

    It is less exact than `CuptiClock` for launches of few microseconds. But CUPTI has one user in a process, and JAX's
    recorder ends the process if records are lost, which happened after a trace by `jax.profiler`.

    Args:
      read: puts a kernel into the queue that waits for so many nanoseconds and then reads the device's clock. It
        returns an array of one element: nanoseconds modulo 2**32.
    """

    rests = (0.0, 0.0)

    def __init__(self, read: Callable[[int], Any]):
        self._read = read
        self._wait = _WAITS[0]
        jax.block_until_ready(read(0))  # Compiles it.

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        return [self._times(visit) for visit in visits]

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return _host_seconds(launch)

    def _times(self, visit: Visit) -> list[float]:
        time.sleep(visit.rest)
        launches, times = list(itertools.islice(visit.launches(), _QUEUED * _READINGS)), []
        num_parts = math.ceil(len(launches) / _QUEUED)
        for i in range(num_parts):
            # Launches that follow each other have different operands, so that these are not in the cache. No part is
            # launched twice: its operands would be there.
            part = launches[i * len(launches) // num_parts : (i + 1) * len(launches) // num_parts]
            times.append(self._seconds(part) / len(part))
        visit.probe()
        return [min(times)] * len(launches)

    def _seconds(self, launches: Sequence[Callable[[], Any]]) -> float:
        begin, result = self._read(self._wait), None
        for launch in launches:
            # The previous result's memory is free for the next one: its kernels are ahead in the same stream.
            result = launch()
        end = self._read(0)
        queued = time.perf_counter()
        jax.block_until_ready((result, end))
        left = time.perf_counter() - queued
        seconds = (np.asarray(end).item() - np.asarray(begin).item()) % 2**32 / 1e9
        # The wait may have ended before the last launch was in the queue. The next waits are longer.
        if left <= _LEFT_SECONDS + seconds:
            self._wait = min(2 * self._wait, _WAITS[1])
        return seconds


def _host_seconds(launch: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(launch())
    return time.perf_counter() - begin


def clock_for(platform: str) -> Clock:
    """The clock for calls on a platform as `jax.Device.platform` names it."""
    return CuptiClock() if platform in hardware.GPU_PLATFORMS else WallClock()


def num_rotations(num_bytes: int) -> tuple[int, bool]:
    """How many copies of operands of this size exceed the cache, and whether they do.

    Operands too small for that many copies are timed as one set, warm.
    """
    copies = math.ceil(_CACHE_BYTES / max(num_bytes, 1))
    return (copies, True) if copies <= _MAX_ROTATIONS else (1, False)


def measure(
    calls: Mapping[str, Call],
    *,
    regime: Regime = "burst",
    rounds: int | None = None,
    budget_s: float = math.inf,
    clock: Clock | None = None,
    probe: Callable[[], float | None] = lambda: None,
) -> dict[str, Samples]:
    """Times every call in turns: A B C, C B A, A B C, ...

    Args:
      calls: the sides by name; all have been compiled or will be on their first, uncounted, launch.
      regime: "burst" or "sustained".
      rounds: turns of each side; None: bursts go on until the sides' ratios have settled, and the sustained regime
        makes as many rounds as fit into the budget, both within limits.
      budget_s: no burst starts a further round after this many seconds, but for the first three.
      clock: the clock; None: the one for the devices of the operands.
      probe: called once for each side and round while its launches are under way; a number it returns (the chip's
        clock rate, say) goes into `Samples.probed`.

    Returns:
      The samples of each side.

    Raises:
      MeasureError: the device's record does not match the launches.
      ValueError: the regime is unknown, or rounds is below 1.
    """
    if regime not in REGIMES:
        raise ValueError(f"measure: regime must be one of {REGIMES}; got {regime!r}.")
    if rounds is not None and rounds < 1:
        raise ValueError(f"measure: rounds must be at least 1, or None; got {rounds}.")
    if not calls:
        return {}
    begin = time.perf_counter()
    clock = clock or clock_for(_platform(calls))
    sides = {name: _Side(call, probe) for name, call in calls.items()}
    for side in sides.values():
        side.warm_up(clock)
    turns = list(sides.values())
    if regime == "burst":
        _bursts(turns, clock, rounds, begin + budget_s)
    else:
        _load(turns, clock, rounds, budget_s)
    return {name: Samples.of(side.rounds, side.probed) for name, side in sides.items()}


def _bursts(sides: list[_Side], clock: Clock, rounds: int | None, deadline: float) -> None:
    at_least, at_most = _ROUNDS["burst"] if rounds is None else (rounds, rounds)
    for done in range(at_most):
        if done >= at_least and rounds is None and _settled(sides):
            break
        if done >= min(at_least, _FEW) and time.perf_counter() > deadline:
            break
        # Every other round in the opposite order: what changes steadily then favours nobody.
        turns = sides[:: -1 if done % 2 else 1]
        for side, times in zip(turns, clock.times([side.burst(clock.rests) for side in turns]), strict=True):
            side.rounds.append(times)


def _load(sides: list[_Side], clock: Clock, rounds: int | None, budget_s: float) -> None:
    """All rounds in one go: between two calls of the clock the chip would cool."""
    if rounds is None:
        at_least, at_most = _ROUNDS["sustained"]
        fitting = (budget_s - _WARM_SECONDS) / sum(side.turn_seconds for side in sides)
        rounds = max(at_least, int(min(fitting, at_most)))
    turns = [(side, done) for done in range(rounds) for side in sides[:: -1 if done % 2 else 1]]
    uncounted = [_WARM_SECONDS / len(sides) if done == 0 else _TURN_SECONDS for _, done in turns]
    visits = [side.load(seconds) for (side, _), seconds in zip(turns, uncounted)]
    for (side, _), times in zip(turns, clock.times(visits), strict=True):
        side.rounds.append(times[-side.counted :])


def _settled(sides: Sequence[_Side]) -> bool:
    """Whether the standard error of every side's time, relative to the mean of its round, is small."""
    by_round = [
        [statistics.median(times) for times in times_of_round] for times_of_round in zip(*(s.rounds for s in sides))
    ]
    if len(sides) > 1:  # What all sides of a round share does not move their ratios.
        by_round = [[x / statistics.geometric_mean(medians) for x in medians] for medians in by_round]
    errors = [statistics.stdev(values) / statistics.fmean(values) for values in zip(*by_round)]
    # 1.25: by so much the error of a normal sample's median exceeds that of its mean.
    return 1.25 * max(errors) / math.sqrt(len(by_round)) <= _SETTLED


class _Side:
    """One call under measurement: where its rotation stands and what it took so far."""

    def __init__(self, call: Call, probe: Callable[[], float | None]):
        self._call, self._probe = call, probe
        self._operands = itertools.cycle(call.operands)
        self._estimate = math.nan if call.seconds is None else call.seconds
        self.rounds: list[list[float]] = []
        self.probed: list[float] = []

    def warm_up(self, clock: Clock) -> None:
        """One launch to compile and load, then a rough look at how long one takes."""
        if self._call.seconds is None:
            jax.block_until_ready(self._call.function(*next(self._operands)))
            self._estimate = clock.rough_seconds(next(self._launches(1)))

    def burst(self, rests: tuple[float, float]) -> Visit:
        few, many = _BURST_LAUNCHES
        short, long = _BURST_SECONDS
        count = min(self._launches_in(short, few, many), self._launches_in(long, _FEW, many))
        least, most = rests
        return self._visit(count, rest=min(max(_REST * count * self._estimate, least), most))

    @property
    def counted(self) -> int:
        """Launches that count in one turn of the sustained regime."""
        return self._launches_in(_COUNTED_SECONDS, *_SUSTAINED_LAUNCHES)

    @property
    def turn_seconds(self) -> float:
        return self._estimate * (self.counted + self._launches_in(_TURN_SECONDS, 1, _SUSTAINED_LAUNCHES[1]))

    def load(self, uncounted_seconds: float) -> Visit:
        """A turn of the sustained regime: only its last launches count."""
        return self._visit(self._launches_in(uncounted_seconds, 1, 5 * _SUSTAINED_LAUNCHES[1]) + self.counted)

    def _launches_in(self, seconds: float, few: int, many: int) -> int:
        return min(max(math.ceil(seconds / max(self._estimate, 1e-7)), few), many)

    def _visit(self, count: int, rest: float = 0.0) -> Visit:
        launches = functools.partial(self._launches, count)
        return Visit(self._call.function, launches, count, self._record_probe, rest)

    def _record_probe(self) -> None:
        if (value := self._probe()) is not None:
            self.probed.append(value)

    def _launches(self, count: int) -> Iterator[Callable[[], Any]]:
        for _ in range(count):
            operands = next(self._operands)
            yield lambda operands=operands: self._call.function(*operands)


def _platform(calls: Mapping[str, Call]) -> str:
    """Where the first array among the operands lives; JAX's default backend if there is none."""
    arrays = (x for call in calls.values() for x in jax.tree.leaves(call.operands[0]) if isinstance(x, jax.Array))
    first = next(arrays, None)
    return jax.default_backend() if first is None else next(iter(first.devices())).platform
