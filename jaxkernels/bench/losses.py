"""Where `backend=None` is slower than the best peer: a summary of random rows.

The ratio of a row is the time of the fastest baseline over that of the side `auto`. Below 1, auto lost.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence

from jaxkernels.bench.lowering import AUTO
from jaxkernels.bench.results import Row, Side
from jaxkernels.core import measure

__all__ = [
    "EDGES", "HEAD", "THRESHOLDS", "Group", "auto_ratio", "auto_side", "bars", "groups", "has_better", "histogram",
    "in_program_ratio", "is_below", "loss", "table",
]  # fmt: skip

#: The summary has the share of rows below each. Below the largest, our other backends are timed, too.
THRESHOLDS = (0.97, 0.95)

#: The ratios at which the bins of the histogram begin; one more bin lies before the first.
EDGES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.97, 1.0, 1.03, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)

#: The table names so many of the rows with the lowest ratios.
_NUM_WORST = 10

_BAR_LENGTH = 50


def auto_side(row: Row) -> Side | None:
    """The side of `backend=None`, or None if it was not timed."""
    return next((side for side in row.ours if side.name == AUTO), None)


def auto_ratio(row: Row) -> float | None:
    """How many times as fast as the fastest baseline auto is; None without a baseline or without auto."""
    side = auto_side(row)
    return None if side is None else row.ratio(side)


def is_below(row: Row) -> bool:
    """Whether auto is slower than the fastest baseline by more than the largest of `THRESHOLDS` allows."""
    ratio = auto_ratio(row)
    return ratio is not None and ratio < max(THRESHOLDS)


def in_program_ratio(row: Row) -> float | None:
    """As `auto_ratio`, of programs of several calls; None if they were not timed."""
    auto, baseline = auto_side(row), row.fastest_baseline
    if auto is None or baseline is None or auto.in_program is None or baseline.in_program is None:
        return None
    return baseline.in_program / auto.in_program


def loss(row: Row) -> str | None:
    """Which backend and configuration would have won a row that auto lost, or None if auto lost nothing.

    If none of ours would have won, names the baseline, and those of ours that are faster than auto. The last part is
    the ratio in programs of several calls, if they were timed.
    """
    auto, baseline, ratio = auto_side(row), row.fastest_baseline, auto_ratio(row)
    if auto is None or baseline is None or ratio is None or ratio >= 1:
        return None
    ratios = {side.name: (row.ratio(side) or 0.0, side) for side in row.ours if side is not auto}
    better = sorted((value for value in ratios.values() if value[0] > ratio), key=lambda value: -value[0])
    described = [f"{side.name} {found:.3f} x ({_kernels(side)})" for found, side in better]
    text = f"auto took {_kernels(auto)}: {ratio:.3f} x {baseline.name}; "
    in_program = in_program_ratio(row)
    end = "" if in_program is None else f"; in a program of several calls {in_program:.3f} x {baseline.name}"
    if better and better[0][0] >= 1:
        return f"{text}would have won: {described[0]}{end}"
    return f"{text}fastest: {baseline.name} (a peer){''.join(f', then ours: {x}' for x in described[:1])}{end}"


def has_better(row: Row) -> bool:
    """Whether another backend of ours is faster than auto by more than the largest of `THRESHOLDS` allows."""
    auto = auto_side(row)
    if auto is None or auto.samples is None:
        return False
    others = [side.samples for side in row.ours if side is not auto and side.samples is not None]
    return any(measure.ratio(auto.samples, samples) < max(THRESHOLDS) for samples in others)


def _kernels(side: Side) -> str:
    """Each kernel once, without its operation if there is one kernel only."""
    distinct = list(dict.fromkeys(side.kernels))
    return "; ".join(distinct) if len(distinct) > 1 else "".join(distinct).partition(": ")[2]


@dataclasses.dataclass(frozen=True)
class Group:
    """The ratios of the rows of one kind.

    Attributes:
      kind: "all", or a kind of the rows.
      ratios: those of the rows that have one.
    """

    kind: str
    ratios: tuple[float, ...]

    @property
    def cells(self) -> list[str]:
        """Kind, number of rows, geometric mean, least, most, and the shares below `THRESHOLDS`."""
        numbers = [
            f"{value:.3f}" for value in (statistics.geometric_mean(self.ratios), min(self.ratios), max(self.ratios))
        ]
        shares = [sum(ratio < limit for ratio in self.ratios) / len(self.ratios) for limit in THRESHOLDS]
        return [self.kind, str(len(self.ratios)), *numbers, *(f"{share:.1%}" for share in shares)]


#: The names of `Group.cells`.
HEAD = ("kind", "rows", "geometric mean", "least", "most", *(f"below {limit}" for limit in THRESHOLDS))


def groups(rows: Iterable[Row]) -> list[Group]:
    """The rows in all, then by kind, in the order of the kinds' names. A kind without a ratio has no group."""
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        if (ratio := auto_ratio(row)) is not None:
            for kind in ("all", *row.kinds):
                by_kind.setdefault(kind, []).append(ratio)
    names = sorted(by_kind, key=lambda kind: (kind != "all", kind))
    return [Group(kind, tuple(by_kind[kind])) for kind in names]


def histogram(rows: Iterable[Row]) -> Iterator[tuple[str, int]]:
    """The bins of `EDGES`, and the number of rows in each."""
    counts = [0] * (len(EDGES) + 1)
    for row in rows:
        if (ratio := auto_ratio(row)) is not None:
            counts[bisect.bisect_right(EDGES, ratio)] += 1
    ends = [f"below {EDGES[0]:g}", *(f"{a:g} to {b:g}" for a, b in itertools.pairwise(EDGES)), f"from {EDGES[-1]:g}"]
    yield from zip(ends, counts, strict=True)


def table(rows: Sequence[Row]) -> str:
    """Markdown: the summary by kind, the histogram, and the worst rows with what would have won."""
    found = groups(rows)
    if not found:
        return "No row has both a time of auto and of a peer.\n"
    lines = [HEAD, ["---"] * len(HEAD), *(group.cells for group in found)]
    text = "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
    without = len(rows) - len(found[0].ratios)
    text += f"\nRatio of `backend=None` to the fastest peer. Rows without a peer, or without auto: {without}.\n"
    text += f"Rows in which another backend of ours is more than 3 % faster than auto: {sum(map(has_better, rows))}.\n"
    if lost := [ratio for row in rows if is_below(row) and (ratio := in_program_ratio(row)) is not None]:
        text += (
            f"Rows below {max(THRESHOLDS)} that were also timed in programs of several calls: {len(lost)}. "
            f"Of these, not below {max(THRESHOLDS)} there: {sum(ratio >= max(THRESHOLDS) for ratio in lost)}.\n"
        )
    text += "\n```\n" + "".join(f"{line}\n" for line in bars(rows)) + "```\n"
    worst = sorted((row for row in rows if loss(row) is not None), key=lambda row: auto_ratio(row) or 0.0)[:_NUM_WORST]
    if worst:
        text += f"\nThe {len(worst)} lowest ratios:\n\n"
        text += "".join(f"- {row.label} {row.shape} {row.dtype}: `{loss(row)}`\n" for row in worst)
    return text


def bars(rows: Iterable[Row]) -> Iterator[str]:
    """The histogram as lines of text."""
    bins = list(histogram(rows))
    largest = max(count for _, count in bins)
    for name, count in bins:
        bar = "#" * (-(-count * _BAR_LENGTH // largest) if largest else 0)
        yield f"{name:<12} {count:5}  {bar}".rstrip()
