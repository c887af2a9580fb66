"""A run's folder: what it was asked, what it measured, and what it keeps.

config.json       the configuration, and the key of the data
tokenizer.json    the BPE, if there is one
metrics.jsonl     one line for each training step and for each evaluation
checkpoints/      written by `jaxkernels.models.checkpoints`
loss.png          the losses over the steps, at the end
sample.txt        text written by the model, at the end
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from typing import Any, Self

from jaxkernels.folders import write_whole
from jaxkernels.models import tokenizer as tokenizer_lib
from jaxkernels.models.checkpoints import Checkpoints
from jaxkernels.models.config import InputError, TrainingConfig
from jaxkernels.models.tokenizer import Tokenizer

__all__ = ["RUNS_FOLDER", "Metrics", "Run", "latest_run"]

#: Where runs go unless a folder is named, below the current folder.
RUNS_FOLDER = pathlib.Path("runs")

_CONFIG = "config.json"


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
        content = {"data_key": data_key, **config.to_json()}
        try:
            if folder is not None:
                check_free(folder)
                folder.mkdir(parents=True, exist_ok=True)
            else:
                folder = _first_free(config.preset)
            tokenizer.save(folder)
            (folder / _CONFIG).write_text(json.dumps(content, indent=2) + "\n")
        except OSError as e:
            raise InputError(f"run: cannot write {folder or RUNS_FOLDER}: {e.strerror}.") from e
        return cls(folder, config, data_key)

    @classmethod
    def open(cls, folder: pathlib.Path) -> Self:
        """Reads the run in `folder`; raises InputError if there is none."""
        path = folder / _CONFIG
        if not path.is_file():
            raise InputError(f"run: {folder} is not a run's folder: it has no {_CONFIG}.")
        try:
            values = json.loads(path.read_text())
            data_key = values.pop("data_key")
            return cls(folder, TrainingConfig.from_json(values), data_key)
        except (AttributeError, KeyError, TypeError, ValueError) as e:
            raise InputError(f"run: {path} is not a run's configuration: {e}.") from e

    def tokenizer(self) -> Tokenizer:
        return tokenizer_lib.load(self.config.tokenizer, self.folder)

    def checkpoints(self, *, read_only: bool = False) -> Checkpoints:
        folder = self.folder / "checkpoints"
        if read_only and not folder.exists():
            raise InputError(f"run: {self.folder} holds no checkpoint.")
        return Checkpoints(folder, read_only=read_only)

    def metrics(self) -> Metrics:
        return Metrics(self.folder / "metrics.jsonl")


class Metrics:
    """The lines of metrics.jsonl: {"step", "loss", ...} for a step, {"step", "validation_loss"} for an evaluation."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def append(self, rows: list[dict[str, Any]]) -> None:
        with open(self.path, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def read(self) -> list[dict[str, Any]]:
        """Returns every whole line; the last may have been cut off when the run was killed."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def truncate(self, step: int) -> None:
        """Drops what came after `step`: the run continues from there."""
        rows = [row for row in self.read() if row["step"] <= step]
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in rows))


def check_free(folder: pathlib.Path) -> None:
    """Raises InputError unless a new run can go to `folder`."""
    if (folder / _CONFIG).exists():
        raise InputError(
            f"run: {folder} already holds a run. Continue it with --resume, or name another folder with --out."
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run: {folder} is not a folder. Name another one with --out.")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"run: {folder} is not empty. Name another folder with --out.")


def latest_run() -> pathlib.Path:
    """Returns the folder of the run under ./runs that was started last; raises InputError if there is none."""
    configs = list(RUNS_FOLDER.glob(f"*/{_CONFIG}"))
    if not configs:
        raise InputError(f"run: there is no run under ./{RUNS_FOLDER}. Start one with `jaxkernels train`.")
    return max(configs, key=lambda path: path.stat().st_mtime_ns).parent


def _first_free(name: str) -> pathlib.Path:
    for number in itertools.count(1):
        folder = RUNS_FOLDER / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")
