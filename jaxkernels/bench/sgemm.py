"""How fast each rung of the SGEMM ladder is, beside cuBLAS.

    for point in study([(4096, 4096, 4096)], device):
        print(point)

All rungs of a size are checked, then measured in bursts, in turns with cuBLAS.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
import os
import pathlib
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxkernels.bench import results
from jaxkernels.bench.sgemm_profile import Profile
from jaxkernels.core import hardware
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import Call, Clock, clock_for, measure, ratio
from jaxkernels.ffi.compiler import CompileError
from jaxkernels.ffi.sgemm import RUNGS, Config, lookup, search_space, sgemm

__all__ = ["BASELINE", "SIZES", "Point", "load", "parse_size", "plot", "save", "search", "study", "table"]

_SCHEMA = 1
#: m, n, k. The last four divide no tile; the last two have rows that are no multiples of 16 bytes.
SIZES = (
    *((size, size, size) for size in (128, 256, 512, 1024, 2048, 4096, 8192)),
    (1000, 1000, 1000),
    (1111, 2333, 517),
    (4095, 4097, 4093),
)
#: The name of `jnp.matmul` with precision HIGHEST: XLA calls cuBLAS.
BASELINE = "cuBLAS"
#: A size's measurement starts no further round after this many seconds.
_SECONDS = 6.0
#: Rungs whose one launch takes longer are left out of a size.
_SLOWEST_S = 0.15
#: Allowed error, as a share of the reference's largest value. Sums in another order differ by 1e-6, TF32 by 1e-4.
_TOLERANCE = 1e-5

Size = tuple[int, int, int]


@dataclasses.dataclass(frozen=True)
class Point:
    """A measured rung: seconds (median, p10, p90), FLOP/s and how many times as fast as cuBLAS it is.

    Attributes:
      size: "MxNxK".
      rung: its number; 0 for cuBLAS.
      name: its name.
      config: its tile sizes.
    """

    size: str
    rung: int
    name: str
    config: str
    seconds: float
    p10: float
    p90: float
    flops_per_s: float
    share_of_baseline: float
    share_of_peak: float | None


def parse_size(text: str) -> Size:
    """Reads "MxNxK".

    Raises:
      InputError: it has another form.
    """
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"study: a size is MxNxK; got {text!r}. Write 4096x4096x4096.")
    m, n, k = map(int, parts)
    return m, n, k


def study(
    sizes: Sequence[Size], device: Any, *, rungs: Sequence[int] | None = None, clock: Clock | None = None
) -> Iterator[Point]:
    """Measures cuBLAS and every rung at each size, smaller products first.

    Args:
      sizes: m, n and k of each product.
      device: the device to run on.
      rungs: numbers of the rungs; None: all that the device can run.
      clock: None: the default clock of the device.

    Raises:
      InputError: a rung's result is wrong.
    """
    chip = hardware.chip_of(device)
    chosen = [rung for rung in RUNGS if rungs is None or rung.number in rungs]
    chosen = [rung for rung in chosen if chip.is_hopper or not rung.uses_tma]
    functions = {rung.number: functools.partial(sgemm, rung=rung) for rung in chosen}
    configs = {rung.number: str(rung.config) for rung in chosen}
    rates: dict[int, float] = {}
    for size in sorted(sizes, key=lambda size: _flops(size)):
        # A slow rung is left out by the speed that it had at the size before.
        slow = {number for number, rate in rates.items() if _flops(size) / rate > _SLOWEST_S}
        here = {number: f for number, f in functions.items() if number not in slow}
        for number, samples, share in _measure(size, here, device, clock):
            rate = _flops(size) / samples.median
            rates[number] = rate
            name = BASELINE if number == 0 else lookup(number).name
            times = (samples.median, samples.p10, samples.p90)
            peak = chip.fp32_flops_per_s
            of_peak = None if peak is None else rate / peak
            yield Point(_text(size), number, name, configs.get(number, ""), *times, rate, share, of_peak)


def search(
    size: Size,
    device: Any,
    *,
    rung: int | str = "autotuned",
    configs: Sequence[Config] | None = None,
    clock: Clock | None = None,
) -> list[tuple[Config, float]]:
    """Measures configurations of a rung at one size.

    Args:
      size: m, n and k of the product.
      device: the device to run on.
      rung: the rung.
      configs: its configurations; None: the search space of rung 9.
      clock: None: the default clock of the device.

    Returns:
      Each configuration with its FLOP/s, the fastest first. A configuration that does not compile, as one whose
      registers spill, is left out with a warning.
    """
    configs = search_space()[0] if configs is None else configs
    functions = {i: functools.partial(sgemm, rung=rung, config=config) for i, config in enumerate(configs, start=1)}

    def refuse(number: int, reason: CompileError) -> None:
        warnings.warn(f"search: left out {configs[number - 1]}: {reason}", stacklevel=3)

    measured = _measure(size, functions, device, clock, refuse)
    found = {i: _flops(size) / samples.median for i, samples, _ in measured if i}
    return sorted(((configs[i - 1], rate) for i, rate in found.items()), key=lambda pair: -pair[1])


def _measure(
    size: Size,
    functions: dict[int, Callable[..., Any]],
    device: Any,
    clock: Clock | None,
    refuse: Callable[[int, CompileError], None] | None = None,
) -> Iterator[tuple[int, Any, float]]:
    """Yields number, samples and the speed relative to cuBLAS, which is number 0.

    `refuse` is called with the number of each kernel that does not compile; None: the error is raised.
    """
    m, n, k = size
    keys = jax.random.split(jax.random.key(0))
    draws = zip(keys, ((m, k), (k, n)))
    operands = tuple(jax.device_put(jax.random.normal(key, shape, jnp.float32), device) for key, shape in draws)
    sides = {0: functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)} | functions

    def compiled(number: int) -> Any:
        try:
            return jax.jit(sides[number]).lower(*operands).compile()
        except CompileError as reason:
            if refuse is None:
                raise
            return reason

    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        programs = dict(zip(sides, pool.map(compiled, sides)))
    for number, reason in list(programs.items()):
        if isinstance(reason, CompileError) and refuse is not None:
            refuse(number, reason)
            del programs[number]
    expected = programs[0](*operands)
    seconds = {}
    for number, program in programs.items():
        error = float(jnp.max(jnp.abs(program(*operands) - expected)) / jnp.max(jnp.abs(expected)))
        if not error <= _TOLERANCE:
            raise InputError(
                f"study: rung {number} at {_text(size)} has an error of {error:.2g} of the largest value; at most "
                f"{_TOLERANCE} is allowed."
            )
        begin = time.perf_counter()
        jax.block_until_ready(program(*operands))
        seconds[number] = time.perf_counter() - begin
    calls = {str(i): Call(p, [operands]) for i, p in programs.items() if i == 0 or seconds[i] <= _SLOWEST_S}
    samples = measure(calls, regime="burst", budget_s=_SECONDS, clock=clock or clock_for(device.platform))
    for name, found in samples.items():
        yield int(name), found, ratio(found, samples["0"])


def _flops(size: Size) -> float:
    m, n, k = size
    return 2.0 * m * n * k


def _text(size: Size) -> str:
    return "x".join(map(str, size))


def save(
    points: Sequence[Point], environment: dict[str, Any], path: pathlib.Path, profiles: Sequence[Profile] = ()
) -> None:
    """Writes JSON; times in seconds."""
    content: dict[str, Any] = dict(sgemm=_SCHEMA, environment=environment)
    content["points"] = [dataclasses.asdict(point) for point in points]
    if profiles:
        content["profiles"] = [dataclasses.asdict(profile) for profile in profiles]
    results.write(content, path)


def load(path: pathlib.Path) -> tuple[list[Point], dict[str, Any], list[Profile]]:
    """Reads the points, the environment and the profiles that `save` wrote.

    Raises:
      InputError: the file is missing or holds something else.
    """
    values = results.read(path, "study")
    if not isinstance(values, dict) or values.get("sgemm") != _SCHEMA:
        raise InputError(f"study: {path} holds no study of SGEMM of schema {_SCHEMA}.")
    profiles = [Profile(**profile) for profile in values.get("profiles", [])]
    return [Point(**point) for point in values["points"]], values["environment"], profiles


def table(points: Sequence[Point], environment: dict[str, Any], profiles: Sequence[Profile] = ()) -> str:
    """Markdown tables of TFLOP/s and percent of cuBLAS, with a line for each rung, and of the profiles."""
    sizes = list(dict.fromkeys(point.size for point in points))
    found = {(point.rung, point.size): point for point in points}
    head = ["rung", *(_short(size) for size in sizes)]
    lines = [head, ["---"] * len(head)]
    for number, name in sorted(dict.fromkeys((point.rung, point.name) for point in points)):
        cells = [_cell(found.get((number, size))) for size in sizes]
        lines.append([f"{number} {name}" if number else name, *cells])
    source = f"{environment['device']}, jax {environment['versions']['jax']}, {environment['date'][:10]}"
    text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
    text += f"\nTFLOP/s (percent of {BASELINE}), bursts. {source}, by `{environment['command']}`.\n"
    return text + (_profile_table(profiles) if profiles else "")


def _profile_table(profiles: Sequence[Profile]) -> str:
    head = ["rung", "size", "bank conflicts", "occupancy", "limiter"]
    lines = [head, ["---"] * len(head)]
    for p in profiles:
        conflicts, occupancy = f"{p.bank_conflicts:.3g}", f"{p.occupancy:.0%}"
        lines.append([f"{p.rung} {p.name}", _short(p.size), conflicts, occupancy, p.limit])
    return "\nBy Nsight Compute:\n\n" + "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    speed = f"{point.flops_per_s / 1e12:.3g}"
    return speed if point.rung == 0 else f"{speed} ({100 * point.share_of_baseline:.3g})"


def _short(size: str) -> str:
    m, *others = size.split("x")
    return f"{m}³" if all(other == m for other in others) else size


def plot(points: Sequence[Point], path: pathlib.Path) -> None:
    """Draws the speed of every rung over the square sizes, and bars of the other sizes."""
    from matplotlib.figure import Figure

    squares = [point for point in points if len(set(point.size.split("x"))) == 1]
    largest = max((point.size for point in squares), key=lambda size: int(size.split("x")[0]), default=None)
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    colours = itertools.cycle([f"C{i}" for i in range(10)])
    for number, name in sorted(dict.fromkeys((point.rung, point.name) for point in points)):
        line = sorted((int(p.size.split("x")[0]), p.flops_per_s / 1e12) for p in squares if p.rung == number)
        label, colour = f"{number} {name}" if number else name, "black" if number == 0 else next(colours)
        style = "--" if number == 0 else "-" if number <= 10 else "-."
        left.plot(*zip(*line), style, color=colour, marker=".", label=label) if line else None
    left.set(xlabel="m = n = k", ylabel="TFLOP/s", ylim=(0, None), xscale="log")
    left.set_xscale("log", base=2)
    left.grid(alpha=0.3)
    left.legend(fontsize=7)
    bars = [point for point in points if point.size in (largest, "4096x4096x4096", "4095x4097x4093") and point.rung]
    sizes, numbers = list(dict.fromkeys(p.size for p in bars)), sorted({p.rung for p in bars})
    for i, size in enumerate(sizes):
        here = {point.rung: 100 * point.share_of_baseline for point in bars if point.size == size}
        places = [place + (i - (len(sizes) - 1) / 2) * 0.8 / len(sizes) for place in range(len(numbers))]
        heights = [here.get(number, 0.0) for number in numbers]
        right.bar(places, heights, 0.8 / len(sizes), label=_short(size))
    right.axhline(100, color="black", linestyle="--", linewidth=1)
    right.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    right.set(xlabel="rung", ylabel="% of cuBLAS")
    right.grid(axis="y", alpha=0.3)
    if bars:
        right.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
