"""The SGEMM ladder: each rung compiles without spills, and is right on the emulator and on a GPU."""

from __future__ import annotations

import dataclasses
import pathlib
import runpy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sanitizer
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator

from jaxkernels.core import hardware
from jaxkernels.ffi import CudaKernel
from jaxkernels.ffi.sgemm import RUNGS, Config, Rung, choose, ladder, lookup, search_space, sgemm

ROOT = pathlib.Path(__file__).parent.parent
EVERY_RUNG = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: f"{rung.number}_{rung.name}")

#: Text of the kernels that a C++ compiler refuses, and its replacement.
_STATIC = {kind: f"{kind}& {name} = emulator::static_shared<{kind}>();" for kind, name in
           [("Tiles", "tiles"), ("Buffers", "buffers")]}  # fmt: skip
_DECLARED = {
    "__shared__ Tiles tiles;": _STATIC["Tiles"],
    "__shared__ Buffers buffers;": _STATIC["Buffers"],
    **DYNAMIC_SMEM,
}  # fmt: skip


def named(value: Any) -> str:
    return value.name if isinstance(value, Rung) else str(value)


def translated(rung: Rung) -> dict[str, str]:
    text = rung.path.read_text()
    return {old: new for old, new in _DECLARED.items() if old in text}


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    emulator = Emulator(libraries, {f"sgemm_{rung.name}": translated(rung) for rung in RUNGS})

    def call(kernel: CudaKernel, *operands: Any, **constants: Any) -> jax.Array:
        results = kernel._run(constants, hardware.lookup("NVIDIA H200"), *map(jnp.asarray, operands))
        return results[0] if len(results) == 1 else results

    monkeypatch.setattr(CudaKernel, "__call__", call)
    with emulator.installed():
        yield emulator


def random(m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    draw = np.random.default_rng(m + n + k).standard_normal
    return tuple(draw(shape).astype(np.float32) for shape in ((m, k), (k, n), (m, n)))


def error(rung: Rung, sizes: tuple[int, int, int], *, alpha: float = 1.0, beta: float = 0.0, **options: Any) -> float:
    """The largest error against float64, in units of what float32 sums of this length may be off by."""
    a, b, c = random(*sizes)
    call = lambda *x: sgemm(*x, alpha=alpha, beta=beta, rung=rung, **options)
    # Not traced on the emulator.
    call = jax.jit(call) if jax.default_backend() == "gpu" else call
    out = np.asarray(call(a, b, c) if beta else call(a, b), np.float64)
    wide = [x.astype(np.float64) for x in (a, b, c)]
    expected = alpha * wide[0] @ wide[1] + beta * wide[2]
    scale = abs(alpha) * np.abs(wide[0]) @ np.abs(wide[1]) + abs(beta * wide[2])
    assert out.shape == expected.shape
    worst = np.max(np.abs(out - expected) / scale)
    return np.inf if np.isnan(worst) else worst / (np.sqrt(sizes[2]) * np.finfo(np.float32).eps)


#: m, n, k. Rows of the operands are multiples of 16 bytes in some, and not in others.
SMALL = [(1, 1, 1), (33, 70, 19), (130, 132, 36), (67, 129, 44), (129, 260, 70), (65, 36, 97)]
LARGE = [(128, 128, 128), (1000, 1000, 1000), (1111, 2333, 517), (1, 4097, 1023), (4095, 1, 333), (257, 1030, 4093)]
#: What `choose` chooses among: rung and configuration.
CHOICES = [(rung, config) for rung in RUNGS if rung.tiles for config in ladder.candidates(4096, rung)]
SCALES = [(1.0, 0.0), (-1.5, 0.5), (2.0, 1.0)]


@pytest.mark.sampled(one_in=15)
@EVERY_RUNG
@pytest.mark.parametrize("sizes", [(1024, 1024, 1024), (1111, 2333, 517), (1024, 1023, 1024), (64, 1024, 1023)])
@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_compiles_without_spills(rung: Rung, sizes: tuple[int, int, int], chip: str) -> None:
    target = hardware.lookup(chip)
    if rung.uses_tma and not target.is_hopper:
        return
    m, n, k = sizes
    pad = lambda size: -(-size // 4) * 4 if rung.uses_tma else size
    operands = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((m, pad(k)), (k, pad(n)))]
    constants = dict(sizes=sizes, alpha=1.0, beta=0.0, config=rung.config)
    report = rung.kernel._compiled(rung.kernel._call(operands, constants, target), target).report
    assert report is not None
    assert (report.stack_bytes, report.spill_store_bytes, report.spill_load_bytes) == (0, 0, 0)


@pytest.mark.sampled(one_in=9)
@NEEDS_COMPILER
@EVERY_RUNG
@pytest.mark.parametrize(("sizes", "scales"), list(zip(SMALL, SCALES * 2)), ids=str)
def test_values_on_the_emulator(rung: Rung, sizes: Any, scales: Any, emulator: Emulator) -> None:
    alpha, beta = scales
    assert error(rung, sizes, alpha=alpha, beta=beta) < 1


@pytest.mark.sampled(one_in=4)
@NEEDS_COMPILER
@EVERY_RUNG
def test_c_is_not_read_if_beta_is_zero(rung: Rung, emulator: Emulator) -> None:
    a, b, c = random(34, 40, 9)
    out = sgemm(a, b, np.full_like(c, np.nan), rung=rung)
    np.testing.assert_allclose(np.asarray(out), a @ b, rtol=1e-4, atol=1e-4)


#: Rung -> a correct text of its file, and a wrong one.
BUGS = {
    1: ("% tiles_n * BN", "% tiles_n"),
    2: ("i < k;", "i < k - 1;"),
    3: ("    __syncthreads();  // All threads have read them.\n", ""),
    4: ("tiles.a[row + i][l]", "tiles.a[row][l]"),
    5: ("tiles.b[i / BN][i % BN] =", "tiles.b[i / BN][i % BN ^ 1] ="),
    6: ("tiles.a[i % BK + 3]", "tiles.a[i % BK + 2]"),
    7: ("[at / TN]", "[at % TN]"),
    8: ("kPadding = 5", "kPadding = -5"),
    9: ("i / 4 * 4 * (BM / TM)", "i / 4 * (BM / TM)"),
    10: ("lane / LANES_N * TM", "lane % LANES_N * TM"),
    11: ("      if (tile > 0) named_barrier_sync<kThreads>(kEmpty);\n", ""),
    12: ("    cp_async_wait_group<0>();\n", ""),
    13: ("slot.a[(swizzled ^ k4)", "slot.a[(swizzled + k4)"),
    14: ("tile * BK + rank * kPart", "tile * BK"),
    15: ("const int begin = ", "const int begin = 1 + "),
    16: ("from[swizzled ^ k4]", "from[swizzled + k4]"),
    17: ("return share(block) <= first_step();", "return share(block) < first_step();"),
}


@pytest.mark.sampled(one_in=2)
@NEEDS_COMPILER
@EVERY_RUNG
def test_planted_bugs_are_noticed(rung: Rung, emulator: Emulator) -> None:
    before, after = BUGS[rung.number]
    emulator.edits = {before: after}
    assert is_wrong(rung, emulator)


@pytest.mark.sampled(one_in=3)
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("number", "before", "after"),
    [
        (11, "    named_barrier_sync<kThreads>(kFull + buffer);\n", ""),
        (12, "    __syncthreads();  // The front is complete. All threads have read the back.\n", ""),
        (13, "    shared.ring.consumer_wait(multiplied);\n", ""),
        (13, "    shared.ring.consumer_release(multiplied.slot(), 0);\n", ""),
        (14, "Ring<STAGES, Grid> ring;", "Ring<STAGES> ring;"),
        (14, "  tma::barrier_cluster();  // The barriers of all blocks are initialised.\n", "  __syncthreads();\n"),
        (14, "  if (threadIdx.x == 0) shared.ring.producer_drain(requested);\n", ""),
        (16, "    shared.ring.consumer_wait(multiplied);\n", ""),
        (16, "    shared.ring.producer_wait(filled);\n", ""),
        (16, "    shared.staged_ring.consumer_wait(read);\n", ""),
        (16, "shared.ring.init(kConsumers, 1 + TRANSPOSERS)", "shared.ring.init(kConsumers, TRANSPOSERS)"),
        (17, "      if (step + 1 < work.end) requested.next();\n", ""),
    ],
)
def test_missing_waits_are_noticed(number: int, before: str, after: str, emulator: Emulator) -> None:
    emulator.edits = {before: after}
    rung = lookup(number)
    config = dataclasses.replace(rung.config, STAGES=min(rung.config.STAGES, 2))
    assert is_wrong(rung, emulator, config=config)


#: All tiles of rungs 15 to 17, with k whole or divided.
TILES = [(rung, config) for rung, config in CHOICES if config.SPLIT_K in (1, 2, 4)]
SPLIT = [(rung, config) for rung, config in TILES if config.SPLIT_K > 1]


@pytest.mark.sampled(one_in=14)
@NEEDS_COMPILER
@pytest.mark.parametrize(("rung", "config"), TILES, ids=named)
@pytest.mark.parametrize("sizes", [(67, 129, 300), (130, 68, 70), (1, 1, 31)], ids=str)
def test_tiles_to_choose_from_on_the_emulator(
    rung: Rung, config: Config, sizes: tuple[int, int, int], emulator: Emulator
) -> None:
    """With parts of k that differ in length, or are empty."""
    emulator.is_at_once = rung.streams
    for emulator.seed in range(2):
        assert error(rung, sizes, alpha=-1.5, beta=0.5, config=config) < 1


@pytest.mark.sampled(one_in=2)
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    tma::barrier_cluster();  // The partial sums of all blocks are complete.\n", ""),
        ("    tma::barrier_cluster();  // No block leaves while another reads its partial sums.\n", ""),
        ("    __syncthreads();  // All warps have read the slots.\n", ""),
        ("const int at_row = part * kRows + i", "const int at_row = i"),
    ],
)
def test_split_k_with_planted_bugs(before: str, after: str, emulator: Emulator) -> None:
    emulator.edits = {before: after}
    assert is_wrong(lookup("split_k"), emulator, config=SPLIT[0][1], k=300)


@pytest.mark.sampled(one_in=2)
@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        if (threadIdx.x == 0) wait_for_turn(&has_given[other], 1);\n", ""),
        ("      named_barrier_sync<32 * kConsumers>(1);  // All consumers have written.\n", ""),
        ("        named_barrier_sync<32 * kConsumers>(1);  // The other block's sums are there for all.\n", ""),
        ("all / blocks * block + min(all % blocks, block)", "all / blocks * block"),
        ("} while (!work.begins_with(other));", "} while (false);"),
    ],
)
def test_stream_k_with_planted_bugs(before: str, after: str, emulator: Emulator) -> None:
    emulator.edits = {before: after}
    emulator.is_at_once = True
    assert is_wrong(lookup("stream_k"), emulator, k=700)


def is_wrong(rung: Rung, emulator: Emulator, k: int = 40, **options: Any) -> bool:
    """Whether one of a few runs fails or gives a wrong result."""
    for seed in range(6):
        emulator.seed = seed
        try:
            if not error(rung, (134, 137, k + 32 * seed), alpha=2.0, beta=-1.0, **options) < 1:
                return True
        except RuntimeError:
            return True
    return False


# Python.


def test_files_and_the_table_agree() -> None:
    assert [rung.number for rung in RUNGS] == list(range(1, len(RUNGS) + 1))
    assert {rung.path for rung in RUNGS} == set(ladder._FOLDER.glob("*.cu"))
    assert lookup(6) is lookup("vectorised") is RUNGS[5]


X = np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((X, X), {}, r"a must have as many columns as b has rows; got \(8, 4\) and \(8, 4\)\. Transpose one\."),
        ((X[0], X), {}, r"a must be a float32 matrix; got float32\[4\]\."),
        ((X, X.T.astype(np.int32)), {}, r"b must be a float32 matrix; got int32\[4, 8\]\. Convert it"),
        ((X, X[:0].T), {}, r"sizes of b must be 1 to 2\^31 - 1; got \(4, 0\)\."),
        ((X, X.T, X), {}, r"c must have the shape of the product, \(8, 8\); got \(8, 4\)\."),
        ((X, X.T), dict(beta=1.0), r"beta must be 0 if c is not given; got beta=1\.0\. Give c\."),
        ((X, X.T), dict(alpha=np.inf), r"alpha must be a finite Python number; got inf\."),
        ((X, X.T), dict(alpha=X), r"alpha must be a finite Python number; got ndarray\. Scale the result"),
        ((X, X.T), dict(rung=99), r"rung must be a number or name of the ladder; got 99\. Use one of 1 \(naive\), "),
        ((X, X.T), dict(rung="fast"), r"rung must be a number or name of the ladder; got 'fast'\."),
    ],
)
def test_refusals(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^sgemm\[cuda\]: {message}"):
        sgemm(*arguments, **options)


def test_other_platforms_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="runs on CUDA devices"):
        jax.jit(sgemm).trace(X, X.T).lower(lowering_platforms=("cpu",))


@pytest.mark.sampled(one_in=6)
@EVERY_RUNG
def test_lowers_without_a_gpu(rung: Rung) -> None:
    """With donated C, the result takes its place."""
    f = jax.jit(lambda a, b, c: sgemm(a, b, c, alpha=2.0, beta=1.0, rung=rung), donate_argnums=2)
    text = f.trace(*random(33, 30, 7)).lower(lowering_platforms=("cuda",)).as_text()
    assert f"sgemm_{rung.name}" in text
    assert "output_operand_alias" in text


def test_search_space() -> None:
    legal, refused = search_space()
    assert len(legal) + sum(refused.values()) == 3 * 3 * 3 * 3 * 3
    assert len(legal) > 20
    assert lookup("autotuned").config in legal
    assert len(refused) == 4, "a rule excludes nothing"


@pytest.mark.sampled(one_in=7)
@pytest.mark.parametrize(("rung", "config"), CHOICES, ids=named)
def test_tiles_to_choose_from_compile(rung: Rung, config: Config) -> None:
    target = hardware.lookup("NVIDIA H200")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    constants = dict(sizes=(1024, 1024, 1024), alpha=1.0, beta=0.0, config=config)
    call = rung.kernel._call([x, x], constants, target)
    report = rung.kernel._compiled(call, target).report
    # The model assumes config.BLOCKS blocks on an SM. Its 64 K registers, of which threads get multiples of 8, and its
    # shared memory suffice for them.
    assert config.BLOCKS * config.threads * -(-report.registers // 8) * 8 <= 65536
    assert config.BLOCKS * (call.arguments["smem_bytes"] + 1024) <= 228 * 1024


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if rung.tiles], ids=named)
def test_tiles_are_chosen_by_size(rung: Rung) -> None:
    chosen = lambda *sizes: choose(*sizes, rung)
    assert chosen(8192, 8192, 8192).SPLIT_K == 1
    assert rung.streams or chosen(1024, 1024, 1024).SPLIT_K > 1
    assert chosen(100, 100, 60).SPLIT_K == 1
    assert chosen(1024, 1024, 1024).BM * chosen(1024, 1024, 1024).BN > chosen(128, 128, 128).BM * 64


@pytest.mark.parametrize(
    "sizes", [(8192, 8192, 8192), (4096, 4096, 4096), (1000, 999, 70), (300, 200, 1), (128, 64, 9999)]
)
@pytest.mark.parametrize("config", ladder.candidates(4096, "stream_k"), ids=str)
def test_stream_k_gives_all_blocks_as_many_steps(sizes: tuple[int, int, int], config: Config) -> None:
    m, n, k = sizes
    tiles, steps = -(-m // config.BM) * -(-n // config.BN), -(-k // config.BK)
    blocks, whole_tiles = ladder._stream(config, m, n, k)
    assert whole_tiles % blocks == 0
    assert 1 <= blocks <= 132 * config.BLOCKS
    # Fewer blocks where a block would have too little to do, or a tile too many blocks.
    assert blocks == 132 * config.BLOCKS or blocks == tiles or tiles * steps <= blocks * 5 or blocks == 16 * tiles
    assert tiles - whole_tiles < 2 * blocks
    assert tiles == whole_tiles or (tiles - whole_tiles) * steps >= blocks


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("config", search_space()[0], ids=str)
def test_search_space_compiles(config: Config) -> None:
    rung, target = lookup("autotuned"), hardware.lookup("NVIDIA H200")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    constants = dict(sizes=(1024, 1024, 1024), alpha=1.0, beta=0.0, config=config)
    rung.kernel._compiled(rung.kernel._call([x, x], constants, target), target)


# On a GPU.


@pytest.mark.gpu
@EVERY_RUNG
@pytest.mark.parametrize(("sizes", "scales"), list(zip(SMALL + LARGE, SCALES * 4)), ids=str)
def test_values(rung: Rung, sizes: Any, scales: Any) -> None:
    alpha, beta = scales
    assert error(rung, sizes, alpha=alpha, beta=beta) < 1


@pytest.mark.gpu
@pytest.mark.parametrize(("rung", "config"), CHOICES, ids=named)
@pytest.mark.parametrize("sizes", [(300, 517, 1133), (257, 1030, 4093), (1, 1, 1)], ids=str)
def test_split_k(rung: Rung, config: Config, sizes: tuple[int, int, int]) -> None:
    assert error(rung, sizes, alpha=-1.5, beta=0.5, config=config) < 1


@pytest.mark.gpu
@EVERY_RUNG
def test_runs_are_bitwise_equal(rung: Rung) -> None:
    a, b, _ = random(1000, 1111, 515)
    f = jax.jit(lambda a, b: sgemm(a, b, rung=rung))
    np.testing.assert_array_equal(np.asarray(f(a, b)), np.asarray(f(a, b)))


@pytest.mark.gpu
@pytest.mark.parametrize("config", search_space()[0][::5], ids=str)
def test_search_space_is_right(config: Config) -> None:
    assert error(lookup("autotuned"), (300, 517, 133), config=config) < 1


_SANITIZED = """
import functools
from jaxkernels.ffi.sgemm import RUNGS, sgemm

def run(rung):
    a, b = (np.ones(shape, np.float32) for shape in ((300, 133), (133, 517)))
    return jax.jit(functools.partial(sgemm, rung=rung))(a, b)

steps = {rung.name: functools.partial(run, rung) for rung in RUNGS}
"""


#: racecheck does not see that __syncwarp() and an arrival of one lane at an mbarrier order what the other lanes did.
#: For it, all lanes arrive in the rungs whose warps write shared memory for other warps.
_FOLLOWED = [
    ("if (lane == 0) tma::mbarrier_arrive(&shared.ring.full", "tma::mbarrier_arrive(&shared.ring.full"),
    ("shared.ring.init(kConsumers, 1 + TRANSPOSERS)", "shared.ring.init(32 * kConsumers, 1 + 32 * TRANSPOSERS)"),
    (
        "shared.ring.consumer_release(multiplied.slot(), 0)",
        "tma::mbarrier_arrive(&shared.ring.empty[multiplied.slot()])",
    ),
]
_FOLLOW = f"""
import pathlib, shutil, tempfile
from jaxkernels.ffi.sgemm import ladder

folder = pathlib.Path(tempfile.mkdtemp()) / "sgemm"
shutil.copytree(pathlib.Path(ladder.__file__).parent, folder)
for path in (folder / "16_transposed.cu", folder / "17_stream_k.cu"):
    text = path.read_text()
    for old, new in {_FOLLOWED!r}:
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)
original = ladder.Rung.path.fget
ladder.Rung.path = property(lambda rung: folder / original(rung).name)
"""


@pytest.mark.gpu
@pytest.mark.parametrize("first", range(0, len(RUNGS), 3))
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_finds_nothing(tool: str, first: int) -> None:
    names = tuple(rung.name for rung in RUNGS[first : first + 3])
    if tool == "memcheck":
        sanitizer.assert_finds_nothing_else(tool, _SANITIZED, names)
    else:
        sanitizer.assert_finds_nothing_else(tool, _FOLLOW + _SANITIZED, ("planted", *names))


def test_what_racecheck_gets_is_in_the_files() -> None:
    for name in ("16_transposed.cu", "17_stream_k.cu"):
        text = (ROOT / "ffi" / "sgemm" / name).read_text()
        assert [text.count(old) for old, _ in _FOLLOWED] == [1, 1, 1]


def test_configs_print_what_they_set() -> None:
    assert str(dataclasses.replace(Config(32, 64), SPLIT_K=2)) == "BM=32, BN=64, SPLIT_K=2"


# The page.


@pytest.fixture(scope="module")
def page() -> Any:
    return runpy.run_path(str(ROOT / "docs" / "sgemm.py"))


def test_the_page_and_its_pictures_are_up_to_date(page: Any) -> None:
    """Otherwise run `python docs/sgemm.py`."""
    text = page["PAGE"].read_text()
    assert page["page"](text) == text
    for name, draw in page["PICTURES"].items():
        assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text() == draw()


def test_bank_conflicts_are_those_that_the_files_claim(page: Any) -> None:
    assert [page["conflicts"](reads) for reads in page["reads_of_b"]().values()] == [2, 1, 4, 1]
