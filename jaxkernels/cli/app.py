"""The command line: `jaxkernels train`, `sample`, `tune`, `bench`, `study`, `report`, `doctor`; or
`python -m jaxkernels`.

A command imports its modules when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import pathlib
import signal
from collections.abc import Collection
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import jaxkernels
from jaxkernels.cli.bench import bench, report, study
from jaxkernels.cli.tune import tune
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.models.config import PRESETS, TrainingConfig

__all__ = ["app", "main"]


class _Group(TyperGroup):
    """Prints errors that a user can correct (bad input, an unsupported backend) in one line and exits with code 1.

    If a signal ends a training, the exit code is 128 plus the number of the signal.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (InputError, NotImplementedError) as e:
            message = str(e).replace(dispatch.WAY_OUT, "Leave --backend out, or use --backend xla.")
        except KeyboardInterrupt as e:
            raise typer.Exit(128 + getattr(e, "signum", signal.SIGINT)) from e
        Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(f"error: {message}")
        raise typer.Exit(1)


app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich"
)

_MODEL, _DATA, _SCHEDULE, _RUN = "Model", "Text", "Schedule", "Run"


def _described(attribute: str) -> str:
    """Each preset's value of an attribute, as the default that help shows."""
    return ", ".join(f"{name}: {getattr(preset, attribute)}" for name, preset in PRESETS.items())


def _sizes() -> str:
    return ", ".join(f"{name} ({preset.model.num_params / 1e6:,.1f} M parameters)" for name, preset in PRESETS.items())


def _print_version(asked: bool) -> None:
    if asked:
        print(f"jaxkernels {jaxkernels.__version__}")
        raise typer.Exit


@app.callback()
def _jaxkernels(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Matmul and attention at the speed of the Hopper chip, and a transformer that is trained with them.

    `jaxkernels train` trains a small language model on this machine, and `jaxkernels sample` prints text from it.
    `jaxkernels tune` finds the fastest configurations for your shapes. `jaxkernels bench` measures the speed.
    `jaxkernels doctor` reports which backends run on this machine.
    """


@app.command()
def train(
    preset: Annotated[
        str | None, typer.Option(help=f"Size: {_sizes()}.", show_default="tiny", rich_help_panel=_MODEL)
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help=f"Kernels for every matmul and attention: {', '.join(dispatch.backend_names())}.",
            show_default="the fastest that can run here, for each operation",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute in bfloat16, float16 or float32; parameters are float32 in any case.",
            show_default="float32 on a CPU, else bfloat16",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    remat: Annotated[
        bool | None,
        typer.Option(
            "--remat/--no-remat",
            help="Recompute activations in the backward pass: less memory, more work.",
            show_default="for 1b",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    scan: Annotated[
        bool | None,
        typer.Option(
            "--scan/--no-scan",
            help="Loop over the layers instead of compiling each: compiles faster.",
            show_default="for 1b",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    data: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="A UTF-8 text file, or a folder of them.",
            show_default="the Python standard library's source",
            rich_help_panel=_DATA,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="bytes, or bpe: byte pairs learnt from the text.",
            show_default=_described("tokenizer"),
            rich_help_panel=_DATA,
        ),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(help="Entries of the bpe vocabulary.", show_default="32768, tiny: 4096", rich_help_panel=_DATA),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Optimizer steps.", show_default=_described("steps"), rich_help_panel=_SCHEDULE),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences in a step.", show_default=_described("batch_size"), rich_help_panel=_SCHEDULE),
    ] = None,
    sequence_length: Annotated[
        int | None,
        typer.Option(
            help="Tokens in a sequence.", show_default=_described("sequence_length"), rich_help_panel=_SCHEDULE
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak of the schedule: a linear warm-up, then a cosine down to a tenth.",
            show_default=_described("learning_rate"),
            rich_help_panel=_SCHEDULE,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of weights, batches and sample.", show_default="0", rich_help_panel=_SCHEDULE),
    ] = None,
    deterministic: Annotated[
        bool | None,
        typer.Option(
            "--deterministic/--no-deterministic",
            help="On a GPU, equal runs have equal losses, bit for bit; without, XLA also autotunes its own matmuls.",
            show_default="deterministic",
            rich_help_panel=_SCHEDULE,
        ),
    ] = None,
    out: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="The run's folder.",
            show_default="a new one in ./runs; with --resume the newest there",
            rich_help_panel=_RUN,
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue a run from its newest checkpoint, to the same losses. Options come from the run. You may "
            "change --data (to another place of the same text), --eval-every, --checkpoint-every and --steps. "
            "A change of --steps also changes the schedule of the learning rate.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    init_from: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Start from the weights of another run's newest checkpoint. Other options default to that run's. "
            "The optimizer and the schedule start anew.",
            show_default="random weights",
            rich_help_panel=_RUN,
        ),
    ] = None,
    checkpoint_every: Annotated[
        int | None,
        typer.Option(help="Steps between checkpoints.", show_default="a quarter of the steps", rich_help_panel=_RUN),
    ] = None,
    eval_every: Annotated[
        int | None,
        typer.Option(help="Steps between evaluations.", show_default="a tenth of the steps", rich_help_panel=_RUN),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(help="Devices to split the batch over.", show_default="all", rich_help_panel=_RUN),
    ] = None,
) -> None:
    """Train a language model. The default is a tiny one on Python's own source: minutes on a laptop.

    It shows loss, speed, time left, and MFU if the peak of the chip is known. At the end the run's folder holds
    config.json, metrics.jsonl, checkpoints/, loss.png and sample.txt.
    """
    if backend is not None and backend not in dispatch.backend_names():
        raise InputError(
            f"train: unknown backend {backend!r}; use one of {', '.join(dispatch.backend_names())}, "
            "or leave --backend out for the fastest that can."
        )
    options: dict[str, Any] = dict(
        data=None if data is None else str(data.absolute()),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        dtype=dtype,
        backend=backend,
        remat=remat,
        scan=scan,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        seed=seed,
        deterministic=deterministic,
        checkpoint_every=checkpoint_every,
        eval_every=eval_every,
    )
    import jax

    from jaxkernels.models import config as config_lib
    from jaxkernels.models import training
    from jaxkernels.models.run import Run, latest_run

    visible = jax.devices()
    if devices is not None and not 1 <= devices <= len(visible):
        raise InputError(f"train: --devices must be from 1 to {len(visible)}, the devices here; got {devices}.")
    used = visible[:devices]
    if backend is not None and not dispatch.runs_on(backend, hardware.chip_of(used[0])):
        raise InputError(
            f"train: --backend {backend} does not run on {hardware.chip_of(used[0]).platform}, the devices here. "
            "Leave --backend out, or use --backend xla."
        )
    if resume:
        if init_from is not None:
            raise InputError("train: --init-from starts a new run, --resume continues one: give one of them.")
        run = Run.open(out or latest_run())
        _check_same(run.config, run.folder, {"preset": preset, **options}, training.CHANGEABLE)
        training.resume(run, devices=used, **{name: options[name] for name in training.CHANGEABLE})
    elif init_from is not None:
        config = training.warm_config(Run.open(init_from), preset=preset, **options)
        training.train(config, out=out, devices=used)
    else:
        config = config_lib.training_config(preset or "tiny", platform=used[0].platform, **options)
        training.train(config, out=out, devices=used)


def _check_same(
    config: TrainingConfig, folder: pathlib.Path, options: dict[str, Any], changeable: Collection[str]
) -> None:
    """Raises InputError where an option that is given, and not changeable, differs from the run's."""
    differences = []
    for name, value in options.items():
        theirs = getattr(config, name) if hasattr(config, name) else getattr(config.model, name)
        if value is not None and value != theirs and name not in changeable:
            differences.append(f"{name}={theirs!r} there, {value!r} here")
    if differences:
        raise InputError(
            f"train: {folder} was started with other options: {'; '.join(differences)}. "
            "Leave them out to resume it, or start a new run."
        )


@app.command()
def sample(
    run: Annotated[
        pathlib.Path | None,
        typer.Argument(help="The run's folder.", show_default="the newest in ./runs"),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to continue. Without it a new document begins.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to write.")] = 256,
    temperature: Annotated[
        float, typer.Option(help="Below 1: more predictable; above 1: more varied; 0: always the likeliest token.")
    ] = 0.8,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from the k likeliest tokens only.", show_default="all")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
) -> None:
    """Continue a prompt with a trained model, from the newest checkpoint of a run."""
    from jaxkernels.models import progress, sampling
    from jaxkernels.models.run import Run, latest_run

    source = Run.open(run or latest_run())
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with progress.waiting(console, "reading the checkpoint and writing"):
        text = sampling.text_from_run(
            source,
            log=lambda message: console.print(f"{source.folder}: {message}"),
            prompt=prompt,
            num_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
        )
    print(prompt + text)


@app.command()
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print JSON, for a bug report or a program.")] = False,
) -> None:
    """Report versions, devices, driver, caches, and which backends run on this machine."""
    from jaxkernels.cli import doctor as doctor_lib

    report = doctor_lib.examine()
    print(doctor_lib.as_json(report) if json else doctor_lib.as_text(report))


app.command()(tune)
app.command()(bench)
app.command()(study)
app.command()(report)


def main() -> None:
    """Entry point of the `jaxkernels` command."""
    app(prog_name="jaxkernels")
