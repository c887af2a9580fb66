"""`jk.rms_norm` and `jk.layer_norm`: the table of cases by the error rule, and what they promise beyond it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from errors import raises_exactly
from flax import nnx
from numerics import assert_close, assert_error_rule, assert_same_bits, compile_quickly

import jaxkernels as jk
from jaxkernels.core import dispatch
from jaxkernels.ops.norm.oracle import plain_norm


def test_error_rule(backend, norm_case):
    assert_error_rule(norm_case, plain_norm, backend)


def draw(*shape: int, seed: int = 0, dtype: str = "float32") -> np.ndarray:
    return random_array(np.random.default_rng(seed), shape, dtype)


# In the place of flax.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_follows_flax(backend, dtype):
    """`nnx.RMSNorm` and `nnx.LayerNorm`, whose parameters are float32."""
    x, scale, bias = draw(3, 5, 48, dtype=dtype), draw(48, seed=1), draw(48, seed=2)
    rms = nnx.RMSNorm(48, dtype=x.dtype, rngs=nnx.Rngs(0))
    layer = nnx.LayerNorm(48, dtype=x.dtype, use_fast_variance=False, rngs=nnx.Rngs(0))
    for norm in (rms, layer):
        norm.scale[...] = scale
    layer.bias[...] = bias
    tolerance = 2 * float(jnp.finfo(x.dtype).eps)
    for ours, theirs in (
        (jk.rms_norm(x, scale, backend=backend), rms(x)),
        (jk.layer_norm(x, scale, bias, backend=backend), layer(x)),
    ):
        assert ours.dtype == theirs.dtype
        assert_close(ours.astype(jnp.float32), theirs.astype(jnp.float32), rtol=max(tolerance, 2e-6))


@pytest.mark.parametrize("norm", [jk.rms_norm, jk.layer_norm])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_residual_is_added_first_and_the_sum_returned(backend, norm, dtype):
    x, residual, scale = draw(6, 40, dtype=dtype), draw(6, 40, seed=1, dtype=dtype), draw(40, seed=2, dtype=dtype)
    out, total = norm(x, scale, residual=residual, backend=backend)
    assert_same_bits(total, x + residual)
    assert_same_bits(out, norm(total, scale, backend=backend))


def test_accepts_whatever_is_an_array():
    out, total = jk.layer_norm([[1.0, 3.0]], [2.0, 2.0], np.float32([1.0, 0.0]), residual=[[0.0, 0.0]], eps=0)
    np.testing.assert_array_equal(out, [[-1.0, 2.0]])
    np.testing.assert_array_equal(total, [[1.0, 3.0]])


def test_offset_is_added_to_the_scale(backend):
    x, scale = draw(3, 8), draw(8, seed=1)
    assert_close(jk.rms_norm(x, scale, scale_offset=1.0, backend=backend), jk.rms_norm(x, scale + 1, backend=backend))
    assert_same_bits(jk.rms_norm(x, scale_offset=1.0, backend=backend), jk.rms_norm(x, backend=backend))


# Numbers.


def test_variance_of_rows_far_from_zero(backend):
    """E[x^2] - E[x]^2 in float32 would have no digit of it."""
    x = 1e4 + draw(4, 256)
    with jax.enable_x64(True):
        expected = plain_layer_norm(x.astype(np.float64))
    np.testing.assert_allclose(jk.layer_norm(x, backend=backend), expected, atol=2e-3)


def plain_layer_norm(x: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("norm", [jk.rms_norm, jk.layer_norm])
def test_zero_rows(backend, norm):
    """Zeros, with finite gradients."""
    x = np.zeros((3, 16), np.float32)
    out, pull = jax.vjp(functools.partial(norm, backend=backend), x)
    assert_same_bits(out, x)
    (dx,) = pull(draw(3, 16))
    assert np.isfinite(dx).all()


@pytest.mark.parametrize("norm", [jk.rms_norm, jk.layer_norm])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_spoils_no_other(backend, norm, bad):
    x, ct = draw(5, 16), draw(5, 16, seed=1)
    spoilt = x.copy()
    spoilt[2, 3] = bad
    f = functools.partial(norm, backend=backend)
    (out, pull), (expected, expected_pull) = jax.vjp(f, spoilt), jax.vjp(f, x)
    others = np.arange(5) != 2
    assert_same_bits((out[others], pull(ct)[0][others]), (expected[others], expected_pull(ct)[0][others]))
    assert np.isnan(out[2, 3])
    assert np.isnan(pull(ct)[0][2]).all()


@pytest.mark.parametrize("norm", [jk.rms_norm, jk.layer_norm])
def test_extremes_of_float16(backend, norm):
    """Squares beyond its range, and denormal numbers."""
    x = np.stack([np.linspace(-6e4, 6e4, 64), np.linspace(1e-7, 6e-6, 64)]).astype(np.float16)
    out = norm(x, eps=1e-20, backend=backend)
    wide = norm(x.astype(np.float32), eps=1e-20, backend=backend)
    np.testing.assert_allclose(out.astype(np.float32), wide, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("norm", [jk.rms_norm, jk.layer_norm])
def test_float64(backend, norm):
    """Under jax_enable_x64, statistics and all that follows have 64 bits; and float32 stays float32."""
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 16))
        centred = x - x.mean(-1, keepdims=True) if norm is jk.layer_norm else x
        expected = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(norm(x, backend=backend), expected, rtol=1e-13)
        assert norm(x.astype(np.float32), x[0], backend=backend).dtype == np.float32
        scale = jnp.ones(16, jnp.float32)
        assert jax.grad(lambda s: norm(x, s, backend=backend).sum())(scale).dtype == np.float32


def test_empty_arrays(backend):
    for shape in ((0, 8), (3, 0, 8)):
        x = np.zeros(shape, np.float32)
        out, pull = jax.vjp(lambda x, s: jk.rms_norm(x, s, backend=backend), x, np.ones(8, np.float32))
        assert out.shape == shape
        assert [grad.shape for grad in pull(out)] == [shape, (8,)]
        assert_same_bits(pull(out)[1], np.zeros(8, np.float32))


# Gradients that are not asked for.


def test_parameters_that_are_constants_are_spared_their_gradients():
    x, scale, bias = draw(6, 40), draw(40, seed=1), draw(40, seed=2)
    norm = lambda x, scale, bias: jk.layer_norm(x, scale, bias).sum()

    def backward_results(argnums: tuple[int, ...]) -> int:
        jaxpr = jax.make_jaxpr(jax.grad(norm, argnums))(x, scale, bias)
        (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "jk_norm_backward"]
        return len(equation.outvars)

    assert [backward_results(argnums) for argnums in ((0,), (0, 1), (0, 2), (0, 1, 2))] == [1, 2, 2, 3]


def test_the_sum_alone_needs_no_backward_kernel():
    x, residual = draw(6, 40), draw(6, 40, seed=1)
    gradient = jax.grad(lambda x, r: jnp.sum(jk.rms_norm(x, residual=r)[1] ** 2), (0, 1))
    assert "jk_norm_backward" not in str(jax.make_jaxpr(gradient)(x, residual))
    assert_close(gradient(x, residual), (2 * (x + residual),) * 2)


def test_the_cotangent_of_the_sum_is_added_in_the_backward_kernel(opaque):
    x, residual = draw(6, 40), draw(6, 40, seed=1)
    block = lambda x, r: sum(jnp.sum(jnp.sin(y)) for y in jk.rms_norm(x, residual=r, backend=opaque))
    with dispatch.recording() as choices:
        jax.jit(jax.grad(block)).lower(x, residual)
    assert [(c.op, c.spec.sum_gradient) for c in choices] == [("norm_forward", False), ("norm_backward", True)]


# Refusals.

X, SCALE = draw(3, 8), draw(8)


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((None,), {}, "rms_norm[auto]: x must be an array that JAX takes; got NoneType."),
        ((np.float32(1),), {}, "rms_norm[auto]: x must have shape (..., F) with F at least 1; got ()."),
        ((X[:, :0],), {}, "rms_norm[auto]: x must have shape (..., F) with F at least 1; got (3, 0)."),
        (
            (np.int32([[1]]),),
            {},
            "rms_norm[auto]: x must have a floating dtype; got int32. Cast it with .astype.",
        ),
        (
            (jnp.zeros((2, 8), jnp.float8_e4m3fn),),
            {},
            "rms_norm[auto]: x must have a floating dtype of 16 bits or more; got float8_e4m3fn. Cast it with .astype.",
        ),
        ((X, SCALE[:3]), {}, "rms_norm[auto]: scale must have shape (8,) for x (3, 8); got (3,)."),
        ((X, SCALE[None]), {}, "rms_norm[auto]: scale must have shape (8,) for x (3, 8); got (1, 8)."),
        (
            (X,),
            dict(residual=X[0]),
            "rms_norm[auto]: residual must have the shape and dtype of x, f32[3,8]; got f32[8].",
        ),
        (
            (X,),
            dict(residual=jnp.asarray(X, jnp.bfloat16)),
            "rms_norm[auto]: residual must have the shape and dtype of x, f32[3,8]; got bf16[3,8].",
        ),
        ((X,), dict(eps=-1.0), "rms_norm[auto]: eps must not be negative; got -1.0."),
        (
            (X,),
            dict(eps=np.nan),
            "rms_norm[auto]: eps must be a finite real number known at trace time; got nan. The kernels are compiled "
            "for one eps.",
        ),
        (
            (X, SCALE),
            dict(scale_offset="1"),
            "rms_norm[auto]: scale_offset must be a finite real number known at trace time; got '1'. Add a traced "
            "number to the scale.",
        ),
        (
            (X,),
            dict(backend="flash"),
            "rms_norm: unknown backend='flash'; use one of "
            + ", ".join(map(repr, dispatch.backend_names()))
            + ", or None to let the op choose.",
        ),
    ],
)
def test_refusals(args, options, message):
    with raises_exactly(ValueError, message):
        jk.rms_norm(*args, **options)


def test_refusals_name_the_function():
    with raises_exactly(ValueError, "layer_norm[xla]: bias must have shape (8,) for x (3, 8); got (3,)."):
        jk.layer_norm(X, SCALE, SCALE[:3], backend="xla")


@pytest.mark.parametrize("name", ["cuda", "pallas", "cudnn"])
def test_backends_without_norms(name):
    message = f"norm_forward[{name}]: no such kernel in this backend. {dispatch.WAY_OUT}"
    with raises_exactly(NotImplementedError, message):
        jk.rms_norm(X, backend=name)


def test_kernels_refuse_second_derivatives(opaque):
    gradient = jax.grad(lambda x: jk.rms_norm(x, backend=opaque).sum())
    message = 'norm_backward[opaque]: second derivatives are computed by XLA only. Use backend=None or backend="xla".'
    with raises_exactly(NotImplementedError, message):
        jax.jvp(gradient, (X,), (X,))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("features", [1024, 5000, 16384])
def test_kernels_repeat_bit_by_bit(centered, features):
    """50 runs of value and gradients."""
    norm = functools.partial(jk.layer_norm if centered else jk.rms_norm, backend="triton")
    x, residual, scale = (jnp.asarray(draw(*s, dtype="bfloat16")) for s in ((2048, features),) * 2 + ((features,),))

    @jax.jit
    def run(x: Any, residual: Any, scale: Any) -> Any:
        out, pull = jax.vjp(lambda x, r, s: norm(x, s, residual=r), x, residual, scale)
        return out, pull(out)

    first = run(x, residual, scale)
    for _ in range(50):
        assert_same_bits(run(x, residual, scale), first)


@pytest.mark.gpu
def test_kernels_have_forward_mode():
    x, dx = draw(64, 512), draw(64, 512, seed=1)
    scale, dscale = draw(512, seed=2), draw(512, seed=3)
    push = lambda backend: jax.jvp(lambda *xs: jk.rms_norm(*xs, backend=backend), (x, scale), (dx, dscale))
    assert_close(*compile_quickly(lambda: (push("triton"), push("xla")))())
