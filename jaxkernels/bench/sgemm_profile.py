"""What limits each rung of the SGEMM ladder, by Nsight Compute (`ncu`).

    for profile in profile((4096, 4096, 4096), [13, 16]):
        print(profile)

A child process launches each rung once under `ncu`, which replays the kernel for each group of counters. Clocks are not
locked.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence

from jaxkernels.core.errors import InputError
from jaxkernels.ffi.sgemm import lookup, sgemm

__all__ = ["Profile", "parse", "profile"]

Size = tuple[int, int, int]

_OCCUPANCY = "sm__warps_active.avg.pct_of_peak_sustained_active"
_CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
#: Unit -> the counter of its utilisation, in percent of the peak.
_UNITS = {
    "FMA pipe": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "shared memory": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
    "L2": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "DRAM": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
}
_STALL = re.compile(r"smsp__average_warps_issue_stalled_(?P<reason>\w+?)_per_issue_active\.ratio")
_NO_STALLS = ("selected", "not_selected")
#: If no unit is busier, the most frequent reason of stalls is the limiter.
_BUSY_PERCENT = 60.0
_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Profile:
    """What a rung was limited by.

    Attributes:
      size: "MxNxK".
      rung: its number.
      name: its name.
      bank_conflicts: turns of shared memory that bank conflicts added, of all SMs.
      occupancy: warps on an SM, as a share of the most that it can hold.
      limiter: the unit with the highest utilisation, or the most frequent reason of stalls.
      utilisation: that unit's share of its peak; None for a stall.
    """

    size: str
    rung: int
    name: str
    bank_conflicts: int
    occupancy: float
    limiter: str
    utilisation: float | None

    @property
    def limit(self) -> str:
        """The limiter, with its utilisation."""
        return self.limiter if self.utilisation is None else f"{self.limiter}, {self.utilisation:.0%} of its peak"


def profile(size: Size, rungs: Sequence[int]) -> list[Profile]:
    """Profiles rungs at one size.

    Raises:
      InputError: `ncu` is missing, may not read the counters, or fails.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise InputError("study: --profile needs Nsight Compute; found no ncu in PATH. Install it, or leave it out.")
    text = "x".join(map(str, size))
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "ncu.csv"
        command = [ncu, "--clock-control", "none", "--replay-mode", "kernel", "--target-processes", "all"]
        command += ["--kernel-name", "regex:^sgemm_", "--section", "WarpStateStats"]
        command += ["--metrics", ",".join((_OCCUPANCY, _CONFLICTS, *_UNITS.values()))]
        command += ["--csv", "--page", "raw", "--log-file", str(log)]
        command += [sys.executable, "-m", __name__, text, ",".join(map(str, rungs))]
        # ncu saves and restores the child's GPU memory for each pass of a replay. By default JAX preallocates 75 % of
        # the GPU's memory: copies of that took more than 200 s on an H200 (2026-11-26).
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        try:
            child = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            raise InputError(f"study: --profile took more than {_SECONDS} s. Use smaller --shapes.") from None
        said = (log.read_text() if log.exists() else "") + child.stdout + child.stderr
    if "ERR_NVGPUCTRPERM" in said:
        raise InputError(
            "study: --profile needs permission to read the GPU's counters; ncu reports ERR_NVGPUCTRPERM. Run as root, "
            "or set the driver's option NVreg_RestrictProfilingToAdminUsers=0."
        )
    found = parse(said, text)
    if not found:
        last = said.strip().splitlines()[-1:] or ["nothing"]
        raise InputError(f"study: --profile got no counters; ncu ended with {child.returncode} and said {last[0]!r}.")
    return found


def parse(text: str, size: str) -> list[Profile]:
    """Reads the raw page of `ncu --csv`: a line of names, a line of units, a line for each kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.DictReader(io.StringIO("\n".join(lines))))
    return [_profile_of(row, size) for row in rows if (row.get("Kernel Name") or "").startswith("sgemm_")]


def _profile_of(row: Mapping[str, str], size: str) -> Profile:
    rung = lookup(re.split(r"\W", row["Kernel Name"])[0].removeprefix("sgemm_"))
    busiest = max(_UNITS, key=lambda unit: _number(row, _UNITS[unit]))
    utilisation: float | None = _number(row, _UNITS[busiest]) / 100
    stalls = {match["reason"]: _number(row, name) for name in row if (match := _STALL.fullmatch(name or ""))}
    stalls = {reason: value for reason, value in stalls.items() if reason not in _NO_STALLS}
    if _number(row, _UNITS[busiest]) < _BUSY_PERCENT and stalls:
        busiest = "stalls: " + max(stalls, key=lambda reason: stalls[reason]).replace("_", " ")
        utilisation = None
    conflicts = int(_number(row, _CONFLICTS))
    occupancy = _number(row, _OCCUPANCY) / 100
    return Profile(size, rung.number, rung.name, conflicts, occupancy, busiest, utilisation)


def _number(row: Mapping[str, str], name: str) -> float:
    """A counter that this version of ncu does not have counts as 0."""
    try:
        return float((row.get(name) or "0").replace(",", ""))
    except ValueError:
        return 0.0


def _launch(size: Size, rungs: Sequence[int]) -> None:
    """What the child process does: launches each rung once."""
    import jax
    import jax.numpy as jnp

    m, n, k = size
    keys = jax.random.split(jax.random.key(0))
    a, b = jax.random.normal(keys[0], (m, k), jnp.float32), jax.random.normal(keys[1], (k, n), jnp.float32)
    for rung in rungs:
        jax.block_until_ready(jax.jit(functools.partial(sgemm, rung=rung))(a, b))


if __name__ == "__main__":
    m, n, k = map(int, sys.argv[1].split("x"))
    _launch((m, n, k), [int(rung) for rung in sys.argv[2].split(",")])
