"""Times of similar problems correct the estimates of cost models.

A cost model knows tiles, waves and bytes. It does not know what XLA fuses, which kernel cuBLAS takes, or what a pass
costs that pads an operand. `backend=None` compares the backends of an operation, so that such errors choose a slow one.
Therefore each estimate is multiplied by a correction that was learned from measured times:

    corrected = estimate(spec, config) * exp(f(point))

f is a Gaussian process regression ("kriging") of log(time / estimate), one for each design. The covariance of two
points is

    VARIANCE * exp(-|x - y| / LENGTH)        Matern, 1/2

with their Euclidean distance. A point has the features of the problem and of the configuration (`features` in
ops/<op>/tuning.py), and how the estimate compares with those of the other backends: where cost models disagree, one of
them is wrong. Near a measured problem the correction is that of the problem; far from all of them it is the mean. So a
wrong cost model costs little where problems were measured, and a right one helps between them.

Corrected estimates of products still have median errors of 5 to 10 %. A backend takes the place of XLA only if it is
estimated to be faster by more than `MARGIN`.

The times are in `tables/times/<chip>.json`, one problem a line, with the version of each kernel. Times of another
version do not count. Times of an H100, which counts as an H200, count beside those of an H200. A design with times of
fewer than `ENOUGH` problems takes the correction of all designs of its backend. `jaxkernels tune --times` makes the
table of files of `jaxkernels bench --json`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxkernels.core import hardware, plain, winners
from jaxkernels.core.hardware import Chip

__all__ = [
    "ENOUGH", "MARGIN", "Errors", "Estimate", "Problem", "Regression", "as_measured", "corrections_of", "covers",
    "errors_of", "least", "measured_backends", "read", "regression_of", "table_of", "write",
]  # fmt: skip

#: Problems that a regression needs.
ENOUGH = 10

#: By how much a backend must be estimated to be faster than XLA. By cross-validation, 5 % leaves 13.6 % of the drawn
#: products and 18.6 % of the drawn gradients of attentions below 0.95 of the fastest peer, no margin 14.1 % and 20.4 %.
#: The geometric means differ by less than 1 %.
MARGIN = 0.05

#: The variance of corrections, the distance of points at which their covariance falls to 1/e, and the variance of what
#: points do not say. Chosen by cross-validation (`jaxkernels tune --times`). Factors of two around them change the
#: result by less than 1 %.
_VARIANCE = 1.0
_LENGTH = 64.0
_NOISE = 0.01

#: The distance of two points that differ only in the estimate, by a factor of two relative to the other backends'.
_RELATIVE = 5.0

#: An extra of the package: its estimates do not count in the mean that estimates are relative to. So the estimates of
#: the other backends are the same with and without it.
_EXTRA = "triton"

#: In place of a design's name: all designs of a backend.
_ALL = None

#: (backend, design) -> a point, and log(time / estimate) there.
Errors = dict[tuple[str, str], tuple[tuple[float, ...], float]]

_TABLES = pathlib.Path(__file__).parent / "tables" / "times"

#: Chip -> the chip that it counts as, estimates too: the same SMs. Its memory is slower, as some cost models know.
_STAND_INS = {"NVIDIA H100 80GB HBM3": "NVIDIA H200"}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a cost model says of a problem.

    Attributes:
      backend, design: whose cost model.
      config: the configuration.
      seconds: the estimate.
    """

    backend: str
    design: str
    config: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Problem:
    """The measured times of one problem.

    Attributes:
      op: the kernel's name in the registry.
      spec: the problem, as `plain.describe` has it.
      times: backend -> its version, its configuration as `dispatch.Backend.encode` has it, and seconds.
      fastest: seconds of the fastest way that was measured, by ours or by others.
    """

    op: str
    spec: Mapping[str, Any]
    times: Mapping[str, tuple[int, Mapping[str, Any], float]]
    fastest: float


class Regression:
    """A Gaussian process with a constant mean: `regression(x)` is the expected value at x.

    It uses no BLAS. BLAS starts a thread for each core of the host, and programs are compiled in many processes: where
    a container has fewer cores than its host, so many threads wait for each other for minutes.
    """

    def __init__(self, points: Sequence[Sequence[float]], values: Sequence[float]) -> None:
        """Args:
        points: (N, D).
        values: (N,) what was observed there.
        """
        self._points, observed = np.asarray(points, np.float64), np.asarray(values, np.float64)
        self._mean = float(np.mean(observed))
        covariance = _covariance(self._points, self._points) + _NOISE * np.eye(len(observed))
        self._weights = _solved(covariance, observed - self._mean)

    def __call__(self, point: Sequence[float]) -> float:
        row = _covariance(np.asarray(point, np.float64)[None], self._points)[0]
        return self._mean + float(np.sum(row * self._weights))


def _covariance(xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
    squares = np.zeros((len(xs), len(ys)))
    for x, y in zip(xs.T, ys.T):
        squares += (x[:, None] - y[None]) ** 2
    return _VARIANCE * np.exp(-np.sqrt(squares) / _LENGTH)


def _solved(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The solution of matrix * x = values for a positive definite matrix, by Cholesky's decomposition."""
    lower, x = matrix.copy(), values.copy()
    for j in range(len(x)):
        lower[j:, j] -= np.einsum("ij,j->i", lower[j:, :j], lower[j, :j])
        lower[j:, j] /= math.sqrt(lower[j, j])
    for j in range(len(x)):
        x[j] = (x[j] - np.sum(lower[j, :j] * x[:j])) / lower[j, j]
    for j in reversed(range(len(x))):
        x[j] = (x[j] - np.sum(lower[j + 1 :, j] * x[j + 1 :])) / lower[j, j]
    return x


def least(seconds: Mapping[str, float], margin: float = MARGIN) -> str:
    """The backend with the least time: XLA, unless another one is faster by more than the margin."""
    return min(seconds, key=lambda backend: seconds[backend] * (1 if backend == "xla" else 1 + margin))


def as_measured(spec: Any) -> Any:
    """The spec on the chip whose times correct its estimates."""
    return dataclasses.replace(spec, target=_measured_on(spec.target))


def covers(op: str, spec: Any) -> bool:
    """Whether estimates of a problem can be corrected: its sizes are known, and its kind has features."""
    return plain.describe(spec) is not None and _features(op, spec, None) is not None


def corrections_of(op: str, spec: Any, estimates: Sequence[Estimate]) -> dict[str, float]:
    """Backend -> the logarithm of time / estimate that is expected, for one estimate of each backend.

    A backend is missing without enough times of problems on the spec's chip. `covers` must hold, and the estimates must
    be of the spec that `as_measured` returns.
    """
    regressions = {
        x.backend: _regression(op, x.backend, x.design, spec.target) or _regression(op, x.backend, _ALL, spec.target)
        for x in estimates
    }
    measured = [x for x in estimates if regressions[x.backend] is not None]
    found = {}
    for estimate, point in zip(measured, _points(op, spec, measured)):
        if (regression := regressions[estimate.backend]) is not None:
            found[estimate.backend] = regression(point)
    return found


def _features(op: str, spec: Any, config: Any) -> tuple[float, ...] | None:
    """The features of a problem and of a configuration; None for kinds of problems that have none."""
    from jaxkernels.core import registry  # Its modules import dispatch, which imports this one.

    features = getattr(registry.part(registry.operation_of(op), "tuning"), "features", None)
    return None if features is None else features(op, spec, config)


def _points(op: str, spec: Any, estimates: Sequence[Estimate]) -> list[tuple[float, ...]]:
    """Where estimates lie among others; empty for kinds of problems that have no features."""
    logarithms = [math.log2(estimate.seconds) for estimate in estimates]
    compared = [x for estimate, x in zip(estimates, logarithms) if estimate.backend != _EXTRA] or logarithms
    points = []
    for estimate, logarithm in zip(estimates, logarithms):
        if (features := _features(op, spec, estimate.config)) is None:
            return []
        points.append((*features, _RELATIVE * (logarithm - sum(compared) / len(compared))))
    return points


@functools.lru_cache(maxsize=256)
def _regression(op: str, backend: str, design: str | None, chip: Chip) -> Regression | None:
    return regression_of(_errors(op, chip), backend, design)


@functools.lru_cache(maxsize=64)
def _errors(op: str, chip: Chip) -> list[Errors]:
    return [errors_of(op, problem, chip) for problem in table_of(chip) if problem.op == op]


def _measured_on(chip: Chip) -> Chip:
    """The chip whose times correct the estimates of this one."""
    return hardware.lookup(_STAND_INS[chip.name]) if chip.name in _STAND_INS else chip


def regression_of(errors: Iterable[Errors], backend: str, design: str | None = None) -> Regression | None:
    """The regression of the errors of a design, or of all designs of a backend; None with too few.

    Args:
      errors: those of measured problems (`errors_of`).
    """
    found = [
        error
        for of_problem in errors
        for (name, of_design), error in of_problem.items()
        if name == backend and design in (of_design, _ALL)
    ]
    return Regression(*zip(*found)) if len(found) >= ENOUGH else None


def errors_of(op: str, problem: Problem, chip: Chip) -> Errors:
    """(backend, design) -> where the estimate of a problem lies, and log(time / estimate)."""
    from jaxkernels.core import dispatch, registry

    tuning = registry.part(registry.operation_of(op), "tuning")
    assert tuning is not None
    try:
        spec = plain.restore(type(tuning.probe(chip)), dict(problem.spec), chip)
    except ValueError:
        return {}  # An older version described it.
    estimates, measured = [], []
    for name, (version, values, seconds) in problem.times.items():
        if (op, name) not in dispatch.REGISTRY:
            continue
        backend = dispatch.load(op, name)
        if version != backend.version:
            continue
        try:
            config = backend.decode(dict(values))
        except ValueError:
            continue
        estimate = backend.estimate(spec, config)
        if estimate is not None and 0 < estimate < math.inf:
            estimates.append(Estimate(name, dispatch.name_of(backend.design_of(config)), config, estimate))
            measured.append(seconds)
    return {
        (estimate.backend, estimate.design): (point, math.log(seconds / estimate.seconds))
        for estimate, point, seconds in zip(estimates, _points(op, spec, estimates), measured)
    }


def measured_backends(chip: Chip) -> set[str]:
    """Backends with times on this very chip."""
    return {name for problem in _own_table(chip.name) for name in problem.times}


def table_of(chip: Chip) -> tuple[Problem, ...]:
    """The problems that the package has times of, on a chip and on those that count as the same."""
    name = _measured_on(chip).name
    same = [other for other, measured in _STAND_INS.items() if measured == name]
    return tuple(problem for chip_name in (name, *same) for problem in _own_table(chip_name))


def _own_table(chip_name: str) -> tuple[Problem, ...]:
    return _read_table(_TABLES / f"{winners.slug(chip_name)}.json")


@functools.cache
def _read_table(path: pathlib.Path) -> tuple[Problem, ...]:
    try:
        return read(path)
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as e:
        warnings.warn(f"times: ignored {path}: {e}. Install jaxkernels anew.", stacklevel=2)
        return ()


def read(path: pathlib.Path) -> tuple[Problem, ...]:
    """Reads a table.

    Raises:
      OSError: the file cannot be read.
      ValueError: it is no table of times.
    """
    try:
        entries = json.loads(path.read_text())
        return tuple(
            Problem(
                str(entry["op"]),
                entry["spec"],
                {
                    str(backend): (int(version), dict(config), float(seconds))
                    for backend, (version, config, seconds) in entry["times"].items()
                },
                float(entry["fastest"]),
            )
            for entry in entries
        )
    except (TypeError, KeyError, AttributeError, ValueError) as e:
        raise ValueError("it is no table of times") from e


def write(path: pathlib.Path, problems: Iterable[Problem]) -> None:
    """Writes a table: one problem a line.

    Raises:
      OSError: the file cannot be written.
    """
    lines = [json.dumps(dataclasses.asdict(problem), separators=(",", ":")) for problem in problems]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
