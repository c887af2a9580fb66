"""The CUDA matmul kernel on an emulator of warps, clusters and asynchronous copies (tests/cuda/emulated): it neither
waits for ever nor reads, overwrites or leaves too early, and its indices are right."""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import itertools
import pathlib
import shutil
import subprocess
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from products import LAYOUTS, assert_right, make_spec, random_operands
from test_cuda_matmul import SCHEDULES

from jaxkernels.ffi import custom_call, matmul
from jaxkernels.specs import MatmulSpec

Config = matmul.Config

ROOT = pathlib.Path(__file__).parent.parent
EMULATED = ROOT / "tests" / "cuda" / "emulated"
#: What of the kernel's text no C++ compiler takes, and what stands for it: also a tanh that is exact.
TRANSLATED = {
    "extern __shared__ __align__(1024) unsigned char dynamic_smem[];":
    "unsigned char* dynamic_smem = emulator::shared_memory();",
    'asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));': "y = tanhf(x);",
}  # fmt: skip

#: Each library has an emulator of its own.
_COMPILE = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-fPIC", "-fno-gnu-unique", "-I", str(EMULATED)]
#: Compiled once, they save each library a third of its time.
_HEADERS = "headers.h"

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


class Map(ctypes.Structure):
    """A tensor map of emulated/tma.cuh, innermost dimension first."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 4),
        ("byte_strides", ctypes.c_longlong * 4),
        ("box", ctypes.c_int * 4),
        ("rank", ctypes.c_int),
        ("swizzle_bytes", ctypes.c_int),
        ("element_bytes", ctypes.c_int),
    )


class Compiled(NamedTuple):
    cubin: str
    name: str


class Emulator:
    """Takes the place of the compiler and of the launch."""

    def __init__(self, folder: pathlib.Path):
        self._folder = folder
        self.seed = 0
        #: What to change in the kernel's text.
        self.edits: dict[str, str] = {}

    def compile_kernel(self, source: str, name: str, *, defines: dict[str, Any], **_: Any) -> Any:
        """In place of compiler.compile_kernel."""
        for old, new in (TRANSLATED | self.edits).items():
            if source.count(old) != 1:  # No AssertionError, which some tests wait for.
                raise ValueError(f"to be replaced, {source.count(old)} times in the kernel's text: {old!r}")
            source = source.replace(old, new)
        macros = [f"-D{macro}={int(v) if isinstance(v, bool) else v}" for macro, v in sorted(defines.items())]
        stem = self._folder / hashlib.sha256("".join([source, *macros]).encode()).hexdigest()[:16]
        library = stem.with_suffix(".so")
        if not library.exists():
            text = stem.with_suffix(".cu")
            text.write_text(source)
            command = [*_COMPILE, "-shared", "-include", str(self._folder / _HEADERS)]
            command += [f'-DGEMM_SOURCE="{text}"', *macros, str(EMULATED / "gemm.cc"), "-o", str(library)]
            subprocess.run(command, check=True)
        return Compiled(str(library), name)

    def launch(
        self, cubin: str, name: str, operands: Any, results: Any, *, parameters: Any, grid: Any, block: Any,
        cluster: Any, input_output_aliases: Any, **_: Any,
    ) -> list[jnp.ndarray]:  # fmt: skip
        """In place of custom_call.launch."""
        outs = [np.empty(x.shape, x.dtype) for x in results]
        for out in outs:
            out.view(np.uint8)[...] = 0xFF
        for operand, result in input_output_aliases.items():
            outs[result][...] = operands[operand]
        buffers = [*(np.asarray(x) for x in operands), *outs]
        *matrices, bias, problem = parameters
        flat = itertools.chain.from_iterable(p if isinstance(p, tuple) else (p,) for p in matrices)
        described = [self._map(buffers[p.buffer], p) for p in flat]
        maps = (Map * len(described))(*described)
        bias_data = buffers[bias.buffer].ctypes.data_as(ctypes.c_void_p)
        run = ctypes.CDLL(cubin).run_gemm
        run.restype = ctypes.c_char_p
        error = run(maps, bias_data, problem.tobytes(), grid[0], block[0], cluster[0], self.seed)
        if error:
            raise RuntimeError(error.decode())
        return [jnp.asarray(out) for out in outs]

    def _map(self, buffer: np.ndarray, parameter: custom_call.Parameter) -> Map:
        if isinstance(parameter, custom_call.Pointer):
            return Map(data=buffer.ctypes.data)
        assert isinstance(parameter, custom_call.TensorMap)
        described = custom_call.check(
            "gemm", [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)],
            parameters=[dataclasses.replace(parameter, buffer=0)], grid=(1,), block=(1,),
        )  # fmt: skip
        sizes, strides, box = (described[f"parameter0.{what}"].tolist() for what in ("sizes", "byte_strides", "box"))
        four = lambda kind, values: (kind * 4)(*values, *[1] * (4 - len(values)))
        return Map(
            buffer.ctypes.data + parameter.offset,
            four(ctypes.c_longlong, sizes),
            four(ctypes.c_longlong, [buffer.itemsize, *strides]),
            four(ctypes.c_int, box),
            len(box),
            int(parameter.swizzle.removesuffix("B")),
            buffer.itemsize,
        )


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("emulated")
    headers = folder / _HEADERS
    headers.write_text('#include "ptx.cuh"\n')
    subprocess.run([*_COMPILE, "-x", "c++-header", str(headers), "-o", f"{headers}.gch"], check=True)
    return folder


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Emulator:
    emulator = Emulator(libraries)
    monkeypatch.setattr(matmul, "_compile_cached", matmul._compile_cached.__wrapped__)
    monkeypatch.setattr(matmul.compiler, "compile_kernel", emulator.compile_kernel)
    monkeypatch.setattr(matmul.custom_call, "launch", emulator.launch)

    def pad_rows(spec: MatmulSpec, x: jnp.ndarray) -> jnp.ndarray:
        """Rows that TMA cannot take, to whole cache lines."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 64 if x.shape[-1] % 8 else 0)])

    monkeypatch.setattr(matmul, "_pad_rows", pad_rows)
    return emulator


def check(spec: MatmulSpec, config: Config) -> None:
    """Runs the kernel on a chip of few SMs, so that blocks work on several tiles each, and checks the result."""
    blocks = config.cluster_blocks
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=blocks))
    operands = random_operands(spec)
    assert_right(spec, operands, matmul.run(spec, config, *map(jnp.asarray, operands)))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(("name", "layouts"), list(zip(SCHEDULES, itertools.cycle(LAYOUTS))))
def test_schedules(name: str, layouts: str, emulator: Emulator) -> None:
    config = SCHEDULES[name]
    k = 136 + (config.split_k - 1) * config.block_k
    check(make_spec(config.block_m + 72, config.block_n + 40, k, layouts=layouts), config)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [Config(128, 192, num_stages=3), Config(256, 128, num_stages=2, cluster_n=2), Config(64, 256, cluster_m=2)],
    ids=["alone", "cluster-n", "cluster-m"],
)
def test_operands_of_whole_boxes(config: Config, layouts: str, emulator: Emulator) -> None:
    """One copy loads several boxes of an operand whose blocks and contiguous rows are whole boxes."""
    check(make_spec(config.block_m + 64, config.block_n + 128, 136, batch=2, layouts=layouts), config)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_padded_rows_are_no_whole_boxes(layouts: str, emulator: Emulator) -> None:
    """The kernel is compiled for the sizes of the product, and not for those of what was padded."""
    check(make_spec(185, 251, 72, layouts=layouts), Config(128, 128, num_stages=3))


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("config", "shape", "options"),
    [
        (Config(64, 64), (601, 72, 185), {}),
        (Config(64, 64), (133, 72, 188), {}),
        (Config(128, 96), (301, 72, 190), dict(bias=True, activation="gelu_erf")),
        (Config(64, 64, 128, num_stages=3), (301, 72, 191), dict(residual=True)),
        (Config(64, 64, ping_pong=True), (601, 136, 121), {}),
        (
            Config(64, 96, ping_pong=True), (301, 104, 186),
            dict(residual=True, save_preactivation=True, activation="relu"),
        ),
        (Config(64, 96, ping_pong=True, cluster_n=2), (133, 200, 123), dict(alpha=0.3)),
        (Config(64, 96, cluster_m=2), (1090, 72, 69), dict(bias=True, residual=True)),
        (Config(64, 64, cluster_m=2, cluster_n=2), (301, 132, 66), dict(out_dtype="float32")),
        (Config(64, 64, split_k=2), (133, 64, 250), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 64, num_stages=3, split_k=2, reduce_add=True), (133, 68, 251), dict(out_dtype="float32")),
        (Config(64, 64, minor="n", strip=3), (601, 136, 67), {}),
        (Config(128, 256, num_stages=3), (301, 264, 127), {}),
        (Config(256, 64, num_stages=2), (301, 72, 129), dict(out_dtype="float32")),
        (Config(64, 64, num_stages=1), (133, 64, 251), {}),
    ],
    ids=lambda x: str(x).split("Config")[-1],
)  # fmt: skip
def test_an_lhs_read_in_place(
    config: Config, shape: tuple[int, int, int], options: dict[str, Any], emulator: Emulator
) -> None:
    """Rows of every residue, also where some have a row more than others, and tiles of several blocks of k."""
    config = dataclasses.replace(config, in_place=True)
    spec = make_spec(*shape, **options)
    assert matmul._num_residues(spec, config) == (8 if shape[2] % 2 else 4 if shape[2] % 4 else 2)
    check(spec, config)


@pytest.mark.parametrize(("m", "k"), [(72, 67), (76, 70), (70, 68)])
def test_batches_read_in_place(m: int, k: int, emulator: Emulator) -> None:
    check(make_spec(m, 64, k, batch=2), Config(64, 64, in_place=True))


def check_rows_that_are_no_numbers(config: Config, m: int, k: int) -> None:
    """Read in place, a row has the end of another one before it, and the begin of another one behind it."""
    n = 40
    lhs, rhs = np.random.default_rng(0).standard_normal((m, k), np.float32), np.ones((k, n), np.float32)
    lhs[3::7, -1], lhs[4::14, 0] = np.inf, np.nan
    spec = make_spec(m, n, k)
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=config.cluster_blocks))
    out = matmul.run(spec, config, *(jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs)))
    np.testing.assert_array_equal(np.isfinite(np.asarray(out, np.float32)), np.isfinite(lhs @ rhs))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("k", [67, 121, 124, 250])
@pytest.mark.parametrize(
    "config", [Config(64, 64), Config(128, 64, num_stages=2), Config(64, 64, ping_pong=True)],
    ids=["alone", "shared", "ping-pong"],
)  # fmt: skip
def test_what_is_no_number_stays_in_its_row(config: Config, k: int, emulator: Emulator) -> None:
    check_rows_that_are_no_numbers(dataclasses.replace(config, in_place=True), 203, k)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize(
    ("config", "shape", "options"),
    [
        (Config(64, 96), (130, 200), dict(residual=True)),
        (Config(64, 96, ping_pong=True), (200, 200), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 128, num_staging=4), (130, 264), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 96), (130, 201), dict(residual=True, bias=True)),
        (Config(64, 64), (130, 131), dict(residual=True, out_dtype="float32", bias=True, activation="gelu_erf")),
        (Config(64, 64, split_k=2), (70, 136), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 64, cluster_n=2, num_staging=4), (130, 264), dict(residual=True, bias=True, out_dtype="float32")),
        (Config(64, 96, ping_pong=True), (130, 201), dict(alpha=0.3)),
        (Config(64, 96), (130, 201), dict(bias=True, activation="silu")),
        (Config(64, 64, cluster_m=2), (130, 136), dict(activation="gelu", residual=True, out_dtype="float16")),
        (
            Config(64, 64, split_k=2), (70, 136),
            dict(alpha=-0.3, bias=True, residual=True, save_preactivation=True, activation="gelu", out_dtype="float32"),
        ),
    ],
    ids=[
        "narrow", "narrow-ping-pong-saved", "saved", "odd", "odd-float32", "split-saved", "cluster", "alpha",
        "silu", "gelu-float16", "alpha-split-saved",
    ],
)  # fmt: skip
def test_epilogues(config: Config, shape: tuple[int, int], options: dict[str, Any], emulator: Emulator) -> None:
    check(make_spec(*shape, 136, batch=2, **options), config)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize("k", [24, 136, 456])
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (Config(128, 64, num_stages=3), {}),
        (Config(128, 96, num_stages=3, cluster_m=2), dict(bias=True, alpha=0.3)),
        (Config(128, 128, num_stages=3), dict(bias=True, activation="relu")),
        (Config(128, 256, num_stages=3), dict(activation="gelu_erf")),
        (Config(256, 64, num_stages=2), dict(activation="relu")),
        (Config(256, 64, num_stages=3), dict(out_dtype="float32")),
        (Config(256, 64, num_stages=2, num_staging=4), dict(bias=True, activation="gelu_erf", save_preactivation=True)),
        (Config(256, 96, num_stages=3, cluster_n=2), dict(bias=True, activation="relu")),
    ],
    ids=["tile", "tile-cluster", "part", "quarter", "tile-tall", "half-float32", "half-saved", "half-cluster"],
)
def test_deferred_stores(config: Config, options: dict[str, Any], k: int, emulator: Emulator) -> None:
    """Behind all of the next tile's steps or some."""
    check(make_spec(300, 200, k, batch=2, **options), config)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_short_rings(num_stages: int, emulator: Emulator) -> None:
    for config in (Config(64, 64, num_stages=num_stages), Config(64, 64, num_stages=num_stages, ping_pong=True)):
        check(make_spec(200, 136, 200), config)


@pytest.mark.parametrize("n", [65, 66, 67, 127, 194])
@pytest.mark.parametrize("block_n", [64, 96])
def test_rows_that_begin_anywhere(block_n: int, n: int, emulator: Emulator) -> None:
    """Also where the second product's first row is an odd one."""
    check(make_spec(71, n, 72, batch=2), Config(64, block_n, num_stages=3))


@pytest.mark.parametrize("minor", ["m", "n"])
def test_parts_of_k_that_are_added(minor: Any, emulator: Emulator) -> None:
    config = Config(64, 64, num_stages=3, split_k=3, reduce_add=True, minor=minor, strip=3)
    check(make_spec(200, 136, 456, batch=2, out_dtype="float32"), config)
    check(make_spec(200, 136, 456, bias=True, residual=True, activation="gelu", save_preactivation=True), config)
    check(make_spec(200, 136, 456), dataclasses.replace(config, cluster_m=2, split_k=2))


@pytest.mark.parametrize("minor", ["m", "n"])
def test_tile_orders(minor: Any, emulator: Emulator) -> None:
    for strip in (1, 3):
        check(make_spec(300, 270, 24, batch=2), Config(64, 64, num_stages=3, minor=minor, strip=strip))


@pytest.mark.parametrize("strip", [2**31 - 1, 2**40])
def test_a_strip_may_be_wider_than_all_tiles(strip: int, emulator: Emulator) -> None:
    """Its width times the tiles along the other dimension is beyond 32 bits."""
    check(make_spec(300, 256, 24), Config(64, 64, num_stages=3, strip=strip))


def test_alpha_scales_before_rounding(emulator: Emulator) -> None:
    """The product is 80000, beyond float16; alpha is no part of the kernel."""
    operands = jnp.full((72, 80), 100, jnp.float16), jnp.full((80, 64), 10, jnp.float16)
    for alpha in (1e-3, -5e-4):
        spec = make_spec(72, 64, 80, dtypes=("float16", "float16"), alpha=alpha)
        out = matmul.run(spec, Config(64, 64), *operands)
        np.testing.assert_array_equal(out, np.full((72, 64), 80000 * alpha, np.float16))


def test_infinities_of_a_float32_operand_stay_infinities(emulator: Emulator) -> None:
    spec = make_spec(72, 64, 80, dtypes=("float32", "bfloat16"), out_dtype="float32")
    lhs = np.ones((72, 80), np.float32)
    lhs[3, 5], lhs[7, 2] = np.inf, np.nan
    out = np.asarray(matmul.run(spec, Config(64, 64), jnp.asarray(lhs), jnp.ones((80, 64), jnp.bfloat16)))
    assert np.isposinf(out[3]).all()
    assert np.isnan(out[7]).all()
    assert np.isfinite(np.delete(out, [3, 7], axis=0)).all()


#: Bugs: changes to the kernel's text, and what is then found; None for wrong results.
_NARROW = Config(64, 96, num_stages=3)
_CLUSTER = Config(64, 96, num_stages=3, cluster_m=2)
_WAITS_FOR_READS = "cp_async_bulk_wait_group_read<0>();"
PLANTED: dict[str, tuple[Config, dict[str, str], str | None]] = {
    "residual of the wrong size": (
        _NARROW, {"expect_tx(full, kPieceM * kPieceBytes)": "expect_tx(full, kStagingBytes)"},
        "waits for ever for an mbarrier",
    ),
    "slot released while it is read": (
        _NARROW,
        {
            "Config::kStages > 1 ? 1 : 0": "0",
            "wgmma_wait<kInFlight>();\n      if (kInFlight == 0)": "wgmma_wait<1>();\n      if (kInFlight == 0)",
        },
        None,
    ),
    "buffer filled while it is stored": (
        _NARROW, {f"{_WAITS_FOR_READS}\n    mbarrier_arrive": "mbarrier_arrive"}, None
    ),
    "block leaves before its buffers are stored": (
        _NARROW, {f"{_WAITS_FOR_READS}\n  }}\n\n private": ";\n  }\n\n private"},
        "a store from the memory of a block that has left",
    ),
    "block leaves before its peer's releases arrive": (
        _CLUSTER, {"i < Config::kStages; ++i, place.next()": "i < 0; ++i, place.next()"},
        "an arrival at a barrier of a block that has left",
    ),
    "second half multiplied before it is stored": (
        Config(256, 64, num_stages=3),
        {
            "behind(k);\n        issue<1, 2>(acc, place.slot(), first_lhs, first_rhs, false);":
            "issue<1, 2>(acc, place.slot(), first_lhs, first_rhs, false);\n        behind(k);"
        },
        None,
    ),
    "deferred piece written before its buffer was read": (
        Config(128, 256, num_stages=3), {"      wait_free(p);\n": ""}, None
    ),
    "cluster begins before its barriers are there": (
        _CLUSTER, {"barrier_cluster_wait();\n  }\n\n  if (warpgroup": "}\n\n  if (warpgroup"}, "must be initialised"
    ),
}  # fmt: skip


def check_orders(config: Config, emulator: Emulator) -> None:
    k = 24 if config.block_n == 256 else 520  # Of one step: pieces are stored one behind the other.
    options = dict(residual=config.block_m == 64, out_dtype="float32" if config.block_m == 256 else "bfloat16")
    for emulator.seed in range(8):
        check(make_spec(300, 200, k, **options), config)


@pytest.mark.parametrize(("config", "edits", "message"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_bugs_are_found(config: Config, edits: dict[str, str], message: str | None, emulator: Emulator) -> None:
    emulator.edits = edits
    with pytest.raises(AssertionError if message is None else RuntimeError, match=message):
        check_orders(config, emulator)


@pytest.mark.parametrize(
    "config",
    dict.fromkeys(config for config, *_ in PLANTED.values()),
    ids=lambda config: f"{config.block_m}x{config.block_n}-{config.cluster_m}",
)
def test_without_them_every_order_is_right(config: Config, emulator: Emulator) -> None:
    check_orders(config, emulator)


#: Of an lhs read in place. What is not cleared shows in the rows of others that are no numbers.
IN_PLACE_PLANTED: dict[str, tuple[str, str]] = {
    "rhs read from its first row on": ("k_element - tile.head", "k_element"),
    "rows before the head not cleared": ("if (element < head) store", "if (element + 1 < head) store"),
    "cleared before they are there": (
        "    mbarrier_wait_parity(&shared.full[place.slot()], place.parity());\n    clear_heads", "    clear_heads"
    ),
    "multiplied before all are cleared": (
        "  named_barrier_sync<kWarpgroup>(2 + uniform(threadIdx.x / kWarpgroup));\n", ""
    ),
    "rows of another residue stored": (
        "store(&matrix.of[piece.residue], staging, to);\n    }", "store(&matrix.of[0], staging, to);\n    }"
    ),
}  # fmt: skip


def check_orders_in_place(emulator: Emulator) -> None:
    # Nothing is there early, or waited for later: one slot, half of which a peer fills.
    config = Config(64, 32, num_stages=1, cluster_n=2, in_place=True)
    for emulator.seed in range(8):
        check_rows_that_are_no_numbers(config, 203, 35)
        check(make_spec(75, 40, 67), config)


@pytest.mark.parametrize("edit", IN_PLACE_PLANTED.values(), ids=IN_PLACE_PLANTED)
def test_planted_bugs_of_rows_read_in_place_are_found(edit: tuple[str, str], emulator: Emulator) -> None:
    emulator.edits = dict([edit])
    with pytest.raises(AssertionError):
        check_orders_in_place(emulator)


def test_without_them_every_order_in_place_is_right(emulator: Emulator) -> None:
    check_orders_in_place(emulator)
