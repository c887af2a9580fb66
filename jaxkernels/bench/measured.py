"""Reads the times of kernels from benchmarks, for `jaxkernels.tuning.calibration` and `jaxkernels.core.times`.

A file is the JSON of `jaxkernels bench --json`, or a table of winners that `jaxkernels tune --table` wrote. A time is
used if the estimate of the kernel's cost model claims to be that time:

- the timed program has exactly one of our kernels, as the forward problems and the backward problems of attention have;
- `not_estimated` of its design has no reason;
- the kernel has the version of the code, and the time is from bursts, which is also what the tuner measures.

The baselines "xla" and "cudnn" run what the backends of these names run. Their times count for the designs of these
backends. Files have no specs of them: that of one of our sides is taken, else the row's problem is looked up in the
suites.

The estimate of an attention's backward pass has the passes around the kernel. The gradients of a product are two
products and more, so these rows are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable, Iterator
from types import ModuleType
from typing import Any

from jaxkernels.bench import results, suites
from jaxkernels.bench.lowering import kernels_of
from jaxkernels.bench.results import Row, Side, TimedKernel
from jaxkernels.core import dispatch, plain, registry, times
from jaxkernels.core.errors import InputError
from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Problem
from jaxkernels.tuning.calibration import Time

__all__ = ["Design", "Measured", "designs", "problems", "read"]


@dataclasses.dataclass(frozen=True)
class Design:
    """A design with constants.

    Attributes:
      op, backend: where it is registered.
      module: the design.
    """

    op: str
    backend: str
    module: ModuleType

    @property
    def name(self) -> str:
        """Its name on the command line: "matmul.cuda.gemm"."""
        return f"{self.op}.{self.backend}.{dispatch.name_of(self.module)}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times in files.

    Attributes:
      times: name of a design -> its times.
      left_out: reason -> the number of times that are not used.
    """

    times: dict[str, list[Time]]
    left_out: dict[str, int]


def designs() -> dict[str, Design]:
    """The designs with constants, by name."""
    found = [
        Design(op, backend, module)
        for op, backend in dispatch.REGISTRY
        for module in dispatch.load(op, backend).designs
        if hasattr(module, "Constants")
    ]
    return {design.name: design for design in found}


def read(paths: Iterable[pathlib.Path], target: Chip, wanted: Iterable[Design]) -> Measured:
    """Reads times of designs on a chip.

    Raises:
      InputError: a file is missing or holds something else.
    """
    by_module = {design.module.__name__: design for design in wanted}
    pairs = {(design.op, design.backend) for design in by_module.values()}
    times: dict[str, list[Time]] = {design.name: [] for design in by_module.values()}
    left_out: collections.Counter[str] = collections.Counter()
    for path in paths:
        for kernels, seconds, reason in _of_file(path, target, {backend for _, backend in pairs}):
            if kernels and not any((kernel.op, kernel.backend) in pairs for kernel in kernels):
                continue
            found = _time(kernels, seconds, target) if reason is None else reason
            if isinstance(found, str):
                left_out[found] += 1
            elif (design := by_module.get(found[0].__name__)) is not None:
                times[design.name].append(found[1])
    return Measured(times, dict(left_out))


def problems(paths: Iterable[pathlib.Path], target: Chip) -> list[times.Problem]:
    """The problems of benchmarks with the times of all backends in bursts, for `jaxkernels.core.times`.

    Sides that were looked at once count: slow sides are looked at only. If several rows have one problem, the last one
    counts.

    Raises:
      InputError: a file is missing, holds something else, or has no time of one kernel on this chip.
    """
    found: dict[tuple[str, str], times.Problem] = {}
    for path in paths:
        try:
            run = results.load(path, "tune")
            if run.environment["device"] != str(target):
                raise InputError(f"tune: {path} is of another chip: {run.environment['device']}. Name it with --chip.")
            for row in run.rows:
                if row.regime == "burst" and (problem := _problem_of(row, target)) is not None:
                    found[problem.op, json.dumps(problem.spec)] = problem
        except (KeyError, TypeError, AttributeError) as e:
            raise InputError(
                f"tune: {path} is no benchmark: {type(e).__name__}: {e}. Use a file that `jaxkernels bench --json` "
                "wrote."
            ) from e
    if not found:
        raise InputError("tune: the files have no times of single kernels in bursts. Use rows of gemm or attention.")
    return list(found.values())


def _problem_of(row: Row, target: Chip) -> times.Problem | None:
    """None if several kernels were timed together, or none of a backend."""
    timed = None if suites.registry_name(row.op) is None else _kernels_of(row, target)
    if timed is None or len(timed) != 1:
        return None
    (op, spec), of_backend = timed[0], {}
    for side in row.sides:
        kernels = side.timed if side.is_ours else _of_baseline(timed, side, target)[0]
        # A baseline's program is not quite the backend's: it counts if the backend itself was not timed.
        if len(kernels) == 1 and (side.is_ours or kernels[0].backend not in of_backend):
            of_backend[kernels[0].backend] = (kernels[0].version, kernels[0].config, side.seconds)
    if not of_backend:
        return None
    return times.Problem(op, plain.describe(spec) or {}, of_backend, min(side.seconds for side in row.sides))


#: The kernels of a time, the time in seconds, and the reason why it is not used or None.
_Found = tuple[tuple[TimedKernel, ...], float, str | None]


def _of_file(path: pathlib.Path, target: Chip, backends: set[str]) -> Iterator[_Found]:
    values = results.read(path, "tune")
    try:
        yield from _of_table(values, target) if isinstance(values, list) else _of_benchmark(path, target, backends)
    except (KeyError, TypeError, AttributeError) as e:
        raise InputError(
            f"tune: {path} is neither a benchmark nor a table of winners: {type(e).__name__}: {e}. Use a file that "
            "`jaxkernels bench --json` or `jaxkernels tune --table` wrote."
        ) from e


def _of_table(entries: list[dict[str, Any]], target: Chip) -> Iterator[_Found]:
    for entry in entries:
        key = entry["key"]
        if key["backend"] not in dispatch.backend_names():  # The fastest backend, not a configuration.
            continue
        kernel = TimedKernel(key["op"], key["backend"], key["version"], entry["winner"], key["spec"])
        is_same = (key["device"], key["num_sms"]) == (target.name, target.num_sms)
        yield (kernel,), entry["seconds"], None if is_same else f"of another chip: {key['device']}"


def _of_benchmark(path: pathlib.Path, target: Chip, backends: set[str]) -> Iterator[_Found]:
    run = results.load(path, "tune")
    device = run.environment["device"]
    for row in run.rows:
        timed = functools.cache(functools.partial(_kernels_of, row, target))
        for side in row.sides:
            if not side.is_ours and side.name not in backends:
                continue
            reason = None
            if device != str(target):
                reason = f"of another chip: {device}"
            elif row.regime != "burst":
                reason = f"of the {row.regime} regime"
            elif not side.is_ours:
                yield _of_baseline(timed(), side, target)
                continue
            elif side.samples is None:
                reason = "of a side that was only looked at once"
            elif not side.timed:
                reason = "without a record of the kernel: the file is older, or it is a training step"
            yield side.timed, side.seconds, reason


def _of_baseline(kernels: list[tuple[str, Any]] | None, side: Side, target: Chip) -> _Found:
    """The time of a baseline as one of the backend of its name. A side that was looked at once counts: slow baselines
    are looked at only, and they show what is slow.

    Args:
      kernels: those of the row (`_kernels_of`).
    """
    if kernels is None:
        return (), side.seconds, "of a baseline, for a problem that no suite has"
    found = [
        TimedKernel(op, side.name, backend.version, backend.encode(config), plain.describe(spec))
        for op, spec in kernels
        if (op, side.name) in dispatch.REGISTRY
        for backend in [dispatch.load(op, side.name)]
        for config in backend.search_space(dataclasses.replace(spec, target=target))
    ]
    reason = None if found else "of a baseline that does not support the problem as a backend"
    return tuple(found), side.seconds, reason


def _kernels_of(row: Row, target: Chip) -> list[tuple[str, Any]] | None:
    """The timed kernels and their specs: of the first side of ours that has a record of them, else by the suites."""
    for side in row.sides:
        if side.timed and all(kernel.spec is not None for kernel in side.timed):
            try:
                return [(k.op, plain.restore(_kind(k.op, target), k.spec or {}, target)) for k in side.timed]
            except ValueError:
                break
    problem = _problems().get(row.problem)
    if problem is None:
        return None
    of_op = registry.OPERATIONS[suites.registry_name(row.op) or ""].kernels
    kernels = kernels_of(problem, "xla", target.platform)
    if len(of_op) == 1:
        return kernels
    # The forward pass of a backward problem is not timed, nor the other way round. The kernel of a forward problem is
    # the first one: that of a gradient's forward pass may follow.
    forward = next(iter(of_op))
    return kernels[:1] if problem.direction == "forward" else [kernel for kernel in kernels if kernel[0] != forward]


@functools.cache
def _problems() -> dict[tuple[str, ...], Problem]:
    return {problem.key(suite.name): problem for suite in suites.all_suites().values() for problem in suite.problems}


def _time(kernels: tuple[TimedKernel, ...], seconds: float, target: Chip) -> tuple[ModuleType, Time] | str:
    """The design and the time, or the reason why it is not used."""
    if len(kernels) != 1:
        return "of several kernels of ours together"
    (kernel,) = kernels
    if (kernel.op, kernel.backend) not in dispatch.REGISTRY:
        return "of a backend that no longer exists"
    backend = dispatch.load(kernel.op, kernel.backend)
    if kernel.version != backend.version:
        return f"of another version of {kernel.op}[{kernel.backend}]"
    if kernel.spec is None:
        return "of a spec that is not kept in files"
    try:
        config = backend.decode(kernel.config)
        spec = plain.restore(_kind(kernel.op, target), kernel.spec, target)
    except (ValueError, TypeError):
        return "of a configuration or spec that the code does not have"
    design = backend.design_of(config)
    if not hasattr(design, "Constants"):
        return f"of a design without constants: {kernel.op}.{kernel.backend}.{dispatch.name_of(design)}"
    if (part := design.not_estimated(spec, config)) is not None:
        return f"of more than the estimate has: {part}"
    return design, Time(spec, config, seconds)


def _kind(op: str, target: Chip) -> type[Any]:
    """The class of an operation's specs."""
    tuning = registry.part(registry.operation_of(op), "tuning")
    if tuning is None:
        raise ValueError(f"{op} has no module `tuning`")
    return type(tuning.probe(target))
