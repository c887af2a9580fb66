"""Pictures of a run. For each suite: bars (baseline and ours, as shares of the chip's limit) and a roofline.

Random problems have a histogram instead: the ratio of `backend=None` to the fastest baseline.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxkernels.bench import losses, random_rows
from jaxkernels.bench.results import Results, Row, Side

__all__ = ["plot"]

_BASELINE_COLOUR = "tab:gray"

#: More rows in one picture would be too small to read.
_ROWS_OF_BARS = 48
#: Up to this many intensities of a roofline get a tick each.
_MAX_TICKS = 8


def plot(results: Results, folder: pathlib.Path) -> list[pathlib.Path]:
    """Draws PNGs for each suite and regime that has timed rows, and returns their paths.

    These are a roofline, and bars. The bars of a long suite take several pages. A suite of random problems has a
    histogram.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if row.ours:
            groups.setdefault((row.suite, row.regime), []).append(row)
    paths = []
    for (suite, regime), rows in groups.items():
        title = f"{suite}, {regime}, {results.environment['device']}"
        pages = [rows[start : start + _ROWS_OF_BARS] for start in range(0, len(rows), _ROWS_OF_BARS)]
        figures = {"bars" if i == 0 else f"bars-{i + 1}": _bars(page, title) for i, page in enumerate(pages)}
        figures |= {"roofline": _roofline(rows, title)}
        if random_rows.is_random(suite):
            figures = {"histogram": _histogram(rows, title)}
        for name, figure in figures.items():
            if figure is not None:
                paths.append(folder / f"{suite}-{regime}-{name}.png")
                figure.savefig(paths[-1], dpi=120)
    return paths


def _histogram(rows: Sequence[Row], title: str) -> Figure | None:
    """The number of rows over auto's ratio to the fastest baseline. None if no row has a ratio."""
    names, counts = zip(*losses.histogram(rows))
    if not any(counts):
        return None
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    is_lost = [i < losses.EDGES.index(1.0) + 1 for i in range(len(names))]
    drawn = axes.bar(range(len(names)), counts, color=["tab:red" if lost else "tab:green" for lost in is_lost])
    axes.bar_label(drawn, fontsize=8)
    axes.set_xticks(range(len(names)), names, rotation=45, ha="right", fontsize=8)
    axes.set(title=title, xlabel="speed of backend=None over that of the fastest baseline", ylabel="rows")
    axes.grid(axis="y", alpha=0.3)
    return figure


def _by_side(rows: Sequence[Row], value: Callable[[Row, Side], float | None]) -> dict[str, list[float]]:
    """Side -> its value in every row; NaN if the row lacks the side."""

    def of(row: Row, side: Side | None) -> float:
        found = None if side is None else value(row, side)
        return float("nan") if found is None else found

    values = {"fastest baseline": [of(row, row.fastest_baseline) for row in rows]}
    for name in dict.fromkeys(side.name for row in rows for side in row.ours):
        values[name] = [of(row, next((s for s in row.ours if s.name == name), None)) for row in rows]
    return values


def _tflops(row: Row, side: Side) -> float:
    return row.flops_per_s(side) / 1e12


def _percent_of_limit(row: Row, side: Side) -> float | None:
    share = row.share_of_limit(side)
    return None if share is None else 100 * share


def _bars(rows: Sequence[Row], title: str) -> Figure:
    """Bars of the share of the chip's limit; of TFLOP/s if the limit of a row is not known."""
    is_known = all(row.limits is not None for row in rows)
    sides = _by_side(rows, _percent_of_limit if is_known else _tflops)
    figure = Figure(figsize=(9, 1.5 + 0.12 * len(rows) * (len(sides) + 0.5)), layout="constrained")
    axes = figure.add_subplot()
    places, height = np.arange(len(rows)), 0.8 / len(sides)
    for i, (name, values) in enumerate(sides.items()):
        colour = _BASELINE_COLOUR if i == 0 else f"C{i - 1}"
        axes.barh(places + i * height, values, height, label=name, color=colour)
    axes.set_yticks(places + 0.4 - height / 2, [f"{row.shape} {row.dtype}" for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - height / 2 + 0.2, -height / 2 - 0.2)
    unit = "% of the chip's limit: FLOPs over peak or bytes over bandwidth" if is_known else "TFLOP/s"
    axes.set(title=title, xlabel=unit)
    if is_known:
        axes.set_xlim(0, 100)
    axes.grid(axis="x", alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(sides), fontsize=8)
    return figure


def _roofline(rows: Sequence[Row], title: str) -> Figure | None:
    """FLOP/s over FLOPs per byte, and for attention also over FLOPs per exponential.

    None for training steps: their bytes are not counted.
    """
    rows = [row for row in rows if row.num_bytes]
    if not rows:
        return None
    panels = [("FLOP per byte that must be moved", lambda row: (row.num_bytes, row.memory_bytes_per_s))]
    if all(row.num_exps for row in rows):
        panels.append(("FLOP per exponential", lambda row: (row.num_exps, row.exps_per_s)))
    figure = Figure(figsize=(8 if len(panels) == 1 else 14, 5), layout="constrained")
    for axes, (label, need) in zip(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels):
        intensity = np.array([row.flops / need(row)[0] for row in rows])
        for i, (name, values) in enumerate(_by_side(rows, _tflops).items()):
            marker, colour = ("x", _BASELINE_COLOUR) if i == 0 else ("o", f"C{i - 1}")
            axes.scatter(intensity, values, marker=marker, color=colour, s=24, label=name, alpha=0.8)
        _roofs(axes, {(row.peak_flops_per_s, need(row)[1]) for row in rows}, intensity)
        axes.set(xlabel=label, xscale="log", yscale="log")
        axes.grid(which="both", alpha=0.2)
        if len(exact := np.unique(intensity.round())) <= _MAX_TICKS:
            axes.set_xticks(exact, [f"{x:.0f}" for x in exact], fontsize=7)
            axes.set_xticks([], minor=True)
    figure.axes[0].set_ylabel("TFLOP/s")
    figure.axes[0].legend(fontsize=8)
    figure.suptitle(title)
    return figure


def _roofs(axes: Axes, limits: Iterable[tuple[float | None, float | None]], intensity: np.ndarray) -> None:
    """Draws the roofs: the lower of slope and peak, and the speed if the two units never overlap (dashed)."""
    x = np.geomspace(intensity.min() / 2, intensity.max() * 2, 200)
    for peak, rate in limits:
        if peak is not None and rate is not None:
            both = {"both at once": np.minimum(peak, rate * x), "in turns": 1 / (1 / peak + 1 / (rate * x))}
            for (name, speed), style in zip(both.items(), ("solid", "dashed")):
                axes.plot(x, speed / 1e12, color="black", linewidth=1, linestyle=style, label=name)
