"""When the warps of one CTA load, wait and multiply: a picture for each schedule of the mma.sync GEMM.

    stamps = record()
    draw(stamps, pathlib.Path("timeline.png"))

`jaxkernels study pipeline --timeline FILE` does it. The stamps come from a build of the kernel that records the clock
of its SM (`jaxkernels.ffi.pipelines.timeline`); `jaxkernels.bench.study` measures speed.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxkernels.bench import results
from jaxkernels.core.errors import InputError
from jaxkernels.ffi.pipelines import gemm_mma
from jaxkernels.ffi.pipelines.gemm_mma import EVENTS, Config, Timeline

__all__ = ["Summary", "configs", "draw", "encoded", "load", "record", "summary", "table"]

#: m, n, k: eight waves of 128 x 256 tiles on 132 SMs, and enough tiles of k for a steady state.
_SHAPE = (8192, 4096, 1024)
#: Neither in the first wave, whose caches are cold, nor in the last.
_CTA = 300
#: The tile of k at which a picture begins, and the tiles of the slowest schedule that it shows.
_FIRST_TILE, _TILES_SHOWN = 8, 4

_COLOURS = {"load": "tab:blue", "wait": "tab:red", "compute": "tab:green", "in flight": "tab:gray"}


def configs() -> Iterator[Config]:
    """Every schedule with and without prefetched fragments, on a tile that leaves room for one CTA on an SM."""
    for schedule in gemm_mma.SCHEDULES:
        for prefetch in (False, True):
            num_stages = 4 if schedule == "multi_stage" else None
            yield Config(128, 256, 32, 2, 4, schedule, num_stages, prefetch)


def record(shape: tuple[int, int, int] = _SHAPE, cta: int = _CTA) -> list[Timeline]:
    """Records one CTA of each schedule, on a CUDA device. Each schedule runs twice, the first time to warm up.

    Args:
      shape: m, n and k of a bfloat16 product.
      cta: the number of the CTA.
    """
    m, n, k = shape
    keys = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(keys[0], (m, k), jnp.bfloat16), jax.random.normal(keys[1], (k, n), jnp.bfloat16)
    return [[gemm_mma.timeline(a, b, config=config, cta=cta) for _ in range(2)][-1] for config in configs()]


@dataclasses.dataclass(frozen=True)
class Summary:
    """Medians over warps and tiles, cycles; the first and the last tiles of a CTA are left out.

    Attributes:
      tile: from the end of one tile's products to the end of the next tile's.
      wait: in the wait for a tile.
      flight: from the issue of a tile's loads to the end of the wait for it.
    """

    tile: float
    wait: float
    flight: float


def summary(stamps: Timeline) -> Summary:
    """Durations in the steady state."""
    edge = min(_FIRST_TILE, stamps.cycles.shape[1] // 4)
    at = {event: stamps.cycles[:, edge : stamps.cycles.shape[1] - edge, i] for i, event in enumerate(EVENTS)}
    median = lambda x: float(np.median(x)) if x.size else float("nan")
    return Summary(
        median(np.diff(at["compute_end"], axis=1)),
        median(at["wait_end"] - at["wait_begin"]),
        median(at["wait_end"] - at["load_begin"]),
    )


def table(stamps: Sequence[Timeline]) -> str:
    """Returns a Markdown table of the summaries, cycles."""
    lines = ["| schedule | slots | fragments | a tile | waiting | in flight |\n", "|---|---|---|---|---|---|\n"]
    for one in stamps:
        config, found = one.config, summary(one)
        fragments = "prefetched" if config.prefetch_fragments else "in turn"
        numbers = " | ".join(f"{x:.0f}" for x in (found.tile, found.wait, found.flight))
        lines.append(f"| {config.schedule.replace('_', ' ')} | {config.num_slots} | {fragments} | {numbers} |\n")
    return "".join(lines)


def encoded(stamps: Sequence[Timeline]) -> list[dict[str, Any]]:
    """Each configuration with its stamps, cycles, as JSON has them."""
    return [
        dict(
            config=dataclasses.asdict(one.config),
            cycles=one.cycles.tolist(),
            begin=one.begin.tolist(),
            end=one.end.tolist(),
            nanoseconds_per_cycle=one.nanoseconds_per_cycle,
            summary=dataclasses.asdict(summary(one)),
        )
        for one in stamps
    ]


def load(path: pathlib.Path) -> list[Timeline]:
    """Reads the timelines of a file that `jaxkernels.bench.study.save` wrote.

    Raises:
      InputError: the file is missing or holds none.
    """
    values = results.read(path, "timeline")
    if not isinstance(values, dict) or not isinstance(values.get("timelines"), list):
        raise InputError(f"timeline: {path} holds no timelines.")
    arrays = ("cycles", "begin", "end")
    return [
        Timeline(
            config=Config(**one["config"]),
            nanoseconds_per_cycle=one["nanoseconds_per_cycle"],
            **{name: np.array(one[name], np.int64) for name in arrays},
        )
        for one in values["timelines"]
    ]


def draw(stamps: Sequence[Timeline], path: pathlib.Path) -> None:
    """Draws a panel for each schedule into a PNG or SVG: a lane for each warp, and for each tile of warp 0 in flight.

    All panels show the same number of cycles, from the products of tile 8 on.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    first = min(_FIRST_TILE, *(one.cycles.shape[1] - 1 for one in stamps))
    begins = [_at(one, "compute_begin")[:, first].min() for one in stamps]
    width = max(_width(one, begin, first) for one, begin in zip(stamps, begins))
    heights = [one.config.num_warps + one.config.num_slots + 1 for one in stamps]
    figure = Figure(figsize=(11, 0.8 + 0.16 * sum(heights) + 0.45 * len(stamps)), layout="constrained")
    grid = figure.subplots(len(stamps), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, one, begin in zip(grid, stamps, begins):
        _draw_one(axes, one, begin, width)
    grid[-1].set_xlabel("cycles")
    handles = [Patch(color=colour, label=name) for name, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _at(stamps: Timeline, event: str) -> np.ndarray:
    """[warps, tiles] cycles of an event."""
    return stamps.cycles[..., EVENTS.index(event)]


def _width(stamps: Timeline, begin: int, first: int) -> int:
    """Cycles of the tiles that a picture shows."""
    last = min(first + _TILES_SHOWN, stamps.cycles.shape[1]) - 1
    return int(_at(stamps, "compute_end")[:, last].max() - begin)


def _draw_one(axes: Any, stamps: Timeline, begin: int, width: int) -> None:
    config = stamps.config

    def bars(event: str, warp: int, lane: float, height: float) -> None:
        spans = _spans(_at(stamps, f"{event}_begin")[warp], _at(stamps, f"{event}_end")[warp], begin, width)
        axes.broken_barh(spans, (lane - height / 2, height), color=_COLOURS[event], linewidth=0)

    for warp in range(config.num_warps):
        bars("compute", warp, warp, 0.8)
        # With prefetched fragments a warp waits in the middle of a tile's products.
        bars("wait", warp, warp, 0.8)
        bars("load", warp, warp, 0.8)
    for tile, (issued, arrived) in enumerate(zip(_at(stamps, "load_begin")[0], _at(stamps, "wait_end")[0])):
        lane = config.num_warps + 0.5 + tile % config.num_slots
        for start, length in _spans(np.array([issued]), np.array([arrived]), begin, width):
            axes.broken_barh([(start, length)], (lane - 0.35, 0.7), color=_COLOURS["in flight"], alpha=0.5)
            axes.text(start + length / 2, lane, str(tile), ha="center", va="center", fontsize=6)
    found = summary(stamps)
    axes.set_title(
        f"{config.schedule.replace('_', ' ')}, {config.num_slots} slot{'s' if config.num_slots > 1 else ''}"
        f"{', prefetched fragments' if config.prefetch_fragments else ''}: {found.tile:.0f} cycles a tile, of which "
        f"{found.wait:.0f} waiting; {found.flight:.0f} in flight",
        fontsize=8,
        loc="left",
    )
    axes.set_yticks([0, config.num_warps - 1, config.num_warps + config.num_slots / 2], ["warp 0", "last", "tiles"])
    axes.tick_params(labelsize=7)
    axes.set(xlim=(0, width), ylim=(config.num_warps + config.num_slots, -0.6))


def _spans(begin: np.ndarray, end: np.ndarray, origin: int, width: int) -> list[tuple[int, int]]:
    """The parts of the spans in the picture, as begin and length."""
    low, high = np.clip(begin - origin, 0, width), np.clip(end - origin, 0, width)
    return [(int(a), int(b - a)) for a, b in zip(low, high) if b > a]
