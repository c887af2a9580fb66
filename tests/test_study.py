"""`jaxkernels study`: the variants can be lowered, what is refused says why, files and pictures hold every point."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from jaxkernels.bench import report, sgemm, study, timeline
from jaxkernels.bench.suites import parse_shape
from jaxkernels.cli.app import app
from jaxkernels.core.errors import InputError
from jaxkernels.ffi.sgemm import RUNGS

POINTS = [
    study.Point("mk,kn 64x64x64", backend, "128 x 256", knob, value, 1e-6, 9e-7, 2e-6, 1e12, share)
    for backend in ("cuda", "pallas")
    for knob, value in (("num_stages", "1"), ("num_stages", "2"), ("cluster", "1 x 1"))
    for share in (0.25,)
]


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("of", ["pallas", "cuda"])
def test_variants_differ_in_one_knob_and_lower(of: str) -> None:
    """But for rings that do not fit into shared memory."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    fits: dict[str, list[int]] = {}
    for variant in study.variants():
        if variant.backend != of:
            continue
        lowered = study.lower([x, x], variant, platforms=("cuda",))
        if variant.knob == "cluster":
            assert lowered is not None
        elif lowered is not None:
            fits.setdefault(variant.tile, []).append(int(variant.value))
    assert fits == {"128 x 256": [1, 2, 3, 4], "128 x 128": [1, 2, 3, 4, 5, 6]}


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("prefetches", [False, True])
def test_schedules_of_mma_sync_lower(prefetches: bool) -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    found = []
    for variant in study.variants():
        if variant.backend.startswith("mma.sync") and variant.config.prefetches == prefetches:
            assert study.lower([x, x], variant, platforms=("cuda",)) is not None
            found.append((variant.backend.removesuffix(", look ahead"), variant.value))
    assert found == [
        ("mma.sync one buffer", "1"), ("mma.sync registers", "2"), *(("mma.sync cp.async", str(n)) for n in range(2, 7))
    ]  # fmt: skip


def test_a_timeline_is_drawn_and_saved(tmp_path: pathlib.Path) -> None:
    stamps = np.cumsum(np.arange(12 * 4)).reshape(12, 4)
    timelines = dict.fromkeys(timeline.schedules(), stamps)
    assert len(timelines) == 6
    timeline.draw(timelines, tmp_path / "new" / "timeline.png")
    assert (tmp_path / "new" / "timeline.png").read_bytes().startswith(b"\x89PNG")
    study.save(POINTS, dict(device="a chip"), tmp_path / "study.json", timelines)
    assert study.load(tmp_path / "study.json") == POINTS


@pytest.mark.parametrize("shape", ["512x512x512:nt", "2x512x512x512", "512x512x512:float16"])
def test_only_plain_products_are_studied(shape: str) -> None:
    with pytest.raises(InputError, match="study: needs a plain product"):
        next(study.study(parse_shape("gemm", shape), jax.devices()[0]))


def test_files_hold_every_point(tmp_path: pathlib.Path) -> None:
    study.save(POINTS, dict(device="a chip"), tmp_path / "study.json")
    assert study.load(tmp_path / "study.json") == POINTS
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(InputError, match="holds no study"):
        study.load(tmp_path / "other.json")
    with pytest.raises(InputError, match="cannot be read"):
        study.load(tmp_path / "missing.json")


@pytest.mark.parametrize("share", [0.25, None])
def test_a_picture_is_drawn(share: float | None, tmp_path: pathlib.Path) -> None:
    points = [dataclasses.replace(point, share_of_peak=share) for point in POINTS]
    study.plot(points, tmp_path / "new" / "study.png")
    assert (tmp_path / "new" / "study.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="is about machines without a GPU")
def test_the_command_needs_a_gpu() -> None:
    for arguments in ([], ["pipeline"], ["sgemm"], ["sgemm", "--shapes", "64x32x8"]):
        result = CliRunner().invoke(app, ["study", *arguments])
        assert result.exit_code == 1
        assert re.search("study: needs a CUDA GPU", result.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["attention"], "must be one of pipeline, sgemm; got 'attention'"), (["sgemm", "--shapes", "64x0x1"], "is MxNxK")],
)
def test_unknown_studies_and_sizes_are_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["study", *arguments])
    assert result.exit_code == 1
    assert message in result.stderr


LADDER = [
    sgemm.Point(size, rung, name, "", 1e-6, 9e-7, 2e-6, 1e12 * (rung + 1), 0.5, share)
    for size in ("64x64x64", "128x128x128", "65x32x7")
    for rung, name in ((0, sgemm.BASELINE), (1, "naive"), (6, "vectorised"))
    for share in (0.25,)
]
ENVIRONMENT = dict(device="a chip", versions=dict(jax="0"), date="2000-01-01T00:00", command="jaxkernels study sgemm")


def test_the_ladder_is_saved_drawn_and_written_into_pages(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ladder.json"
    page = "<!-- sgemm: ladder.json -->\n<!-- end -->"
    library = report.Library(tmp_path)
    assert "Not measured yet." in report.render(page, library, where="page")
    sgemm.save(LADDER, ENVIRONMENT, path)
    assert sgemm.load(path) == (LADDER, ENVIRONMENT)
    written = report.render(page, report.Library(tmp_path), where="page")
    assert "| 6 vectorised | 7 (50) | 7 (50) | 7 (50) |" in written
    assert "| rung | 64³ | 128³ | 65x32x7 |" in written
    assert report.render(written, report.Library(tmp_path), where="page") == written
    study.save(POINTS, {}, path)
    with pytest.raises(InputError, match="holds no study of SGEMM"):
        sgemm.load(path)
    sgemm.plot(LADDER, tmp_path / "new" / "ladder.png")
    assert (tmp_path / "new" / "ladder.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
def test_the_ladder_is_measured() -> None:
    points = list(sgemm.study([(256, 256, 256), (100, 133, 77)], jax.devices()[0]))
    assert {point.rung for point in points} == {0, *(rung.number for rung in RUNGS)}
    assert all(point.p10 <= point.seconds <= point.p90 and point.share_of_baseline > 0 for point in points)


@pytest.mark.gpu
def test_both_backends_are_measured(tmp_path: pathlib.Path) -> None:
    points = list(study.study(parse_shape("gemm", "512x512x512"), jax.devices()[0]))
    assert {point.backend.partition(" ")[0] for point in points} == {"cuda", "pallas", "mma.sync"}
    assert len(points) == 28 + 14
    assert all(point.p10 <= point.seconds <= point.p90 and 0 < point.share_of_peak < 1 for point in points)
