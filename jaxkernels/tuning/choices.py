"""How good the choice of a backend by corrected estimates is, by cross-validation, for `jaxkernels tune --times`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxkernels.core import times
from jaxkernels.core.hardware import Chip

__all__ = ["FOLDS", "Validation", "validate"]

#: Parts of the problems: the backend of each part's problems is chosen by the times of the others.
FOLDS = 10


@dataclasses.dataclass(frozen=True)
class Validation:
    """How fast the chosen backends are, relative to the fastest way that was measured: geometric means.

    Attributes:
      op: the kernel.
      num_problems: problems with several backends.
      corrected: if the least corrected estimate chooses, and the problem's own times are left out.
      estimated: if the least estimate chooses.
      best: if each problem had its fastest backend of ours.
    """

    op: str
    num_problems: int
    corrected: float
    estimated: float
    best: float

    def __str__(self) -> str:
        return (
            f"{self.op}: {self.num_problems} problems. Speed of the chosen backend relative to the fastest way "
            f"(geometric mean):\n  {self.corrected:.3f} by corrected estimates, the problem's own times left out\n"
            f"  {self.estimated:.3f} by estimates alone\n  {self.best:.3f} if the fastest backend were known"
        )


def validate(op: str, problems: Sequence[times.Problem], chip: Chip) -> Validation | None:
    """None with too few problems."""
    measured = [(problem, times.errors_of(op, problem, chip)) for problem in problems]
    measured = [(problem, errors) for problem, errors in measured if len(errors) > 1]  # There is a choice.
    if len(measured) < times.ENOUGH:
        return None
    corrected, estimated, best = [], [], []
    order = np.random.default_rng(0).permutation(len(measured)).tolist()
    for part in range(FOLDS):
        held_out = set(order[part::FOLDS])
        others = [measured[i][1] for i in order if i not in held_out]
        keys = {key for i in held_out for key in measured[i][1]}
        regressions = {
            key: times.regression_of(others, *key) or times.regression_of(others, key[0]) for key in sorted(keys)
        }
        for problem, errors in (measured[i] for i in held_out):
            seconds = {key: problem.times[key[0]][2] for key in errors}
            estimates = {key: seconds[key] / math.exp(error) for key, (_, error) in errors.items()}
            predicted = {
                key: estimates[key] * math.exp(regression(point))
                for key, (point, _) in errors.items()
                if (regression := regressions[key]) is not None
            }
            corrected.append(problem.fastest / seconds[_chosen(predicted or estimates)])
            estimated.append(problem.fastest / seconds[min(estimates, key=lambda key: estimates[key])])
            best.append(problem.fastest / min(seconds.values()))
    mean = lambda ratios: math.exp(float(np.mean(np.log(ratios))))
    return Validation(op, len(measured), mean(corrected), mean(estimated), mean(best))


def _chosen(seconds: Mapping[tuple[str, str], float]) -> tuple[str, str]:
    by_backend = {key[0]: key for key in seconds}
    return by_backend[times.least({key[0]: value for key, value in seconds.items()})]
