"""Norms on meshes of eight virtual devices: values, gradients, shardings, and how much is communicated."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from test_sharding import arrays, assert_no_worse, specs_of

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


@every_kind
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("centered", [False, True], ids=["rms", "layer"])
def test_norm(opaque, meshes, kind, name, centered):
    """Both results count: the gradient has the cotangent of the sum, too."""
    x_spec, parameter_spec = SPECS[name]
    if (kind, name) == ("explicit", "fsdp"):
        pytest.skip("JAX refuses to multiply them: there is nothing to compare with")
    add = lambda f: lambda *xs: (lambda out, total: out + jnp.cos(total))(*f(*xs))
    shapes = ((8, 4, 16), (8, 4, 16), (16,), (16,))[: 4 if centered else 3]
    specs = (x_spec, x_spec, parameter_spec, parameter_spec)[: len(shapes)]
    mine, reference = add(functools.partial(ours, backend=opaque)), add(plain)
    out, grads = assert_no_worse(mine, reference, getattr(meshes, kind), arrays(*shapes), specs)
    if kind == "explicit":
        assert specs_of([out, *grads]) == [x_spec, *specs]
