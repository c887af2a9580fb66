"""The commands `jaxkernels bench`, `jaxkernels study` and `jaxkernels report`."""

from __future__ import annotations

import dataclasses
import errno
import functools
import math
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jaxkernels.cli.programs import keep_programs
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.core.folders import check_writable
from jaxkernels.models.progress import plain_console

if TYPE_CHECKING:
    from jaxkernels.bench.results import Results, Row
    from jaxkernels.bench.runner import Settings

__all__ = ["bench", "report", "study"]

_WHAT, _AGAINST, _OUT = "What is timed", "Sides", "Output"


def bench(
    op: Annotated[str, typer.Argument(help="gemm, qkv, attention, norm, lce or train.")],
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="A suite by name; may be repeated. `--suite list` lists them.",
            show_default="all of the operation; without a GPU the smallest",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="A shape instead of a suite: 4096x4096x4096:nt, 4x4096x16x128:causal:backward; may be repeated.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Draw N random problems instead, time backend=None (auto) on them, and name what would have won where "
            "it is slower than the best baseline.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of --random.", show_default="0", rich_help_panel=_WHAT)] = None,
    largest: Annotated[
        int | None,
        typer.Option(help="Largest size that --random draws.", show_default="32768", rich_help_panel=_WHAT),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Processes that measure --random, divided among the GPUs. Those of a GPU compile beside each other, "
            "and time one by one. Half as many as there are CPU cores take the least time.",
            show_default="1",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(
            help="At most this many rows of each suite, evenly spaced, after --match: for a first look.",
            show_default="all",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    match: Annotated[
        str | None,
        typer.Option(
            help="Only rows whose shape, dtype or name (as shown in tables) matches this regular expression: "
            "'H128.*backward', '70B'.",
            show_default="all",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    regime: Annotated[
        list[str] | None,
        typer.Option(
            help="burst or sustained; may be repeated.",
            show_default="both, one after the other; with --random, burst",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A backend to time: {', '.join(dispatch.backend_names())}; may be repeated.",
            show_default="all that support the row; of train: auto, the fastest for each operation",
            rich_help_panel=_AGAINST,
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            help="A baseline to compare with; may be repeated.",
            show_default="all that support the row; of train: cudnn, else xla",
            rich_help_panel=_AGAINST,
        ),
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Of train: how a model runs its layers, scan:REMAT or unrolled:REMAT (`jaxkernels train --help` lists "
            "REMAT); may be repeated. Every side is timed at its fastest setting.",
            show_default="the preset's own, unrolled:none and scan:dots_and_attention",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Of train: also trace some steps, and show where their time goes, for all sides side by side.",
            rich_help_panel=_WHAT,
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(
            help="Of train: steps that count, for each side in each regime.",
            show_default="10",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    json: Annotated[
        pathlib.Path | None, typer.Option("--json", help="Write all results to this file.", rich_help_panel=_OUT)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run in the --json file: measure the missing rows, and its last problem again, which an "
            "interrupt may have cut off.",
            rich_help_panel=_OUT,
        ),
    ] = False,
    plot: Annotated[
        pathlib.Path | None, typer.Option(help="Draw plots into this folder.", rich_help_panel=_OUT)
    ] = None,
    compare: Annotated[
        pathlib.Path | None,
        typer.Option(help="Show the changes since an earlier JSON file.", rich_help_panel=_OUT),
    ] = None,
) -> None:
    """Time the kernels against the fastest alternatives in the same process, after checking their results.

    A line is `op shape dtype backend | time | speed | share of peak | ratio to the fastest baseline | error`.
    On a GPU, times are device times (CUPTI). On a CPU, only small suites run, timed by the host's clock.
    """
    from jaxkernels.bench import results as results_lib
    from jaxkernels.bench import suites

    console = plain_console()
    if op not in suites.kinds():
        raise InputError(f"bench: unknown operation {op!r}; use one of {', '.join(suites.kinds())}.")
    if suite == ["list"]:
        _list_suites(op, console)
        return
    if rows is not None and rows < 1:
        raise InputError(f"bench: --rows must be at least 1; got {rows}.")
    drawn = _drawn(op, random, seed, largest, suite, shapes, rows)
    _check_processes(processes, random)
    old = None if compare is None else results_lib.load(compare)
    earlier = _earlier(op, json) if resume else None
    _check_outputs("bench", json, plot)
    settings = _settings(op, regime, backend, baseline)
    measure = _measure(op, setting, steps, profile)
    if profile and settings.device.platform not in hardware.GPU_PLATFORMS:
        raise InputError(
            f"bench: --profile needs a CUDA GPU; this machine has {settings.device.platform}. Leave it out."
        )
    if drawn:
        settings = dataclasses.replace(settings, auto=True, regimes=settings.regimes if regime else ("burst",))
        if processes is not None and processes > 1:
            from jaxkernels.bench import processes as processes_lib

            measure = functools.partial(processes_lib.run, count=processes)
        work = _matching(drawn, match)
    else:
        work = _work(op, suite or [], shapes or [], rows, match, settings, console)
    results = _run(measure, work, settings, console, json, earlier)
    _breakdowns(results, console)
    _summary(results, console)
    _random_summary(results, console)
    _phases(results, console)
    if json is not None:
        console.print(f"written to {json}")
    if plot is not None:
        from jaxkernels.bench import plots

        for path in plots.plot(results, plot):
            console.print(f"drawn {path}")
    if old is not None:
        _show_changes(old, results, console)
    if wrong := sum(map(_is_wrong, results.rows)):
        console.print(f"{wrong} rows have wrong results of our kernels; see above")
        raise typer.Exit(1)
    if not any(row.ours for row in results.rows):
        raise InputError(f"bench: none of our kernels was timed in {len(results.rows)} rows; see the reasons above.")


def _drawn(
    op: str,
    count: int | None,
    seed: int | None,
    largest: int | None,
    suites: list[str] | None,
    shapes: list[str] | None,
    rows: int | None,
) -> list[tuple[str, Any]]:
    """(suite, problem) pairs of --random; none without it."""
    from jaxkernels.bench import random_rows
    from jaxkernels.core.dice import LARGEST

    if count is None:
        for option, value in (("--seed", seed), ("--largest", largest)):
            if value is not None:
                raise InputError(
                    f"bench: {option} needs --random; got {option} {value} without it. Add --random N, or leave "
                    f"{option} out."
                )
        return []
    for option, given in (("--suite", suites), ("--shapes", shapes)):
        if given:
            raise InputError(
                f"bench: --random draws its own problems; got {option} {given[0]} too. Leave out --random or {option}."
            )
    if rows is not None:
        raise InputError(f"bench: --rows shortens suites; got --rows {rows} with --random. Give --random fewer rows.")
    if count < 1:
        raise InputError(f"bench: --random must be at least 1; got {count}.")
    if seed is not None and seed < 0:
        raise InputError(f"bench: --seed must be at least 0; got {seed}.")
    if largest is not None and not _LEAST_LARGEST <= largest <= LARGEST:
        raise InputError(f"bench: --largest must be from {_LEAST_LARGEST} to {LARGEST}; got {largest}.")
    seed, largest = seed or 0, largest or LARGEST
    suite = random_rows.suite_name(op, seed, largest)
    return [(suite, problem) for problem in random_rows.problems(op, count, seed, largest)]


def _check_processes(processes: int | None, random: int | None) -> None:
    """Checks --processes, and lets them share the GPU's memory. Called before JAX takes the memory."""
    if processes is None:
        return
    if random is None:
        raise InputError(
            f"bench: --processes needs --random; got --processes {processes} without it. Add --random N, or leave "
            "--processes out."
        )
    if processes < 1:
        raise InputError(f"bench: --processes must be at least 1; got {processes}.")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


#: The smallest --largest: the shapes of all kinds of problems fit.
_LEAST_LARGEST = 128


def _earlier(op: str, json: pathlib.Path | None) -> Results | None:
    """The run to resume; None if its file does not exist yet."""
    from jaxkernels.bench import results as results_lib

    if json is None or op == "train":
        given = "train, whose suites have one row each" if op == "train" else "no --json"
        raise InputError(f"bench: --resume needs a --json file with rows of an operation; got {given}.")
    if not json.exists():
        return None
    earlier = results_lib.load(json)
    if any(row.op != op for row in earlier.rows):
        raise InputError(
            f"bench: {json} has rows of {earlier.rows[0].op}, not of {op}. Choose another file with --json."
        )
    return earlier


def _check_outputs(command: str, json: pathlib.Path | None, plot: pathlib.Path | None) -> None:
    """Raises InputError if the results could not be written. Called before they are measured."""
    for option, path, folder in (("--json", json, json and json.parent), ("--plot", plot, plot)):
        try:
            if path is not None and folder is not None:
                check_writable(folder)
                if option == "--json" and path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        except OSError as e:
            raise InputError(f"{command}: cannot write {option} {path}: {e.strerror}.") from e


def _is_wrong(row: Row) -> bool:
    """Whether one of our kernels breaks the error rule. Baselines may break it."""
    ours = [reason for name, reason in row.refused.items() if name.startswith("jaxkernels ")]
    return any(reason.startswith("wrong:") for reason in ours)


def _list_suites(op: str, console: Console) -> None:
    from jaxkernels.bench.suites import all_suites

    for suite in all_suites().values():
        if suite.op == op:
            size = f"{len(suite.problems):4} rows" if suite.problems else "one preset"
            console.print(f"{suite.name:20} {size}  {suite.source}")


def _settings(op: str, regimes: list[str] | None, backends: list[str] | None, baselines: list[str] | None) -> Settings:
    import jax

    from jaxkernels.bench import training
    from jaxkernels.bench.runner import Settings
    from jaxkernels.bench.suites import baselines_of
    from jaxkernels.bench.telemetry import Telemetry
    from jaxkernels.core.measure import REGIMES

    known_baselines = tuple(training.BASELINES if op == "train" else baselines_of(op))
    given = {
        "regime": (regimes, REGIMES),
        "backend": (backends, training.BACKENDS if op == "train" else dispatch.backend_names()),
        "baseline": (baselines, known_baselines),
    }
    for option, (names, known) in given.items():
        for name in names or ():
            if name not in known:
                raise InputError(f"bench: unknown {option} {name!r}; use one of {', '.join(known)}.")
    device = jax.devices()[0]
    as_tuple = lambda names: None if names is None else tuple(dict.fromkeys(names))
    return Settings(
        device=device,
        telemetry=Telemetry(device.local_hardware_id or 0),
        backends=as_tuple(backends),
        baselines=as_tuple(baselines),
        regimes=as_tuple(regimes) or REGIMES,
        processes=max((os.cpu_count() or 1) - 4, 0) if device.platform in hardware.GPU_PLATFORMS else 0,
    )


def _work(
    op: str,
    names: list[str],
    shapes: list[str],
    rows: int | None,
    match: str | None,
    settings: Settings,
    console: Console,
) -> list[tuple[str, Any]]:
    """(suite, problem) pairs; for training (suite, preset) pairs."""
    from jaxkernels.bench import suites

    own = [("shapes", suites.parse_shape(op, text)) for text in shapes]
    if own and not names:
        return own
    has_gpu = settings.device.platform in hardware.GPU_PLATFORMS
    selected, left_out = suites.select(op, names, has_gpu=has_gpu)
    if left_out:
        console.print(
            f"no GPU: only {', '.join(s.name for s in selected)} runs, timed by the host's clock. "
            f"Select others with --suite: {', '.join(left_out)}."
        )
    if op == "train":
        if match is not None:
            raise InputError("bench: --match selects rows of an operation; a suite of train has one row only.")
        return [(suite.name, suite.name.removeprefix("train-")) for suite in selected]
    matching = _matching([(suite.name, problem) for suite in selected for problem in suite.problems], match)
    work = []
    for suite in selected:
        mine = [pair for pair in matching if pair[0] == suite.name]
        work += mine[:: 1 if rows is None else max(1, math.ceil(len(mine) / rows))]
    return work + own


def _matching(work: list[tuple[str, Any]], match: str | None) -> list[tuple[str, Any]]:
    """The pairs whose problem matches a regular expression."""
    if match is None:
        return work
    try:
        pattern = re.compile(match)
    except re.error as e:
        raise InputError(f"bench: --match {match!r} is not a regular expression: {e}.") from e
    found = [(s, p) for s, p in work if pattern.search(" ".join((p.shape, p.case.dtype, p.label, *p.kinds)))]
    if not found:
        raise InputError(
            f"bench: --match {match!r} matches none of {len(work)} rows. The first row is {work[0][1].shape}."
        )
    return found


#: Makes rows of (suite, problem) pairs, settings, and a function that shows the current step.
_Measure = Callable[[list[tuple[str, Any]], "Settings", Callable[[str], None]], "Iterator[Row]"]


def _measure(op: str, settings: list[str] | None, steps: int | None, profile: bool) -> _Measure:
    """The function that measures an operation or training. Raises InputError if an option does not fit."""
    from jaxkernels.bench import runner, training

    if op != "train":
        for option, given in (("--setting", settings), ("--steps", steps), ("--profile", profile)):
            if given:
                raise InputError(f"bench: {option} is for train; got {op}. Leave it out.")
        return runner.run
    if steps is not None and steps < 1:
        raise InputError(f"bench: --steps must be at least 1; got {steps}.")
    keep_programs()
    layouts = tuple(dict.fromkeys(map(training.Setting.parse, settings or ())))
    plan = training.Plan(layouts, training.Plan.steps if steps is None else steps, profile)
    return functools.partial(training.run, plan=plan)


#: A run that is killed loses at most the rows of this time.
_SAVE_SECONDS = 20.0


def _run(
    measure: _Measure,
    work: list[tuple[str, Any]],
    settings: Settings,
    console: Console,
    json: pathlib.Path | None,
    earlier: Results | None,
) -> Results:
    """Measures rows, shows each, and saves them from time to time. An interrupt keeps the rows measured so far."""
    from jaxkernels.bench import results as results_lib

    rows: list[Row] = []
    begin = saved = time.perf_counter()
    with settings.telemetry, console.status("starting") as spinner:
        where = results_lib.environment(settings.device, settings.telemetry, sys.argv[1:])
        if earlier is not None:
            keys = [problem.key(suite) for suite, problem in work]
            earlier = results_lib.resumed(earlier, where, keys)
            where, begin = earlier.environment, begin - earlier.environment["seconds"]
            rows.extend(earlier.rows)
            done = {row.problem for row in rows}
            work = [item for item, key in zip(work, keys) if key not in done]
            console.print(f"resuming after {len(rows)} rows of {json}; {len(work)} problems are left")
        _show_environment(where, console)
        if settings.telemetry.reason is not None:
            console.print(f"clocks, power and temperature are not sampled: {settings.telemetry.reason}")
        so_far = lambda: results_lib.Results(where | dict(seconds=time.perf_counter() - begin), tuple(rows))
        try:
            for row in measure(work, settings, lambda text: spinner.update(Text(text))):
                rows.append(row)
                _show(row, settings, console)
                if json is not None and time.perf_counter() - saved > _SAVE_SECONDS:
                    results_lib.save(so_far(), json)
                    saved = time.perf_counter()
        except KeyboardInterrupt:
            console.print(f"interrupted after {len(rows)} rows")
    results = so_far()
    if json is not None:
        results_lib.save(results, json)
    return results


def _show_environment(where: dict[str, Any], console: Console) -> None:
    console.print(f"{where['device']}, driver {where['driver']}, jax {where['versions']['jax']}, {where['clock']}")


#: Column widths of the live table: problem and side, time, speed, share of peak, ratio, error.
_WIDTHS = (64, 12, 18, 15, 26, 11)


def _show(row: Row, settings: Settings, console: Console) -> None:
    """Prints a row: our sides, the reasons of named sides that were not timed, and the chip's clock and power."""
    from jaxkernels.bench.losses import loss
    from jaxkernels.bench.results import cells, line

    for side in row.ours:
        if console.is_terminal:
            padded = [cell.ljust(width) for cell, width in zip(cells(row, side), _WIDTHS)]
            console.print(" ".join([*padded, cells(row, side)[-1]]))
        else:
            console.print(line(row, side))
    if not row.ours:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in row.refused.items())
        console.print(f"{row.op} {row.shape} {row.dtype} | {row.regime} | none of our kernels was timed: {reasons}")
    else:
        ours = [*(["auto"] if settings.auto else []), *(settings.backends or ())]
        named = [f"jaxkernels {name}" for name in ours] + list(settings.baselines or ())
        for name, reason in row.refused.items():
            if name in named or row.tokens is not None or reason.startswith("wrong:"):
                console.print(f"{row.op} {row.shape} {row.dtype} | {row.regime} | {name}: {reason}")
    if settings.auto and (text := loss(row)) is not None:
        console.print(f"    {text}")
    if row.device is not None:
        d = row.device
        console.print(
            f"    {d.sm_clock_mhz:.0f} MHz, {d.power_w:.0f} W (at most {d.power_max_w:.0f}), {d.temperature_c:.0f} C"
        )


def _breakdowns(results: Results, console: Console) -> None:
    """Prints where the time of traced training steps goes: groups of kernels side by side, then kernels by name."""
    from jaxkernels.bench.step_profile import GROUPS

    for row in results.rows:
        traced = [(side, side.breakdown) for side in row.sides if side.breakdown is not None]
        if not traced:
            continue
        table = Table(title=f"{row.shape}: milliseconds of a step")
        for name in ("kernels", *(f"{side.name} {side.setting}" for side, _ in traced)):
            table.add_column(name, justify="left" if name == "kernels" else "right")
        for group in GROUPS:
            table.add_row(group, *(f"{found.groups[group] * 1e3:.2f}" for _, found in traced))
        table.add_row("step", *(f"{found.seconds * 1e3:.2f}" for _, found in traced))
        console.print(table)
        for side, found in traced:
            console.print(f"{row.shape} {side.name} {side.setting}, by kernel:")
            for kernel in found.kernels:
                console.print(
                    f"    {kernel.seconds * 1e3:8.3f} ms {kernel.count:7.1f} launches  {kernel.group:12} {kernel.name}"
                )


def _summary(results: Results, console: Console) -> None:
    """Prints a line for each suite, regime and backend: geometric mean, smallest and largest ratio."""
    from jaxkernels.bench.random_rows import is_random
    from jaxkernels.bench.report import geometric_mean, ratios

    found_ratios = ratios(row for row in results.rows if not is_random(row.suite))
    if not found_ratios and results.rows and is_random(results.rows[-1].suite):
        return
    table = Table(title="ratio to the fastest baseline")
    for name in ("suite", "regime", "backend", "rows", "geometric mean", "least", "most"):
        table.add_column(name)
    for key, found in found_ratios.items():
        ends = [f"{value:.3f}" for value in (geometric_mean(found), min(found), max(found))]
        table.add_row(*key, str(len(found)), *ends)
    console.print(table)


def _random_summary(results: Results, console: Console) -> None:
    """Prints the ratios of auto in random rows by suite, regime and kind, and their histogram."""
    from jaxkernels.bench import losses
    from jaxkernels.bench.random_rows import is_random

    by_suite: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if is_random(row.suite):
            by_suite.setdefault((row.suite, row.regime), []).append(row)
    for (suite, regime), rows in by_suite.items():
        groups = losses.groups(rows)
        if not groups:
            console.print(f"{suite}, {regime}: no row has both a time of auto and of a baseline")
            continue
        table = Table(title=f"{suite}, {regime}: ratio of auto to the fastest baseline")
        for name in losses.HEAD:
            table.add_column(name)
        for group in groups:
            table.add_row(*group.cells)
        console.print(table)
        better = sum(map(losses.has_better, rows))
        console.print(f"rows in which another backend of ours is more than 3 % faster than auto: {better}")
        for text in losses.bars(rows):
            console.print(text)


def _phases(results: Results, console: Console) -> None:
    """Prints where the run's time went: in the main thread, and in the threads that lower and compile."""
    phases = _sums(row.seconds for row in results.rows)
    if phases:
        parts = [f"{name} {seconds:.1f}" for name, seconds in phases.items()]
        console.print(f"seconds: {', '.join(parts)}; {results.environment['seconds']:.1f} in all")
    programs: dict[str, list[dict[str, float]]] = {}
    for row in results.rows:
        if "compile" in row.seconds:  # Rows of later regimes have the same programs.
            for name, seconds in row.programs.items():
                programs.setdefault(name, []).append(seconds)
    for name, each in programs.items():
        parts = [f"{step} {seconds:.1f}" for step, seconds in _sums(each).items()]
        console.print(f"    {name}: {', '.join(parts)}, in many threads at once")


def _sums(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _show_changes(old: Results, new: Results, console: Console) -> None:
    from jaxkernels.bench.results import compare

    changes = compare(old, new)
    moved = [change for change in changes if change.verdict != "noise"]
    console.print(
        f"{len(changes)} times in both runs; {len(moved)} changed beyond noise (their p10 to p90 do not overlap)"
    )
    for change in sorted(moved, key=lambda change: change.factor):
        row, side = change.row, change.side
        times = f"{change.old.median * 1e6:,.1f} -> {change.new.median * 1e6:,.1f} us"
        problem = f"{row.op} {row.shape} {row.dtype}"
        name = side.name if side.is_ours else f"{side.name} (baseline)"
        console.print(f"{problem} {name} | {row.regime} | {times} | {change.verdict}, {change.factor:.3f} x")


def study(
    what: Annotated[str, typer.Argument(help="pipeline or sgemm.")] = "pipeline",
    shapes: Annotated[
        list[str] | None,
        typer.Option(help="Products MxNxK; may be repeated.", show_default="those of docs/pipeline.md, docs/sgemm.md"),
    ] = None,
    json: Annotated[pathlib.Path | None, typer.Option("--json", help="Write every point to this file.")] = None,
    plot: Annotated[pathlib.Path | None, typer.Option(help="Draw the points into this file.")] = None,
    timeline: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Record when the schedules of the mma.sync GEMM wait and multiply, and draw it into this file."
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Of sgemm: find what limits each rung, with Nsight Compute (ncu).")
    ] = False,
) -> None:
    """Measure how the design of a matrix product changes its speed, after checking every result.

    `jaxkernels study pipeline` times the GEMMs of both backends with rings of 1, 2, 3, ... slots and with several
    clusters. `jaxkernels study sgemm` times the rungs of the SGEMM ladder and cuBLAS. To find the fastest
    configuration, use `jaxkernels tune`.
    """
    if what not in _STUDIES:
        raise InputError(f"study: what is studied must be one of {', '.join(_STUDIES)}; got {what!r}.")
    if timeline is not None and what != "pipeline":
        raise InputError(f"study: --timeline belongs to the study of pipelines; got {what!r}. Leave it out.")
    if profile and what != "sgemm":
        raise InputError(f"study: --profile belongs to the study of sgemm; got {what!r}. Leave it out.")
    import jax

    from jaxkernels.bench import results as results_lib
    from jaxkernels.bench.telemetry import Telemetry

    console = plain_console()
    measure, save, draw = _STUDIES[what](shapes)
    device = jax.devices()[0]
    if device.platform not in hardware.GPU_PLATFORMS:
        raise InputError(f"study: needs a CUDA GPU to measure on; this machine has {device}.")
    _check_outputs("study", json, plot and plot.parent)
    _check_outputs("study", None, timeline and timeline.parent)
    points = []
    with Telemetry(device.local_hardware_id or 0) as telemetry:
        where = results_lib.environment(device, telemetry, sys.argv[1:])
        _show_environment(where, console)
        for point, line in measure(device):
            points.append(point)
            console.print(line)
    if timeline is not None:
        from jaxkernels.bench import timeline as timeline_lib

        timelines = timeline_lib.record()
        timeline_lib.draw(timelines, timeline)
        console.print(f"drawn {timeline}")
        save = functools.partial(save, timelines=timelines)
    if profile:
        save = functools.partial(save, profiles=_sgemm_profiles(points, console))
    if json is not None:
        save(points, where, json)
        console.print(f"written to {json}")
    if plot is not None:
        draw(points, plot)
        console.print(f"drawn {plot}")


def _study_pipeline(shapes: list[str] | None) -> _Study:
    from jaxkernels.bench import study as study_lib
    from jaxkernels.bench import suites

    problems = [suites.parse_shape("gemm", text) for text in shapes or ["8192x8192x8192", "2048x2048x2048"]]

    def measure(device: Any) -> Iterator[tuple[Any, str]]:
        for problem in problems:
            for point in study_lib.study(problem, device):
                name = f"{point.shape} {point.backend} {point.tile} {point.knob} {point.value}"
                yield point, _point_line(name, point, "" if point.share_of_peak is None else "of peak")

    return measure, study_lib.save, study_lib.plot


def _study_sgemm(shapes: list[str] | None) -> _Study:
    from jaxkernels.bench import sgemm

    sizes = [sgemm.parse_size(text) for text in shapes] if shapes else sgemm.SIZES

    def measure(device: Any) -> Iterator[tuple[Any, str]]:
        for point in sgemm.study(sizes, device):
            name = f"{point.size} {point.rung} {point.name}" if point.rung else f"{point.size} {point.name}"
            of_baseline = "" if point.rung == 0 else f", {point.share_of_baseline:.1%} of {sgemm.BASELINE}"
            yield point, _point_line(name, point, "" if point.share_of_peak is None else "of peak") + of_baseline

    return measure, sgemm.save, sgemm.plot


def _sgemm_profiles(points: Sequence[Any], console: Any) -> list[Any]:
    """Profiles the rungs of one size, the largest of those up to 4096^3. Prints why if that is impossible."""
    from jaxkernels.bench import sgemm, sgemm_profile

    sizes = [sgemm.parse_size(point.size) for point in points]
    size = max(sizes, key=lambda size: (math.prod(size) <= 4096**3, math.prod(size)))
    rungs = [point.rung for point, of in zip(points, sizes) if of == size and point.rung]
    try:
        found = sgemm_profile.profile(size, rungs)
    except InputError as reason:
        console.print(str(reason))
        return []
    for p in found:
        utilisation = "" if p.utilisation is None else f" ({p.utilisation:.0%})"
        console.print(
            f"{p.size} {p.rung} {p.name} | {p.bank_conflicts:,} bank conflicts | occupancy {p.occupancy:.0%} | "
            f"limited by {p.limiter}{utilisation}"
        )
    return found


def _point_line(name: str, point: Any, peak: str) -> str:
    share = f", {point.share_of_peak:.1%} {peak}" if peak else ""
    return f"{name} | {point.seconds * 1e6:,.1f} us | {point.flops_per_s / 1e12:.4g} TFLOP/s{share}"


#: What measures the points of a study on a device and gives a line for each, what saves them, and what draws them.
_Study = tuple[Callable[[Any], "Iterator[tuple[Any, str]]"], Callable[..., None], Callable[..., None]]
_STUDIES: dict[str, Callable[[list[str] | None], _Study]] = {"pipeline": _study_pipeline, "sgemm": _study_sgemm}


def report(
    files: Annotated[
        list[pathlib.Path] | None,
        typer.Argument(help="Markdown files with tables.", show_default="README.md and docs/**/*.md"),
    ] = None,
    results: Annotated[pathlib.Path, typer.Option(help="Folder of the benchmarks' JSON.")] = pathlib.Path(
        "docs/benchmarks"
    ),
    check: Annotated[bool, typer.Option("--check", help="Change nothing; fail if a table is out of date.")] = False,
) -> None:
    """Write the documentation's benchmark tables from committed results."""
    from jaxkernels.bench.report import Library, render

    console = plain_console()
    if not results.is_dir():
        raise InputError(f"report: the folder {results} does not exist. Name the benchmarks' folder with --results.")
    library = Library(results)
    stale = []
    for path in files or [pathlib.Path("README.md"), *sorted(pathlib.Path("docs").glob("**/*.md"))]:
        if not path.is_file():
            raise InputError(f"report: the file {path} does not exist.")
        text = path.read_text()
        written = render(text, library, where=str(path))
        if written != text:
            stale.append(path)
            if not check:
                path.write_text(written)
                console.print(f"{path}: written")
    if check and stale:
        raise InputError(f"report: out of date: {', '.join(map(str, stale))}. Run `jaxkernels report`.")
    if not stale:
        console.print("every table is up to date")
