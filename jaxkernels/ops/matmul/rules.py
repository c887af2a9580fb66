"""The primitives of matrix products, and their derivatives.

`dot_general_op` is the product times a constant, bilinear in its operands. `matmul_op` adds the epilogue
(bias, activation, multiplier, residual); its derivative is written with plain products, so that every order of
derivative in both modes follows from the two rules of the bilinear primitive.

`pair_op` is two products of one lhs, whose transpose adds the second product to the first one in its epilogue.
`gated_tangent_op` is the tangent of (activation(preactivation) * multiplier) @ rhs by the pre-activation and the
multiplier. Its transpose is one product, whose epilogue makes both gradients.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, mlir

from jaxkernels.core import _jax
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.reference_rules import differentiate
from jaxkernels.core.sharding import Assignment
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.epilogue import apply_epilogue
from jaxkernels.ops.matmul.spec import DimensionNumbers, GatedTangentSpec, MatmulSpec, PairSpec, free_dims

__all__ = ["dot_general_op", "gated_tangent_op", "matmul_op", "pair_op"]


class _MatmulOp(KernelOp):
    """An operand of the plain product may be a Python scalar: JAX passes literals of a program to the rules as such."""

    keeps_weak_types = True

    def local(self, spec: MatmulSpec, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        if not spec.fused or not assignment.sums[0]:
            return super().local(spec, assignment, **params)
        # The shards' partial products must be added up before the activation sees them.
        return _unfused(spec, params, add_up=lambda out: jax.lax.psum(out, assignment.sums[0]))

    def batch(
        self, args: Sequence[jax.Array], dims: Sequence[int | None], *, static: MatmulSpec, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """A mapped axis becomes a batch dimension or a free dimension of the product."""
        xs: dict[str, Any] = static.named(self.name, args)
        at: dict[str, Any] = static.named(self.name, dims)
        if static.fused and (at["lhs"] is None or at["rhs"] is not None or at.get("bias") is not None):
            # A weight or a bias of its own for each element: the kernels fuse one bias for all.
            outs = jax.vmap(_unfused(static, params), in_axes=tuple(dims), out_axes=0)(*args)
            return outs, [0] * len(outs)
        ndims = np.ndim(xs["lhs"]), np.ndim(xs["rhs"])
        numbers, out_dim = _batched(static.dimension_numbers, *ndims, at["lhs"], at["rhs"])
        spec = dataclasses.replace(static, dimension_numbers=numbers)
        for name in ("multiplier", "residual", "preactivation"):
            if name in xs and at[name] is None:
                x, size = jnp.expand_dims(xs[name], out_dim), xs["lhs"].shape[at["lhs"]]
                xs[name] = jnp.broadcast_to(x, (*x.shape[:out_dim], size, *x.shape[out_dim + 1 :]))
            elif name in xs:
                xs[name] = jnp.moveaxis(xs[name], at[name], out_dim)
        outs = self._list(self.bind(spec, xs, **params))
        return outs, [out_dim] * len(outs)


dot_general_op = _MatmulOp("matmul", "jk_dot_general", multiple_results=False)
matmul_op = _MatmulOp("matmul", "jk_matmul", multiple_results=True)


# Rules of the plain product.


def _cotangent(
    ct: jax.Array,
    mine: Any,
    other: jax.Array,
    *,
    mine_k: tuple[int, ...],
    mine_b: tuple[int, ...],
    other_k: tuple[int, ...],
    other_b: tuple[int, ...],
    ct_other: tuple[int, ...],
    static: MatmulSpec,
    backend: str | None,
    config: Any,
) -> jax.Array:
    """The cotangent of one operand: ct contracted with the other over the other's free dimensions.

    It is a product of other sizes than `config` was given for, and chooses its own.

    dot_general(ct, other) has the dimensions (batch, mine's free, k) and dot_general(other, ct) has
    (batch, k, mine's free): the order is taken that leaves the result in mine's own layout.
    """
    mine_free = free_dims(mine.aval.ndim, mine_k, mine_b)
    other_free = free_dims(np.ndim(other), other_k, other_b)
    ct_b = tuple(range(len(mine_b)))
    k = tuple(mine_k[i] for i in np.argsort(other_k, kind="stable"))  # as the other operand orders them
    order = (*mine_b, *k, *mine_free)
    if order == tuple(range(mine.aval.ndim)):
        operands, dims = dict(lhs=other, rhs=ct), ((other_free, ct_other), (other_b, ct_b))
        cotangent = "rhs"
    else:
        order = (*mine_b, *mine_free, *k)
        operands, dims = dict(lhs=ct, rhs=other), ((ct_other, other_free), (ct_b, other_b))
        cotangent = "lhs"
    spec = dataclasses.replace(static, dimension_numbers=dims, out_dtype=mine.aval.dtype, cotangent=None)
    types = [ArrayType.of(jax.typeof(operands[name])) for name in ("lhs", "rhs")]
    if spec.typed(dot_general_op.name, types).has_odd_rows(cotangent):
        spec = dataclasses.replace(spec, cotangent=cotangent)
    return jnp.transpose(dot_general_op.bind(spec, operands, backend=backend), np.argsort(order).tolist())


def _transpose_lhs(ct: jax.Array, lhs: Any, rhs: jax.Array, *, static: MatmulSpec, **params: Any) -> jax.Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = static.dimension_numbers
    num_n = np.ndim(rhs) - len(rhs_k) - len(rhs_b)
    return _cotangent(
        ct, lhs, rhs, mine_k=lhs_k, mine_b=lhs_b, other_k=rhs_k, other_b=rhs_b,
        ct_other=tuple(range(np.ndim(ct) - num_n, np.ndim(ct))), static=static, **params,
    )  # fmt: skip


def _transpose_rhs(ct: jax.Array, lhs: jax.Array, rhs: Any, *, static: MatmulSpec, **params: Any) -> jax.Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = static.dimension_numbers
    num_m = np.ndim(lhs) - len(lhs_k) - len(lhs_b)
    return _cotangent(
        ct, rhs, lhs, mine_k=rhs_k, mine_b=rhs_b, other_k=lhs_k, other_b=lhs_b,
        ct_other=tuple(range(len(lhs_b), len(lhs_b) + num_m)), static=static, **params,
    )  # fmt: skip


ad.defbilinear(dot_general_op.primitive, _transpose_lhs, _transpose_rhs)
_jax.register_bilinear_taylor(dot_general_op.primitive)


def _batched(
    dimension_numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int, lhs_dim: int | None, rhs_dim: int | None
) -> tuple[DimensionNumbers, int]:
    """The dimension numbers with a mapped dimension added, and its place in the result.

    Mapped in both operands it becomes a batch dimension; in one, a free dimension of that operand.
    The ranks include the mapped dimensions.
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
    lhs_k, lhs_b = _shifted(lhs_k, lhs_dim), _shifted(lhs_b, lhs_dim)
    rhs_k, rhs_b = _shifted(rhs_k, rhs_dim), _shifted(rhs_b, rhs_dim)
    if lhs_dim is not None and rhs_dim is not None:
        return ((lhs_k, rhs_k), ((lhs_dim, *lhs_b), (rhs_dim, *rhs_b))), 0
    numbers = ((lhs_k, rhs_k), (lhs_b, rhs_b))
    lhs_free = free_dims(lhs_ndim, lhs_k, lhs_b)
    if lhs_dim is not None:
        return numbers, len(lhs_b) + lhs_free.index(lhs_dim)
    rhs_free = free_dims(rhs_ndim, rhs_k, rhs_b)
    return numbers, len(lhs_b) + len(lhs_free) + rhs_free.index(rhs_dim)


def _shifted(dims: tuple[int, ...], inserted: int | None) -> tuple[int, ...]:
    """The dimensions as they are numbered after one was inserted."""
    return dims if inserted is None else tuple(d + (d >= inserted) for d in dims)


# Rules of the product with an epilogue.


def _unfused(
    spec: MatmulSpec, params: dict[str, Any], add_up: Callable[[jax.Array], jax.Array] = lambda out: out
) -> Callable[..., list[jax.Array]]:
    """The fused function as a plain product, summed over shards by `add_up`, followed by jnp operations."""

    def product_then_epilogue(*xs: jax.Array) -> list[jax.Array]:
        operands = spec.named(matmul_op.name, xs)
        out = add_up(dot_general_op.bind(spec.product, operands, **params))
        typed = spec.typed(matmul_op.name, [ArrayType.of(x) for x in xs])
        with usual_promotion():
            return apply_epilogue(typed, out, operands)

    return product_then_epilogue


def _fused_jvp(primals: Any, tangents: Any, *, static: MatmulSpec, **params: Any) -> tuple[list, list]:
    if static.is_gradient:
        outs = matmul_op.primitive.bind(*primals, static=static, **params)
        return outs, differentiate(_unfused(static, dict(backend=params["backend"], config=None)), primals, tangents)
    operands, dots = static.named(matmul_op.name, primals), static.named(matmul_op.name, tangents)
    moving = {name: dot for name, dot in dots.items() if type(dot) is not ad.Zero}
    needs_preactivation = static.activation is not None or "multiplier" in moving
    saving = dataclasses.replace(static, save_preactivation=static.save_preactivation or needs_preactivation)
    outs = matmul_op.bind(saving, operands, **params)
    out, preactivation = outs[0], outs[-1]
    rest = dataclasses.replace(static, bias=None, residual=None, save_preactivation=False)
    if static.activation is not None and static.residual is None:
        multiplier = [operands["multiplier"]] if "multiplier" in operands else []
        out = _activated_p.bind(*_jax.match_varying_axes(out, preactivation, *multiplier), static=rest.untyped())

    terms = [
        dot_general_op.bind(static.product, operands | {name: moving[name]}, **params)
        for name in ("lhs", "rhs")
        if name in moving
    ]
    if "bias" in moving:
        terms.append(jnp.broadcast_to(moving["bias"].astype(out.dtype), out.shape))
    dpre = functools.reduce(jnp.add, terms) if terms else None

    given = operands | {"preactivation": preactivation}
    varying = {} if dpre is None else {"preactivation": dpre}
    if "multiplier" in moving:
        varying["multiplier"] = moving["multiplier"]

    def activate_and_multiply(arrays: dict[str, jax.Array]) -> jax.Array:
        named = given | arrays
        return apply_epilogue(rest, named["preactivation"], named)[0]

    dout = dpre
    if varying and rest.fused:
        # The checkpoint makes the backward pass keep the pre-activation and the multiplier, and nothing else.
        function = jax.checkpoint(activate_and_multiply, prevent_cse=False)
        _, dout = jax.jvp(function, ({name: given[name] for name in varying},), (varying,))
    if "residual" in moving:
        dresidual = moving["residual"].astype(out.dtype)
        dout = dresidual if dout is None else dout + dresidual

    zero = ad.Zero(jax.typeof(out).to_tangent_aval())
    tangent = lambda t: zero if t is None else t
    if static.save_preactivation:
        return [out, preactivation], [tangent(dout), tangent(dpre)]
    return [out], [tangent(dout)]


def _activated(out: jax.Array, *_: jax.Array, static: MatmulSpec) -> jax.Array:
    return out


def _activate(preactivation: jax.Array, *multiplier: jax.Array, static: MatmulSpec) -> jax.Array:
    with usual_promotion():
        return apply_epilogue(static, preactivation, dict(zip(["multiplier"], multiplier)))[0]


def _elementwise_primitive(name: str, function: Callable[..., jax.Array]) -> Any:
    """A primitive of arrays of one shape, with the rules of a function that is elementwise."""
    primitive = jax.extend.core.Primitive(name)
    _jax.evaluate_eagerly(primitive)
    primitive.def_abstract_eval(lambda x, *_, static: x)

    def lower(ctx: mlir.LoweringRuleContext, *values: Any, static: MatmulSpec) -> Any:
        run = functools.partial(function, static=static)
        return _jax.lower_traced(ctx, run, values, multiple_results=False)

    def jvp(primals: Any, tangents: Any, *, static: MatmulSpec) -> Any:
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return jax.jvp(functools.partial(function, static=static), tuple(primals), tuple(tangents))

    def batch(args: Sequence[Any], dims: Sequence[int | None], *, static: MatmulSpec) -> tuple[list, list]:
        num = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        spread = lambda x, d: jnp.broadcast_to(x, (num, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        return [primitive.bind(*map(spread, args, dims), static=static)], [0]

    def taylor(primals: Any, series: Any, *, static: MatmulSpec) -> Any:
        (out,), (terms,) = _jax.taylor(lambda *xs: [function(*xs, static=static)], primals, series)
        return out, terms

    mlir.register_lowering(primitive, lower)
    ad.primitive_jvps[primitive] = jvp
    _jax.register_batcher(primitive, batch)
    _jax.register_taylor(primitive, taylor)
    return primitive


#: (out, preactivation[, multiplier]) -> out. It computes nothing. A checkpoint that keeps the pre-activation does not
#: keep `out`, too: the backward pass computes it from the other operands by `_activate_p`.
_activated_p = _elementwise_primitive("activated", _activated)
_activate_p = _elementwise_primitive("activate", _activate)
_jax.register_recomputation(_activated_p, _activate_p)


def _fused_taylor(primals: Any, series: Any, *, static: MatmulSpec, backend: str | None, config: Any) -> Any:
    return _jax.taylor(_unfused(static, dict(backend=backend, config=config)), primals, series)


ad.primitive_jvps[matmul_op.primitive] = _fused_jvp
_jax.register_taylor(matmul_op.primitive, _fused_taylor)


# Linear parts of a gated layer: no kernels of their own, but transposes with fused epilogues.


class _LinearOp(KernelOp):
    """Plain JAX of products, linear in some operands.

    Args:
      function: operands -> results, with the primitive's parameters as keywords.
      weights: the operands that are matrices. Others have free dimensions before the contracted one.
    """

    def __init__(self, name: str, function: Callable[..., list[jax.Array]], weights: frozenset[str]):
        super().__init__("matmul", name, multiple_results=True)
        self.function, self.weights = function, weights
        ad.primitive_jvps[self.primitive] = self._jvp
        _jax.register_taylor(self.primitive, self._taylor)

    def _lower(self, ctx: mlir.LoweringRuleContext, *values: Any, platform: str, **params: Any) -> Any:
        return _jax.lower_traced(ctx, functools.partial(self.function, **params), values, multiple_results=True)

    def batch(
        self, args: Sequence[jax.Array], dims: Sequence[int | None], *, static: Any, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """A mapped axis becomes a free dimension, if all have the same weights."""
        at, xs = static.named(self.name, dims), static.named(self.name, args)
        if any(at[name] is not None for name in self.weights):
            outs = jax.vmap(functools.partial(self.function, static=static, **params), in_axes=tuple(dims))(*args)
            return outs, [0] * len(outs)
        num = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        for name in xs.keys() - self.weights:
            x, d = xs[name], at[name]
            xs[name] = jnp.broadcast_to(x, (num, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
        ((lhs_k,), rhs_k), batch = static.dimension_numbers
        spec = dataclasses.replace(static, dimension_numbers=(((lhs_k + 1,), rhs_k), batch))
        outs = self.bind(spec, xs, **params)
        return outs, [0] * len(outs)

    def _jvp(self, primals: Any, tangents: Any, **params: Any) -> Any:
        outs = self.primitive.bind(*primals, **params)
        return outs, differentiate(functools.partial(self.function, **params), primals, tangents)

    def _taylor(self, primals: Any, series: Any, **params: Any) -> Any:
        return _jax.taylor(functools.partial(self.function, **params), primals, series)


def _gated_tangent(*xs: jax.Array, static: GatedTangentSpec, **params: Any) -> list[jax.Array]:
    named = static.named(gated_tangent_op.name, xs)
    point = named["at_preactivation"], named["at_multiplier"]
    gate = functools.partial(_activate, static=static.gate)
    h_dot = jax.jvp(gate, point, (named["lhs"], named["multiplier_dot"]))[1]
    return [dot_general_op.bind(static.plain, dict(lhs=h_dot, rhs=named["rhs"]), **params)]


def _pair(*xs: jax.Array, static: PairSpec, **params: Any) -> list[jax.Array]:
    lhs, *weights = xs
    return [dot_general_op.bind(static.plain, dict(lhs=lhs, rhs=rhs), **params) for rhs in weights]


gated_tangent_op = _LinearOp("jk_gated_tangent", _gated_tangent, frozenset({"rhs"}))
pair_op = _LinearOp("jk_pair_of_products", _pair, frozenset({"rhs", "other_rhs"}))


def _by_transpose(ct: jax.Array) -> DimensionNumbers:
    """The dimension numbers of a cotangent times a transposed matrix."""
    return ((np.ndim(ct) - 1,), (1,)), ((), ())


def _gated_tangent_transpose(
    cts: Any, lhs: Any, rhs: jax.Array, multiplier_dot: Any, preactivation: jax.Array, multiplier: jax.Array,
    *, static: GatedTangentSpec, backend: str | None, config: Any,
) -> Any:  # fmt: skip
    (ct,) = cts
    spec = dataclasses.replace(
        static.gate,
        dimension_numbers=_by_transpose(ct),
        out_dtype=preactivation.dtype,
        preactivation=ArrayType.of(preactivation),
    )
    operands = dict(lhs=ct, rhs=rhs, preactivation=preactivation, multiplier=multiplier)
    gradients = matmul_op.bind(spec, operands, backend=backend)
    # One of the tangents may be a constant: zeros.
    dlhs, dmultiplier = (
        gradient.astype(x.aval.dtype) if ad.is_undefined_primal(x) else None
        for gradient, x in zip(gradients, (lhs, multiplier_dot))
    )
    return dlhs, None, dmultiplier, None, None


def _pair_transpose(
    cts: Any, lhs: Any, *weights: jax.Array, static: PairSpec, backend: str | None, config: Any
) -> Any:  # fmt: skip
    assert ad.is_undefined_primal(lhs)
    total = None
    for ct, rhs in zip(cts, weights):
        if type(ct) is ad.Zero:
            continue
        plain = dataclasses.replace(static.plain, dimension_numbers=_by_transpose(ct), out_dtype=lhs.aval.dtype)
        if total is None:
            total = dot_general_op.bind(plain, dict(lhs=ct, rhs=rhs), backend=backend)
        else:
            spec = dataclasses.replace(plain, residual=ArrayType.of(total), adds_apart=True)
            (total,) = matmul_op.bind(spec, dict(lhs=ct, rhs=rhs, residual=total), backend=backend)
    return total, None, None


ad.primitive_transposes[gated_tangent_op.primitive] = _gated_tangent_transpose
ad.primitive_transposes[pair_op.primitive] = _pair_transpose
