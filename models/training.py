"""Trains a language model: a jitted step, a loop that keeps the device busy, and its reports.

The losses of a run depend only on its `TrainingConfig`, its text, the devices and the versions of the libraries. The
batches are a function of (seed, step). So a run that is killed and resumed logs the same losses as one that is not.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from rich.console import Console

import jaxkernels as jk
from jaxkernels.core import hardware
from jaxkernels.core.errors import InputError
from jaxkernels.models import data as data_lib
from jaxkernels.models import memory
from jaxkernels.models.checkpoints import Checkpoints
from jaxkernels.models.config import TrainingConfig
from jaxkernels.models.data import TokenData
from jaxkernels.models.interrupts import Interrupts
from jaxkernels.models.plot import plot_losses
from jaxkernels.models.progress import Progress, plain_console, waiting
from jaxkernels.models.run import Run, check_free
from jaxkernels.models.sampling import sample_text
from jaxkernels.models.tokenizer import BpeTokenizer, Tokenizer
from jaxkernels.models.transformer import abstract_params, init_params

__all__ = [
    "CHANGEABLE", "TrainState", "Trainer", "cross_entropy", "optimizer", "peak_flops_per_s", "resume", "train",
    "warm_config",
]  # fmt: skip

#: Fields of a `TrainingConfig` that may change when a run is resumed. Only `steps` changes the losses.
CHANGEABLE = ("data", "steps", "eval_every", "checkpoint_every")

#: The measurements of a step, in the order of metrics.jsonl.
_MEASURED = ("loss", "grad_norm", "learning_rate")
_NAMES = {"loss": "loss", "grad_norm": "gradient's norm", "learning_rate": "learning rate"}

_SAMPLE_TOKENS = 256
_SAMPLE_TEMPERATURE = 0.8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a training. All arrays are float32, except for counters and the first moment of adafactor.

    Attributes:
      params: the model's parameters (the master weights), a pure dict of arrays.
      opt_state: the optimizer's state.
      step: steps done, int32.
    """

    params: Any
    opt_state: optax.OptState
    step: jax.Array


def learning_rate(config: TrainingConfig) -> optax.Schedule:
    """Linear warm-up to the peak, then a cosine down to a tenth of it at the last step."""
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / config.warmup_steps,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=0.1 * config.learning_rate,
    )


def optimizer(config: TrainingConfig) -> optax.GradientTransformation:
    """AdamW or Adafactor on clipped gradients. Weight decay applies to every matrix, but not to the norms' scales.

    "adafactor" keeps the second moment of a matrix as a row and a column (Shazeer and Stern 2018, arXiv:1804.04235).
    Its first moment is in bfloat16. Updates are not clipped for each array, so that `scan` does not change them.
    """
    is_matrix = functools.partial(jax.tree.map_with_path, lambda path, _: path[-1].key != "scale")
    if config.optimizer == "adafactor":
        return optax.chain(
            optax.clip_by_global_norm(config.clip_norm),
            optax.scale_by_factored_rms(),
            optax.ema(0.9, debias=False, accumulator_dtype=jnp.bfloat16),
            optax.add_decayed_weights(config.weight_decay, is_matrix),
            optax.scale_by_learning_rate(learning_rate(config)),
        )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix),
    )


def cross_entropy(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean negative log-likelihood of the targets, in nats per token, computed in float32.

    A comparison selects the target's logit. Its gradient is elementwise, so XLA never writes the float32 logits to
    memory. The gradient of indexing would be a scatter into all of them.
    """
    logits = logits.astype(jnp.float32)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits, axis=-1, where=is_target))


def peak_flops_per_s(device: Any, dtype: str) -> float | None:
    """The device's published matmul peak for `dtype`; None if it is not in our table.

    For float32 it is the TF32 peak: XLA's default precision for float32 products on a GPU.
    """
    chip = hardware.chip_of(device)
    return chip.tf32_flops_per_s if dtype == "float32" else chip.bf16_flops_per_s


class Trainer:
    """The compiled functions of one run, and their devices.

    Data parallelism: the batch is split over a one-dimensional mesh of the devices, each device has the whole state,
    and XLA sums the gradients.

    Args:
      config: the run's configuration.
      devices: the devices; None: all devices of JAX.
      attention_fn: replaces the model's attention, as in `Transformer`.

    Raises:
      InputError: the batch cannot be split evenly over the devices, or a step does not fit into their memory.
      NotImplementedError: the config names a backend that cannot run the model here.
    """

    def __init__(
        self,
        config: TrainingConfig,
        devices: Sequence[Any] | None = None,
        attention_fn: Callable[..., jax.Array] | None = None,
    ):
        self.devices = _as_devices(devices)
        if config.batch_size % len(self.devices):
            raise InputError(
                f"train: --batch-size must be a multiple of the number of devices ({len(self.devices)}); "
                f"got {config.batch_size}. Change it, or use fewer devices with --devices."
            )
        self.config = config
        model = dataclasses.replace(config.model, deterministic=config.deterministic)
        self.graphdef, _ = abstract_params(model, attention_fn)
        self._optimizer = optimizer(config)
        self._stores_logits = memory.stores_logits(config, self.devices[0])
        mesh = jax.make_mesh((len(self.devices),), ("data",), axis_types=(AxisType.Auto,), devices=self.devices)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("data"))
        state = self.abstract_state()
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated), state)
        shape = (config.batch_size, config.sequence_length + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._split)
        on_gpu = self.devices[0].platform in hardware.GPU_PLATFORMS
        options = {"xla_gpu_deterministic_ops": True} if on_gpu and config.deterministic else None

        def compiled(function: Callable[..., Any], *args: Any, **jit_options: Any) -> Any:
            # Two measurements may find different kernels fastest.
            with jk.comparing(False) if config.deterministic else contextlib.nullcontext():
                traced = jax.jit(function, **jit_options).trace(*args)
                if on_gpu and len(self.devices) == 1:
                    jk.compile_ahead(traced)
                return traced.lower().compile(options)

        #: (state, batch) -> (next state, metrics); the state's buffers are donated.
        self.step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]] = compiled(
            self._step, state, batch, donate_argnums=0, out_shardings=self.replicated
        )
        memory.check_compiled(config, self.devices, self.step)  # type: ignore[arg-type]
        self._lower_loss = lambda: compiled(self._loss, state.params, batch)

    @functools.cached_property
    def loss(self) -> Callable[[Any, jax.Array], jax.Array]:
        """(params, batch) -> loss; compiled where it is first used."""
        return self._lower_loss()

    def init_state(self) -> TrainState:
        """Returns the state before the first step. It depends on the seed."""
        key = jax.device_put(jax.random.key(self.config.seed), self.replicated)
        params = init_params(self.config.model, key)
        # Not jitted: the optimizer's zeros then take one program for each shape, not one kernel for each array.
        state = TrainState(params, self._optimizer.init(params), jnp.int32(0))
        return jax.device_put(state, self.replicated)

    def abstract_state(self) -> TrainState:
        """Returns the shapes and dtypes of the state."""
        _, params = abstract_params(self.config.model)
        return jax.eval_shape(lambda params: TrainState(params, self._optimizer.init(params), jnp.int32(0)), params)

    def put(self, batch: Any) -> jax.Array:
        """Starts to copy the batch to the devices."""
        return jax.device_put(batch, self._split)

    def evaluate(self, params: Any, tokens: Any) -> float:
        """Returns the mean loss over the validation batches, nats per token."""
        c = self.config
        batches = data_lib.validation_batches(
            tokens, num_batches=c.eval_batches, batch_size=c.batch_size, sequence_length=c.sequence_length
        )
        losses = [self.loss(params, self.put(batch)) for batch in batches]
        return math.fsum(map(float, losses)) / len(losses)

    def _loss(self, params: Any, batch: Int[Array, "B T+1"]) -> Float[Array, ""]:
        model, tokens, targets = nnx.merge(self.graphdef, params), batch[:, :-1], batch[:, 1:]
        return cross_entropy(model(tokens), targets) if self._stores_logits else model.loss(tokens, targets)

    def _step(self, state: TrainState, batch: Int[Array, "B T+1"]) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, grads = jax.value_and_grad(self._loss)(state.params, batch)
        updates, opt_state = self._optimizer.update(grads, state.opt_state, state.params)
        metrics = dict(
            loss=loss, grad_norm=optax.tree.norm(grads), learning_rate=learning_rate(self.config)(state.step)
        )
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1), metrics


def train(
    config: TrainingConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    devices: Sequence[Any] | None = None,
    console: Console | None = None,
) -> Run:
    """Trains a model and returns its finished run.

    The first Ctrl-C or SIGTERM saves the run and then raises `Interrupted`, a KeyboardInterrupt; the second raises it
    at once. A run that fails before its first step leaves no folder.

    Args:
      config: the run's configuration. With `init_from` it starts from the weights of another run, else from random
        weights.
      out: folder of the run; None: a new one under ./runs.
      devices: the devices to train on; None: all devices of JAX.
      console: the console to report to; None: standard output.

    Raises:
      InputError: the text, the folder or an option cannot be used, there is too little memory, another process is
        training in the folder, or a loss is not finite.
      NotImplementedError: the config names a backend that cannot run the model here.
    """
    if not isinstance(config, TrainingConfig):
        raise InputError(f"train: config must be a TrainingConfig; got {config!r}.")
    console = console or plain_console()
    folder = None if out is None else pathlib.Path(out)
    devices = _as_devices(devices)
    check_free(folder)
    memory.check_config(config, devices)
    source = None if config.init_from is None else Run.open(pathlib.Path(config.init_from))
    if source is not None:
        _check_same_model(config, source)
    data = _load_data(config, console)
    if source is not None and not _are_same(data.tokenizer, source.tokenizer()):
        raise InputError(
            f"train: --init-from needs a run with the same tokens; the byte pairs of this text differ from those of "
            f"{source.folder}. Use that run's text, or a run with --tokenizer bytes."
        )
    trainer = _compile(config, devices, console)
    run = Run.create(folder, config, data.key, data.tokenizer)
    try:
        with run.lock():
            _run(run, trainer, data, console)
    except Exception:
        if not run.has_begun():
            run.discard()
        raise
    return run


def resume(
    run: Run,
    *,
    devices: Sequence[Any] | None = None,
    console: Console | None = None,
    **changes: Any,
) -> Run:
    """Continues a run from its newest undamaged checkpoint to its end, and returns it. Interrupts act as in `train`.

    A run without a checkpoint starts again from its first step.

    Args:
      run: the run.
      devices: the devices to train on; None: all devices of JAX.
      console: the console to report to; None: standard output.
      **changes: new values of the fields in `CHANGEABLE`; None keeps the old value. If `steps` changes, the learning
        rate follows the new schedule from here on. It jumps up if it had decayed and the run is extended.

    Raises:
      InputError: all checkpoints are damaged, the newest is of another model, the text has changed, another process is
        training the run, or a loss is not finite.
      NotImplementedError: the config names a backend that cannot run the model here.
    """
    if unknown := sorted(changes.keys() - set(CHANGEABLE)):
        raise InputError(f"train: only {', '.join(CHANGEABLE)} can change; got {', '.join(unknown)}.")
    console = console or plain_console()
    devices = _as_devices(devices)
    with run.lock():
        given = {name: value for name, value in changes.items() if value is not None}
        config = dataclasses.replace(Run.open(run.folder).config, **given)
        run = dataclasses.replace(run, config=config)
        memory.check_config(config, devices)
        data = _load_data(config, console)
        if data.key != run.data_key:
            raise InputError(
                f"data: the text differs from the text that {run.folder} was started with. Restore it, or start a new "
                "run."
            )
        trainer = _compile(config, devices, console)
        _run(run, trainer, data, console)
    return run


def _as_devices(devices: Sequence[Any] | None) -> tuple[Any, ...]:
    if devices is None:
        return tuple(jax.devices())
    if not isinstance(devices, Sequence) or not devices or not all(isinstance(d, jax.Device) for d in devices):
        raise InputError(
            f"train: devices must be a sequence of at least one JAX device, or None for all; got {devices!r}."
        )
    return tuple(devices)


def _run(run: Run, trainer: Trainer, data: TokenData, console: Console) -> None:
    """Trains a run to its end, from its newest checkpoint if it has one. The caller has locked the run."""
    say = lambda message: console.print(f"{run.folder}: {message}")
    with Interrupts() as interrupts, _hint_at_resuming(run, console), memory.explained(run.config):
        with run.checkpoints(log=say) as checkpoints:
            state = _first_state(run, trainer, data, checkpoints, console)
            if interrupts.signum is not None:
                _stop(run, checkpoints, state, interrupts, console)
            state = _loop(run, trainer, data, checkpoints, state, interrupts, console)
            with waiting(console, "writing the last checkpoint"):
                checkpoints.wait()
        interrupts.check()
        try:
            _finish(run, state, data, console)
        except OSError as e:
            raise InputError(f"run: cannot write to {run.folder}: {e.strerror}.") from e


def _first_state(run: Run, trainer: Trainer, data: TokenData, checkpoints: Checkpoints, console: Console) -> TrainState:
    """The state at the start: from the newest checkpoint, else with another run's weights, else with random ones."""
    c = run.config
    shapes = trainer.abstract_state()
    if checkpoints.latest_step() is not None:
        with waiting(console, "reading the checkpoint"):
            params, rest = checkpoints.restore(
                c, trainer.replicated, shapes.params, dict(opt_state=shapes.opt_state, step=shapes.step)
            )
        state = TrainState(params, **rest)
        step = int(state.step)
        if step > c.steps:
            raise InputError(
                f"train: --steps must be at least {step}, the step of the newest checkpoint; got {c.steps}."
            )
        console.print(f"{run.folder}: resumed after step {step:,}")
        if c != Run.open(run.folder).config:
            run.save_config()
        _forget_after(run, step, console)
        return state
    if run.has_begun():
        console.print(f"{run.folder}: has no checkpoint yet; starting again from the first step")
    if c != Run.open(run.folder).config:
        run.save_config()
    _forget_after(run, -1, console)
    with waiting(console, "making the weights"):
        state = trainer.init_state()
    if c.init_from is not None:
        source = Run.open(pathlib.Path(c.init_from))
        log = lambda message: console.print(f"{source.folder}: {message}")
        with waiting(console, "reading the weights"), source.checkpoints(read_only=True, log=log) as others:
            params, _ = others.restore(source.config, trainer.replicated, shapes.params)
        console.print(f"{run.folder}: starting from the weights of {source.folder}")
        state = dataclasses.replace(state, params=params)
    with waiting(console, "evaluating"):
        loss = trainer.evaluate(state.params, data.validation)
    if not math.isfinite(loss):
        raise _diverged(run, checkpoints, 0, "validation loss", loss)
    run.metrics().append([dict(step=0, validation_loss=loss)])
    console.print(f"{run.folder}: validation loss {loss:.3f} before the first step")
    return state


def _forget_after(run: Run, step: int, console: Console) -> None:
    """Deletes the measurements of steps that will be repeated, and damaged lines."""
    metrics = run.metrics()
    if num_damaged := metrics.truncate(step):
        console.print(f"{metrics.path}: removed {num_damaged} damaged lines")


#: Fields of a `ModelConfig` that change the parameters' shapes, layout or meaning.
_ARCHITECTURE = (
    "vocab_size", "num_layers", "embed_dim", "num_heads", "num_kv_heads", "head_dim", "mlp_dim", "rope_theta",
    "norm_epsilon", "tied_embedding", "scan",
)  # fmt: skip


def warm_config(source: Run, **options: Any) -> TrainingConfig:
    """The configuration of a run that starts from the weights of `source`.

    Args:
      source: the run with the weights (of its newest checkpoint).
      **options: fields of `TrainingConfig` and `ModelConfig`. A field that is None or missing has the source's value.
        If `steps` is given, `eval_every` and `checkpoint_every` default to a tenth and a quarter of it.

    Raises:
      InputError: a value is out of range, or does not fit the weights.
    """
    given = {name: value for name, value in options.items() if value is not None}
    if "steps" in given:
        given = {name: max(given["steps"] // n, 1) for name, n in (("eval_every", 10), ("checkpoint_every", 4))} | given
    fields = {field.name for field in dataclasses.fields(TrainingConfig)}
    model = dataclasses.replace(source.config.model, **{n: v for n, v in given.items() if n not in fields})
    changed = {name: value for name, value in given.items() if name in fields}
    init_from = str(source.folder.absolute())
    config = dataclasses.replace(source.config, **changed, model=model, init_from=init_from)
    _check_same_model(config, source)
    return config


def _check_same_model(config: TrainingConfig, source: Run) -> None:
    """Raises InputError if the weights of `source` do not fit the model of `config`."""
    names = [*_ARCHITECTURE, "tokenizer"]
    values = [{**dataclasses.asdict(c.model), "tokenizer": c.tokenizer} for c in (source.config, config)]
    different = [f"{n}={values[0][n]!r} there, {values[1][n]!r} here" for n in names if values[0][n] != values[1][n]]
    if different:
        raise InputError(
            f"train: the weights of {source.folder} are of another model: {'; '.join(different)}. "
            "Leave these options out, or start without --init-from."
        )


def _are_same(first: Tokenizer, second: Tokenizer) -> bool:
    if isinstance(first, BpeTokenizer) and isinstance(second, BpeTokenizer):
        return first.model.to_str() == second.model.to_str()
    return first == second


@contextlib.contextmanager
def _hint_at_resuming(run: Run, console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"interrupted; to continue: jaxkernels train --resume --out {shlex.quote(str(run.folder))}")
        raise


def _load_data(config: TrainingConfig, console: Console) -> TokenData:
    data = data_lib.load(
        None if config.data is None else pathlib.Path(config.data),
        tokenizer=config.tokenizer,
        vocab_size=config.model.vocab_size,
        sequence_length=config.sequence_length,
        console=console,
    )
    source = config.data or "the Python standard library's source"
    console.print(
        f"{source}: {data.num_documents:,} files, {data.num_bytes / 1e6:.1f} MB, {len(data.train):,} training and "
        f"{len(data.validation):,} validation tokens ({config.tokenizer}, {data.tokenizer.vocab_size:,} entries)"
    )
    return data


def _compile(config: TrainingConfig, devices: Sequence[Any] | None, console: Console) -> Trainer:
    begin = time.perf_counter()
    with waiting(console, "compiling"), memory.explained(config):
        trainer = Trainer(config, devices)
        _ = trainer.loss  # Compiles it.
    console.print(
        f"{config.preset}: {config.model.num_params:,} parameters, {config.model.dtype}, backend "
        f"{config.model.backend or 'auto'}, on {len(trainer.devices)} x {trainer.devices[0].device_kind}; "
        f"compiled in {time.perf_counter() - begin:.1f} s"
    )
    return trainer


def _loop(
    run: Run,
    trainer: Trainer,
    data: TokenData,
    checkpoints: Checkpoints,
    state: TrainState,
    interrupts: Interrupts,
    console: Console,
) -> TrainState:
    """Trains to the end of the schedule, and measures and saves on the way. After an interrupt it saves and raises."""
    c = run.config
    metrics = run.metrics()
    peak = peak_flops_per_s(trainer.devices[0], c.model.dtype)
    flops_per_token = c.model.flops_per_token(c.sequence_length)
    start = int(state.step)
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    clock = time.perf_counter()
    with Progress(console, start, c.steps) as progress:
        for step in range(start + 1, c.steps + 1):
            batch = trainer.put(
                data_lib.batch_at(
                    data.train, seed=c.seed, step=step, batch_size=c.batch_size, sequence_length=c.sequence_length
                )
            )
            state, measured = trainer.step(state, batch)
            pending.append((step, measured))
            evaluating = step % c.eval_every == 0 or step == c.steps
            stopping = interrupts.signum is not None
            saving = step % c.checkpoint_every == 0 or step == c.steps or stopping
            if not (evaluating or saving or step % c.log_every == 0):
                continue
            # Reading a number waits for its step. Unless the loop must stop here, the newest step is not read yet, so
            # that the device has work while the host writes.
            num_ready = len(pending) if evaluating or saving else len(pending) - 1
            if num_ready:
                rows = []
                for ready, values in pending[:num_ready]:
                    rows.append({"step": ready, **{name: float(values[name]) for name in _MEASURED}})
                del pending[:num_ready]
                now = time.perf_counter()
                speed = dict(tokens_per_s=num_ready * c.batch_size * c.sequence_length / (now - clock))
                if peak is not None:
                    speed["mfu"] = speed["tokens_per_s"] * flops_per_token / (peak * len(trainer.devices))
                clock = now
                finite = list(itertools.takewhile(_is_finite, rows))
                metrics.append([row | speed for row in finite])
                if len(finite) < len(rows):
                    row = rows[len(finite)]
                    name = next(name for name in _MEASURED if not math.isfinite(row[name]))
                    raise _diverged(run, checkpoints, row["step"], _NAMES[name], row[name])
                progress.update(rows[-1]["step"], math.fsum(row["loss"] for row in rows) / num_ready, **speed)
            if evaluating:
                with progress.doing("evaluating"):
                    loss = trainer.evaluate(state.params, data.validation)
                if not math.isfinite(loss):
                    raise _diverged(run, checkpoints, step, "validation loss", loss)
                metrics.append([dict(step=step, validation_loss=loss)])
                progress.evaluated(loss)
            if saving:
                with progress.doing("saving"):
                    # No loss was computed with the newest parameters yet.
                    loss = float(trainer.loss(state.params, batch))
                    if not math.isfinite(loss):
                        raise _diverged(run, checkpoints, step, "loss after the step", loss)
                    _save(run, checkpoints, state)
            if stopping:
                _stop(run, checkpoints, state, interrupts, console)
            if evaluating or saving:
                clock = time.perf_counter()
    return state


def _save(run: Run, checkpoints: Checkpoints, state: TrainState) -> None:
    rest = dict(opt_state=state.opt_state, step=state.step)
    checkpoints.save(int(state.step), run.config, state.params, rest)


def _stop(run: Run, checkpoints: Checkpoints, state: TrainState, interrupts: Interrupts, console: Console) -> None:
    """Saves the state unless it is already saved, and raises the interrupt."""
    checkpoints.wait()
    if checkpoints.latest_step() != int(state.step):
        _save(run, checkpoints, state)
    if checkpoints.wait():
        console.print(f"{run.folder}: saved after step {int(state.step):,}")
    interrupts.check()


def _is_finite(row: dict[str, float]) -> bool:
    return all(map(math.isfinite, row.values()))


def _diverged(run: Run, checkpoints: Checkpoints, step: int, name: str, value: float) -> InputError:
    """The error for a number that is not finite, with advice."""
    c = run.config
    checkpoints.wait()
    newest = checkpoints.latest_step()
    ways = [f"a smaller --learning-rate than {c.learning_rate:g}"]
    ways += ["--dtype bfloat16 or float32"] if c.model.dtype == "float16" else []
    kept = "No checkpoint was saved before it."
    if newest is not None:
        kept = f"The newest checkpoint is of step {newest:,}; --init-from {run.folder} starts a run from its weights."
    return InputError(f"train: the {name} is {value} at step {step:,}. Start again with {' or '.join(ways)}. {kept}")


def _finish(run: Run, state: TrainState, data: TokenData, console: Console) -> None:
    """Plots the losses, and lets the model generate a sample."""
    c = run.config
    rows = run.metrics().read()
    plot_losses(rows, f"{c.preset}: {c.model.num_params / 1e6:,.1f} M parameters", run.folder / "loss.png")
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    console.print(f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token; everything is in {run.folder}")
    with waiting(console, "writing a sample"):
        text = sample_text(
            c.model,
            state.params,
            data.tokenizer,
            prompt="",
            num_tokens=_SAMPLE_TOKENS,
            num_slots=c.sequence_length,
            temperature=_SAMPLE_TEMPERATURE,
            top_k=None,
            seed=c.seed,
        )
    (run.folder / "sample.txt").write_text(text)
    console.rule("sample")
    console.print(text)
