"""The CUDA matmul kernel for few rows: what it refuses, that every config compiles without spills, its results on an
emulator (tests/cuda/emulated), and on a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator
from products import LAYOUTS, REFUSALS, assert_right, make_spec, random_operands

from jaxkernels import ffi
from jaxkernels.core import dispatch, hardware
from jaxkernels.ffi.matmul import few_rows, gemm
from jaxkernels.ops.matmul.spec import MatmulSpec

Config = few_rows.Config

#: What a kernel can be asked to do beside the product.
EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alpha": dict(alpha=0.3),
    "bias-gelu": dict(bias=True, activation="gelu"),
    "residual": dict(residual=True),
    "bias-silu-saved": dict(bias=True, activation="silu", save_preactivation=True),
    "relu-float16": dict(activation="relu", out_dtype="float16"),
    "all-float32": dict(
        alpha=-0.3, bias=True, activation="gelu_erf", residual=True, save_preactivation=True, out_dtype="float32"
    ),
    "residual-of-float32": dict(residual=True, residual_dtype="float32"),
    "bias-relu-squared": dict(bias=True, activation="relu_squared"),
    "silu-multiplier": dict(activation="silu", multiplier=True, save_preactivation=True),
}


# Choice.


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("m", "n"), [(1, 6144), (16, 28672), (28672, 8)])
def test_few_rows_take_this_design(m: int, n: int, layouts: str) -> None:
    assert isinstance(dispatch.default_config("matmul", "cuda", make_spec(m, n, 4096, layouts=layouts)), Config)


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (128, 4096, 4096), (65, 4096, 4096)], ids=str)
def test_other_products_do_not(sizes: tuple[int, int, int]) -> None:
    assert isinstance(dispatch.default_config("matmul", "cuda", make_spec(*sizes)), gemm.Config)


def test_parts_of_k_fill_the_chip_where_tiles_do_not() -> None:
    """A short result with a long k is divided; 448 tiles of 64 rows are not."""
    assert dispatch.default_config("matmul", "cuda", make_spec(8, 4096, 14336)).split_k > 1
    assert dispatch.default_config("matmul", "cuda", make_spec(8, 28672, 4096)).split_k == 1


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "sizes", [(1, 8, 8), (64, 64, 64), (8, 4096, 256), (64, 28672, 4096), (24, 100000, 8)], ids=str
)
def test_search_space_is_legal(sizes: tuple[int, int, int], layouts: str) -> None:
    spec = make_spec(*sizes, layouts=layouts)
    assert few_rows.unsupported(spec) is None
    space = list(few_rows.search_space(spec))
    assert 0 < len(space) == len(set(space)) <= 48
    for config in space:
        few_rows._check_limits(spec, config, few_rows._Sides.of(spec))
        assert 0 < few_rows.estimate(spec, config) < 1


# Refusals.


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        (dict(block_rows=96), "block_rows must be 64, 128 or 256"),
        (dict(block_k=32), "block_k must be a multiple of 64 up to 256"),
        (dict(block_k=320), "block_k must be a multiple of 64 up to 256"),
        (dict(num_stages=1), "num_stages must be at least 2"),
        (dict(split_k=3), "split_k must be 1, 2, 4 or 8"),
        (dict(split_k=16), "split_k must be 1, 2, 4 or 8"),
    ],
    ids=str,
)
def test_config_refuses_what_cannot_run(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(f'matmul[cuda]: {message}; got Config(')}"):
        Config(**knobs)


@pytest.mark.parametrize(("spec", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_refusals_of_every_kernel(spec: MatmulSpec, reason: str) -> None:
    assert few_rows.unsupported(spec) == reason


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (make_spec(65, 66, 80), "takes at most 64 rows or columns, the result has 65 and 66"),
        (
            make_spec(8, 80, 80, dtypes=("bfloat16", "float16"), out_dtype="float32"),
            "takes operands of one dtype, not bfloat16 and float16",
        ),
        (
            make_spec(8, 100, 80),
            "loads rows of whole 16-byte units, those of the weights have 100 elements",
        ),
        (
            make_spec(8, 96, 81, layouts="mk.kn"),
            "loads rows of whole 16-byte units, those of the few rows have 81 elements",
        ),
        (
            make_spec(12, 100, 80, layouts="km.nk"),
            "loads rows of whole 16-byte units, those of the few rows have 12 elements",
        ),
        (
            make_spec(8, 2**16, 8, batch=2**21),
            "counts tiles in 32 bits, and a batch may have 2147483648",
        ),
    ],
    ids=["many", "mixed", "weights", "k", "few", "tiles"],
)  # fmt: skip
def test_refusals(spec: MatmulSpec, reason: str) -> None:
    assert few_rows.unsupported(spec) == reason


@pytest.mark.parametrize(
    ("spec", "config", "message"),
    [
        (
            make_spec(8, 512, 512),
            Config(num_stages=14),
            "a block has at most 232448 bytes of shared memory on NVIDIA H200; "
            "got {config}, which needs 248832. Use fewer stages or smaller blocks.",
        ),
        (
            make_spec(8, 512, 192),
            Config(split_k=4),
            "every part of split_k=4 must have a step of 64 of k; got k=192. Use a smaller split_k.",
        ),
    ],
    ids=["shared memory", "split_k"],
)
def test_what_does_not_fit_is_refused_before_it_is_compiled(
    spec: MatmulSpec, config: Config, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows, "compile_few_rows", lambda *_: pytest.fail("compiled"))
    with pytest.raises(ValueError, match=f"^{re.escape(f'matmul[cuda]: {message.format(config=config)}')}"):
        few_rows.run(spec, config, *random_operands(spec))


# Machine code.


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("few", [8, 40, 64])
@pytest.mark.parametrize("options", EPILOGUES.values(), ids=EPILOGUES)
def test_the_search_space_compiles_without_spills(options: dict[str, Any], few: int, layouts: str) -> None:
    """`compile_few_rows` is strict: it raises if registers spill or ptxas serialises products.

    Each of the 96 cases compiles every twelfth of its kernels, and begins with another one.
    """
    first = 4 * list(EPILOGUES.values()).index(options) + LAYOUTS.index(layouts)
    for spec in (make_spec(few, 4096, 4096, layouts=layouts, **options), make_spec(4096, few, 512, **options)):
        for config in list(few_rows.search_space(spec))[first % 12 :: 12]:
            few_rows.compile_few_rows(spec, config)


def test_kernels_are_shared_by_sizes_and_values_of_alpha() -> None:
    first = few_rows.compile_few_rows(make_spec(1, 4096, 512, alpha=0.5), Config())
    assert few_rows.compile_few_rows(make_spec(8, 8192, 4096, batch=3, alpha=0.3), Config()) is first
    assert few_rows.compile_few_rows(make_spec(9, 4096, 512, alpha=0.5), Config()) is not first


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_one_launch_and_nothing_else(layouts: str) -> None:
    """XLA neither pads nor transposes nor converts anything."""
    spec = make_spec(16, 4096, 1024, layouts=layouts, bias=True, activation="silu", residual=True)
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in random_operands(spec)]
    run = jax.jit(lambda *operands: few_rows.run(spec, Config(split_k=2), *operands))
    text = run.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"stablehlo\.(\w+)", text)) <= {"custom_call", "reshape"}
    assert text.count(f"@{ffi.TARGET}") == 1


# On the emulator.


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(few_rows, "_compile_cached", few_rows._compile_cached.__wrapped__)
    with Emulator(libraries, {"jaxkernels::few_rows": DYNAMIC_SMEM}).installed() as emulator:
        yield emulator


def check_emulated(spec: MatmulSpec, config: Config) -> None:
    """Runs the kernel on a chip of one SM, so that CTAs work on several tiles each, and checks the result."""
    assert few_rows.unsupported(spec) is None
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=1))
    assert_right(spec, few_rows.run(spec, config, *map(jnp.asarray, random_operands(spec))))


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("split_k", [1, 2, 4, 8])
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(("m", "n"), [(16, 200), (200, 24)])
def test_emulated_layouts(m: int, n: int, layouts: str, split_k: int, emulator: Emulator) -> None:
    check_emulated(make_spec(m, n, 584, layouts=layouts), Config(64, 64, 3, split_k))


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize(
    ("sizes", "layouts", "config"),
    [
        ((1, 1, 8), "mk.nk", Config(64, 64, 2)),
        ((1, 136, 72), "km.kn", Config(64, 64, 3)),
        ((136, 1, 72), "mk.kn", Config(64, 64, 3)),
        ((3, 65, 200), "mk.nk", Config(64, 64, 2, 2)),
        ((65, 3, 200), "mk.nk", Config(64, 64, 2, 2)),
        ((33, 257, 264), "mk.nk", Config(128, 64, 3, 4)),
        ((257, 33, 264), "mk.nk", Config(256, 64, 2)),
        ((64, 640, 136), "mk.kn", Config(256, 64, 3)),
        ((64, 640, 520), "km.kn", Config(256, 64, 2, 4)),
        ((56, 400, 328), "km.nk", Config(128, 128, 2)),
        ((640, 64, 648), "km.kn", Config(128, 64, 5, 8)),
        ((64, 64, 64), "mk.kn", Config(64, 128, 4)),
    ],
    ids=str,
)
def test_emulated_sizes(sizes: tuple[int, int, int], layouts: str, config: Config, emulator: Emulator) -> None:
    check_emulated(make_spec(*sizes, layouts=layouts), config)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("options", EPILOGUES.values(), ids=EPILOGUES)
@pytest.mark.parametrize(("m", "n", "config"), [(12, 200, Config(64, 64, 3)), (201, 16, Config(128, 64, 3, 4))])
def test_emulated_epilogues(m: int, n: int, config: Config, options: dict[str, Any], emulator: Emulator) -> None:
    check_emulated(make_spec(m, n, 264, batch=2, **options), config)


@NEEDS_COMPILER
def test_emulated_float16(emulator: Emulator) -> None:
    check_emulated(make_spec(9, 72, 136, dtypes=("float16", "float16")), Config(64, 64, 3, 2))


#: Bugs: changes to the kernel's text, and what is then found; None for wrong results.
_ALONE, _CLUSTER = Config(64, 64, 3), Config(64, 64, 3, 4)
_BARRIER = "named_barrier_sync<kConsumerThreads>(1);"
PLANTED: dict[str, tuple[Config, tuple[str, str], str | None]] = {
    "slot released while it is read": (_ALONE, ("    wgmma_wait<1>();\n", ""), None),
    "sums overwritten while they are read": (_ALONE, (f"    {_BARRIER}  // All have", "    // All have"), None),
    "sums read before they are there": (_ALONE, (f"    {_BARRIER}\n  }} else {{\n", "  } else {\n"), None),
    "sums of peers read before they are there": (
        _CLUSTER, ("    mbarrier_wait_parity(&shared.sums_full, 0);\n", ""), ""
    ),
    "sums sent to another CTA": (
        _CLUSTER, ("owner = row / kPartRows", "owner = row % Config::kSplitK"), ""
    ),
    "sums of one part missing": (
        _CLUSTER, ("Config::kBlockRows * Config::kColumns * sizeof(float)", "kPartRows * Config::kColumns * 4"), ""
    ),
    "cluster begins before its barriers are there": (
        _CLUSTER, ("    barrier_cluster_wait();  // All", "    // All"), "must be initialised"
    ),
    "barriers not shown to the copy engine": (
        _ALONE, ("    fence_mbarrier_init();\n", ""), r"a barrier needs fence\.mbarrier_init"
    ),
    "bytes of the weights only": (
        _ALONE, ("Weights::kBytes + few_bytes)", "Weights::kBytes)"), ""
    ),
}  # fmt: skip


def check_orders(config: Config, emulator: Emulator) -> None:
    """Tiles of several steps, and of a single one: then consumers soon write the next tile's sums."""
    for emulator.seed in range(8):
        check_emulated(make_spec(16, 200, 584), config)
        check_emulated(make_spec(16, 520, 64 * config.split_k), config)


@NEEDS_COMPILER
@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("config", "edit", "message"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_bugs_are_found(config: Config, edit: tuple[str, str], message: str | None, emulator: Emulator) -> None:
    emulator.edits = dict([edit])
    error = {None: AssertionError, "": (AssertionError, RuntimeError)}.get(message, RuntimeError)
    with pytest.raises(error, match=message or None):
        check_orders(config, emulator)


@NEEDS_COMPILER
@pytest.mark.parametrize("config", [_ALONE, _CLUSTER], ids=["alone", "cluster"])
def test_without_them_every_order_is_right(config: Config, emulator: Emulator) -> None:
    check_orders(config, emulator)


# On a GPU.


def check(spec: MatmulSpec, config: Config, *, runs: int = 3) -> None:
    """Runs the kernel and holds it to the error rule, and to the same bits in every run."""
    spec = dataclasses.replace(spec, target=hardware.chip_of(jax.devices()[0]))
    on_device = [jnp.asarray(x) for x in random_operands(spec)]
    product = jax.jit(lambda *operands: few_rows.run(spec, config, *operands))
    outs = jax.tree.map(np.asarray, product(*on_device))
    bits = lambda results: [np.asarray(x).tobytes() for x in jax.tree.leaves(results)]
    for _ in range(runs - 1):
        assert bits(product(*on_device)) == bits(outs)
    assert_right(spec, outs)


@pytest.mark.gpu
@pytest.mark.parametrize("split_k", [1, 2, 4, 8])
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_layouts(layouts: str, split_k: int) -> None:
    for block_rows, block_k in ((64, 128), (128, 64), (256, 64)):
        config = Config(block_rows, block_k, 3, split_k)
        check(make_spec(24, 4104, 2056, layouts=layouts), config)
        check(make_spec(4104, 40, 2056, layouts=layouts), config)


@pytest.mark.gpu
@pytest.mark.parametrize("few", [1, 5, 8, 17, 33, 48, 64])
def test_numbers_of_few_rows(few: int) -> None:
    for split_k in (1, 4):
        check(make_spec(few, 1000, 1096), Config(128, 64, 4, split_k))
        check(make_spec(1001, few, 1096, layouts="mk.nk"), Config(64, 64, 8, split_k))


@pytest.mark.gpu
@pytest.mark.parametrize("options", EPILOGUES.values(), ids=EPILOGUES)
def test_epilogues(options: dict[str, Any]) -> None:
    for split_k in (1, 2, 8):
        check(make_spec(12, 1000, 1096, batch=2, **options), Config(64, 64, 4, split_k))
        check(make_spec(1001, 56, 1096, **options), Config(128, 64, 4, split_k))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("m", [1, 16, 64])
def test_every_configuration_of_the_search_space(m: int, dtype: str) -> None:
    spec = make_spec(m, 4096, 4096, dtypes=(dtype, dtype))
    for config in few_rows.search_space(spec):
        check(spec, config, runs=2)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [Config(64, 128, 6), Config(64, 64, 8, 2), Config(128, 64, 5, 8)], ids=str)
def test_thousands_of_runs_agree(config: Config) -> None:
    """A slot or a sum that is overwritten too early shows in one run of very many."""
    spec = make_spec(16, 4096, 4096)
    operands = [jnp.asarray(x) for x in random_operands(spec)]
    product = jax.jit(lambda *operands: few_rows.run(spec, config, *operands))
    agrees = jax.jit(lambda *pair: jnp.array_equal(*pair))
    first = product(*operands)
    assert jnp.stack([agrees(product(*operands), first) for _ in range(3000)]).all()
