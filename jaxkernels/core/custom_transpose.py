"""Linear functions with a transpose of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, mlir

from jaxkernels.core import _jax
from jaxkernels.core.reference_rules import differentiate

__all__ = ["linear_call"]

#: Of constants and tangents, or of constants and cotangents, a list of results.
Function = Callable[..., list[jax.Array]]


def linear_call(
    fun: Function,
    transpose: Function,
    constants: Sequence[jax.Array],
    tangents: Sequence[jax.Array],
    *,
    like: Sequence[jax.Array],
) -> list[jax.Array]:
    """Returns fun(*constants, *tangents), which is linear in the tangents and returns arrays with the types of `like`.

    Its transpose is transpose(*constants, *cotangents): one cotangent for each tangent. Unlike
    `jax.custom_derivatives.linear_call`, it is differentiable in the constants, as `fun` is. `jax.vmap` maps both
    functions. Neither may close over traced values.
    """
    types = tuple((x.shape, jnp.dtype(x.dtype)) for x in like)
    params = dict(fun=fun, transpose=transpose, num_constants=len(constants), types=types)
    return _primitive.bind(*constants, *tangents, **params)


def _impl(*xs: jax.Array, fun: Function, **_: Any) -> list[jax.Array]:
    return fun(*xs)


def _abstract_eval(*_: Any, types: Any, **__: Any) -> list[Any]:
    return [ShapedArray(shape, dtype) for shape, dtype in types]


def _jvp(primals: Any, tangents: Any, *, fun: Function, **params: Any) -> Any:
    outs = _primitive.bind(*primals, fun=fun, **params)
    return outs, differentiate(fun, primals, tangents)


def _transpose(
    cotangents: Any, *xs: Any, fun: Function, transpose: Function, num_constants: int, types: Any
) -> list[Any]:
    constants, tangents = xs[:num_constants], xs[num_constants:]
    filled = [jnp.zeros(shape, dtype) if type(ct) is ad.Zero else ct for ct, (shape, dtype) in zip(cotangents, types)]
    cts = transpose(*constants, *filled)
    is_wanted = [ad.is_undefined_primal(x) for x in tangents]
    return [None] * num_constants + [ct if wanted else None for ct, wanted in zip(cts, is_wanted)]


def _batch(
    xs: Sequence[Any], dims: Sequence[int | None], *, fun: Function, transpose: Function, num_constants: int, types: Any
) -> Any:
    size = next(x.shape[d] for x, d in zip(xs, dims) if d is not None)
    constant_dims, tangent_dims = tuple(dims[:num_constants]), dims[num_constants:]

    def mapped_transpose(*xs: jax.Array) -> list[jax.Array]:
        cts = jax.vmap(transpose, in_axes=(*constant_dims, *(0,) * len(types)))(*xs)
        return [ct.sum(0) if d is None else jnp.moveaxis(ct, 0, d) for ct, d in zip(cts, tangent_dims)]

    types = tuple(((size, *shape), dtype) for shape, dtype in types)
    mapped = dict(fun=jax.vmap(fun, in_axes=tuple(dims)), transpose=mapped_transpose, num_constants=num_constants)
    return _primitive.bind(*xs, **mapped, types=types), [0] * len(types)


_primitive = jax.extend.core.Primitive("linear_call_with_transpose")
_primitive.multiple_results = True
_primitive.def_impl(_impl)
_primitive.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
_jax.register_batcher(_primitive, _batch)
mlir.register_lowering(_primitive, mlir.lower_fun(_impl, multiple_results=True))
