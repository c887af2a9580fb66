"""`jax_enable_x64` changes no kernel: programs are traced and lowered for a Hopper GPU with it and without it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import extra_types
from cases import ATTENTION_CASES, MATMUL_CASES, AttentionCase, MatmulCase
from jax import export

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention import tuning as attention_tuning
from jaxkernels.ops.attention.spec import AttentionSpec


@contextlib.contextmanager
def x64() -> Iterator[None]:
    """For all threads, as users set it."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.fixture(params=["cuda", "pallas"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The backend whose products are taken before all others."""
    left_out = {"cuda": "pallas", "pallas": "cuda"}[request.param]
    without = {key: entry for key, entry in dispatch.REGISTRY.items() if key != ("matmul", left_out)}
    monkeypatch.setattr(dispatch, "REGISTRY", without)
    return request.param


def with_gradients(case: AttentionCase | MatmulCase, **options: Any) -> Callable[..., Any]:
    """Results and gradients of a case, as one function of its operands and cotangents."""

    def f(operands: dict[str, Any], cotangents: Any) -> Any:
        moving = {name: x for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        out, pull = jax.vjp(lambda xs: case.run(operands | xs, **options), moving)
        return out, pull(cotangents)

    return f


def lower(f: Callable[..., Any], *arguments: Any) -> str:
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return jax.jit(f).trace(*structs).lower(lowering_platforms=("cuda",)).as_text()


def assert_lowers_alike(case: AttentionCase | MatmulCase) -> None:
    arguments = case.operands(), case.cotangents()
    usual = lower(with_gradients(case), *arguments)
    with x64():
        assert lower(with_gradients(case), *arguments) == usual


@pytest.mark.sampled(one_in=72)
@pytest.mark.parametrize("case", [case for case in ATTENTION_CASES if case.dtype != "float32"], ids=lambda c: c.id)
def test_attention_cases_lower_alike(case: AttentionCase) -> None:
    assert_lowers_alike(case)


@pytest.mark.sampled(one_in=24)
@pytest.mark.parametrize("case", MATMUL_CASES, ids=lambda case: case.id)
def test_matmul_cases_lower_alike(case: MatmulCase, kernels: str) -> None:
    assert_lowers_alike(case)


@pytest.mark.parametrize("options", [dict(), dict(query_seq_lengths=np.int32([50]))], ids=["plain", "lengths"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.one_version
@pytest.mark.sampled(one_in=3)
def test_attention_of_every_design_lowers_alike(head_dim: int, options: dict[str, Any]) -> None:
    """The fused backward pass, the one of two kernels, and the one of wide heads."""
    x = jax.ShapeDtypeStruct((1, 72, 2, head_dim), jnp.bfloat16)

    def gradient(*xs: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(jk.dot_product_attention, deterministic=True, **options), *xs)
        return pull(out)

    usual = lower(gradient, x, x, x)
    with x64():
        assert lower(gradient, x, x, x) == usual


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_qkv_projection_lowers_alike(pairs: Any) -> None:
    """Values, and gradients in all operands, angles included."""
    array = jax.ShapeDtypeStruct
    xs = array((2, 128, 64), jnp.bfloat16), array((64, 256), jnp.bfloat16), *[array((128, 32), jnp.float32)] * 2

    def gradients(*xs: jax.Array) -> Any:
        f = lambda x, w, *angles: jk.qkv_projection(x, w, angles, num_heads=2, num_kv_heads=1, pairs=pairs)
        out, pull = jax.vjp(f, *xs)
        return out, pull(out)

    usual = lower(gradients, *xs)
    assert usual.count("@jaxkernels_launch") >= 3
    with x64():
        assert lower(gradients, *xs) == usual


def test_wide_operands_keep_their_width(opaque: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((5, 7)), rng.standard_normal((7, 3))
    integers = rng.integers(-(2**40), 2**40, (2, 5, 5))
    with x64():
        np.testing.assert_allclose(jk.matmul(a, b, backend=opaque), a @ b, rtol=1e-14)
        np.testing.assert_array_equal(jk.matmul(*integers, backend=opaque), integers[0] @ integers[1])
        # The result alone is wide.
        narrow = np.full((2, 2), 2**30, np.int32)
        numbers = (((1,), (0,)), ((), ()))
        product = jk.dot_general(narrow, narrow, numbers, preferred_element_type=np.int64, backend=opaque)
        np.testing.assert_array_equal(product, np.full((2, 2), 2**61))


def test_symbolic_shapes_are_exported() -> None:
    """Sizes that are known at run time only have 64 bits under the flag."""
    batch, length = export.symbolic_shape("b, t")
    attend = jax.jit(functools.partial(jk.dot_product_attention, is_causal=True))
    with x64():
        x = jax.ShapeDtypeStruct((batch, length, 2, 8), jnp.float32)
        exported = export.export(attend)(x, x, x)
        qkv = np.random.default_rng(0).standard_normal((3, 2, 5, 2, 8), np.float32)
        np.testing.assert_allclose(exported.call(*qkv), attend(*qkv), rtol=1e-6)


def test_a_projection_of_symbolic_shapes_is_exported() -> None:
    batch, length = export.symbolic_shape("b, t")
    project = jax.jit(lambda x, w, *angles: jk.qkv_projection(x, w, angles, num_heads=2))
    sizes = (batch, length, 8), (8, 24), (length, 2), (length, 2)
    with x64():
        exported = export.export(project)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes))
        rng = np.random.default_rng(0)
        xs = [rng.standard_normal(shape, np.float32) for shape in ((2, 5, 8), (8, 24), (5, 2), (5, 2))]
        for part, expected in zip(exported.call(*xs), project(*xs), strict=True):
            np.testing.assert_allclose(part, expected, rtol=1e-6, atol=1e-6)


def test_operands_to_measure_on_are_the_same() -> None:
    array = ArrayType((2, 24, 2, 8), jnp.dtype(jnp.bfloat16))
    spec = AttentionSpec(
        array,
        array,
        array,
        0.3,
        hardware.host(),
        query_lengths=True,
        key_lengths=True,
        segments=True,
        query_offset=True,
    )
    device = jax.devices("cpu")[0]
    usual = attention_tuning.operands("attention_backward", spec, device)
    with x64():
        made = attention_tuning.operands("attention_backward", spec, device)
    assert [ArrayType.of(x) for x in made[3:8]] == extra_types(spec)
    for x, y in zip(made, usual, strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


@pytest.mark.gpu
@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", [case for case in ATTENTION_CASES if case.size != "small"], ids=lambda case: case.id)
def test_attention_has_the_same_bits(case: AttentionCase) -> None:
    assert_same_bits(case, deterministic=True)


@pytest.mark.gpu
@pytest.mark.sampled(one_in=8)
@pytest.mark.parametrize("case", [case for case in MATMUL_CASES if case.size != "small"], ids=lambda case: case.id)
def test_products_have_the_same_bits(case: MatmulCase, kernels: str) -> None:
    assert_same_bits(case)


def assert_same_bits(case: AttentionCase | MatmulCase, **options: Any) -> None:
    f = jax.jit(with_gradients(case, **options))
    arguments = case.operands(), case.cotangents()
    usual = f(*arguments)
    with x64():
        results = f(*arguments)
    jax.tree.map(
        functools.partial(np.testing.assert_array_equal, strict=True), jax.tree.map(np.asarray, results), usual
    )
