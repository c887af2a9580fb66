"""A run's folder: what it was asked, what it measured, and what it keeps.

config.json       the configuration, the key of the data, and a checksum of both
tokenizer.json    the BPE, if there is one
metrics.jsonl     one line for each training step and for each evaluation
checkpoints/      written by `jaxkernels.models.checkpoints`
loss.png          the losses over the steps, at the end
sample.txt        text written by the model, at the end
damaged/          checkpoints that could not be read, if there are any
.lock             locked by the process that trains
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, Self

import filelock

from jaxkernels.core.errors import InputError
from jaxkernels.core.folders import check_writable, write_whole
from jaxkernels.models import tokenizer as tokenizer_lib
from jaxkernels.models.checkpoints import Checkpoints, complete_steps
from jaxkernels.models.config import TrainingConfig
from jaxkernels.models.tokenizer import Tokenizer

__all__ = ["RUNS_FOLDER", "Metrics", "Run", "check_free", "latest_run"]

#: Where runs go unless a folder is named, below the current folder.
RUNS_FOLDER = pathlib.Path("runs")

_CONFIG = "config.json"
_LOCK = ".lock"


@dataclasses.dataclass(frozen=True)
class Run:
    """A run's folder and what its config.json says.

    Attributes:
      folder: the folder.
      config: the configuration.
      data_key: `TokenData.key` of the text it is trained on.
    """

    folder: pathlib.Path
    config: TrainingConfig
    data_key: str

    @classmethod
    def create(cls, folder: pathlib.Path | None, config: TrainingConfig, data_key: str, tokenizer: Tokenizer) -> Self:
        """Makes the folder of a new run; None takes the first free name of the preset under ./runs."""
        try:
            if folder is not None:
                check_free(folder)
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = _first_free(config.preset)
            tokenizer.save(folder)
            run = cls(folder, config, data_key)
            run.save_config()
            return run
        except OSError as e:
            raise InputError(f"run: cannot write {folder or RUNS_FOLDER}: {e.strerror}.") from e

    @classmethod
    def open(cls, folder: pathlib.Path) -> Self:
        """Reads the run in `folder`.

        Raises:
          InputError: there is no run, or its config.json was not written by `save_config`.
        """
        path = folder / _CONFIG
        if not path.is_file():
            raise InputError(f"run: {folder} is not a run's folder: it has no {_CONFIG}.")
        try:
            values = json.loads(path.read_text())
            content = {name: value for name, value in values.items() if name != "checksum"}
            if values["checksum"] != _checksum(content):
                raise InputError(_edited(folder, content))
            data_key = content.pop("data_key")
            return cls(folder, TrainingConfig.from_json(content), data_key)
        except OSError as e:
            raise InputError(f"run: cannot read {path}: {e.strerror}.") from e
        except InputError:
            raise
        except KeyError as e:
            raise InputError(f"run: {path} is not a run's configuration: it has no {e}.") from e
        except (AttributeError, TypeError, ValueError) as e:
            raise InputError(f"run: {path} is not a run's configuration: {e}.") from e

    def save_config(self) -> None:
        """Writes config.json."""
        content = {"data_key": self.data_key, **self.config.to_json()}
        content["checksum"] = _checksum(content)
        write_whole(self.folder / _CONFIG, json.dumps(content, indent=2) + "\n")

    def has_begun(self) -> bool:
        """Whether anything was measured or saved."""
        return bool(complete_steps(_checkpoints_folder(self.folder))) or any(
            "loss" in row for row in self.metrics().read()
        )

    def discard(self) -> None:
        """Removes the folder, with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other processes from training this run; the operating system unlocks it when this one ends.

        Raises:
          InputError: another process trains it.
        """
        path = self.folder / _LOCK
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout as e:
            raise InputError(
                f"run: another process trains {self.folder}. Wait for its end, or stop it; "
                "`jaxkernels sample` works meanwhile."
            ) from e
        except OSError as e:
            raise InputError(f"run: cannot lock {path}: {e.strerror}.") from e
        try:
            yield
        finally:
            lock.release()

    def tokenizer(self) -> Tokenizer:
        """Reads the tokenizer; raises InputError where its file is missing or damaged."""
        try:
            return tokenizer_lib.load(self.config.tokenizer, self.folder)
        except Exception as e:  # The library raises plain Exceptions.
            path = self.folder / tokenizer_lib.FILE_NAME
            raise InputError(f"run: cannot read {path}: {e}.") from e

    def checkpoints(self, *, read_only: bool = False, log: Callable[[str], None] = lambda message: None) -> Checkpoints:
        """The run's checkpoints; the arguments as in `Checkpoints`."""
        folder = _checkpoints_folder(self.folder)
        if read_only and not complete_steps(folder):
            raise InputError(
                f"run: {self.folder} holds no checkpoint yet. Train it with `jaxkernels train --resume "
                f"--out {self.folder}`."
            )
        return Checkpoints(folder, read_only=read_only, log=log)

    def metrics(self) -> Metrics:
        return Metrics(self.folder / "metrics.jsonl")


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _edited(folder: pathlib.Path, content: dict[str, Any]) -> str:
    """Says that config.json does not fit its checksum, and in which fields it differs from the newest checkpoint."""
    flat = lambda values: {**values, **values.get("model", {})}
    saved = None
    if complete_steps(_checkpoints_folder(folder)):
        with Checkpoints(_checkpoints_folder(folder), read_only=True) as checkpoints:
            saved = checkpoints.newest_config()
    now, before = flat(content), flat(saved or {})
    fields = [name for name in before if name != "model" and before[name] != now.get(name)]
    differences = "; ".join(f"{name}={before[name]!r} in the checkpoint, {now.get(name)!r} there" for name in fields)
    return (
        f"run: {folder / _CONFIG} was changed by hand: it differs from its checksum"
        f"{f' ({differences})' if differences else ''}. Undo the change. `train --resume` takes --steps, --data, "
        "--eval-every and --checkpoint-every; other settings need a new run (--init-from takes over weights)."
    )


def _checkpoints_folder(folder: pathlib.Path) -> pathlib.Path:
    return folder / "checkpoints"


class Metrics:
    """The lines of metrics.jsonl: {"step", "loss", ...} for a step, {"step", "validation_loss"} for an evaluation."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Adds lines; raises InputError where the file cannot be written."""
        try:
            with open(self.path, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
        except OSError as e:
            raise InputError(
                f"run: cannot write {self.path}: {e.strerror}. Make room, then continue the run with --resume."
            ) from e

    def read(self) -> list[dict[str, Any]]:
        """Returns every whole line that has a step: a kill or a full disk may have cut one off."""
        return self._read()[0]

    def _read(self) -> tuple[list[dict[str, Any]], int]:
        """The rows, and how many other whole lines there are."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        lines = [line for line in text.split("\n")[:-1] if line]
        rows = [row for row in map(_row, lines) if row is not None]
        return rows, len(lines) - len(rows)

    def truncate(self, step: int) -> int:
        """Drops what came after `step`, as the run continues from there, and lines that are no rows.

        Returns:
          How many lines were no rows.
        """
        rows, num_damaged = self._read()
        kept = [row for row in rows if row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return num_damaged


def _row(line: str) -> dict[str, Any] | None:
    """The row that a line holds; None if it holds none."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    is_number = lambda value: isinstance(value, (int, float)) and not isinstance(value, bool)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return None
    loss = row.get("loss", row.get("validation_loss"))
    return row if is_number(loss) and all(map(is_number, row.values())) else None


def check_free(folder: pathlib.Path | None) -> None:
    """Raises InputError unless a new run can go to `folder`, or to a new one under ./runs if it is None."""
    try:
        if folder is not None:
            if (folder / _CONFIG).exists():
                raise InputError(
                    f"run: {folder} already holds a run. Continue it with --resume, or name another folder with --out."
                )
            if folder.exists() and not folder.is_dir():
                raise InputError(f"run: {folder} is not a folder. Name another one with --out.")
            if folder.exists() and any(path.name != _LOCK for path in folder.iterdir()):
                raise InputError(f"run: {folder} is not empty. Name another folder with --out.")
        check_writable(folder or RUNS_FOLDER)
    except OSError as e:
        raise InputError(
            f"run: cannot write {folder or RUNS_FOLDER}: {e.strerror}. Name another folder with --out."
        ) from e


def latest_run() -> pathlib.Path:
    """Returns the folder of the run under ./runs that was started last.

    A run without a checkpoint counts only if no run has one: a failed start does not hide the run before it.

    Raises:
      InputError: there is no run.
    """
    configs = list(RUNS_FOLDER.glob(f"*/{_CONFIG}"))
    if not configs:
        raise InputError(f"run: there is no run under ./{RUNS_FOLDER}. Start one with `jaxkernels train`.")
    has_checkpoint = lambda folder: bool(complete_steps(_checkpoints_folder(folder)))
    return max((path.parent for path in configs), key=lambda f: (has_checkpoint(f), (f / _CONFIG).stat().st_mtime_ns))


def _first_free(name: str) -> pathlib.Path:
    for number in itertools.count(1):
        folder = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")
