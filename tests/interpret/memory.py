"""Models the GPU's memory: clocks, operations in flight, barriers, races.

JAX's interpret mode gives every thread (a warpgroup) a vector clock, and every access to a buffer the clock of its
thread at that moment. Two accesses race if neither clock is below the other. The classes here replace three of JAX's
classes, and find more errors:

- a wgmma reads shared memory until it has been waited for;
- a TMA multicast writes into every block of the cluster, and each block's barrier counts its share;
- stores to global memory are waited for by commit group; reductions into it do not race with each other;
- blocks of different clusters are never ordered: on the GPU they run at the same time;
- a thread that would wait for ever fails instead.
"""

from __future__ import annotations

import collections
import dataclasses
import fractions
import itertools
import threading
import time
from typing import Any

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state, shared_memory

__all__ = ["Barrier", "Races", "Session", "SharedMemory", "session"]


@dataclasses.dataclass
class Session:
    """One use of the harness: its settings and its findings.

    Attributes:
      deadlock_after: seconds that a thread waits before it reports a deadlock.
      races: a text for each pair of source lines whose accesses race.
      failure: the first exception in a callback; XLA passes on its text only.
    """

    deadlock_after: float = 20.0
    races: dict[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    failure: Exception | None = None


session = Session()

_SPACES = list(gpu_core.MemorySpace)
_REGS = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)

_Box = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class _Event:
    """One access: `kind` is "read", "write" or "reduction"; `box` is its range, one interval a dimension."""

    kind: str
    thread: Any
    clock: Any
    key: shared_memory.HostAllocationKey
    box: _Box
    source_info: Any

    @property
    def where(self) -> str:
        return _where(self.source_info)

    def __str__(self) -> str:
        box = ", ".join(f"{start}:{stop}" for start, stop in self.box)
        space = f"{_SPACES[self.key.memory_space_id].name} buffer {self.key.buffer_id}"
        return f"{self.kind} of {space} of block {self.key.block_id} [{box}] by {_name(self.thread)} at {self.where}"


def _name(thread) -> str:
    return f"warpgroup {thread.warpgroup_id} of block {thread.block_id}"


def _where(source_info: Any) -> str:
    """Names the line of the kernel. If it is not recorded (the body of a pipeline), names the functions of Pallas."""
    if source_info is None:
        return "the launch"
    if summary := source_info_util.summarize(source_info):
        return summary
    codes, _ = source_info.traceback.raw_frames()
    return " in ".join(code.co_name for code in codes if "/pallas/" in code.co_filename)


def _event(kind, thread, clock, key, access, source_info) -> _Event:
    box = tuple((r, r + 1) if isinstance(r, int) else (r.start, r.stop) for r in access.range)
    return _Event(kind, thread, clock, key, box, source_info)


def _overlap(a: _Box, b: _Box) -> bool:
    return all(start < b_stop and b_start < stop for (start, stop), (b_start, b_stop) in zip(a, b, strict=True))


def _covers(a: _Box, b: _Box) -> bool:
    return all(start <= b_start and b_stop <= stop for (start, stop), (b_start, b_stop) in zip(a, b, strict=True))


class Races(race_detection_state.GPURaceDetectionState):
    """Compares every access with the earlier ones to the same buffer, and reports races to the session.

    The members of a `RefUnion` are separate buffers here; accesses through different alias groups count as
    accesses to the same place.
    """

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._reads: dict[Any, list[_Event]] = collections.defaultdict(list)
        self._writes: dict[Any, list[_Event]] = collections.defaultdict(list)
        self._last_written: dict[Any, _Event] = {}  # union -> the last write through any of its groups

    def check_read(self, thread, clock, buffer_key, rnge, source_info=None):
        if buffer_key.memory_space_id == _REGS:
            return
        event = _event("read", thread, clock, buffer_key, rnge, source_info)
        with self.lock:
            self._compare(event, self._writes[buffer_key])
            self._reads[buffer_key].append(event)
            if buffer_key in self.ref_union_members:
                union, group = self.ref_union_members[buffer_key]
                last = self._last_written.get(union)
                if last is not None and self.ref_union_members[last.key][1] != group:
                    self._report(event, "reads through another alias group what was written last, by the", last)

    def check_write(
        self, thread, clock, buffer_key, rnge, source_info=None, *, clock_for_reads=None, reduction: bool = False
    ):
        """Records a write.

        A copy by the asynchronous proxy passes the generic clock as `clock_for_reads`: an earlier reader has the
        values in registers when it signals, so that a fence between the proxies is owed for earlier writes only.
        """
        if buffer_key.memory_space_id == _REGS:
            return
        kind = "reduction" if reduction else "write"
        event = _event(kind, thread, clock, buffer_key, rnge, source_info)
        with self.lock:
            if buffer_key in self.ref_union_members:
                union, group = self.ref_union_members[buffer_key]
                for other, (other_union, other_group) in self.ref_union_members.items():
                    if other_union == union and other_group != group:
                        self._compare(event, self._reads[other], clock_for_reads, anywhere=True)
                        self._compare(event, self._writes[other], anywhere=True)
                self._last_written[union] = event
            self._reads[buffer_key] = self._compare(event, self._reads[buffer_key], clock_for_reads)
            self._writes[buffer_key] = [*self._compare(event, self._writes[buffer_key]), event]

    def _compare(self, event: _Event, earlier: list[_Event], clock=None, anywhere: bool = False) -> list[_Event]:
        """Reports the races of `event` with `earlier`. Returns the events that later ones must be compared with.

        Events that a write covers and follows are dropped: an access that races with them also races with the write.
        """
        kept = []
        for other in earlier:
            if anywhere or _overlap(event.box, other.box):
                if not other.clock.ordered(clock or event.clock):
                    if not (event.kind == other.kind == "reduction"):
                        self._report(event, "is not ordered with the earlier", other)
                elif event.kind == "write" and not anywhere and _covers(event.box, other.box):
                    continue
            kept.append(other)
        return kept

    def _report(self, event: _Event, relation: str, other: _Event) -> None:
        self.races_found = True
        session.races.setdefault((event.where, other.where), f"RACE: {event}\n      {relation} {other}")


class SharedMemory(shared_memory.GPUSharedMemory):
    """The memories of one GPU, with the clocks of its threads and of the operations in flight.

    Attributes:
      wgmmas: thread -> (accumulator, clock) of each wgmma it has not waited for, oldest first.
      open_group: thread -> clocks of the reads and the writes of its stores that no group has taken yet.
    """

    _num_clusters = 0

    def __init__(self, *, num_tma_threads_per_device: int, **settings: Any):
        # Two more positions in every clock: see `reset_per_cluster_state`.
        super().__init__(num_tma_threads_per_device=num_tma_threads_per_device + 2, **settings)
        self.num_tma_threads = num_tma_threads_per_device
        self._semaphores: dict[tuple[int, ...], int] = collections.defaultdict(int)
        self._semaphore_clocks = collections.defaultdict(lambda: self.VectorClock(self.vector_clock_size))
        self._signalled = _Condition()
        self._released: set[Any] = set()

    def reset_per_cluster_state(self):
        """Starts a cluster. Its clocks rise in one position and fall in another, so that clusters are unordered."""
        super().reset_per_cluster_state()
        self._num_clusters += 1
        for bundle in self.clocks.values():
            for clock in (bundle.generic_clock, bundle.async_smem_clock):
                clock.clock[-2:] = self._num_clusters, 2**30 - self._num_clusters
        self.wgmmas: dict[Any, collections.deque] = collections.defaultdict(collections.deque)
        self.open_group: dict[Any, tuple[Any, Any]] = {}

    def set_failed(self, exception, failed_thread=None, top_level=True):
        if session.failure is None:
            session.failure = exception
        super().set_failed(exception, failed_thread, top_level)

    def access(self, key, transforms):
        access = super().access(key, transforms)
        if any((r if isinstance(r, int) else r.start) < 0 for r in access.range):
            raise IndexError(f"[{access.range}] starts before the array; NumPy would count from its end.")
        return access

    def start_async(self, thread) -> tuple[Any, int]:
        """Returns the clocks of an operation that `thread` issues now, and the operation's own position in them."""
        clock = self.incr_clock(thread)
        position = self.get_next_tma_thread_id()
        clock.inc(position)
        return clock, position

    def issue_wgmma(self, thread, accumulator, clock) -> None:
        with self.lock:
            self.wgmmas[thread].append((accumulator, clock))

    def wait_wgmma(self, thread, n: int) -> None:
        """Waits until at most the `n` youngest wgmmas of `thread` are in flight."""
        with self.lock:
            self.incr_clock(thread, take_lock=False)
            while len(self.wgmmas[thread]) > n:
                self.clocks[thread].update(self.wgmmas[thread].popleft()[1])

    def add_copy_smem_to_gmem_clocks(self, thread, read_clock, write_clock):
        with self.lock:
            if thread in self.open_group:
                reads, writes = self.open_group[thread]
                reads.update(read_clock)
                writes.update(write_clock)
            else:
                self.open_group[thread] = (read_clock, write_clock)

    def commit_group(self, thread) -> None:
        """Closes the thread's group of stores. A wait also counts empty groups."""
        with self.lock:
            nothing = self.VectorClock(self.vector_clock_size)
            reads, writes = self.open_group.pop(thread, (nothing, nothing))
            self.pending_smem_to_gmem_read_clocks[thread].append(reads)
            self.pending_smem_to_gmem_write_clocks[thread].append(writes)

    def kernel_thread_finished(self, thread):
        if thread in self.open_group:
            raise ValueError(f"{thread} finished the kernel with a store to GMEM in no commit group.")
        with self.lock:
            pending = self.pending_smem_to_gmem_read_clocks[thread]
            self.pending_smem_to_gmem_read_clocks[thread] = collections.deque(
                clock for clock in pending if clock.generic_clock.clock.any()
            )
        super().kernel_thread_finished(thread)

    def deallocate_buffer(self, key, logging_info=None):
        super().deallocate_buffer(key, logging_info)
        if key not in self.mem:
            self._released.add(key)

    def signal_semaphore(self, thread, place: tuple[int, ...], value: int) -> None:
        """Signals. A thread that sees the semaphore's new value is ordered after this thread's accesses."""
        clock = self.incr_clock(thread)
        with self._signalled:
            self._semaphores[place] += value
            self._semaphore_clocks[place].update(clock)
            self._signalled.notify_all()

    def wait_semaphore(self, thread, place: tuple[int, ...], value: int, *, decrement: bool) -> None:
        """Waits until the semaphore has at least the value."""
        with self._signalled:
            while self._semaphores[place] < value:
                try:
                    self._signalled.wait()
                except TimeoutError:
                    raise TimeoutError(
                        f"deadlock: semaphore {place} never reaches {value}; it is at {self._semaphores[place]}"
                    ) from None
            if decrement:
                self._semaphores[place] -= value
            with self.lock:
                self.clocks[thread].update(self._semaphore_clocks[place])

    def peers(self, thread, cluster: tuple[int, ...], is_collective: tuple[bool, ...]) -> list[int]:
        """Returns the blocks that take part in the thread's collective copy, in order."""
        if not cluster:
            return [thread.block_id]
        own = np.unravel_index(thread.block_id, cluster)
        choices = [range(size) if shared else (i,) for size, shared, i in zip(cluster, is_collective, own, strict=True)]
        return [int(np.ravel_multi_index(c, cluster)) for c in itertools.product(*choices)]

    def of_peer(self, key, block: int):
        """Returns `key` in another block, once that has allocated it: on the GPU it is there from the launch."""
        key = dataclasses.replace(key, block_id=block)
        deadline = time.monotonic() + session.deadlock_after
        while key not in self.mem:
            self.check_failed()
            if key in self._released:
                raise self.has_left(key)
            if time.monotonic() > deadline:
                raise TimeoutError(f"deadlock: block {block} never allocates what a multicast writes to.")
            time.sleep(1e-3)
        return key

    def has_left(self, key) -> ValueError:
        return ValueError(f"multicast into block {key.block_id}, which has left the scope of the buffer.")


class _Condition(threading.Condition):
    """Gives up waiting after `Session.deadlock_after`."""

    def wait(self, timeout=None):
        if not super().wait(timeout or session.deadlock_after):
            raise TimeoutError
        return True


class Barrier(shared_memory.Barrier):
    """An mbarrier in shared memory.

    A thread that waits for a phase is ordered after the arrivals of that phase, and not after those of the next
    one that came before it looked.
    """

    def __init__(self, shared_memory: SharedMemory, **settings: Any):
        super().__init__(shared_memory, **settings)
        self.cv = _Condition()
        self._arriving = threading.Lock()  # taken before any other lock
        self._arrived = fractions.Fraction(0)
        self._clock = self.VectorClock(shared_memory.vector_clock_size)

    def arrive(self, thread, clock=None, logging_info=None, share=fractions.Fraction(1)):
        """Arrives. The part of each block in a multicast copy is a share of one arrival at every block's barrier."""
        with self._arriving:
            self._arrived += share
            self._clock.update(clock)
            if self._arrived >= self.num_arrivals:
                self._arrived -= self.num_arrivals
                clock, self._clock = self._clock, self.VectorClock(self.shared_memory.vector_clock_size)
                self.arrivals_count = self.num_arrivals - 1
                super().arrive(thread, clock, logging_info)

    def wait(self, thread, logging_info=None):
        try:
            super().wait(thread, logging_info)
        except TimeoutError:
            raise TimeoutError(
                f"deadlock: {_name(thread)} waited {session.deadlock_after:g} s for a barrier that had"
                f" {float(self._arrived):g} of {self.num_arrivals} arrivals in phase {self.phase}, at"
                f" {_where(logging_info.source_info)}"
            ) from None

    def deallocate(self):
        """Leaves the scope. Completions without a wait are legal at the end (jax 0.11.2 refuses them)."""
        with self.cv:
            self.ref_count -= 1
            if self.ref_count == 0 and self._arrived:
                raise ValueError(f"Barrier deallocated with {float(self._arrived):g} arrivals pending.")
