"""The GEMM of selectable schedules: it compiles for every chip since Ampere, multiplies on an emulator of warps and of
asynchronous copies, where planted bugs are noticed, and on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator

import jaxkernels as jk
from jaxkernels.core import hardware
from jaxkernels.ffi.pipelines import gemm_mma
from jaxkernels.ffi.pipelines.gemm_mma import EVENTS, SCHEDULES, Config

DTYPES = ("bfloat16", "float16", "float32")
VARIANTS = [(schedule, prefetch) for schedule in SCHEDULES for prefetch in (False, True)]
#: One in three of them are all variants, each in one dtype.
PRODUCTS = [(DTYPES[(i + j) % 3], *VARIANTS[i]) for i in range(len(VARIANTS)) for j in range(3)]
CHIPS = {
    "sm_80": "NVIDIA A100-SXM4-80GB",
    "sm_86": "NVIDIA A10",
    "sm_89": "NVIDIA L4",
    "sm_90a": "NVIDIA H200",
}
#: A small tile for the emulator: four warps of 32 x 32.
SMALL = Config(64, 64, 32, warps_m=2, warps_n=2, num_stages=3)


def of(config: Config, schedule: Any, prefetch: bool, **changes: Any) -> Config:
    """The configuration with another schedule, and that schedule's default number of slots."""
    fields: dict[str, Any] = dict(schedule=schedule, prefetch_fragments=prefetch, num_stages=None)
    return dataclasses.replace(config, **(fields | changes))


def draw(shape: tuple[int, ...], dtype: Any, seed: int) -> np.ndarray:
    """Normal numbers that every dtype here represents exactly."""
    x = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(jnp.asarray(x, jnp.bfloat16).astype(dtype))


def exact(a: Any, b: Any) -> np.ndarray:
    return np.asarray(a, np.float64) @ np.asarray(b, np.float64)


def assert_right(out: Any, a: Any, b: Any) -> None:
    """Sums are float32, which tensor cores truncate; the result is rounded once."""
    expected = exact(a, b)
    scale = np.abs(np.asarray(a, np.float64)) @ np.abs(np.asarray(b, np.float64)) + 1
    rounding = float(jnp.finfo(out.dtype).eps)
    error = np.abs(np.asarray(out, np.float64) - expected)
    assert np.all(error <= 1e-5 * scale + rounding * np.abs(expected)), f"{error.max()} of {np.abs(expected).max()}"


# Compilation.


def compile_for(chip: str, monkeypatch: pytest.MonkeyPatch, dtype: str, config: Config, k: int = 512) -> Any:
    monkeypatch.setenv("JAXKERNELS_TARGET", CHIPS[chip])
    x = jax.ShapeDtypeStruct((512, k), dtype), jax.ShapeDtypeStruct((k, k), dtype)
    return gemm_mma.kernel.compile(*x, config=config, out_dtype="float32")


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_default_tiles_compile_without_spills(
    chip: str, schedule: Any, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is strict: it refuses spills."""
    for dtype in DTYPES:
        compiled = compile_for(chip, monkeypatch, dtype, of(Config(), schedule, prefetch))
        assert compiled.report.spill_store_bytes == 0


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
@pytest.mark.parametrize("chip", CHIPS)
def test_wide_tiles_compile_without_spills(
    chip: str, schedule: Any, prefetch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = of(Config(128, 256), schedule, prefetch, num_stages=3 if schedule == "multi_stage" else None)
    assert compile_for(chip, monkeypatch, "bfloat16", wide).report.spill_store_bytes == 0


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_rows_compile_without_spills(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for schedule, prefetch in VARIANTS:
        compile_for("sm_80", monkeypatch, dtype, of(Config(), schedule, prefetch), k=511)


@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
def test_the_recording_build_compiles(schedule: Any, prefetch: bool) -> None:
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    config = of(Config(), schedule, prefetch)
    gemm_mma.timeline_kernel.compile(x, x, config=config, out_dtype="float32", cta=0)


def test_it_lowers_without_a_gpu() -> None:
    x = jax.ShapeDtypeStruct((100, 100), jnp.bfloat16)
    lowered = jax.jit(gemm_mma.matmul).trace(x, x).lower(lowering_platforms=("cuda",))
    assert f"@{jk.ffi.TARGET}" in lowered.as_text()


# Values, on the emulator.


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    emulator = Emulator(libraries, {"jaxkernels::gemm_mma": DYNAMIC_SMEM})

    def call(kernel: jk.ffi.CudaKernel, *operands: Any, **constants: Any) -> Any:
        results = kernel._run(constants, hardware.lookup("NVIDIA H200"), *map(jnp.asarray, operands))
        return results[0] if len(results) == 1 else tuple(results)

    monkeypatch.setattr(jk.ffi.CudaKernel, "__call__", call)
    with emulator.installed():
        yield emulator


def check(shape: tuple[int, int, int], dtype: Any, config: Config, out_dtype: Any = None) -> None:
    m, n, k = shape
    a, b = draw((m, k), dtype, 0), draw((k, n), dtype, 1)
    assert_right(gemm_mma.matmul(a, b, config=config, out_dtype=out_dtype), a, b)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("dtype", "schedule", "prefetch"), PRODUCTS)
def test_every_schedule_multiplies(dtype: str, schedule: Any, prefetch: bool, emulator: Emulator) -> None:
    """Aligned rows, rows of odd sizes, and a single tile of k."""
    config = of(SMALL, schedule, prefetch)
    for emulator.seed, shape in enumerate([(72, 136, 160), (67, 75, 133), (1, 65, 7)]):
        check(shape, dtype, config, "float32")
    check((65, 72, 40), dtype, config)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("prefetch", [False, True])
def test_every_depth_of_the_ring(num_stages: int, prefetch: bool, emulator: Emulator) -> None:
    """Fewer tiles than slots, as many, and more."""
    config = of(SMALL, "multi_stage", prefetch, num_stages=num_stages)
    for emulator.seed, k in enumerate([32, 32 * num_stages, 32 * num_stages + 40]):
        check((64, 64, k), jnp.bfloat16, config)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("bfloat16", Config(32, 32, 32, 1, 1)),
        ("bfloat16", Config(32, 64, 64, 2, 1)),
        ("float16", Config(64, 128, 64, 1, 4)),
        ("float16", Config(128, 32, 32, 4, 1, num_stages=2)),
        ("bfloat16", Config(64, 256, 32, 2, 4, num_stages=2, strip=1)),
        ("float32", Config(32, 32, 16, 1, 1)),
        ("float32", Config(64, 128, 16, 2, 2)),
        ("float32", Config(128, 64, 32, 4, 2, num_stages=2)),
    ],
    ids=str,
)
def test_every_layout_of_a_tile(dtype: str, config: Config, emulator: Emulator) -> None:
    check((2 * config.block_m + 8, config.block_n + 8, 2 * config.block_k + 8), dtype, config, "float32")


@NEEDS_COMPILER
def test_float32_is_rounded_to_tf32(emulator: Emulator) -> None:
    a, b = (np.random.default_rng(i).standard_normal((64, 64), np.float32) for i in range(2))
    rounded = [((x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32) for x in (a, b)]
    out = gemm_mma.matmul(a, b, config=dataclasses.replace(SMALL, block_k=16))
    np.testing.assert_allclose(np.asarray(out), exact(*rounded), rtol=0, atol=1e-5)


@NEEDS_COMPILER
def test_what_lies_beside_an_operand_does_not_matter(emulator: Emulator) -> None:
    """A row's last unit is followed by the next row, which may hold infinities."""
    a, b = draw((64, 33), jnp.bfloat16, 0).copy(), draw((33, 64), jnp.bfloat16, 1)
    a[1:, :8] = np.inf
    out = np.asarray(gemm_mma.matmul(a, b, config=SMALL), np.float32)
    assert np.all(np.isfinite(out[0]))
    assert not np.any(np.isfinite(out[1:]))


BUGS = {
    "copies-not-waited-for": ("multi_stage", "cp_async_wait_group<Config::kStages - 2>();", ""),
    "waits-for-one-group-less": (
        "multi_stage", "cp_async_wait_group<Config::kStages - 2>();", "cp_async_wait_group<Config::kStages - 1>();",
    ),
    "no-empty-groups": (
        "multi_stage", "  cp_async_commit_group();\n}", "  if (tile < tiles) cp_async_commit_group();\n}",
    ),
    "no-barrier-after-wait": (
        "multi_stage", "cp_async_wait_group<Config::kStages - 2>();\n  __syncthreads();",
        "cp_async_wait_group<Config::kStages - 2>();",
    ),
    "no-barrier-after-put": ("double_buffered", "  loader.put(slot);\n  __syncthreads();", "  loader.put(slot);"),
    "one-slot-for-two": ("double_buffered", "smem + (slot == smem ? kSlotBytes : 0)", "smem + (slot == 0)"),
    "no-barrier-before-products": ("single_stage", "__syncthreads();   // All threads have stored.", ""),
    "no-barrier-after-products": (
        "single_stage", "__syncthreads();  // All warps have read the slot: it may be overwritten.", "",
    ),
}  # fmt: skip


@pytest.mark.sampled(one_in=4)
@NEEDS_COMPILER
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("bug", BUGS)
def test_planted_bugs_are_noticed(bug: str, prefetch: bool, emulator: Emulator) -> None:
    """By wrong values, under one of some seeds."""
    schedule, old, new = BUGS[bug]
    emulator.edits = {old: new}
    config = of(SMALL, schedule, prefetch, num_stages=3 if schedule == "multi_stage" else None)

    def check_with_seeds() -> None:
        for emulator.seed in range(200):
            check((64, 64, 256), jnp.bfloat16, config)

    with pytest.raises(AssertionError):
        check_with_seeds()


#: Lines that access shared memory by 16 bytes a lane. The emulator checks the other such accesses by itself.
ACCESSES = {
    "ldmatrix_x4(address + i * kMmaM": "need_distinct_banks(address + i * kMmaM * kLhsRowBytes);\n",
    "ldmatrix_x4_trans(address + rows": "need_distinct_banks(address + rows);\n",
    "cp_async<16>(to,": "need_distinct_banks(to);\n",
}


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("dtype", "block_n", "block_k"),
    [
        ("bfloat16", 32, 32), ("bfloat16", 128, 64), ("bfloat16", 64, 32), ("float16", 256, 32),
        ("float32", 32, 16), ("float32", 128, 32), ("float32", 64, 16),
    ],
)  # fmt: skip
def test_accesses_have_no_bank_conflicts(dtype: str, block_n: int, block_k: int, emulator: Emulator) -> None:
    emulator.edits = {access: check + access for access, check in ACCESSES.items()}
    check((64, block_n, 2 * block_k), dtype, Config(64, block_n, block_k, 2, 1 if block_n < 128 else 2))


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("dtype", "old", "new"),
    [
        ("bfloat16", "row * kRowBytes + (byte ^ row % 8 * kUnitBytes)", "row * kRowBytes + byte"),
        ("float32", "byte ^ row % 4 * 2 * kUnitBytes", "byte ^ row % 8 * kUnitBytes"),
    ],
)
def test_bank_conflicts_are_noticed(dtype: str, old: str, new: str, emulator: Emulator) -> None:
    """The emulator refuses them where the rhs is read."""
    emulator.edits = {access: check + access for access, check in ACCESSES.items()} | {old: new}
    with pytest.raises(RuntimeError, match="a bank conflict"):
        check((64, 64, 64), dtype, SMALL)


# The timeline, on the emulator.


def assert_in_order(stamps: gemm_mma.Timeline, tiles: int) -> None:
    config, at = stamps.config, dict(zip(EVENTS, np.moveaxis(stamps.cycles, -1, 0)))
    assert stamps.cycles.shape == (config.num_warps, tiles, len(EVENTS))
    assert np.all(at["load_begin"] <= at["load_end"])
    assert np.all(at["load_end"] <= at["wait_end"])
    assert np.all(at["wait_begin"] <= at["wait_end"])
    assert np.all(at["wait_end"] <= at["compute_begin"] if not config.prefetch_fragments else True)
    assert np.all(at["compute_begin"] <= at["compute_end"])
    assert np.all(stamps.begin[:, None, None] <= stamps.cycles)
    assert np.all(stamps.cycles <= stamps.end[:, None, None])
    # Loads in flight when a tile's products begin: how the schedules differ.
    ahead = {"single_stage": 0, "double_buffered": 1, "multi_stage": config.num_slots - 1}[config.schedule]
    issued = (at["load_begin"][:, None, :] < at["compute_end"][:, :, None]).sum(2)
    assert np.all(issued == np.minimum(np.arange(1, tiles + 1) + ahead, tiles))


@pytest.mark.sampled(one_in=3)
@NEEDS_COMPILER
@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
def test_the_timeline_has_every_event(schedule: Any, prefetch: bool, emulator: Emulator) -> None:
    a, b = draw((128, 200), jnp.bfloat16, 0), draw((200, 64), jnp.bfloat16, 1)
    stamps = gemm_mma.timeline(a, b, config=of(SMALL, schedule, prefetch), cta=1)
    assert_in_order(stamps, 7)
    assert stamps.nanoseconds_per_cycle > 0


@NEEDS_COMPILER
def test_stamps_may_wrap_round() -> None:
    stamps = np.zeros((2, 2, 6), np.uint32)
    stamps[:, 0] = np.arange(6) + 5
    stamps[0, 1, :4] = 2, 1_000, 40, 1_076
    stamps[1, 1, :4] = 2**32 - 10, 1_000, 50, 1_120
    found = gemm_mma._timeline_of(SMALL, stamps)
    assert found.begin.tolist() == [12, 0]
    assert found.end.tolist() == [50, 60]
    assert found.cycles[0, 0].tolist() == [15, 16, 17, 18, 19, 20]
    assert found.nanoseconds_per_cycle == 2


# Refusals.


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            dict(block_m=96),
            "block_m and block_n must each be one of (32, 64, 128, 256); got block_m=96, block_n=128. Use 128 and 128.",
        ),
        (dict(block_k=48), "block_k must be one of (16, 32, 64); got block_k=48. Use block_k=32."),
        (
            dict(warps_m=4, warps_n=8),
            "warps_m and warps_n must each be one of (1, 2, 4, 8), and at most 16 warps together; got warps_m=4, "
            "warps_n=8. Use 2 and 4.",
        ),
        (
            dict(block_n=32),
            "a warp's tile must be a multiple of 16 x 32; got 128/2 x 32/4. Use fewer warps or a larger block.",
        ),
        (
            dict(warps_m=1, warps_n=1),
            "a warp's tile must leave each thread at most 128 accumulators; got 128 x 128 of 32 threads. "
            "Use more warps or a smaller block.",
        ),
        (
            dict(num_stages=7),
            "num_stages of multi_stage must be from 2 to 6; got num_stages=7. Leave it out for the default.",
        ),
        (
            dict(schedule="single_stage", num_stages=2),
            "num_stages of single_stage must be 1; got num_stages=2. Leave it out for the default.",
        ),
        (dict(strip=0), "strip must be from 1 to 128; got strip=0. Use strip=8."),
        (dict(ctas_per_sm=9), "ctas_per_sm must be from 1 to 8; got ctas_per_sm=9. Use ctas_per_sm=1."),
        (
            dict(schedule="triple"),
            'schedule must be "single_stage" or "double_buffered" or "multi_stage"; got \'triple\'. '
            "Leave it out for the default.",
        ),
    ],
    ids=lambda x: str(x)[:40],
)
def test_configs_that_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape('pipelines[cuda]: ' + message)}$"):
        Config(**fields)


@pytest.mark.parametrize(
    ("shapes", "dtypes", "options", "message"),
    [
        (
            ((4, 8), (8, 4)), ("int8", "int8"), {},
            "operands must both be one of bfloat16, float16, float32; got int8 and int8. Cast them with .astype.",
        ),
        (
            ((4, 8), (8, 4)), ("float16", "bfloat16"), {},
            "operands must both be one of bfloat16, float16, float32; got float16 and bfloat16. "
            "Cast them with .astype.",
        ),
        (
            ((4, 8), (9, 4)), ("float16", "float16"), {},
            "operands must be matrices of m x k and k x n; got shapes (4, 8) and (9, 4). Use jax.vmap for batches.",
        ),
        (
            ((4, 0), (0, 4)), ("float16", "float16"), {},
            "m, k and n must be from 1 to 268435456; got m=4, k=0, n=4. Use jax.numpy.matmul for empty or larger "
            "matrices.",
        ),
        (
            ((4, 8), (8, 4)), ("float16", "float16"), dict(out_dtype="bfloat16"),
            "out_dtype must be float32 or the operands' dtype; got out_dtype=bfloat16, operands of float16. "
            "Cast the result with .astype.",
        ),
        (
            ((4, 8), (8, 4)), ("float32", "float32"), dict(config=Config(block_k=64)),
            "block_k must be 16 or 32 for float32; got block_k=64. Use block_k=16.",
        ),
        (
            ((4, 8), (8, 4)), ("float16", "float16"), dict(config=Config(64, 32, 32, warps_m=4, warps_n=1)),
            None,
        ),
        (
            ((4, 8), (8, 4)), ("float16", "float16"), dict(config=Config(128, 32, 32, warps_m=8, warps_n=1)),
            "a tile of each operand must have a 16-byte unit for each thread, and a row of it at most one; "
            "got 512 and 128 units, 256 threads. Use fewer warps or a larger block.",
        ),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_calls_that_are_refused(
    shapes: Any, dtypes: tuple[str, str], options: dict[str, Any], message: str | None
) -> None:
    multiply = lambda a, b: gemm_mma.matmul(a, b, **options)
    operands = [jnp.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes)]
    if message is None:
        assert jax.eval_shape(multiply, *operands).shape == (4, 4)
        return
    with pytest.raises(ValueError, match=f"^{re.escape('pipelines[cuda]: ' + message)}$"):
        multiply(*operands)


def test_a_ring_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA A10")
    x = jax.ShapeDtypeStruct((256, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match="shared memory"):
        jax.eval_shape(lambda a, b: gemm_mma.matmul(a, b, config=Config(128, 128, 64, num_stages=4)), x, x)


def test_a_timeline_needs_a_cta_of_the_grid() -> None:
    x = jnp.zeros((256, 256), jnp.bfloat16)
    message = "pipelines[cuda]: cta must be from 0 to 3 for these sizes; got cta=4. Use cta=0."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        gemm_mma.timeline(x, x, cta=4)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_on_a_gpu(dtype: str, schedule: Any, prefetch: bool) -> None:
    """Right for aligned and odd sizes, and the same bits each time."""
    config = of(Config(), schedule, prefetch)
    multiply = jax.jit(lambda a, b: gemm_mma.matmul(a, b, config=config, out_dtype="float32"))
    for m, n, k in [(512, 768, 640), (301, 517, 333), (129, 264, 1000), (1, 1, 1), (130, 33, 4104)]:
        a, b = draw((m, k), dtype, 0), draw((k, n), dtype, 1)
        first = np.asarray(multiply(a, b))
        assert_right(first, a, b)
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(multiply(a, b)).view(np.uint32), first.view(np.uint32))


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize(("dtype", "block_k"), [("bfloat16", 32), ("bfloat16", 64), ("float32", 16), ("float32", 32)])
def test_depths_of_the_ring_on_a_gpu(dtype: str, block_k: int, num_stages: int) -> None:
    for prefetch, (block_m, block_n) in itertools.product((False, True), ((128, 128), (64, 256))):
        config = Config(block_m, block_n, block_k, num_stages=num_stages, prefetch_fragments=prefetch)
        if config.smem_bytes(dtype) > hardware.chip_of(jax.devices()[0]).smem_bytes:
            continue
        a, b = draw((300, 2000), dtype, 0), draw((2000, 520), dtype, 1)
        assert_right(gemm_mma.matmul(a, b, config=config), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("schedule", "prefetch"), VARIANTS)
def test_timelines_on_a_gpu(schedule: Any, prefetch: bool) -> None:
    a, b = draw((512, 1000), jnp.bfloat16, 0), draw((1000, 512), jnp.bfloat16, 1)
    stamps = gemm_mma.timeline(a, b, config=of(Config(), schedule, prefetch), cta=5)
    assert_in_order(stamps, 32)


_SANITIZED = """
import functools
from jaxkernels.ffi.pipelines import gemm_mma
from test_pipelines import VARIANTS, Config, of

def run(schedule, prefetch):
    multiply = functools.partial(gemm_mma.matmul, config=of(Config(), schedule, prefetch))
    return jax.jit(multiply)(*(jnp.ones(shape, jnp.bfloat16) for shape in ((301, 333), (333, 517))))

steps = {f"{schedule} {prefetch}": functools.partial(run, schedule, prefetch) for schedule, prefetch in VARIANTS}
"""


@pytest.mark.gpu
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, prefetch: bool) -> None:
    names = tuple(f"{schedule} {prefetch}" for schedule in dict.fromkeys(schedule for schedule, _ in VARIANTS))
    sanitizer.assert_finds_nothing_else(tool, _SANITIZED, names if tool == "memcheck" else ("planted", *names))
