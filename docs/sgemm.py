"""Writes the generated parts of docs/sgemm.md, and draws its pictures: `python docs/sgemm.py`.

The section of each rung comes from the table in ffi/sgemm/ladder.py and from the rung's file, as a difference from the
file of an earlier rung. The pictures come from the formulas by which the kernels' threads address memory.
"""

from __future__ import annotations

import difflib
import pathlib
import re
from collections.abc import Callable, Iterable

from jaxkernels.bench import sgemm
from jaxkernels.ffi.sgemm import RUNGS, Rung, lookup

DOCS = pathlib.Path(__file__).parent
PAGE = DOCS / "sgemm.md"
PROFILE = DOCS / "benchmarks" / "sgemm-profile.json"

#: Rung -> the rung that its code is compared with. Others are compared with the one before; None: shown whole.
_BASES = {1: None, 8: 6, 9: 6, 10: 6, 11: 10, 12: 10, 13: None, 15: 13, 16: 15}
_PICTURES = {
    2: ("sgemm-global", "what a warp reads and writes in rungs 1 and 2"),
    7: ("sgemm-banks", "the banks that reads of shared memory use"),
    10: ("sgemm-tiles", "the tiles of a block, a warp and a thread"),
    13: ("sgemm-swizzle", "the units of A in a swizzled slot"),
}
_SECTIONS = re.compile(r"(<!-- rungs -->\n).*?(<!-- end of rungs -->)", re.DOTALL)
_SIGNATURE = re.compile(r"__global__.*?\) \{", re.DOTALL)


# The page.


def sections() -> str:
    """A section for each rung."""
    outcomes = _outcomes()
    return "\n".join(_section(rung, outcomes.get(rung.number)) for rung in RUNGS)


def _outcomes() -> dict[int, str]:
    """Rung -> its speed and what limits it, by the profile."""
    points, _, profiles = sgemm.load(PROFILE)
    found = {profile.rung: profile for profile in profiles}
    return {
        point.rung: f"{point.flops_per_s / 1e12:.3g} TFLOP/s at 4096³, {point.share_of_baseline:.0%} of cuBLAS. "
        f"{found[point.rung].bank_conflicts:,.0f} bank conflicts, occupancy {found[point.rung].occupancy:.0%}, "
        f"limited by {found[point.rung].limit}."
        for point in points
        if point.rung in found
    }


def _section(rung: Rung, outcome: str | None) -> str:
    base = _BASES.get(rung.number, rung.number - 1)
    parts = [
        f"### {rung.number}. {rung.name}\n",
        f"{rung.idea} Prediction: {rung.prediction[0].lower()}{rung.prediction[1:]}\n",
        *([f"Outcome: {outcome}\n"] if outcome else []),
        f"[The file](../ffi/sgemm/{rung.path.name}); default tiles: {rung.config}.\n",
    ]
    if picture := _PICTURES.get(rung.number):
        parts.append(f"![{picture[1]}](pictures/{picture[0]}.svg)\n")
    if base is None:
        code = f"```cuda\n{_code(rung)}```\n"
        what = "The code"
    else:
        lines = difflib.unified_diff(*(_code(r).splitlines() for r in (lookup(base), rung)), lineterm="", n=1)
        code = "```diff\n" + "".join(f"{line}\n" for line in list(lines)[2:]) + "```\n"
        what = f"What differs from rung {base}"
    parts.append(f"<details><summary>{what}</summary>\n\n{code}\n</details>\n")
    return "\n".join(parts)


def _code(rung: Rung) -> str:
    """A rung's file without its first comment, with the same signature in all."""
    lines = rung.path.read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    text = "\n".join(lines[begin:]).strip() + "\n"
    return _SIGNATURE.sub("__global__ void sgemm(a, b, c, m, n, k, alpha, beta) {", text)


def page(text: str) -> str:
    """The page with its sections written anew."""
    return _SECTIONS.sub(lambda match: match[1] + sections() + match[2], text)


# Pictures.

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2", "#ff9da6", "#9d755d")


class _Drawing:
    def __init__(self, width: int, height: int):
        self._size = width, height
        self._parts: list[str] = []

    def rect(self, x: float, y: float, width: float, height: float, fill: str = "none", line: str = "#999") -> None:
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self._parts.append(f'<rect {shape} fill="{fill}" stroke="{line}"/>')

    def text(self, x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> None:
        self._parts.append(f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{text}</text>')

    def svg(self) -> str:
        width, height = self._size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        background = f'<rect width="{width}" height="{height}" fill="white"/>'
        return "\n".join([head, background, *self._parts, "</svg>"]) + "\n"


def global_accesses() -> str:
    """What the first 32 threads read of A and B in one step of k, and write of C, in a corner of 32 x 32 elements."""
    size, cells = 6, 32
    drawing = _Drawing(760, 500)
    for i, (title, place) in enumerate(
        [("Rung 1: lanes are rows", lambda t: (t % 32, t // 32)), ("Rung 2: lanes are columns", lambda t: (0, t % 32))]
    ):
        top = 30 + 240 * i
        drawing.text(10, top - 8, title, 14)
        places = [place(t) for t in range(32)]
        matrices = (
            ("A, at one step of k", {(row, 5) for row, _ in places}),
            ("B, at one step of k", {(5, column) for _, column in places}),
            ("C", set(places)),
        )
        for j, (name, touched) in enumerate(matrices):
            left = 10 + 250 * j
            drawing.rect(left, top, size * cells, size * cells)
            for row, column in touched:
                drawing.rect(left + size * column, top + size * row, size, size, _COLOURS[0], "white")
            # A sector is 32 bytes: 8 elements of a row.
            sectors = len({(row, column // 8) for row, column in touched})
            drawing.text(left, top + size * cells + 16, f"{name}: {sectors} sectors for one instruction of a warp")
    return drawing.svg()


def words_by_bank(addresses: Iterable[tuple[int, int]]) -> dict[int, dict[int, list[int]]]:
    """Bank -> word -> the lanes that read it; of (lane, word) pairs."""
    banks: dict[int, dict[int, list[int]]] = {}
    for lane, word in addresses:
        banks.setdefault(word % 32, {}).setdefault(word, []).append(lane)
    return banks


def conflicts(addresses: Iterable[tuple[int, int]]) -> int:
    """How many words of one bank are needed at once; 1: no conflict."""
    return max(map(len, words_by_bank(addresses).values()))


def reads_of_b() -> dict[str, list[tuple[int, int]]]:
    """What the threads that are served at once read of a row of the tile of B: (lane, word).

    A 16-byte read serves 8 lanes at once, a 4-byte read all 32.
    """
    vector = lambda word: [(lane, word(lane) + j) for lane in range(8) for j in range(4)]
    scalar = lambda word: [(lane, word(lane)) for lane in range(32)]
    return {
        "Rung 6: lanes read 16 bytes at a distance of 8 words": vector(lambda t: t % 16 * 8),
        "Rung 7: lanes read neighbouring words": scalar(lambda t: t % 16),
        "Rung 8: lanes read 4 bytes at a distance of 8 words": scalar(lambda t: t % 16 * 8),
        "Rung 9: lanes read neighbouring units of 16 bytes": vector(lambda t: t % 16 * 4),
    }


def bank_accesses() -> str:
    """The banks that one read of B uses, with the lane at each word."""
    size = 22
    drawing = _Drawing(32 * size + 20, 500)
    top = 30
    for title, addresses in reads_of_b().items():
        depth = conflicts(addresses)
        note = "no conflict" if depth == 1 else f"{depth} words of one bank: {depth} turns"
        drawing.text(10, top - 6, f"{title}: {note}", 14)
        banks = words_by_bank(addresses)
        for bank in range(32):
            x = 10 + size * bank
            for turn in range(depth):
                drawing.rect(x, top + size * turn, size, size)
            for turn, lanes in enumerate(dict(sorted(banks.get(bank, {}).items())).values()):
                drawing.rect(x, top + size * turn, size, size, _COLOURS[lanes[0] % 8], "white")
                drawing.text(x + size / 2, top + size * turn + 15, str(lanes[0]), 11, "middle")
            drawing.text(x + size / 2, top + size * depth + 12, str(bank), 9, "middle")
        top += size * depth + 50
    drawing.text(10, top - 10, "Columns are banks; a cell is a word that is read, with the first lane that reads it.")
    return drawing.svg()


def tiles() -> str:
    """The tile of a block of rung 10, the tile of its first warp, and the results of some lanes."""
    config = lookup("warp_tile").config
    scale = 3
    wm, wn = config.LANES_M * config.TM, config.LANES_N * config.TN
    drawing = _Drawing(2 * scale * config.BN + 60, scale * config.BM + 60)
    drawing.text(10, 20, f"A block: {config.BM} x {config.BN} results, in tiles of warps of {wm} x {wn}", 13)
    for row in range(0, config.BM, wm):
        for column in range(0, config.BN, wn):
            drawing.rect(10 + scale * column, 30 + scale * row, scale * wn, scale * wm)
            warp = row // wm * (config.BN // wn) + column // wn
            drawing.text(16 + scale * column, 46 + scale * row, f"warp {warp}")
    left, zoom = scale * config.BN + 40, scale * config.BM // wm
    drawing.text(left, 20, f"Warp 0: lanes 0 to 7, {config.TM} x {config.TN} results each, in groups of 4 columns", 13)
    drawing.rect(left, 30, zoom * wn, zoom * wm)
    for lane in range(8):
        for group in range(0, config.TN, 4):
            row, column = lane // config.LANES_N * config.TM, lane % config.LANES_N * 4 + group * config.LANES_N
            x, y = left + zoom * column, 30 + zoom * row
            drawing.rect(x, y, 4 * zoom, config.TM * zoom, _COLOURS[lane], "white")
            drawing.text(x + 2 * zoom, y + config.TM * zoom / 2, str(lane), 12, "middle")
    return drawing.svg()


def swizzle() -> str:
    """Where the 16-byte units of 8 rows of A lie in a slot, and which of them lanes 0 to 31 read at k = 0."""
    size = 44
    drawing = _Drawing(8 * size + 20, 8 * size + 90)
    drawing.text(10, 20, "8 rows of A in a slot: a row is 32 banks; u is the unit along k", 13)
    for row in range(8):
        for unit in range(8):
            x, y = 10 + size * (unit ^ row), 30 + size * row
            drawing.rect(x, y, size, size, _COLOURS[0] if unit == 0 else "white")
            drawing.text(x + size / 2, y + size / 2 + 4, f"r{row} u{unit}", 11, "middle")
    drawing.text(10, 8 * size + 52, "Coloured: what a warp reads at k = 0, each row by 4 lanes.")
    drawing.text(10, 8 * size + 70, "All in different banks, so one read takes one turn.")
    return drawing.svg()


PICTURES: dict[str, Callable[[], str]] = {
    "sgemm-global": global_accesses,
    "sgemm-banks": bank_accesses,
    "sgemm-tiles": tiles,
    "sgemm-swizzle": swizzle,
}


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    for name, draw in PICTURES.items():
        (DOCS / "pictures" / f"{name}.svg").write_text(draw())
