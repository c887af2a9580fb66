"""`jaxkernels bench --random N --processes M`: turns of processes, and rows that come from several."""

from __future__ import annotations

import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
import types

import jax
import pytest
from errors import raises_exactly

from jaxkernels.bench import processes, random_rows, results
from jaxkernels.bench.processes import Turns
from jaxkernels.bench.runner import Turn

OTHER = 1  # The number of a process that is not this one.


@pytest.fixture
def turns(tmp_path):
    return Turns(tmp_path)


def enter(turns: Turns, kind: Turn) -> tuple[threading.Event, threading.Thread]:
    """Asks for a turn in a thread. The event is set when it has had it."""
    entered = threading.Event()

    def work() -> None:
        with turns.turn(kind):
            entered.set()

    thread = threading.Thread(target=work)
    thread.start()
    return entered, thread


@pytest.mark.parametrize(
    ("before", "kind", "waits"),
    [
        ([], "timing", False),
        (["autotuning", "autotuning"], "autotuning", False),
        (["autotuning"], "timing", True),
        (["timing"], "timing", True),
        (["timing"], "autotuning", True),
        (["autotuning", "timing waits"], "autotuning", False),
        (["autotuning", "timing waits"], "timing", True),
        (["timing waits"], "autotuning", True),
    ],
)
def test_processes_autotune_together_and_time_alone(turns, tmp_path, before, kind, waits):
    others = [[OTHER, other.split()[0], "waits" not in other] for other in before]
    (tmp_path / "queue").write_text(json.dumps(others))
    entered, thread = enter(turns, kind)
    assert entered.wait(0.3 if waits else 10) != waits
    if waits:
        asked = False
        while not asked:
            with turns._queue() as waiting:
                if asked := len(waiting) > len(before):
                    del waiting[: len(before)]  # The others have left.
        assert entered.wait(10)
    thread.join()
    left = json.loads((tmp_path / "queue").read_text())
    assert left == ([] if waits else others)


def test_two_threads_of_a_process_have_turns_of_their_own(turns, tmp_path):
    inside, leave = threading.Event(), threading.Event()

    def autotune() -> None:
        with turns.turn("autotuning"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=autotune)
    thread.start()
    assert inside.wait(10)
    with turns.turn("autotuning"):
        pass
    entered, timing = enter(turns, "timing")
    assert not entered.wait(0.3)  # The first thread still autotunes.
    leave.set()
    assert entered.wait(10)
    thread.join()
    timing.join()
    assert json.loads((tmp_path / "queue").read_text()) == []


def test_turn_is_given_back_after_an_error(turns):
    with pytest.raises(KeyError), turns.turn("timing"):
        raise KeyError
    with turns.turn("timing"):
        pass


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        (None, ["0", "1", "2"]),
        ("", ["0", "1", "2"]),
        ("3,5, 7", ["3", "5", "7"]),
        ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a", "GPU-b", "GPU-c"]),
    ],
)
def test_gpus_are_those_of_this_process(named, gpus, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert processes._gpus(types.SimpleNamespace(platform="gpu")) == gpus
    assert processes._gpus(jax.devices("cpu")[0]) == [""]


@pytest.mark.parametrize("before", [None, "0,1"])
def test_processes_see_one_gpu(before, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if before is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before)
    with processes._seeing("1"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    with processes._seeing(""):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before


def test_problems_are_divided_among_gpus(monkeypatch):
    """Seven problems, five processes, two GPUs."""
    started = []

    class Process:
        exitcode = None

        def __init__(self, target, args, daemon):
            _, self.folder, self.work, _ = args

        def start(self):
            started.append((os.environ["CUDA_VISIBLE_DEVICES"], self.folder.name, self.work))

        def terminate(self):
            pass

        def join(self):
            pass

    context = types.SimpleNamespace(Queue=queue.Queue, Process=Process)
    monkeypatch.setattr(processes.multiprocessing, "get_context", lambda kind: context)
    monkeypatch.setattr(processes, "_gpus", lambda device: ["4", "6"])
    monkeypatch.setattr(processes, "_rows", lambda *args: [])
    settings = types.SimpleNamespace(device=None, backends=None, baselines=None, regimes=("burst",), auto=True)
    assert list(processes.run([("suite", i) for i in range(7)], settings, count=5)) == []
    work = lambda *problems: [("suite", i) for i in problems]
    assert started == [
        ("4", "0", work(0, 5)), ("6", "1", work(1, 6)), ("4", "0", work(2)), ("6", "1", work(3)), ("4", "0", work(4)),
    ]  # fmt: skip


class Messages:
    """A queue with messages of processes."""

    def __init__(self, *messages: tuple[int, str, object]):
        self._messages = list(messages)

    def get(self, timeout: float) -> tuple[int, str, object]:
        if not self._messages:
            raise queue.Empty
        return self._messages.pop(0)


def row(problem: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(problem=problem)


def test_rows_come_as_they_are_measured_and_the_status_counts():
    said = []
    messages = Messages(
        (1, "status", "compiling 1 to 2 of 2"), (2, "status", "timing 1 of 2: 8x8x8"), (2, "row", row("b")),
        (2, "end", None), (1, "row", row("a")), (1, "row", row("a")), (1, "end", None),
    )  # fmt: skip
    alive = types.SimpleNamespace(exitcode=None)
    found = processes._rows(messages, [alive, alive], said.append, 2)
    assert [x.problem for x in found] == ["b", "a", "a"]
    assert said[1] == "0 of 2 problems; processes: 1 compiling, 1 timing"
    assert said[-1] == "2 of 2 problems; processes: starting"


def test_process_that_fails_or_is_killed_ends_the_run():
    failed = Messages((1, "error", "ValueError: no"))
    with raises_exactly(
        RuntimeError, "bench: a process failed: ValueError: no. Use fewer --processes, and --resume the run."
    ):
        list(processes._rows(failed, [types.SimpleNamespace(exitcode=None)], print, 1))
    with pytest.raises(RuntimeError, match="there was not enough memory: use fewer --processes"):
        list(processes._rows(Messages(), [types.SimpleNamespace(exitcode=-9)], print, 1))


def test_several_processes_measure_every_problem_once(tmp_path):
    out = tmp_path / "rows.json"
    command = [sys.executable, "-m", "jaxkernels", "bench", "gemm", "--random", "3", "--largest", "128"]
    environment = os.environ | {
        "PYTHONPATH": str(pathlib.Path(__file__).parent.parent),
        "JAX_PLATFORMS": "cpu",
        "JAXKERNELS_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [*command, "--processes", "2", "--json", str(out)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = results.load(out).rows
    drawn = random_rows.problems("gemm", 3, 0, 128)
    assert sorted(row.label for row in rows) == sorted(problem.label for problem in drawn)
    assert all(row.ours and row.ours[0].name == "auto" for row in rows)
