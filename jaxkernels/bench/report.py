"""The benchmark tables of the documentation, written from committed results.

A table stands between two comments, `<!-- benchmark: gemm-square -->` and `<!-- end -->`. The first comment names a
suite. A regime may follow the name; the default is "burst". (Training steps have one regime only.)
`<!-- benchmark: all -->` is a table with one line for each suite of chosen problems. `<!-- sgemm: sgemm.json -->` is
the table of the SGEMM ladder from that file. `<!-- random: gemm-random.json -->` is the summary of the random problems
in that file.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxkernels.bench import losses, random_rows, sgemm
from jaxkernels.bench import results as results_lib
from jaxkernels.bench.results import Results, Row, Side
from jaxkernels.bench.suites import all_suites
from jaxkernels.core.errors import InputError
from jaxkernels.core.measure import REGIMES

__all__ = ["Library", "geometric_mean", "ratios", "render", "summary", "table"]

#: In place of a suite's name: a summary of all suites.
_ALL = "all"

_BLOCK = re.compile(r"(<!-- benchmark: (?P<name>[^>]*?) -->\n)(?P<body>.*?)(<!-- end -->)", re.DOTALL)
_MARKER = re.compile(r"<!-- benchmark: ")
_FILE = re.compile(
    r"(<!-- (?P<what>sgemm|random): (?P<file>[\w.-]+) -->\n)(?P<body>.*?)(?P<end><!-- end -->)", re.DOTALL
)


@dataclasses.dataclass(frozen=True)
class Found:
    """A row, the file it is in, and the run that the file holds."""

    row: Row
    path: pathlib.Path
    run: Results


class Library:
    """The results in a folder, by suite. Each row of a suite is in one file.

    Raises:
      InputError: two files hold the same row, or one cannot be read.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._found: dict[str, dict[tuple[str, ...], Found]] = {}
        for path in sorted(folder.glob("*.json")):
            if not _is_benchmark(path):
                continue
            results = results_lib.load(path)
            for row in results.rows:
                found = self._found.setdefault(row.suite, {}).setdefault(row.key, Found(row, path, results))
                if found.path != path:
                    what = " ".join(row.key)
                    raise InputError(f"report: {what} is in {found.path.name} and in {path.name}. Keep one of them.")

    def __iter__(self) -> Iterator[Row]:
        """All rows."""
        return (found.row for of_suite in self._found.values() for found in of_suite.values())

    def __getitem__(self, suite: str) -> list[Found]:
        """The rows of a suite, in its order."""
        if suite not in self._found:
            known = ", ".join(self._found) or "none"
            raise InputError(f"report: no results of suite {suite!r} in {self.folder}; there are: {known}.")
        problems = all_suites()[suite].problems if suite in all_suites() else ()
        places = {problem.key(suite): i for i, problem in enumerate(problems)}
        return sorted(self._found[suite].values(), key=lambda found: places.get(found.row.problem, len(places)))


def _is_benchmark(path: pathlib.Path) -> bool:
    """Whether a JSON file holds benchmark results. The folder may hold other figures, with other schemas."""
    try:
        values = json.loads(path.read_text())
    except ValueError as e:
        raise InputError(f"report: {path} is not JSON: {e}.") from e
    return isinstance(values, dict) and "schema" in values


def render(text: str, library: Library, *, where: str) -> str:
    """Returns the text with all its tables replaced by current ones.

    Args:
      text: a Markdown document.
      library: the results.
      where: the document's name, for messages.

    Raises:
      InputError: a comment has the wrong form, is not closed, or names a suite or regime without results.
    """
    blocks = len(_BLOCK.findall(text))
    if (markers := len(_MARKER.findall(text))) != blocks:
        raise InputError(f"report: {where} opens {markers} tables and closes {blocks}. Close each with <!-- end -->.")

    def write(match: re.Match[str]) -> str:
        if match["name"] == _ALL:
            return match[1] + summary(library) + match[4]
        suite, *rest = match["name"].split()
        regime = rest[0] if rest else "burst"
        if len(rest) > 1 or regime not in REGIMES:
            raise InputError(f"report: {where}: a table is `SUITE` or `SUITE REGIME`; got {match['name']!r}.")
        found = library[suite]
        if not rest and any(x.row.tokens is not None and x.row.regime == "sustained" for x in found):
            regime = "sustained"  # The steps of a training follow each other.
        rows = [x for x in found if x.row.regime == regime]
        if not rows:
            files = ", ".join(dict.fromkeys(x.path.name for x in found))
            raise InputError(f"report: {files}: no rows of {suite} in the regime {regime}.")
        return match[1] + table(rows) + match[4]

    def write_file(match: re.Match[str]) -> str:
        path = library.folder / match["file"]
        if not path.exists():
            content = "Not measured yet.\n"
        else:
            content = sgemm.table(*sgemm.load(path)) if match["what"] == "sgemm" else _random(path)
        return match[1] + content + match["end"]

    return _FILE.sub(write_file, _BLOCK.sub(write, text))


def _random(path: pathlib.Path) -> str:
    """The summary of the random rows of a file, and the run that measured them."""
    results = results_lib.load(path)
    rows = [row for row in results.rows if random_rows.is_random(row.suite)]
    if not rows:
        raise InputError(f"report: {path} has no random rows. Measure some with `jaxkernels bench --random`.")
    return losses.table(rows) + f"\n{_run(Found(rows[0], path, results))}\n"


def summary(library: Library) -> str:
    """A Markdown table with a line for each suite and backend: geometric mean, smallest and largest ratio."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    chosen = (row for row in library if not random_rows.is_random(row.suite))
    for (suite, regime, backend), found in ratios(chosen).items():
        text = f"{geometric_mean(found):.3f} ({min(found):.2f} to {max(found):.2f}, of {len(found)})"
        cells.setdefault((suite, backend), {})[regime] = text
    lines = [[*key, *(by_regime.get(regime, "-") for regime in REGIMES)] for key, by_regime in cells.items()]
    text = _markdown(["suite", "backend", *REGIMES], lines)
    return text + "\nRatio to the fastest baseline: geometric mean (least to most, of the number of rows).\n"


def ratios(rows: Iterable[Row]) -> dict[tuple[str, str, str], list[float]]:
    """(suite, regime, backend) -> the ratio to the fastest baseline in each row."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        for side in row.ours:
            if (ratio := row.ratio(side)) is not None:
                found.setdefault((row.suite, row.regime, side.name), []).append(ratio)
    return found


def table(found: Sequence[Found]) -> str:
    """Rows of one suite as a Markdown table, with the runs that measured them below it."""
    rows = [x.row for x in found]
    names = list(dict.fromkeys(side.name for row in rows for side in row.ours))
    is_training = rows[0].tokens is not None
    if is_training:
        timed = [side for row in rows for side in row.sides if not side.is_ours and side.samples is not None]
        baselines = list(dict.fromkeys(side.name for side in timed))
        head = ["preset", "dtype", *(f"{name} (baseline)" for name in baselines), *names]
        lines = []
        for row in rows:
            theirs = {side.name: side for side in row.sides if not side.is_ours and side.samples is not None}
            cells = [_step(row, theirs.get(name)) for name in baselines]
            lines.append([row.shape, row.dtype, *cells, *_by_name(row, names, _step)])
    else:
        head = ["shape", "dtype", "fastest baseline", *names]
        lines = [[_shape(row), row.dtype, _baseline(row), *_by_name(row, names, _speed)] for row in rows]
        if any(row.fastest_baseline for row in rows):
            means = [_mean(row.ratio(s) for row in rows for s in row.ours if s.name == name) for name in names]
            lines.append(["geometric mean", "", "", *means])
    return _markdown(head, lines) + "\n" + _sources(found, is_training=is_training)


def _markdown(head: list[str], lines: list[list[str]]) -> str:
    return "".join("| " + " | ".join(cells) + " |\n" for cells in [head, ["---"] * len(head), *lines])


def _by_name(row: Row, names: Sequence[str], show: Callable[[Row, Side | None], str]) -> list[str]:
    ours = {side.name: side for side in row.ours}
    return [show(row, ours.get(name)) for name in names]


def _shape(row: Row) -> str:
    return f"{row.shape} ({row.label})" if row.label else row.shape


def _baseline(row: Row) -> str:
    side = row.fastest_baseline
    return "-" if side is None else f"{side.name} {_tflops(row, side)}"


def _tflops(row: Row, side: Side) -> str:
    """TFLOP/s, or GB/s if memory is the limit."""
    if row.limits is not None and row.limits[1] > row.limits[0]:
        return f"{row.num_bytes / side.seconds / 1e9:,.0f} GB/s"
    return f"{row.flops_per_s(side) / 1e12:.4g}"


def _speed(row: Row, side: Side | None) -> str:
    if side is None:
        return "-"
    ratio, share = row.ratio(side), row.share_of_limit(side)
    notes = ([] if ratio is None else [f"{ratio:.2f} x"]) + ([] if share is None else [f"{share:.0%} of limit"])
    return f"{_tflops(row, side)} ({', '.join(notes)})" if notes else _tflops(row, side)


def _step(row: Row, side: Side | None) -> str:
    if side is None or row.tokens is None:
        return "-"
    seconds, share, ratio = side.seconds, row.share_of_peak(side), row.ratio(side)
    text = f"{seconds * 1e3:.1f} ms, {row.tokens / seconds:,.0f} tokens/s"
    text += "" if share is None else f", MFU {share:.1%}"
    text += "" if side.setting is None else f", {side.setting}"
    text += "" if side.memory_bytes is None else f", {side.memory_bytes / 1e9:.1f} GB"
    return text + (f" ({ratio:.2f} x)" if side.is_ours and ratio is not None else "")


def geometric_mean(values: Iterable[float]) -> float | None:
    """Returns None if there are no values."""
    logarithms = [math.log(value) for value in values]
    return math.exp(math.fsum(logarithms) / len(logarithms)) if logarithms else None


def _mean(ratios: Iterable[float | None]) -> str:
    mean = geometric_mean(ratio for ratio in ratios if ratio is not None)
    return "-" if mean is None else f"{mean:.3f} x"


def _sources(found: Sequence[Found], *, is_training: bool) -> str:
    content = f"{'Step time and speed' if is_training else 'TFLOP/s'}, {found[0].row.regime}"
    runs = collections.Counter(x.path for x in found)
    texts = [_run(next(x for x in found if x.path == path)) for path in runs]
    if len(runs) > 1:
        texts = [f"{n} rows: {text}" for n, text in zip(runs.values(), texts)]
    return f"{content}; x: ratio to the fastest baseline. {' '.join(texts)}\n"


def _run(found: Found) -> str:
    environment = found.run.environment
    machine = [environment["device"], *([f"driver {environment['driver']}"] if environment["driver"] else [])]
    machine += [f"jax {environment['versions']['jax']}", environment["date"][:10]]
    machine += [f"commit {environment['commit'][:12]}"] if environment["commit"] else []
    return f"{', '.join(machine)}; data: {found.path.name}, by `{environment['command']}`."
