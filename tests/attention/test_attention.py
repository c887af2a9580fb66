"""`jk.dot_product_attention`: the table of cases by the error rule, the semantics of `jax.nn`, and what is added."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import h200, needs_aot
from cases import ATTENTION_CASES, AttentionCase, random_array
from numerics import (
    assert_close,
    assert_error_rule,
    compile_quickly,
    exact_attention_gradients,
    plain_attention,
    with_gradients,
)

import jaxkernels as jk
from jaxkernels.core import dispatch

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def test_error_rule(backend, attention_case):
    # The kernels add up dq in the order in which its parts come, unless that is asked to be the same every time.
    check = functools.partial(assert_error_rule, attention_case, plain_attention, backend)
    # cuDNN divides the keys of few queries: then the order of the output's sums changes, too.
    check(gradients_repeat=backend not in ("pallas", "cuda", "cudnn"), output_repeats=backend != "cudnn")
    if backend in ("pallas", "cuda") and attention_case.size != "small":
        check(deterministic=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True),
        dict(local_window_size=(255, 0)),
        # Blocks ask for items of the forward pass, and get others each time.
        dict(is_causal=True, key_value_seq_lengths=np.array([1000, 700, 30, 999], np.int32)),
    ],
    ids=["causal", "window", "lengths"],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_200_runs_have_the_same_bits(head_dim, options):
    """With a chip full of blocks, which begin and end in a different order in each run."""
    shapes = [(4, 1000, heads, head_dim) for heads in (16, 4, 4)]
    rng = np.random.default_rng(0)
    operands = [jnp.asarray(random_array(rng, shape, "bfloat16")) for shape in shapes]
    attention = functools.partial(
        jk.dot_product_attention, **options, deterministic=True, return_residual=True, backend="pallas"
    )

    @jax.jit
    def bits(*operands):
        results, pull = jax.vjp(attention, *operands)
        leaves = jax.tree.leaves((results, pull(results)))
        return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in leaves]

    count_others = jax.jit(lambda xs, ys: sum(jnp.sum(x != y) for x, y in zip(xs, ys, strict=True)))
    first = bits(*operands)
    # Nothing waits for a run before the last.
    assert jnp.stack([count_others(first, bits(*operands)) for _ in range(199)]).tolist() == [0] * 199


def is_known_to_jax(case: AttentionCase) -> bool:
    has_open_window = case.window is not None and None in case.window
    return not (case.segments or case.soft_cap or case.value_dim or case.query_offset or has_open_window)


@pytest.mark.parametrize(
    "case",
    [case for case in ATTENTION_CASES if case.size == "small" and case.dtype == "float32" and is_known_to_jax(case)],
    ids=lambda case: case.id,
)
def test_reference_of_the_error_rule_is_jax_nn(case):
    def with_jax_nn(operands):
        return jax.nn.dot_product_attention(
            **operands, is_causal=case.causal, local_window_size=case.window, return_residual=True
        )

    ct_out, ct_lse = case.cotangents()
    # jax.nn's residual has no gradient.
    reference = with_gradients(with_jax_nn, case.operands(), (ct_out, ct_lse))
    plain = with_gradients(functools.partial(plain_attention, case), case.operands(), (ct_out, np.zeros_like(ct_lse)))
    assert_close(plain, reference)


# In the place of jax.nn.


def qkv(dtype: str = "float32", *, rank: int = 4, num_keys: int = S) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, num_keys, K, H), (B, num_keys, K, H)
    return [random_array(rng, shape[4 - rank :], dtype) for shape in shapes]


def draw(*shape: int) -> np.ndarray:
    return random_array(np.random.default_rng(1), shape, "float32")


def assert_follows_jax_nn(*args: Any, backend: str | None = None, **options: Any) -> None:
    """Output, residual and the gradients in every floating argument."""

    def results(attention: Callable[..., Any]) -> Any:
        f = lambda *args: attention(*args, **options, return_residual=True)
        (out, residual), pull = jax.vjp(f, *args)
        return out, residual, pull((jnp.sin(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape), residual))

    ours = functools.partial(jk.dot_product_attention, backend=backend)
    assert_close(*compile_quickly(lambda: (results(ours), results(jax.nn.dot_product_attention)))())


LENGTHS = dict(query_seq_lengths=np.int32([3, 0]), key_value_seq_lengths=np.int32([0, 5]))
A_MASK = draw(B, N, T, S) > 0


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(is_causal=True),
        dict(scale=0.3),
        dict(scale=np.float32(2.0)),
        dict(local_window_size=1),
        dict(local_window_size=(3, 0)),
        dict(local_window_size=[0, 2], is_causal=True),
        dict(local_window_size=100),
        dict(key_value_seq_lengths=LENGTHS["key_value_seq_lengths"]),
        dict(query_seq_lengths=LENGTHS["query_seq_lengths"]),
        dict(**LENGTHS, is_causal=True, local_window_size=(2, 1)),
        dict(mask=A_MASK),
        dict(mask=A_MASK[:1, :1, :1]),
        dict(mask=A_MASK[0, :, :, :1], is_causal=True),
        dict(mask=A_MASK[0, 0], **LENGTHS),
        dict(implementation="xla"),
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_options_follow_jax_nn(backend, options):
    if "implementation" in options:
        backend = None
    assert_follows_jax_nn(*qkv(), backend=backend, **options)


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(mask=A_MASK[0])], ids=["causal", "mask"])
def test_inputs_without_batch_follow_jax_nn(options):
    lengths = dict(query_seq_lengths=np.int32([3]), key_value_seq_lengths=np.int32([5]))
    assert_follows_jax_nn(*qkv(rank=3), draw(N, T, S), **options, **lengths)


@pytest.mark.parametrize("letters", ["".join(letters) for letters in itertools.product("B1", "N1", "T1", "S1")])
def test_bias_of_every_broadcast_shape_follows_jax_nn(letters):
    sizes = dict(B=B, N=N, T=T, S=S)
    bias = draw(*(sizes.get(letter, 1) for letter in letters))
    assert_follows_jax_nn(*qkv(), bias, mask=A_MASK)


@pytest.mark.parametrize("shape", [(N, T, S), (1, T, S), (T, S), (1, S), (S,)], ids=str)
def test_bias_of_lower_rank_follows_jax_nn(shape):
    assert_follows_jax_nn(*qkv(), draw(*shape), is_causal=True)


def test_bias_of_minus_infinity_follows_jax_nn():
    """Some keys hidden by it, then all keys of a row: NaN, there and in the gradients."""
    some_keys = np.where(np.arange(S) < 4, 0, -np.inf).astype(np.float32)[None, None, None]
    some_queries = np.where(np.arange(T) < 4, 0, -np.inf).astype(np.float32)[None, None, :, None]
    for bias in (some_keys, some_queries):
        assert_follows_jax_nn(*qkv(), bias)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, T, S), (B, 0, S), (B, T, 0)])
def test_empty_axes_follow_jax_nn(batch, queries, keys):
    inputs = np.ones((batch, queries, N, H)), np.ones((batch, keys, K, H)), np.ones((batch, keys, K, H))
    assert_follows_jax_nn(*(x.astype(np.float32) for x in inputs), is_causal=True)


@pytest.mark.parametrize(
    ("function", "drops"),
    [
        (lambda q: jk.dot_product_attention(q, q, q), [("attention_forward", True)]),
        (lambda q: jk.dot_product_attention(q, q, q, return_lse=True), [("attention_forward", False)]),
        (lambda q: jk.dot_product_attention(q, q, q, return_residual=True), [("attention_forward", False)]),
        (
            jax.grad(lambda q: jnp.sum(jk.dot_product_attention(q, q, q))),
            [("attention_forward", False), ("attention_backward", False)],
        ),
        (
            lambda q: jax.jvp(lambda q: jk.dot_product_attention(q, q, q, return_lse=True), [q], [q]),
            [("attention_forward", False), ("attention_tangent", False)],
        ),
    ],
)
def test_the_choice_knows_whether_the_logsumexp_is_used(function, drops):
    choices = jk.explain(function, jnp.ones((B, T, N, H))).choices
    assert [(choice.op, choice.spec.drops_lse) for choice in choices] == drops


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes_of_output_and_residual_follow_jax_nn(dtype):
    mask = np.ones((T, S), bool)
    mask[1] = False  # Its residual is -0.7 times float32's largest number: minus infinity in float16.
    options = dict(mask=mask, return_residual=True)
    ours = jk.dot_product_attention(*qkv(dtype), **options)
    reference = jax.nn.dot_product_attention(*qkv(dtype), **options)
    for x, y in zip(ours, reference, strict=True):
        assert x.dtype == y.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(x, y)


def test_float64():
    with jax.enable_x64(True):
        inputs = [x.astype(np.float64) for x in qkv()]
        loss = lambda attention: lambda *xs: jnp.sum(jnp.sin(attention(*xs, is_causal=True)))
        ours = jax.grad(loss(jk.dot_product_attention), (0, 1, 2))(*inputs)
        reference = jax.grad(loss(jax.nn.dot_product_attention), (0, 1, 2))(*inputs)
        for x, y in zip(ours, reference, strict=True):
            assert x.dtype == np.float64
            np.testing.assert_allclose(x, y, atol=1e-6)  # Both compute the softmax in float32.


def test_accepts_whatever_is_an_array():
    q, k, v = qkv()
    out = jk.dot_product_attention(jnp.asarray(q), k.tolist(), v, query_seq_lengths=[1, 2])
    assert_close(out, jax.nn.dot_product_attention(q, k, v, query_seq_lengths=[1, 2]))


# Edge cases, by what they must give.


def test_query_without_keys_gets_the_mean_of_the_values(backend):
    q, k, v = qkv()
    mask = np.ones((T, S), bool)
    mask[1:3] = False
    f = functools.partial(jk.dot_product_attention, mask=mask, backend=backend)
    mean = np.repeat(v.mean(axis=1), N // K, axis=1)
    for row in (1, 2):
        assert_close(np.asarray(f(q, k, v))[:, row], mean)
    dq, dk, dv = jax.grad(lambda *xs: jnp.sum(f(*xs)[:, 1]), (0, 1, 2))(q, k, v)
    assert not dq.any()
    assert not dk.any()
    assert_close(dv, np.full_like(v, N // K / S))


def test_padded_queries_give_zero_and_take_no_gradient(backend):
    q, k, v = qkv()
    f = functools.partial(jk.dot_product_attention, query_seq_lengths=np.int32([2, 5]), backend=backend)
    out, pull = jax.vjp(f, q, k, v)
    assert not np.any(out[0, 2:])
    assert np.all(out[1])
    dq, dk, dv = pull(jnp.zeros_like(out).at[0, 2:].set(1e6))
    assert not any(np.any(grad) for grad in (dq, dk, dv))


def test_large_logits_do_not_overflow(backend):
    """Logits of a million: each query gets the value of one key, and exp alone would overflow."""
    q, k, v = qkv()
    out, lse = jk.dot_product_attention(q, k, v, scale=1e6, return_lse=True, backend=backend)
    logits = 1e6 * np.einsum("btnh,bsnh->btns", q, np.repeat(k, N // K, axis=2))
    is_best = logits == logits.max(axis=-1, keepdims=True)
    assert_close(np.asarray(out), np.einsum("btns,bsnh->btnh", is_best, np.repeat(v, N // K, axis=2)))
    assert_close(np.asarray(lse), logits.max(axis=-1))


@pytest.mark.parametrize("scale", [1e11, 1e25])
@pytest.mark.parametrize("shape", [(1, 64, 2, 32), (7, 5, 2, 8)], ids=str)
def test_compiled_logits_beyond_1e8_are_no_nans(shape, scale):
    """XLA computes a logit twice, rounded for the maximum and unrounded beside it: 512 apart at 1e10."""
    queries, keys, heads, dim = shape
    rng = np.random.default_rng(0)
    q, k, v = (random_array(rng, (2, length, heads, dim), "float32") for length in (queries, keys, keys))
    grads = jax.jit(jax.grad(lambda *xs: jnp.sum(jk.dot_product_attention(*xs, scale=scale)), (0, 1, 2)))(q, k, v)
    assert all(np.isfinite(grad).all() for grad in grads)
    out = jax.jit(functools.partial(jk.dot_product_attention, scale=scale))(q, k, v)
    best = np.einsum("btnh,bsnh->bnts", q, k).argmax(axis=-1)
    np.testing.assert_array_equal(out, np.take_along_axis(v, np.moveaxis(best, 1, 2)[..., None], axis=1))


@pytest.mark.parametrize("scale", [1e11, -1e11, 1e-30])
@pytest.mark.parametrize(
    "rules",
    [
        dict(is_causal=True),
        dict(key_value_seq_lengths=np.int32([5, 3])),
        dict(is_causal=True, logits_soft_cap=1e12),
        dict(local_window_size=(1, 2)),
    ],
    ids=str,
)
def test_compiled_logits_of_any_size_are_masked(rules, scale):
    rng = np.random.default_rng(0)
    q, k, v = (random_array(rng, (2, length, 2, 8), "float32") for length in (7, 5, 5))
    f = functools.partial(jk.dot_product_attention, scale=scale, return_lse=True, **rules)
    with jax.disable_jit():  # Each operation rounds.
        expected = f(q, k, v)
    assert_close(jax.jit(f)(q, k, v), expected)
    grads = jax.jit(jax.grad(lambda *xs: jnp.sum(f(*xs)[0]), (0, 1, 2)))(q, k, v)
    assert all(np.isfinite(grad).all() for grad in grads)


@pytest.mark.parametrize(
    ("tied", "spread"),
    [("", 16), ("", 100), ("", 400), ("q = k", 1), ("q = k = v", 1)],
    ids=lambda x: str(x) or "independent",
)
def test_gradients_at_peaked_softmaxes_are_as_near_as_jax_nns(tied, spread):
    """If one p is nearly 1, dp - delta nearly cancels, and the error of delta dominates."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (random_array(rng, (1, 128, 2, 64), "bfloat16") for _ in range(4))
    bias = random_array(rng, (1, 2, 128, 128), "bfloat16")
    q = (spread * q.astype(np.float32)).astype(q.dtype)
    k = q if tied else k
    v = q if tied == "q = k = v" else v
    pull = lambda attention: jax.vjp(lambda *xs: attention(*xs), q, k, v, bias)[1](dout)
    ours, reference = jax.jit(lambda: (pull(jk.dot_product_attention), pull(jax.nn.dot_product_attention)))()
    exact = exact_attention_gradients(q, k, v, bias, dout)
    for name, x, y, z in zip(("dq", "dk", "dv", "dbias"), ours, reference, exact, strict=True):
        error, of_reference = (float(np.max(np.abs(np.float64(grad) - z))) for grad in (x, y))
        assert error <= 1.1 * of_reference + 2**-10 * float(np.max(np.abs(z))), name


PADDED = dict(query_seq_lengths=np.int32([3, T]), key_value_seq_lengths=np.int32([5, 0]))


def fill_padding(name: str, x: np.ndarray, value: float) -> np.ndarray:
    """Puts `value` behind the lengths of `PADDED` into q (or the like), k, v or a bias."""
    no_query = np.arange(T) >= PADDED["query_seq_lengths"][:, None]
    no_key = np.arange(S) >= PADDED["key_value_seq_lengths"][:, None]
    is_padding = dict(q=no_query, k=no_key, v=no_key, bias=(no_query[:, :, None] | no_key[:, None])[:, None])[name]
    return np.where(is_padding.reshape(is_padding.shape + (1,) * (x.ndim - is_padding.ndim)), value, x).astype(x.dtype)


@pytest.mark.parametrize("poison", [np.nan, np.inf], ids=str)
def test_padding_reaches_no_result_and_no_gradient(poison, backend):
    """Padding of operands and of cotangents. The second sequence has no keys: its queries get means of all values."""
    f = functools.partial(jk.dot_product_attention, **PADDED, return_lse=True, backend=backend)

    def results(value):
        xs = (*qkv(), draw(B, T, N, H), draw(B, T, N))
        q, k, v, dout, dlse = (fill_padding(name, x, value) for name, x in zip("qkvqq", xs))
        out, pull = jax.vjp(f, q, k, v)
        return out, pull((dout, dlse))

    assert_close(*compile_quickly(lambda: (results(poison), results(0.0)))())


@pytest.mark.parametrize("options", [dict(), dict(logits_soft_cap=2.0)], ids=["", "soft cap"])
def test_padding_reaches_no_tangent_and_no_second_derivative(options):
    """A bias's padding neither."""
    f = functools.partial(jk.dot_product_attention, **PADDED, **options, return_lse=True)
    loss = lambda *xs: sum(jnp.sum(jnp.sin(x)) for x in f(*xs))

    def results(value):
        operands = dict(zip(("q", "k", "v", "bias"), (*qkv(), draw(B, N, T, S))))
        xs = [fill_padding(name, x, value) for name, x in operands.items()]
        dots = [fill_padding(name, x + 1, value) for name, x in operands.items()]
        grad = jax.grad(loss, (0, 1, 2, 3))
        of_grad = jax.grad(lambda *xs: sum(jnp.sum(x**2) for x in grad(*xs)), (0, 1, 2, 3))
        return jax.jvp(f, xs, dots), jax.jvp(grad, xs, dots), of_grad(*xs)

    assert_close(*compile_quickly(lambda: (results(np.nan), results(0.0)))(), rtol=1e-4)


# Features that jax.nn does not have.


def test_residual_has_no_gradient_and_lse_has_one(backend):
    q, k, v = qkv()
    f = functools.partial(jk.dot_product_attention, is_causal=True, backend=backend)
    loss = lambda *xs, **options: jnp.sum(jnp.sin(f(*xs, **options)[1]))
    of_residual = jax.grad(functools.partial(loss, return_residual=True), (0, 1, 2))(q, k, v)
    assert not any(np.any(grad) for grad in of_residual)

    def reference(q, k):
        logits = jnp.einsum("btnh,bsnh->btns", q, jnp.repeat(k, N // K, axis=2)) / np.sqrt(H).astype(np.float32)
        visible = np.arange(S) <= np.arange(T)[:, None]
        return jnp.sum(jnp.sin(jax.nn.logsumexp(jnp.where(visible[None, :, None], logits, -jnp.inf), axis=-1)))

    *of_lse, dv = jax.grad(functools.partial(loss, return_lse=True), (0, 1, 2))(q, k, v)
    assert_close(tuple(of_lse), jax.grad(reference, (0, 1))(q, k))
    assert not dv.any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_lse_is_float32(dtype):
    _, lse = jk.dot_product_attention(*qkv(dtype), return_lse=True)
    assert (lse.shape, lse.dtype) == ((B, T, N), jnp.float32)
    _, lse = jk.dot_product_attention(*qkv(dtype, rank=3), return_lse=True)
    assert (lse.shape, lse.dtype) == ((T, N), jnp.float32)


def test_one_array_of_segment_ids_is_told_from_two():
    q, k, v = (jax.ShapeDtypeStruct((2, 16, 4, 8), jnp.bfloat16) for _ in range(3))
    ids = jax.ShapeDtypeStruct((2, 16), jnp.int32)

    def attention(q, k, v, of_queries, of_keys):
        return jk.dot_product_attention(q, k, v, query_segment_ids=of_queries, key_value_segment_ids=of_keys)

    def specs(f, *operands):
        with dispatch.recording() as choices:
            jax.jit(jax.grad(lambda *xs: f(*xs).astype(jnp.float32).sum())).lower(*operands)
        return {choice.op: choice.spec.self_segments for choice in choices}

    passes = ("attention_forward", "attention_backward")
    assert specs(lambda q, k, v, ids: attention(q, k, v, ids, ids), q, k, v, ids) == dict.fromkeys(passes, True)
    assert specs(attention, q, k, v, ids, ids) == dict.fromkeys(passes, False)
    mapped = jax.vmap(lambda q, ids: attention(q, q, q, ids, ids))
    stacked = (jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (q, ids))
    assert specs(mapped, *stacked) == dict.fromkeys(passes, True)


def test_segment_ids_without_batch():
    q, k, v = qkv(rank=3)
    of_queries, of_keys = np.int32([0, 0, 1, 1, 2]), np.int32([0, 1, 1, 1, 2, 2, 2])
    out = jk.dot_product_attention(q, k, v, query_segment_ids=of_queries, key_value_segment_ids=of_keys)
    assert_close(out, jax.nn.dot_product_attention(q, k, v, mask=of_queries[:, None] == of_keys))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_traced_scale_and_its_gradient_follow_jax_nn(dtype):
    inputs, options = qkv(dtype), dict(is_causal=True, return_residual=True)

    def results(attention):
        f = lambda scale, *xs: attention(*xs, scale=scale, **options)
        out, pull = jax.vjp(f, np.float32(0.7), *inputs)
        mapped = jax.vmap(f, in_axes=(0, None, None, None))(np.float32([0.3, 1.5]), *inputs)
        return out, mapped, pull(jax.tree.map(jnp.ones_like, out))

    ours, reference = compile_quickly(
        lambda: (results(jk.dot_product_attention), results(jax.nn.dot_product_attention))
    )()
    tolerance = 2.0**-7 if dtype == "bfloat16" else 2e-5
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(reference), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_allclose(np.float32(x), np.float32(y), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [jnp.int32(2), (jnp.int32(3), np.int64(0)), [jnp.uint8(1), None]], ids=str)
def test_windows_may_be_concrete_arrays(window):
    plain = (
        [None if side is None else int(side) for side in window] if isinstance(window, (tuple, list)) else int(window)
    )
    out, reference = (jk.dot_product_attention(*qkv(), local_window_size=x) for x in (window, plain))
    np.testing.assert_array_equal(out, reference)


def test_operands_of_mixed_rank_follow_jax_nn():
    q, k, v = qkv(rank=3)
    for operands in ((q, k[None], v[None]), (q[None], k, v), (q[None], k, v[None])):
        assert_follows_jax_nn(*operands)


def test_window_open_on_one_side():
    q, k, v = qkv()
    i, j = np.arange(T)[:, None], np.arange(S)
    for window, visible in (((1, None), j >= i - 1), ((None, 1), j <= i + 1), ((2**31, 2**40), j >= 0)):
        out = jk.dot_product_attention(q, k, v, local_window_size=window)
        assert_close(out, jax.nn.dot_product_attention(q, k, v, mask=np.broadcast_to(visible, (T, S))))


@pytest.mark.parametrize("query_lengths", [None, [3, 2**31 - 1]], ids=["", "lengths"])
@pytest.mark.parametrize("rules", [dict(is_causal=True), dict(local_window_size=(2, 1))], ids=str)
def test_bottom_right_alignment_counts_from_the_last_query_and_key(rules, query_lengths):
    q, k, v = qkv()
    rules = rules | dict(query_seq_lengths=None if query_lengths is None else jnp.int32(query_lengths))
    i, j = np.arange(T)[:, None] + (S - T), np.arange(S)
    left, right = rules.get("local_window_size", (S, 0))
    mask = (j >= i - left) & (j <= i + right)

    def loss(*xs, **options):
        return (jk.dot_product_attention(*xs, query_seq_lengths=rules["query_seq_lengths"], **options) ** 2).sum()

    masks = {name: x for name, x in rules.items() if name != "query_seq_lengths"} | dict(alignment="bottom_right")
    for f in (jax.value_and_grad(loss, (0, 1, 2)), jax.jit(jax.value_and_grad(loss, (0, 1, 2)), static_argnames=masks)):
        for x, y in zip(jax.tree.leaves(f(q, k, v, **masks)), jax.tree.leaves(f(q, k, v, mask=mask[None, None]))):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def test_bottom_right_alignment_maps():
    q, k, v = qkv()
    attend = functools.partial(jk.dot_product_attention, is_causal=True, alignment="bottom_right")
    np.testing.assert_allclose(jax.vmap(attend)(q, k, v), attend(q, k, v), rtol=1e-5, atol=1e-5)


def test_soft_cap_comes_after_the_bias_and_before_the_masks():
    q, k, v = qkv()
    bias, cap = 50 * draw(1, N, T, S), 2.0
    out = jk.dot_product_attention(q, k, v, bias, logits_soft_cap=cap, is_causal=True)
    logits = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, N // K, axis=2)) / np.sqrt(H).astype(np.float32) + bias
    capped = cap * jnp.tanh(logits / cap)
    # With queries and keys of zero, jax.nn's logits are its bias.
    reference = jax.nn.dot_product_attention(np.zeros_like(q), np.zeros_like(k), v, capped, is_causal=True)
    assert_close(out, reference)


def test_bias_that_is_not_differentiated_is_spared_its_gradient():
    q, k, v = qkv()
    bias = draw(1, N, T, S)
    loss = lambda q, bias: jnp.sum(jk.dot_product_attention(q, k, v, bias))
    asks_for_it = lambda argnums: "bias_gradient" in str(jax.make_jaxpr(jax.grad(loss, argnums))(q, bias))
    assert asks_for_it((0, 1))
    assert not asks_for_it(0)


@pytest.mark.parametrize("ranks", [(4, 3, 3), (3, 4, 4), (3, 4, 3), (4, 4, 3)], ids=str)
def test_operands_of_mixed_rank(ranks):
    """As jax.nn's: an array without a batch counts as a batch of one."""
    rng = np.random.default_rng(0)
    shapes = (1, 5, 4, 8), (1, 6, 2, 8), (1, 6, 2, 8)
    xs = [random_array(rng, shape[4 - rank :], "float32") for shape, rank in zip(shapes, ranks)]
    out, expected = jk.dot_product_attention(*xs), jax.nn.dot_product_attention(*xs)
    assert out.shape == expected.shape
    assert_close(out, expected)


@needs_aot
@pytest.mark.parametrize("has_lengths", [False, True])
def test_xla_computes_one_query_in_one_kernel(has_lengths):
    """Also with the passes that clear padding, as in `jax.nn.dot_product_attention`."""
    sharding = jax.sharding.SingleDeviceSharding(h200())
    struct = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    q, k = struct((4, 1, 1, 128), jnp.bfloat16), struct((4, 83, 1, 128), jnp.bfloat16)
    lengths = [struct((4,), jnp.int32)] * has_lengths

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, *lengths: jax.Array) -> jax.Array:
        named = dict(key_value_seq_lengths=lengths[0]) if lengths else {}
        return jk.dot_product_attention(q, k, v, backend="xla", **named)

    lowered = jax.jit(attend).trace(q, k, k, *lengths).lower(lowering_platforms=("cuda",))
    entry = lowered.compile().as_text().partition("ENTRY")[2]
    assert len(re.findall(r" (?:fusion|custom-call|copy|transpose|reduce)\(", entry)) == 1
