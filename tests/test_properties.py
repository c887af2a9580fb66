"""Random programs, compared with plain JAX: our functions compute all that lax and jax.nn accept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import random_array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics import assert_close, compile_quickly

import jaxkernels as jk


def bounded(max_examples: int) -> settings:
    """Every example is a program to compile. Derandomised: each run draws the same."""
    slow = [HealthCheck.too_slow]
    return settings(
        max_examples=max_examples, deadline=None, derandomize=True, database=None, suppress_health_check=slow
    )


# Distinct, so that two axes in the wrong order cannot go unseen; 1 is drawn beside them.
SIZES = (2, 3, 4, 5, 6, 7)
rng = np.random.default_rng


def with_gradients(f: Any, *xs: Any) -> Any:
    out, pull = jax.vjp(f, *xs)
    return out, pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))


@st.composite
def contractions(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], Any]:
    """Shapes and dimension numbers of a dot_general: every dimension in any place."""
    sizes = draw(st.permutations(SIZES))
    kinds = draw(st.lists(st.sampled_from("bkmn"), min_size=1, max_size=5))
    axes = [(kind, 1 if draw(st.integers(0, 7)) == 0 else sizes[i]) for i, kind in enumerate(kinds)]
    lhs = draw(st.permutations([i for i, (kind, _) in enumerate(axes) if kind != "n"]))
    rhs = draw(st.permutations([i for i, (kind, _) in enumerate(axes) if kind != "m"]))
    of_kind = lambda kind: draw(st.permutations([i for i, (k, _) in enumerate(axes) if k == kind]))
    contracting, batch = of_kind("k"), of_kind("b")
    numbers = tuple(
        tuple(tuple(operand.index(i) for i in shared) for operand in (lhs, rhs)) for shared in (contracting, batch)
    )
    return tuple(axes[i][1] for i in lhs), tuple(axes[i][1] for i in rhs), numbers


@given(contractions())
@bounded(40)
def test_dot_general(program):
    lhs_shape, rhs_shape, numbers = program
    lhs, rhs = random_array(rng(0), lhs_shape, "float32"), random_array(rng(1), rhs_shape, "float32")
    run = lambda dot: with_gradients(lambda lhs, rhs: dot(lhs, rhs, numbers), lhs, rhs)
    assert_close(*compile_quickly(lambda: (run(jk.dot_general), run(jax.lax.dot_general)))())


@st.composite
def matmuls(draw: st.DrawFn) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    m, n, k, *batch = draw(st.permutations(SIZES))
    m, n, k = (1 if draw(st.integers(0, 7)) == 0 else size for size in (m, n, k))
    batch = batch[: draw(st.integers(0, 2))]
    broadcast = lambda: tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in batch)[
        draw(st.integers(0, len(batch))) :
    ]
    a = random_array(rng(0), (*broadcast(), m, k) if draw(st.booleans()) else (k,), "float32")
    b = random_array(rng(1), (*broadcast(), k, n) if draw(st.booleans()) or a.ndim == 1 else (k,), "float32")
    shape = jax.eval_shape(jnp.matmul, a, b).shape
    options: dict[str, Any] = dict(
        activation=draw(st.sampled_from([None, "relu", "relu_squared", "silu", "gelu", "gelu_erf"]))
    )
    options["alpha"] = draw(st.sampled_from([1.0, -0.3]))
    if b.ndim > 1 and draw(st.booleans()):
        options["bias"] = random_array(rng(2), (n,), "float32")
    if draw(st.booleans()):
        options["residual"] = random_array(rng(3), shape, "float32")
    return (a, b), options


@given(matmuls())
@bounded(40)
def test_matmul(program):
    (a, b), options = program
    activations = dict(
        relu=jax.nn.relu,
        relu_squared=lambda x: jnp.maximum(x, 0) ** 2,
        silu=jax.nn.silu,
        gelu=jax.nn.gelu,
        gelu_erf=lambda x: jax.nn.gelu(x, approximate=False),
    )

    def reference(a, b):
        out = options["alpha"] * jnp.matmul(a, b) + options.get("bias", 0)
        return activations.get(options["activation"], lambda x: x)(out) + options.get("residual", 0)

    ours = lambda a, b: jk.matmul(a, b, **options)
    assert_close(*compile_quickly(lambda: (with_gradients(ours, a, b), with_gradients(reference, a, b)))())


@st.composite
def attentions(draw: st.DrawFn) -> tuple[tuple[np.ndarray, ...], dict[str, Any]]:
    """Arguments that jax.nn takes, in every combination."""
    batch, num_queries, num_keys, head_dim = draw(st.permutations(SIZES))[:4]
    num_kv_heads, group_size = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]))
    heads = num_kv_heads * group_size
    num_queries, num_keys = (1 if draw(st.integers(0, 7)) == 0 else size for size in (num_queries, num_keys))
    full = (batch, heads, num_queries, num_keys)

    def broadcast() -> tuple[int, ...]:
        shape = tuple(size if draw(st.booleans()) else 1 for size in full)
        return shape[draw(st.integers(0, 3)) :]

    kv_shape = (batch, num_keys, num_kv_heads, head_dim)
    xs = tuple(
        random_array(rng(i), shape, "float32")
        for i, shape in enumerate([(batch, num_queries, heads, head_dim), kv_shape, kv_shape])
    )
    if draw(st.booleans()):
        xs = (*xs, random_array(rng(3), broadcast(), "float32"))
    side = st.integers(0, 7)
    lengths = lambda most: np.array(draw(st.lists(st.integers(0, most), min_size=batch, max_size=batch)), np.int32)
    options: dict[str, Any] = dict(is_causal=draw(st.booleans()))
    if draw(st.booleans()):
        options["mask"] = rng(4).random(broadcast()) < draw(st.sampled_from([0.1, 0.6, 0.9]))
    if draw(st.booleans()):
        options["local_window_size"] = (draw(side), draw(side)) if draw(st.booleans()) else draw(side)
    if draw(st.booleans()):
        options["query_seq_lengths"] = lengths(num_queries)
    if draw(st.booleans()):
        options["key_value_seq_lengths"] = lengths(num_keys)
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(-2, 2, width=32))
    return xs, options


@given(attentions())
@bounded(12)
def test_attention(program):
    xs, options = program
    run = lambda attention: with_gradients(lambda *xs: attention(*xs, **options), *xs)
    ours, reference = compile_quickly(lambda: (run(jk.dot_product_attention), run(jax.nn.dot_product_attention)))()
    assert_close(ours, reference)
