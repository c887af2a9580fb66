"""How long calls take: sides in turns, in two regimes, by the device's own clock.

>>> measure({"ours": Call(f, [operands]), "theirs": Call(g, [operands])}, regime="burst")
{"ours": Samples(...), "theirs": Samples(...)}

On a CUDA device a time is the sum of the durations of the kernels that one call launches, as CUPTI records them: what
the host does in between is not in it, nor are copies and fills that are no kernels. Elsewhere it is wall-clock time
until the result is ready.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import jax

__all__ = [
    "REGIMES", "Call", "Clock", "CuptiClock", "MeasureError", "Regime", "Samples", "WallClock", "clock_for", "measure",
    "num_rotations", "ratio",
]  # fmt: skip

#: "burst": a few launches after a pause, at the clocks of a cool chip. "sustained": launches back to back, at the
#: clocks that the power limit leaves.
Regime = Literal["burst", "sustained"]
REGIMES: tuple[Regime, ...] = ("burst", "sustained")

#: Launches of one side in one round of a burst, for short and for long kernels.
_BURST_LAUNCHES = (12, 8)
_LONG_SECONDS = 2e-3

#: Before each burst, so that power and temperature fall back.
_PAUSE_SECONDS = 0.05

#: Back to back before the counted launches of the sustained regime, and while they are counted.
_WARM_SECONDS = _COUNTED_SECONDS = 0.15

#: One visit's launches in the sustained regime: at least and at most.
_SUSTAINED_LAUNCHES = (4, 3000)

#: Rounds when the caller does not say: at least and at most, and the standard error of the median at which they end.
_ROUNDS = (3, 9)
_SETTLED = 0.004

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
    """

    function: Callable[..., Any]
    operands: Sequence[tuple[Any, ...]]

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

    @property
    def spread(self) -> float:
        """(p90 - p10) / median."""
        return (self.p90 - self.p10) / self.median


def ratio(ours: Samples, theirs: Samples) -> float:
    """How many times as fast `ours` is: the median over shared rounds of their time over ours."""
    return statistics.median(b / a for a, b in zip(ours.round_medians, theirs.round_medians, strict=True))


class Clock(Protocol):
    """Runs launches and says how long each took."""

    #: Seconds to rest before a burst.
    pause: float

    def times(self, launches: Iterator[Callable[[], Any]], probe: Callable[[], float | None]) -> list[float]:
        """Starts every launch, calls `probe` while they are under way, waits for them, and returns their seconds."""
        ...

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        """About how long one launch takes, to know how many to make: cheap, and with the host's part in it."""
        ...


class CuptiClock:
    """Durations of the kernels on a CUDA device, as the driver's CUPTI library records them.

    JAX ships the recorder with Mosaic GPU (`jax.experimental.mosaic.gpu.profiler`). Its own `measure` keeps the
    results of all launches alive and cannot change operands between them, so the recorder is used directly.
    """

    pause = _PAUSE_SECONDS

    def __init__(self, recorder: Any = None):
        if recorder is None:
            from jax.experimental.mosaic.gpu import profiler

            if profiler.mosaic_gpu_lib is None:
                raise MeasureError("measure: this jaxlib has no CUPTI recorder. Install jax[cuda13] or jax[cuda12].")
            recorder = profiler.mosaic_gpu_lib._mosaic_gpu_ext
        self._recorder = recorder

    def times(self, launches: Iterator[Callable[[], Any]], probe: Callable[[], float | None]) -> list[float]:
        count, result = 0, None
        self._recorder._cupti_init()
        try:
            for launch in launches:
                # The previous result's memory is free for the next one: its kernels are ahead in the same stream.
                result = launch()
                count += 1
            probe()
            jax.block_until_ready(result)
        finally:
            timings = self._recorder._cupti_get_timings(True)
        return _sum_launches(timings, count)

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return _host_seconds(launch)


def _sum_launches(timings: Sequence[tuple[str, float]], count: int) -> list[float]:
    """Splits a record of (kernel, milliseconds) into `count` launches of the same kernels; seconds of each."""
    if not timings or len(timings) % count:
        raise MeasureError(f"measure: {len(timings)} kernels were recorded for {count} launches, not a multiple.")
    each = len(timings) // count
    launches = [timings[i : i + each] for i in range(0, len(timings), each)]
    names = [[name for name, _ in launch] for launch in launches]
    if odd := next((launch for launch in names if sorted(launch) != sorted(names[0])), None):
        raise MeasureError(f"measure: launches differ in their kernels: {names[0]} and {odd}.")
    return [math.fsum(milliseconds for _, milliseconds in launch) / 1e3 for launch in launches]


class WallClock:
    """The host's clock, around each call until its result is ready."""

    pause = 0.0

    def times(self, launches: Iterator[Callable[[], Any]], probe: Callable[[], float | None]) -> list[float]:
        times = []
        for launch in launches:
            begin = time.perf_counter()
            jax.block_until_ready(launch())
            times.append(time.perf_counter() - begin)
        probe()
        return times

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        return _host_seconds(launch)


def _host_seconds(launch: Callable[[], Any], count: int = 3) -> float:
    """Of one of `count` launches that follow each other, by the host's clock."""
    begin = time.perf_counter()
    jax.block_until_ready([launch() for _ in range(count)])
    return (time.perf_counter() - begin) / count


def clock_for(platform: str) -> Clock:
    """The clock for calls on a platform as `jax.Device.platform` names it."""
    return CuptiClock() if platform in ("gpu", "cuda") else WallClock()


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
    """Times every call in turns: A B C, A B C, ...

    Args:
      calls: the sides by name; all have been compiled or will be on their first, uncounted, launch.
      regime: "burst" or "sustained".
      rounds: turns of each side; None: as many as it takes for every side's median to settle, within limits.
      budget_s: no further round starts after this many seconds, but for the first three.
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
    sides = {name: _Side(call, clock, probe) for name, call in calls.items()}
    for side in sides.values():
        side.warm_up()
    at_least, at_most = _ROUNDS if rounds is None else (rounds, rounds)
    for done in itertools.count():
        if done >= at_most or (done >= at_least and rounds is None and all(side.settled for side in sides.values())):
            break
        if done >= min(at_least, _ROUNDS[0]) and time.perf_counter() - begin > budget_s:
            break
        for side in sides.values():
            side.burst() if regime == "burst" else side.sustained(is_first=done == 0)
    return {name: Samples.of(side.rounds, side.probed) for name, side in sides.items()}


class _Side:
    """One call under measurement: where its rotation stands and what it took so far."""

    def __init__(self, call: Call, clock: Clock, probe: Callable[[], float | None]):
        self._call, self._clock, self._probe = call, clock, probe
        self._operands = itertools.cycle(call.operands)
        self._estimate = math.nan
        self.rounds: list[list[float]] = []
        self.probed: list[float] = []

    @property
    def settled(self) -> bool:
        """Whether the standard error of the median over rounds is small; 1.25 is a normal median's excess error."""
        medians = [statistics.median(times) for times in self.rounds]
        error = 1.25 * statistics.stdev(medians) / math.sqrt(len(medians))
        return error <= _SETTLED * statistics.median(medians)

    def warm_up(self) -> None:
        """One launch to compile and load, then a rough look at how long one takes."""
        jax.block_until_ready(self._call.function(*next(self._operands)))
        self._estimate = self._clock.rough_seconds(next(self._launches(1)))

    def burst(self) -> None:
        time.sleep(self._clock.pause)
        self._run(_BURST_LAUNCHES[self._estimate > _LONG_SECONDS])

    def sustained(self, *, is_first: bool) -> None:
        """Launches for as long as it takes, of which the first part is not counted.

        The chip comes hot from the side before, which ran for as long; only in the first round is it cool.
        """
        few, many = _SUSTAINED_LAUNCHES
        launches_in = lambda seconds: min(max(math.ceil(seconds / max(self._estimate, 1e-7)), few), many)
        self._run(launches_in(_COUNTED_SECONDS), launches_in(_WARM_SECONDS if is_first else _WARM_SECONDS / 3))

    def _run(self, count: int, uncounted: int = 0) -> None:
        times = self._clock.times(self._launches(uncounted + count), self._record_probe)
        self.rounds.append(times[uncounted:])

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
