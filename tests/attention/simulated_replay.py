"""Replays the steps of warpgroups (waits, arrivals, reads, writes) in random orders, and checks them.

The steps of a warpgroup do not depend on the time of the others' steps (see `simulated`). So each warpgroup has a list
of steps: a kind, and its object. No order may end in a deadlock, or let a barrier complete two phases before a waiting
warpgroup has seen the first. The happens-before relation is the same in all orders. So the first order alone checks it,
with vector clocks: for each read, that the write before it has ended; for each write, that the reads before it have
ended. It also records the content that each read finds. wgmma and TMA end when they are waited for. They see the writes
of threads only after a fence.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Block", "Part", "Read", "Write", "replay"]

#: A block that TMA loads or stores: the name of a global array, and the block's first index.
type Block = tuple[Any, ...]
#: A part of a slot of shared memory, or of a block of global memory: a range or None for each axis; () is all of it.
type Part = tuple[tuple[int, int] | None, ...]
#: The time of a step, for vector clocks: the number of a warpgroup, and its time.
type Epoch = tuple[int, int] | None


@dataclasses.dataclass(eq=False)
class Read:
    """A read of shared memory. After `replay`, `contents` has the values by the parts in which they were written."""

    place: tuple[Any, ...]
    part: Part
    is_async: bool
    contents: dict[Part, Any] = dataclasses.field(default_factory=dict)
    done: Epoch = None

    @property
    def block(self) -> Block:
        """The block that TMA has loaded into the slot."""
        blocks = list(self.contents.values())
        assert all(isinstance(block, tuple) for block in blocks), f"{self.place} holds what threads have written"
        assert all(block == blocks[0] for block in blocks), f"{self.place} holds parts of {blocks}"
        return blocks[0] if blocks else ("garbage",)


@dataclasses.dataclass(eq=False)
class Write:
    """A write of shared memory, by threads or by TMA (a barrier signals its end); or of global memory."""

    place: tuple[Any, ...]
    part: Part
    value: Any
    barrier: Any = None
    is_async: bool = False
    done: Epoch = None
    fenced: Epoch = None


class Traced(Protocol):
    """A warpgroup: its steps, and its CTA (with `number` and the `num_arrivals` of its barriers)."""

    cta: Any
    trace: list[tuple[str, Any]]


def replay(
    clusters: Sequence[Sequence[Traced]], rng: np.random.Generator, *, most_resident: int = 1, times: int = 3
) -> list[Write]:
    """Replays the steps of warpgroups in random orders. Returns the stores in the order in which they were made.

    Args:
      most_resident: the largest number of clusters on the chip at once. When one ends, the next begins.
      times: the number of orders.
    """
    first, *others = (_Replay(clusters, rng, keeps_account=i == 0) for i in range(times))
    for order in (first, *others):
        order.run(int(rng.integers(1, rng.integers(1, most_resident + 1) + 1)))
    return first.stores


class _Replay:
    """One order. If `keeps_account`, it checks accesses to memory.

    `clocks` then has, for each warpgroup, the known times of the others, and the known rounds of barriers at which
    copies arrive.
    """

    def __init__(self, clusters: Sequence[Sequence[Traced]], rng: np.random.Generator, *, keeps_account: bool):
        warpgroups = [warpgroup for cluster in clusters for warpgroup in cluster]
        numbers = iter(range(len(warpgroups)))
        self.waiting = [[next(numbers) for _ in cluster] for cluster in clusters]
        self.ctas = [warpgroup.cta.number for warpgroup in warpgroups]
        self.rng, self.keeps_account = rng, keeps_account
        of_memory = () if keeps_account else ("read", "write", "end", "fence")
        self.traces = [[step for step in warpgroup.trace if step[0] not in of_memory] for warpgroup in warpgroups]
        self.steps = {kind: getattr(self, f"_{kind}") for trace in self.traces for kind, _ in trace}
        self.position = [0] * len(warpgroups)
        self.rounds = _Rounds(warpgroups)
        self.signals: dict[Any, list[np.ndarray]] = collections.defaultdict(list)
        # Memory.
        ends = {what.barrier for trace in self.traces for kind, what in trace if kind == "write" and what.barrier}
        self.component = {barrier: len(warpgroups) + i for i, barrier in enumerate(sorted(ends))}
        self.clocks = np.zeros((len(warpgroups), len(warpgroups) + len(ends)), np.int32)
        np.fill_diagonal(self.clocks, 1)
        self.at_barriers: dict[Any, np.ndarray] = {}
        self.memory: dict[Any, dict[Part, tuple[Write, list[Read]]]] = collections.defaultdict(dict)
        self.unfenced: list[list[Write]] = [[] for _ in warpgroups]
        self.stores: list[Write] = []
        # The last access to each CTA by other CTAs of its cluster.
        self.from_outside: dict[tuple[int, int], int] = {}

    def run(self, num_resident: int) -> None:
        resident: list[list[int]] = []
        while self.waiting or resident:
            while self.waiting and len(resident) < num_resident:
                resident.append(self.waiting.pop(0))
            live = [i for cluster in resident for i in cluster]
            moved = next((i for i in self.rng.permutation(live) if self._advance(i)), None)
            assert moved is not None, f"deadlock: {[self.traces[i][self.position[i]] for i in live]}"
            if self.position[moved] == len(self.traces[moved]):
                resident = [[i for i in cluster if i != moved] for cluster in resident]
                resident = [cluster for cluster in resident if cluster]
        self.rounds.check_end()
        for (cta, of), time in self.from_outside.items():
            is_known = any(self._knows(i, (of, time)) for i, ours in enumerate(self.ctas) if ours == cta)
            assert is_known, f"CTA {cta} may be gone before the other is done with it"

    def _advance(self, i: int) -> bool:
        """Takes some steps of a warpgroup. Returns whether it could take any."""
        start, trace = self.position[i], self.traces[i]
        for kind, what in trace[start : start + 2 ** int(self.rng.integers(8))]:
            if self.steps[kind](i, what) is False:
                break
            self.position[i] += 1
        return self.position[i] > start

    # Barriers and semaphores.

    def _arrive(self, i: int, barrier: Any) -> None:
        self._tell(i, barrier, self.rounds.arrive(i, barrier))

    def _bytes(self, i: int, barrier: Any) -> None:
        self._tell(i, barrier, self.rounds.send(i, barrier))

    def _tell(self, i: int, barrier: Any, nth: int) -> None:
        """A warpgroup that waits for a round of a barrier learns the clocks of all that arrived in it."""
        if not self.keeps_account:
            return
        clock, others = self.clocks[i], self.at_barriers.get((barrier, nth))
        self.at_barriers[barrier, nth] = clock.copy() if others is None else np.maximum(others, clock)
        if barrier[0] != self.ctas[i]:
            self.from_outside[barrier[0], i] = int(clock[i])
        clock[i] += 1

    def _wait(self, i: int, barrier: Any) -> bool:
        nth = self.rounds.wait(i, barrier)
        if nth is not None and self.keeps_account:
            self._learn(i, self.at_barriers[barrier, nth])
            if barrier in self.component:
                self.clocks[i, self.component[barrier]] = nth + 1
        return nth is not None

    def _signal(self, i: int, semaphore: Any) -> None:
        """A warpgroup that waits for n signals learns the clocks of the first n that signalled."""
        signals = self.signals[semaphore]
        signals.append(np.maximum(self.clocks[i], signals[-1]) if signals else self.clocks[i].copy())
        self.clocks[i, i] += 1

    def _await(self, i: int, what: Any) -> bool:
        semaphore, value = what
        signals = self.signals[semaphore]
        if 0 < value <= len(signals):
            self._learn(i, signals[value - 1])
        return value <= len(signals)

    # Memory.

    def _learn(self, i: int, clock: np.ndarray) -> None:
        np.maximum(self.clocks[i], clock, out=self.clocks[i])

    def _knows(self, i: int, epoch: Epoch) -> bool:
        return epoch is not None and bool(self.clocks[i, epoch[0]] >= epoch[1])

    def _now(self, i: int) -> Epoch:
        return i, int(self.clocks[i, i])

    def _read(self, i: int, read: Read) -> None:
        for part, (write, reads) in self.memory[read.place].items():
            if _overlap(part, read.part):
                is_there = self._knows(i, write.fenced if read.is_async else write.done)
                assert is_there, f"race: {read.place} is read before it is written"
                read.contents[part] = write.value
                reads.append(read)
        read.done = None if read.is_async else self._now(i)

    def _write(self, i: int, write: Write) -> None:
        parts = self.memory[write.place]
        for part in [part for part in parts if _overlap(part, write.part)]:
            before, reads = parts.pop(part)
            assert self._knows(i, before.done), f"race: {write.place} is written twice"
            assert all(self._knows(i, read.done) for read in reads), f"race: {write.place} is written before it is read"
        parts[write.part] = write, []
        if write.barrier is not None:
            of, nth = self.component[write.barrier], self.rounds.next(i, write.barrier)
            write.done = write.fenced = of, nth + 1
            if write.place[0] != self.ctas[i]:
                self.from_outside[write.place[0], of] = nth + 1
        elif write.is_async:
            self.stores.append(write)
        else:
            write.done = self._now(i)
            self.unfenced[i].append(write)

    def _end(self, i: int, what: Read | Write) -> None:
        what.done = self._now(i)

    def _fence(self, i: int, _: None) -> None:
        for write in self.unfenced[i]:
            write.fenced = self._now(i)
        self.unfenced[i].clear()


class _Rounds:
    """The rounds (phases) of barriers.

    A round is over when the barrier has its arrivals, and the other CTA of the cluster has sent its half of a shared
    load. A warpgroup arrives equally often, and sends equally much, in every round.
    """

    def __init__(self, warpgroups: Sequence[Traced]) -> None:
        num_arrivals = {warpgroup.cta.number: warpgroup.cta.num_arrivals for warpgroup in warpgroups}
        counts: dict[str, collections.Counter[Any]] = dict(arrive=collections.Counter(), bytes=collections.Counter())
        self.share: collections.Counter[Any] = collections.Counter()
        for i, warpgroup in enumerate(warpgroups):
            for kind, what in warpgroup.trace:
                if kind in counts:
                    counts[kind][what] += 1
                    self.share[kind, i, what] += 1
        self.to_arrive = {barrier: num_arrivals[barrier[0]][barrier[1]] for barrier in counts["arrive"]}
        rounds = {barrier: -(-n // self.to_arrive[barrier]) for barrier, n in counts["arrive"].items()}
        for place, n in self.share.items():
            self.share[place] = -(-n // rounds.get(place[2], 1))
        self.to_send = {barrier: -(-n // rounds.get(barrier, 1)) for barrier, n in counts["bytes"].items()}
        self.arrived: collections.Counter[Any] = collections.Counter()
        self.sent: collections.Counter[Any] = collections.Counter()
        self.done: collections.Counter[Any] = collections.Counter()
        self.waited: collections.Counter[Any] = collections.Counter()

    def next(self, i: int, barrier: Any) -> int:
        """The round in which the load of a warpgroup arrives."""
        if ("arrive", i, barrier) in self.share:
            return self.arrived[barrier] // self.to_arrive[barrier]
        return self.sent[barrier] // self.to_send[barrier]

    def arrive(self, i: int, barrier: Any) -> int:
        self.arrived[barrier] += 1
        return self._check("arrive", i, barrier, (self.arrived[barrier] - 1) // self.to_arrive[barrier])

    def send(self, i: int, barrier: Any) -> int:
        self.sent[barrier] += 1
        return self._check("bytes", i, barrier, (self.sent[barrier] - 1) // self.to_send[barrier])

    def _check(self, kind: str, i: int, barrier: Any, nth: int) -> int:
        place = kind, i, barrier
        assert self.done[place] // self.share[place] == nth, f"{barrier}: a warpgroup arrives in the place of another"
        self.done[place] += 1
        return nth

    def wait(self, i: int, barrier: Any) -> int | None:
        """The round that the warpgroup waits for, if it is over; else None."""
        completed = self.arrived[barrier] // self.to_arrive.get(barrier, 1)
        if barrier in self.to_send:
            completed = min(completed, self.sent[barrier] // self.to_send[barrier])
        nth = self.waited[i, barrier]
        if completed == nth:
            return None
        assert completed == nth + 1, f"{barrier} completed two rounds before a wait"
        self.waited[i, barrier] += 1
        return nth

    def check_end(self) -> None:
        for barrier, count in self.arrived.items():
            assert count % self.to_arrive[barrier] == 0, f"arrivals are left over at {barrier}"


def _overlap(some: Part, others: Part) -> bool:
    return all(a is None or b is None or (a[0] < b[1] and b[0] < a[1]) for a, b in zip(some, others))
