"""Takes the steps of warpgroups in random orders, one after the other: their waits, arrivals, reads and writes.

What they do does not depend on when the others do it (see `simulated`), so each has its steps in a list: a kind, and
what it is done to. In no order may all wait, or a barrier go round twice. What happens before what is the same in all
of them. In the first, vector clocks tell of each read whether the write before it must have ended, and of each write
whether the reads before it must; then what is read is known. wgmma and TMA end when they are waited for, and see of
what threads write only what a fence follows.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

__all__ = ["Block", "Part", "Read", "Write", "replay"]

#: What TMA loads and stores: a global array's name, and the first place in it.
type Block = tuple[Any, ...]
#: Of a slot of shared memory, or a block of global memory: for each axis the range, or None; () is all of it.
type Part = tuple[tuple[int, int] | None, ...]
#: When something was done, for vector clocks: by whom, and at what time of theirs.
type Epoch = tuple[int, int] | None


@dataclasses.dataclass(eq=False)
class Read:
    """Of shared memory: `contents`, by the parts in which they were written, are there after `replay`."""

    place: tuple[Any, ...]
    part: Part
    is_async: bool
    contents: dict[Part, Any] = dataclasses.field(default_factory=dict)
    done: Epoch = None

    @property
    def block(self) -> Block:
        """That which TMA has loaded there, whole; or nothing."""
        blocks = list(self.contents.values())
        assert all(isinstance(block, tuple) for block in blocks), f"{self.place} holds what threads have written"
        assert all(block == blocks[0] for block in blocks), f"{self.place} holds parts of {blocks}"
        return blocks[0] if blocks else ("garbage",)


@dataclasses.dataclass(eq=False)
class Write:
    """Of shared memory by threads or TMA, the end of which a barrier tells; or of global memory."""

    place: tuple[Any, ...]
    part: Part
    value: Any
    barrier: Any = None
    is_async: bool = False
    done: Epoch = None
    fenced: Epoch = None


class Traced(Protocol):
    """A warpgroup: its steps, and its CTA, of which the number and, by name, barriers' `num_arrivals` matter."""

    cta: Any
    trace: list[tuple[str, Any]]


def replay(
    clusters: Sequence[Sequence[Traced]], rng: np.random.Generator, *, most_resident: int = 1, times: int = 3
) -> list[Write]:
    """Takes what warpgroups do in random orders, some steps of each at a time; returns ordered stores as they come.

    Args:
      most_resident: how many clusters, at most, are on the chip at once; where one ends, the next begins.
    """
    first, *others = (_Replay(clusters, rng, keeps_account=i == 0) for i in range(times))
    for order in (first, *others):
        order.run(int(rng.integers(1, rng.integers(1, most_resident + 1) + 1)))
    return first.stores


class _Replay:
    """One order. If it keeps account of memory, `clocks` tell what each warpgroup knows of the others' times and, of
    barriers at which copies arrive, of the rounds."""

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
        # What was last done to each CTA by others of its cluster.
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
        """Whether a warpgroup could do anything."""
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
        """Whoever waits for a barrier's round knows what all who have arrived in it knew."""
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
        """Whoever waits for so many signals knows what tells any of them."""
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
    """Barriers' rounds. A round is over when as many have arrived as the barrier needs, and the other CTA of the
    cluster has sent its half of what both load. In each round each arrives as often, and sends as much."""

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
        """The round in which what a warpgroup loads arrives."""
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
        assert self.done[place] // self.share[place] == nth, f"{barrier}: one arrives in another's place"
        self.done[place] += 1
        return nth

    def wait(self, i: int, barrier: Any) -> int | None:
        """The round that is over, or None if it is not."""
        completed = self.arrived[barrier] // self.to_arrive.get(barrier, 1)
        if barrier in self.to_send:
            completed = min(completed, self.sent[barrier] // self.to_send[barrier])
        nth = self.waited[i, barrier]
        if completed == nth:
            return None
        assert completed == nth + 1, f"{barrier} went round twice"
        self.waited[i, barrier] += 1
        return nth

    def check_end(self) -> None:
        for barrier, count in self.arrived.items():
            assert count % self.to_arrive[barrier] == 0, f"arrivals are left over at {barrier}"


def _overlap(some: Part, others: Part) -> bool:
    return all(a is None or b is None or (a[0] < b[1] and b[0] < a[1]) for a, b in zip(some, others))
