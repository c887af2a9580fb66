"""Norms on meshes of eight virtual devices: values, gradients, shardings, and how much is communicated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from numerics import assert_close, compile_quickly
from test_sharding import arrays, assert_no_worse, collectives, place, specs_of, with_gradients

import jaxkernels as jk

every_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])


def plain(x: Any, residual: Any, scale: Any, bias: Any = None) -> tuple[jax.Array, jax.Array]:
    """A layer norm if there is a bias, else an RMS norm; and the sum."""
    z = x + residual
    centred = z if bias is None else z - jnp.mean(z, axis=-1, keepdims=True)
    out = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-6) * scale
    return out if bias is None else out + bias, z


def ours(x: Any, residual: Any, scale: Any, bias: Any = None, *, backend: str) -> tuple[jax.Array, jax.Array]:
    if bias is None:
        return jk.rms_norm(x, scale, residual=residual, backend=backend)
    return jk.layer_norm(x, scale, bias, residual=residual, backend=backend)


#: Spec of x and of the residual, and of scale and bias.
SPECS = {
    "batch": (P("x", None, None), P(None)),
    "batch and length": (P("x", "y", None), P(None)),
    "batch over both axes": (P(("x", "y"), None, None), P(None)),
    "features": (P(None, None, "x"), P("x")),
    "batch and features": (P("x", None, "y"), P("y")),
    "fsdp": (P("x", None, None), P("x")),
}


@pytest.mark.sampled(one_in=4)
@every_kind
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm(opaque, meshes, kind, name, centered):
    """Both results count: the gradient has the cotangent of the sum, too."""
    x_spec, parameter_spec = SPECS[name]
    add = lambda f: lambda *xs: (lambda out, total: out + jnp.cos(total))(*f(*xs))
    shapes = ((8, 4, 16), (8, 4, 16), (16,), (16,))[: 4 if centered else 3]
    specs = (x_spec, x_spec, parameter_spec, parameter_spec)[: len(shapes)]
    mine, reference = add(functools.partial(ours, backend=opaque)), add(plain)
    out, grads = assert_no_worse(mine, reference, getattr(meshes, kind), arrays(*shapes), specs)
    if kind == "explicit":
        assert specs_of([out, *grads]) == [x_spec, *specs]


@every_kind
def test_second_derivatives(meshes, kind):
    xs = arrays((8, 4, 16), (8, 4, 16), (16,), (16,))
    placed = place(getattr(meshes, kind), xs, (P("x", None, "y"), P("x", None, "y"), P("y"), P("y")))

    def derivative(f: Any) -> Any:
        grad = jax.grad(lambda *xs: sum(jnp.sum(jnp.sin(y)) for y in f(*xs)), (0, 1, 2, 3))
        return lambda *xs: jax.jvp(grad, xs, xs)

    mine = compile_quickly(derivative(functools.partial(ours, backend="xla")))
    assert_close(mine(*placed), compile_quickly(derivative(plain))(*xs), rtol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(opaque, meshes, check_vma):
    """Data parallel by hand: scale and bias are replicated, and their gradients are sums over shards."""
    add = lambda f: lambda *xs: sum(f(*xs))
    specs = P("x"), P("x"), P(), P()
    mapped = lambda f: jax.shard_map(f, mesh=meshes.auto, in_specs=specs, out_specs=P("x"), check_vma=check_vma)
    xs = arrays((8, 4, 16), (8, 4, 16), (16,), (16,))
    mine = compile_quickly(with_gradients(mapped(add(functools.partial(ours, backend=opaque))))).lower(*xs).compile()
    assert_close(mine(*xs), compile_quickly(with_gradients(add(plain)))(*xs))
    reference = compile_quickly(with_gradients(mapped(add(plain)))).lower(*xs).compile()
    assert collectives(mine).total() <= collectives(reference).total()


def test_vmap_over_a_sharded_axis(opaque, meshes):
    """Of x and of the scale: each element has its own."""
    xs = arrays((8, 6, 16), (8, 6, 16), (8, 16))
    placed = place(meshes.explicit, xs, (P("x", "y", None), P("x", "y", None), P("x", None)))
    transformed = lambda f: jax.vmap(with_gradients(lambda *xs: sum(f(*xs))))
    results = compile_quickly(transformed(functools.partial(ours, backend=opaque)))(*placed)
    assert_close(results, compile_quickly(transformed(plain))(*xs))
    assert specs_of(results) == [P("x", "y", None)] * 3 + [P("x", None)]
