"""The benchmarks' method: turns, rotation, rounds, both regimes, CUPTI's record; with clocks made for the tests."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly

from jaxkernels.core import measure as lib
from jaxkernels.core.measure import (
    Call,
    CuptiClock,
    MeasureError,
    QueueClock,
    Samples,
    Visit,
    WallClock,
    measure,
    num_rotations,
    ratio,
)
from jaxkernels.pallas import timer


class FakeClock:
    """Runs launches, writes down what they return, and says they took what `seconds` of that is."""

    rests = (0.01, 0.06)

    def __init__(self, seconds: Callable[[Any], float]):
        self.launched: list[Any] = []
        #: (number of visits, rests) of each call.
        self.calls: list[tuple[int, list[float]]] = []
        self._seconds = seconds

    def times(self, visits: Sequence[Visit]) -> list[list[float]]:
        self.calls.append((len(visits), [visit.rest for visit in visits]))
        times = []
        for visit in visits:
            results = [launch() for launch in visit.launches()]
            assert len(results) == visit.count
            self.launched += results
            visit.probe()
            times.append([self._seconds(result) for result in results])
        return times

    def rough_seconds(self, launch: Callable[[], Any]) -> float:
        self.launched.append(launch())
        return self._seconds(self.launched[-1])


def side(name: str, copies: int = 1) -> Call:
    return Call(lambda i: (name, i), [(i,) for i in range(copies)])


def runs(launched: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """(name, launches) of each visit."""
    visits: list[tuple[str, int]] = []
    for name, _ in launched:
        visits = [*visits[:-1], (name, visits[-1][1] + 1)] if visits and visits[-1][0] == name else [*visits, (name, 1)]
    return visits


def test_sides_take_turns():
    clock = FakeClock(lambda result: {"a": 1e-4, "b": 3e-4}[result[0]])
    samples = measure({"a": side("a"), "b": side("b")}, rounds=3, clock=clock)
    # One launch of each to know how long one takes, then A B, B A, A B.
    assert runs(clock.launched) == [("a", 1), ("b", 1), ("a", 30), ("b", 2 * 12), ("a", 2 * 30), ("b", 12)]
    assert [rests for _, rests in clock.calls] == [
        pytest.approx(x) for x in ([0.01, 0.0108], [0.0108, 0.01], [0.01, 0.0108])
    ]
    assert samples["a"] == Samples(1e-4, 1e-4, 1e-4, 90, (1e-4,) * 3)
    assert ratio(samples["a"], samples["b"]) == pytest.approx(3)


@pytest.mark.parametrize(
    ("seconds", "launches", "rest"),
    [(5e-6, 50, 0.01), (1e-4, 30, 0.01), (1e-3, 12, 0.036), (5e-3, 4, 0.06), (43e-3, 3, 0.06)],
)
def test_bursts_are_as_long_as_their_kernels_ask_for(seconds, launches, rest):
    clock = FakeClock(lambda _: seconds)
    assert measure({"a": side("a")}, rounds=2, clock=clock)["a"].count == 2 * launches
    assert clock.calls[0] == (1, [pytest.approx(rest)])


def test_operands_rotate_through_all_rounds():
    clock = FakeClock(lambda _: 3e-4)
    measure({"a": side("a", copies=5)}, rounds=2, clock=clock)
    # The first copy went into the launch that loads the program, the second into the rough look.
    assert [i for _, i in clock.launched] == [(1 + n) % 5 for n in range(1 + 2 * 12)]


def test_a_call_whose_time_is_known_is_not_warmed_up():
    clock = FakeClock(lambda _: 3e-4)
    call = Call(lambda i: i, [(0,), (1,)], seconds=1e-3)
    measure({"a": call}, rounds=1, clock=clock)
    assert clock.launched == [0, 1] * 6
    assert clock.calls == [(1, [pytest.approx(0.036)])]


def by_round(*factors: Callable[[int], float]) -> FakeClock:
    """Sides "0", "1", ... take 0.3 ms, times their factor in each round of bursts."""
    counts = [-1] * len(factors)  # The rough look.

    def seconds(result: tuple[str, int]) -> float:
        i = int(result[0])
        counts[i] += 1
        return 3e-4 * factors[i](max(counts[i] - 1, 0) // 12)

    return FakeClock(seconds)


def num_rounds(*factors: Callable[[int], float]) -> int:
    sides = {str(i): side(str(i)) for i in range(len(factors))}
    return len(measure(sides, clock=by_round(*factors))["0"].round_medians)


def test_rounds_end_when_every_ratio_has_settled():
    steady, drifting = lambda i: 1.0, lambda i: 1 + 0.02 * i
    noisy = lambda i: 1 + 0.05 * (i % 2)
    assert num_rounds(steady) == 5
    assert num_rounds(steady, steady) == 5
    assert num_rounds(drifting) == 15
    # A drift of all sides at once leaves the ratios as they are; what one does alone moves them.
    assert num_rounds(drifting, drifting) == 5
    assert num_rounds(steady, drifting) == 15
    assert num_rounds(steady, noisy) == 15


def test_no_burst_starts_beyond_the_budget(monkeypatch):
    now = iter(range(0, 10**6, 10))
    monkeypatch.setattr(lib.time, "perf_counter", lambda: float(next(now)))
    samples = measure({"a": side("a")}, rounds=50, budget_s=5, clock=FakeClock(lambda _: 1e-4))
    assert len(samples["a"].round_medians) == 3


def test_sustained_counts_only_what_comes_after_the_warm_up():
    """30 launches of 10 ms warm up in the first round, 1 in the next; 2 are counted in each."""
    count = iter(range(10**6))

    def seconds(_: Any) -> float:
        i = next(count) - 1  # After the rough look.
        return 1.0 if 0 <= i < 30 or i == 32 else 0.01

    clock = FakeClock(seconds)
    samples = measure({"a": side("a")}, regime="sustained", rounds=2, clock=clock)["a"]
    assert samples.count == 4
    assert (samples.p10, samples.p90) == pytest.approx((0.01, 0.01))
    assert next(count) == 1 + 32 + 3
    assert clock.calls == [(2, [0.0, 0.0])]


def test_sustained_rounds_are_one_load_within_the_budget():
    """Turns of 5 + 15 ms of two sides, after 0.3 s; fewer rounds fit than are made at most, or at least."""
    rounds = []
    for budget_s in (0.0, 0.59, 10.0):
        clock = FakeClock(lambda _: 1e-3)
        samples = measure({"a": side("a"), "b": side("b")}, regime="sustained", budget_s=budget_s, clock=clock)
        rounds.append(len(samples["a"].round_medians))
        assert [number for number, _ in clock.calls] == [2 * rounds[-1]]
        assert runs(clock.launched[2:])[:3] == [("a", 165), ("b", 165 + 20), ("a", 2 * 20)]
    assert rounds == [5, 7, 15]


def test_what_the_probe_says_is_kept_by_side():
    clocks = iter([1980.0, 1700.0, 1690.0, 1975.0])
    samples = measure(
        {"a": side("a"), "b": side("b")}, rounds=2, clock=FakeClock(lambda _: 1e-4), probe=lambda: next(clocks)
    )
    assert (samples["a"].probed, samples["b"].probed) == ((1980, 1975), (1700, 1690))


def test_samples_are_percentiles_within_what_was_measured():
    samples = Samples.of([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]])
    assert (samples.median, samples.p10, samples.p90, samples.count) == (6, 2, 10, 11)
    assert samples.round_medians == (3, 8.5)
    assert samples.spread == pytest.approx(8 / 6)
    assert Samples.of([[3.0]]) == Samples(3, 3, 3, 1, (3,))


def test_ratio_is_of_shared_rounds():
    """A drift of both sides cancels, even if it is larger than their difference."""
    ours, theirs = Samples.of([[1.0], [2.0], [4.0]]), Samples.of([[1.1], [2.2], [4.4]])
    assert ratio(ours, theirs) == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(regime="idle"), "measure: regime must be one of ('burst', 'sustained'); got 'idle'."),
        (dict(rounds=0), "measure: rounds must be at least 1, or None; got 0."),
    ],
)
def test_wrong_arguments(arguments, message):
    with raises_exactly(ValueError, message):
        measure({"a": side("a")}, **arguments)


def test_a_call_needs_operands():
    with raises_exactly(ValueError, "Call: operands must hold at least one tuple of arguments; got none."):
        Call(print, [])


def test_rotation_exceeds_the_cache_or_is_left():
    assert num_rotations(30_000_000) == (4, True)
    assert num_rotations(500_000_000) == (1, True)
    assert num_rotations(1000) == (1, False)


class Recorder:
    """Mosaic GPU's CUPTI recorder, as `jax.experimental.mosaic.gpu.profiler` uses it."""

    def __init__(self, *timings: tuple[str, float]):
        self.timings, self.calls = timings, []

    def _cupti_init(self) -> None:
        self.calls.append("init")

    def _cupti_get_timings(self, finalize: bool) -> list[tuple[str, float]]:
        self.calls.append(f"get {finalize}")
        return list(self.timings)


def visit(function: Callable[..., Any], count: int, probe: Callable[[], None] = lambda: None) -> Visit:
    return Visit(function, lambda: (function for _ in range(count)), count, probe)


def left() -> int:
    return 1


def right() -> int:
    return 2


def test_cupti_sums_the_kernels_of_each_launch():
    recorder = Recorder(("gemm", 1.0), ("reduce", 0.25), ("gemm", 2.0), ("reduce", 0.5))
    probed = []
    (times,) = CuptiClock(recorder).times([visit(left, 2, lambda: probed.append("now"))])
    assert times == [1.25e-3, 2.5e-3]
    assert recorder.calls == ["init", "get True"]
    assert probed == ["now"]


def test_cupti_accepts_kernels_of_one_launch_in_any_order():
    recorder = Recorder(("left", 1.0), ("right", 2.0), ("right", 2.0), ("left", 1.0))
    assert CuptiClock(recorder).times([visit(left, 2)]) == [[3e-3, 3e-3]]


def test_kernels_of_a_name_belong_to_the_launches_in_their_order():
    """Others may stand between them. Here a launch has two kernels of one name."""
    names = ["sum", "gemm", "gemm", "sum", "gemm", "gemm"]
    recorder = Recorder(*zip(names, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]))
    assert CuptiClock(recorder).times([visit(left, 2)]) == [[7e-3, 56e-3]]
    recorder.timings = list(zip(["sum", "sum", "gemm", "gemm", "gemm", "gemm"], [1.0, 8.0, 2.0, 4.0, 16.0, 32.0]))
    assert CuptiClock(recorder).times([visit(left, 2)]) == [[7e-3, 56e-3]]


def test_cupti_refuses_other_kernels_than_it_knows():
    recorder = Recorder(("gemm", 1.0), ("sum", 1.0))
    clock = CuptiClock(recorder)
    clock.times([visit(left, 1)])
    recorder.timings = [("gemm", 1.0), ("gemm", 1.0)]
    with raises_exactly(MeasureError, "measure: kernel gemm was recorded 2 times where it ran 1 times."):
        clock.times([visit(left, 1)])


def test_cupti_keeps_one_record_of_sides_whose_kernels_are_known():
    recorder = Recorder(("gemm", 1.0))
    clock = CuptiClock(recorder)
    assert clock.times([visit(left, 1)]) == [[1e-3]]
    recorder.timings = [("split", 1.0), ("sum", 1.0)]
    assert clock.times([visit(right, 1)]) == [[2e-3]]
    recorder.calls.clear()
    recorder.timings = [("gemm", 1.0), ("gemm", 2.0), ("split", 3.0), ("sum", 1.0), ("gemm", 5.0)]
    assert clock.times([visit(left, 2), visit(right, 1), visit(left, 1)]) == [[1e-3, 2e-3], [4e-3], [5e-3]]
    assert recorder.calls == ["init", "get True"]
    # One that is new makes each have its own record.
    recorder.timings = [("gemm", 1.0)]
    assert clock.times([visit(left, 1), visit(lambda: 3, 1)]) == [[1e-3], [1e-3]]
    assert recorder.calls == ["init", "get True"] * 3


@pytest.mark.parametrize(
    ("timings", "message"),
    [
        ([], "measure: no kernels were recorded for 2 launches."),
        ([("a", 1.0)] * 3, "measure: kernel a was recorded 3 times for 2 launches, not a multiple."),
        ([("a", 1.0), ("b", 1.0)], "measure: kernel a was recorded 1 times for 2 launches, not a multiple."),
    ],
)
def test_a_record_that_does_not_add_up_is_refused(timings, message):
    with raises_exactly(MeasureError, message):
        CuptiClock(Recorder(*timings)).times([visit(left, 2)])


def test_cupti_learns_anew_what_a_launch_consists_of():
    """For example, XLA puts a program into a CUDA graph, in which a copy is a kernel."""
    recorder = Recorder(("gemm", 1.0))
    clock = CuptiClock(recorder)
    clock.times([visit(left, 1)])
    recorder.timings = [("gemm", 1.0), ("copy", 0.5)]
    recorder.calls.clear()
    assert clock.times([visit(left, 1)]) == [[1.5e-3]]
    assert clock.times([visit(left, 1)]) == [[1.5e-3]]
    assert recorder.calls == ["init", "get True"] * 3


def test_the_recorder_stops_after_a_failed_launch():
    recorder = Recorder()

    def fail() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        CuptiClock(recorder).times([visit(fail, 1)])
    assert recorder.calls == ["init", "get True"]


def test_the_recorder_has_the_names_that_jax_gives_it():
    from jax.experimental.mosaic.gpu import profiler

    assert hasattr(profiler, "mosaic_gpu_lib")
    names = profiler.Cupti.measure.__code__.co_consts
    inner = {name for const in names if hasattr(const, "co_names") for name in const.co_names}
    assert {"_cupti_init", "_cupti_get_timings", "_mosaic_gpu_ext", "mosaic_gpu_lib"} <= inner


def test_the_host_clock_waits_for_results():
    f = jax.jit(lambda x: x @ x)
    small, large = jnp.ones((8, 8)), jnp.ones((512, 512))
    samples = measure({"small": Call(f, [(small,)]), "large": Call(f, [(large,)])}, rounds=3)
    assert samples["large"].median > 2 * samples["small"].median
    assert isinstance(lib.clock_for("cpu"), WallClock)


class Machine:
    """A host and a device with a queue, on a clock that only they move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = self.free = 0.0
        #: The waits of all readings, in nanoseconds.
        self.waits: list[int] = []
        self._readings: list[np.ndarray] = []
        self._ends: dict[int, float] = {}
        monkeypatch.setattr(lib.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(jax, "block_until_ready", self.wait)

    def enqueue(self, seconds: float, host_seconds: float = 1e-5) -> float:
        """The host takes its time, then the device does the work when it is free. Returns when it has ended."""
        self.now += host_seconds
        self.free = max(self.free, self.now) + seconds
        return self.free

    def read(self, nanoseconds: int) -> np.ndarray:
        self.waits.append(nanoseconds)
        end = self.enqueue(nanoseconds / 1e9)
        self._ends[id(reading := _low_bits(end))] = end
        self._readings.append(reading)
        return reading

    def wait(self, results: Any) -> None:
        """Until all of these have ended."""
        ends = [self._ends.get(id(x), x) for x in jax.tree.leaves(results)]
        self.now = max(self.now, *ends) + 1e-5


def _low_bits(seconds: float) -> np.ndarray:
    """Nanoseconds modulo 2**32, as a signed number. They overflow after a millisecond."""
    return np.array([(round(seconds * 1e9) + 2**32 - 1_000_000) % 2**32], np.uint32).view(np.int32)


@pytest.mark.parametrize(
    ("seconds", "host_seconds", "longest"),
    [
        (2e-6, 3e-5, 2_000_000),
        (2e-6, 4e-4, 4_000_000),  # The host takes longer than the wait: it becomes longer.
        (2e-6, 1e-3, 8_000_000),
        (1e-4, 3e-5, 2_000_000),
        (3e-3, 4e-4, 4_000_000),
        # The last launch is long: that it is left does not tell that the device has not waited.
        (1e-4, 3.5e-4, 4_000_000),
        (6e-5, 3e-4, 2_000_000),
        (1.5e-4, 3.5e-4, 4_000_000),
    ],
)
def test_the_clock_of_the_queue_leaves_out_the_host(seconds, host_seconds, longest, monkeypatch):
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    count = 50
    launches = lambda: iter([lambda: machine.enqueue(seconds, host_seconds)] * count)
    probed = []
    visit = Visit(None, launches, count, lambda: probed.append(machine.now))
    first, second = clock.times([visit, visit])
    assert first == pytest.approx([seconds] * 18, rel=1e-3)
    assert second == pytest.approx([seconds] * 18, rel=1e-3)
    assert max(machine.waits) == longest
    assert len(probed) == 2


def test_the_clock_of_the_queue_ends_with_a_host_that_is_too_slow(monkeypatch):
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    launches = lambda: iter([lambda: machine.enqueue(2e-6, 1e-2)] * 24)
    ((first, *_),) = clock.times([Visit(None, launches, 24, lambda: None)])
    assert 2e-6 < first <= 1e-2
    assert max(machine.waits) == lib._WAITS[1]


@pytest.mark.parametrize("wakes_late", [False, True])
def test_the_clock_of_the_queue_leaves_out_a_host_that_stops(wakes_late, monkeypatch):
    """The host stops in two of three readings, for longer than the device waits. If it also wakes late, it looks as if
    it had been ahead."""
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    if wakes_late:
        monkeypatch.setattr(jax, "block_until_ready", lambda xs: (machine.wait(xs), machine.enqueue(0.0, 0.1)))
    pauses = itertools.cycle([*[0.1, *[1e-6] * 5] * 2, *[1e-6] * 6])
    launches = lambda: iter([lambda: machine.enqueue(2e-6, next(pauses))] * 18)
    (times,) = clock.times([Visit(None, launches, 18, lambda: None)])
    assert times == pytest.approx([2e-6] * 18, rel=1e-3)


def test_the_clock_of_the_queue_launches_few_and_nothing_twice(monkeypatch):
    """A comparison is brief, and operands that were just read are in the cache."""
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    launched = []
    launch = lambda i: (launched.append(i), machine.enqueue(2e-6, 1e-2))[1]
    clock.times([Visit(None, lambda: iter([functools.partial(launch, i) for i in range(50)]), 50, lambda: None)])
    assert launched == [*range(18)]


def test_the_clock_of_the_queue_keeps_few_launches_in_flight(monkeypatch):
    """JAX blocks the host at 32 computations of a device."""
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    queues, seconds = [], clock._seconds
    monkeypatch.setattr(clock, "_seconds", lambda part: (queues.append(len(part)), seconds(part))[1])
    clock.times([Visit(None, lambda: iter([lambda: machine.enqueue(1e-5)] * 13), 13, lambda: None)])
    assert max(queues) + 2 < 32
    assert sum(queues) == 13
    assert min(queues) >= 4  # No short part: its time would be less exact.


@pytest.mark.parametrize(("copies", "count"), [(3, 18), (2, 15), (5, 17)])
def test_the_clock_of_the_queue_keeps_the_rotation(copies, count, monkeypatch):
    """Each part of a visit has all operands, in their order: with one of them, it would be in the cache."""
    machine = Machine(monkeypatch)
    clock = QueueClock(machine.read)
    parts, seconds = [], clock._seconds
    monkeypatch.setattr(clock, "_seconds", lambda part: (parts.append([launch() for launch in part]), seconds(part))[1])
    launches = lambda: iter([lambda i=i: i % copies for i in range(count)])
    clock.times([Visit(None, launches, count, lambda: None)])
    assert [*itertools.chain(*parts)] == [i % copies for i in range(count)]
    assert all({*part} == {*range(copies)} for part in parts)


def test_the_kernel_that_reads_the_clock_is_lowered():
    operand = jax.ShapeDtypeStruct((1,), jnp.int32)
    program = timer.wait_and_read.trace(operand).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("stablehlo.custom_call @mosaic_gpu") == 1


@pytest.mark.gpu
def test_the_device_waits_before_its_clock_is_read():
    read = timer.reader(jax.devices()[0])
    first, second, third = (np.asarray(read(wait)).item() for wait in (0, 3_000_000, 0))
    assert 3_000_000 <= (second - first) % 2**32 < 500_000_000
    assert 0 <= (third - second) % 2**32 < 500_000_000


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="other workers use the GPU at the same time")
@pytest.mark.parametrize("size", [64, 512, 4096])
def test_both_clocks_agree_on_a_gpu(size):
    """A launch has one kernel. In the queue, kernels also have pauses between them."""
    device = jax.devices()[0]
    x = jnp.ones((size, size))
    calls = {"a": Call(jax.jit(lambda x: jnp.sin(x) + 1).lower(x).compile(), [(x,)] * 2)}
    exact = measure(calls, rounds=5, clock=CuptiClock())["a"].median
    brief = measure(calls, rounds=15, clock=QueueClock(timer.reader(device)))["a"].median
    assert exact * 0.9 - 1e-6 < brief < exact * 1.1 + 3e-6
