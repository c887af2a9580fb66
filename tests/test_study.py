"""`jaxkernels study`: the variants can be lowered, what is refused says why, files and pictures hold every point."""

from __future__ import annotations

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

from jaxkernels.bench import report, sgemm, sgemm_profile, study
from jaxkernels.bench.suites import parse_shape
from jaxkernels.cli.app import app
from jaxkernels.core.errors import InputError
from jaxkernels.ffi.compiler import CompileError
from jaxkernels.ffi.sgemm import RUNGS, Config

POINTS = [
    study.Point("mk,kn 64x64x64", backend, "128 x 256", knob, value, 1e-6, 9e-7, 2e-6, 1e12, share)
    for backend in ("cuda", "pallas")
    for knob, value in (("num_stages", "1"), ("num_stages", "2"), ("cluster", "1 x 1"))
    for share in (0.25,)
]
MMA_POINTS = [
    dataclasses.replace(POINTS[0], backend=backend, tile=tile, value=value)
    for backend in ("mma single_stage", "mma multi_stage", "mma multi_stage prefetch")
    for tile in ("128 x 256", "128 x 128")
    for value in ("1", "2")
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


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("variant", list(study._mma_variants()), ids=lambda v: f"{v.backend}-{v.tile}-{v.value}")
def test_schedules_lower(variant: study.Variant) -> None:
    """All fit into the shared memory of a Hopper GPU, and none spills."""
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    assert study.lower([x, x], variant, platforms=("cuda",)) is not None


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


def test_a_table_has_a_line_for_each_ring() -> None:
    lines = study.table([*POINTS, *MMA_POINTS], POINTS[0].shape).splitlines()
    assert lines[0] == "| kernel | slots | 128 x 256 | 128 x 256, prefetch | 128 x 128 | 128 x 128, prefetch |"
    assert lines[2] == "| `cuda` | 1 | 1 (25) |  |  |  |"
    assert "| `mma single_stage` | 1 | 1 (25) |  | 1 (25) |  |" in lines
    assert "| `mma multi_stage` | 2 | 1 (25) | 1 (25) | 1 (25) | 1 (25) |" in lines
    assert len(lines) == 2 + 2 * 4


@pytest.mark.parametrize("share", [0.25, None])
@pytest.mark.parametrize("schedules", [[], MMA_POINTS], ids=["tma", "tma-and-mma"])
def test_a_picture_is_drawn(schedules: list[study.Point], share: float | None, tmp_path: pathlib.Path) -> None:
    points = [dataclasses.replace(point, share_of_peak=share) for point in [*POINTS, *schedules]]
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
    assert sgemm.load(path) == (LADDER, ENVIRONMENT, [])
    written = report.render(page, report.Library(tmp_path), where="page")
    assert "| 6 vectorised | 7 (50) | 7 (50) | 7 (50) |" in written
    assert "| rung | 64³ | 128³ | 65x32x7 |" in written
    assert report.render(written, report.Library(tmp_path), where="page") == written
    study.save(POINTS, {}, path)
    with pytest.raises(InputError, match="holds no study of SGEMM"):
        sgemm.load(path)
    sgemm.plot(LADDER, tmp_path / "new" / "ladder.png")
    assert (tmp_path / "new" / "ladder.png").read_bytes().startswith(b"\x89PNG")


#: The raw page of ncu for two rungs and a kernel of XLA, without most of its columns.
NCU = """==PROF== Connected to process 1 (python)
==PROF== Profiling "sgemm_tma" - 0: 0%....50%....100% - 12 passes
"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",\
"lts__t_sectors.avg.pct_of_peak_sustained_elapsed","sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__warps_active.avg.pct_of_peak_sustained_active",\
"smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",\
"smsp__average_warps_issue_stalled_selected_per_issue_active.ratio"
"","","%","","%","%","%","%","inst","inst"
"0","sgemm_tma(TensorMap, TensorMap, float *, int, int, int)","4.1","1,234","55.5","9","70.5","12.5","0.2","1"
"1","sgemm_naive(const float *, const float *, float *)","1.5","0","41","59.9","2.5","97.25","30.5","1"
"2","loop_add_fusion","80","0","1","50","1","90","9","1"
"""


def test_profiles_are_read_saved_and_shown(tmp_path: pathlib.Path) -> None:
    found = sgemm_profile.parse(NCU, "64x64x64")
    assert found == [
        sgemm_profile.Profile("64x64x64", 13, "tma", 1234, 0.125, "FMA pipe", 0.705),
        sgemm_profile.Profile("64x64x64", 1, "naive", 0, 0.9725, "stalls: long scoreboard", None),
    ]
    sgemm.save(LADDER, ENVIRONMENT, tmp_path / "ladder.json", profiles=found)
    loaded = sgemm.load(tmp_path / "ladder.json")
    assert loaded == (LADDER, ENVIRONMENT, found)
    written = sgemm.table(*loaded)
    assert "| 13 tma | 64³ | 1.23e+03 | 12% | FMA pipe, 70% of its peak |" in written
    assert "| 1 naive | 64³ | 0 | 97% | stalls: long scoreboard |" in written


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (None, r"study: --profile needs Nsight Compute; found no ncu in PATH\."),
        ("echo '==ERROR== ERR_NVGPUCTRPERM - no permission'", "needs permission to read the GPU's counters"),
        ("echo broken; exit 3", "got no counters; ncu ended with 3 and said 'broken'"),
    ],
)
def test_no_profile_says_why(
    script: str | None, message: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script is not None:
        (tmp_path / "ncu").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match=message):
        sgemm_profile.profile((64, 64, 64), [1])


def test_a_profile_does_not_preallocate_memory(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child process gets the rest of the environment unchanged."""
    script = '#!/bin/sh\necho "$XLA_PYTHON_CLIENT_PREALLOCATE $XLA_PYTHON_CLIENT_ALLOCATOR"\n'
    (tmp_path / "ncu").write_text(script)
    (tmp_path / "ncu").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    with pytest.raises(InputError, match="said 'false platform'"):
        sgemm_profile.profile((64, 64, 64), [1])


def test_a_search_leaves_out_what_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def multiply(a: jax.Array, b: jax.Array, *, rung: int, config: Config) -> jax.Array:
        if config.TM == 16:
            raise CompileError("must not spill registers", "")
        return a @ b

    monkeypatch.setattr(sgemm, "sgemm", multiply)
    monkeypatch.setattr(sgemm, "_SECONDS", 0.0)
    configs = [Config(64, 64, TM=tm) for tm in (8, 16)]
    with pytest.warns(UserWarning, match="left out BM=64, BN=64, TM=16: must not spill registers"):
        found = sgemm.search((16, 16, 16), jax.devices()[0], rung=13, configs=configs)
    assert [config for config, _ in found] == configs[:1]


@pytest.mark.gpu
def test_the_ladder_is_measured() -> None:
    points = list(sgemm.study([(256, 256, 256), (100, 133, 77)], jax.devices()[0]))
    assert {point.rung for point in points} == {0, *(rung.number for rung in RUNGS)}
    assert all(point.p10 <= point.seconds <= point.p90 and point.share_of_baseline > 0 for point in points)


@pytest.mark.gpu
def test_all_kernels_are_measured(tmp_path: pathlib.Path) -> None:
    points = list(study.study(parse_shape("gemm", "512x512x512"), jax.devices()[0]))
    schedules = [f"mma {schedule}{prefetch}" for schedule in study.gemm_mma.SCHEDULES for prefetch in ("", " prefetch")]
    assert {point.backend for point in points} == {"cuda", "pallas", *schedules}
    assert len(points) == 28 + 28
    assert all(point.p10 <= point.seconds <= point.p90 and 0 < point.share_of_peak < 1 for point in points)
