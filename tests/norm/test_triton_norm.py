"""The Triton kernels of norms: in Triton's interpreter against the reference, compiled for every chip, and with planted
mistakes."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the kernels are compiled and interpreted by Triton")

import tritons

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm import reference, tuning
from jaxkernels.ops.norm.spec import NormSpec
from jaxkernels.triton import calls
from jaxkernels.triton.norm import (
    backward,
    backward_kernel,
    forward,
    forward_kernel,
    row_kernel,
    tangent,
    tangent_kernel,
)

pytestmark = pytest.mark.usefixtures("as_if_triton_was_installed")

H200 = hardware.lookup("NVIDIA H200")
A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")
TWO_SMS = dataclasses.replace(H200, num_sms=2)

KERNELS = {
    "norm_forward": (forward, forward_kernel, reference.forward),
    "norm_tangent": (tangent, tangent_kernel, reference.tangent),
    "norm_backward": (backward, backward_kernel, reference.backward),
}
CPU = jax.devices("cpu")[0]


def make_spec(
    kernel: str, *shape: int, dtype: str = "float32", parameters: str | None = None, scale: int = 1, bias: int = 0,
    residual: bool = False, target: hardware.Chip = TWO_SMS, eps: float = 1e-6, **options: Any,
) -> NormSpec:  # fmt: skip
    """The pass of a norm of (G, ..., F). `scale` and `bias` are the first sizes of the parameters, 0 for none."""
    array = lambda dtype, *shape: ArrayType(shape, jnp.dtype(dtype))
    is_backward = kernel == "norm_backward"
    return NormSpec(
        x=array(dtype, *shape),
        target=target,
        eps=eps,
        scale=array(parameters or dtype, scale, shape[-1]) if scale else None,
        bias=array(parameters or dtype, bias, shape[-1]) if bias else None,
        residual=residual and not is_backward,
        sum_gradient=residual and is_backward,
        scale_gradient=is_backward and bool(scale),
        bias_gradient=is_backward and bool(bias),
        **options,
    )


def run(kernel: str, spec: NormSpec, tile: tuple[int, ...], named: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    """The results in Triton's interpreter, by name."""
    design, module, _ = KERNELS[kernel]
    with tritons.interpreted(module, row_kernel):
        results = design.run(spec, design.Config(*tile), *spec.pack(kernel, named))
    return dict(zip(spec.outputs(kernel), map(np.asarray, results), strict=True))


def assert_right(kernel: str, spec: NormSpec, tile: tuple[int, ...], seed: int = 0) -> None:
    named = spec.named(kernel, tuning.operands(kernel, spec, CPU, seed))
    actual = run(kernel, spec, tile, named)
    expected = KERNELS[kernel][2](spec, named)
    if "sum" in actual:  # Triton's interpreter rounds to bfloat16 towards 0. The norm is that of the sum it returns.
        returned = dict(x=jnp.asarray(actual["sum"]), residual=jnp.zeros_like(named["x"]))
        expected = reference.forward(spec, named | returned) | {"sum": expected["sum"]}
    for name, value in actual.items():
        wanted = np.asarray(expected[name])
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), name
        tolerance = 2e-6 if value.dtype == np.float32 else 2 * float(jnp.finfo(value.dtype).eps)
        value, wanted = value.astype(np.float64), wanted.astype(np.float64)
        limit = tolerance * max(1.0, np.max(np.abs(wanted), initial=0))
        np.testing.assert_allclose(value, wanted, rtol=tolerance, atol=limit, err_msg=name)


every_kernel = pytest.mark.parametrize("kernel", KERNELS)

#: Whole rows; several tiles for a program; chunks, which may be ragged. (block_rows, block_features, warps, programs).
TILES = [(1, 64, 4, 1), (4, 64, 4, 2), (2, 16, 4, 1), (1, 8, 4, 2)]


@pytest.mark.sampled(one_in=5)
@every_kernel
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_tiles(kernel, tile, centered):
    """Of 11 rows of 37 features, with every operand."""
    spec = make_spec(kernel, 1, 11, 37, centered=centered, bias=1, residual=True, scale_offset=0.5)
    assert_right(kernel, spec, tile)


#: What the backward pass alone has: loads ahead, two blocks of columns, rows that are read twice. (block_rows,
#: block_features, warps, programs, stages, block_rest, converts_twice).
BACKWARD_TILES = [
    (4, 64, 4, 2, 2), (2, 64, 4, 1, 2, 0, True), (1, 32, 4, 1, 1, 8), (1, 32, 4, 2, 2, 8), (1, 32, 4, 1, 1, 8, True),
    (1, 32, 4, 1, 2, 32, True), (1, 64, 4, 1, 1, 0, True, 1),
]  # fmt: skip


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("tile", BACKWARD_TILES, ids=str)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_tiles_of_the_backward_pass(tile, centered, residual):
    """Of two groups of 11 rows of 37 features, whose scale is their own."""
    spec = make_spec("norm_backward", 2, 11, 37, centered=centered, scale=2, bias=1, residual=residual)
    assert_right("norm_backward", spec, tile)


@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_forward_pass_in_two_blocks_of_columns(centered):
    spec = make_spec("norm_forward", 1, 11, 37, centered=centered, bias=1, residual=True, scale_offset=0.5)
    assert_right("norm_forward", spec, (1, 32, 4, 2, 1, 8))


@pytest.mark.parametrize("kernel", ["norm_forward", "norm_tangent"])
def test_x_is_returned(kernel):
    spec = make_spec(kernel, 1, 11, 37, returns_x=True)
    named = spec.named(kernel, tuning.operands(kernel, spec, CPU, 0))
    returned, given = dict(norm_forward=("sum", "x"), norm_tangent=("dsum", "dx"))[kernel]
    np.testing.assert_array_equal(run(kernel, spec, TILES[0], named)[returned], named[given])


@pytest.mark.sampled(one_in=5)
@every_kernel
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 5, 1), (1, 1, 64), (1, 3, 2, 33), (1, 2, 65), (1, 40)], ids=str)
def test_sizes(kernel, shape):
    for centered in (False, True):
        assert_right(kernel, make_spec(kernel, *shape, centered=centered, bias=1), (2, 32, 4, 1))


@every_kernel
@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize(("scale", "bias"), [(0, 0), (1, 0), (0, 1), (3, 0), (3, 1), (1, 3), (3, 3)], ids=str)
@pytest.mark.parametrize("tile", TILES[1:3], ids=str)
def test_groups_with_parameters_of_their_own(kernel, scale, bias, tile):
    assert_right(kernel, make_spec(kernel, 3, 5, 18, scale=scale, bias=bias, centered=True, residual=True), tile)


@pytest.mark.sampled(one_in=5)
@every_kernel
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("parameters", ["bfloat16", "float16", "float32"])
def test_dtypes(kernel, dtype, parameters):
    spec = make_spec(kernel, 1, 6, 48, dtype=dtype, parameters=parameters, bias=1, residual=True, centered=True)
    assert_right(kernel, spec, (2, 64, 4, 1))


@every_kernel
@pytest.mark.sampled(one_in=60)
@pytest.mark.parametrize("seed", range(80))
def test_random(kernel, seed):
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    groups = pick(1, 1, 2, 3)
    shape = (groups, *(int(n) for n in rng.integers(1, 6, size=rng.integers(0, 3))), int(rng.integers(1, 70)))
    spec = make_spec(
        kernel, *shape, dtype=pick("bfloat16", "float16", "float32"), parameters=pick("bfloat16", "float32"),
        scale=pick(0, 1, groups), bias=pick(0, 1, groups), residual=bool(rng.random() < 0.5),
        centered=bool(rng.random() < 0.5), scale_offset=pick(0.0, 1.0), eps=pick(1e-6, 0.1),
    )  # fmt: skip
    assert_right(kernel, spec, (pick(1, 2, 4), pick(4, 16, 64, 128), 4, pick(1, 2)), seed)


def test_a_row_that_is_not_finite_spoils_no_other():
    """And it is NaN where the reference is: in the program's other rows, in chunks, and in the sums over rows."""
    for kernel, (tile, centered) in itertools.product(KERNELS, zip(TILES, itertools.cycle((False, True)))):
        spec = make_spec(kernel, 1, 11, 37, centered=centered, bias=1, residual=True)
        named = spec.named(kernel, tuning.operands(kernel, spec, CPU))
        x = named["x"].at[0, 3, 5].set(jnp.nan).at[0, 6, 0].set(jnp.inf).at[0, 8].set(0)
        named |= {"x": x} | (reference.statistics(spec, x) if kernel != "norm_forward" else {})
        actual, expected = run(kernel, spec, tile, named), KERNELS[kernel][2](spec, named)
        for name, value in actual.items():
            np.testing.assert_array_equal(np.isfinite(value), np.isfinite(expected[name]), err_msg=f"{kernel} {name}")
        rows = actual[spec.outputs(kernel)[0]][0]
        assert np.isfinite(rows[[0, 1, 2, 4, 5, 7, 8, 9, 10]]).all()
        assert np.isnan(rows[3]).all()


def test_extremes_of_float16():
    """Squares and sums beyond its range, and denormal numbers."""
    x = jnp.asarray(np.stack([np.full(48, 6e4), np.full(48, 6e-8), np.linspace(-6e4, 6e4, 48)])[None], jnp.float16)
    for centered, eps in itertools.product((False, True), (1e-6, 1e-20)):
        spec = make_spec("norm_forward", *x.shape, dtype="float16", centered=centered, eps=eps)
        named = dict(x=x, scale=jnp.ones((1, 48), jnp.float16))
        actual, expected = run("norm_forward", spec, (2, 64, 4, 1), named), reference.forward(spec, named)
        for name, value in actual.items():
            np.testing.assert_allclose(value.astype(np.float32), expected[name].astype(jnp.float32), rtol=2e-3)


def test_sum_is_rounded_before_it_is_normalized():
    """1 + 2^-9 is no bfloat16 number: the norm of the rounded sum has no trace of it."""
    x = jnp.ones((1, 1, 8), jnp.bfloat16)
    residual = jnp.full_like(x, 2.0**-9).at[0, 0, 0].set(2.0)
    spec = make_spec("norm_forward", 1, 1, 8, dtype="bfloat16", scale=0, residual=True)
    actual = run("norm_forward", spec, (1, 8, 4, 1), dict(x=x, residual=residual))
    np.testing.assert_array_equal(actual["sum"], x + residual)
    np.testing.assert_array_equal(actual["sum"][0, 0, 1:], jnp.ones(7, jnp.bfloat16))
    np.testing.assert_allclose(actual["rstd"], 1 / np.sqrt((9 + 7) / 8 + 1e-6), rtol=1e-6)


# For every chip.


def compile_default(kernel: str, spec: NormSpec) -> list[tritons.Compiled]:
    config = dispatch.default_config(kernel, "triton", spec)
    types = spec.pack(kernel, {name: x.type for name, x in spec.arrays().items()})
    return tritons.compiled(spec.target, functools.partial(KERNELS[kernel][0].run, spec, config), *types)


@every_kernel
@pytest.mark.sampled(one_in=38)
@pytest.mark.parametrize("features", [100, 1024, 5120, 8192, 16384, 65536])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("chip", tritons.CHIPS, ids=lambda chip: chip.name.removeprefix("NVIDIA ").replace(" ", "-"))
def test_default_compiles_without_spills(kernel, chip, centered, dtype, features):
    spec = make_spec(
        kernel, 1, 4096, features, dtype=dtype, parameters="float32", centered=centered, bias=int(centered),
        residual=True, target=chip,
    )  # fmt: skip
    for one in compile_default(kernel, spec):
        assert one.shared <= chip.smem_bytes, one
        assert one.spilled == 0, one


@every_kernel
def test_rows_are_loaded_16_bytes_at_a_time(kernel):
    """Where they begin at multiples of 16 bytes."""
    spec = make_spec(kernel, 1, 4096, 4096, dtype="bfloat16", residual=True, target=H200)
    made = compile_default(kernel, spec)[0]
    assert "ld.global.v4.b32" in made.ptx or "cp.async.cg.shared.global" in made.ptx
    assert "st.global.v4.b32" in made.ptx
    assert "ld.global.b16" not in made.ptx


@pytest.mark.parametrize("chip", [H200, A100], ids=lambda chip: chip.name.replace(" ", "-"))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_tiles_in_flight_have_room_in_shared_memory(chip, dtype):
    """Both blocks of columns count. Triton has three arrays in flight at most."""
    space = list(forward.search_space(make_spec("norm_forward", 1, 4096, 12288, dtype=dtype, target=chip)))
    assert any(config.block_rest for config in space)
    for config in space:
        tile = config.block_rows * (config.block_features + config.block_rest) * jnp.dtype(dtype).itemsize
        assert config.num_stages == 1 or 3 * config.num_stages * tile <= chip.smem_bytes, config


@pytest.mark.parametrize("chip", [H200, A100], ids=lambda chip: chip.name.replace(" ", "-"))
def test_tiles_are_asked_for_on_hopper(chip):
    spec = make_spec("norm_backward", 1, 4096, 5120, dtype="bfloat16", target=chip)
    made = compile_default("norm_backward", spec)[0]
    assert ("cp.async.bulk.prefetch.L2.global" in made.ptx) == (chip is H200)


@pytest.mark.sampled(one_in=6)
@pytest.mark.parametrize("features", [1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384])
@pytest.mark.parametrize("options", [{}, dict(residual=True), dict(centered=True, bias=1)], ids=["rms", "sum", "layer"])
def test_programs_of_the_backward_default_run_at_once(features, options):
    """An SM has registers for all of its programs. The last ones would run alone."""
    spec = make_spec("norm_backward", 1, 16384, features, dtype="bfloat16", target=H200, **options)
    config = dispatch.default_config("norm_backward", "triton", spec)
    made = compile_default("norm_backward", spec)[0]
    registers = config.programs_per_sm * 32 * config.num_warps * 8 * -(-made.registers // 8)
    assert registers <= 65536, (config, made.registers)
    assert made.spilled == 0


def test_estimate_of_the_backward_pass_follows_the_bytes():
    """Bytes take at least the time of a copy; halving the rows halves the time; what was measured is near."""
    for features in (1024, 2048, 4096, 5120, 8192, 16384):
        make = lambda rows: make_spec("norm_backward", 1, rows, features, dtype="bfloat16", target=H200)  # noqa: B023
        estimate = lambda spec: backward.estimate(spec, dispatch.default_config("norm_backward", "triton", spec))
        seconds = estimate(make(16384))
        copy = 6 * 16384 * features / 4.3e12
        assert copy < seconds < 1.5 * copy
        assert 0.45 < estimate(make(8192)) / seconds < 0.65


@pytest.mark.parametrize(
    ("features", "options", "microseconds"),
    [
        (2048, {}, 53.2),
        (2560, dict(residual=True), 85.2),
        (3072, dict(centered=True, bias=1), 82.2),
        (4096, {}, 99.9),
        (5120, dict(residual=True), 164.7),
        (8192, dict(centered=True, bias=1), 198.2),
        (12288, dict(centered=True, bias=1), 346.3),
        (16384, {}, 383.1),
        (16384, dict(residual=True), 535.4),
    ],
)  # fmt: skip
def test_estimate_of_the_backward_pass_is_near_what_was_measured(features, options, microseconds):
    """On an H200, 16,384 rows of bfloat16, default configurations."""
    spec = make_spec("norm_backward", 1, 16384, features, dtype="bfloat16", target=H200, **options)
    config = dispatch.default_config("norm_backward", "triton", spec)
    assert 0.9 < 1e6 * backward.estimate(spec, config) / microseconds < 1.1


# Planted mistakes.


@pytest.mark.sampled(one_in=12)
@pytest.mark.parametrize(
    ("module", "name", "right", "wrong", "kernel"),
    [
        (row_kernel, "rows_of", "tile * BLOCK +", "tile +", "norm_forward"),
        (row_kernel, "rows_of", "group.to(tl.int64) * p.num_rows + row", "row", "norm_forward"),
        (row_kernel, "load_parameter", "group.to(tl.int64) * p.num_features", "0", "norm_forward"),
        (row_kernel, "load_scale", "+ p.scale_offset", "", "norm_forward"),
        (row_kernel, "mean_of", "p.num_features", "p.block_features", "norm_forward"),
        (forward_kernel, "squares", "z - center, 0.0", "z - center, z - center", "norm_forward"),
        (forward_kernel, "load_sum", ".to(x.dtype.element_ty)", "", "norm_forward"),
        (forward_kernel, "inverse_root", "+ p.eps", "", "norm_forward"),
        (forward_kernel, "statistics", "center, column, p)", "0.0, column, p)", "norm_forward"),
        (forward_kernel, "finish", "store_tile(sums, z,", "store_tile(sums, z - center,", "norm_forward"),
        (tangent_kernel, "finish", "change - shift", "change", "norm_tangent"),
        (tangent_kernel, "finish", "y + normalized *", "y + v *", "norm_tangent"),
        (tangent_kernel, "load_change", "v += load", "v = load", "norm_tangent"),
        (backward_kernel, "scaled", "dy * load_scale", "dy + load_scale", "norm_backward"),
        (backward_kernel, "gradient", "v - normalized * along", "v - along", "norm_backward"),
        (backward_kernel, "gradient", "change - shift", "change", "norm_backward"),
        (backward_kernel, "rows_in_chunks", "dx += load_tile", "dx = load_tile", "norm_backward"),
        (backward_kernel, "whole_rows", "dx += raw_dz", "dx = raw_dz", "norm_backward"),
        (backward_kernel, "whole_rows", "dx_rest += raw_dz_rest", "dx_rest = raw_dz_rest", "norm_backward"),
        (backward_kernel, "whole_rows", "of_scale += dy", "of_scale = dy", "norm_backward"),
        (backward_kernel, "whole_rows", "of_bias_rest += dy_rest", "of_bias_rest += dy_rest * 2", "norm_backward"),
        (backward_kernel, "whole_rows", "rows_of(tile + p.num_programs,", "rows_of(tile,", "norm_backward"),
        (
            backward_kernel,
            "whole_rows",
            "raw_x_rest, raw_dy_rest = next",
            "raw_dy_rest, raw_x_rest = next",
            "norm_backward",
        ),
        (row_kernel, "joined", " + tl.sum(rest, axis=0)", "", "norm_backward"),
        (backward_kernel, "sums_of_rows", "(products, total)", "(total, products)", "norm_backward"),
        (backward_kernel, "whole_rows", "total += v_rest", "total += dy_rest", "norm_backward"),
        (backward_kernel, "add_shares", "add_columns(bias_parts", "add_columns(scale_parts", "norm_backward"),
        (backward_kernel, "add_columns", "group * SHARES + share", "share", "norm_backward"),
        (forward_kernel, "whole_rows", "squares(z_rest, center, rest, p)", "z_rest * z_rest", "norm_forward"),
        (forward_kernel, "whole_rows", "tl.sum(z_rest, axis=1)", "tl.sum(z, axis=1)", "norm_forward"),
        (backward_kernel, "add_share", "before + values", "values", "norm_backward"),
        (backward_kernel, "add_share", ">= p.num_programs", "> p.num_programs", "norm_backward"),
        (backward_kernel, "sums", "total += v", "total = v", "norm_backward"),
        (backward_kernel, "norm_backward", "group.to(tl.int64) * p.num_programs + ", "", "norm_backward"),
    ],
)
def test_planted_mistake_is_noticed(module, name, right, wrong, kernel, tmp_path):
    """By three groups of 5 rows of 37 features, whole, in chunks, and in two blocks of columns."""
    options: dict[str, Any] = dict(scale=3, bias=3, centered=True, residual=True, scale_offset=0.5, eps=0.5)
    spec = make_spec(kernel, 3, 5, 37, dtype="float16" if name == "load_sum" else "float32", **options)

    def assert_both() -> None:
        two_blocks = {
            "norm_forward": [(1, 32, 4, 1, 1, 8)],
            "norm_backward": [(1, 32, 4, 1, 2, 8), (1, 32, 4, 1, 1, 8, True), (1, 32, 4, 1, 1, 32)],
        }
        for tile in ((2, 64, 4, 1), (2, 16, 4, 1), *two_blocks.get(kernel, [])):
            assert_right(kernel, spec, tile)

    with tritons.planted(module, name, right, wrong, tmp_path), pytest.raises((AssertionError, FloatingPointError)):
        assert_both()
    assert_both()


# Limits and errors.


@pytest.mark.parametrize(
    ("shape", "options", "reason"),
    [
        ((1, 4, 8), dict(target=hardware.host()), "compute capability 8.0 or newer, the target is cpu"),
        (
            (1, 4, 8),
            dict(target=dataclasses.replace(A100, compute_capability=(7, 5))),
            "needs a CUDA GPU of compute capability 8.0 or newer",
        ),
        ((1, 4, 8), dict(dtype="float64"), "takes bfloat16, float16 or float32, x is float64"),
        ((1, 4, 8), dict(parameters="float64"), "takes bfloat16, float16 or float32, scale is float64"),
        ((1, 0, 8), dict(), "has no work in an empty array"),
        ((70000, 4, 8), dict(scale=70000), "takes at most 65535 groups with a scale or bias of their own, got 70000"),
        ((2**20, 2**11, 8), dict(), "counts rows in 32 bits, x has 2147483648"),
    ],
)
@every_kernel
def test_limits_are_stated(kernel, shape, options, reason):
    assert reason in (KERNELS[kernel][0].unsupported(make_spec(kernel, *shape, **options)) or "")


def test_many_groups_that_share_their_parameters_are_supported():
    assert forward.unsupported(make_spec("norm_forward", 70000, 4, 8)) is None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: forward.Config(3, 64, 4), r"norm_forward\[triton\]: block_rows must be a power of two; got 3"),
        (lambda: tangent.Config(1, 48, 4), r"norm_tangent\[triton\]: block_features must be a power of two; got 48"),
        (lambda: forward.Config(1, 64, 3), r"norm_forward\[triton\]: num_warps must be 1, 2, 4, 8 or 16; got 3"),
        (lambda: forward.Config(1, 64, 4, -1), r"norm_forward\[triton\]: programs_per_sm must not be negative; got -1"),
        (lambda: backward.Config(1, 64, 4, 0), r"norm_backward\[triton\]: programs_per_sm must be positive; got 0"),
        (
            lambda: backward.Config(1, 64, 4, block_rest=12),
            r"norm_backward\[triton\]: block_rest must be 0 or a power of two; got 12",
        ),
        (
            lambda: backward.Config(2, 64, 4, block_rest=16),
            "a second block of columns must have one row; got 2 rows and block_rest=16",
        ),
        (lambda: backward.Config(1, 64, 4, tiles_to_l2=9), "tiles_to_l2 must be from 0 to 8; got 9"),
        (lambda: forward.Config(1, 64, 4, 1, 0), r"norm_forward\[triton\]: num_stages must be from 1 to 8; got 0"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
@pytest.mark.parametrize(
    ("kernel", "chip", "options", "reason"),
    [
        ("norm_forward", H200, dict(residual=True), None),
        ("norm_forward", H200, dict(returns_x=True), None),
        ("norm_forward", H200, {}, "has no residual and returns no x, and XLA may fuse the norm with what computes x"),
        ("norm_forward", H200, dict(centered=True, features=4096), None),
        ("norm_forward", A100, dict(residual=True), f"was not measured on {A100.name}"),
        ("norm_backward", H200, dict(residual=True), None),
        ("norm_backward", H200, dict(returns_x=True), None),
        ("norm_backward", H200, {}, "may have no cotangent of a sum to add, and XLA fuses the gradient's sum"),
        ("norm_backward", H200, dict(features=512), "was measured with 768 to 16,384 features only"),
        ("norm_backward", A100, dict(residual=True), f"was not measured on {A100.name}"),
        ("norm_tangent", H200, {}, "was not measured yet"),
    ],
)  # fmt: skip
def test_none_takes_what_was_measured_faster(kernel, chip, options, reason):
    features = options.pop("features", 1024)
    choice = dispatch.choose(kernel, make_spec(kernel, 1, 64, features, target=chip, **options), None)
    assert choice.backend == ("triton" if reason is None else "xla")
    assert choice.passed_over == (() if reason is None else (("triton", reason),))


# Through the public functions.


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
@pytest.mark.parametrize(("mode", "num_calls"), [("value", 1), ("vjp", 3), ("jvp", 2), ("vmap", 1)])
def test_public_function_is_lowered_for_another_chip(mode, num_calls, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", A100.name)
    x, scale = jax.ShapeDtypeStruct((64, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.bfloat16)
    norm = functools.partial(jk.rms_norm, backend="triton")
    function = {
        "value": norm,
        "vjp": jax.grad(lambda *xs: norm(*xs).astype(jnp.float32).sum(), (0, 1)),
        "jvp": lambda *xs: jax.jvp(norm, xs, xs),
        "vmap": jax.vmap(norm, (0, None)),
    }[mode]
    shapes = (jax.ShapeDtypeStruct((3, 64, 256), jnp.bfloat16), scale) if mode == "vmap" else (x, scale)
    text = jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert sum(text.count(f"custom_call @{name}(") for name in calls.TARGETS) == num_calls
