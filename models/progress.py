"""The output of training: a live bar on a terminal, and a line for each evaluation."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Self

from rich import progress as rich_progress
from rich.console import Console

__all__ = ["Progress", "plain_console", "waiting"]


def plain_console() -> Console:
    """A console for standard output that prints text as it is: no markup, no colours, no line breaks added."""
    return Console(markup=False, highlight=False, soft_wrap=True)


class Progress:
    """Shows loss, tokens/s, time left, and MFU if it is known. A context manager.

    Args:
      console: the console to print to.
      start: steps done before.
      steps: all steps of the run.
    """

    def __init__(self, console: Console, start: int, steps: int):
        self.console = console
        self.start, self.steps, self.step = start, steps, start
        self._text = ""
        self._begin = time.perf_counter()
        self._bar = rich_progress.Progress(
            rich_progress.BarColumn(),
            rich_progress.MofNCompleteColumn(),
            rich_progress.TextColumn("{task.fields[text]}", markup=False),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=start, text="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def update(self, step: int, loss: float, tokens_per_s: float, mfu: float | None = None) -> None:
        """Shows the state after `step`; `loss` is the mean over the latest steps, `mfu` a share."""
        self.step = step
        left = (time.perf_counter() - self._begin) / (step - self.start) * (self.steps - step)
        parts = [f"loss {loss:.3f}", f"{tokens_per_s:,.0f} tokens/s"]
        parts += [f"MFU {mfu:.1%}"] if mfu is not None else []
        parts += [f"ETA {int(left) // 60}:{int(left) % 60:02d}"]
        self._text = "  ".join(parts)
        self._bar.update(self._task, completed=step, text=self._text)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Shows beside the bar what the loop is doing."""
        self._bar.update(self._task, text=what)
        yield
        self._bar.update(self._task, text=self._text)

    def evaluated(self, validation_loss: float) -> None:
        """Prints the line of an evaluation."""
        width = len(f"{self.steps:,}")
        self.console.print(
            f"step {self.step:>{width},}/{self.steps:,}  validation loss {validation_loss:.3f}  {self._text}"
        )


@contextlib.contextmanager
def waiting(console: Console, text: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
    """Shows a spinner, a bar and the elapsed time while something takes long. It shows them on a terminal only.

    Args:
      console: the console to print to.
      text: a description.
      total: the amount of work; None if it is not known.

    Yields:
      A function to call with the amount of work that was done since its last call.
    """
    bar = rich_progress.Progress(
        rich_progress.SpinnerColumn(),
        rich_progress.TextColumn("{task.description}", markup=False),
        rich_progress.BarColumn(),
        rich_progress.TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task = bar.add_task(text, total=total)
    with bar:
        yield lambda amount: bar.advance(task, amount)
