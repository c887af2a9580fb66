"""`jk.matmul`: the table of cases by the error rule, and the semantics of `jnp.matmul`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from numerics import (
    assert_close,
    assert_error_rule,
    assert_same_bits,
    plain_matmul,
)

import jaxkernels as jk


def test_error_rule(backend, matmul_case):
    assert_error_rule(matmul_case, plain_matmul, backend)


def arrays(*shapes: tuple[int, ...], dtype: str = "float32") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [random_array(rng, shape, dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((7,), (7,)),
        ((7,), (7, 3)),
        ((5, 7), (7,)),
        ((5, 7), (7, 3)),
        ((4, 5, 7), (7,)),
        ((4, 5, 7), (7, 3)),
        ((7,), (4, 7, 3)),
        ((5, 7), (4, 7, 3)),
        ((5, 7), (2, 4, 7, 3)),
        ((4, 5, 7), (4, 7, 3)),
        ((4, 5, 7), (1, 7, 3)),
        ((1, 5, 7), (4, 7, 3)),
        ((2, 1, 5, 7), (4, 7, 3)),
        ((4, 5, 7), (2, 1, 7, 3)),
        ((0, 7), (7, 3)),
        ((5, 0), (0, 3)),
        ((4, 5, 7), (4, 7, 0)),
        ((0, 5, 7), (7, 3)),
    ],
    ids=str,
)
def test_ranks_follow_jnp_matmul(backend, a_shape, b_shape):
    a, b = arrays(a_shape, b_shape)
    assert_close(jk.matmul(a, b, backend=backend), jnp.matmul(a, b))
    # With an activation the same ranks go through the fused primitive.
    assert_close(jk.matmul(a, b, activation="relu", backend=backend), jnp.maximum(jnp.matmul(a, b), 0))


@pytest.mark.parametrize(
    ("a_dtype", "b_dtype"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float16"),
        ("int8", "float16"),
        ("int8", "int32"),
        ("int16", "int16"),
        ("uint8", "int8"),
        ("bool", "bool"),
        ("bool", "bfloat16"),
        ("complex64", "float32"),
        ("float8_e4m3fn", "float8_e4m3fn"),
    ],
)
def test_dtypes_follow_jnp_matmul(a_dtype, b_dtype):
    a, b = arrays((5, 7), (7, 3))
    a, b = (np.rint(2 * a).astype(jnp.dtype(a_dtype)), np.rint(2 * b).astype(jnp.dtype(b_dtype)))
    out, reference = jk.matmul(a, b), jnp.matmul(a, b)
    assert out.dtype == reference.dtype
    np.testing.assert_array_equal(out, reference)  # Small whole numbers: every order of sums is exact.


def test_weak_types_promote_as_in_jnp_matmul():
    weak = jnp.broadcast_to(2.0, (5, 7))
    b = jnp.ones((7, 3), jnp.bfloat16)
    assert jk.matmul(weak, b).dtype == jnp.matmul(weak, b).dtype == jnp.bfloat16


def test_accepts_whatever_is_an_array():
    out = jk.matmul([[1.0, 2.0]], np.array([[3.0], [4.0]], np.float32), bias=[1.0], residual=np.float32([[2.0]]))
    np.testing.assert_array_equal(out, [[14.0]])


@pytest.mark.parametrize("activation", ["relu", "relu_squared", "silu", "gelu", "gelu_erf"])
def test_activation_is_that_of_jax_nn(backend, activation):
    functions = dict(
        relu=jax.nn.relu,
        relu_squared=lambda x: jnp.maximum(x, 0) ** 2,
        silu=jax.nn.silu,
        gelu=jax.nn.gelu,
        gelu_erf=lambda x: jax.nn.gelu(x, approximate=False),
    )
    a, b, bias = arrays((5, 7), (7, 3), (3,))
    out = jk.matmul(a, b, bias=bias, activation=activation, backend=backend)
    assert_close(out, functions[activation](a @ b + bias))


def test_residual_comes_after_the_activation(backend):
    a, b, residual = arrays((5, 7), (7, 3), (5, 3))
    out = jk.matmul(a, b, activation="relu", residual=residual, backend=backend)
    assert_close(out, jnp.maximum(a @ b, 0) + residual)


def test_multiplier_comes_after_the_activation_and_before_the_residual(backend):
    a, b, bias, multiplier, residual = arrays((5, 7), (7, 3), (3,), (5, 3), (5, 3))
    multiply = functools.partial(jk.matmul, a, b, bias=bias, activation="relu", multiplier=multiplier, backend=backend)
    expected = jnp.maximum(a @ b + bias, 0) * multiplier
    assert_close(multiply(), expected)
    assert_close(multiply(residual=residual), expected + residual)
    assert_close(jk.matmul(a, b, multiplier=multiplier, backend=backend), (a @ b) * multiplier)


def test_alpha_scales_the_product_alone(backend):
    a, b, bias, residual = arrays((5, 7), (7, 3), (3,), (5, 3))
    product = functools.partial(jk.matmul, a, b, alpha=-0.3, backend=backend)
    assert_close(product(), -0.3 * (a @ b))
    out = product(bias=bias, activation="relu", residual=residual)
    assert_close(out, jnp.maximum(-0.3 * (a @ b) + bias, 0) + residual)


@pytest.mark.parametrize("epilogue", [{}, dict(bias=np.ones(3, np.float16))], ids=["plain", "bias"])
def test_alpha_scales_before_rounding(backend, epilogue):
    """The product is 7e5, beyond float16; in bfloat16 its last bit would be 4096."""
    a, b = np.full((5, 7), 100, np.float16), np.full((7, 3), 1000, np.float16)
    out = jk.matmul(a, b, alpha=1e-3, **epilogue, backend=backend)
    np.testing.assert_array_equal(out, np.full((5, 3), 700 + len(epilogue), np.float16))
    out = jk.matmul(a.astype(jnp.bfloat16), b.astype(jnp.bfloat16), alpha=1 / 7e5, backend=backend)
    np.testing.assert_array_equal(out, np.ones((5, 3), jnp.bfloat16))


def test_alpha_is_any_real_number():
    a, b = arrays((5, 7), (7, 3))
    for alpha in (2, 2.0, np.int8(2), np.float32(2), jnp.bfloat16(2), np.array(2.0), jnp.array(2)):
        (equation,) = jax.make_jaxpr(functools.partial(jk.matmul, alpha=alpha))(a, b).eqns
        assert repr(equation.params["static"].alpha) == "2.0"


def test_alpha_of_one_is_not_there():
    a, b = np.ones((5, 7), np.int8), np.ones((7, 3), np.int8)
    lowered = lambda *xs, **options: jax.jit(functools.partial(jk.matmul, **options)).lower(*xs).as_text()
    assert lowered(a, b, alpha=1) == lowered(a, b)
    assert lowered(*arrays((5, 7), (7, 3)), alpha=np.float32(1)) == lowered(*arrays((5, 7), (7, 3)))


def test_alpha_keeps_the_width_of_float64():
    with jax.enable_x64(True):
        a, b = (x.astype(np.float64) for x in arrays((5, 7), (7, 3)))
        np.testing.assert_allclose(jk.matmul(a, b, alpha=0.3), 0.3 * (a @ b), rtol=1e-14)


@pytest.mark.parametrize("requested", ["float64", float, np.float64, jnp.float32])
def test_out_dtype_is_canonicalised(requested):
    a, b = arrays((5, 7), (7, 3), dtype="bfloat16")
    assert jk.matmul(a, b, out_dtype=requested).dtype == jnp.float32


def test_out_dtype_of_integers_may_be_floating_or_wider():
    a, b = np.full((5, 7), 100, np.int8), np.full((7, 3), 100, np.int8)
    for dtype in (jnp.int32, jnp.float32):
        out = jk.matmul(a, b, out_dtype=dtype)
        assert out.dtype == dtype
        np.testing.assert_array_equal(out, np.full((5, 3), 70_000))


def test_out_dtype_of_integers_may_be_a_narrower_float():
    """300 * 300 * 7 in float32, rounded once."""
    a, b = np.full((5, 7), 300, np.int32), np.full((7, 3), 300, np.int32)
    out = jk.matmul(a, b, out_dtype=jnp.bfloat16)
    np.testing.assert_array_equal(out, np.full((5, 3), 630_000, jnp.bfloat16))


def test_wider_out_dtype_keeps_the_width_of_its_cotangent():
    """In bfloat16 1 + 2^-12 is 1, and the sum of 2048 (1 + 2^-12) - 2048 is 0."""
    a, b = jnp.ones((1, 1), jnp.bfloat16), jnp.ones((1, 4096), jnp.bfloat16)
    _, pull = jax.vjp(lambda a: jk.matmul(a, b, out_dtype=jnp.float32), a)
    (da,) = pull(jnp.where(jnp.arange(4096) % 2 == 0, 1 + 2**-12, -1.0)[None])
    assert (da.dtype, da.item()) == (jnp.bfloat16, 0.5)


def precision_in(f, *args):
    (equation,) = jax.make_jaxpr(f)(*args).eqns
    return equation.params["static"].precision


HIGHEST = jax.lax.Precision.HIGHEST
PRESET = jax.lax.DotAlgorithmPreset.F32_F32_F32


@pytest.mark.parametrize(
    ("precision", "canonical"),
    [
        (None, None),
        ("highest", (HIGHEST, HIGHEST)),
        (HIGHEST, (HIGHEST, HIGHEST)),
        (("highest", "default"), (HIGHEST, jax.lax.Precision.DEFAULT)),
        ((HIGHEST, HIGHEST), (HIGHEST, HIGHEST)),
        ("F32_F32_F32", PRESET),
        (PRESET, PRESET),
    ],
    ids=str,
)
def test_precision_takes_every_form_that_lax_takes(precision, canonical):
    a, b = arrays((5, 7), (7, 3))
    numbers = (((1,), (0,)), ((), ()))
    assert precision_in(lambda a, b: jk.matmul(a, b, precision=precision), a, b) == canonical
    assert precision_in(lambda a, b: jk.dot_general(a, b, numbers, precision=precision), a, b) == canonical
    loss = lambda a, b: jnp.sum(jk.matmul(a, b, precision=precision))
    assert_close(jax.jit(jax.grad(loss))(a, b), jnp.broadcast_to(b.sum(1), a.shape))


def test_precision_defaults_to_that_of_the_context_of_the_call():
    """Kernels are chosen when the program is lowered: by then the context manager may be gone."""
    a, b = arrays((5, 7), (7, 3))
    with jax.default_matmul_precision("highest"):
        traced = jax.jit(jk.matmul).trace(a, b)
        assert precision_in(jk.matmul, a, b) == (HIGHEST, HIGHEST)
        assert precision_in(functools.partial(jk.matmul, activation="relu"), a, b) == (HIGHEST, HIGHEST)
    assert traced.lower().as_text().count("HIGHEST") == 2  # one for each operand
    assert precision_in(jk.matmul, a, b) is None


def test_works_without_jit(backend):
    a, b, bias = arrays((5, 7), (7, 3), (3,))
    with jax.disable_jit():
        assert_close(jk.matmul(a, b, bias=bias, activation="relu", backend=backend), jnp.maximum(a @ b + bias, 0))


def test_float64():
    with jax.enable_x64(True):
        a, b, bias = (x.astype(np.float64) for x in arrays((5, 7), (7, 3), (3,)))
        f = lambda a, b: jnp.sum(jk.matmul(a, b, bias=bias, activation="gelu"))
        reference = lambda a, b: jnp.sum(jax.nn.gelu(a @ b + bias))
        for x, y in zip(jax.grad(f, (0, 1))(a, b), jax.grad(reference, (0, 1))(a, b)):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, y, rtol=1e-13)


def test_float64_beside_an_8_bit_float_keeps_its_width():
    with jax.enable_x64(True):
        (a,), b = arrays((5, 7)), np.ones((7, 3), jnp.float8_e5m2)
        out = jk.dot_general(a.astype(np.float64), b, (((1,), (0,)), ((), ())))
        assert out.dtype == np.float64
        np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64), rtol=1e-14)


def test_nan_and_infinity_pass_through(backend):
    a, b = arrays((5, 7), (7, 3))
    a[1, 2], a[3, 4], b[4, 0] = np.nan, np.inf, 2.0
    out = jk.matmul(a, b, backend=backend)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(a @ b))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(a @ b))
    assert_same_bits(jk.matmul(a, b, backend=backend), out)
