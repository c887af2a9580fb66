"""Timelines of the schedules: files hold every stamp, pictures are drawn, summaries are those of known stamps."""

from __future__ import annotations

import dataclasses
import pathlib

import numpy as np
import pytest

from jaxkernels.bench import study, timeline
from jaxkernels.core.errors import InputError
from jaxkernels.ffi.pipelines.gemm_mma import SCHEDULES, Config, Timeline


def made_up(config: Config, tiles: int = 16) -> Timeline:
    """A tile takes 100 cycles: 10 to issue loads, 30 to wait, 60 to multiply. Warps begin one cycle apart."""
    steady = np.array([0, 10, 10, 40, 40, 100])
    cycles = np.arange(config.num_warps)[:, None, None] + 100 * np.arange(tiles)[:, None] + steady
    begin, end = cycles[:, 0, 0], cycles[:, -1, -1]
    return Timeline(config, cycles, begin, end, 0.5)


def test_every_schedule_is_recorded_with_and_without_prefetch() -> None:
    configs = list(timeline.configs())
    assert [(c.schedule, c.prefetch_fragments) for c in configs] == [(s, p) for s in SCHEDULES for p in (False, True)]
    assert {(c.block_m, c.block_n, c.num_warps) for c in configs} == {(128, 256, 8)}


def test_a_summary_has_the_medians() -> None:
    assert timeline.summary(made_up(Config())) == timeline.Summary(tile=100, wait=30, flight=40)


def test_a_table_has_a_line_for_each_schedule() -> None:
    lines = timeline.table([made_up(config) for config in timeline.configs()]).splitlines()
    assert lines[2] == "| single stage | 1 | in turn | 100 | 30 | 40 |"
    assert lines[7] == "| multi stage | 4 | prefetched | 100 | 30 | 40 |"


def test_files_hold_every_stamp(tmp_path: pathlib.Path) -> None:
    stamps = [made_up(config) for config in timeline.configs()]
    path = tmp_path / "timeline.json"
    study.save([], dict(device="a chip"), path, stamps)
    for found, expected in zip(timeline.load(path), stamps, strict=True):
        for field in dataclasses.fields(Timeline):
            np.testing.assert_array_equal(getattr(found, field.name), getattr(expected, field.name))
    path.write_text("[]")
    with pytest.raises(InputError, match="holds no timelines"):
        timeline.load(path)


@pytest.mark.parametrize(("tiles", "suffix"), [(16, "png"), (16, "svg"), (1, "png")])
def test_a_picture_is_drawn(tiles: int, suffix: str, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / f"timeline.{suffix}"
    timeline.draw([made_up(config, tiles) for config in timeline.configs()], path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.gpu
def test_schedules_are_recorded_on_a_gpu(tmp_path: pathlib.Path) -> None:
    stamps = timeline.record()
    timeline.draw(stamps, tmp_path / "timeline.png")
    assert len(stamps) == 6
    assert all(timeline.summary(one).tile > 0 for one in stamps)
