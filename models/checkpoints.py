"""Checkpoints of a run, with Orbax: written in the background, complete or not there at all."""

from __future__ import annotations

import logging
import pathlib
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import LatestN

from jaxkernels.models.config import InputError, TrainingConfig

__all__ = ["Checkpoints"]

#: Older checkpoints are deleted.
_NUM_KEPT = 2

# Orbax reports every file it writes; what matters to a user, training says itself.
logging.getLogger("absl").setLevel(logging.ERROR)


class Checkpoints:
    """The checkpoints in one folder; a context manager that waits for the last one to be written.

    A checkpoint has three parts: the parameters, the rest of the training state, and the run's
    configuration, so that one made for another model is told from a fitting one.

    Args:
      folder: where they are; made if need be.
      read_only: do not touch the folder: another process may be training there.
    """

    def __init__(self, folder: pathlib.Path, *, read_only: bool = False):
        self.folder = folder
        if read_only:
            options = ocp.CheckpointManagerOptions(read_only=True, create=False)
        else:
            options = ocp.CheckpointManagerOptions(
                preservation_policy=LatestN(_NUM_KEPT), cleanup_tmp_directories=True, enable_async_checkpointing=True
            )
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.close()

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, config: TrainingConfig, params: Any, rest: Any) -> None:
        """Copies the arrays to the host and writes them in the background."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(params),
                rest=ocp.args.StandardSave(rest),
                config=ocp.args.JsonSave(config.to_json()),
            ),
        )

    def restore(
        self, config: TrainingConfig, sharding: jax.sharding.Sharding, params: Any, rest: Any = None
    ) -> tuple[Any, Any]:
        """Reads the newest checkpoint back.

        Args:
          config: the run's configuration; the checkpoint must have been made for its model.
          sharding: where the arrays go.
          params: the parameters' shapes and dtypes (`jax.eval_shape`).
          rest: those of the rest of the state, or None to leave it.

        Returns:
          (params, rest), rest None if it was not asked for.

        Raises:
          InputError: there is no checkpoint, or it is of another model.
        """
        step = self.latest_step()
        if step is None:
            raise InputError(f"run: {self.folder.parent} holds no checkpoint.")
        found = self._manager.restore(step, args=ocp.args.Composite(config=ocp.args.JsonRestore()))["config"]
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
        parts = dict(params=params) if rest is None else dict(params=params, rest=rest)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), parts)
        args = {name: ocp.args.StandardRestore(tree) for name, tree in placed.items()}
        restored = self._manager.restore(step, args=ocp.args.Composite(**args))
        return restored["params"], restored.get("rest")
