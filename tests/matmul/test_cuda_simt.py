"""Products of float32 on CUDA cores as a design of the backend "cuda": what it takes, and that it lowers everywhere."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ffi.matmul import simt
from jaxkernels.ops.matmul.spec import MatmulSpec

HIGHEST = lax.Precision.HIGHEST


def spec_of(dtype: str = "float32", size: int = 48, **options) -> MatmulSpec:
    x = ArrayType((size, size), jnp.dtype(dtype))
    common = dict(precision=HIGHEST, target=hardware.lookup("NVIDIA H200"), out_dtype=jnp.dtype(dtype))
    return MatmulSpec(x, x, dimension_numbers=(((1,), (0,)), ((), ())), **common | options)


def test_takes_exact_products_of_float32():
    assert simt.unsupported(spec_of()) is None
    assert simt.unsupported(spec_of(precision=(HIGHEST, HIGHEST))) is None
    assert simt.unsupported(spec_of(target=hardware.lookup("NVIDIA A100-SXM4-80GB"))) is None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(dtype="bfloat16"), "on CUDA cores takes and returns float32, not bfloat16, bfloat16 to bfloat16"),
        (dict(precision=None), "on CUDA cores multiplies float32 exactly (precision HIGHEST), the precision asked for"),
        (
            dict(target=dataclasses.replace(hardware.lookup("NVIDIA A100-SXM4-80GB"), compute_capability=(7, 0))),
            "needs a GPU of compute capability 8.0 or newer",
        ),
    ],
)
def test_refusals(options, reason):
    assert simt.unsupported(spec_of(**options)).startswith(reason)


def test_rungs_with_tma_are_for_hopper():
    hopper = list(simt.search_space(spec_of()))
    other = list(simt.search_space(spec_of(target=hardware.lookup("NVIDIA A100-SXM4-80GB"))))
    assert len(other) < len(hopper)
    assert {config.rung for config in other} == {9, 10, 11, 12}
    with pytest.raises(ValueError, match=r"^matmul\[cuda\]: rung must be from 1 to \d+; got Config\(rung=0\)\.$"):
        simt.Config(0)


@pytest.mark.parametrize("layouts", ["mk,kn", "km,kn", "mk,nk"])
def test_calls_lower_with_gradients_and_epilogues(layouts):
    lhs, rhs = ((0,) if layouts[0] == "k" else (1,)), ((1,) if layouts.endswith("nk") else (0,))
    x = jax.ShapeDtypeStruct((130, 130), jnp.float32)
    product = lambda a, b: jk.dot_general(a, b, ((lhs, rhs), ((), ())), precision=HIGHEST, backend="cuda")
    fused = lambda a, b: jk.matmul(a, b, bias=b[0], activation="gelu", precision=HIGHEST, backend="cuda")
    loss = lambda f: lambda a, b: f(a, b).sum()
    for f in (product, jax.grad(loss(product), (0, 1)), fused):
        assert "sgemm_" in jax.jit(f).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("sizes", "layouts", "chosen"),
    [
        ((4096, 4096, 4096), "mk,kn", "cuda"),
        ((640, 8000, 8000), "mk,kn", "cuda"),
        ((130, 132, 136), "mk,kn", "xla"),
        ((2**20, 4, 1024), "mk,kn", "xla"),
        ((8192, 8192, 256), "mk,kn", "xla"),
        ((4096, 4096, 4095), "mk,kn", "xla"),
        ((4096, 4095, 4096), "mk,kn", "xla"),
        ((4096, 4096, 4096), "mk,nk", "xla"),
        ((4096, 4096, 4096), "km,kn", "xla"),
    ],
)
def test_none_takes_them_where_they_are_faster_than_cublas(sizes, layouts, chosen, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA H200")
    m, n, k = sizes
    lhs, rhs = layouts.split(",")
    a = jax.ShapeDtypeStruct((m, k) if lhs == "mk" else (k, m), jnp.float32)
    b = jax.ShapeDtypeStruct((k, n) if rhs == "kn" else (n, k), jnp.float32)
    dims = ((lhs.index("k"),), (rhs.index("k"),)), ((), ())
    f = lambda a, b: jk.dot_general(a, b, dims, precision=HIGHEST)
    explained = str(jk.explain(f, a, b, platform="cuda"))
    assert ("-> cuda" in explained) == (chosen == "cuda"), explained


@pytest.mark.parametrize("config", list(simt.search_space(spec_of())), ids=str)
@pytest.mark.parametrize("chip", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB"])
def test_estimates_grow_with_the_product(config, chip):
    target = hardware.lookup(chip)
    seconds = [simt.estimate(spec_of(size=size, target=target), config) for size in (64, 512, 2048, 8192)]
    assert sorted(seconds) == seconds
    # No faster than the chip's peak, and no slower than a hundredth of it on a large product.
    peak = target.fp32_flops_per_s
    assert 2 * 8192**3 / peak < seconds[-1] < 200 * 8192**3 / peak


def test_a_configuration_of_before_is_the_first_designs():
    backend = dispatch.load("matmul", "cuda")
    config = backend.designs[0].Config(128, 256)
    assert backend.decode(dataclasses.asdict(config)) == config
    assert backend.decode(backend.encode(simt.Config(10))) == simt.Config(10)


@pytest.mark.gpu
@pytest.mark.parametrize("config", list(simt.search_space(spec_of())), ids=str)
def test_values_on_a_gpu(config):
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((333, 517), (517, 250)))
    for x, y, dims in ((a, b, ((1,), (0,))), (a.T, b, ((0,), (0,))), (a, b.T, ((1,), (1,)))):
        f = lambda x, y, dims=dims: jk.dot_general(x, y, (dims, ((), ())), precision=HIGHEST, backend="cuda")
        exact = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
        np.testing.assert_allclose(np.asarray(jax.jit(f)(x, y)), exact, rtol=1e-4, atol=1e-4)
