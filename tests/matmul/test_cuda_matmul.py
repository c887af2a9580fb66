"""The CUDA matmul kernel: what it refuses, that every config compiles without spills, and on a GPU its results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import LAYOUTS, REFUSALS, assert_right, make_spec, random_operands, shipped_winners, types_of

from jaxkernels import ffi
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.cases import random_array
from jaxkernels.ffi import compiler, handler
from jaxkernels.ffi.matmul import gemm as matmul
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.triton import calls

Config = matmul.Config

#: One of each kind of schedule.
SCHEDULES = {
    "cooperative": Config(),
    "tall": Config(block_m=256, block_n=128),
    "largest": Config(block_m=256, block_n=192, num_stages=3),
    "one consumer": Config(block_m=64, block_n=128, block_k=128),
    "ping-pong": Config(block_n=128, ping_pong=True),
    "ping-pong, 64 rows": Config(block_m=64, ping_pong=True),
    "cluster along m": Config(cluster_m=2),
    "cluster along n": Config(cluster_n=2),
    "pieces of 64 bytes": Config(block_n=160),
    "pieces of 64 bytes in a cluster": Config(block_n=160, cluster_m=2),
    "odd boxes in a cluster": Config(block_m=256, block_n=192, num_stages=3, cluster_m=2),
    "ping-pong in a cluster": Config(block_n=128, ping_pong=True, cluster_n=2),
    "cluster of four": Config(block_n=192, cluster_m=2, cluster_n=2),
    "cluster of four along m": Config(block_m=64, block_n=160, block_k=128, num_stages=3, cluster_m=4),
    "ping-pong in a cluster of four along n": Config(block_m=64, block_n=96, ping_pong=True, cluster_n=4),
    "split k": Config(block_n=128, split_k=2),
    "split k by 8": Config(block_m=64, block_n=128, split_k=8),
    "split k by 9, added by TMA": Config(block_n=128, split_k=9, reduce_add=True),
    "split k by 2 in a cluster, added by TMA": Config(cluster_m=2, split_k=2, reduce_add=True),
    "split k by 3, through memory": Config(split_k=3, through_memory=True),
    "split k by 5, through memory, tall": Config(block_m=256, block_n=128, split_k=5, through_memory=True),
    "split k by 2 in a cluster, through memory": Config(block_n=160, cluster_n=2, split_k=2, through_memory=True),
    "split k by 3, through memory, one consumer": Config(64, 128, cluster_m=2, split_k=3, through_memory=True),
}


def lower(spec: MatmulSpec, config: Any) -> str:
    operands = [jax.ShapeDtypeStruct(t.shape, t.dtype) for t in types_of(spec)]
    run = jax.jit(lambda *operands: dispatch.load("matmul", "cuda").run(spec, config, *operands))
    return run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("name", "layouts"), list(zip(SCHEDULES, itertools.cycle(LAYOUTS))))
def test_schedules_compile_without_spills(name: str, layouts: str) -> None:
    config = SCHEDULES[name]
    out_dtype = "float32" if config.reduce_add else "bfloat16"
    report = matmul.compile_gemm(make_spec(512, 512, 512, layouts=layouts, out_dtype=out_dtype), config).report
    assert report is not None
    assert (report.spill_store_bytes, report.spill_load_bytes, report.stack_bytes) == (0, 0, 0)


#: What a kernel can be asked to do beside the product; each names one kernel of a schedule.
EPILOGUES: list[dict[str, Any]] = [
    dict(n=512, bias=True, activation="gelu"),
    dict(n=512, bias=True, activation="gelu", save_preactivation=True),
    dict(n=512, bias=True, activation="gelu_erf", residual=True, save_preactivation=True),
    dict(n=512, bias=True, residual=True),
    dict(n=512, activation="silu", multiplier=True, save_preactivation=True),
    dict(n=511, activation="gelu", multiplier=True),
    dict(n=512, activation="silu"),
    dict(n=512, activation="silu", gradients=True),
    dict(n=511, activation="gelu_erf", gradients=True),
    dict(n=512, activation="gelu", gradients=True, out_dtype="float32"),
    dict(n=511, bias=True, activation="relu_squared"),
    dict(n=512, out_dtype="float32"),
    dict(n=512, alpha=0.3),
    dict(n=512, alpha=0.3, bias=True, activation="gelu", residual=True, save_preactivation=True),
    dict(n=512, out_dtype="float32", bias=True, activation="gelu_erf", residual=True),
    dict(n=511),
    dict(n=511, bias=True, activation="relu", residual=True),
    dict(n=512, odd_k=True),
    dict(n=512, odd_k=True, bias=True, activation="gelu", save_preactivation=True),
]


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("options", EPILOGUES, ids=lambda options: "-".join(options))
def test_the_search_space_compiles_without_spills(options: dict[str, Any], pytestconfig: pytest.Config) -> None:
    """`compile_gemm` is strict: it raises if registers spill or ptxas serialises products.

    Of each epilogue's some 190 kernels a thirtieth, from another one on, or with --thorough a sixth.
    """
    step = 6 if pytestconfig.getoption("--thorough") else 30
    first = EPILOGUES.index(options) * step // len(EPILOGUES)
    options = dict(options)
    rest = 1 if options.pop("odd_k", False) else 0  # Also what reads an lhs in place.
    for m, k in ((4096, 4096), (256, 8192)):
        spec = make_spec(m, **(options | dict(n=4096 - 512 + options["n"])), k=k + rest)
        kernels = {}
        for config in matmul.search_space(spec):
            kernels.setdefault(dataclasses.replace(config, strip=1, minor="m"), config)
        for config in list(kernels)[first::step]:
            matmul.compile_gemm(spec, config)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize(
    ("options", "is_large"),
    [(dict(residual=True, out_dtype="float32"), False), (dict(residual=True), True), (dict(out_dtype="float32"), True)],
    ids=["residual-float32", "residual", "float32"],
)
def test_defaults_of_large_tiles_compile_without_spills(options: dict[str, Any], is_large: bool, alpha: float) -> None:
    """192 accumulators a thread leave no registers for a residual in float32."""
    spec = make_spec(1024, 768, 4096, batch=8, alpha=alpha, **options)
    config = dispatch.default_config("matmul", "cuda", spec)
    assert (config.num_accumulators == 192) == is_large
    matmul.compile_gemm(spec, config)


def test_what_spills_names_the_configuration() -> None:
    spec, config = make_spec(512, 512, 512, bias=True, activation="gelu"), Config(256, 192, num_stages=3)
    with pytest.raises(compiler.CompileError, match="must not spill registers") as e:
        matmul.compile_gemm(spec, config)
    note = f"matmul[cuda]: compiled for {spec} with {config}. Use a smaller tile, or leave config out."
    assert e.value.__notes__ == [note]


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "mnk", [(1, 1, 1), (16, 4096, 4096), (1024, 1024, 1024), (4095, 4097, 4093), (8192, 8192, 8192)], ids=str
)
def test_defaults_compile_and_lower(mnk: tuple[int, int, int], layouts: str) -> None:
    spec = make_spec(*mnk, layouts=layouts, bias=True, activation="gelu", save_preactivation=True)
    assert f"@{ffi.TARGET}" in lower(spec, dispatch.default_config("matmul", "cuda", spec))


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize(("spec", "config"), shipped_winners("cuda"), ids=str)
def test_every_shipped_winner_compiles_without_spills(spec: MatmulSpec, config: Config) -> None:
    assert matmul.compile_gemm(spec, config).cubin


def test_kernels_are_shared_by_shapes_and_tile_orders() -> None:
    """For sizes at which blocks have more than one tile."""
    first = matmul.compile_gemm(make_spec(4096, 4096, 512), Config())
    assert matmul.compile_gemm(make_spec(1024, 4096, 72, batch=3), Config(strip=3, minor="n")) is first


def test_kernels_are_shared_by_values_of_alpha() -> None:
    plain, half, third = (matmul.compile_gemm(make_spec(512, 512, 512, alpha=x), Config()) for x in (1.0, 0.5, 1 / 3))
    assert half is third is not plain


def test_only_rows_that_tma_cannot_take_are_padded() -> None:
    count = lambda spec: lower(spec, Config()).count(f"@{ffi.TARGET}")
    assert count(make_spec(70, 72, 80)) == 1
    assert count(make_spec(70, 72, 81, layouts="km.kn")) == 2  # km: rows of 70 elements.
    assert count(make_spec(72, 72, 81, layouts="km.kn")) == 1  # No row is as long as k.
    assert count(make_spec(72, 72, 81)) == 2
    assert count(make_spec(72, 71, 81)) == 3


def test_an_lhs_that_is_read_in_place_is_not_padded() -> None:
    count = lambda spec: lower(spec, Config(in_place=True)).count(f"@{ffi.TARGET}")
    assert count(make_spec(72, 72, 81)) == 1
    assert count(make_spec(72, 68, 81, out_dtype="float32")) == 2


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        (make_spec(72, 72, 80), "rows of the lhs that are not whole 16-byte units; got k=80"),
        (
            make_spec(72, 72, 81, layouts="mk.nk"),
            "k to be the contiguous dimension of the lhs, and n of the rhs; got mk and nk",
        ),
        (make_spec(72, 68, 81), "rows of the result that are whole 16-byte units; got n=68 of bfloat16"),
        (make_spec(7, 72, 81), "rows of each of 8 residues; got m=7"),
        (make_spec(71, 72, 81, batch=2), "matrices that are whole 16-byte units in a batch; got m=71, k=81"),
        (
            make_spec(72, 72, 81, residual=True, save_preactivation=True, activation="relu"),
            "rows of no more than 4 residues beside both a residual and a saved pre-activation; got k=81",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_read_in_place_is_refused(spec: MatmulSpec, needs: str) -> None:
    message = f"matmul[cuda]: in_place needs {needs}. Leave it out."
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        lower(spec, Config(in_place=True))
    assert not any(config.in_place for config in matmul.search_space(spec))


def test_defaults_that_were_measured_fastest_where_k_is_odd() -> None:
    """On an H200, 2026-11-21 (docs/cuda-gemm.md)."""
    default_config = functools.partial(dispatch.default_config, "matmul", "cuda")
    for rest in range(1, 8):
        assert default_config(make_spec(4096, 4096, 4096 + rest)) == Config(cluster_m=2, in_place=True)
    largest = Config(block_m=256, block_n=192, num_stages=3, cluster_n=2, in_place=True)
    assert default_config(make_spec(8192, 768, 50257)) == largest
    assert not default_config(make_spec(4095, 4097, 4093)).in_place
    assert not default_config(make_spec(64, 4096, 4097)).in_place


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(block_m=96), "block_m must be a multiple of 64 for each consumer"),
        (dict(block_m=0), "block_m must be a multiple of 64 for each consumer"),
        (dict(block_m=-128), "block_m must be a multiple of 64 for each consumer"),
        (dict(block_n=176), "block_n must be a multiple of 32 up to 256"),
        (dict(block_k=32), "block_k must be a multiple of 64"),
        (dict(block_m=256), "a consumer's tile must leave each thread 192 accumulators"),
        (dict(num_stages=0), "num_stages and split_k must be positive"),
        (dict(strip=2**16 + 1), "strip must be from 1 to 65536"),
        (dict(split_k=9, num_stages=6), "split_k must be at most 8 without through_memory"),
        (dict(split_k=2, cluster_m=2), "split_k excludes multicast clusters without through_memory"),
        (dict(through_memory=True), "through_memory needs a split_k above 1, and excludes reduce_add"),
        (
            dict(split_k=3, through_memory=True, block_m=256, block_n=192, num_stages=3),
            "with through_memory, a consumer's tile must leave each thread 128 accumulators",
        ),
        (dict(block_n=128, split_k=2, ping_pong=True), "split_k excludes ping_pong"),
        (dict(num_staging=3), "num_staging must be 2 or 4"),
        (dict(split_k=2, num_stages=2), "the partial sums of split_k must fit into the ring"),
        (dict(block_n=160, split_k=2, num_stages=2), "the partial sums of split_k must fit into the ring"),
    ],
    ids=str,
)
def test_config_refuses_what_cannot_run(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'matmul[cuda]: {message}; got Config(')}"):
        Config(**knobs)


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (
            make_spec(512, 512, 512),
            Config(num_stages=5),
            "a block has at most 232448 bytes of shared memory on NVIDIA H200; "
            "got {config}, which needs 279552. Use fewer stages or smaller blocks.",
        ),
        (
            make_spec(512, 512, 512),
            Config(block_m=512, block_n=64, num_stages=2),
            "one copy loads at most 256 rows; got {config}, which needs 512 of lhs. Use smaller blocks.",
        ),
        (
            make_spec(512, 512, 512),
            Config(block_m=64, block_n=64, block_k=320, num_stages=1),
            "one copy loads at most 256 rows; got {config}, which needs 320 of rhs. Use smaller blocks.",
        ),
        (
            make_spec(1, 4, 2**29 - 8, out_dtype="float32"),
            Config(block_m=64, block_n=64, num_stages=2, split_k=264, reduce_add=True),
            "tiles, and steps of k, times split_k must be at most 1073741824; "
            "got split_k=264, which makes 2214592512. Use a smaller split_k.",
        ),
    ],
    ids=["shared memory", "block_m", "block_k", "split_k"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_it_is_compiled(
    spec: MatmulSpec, config: Config, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "compile_gemm", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=f"^{re.escape(f'matmul[cuda]: {message.format(config=config)}')}"):
        lower(spec, config)


@pytest.mark.parametrize(("spec", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(spec: MatmulSpec, reason: str) -> None:
    assert matmul.unsupported(spec) == reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(1, 1, 8, batch=2**31), "counts tiles in 32 bits, and a batch of 2147483648 may have 2147483648"),
        (make_spec(2**15, 8, 9, batch=2**16), "counts rows that it pads in 32 bits, and an operand has 2147483648"),
    ],
    ids=["tiles", "padded rows"],
)
def test_what_is_beyond_32_bits_runs_elsewhere(spec: MatmulSpec, reason: str) -> None:
    assert matmul.unsupported(spec) == reason
    assert dispatch.choose("matmul", spec, None).backend != "cuda"


def test_without_nvrtc_products_run_on_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("compile[nvrtc]: the library cannot be loaded")

    spec = make_spec(512, 512, 512)
    monkeypatch.setattr(calls, "missing", lambda: "needs triton")
    assert dispatch.choose("matmul", spec, None).backend == "cuda"
    monkeypatch.setattr(compiler, "nvrtc_version", missing)
    handler.missing.cache_clear()
    try:
        choice = dispatch.choose("matmul", spec, None)
    finally:
        handler.missing.cache_clear()
    assert choice.backend == "pallas"
    reason = (
        "gemm needs NVRTC: compile[nvrtc]: the library cannot be loaded; few_rows takes at most 64 rows or columns, "
        "the result has 512 and 512; simt on CUDA cores takes and returns float32, not bfloat16, bfloat16 to bfloat16"
    )
    assert choice.passed_over == (("cuda", reason),)


def test_the_model_prefers_tiles_that_fill_the_machine() -> None:
    tile = lambda *sizes: dataclasses.astuple(dispatch.default_config("matmul", "cuda", make_spec(*sizes)))[:2]
    assert tile(4096, 4096, 4096) == (128, 256)
    assert tile(1024, 1024, 1024) == (64, 128)


# On a GPU.


def check(spec: MatmulSpec, config: Config, *, runs: int = 3) -> None:
    """Runs the kernel and holds it to the error rule, and to the same bits in every run."""
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    operands = random_operands(spec)
    on_device = [jnp.asarray(x) for x in operands]
    product = jax.jit(lambda *operands: matmul.run(spec, config, *operands))
    outs = jax.tree.map(np.asarray, product(*on_device))
    bits = lambda results: [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]
    for _ in range(runs - 1):
        assert bits(product(*on_device)) == bits(outs)
    assert_right(spec, outs)


@pytest.mark.gpu
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
def test_schedules(config: Config, layouts: str) -> None:
    check(make_spec(1000, 1112, 1160, layouts=layouts), config, runs=1 if config.reduce_add else 3)


@pytest.mark.gpu
@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("options", [{}, dict(bias=True, activation="gelu"), dict(out_dtype="float32")], ids=str)
@pytest.mark.parametrize("config", [c for c in SCHEDULES.values() if c.split_k == 1], ids=str)
def test_several_tiles_for_each_block(config: Config, options: dict[str, Any], layouts: str) -> None:
    """Results are stored during the products of the next tile."""
    if config.num_accumulators > 128 and options.get("bias"):
        pytest.skip("192 accumulators leave no registers for a bias")
    check(make_spec(2600, 2824, 328, layouts=layouts, **options), config, runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_number_of_stages(num_stages: int) -> None:
    check(make_spec(300, 520, 712), Config(num_stages=num_stages))


@pytest.mark.gpu
@pytest.mark.parametrize("k", [581, 582, 588])
@pytest.mark.parametrize("config", SCHEDULES.values(), ids=SCHEDULES)
def test_an_lhs_read_in_place(config: Config, k: int) -> None:
    spec = make_spec(1111, 1000, k + 512 * (config.split_k - 1), residual=True)
    check(spec, dataclasses.replace(config, in_place=True), runs=1 if config.reduce_add else 3)


@pytest.mark.gpu
@pytest.mark.parametrize("minor", ["m", "n"])
@pytest.mark.parametrize("strip", [1, 3])
@pytest.mark.parametrize("cluster", [(1, 1), (2, 1), (1, 2), (2, 2), (1, 4)], ids=str)
def test_tile_orders(minor: Any, strip: int, cluster: tuple[int, int]) -> None:
    cluster_m, cluster_n = cluster
    config = Config(block_n=128, minor=minor, strip=strip, cluster_m=cluster_m, cluster_n=cluster_n)
    check(make_spec(2000, 2300, 136), config)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1), (5, 7, 3), (63, 65, 129), (1, 300, 70), (300, 1, 70), (129, 257, 1)], ids=str
)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_ragged_sizes(sizes: tuple[int, int, int], layouts: str) -> None:
    check(make_spec(*sizes, layouts=layouts), Config())
    check(make_spec(*sizes, layouts=layouts, batch=3), Config(block_n=128, ping_pong=True, cluster_m=2))


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("block_n", [96, 128, 160])
def test_rows_that_begin_anywhere(block_n: int, out_dtype: str) -> None:
    """Odd rows of 16-bit results begin in the middle of a 4-byte word, every other one."""
    for n in (95, 257, 259):
        spec = make_spec(301, n, 200, batch=2, out_dtype=out_dtype, residual=True)
        check(spec, Config(block_n=block_n, num_stages=3), runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("save", [False, True])
@pytest.mark.parametrize("block_n", [96, 160])
def test_residuals_in_narrow_pieces(block_n: int, save: bool) -> None:
    activation = "relu" if save else None
    spec = make_spec(300, 1000, 200, batch=2, residual=True, activation=activation, save_preactivation=save)
    for num_staging in (2, 4):
        check(spec, Config(block_n=block_n, num_stages=3, num_staging=num_staging), runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "relu_squared", "silu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("n", [1000, 1001])
def test_gradients_of_a_gate(activation: str | None, n: int) -> None:
    spec = make_spec(600, n, 200, layouts="mk.nk", gradients=True, activation=activation)
    configs = [Config(block_n=128, ping_pong=True, num_staging=4), Config(block_n=128), Config(64, 64, split_k=2)]
    wide = Config(block_n=192, ping_pong=True)
    for config in (*configs, wide) if matmul._has_wide_gate(spec, wide) else configs:
        check(spec, config, runs=2)


@pytest.mark.gpu
def test_gates_of_wide_tiles() -> None:
    for activation in (None, "silu", "gelu_erf"):
        spec = make_spec(1000, 1160, 200, activation=activation, multiplier=True, save_preactivation=True)
        check(spec, Config(block_n=192, ping_pong=True), runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(dtype: str, out_dtype: str) -> None:
    for n in (136, 137):
        check(make_spec(72, n, 136, dtypes=(dtype, dtype), out_dtype=out_dtype), Config())


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "relu_squared", "silu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("n", [1000, 1001, 1002])
def test_epilogues(activation: str | None, out_dtype: str, n: int) -> None:
    options = dict(layouts="mk.kn", out_dtype=out_dtype, bias=True, activation=activation)
    for residual, batch in itertools.product((False, True), (None, 2)):
        spec = make_spec(
            600, n, 200, residual=residual, batch=batch, save_preactivation=activation is not None, **options
        )
        for config in (Config(block_n=128), Config(block_n=128, ping_pong=True), Config(block_n=128, split_k=2)):
            check(spec, config, runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("n", [1000, 1001])
def test_alpha(out_dtype: str, n: int) -> None:
    for config in (Config(block_n=128), Config(block_n=128, ping_pong=True), Config(block_n=128, split_k=2)):
        check(make_spec(600, n, 200, out_dtype=out_dtype, alpha=-0.3), config, runs=2)
        epilogue = dict(bias=True, activation="silu", residual=True, save_preactivation=True)
        check(make_spec(600, n, 200, batch=2, out_dtype=out_dtype, alpha=0.3, **epilogue), config, runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("num_staging", [2, 4])
def test_number_of_staging_buffers(num_staging: int) -> None:
    config = Config(num_stages=3, num_staging=num_staging)
    check(make_spec(2000, 2000, 200), config)
    check(make_spec(2000, 2000, 200, residual=True), config)


@pytest.mark.gpu
def test_padding_is_not_read() -> None:
    """NaNs beyond an operand's rows never reach the result."""
    whole = np.full((136, 200), np.nan, np.float32).astype(jnp.bfloat16)
    whole[:, :135] = random_array(np.random.default_rng(0), (136, 135), "bfloat16")
    spec = make_spec(136, 135, 135)
    out = matmul.run(spec, Config(), jnp.asarray(whole)[:, :135], jnp.asarray(whole)[:135, :135])
    assert not np.isnan(np.asarray(out, np.float32)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config", [Config(cluster_m=2), Config(cluster_n=2), Config(cluster_m=2, cluster_n=2)], ids=str
)
def test_a_cluster_ends_together(config: Config) -> None:
    """A block that leaves while its neighbour still releases slots to it breaks the context, now and then."""
    check(make_spec(64, 28672, 4096), config, runs=200)


_SMALL = make_spec(600, 1000, 200, out_dtype="float32", alpha=-0.3)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("config", "spec"),
    [
        (Config(block_n=128), _SMALL),
        (Config(block_n=128, ping_pong=True), _SMALL),
        (Config(block_n=128, split_k=2), _SMALL),
        (Config(cluster_m=2), make_spec(2600, 2824, 328)),
        (Config(256, 192, num_stages=3, cluster_n=2), make_spec(2600, 2824, 328)),
    ],
    ids=str,
)
def test_thousands_of_runs_agree(config: Config, spec: MatmulSpec) -> None:
    """A store by TMA that does not wait for a slow thread of its warp shows in one run of very many."""
    operands = [jnp.asarray(x) for x in random_operands(spec)]
    product = jax.jit(lambda *operands: matmul.run(spec, config, *operands))
    agrees = jax.jit(lambda *pair: jnp.array_equal(*pair))
    first = product(*operands)
    assert jnp.stack([agrees(product(*operands), first) for _ in range(3000)]).all()
