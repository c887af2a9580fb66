"""Norms in plain JAX: the three passes of the backend "xla", and the rules of their derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from jaxkernels.core.types import ArrayType
from jaxkernels.ops.norm.spec import NormSpec

__all__ = ["Config", "Mean", "backward", "forward", "mean_of_features", "search_space", "statistics", "tangent"]

#: The mean of (..., F) over the last axis, which stays with size 1.
Mean = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Config:
    """Nothing to choose."""


def search_space(spec: NormSpec) -> tuple[Config, ...]:
    return (Config(),)


def mean_of_features(x: jax.Array) -> jax.Array:
    """The mean where a device has all features."""
    return jnp.mean(x, axis=-1, keepdims=True)


def statistics(spec: NormSpec, z: jax.Array, mean: Mean = mean_of_features) -> dict[str, jax.Array]:
    """Mean (of a layer norm) and reciprocal standard deviation of each row, by name, without the last axis."""
    z, found = z.astype(spec.wide), {}
    if spec.centered:
        center = mean(z)
        z, found["mean"] = z - center, center[..., 0]
    return found | {"rstd": jax.lax.rsqrt(mean(z * z) + spec.eps)[..., 0]}


def forward(spec: NormSpec, named: Mapping[str, jax.Array], mean: Mean = mean_of_features) -> dict[str, jax.Array]:
    """out, sum (if a residual is given or x is returned), mean (of a layer norm) and rstd."""
    z, sums = named["x"], {}
    if spec.residual:
        z = sums["sum"] = (z.astype(spec.wide) + named["residual"].astype(spec.wide)).astype(z.dtype)
    elif spec.returns_x:
        sums["sum"] = z
    saved = statistics(spec, z, mean)
    out = _normalized(spec, z, saved)
    if spec.scale is not None:
        out = out * _scale(spec, named)
    if spec.bias is not None:
        out = out + _by_row(spec, named["bias"])
    return dict(out=out.astype(z.dtype), **sums, **saved)


def tangent(spec: NormSpec, named: Mapping[str, jax.Array], mean: Mean = mean_of_features) -> dict[str, jax.Array]:
    """dout, and dsum if there is a sum.

    With n the normalized rows and v the tangent of z, n' = rstd (v - mean(v) - n mean(n v)); an RMS norm lacks mean(v).
    """
    z, dz, sums = named["x"], named["dx"].astype(spec.wide), {}
    if spec.residual:
        dz = dz + named["dresidual"].astype(spec.wide)
        sums["dsum"] = dz.astype(z.dtype)
    elif spec.returns_x:
        sums["dsum"] = named["dx"]
    normalized = _normalized(spec, z, named)
    dout = _derivative(spec, dz, normalized, named["rstd"], mean)
    if spec.scale is not None:
        dout = dout * _scale(spec, named) + normalized * _by_row(spec, named["dscale"])
    if spec.bias is not None:
        dout = dout + _by_row(spec, named["dbias"])
    return dict(dout=dout.astype(z.dtype), **sums)


def backward(spec: NormSpec, named: Mapping[str, jax.Array], mean: Mean = mean_of_features) -> dict[str, jax.Array]:
    """dx, which is the gradient of x and of the residual, and the wanted ones of dscale and dbias.

    The derivative of the normalized row is a symmetric matrix, so the pass is the tangent pass's map of dout * scale.
    """
    z, dout = named["x"], named["dout"].astype(spec.wide)
    normalized = _normalized(spec, z, named)
    g = dout if spec.scale is None else dout * _scale(spec, named)
    dx = _derivative(spec, g, normalized, named["rstd"], mean)
    if spec.sum_gradient:
        dx = dx + named["dsum"].astype(spec.wide)
    grads = {"dx": dx.astype(z.dtype)}
    if spec.scale_gradient:
        grads["dscale"] = _added_up(spec, dout * normalized, spec.scale)
    if spec.bias_gradient:
        grads["dbias"] = _added_up(spec, dout, spec.bias)
    return grads


def _normalized(spec: NormSpec, z: jax.Array, saved: Mapping[str, jax.Array]) -> jax.Array:
    z = z.astype(spec.wide)
    return (z - saved["mean"][..., None] if spec.centered else z) * saved["rstd"][..., None]


def _derivative(spec: NormSpec, v: jax.Array, normalized: jax.Array, rstd: jax.Array, mean: Mean) -> jax.Array:
    """The derivative of normalized rows in the direction v: rstd (v - mean(v) - normalized mean(normalized v))."""
    change = v - normalized * mean(normalized * v)
    return (change - mean(v) if spec.centered else change) * rstd[..., None]


def _scale(spec: NormSpec, named: Mapping[str, jax.Array]) -> jax.Array:
    return _by_row(spec, named["scale"]) + spec.scale_offset


def _by_row(spec: NormSpec, parameter: jax.Array) -> jax.Array:
    """(1 | G, F) -> (1 | G, 1, ..., F), in the dtype of the statistics."""
    shape = parameter.shape
    return parameter.astype(spec.wide).reshape(shape[0], *(1,) * (spec.x.ndim - 2), shape[1])


def _added_up(spec: NormSpec, gradient: jax.Array, parameter: ArrayType | None) -> jax.Array:
    """The gradient of a parameter, from its gradient for each row."""
    assert parameter is not None
    first = 0 if parameter.shape[0] == 1 else 1
    total = jnp.sum(gradient, axis=tuple(range(first, gradient.ndim - 1)))
    return total.reshape(parameter.shape[0], -1).astype(parameter.dtype)
