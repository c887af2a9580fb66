"""Times whole training steps, and makes rows of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxkernels.bench import accuracy
from jaxkernels.bench.lowering import AUTO
from jaxkernels.bench.results import Row, Side
from jaxkernels.bench.runner import Settings, our_key
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.measure import Call, WallClock, measure
from jaxkernels.models.config import TrainingConfig, training_config
from jaxkernels.models.training import Trainer, peak_flops_per_s
from jaxkernels.ops.attention.baselines import cudnn_refuses

__all__ = ["run"]

#: The fraction of the loss that counts as an error ratio of 1.
_LOSS_UNIT = 0.005
_CHECKED = "the loss of the first step, compared with xla's: an error ratio of 1 is half a percent"

_ROUNDS, _BUDGET_SECONDS = 5, 30

_AttentionFn = Callable[..., jax.Array]

#: Baseline -> the attention that replaces ours. All baselines use XLA's products.
_BASELINES: dict[str, _AttentionFn | None] = {
    "xla": None,
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
}


class _Steps:
    """A model. Each call is a training step on the same batch."""

    def __init__(self, config: TrainingConfig, device: Any, attention_fn: _AttentionFn | None = None):
        self._trainer = Trainer(config, [device], attention_fn)
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
    """Times the training step of presets, and yields a row for each.

    Our sides are the backends, and "auto": `backend=None` for every operation. The baselines are "xla", with XLA's
    products and attention, and "cudnn", with XLA's products and cuDNN's attention. The ratio is to the faster one. All
    sides have the preset's `scan` and `remat`. XLA may autotune (`deterministic=False`), which makes the baselines
    faster. Steps run one after the other; the host's clock times each from its start to its result.

    Args:
      presets: (suite, preset name) pairs.
      settings: the sides to compare; `regimes` and `baselines` are ignored.
      status: called with a description of the current step.
    """
    chip = hardware.chip_of(settings.device)
    backends = settings.backends or (AUTO, *dispatch.backend_names())
    for suite, preset in presets:
        config = _config(preset, AUTO, settings.device)
        sides: dict[str, tuple[str, str, _AttentionFn | None]] = {}  # key -> name, backend, attention
        refused: dict[str, str] = {}
        for name, attention_fn in _BASELINES.items():
            reason = cudnn_refuses(config.model.dtype, chip) if name == "cudnn" else None
            if reason is None:
                sides[name] = name, "xla", attention_fn
            else:
                refused[name] = reason
        sides |= {our_key(name): (name, name, None) for name in backends if name not in _BASELINES}
        steps: dict[str, _Steps] = {}
        losses: dict[str, float] = {}
        for key, (name, backend, attention_fn) in sides.items():
            status(f"{preset}: compiling for {name}")
            try:
                step = _Steps(_config(preset, backend, settings.device), settings.device, attention_fn)
                losses[key] = float(step())
                reference = next(iter(losses.values()))  # xla's, unless it failed
                if not abs(losses[key] / reference - 1) / _LOSS_UNIT <= accuracy.ALLOWED:
                    refused[key] = f"wrong: its first loss is {losses[key]:.4f}, {next(iter(losses))}'s {reference:.4f}"
                else:
                    steps[key] = step
            except Exception as e:  # No kernel for this model, or out of memory: the other sides may work.
                refused[key] = f"{type(e).__name__}: {e}".splitlines()[0]
        status(f"{preset}: timing")
        settings.telemetry.take()
        samples = measure(
            {key: Call(step, [()]) for key, step in steps.items()},
            regime="sustained",
            rounds=_ROUNDS,
            budget_s=_BUDGET_SECONDS,
            clock=settings.clock or WallClock(),
            probe=settings.telemetry.sm_clock,
        )
        timed = [
            Side(
                name=sides[key][0],
                is_ours=key not in _BASELINES,
                seconds=times.median,
                samples=times,
                error_ratio=abs(losses[key] / next(iter(losses.values())) - 1) / _LOSS_UNIT,
            )
            for key, times in samples.items()
        ]
        yield _row(suite, config, settings, tuple(timed), refused)


def _config(preset: str, backend: str, device: Any) -> TrainingConfig:
    name = None if backend == AUTO else backend
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
        memory_bytes_per_s=None,  # The bytes of a step are not counted.
        is_warm=False,
        sides=sides,
        refused=refused,
        checked=_CHECKED,
        tokens=tokens,
        device=settings.telemetry.take(),
    )
