"""The command `jaxkernels tune`."""

from __future__ import annotations

import json
import pathlib
import time
from collections.abc import Iterable
from typing import Annotated, Any

import jax
import typer

from jaxkernels.bench import measured, random_rows, suites
from jaxkernels.bench.lowering import kernels_of
from jaxkernels.core import dispatch, hardware, registry, times, winners
from jaxkernels.core.errors import InputError
from jaxkernels.tuning import calibration, choices, tuner

__all__ = ["tune"]


def tune(
    op: Annotated[
        str | None,
        typer.Argument(
            help="An operation, with its gradients: gemm, qkv, attention, norm, lce.",
            show_default="all, with --calibrate; else needed",
        ),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            help="gemm: MxNxK, then any of :nt :tn :tt :DTYPE; attention: BxTxSxNxKxH, then any of :causal :DTYPE. "
            "Separate several with commas."
        ),
    ] = None,
    suite: Annotated[list[str] | None, typer.Option(help="A suite of `jaxkernels bench`; may be repeated.")] = None,
    random: Annotated[
        int | None, typer.Option(min=1, help="N random problems, those of `jaxkernels bench --random`.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of --random.", show_default="0")] = None,
    backend: Annotated[
        str | None,
        typer.Option(help="Tune this backend only.", show_default="all; also stores which of them is fastest"),
    ] = None,
    top: Annotated[
        int, typer.Option(min=1, help="Configurations of a backend to measure first; then half as many follow.")
    ] = 8,
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for one kernel.")] = 15.0,
    minutes: Annotated[
        float | None,
        typer.Option(help="Begin no kernel that may end later. The same command goes on.", show_default="no limit"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also measure kernels that have a stored winner.")] = False,
    table: Annotated[
        pathlib.Path | None,
        typer.Option(
            help="Write all winners of this device to a file, in the format of jaxkernels/core/tables. Winners that "
            "the file has already count as stored."
        ),
    ] = None,
    calibrate: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            help="Measure nothing. Fit the constants of cost models to the times in a file of `bench --json` or of "
            "`tune --table`, and print them; may be repeated."
        ),
    ] = None,
    times_of: Annotated[
        list[pathlib.Path] | None,
        typer.Option(
            "--times",
            help="Measure nothing. Write the times in a file of `bench --json` to --table, in the format of "
            "jaxkernels/core/tables/times, and print how good the choice of backends by them is; may be repeated.",
        ),
    ] = None,
    design: Annotated[
        list[str] | None,
        typer.Option(
            help="With --calibrate: fit this cost model only, such as matmul.cuda.gemm; may be repeated.",
            show_default="all",
        ),
    ] = None,
    chip_name: Annotated[
        str | None,
        typer.Option(
            "--chip",
            help="With --calibrate and --times: use times of this chip only.",
            show_default="this machine's GPU, else an H200",
        ),
    ] = None,
) -> None:
    """Measure which configurations are fastest on this GPU, and keep them for every program on this machine.

    `jaxkernels tune gemm --shapes 4096x4096x4096,8192x8192x8192:nt`

    `jaxkernels tune gemm --random 400 --minutes 8 --table winners.json`

    `jaxkernels tune attention --calibrate attention.json`

    `jaxkernels tune --times gemm.json --times attention.json --table jaxkernels/core/tables/times/nvidia_h200.json`
    """
    operations = suites.kinds()[:-1]
    if times_of:
        if op or shapes or suite or random or minutes or force or calibrate or design or backend:
            raise InputError(
                "tune: --times measures nothing and takes no operation, --shapes, --suite, --random, --minutes, "
                "--force, --calibrate, --design or --backend. Leave them out."
            )
        if table is None:
            raise InputError("tune: --times needs a file to write. Name it with --table.")
        _write_times(times_of, table, _chip(chip_name))
        return
    if op is None and not calibrate:
        raise InputError(f"tune: no operation is given; use one of {', '.join(operations)}.")
    if op is not None and op not in operations:
        is_file = bool(calibrate) and pathlib.Path(op).exists()
        way_out = "repeat --calibrate for each file" if is_file else f"use one of {', '.join(operations)}"
        raise InputError(f"tune: unknown operation {op!r}; {way_out}.")
    if backend is not None and backend not in dispatch.backend_names():
        raise InputError(
            f"tune: unknown backend {backend!r}; use one of {', '.join(dispatch.backend_names())}, "
            "or leave --backend out to tune all."
        )
    if calibrate:
        if shapes or suite or random or minutes or force or table is not None:
            raise InputError(
                "tune: --calibrate measures nothing and takes no --shapes, --suite, --random, --minutes, --force or "
                "--table. Leave them out."
            )
        _calibrate(calibrate, _designs(op, backend, design), _chip(chip_name))
        return
    if design or chip_name is not None:
        raise InputError("tune: --design needs --calibrate, and --chip --calibrate or --times. Name a file with it.")
    assert op is not None
    if seed is not None and random is None:
        raise InputError(f"tune: --seed needs --random; got --seed {seed} without it. Add --random N, or leave it out.")
    if not shapes and not suite and not random:
        raise InputError(
            "tune: no shapes are given. Name shapes with --shapes, or a suite with --suite, or draw some with --random."
        )
    if minutes is not None and minutes * 60 < budget:
        raise InputError(
            f"tune: --minutes must be at least the budget of one kernel, {budget:g} s; got {minutes:g}. Use more "
            "minutes or a smaller --budget."
        )
    problems = [suites.parse_shape(op, text) for item in shapes or [] for text in item.split(",")]
    problems += [p for s in suites.select(op, suite, has_gpu=True)[0] for p in s.problems] if suite else []
    problems += random_rows.problems(op, random, seed or 0, command="tune") if random else []
    chip = hardware.chip_of(jax.devices()[0])
    if chip.platform != "cuda":
        raise InputError(f"tune: needs a CUDA GPU to measure on; this machine has {chip}.")
    if table is not None and table.exists():
        _adopt_table(table, chip)
    begin = time.monotonic()
    failed = left = 0
    for name, spec in dict.fromkeys(kernel for p in problems for kernel in kernels_of(p, backend)):
        if not force and dispatch.is_tuned(name, spec, backend):
            print(f"{name}  {spec}\n  already tuned, or there is only one configuration")
            continue
        if minutes is not None and time.monotonic() - begin + budget > 60 * minutes:
            left += 1
            continue
        try:
            result = tuner.tune(name, spec, backend, top=top, budget_s=budget)
        except tuner.TuningError as e:
            failed += 1
            print(f"{name}  {spec}\n  not tuned: {e}")
            continue
        failed += result.winner is None and bool(result.candidates)
        print(result, flush=True)
    if table is not None:
        _write_table(table, winners.entries(chip))
    if left:
        print(f"{left} kernels are left. The same command measures them.")
    if failed:
        raise InputError(f"tune: {failed} kernels could not be tuned; see the reasons above.")


def _designs(op: str | None, backend: str | None, names: list[str] | None) -> list[measured.Design]:
    """The designs to calibrate.

    Raises:
      InputError: a name is unknown, or no design is left.
    """
    known = measured.designs()
    kernels = None if op is None else registry.OPERATIONS[suites.registry_name(op) or ""].kernels
    for name in names or []:
        if name not in known:
            raise InputError(f"tune: no cost model with constants is called {name!r}; use {_listed(known)}.")
    found = [
        design
        for name, design in known.items()
        if (not names or name in names)
        and (kernels is None or design.op in kernels)
        and backend in (None, design.backend)
    ]
    if not found:
        raise InputError(
            f"tune: no design of this operation and backend has constants to fit; {_listed(known)} have. "
            "Leave the operation, --backend or --design out."
        )
    return found


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _chip(name: str | None) -> hardware.Chip:
    if name is None:
        return hardware.cuda_target()
    try:
        return hardware.lookup(name)
    except ValueError as e:
        raise InputError(f"tune: {e}") from e


def _calibrate(paths: list[pathlib.Path], designs: list[measured.Design], target: hardware.Chip) -> None:
    """Fits the constants of designs and prints them."""
    found = measured.read(paths, target, designs)
    for reason, count in found.left_out.items():
        print(f"left out: {count} times {reason}")
    refused, num_fits = [], 0
    for design in designs:
        times, constants = found.times[design.name], design.module.CONSTANTS
        if (reason := calibration.too_few(constants, times)) is not None:
            refused.append(f"{design.name}: not fitted: {reason}")
            continue
        num_fits += 1
        fit = calibration.fit(design.module.estimate, constants, times)
        print(f"{design.name}  {fit.num_times} times of {fit.num_problems} problems on {target}\n{fit}", flush=True)
    for reason in refused:
        print(reason)
    if not num_fits:
        raise InputError(
            f"tune: the files have too few times on {target} for any of the cost models; see the reasons above. "
            "Measure more problems with `jaxkernels bench OP --random N --json FILE`, or name the chip with --chip."
        )


def _write_times(paths: list[pathlib.Path], table: pathlib.Path, target: hardware.Chip) -> None:
    """Makes a table of times of benchmarks and prints how good the choice by it is."""
    problems = measured.problems(paths, target)
    for name in dict.fromkeys(problem.op for problem in problems):
        validation = choices.validate(name, [problem for problem in problems if problem.op == name], target)
        print(validation or f"{name}: too few problems for a choice by their times")
    try:
        times.write(table, problems)
    except OSError as e:
        raise InputError(f"tune: cannot write {table}: {e.strerror}.") from e
    print(f"{len(problems)} problems in {table}")


def _adopt_table(path: pathlib.Path, chip: hardware.Chip) -> None:
    """Stores the winners of a table for this chip that the cache does not have."""
    try:
        winners.adopt(json.loads(path.read_text()), chip)
    except OSError as e:
        raise InputError(f"tune: cannot read {path}: {e.strerror}.") from e
    except ValueError as e:
        raise InputError(f"tune: {path} is no table of winners: {e}. Name another file, or delete it.") from e


def _write_table(path: pathlib.Path, entries: list[dict[str, Any]]) -> None:
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    try:
        path.write_text(f"[\n{lines}\n]\n" if entries else "[]\n")
    except OSError as e:
        raise InputError(f"tune: cannot write {path}: {e.strerror}.") from e
    print(f"{len(entries)} winners in {path}")
