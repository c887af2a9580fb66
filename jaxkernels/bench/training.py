"""Training steps as rows: what the kernels are worth to a whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxkernels import dispatch
from jaxkernels.bench import accuracy
from jaxkernels.bench.measure import Call, WallClock, measure
from jaxkernels.bench.results import Row, Side
from jaxkernels.bench.runner import Settings
from jaxkernels.models.config import TrainingConfig, training_config
from jaxkernels.models.training import Trainer, peak_flops_per_s

__all__ = ["run"]

_BASELINE = "xla"
_AUTO = "auto"

#: The fraction of the loss that counts as an error ratio of 1.
_LOSS_UNIT = 0.005
_CHECKED = "the loss of the first step, against xla's: an error ratio of 1 is half a percent"

_ROUNDS, _BUDGET_SECONDS = 5, 30


class _Steps:
    """A model that takes one training step at each call, always on the same batch."""

    def __init__(self, config: TrainingConfig, device: Any):
        self._trainer = Trainer(config, [device])
        rng = np.random.default_rng(config.seed)
        shape = (config.batch_size, config.sequence_length + 1)
        self._batch = self._trainer.put(rng.integers(config.model.vocab_size, size=shape, dtype=np.int32))
        self._state = self._trainer.init_state()

    def __call__(self) -> jax.Array:
        self._state, measured = self._trainer.step(self._state, self._batch)
        return measured["loss"]


def run(
    presets: Iterable[tuple[str, str]], settings: Settings, status: Callable[[str], None] = lambda text: None
) -> Iterator[Row]:
    """Times the training step of presets, given with the name of their suite; one row each.

    Sides are the backends, and "auto" where each operation chooses; xla's step is the baseline. XLA is free to autotune
    (`deterministic=False`), which makes the baseline faster. A step is timed by the host's clock, from its start to its
    result, one after the other.

    Args:
      presets: (suite, preset name) pairs.
      settings: what to compare; regimes and baselines are not looked at.
      status: told what is going on.
    """
    ours = settings.backends or (_AUTO, *dispatch.backend_names())
    for suite, preset in presets:
        steps, losses, refused = {}, {}, {}
        for name in (_BASELINE, *(name for name in ours if name != _BASELINE)):
            status(f"{preset}: compiling for {name}")
            try:
                steps[name] = _Steps(_config(preset, name, settings.device), settings.device)
                losses[name] = float(steps[name]())
                error = abs(losses[name] / losses.get(_BASELINE, losses[name]) - 1) / _LOSS_UNIT
                if not error <= accuracy.ALLOWED:
                    refused[name] = f"wrong: its first loss is {losses[name]:.4f}, xla's {losses[_BASELINE]:.4f}"
                    del steps[name]
            except Exception as e:  # No kernel for this model, or no memory: the others may do.
                refused[name] = f"{type(e).__name__}: {e}".splitlines()[0]
        status(f"{preset}: timing")
        settings.telemetry.take()
        samples = measure(
            {name: Call(step, [()]) for name, step in steps.items()},
            regime="sustained",
            rounds=_ROUNDS,
            budget_s=_BUDGET_SECONDS,
            clock=settings.clock or WallClock(),
            probe=settings.telemetry.sm_clock,
        )
        sides = [
            Side(
                name=name,
                is_ours=name != _BASELINE,
                seconds=times.median,
                samples=times,
                error_ratio=abs(losses[name] / losses[_BASELINE] - 1) / _LOSS_UNIT,
            )
            for name, times in samples.items()
        ]
        yield _row(suite, _config(preset, _AUTO, settings.device), settings, tuple(sides), refused)


def _config(preset: str, backend: str, device: Any) -> TrainingConfig:
    name = None if backend == _AUTO else backend
    config = training_config(preset, platform=device.platform, backend=name)
    return dataclasses.replace(config, deterministic=False)


def _row(
    suite: str, config: TrainingConfig, settings: Settings, sides: tuple[Side, ...], refused: dict[str, str]
) -> Row:
    tokens = config.batch_size * config.sequence_length
    return Row(
        suite=suite,
        label=f"{config.model.num_params / 1e6:,.0f} M parameters",
        op="train",
        shape=f"{config.preset} {config.batch_size}x{config.sequence_length}",
        dtype=config.model.dtype,
        regime="sustained",
        flops=tokens * config.model.flops_per_token(config.sequence_length),
        num_bytes=0,
        peak_flops_per_s=peak_flops_per_s(settings.device, config.model.dtype),
        memory_bytes_per_s=None,  # A step is many kernels: their bytes have no sum that would bound it.
        is_warm=False,
        sides=sides,
        refused=refused,
        checked=_CHECKED,
        tokens=tokens,
        device=settings.telemetry.take(),
    )
