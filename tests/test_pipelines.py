"""The product with selectable schedules: each compiled for every chip that it runs on, on an emulator against float64,
with planted mistakes, and on a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import NEEDS_COMPILER, Emulator

from jaxkernels.ffi import compiler, custom_call
from jaxkernels.ffi.kernel import LaunchPlan
from jaxkernels.ffi.pipelines import STAMPS, Config, configs, matmul, timeline
from jaxkernels.ffi.pipelines import gemm as pipelines

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a")
NAMES = {
    f"{config.schedule}{config.num_stages if config.schedule == 'async' else ''}{'-ahead' * config.prefetches}": config
    for config in configs()
}
SMALL = dict(block_m=32, block_n=64, block_k=32, warps_m=1, warps_n=2)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_compiles_without_spills(arch, dtype, name):
    for sizes in ((4096, 4096), (4093, 4095)):
        defines = pipelines._defines(NAMES[name], dtype, dtype, *sizes, records=False)
        source = pipelines._SOURCE.read_text()
        compiler.compile_kernel(source, "jaxkernels::gemm", filename="gemm.cu", defines=defines, arch=arch, strict=True)


# On the emulator.


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture
def emulator(libraries: pathlib.Path) -> Iterator[Emulator]:
    translated = {
        "extern __shared__ __align__(1024) unsigned char dynamic_smem[];":
        "unsigned char* dynamic_smem = emulator::shared_memory();",
    }  # fmt: skip
    with Emulator(libraries, {"jaxkernels::gemm": translated}).installed() as emulator:
        yield emulator


def run_emulated(a: jax.Array, b: jax.Array, config: Config, out_dtype: str, *, records: bool = False) -> list[Any]:
    """What the kernel's plan launches, on the emulator."""
    plan: LaunchPlan = pipelines._plan(a, b, config=config, out_dtype=out_dtype, records=records)
    made = compiler.compile_kernel(pipelines._SOURCE.read_text(), "jaxkernels::gemm", defines=plan.defines)
    places = {"a": 0, "b": 1, "out": 2, "stamps": 3}
    parameters = [
        dataclasses.replace(x, buffer=places[x.buffer]) if isinstance(x, custom_call.Pointer) else x
        for x in plan.parameters
    ]
    return custom_call.launch(
        made.cubin, made.name, [a, b], list(plan.results.values()), parameters=parameters, grid=plan.grid,
        block=plan.block, smem_bytes=plan.smem_bytes,
    )  # fmt: skip


def draw(m: int, n: int, k: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(m * n + k)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((m, k), (k, n)))


def check(config: Config, m: int, n: int, k: int, dtype: str = "bfloat16", out_dtype: str = "float32") -> None:
    a, b = draw(m, n, k, dtype)
    assert_product(run_emulated(a, b, config, out_dtype)[0], a, b)


def assert_product(out: Any, a: Any, b: Any) -> None:
    exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    bound = 2**-8 if out.dtype != jnp.float32 else 2**-9 if a.dtype == jnp.float32 else 2**-18
    np.testing.assert_allclose(np.asarray(out, np.float64), exact, rtol=bound, atol=bound * np.sqrt(a.shape[1]))


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", NAMES)
def test_schedules(name: str, emulator: Emulator) -> None:
    config = dataclasses.replace(NAMES[name], **SMALL)
    check(config, 72, 136, 168)
    check(config, 40, 64, 8)  # Fewer tiles than slots.


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("schedule", ["single", "registers", "async"])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"), [("float16", "float16"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_dtypes_and_rows_that_are_no_whole_units(schedule: Any, dtype: str, out_dtype: str, emulator: Emulator) -> None:
    config = Config(schedule, **SMALL)
    check(config, 70, 130, 100, dtype, out_dtype)
    check(config, 33, 67, 71, dtype, out_dtype)
    check(config, 1, 1, 1, dtype, out_dtype)


@NEEDS_COMPILER
def test_wide_rows_and_more_warps(emulator: Emulator) -> None:
    check(Config("async", 4, block_m=64, block_n=128, block_k=64, warps_m=2, warps_n=2), 100, 200, 136)


@NEEDS_COMPILER
@pytest.mark.parametrize("seed", range(1, 4))
def test_in_any_order(seed: int, emulator: Emulator) -> None:
    emulator.seed = seed
    for prefetches in (False, True):
        check(Config("async", 3, prefetches=prefetches, **SMALL), 72, 64, 264)
        check(Config("registers", prefetches=prefetches, **SMALL), 72, 64, 264)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("right", "wrong", "config"),
    [
        ("cp_async_wait_group<kSlots - 2>();", "cp_async_wait_group<kSlots - 1>();", Config("async", 3, **SMALL)),
        ("cp_async_wait_group<kSlots - 2>();\n    __syncthreads();", "cp_async_wait_group<kSlots - 2>();",
         Config("async", 3, **SMALL)),
        ("__syncthreads();  // The tile is complete.", "", Config("single", **SMALL)),
        ("record(tile, kMultiplied);\n          if (has_next) write(slot ^ 1);\n          __syncthreads();",
         "record(tile, kMultiplied);\n          if (has_next) write(slot ^ 1);", Config("registers", **SMALL)),
        ("read(next_slot, 0, 0);", "read(slot, 0, 0);", Config("async", 3, **SMALL)),
        ("free_slot = slot;", "", Config("async", 3, **SMALL)),
        ("lane % 16;\n      ldmatrix_x4(", "lane % 8;\n      ldmatrix_x4(", Config("single", **SMALL)),
    ],
    ids=str,
)  # fmt: skip
def test_planted_mistake_is_noticed(right: str, wrong: str, config: Config, emulator: Emulator) -> None:
    def check_in_several_orders() -> None:
        for seed in range(4):
            emulator.seed = seed
            check(config, 72, 64, 264)

    emulator.edits = {right: wrong}
    with pytest.raises((AssertionError, RuntimeError)):
        check_in_several_orders()


@NEEDS_COMPILER
@pytest.mark.parametrize("schedule", ["single", "registers", "async"])
def test_stamps_are_in_order(schedule: Any, emulator: Emulator) -> None:
    a, b = draw(40, 64, 200, "bfloat16")
    words = run_emulated(a, b, Config(schedule, **SMALL), "float32", records=True)[1]
    stamps = np.asarray(words).view(np.int64).reshape(7, len(STAMPS))
    assert (np.diff(stamps.reshape(-1)) >= 0).all()


# Errors.


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (dict(num_stages=7), "num_stages must be from 2 to 6"),
        (dict(block_m=24), "block_m must be a multiple of 16 for each warp"),
        (dict(block_n=96, warps_n=4), "block_n must be a multiple of 16 for each warp"),
        (dict(block_k=48), "block_k must be a multiple of 32"),
        (dict(block_m=512, block_n=512, warps_m=8, warps_n=8), "a block must have at most 1024 threads"),
    ],
)
def test_configurations_that_are_refused(options, rule):
    with pytest.raises(
        ValueError, match=r'^pipelines\[cuda\]: schedule must be "single" or "registers" or "async"; got'
    ):
        Config("double")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"^pipelines\[cuda\]: {rule}; got Config\("):
        Config(**options)


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (((8, 8), "int8"), ((8, 8), "int8"), {}, r"a must be a matrix of bfloat16, float16, float32; got int8\[8, 8\]"),
        (((8,), "float16"), ((8, 8), "float16"), {}, r"a must be a matrix of .*; got float16\[8\]"),
        (((8, 8), "float16"), ((8, 8), "float32"), {}, "a and b must have one dtype; got float16 and float32"),
        (((8, 4), "float16"), ((8, 8), "float16"), {}, "a must have as many columns as b has rows; got"),
        (((8, 0), "float16"), ((0, 8), "float16"), {}, "sizes of a must be 1 to"),
        (((8, 8), "float16"), ((8, 8), "float16"), dict(out_dtype="bfloat16"), "out_dtype must be float16 or float32"),
        (
            ((8, 8), "float16"), ((8, 8), "float16"),
            dict(config=Config(block_m=16, block_n=64, warps_m=1, warps_n=4, block_k=32)),
            "the 128 threads of a block must load equally many 16-byte units of each tile",
        ),
    ],
)  # fmt: skip
def test_operands_that_are_refused(a, b, options, message):
    operands = [jnp.zeros(*x) for x in (a, b)]
    with pytest.raises(ValueError, match=rf"^pipelines\[cuda\]: {message}"):
        matmul(*operands, **options)


def test_lowers_for_cuda():
    x = jax.ShapeDtypeStruct((300, 300), jnp.bfloat16)
    text = jax.jit(matmul).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" in text


def test_every_schedule_fits_shared_memory_of_its_chips():
    for config in configs():
        assert config.smem_bytes(2) <= 99 * 1024  # GeForce RTX 3090 and 4090.
        assert config.smem_bytes(4) <= 227 * 1024


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_a_gpu(dtype, name):
    for m, n, k in ((1000, 777, 555), (256, 512, 1024), (1, 130, 4096)):
        a, b = draw(m, n, k, dtype)
        run = jax.jit(lambda a, b: matmul(a, b, config=NAMES[name], out_dtype="float32"))
        out = run(a, b)
        assert_product(out, a, b)
        np.testing.assert_array_equal(np.asarray(run(a, b)), np.asarray(out))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_timeline_on_a_gpu(name):
    a, b = draw(512, 512, 2048, "bfloat16")
    stamps = timeline(a, b, config=NAMES[name])
    assert stamps.shape == (2048 // 32, len(STAMPS))
    assert (np.diff(stamps.reshape(-1)) >= 0).all()
