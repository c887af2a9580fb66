"""The loop over layers: values and derivatives of `jax.lax.scan`, without its copies."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead_of_time import h200, needs_aot
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

import jaxkernels as jk
from jaxkernels import layers
from jaxkernels.core import hardware

LAYERS, TOKENS, FEATURES = 4, 3, 8


def draw(i: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(i), shape) / 3


X = draw(0, TOKENS, FEATURES)
PARAMS = dict(w=draw(1, LAYERS, FEATURES, FEATURES), b=draw(2, LAYERS, FEATURES))
FACTOR = draw(3, FEATURES)  # The layer closes over it.
ARGS = (X, PARAMS, FACTOR)


def layer(factor: Any, x: Any, p: Any) -> Any:
    h = jk.matmul(x, p["w"], activation="gelu")
    return x + jnp.tanh(h * factor + p["b"]) @ p["w"].T


def looped(x: Any, params: Any, factor: Any, policy: Any = None) -> Any:
    one = functools.partial(layer, factor)
    return jk.scan_layers(one if policy is None else jax.checkpoint(one, policy=policy), x, params)


def plain(one: Any, x: Any, params: Any) -> Any:
    return lax.scan(lambda x, p: (one(x, p), None), x, params)[0]


def scanned(x: Any, params: Any, factor: Any) -> Any:
    return plain(functools.partial(layer, factor), x, params)


def squares(f: Any) -> Any:
    return lambda *args: sum((leaf**2).sum() for leaf in jax.tree.leaves(f(*args)))


def assert_close(actual: Any, expected: Any) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


gradients = lambda f: jax.grad(squares(f), argnums=(0, 1, 2))
TANGENTS = jax.tree.map(lambda x: draw(9, *x.shape), ARGS)
TRANSFORMS = {
    "value": lambda f: f,
    "grad": gradients,
    "grad of x": lambda f: jax.grad(squares(f), argnums=0),
    "grad of params": lambda f: jax.grad(squares(f), argnums=1),
    "grad of what the layer closes over": lambda f: jax.grad(squares(f), argnums=2),
    "jvp": lambda f: lambda *args: jax.jvp(f, args, TANGENTS),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*TANGENTS),
    "forward over reverse": lambda f: lambda *args: jax.jvp(gradients(f), args, TANGENTS),
    "reverse over forward": lambda f: gradients(lambda *args: jax.jvp(f, args, TANGENTS)[1]),
    "reverse over reverse": lambda f: gradients(gradients(f)),
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "hessian": lambda f: jax.hessian(squares(f)),
    "checkpoint": lambda f: gradients(jax.checkpoint(f)),
    "inside a scan": lambda f: gradients(lambda x, *rest: lax.scan(lambda x, _: (f(x, *rest), None), x, length=2)[0]),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_are_those_of_scan(name, jit):
    transform = TRANSFORMS[name]
    run = jax.jit(transform(looped)) if jit else transform(looped)
    assert_close(run(*ARGS), jax.jit(transform(scanned))(*ARGS))


@pytest.mark.parametrize(
    "policy",
    [
        jk.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.nothing_saveable,
        jax.checkpoint_policies.everything_saveable,
    ],
)
def test_a_checkpointed_layer(policy):
    assert_close(gradients(functools.partial(looped, policy=policy))(*ARGS), gradients(scanned)(*ARGS))


MAPPED = {
    "x": ((0, None, None), (draw(4, 5, TOKENS, FEATURES), PARAMS, FACTOR)),
    "a parameter": (
        (None, dict(w=1, b=None), None),
        (X, PARAMS | dict(w=draw(5, LAYERS, 5, FEATURES, FEATURES)), FACTOR),
    ),
    "what the layer closes over": ((None, None, 0), (X, PARAMS, draw(6, 5, FEATURES))),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(mapped):
    in_axes, args = MAPPED[mapped]
    over = lambda f: jax.vmap(f, in_axes=in_axes)
    for transform in (
        over,
        lambda f: over(gradients(f)),
        lambda f: gradients(over(f)),
        lambda f: over(lambda *args: jax.jvp(f, args, jax.tree.map(jnp.ones_like, args))),
    ):
        assert_close(jax.jit(transform(looped))(*args), jax.jit(transform(scanned))(*args))


def test_a_stream_of_several_arrays_and_parameters_without_gradients():
    """The stream counts layers in an integer, and a layer has a key."""
    params = dict(w=PARAMS["w"], key=jax.random.split(jax.random.key(0), LAYERS))

    def one(state: Any, p: Any) -> Any:
        kept = jax.random.bernoulli(p["key"], 0.5, X.shape)
        return dict(x=state["x"] + kept * jnp.tanh(state["x"] @ p["w"]), count=state["count"] + 1)

    def run(loop: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            out = loop(one, dict(x=x, count=jnp.int32(0)), params | dict(w=w))
            return (out["x"] ** 2).sum(), out["count"]

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(X, PARAMS["w"])

    actual = run(jk.scan_layers)
    assert actual[0][1] == LAYERS
    assert_close(actual, run(plain))


W, B, S = PARAMS["w"], PARAMS["b"], draw(7, LAYERS)
FORMS = {
    "a parameter without a reader": (lambda x, p: jnp.tanh(x @ p["w"]), X, dict(w=W, s=S)),
    "a scalar parameter": (lambda x, p: jnp.tanh(x @ p["w"]) * p["s"], X, dict(w=W, s=S)),
    "parameters in one array": (lambda x, w: jnp.sin(x @ w), X, W),
    "the identity": (lambda x, p: x, X, dict(w=W)),
    "a constant": (lambda x, p: jnp.ones_like(x), X, dict(w=W)),
    "not of the stream": (lambda x, p: p["b"] + jnp.zeros_like(x), X, dict(b=B)),
    "two arrays that change places": (lambda s, p: (s[1], jnp.sin(s[0] @ p["w"])), (X, X + 1), dict(w=W)),
    "one array twice": (lambda s, p: (jk.matmul(s[0], p["w"]) + s[1],) * 2, (X, X + 1), dict(w=W)),
    "a kernel's result is the stream": (lambda x, p: jk.matmul(x, p["w"], activation="silu"), X, dict(w=W)),
    "a kernel's result has several readers": (
        lambda x, p: (lambda h: jnp.sin(h) * jnp.cos(h) + jk.matmul(h, p["w"]) * h)(jk.matmul(x, p["w"])), X, dict(w=W)
    ),
    "a parameter has many readers": (
        lambda x, p: functools.reduce(lambda y, _: jnp.sin(y @ p["w"]) * x @ p["w"], range(20), x), X, dict(w=W)
    ),
    "another shape": (lambda x, p: jk.matmul(x, p["w"]).reshape(-1).reshape(2, 12).reshape(3, 8) ** 2, X, dict(w=W)),
    "a branch": (
        lambda x, p: lax.cond(p["n"] > 1, lambda x: jnp.sin(x @ p["w"]), lambda x: x * 2, x),
        X, dict(w=W, n=jnp.arange(LAYERS)),
    ),
    "a scan": (
        lambda x, p: lax.scan(lambda x, _: (jnp.sin(jk.matmul(x, p["w"])), None), x, length=3)[0], X, dict(w=W)
    ),
    "a jit": (lambda x, p: jax.jit(lambda h: jnp.sin(jk.matmul(h, p["w"])))(x) + x, X, dict(w=W)),
    "a jit that returns a number": (
        lambda x, p: (lambda h, c: h * c * jnp.sin(h * c))(*jax.jit(lambda x: (jnp.sin(x @ p["w"]), 2.0))(x)),
        X, dict(w=W),
    ),
    "a number with a name": (lambda x, p: jnp.sin(x @ p["w"] * checkpoint_name(jnp.float32(2), "two")), X, dict(w=W)),
    "a jit that returns an operand": (
        lambda x, p: (lambda h, x: h * jnp.sin(x))(*jax.jit(lambda x: (jk.matmul(x, p["w"]), x))(x)), X, dict(w=W)
    ),
    "layers": (lambda x, p: jk.scan_layers(lambda x, w: jnp.sin(jk.matmul(x, w)), x, p["w"][None]), X, dict(w=W)),
    "a checkpoint with barriers": (jax.checkpoint(lambda x, p: jnp.sin(jk.matmul(jnp.sin(x), p["w"]))), X, dict(w=W)),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_layers_of_many_forms(form):
    one, x, params = FORMS[form]
    grad = lambda f: jax.jit(jax.grad(squares(f), argnums=(0, 1), allow_int=True))(x, params)
    actual = grad(functools.partial(jk.scan_layers, one))
    expected = grad(functools.partial(plain, one))
    floating = lambda tree: [leaf for leaf in jax.tree.leaves(tree) if leaf.dtype != jax.dtypes.float0]
    assert_close(floating(actual), floating(expected))


def test_attention_projection_and_gated_layers():
    """Kernels of several results, views of results, and results that only the backward pass reads."""
    heads, features = 2, 16
    angles = jnp.arange(12.0)[:, None] / jnp.arange(1, 5)
    rotation = jnp.cos(angles), jnp.sin(angles)
    params = dict(
        scale=draw(0, LAYERS, 16), qkv=draw(1, LAYERS, 16, 48), out=draw(2, LAYERS, 16, 16),
        gate=draw(3, LAYERS, 16, 32), up=draw(4, LAYERS, 16, 32), down=draw(5, LAYERS, 32, 16),
    )  # fmt: skip

    def block(x: Any, p: Any) -> Any:
        normalised, x = jk.rms_norm(x, p["scale"], return_x=True)
        q, k, v = jk.qkv_projection(normalised, p["qkv"], rotation, num_heads=heads, num_kv_heads=heads)
        out = jk.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = jk.matmul(out, p["out"], residual=x)
        return jk.gated_mlp(x, p["gate"], p["up"], p["down"], activation="silu", residual=x)

    x = draw(7, 2, 12, features)
    expected = jax.jit(jax.grad(squares(functools.partial(plain, block)), argnums=(0, 1)))(x, params)
    for one in (block, jax.checkpoint(block, policy=jk.checkpoint_policies.save_products_and_attention)):
        actual = jax.jit(jax.grad(squares(functools.partial(jk.scan_layers, one)), argnums=(0, 1)))(x, params)
        assert_close(actual, expected)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_meshes(axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    one = lambda x, p: x + jnp.tanh(x @ p)
    loss = lambda loop: lambda x, w: (loop(one, x, w) ** 2).sum()
    x, w = draw(0, 8, FEATURES), PARAMS["w"]
    with jax.set_mesh(mesh):
        args = jax.device_put(x, PartitionSpec("data")), jax.device_put(w, PartitionSpec())
        compiled = jax.jit(jax.value_and_grad(loss(jk.scan_layers), argnums=(0, 1))).lower(*args).compile()
        actual = jax.device_get(compiled(*args))
    assert_close(actual, jax.value_and_grad(loss(plain), argnums=(0, 1))(x, w))
    assert "all-gather" not in str(compiled.as_text())


def test_shard_map():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    one = lambda x, p: x + jnp.tanh(x @ p)
    x, w = draw(0, 8, FEATURES), PARAMS["w"]
    specs: Any = dict(in_specs=(PartitionSpec("data"), PartitionSpec()), out_specs=PartitionSpec("data"))
    sharded = jax.shard_map(functools.partial(jk.scan_layers, one), mesh=mesh, **specs)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    actual = jax.jit(jax.grad(squares(sharded), argnums=(0, 1)))(jax.device_put(x, sharding), w)
    assert_close(actual, jax.grad(squares(functools.partial(jk.scan_layers, one)), argnums=(0, 1))(x, w))


def test_keys_that_a_layer_keeps():
    def one(x: Any, p: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(3), p["n"])
        dropout = jax.checkpoint(lambda x, key: x * jax.random.bernoulli(key, 0.5, x.shape) @ p["w"])
        return dropout(x, key) + x

    params = dict(w=PARAMS["w"], n=jnp.arange(LAYERS))
    loss = lambda loop: lambda w: (loop(one, X, params | dict(w=w)) ** 2).sum()
    assert_close(jax.grad(loss(jk.scan_layers))(PARAMS["w"]), jax.grad(loss(plain))(PARAMS["w"]))


def test_named_axes():
    one = lambda x, w: jnp.sin(x @ w) + lax.psum(x, "rows") / 8
    loss = lambda loop: lambda w: jax.vmap(lambda x: loop(one, x, w), axis_name="rows")(X).sum()
    assert_close(jax.grad(loss(jk.scan_layers))(PARAMS["w"]), jax.grad(loss(plain))(PARAMS["w"]))


def test_arrays_in_the_memory_of_the_host():
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["h"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    one = jax.checkpoint(lambda x, w: jnp.sin(checkpoint_name(x @ w, "h")), policy=policy)
    grad = lambda loop: jax.jit(jax.grad(lambda w: (loop(one, X, w) ** 2).sum()))
    assert_close(grad(jk.scan_layers)(PARAMS["w"]), grad(plain)(PARAMS["w"]))
    assert f"f32<host>[{LAYERS}," in str(jax.make_jaxpr(grad(jk.scan_layers))(PARAMS["w"]))


def test_export():
    run = jax.jit(gradients(looped))
    exported = jax.export.deserialize(jax.export.export(run)(*ARGS).serialize())
    assert_close(exported.call(*ARGS), run(*ARGS))
    assert "AllocateBuffer" not in jax.export.export(run, platforms=["cuda"])(*ARGS).mlir_module()


def test_no_layers():
    np.testing.assert_array_equal(jk.scan_layers(lambda x, p: x @ p, X, PARAMS["w"][:0]), X)


@pytest.mark.parametrize(
    ("error", "run", "message"),
    [
        (ValueError, lambda: jk.scan_layers(lambda x, p: x, X, {}), "got none"),
        (
            ValueError,
            lambda: jk.scan_layers(lambda x, p: x, X, PARAMS | dict(b=PARAMS["b"][:2])),
            r"got params\['w'\] of shape \(4, 8, 8\) and params\['b'\] of shape \(2, 8\). Stack the parameters",
        ),
        (
            TypeError,
            lambda: jk.scan_layers(lambda x, p: x[:1], X, PARAMS),
            r"layer must return arrays like x, float32\[3, 8\]; got float32\[1, 8\]",
        ),
        (
            TypeError,
            lambda: jk.scan_layers(lambda x, p: dict(x=x), X, PARAMS),
            r"got \{'x': 'float32\[3, 8\]'\}",
        ),
    ],
)
def test_errors(error, run, message):
    with pytest.raises(error, match=f"^scan_layers: .*{message}"):
        run()


@pytest.mark.parametrize(("chip", "read"), [("NVIDIA H200", "arg1"), ("NVIDIA A100-SXM4-80GB", "arg0")])
def test_only_kernels_for_hopper_read_slices(chip, read, monkeypatch):
    monkeypatch.setattr(hardware, "cuda_target", lambda devices: hardware.lookup(chip))
    traced = jax.jit(lambda value, kept: layers._same_p.bind(value, kept)).trace(X, X)
    assert f"return %{read} " in traced.lower(lowering_platforms=("cuda",)).as_text()


@needs_aot
def test_kernels_write_where_the_backward_pass_reads():
    """A layer of an MLP, compiled for an H200: each kernel runs once, nothing is zeroed, and nothing is copied."""
    num_layers, tokens, features, hidden = 5, 512, 256, 1024
    sharding = SingleDeviceSharding(h200())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)
    args = array(tokens, features), (array(num_layers, features, hidden), array(num_layers, hidden, features))

    def one(x: Any, p: Any) -> Any:
        up = jk.matmul(x, p[0], backend="pallas")
        return jk.matmul(jnp.tanh(up), p[1], residual=x, backend="pallas")

    loss = lambda loop: lambda x, p: (loop(one, x, p).astype(jnp.float32) ** 2).sum()

    def compiled(loop: Any) -> str:
        return str(jax.jit(jax.grad(loss(loop), argnums=(0, 1))).lower(*args).compile().as_text())

    def num_kernels(text: str) -> int:
        return len(re.findall(r'custom_call_target="mosaic_gpu', text))

    def num_zeroed(text: str) -> int:
        return len(re.findall(rf"= bf16\[{num_layers},[\d,]*\]\S* broadcast\(", text))

    text = compiled(jk.scan_layers)
    assert num_kernels(text) == 2 + 4
    assert num_zeroed(text) == 0
    assert num_zeroed(compiled(plain)) > 0
