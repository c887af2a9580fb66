"""Training a language model: one jitted step, a loop that keeps the device busy, and what it reports.

The losses of a run depend on its `TrainingConfig`, its text, the devices and the versions of the libraries,
and on nothing else: the batches are a function of (seed, step), so a run that was killed and resumed logs
the losses it would have logged.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import pathlib
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

from jaxkernels import hardware
from jaxkernels.models import data as data_lib
from jaxkernels.models.checkpoints import Checkpoints
from jaxkernels.models.config import InputError, TrainingConfig
from jaxkernels.models.data import TokenData
from jaxkernels.models.plot import plot_losses
from jaxkernels.models.progress import Progress, plain_console
from jaxkernels.models.run import Run, check_free
from jaxkernels.models.sampling import sample_text
from jaxkernels.models.transformer import abstract_params, init_params

__all__ = ["TrainState", "Trainer", "cross_entropy", "optimizer", "peak_flops_per_s", "resume", "train"]

#: What a step measures, in the order of metrics.jsonl.
_MEASURED = ("loss", "grad_norm", "learning_rate")

_SAMPLE_TOKENS = 256
_SAMPLE_TEMPERATURE = 0.8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a step turns into the next one; all float32 but the counters.

    Attributes:
      params: the model's parameters, a pure dict of arrays: the master weights.
      opt_state: the optimizer's.
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
    """AdamW on clipped gradients; weight decay on every matrix, not on the norms' scales."""
    is_matrix = functools.partial(jax.tree.map_with_path, lambda path, _: path[-1].key != "scale")
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=is_matrix),
    )


def cross_entropy(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean negative log-likelihood of the targets, in nats per token, computed in float32.

    The target's logit is picked by comparison, not by index: then the gradient is elementwise too, and XLA
    never writes the float32 logits to memory; an index's gradient is a scatter into all of them.
    """
    logits = logits.astype(jnp.float32)
    is_target = jnp.arange(logits.shape[-1]) == targets[..., None]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits, axis=-1, where=is_target))


def peak_flops_per_s(device: Any, dtype: str) -> float | None:
    """The device's published matmul peak for `dtype`, None where we have no figure.

    For float32 it is the TF32 peak: XLA's default precision for float32 products on a GPU.
    """
    chip = hardware.chip_of(device)
    return chip.tf32_flops_per_s if dtype == "float32" else chip.bf16_flops_per_s


class Trainer:
    """The compiled functions of one run, and the devices they run on.

    The batch is split over a one-dimensional mesh of the devices and the state is kept whole on each
    (data parallelism); XLA adds up the gradients.

    Args:
      config: what to train.
      devices: the devices; None for all that JAX sees.

    Raises:
      InputError: the batch cannot be split evenly over the devices.
      NotImplementedError: the config names a backend that cannot run the model here.
    """

    def __init__(self, config: TrainingConfig, devices: Sequence[Any] | None = None):
        self.devices = tuple(jax.devices() if devices is None else devices)
        if config.batch_size % len(self.devices):
            raise InputError(
                f"train: --batch-size must be a multiple of the {len(self.devices)} devices it is split over; "
                f"got {config.batch_size}. Change it, or use fewer with --devices."
            )
        self.config = config
        model = dataclasses.replace(config.model, deterministic=config.deterministic)
        self.graphdef, _ = abstract_params(model)
        self._optimizer = optimizer(config)
        mesh = jax.make_mesh((len(self.devices),), ("data",), axis_types=(AxisType.Auto,), devices=self.devices)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("data"))
        state = self.abstract_state()
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated), state)
        shape = (config.batch_size, config.sequence_length + 1)
        batch = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._split)
        on_gpu = self.devices[0].platform in ("gpu", "cuda")
        options = {"xla_gpu_deterministic_ops": True} if on_gpu and config.deterministic else None
        step = jax.jit(self._step, donate_argnums=0, out_shardings=self.replicated).lower(state, batch)
        #: (state, batch) -> (next state, metrics); the state's buffers are donated.
        self.step: Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]] = step.compile(options)
        loss = jax.jit(self._loss).lower(state.params, batch)
        #: (params, batch) -> loss.
        self.loss: Callable[[Any, jax.Array], jax.Array] = loss.compile(options)

    def init_state(self) -> TrainState:
        """Returns the state before the first step, a function of the seed."""
        key = jax.device_put(jax.random.key(self.config.seed), self.replicated)
        params = init_params(self.config.model, key)
        # The optimizer's zeros come one program for each shape: a single program would compile each array's kernel.
        state = TrainState(params, self._optimizer.init(params), jnp.int32(0))
        return jax.device_put(state, self.replicated)

    def abstract_state(self) -> TrainState:
        """Returns its shapes and dtypes."""
        _, params = abstract_params(self.config.model)
        return TrainState(params, jax.eval_shape(self._optimizer.init, params), jax.ShapeDtypeStruct((), jnp.int32))

    def put(self, batch: Any) -> jax.Array:
        """Starts the batch's way to the devices."""
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
        logits = nnx.merge(self.graphdef, params)(batch[:, :-1])
        return cross_entropy(logits, batch[:, 1:])

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
    out: pathlib.Path | None = None,
    devices: Sequence[Any] | None = None,
    console: Console | None = None,
) -> Run:
    """Trains a model from scratch and returns its finished run.

    Args:
      config: what to train.
      out: folder of the run; None for a new one under ./runs.
      devices: the devices to train on; None for all that JAX sees.
      console: where to report; None for standard output.

    Raises:
      InputError: the text, the folder or an option cannot be used.
      NotImplementedError: the config names a backend that cannot run the model here.
    """
    console = console or plain_console()
    if out is not None:
        check_free(out)
    data = _load_data(config, console)
    trainer = _compile(config, devices, console)
    run = Run.create(out, config, data.key, data.tokenizer)
    with run.checkpoints() as checkpoints, _hint_at_resuming(run, console):
        state = trainer.init_state()
        loss = trainer.evaluate(state.params, data.validation)
        run.metrics().append([dict(step=0, validation_loss=loss)])
        console.print(f"{run.folder}: validation loss {loss:.3f} before the first step")
        state = _loop(run, trainer, data, checkpoints, state, console)
    _finish(run, state, data, console)
    return run


def resume(run: Run, *, devices: Sequence[Any] | None = None, console: Console | None = None) -> None:
    """Continues a run from its newest checkpoint to its end.

    Raises:
      InputError: there is no checkpoint or it is of another model, or the text is not the one the run
        was started with.
      NotImplementedError: the config names a backend that cannot run the model here.
    """
    console = console or plain_console()
    config = run.config
    with run.checkpoints() as checkpoints, _hint_at_resuming(run, console):
        if checkpoints.latest_step() is None:
            raise InputError(f"run: {run.folder} holds no checkpoint to resume from. Start a new run.")
        data = _load_data(config, console)
        if data.key != run.data_key:
            raise InputError(
                f"data: the text is no longer the one {run.folder} was started with. Restore it, or start a new run."
            )
        trainer = _compile(config, devices, console)
        shapes = trainer.abstract_state()
        params, rest = checkpoints.restore(
            config, trainer.replicated, shapes.params, dict(opt_state=shapes.opt_state, step=shapes.step)
        )
        state = TrainState(params, **rest)
        run.metrics().truncate(int(state.step))
        console.print(f"{run.folder}: resumed after step {int(state.step):,}")
        state = _loop(run, trainer, data, checkpoints, state, console)
    _finish(run, state, data, console)


@contextlib.contextmanager
def _hint_at_resuming(run: Run, console: Console) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        console.print(f"interrupted; to go on from the newest checkpoint: jaxkernels train --resume --out {run.folder}")
        raise


def _load_data(config: TrainingConfig, console: Console) -> TokenData:
    data = data_lib.load(
        None if config.data is None else pathlib.Path(config.data),
        tokenizer=config.tokenizer,
        vocab_size=config.model.vocab_size,
        sequence_length=config.sequence_length,
        log=console.print,
    )
    source = config.data or "the Python standard library's source"
    console.print(
        f"{source}: {data.num_documents:,} files, {data.num_bytes / 1e6:.1f} MB, {len(data.train):,} training and "
        f"{len(data.validation):,} validation tokens ({config.tokenizer}, {data.tokenizer.vocab_size:,} entries)"
    )
    return data


def _compile(config: TrainingConfig, devices: Sequence[Any] | None, console: Console) -> Trainer:
    begin = time.perf_counter()
    trainer = Trainer(config, devices)
    console.print(
        f"{config.preset}: {config.model.num_params:,} parameters, {config.model.dtype}, backend "
        f"{config.model.backend or 'auto'}, on {len(trainer.devices)} x {trainer.devices[0].device_kind}; "
        f"compiled in {time.perf_counter() - begin:.1f} s"
    )
    return trainer


def _loop(
    run: Run, trainer: Trainer, data: TokenData, checkpoints: Checkpoints, state: TrainState, console: Console
) -> TrainState:
    """Trains to the end of the schedule, measuring and saving on the way."""
    c = run.config
    metrics = run.metrics()
    peak = peak_flops_per_s(trainer.devices[0], c.model.dtype)
    flops_per_token = c.model.flops_per_token(c.sequence_length)
    start = int(state.step)
    pending: list[tuple[int, dict[str, jax.Array]]] = []
    clock = time.perf_counter()
    with Progress(console, start, c.steps) as progress:
        for step in range(start + 1, c.steps + 1):
            batch = data_lib.batch_at(
                data.train, seed=c.seed, step=step, batch_size=c.batch_size, sequence_length=c.sequence_length
            )
            state, measured = trainer.step(state, trainer.put(batch))
            pending.append((step, measured))
            evaluating = step % c.eval_every == 0 or step == c.steps
            saving = step % c.checkpoint_every == 0 or step == c.steps
            if not (evaluating or saving or step % c.log_every == 0):
                continue
            # Reading a number waits for its step. While the loop goes on, the newest step stays unread, so that
            # the device has work while the host writes.
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
                metrics.append([row | speed for row in rows])
                progress.update(rows[-1]["step"], math.fsum(row["loss"] for row in rows) / num_ready, **speed)
            if evaluating:
                loss = trainer.evaluate(state.params, data.validation)
                metrics.append([dict(step=step, validation_loss=loss)])
                progress.evaluated(loss)
            if saving:
                checkpoints.save(step, c, state.params, dict(opt_state=state.opt_state, step=state.step))
            if evaluating or saving:
                clock = time.perf_counter()
    return state


def _finish(run: Run, state: TrainState, data: TokenData, console: Console) -> None:
    """Draws the losses and lets the model write."""
    c = run.config
    rows = run.metrics().read()
    plot_losses(rows, f"{c.preset}: {c.model.num_params / 1e6:,.1f} M parameters", run.folder / "loss.png")
    losses = [row["validation_loss"] for row in rows if "validation_loss" in row]
    console.print(f"validation loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token; everything is in {run.folder}")
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
