"""The product in Triton: in Triton's interpreter against the reference, compiled for every chip, and with planted
mistakes."""

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
from jax import lax

pytest.importorskip("triton", reason="the kernels are compiled and interpreted by Triton")

import tritons

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul import reference
from jaxkernels.ops.matmul.spec import MatmulSpec
from jaxkernels.triton import calls
from jaxkernels.triton.matmul import gemm, gemm_kernel

pytestmark = pytest.mark.usefixtures("as_if_triton_was_installed")

H200 = hardware.lookup("NVIDIA H200")
A100 = hardware.lookup("NVIDIA A100-SXM4-80GB")
FOUR_SMS = dataclasses.replace(H200, num_sms=4)
LAYOUTS = ("mk.kn", "mk.nk", "km.kn", "km.nk")


def make_spec(
    m: int, n: int, k: int, layouts: str = "mk.kn", *, dtype: str = "float32", out: str | None = None,
    batch: int | None = None, bias: bool = False, multiplier: bool = False, residual: bool = False,
    target: hardware.Chip = H200, precision: Any = lax.Precision.HIGHEST, **options: Any,
) -> MatmulSpec:  # fmt: skip
    lhs, rhs = layouts.split(".")
    sizes, lead = dict(m=m, n=n, k=k), () if batch is None else (batch,)
    array = lambda dtype, *shape: ArrayType((*lead, *shape), jnp.dtype(dtype))
    contracting = (len(lead) + lhs.index("k"),), (len(lead) + rhs.index("k"),)
    batches = tuple(range(len(lead)))
    return MatmulSpec(
        array(dtype, *(sizes[axis] for axis in lhs)),
        array(dtype, *(sizes[axis] for axis in rhs)),
        (contracting, (batches, batches)),
        jnp.dtype(out or dtype),
        target,
        precision=precision,
        bias=ArrayType((n,), jnp.dtype(dtype)) if bias else None,
        multiplier=array(out or dtype, m, n) if multiplier else None,
        residual=array(out or dtype, m, n) if residual else None,
        **options,
    )


def draw(spec: MatmulSpec, seed: int = 0) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    types = [spec.arrays()[name].type for name in spec.inputs("matmul")]
    return [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in types]


def config(block_m: int = 16, block_n: int = 16, block_k: int = 16, **options: Any) -> gemm.Config:
    return gemm.Config(block_m, block_n, block_k, num_warps=4, num_stages=2, **options)


def assert_right(spec: MatmulSpec, chosen: gemm.Config, seed: int = 0, tolerance: float | None = None) -> None:
    """The product in Triton's interpreter is what the reference gives."""
    operands = draw(spec, seed)
    with tritons.interpreted(gemm_kernel):
        actual = gemm.run(spec, chosen, *operands)
    expected = reference.run(spec, reference.Config(), *operands)
    tolerance = tolerance or (1e-5 if jnp.dtype(jnp.float32) == spec.out_dtype == spec.lhs.dtype else 2e-2)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * max(1.0, np.abs(y).max()))


SIZES = [(40, 50, 60), (64, 64, 64), (7, 50, 33), (1, 48, 5), (33, 1, 17), (17, 16, 1)]


@pytest.mark.parametrize(("layouts", "sizes"), itertools.product(LAYOUTS, SIZES), ids=str)
def test_layouts_and_ragged_sizes(layouts, sizes):
    assert_right(make_spec(*sizes, layouts), config(16, 32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("out", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype, out):
    assert_right(make_spec(40, 48, 56, dtype=dtype, out=out), config(32, 16, 32))


@pytest.mark.parametrize("activation", [None, "relu", "relu_squared", "silu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("split_k", [1, 2])
def test_epilogues(activation, split_k):
    saves = activation is not None
    spec = make_spec(
        40,
        47,
        56,
        bias=True,
        multiplier=activation not in ("relu", "gelu"),
        residual=activation != "silu",
        activation=activation,
        alpha=0.375,
        save_preactivation=saves,
    )
    assert_right(spec, config(16, 32, split_k=split_k))


def test_activations_of_large_numbers():
    """No exponential overflows into NaN, and NaN stays NaN."""
    x = jnp.asarray([[-1e30, -100.0, -1.0, 0.0, 1.0, 100.0, 1e30, jnp.nan]], jnp.float32)
    for activation in ("relu", "relu_squared", "silu", "gelu", "gelu_erf"):
        spec = make_spec(1, 8, 8, activation=activation)
        with tritons.interpreted(gemm_kernel):
            (actual,) = gemm.run(spec, config(), x, jnp.eye(8, dtype=jnp.float32))
        (expected,) = reference.run(spec, reference.Config(), x, jnp.eye(8, dtype=jnp.float32))
        assert np.array_equal(np.isnan(actual), np.isnan(expected))
    with tritons.interpreted(gemm_kernel):
        (actual,) = gemm.run(make_spec(1, 7, 7, activation="gelu"), config(), x[:, :7], jnp.eye(7, dtype=jnp.float32))
    np.testing.assert_allclose(actual[0], jax.nn.gelu(x[0, :7]), rtol=1e-6)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_batches_and_parts_of_k(layouts):
    assert_right(make_spec(33, 47, 129, layouts, batch=3), config(16, 16, 32, split_k=2))
    assert_right(make_spec(33, 20, 28, layouts, batch=3), config(16, 32))


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("strip", [1, 2, 3, 8])
@pytest.mark.parametrize("programs_per_sm", [0, 1, 2])
def test_every_tile_is_computed_once(strip, programs_per_sm):
    """Also where a program computes several tiles, and the last strip is narrower."""
    spec = make_spec(80, 70, 40, batch=2, target=FOUR_SMS)
    assert_right(spec, config(strip=strip, programs_per_sm=programs_per_sm))


def test_float32_is_rounded_to_the_nearest_tf32_number():
    spec = make_spec(16, 16, 1, precision=None)
    lhs = jnp.asarray(
        [[1 + 2.0**-11], [1 + 3 * 2.0**-12], [-1 - 2.0**-11], [jnp.inf], [jnp.nan], *[[1.0]] * 11], "float32"
    )
    with tritons.interpreted(gemm_kernel):
        out = np.asarray(gemm.run(spec, config(), lhs, jnp.ones((1, 16), jnp.float32)))[:, 0]
    np.testing.assert_array_equal(out[:5], np.float32([1 + 2.0**-10, 1 + 2.0**-10, -1 - 2.0**-10, np.inf, np.nan]))
    assert_right(make_spec(40, 50, 60, precision=None), config(), tolerance=2e-3)


def test_operands_of_two_dtypes():
    lhs, rhs = (ArrayType((40, 40), jnp.dtype(dtype)) for dtype in ("float32", "bfloat16"))
    spec = MatmulSpec(lhs, rhs, (((1,), (0,)), ((), ())), jnp.dtype(jnp.float32), H200)
    assert_right(spec, config(), tolerance=1e-4)


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("seed", range(40))
def test_random(seed):
    rng = np.random.default_rng(seed)
    pick = lambda *values: values[rng.integers(len(values))]
    size = lambda: int(rng.integers(1, 90))
    m, n, k = size(), size(), size()
    spec = make_spec(
        m, n, k, pick(*LAYOUTS), dtype=pick("float32", "bfloat16"), batch=pick(None, 1, 3), bias=pick(True, False),
        residual=pick(True, False), activation=pick(None, "silu", "gelu"), alpha=pick(1.0, -0.5), target=FOUR_SMS,
    )  # fmt: skip
    block_k = pick(16, 32)
    split_k = pick(1, 2, 3)
    steps = -(-k // block_k)
    if -(-steps // split_k) * (split_k - 1) >= steps:
        split_k = 1
    chosen = config(
        pick(16, 32), pick(16, 32, 128), block_k, strip=pick(1, 2, 8), split_k=split_k, programs_per_sm=pick(0, 1)
    )
    assert_right(spec, chosen, seed)


# For every chip.

_PRODUCTS = {
    "large": dict(m=4096, n=4096, k=4096, dtype="bfloat16"),
    "large-tn": dict(m=4096, n=4096, k=4096, layouts="km.nk", dtype="float16"),
    "tf32": dict(m=2048, n=2048, k=2048, precision=None),
    "fp32": dict(m=1024, n=1024, k=1024),
    "few-rows": dict(m=16, n=4096, k=4096, dtype="bfloat16"),
    "small": dict(m=512, n=512, k=512, dtype="bfloat16"),
    "ragged": dict(
        m=1023, n=511, k=767, dtype="bfloat16", bias=True, residual=True, activation="gelu", save_preactivation=True
    ),
}  # fmt: skip


def compile_with(spec: MatmulSpec, chosen: gemm.Config, most_spilled: int = 0) -> tritons.Compiled:
    types = [spec.arrays()[name].type for name in spec.inputs("matmul")]
    (made,) = tritons.compiled(spec.target, functools.partial(gemm.run, spec, chosen), *types)
    assert made.spilled <= most_spilled, (chosen, made)
    assert made.shared <= gemm._shared_bytes(spec, chosen) <= spec.target.smem_bytes, (chosen, made)
    return made


@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("product", _PRODUCTS)
@pytest.mark.parametrize("chip", tritons.CHIPS, ids=lambda chip: chip.name.removeprefix("NVIDIA ").replace(" ", "-"))
def test_default_compiles_without_spills(chip, product):
    spec = make_spec(**_PRODUCTS[product], target=chip)
    made = compile_with(spec, dispatch.default_config("matmul", "triton", spec))
    if product == "large":
        assert (
            "wgmma" if chip.is_hopper else "tcgen05" if chip.compute_capability == (10, 0) else "mma.sync"
        ) in made.ptx
        assert "cp.async" in made.ptx


@pytest.mark.thorough
@pytest.mark.parametrize("chip", tritons.CHIPS, ids=lambda chip: chip.name.removeprefix("NVIDIA ").replace(" ", "-"))
def test_every_configuration_compiles_and_hardly_spills(chip):
    for product in ("large", "tf32", "few-rows"):
        spec = make_spec(**_PRODUCTS[product], target=chip)
        for chosen in gemm.search_space(spec):
            compile_with(spec, chosen, most_spilled=64)


def test_shared_memory_holds_the_float32_products_of_two_dtypes():
    lhs, rhs = (ArrayType((8192, 8192), jnp.dtype(dtype)) for dtype in ("float32", "bfloat16"))
    spec = MatmulSpec(lhs, rhs, (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), H200)
    for chosen in itertools.islice(gemm.search_space(spec), 8):
        for made in tritons.compiled(H200, functools.partial(gemm.run, spec, chosen), lhs, rhs):
            assert made.shared <= H200.smem_bytes, (chosen, made.shared)


def test_bias_in_8_bits():
    spec = make_spec(16, 16, 16, bias=True)
    spec = dataclasses.replace(spec, bias=ArrayType((16,), jnp.dtype(jnp.float8_e4m3fn)))
    assert_right(spec, config())


def test_search_space_holds_something_for_every_product():
    for chip, sizes, dtype in itertools.product(tritons.CHIPS, [*SIZES, (1, 1, 1)], ["bfloat16", "float32"]):
        spec = make_spec(*sizes, dtype=dtype, target=chip)
        space = list(gemm.search_space(spec))
        assert space
        assert len(space) == len(set(space))


# Planted mistakes. None leaves the arrays: the interpreter would write there.


@pytest.mark.parametrize(
    ("name", "right", "wrong", "options", "chosen"),
    [
        ("_multiply", "is_inside = ks < p.k - k", "is_inside = ks < p.k", dict(k=41), config()),
        ("_multiply", "part * p.k_iters + step", "part + step", dict(k=64), config(split_k=2)),
        ("_multiply", "batch.to(tl.int64) * (p.m * p.k)", "0 * batch.to(tl.int64)", dict(batch=2), config()),
        ("_multiply", "batch.to(tl.int64) * (p.k * p.n)", "0 * batch.to(tl.int64)", dict(batch=2), config()),
        ("_tile_of", "tile // (p.strip * p.n_tiles) * p.strip", "tile // (p.strip * p.n_tiles)", {}, config(strip=2)),
        ("_tile_of", "first_row + within % num_rows", "first_row", dict(m=80), config(strip=2)),
        ("_first", "SIZE - BLOCK", "SIZE - BLOCK - 1", dict(m=40), config()),
        ("_place", "product % p.batch, m_idx", "product % 1, m_idx", dict(batch=2), config()),
        ("_finish_piece", "bias + column + columns", "bias + columns", dict(bias=True), config()),
        ("_finish_piece", "x = x * p.alpha", "x = x", dict(alpha=0.5), config()),
        ("_finish", "FIRST + WIDTH // 2", "FIRST", dict(n=128), config(16, 128)),
        ("_activated", "1.5957691216057308", "0.7978845608028654", dict(activation="gelu"), config()),
    ],
)  # fmt: skip
def test_planted_mistake_is_noticed(name, right, wrong, options, chosen, tmp_path):
    spec = make_spec(**(dict(m=48, n=64, k=32) | options))
    with tritons.planted(gemm_kernel, name, right, wrong, tmp_path), pytest.raises(AssertionError):
        assert_right(spec, chosen)
    assert_right(spec, chosen)


# Limits and errors.


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(target=dataclasses.replace(A100, compute_capability=(7, 0))), "compute capability 8.0 or newer"),
        (dict(target=hardware.host()), "the target is cpu"),
        (dict(dtype="int8"), "two float32 operands, or without epilogue any two of .* not int8 and int8"),
        (dict(dtype="float64"), "not float64 and float64"),
        (dict(precision=lax.DotAlgorithmPreset.BF16_BF16_F32_X9), "multiplies float32 in TF32, three"),
        (dict(dtype="bfloat16", precision=lax.DotAlgorithmPreset.BF16_BF16_BF16), "accumulates 16-bit products"),
        (dict(m=0), "no work in an empty product"),
        (dict(m=2**29), "32 bits"),
    ],
)  # fmt: skip
def test_limits_are_stated(options, reason):
    assert re.search(reason, gemm.unsupported(make_spec(**(dict(m=16, n=16, k=16) | options))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(block_m=24), r"matmul\[triton\]: block_m must be a power of two of at least 16; got 24"),
        (dict(block_k=8), r"matmul\[triton\]: block_k must be a power of two of at least 16; got 8"),
        (dict(num_warps=6), r"matmul\[triton\]: num_warps must be 1, 2, 4, 8 or 16; got 6"),
        (dict(num_stages=9), r"matmul\[triton\]: num_stages must be from 1 to 8; got 9"),
        (dict(strip=0), r"matmul\[triton\]: strip must be from 1 to 65536; got 0"),
        (dict(split_k=0), r"matmul\[triton\]: split_k must be from 1 to 65536; got 0"),
        (dict(programs_per_sm=-1), r"matmul\[triton\]: programs_per_sm must be from 0 to 65536; got -1"),
        (dict(block_n=True), r"matmul\[triton\]: block_n must be an int; got True"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(options, message):
    with pytest.raises(ValueError, match=message):
        gemm.Config(**options)


def test_part_without_any_of_k_is_refused():
    spec = make_spec(16, 16, 40)
    with pytest.raises(
        ValueError, match=r"matmul\[triton\]: every part of split_k=4 must have some of k=40, in blocks of"
    ):
        gemm.run(spec, config(split_k=4), *draw(spec))


def test_hopper_leaves_products_to_cublas_unless_asked(monkeypatch):
    monkeypatch.setattr(calls, "missing", lambda: None)
    without = {key: entry for key, entry in dispatch.REGISTRY.items() if key[1] not in ("cuda", "pallas")}
    monkeypatch.setattr(dispatch, "REGISTRY", without)
    product = dict(m=512, n=512, k=512, dtype="bfloat16")
    assert dispatch.choose("matmul", make_spec(**product), None).backend == "xla"
    assert dispatch.choose("matmul", make_spec(**product), "triton").backend == "triton"
    assert dispatch.choose("matmul", make_spec(**product, target=A100), None).backend == "triton"


@pytest.mark.skipif("calls.missing() is not None", reason="Triton cannot compile kernels here")
def test_public_function_and_its_gradient_are_lowered_for_another_chip(monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", A100.name)
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    gradients = jax.grad(lambda a, b: jk.matmul(a, b, activation="silu").astype(jnp.float32).sum(), (0, 1))
    text = jax.jit(gradients).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert sum(text.count(f"custom_call @{name}(") for name in calls.TARGETS) == 3
    assert "dot_general" not in text
