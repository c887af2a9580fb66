"""The command line: `jaxkernels train`, `sample`, `tune`, `bench`, `study`, `report`, `doctor`; or
`python -m jaxkernels`.

A command imports its modules when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import pathlib
import signal
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import jaxkernels
from jaxkernels.cli.bench import bench, report, study
from jaxkernels.cli.train import train
from jaxkernels.cli.tune import tune
from jaxkernels.core import dispatch
from jaxkernels.core.errors import InputError

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


app.command()(train)


@app.command()
def sample(
    run: Annotated[
        pathlib.Path | None,
        typer.Argument(help="The run's folder.", show_default="the newest in ./runs"),
    ] = None,
    prompt: Annotated[str, typer.Option(help="Text to continue. The default is to begin a new document.")] = "",
    tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 256,
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
