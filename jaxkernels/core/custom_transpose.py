"""Linear functions with a transpose of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.interpreters import ad, batching, mlir

__all__ = ["linear_call"]

#: Of constants and tangents, or of constants and cotangents, a list of results.
Function = Callable[..., list[jax.Array]]


def linear_call(
    fun: Function, transpose: Function, constants: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> list[jax.Array]:
    """Returns fun(*constants, *tangents), which is linear in the tangents.

    Its transpose is transpose(*constants, *cotangents): one cotangent for each tangent. Unlike
    `jax.custom_derivatives.linear_call`, it is differentiable in the constants, as `fun` is. `jax.vmap` maps both
    functions. Neither may close over traced values.
    """
    outs = jax.eval_shape(fun, *constants, *tangents)
    types = tuple((out.shape, jnp.dtype(out.dtype)) for out in outs)
    return _primitive.bind(
        *constants, *tangents, fun=fun, transpose=transpose, num_constants=len(constants), types=types
    )


def _impl(*xs: jax.Array, fun: Function, **_: Any) -> list[jax.Array]:
    return fun(*xs)


def _abstract_eval(*_: Any, types: Any, **__: Any) -> list[Any]:
    return [ShapedArray(shape, dtype) for shape, dtype in types]


def _jvp(primals: Any, tangents: Any, *, fun: Function, **params: Any) -> Any:
    outs = _primitive.bind(*primals, fun=fun, **params)
    moving = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]

    def of_moving(*xs: jax.Array) -> list[jax.Array]:
        args = list(primals)
        for i, x in zip(moving, xs):
            args[i] = x
        return fun(*args)

    return outs, jax.jvp(of_moving, [primals[i] for i in moving], [tangents[i] for i in moving])[1]


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

    def mapped(*xs: jax.Array) -> list[jax.Array]:
        return jax.vmap(fun, in_axes=tuple(dims), axis_size=size)(*xs)

    def mapped_transpose(*xs: jax.Array) -> list[jax.Array]:
        cts = jax.vmap(transpose, in_axes=(*constant_dims, *(0,) * len(types)), axis_size=size)(*xs)
        return [ct.sum(0) if d is None else jnp.moveaxis(ct, 0, d) for ct, d in zip(cts, tangent_dims)]

    outs = linear_call(mapped, mapped_transpose, xs[:num_constants], xs[num_constants:])
    return outs, [0] * len(outs)


_primitive = jax.extend.core.Primitive("linear_call_with_transpose")
_primitive.multiple_results = True
_primitive.def_impl(_impl)
_primitive.def_abstract_eval(_abstract_eval)
ad.primitive_jvps[_primitive] = _jvp
ad.primitive_transposes[_primitive] = _transpose
batching.primitive_batchers[_primitive] = _batch
mlir.register_lowering(_primitive, mlir.lower_fun(_impl, multiple_results=True))
