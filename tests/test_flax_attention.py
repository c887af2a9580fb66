"""`attention_fn` in Flax's attention layers, NNX and Linen, against the functions they have themselves."""

from __future__ import annotations

import functools
import inspect
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


@pytest.mark.sampled(one_in=3)
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


def test_nnx_layer_refuses_dropout():
    layer = nnx_layer(attention_fn, dropout_rate=0.1)
    with pytest.raises(NotImplementedError) as e:
        layer(inputs(2), deterministic=False)
    assert str(e.value) == (
        "attention_fn[auto]: there is no dropout on attention weights; got dropout_rate=0.1 and deterministic=False. "
        "Set dropout_rate=0 and put a Dropout layer after the attention, or use Flax's own attention_fn."
    )


def test_linen_layer_refuses_dropout():
    module = linen.MultiHeadDotProductAttention(
        num_heads=HEADS, attention_fn=attention_fn, dropout_rate=0.1, deterministic=False
    )
    with pytest.raises(NotImplementedError, match=r"there is no dropout on attention weights; got dropout_rate=0\.1"):
        module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, inputs(2))


@pytest.mark.parametrize("flax", ["nnx", "linen"])
def test_layer_refuses_to_sow_weights(flax):
    if flax == "nnx":
        call = nnx_layer(attention_fn)
    else:
        module = linen.MultiHeadDotProductAttention(num_heads=HEADS, attention_fn=attention_fn)
        call = functools.partial(module.init, jax.random.key(0))
    with pytest.raises(NotImplementedError) as e:
        call(inputs(2), sow_weights=True)
    assert str(e.value) == (
        "attention_fn[auto]: the attention weights are never formed, so they cannot be sown; got a module to sow them "
        "in. Leave sow_weights=False, or use Flax's own attention_fn."
    )


Q = np.zeros((2, 5, HEADS, 8), np.float32)


@pytest.mark.parametrize(
    ("error", "args", "options", "message"),
    [
        (ValueError, (Q, Q, Q), dict(dropout_rate=1.0), "attention_fn[auto]: dropout_rate must be in [0, 1); got 1.0."),
        (
            NotImplementedError,
            (Q, Q, Q),
            dict(qk_attn_weights_einsum=jnp.einsum, attn_weights_value_einsum=jnp.einsum),
            f"attention_fn[auto]: the products are the kernel's own; got qk_attn_weights_einsum={jnp.einsum!r}. "
            "Use Flax's own attention_fn with it.",
        ),
        (
            NotImplementedError,
            (Q, Q, Q),
            dict(precision="highest"),
            "attention_fn[auto]: float32 is multiplied at JAX's default precision; got precision='highest'. "
            "Set jax_default_matmul_precision instead, or use Flax's own attention_fn.",
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
