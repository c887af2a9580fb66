"""Checkpoints of a run, with Orbax: written atomically in the background, and checked when they are read."""

from __future__ import annotations

import contextlib
import gc
import logging
import pathlib
import re
import shutil
import sys
import warnings
import zlib
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import TracebackType
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

from jaxkernels.core.errors import InputError
from jaxkernels.models.config import TrainingConfig

__all__ = ["Checkpoints", "complete_steps"]

#: Older checkpoints are deleted.
_NUM_KEPT = 2

# Orbax logs every file that it writes and every error. Training reports the errors that matter to a user.
logging.getLogger("absl").setLevel(logging.CRITICAL)


def complete_steps(folder: pathlib.Path) -> list[int]:
    """The steps of the complete checkpoints in `folder`, newest first. Orbax names incomplete ones differently."""
    if not folder.is_dir():
        return []
    return sorted(
        (int(path.name) for path in folder.iterdir() if path.name.isdecimal() and path.is_dir()), reverse=True
    )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses the tracebacks that Orbax's threads print on standard error after a failure.

    If a reader or writer fails, the others end later, and each prints a traceback.
    """
    hooks = sys.unraisablehook, sys.excepthook
    logger = logging.getLogger("asyncio")
    seen = False

    def is_echo(error: BaseException | None, traceback: TracebackType | None) -> bool:
        nonlocal seen
        files = [frame.f_code.co_filename for frame, _ in walk_tb(traceback)]
        found = str(error) == "Event loop is closed" or "tensorstore" in str(error)
        found |= any("orbax" in file for file in files)
        seen |= found
        return found

    def is_wanted(record: logging.LogRecord) -> bool:
        return not (isinstance(record.exc_info, tuple) and is_echo(*record.exc_info[1:]))

    sys.unraisablehook = lambda args: is_echo(args.exc_value, args.exc_traceback) or hooks[0](args)
    sys.excepthook = lambda kind, value, traceback: is_echo(value, traceback) or hooks[1](kind, value, traceback)
    logger.addFilter(is_wanted)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
            yield
            if seen:
                gc.collect()
    finally:
        logger.removeFilter(is_wanted)
        sys.unraisablehook, sys.excepthook = hooks


class Checkpoints:
    """The checkpoints in one folder. A context manager; leaving it waits until the last one is written.

    A checkpoint has three parts: the parameters, the rest of the training state, and the run's configuration with
    checksums of the arrays. The configuration shows whether a checkpoint fits a model.

    Args:
      folder: the folder; created if it does not exist.
      read_only: do not change the folder, because another process may be training there.
      log: called with a line of text if a checkpoint cannot be read or written.

    Raises:
      InputError: the folder cannot be used, or (on leaving) the last checkpoint could not be written.
    """

    def __init__(
        self, folder: pathlib.Path, *, read_only: bool = False, log: Callable[[str], None] = lambda message: None
    ):
        self.folder = folder
        self._read_only = read_only
        self._log = log
        #: The step whose checkpoint is being written, or None.
        self._writing: int | None = None
        #: The reason why the last checkpoint could not be written, or None.
        self._failure: str | None = None
        self._quiet = _quiet()
        self._manager = self._open(cleanup=True)

    def _open(self, *, cleanup: bool) -> ocp.CheckpointManager:
        if self._read_only:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False)
        else:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=LatestN(_NUM_KEPT), cleanup_tmp_directories=cleanup, enable_async_checkpointing=True
            )
        try:
            return ocp.CheckpointManager(self.folder.absolute(), options=options)
        except OSError as e:
            raise InputError(f"run: cannot use {self.folder}: {e.strerror or e}.") from e

    def __enter__(self) -> Self:
        self._quiet.__enter__()
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(lambda *exception: self._quiet.__exit__(None, None, None))
            stack.callback(self._manager.close)
            self.wait()
            self._remove_partial()
        if kind is None and self._failure is not None:
            newest = self.latest_step()
            kept = "There is no other checkpoint." if newest is None else f"The newest checkpoint is of step {newest}."
            raise InputError(f"run: {self._failure} {kept} Free some disk space, then continue the run with --resume.")

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return next(iter(complete_steps(self.folder)), None)

    def save(self, step: int, config: TrainingConfig, params: Any, rest: Any) -> None:
        """Copies the arrays to the host and writes them in the background.

        If a checkpoint cannot be written (for example, the disk is full), `log` is called, and older checkpoints stay.
        """
        self.wait()
        parts = dict(params=params, rest=rest)
        content = config.to_json() | {"checksums": {name: checksum(tree) for name, tree in parts.items()}}
        args = {name: ocp.args.StandardSave(tree) for name, tree in parts.items()}
        self._writing, self._failure = step, None
        try:
            self._manager.save(step, args=ocp.args.Composite(config=ocp.args.JsonSave(content), **args))
        except Exception as e:
            self._fail(e)

    def wait(self) -> bool:
        """Waits until the last checkpoint is written. Returns whether it was written."""
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            self._fail(e)
        self._writing = None
        return self._failure is None

    def _fail(self, error: Exception) -> None:
        """Records and logs that a checkpoint could not be written, and reopens the folder."""
        self._failure = f"the checkpoint of step {self._writing} could not be written: {_reason(error)}."
        self._writing = None
        self._log(self._failure)
        with contextlib.suppress(Exception):  # Raises the same error again.
            self._manager.close()
        self._remove_partial()
        self._manager = self._open(cleanup=False)

    def _remove_partial(self) -> None:
        """Removes the files of a failed save, which take disk space. Orbax's other writers may still add to them."""
        if self._failure is not None:
            for path in self.folder.glob("*.orbax-checkpoint-tmp"):
                shutil.rmtree(path, ignore_errors=True)

    def restore(
        self, config: TrainingConfig, sharding: jax.sharding.Sharding, params: Any, rest: Any = None
    ) -> tuple[Any, Any]:
        """Reads the newest undamaged checkpoint.

        A newer checkpoint that cannot be read, or whose arrays differ from their checksums, is reported to `log`.
        Unless `read_only`, it is moved to the folder `damaged` beside this one: the run will write that step again.

        Args:
          config: the run's configuration. The checkpoint must be of its model.
          sharding: the sharding of the arrays.
          params: the parameters' shapes and dtypes (`jax.eval_shape`).
          rest: shapes and dtypes of the rest of the state; None: do not read it.

        Returns:
          (params, rest); rest is None if it was not read.

        Raises:
          InputError: there is no checkpoint, all are damaged, or the checkpoint is of another model.
        """
        parts = dict(params=params) if rest is None else dict(params=params, rest=rest)
        damaged: dict[int, str] = {}
        for step in complete_steps(self.folder):
            try:
                restored = self._read(step, config, sharding, parts)
            except (InputError, MemoryError, jax.errors.JaxRuntimeError):
                raise
            except Exception as e:  # Orbax and TensorStore raise exceptions of many types for damaged files.
                damaged[step] = _reason(e)
                continue
            for bad, reason in damaged.items():
                self._log(f"the checkpoint of step {bad} is damaged ({reason}); using the one of step {step}")
            if damaged and not self._read_only:
                self._set_aside(damaged)
            return restored["params"], restored.get("rest")
        if not damaged:
            raise InputError(f"run: {self.folder.parent} holds no checkpoint.")
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise InputError(f"run: every checkpoint in {self.folder} is damaged: {reasons}. Start a new run.")

    def _read(self, step: int, config: TrainingConfig, sharding: jax.sharding.Sharding, parts: Any) -> Any:
        """Reads the parts of one checkpoint. Raises an exception of any type if it is damaged."""
        found = self._config(step)
        self._check_model(step, found, config)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), parts)
        args = {name: ocp.args.StandardRestore(tree) for name, tree in placed.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        for name in parts:
            if checksum(restored[name]) != found["checksums"][name]:
                raise ValueError(f"the arrays of its part {name!r} differ from their checksum")
        return restored

    def _config(self, step: int) -> dict[str, Any]:
        return self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]

    def newest_config(self) -> dict[str, Any] | None:
        """The configuration in the newest checkpoint with a readable one, or None."""
        for step in complete_steps(self.folder):
            with contextlib.suppress(Exception):  # Damaged, as in `restore`.
                found = self._config(step)
                return {name: value for name, value in found.items() if name != "checksums"}
        return None

    def _check_model(self, step: int, found: dict[str, Any], config: TrainingConfig) -> None:
        expected = config.to_json()
        theirs = {"tokenizer": found["tokenizer"], **found["model"]}
        ours = {"tokenizer": expected["tokenizer"], **expected["model"]}
        differences = [
            f"{name}={theirs.get(name)!r} in the checkpoint, {ours.get(name)!r} in config.json"
            for name in sorted(theirs.keys() | ours.keys())
            if theirs.get(name) != ours.get(name)
        ]
        if differences:
            raise InputError(
                f"run: the checkpoint of step {step} in {self.folder.parent} is of another model: "
                f"{'; '.join(differences)}."
            )

    def _set_aside(self, steps: dict[int, str]) -> None:
        target = self.folder.parent / "damaged"
        target.mkdir(exist_ok=True)
        for step in steps:
            free = next(
                path for n in range(1000) if not (path := target / (f"{step}-{n}" if n else str(step))).exists()
            )
            (self.folder / str(step)).rename(free)
        self._manager.reload()


@jax.jit
def _sum_of_bits(x: jax.Array) -> jax.Array:
    """Sum of (2 i + 1) x_i over the elements' bits, modulo 2**32: a change of a single element always changes it."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
    bits = bits.reshape(-1).astype(jnp.uint32)
    return jnp.sum(bits * (2 * jax.lax.iota(jnp.uint32, bits.size) + 1), dtype=jnp.uint32)


def checksum(tree: Any) -> int:
    """A checksum of arrays of 16-bit or 32-bit elements, computed on their devices."""
    sums = jax.device_get([_sum_of_bits(x) for x in jax.tree.leaves(tree)])
    return zlib.crc32(np.asarray(sums, np.uint32).tobytes())


def _reason(error: Exception) -> str:
    """The error in one line."""
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror
    # TensorStore appends descriptions of arrays.
    line = re.split(r" \[\w+(?:\[\d+\])?='| See full TensorStore details", str(error).strip())[0]
    if "os_error_code" in str(error):
        return line.rpartition(": ")[2]
    line = (line.splitlines() or [type(error).__name__])[0]
    return line[:200].rstrip(".")
