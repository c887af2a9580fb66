"""Fits the constants of cost models to measured times, for `jaxkernels tune --calibrate`.

The constants of a design (`Constants` in `jaxkernels.core.dispatch`) are fitted to the times of its kernels: least
squares of log(estimate / time) over the logarithms of the constants, so that an error of 10 % counts the same for short
and long kernels, and constants stay positive. Residuals beyond the usual spread count by their size and not by its
square (Huber's loss): a few wrong times change little. A weak prior holds each constant near its value in the code:
where times say little, it stays there. `jaxkernels.bench.measured` reads the times.

A constant that the times do not determine keeps its value: no estimate depends on it, or its standard error is above
`MAX_STANDARD_ERROR`, because it has little effect, or the same effect as another one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["FOLDS", "MAX_STANDARD_ERROR", "Errors", "Fit", "Time", "fit", "too_few"]

#: Parts of the problems in the cross-validation: each is estimated with constants fitted to the others.
FOLDS = 5
#: The largest standard error of the logarithm of a constant that is fitted, and the standard deviation of the prior.
MAX_STANDARD_ERROR = 0.5

#: Huber's loss is linear from this multiple of the spread on.
_HUBER = 1.345
#: The median of |x| of a normal distribution with standard deviation 1.
_NORMAL_MEDIAN = 0.6745
#: A spread of the residuals' logarithms that times have in any case.
_LEAST_SPREAD = 0.005
#: The step of a numeric derivative, in logarithms.
_STEP = 1e-4
#: A derivative d log(estimate) / d log(constant) below this counts as zero.
_ZERO = 1e-6
_MAX_ITERATIONS = 100
_MAX_DAMPING = 1e8
#: Significant digits of a fitted constant.
_DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Time:
    """One measured time.

    Attributes:
      spec: the problem of the kernel; times of one spec stay in one part of the cross-validation.
      config: the configuration.
      seconds: the time.
    """

    spec: Hashable
    config: Any
    seconds: float


@dataclasses.dataclass(frozen=True)
class Errors:
    """Median and 90th percentile of |log(estimate / time)|, natural logarithm."""

    median: float
    p90: float

    @classmethod
    def of(cls, residuals: np.ndarray) -> Errors:
        return cls(*(float(x) for x in np.quantile(np.abs(residuals), (0.5, 0.9))))


@dataclasses.dataclass(frozen=True)
class Fit:
    """Fitted constants.

    Attributes:
      old, new: the constants before and after, of a design's class `Constants`.
      standard_errors: fitted constant -> the standard error of its logarithm.
      kept: constant that keeps its value -> the reason.
      before, after: the errors of both.
      validated: the errors of estimates with constants that were fitted to the other problems.
      num_times, num_problems: the times and their specs.
    """

    old: Any
    new: Any
    standard_errors: Mapping[str, float]
    kept: Mapping[str, str]
    before: Errors
    after: Errors
    validated: Errors
    num_times: int
    num_problems: int

    @property
    def is_better(self) -> bool:
        """Whether constants that were fitted to other problems estimate better than the old ones, by both errors."""
        return self.validated.median <= self.before.median and self.validated.p90 <= self.before.p90

    def __str__(self) -> str:
        rows = {
            "constants in the code": self.before,
            "fitted": self.after,
            f"fitted to the other problems ({FOLDS} parts)": self.validated,
        }
        width = max(map(len, rows))
        lines = [f"  {'|log(estimate / time)|':{width}}  median  90th percentile"]
        lines += [f"  {name:{width}}  {errors.median:6.3f}  {errors.p90:6.3f}" for name, errors in rows.items()]
        lines += [f"  kept {name}: {reason}" for name, reason in self.kept.items()]
        if not self.is_better:
            lines.append("  The fitted constants do not estimate other problems better. Keep those in the code.")
        return "\n".join([*lines, self.as_python()])

    def as_python(self) -> str:
        """The constants as text that replaces `CONSTANTS` in the design."""
        lines = ["CONSTANTS = Constants("]
        for name, old in dataclasses.asdict(self.old).items():
            if name in self.kept:
                lines.append(f"    {name}={_literal(old)},")
            else:
                error = f"standard error {self.standard_errors[name]:.1%}"
                lines.append(f"    {name}={_literal(getattr(self.new, name))},  # was {_literal(old)}; {error}")
        return "\n".join([*lines, ")"])


def _literal(value: float) -> str:
    """A float as Python text: 7.6e12."""
    text = f"{value:.{_DIGITS}g}"
    if float(text) != value:
        text = repr(value)
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa}e{int(exponent)}" if e else repr(float(text))


def too_few(constants: Any, times: Sequence[Time]) -> str | None:
    """Why there are too few times for a fit, or None."""
    num_problems, num_constants = len({time.spec for time in times}), len(dataclasses.fields(constants))
    if num_problems < 2 * FOLDS:
        return f"a fit needs times of at least {2 * FOLDS} problems, there are {num_problems}"
    if len(times) <= num_constants:
        return f"a fit of {num_constants} constants needs more times than that, there are {len(times)}"
    return None


def fit(estimate: Callable[[Any, Any, Any], float], constants: Any, times: Sequence[Time]) -> Fit:
    """Fits constants to times.

    Args:
      estimate: the cost model: (spec, config, constants) -> seconds.
      constants: a dataclass of positive floats: where the search starts, and the values of what is not fitted.
      times: the times; see `too_few`.
    """
    new, standard_errors, kept = _fitted(estimate, constants, times)
    problems = list(dict.fromkeys(time.spec for time in times))
    order = np.random.default_rng(0).permutation(len(problems))
    part_of = {problems[i]: place % FOLDS for place, i in enumerate(order)}
    residuals = []
    for part in range(FOLDS):
        others = [time for time in times if part_of[time.spec] != part]
        held_out = [time for time in times if part_of[time.spec] == part]
        residuals.append(_residuals(estimate, _fitted(estimate, constants, others)[0], held_out))
    return Fit(
        old=constants,
        new=new,
        standard_errors=standard_errors,
        kept=kept,
        before=Errors.of(_residuals(estimate, constants, times)),
        after=Errors.of(_residuals(estimate, new, times)),
        validated=Errors.of(np.concatenate(residuals)),
        num_times=len(times),
        num_problems=len(problems),
    )


def _residuals(estimate: Callable[[Any, Any, Any], float], constants: Any, times: Sequence[Time]) -> np.ndarray:
    """log(estimate / time) of each time; NaN where the estimate is not positive."""
    estimates = np.array([estimate(time.spec, time.config, constants) for time in times])
    return np.log(np.where(estimates > 0, estimates, math.nan)) - np.log([time.seconds for time in times])


def _fitted(
    estimate: Callable[[Any, Any, Any], float], constants: Any, times: Sequence[Time]
) -> tuple[Any, dict[str, float], dict[str, str]]:
    """The fitted constants, the standard errors of their logarithms, and the constants that are not fitted."""
    start = {name: math.log(value) for name, value in dataclasses.asdict(constants).items()}
    kept: dict[str, str] = {}
    logs = dict(start)

    def residuals(logs: Mapping[str, float]) -> np.ndarray:
        fitted = {name: math.exp(x) for name, x in logs.items() if name not in kept}
        return _residuals(estimate, dataclasses.replace(constants, **fitted), times)

    while True:
        free = [name for name in start if name not in kept]
        slopes = _slopes(residuals, logs, free)
        without_effect = [name for name, column in zip(free, slopes.T) if np.all(np.abs(column) < _ZERO)]
        if not without_effect:
            logs, slopes = _minimised(residuals, logs, start, free)
            errors = _standard_errors(residuals(logs), slopes)
            if not free or max(errors) <= MAX_STANDARD_ERROR:
                break
            worst = int(np.argmax(errors))
            size = f"{errors[worst]:.0%}" if errors[worst] < 10 else "above 1000%"
            kept[free[worst]] = f"its standard error would be {size}"
            logs[free[worst]] = start[free[worst]]
        else:
            kept |= dict.fromkeys(without_effect, "no estimate depends on it")
            logs |= {name: start[name] for name in without_effect}
    rounded = {name: float(f"{math.exp(logs[name]):.{_DIGITS}g}") for name in free}
    return dataclasses.replace(constants, **rounded), dict(zip(free, map(float, errors))), kept


def _slopes(
    residuals: Callable[[Mapping[str, float]], np.ndarray], logs: Mapping[str, float], free: Sequence[str]
) -> np.ndarray:
    """d residual / d log(constant), (times, constants), by central differences."""
    if not free:
        return np.zeros((len(residuals(logs)), 0))
    columns = []
    for name in free:
        above, below = (residuals({**logs, name: logs[name] + step}) for step in (_STEP, -_STEP))
        columns.append((above - below) / (2 * _STEP))
    return np.nan_to_num(np.stack(columns, axis=1))


def _minimised(
    residuals: Callable[[Mapping[str, float]], np.ndarray],
    logs: Mapping[str, float],
    prior: Mapping[str, float],
    free: Sequence[str],
) -> tuple[dict[str, float], np.ndarray]:
    """The logarithms of the constants with the least loss, and the slopes there: Levenberg and Marquardt's steps."""
    logs, found = dict(logs), residuals(logs)
    distance = lambda logs: np.array([logs[name] - prior[name] for name in free])
    slopes, damping = _slopes(residuals, logs, free), 1e-3
    for _ in range(_MAX_ITERATIONS if free else 0):
        spread = _spread(found)
        weighted = slopes * _weights(found, spread)[:, None]
        pull = (spread / MAX_STANDARD_ERROR) ** 2
        normal = weighted.T @ slopes + pull * np.eye(len(free))
        gradient = weighted.T @ found + pull * distance(logs)
        loss = lambda logs, found: _loss(found, spread) + pull / 2 * float(np.sum(distance(logs) ** 2))  # noqa: B023
        step = np.zeros(len(free))
        while damping < _MAX_DAMPING:
            step = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
            trial = logs | {name: logs[name] + float(x) for name, x in zip(free, np.clip(step, -1, 1))}
            tried = residuals(trial)
            if loss(trial, tried) < loss(logs, found):
                logs, found, damping = trial, tried, max(damping / 10, 1e-9)
                break
            damping *= 10
        else:
            break
        slopes = _slopes(residuals, logs, free)
        if np.max(np.abs(step)) < 1e-6:
            break
    return logs, slopes


def _spread(residuals: np.ndarray) -> float:
    """A standard deviation that a few outliers do not change."""
    return max(float(np.median(np.abs(residuals))) / _NORMAL_MEDIAN, _LEAST_SPREAD)


def _weights(residuals: np.ndarray, spread: float) -> np.ndarray:
    """Weights with which least squares have the gradient of Huber's loss."""
    return np.minimum(1, _HUBER * spread / np.maximum(np.abs(residuals), 1e-300))


def _loss(residuals: np.ndarray, spread: float) -> float:
    if not np.all(np.isfinite(residuals)):
        return math.inf
    size, limit = np.abs(residuals), _HUBER * spread
    return float(np.sum(np.where(size <= limit, size**2 / 2, limit * (size - limit / 2))))


def _standard_errors(residuals: np.ndarray, slopes: np.ndarray) -> np.ndarray:
    """Standard errors of the logarithms; those of constants with the same effect are large."""
    num_times, num_free = slopes.shape
    spread = _spread(residuals)
    weights = _weights(residuals, spread)
    variance = np.sum(weights * residuals**2) / max(num_times - num_free, 1)
    normal = (slopes * weights[:, None]).T @ slopes
    values, vectors = np.linalg.eigh(normal)
    values = np.maximum(values, 1e-12 * max(values, default=1.0))
    return np.sqrt(max(variance, _LEAST_SPREAD**2) * np.sum(vectors**2 / values, axis=1))
