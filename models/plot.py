"""Plots the losses of a run over its steps."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

__all__ = ["plot_losses"]


def plot_losses(rows: Sequence[dict[str, Any]], title: str, path: pathlib.Path) -> None:
    """Draws the training and validation losses of metrics.jsonl's rows into a PNG."""
    train = [(row["step"], row["loss"]) for row in rows if "loss" in row]
    validation = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*train), color="tab:blue", linewidth=0.8, alpha=0.6, label="training")
    last = f"validation, {validation[-1][1]:.3f} at the end"
    axes.plot(*zip(*validation), color="tab:orange", marker="o", markersize=4, label=last)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)", ylim=(0, None))
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
