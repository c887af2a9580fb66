"""The command `jaxkernels train`."""

from __future__ import annotations

import pathlib
from collections.abc import Collection
from typing import Annotated, Any

import typer

from jaxkernels.cli.programs import keep_programs
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.models.config import OPTIMIZERS, PRESETS, REMATS, TrainingConfig

__all__ = ["train"]

_MODEL, _DATA, _SCHEDULE, _RUN = "Model", "Text", "Schedule", "Run"


def _described(attribute: str) -> str:
    """The value of an attribute in each preset, as the default in help texts."""
    value = lambda preset: getattr(preset if hasattr(preset, attribute) else preset.model, attribute)
    return ", ".join(f"{name}: {value(preset)}" for name, preset in PRESETS.items())


def _sizes() -> str:
    return ", ".join(f"{name} ({preset.model.num_params / 1e6:,.1f} M parameters)" for name, preset in PRESETS.items())


# The model.

_Preset = Annotated[str | None, typer.Option(help=f"Size: {_sizes()}.", show_default="tiny", rich_help_panel=_MODEL)]
_Backend = Annotated[
    str | None,
    typer.Option(
        help=f"Kernels for every matmul and attention: {', '.join(dispatch.backend_names())}.",
        show_default="the fastest that can run here, for each operation",
        rich_help_panel=_MODEL,
    ),
]
_Dtype = Annotated[
    str | None,
    typer.Option(
        help="Compute in bfloat16, float16 or float32; parameters are float32 in any case.",
        show_default="float32 on a CPU, else bfloat16",
        rich_help_panel=_MODEL,
    ),
]
_Remat = Annotated[
    str | None,
    typer.Option(
        help="What the backward pass keeps of a layer, with ever less memory and more work: "
        f"{', '.join(REMATS)} (only the layer's input).",
        show_default=_described("remat"),
        rich_help_panel=_MODEL,
    ),
]
_Scan = Annotated[
    bool | None,
    typer.Option(
        "--scan/--no-scan",
        help="Loop over the layers instead of compiling each: compiles faster.",
        show_default="for 1b and 8b",
        rich_help_panel=_MODEL,
    ),
]
_ChunkedLoss = Annotated[
    bool | None,
    typer.Option(
        "--chunked-loss/--no-chunked-loss",
        help="Store the logits of some tokens at a time: less memory, the same loss up to rounding.",
        show_default="if a kernel computes the loss",
        rich_help_panel=_MODEL,
    ),
]

# The text.

_Data = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="A UTF-8 text file, or a folder of them.",
        show_default="the Python standard library's source",
        rich_help_panel=_DATA,
    ),
]
_Tokenizer = Annotated[
    str | None,
    typer.Option(
        help="bytes, or bpe: byte pairs learnt from the text.",
        show_default=_described("tokenizer"),
        rich_help_panel=_DATA,
    ),
]
_VocabSize = Annotated[
    int | None,
    typer.Option(help="Entries of the bpe vocabulary.", show_default="32768, tiny: 4096", rich_help_panel=_DATA),
]

# The schedule.

_Steps = Annotated[
    int | None,
    typer.Option(help="Optimizer steps.", show_default=_described("steps"), rich_help_panel=_SCHEDULE),
]
_BatchSize = Annotated[
    int | None,
    typer.Option(help="Sequences in a step.", show_default=_described("batch_size"), rich_help_panel=_SCHEDULE),
]
_SequenceLength = Annotated[
    int | None,
    typer.Option(help="Tokens in a sequence.", show_default=_described("sequence_length"), rich_help_panel=_SCHEDULE),
]
_LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Peak of the schedule: a linear warm-up, then a cosine down to a tenth.",
        show_default=_described("learning_rate"),
        rich_help_panel=_SCHEDULE,
    ),
]
_Optimizer = Annotated[
    str | None,
    typer.Option(
        help="; ".join(f"{name}: {text}" for name, text in OPTIMIZERS.items()) + ".",
        show_default=_described("optimizer"),
        rich_help_panel=_SCHEDULE,
    ),
]
_Seed = Annotated[
    int | None,
    typer.Option(help="Seed of weights, batches and sample.", show_default="0", rich_help_panel=_SCHEDULE),
]
_Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="On a GPU, equal runs have equal losses, bit for bit; without, XLA also autotunes its own matmuls.",
        show_default="deterministic",
        rich_help_panel=_SCHEDULE,
    ),
]

# The run.

_Out = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="The run's folder.",
        show_default="a new one in ./runs; with --resume the newest there",
        rich_help_panel=_RUN,
    ),
]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Continue a run from its newest checkpoint, to the same losses. Options come from the run. You may "
        "change --data (to another place of the same text), --eval-every, --checkpoint-every and --steps. "
        "A change of --steps also changes the schedule of the learning rate.",
        rich_help_panel=_RUN,
    ),
]
_InitFrom = Annotated[
    pathlib.Path | None,
    typer.Option(
        help="Start from the weights of another run's newest checkpoint. Other options default to that run's. "
        "The optimizer and the schedule start anew.",
        show_default="random weights",
        rich_help_panel=_RUN,
    ),
]
_CheckpointEvery = Annotated[
    int | None,
    typer.Option(help="Steps between checkpoints.", show_default="a quarter of the steps", rich_help_panel=_RUN),
]
_EvalEvery = Annotated[
    int | None,
    typer.Option(help="Steps between evaluations.", show_default="a tenth of the steps", rich_help_panel=_RUN),
]
_Devices = Annotated[
    int | None,
    typer.Option(help="Devices to split the batch over.", show_default="all", rich_help_panel=_RUN),
]


def train(
    preset: _Preset = None,
    backend: _Backend = None,
    dtype: _Dtype = None,
    remat: _Remat = None,
    scan: _Scan = None,
    chunked_loss: _ChunkedLoss = None,
    data: _Data = None,
    tokenizer: _Tokenizer = None,
    vocab_size: _VocabSize = None,
    steps: _Steps = None,
    batch_size: _BatchSize = None,
    sequence_length: _SequenceLength = None,
    learning_rate: _LearningRate = None,
    optimizer: _Optimizer = None,
    seed: _Seed = None,
    deterministic: _Deterministic = None,
    out: _Out = None,
    resume: _Resume = False,
    init_from: _InitFrom = None,
    checkpoint_every: _CheckpointEvery = None,
    eval_every: _EvalEvery = None,
    devices: _Devices = None,
) -> None:
    """Train a language model. The default is a tiny one on Python's own source: minutes on a laptop.

    It shows loss, speed, time left, and MFU if the peak of the chip is known. At the end the run's folder holds
    config.json, metrics.jsonl, checkpoints/, loss.png and sample.txt.
    """
    _check_backend(backend)
    options: dict[str, Any] = dict(
        data=None if data is None else str(data.absolute()),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        dtype=dtype,
        backend=backend,
        remat=remat,
        scan=scan,
        chunked_loss=chunked_loss,
        steps=steps,
        batch_size=batch_size,
        sequence_length=sequence_length,
        learning_rate=learning_rate,
        optimizer=optimizer,
        seed=seed,
        deterministic=deterministic,
        checkpoint_every=checkpoint_every,
        eval_every=eval_every,
    )
    used = _devices(devices, backend)

    from jaxkernels.models import config as config_lib
    from jaxkernels.models import training
    from jaxkernels.models.run import Run, latest_run

    keep_programs()
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


def _check_backend(backend: str | None) -> None:
    if backend is not None and backend not in dispatch.backend_names():
        raise InputError(
            f"train: unknown backend {backend!r}; use one of {', '.join(dispatch.backend_names())}, "
            "or leave --backend out for the fastest."
        )


def _devices(count: int | None, backend: str | None) -> list[Any]:
    """The first `count` devices, or all. Raises InputError if there are fewer, or the backend does not run on them."""
    import jax

    visible = jax.devices()
    if count is not None and not 1 <= count <= len(visible):
        raise InputError(f"train: --devices must be from 1 to {len(visible)}, the devices here; got {count}.")
    chip = hardware.chip_of(visible[0])
    if backend is not None and not dispatch.runs_on(backend, chip):
        raise InputError(
            f"train: --backend {backend} does not run on {chip.platform}, the devices here. "
            "Leave --backend out, or use --backend xla."
        )
    return visible[:count]


def _check_same(
    config: TrainingConfig, folder: pathlib.Path, options: dict[str, Any], changeable: Collection[str]
) -> None:
    """Raises InputError if a given option differs from the run's, and may not be changed."""
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
