"""How the pipeline of a GEMM changes its speed.

The kernels of both backends load by TMA and multiply by wgmma: their slots and clusters are varied. A third kernel uses
Ampere's instructions (`jaxkernels.ffi.pipelines`): its schedule, its slots and its prefetched fragments are varied.

    for point in study(parse_shape("gemm", "8192x8192x8192"), device):
        print(point)

All points of a shape are checked, then measured in bursts, in turns.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkernels as jk
from jaxkernels.bench import results
from jaxkernels.bench.suites import peak_flops_per_s
from jaxkernels.bench.timeline import Timeline, encoded
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Call, Clock, clock_for, measure
from jaxkernels.core.problems import Problem
from jaxkernels.ffi.pipelines import gemm_mma
from jaxkernels.ops.matmul.cases import MatmulCase

__all__ = ["Point", "Variant", "load", "lower", "plot", "save", "study", "table", "variants"]

_SCHEMA = 1
_SECONDS = 16.0
#: Allowed error, as a share of the reference's largest value. Correct 16-bit results differ by up to 2^-8.
_TOLERANCE = 0.01


@dataclasses.dataclass(frozen=True)
class Variant:
    """One configuration of a kernel.

    Attributes:
      backend: the backend of the kernel; for the third kernel "mma" and its schedule, as "mma multi_stage prefetch".
      tile: the tile of a block, e.g. "128 x 256".
      knob: the knob that is varied.
      value: the value of the knob, e.g. "4" slots, "2 x 1" blocks along m and n.
      config: the configuration.
    """

    backend: str
    tile: str
    knob: Literal["num_stages", "cluster"]
    value: str
    config: Any


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured variant: seconds (median, p10, p90), FLOP/s and their share of the tensor cores' peak."""

    shape: str
    backend: str
    tile: str
    knob: str
    value: str
    seconds: float
    p10: float
    p90: float
    flops_per_s: float
    share_of_peak: float | None


_TILES = ((128, 256), (128, 128))
_STAGES = range(1, 9)
#: The first word of `backend` for the kernel of Ampere's instructions, and its slots by schedule.
_MMA, _PREFETCH = "mma", "prefetch"
_MMA_STAGES = {"single_stage": (1,), "double_buffered": (2,), "multi_stage": (2, 3, 4, 5, 6)}
_CLUSTERS = {
    "cuda": {
        "1 x 1": {},
        "2 x 1": dict(cluster_m=2),
        "1 x 2": dict(cluster_n=2),
        "2 x 2": dict(cluster_m=2, cluster_n=2),
        "4 x 1": dict(cluster_m=4),
    },
    "pallas": {"1 x 1": {}, "2 x 1": dict(cluster="m"), "1 x 2": dict(cluster="n")},
}


def variants() -> Iterator[Variant]:
    """Rings of 1 to 8 slots for two tiles, and clusters for the larger tile. Some do not fit into shared memory.

    The kernel that uses Ampere's instructions has every schedule and every number of slots, each with and without
    prefetched fragments.
    """
    for backend, clusters in _CLUSTERS.items():
        config = dispatch.load("matmul", backend).designs[0].Config
        # Releasing a slot one step late needs a second slot.
        late = lambda n, backend=backend: {} if backend == "cuda" else dict(delay_release=min(1, n - 1))
        for block_m, block_n in _TILES:
            tile = f"{block_m} x {block_n}"
            for n in _STAGES:
                yield Variant(backend, tile, "num_stages", str(n), config(block_m, block_n, num_stages=n, **late(n)))
        block_m, block_n = _TILES[0]
        for value, knobs in clusters.items():
            yield Variant(backend, f"{block_m} x {block_n}", "cluster", value, config(block_m, block_n, **knobs))
    yield from _mma_variants()


def _mma_variants() -> Iterator[Variant]:
    for (block_m, block_n), schedule, prefetch in itertools.product(_TILES, gemm_mma.SCHEDULES, (False, True)):
        backend = " ".join([_MMA, schedule, *([_PREFETCH] if prefetch else [])])
        for n in _MMA_STAGES[schedule]:
            config = gemm_mma.Config(
                block_m, block_n, schedule=schedule, num_stages=n, prefetch_fragments=prefetch, warps_m=2, warps_n=4
            )
            yield Variant(backend, f"{block_m} x {block_n}", "num_stages", str(n), config)


def study(problem: Problem, device: Any, *, clock: Clock | None = None) -> Iterator[Point]:
    """Measures every variant that fits the device.

    Args:
      problem: a product of two row-major matrices, without an epilogue.
      device: the device to run on.
      clock: None: the default clock of the device.

    Raises:
      InputError: the problem is not such a product, or a variant's result is wrong.
    """
    case = problem.case
    if not isinstance(case, MatmulCase) or case != MatmulCase(case.m, case.n, case.k):
        raise InputError(f"study: needs a plain product MxNxK of bfloat16; got {case}.")
    operands = [jnp.asarray(x, device=device) for x in case.operands().values()]
    expected = jnp.matmul(*operands, preferred_element_type=jnp.float32)
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        lowered = zip(variants(), pool.map(functools.partial(lower, operands), variants()))
        fitting = {variant: program for variant, program in lowered if program is not None}
        programs = dict(zip(fitting, pool.map(lambda program: program.compile(), fitting.values())))
    for variant, program in programs.items():
        error = float(jnp.max(jnp.abs(program(*operands) - expected)) / jnp.max(jnp.abs(expected)))
        if not error <= _TOLERANCE:
            raise InputError(
                f"study: {variant} has an error of {error:.2g} of the largest value; at most {_TOLERANCE} is allowed."
            )
    samples = measure(
        {str(i): Call(program, [tuple(operands)]) for i, program in enumerate(programs.values())},
        regime="burst",
        budget_s=_SECONDS,
        clock=clock or clock_for(device.platform),
    )
    peak = peak_flops_per_s(problem, hardware.chip_of(device))
    for variant, times in zip(programs, samples.values()):
        rate = problem.flops / times.median
        key = (problem.shape, variant.backend, variant.tile, variant.knob, variant.value)
        yield Point(*key, times.median, times.p10, times.p90, rate, None if peak is None else rate / peak)


def lower(operands: Sequence[Any], variant: Variant, platforms: tuple[str, ...] | None = None) -> Any | None:
    """Lowers the variant's program for the operands, and for `platforms` if given.

    Returns None if its ring does not fit into shared memory.
    """
    if isinstance(variant.config, gemm_mma.Config):
        multiply: Any = functools.partial(gemm_mma.matmul, config=variant.config)
    else:
        multiply = functools.partial(jk.matmul, backend=variant.backend, config=variant.config)
    try:
        return jax.jit(multiply).trace(*operands).lower(lowering_platforms=platforms)
    except ValueError as e:
        if "shared memory" in str(e):
            return None
        raise


def save(
    points: Sequence[Point], environment: dict[str, Any], path: pathlib.Path, timelines: Sequence[Timeline] = ()
) -> None:
    """Writes JSON; times in seconds, timelines in clock cycles."""
    values = [dataclasses.asdict(point) for point in points]
    results.write(dict(study=_SCHEMA, environment=environment, points=values, timelines=encoded(timelines)), path)


def load(path: pathlib.Path) -> list[Point]:
    """Reads what `save` wrote.

    Raises:
      InputError: the file is missing or holds something else.
    """
    values = results.read(path, "study")
    if not isinstance(values, dict) or values.get("study") != _SCHEMA:
        raise InputError(f"study: {path} holds no study of schema {_SCHEMA}.")
    return [Point(**point) for point in values["points"]]


def table(points: Sequence[Point], shape: str) -> str:
    """Returns a Markdown table of the speed over slots: a line for each schedule and number of slots, a column for each
    tile, without and with prefetched fragments. The kernels by TMA and wgmma have no choice of fragments.

    Args:
      points: as `load` returns them.
      shape: the shape of the points to show.
    """
    points = [point for point in points if point.shape == shape and point.knob == "num_stages"]
    tiles = list(dict.fromkeys(point.tile for point in points))
    columns = [(tile, suffix) for tile in tiles for suffix in ("", f" {_PREFETCH}")]
    names = [f"{tile},{suffix}" if suffix else tile for tile, suffix in columns]
    lines = [["kernel", "slots", *names], ["---"] * (2 + len(columns))]
    cells = {(point.backend, point.value, point.tile): _cell(point) for point in points}
    plain = [(point.backend.removesuffix(f" {_PREFETCH}"), point.value) for point in points]
    for backend, value in dict.fromkeys(plain):
        row = [cells.get((backend + suffix, value, tile), "") for tile, suffix in columns]
        lines.append([f"`{backend}`", value, *row])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(point: Point) -> str:
    share = "" if point.share_of_peak is None else f" ({100 * point.share_of_peak:.0f})"
    return f"{point.flops_per_s / 1e12:.0f}{share}"


def plot(points: Sequence[Point], path: pathlib.Path) -> None:
    """Draws a row for each shape: speed over the ring's slots, the same for the schedules of mma, and by cluster."""
    from matplotlib.figure import Figure

    shapes = list(dict.fromkeys(point.shape for point in points))
    has_mma = any(map(_is_mma, points))
    columns = 3 if has_mma else 2
    figure = Figure(figsize=(5 * columns, 3.4 * len(shapes)), layout="constrained")
    grid = figure.subplots(len(shapes), columns, squeeze=False)
    for shape, row in zip(shapes, grid):
        here = [point for point in points if point.shape == shape]
        slots = [point for point in here if point.knob == "num_stages"]
        _draw_slots(row[0], [point for point in slots if not _is_mma(point)])
        row[0].set_title(f"{shape}, TMA and wgmma" if has_mma else shape, fontsize=9)
        if has_mma:
            _draw_schedules(row[1], [point for point in slots if _is_mma(point)])
            row[1].set_title(f"{shape}, mma.sync", fontsize=9)
            row[1].sharey(row[0])
        _draw_clusters(row[-1], [point for point in here if point.knob == "cluster"])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _is_mma(point: Point) -> bool:
    return point.backend.split()[0] == _MMA


def _height(point: Point) -> float:
    """Percent of peak; TFLOP/s if the peak is not known."""
    return point.flops_per_s / 1e12 if point.share_of_peak is None else 100 * point.share_of_peak


def _unit(points: Sequence[Point]) -> str:
    return "TFLOP/s" if any(point.share_of_peak is None for point in points) else "% of the tensor cores' peak"


def _draw_slots(axes: Any, points: Sequence[Point]) -> None:
    for backend, tile in dict.fromkeys((point.backend, point.tile) for point in points):
        line = [point for point in points if (point.backend, point.tile) == (backend, tile)]
        style = "-" if tile == points[0].tile else "--"
        x, y = [int(point.value) for point in line], [_height(point) for point in line]
        axes.plot(x, y, style, marker="o", label=f"{backend}, {tile}")
    axes.set(xlabel="slots of the ring", ylabel=_unit(points), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _draw_schedules(axes: Any, points: Sequence[Point]) -> None:
    """Colours are schedules, dashes the smaller tile, filled markers prefetched fragments."""
    colours = {schedule: f"C{i}" for i, schedule in enumerate(gemm_mma.SCHEDULES)}
    for backend, tile in dict.fromkeys((point.backend, point.tile) for point in points):
        line = [point for point in points if (point.backend, point.tile) == (backend, tile)]
        _, schedule, *prefetch = backend.split()
        x, y = [int(point.value) for point in line], [_height(point) for point in line]
        style, colour = "-" if tile == points[0].tile else "--", colours[schedule]
        fill = colour if prefetch else "white"
        label = ", ".join([schedule.replace("_", " "), *prefetch, tile])
        axes.plot(x, y, style, marker="o", color=colour, markerfacecolor=fill, label=label)
    axes.set(xlabel="slots", ylabel=_unit(points), ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=6, ncols=2)


def _draw_clusters(axes: Any, points: Sequence[Point]) -> None:
    values = list(dict.fromkeys(point.value for point in points))
    backends = list(dict.fromkeys(point.backend for point in points))
    for i, backend in enumerate(backends):
        mine = [point for point in points if point.backend == backend]
        places = np.array([values.index(point.value) for point in mine]) + (i - 0.5) * 0.4
        bars = axes.bar(places, [_height(point) for point in mine], 0.38, label=backend)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(values)), values)
    axes.set(xlabel="blocks of a cluster along m x n", ylabel=_unit(points))
    axes.set_ylim(0, 1.2 * max(map(_height, points)))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8, ncols=len(backends))
