"""Linear cross entropy on meshes of eight virtual devices: values, gradients, shardings and collectives."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from losses import CHUNKED, EVERYTHING, ours, plain
from numerics import assert_close
from test_sharding import collectives, specs_of

from jaxkernels.ops.linear_cross_entropy import reference
from jaxkernels.ops.linear_cross_entropy.cases import LinearCrossEntropyCase

CASE = LinearCrossEntropyCase(384, 16, 64, lead=(8, 48), dtype="float32")
ALL_OPTIONS = dataclasses.replace(CASE, **EVERYTHING)
SMALL_CHUNKS = reference.Config(chunk=40)

#: Specs of x and of w (V, d).
LAYOUTS = {
    "tokens": (P("x"), P()),
    "tokens over both axes": (P("x", "y"), P()),
    "tokens over both axes at once": (P(("x", "y")), P()),
    "vocabulary": (P(), P("y")),
    "vocabulary over both axes": (P(), P(("x", "y"))),
    "tokens and vocabulary": (P("x"), P("y")),
    "width": (P("x"), P(None, "x")),
    "vocabulary along the tokens": (P("x"), P("x")),
}

every_layout = pytest.mark.parametrize("layout", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])
every_reduction = pytest.mark.parametrize("reduction", ["none", "mean"])


def program(f: Callable[..., Any], case: LinearCrossEntropyCase, reduction: str, **options: Any) -> Callable[..., Any]:
    """operands -> results and gradients in x, w and the bias."""

    def run(operands: dict[str, jax.Array]) -> Any:
        moving = {name: x for name, x in operands.items() if name in ("x", "w", "bias")}

        def total(moving: dict[str, jax.Array]) -> Any:
            outs = f(case, reduction, operands | moving, **options)
            return sum(jnp.sum(jnp.sin(out)) for out in jax.tree.leaves(outs)), outs

        grads, outs = jax.grad(total, has_aux=True)(moving)
        return outs, grads

    return run


def place(mesh: jax.sharding.Mesh, case: LinearCrossEntropyCase, layout: str) -> dict[str, jax.Array]:
    x_spec, w_spec = LAYOUTS[layout]
    specs = dict(x=x_spec, labels=x_spec, weights=x_spec, w=w_spec, bias=P(*w_spec[:1]))
    return {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in case.operands().items()}


def losses_alone(f: Callable[..., Any]) -> Callable[..., Any]:
    """Without the logsumexp: then a mean of `ours` is the fused pass."""

    def run(case: LinearCrossEntropyCase, reduction: str, operands: Any, **options: Any) -> Any:
        outs = f(case, reduction, operands, **options)
        return outs[0] if reduction == "none" else outs

    return run


@pytest.mark.sampled(one_in=5)
@every_layout
@every_kind
@every_reduction
def test_no_more_collectives_than_plain_losses(meshes, kind, layout, reduction):
    mesh = getattr(meshes, kind)
    with jax.set_mesh(mesh):
        operands = place(mesh, CASE, layout)
        run = program(losses_alone(ours), CASE, reduction, config=SMALL_CHUNKS)
        compiled = jax.jit(run).lower(operands).compile()
        outs, grads = results = compiled(operands)
        whole = jax.jit(program(losses_alone(plain), CASE, reduction))(CASE.operands())
        assert_close(results, whole, rtol=1e-4)
        if kind == "explicit":
            full = {
                name: P(*spec, *[None] * (operands[name].ndim - len(spec))) for name, spec in zip("xw", LAYOUTS[layout])
            }
            assert specs_of(grads) == [full["w"], full["x"]]
            assert specs_of([outs]) == [P(*full["x"][:2]) if reduction == "none" else P()]
    # An Explicit mesh refuses plain losses in some of the layouts: an Auto one decides what they need.
    by_jax = jax.jit(program(compared_losses, CASE, reduction)).lower(place(meshes.auto, CASE, layout)).compile()
    counts = collectives(by_jax)
    assert collectives(compiled).total() <= counts.total(), (collectives(compiled), counts)


def compared_losses(case: LinearCrossEntropyCase, reduction: str, operands: dict[str, jax.Array]) -> jax.Array:
    """As one writes them for a mesh: a comparison selects the label's logit."""
    logits = jnp.einsum("bsd,vd->bsv", operands["x"], operands["w"])
    is_label = jnp.arange(case.vocab) == operands["labels"][..., None]
    losses = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits, axis=-1, where=is_label)
    return losses if reduction == "none" else jnp.mean(losses)


@pytest.mark.sampled(one_in=5)
@every_layout
@every_kind
@every_reduction
def test_all_options(meshes, kind, layout, reduction):
    mesh = getattr(meshes, kind)
    with jax.set_mesh(mesh):
        operands = place(mesh, ALL_OPTIONS, layout)
        results = jax.jit(program(ours, ALL_OPTIONS, reduction, config=SMALL_CHUNKS))(operands)
    assert_close(results, jax.jit(program(plain, ALL_OPTIONS, reduction))(ALL_OPTIONS.operands()), rtol=1e-4)


@every_kind
@pytest.mark.parametrize("layout", ["tokens", "tokens and vocabulary"])
def test_forward_mode_and_second_derivatives(meshes, kind, layout):
    mesh = getattr(meshes, kind)

    def curvature(f: Callable[..., Any], operands: dict[str, jax.Array], **options: Any) -> Any:
        loss = lambda w: f(CASE, "mean", operands | dict(w=w), **options)
        per_token = lambda w: f(CASE, "none", operands | dict(w=w), **options)
        w = operands["w"]
        return jax.jvp(jax.grad(loss), (w,), (w,)), jax.jvp(per_token, (w,), (w,))

    with jax.set_mesh(mesh):
        results = jax.jit(lambda xs: curvature(ours, xs, config=SMALL_CHUNKS))(place(mesh, CASE, layout))
    assert_close(results, jax.jit(lambda xs: curvature(plain, xs))(CASE.operands()), rtol=1e-4)


@every_reduction
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(meshes, reduction, check_vma):
    """Data parallel by hand: w is replicated, and its gradient is a sum over shards."""

    def mapped(f: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def shard(x: jax.Array, labels: jax.Array, w: jax.Array) -> jax.Array:
            case = dataclasses.replace(CASE, lead=(2, 48), tokens=96)
            loss = f(case, reduction, dict(x=x, labels=labels, w=w), **options)
            return loss if reduction == "none" else jax.lax.pmean(loss, "x")

        specs = P("x"), P("x"), P()
        out_specs = P("x") if reduction == "none" else P()
        return jax.shard_map(shard, mesh=meshes.auto, in_specs=specs, out_specs=out_specs, check_vma=check_vma)

    def run(f: Callable[..., Any]) -> Callable[..., Any]:
        total = lambda x, w, labels: jnp.sum(jnp.sin(f(x, labels, w)))
        return jax.value_and_grad(total, (0, 1))

    xs = CASE.operands()
    arguments = xs["x"], xs["w"], xs["labels"]
    compiled = jax.jit(run(mapped(losses_alone(ours), config=SMALL_CHUNKS))).lower(*arguments).compile()
    expected = lambda x, labels, w: losses_alone(plain)(CASE, reduction, dict(x=x, labels=labels, w=w))
    assert_close(compiled(*arguments), jax.jit(run(expected))(*arguments), rtol=1e-4)
    by_jax = jax.jit(run(mapped(losses_alone(plain)))).lower(*arguments).compile()
    assert collectives(compiled).total() <= collectives(by_jax).total()


@every_reduction
def test_vmap_over_a_sharded_axis(meshes, reduction):
    """Explicit: each shard has models of its own."""
    operands = {name: jnp.stack([x] * 4) for name, x in CASE.operands().items()}
    scale = jnp.asarray([1.0, 0.5, 2.0, -1.0])
    operands["w"] = operands["w"] * scale[:, None, None]
    run = lambda f, **options: jax.jit(jax.vmap(program(losses_alone(f), CASE, reduction, **options)))
    with jax.set_mesh(meshes.explicit):
        placed = {name: jax.device_put(x, NamedSharding(meshes.explicit, P("x"))) for name, x in operands.items()}
        compiled = run(ours, config=CHUNKED).lower(placed).compile()
        results = compiled(placed)
    assert collectives(compiled) == collections.Counter()
    assert_close(results, run(plain)(operands), rtol=1e-4)


def test_eager_evaluation(meshes):
    with jax.set_mesh(meshes.explicit):
        operands = place(meshes.explicit, CASE, "tokens and vocabulary")
        results = program(ours, CASE, "mean", config=SMALL_CHUNKS)(operands)
    assert_close(results, program(plain, CASE, "mean")(CASE.operands()), rtol=1e-4)
