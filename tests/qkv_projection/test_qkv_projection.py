"""The public function of the projection to queries, keys and values: its values, dtypes and routes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numerics import assert_close, assert_same_bits, compile_quickly

import jaxkernels as jk

HEADS = dict(num_heads=4, num_kv_heads=2)


def operands(dtype: str = "float32") -> tuple[jax.Array, ...]:
    """x (2, 5, 7), w (7, 48) for 8 heads of 6 features, cos and sin (5, 3)."""
    rng = np.random.default_rng(0)
    x, w, angles = (rng.standard_normal(shape) for shape in ((2, 5, 7), (7, 48), (5, 3)))
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype), jnp.asarray(np.cos(angles)), jnp.asarray(np.sin(angles))


def project(x: jax.Array, w: jax.Array, cos: jax.Array, sin: jax.Array, **options: Any) -> Any:
    return jk.qkv_projection(x, w, (cos, sin), **(HEADS | options))


def gradients(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that differentiates the sum of sines of query, key and value in x, w, cos and sin."""
    loss = lambda *xs: sum(jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in f(*xs))
    return jax.grad(loss, (0, 1, 2, 3))


def equations(jaxpr: Any) -> list[str]:
    """Names of the primitives of a program, inner programs included."""
    inner = [eqn.params[name] for eqn in jaxpr.eqns for name in ("jaxpr", "call_jaxpr") if name in eqn.params]
    return [eqn.primitive.name for eqn in jaxpr.eqns] + [name for x in inner for name in equations(x)]


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_pairs_are_complex_numbers(pairs):
    """The rotation multiplies them by cos + i sin. Values are not rotated."""
    x, w, cos, sin = operands()
    plain = jk.qkv_projection(x, w, **HEADS)
    rotated = project(x, w, cos, sin, pairs=pairs)
    assert [part.shape for part in rotated] == [(2, 5, 4, 6), (2, 5, 2, 6), (2, 5, 2, 6)]
    turn = np.asarray(cos + 1j * sin)[:, None]
    first, second = (slice(3), slice(3, 6)) if pairs == "halves" else (slice(0, 6, 2), slice(1, 6, 2))
    for before, after in zip(plain[:2], rotated[:2]):
        expected = (before[..., first] + 1j * before[..., second]) * turn
        assert_close((after[..., first], after[..., second]), (expected.real, expected.imag))
    assert_same_bits(rotated[2], plain[2])


def test_heads_of_keys_are_as_many_as_those_of_queries_by_default():
    x, w, cos, sin = operands()
    rotation = cos[:, :2], sin[:, :2]
    alone = jk.qkv_projection(x, w, rotation, num_heads=4)
    assert_same_bits(alone, jk.qkv_projection(x, w, rotation, num_heads=4, num_kv_heads=4))
    assert {part.shape for part in alone} == {(2, 5, 4, 4)}


@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_a_plain_product_equals_the_primitive(pairs):
    """Values and gradients: a backend that is named "xla" gets no primitive of the projection."""
    ours, plain = (functools.partial(project, pairs=pairs, backend=backend) for backend in (None, "xla"))
    xs = operands()
    assert "jk_qkv_projection" in equations(jax.make_jaxpr(ours)(*xs).jaxpr)
    assert "jk_qkv_projection" not in equations(jax.make_jaxpr(plain)(*xs).jaxpr)
    assert_close(*compile_quickly(lambda: tuple((f(*xs), gradients(f)(*xs)) for f in (ours, plain)))())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("named", [None, "xla", "opaque"])
def test_promotion_that_is_forbidden_to_the_caller(opaque, named, dtype):
    f = functools.partial(project, backend=named)
    xs = operands(dtype)
    expected = compile_quickly(lambda: (f(*xs), gradients(f)(*xs)))()
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_same_bits(compile_quickly(lambda: (f(*xs), gradients(f)(*xs)))(), expected)


def test_gradients_are_one_product_each():
    """One product projects, one makes the gradient of x, and one the gradient of w. There is no plain product."""
    x, w, cos, sin = operands()
    gradient = jax.grad(lambda x, w: sum(map(jnp.sum, project(x, w, cos, sin))), (0, 1))
    found = equations(jax.make_jaxpr(gradient)(x, w).jaxpr)
    assert found.count("jk_qkv_projection") == 3
    assert "jk_dot_general" not in found


@pytest.mark.parametrize("named", [None, "xla", "opaque"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_x64(opaque, named, dtype):
    """Results have the dtype of the operands. Angles of float64 count in float64 if the operands are float64."""
    with jax.enable_x64(True):
        x, w, cos, sin = operands(dtype)
        assert (cos.dtype, x.dtype) == (jnp.float64, jnp.dtype(dtype))
        f = functools.partial(project, backend=named)
        parts, grads = compile_quickly(lambda: (f(x, w, cos, sin), gradients(f)(x, w, cos, sin)))()
        assert {part.dtype for part in parts} == {jnp.dtype(dtype)}
        assert [grad.dtype for grad in grads] == [x.dtype, w.dtype, cos.dtype, sin.dtype]
        x, w = x.astype(jnp.float64), w.astype(jnp.float64)
        first, second = jnp.split((x @ w).reshape(2, 5, 8, 6)[:, :, :6], 2, axis=-1)
        cos, sin = cos[:, None], sin[:, None]
        exact = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
        tolerance = dict(bfloat16=2**-7, float32=1e-6, float64=1e-14)[dtype]
        rotated = jnp.concatenate(parts[:2], axis=-2).astype(jnp.float64)
        assert float(jnp.max(jnp.abs(rotated - exact))) <= tolerance * float(jnp.max(jnp.abs(exact)))
    if dtype != "float64":
        assert_close(parts, f(*operands(dtype)), rtol=2 * tolerance)
