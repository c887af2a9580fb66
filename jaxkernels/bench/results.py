"""The results of a run and all that is needed to repeat it; their JSON; the comparison of two runs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import pathlib
import platform
import statistics
import subprocess
import sys
from collections.abc import Collection, Iterator
from typing import Any, Literal

from jaxkernels.bench.step_profile import Breakdown, KernelTime
from jaxkernels.bench.telemetry import Reading, Telemetry
from jaxkernels.core import hardware, measure
from jaxkernels.core.errors import InputError
from jaxkernels.core.folders import write_whole
from jaxkernels.core.measure import Regime, Samples
from jaxkernels.core.versions import installed_version

__all__ = [
    "SCHEMA", "Change", "Results", "Row", "Side", "TimedKernel", "cells", "compare", "environment", "line", "load",
    "read", "resumed", "save", "write",
]  # fmt: skip

#: The schema of the JSON; files with another schema are refused.
SCHEMA = 1

_PACKAGES = (
    "jaxkernels", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
    "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc", "nvidia-nvjitlink", "triton", "tokamax", "flax",
    "numpy",
)  # fmt: skip

#: If the clock rates of two sides differ by more than this, their row gets a flag.
_MAX_DRIFT = 0.03


@dataclasses.dataclass(frozen=True)
class TimedKernel:
    """One of our kernels in a timed program, in a form that can be read back (`jaxkernels.tuning.calibration`).

    Attributes:
      op, backend: the operation and the backend.
      version: the backend's version.
      config: the configuration, as `dispatch.Backend.encode` has it.
      spec: the spec, as `plain.describe` has it; None if it has no such form.
    """

    op: str
    backend: str
    version: int
    config: dict[str, Any]
    spec: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Side:
    """One way to compute a row's problem, measured.

    Attributes:
      name: a backend, or a baseline and its variant.
      is_ours: whether it is a backend of this package.
      seconds: the median time of one call.
      samples: the measured times; None if the side was too slow to compete: `seconds` is then from one round of bursts.
      error_ratio: see `jaxkernels.bench.accuracy.error_ratio`.
      kernels: kernel and configuration of each of our operations in it, as in `jaxkernels.explain`. A backward problem
        has those of its forward pass, too, which is not timed.
      timed: the kernels of the timed program. Older files have none.
      setting: of a training step, how the model ran its layers (`jaxkernels.bench.training.Setting`); None elsewhere. A
        side is timed at its fastest setting; at the others it has no samples.
      memory_bytes: the device memory that the program needs, as XLA plans it; None if not known.
      joules: the energy of one call; None if it was not measured.
      breakdown: where the time goes (`jaxkernels.bench.step_profile`); None if it was not traced.
      in_program: the seconds of one call in a program of several calls, with the pauses between kernels. Auto and the
        fastest baseline have it in rows of short problems that auto lost; else it is None.
    """

    name: str
    is_ours: bool
    seconds: float
    samples: Samples | None
    error_ratio: float
    kernels: tuple[str, ...] = ()
    timed: tuple[TimedKernel, ...] = ()
    setting: str | None = None
    memory_bytes: int | None = None
    joules: float | None = None
    breakdown: Breakdown | None = None
    in_program: float | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """A problem in one regime: all sides, measured in turns.

    Attributes:
      suite, label, op, shape, dtype: the problem.
      regime: how it was timed.
      flops, num_bytes, num_exps: the work of the problem (`jaxkernels.core.problems.Problem`).
      peak_flops_per_s, memory_bytes_per_s, exps_per_s: rates of the chip; None if not known.
      is_warm: whether the operands stayed in the cache. Otherwise copies were rotated, so that they did not.
      sides: the sides that were correct and timed.
      refused: side -> the reason why it was not timed: it does not support the problem, failed, or was wrong.
      checked: the part of the result that was compared with the reference, or "all".
      tokens: the tokens of a training step, else None.
      device: clock, power and temperature during the measurement; None if they are not sampled.
      seconds: the time that the run spent on the row: "compile" (a share, as many compile at once), "choose" (also a
        share: our backends are compared and compiled), "check", "look" (the first look at each side) and "time". The
        row of a problem's first regime has the first four. Waiting for a turn does not count.
      programs: side -> the seconds that "lower" and "compile" took on a thread; many threads worked at once.
      kinds: the groups in which a summary counts a random problem (`jaxkernels.bench.losses`).
    """

    suite: str
    label: str
    op: str
    shape: str
    dtype: str
    regime: Regime
    flops: float
    num_bytes: int
    peak_flops_per_s: float | None
    memory_bytes_per_s: float | None
    is_warm: bool
    sides: tuple[Side, ...]
    refused: dict[str, str]
    checked: str
    num_exps: float = 0
    exps_per_s: float | None = None
    tokens: int | None = None
    device: Reading | None = None
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    programs: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    kinds: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """Equal keys mean the same row in two runs."""
        return *self.problem, self.regime

    @property
    def problem(self) -> tuple[str, ...]:
        """Equal in the rows of one problem in different regimes."""
        return self.suite, self.shape, self.dtype

    @property
    def ours(self) -> tuple[Side, ...]:
        return tuple(side for side in self.sides if side.is_ours and side.samples is not None)

    @property
    def fastest_baseline(self) -> Side | None:
        timed = [side for side in self.sides if not side.is_ours and side.samples is not None]
        return min(timed, key=lambda side: side.seconds, default=None)

    def ratio(self, side: Side) -> float | None:
        """How many times as fast as the fastest baseline a side is."""
        baseline = self.fastest_baseline
        if baseline is None or baseline.samples is None or side.samples is None:
            return None
        return measure.ratio(side.samples, baseline.samples)

    def flops_per_s(self, side: Side) -> float:
        return self.flops / side.seconds

    def share_of_peak(self, side: Side) -> float | None:
        """The side's share of the chip's peak FLOP/s for this arithmetic."""
        return None if self.peak_flops_per_s is None else self.flops_per_s(side) / self.peak_flops_per_s

    @property
    def limits(self) -> tuple[float, float] | None:
        """The seconds of the FLOPs at the peak rate, and of the bytes at the memory's. The larger is the limit."""
        if self.peak_flops_per_s is None or self.memory_bytes_per_s is None:
            return None
        return self.flops / self.peak_flops_per_s, self.num_bytes / self.memory_bytes_per_s

    def share_of_limit(self, side: Side) -> float | None:
        """The side's share of the limit. It can exceed 1 if bytes stay in the cache."""
        return None if self.limits is None else max(self.limits) / side.seconds

    @property
    def flags(self) -> tuple[str, ...]:
        """Conditions that make the row less reliable."""
        flags = ["warm"] if self.is_warm else []
        clocks = {
            side.name if side.is_ours else f"{side.name} (baseline)": statistics.median(side.samples.probed)
            for side in self.sides
            if side.samples is not None and side.samples.probed
        }
        if clocks and max(clocks.values()) > (1 + _MAX_DRIFT) * min(clocks.values()):
            flags.append("clocks " + ", ".join(f"{name} {mhz:.0f}" for name, mhz in clocks.items()) + " MHz")
        return tuple(flags)


def cells(row: Row, side: Side) -> list[str]:
    """The table cells of a timed side: name, time, speed, share of peak, ratio, error ratio, flags.

    The speed is in TFLOP/s. For a training step it is in tokens/s.
    """
    share, ratio, baseline = row.share_of_peak(side), row.ratio(side), row.fastest_baseline
    seconds = side.seconds
    speed = (
        f"{row.flops_per_s(side) / 1e12:.4g} TFLOP/s" if row.tokens is None else f"{row.tokens / seconds:,.0f} tokens/s"
    )
    return [
        f"{row.op} {row.shape} {row.dtype} {_named(side)}",
        f"{seconds * 1e6:,.1f} us" if seconds < 0.01 else f"{seconds * 1e3:,.1f} ms",
        speed,
        "- of peak" if share is None else f"{share:.1%} of peak",
        "no baseline" if ratio is None or baseline is None else f"{ratio:.3f} x {_named(baseline)}",
        f"error {side.error_ratio:.2f}",
        "; ".join([row.regime, *_costs(row, side), *row.flags]),
    ]


def _named(side: Side) -> str:
    return side.name if side.setting is None else f"{side.name} {side.setting}"


def _costs(row: Row, side: Side) -> Iterator[str]:
    """Memory and energy, where they are known."""
    if side.memory_bytes is not None:
        yield f"{side.memory_bytes / 1e9:.1f} GB"
    if side.joules is not None and row.tokens is not None:
        yield f"{side.joules / row.tokens * 1e3:.2f} mJ/token"


def line(row: Row, side: Side) -> str:
    """`op shape dtype backend | us | TFLOP/s | % of peak | x baseline | error ratio | regime`."""
    return " | ".join(cells(row, side))


@dataclasses.dataclass(frozen=True)
class Results:
    """A run: its environment and its rows."""

    environment: dict[str, Any]
    rows: tuple[Row, ...]


def environment(device: Any, telemetry: Telemetry, command: list[str]) -> dict[str, Any]:
    """The environment of a run: command, date, device, driver, versions, commit."""
    return dict(
        command=" ".join(["jaxkernels", *command]),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        device=str(hardware.chip_of(device)),
        platform=device.platform,
        platform_version=device.client.platform_version.splitlines()[0],
        driver=telemetry.driver(),
        limits=telemetry.limits(),
        telemetry=telemetry.reason or "sampled",
        clock="CUPTI kernel durations" if device.platform in hardware.GPU_PLATFORMS else "wall clock",
        host=f"{platform.machine()}, {platform.system()}",
        python=sys.version.split()[0],
        versions={name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        commit=_commit(),
    )


def resumed(earlier: Results, where: dict[str, Any], problems: Collection[tuple[str, ...]]) -> Results:
    """The rows and the environment with which a resumed run starts.

    An interrupt may have come between two regimes of the last problem. If the resumed run measures that problem again,
    its rows are left out.

    Args:
      earlier: the run so far.
      where: the environment of the resumed run.
      problems: the problems that the resumed run measures, as `Row.problem`.

    Raises:
      InputError: the two runs have different chips, versions or commits.
    """
    same = lambda x: dict(device=x["device"], commit=x["commit"] and x["commit"].removesuffix("+")) | x["versions"]
    before, now = same(earlier.environment), same(where)
    for name in before | now:
        if before.get(name) != now.get(name):
            raise InputError(
                f"bench: --resume needs the same {name} as the earlier run; got {now.get(name)}, before it was "
                f"{before.get(name)}. Write another file with --json."
            )
    cut_off = {row.problem for row in earlier.rows[-1:]}.intersection(problems)
    rows = tuple(row for row in earlier.rows if row.problem not in cut_off)
    both = dict(
        command=f"{earlier.environment['command']} && {where['command']}",
        resumed=[*earlier.environment.get("resumed", ()), where["date"]],
    )
    return Results(earlier.environment | both, rows)


def _commit() -> str | None:
    """The checkout's commit, with "+" if files differ from it; None if the package is not in a checkout."""
    root = pathlib.Path(__file__).parents[2]
    if not (root / "pyproject.toml").exists():
        return None
    try:
        git = lambda *args: subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=True)
        return git("rev-parse", "HEAD").stdout.strip() + ("+" if git("status", "--porcelain").stdout else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def save(results: Results, path: pathlib.Path) -> None:
    """Writes JSON atomically; times in seconds."""
    rows = [dataclasses.asdict(row) for row in results.rows]
    for side in (side for row in rows for side in row["sides"]):
        for name in ("timed", "setting", "memory_bytes", "joules", "breakdown", "in_program"):
            if not side[name]:  # A side that has none, or of an older file.
                del side[name]
    write(dict(schema=SCHEMA, environment=results.environment, rows=rows), path)


def write(values: dict[str, Any], path: pathlib.Path) -> None:
    """Writes JSON atomically, in a form that is easy to read and to diff."""
    write_whole(path, json.dumps(_rounded(values), indent=1) + "\n")


def _rounded(value: Any) -> Any:
    """Rounds every float to six digits."""
    if isinstance(value, dict):
        return {name: _rounded(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(x) for x in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def load(path: pathlib.Path, command: str = "bench") -> Results:
    """Reads what `save` wrote.

    Raises:
      InputError: the file is missing or holds something else. The message begins with `command`.
    """
    values = read(path, command)
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        found = values.get("schema") if isinstance(values, dict) else None
        raise InputError(f"{command}: {path} is not a benchmark of schema {SCHEMA}; its schema is {found}.")
    return Results(values["environment"], tuple(map(_row, values["rows"])))


def read(path: pathlib.Path, command: str) -> Any:
    """Reads a JSON file.

    Raises:
      InputError: the file is missing or is not JSON. The message begins with `command`.
    """
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise InputError(f"{command}: {path} cannot be read: {e}.") from e


def _row(values: dict[str, Any]) -> Row:
    device = values["device"] and Reading(**values["device"])
    kinds = tuple(values.get("kinds", ()))  # Older files have none.
    return Row(**{**values, "sides": tuple(map(_side, values["sides"])), "device": device, "kinds": kinds})


def _side(values: dict[str, Any]) -> Side:
    samples = values["samples"]
    if samples is not None:
        as_tuples = {name: tuple(samples[name]) for name in ("round_medians", "probed")}
        samples = Samples(**{**samples, **as_tuples})
    timed = tuple(TimedKernel(**kernel) for kernel in values.get("timed", ()))
    if (traced := values.get("breakdown")) is not None:
        kernels = tuple(KernelTime(**kernel) for kernel in traced["kernels"])
        values = values | dict(breakdown=Breakdown(**traced | dict(kernels=kernels)))
    return Side(**{**values, "samples": samples, "kernels": tuple(values["kernels"]), "timed": timed})


@dataclasses.dataclass(frozen=True)
class Change:
    """One side of one row in two runs.

    Attributes:
      row, side: the row and the side in the new run.
      old, new: the side's samples in the two runs.
    """

    row: Row
    side: Side
    old: Samples
    new: Samples

    @property
    def factor(self) -> float:
        """The old time over the new time."""
        return self.old.median / self.new.median

    @property
    def verdict(self) -> Literal["faster", "slower", "noise"]:
        """The change is noise if the spans from p10 to p90 overlap."""
        if self.new.p90 < self.old.p10:
            return "faster"
        return "slower" if self.new.p10 > self.old.p90 else "noise"


def compare(old: Results, new: Results) -> list[Change]:
    """The sides that both runs timed, in the order of the new run."""
    key = lambda row, side: (row.key, side.name, side.is_ours)
    before = {key(row, side): side.samples for row in old.rows for side in row.sides if side.samples is not None}
    return [
        Change(row, side, before[key(row, side)], side.samples)
        for row in new.rows
        for side in row.sides
        if side.samples is not None and key(row, side) in before
    ]
