"""`attention_fn` in Flax's attention layers, NNX and Linen, against the functions they have themselves."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from flax import linen, nnx
from numerics import assert_accurate, assert_close, compile_quickly

import jaxkernels as jk
from jaxkernels.models.attention import attention_fn, linen_attention_fn, make_attention_fn, nnx_attention_fn

FEATURES, HEADS, KV_HEADS = 24, 4, 2
STOCK = {"nnx": nnx.dot_product_attention, "linen": linen.dot_product_attention}


def inputs(*batch: int, length: int = 7, seed: int = 0) -> np.ndarray:
    return random_array(np.random.default_rng(seed), (*batch, length, FEATURES), "float32")


def nnx_layer(function: Callable[..., Any], **options: Any) -> nnx.MultiHeadAttention:
    options = dict(num_heads=HEADS, in_features=FEATURES, decode=False) | options
    return nnx.MultiHeadAttention(**options, attention_fn=function, rngs=nnx.Rngs(0))


def nnx_run(function: Callable[..., Any], *xs: Any, layer: Any = (), **call: Any) -> Any:
    """Output of a layer and the gradients in its inputs and parameters."""
    graphdef, params = nnx.split(nnx_layer(function, **dict(layer)))
    weigh = inputs(*xs[0].shape[:-2], length=xs[0].shape[-2], seed=9)

    def loss(params: Any, xs: Any) -> tuple[jax.Array, jax.Array]:
        out = nnx.merge(graphdef, params)(*xs, **call)
        return jnp.sum(out * weigh), out

    (_, out), grads = compile_quickly(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, xs)
    return out, nnx.to_pure_dict(grads[0]), grads[1]


def linen_run(function: Callable[..., Any], *xs: Any, layer: Any = (), **call: Any) -> Any:
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, **dict(layer))
    params = module.init(jax.random.key(0), *xs)
    weigh = inputs(*xs[0].shape[:-2], length=xs[0].shape[-2], seed=9)

    def loss(params: Any, xs: Any) -> tuple[jax.Array, jax.Array]:
        out = module.apply(params, *xs, **call)
        return jnp.sum(out * weigh), out

    (_, out), grads = compile_quickly(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(params, xs)
    return out, *grads


RUN = {"nnx": nnx_run, "linen": linen_run}

#: inputs, and what the layer is called with.
CALLS = {
    "self": ((inputs(2),), {}),
    "cross": ((inputs(2), inputs(2, length=5, seed=1)), {}),
    "no batch": ((inputs(),), {}),
    "two batches": ((inputs(2, 3),), {}),
    "causal mask": ((inputs(2),), dict(mask=nnx.make_causal_mask(jnp.ones((2, 7))))),
    "causal mask, two batches": ((inputs(2, 3),), dict(mask=nnx.make_causal_mask(jnp.ones((2, 3, 7))))),
    "padding mask": ((inputs(2),), dict(mask=nnx.make_attention_mask(np.ones((2, 7)), np.arange(7) < [[4], [6]]))),
    "bool mask for all": ((inputs(2),), dict(mask=np.tri(7, dtype=bool))),
    "row without keys": ((inputs(2),), dict(mask=np.arange(7)[:, None] > np.zeros((1, 1, 1, 7)))),
}


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize("flax", ["nnx", "linen"])
@pytest.mark.parametrize("name", CALLS)
def test_layer_agrees_with_the_stock_one(flax, name):
    xs, call = CALLS[name]
    assert_close(RUN[flax](attention_fn, *xs, **call), RUN[flax](STOCK[flax], *xs, **call), rtol=5e-5)


def test_nnx_layer_with_grouped_heads_and_causal_flag():
    options = dict(layer=dict(num_kv_heads=KV_HEADS, normalize_qk=True), is_causal=True)
    x = inputs(2)
    assert_close(nnx_run(attention_fn, x, **options), nnx_run(STOCK["nnx"], x, **options), rtol=5e-5)


def test_bias_of_every_shape_agrees_with_the_stock_functions():
    rng = np.random.default_rng(0)
    q, k, v = (random_array(rng, (2, 3, length, HEADS, 8), "float32") for length in (7, 5, 5))
    for shape in [(7, 5), (HEADS, 7, 5), (1, HEADS, 1, 5), (3, 1, 7, 5), (2, 3, HEADS, 7, 5), (2, 1, 1, 1, 5)]:
        bias = random_array(rng, shape, "float32")
        mask = rng.random(shape) < 0.8
        ours = attention_fn(q, k, v, bias, mask)
        assert_close(ours, linen.dot_product_attention(q, k, v, bias, mask), rtol=5e-5)


def test_operands_are_promoted_as_the_stock_functions_do():
    q, k, v = (random_array(np.random.default_rng(i), (2, 5, HEADS, 8), dtype) for i, dtype in enumerate(
        ("bfloat16", "float32", "bfloat16")
    ))  # fmt: skip
    for dtype in (None, jnp.bfloat16):
        ours, stock = attention_fn(q, k, v, dtype=dtype), nnx.dot_product_attention(q, k, v, dtype=dtype)
        assert ours.dtype == stock.dtype
        np.testing.assert_allclose(
            np.asarray(ours, np.float32), np.asarray(stock, np.float32), atol=2e-2 if dtype else 1e-5
        )


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_bfloat16_is_as_exact_as_the_stock_functions(flax):
    operands = {
        name: random_array(np.random.default_rng(i), (2, 64, HEADS, 32), "bfloat16") for i, name in enumerate("qkv")
    }
    widened = {name: x.astype(np.float64) for name, x in operands.items()}
    mask = np.tri(64, dtype=np.float32)[None, None]
    result = lambda function, xs: dict(out=np.asarray(function(*xs.values(), mask=mask)))
    with jax.enable_x64(True):
        reference = result(STOCK["linen"], widened)
    assert_accurate(result(attention_fn, operands), result(STOCK[flax], operands), reference)


# Decoding.


def nnx_decode(function: Callable[..., Any], x: np.ndarray, **options: Any) -> jax.Array:
    layer = nnx_layer(function, **(options | dict(decode=True)))
    layer.init_cache(x.shape)
    graphdef, params, cache = nnx.split(layer, nnx.Param, ...)

    @compile_quickly
    def step(cache: Any, token: jax.Array) -> Any:
        layer = nnx.merge(graphdef, params, cache)
        return layer(token), nnx.state(layer, nnx.Cache)

    outs = []
    for i in range(x.shape[1]):
        out, cache = step(cache, x[:, i : i + 1])
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


def linen_decode(function: Callable[..., Any], x: np.ndarray) -> jax.Array:
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=function, decode=True)
    variables = module.init(jax.random.key(0), x)
    step = compile_quickly(lambda variables, token: module.apply(variables, token, mutable=["cache"]))
    outs = []
    for i in range(x.shape[1]):
        out, cache = step(variables, x[:, i : i + 1])
        variables = {**variables, **cache}
        outs.append(out)
    return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize("num_kv_heads", [HEADS, KV_HEADS])
def test_nnx_decode_with_the_cache_agrees_with_the_stock_one_and_with_one_pass(num_kv_heads):
    x, options = inputs(2), dict(num_kv_heads=num_kv_heads)
    ours = nnx_decode(attention_fn, x, **options)
    assert_close(ours, nnx_decode(STOCK["nnx"], x, **options))
    assert_close(ours, nnx_layer(attention_fn, **options)(x, is_causal=True))


def test_linen_decode_with_the_cache_agrees_with_the_stock_one_and_with_one_pass():
    x = inputs(2)
    ours = linen_decode(attention_fn, x)
    assert_close(ours, linen_decode(STOCK["linen"], x))
    module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
    params = module.init(jax.random.key(0), x)
    assert_close(ours, module.apply(params, x, mask=linen.make_causal_mask(jnp.ones((2, 7)))))


# Dropout and what else the kernels do not do.


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_deterministic_layer_ignores_its_dropout_rate(flax):
    layer = dict(dropout_rate=0.5, deterministic=True) | (dict(keep_rngs=False) if flax == "nnx" else {})
    x = inputs(2)
    assert_close(RUN[flax](attention_fn, x, layer=layer), RUN[flax](STOCK[flax], x, layer=layer), rtol=5e-5)


@pytest.mark.parametrize("rate", [0.3, 0.0])
@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_layer_that_needs_the_weights_gets_those_of_the_stock_one(flax, rate):
    """Dropout on the weights, and sown weights."""
    x, found = inputs(2), []
    for function in (attention_fn, STOCK[flax]):
        if flax == "nnx":
            layer = nnx_layer(function, dropout_rate=rate)
            out = layer(x, deterministic=False, rngs=nnx.Rngs(dropout=3), sow_weights=True, is_causal=True)
            found.append((out, jax.tree.leaves(nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate)))))
        else:
            module = linen.MultiHeadDotProductAttention(
                num_heads=HEADS, attention_fn=function, dropout_rate=rate, deterministic=False
            )
            keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
            variables = module.init(keys, x)
            run = functools.partial(module.apply, mutable=["intermediates"], sow_weights=True)
            out, sown = run(variables, x, mask=np.tri(7, dtype=bool), rngs={"dropout": jax.random.key(1)})
            found.append((out, jax.tree.leaves(sown)))
    assert found[0][1]
    assert_close(*found, rtol=1e-6)


class Einsum(linen.Module):
    """An einsum of the caller's own."""

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        return 2 * jnp.einsum(*args, **kwargs)


def test_linen_layer_with_einsums_of_its_own_gets_them():
    options = dict(qk_attn_weights_einsum_cls=Einsum, attn_weights_value_einsum_cls=Einsum)
    x = inputs(2)
    assert_close(linen_run(attention_fn, x, layer=options), linen_run(STOCK["linen"], x, layer=options), rtol=1e-6)
    causal = attention_fn(Q, Q, Q, is_causal=True, qk_attn_weights_einsum=Einsum(), attn_weights_value_einsum=Einsum())
    assert causal.shape == Q.shape


def test_complex_operands_run_linens_function_for_linen():
    rng = np.random.default_rng(0)
    real = lambda: random_array(rng, (2, 5, HEADS, 8), "float32")
    q, k, v = (real() + 1j * real() for _ in range(3))
    options = dict(mask=np.tri(5, dtype=bool)[None, None], force_fp32_for_softmax=False)
    ours = attention_fn(q, k, v, **options)
    assert ours.dtype == jnp.complex64
    assert_close(ours, linen.dot_product_attention(q, k, v, **options), rtol=1e-6)
    causal = attention_fn(q, k, v, is_causal=True, force_fp32_for_softmax=False)
    assert_close(causal, ours, rtol=1e-6)


def test_more_than_the_default_precision_runs_the_stock_function():
    jaxpr = jax.make_jaxpr(lambda q: attention_fn(q, q, q, precision="highest", is_causal=True))(Q)
    assert "jk_" not in str(jaxpr)


Q = np.zeros((2, 5, HEADS, 8), np.float32)
WAY_OUT = "Use backend=None, which runs Flax's function in this case."


@pytest.mark.parametrize(
    ("error", "args", "options", "message"),
    [
        (
            ValueError,
            (Q, Q, Q),
            dict(dropout_rate=1.0),
            "attention_fn[auto]: dropout_rate must be in the range [0, 1); got 1.0.",
        ),
        *(
            (NotImplementedError, (Q, Q, Q), options | dict(backend="xla"), f"attention_fn[xla]: {reason}. {WAY_OUT}")
            for options, reason in (
                (
                    dict(dropout_rate=0.1),
                    "the kernels have no dropout on attention weights; got dropout_rate=0.1 and deterministic=False",
                ),
                (
                    dict(module=linen.Dense(3)),
                    "the kernels do not store the attention weights, so they cannot be sown; "
                    "got a module to sow them in",
                ),
                (
                    dict(qk_attn_weights_einsum=jnp.einsum, attn_weights_value_einsum=jnp.einsum),
                    f"the kernels compute the products themselves; got qk_attn_weights_einsum={jnp.einsum!r}",
                ),
                (
                    dict(precision="highest"),
                    "float32 is multiplied at JAX's default precision; got precision='highest'",
                ),
                (dict(dtype=jnp.complex64), "operands must be floating-point; got complex64"),
            )
        ),
        (
            ValueError,
            (Q, Q[:1], Q),
            {},
            "attention_fn[auto]: query, key and value must have the same batch dimensions, (*B, length, heads, "
            "features); got (2, 5, 4, 8), (1, 5, 4, 8) and (2, 5, 4, 8).",
        ),
        (
            ValueError,
            (Q, Q, Q),
            dict(bias=np.zeros((3, 1, 5, 5), np.float32)),
            "attention_fn[auto]: bias must be broadcastable to the batch dimensions (2,); got (3, 1, 5, 5).",
        ),
    ],
)
def test_call_is_refused(error, args, options, message):
    with pytest.raises(error) as e:
        attention_fn(*args, **options)
    assert str(e.value) == message


def test_precision_makes_no_difference_to_16_bits():
    q, k, v = (random_array(np.random.default_rng(i), (2, 5, HEADS, 8), "bfloat16") for i in range(3))
    np.testing.assert_array_equal(attention_fn(q, k, v, precision="highest"), attention_fn(q, k, v))


# Causal masks.


def kernels_of(f: Callable[..., Any], *args: Any) -> list[Any]:
    """The specs of the attentions in a program for a GPU, by the backend that each gets."""
    return [(choice.backend, choice.spec) for choice in jk.explain(f, *args, platform="cuda").choices]


CAUSAL = nnx.make_causal_mask(jnp.ones((2, 64)))
X16 = jax.ShapeDtypeStruct((2, 64, HEADS, 64), jnp.bfloat16)


@pytest.mark.parametrize(
    "mask",
    [CAUSAL, np.asarray(CAUSAL), np.tri(64, dtype=bool), jnp.tri(64, dtype=jnp.int8)[None, None]],
    ids=["jax", "numpy", "bool", "int8"],
)
def test_concrete_causal_mask_reaches_the_fast_kernel(mask):
    ((backend, spec),) = kernels_of(lambda x: attention_fn(x, x, x, mask=mask), X16)
    assert backend != "xla"
    assert (spec.causal, spec.mask) == (True, None)


def test_layers_with_a_causal_mask_reach_the_fast_kernel():
    layer = dict(num_heads=HEADS, qkv_features=HEADS * 64, dtype=jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2, 64, FEATURES), jnp.bfloat16)
    inner = nnx.MultiHeadAttention(
        **layer, in_features=FEATURES, decode=False, attention_fn=attention_fn, rngs=nnx.Rngs(0)
    )
    ((backend, spec),) = kernels_of(lambda x: inner(x, mask=CAUSAL), x)
    assert backend != "xla"
    assert (spec.causal, spec.mask) == (True, None)
    module = linen.MultiHeadDotProductAttention(**layer, attention_fn=make_attention_fn(is_causal=True))
    params = jax.eval_shape(module.init, jax.random.key(0), x)
    ((backend, spec),) = kernels_of(module.apply, params, x)
    assert backend != "xla"
    assert (spec.causal, spec.mask) == (True, None)


@pytest.mark.parametrize(
    "mask",
    [
        np.ones((64, 64), bool),
        np.tri(64, k=1, dtype=bool),
        np.asarray(CAUSAL) * (np.arange(64) < np.array([[[[64]]], [[[9]]]])),
        np.ones((1, 64), bool),
    ],
    ids=["full", "one more", "with padding", "for every query"],
)
def test_other_masks_stay_masks(mask):
    ((backend, spec),) = kernels_of(lambda x: attention_fn(x, x, x, mask=mask), X16)
    assert backend in ("cuda", "triton", "cudnn", "xla")  # The first that is installed.
    assert not spec.causal
    assert spec.mask is not None


def test_traced_causal_mask_stays_a_mask_and_explain_says_what_is_fast():
    explanation = jk.explain(lambda x, mask: attention_fn(x, x, x, mask=mask), X16, CAUSAL, platform="cuda")
    assert dict(explanation.choices[0].passed_over)["pallas"] == (
        "does not handle a dense mask yet; is_causal, a window, lengths or segments are fast in its place"
    )


@pytest.mark.parametrize("length", [5, 7])
def test_recognised_masks_give_the_results_of_the_stock_function(length):
    q, k, v = (
        random_array(np.random.default_rng(i), (2, n, HEADS, 8), "float32") for i, n in enumerate((7, length, length))
    )
    mask = np.tri(7, length, dtype=np.float32)
    assert_close(attention_fn(q, k, v, mask=mask), STOCK["linen"](q, k, v, mask=mask), rtol=5e-5)


def test_causal_function_agrees_with_the_mask_and_adds_to_others():
    function, x = make_attention_fn(is_causal=True), inputs(2)
    causal, padding = np.tri(7, dtype=bool)[None, None], np.arange(7) < np.array([[[[7]]], [[[4]]]])
    for mask, full in ((None, causal), (causal, causal), (padding, causal & padding)):
        assert_close(linen_run(function, x, mask=mask), linen_run(STOCK["linen"], x, mask=full), rtol=5e-5)


def test_causal_function_refuses_a_cache():
    message = "is_causal=True needs as many queries as keys; got 1 and 5. Use make_attention_fn() and a mask."
    with pytest.raises(ValueError, match=re.escape(f"attention_fn[auto]: {message}")):
        make_attention_fn(is_causal=True)(Q[:, :1], Q, Q)


# How it plugs in.


@pytest.mark.parametrize("stock", STOCK.values(), ids=STOCK)
def test_signature_has_every_parameter_of_the_stock_functions_in_their_order(stock):
    theirs, ours = list(inspect.signature(stock).parameters), list(inspect.signature(attention_fn).parameters)
    assert set(theirs) <= set(ours)
    shared = theirs[: theirs.index("module") + 1]
    assert ours[: len(shared)] == shared


def test_one_function_serves_both():
    assert nnx_attention_fn is linen_attention_fn is attention_fn


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_backend_is_fixed_by_the_factory(flax, registry):
    del registry["attention_forward", "pallas"]
    x = inputs(2)
    assert_close(RUN[flax](make_attention_fn("xla"), x), RUN[flax](attention_fn, x))
    with pytest.raises(NotImplementedError, match=r"attention_forward\[pallas\]: no such kernel in this backend"):
        RUN[flax](make_attention_fn("pallas"), x)


def test_layers_run_on_our_kernels_alone_with_dot_general_too():
    dot_general = functools.partial(jk.dot_general, backend="xla")
    options = dict(qkv_dot_general=dot_general, out_dot_general=dot_general)
    x = inputs(2)
    ours, stock = nnx_run(make_attention_fn("xla"), x, layer=options), nnx_run(STOCK["nnx"], x)
    assert_close(ours, stock, rtol=5e-5)
    layer = nnx_layer(make_attention_fn("xla"), **options)
    jaxpr = str(jax.make_jaxpr(lambda x: layer(x))(x))
    assert "jk_dot_general" in jaxpr
    assert "jk_attention_forward" in jaxpr
    assert " dot_general[" not in jaxpr
