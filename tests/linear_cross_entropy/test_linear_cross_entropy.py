"""Linear cross entropy: values, derivatives, transforms, padding, memory and refusals."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly
from jax import export
from losses import CASES, CHUNKED, EVERYTHING, cotangents, ours, plain
from numerics import assert_accurate, assert_close, assert_same_bits, in_float64, with_gradients

import jaxkernels as jk
from jaxkernels.core import dispatch, hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase
from jaxkernels.ops.linear_cross_entropy.spec import FUSED, LinearCrossEntropySpec
from jaxkernels.triton import calls

REDUCTIONS = ("none", "sum", "mean")
every_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)

SMALL = LinearCrossEntropyCase(400, 24, 50, dtype="float32")
ALL_OPTIONS = LinearCrossEntropyCase(400, 24, 50, dtype="float32", **EVERYTHING)


def assert_error_rule(case: LinearCrossEntropyCase, reduction: str, seed: int = 0, **options: Any) -> None:
    """Values and gradients are at most twice as far from float64 as those of plain JAX in the same dtype."""
    operands, cts = case.operands(seed), cotangents(case, reduction)
    actual = with_gradients(lambda xs: ours(case, reduction, xs, **options), operands, cts)
    expected = with_gradients(lambda xs: plain(case, reduction, xs), operands, cts)
    assert_accurate(actual, expected, in_float64(lambda xs: plain(case, reduction, xs), operands, cts))


@pytest.mark.sampled(one_in=5)
@every_reduction
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_error_rule(case, reduction):
    assert_error_rule(case, reduction)


@pytest.mark.sampled(one_in=4)
@pytest.mark.parametrize("seed", range(12))
def test_random_options(seed):
    """Any combination of options, sizes, chunks and dtypes."""
    rng = np.random.default_rng(seed)
    chance = lambda: bool(rng.integers(2))
    tokens, embed_dim, vocab = (int(rng.integers(1, most)) for most in (700, 40, 130))
    case = LinearCrossEntropyCase(
        tokens, embed_dim, vocab, vocab_axis=1 if chance() else 0,
        dtype=str(rng.choice(["bfloat16", "float16", "float32"])),
        bias=chance(), weights=chance(), soft_cap=float(rng.uniform(1, 20)) if chance() else None,
        label_smoothing=float(rng.uniform(0, 1)) if chance() else 0.0, z_loss=1e-2 if chance() else 0.0,
        ignore_index=int(rng.integers(-1, vocab)) if chance() else None,
        logits_dtype="float32" if chance() else None,
    )  # fmt: skip
    reduction = str(rng.choice(REDUCTIONS))
    if reduction == "mean" and case.ignore_index is not None and (case.masks(rng)["labels"] < 0).all():
        reduction = "sum"
    assert_error_rule(case, reduction, seed, config=reference.Config(int(rng.integers(1, 800))))


@pytest.mark.sampled(one_in=3)
@every_reduction
def test_derivatives_of_both_modes_and_orders(reduction):
    operands = ALL_OPTIONS.operands()
    labels = operands.pop("labels")

    def scalar(f: Any) -> Any:
        return lambda xs: sum(
            jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(f(ALL_OPTIONS, reduction, xs | dict(labels=labels)))
        )

    tangents = {name: np.float32(0.3) * x + np.float32(0.1) for name, x in operands.items()}

    def derivatives(f: Any) -> Any:
        gradient = jax.grad(f)
        squares = lambda xs: sum(jnp.sum(x**2) for x in jax.tree.leaves(gradient(xs)))
        forward = jax.jvp(f, (operands,), (tangents,))
        return forward, jax.jvp(gradient, (operands,), (tangents,))[1], jax.grad(squares)(operands)

    assert_close(derivatives(scalar(ours)), derivatives(scalar(plain)), rtol=2e-4)


@every_reduction
def test_linearize_agrees_with_jvp(reduction):
    operands = SMALL.operands()
    f = lambda w: ours(SMALL, reduction, operands | dict(w=w))
    w = operands["w"]
    out, linear = jax.linearize(f, w)
    assert_close((out, linear(w)), jax.jvp(f, (w,), (w,)))


@pytest.mark.sampled(one_in=4)
@every_reduction
@pytest.mark.parametrize(
    "axes", [dict(x=0), dict(w=0), dict(x=0, w=0), dict(labels=0), dict(bias=0, weights=0)], ids=str
)
def test_vmap(axes, reduction):
    operands = ALL_OPTIONS.operands()
    scale = lambda name, x: 1 if name == "labels" else jnp.asarray([1, 0.5, 2], x.dtype).reshape(3, *[1] * x.ndim)
    stack = lambda name, x: jnp.stack([x, x[::-1], x]) * scale(name, x)
    stacked = {name: stack(name, x) if name in axes else x for name, x in operands.items()}

    def program(f: Any) -> Any:
        def loss(xs: Any) -> Any:
            floats = {name: x for name, x in xs.items() if name != "labels"}
            total = lambda floats: sum(map(jnp.sum, jax.tree.leaves(f(ALL_OPTIONS, reduction, xs | floats))))
            return f(ALL_OPTIONS, reduction, xs), jax.grad(total)(floats)

        return jax.vmap(loss, in_axes=({name: axes.get(name) for name in operands},))(stacked)

    assert_close(program(ours), program(plain), rtol=1e-4)


@every_reduction
def test_checkpoint_and_jit(reduction):
    operands = SMALL.operands()
    total = lambda w: sum(map(jnp.sum, jax.tree.leaves(ours(SMALL, reduction, operands | dict(w=w)))))
    expected = jax.grad(total)(operands["w"])
    assert_same_bits(jax.jit(jax.grad(total))(operands["w"]), expected)
    assert_close(jax.grad(jax.checkpoint(total))(operands["w"]), expected)


def test_numbers_of_products():
    """A reduced loss and its gradients take three products, and one that is not reduced takes four.

    With several chunks, what sums has the first chunk before the loop.
    """
    case, operands = SMALL, SMALL.operands()

    def count(reduction: str, *names: str, config: reference.Config | None = None) -> int:
        def total(moving: Any) -> Any:
            return jnp.sum(case.run(operands | moving, reduction=reduction, config=config, backend="xla"))

        moving = {name: operands[name] for name in names}
        program = jax.value_and_grad(total) if names else total
        return jax.jit(program).lower(moving).as_text().count("stablehlo.dot_general")

    assert {reduction: count(reduction) for reduction in REDUCTIONS} == dict(none=1, sum=1, mean=1)
    assert {reduction: count(reduction, config=CHUNKED) for reduction in REDUCTIONS} == dict(none=1, sum=1, mean=1)
    assert {reduction: count(reduction, "x", "w") for reduction in REDUCTIONS} == dict(none=4, sum=3, mean=3)
    assert {reduction: count(reduction, "w") for reduction in REDUCTIONS} == dict(none=3, sum=2, mean=2)
    of_chunks = {reduction: count(reduction, "x", "w", config=CHUNKED) for reduction in REDUCTIONS}
    assert of_chunks == dict(none=1 + 2 * 3, sum=2 * 3, mean=2 * 3)


@every_reduction
def test_memory_holds_one_chunk_of_logits(reduction):
    case = LinearCrossEntropyCase(4096, 16, 4096, dtype="float32")
    types = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.operands().items()}
    config = reference.Config(chunk=256)

    def program(xs: Any) -> Any:
        total = lambda x, w: jnp.sum(case.run(xs | dict(x=x, w=w), reduction=reduction, backend="xla", config=config))
        return jax.value_and_grad(total, (0, 1))(xs["x"], xs["w"])

    logits = 4096 * 4096 * 4
    assert jax.jit(program).lower(types).compile().memory_analysis().temp_size_in_bytes < logits / 4


# Labels, padding and NaN.


@every_reduction
def test_label_out_of_range_is_loud(reduction):
    operands = SMALL.operands()
    for label in (-1, 50, 2**31 - 1):
        labels = operands["labels"].copy()
        labels[3] = label
        f = lambda xs, labels=labels: ours(SMALL, reduction, xs | dict(labels=labels))
        out, pull = jax.vjp(f, {name: operands[name] for name in ("x", "w")})
        losses = jnp.atleast_1d(jax.tree.leaves(out)[0])
        is_nan = np.isnan(losses)
        assert is_nan[3 if reduction == "none" else 0]
        assert is_nan.sum() == 1
        (grads,) = pull(jax.tree.map(jnp.ones_like, out))
        assert np.isnan(grads["w"]).all()
        assert (np.isnan(grads["x"]).any(axis=1) == (np.arange(400) == 3)).all()


@every_reduction
def test_ignored_tokens_may_be_nan(reduction):
    case = LinearCrossEntropyCase(400, 24, 50, dtype="float32", ignore_index=-100)
    operands = case.operands()
    ignored = operands["labels"] == -100
    broken = np.where(ignored[:, None], np.nan, operands["x"])
    f = lambda x, w: ours(case, reduction, dict(x=x, w=w, labels=operands["labels"]))

    def results(x: Any) -> Any:
        out, pull = jax.vjp(f, x, operands["w"])
        return out, pull(jax.tree.map(jnp.ones_like, out))

    assert_same_bits(results(broken), results(operands["x"]))
    assert (np.asarray(results(broken)[1][0])[ignored] == 0).all()
    if reduction == "none":
        losses, lse = results(broken)[0]
        assert (np.asarray(losses)[ignored] == 0).all()
        assert (np.asarray(lse)[ignored] == 0).all()


def test_nan_in_a_token_stays_there():
    operands = SMALL.operands()
    operands["x"][5, 2] = np.nan
    losses, lse = ours(SMALL, "none", operands)
    assert (np.isnan(losses) == (np.arange(400) == 5)).all()
    assert (np.isnan(lse) == (np.arange(400) == 5)).all()


def test_mean_of_no_tokens_is_nan():
    operands = SMALL.operands()
    loss = jk.linear_cross_entropy(
        operands["x"], operands["w"], np.full(400, 3), vocab_axis=0, ignore_index=3, reduction="mean"
    )
    assert np.isnan(loss)


def test_bias_of_minus_infinity_leaves_classes_out():
    """Padding of the vocabulary."""
    operands = SMALL.operands()
    operands["labels"] %= 40
    bias = np.where(np.arange(50) < 40, np.float32(0), -np.inf)
    f = lambda w, **options: jk.linear_cross_entropy(
        operands["x"], w, operands["labels"], vocab_axis=0, reduction="mean", **options
    )
    loss, dw = jax.value_and_grad(functools.partial(f, bias=bias))(operands["w"])
    expected, smaller = jax.value_and_grad(f)(operands["w"][:40])
    assert_close((loss, dw[:40]), (expected, smaller))
    assert (np.asarray(dw)[40:] == 0).all()


@every_reduction
def test_large_bias(reduction):
    """The tokens that fill up the last chunk add nothing, although exp(200) overflows."""
    operands = SMALL.operands()
    bias = np.full(50, 200, np.float32)
    f = lambda w, **options: jnp.sum(jax.tree.leaves(ours(SMALL, reduction, operands | dict(w=w) | options))[0])
    assert_close(jax.grad(functools.partial(f, bias=bias))(operands["w"]), jax.grad(f)(operands["w"]), rtol=1e-3)


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_small_weights_in_float16(reduction):
    """Cotangents of logits below 2^-24 are not lost before they are added up, and large ones do not overflow."""
    case = LinearCrossEntropyCase(400, 24, 50, dtype="float16", weights=True)
    operands = case.operands()

    def gradient(scale: float) -> np.ndarray:
        xs = operands | dict(weights=np.full(400, scale, np.float32))
        return np.asarray(jax.grad(lambda w: jnp.sum(case.run(xs | dict(w=w), reduction=reduction)))(operands["w"]))

    usual = gradient(1.0).astype(np.float32)
    # The gradient itself is rounded to 2^-24, half a unit of which is 2^-9 here.
    np.testing.assert_allclose(gradient(2.0**-16).astype(np.float32) * 2.0**16, usual, rtol=2e-3, atol=4e-3)
    np.testing.assert_allclose(gradient(64.0).astype(np.float32) / 64, usual, rtol=2e-3, atol=1e-4)


# Forms of the arguments.


def test_a_single_token():
    operands = SMALL.operands()
    x, w, labels = operands["x"], operands["w"], operands["labels"]
    whole = jk.linear_cross_entropy(x, w, labels, vocab_axis=0, return_logsumexp=True)
    single = jk.linear_cross_entropy(x[7], w, labels[7], vocab_axis=0, return_logsumexp=True)
    assert [out.shape for out in single] == [(), ()]
    assert_close(single, tuple(out[7] for out in whole))
    assert_close(jk.linear_cross_entropy(x[7], w.T, labels[7], weights=2.0, reduction="sum"), 2 * single[0])


@every_reduction
def test_no_tokens(reduction):
    x, w, labels = np.zeros((0, 4), np.float32), np.ones((4, 5), np.float32), np.zeros(0, np.int32)
    loss, dw = jax.value_and_grad(
        lambda w: jnp.sum(jk.linear_cross_entropy(x, w, labels, reduction=reduction))
    )(w)  # fmt: skip
    assert loss == 0
    assert not np.any(dw)


def test_labels_of_any_integer_dtype():
    operands = SMALL.operands()
    expected = ours(SMALL, "none", operands)
    for dtype in (np.int8, np.uint8, np.uint32):
        assert_same_bits(ours(SMALL, "none", operands | dict(labels=operands["labels"].astype(dtype))), expected)


def test_labels_beyond_the_range_of_a_dtype():
    """Neither a vocabulary that is larger than the labels' dtype, nor labels of 64 bits, wrap around."""
    w = np.ones((300, 4), np.float32)
    x = np.ones((2, 4), np.float32)
    losses = lambda labels: jk.linear_cross_entropy(x, w, labels, vocab_axis=0, ignore_index=-100)
    np.testing.assert_allclose(losses(np.array([3, 100], np.int8)), np.log(300), rtol=1e-6)
    np.testing.assert_allclose(losses(np.array([3, 255], np.uint8)), np.log(300), rtol=1e-6)
    assert (np.isnan(losses(np.array([3, 2**32 - 1], np.uint32))) == [False, True]).all()
    with jax.enable_x64(True):
        for label in (2**32 + 3, -(2**32) + 3):
            assert (np.isnan(losses(np.array([3, label], np.int64))) == [False, True]).all()


def test_float64():
    operands = SMALL.operands()
    with jax.enable_x64(True):
        wide = {name: x.astype(np.float64) if name != "labels" else x.astype(np.int64) for name, x in operands.items()}
        losses, lse = ours(SMALL, "none", wide)
        assert losses.dtype == lse.dtype == np.float64
        np.testing.assert_allclose(losses, plain(SMALL, "none", wide)[0], rtol=1e-13)


@every_reduction
def test_settings_of_the_caller_change_nothing(reduction):
    operands = ALL_OPTIONS.operands()
    f = lambda x: jnp.sum(jax.tree.leaves(ours(ALL_OPTIONS, reduction, operands | dict(x=x)))[0])
    g = lambda: jax.jit(lambda x: jax.value_and_grad(f)(x))(operands["x"])
    expected = g()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        actual = jax.jit(jax.value_and_grad(lambda x: ours(ALL_OPTIONS, "sum", operands | dict(x=x))))(operands["x"])
        assert actual[0].dtype == np.float32
    assert_close(actual, jax.value_and_grad(lambda x: ours(ALL_OPTIONS, "sum", operands | dict(x=x)))(operands["x"]))
    assert_same_bits(g(), expected)


@every_reduction
def test_export(reduction):
    """For two platforms at once, with a symbolic number of tokens."""
    operands = SMALL.operands()
    (tokens,) = export.symbolic_shape("t")
    types = dict(
        x=jax.ShapeDtypeStruct((tokens, 24), jnp.float32),
        w=jax.ShapeDtypeStruct((50, 24), jnp.float32),
        labels=jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )

    def program(xs: Any) -> Any:
        total = lambda w: jnp.sum(SMALL.run(xs | dict(w=w), reduction=reduction))
        return jax.value_and_grad(total)(xs["w"])

    for arguments in (types, operands):
        exported = export.export(jax.jit(program), platforms=("cpu", "cuda"))(arguments)
        assert_close(export.deserialize(exported.serialize()).call(operands), program(operands))


def test_explain():
    operands = SMALL.operands()
    f = lambda w: SMALL.run(operands | dict(w=w), reduction="mean")
    (choice,) = jk.explain(jax.grad(f), operands["w"], platform="cuda").choices
    backend = "xla" if calls.missing() else "triton"
    assert (choice.op, choice.backend, choice.spec.gradients) == (FUSED, backend, ("w",))
    (choice,) = jk.explain(f, operands["w"], platform="cuda").choices
    assert choice.op == "linear_cross_entropy_forward"


# Configurations.


def spec_of(tokens: Any, vocab: int, dtype: Any = jnp.bfloat16) -> LinearCrossEntropySpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(dtype))
    return LinearCrossEntropySpec(array(tokens, 64), array(64, vocab), jnp.dtype(dtype), hardware.host())


def test_default_chunks():
    """The largest whose logits take at most 1 GiB."""
    chunk = lambda *sizes: dispatch.default_config(FUSED, "xla", spec_of(*sizes)).chunk
    assert chunk(16384, 128256) == 4096
    assert chunk(32768, 50304) == 10624
    assert chunk(16384, 128256, jnp.float32) == 2048
    assert chunk(100, 10**8) == 128
    space = dispatch.search_space(FUSED, "xla", spec_of(16384, 128256))
    assert [config.chunk for config in space] == [4096, 1024, 2048, 8192, 16384]
    assert [config.chunk for config in dispatch.search_space(FUSED, "xla", spec_of(100, 1000))] == [536832]


@pytest.mark.parametrize("chunk", [1, 2, 127, 399, 400, 10**6])
def test_any_chunk(chunk):
    assert_close(
        ours(SMALL, "none", SMALL.operands(), config=reference.Config(chunk)), plain(SMALL, "none", SMALL.operands())
    )


# Refusals.

X, W, LABELS = np.zeros((6, 4), np.float32), np.zeros((4, 5), np.float32), np.zeros(6, np.int32)

REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "x is an integer": (dict(x=LABELS), "x must have a floating dtype; got int32. Cast it with .astype."),
    "x of 8 bits": (
        dict(x=X.astype(jnp.float8_e4m3fn), w=W.astype(jnp.float8_e4m3fn)),
        "x must have at least 16 bits; got float8_e4m3fn. Cast it with .astype.",
    ),
    "x is a scalar": (dict(x=np.float32(1)), "x must have shape (..., d); got a scalar."),
    "other dtype": (dict(w=W.astype(np.float16)), "w must have x's dtype float32; got float16. Cast it with .astype."),
    "other layout": (
        dict(vocab_axis=0),
        "w must have shape (V, d) with d = 4, x's last dimension; got (4, 5). Set vocab_axis to the axis of w that has "
        "the vocabulary.",
    ),
    "other width": (
        dict(w=np.zeros((3, 5), np.float32)),
        "w must have shape (d, V) with d = 4, x's last dimension; got (3, 5). Set vocab_axis to the axis of w that has "
        "the vocabulary.",
    ),
    "no classes": (dict(w=W[:, :0]), "w must have at least one class; got (4, 0)."),
    "vocab_axis": (dict(vocab_axis=-1), "vocab_axis must be 0 or 1; got -1."),
    "labels": (dict(labels=X[:, 0]), "labels must be integers; got float32."),
    "labels' shape": (dict(labels=LABELS[:5]), "labels must have shape (6,), that of x without d; got (5,)."),
    "bias": (dict(bias=np.zeros(4)), "bias must have shape (V,) = (5,); got (4,)."),
    "weights": (dict(weights=np.zeros(())), "weights must have the labels' shape (6,); got ()."),
    "ignore_index": (
        dict(ignore_index=1.5),
        "ignore_index must be an int of 32 bits or None; got 1.5. Use weights instead.",
    ),
    "ignore_index of 33 bits": (
        dict(ignore_index=2**31),
        "ignore_index must be an int of 32 bits or None; got 2147483648. Use weights instead.",
    ),
    "reduction": (dict(reduction="average"), "unknown reduction='average'; use one of 'none', 'sum', 'mean'."),
    "label_smoothing": (dict(label_smoothing=1.5), "label_smoothing must be from 0 to 1; got 1.5."),
    "z_loss": (
        dict(z_loss=np.inf),
        "z_loss must be a finite real number known at trace time; got inf. It is compiled into the kernel.",
    ),
    "soft cap": (
        dict(logits_soft_cap=0),
        "logits_soft_cap must be positive; got 0. Leave it out for logits without a cap.",
    ),
    "logits_dtype": (
        dict(logits_dtype=jnp.bfloat16),
        "logits_dtype must be float32 for x of float32; got <class 'jax.numpy.bfloat16'>.",
    ),
    "precision": (
        dict(precision="best"),
        "precision must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithmPreset, or the name of "
        "one; got 'best'.",
    ),
    "return_logsumexp": (
        dict(return_logsumexp="yes"),
        "return_logsumexp must be True or False, known at trace time; got 'yes'. It decides how many results there "
        "are.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    changed, message = REFUSALS[name]
    arguments: dict[str, Any] = dict(x=X, w=W, labels=LABELS) | changed
    with raises_exactly(ValueError, f"linear_cross_entropy[auto]: {message}"):
        jk.linear_cross_entropy(**arguments)


def test_refusals_of_backends():
    with raises_exactly(
        NotImplementedError,
        f"linear_cross_entropy_forward[pallas]: no such kernel in this backend. {dispatch.WAY_OUT}",
    ):
        jk.linear_cross_entropy(X, W, LABELS, backend="pallas")
    with raises_exactly(
        ValueError,
        f"linear_cross_entropy_forward: config={CHUNKED!r} needs the backend it is for. Name it with backend=.",
    ):
        jk.linear_cross_entropy(X, W, LABELS, config=CHUNKED)
    with raises_exactly(ValueError, "linear_cross_entropy[xla]: chunk must be at least 1; got Config(chunk=0)."):
        reference.Config(chunk=0)
