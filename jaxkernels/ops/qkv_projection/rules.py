"""The primitive of projections to queries, keys and values, and its derivatives.

Its three kernels are products of x, w and the parts. The derivatives of each are the other two, beside rotations: so
every order of derivative in both modes runs on the kernels. A rotation's transpose turns back, by -sin.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad

from jaxkernels.core import _jax
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.reference_rules import differentiate
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.qkv_projection.reference import compute, rotate
from jaxkernels.ops.qkv_projection.spec import PARTS, QkvProjectionSpec

__all__ = ["qkv_projection_op"]


class _QkvProjectionOp(KernelOp):
    def batch(
        self, args: Sequence[Any], dims: Sequence[int | None], *, static: QkvProjectionSpec, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """A mapped axis becomes the first dimension of the rows, unless each element has its own weight or angles."""
        at, xs = static.named(self.name, dims), static.named(self.name, args)
        rows = [name for name in xs if name in ("x", *PARTS)]
        if static.wanted == "w" or any(at[name] is not None for name in xs.keys() - {*rows}):
            f = functools.partial(_plain, static=static, backend=params["backend"])
            outs = jax.vmap(f, in_axes=tuple(dims), out_axes=0)(*args)
            return outs, [0] * len(outs)
        num = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        for name in rows:
            x, d = xs[name], at[name]
            xs[name] = jnp.broadcast_to(x, (num, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        outs = self.bind(static, xs, **params)
        return outs, [0] * len(outs)


qkv_projection_op = _QkvProjectionOp("qkv_projection", "jk_qkv_projection", multiple_results=True)


def _plain(*xs: jax.Array, static: QkvProjectionSpec, backend: str | None) -> list[jax.Array]:
    """The kernel as a plain product, of operands of any types."""
    typed = static.typed(qkv_projection_op.name, [ArrayType.of(x) for x in xs])
    with usual_promotion():
        return compute(typed, *xs, backend=backend)


def _jvp(
    primals: Any, tangents: Any, *, static: QkvProjectionSpec, backend: str | None, config: Any
) -> tuple[list[Any], list[Any]]:
    operands = static.named(qkv_projection_op.name, primals)
    bind = functools.partial(qkv_projection_op.bind, static, backend=backend)
    outs = qkv_projection_op.bind(static, operands, backend=backend, config=config)
    dots = static.named(qkv_projection_op.name, tangents)
    moving = {name: dot for name, dot in dots.items() if type(dot) is not ad.Zero}
    terms = [bind(operands | {name: moving[name]}) for name in ("x", "w") if name in moving]
    if moving.keys() & {*PARTS}:  # Linear in all three together.
        terms.append(bind(operands | {name: ad.instantiate_zeros(dots[name]) for name in PARTS}))
    if moving.keys() & {"cos", "sin"}:
        zero = lambda x: ad.Zero(jax.typeof(x).to_tangent_aval())
        angles = [dots[name] if name in ("cos", "sin") else zero(x) for name, x in operands.items()]
        terms.append(differentiate(functools.partial(_plain, static=static, backend=backend), primals, angles))
    return outs, [functools.reduce(jnp.add, of_result) for of_result in zip(*terms)]


def _transpose(
    cts: Any, *args: Any, static: QkvProjectionSpec, backend: str | None, config: Any
) -> list[jax.Array | None]:
    """The product of the cotangents and of what is not transposed."""
    operands = static.named(qkv_projection_op.name, args)
    moving = [name for name, x in operands.items() if ad.is_undefined_primal(x)]
    given = {name: x for name, x in operands.items() if name not in moving}
    given |= dict(zip(static.outputs(qkv_projection_op.name), map(ad.instantiate_zeros, cts)))
    if static.pairs is not None:
        for name in ("query", "key"):
            with usual_promotion():
                given[name] = rotate(given[name], given["cos"], -given["sin"], static.head_dim, static.pairs)
    spec = static.of("x" if moving == ["x"] else "w" if moving == ["w"] else "parts")
    outs = qkv_projection_op.bind(spec, given, backend=backend)
    found = dict(zip(spec.outputs(qkv_projection_op.name), outs))
    return [found.get(name) if name in moving else None for name in operands]


def _taylor(primals: Any, series: Any, *, static: QkvProjectionSpec, backend: str | None, config: Any) -> Any:
    return _jax.taylor(functools.partial(_plain, static=static, backend=backend), primals, series)


ad.primitive_jvps[qkv_projection_op.primitive] = _jvp
ad.primitive_transposes[qkv_projection_op.primitive] = _transpose
_jax.register_taylor(qkv_projection_op.primitive, _taylor)
