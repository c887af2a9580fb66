"""When the steps of each schedule of the mma.sync product wait and multiply, from clock stamps of its first warp.

timelines = measure((4096, 4096, 4096))
draw(timelines, path)
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from jaxkernels.ffi.pipelines import STAMPS, Config, timeline

__all__ = ["Timelines", "draw", "measure", "schedules"]

#: Name of a schedule -> the stamps of its tiles along k, in clock cycles (tiles, stamps).
Timelines = Mapping[str, Int64[np.ndarray, "tiles stamps"]]

#: Tiles that a picture shows, behind those in which the pipeline fills.
_FIRST, _SHOWN = 8, 6
#: What happens up to each stamp but the first, and its colour.
_PHASES = (("wait for the tile", "tab:red"), ("multiply", "tab:green"), ("wait for the next tile", "tab:orange"))


def schedules() -> dict[str, Config]:
    """Each schedule, with and without a look ahead."""
    named = {"one buffer": Config("single"), "registers": Config("registers"), "cp.async, 4 stages": Config("async", 4)}
    found = {}
    for name, config in named.items():
        for prefetches in (False, True):
            values = dict(schedule=config.schedule, num_stages=config.num_stages, prefetches=prefetches)
            found[f"{name}{', look ahead' * prefetches}"] = Config(**values)
    return found


def measure(sizes: tuple[int, int, int]) -> dict[str, Int64[np.ndarray, "tiles stamps"]]:
    """Records each schedule for a product of bfloat16 matrices m x k and k x n; `sizes` are m, n and k."""
    m, n, k = sizes
    keys = jax.random.split(jax.random.key(0))
    a, b = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, ((m, k), (k, n))))
    found = {}
    for name, config in schedules().items():
        timeline(a, b, config=config)  # The first run also loads the code.
        found[name] = timeline(a, b, config=config)
    return found


def draw(timelines: Timelines, path: pathlib.Path) -> None:
    """Draws a lane for each schedule: the phases of a few tiles, over clock cycles."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 0.7 * len(timelines) + 1.2), layout="constrained")
    axes: Any = figure.subplots()
    for lane, stamps in enumerate(timelines.values()):
        shown = stamps[min(_FIRST, max(len(stamps) - _SHOWN, 0)) :][:_SHOWN]
        shown = shown - shown[0, 0]
        for phase, (_, color) in enumerate(_PHASES):
            spans = [(int(tile[phase]), int(tile[phase + 1] - tile[phase])) for tile in shown]
            axes.broken_barh(spans, (lane - 0.35, 0.7), color=color)
    assert len(_PHASES) == len(STAMPS) - 1
    axes.set_yticks(range(len(timelines)), list(timelines))
    axes.invert_yaxis()
    axes.set(xlabel=f"clock cycles, {_SHOWN} tiles along k of the first warp")
    axes.legend(handles=[Patch(color=color, label=name) for name, color in _PHASES], fontsize=8, ncols=3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
