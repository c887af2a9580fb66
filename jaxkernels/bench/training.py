"""Times whole training steps, each side at its best setting of `scan` and `remat`, and makes rows of them."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxkernels.bench import accuracy, step_profile
from jaxkernels.bench.lowering import AUTO
from jaxkernels.bench.results import Row, Side
from jaxkernels.bench.runner import Settings, our_key
from jaxkernels.bench.step_profile import Breakdown
from jaxkernels.bench.telemetry import Telemetry
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Call, Regime, Samples, WallClock, measure
from jaxkernels.models.config import REMATS, TrainingConfig, preset, training_config
from jaxkernels.models.memory import step_bytes
from jaxkernels.models.training import Trainer, TrainState, peak_flops_per_s
from jaxkernels.ops.attention.baselines import cudnn_refuses

__all__ = ["BACKENDS", "BASELINES", "Plan", "Setting", "run"]

#: The fraction of the loss, and of the gradient's norm, that counts as an error ratio of 1.
_UNIT = 0.005
_CHECKED = (
    "the loss and the gradient's norm of the first step, compared with the first side's: an error ratio of 1 is half a "
    "percent"
)

#: Steps that a side makes at each setting before its best setting is known.
_LOOK_STEPS = 5

#: Steps are launched ahead of the device until a launch takes this long, so that the host's time is hidden, as in
#: training.
_LAUNCH_SECONDS = 0.1

#: Launches of one side in a burst, as `measure` makes them for launches of this length.
_BURST_LAUNCHES = 3

#: The chip rests before a burst, for up to this long.
_RESTS = (0.01, 1.0)

#: Steps run for this long to measure energy, twice for each side. NVML updates its counter every 0.1 s or less.
_ENERGY_SECONDS = 1.5

#: Steps in a trace.
_TRACED_STEPS = 3

#: Models with more parameters run at their preset's setting only: without recomputation they exceed one GPU's memory.
_MAX_PARAMS = 2e9

_AttentionFn = Callable[..., jax.Array]

#: Baseline -> the attention that replaces ours. All baselines use XLA's products.
BASELINES: dict[str, _AttentionFn | None] = {
    "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    "xla": None,
}

#: The names of our sides.
BACKENDS = (AUTO, *dispatch.backend_names())


@dataclasses.dataclass(frozen=True)
class Setting:
    """How a model runs its layers. As text: "scan:full", "unrolled:none".

    Attributes:
      scan, remat: as in `ModelConfig`.
    """

    scan: bool
    remat: str

    def __str__(self) -> str:
        return f"{'scan' if self.scan else 'unrolled'}:{self.remat}"

    @classmethod
    def parse(cls, text: str) -> Setting:
        """Raises InputError if the text is not a setting."""
        layers, _, remat = text.partition(":")
        if layers not in ("scan", "unrolled") or remat not in REMATS:
            raise InputError(
                f"bench: --setting must be scan:REMAT or unrolled:REMAT, where REMAT is one of {', '.join(REMATS)}; "
                f"got {text!r}."
            )
        return cls(layers == "scan", remat)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The settings, steps and traces of a run.

    Attributes:
      layouts: the settings at which each side is tried; none: the preset's own, unrolled:none, and
        scan:dots_and_attention.
      steps: steps that count, for each side in each regime.
      profile: whether some more steps are traced, to see where their time goes.
    """

    layouts: tuple[Setting, ...] = ()
    steps: int = 10
    profile: bool = False

    def settings(self, name: str) -> tuple[Setting, ...]:
        """The settings at which a preset is tried."""
        if self.layouts:
            return self.layouts
        model = preset(name).model
        own = Setting(model.scan, model.remat)
        others = (Setting(False, "none"), Setting(True, "dots_and_attention"))
        more = others if model.num_params <= _MAX_PARAMS else ()
        return tuple(dict.fromkeys((own, *more)))


@dataclasses.dataclass(frozen=True)
class _Way:
    """A side: a name, whether it is ours, the backend of its products and attention, or its own attention."""

    name: str
    is_ours: bool
    backend: str
    attention_fn: _AttentionFn | None = None

    @property
    def key(self) -> str:
        return our_key(self.name) if self.is_ours else self.name


class _Program:
    """The compiled step of a side at a setting. Each call is a step on the same batch.

    Args:
      way: the side.
      setting: the setting.
      config: the training.
      device: the device.
      states: layout -> the state of training. All programs of a layout take the same one in turn, so that the device
        holds one state for each layout, not one for each program.
    """

    def __init__(
        self, way: _Way, setting: Setting, config: TrainingConfig, device: Any, states: dict[bool, TrainState]
    ):
        self.way, self.setting = way, setting
        self._trainer = Trainer(config, [device], way.attention_fn)
        rng = np.random.default_rng(config.seed)
        shape = (config.batch_size, config.sequence_length + 1)
        self._batch = self._trainer.put(rng.integers(config.model.vocab_size, size=shape, dtype=np.int32))
        self._states = states

    def __call__(self) -> dict[str, jax.Array]:
        # If the step fails, its state is lost: the next program begins with a new one.
        state = self._states.pop(self.setting.scan, None) or self._trainer.init_state()
        self._states[self.setting.scan], measured = self._trainer.step(state, self._batch)
        return measured

    @property
    def memory_bytes(self) -> int | None:
        return step_bytes(self._trainer.step)

    def breakdown(self) -> Breakdown:
        """Where a step's time goes."""
        text = self._trainer.step.as_text()  # type: ignore[attr-defined]
        return step_profile.profile(functools.partial(self.steps, _TRACED_STEPS), _TRACED_STEPS, text)

    def first(self) -> tuple[float, float]:
        """The loss and the gradient's norm of the first step. Frees the states of all programs."""
        self._states.clear()
        measured = self()
        return float(measured["loss"]), float(measured["grad_norm"])

    def steps(self, count: int) -> jax.Array:
        """Makes steps without waiting for them, and returns the last one's loss."""
        for _ in range(count - 1):
            self()
        return self()["loss"]

    def seconds(self, count: int) -> float:
        """The time of a step, when `count` steps follow each other."""
        begin = time.perf_counter()
        jax.block_until_ready(self.steps(count))
        return (time.perf_counter() - begin) / count


def run(
    presets: Iterable[tuple[str, str]],
    settings: Settings,
    status: Callable[[str], None] = lambda text: None,
    plan: Plan | None = None,
) -> Iterator[Row]:
    """Times the training step of presets, and yields a row for each preset and regime.

    Our side is "auto", `backend=None` for every operation, or the named backends. The baseline is "cudnn", with XLA's
    products and cuDNN's attention; where cuDNN has none, "xla", with XLA's products and attention. Every side is tried
    at each setting of `scan` and `remat`, and then timed at its fastest: the ratio compares the best of both. XLA may
    autotune (`deterministic=False`), which makes the baselines faster. The host's clock times launches of one or more
    steps, from their start to their result.

    Args:
      presets: (suite, preset name) pairs.
      settings: the sides to compare, and the regimes.
      status: called with a description of the current step.
      plan: what is measured; None: the default.
    """
    plan = plan or Plan()
    for suite, name in presets:
        yield from _Bench(suite, name, settings, status, plan).rows()


class _Bench:
    """The measurement of one preset."""

    def __init__(self, suite: str, name: str, settings: Settings, status: Callable[[str], None], plan: Plan):
        self._suite, self._name, self._settings, self._plan = suite, name, settings, plan
        self._status = lambda text: status(f"{name}: {text}")
        self._refused: dict[str, str] = {}
        self._states: dict[bool, TrainState] = {}
        self._errors: dict[_Program, float] = {}
        #: The time of a step in the first look.
        self._looks: dict[_Program, float] = {}
        self._seconds: dict[str, float] = dict.fromkeys(("compile", "check", "look", "time"), 0.0)
        self._programs: dict[str, dict[str, float]] = {}

    def rows(self) -> Iterator[Row]:
        self._look()
        best = list(self._best())
        for regime in self._settings.regimes:
            self._status(f"timing, {regime}")
            begin = time.perf_counter()
            self._settings.telemetry.take()
            samples = self._times(best, regime)
            reading = self._settings.telemetry.take()
            joules = self._energy(best) if regime == "sustained" else {}
            self._seconds["time"] = time.perf_counter() - begin
            breakdowns: dict[_Program, Breakdown] = {}
            if self._plan.profile and regime == self._settings.regimes[-1]:
                self._status("tracing")
                for program in best:
                    try:
                        breakdowns[program] = program.breakdown()
                    except InputError as e:
                        self._refused[f"{program.way.key} --profile"] = str(e)
            sides = tuple(
                self._side(program, samples.get(program), joules.get(program), breakdowns.get(program))
                for program in self._looks
            )
            yield self._row(regime, sides, reading)
            self._seconds, self._programs = {}, {}  # Later rows have no compilation of their own.

    def _best(self) -> Iterator[_Program]:
        """Each side's program at its fastest setting, after a step: it has a state."""
        for way in dict.fromkeys(program.way for program in self._looks):
            for program in sorted((p for p in self._looks if p.way == way), key=self._looks.__getitem__):
                try:
                    jax.block_until_ready(program.steps(1))
                except Exception as e:  # Out of memory: the states of both layouts are held now.
                    self._refused[f"{way.key} {program.setting}"] = f"{type(e).__name__}: {e}".splitlines()[0]
                    continue
                yield program
                break

    def _config(self, way: _Way, setting: Setting) -> TrainingConfig:
        platform = self._settings.device.platform
        backend = None if way.backend == AUTO else way.backend
        config = training_config(self._name, platform=platform, backend=backend, scan=setting.scan, remat=setting.remat)
        return dataclasses.replace(config, deterministic=False)

    def _ways(self) -> Iterator[_Way]:
        """The sides: baselines first, of which the first is the reference."""
        device = self._settings.device
        dtype = training_config(self._name, platform=device.platform).model.dtype
        reason = cudnn_refuses(dtype, hardware.chip_of(device))
        chosen = self._settings.baselines or (("xla",) if reason else ("cudnn",))
        if reason is not None:
            self._refused["cudnn"] = reason
        for name in BASELINES:
            if name in chosen and name not in self._refused:
                yield _Way(name, False, "xla", BASELINES[name])
        for name in self._settings.backends or (AUTO,):
            if name not in chosen:  # The baseline of that name is the same program.
                yield _Way(name, True, name)

    def _look(self) -> None:
        """Compiles every side at every setting, checks its first step, and takes its time."""
        reference: tuple[float, float] | None = None
        for way in self._ways():
            for setting in self._plan.settings(self._name):
                key = f"{way.key} {setting}"
                self._status(f"compiling {way.name} {setting}")
                begin = time.perf_counter()
                try:
                    config = self._config(way, setting)
                    program = _Program(way, setting, config, self._settings.device, self._states)
                    compiled = time.perf_counter()
                    first = program.first()
                    reference = reference or first
                    error = max(abs(x / y - 1) for x, y in zip(first, reference)) / _UNIT
                    checked = time.perf_counter()
                    if not error <= accuracy.ALLOWED:
                        self._refused[key] = (
                            f"wrong: its first loss is {first[0]:.4f} and its gradient's norm {first[1]:.4f}; "
                            f"the first side has {reference[0]:.4f} and {reference[1]:.4f}"
                        )
                        continue
                    self._looks[program] = program.seconds(_LOOK_STEPS)
                except Exception as e:  # No kernel for this model, or out of memory: the others may work.
                    self._refused[key] = f"{type(e).__name__}: {e}".splitlines()[0]
                    continue
                self._errors[program] = error
                self._programs[key] = {"compile": compiled - begin}
                self._seconds["compile"] += compiled - begin
                self._seconds["check"] += checked - compiled
                self._seconds["look"] += time.perf_counter() - checked

    def _times(self, programs: Sequence[_Program], regime: Regime) -> dict[_Program, Samples]:
        """The times of a step, the programs in turns."""
        if not programs:
            return {}
        count = max(1, math.ceil(_LAUNCH_SECONDS / max(self._looks[program] for program in programs)))
        launches = math.ceil(self._plan.steps / count)
        calls = {
            str(i): Call(functools.partial(program.steps, count), [()], count * self._looks[program])
            for i, program in enumerate(programs)
        }
        samples = measure(
            calls,
            regime=regime,
            rounds=launches if regime == "sustained" else math.ceil(launches / _BURST_LAUNCHES),
            clock=self._settings.clock or WallClock(_RESTS),
            probe=self._settings.telemetry.sm_clock,
        )
        return {program: samples[str(i)].divided(count) for i, program in enumerate(programs)}

    def _energy(self, programs: Sequence[_Program]) -> dict[_Program, float]:
        """Joules of a step, of the whole GPU under load; nothing where they are not counted."""
        self._status("measuring energy")
        joules: dict[_Program, list[float]] = {program: [] for program in programs}
        for program in [*programs, *reversed(programs)]:
            count = max(1, math.ceil(_ENERGY_SECONDS / self._looks[program]))
            if (used := _joules(self._settings.telemetry, functools.partial(program.steps, count))) is None:
                return {}
            joules[program].append(used / count)
        return {program: math.fsum(each) / len(each) for program, each in joules.items()}

    def _side(
        self, program: _Program, samples: Samples | None, joules: float | None, breakdown: Breakdown | None
    ) -> Side:
        return Side(
            name=program.way.name,
            is_ours=program.way.is_ours,
            seconds=self._looks[program] if samples is None else samples.median,
            samples=samples,
            error_ratio=self._errors[program],
            setting=str(program.setting),
            memory_bytes=program.memory_bytes,
            joules=joules,
            breakdown=breakdown,
        )

    def _row(self, regime: Regime, sides: tuple[Side, ...], reading: Any) -> Row:
        device = self._settings.device
        config = training_config(self._name, platform=device.platform)
        tokens = config.batch_size * config.sequence_length
        return Row(
            suite=self._suite,
            label=f"{config.model.num_params / 1e6:,.0f} M parameters",
            op="train",
            shape=f"{config.preset} {config.batch_size}x{config.sequence_length}",
            dtype=config.model.dtype,
            regime=regime,
            flops=tokens * config.model.flops_per_token(config.sequence_length),
            num_bytes=0,
            peak_flops_per_s=peak_flops_per_s(device, config.model.dtype),
            memory_bytes_per_s=None,  # The bytes of a step are not counted.
            is_warm=False,
            sides=sides,
            refused=dict(self._refused),
            checked=_CHECKED,
            tokens=tokens,
            device=reading,
            seconds=self._seconds,
            programs=self._programs,
        )


def _joules(telemetry: Telemetry, launch: Callable[[], Any]) -> float | None:
    """The energy that the GPU takes during a launch; None where it is not counted."""
    if (begin := telemetry.joules()) is None:
        return None
    jax.block_until_ready(launch())
    end = telemetry.joules()
    return None if end is None else end - begin
