"""The CUDA matmul kernel on an emulator of warps, clusters and asynchronous copies (tests/cuda/emulated): it neither
waits for ever nor reads, overwrites or leaves too early, and its indices are right."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from emulated import DYNAMIC_SMEM, NEEDS_COMPILER, Emulator
from products import LAYOUTS, assert_right, make_spec, random_operands
from test_cuda_matmul import SCHEDULES

from jaxkernels.ffi.matmul import gemm as matmul
from jaxkernels.ops.matmul.spec import MatmulSpec

Config = matmul.Config

#: Text of the kernels that a C++ compiler refuses, and its replacement.
TRANSLATED = {"jaxkernels::gemm": DYNAMIC_SMEM, "jaxkernels::pad_rows": {}}

pytestmark = NEEDS_COMPILER


@pytest.fixture
def emulator(libraries: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulator]:
    monkeypatch.setattr(matmul, "_compile_cached", matmul._compile_cached.__wrapped__)
    monkeypatch.setattr(matmul, "_compile_pad", matmul._compile_pad.__wrapped__)
    with Emulator(libraries, TRANSLATED).installed() as emulator:
        yield emulator


def check(spec: MatmulSpec, config: Config, clusters: int = 1) -> None:
    """Runs the kernel on a chip of few SMs, so that blocks work on several tiles each, and checks the result."""
    blocks = config.cluster_blocks * clusters
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=blocks))
    operands = random_operands(spec)
    assert_right(spec, matmul.run(spec, config, *map(jnp.asarray, operands)))


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize(("name", "layouts"), list(zip(SCHEDULES, itertools.cycle(LAYOUTS))))
def test_schedules(name: str, layouts: str, emulator: Emulator) -> None:
    config = SCHEDULES[name]
    emulator.is_at_once = config.through_memory
    k = 136 + (config.split_k - 1) * config.block_k
    check(make_spec(config.block_m + 72, config.block_n + 40, k, layouts=layouts), config)


@pytest.mark.sampled(one_in=16)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [Config(128, 192, num_stages=3), Config(256, 128, num_stages=2, cluster_n=2), Config(64, 256, cluster_m=2)],
    ids=["alone", "cluster-n", "cluster-m"],
)
def test_operands_of_whole_boxes(config: Config, layouts: str, emulator: Emulator) -> None:
    """One copy loads several boxes of an operand whose blocks and contiguous rows are whole boxes."""
    check(make_spec(config.block_m + 64, config.block_n + 128, 136, batch=2, layouts=layouts), config)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_padded_rows_are_no_whole_boxes(layouts: str, emulator: Emulator) -> None:
    """The kernel is compiled for the sizes of the product, not for the padded sizes."""
    check(make_spec(185, 251, 72, layouts=layouts), Config(128, 128, num_stages=3))


def test_padding_adds_nothing_to_a_sum(emulator: Emulator) -> None:
    """Both operands have padded rows of k, so that elements of the padding meet each other."""
    check(make_spec(72, 64, 67, layouts="mk.nk"), Config(64, 64))


@pytest.mark.sampled(one_in=16)
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
    """Rows of every residue (some residues have one row more than others), and tiles of several blocks of k."""
    config = dataclasses.replace(config, in_place=True)
    spec = make_spec(*shape, **options)
    assert matmul._num_residues(spec, config) == (8 if shape[2] % 2 else 4 if shape[2] % 4 else 2)
    check(spec, config)


@pytest.mark.parametrize(("m", "k"), [(72, 67), (76, 70), (70, 68)])
def test_batches_read_in_place(m: int, k: int, emulator: Emulator) -> None:
    check(make_spec(m, 64, k, batch=2), Config(64, 64, in_place=True))


def check_rows_that_are_no_numbers(config: Config, m: int, k: int) -> None:
    """A row that is read in place has other rows directly before and after it."""
    n = 40
    lhs, rhs = np.random.default_rng(0).standard_normal((m, k), np.float32), np.ones((k, n), np.float32)
    lhs[3::7, -1], lhs[4::14, 0] = np.inf, np.nan
    spec = make_spec(m, n, k)
    spec = dataclasses.replace(spec, target=dataclasses.replace(spec.target, num_sms=config.cluster_blocks))
    out = matmul.run(spec, config, *(jnp.asarray(x, jnp.bfloat16) for x in (lhs, rhs)))
    np.testing.assert_array_equal(np.isfinite(np.asarray(out, np.float32)), np.isfinite(lhs @ rhs))


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize("k", [67, 121, 124, 250])
@pytest.mark.parametrize(
    "config", [Config(64, 64), Config(128, 64, num_stages=2), Config(64, 64, ping_pong=True)],
    ids=["alone", "shared", "ping-pong"],
)  # fmt: skip
def test_what_is_no_number_stays_in_its_row(config: Config, k: int, emulator: Emulator) -> None:
    check_rows_that_are_no_numbers(dataclasses.replace(config, in_place=True), 203, k)


@pytest.mark.sampled(one_in=10)
@pytest.mark.parametrize(
    ("config", "shape", "options"),
    [
        (Config(64, 96), (130, 200), dict(residual=True)),
        (Config(64, 96, ping_pong=True), (200, 200), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 128, num_staging=4), (130, 264), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 96), (130, 201), dict(residual=True, bias=True)),
        (Config(64, 96), (130, 200), dict(multiplier=True, activation="silu", save_preactivation=True)),
        (Config(64, 64, split_k=2), (70, 131), dict(multiplier=True, bias=True, out_dtype="float32")),
        (Config(64, 96), (130, 200), dict(gradients=True, activation="silu")),
        (Config(64, 128, ping_pong=True, num_staging=4), (200, 264), dict(gradients=True, activation="silu")),
        (Config(64, 64, num_staging=4), (130, 131), dict(gradients=True, activation="gelu_erf")),
        (Config(128, 192, num_stages=2, ping_pong=True), (260, 392), dict(gradients=True, activation="silu")),
        (Config(64, 64, split_k=2), (70, 136), dict(gradients=True, activation="gelu", out_dtype="float32")),
        (Config(128, 64, cluster_n=2), (130, 200), dict(gradients=True, activation="relu", alpha=0.3)),
        (Config(64, 64), (130, 136), dict(gradients=True, out_dtype="float16")),
        (Config(64, 64), (130, 131), dict(gradients=True, activation="relu_squared", out_dtype="float32")),
        (Config(64, 64), (130, 131), dict(residual=True, out_dtype="float32", bias=True, activation="gelu_erf")),
        (Config(64, 64, split_k=2), (70, 136), dict(residual=True, save_preactivation=True, activation="relu")),
        (Config(64, 64, cluster_n=2, num_staging=4), (130, 264), dict(residual=True, bias=True, out_dtype="float32")),
        (Config(64, 96, ping_pong=True), (130, 201), dict(alpha=0.3)),
        (Config(64, 96), (130, 201), dict(bias=True, activation="silu")),
        (Config(64, 96), (130, 200), dict(bias=True, activation="relu_squared", save_preactivation=True)),
        (Config(64, 64, cluster_m=2), (130, 136), dict(activation="gelu", residual=True, out_dtype="float16")),
        (
            Config(64, 64, split_k=2), (70, 136),
            dict(alpha=-0.3, bias=True, residual=True, save_preactivation=True, activation="gelu", out_dtype="float32"),
        ),
    ],
    ids=[
        "narrow", "narrow-ping-pong-saved", "saved", "odd", "gated-saved", "gated-split-odd", "gradients",
        "gradients-ping-pong", "gradients-odd", "gradients-wide", "gradients-split-float32", "gradients-cluster",
        "gradients-none", "gradients-odd-float32", "odd-float32", "split-saved", "cluster", "alpha", "silu",
        "relu-squared-saved", "gelu-float16", "alpha-split-saved",
    ],
)  # fmt: skip
def test_epilogues(config: Config, shape: tuple[int, int], options: dict[str, Any], emulator: Emulator) -> None:
    check(make_spec(*shape, 136, batch=2, **options), config)


@pytest.mark.sampled(one_in=16)
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


def check_turns_of_one_step(emulator: Emulator) -> None:
    for emulator.seed in (0, 18):
        for n in (256, 320):
            check(make_spec(32, n, 56), Config(64, 64, num_stages=3, ping_pong=True))


def test_turns_of_one_step(emulator: Emulator) -> None:
    """A warp may still store a tile while the others of its consumer multiply the next one. The planted bug gives all
    warps the turn that one warp has ended."""
    check_turns_of_one_step(emulator)
    arrival = "mbarrier_arrive(&shared.turn[consumer ^ 1][warp]);"
    emulator.edits = {
        f"threadIdx.x % kWarp == 0) {{\n            {arrival}": "threadIdx.x % kWarpgroup == 0) {\n"
        "            for (int i = 0; i < 4; ++i) mbarrier_arrive(&shared.turn[consumer ^ 1][i]);",
    }
    with pytest.raises(RuntimeError, match="waits for ever for an mbarrier"):
        check_turns_of_one_step(emulator)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("n", [65, 66, 67, 127, 194])
@pytest.mark.parametrize("block_n", [64, 96])
def test_rows_that_begin_anywhere(block_n: int, n: int, emulator: Emulator) -> None:
    """Also if the first row of the second product is odd."""
    check(make_spec(71, n, 72, batch=2), Config(64, block_n, num_stages=3))


@pytest.mark.parametrize("minor", ["m", "n"])
def test_parts_of_k_that_are_added(minor: Any, emulator: Emulator) -> None:
    config = Config(64, 64, num_stages=3, split_k=3, reduce_add=True, minor=minor, strip=3)
    check(make_spec(200, 136, 456, batch=2, out_dtype="float32"), config)
    check(make_spec(200, 136, 456, bias=True, residual=True, activation="gelu", save_preactivation=True), config)
    check(make_spec(200, 136, 456), dataclasses.replace(config, cluster_m=2, split_k=2))


@pytest.fixture
def at_once(emulator: Emulator) -> Emulator:
    emulator.is_at_once = True
    return emulator


_PARTS = Config(64, 64, num_stages=3, split_k=3, through_memory=True)


@pytest.mark.sampled(one_in=5)
@pytest.mark.parametrize(
    ("config", "clusters", "shape", "options"),
    [
        (_PARTS, 3, (64, 64, 200), {}),  # 4 steps in 3 parts.
        (_PARTS, 4, (130, 130, 264), dict(bias=True, activation="gelu")),  # 27 parts for 4 blocks.
        (_PARTS, 18, (130, 72, 520), dict(batch=2, residual=True)),
        (dataclasses.replace(_PARTS, split_k=7), 7, (72, 40, 1400), dict(residual=True, save_preactivation=True)),
        (_PARTS, 5, (133, 67, 700), dict(out_dtype="float32", alpha=0.3)),
        (dataclasses.replace(_PARTS, cluster_m=2), 3, (200, 136, 456), {}),
        (dataclasses.replace(_PARTS, cluster_n=2), 2, (200, 130, 456), dict(bias=True)),
        (dataclasses.replace(_PARTS, in_place=True), 5, (133, 72, 457), {}),
        (Config(128, 96, num_stages=2, split_k=2, through_memory=True), 3, (200, 200, 392), dict(batch=2)),
        (Config(256, 64, num_stages=2, split_k=2, through_memory=True, minor="n"), 2, (300, 200, 264), {}),
    ],
    ids=["tile", "many", "batch", "saved", "rows", "cluster-m", "cluster-n", "in-place", "two-consumers", "tall"],
)  # fmt: skip
def test_parts_of_k_that_meet_in_memory(
    config: Config, clusters: int, shape: tuple[int, int, int], options: dict[str, Any], at_once: Emulator
) -> None:
    for at_once.seed in range(2):
        check(make_spec(*shape, **options), config, clusters)


#: Changes to the text of the kernel.
IN_MEMORY_PLANTED: dict[str, tuple[str, str]] = {
    "sums taken before they are there": (
        "    if (threadIdx.x == kWarpgroup) wait_for_turn(&exchange.has_given[other], 1);\n", ""
    ),
    "given before all have written": (
        "  named_barrier_sync<kThreadsOfTile>(1);  // All consumers have written.\n", ""
    ),
    "taken by threads that did not wait": (
        "    named_barrier_sync<kThreadsOfTile>(1);  // The other part's sums are there for all.\n", ""
    ),
    "sums of some parts only": ("part > 0; --part) {", "part > 1; --part) {"),
    "sums of another tile": ("other -= schedule.num_between();", "other -= 1;"),
    "every part stored": ("Config::kSplitK - 1;\n", "0;\n"),
}  # fmt: skip


def check_in_memory(emulator: Emulator) -> None:
    for emulator.seed in range(6):
        check(make_spec(128, 64, 700), Config(128, 64, num_stages=2, split_k=5, through_memory=True), 5)
        check(make_spec(200, 72, 300), _PARTS, 4)


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("edit", IN_MEMORY_PLANTED.values(), ids=IN_MEMORY_PLANTED)
def test_planted_bugs_of_sums_in_memory_are_found(edit: tuple[str, str], at_once: Emulator) -> None:
    at_once.edits = dict([edit])
    with pytest.raises((AssertionError, RuntimeError)):
        check_in_memory(at_once)


def test_without_them_sums_in_memory_are_right(at_once: Emulator) -> None:
    check_in_memory(at_once)


@pytest.mark.parametrize("minor", ["m", "n"])
def test_tile_orders(minor: Any, emulator: Emulator) -> None:
    for strip in (1, 3):
        check(make_spec(300, 270, 24, batch=2), Config(64, 64, num_stages=3, minor=minor, strip=strip))


def test_a_strip_may_be_wider_than_all_tiles(emulator: Emulator) -> None:
    check(make_spec(300, 256, 24), Config(64, 64, num_stages=3, strip=2**16))


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


#: Bugs: changes to the kernel's text, and what is then found; None for wrong results, _EITHER for those or an error.
_EITHER = "."
_NARROW = Config(64, 96, num_stages=3)
_CLUSTER = Config(64, 96, num_stages=3, cluster_m=2)
_WAITS_FOR_READS = "cp_async_bulk_wait_group_read<0>();"
_FENCES_STORE = "  tma::fence_proxy_async();\n  __syncwarp();\n  if"
_UNFENCED_STORE = (
    r"^gemm: block \d+ thread \d+: a store reads a byte at 0x\w+ of shared memory, "
    r"which block \d+ thread \d+ wrote without fence\.proxy\.async before it was issued$"
)
PLANTED: dict[str, tuple[Config, dict[str, str], str | None]] = {
    "residual of the wrong size": (
        _NARROW, {"staging, full, Buffer::kPieceBytes": "staging, full, kStagingBytes"},
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
        _NARROW, {f"{_WAITS_FOR_READS}\n    tma::mbarrier_arrive": "mbarrier_arrive"}, _EITHER
    ),
    "block leaves before its buffers are stored": (
        _NARROW, {f"{_WAITS_FOR_READS}\n  }}\n\n private": ";\n  }\n\n private"},
        "a store from the memory of a block that has left",
    ),
    "block leaves before its peer's releases arrive": (
        _CLUSTER, {"i < kStages; ++i, place.next()": "i < 0; ++i, place.next()"},
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
        Config(128, 256, num_stages=3), {"      wait_free(p);\n": ""}, _UNFENCED_STORE
    ),
    "cluster begins before its barriers are there": (
        _CLUSTER, {"barrier_cluster_wait();\n  }\n\n  if (warpgroup": "}\n\n  if (warpgroup"}, "must be initialised"
    ),
    "stored without a proxy fence": (
        _NARROW, {_FENCES_STORE: "  __syncwarp();\n  if"}, _UNFENCED_STORE
    ),
    "proxy fence behind the barrier": (
        _NARROW, {_FENCES_STORE: "  __syncwarp();\n  tma::fence_proxy_async();\n  if"}, _UNFENCED_STORE
    ),
    "barriers not shown to the copy engine": (
        _NARROW, {"    fence_mbarrier_init();\n": ""}, r"a barrier needs fence\.mbarrier_init"
    ),
}  # fmt: skip


def check_orders(config: Config, emulator: Emulator) -> None:
    k = 24 if config.block_n == 256 else 520  # 24 is a single step, so pieces are stored one after the other.
    options = dict(residual=config.block_m == 64, out_dtype="float32" if config.block_m == 256 else "bfloat16")
    for emulator.seed in range(8):
        check(make_spec(300, 200, k, **options), config)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(("config", "edits", "message"), PLANTED.values(), ids=PLANTED.keys())
def test_planted_bugs_are_found(config: Config, edits: dict[str, str], message: str | None, emulator: Emulator) -> None:
    emulator.edits = edits
    error = {None: AssertionError, _EITHER: (AssertionError, RuntimeError)}.get(message, RuntimeError)
    with pytest.raises(error, match=message):
        check_orders(config, emulator)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "config",
    dict.fromkeys(config for config, *_ in PLANTED.values()),
    ids=lambda config: f"{config.block_m}x{config.block_n}-{config.cluster_m}",
)
def test_without_them_every_order_is_right(config: Config, emulator: Emulator) -> None:
    check_orders(config, emulator)


#: Bugs with an lhs read in place. Elements that are not cleared show, because neighbouring rows have NaN.
IN_PLACE_PLANTED: dict[str, tuple[str, str]] = {
    "rhs read from its first row on": ("k_element - tile.head", "k_element"),
    "rows before the head not cleared": ("if (element < head) store", "if (element + 1 < head) store"),
    "cleared before they are there": (
        "    shared.ring.consumer_wait(place);\n    clear_heads", "    clear_heads"
    ),
    "multiplied before all are cleared": (
        "  named_barrier_sync<kWarpgroup>(2 + uniform(threadIdx.x / kWarpgroup));\n", ""
    ),
    "rows of another residue stored": (
        "TensorMaps<kOf>::kIsInParts ? place.part : piece.residue;", "0;"
    ),
}  # fmt: skip


def check_orders_in_place(emulator: Emulator) -> None:
    # Nothing is there early, or waited for later: one slot, half of which a peer fills.
    config = Config(64, 32, num_stages=1, cluster_n=2, in_place=True)
    for emulator.seed in range(8):
        check_rows_that_are_no_numbers(config, 203, 35)
        check(make_spec(75, 40, 67), config)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("edit", IN_PLACE_PLANTED.values(), ids=IN_PLACE_PLANTED)
def test_planted_bugs_of_rows_read_in_place_are_found(edit: tuple[str, str], emulator: Emulator) -> None:
    emulator.edits = dict([edit])
    with pytest.raises(AssertionError):
        check_orders_in_place(emulator)


def test_heads_are_cleared_behind_a_proxy_fence(emulator: Emulator) -> None:
    emulator.edits = {"  fence_proxy_async();\n  // A warp's products": "  // A warp's products"}
    unfenced = "^gemm: .*: a product reads a byte at .*, which .* wrote without fence.proxy.async before it was issued$"
    with pytest.raises(RuntimeError, match=unfenced):
        check_orders_in_place(emulator)


def test_without_them_every_order_in_place_is_right(emulator: Emulator) -> None:
    check_orders_in_place(emulator)
