"""Measures problems in several processes that share GPUs: they compile beside each other, and time alone on a GPU.

Most of the time of drawn problems is spent by compilers on the host. Timings need the GPU for themselves. XLA's
autotuning uses the GPU, too. So the processes of a GPU take turns (`Turns`): several autotune, draw operands, and check
results beside each other, but a process compares backends alone, and times its problems alone. What XLA does not
autotune is compiled at any time.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import pathlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import filelock
import jax

from jaxkernels.bench.results import Row
from jaxkernels.bench.runner import Settings, Turn
from jaxkernels.core import hardware

__all__ = ["Turns", "run"]

_VISIBLE = "CUDA_VISIBLE_DEVICES"

#: Seconds between two looks at the queue of turns, and at the processes.
_POLL_SECONDS, _WATCH_SECONDS = 0.02, 1.0

#: Problems whose programs a process compiles at the same time: rows come as soon as there are some.
_CHUNK = 1

_ENDED = (
    "bench: a process ended before its problems were measured. Most likely there was not enough memory: use fewer "
    "--processes, and --resume the run."
)


class Turns:
    """Turns of processes, in the order in which they asked. Those that autotune have them together: while one does,
    another one begins at once.

    The queue is a file: a list of [process and thread, kind, whether it has its turn].

    Args:
      folder: a folder for the files, the same in all processes.
    """

    def __init__(self, folder: pathlib.Path):
        self._folder = folder

    @contextlib.contextmanager
    def turn(self, kind: Turn) -> Iterator[None]:
        """Waits for a turn of this thread, and has it inside."""
        me = f"{os.getpid()}, {threading.get_ident()}"
        with self._queue() as queue:
            queue.append([me, kind, False])
        try:
            while not self._begins(me):
                time.sleep(_POLL_SECONDS)
            yield
        finally:
            with self._queue() as queue:
                queue.remove(_entry(queue, me))

    def _begins(self, me: str) -> bool:
        """Takes the turn if it is this thread's."""
        with self._queue() as queue:
            mine = _entry(queue, me)
            current = [kind for _, kind, has_turn in queue if has_turn]
            mine[2] = set(current) == {"autotuning"} == {mine[1]} if current else mine is queue[0]
            return mine[2]

    @contextlib.contextmanager
    def _queue(self) -> Iterator[list[Any]]:
        path = self._folder / "queue"
        with filelock.FileLock(self._folder / "queue.lock"):
            before = path.read_text() if path.exists() else "[]"
            queue = json.loads(before)
            yield queue
            if (after := json.dumps(queue)) != before:
                path.write_text(after)


def _entry(queue: list[Any], thread: str) -> list[Any]:
    return next(entry for entry in queue if entry[0] == thread)


def run(
    work: list[tuple[str, Any]], settings: Settings, status: Callable[[str], None] = lambda text: None, *, count: int
) -> Iterator[Row]:
    """As `runner.run`, in `count` processes. Rows come in the order in which they are measured.

    If there are several GPUs, each process has one of them, and all have about as many processes.

    Raises:
      RuntimeError: a process failed.
    """
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    fields = {name: getattr(settings, name) for name in ("backends", "baselines", "regimes", "auto")}
    gpus = _gpus(settings.device)
    # A process that is ended may still write there. An error from that would hide what ended the run.
    with tempfile.TemporaryDirectory(prefix="jaxkernels-turns-", ignore_cleanup_errors=True) as folder:
        processes = []
        for i in range(min(count, len(work))):
            gpu = i % len(gpus)
            turns = pathlib.Path(folder) / str(gpu)
            turns.mkdir(exist_ok=True)
            process = context.Process(target=_measure, args=(found, turns, work[i::count], fields), daemon=True)
            with _seeing(gpus[gpu]):
                process.start()
            processes.append(process)
        try:
            yield from _rows(found, processes, status, len(work))
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                process.join()


def _gpus(device: Any) -> list[str]:
    """The GPUs of this process, as `CUDA_VISIBLE_DEVICES` names them; one empty name on another platform."""
    if device.platform not in hardware.GPU_PLATFORMS:
        return [""]
    named = os.environ.get(_VISIBLE, "")
    names = [name.strip() for name in named.split(",")] if named else list(map(str, range(jax.local_device_count())))
    return names[: jax.local_device_count()]


@contextlib.contextmanager
def _seeing(gpu: str) -> Iterator[None]:
    """Processes that are started inside see one GPU."""
    before = os.environ.get(_VISIBLE)
    if gpu:
        os.environ[_VISIBLE] = gpu
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_VISIBLE, None)
        else:
            os.environ[_VISIBLE] = before


def _rows(found: Any, processes: list[Any], status: Callable[[str], None], total: int) -> Iterator[Row]:
    running, problems = len(processes), set()
    states: dict[int, str] = {}
    while running:
        try:
            process, kind, value = found.get(timeout=_WATCH_SECONDS)
        except queue.Empty:
            if any(process.exitcode for process in processes):
                raise RuntimeError(_ENDED) from None
            continue
        if kind == "row":
            problems.add(value.problem)
            yield value
        elif kind == "end":
            running -= 1
            states.pop(process, None)
        elif kind == "error":
            raise RuntimeError(f"bench: a process failed: {value}. Use fewer --processes, and --resume the run.")
        else:
            states[process] = value.partition(" ")[0]
        doing = ", ".join(f"{list(states.values()).count(state)} {state}" for state in sorted(set(states.values())))
        status(f"{len(problems)} of {total} problems; processes: {doing or 'starting'}")


def _measure(found: Any, folder: pathlib.Path, work: list[tuple[str, Any]], fields: dict[str, Any]) -> None:
    """A process: measures its share, and sends (its number, "row", "status", "error" or "end", value)."""
    from jaxkernels.bench import runner
    from jaxkernels.bench.telemetry import Telemetry
    from jaxkernels.tuning import tuner

    me = os.getpid()
    try:
        turns = Turns(folder)
        device = jax.devices()[0]
        tuner.compare_in(lambda work: turns.turn("timing" if work == "timing" else "autotuning"))
        settings = Settings(device, Telemetry(device.local_hardware_id or 0), turn=turns.turn, chunk=_CHUNK, **fields)
        with settings.telemetry:
            for row in runner.run(work, settings, lambda text: found.put((me, "status", text))):
                found.put((me, "row", row))
        found.put((me, "end", None))
    except KeyboardInterrupt:
        found.put((me, "end", None))
    except Exception as e:
        found.put((me, "error", f"{type(e).__name__}: {e}"))
