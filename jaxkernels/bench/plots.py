"""Pictures of a run: each suite as bars against the baseline and the chip's limit, and on the roofline."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxkernels.bench.results import Results, Row, Side

__all__ = ["plot"]

_BASELINE_COLOUR = "tab:gray"


def plot(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws two PNGs for each suite and regime that has timed rows, and returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if row.ours:
            groups.setdefault((row.suite, row.regime), []).append(row)
    paths = []
    for (suite, regime), rows in groups.items():
        title = f"{suite}, {regime}, {results.environment['device']}"
        for name, figure in (("bars", _bars(rows, title)), ("roofline", _roofline(rows, title))):
            if figure is not None:
                paths.append(folder / f"{suite}-{regime}-{name}.png")
                figure.savefig(paths[-1], dpi=120)
    return paths


def _sides(rows: Sequence[Row]) -> dict[str, list[float]]:
    """TFLOP/s of every row by side, NaN where a side is not in it."""
    speeds = {"fastest baseline": [_tflops(row, row.fastest_baseline) for row in rows]}
    for name in dict.fromkeys(side.name for row in rows for side in row.ours):
        speeds[name] = [_tflops(row, next((s for s in row.ours if s.name == name), None)) for row in rows]
    return speeds


def _tflops(row: Row, side: Side | None) -> float:
    return float("nan") if side is None else row.flops_per_s(side) / 1e12


def _bars(rows: Sequence[Row], title: str) -> Figure:
    speeds = _sides(rows)
    figure = Figure(figsize=(9, 1.5 + 0.22 * len(rows) * (len(speeds) + 0.5)), layout="constrained")
    axes = figure.add_subplot()
    places, height = np.arange(len(rows)), 0.8 / len(speeds)
    for i, (name, values) in enumerate(speeds.items()):
        colour = _BASELINE_COLOUR if i == 0 else f"C{i - 1}"
        axes.barh(places + i * height, values, height, label=name, color=colour)
    limits = [float("nan") if row.limits is None else row.flops / max(row.limits) / 1e12 for row in rows]
    if not np.isnan(limits).all():
        middle = places + height * (len(speeds) - 1) / 2
        axes.scatter(limits, middle, marker="|", s=160, color="black", label="limit of the chip", zorder=3)
    axes.set_yticks(places + 0.4 - height / 2, [f"{row.shape} {row.dtype}" for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(title=title, xlabel="TFLOP/s")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    return figure


def _roofline(rows: Sequence[Row], title: str) -> Figure | None:
    """FLOP/s over FLOPs per byte; None for training steps, whose bytes are not counted."""
    rows = [row for row in rows if row.num_bytes]
    if not rows:
        return None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    intensity = np.array([row.flops / row.num_bytes for row in rows])
    for i, (name, values) in enumerate(_sides(rows).items()):
        marker, colour = ("x", _BASELINE_COLOUR) if i == 0 else ("o", f"C{i - 1}")
        axes.scatter(intensity, values, marker=marker, color=colour, s=24, label=name)
    _roofs(axes, rows, intensity)
    axes.set(title=title, xlabel="FLOP per byte that must be moved", ylabel="TFLOP/s", xscale="log", yscale="log")
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    return figure


def _roofs(axes: Axes, rows: Sequence[Row], intensity: np.ndarray) -> None:
    """The memory's slope up to each peak among the rows."""
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    for peak, bandwidth in {(row.peak_flops_per_s, row.memory_bytes_per_s) for row in rows}:
        if peak is not None and bandwidth is not None:
            axes.plot(x, np.minimum(peak, bandwidth * x) / 1e12, color="black", linewidth=1)
