"""The transformer: against a plain implementation, under its options, with its cache, and what it is made of."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo
from numerics import assert_close, assert_same_bits, compile_quickly

import jaxkernels as jk
from jaxkernels.core.errors import InputError
from jaxkernels.core.types import ArrayType
from jaxkernels.models.config import PRESETS, REMATS, ModelConfig, preset
from jaxkernels.models.sampling import generate
from jaxkernels.models.training import cross_entropy
from jaxkernels.models.transformer import (
    Transformer,
    _stacked_params,
    abstract_params,
    init_cache,
    init_params,
    rotation_at,
)
from jaxkernels.ops.qkv_projection.reference import rotate
from jaxkernels.triton import calls

#: Every size distinct.
SMALL = ModelConfig(
    vocab_size=53, num_layers=3, embed_dim=40, num_heads=6, num_kv_heads=2, head_dim=8, mlp_dim=56, dtype="float32"
)
OPTIONS = {
    "plain": SMALL,
    "untied": dataclasses.replace(SMALL, tied_embedding=False),
    "scan": dataclasses.replace(SMALL, scan=True),
    "remat": dataclasses.replace(SMALL, remat="full"),
    "scan, remat": dataclasses.replace(SMALL, scan=True, remat="full"),
}


def build(config: ModelConfig, seed: int = 0) -> tuple[nnx.GraphDef, dict[str, Any]]:
    @compile_quickly
    def init() -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(Transformer(config, rngs=nnx.Rngs(params=seed)), nnx.Param))

    # Norms start at 1: other scales show whether each is applied, and where.
    rng = np.random.default_rng(seed)
    perturb = lambda path, x: x * rng.uniform(0.5, 1.5, x.shape).astype(x.dtype) if path[-1].key == "scale" else x
    return abstract_params(config)[0], jax.tree.map_with_path(perturb, init())


def tokens(batch: int = 2, length: int = 11, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(SMALL.vocab_size, size=(batch, length)).astype(np.int32)


def logits_of(config: ModelConfig, params: Any, tokens: Any) -> jax.Array:
    return compile_quickly(lambda params: nnx.merge(abstract_params(config)[0], params)(tokens))(params)


def unstacked(params: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """The parameters of a scanned model in the layout of one that is not."""
    layers = {i: jax.tree.map(lambda x, i=i: x[i], params["layers"]) for i in range(num_layers)}
    return {**params, "layers": layers}


def plain_model(config: ModelConfig, params: dict[str, Any], tokens: np.ndarray) -> jax.Array:
    """The same model as the papers write it, in jnp: one head at a time, complex rotations, every mask spelled out."""
    c = config

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return scale * x / jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + c.norm_epsilon)

    def turned(x: jax.Array) -> jax.Array:  # (B, T, H)
        half = c.head_dim // 2
        angle = np.arange(x.shape[1])[:, None] / c.rope_theta ** (np.arange(half) / half)
        z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
        return jnp.concatenate([z.real, z.imag], axis=-1)

    x = params["embedding"][tokens]
    length = tokens.shape[1]
    for i in range(c.num_layers):
        layer = params["layers"][i]
        y = norm(x, layer["attention_norm"]["scale"]) @ layer["attention"]["qkv"]["kernel"]
        head = lambda n, y=y: y[..., n * c.head_dim : (n + 1) * c.head_dim]
        outs = []
        for n in range(c.num_heads):
            kv = n // (c.num_heads // c.num_kv_heads)
            q, k = turned(head(n)), turned(head(c.num_heads + kv))
            weights = jnp.einsum("bth,bsh->bts", q, k) / math.sqrt(c.head_dim)
            weights = jax.nn.softmax(jnp.where(np.tri(length, dtype=bool), weights, -jnp.inf), axis=-1)
            outs.append(weights @ head(c.num_heads + c.num_kv_heads + kv))
        x = x + jnp.concatenate(outs, axis=-1) @ layer["attention"]["out"]["kernel"]
        y = norm(x, layer["mlp_norm"]["scale"])
        gate = y @ layer["mlp"]["gate"]["kernel"]
        hidden = gate * jax.nn.sigmoid(gate) * (y @ layer["mlp"]["up"]["kernel"])
        x = x + hidden @ layer["mlp"]["down"]["kernel"]
    table = params["embedding"] if c.tied_embedding else params["unembedding"]
    return norm(x, params["norm"]["scale"]) @ table.T


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_gradients_are_those_of_the_plain_model(name):
    config = OPTIONS[name]
    graphdef, params = build(config)
    batch = tokens()

    def plain(params: Any) -> jax.Array:
        return plain_model(config, unstacked(params, config.num_layers) if config.scan else params, batch)

    def with_gradients(model: Any) -> Any:
        loss = lambda params: cross_entropy(model(params)[:, :-1], batch[:, 1:])
        return model(params), jax.grad(loss)(params)

    ours = lambda params: nnx.merge(graphdef, params)(batch)
    assert_close(*compile_quickly(lambda: (with_gradients(ours), with_gradients(plain)))())


def test_options_do_not_change_the_initialisation():
    _, plain = build(SMALL)
    for name in ("remat", "scan", "scan, remat"):
        config = OPTIONS[name]
        _, params = build(config)
        params = unstacked(params, config.num_layers) if config.scan else params
        assert jax.tree.structure(params) == jax.tree.structure(plain)
        matrices = lambda params: [x for path, x in jax.tree.leaves_with_path(params) if path[-1].key != "scale"]
        assert_same_bits(matrices(params), matrices(plain))
    other = build(SMALL, seed=1)[1]
    assert np.any(np.asarray(other["embedding"]) != np.asarray(plain["embedding"]))


@pytest.mark.parametrize("name", ["untied", "scan"])
def test_initial_parameters_are_those_of_the_model(name):
    config = OPTIONS[name]
    params = init_params(config, jax.random.key(3))
    model = jax.jit(lambda: nnx.state(Transformer(config, rngs=nnx.Rngs(params=3)), nnx.Param))()
    assert jax.tree.structure(params) == jax.tree.structure(nnx.to_pure_dict(model))
    assert_close(params, nnx.to_pure_dict(model), rtol=1e-6)


def test_layers_differ_at_the_start():
    kernels = init_params(OPTIONS["scan"], jax.random.key(0))["layers"]["mlp"]["gate"]["kernel"]
    assert len(np.unique(np.asarray(kernels))) > 0.99 * kernels.size  # float32 draws of one layer repeat a few


def test_initialisation_compiles_one_layer_however_many_there_are():
    """XLA took minutes for a program with the draws of 24 layers."""

    def size(num_layers: int) -> int:
        config = dataclasses.replace(preset("350m").model, num_layers=num_layers, scan=True)
        key = jax.random.key(0)
        return len(_stacked_params.lower(config, key).as_text().splitlines())

    assert size(24) == size(2)


def test_logits_do_not_see_later_tokens():
    _, params = build(SMALL)
    changed = tokens()
    changed[:, 6] = (changed[:, 6] + 1) % SMALL.vocab_size
    before, after = logits_of(SMALL, params, tokens()), logits_of(SMALL, params, changed)
    assert_same_bits(before[:, :6], after[:, :6])
    assert np.all(np.any(np.asarray(before[:, 6:]) != np.asarray(after[:, 6:]), axis=-1))


def test_bfloat16_model_keeps_float32_parameters_and_gradients():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    graphdef, params = build(config)
    batch = tokens()

    def loss(params: Any) -> jax.Array:
        logits = nnx.merge(graphdef, params)(batch)
        assert logits.dtype == jnp.bfloat16
        return cross_entropy(logits[:, :-1], batch[:, 1:])

    value, grads = compile_quickly(jax.value_and_grad(loss))(params)
    assert value.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves((params, grads))} == {jnp.dtype("float32")}
    exact = cross_entropy(logits_of(SMALL, params, batch)[:, :-1], batch[:, 1:])
    assert abs(float(value) - float(exact)) < 0.02


def test_rotation_depends_on_distance_alone():
    q, k = np.random.default_rng(0).standard_normal((2, 1, SMALL.head_dim), np.float32)
    at = lambda x, position: rotate(x, *rotation_at(jnp.array([position]), SMALL), SMALL.head_dim, "halves")
    dots = [float(jnp.vdot(at(q, 5 + shift), at(k, 2 + shift))) for shift in (0, 1, 40)]
    np.testing.assert_allclose(dots, dots[0], rtol=1e-4)
    assert abs(float(jnp.vdot(at(q, 6), at(k, 2))) - dots[0]) > 1e-3


# The cache.


def decode(config: ModelConfig, params: Any, batch: np.ndarray, prompt: int, num_slots: int) -> jax.Array:
    """Logits of every token from the prompt's last on, the prompt at once and the others one by one."""
    graphdef, _ = abstract_params(config)
    step = compile_quickly(lambda params, tokens, cache: nnx.merge(graphdef, params)(tokens, cache))
    logits, cache = step(params, batch[:, :prompt], init_cache(config, batch.shape[0], num_slots))
    outs = [logits[:, -1]]
    for i in range(prompt, batch.shape[1]):
        logits, cache = step(params, batch[:, i : i + 1], cache)
        outs.append(logits[:, 0])
    assert int(cache.length) == batch.shape[1]
    return jnp.stack(outs, axis=1)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("name", ["plain", "scan, remat"])
@pytest.mark.parametrize("prompt", [1, 4])
def test_decoding_with_the_cache_gives_the_logits_of_one_pass(name, prompt):
    config = OPTIONS[name]
    _, params = build(config)
    batch = tokens()
    full = logits_of(config, params, batch)
    assert_close(decode(config, params, batch, prompt, num_slots=batch.shape[1]), full[:, prompt - 1 :])


def test_full_cache_remembers_the_latest_tokens(monkeypatch):
    _, params = build(SMALL)
    batch = tokens(length=13)
    num_slots = 5
    decoded = decode(SMALL, params, batch, prompt=3, num_slots=num_slots)
    windowed = functools.partial(jk.dot_product_attention, local_window_size=(num_slots - 1, 0))
    monkeypatch.setattr(jk, "dot_product_attention", windowed)
    assert_close(decoded, logits_of(SMALL, params, batch)[:, 2:])


def test_greedy_generation_takes_the_likeliest_token_each_time():
    graphdef, params = build(SMALL)
    prompt = tokens(length=4)
    new = generate(graphdef, params, prompt, jax.random.key(0), num_tokens=5, num_slots=9, temperature=0.0)
    sequence = np.concatenate([prompt, np.asarray(new)], axis=1)
    expected = np.argmax(np.asarray(logits_of(SMALL, params, sequence)), axis=-1)
    np.testing.assert_array_equal(new, expected[:, 3:-1])


def test_generation_draws_by_temperature_top_k_and_vocabulary():
    graphdef, params = build(SMALL)
    prompt = np.repeat(tokens(batch=1, length=4), 400, axis=0)
    logits = np.asarray(logits_of(SMALL, params, prompt[:1]))[0, -1] * 20  # the model is untrained: nearly uniform
    params = {**params, "norm": {"scale": 20 * params["norm"]["scale"]}}
    drawn = lambda **options: np.asarray(
        generate(graphdef, params, prompt, jax.random.key(1), num_tokens=1, num_slots=8, **options)
    )[:, 0]
    order = np.argsort(-logits)
    assert set(drawn(top_k=3, temperature=3.0)) == set(order[:3])
    assert set(drawn(temperature=9.0, vocab_size=4)) == set(range(4))
    probability = np.exp(logits - np.logaddexp.reduce(logits))
    share = np.mean(drawn() == order[0])
    assert abs(share - probability[order[0]]) < 4 * math.sqrt(probability[order[0]] / 400)
    assert_same_bits(drawn(), drawn())


# The parts of the model.


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of the jaxprs inside. Equations of a scan are repeated."""
    for eqn in jaxpr.eqns:
        yield eqn
        inner = [x for x in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr) if is_jaxpr(x)]
        for _ in range(eqn.params["length"] if eqn.primitive.name == "scan" else 1):
            for x in inner:
                yield from equations(getattr(x, "jaxpr", x))


def is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(getattr(x, "jaxpr", None), "eqns")


def gradient_jaxpr(config: ModelConfig, batch: int = 2, length: int = 11, attention_fn: Any = None) -> Any:
    graphdef, params = abstract_params(config, attention_fn)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    shape = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    return jax.make_jaxpr(jax.value_and_grad(loss))(params, shape).jaxpr


@pytest.mark.parametrize("name", OPTIONS)
def test_every_product_and_attention_is_ours_and_has_the_backend_asked_for(name):
    config = dataclasses.replace(OPTIONS[name], backend="xla")
    found = [(eqn.primitive.name, eqn.params) for eqn in equations(gradient_jaxpr(config))]
    assert "dot_general" not in {primitive for primitive, _ in found}
    ours = [(primitive, params["backend"]) for primitive, params in found if primitive.startswith("jk_")]
    assert {backend for _, backend in ours} == {"xla"}
    forward = sum(primitive == "jk_attention_forward" for primitive, _ in ours)
    backward = sum(primitive == "jk_attention_backward" for primitive, _ in ours)
    assert (forward, backward) == (config.num_layers * (2 if config.remat == "full" else 1), config.num_layers)


#: The primitives that multiply matrices.
PRODUCTS = ("jk_matmul", "jk_dot_general", "jk_qkv_projection")

#: Remat policy -> how many times the backward pass runs the attention again, and the products of a block that a
#: gradient needs: all but the last one.
RECOMPUTED = {
    "none": (0, 0), "dots_and_attention": (0, 0), "dots": (1, 0), "attention": (0, 1), "full": (1, 1),
}  # fmt: skip


@pytest.mark.parametrize("policy", REMATS)
def test_remat_policies_keep_what_they_name(policy):
    def count(config: ModelConfig) -> tuple[int, int]:
        names = [eqn.primitive.name for eqn in equations(gradient_jaxpr(config))]
        return names.count("jk_attention_forward"), sum(map(names.count, PRODUCTS))

    config = dataclasses.replace(SMALL, remat=policy)
    attention, products = (new - old for new, old in zip(count(config), count(SMALL)))
    expected = RECOMPUTED[policy]
    assert (attention, products) == (expected[0] * SMALL.num_layers, expected[1] * 4 * SMALL.num_layers)


@pytest.mark.parametrize("policy", REMATS)
def test_remat_policies_keep_cudnns_attention_as_they_keep_ours(policy, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda capability: True)
    config = dataclasses.replace(SMALL, remat=policy, dtype="bfloat16")
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    names = [eqn.primitive.name for eqn in equations(gradient_jaxpr(config, length=16, attention_fn=cudnn))]
    assert names.count("dot_product_attention_fwd_wrapper") == (1 + RECOMPUTED[policy][0]) * SMALL.num_layers


def test_scan_keeps_no_float32_stream_and_no_copy_of_a_matrix():
    """What a scan keeps of a layer is written in the forward pass and read in the backward pass: more costs time."""
    config = dataclasses.replace(OPTIONS["scan"], dtype="bfloat16")
    forward, backward = (eqn for eqn in gradient_jaxpr(config).eqns if eqn.primitive.name == "scan")
    kept = [x.aval for x in forward.outvars]
    stream = math.prod((2, 11, config.embed_dim))
    assert [str(x) for x in kept if x.dtype == jnp.float32 and x.size >= config.num_layers * stream] == []
    _, params = abstract_params(config)
    matrices = {x.shape for x in jax.tree.leaves(params["layers"]) if x.ndim == 3}
    assert {x.shape for x in kept}.isdisjoint(matrices)
    gradients = [x.aval for x in backward.outvars if x.aval.shape in matrices]
    assert {x.dtype for x in gradients} == {jnp.dtype("bfloat16")}
    assert {x.shape for x in gradients} == matrices


@pytest.mark.parametrize("name", ["plain", "untied", "scan"])
def test_flops_per_token_count_the_products_of_a_training_step(name):
    config, batch, length = OPTIONS[name], 2, 11
    done = 0
    for eqn in equations(gradient_jaxpr(config, batch, length)):
        if eqn.primitive.name in PRODUCTS:
            types = [ArrayType.of(x.aval) for x in eqn.invars]
            if eqn.primitive.name == "jk_qkv_projection":
                product = eqn.params["static"].typed("qkv_projection", types).product
            else:
                product = eqn.params["static"].typed("matmul", types)
            gemm = product.gemm
            done += 2 * (gemm.batch or 1) * gemm.m * gemm.n * gemm.k
    causal_attention = 6 * config.num_layers * length * config.num_heads * config.head_dim
    assert done == batch * length * 6 * config.num_matmul_params
    assert config.flops_per_token(length) == 6 * config.num_matmul_params + causal_attention


# Configurations.

PARAMETERS = {"tiny": 820_352, "124m": 124_275_456, "350m": 351_323_136, "1b": 1_040_254_976, "8b": 8_030_261_248}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_they_promise(name):
    config = preset(name).model
    _, params = abstract_params(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == config.num_params == PARAMETERS[name]


def test_1b_preset_is_llama_but_for_the_vocabulary():
    config = dataclasses.replace(preset("1b").model, vocab_size=128_256)
    assert config.num_params == 1_235_814_400  # "1.23B" in Llama 3.2's model card


def test_untied_embedding_counts_twice():
    config = OPTIONS["untied"]
    _, params = abstract_params(config)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == config.num_params
    assert config.num_params == SMALL.num_params + SMALL.vocab_size * SMALL.embed_dim


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(InputError) as e:
        preset("gpt5")
    assert str(e.value) == "preset: unknown preset 'gpt5'; use one of tiny, 124m, 350m, 1b, 8b."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_kv_heads=4), "ModelConfig: num_heads must be a multiple of num_kv_heads; got 6 and 4."),
        (dict(head_dim=7), "ModelConfig: head_dim must be even (rotary embeddings turn pairs); got 7."),
        (dict(num_layers=0), "ModelConfig: num_layers must be a positive int; got 0."),
        (dict(embed_dim=4.0), "ModelConfig: embed_dim must be an int; got 4.0."),
        (dict(rope_theta=0.0), "ModelConfig: rope_theta must be positive and finite; got 0.0."),
        (dict(dtype="int8"), 'ModelConfig: dtype must be "bfloat16", "float16" or "float32"; got \'int8\'.'),
    ],
)
def test_impossible_config_is_refused(change, message):
    with pytest.raises(InputError) as e:
        dataclasses.replace(SMALL, **change)
    assert str(e.value) == message


def test_training_step_of_124m_takes_fast_backends():
    """cuBLAS, by XLA, is estimated to be a little faster for some of its products."""
    config = preset("124m").model
    graphdef, params = abstract_params(config)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graphdef, params)(tokens[:, :-1]), tokens[:, 1:])

    shape = jax.ShapeDtypeStruct((32, 1025), jnp.int32)
    explanation = jk.explain(jax.grad(loss), params, shape, platform="cuda")
    chosen: dict[str, set[str]] = {}
    for choice in explanation.choices:
        chosen.setdefault(choice.op, set()).add(choice.backend)
    assert chosen["matmul"] <= {"cuda", "xla"}, str(explanation)
    assert "cuda" in chosen["matmul"], str(explanation)
    for attention in ("attention_forward", "attention_backward"):
        assert chosen[attention] <= {"cuda", "pallas"}, str(explanation)
    for norm in ("norm_forward", "norm_backward"):
        assert chosen[norm] == {"xla" if calls.missing() else "triton"}, str(explanation)
