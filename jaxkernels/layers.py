"""A loop over equal layers, as fast as the layers one by one.

`jax.lax.scan` keeps compile times short: XLA compiles one layer instead of all. But its gradient fills arrays for all
layers with zeros, and copies into them what each layer keeps for the backward pass. Where XLA lets a kernel write into
such an array, and the layer reads the result too, XLA of JAX 0.11 runs the kernel twice.

`scan_layers` has the same results. Its gradient allocates these arrays without filling them. A layer's kernels write
into them, and the layer's other kernels read from them. So XLA has nothing to copy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxkernels.core import _jax, hardware
from jaxkernels.core.custom_transpose import linear_call
from jaxkernels.ops.attention.rules import forward_op as attention_op
from jaxkernels.ops.matmul.rules import dot_general_op, matmul_op
from jaxkernels.ops.norm.rules import forward_op as norm_op
from jaxkernels.ops.qkv_projection.rules import qkv_projection_op

__all__ = ["scan_layers"]

_PRODUCTS = (dot_general_op.primitive, matmul_op.primitive)

#: The kernels whose results a layer may keep for its backward pass.
_KERNELS = (
    lax.dot_general_p, *_PRODUCTS, qkv_projection_op.primitive, attention_op.primitive, norm_op.primitive,
)  # fmt: skip

#: Equations whose inner program may hold the kernel that makes a result.
_CALLS = ("jit", "checkpoint", "remat2", "closed_call")

#: Equations whose result has the elements of their first operand, in the same order.
_VIEWS = ("activated", "name", "reshape", "squeeze")


def scan_layers(layer: Callable[[Any, Any], Any], x: Any, params: Any) -> Any:
    """Applies equal layers one after the other, like `jax.lax.scan(lambda x, p: (layer(x, p), None), x, params)[0]`.

    Its gradient needs less memory bandwidth than that of `jax.lax.scan`: kernels write what the backward pass needs
    where it is kept for all layers.

    Args:
      layer: a function of the stream and of one layer's parameters. It returns the next stream. It may close over
        arrays. To compute a part of it again in the backward pass, give `jax.checkpoint(layer, policy=...)`.
      x: the stream before the first layer: an array, or a pytree of arrays.
      params: a pytree of arrays, stacked over the layers in the first axis. Their gradients have the same dtypes. Cast
        them to the dtype of the products before: a cast inside of `layer` is kept for each layer.

    Returns:
      The stream after the last layer, with the shapes and dtypes of `x`.

    Raises:
      ValueError: `params` has no arrays, or their first axes differ.
      TypeError: `layer` returns another structure, shape or dtype than that of `x`.

    Differentiable any number of times in both modes, in `x`, `params` and what `layer` closes over. Forward mode
    computes the layers twice. Under `jax.vmap`, `jax.jit` and meshes with Auto axes it works like `jax.lax.scan`. It is
    `jax.lax.scan` inside `jax.shard_map`, on meshes with Explicit axes, and if `layer` names an axis (`jax.lax.psum`).
    So is its derivative if a layer keeps keys or, by the policy of its checkpoint, arrays in the host's memory.
    """
    x, params = jax.tree.map(jnp.asarray, (x, params))
    stream, stream_tree = jax.tree.flatten(x)
    stacked, params_tree = jax.tree.flatten(params)
    num_layers = _num_layers(params)
    if num_layers == 0:
        return x

    def flat(*xs: jax.Array) -> list[jax.Array]:
        out = layer(stream_tree.unflatten(xs[: len(stream)]), params_tree.unflatten(xs[len(stream) :]))
        return _checked(out, x)

    closed = jax.make_jaxpr(flat)(*stream, *(_at(leaf, 0) for leaf in stacked))
    program = _Program(closed.jaxpr, num_layers, len(stream), len(stacked))
    operands = (*stream, *stacked, *map(jnp.asarray, closed.consts))
    mesh = jax.sharding.get_abstract_mesh()
    if not (mesh.empty or mesh.are_all_axes_auto) or _jax.names_axes(closed.jaxpr):
        return stream_tree.unflatten(program.scan(*operands))
    return stream_tree.unflatten(program(*operands))


@dataclasses.dataclass(frozen=True, eq=False)
class _Program:
    """The loop. Its operands are the leaves of the stream and of the parameters, and what the layer closes over.

    Attributes:
      jaxpr: one layer. Its constants are the arrays that the layer closes over.
      num_layers, num_stream, num_stacked: how many layers there are, and leaves of the stream and of the parameters.
    """

    jaxpr: Jaxpr
    num_layers: int
    num_stream: int
    num_stacked: int

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        call = jax.custom_jvp(self.scan)
        call.defjvp(self._jvp, symbolic_zeros=True)
        return call(*operands)

    def scan(self, *operands: jax.Array) -> list[jax.Array]:
        """The loop in plain JAX."""
        stream, stacked, closed_over = self.parts(operands)
        body = lambda stream, one: (self.layer(*stream, *one, *closed_over), None)
        return lax.scan(body, stream, stacked, length=self.num_layers)[0]

    def layer(self, *one: Any) -> list[Any]:
        """One layer, of its operands."""
        stream, params, closed_over = self.parts(one)
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, closed_over))(*stream, *params)

    def one(self, operands: Sequence[Any], i: Any) -> list[Any]:
        """The operands of layer `i`."""
        stream, stacked, closed_over = self.parts(operands)
        return [*stream, *(_at(x, i) for x in stacked), *closed_over]

    def parts(self, operands: Sequence[Any]) -> list[list[Any]]:
        return _split(operands, self.num_stream, self.num_stacked)

    def _jvp(self, primals: Sequence[Any], tangents: Sequence[Any]) -> Any:
        operands = [jnp.asarray(x) for x in primals]
        is_inexact = [jnp.issubdtype(x.dtype, jnp.inexact) for x in operands]
        moves = [can and not isinstance(t, SymbolicZero) for t, can in zip(tangents, is_inexact)]
        if not any(moves):
            outs = self.scan(*operands)
            return outs, [_no_tangent(out) for out in outs]
        moves[: self.num_stream] = is_inexact[: self.num_stream]  # From the second layer on, the stream moves.
        filled = [jnp.zeros_like(x) if isinstance(t, SymbolicZero) else t for x, t in zip(operands, tangents)]
        moving_tangents = list(compress(filled, moves))
        loop = _Differentiated(self, moves, operands)
        if loop.is_plain:
            outs, out_tangents = self.scan(*operands), loop.tangents(*operands, *moving_tangents)
        else:
            outs, kept = loop.forward(operands)
            given, like = [*operands, *kept], list(compress(outs, moves))
            out_tangents = linear_call(loop.tangents, loop.transpose, given, moving_tangents, like=like)
        rest = iter(out_tangents)
        return outs, [next(rest) if moving else _no_tangent(out) for out, moving in zip(outs, moves)]


class _Differentiated:
    """A loop whose layers keep arrays for the backward pass, and its derivatives in the operands that move.

    One layer keeps the leaves of the function that `jax.vjp` returns. They are literals, or arrays of three kinds:
    arrays that the layer computes, which the loop stacks; the layer's parameters, which are stacked already; and
    arrays that are the same for all layers.

    Attributes:
      is_plain: whether the arrays for all layers must be those of `jax.lax.scan`, because a layer keeps keys, or arrays
        in the host's memory.
    """

    def __init__(self, program: _Program, moves: Sequence[bool], operands: Sequence[jax.Array]):
        self._program, self._moves, self._num_operands = program, moves, len(operands)
        self._stream_moves, self._stacked_moves, self._closed_over_moves = program.parts(moves)
        closed = jax.make_jaxpr(self._layer)(*program.one(operands, 0))
        self._jaxpr, self._consts = closed.jaxpr, closed.consts
        root, stacked = _roots(self._jaxpr), program.parts(self._jaxpr.invars)[1]
        varying = _depend_on(self._jaxpr, self._jaxpr.invars[: program.num_stream + program.num_stacked])
        self._slots: dict[Any, int] = {}
        self._fixed: dict[Any, int] = {}

        def place(v: Any) -> tuple[str, int]:
            v = root(v)
            if v in stacked:
                return "parameter", stacked.index(v)
            kind, numbers = ("stack", self._slots) if v in varying else ("fixed", self._fixed)
            return kind, numbers.setdefault(v, len(numbers))

        self._leaves = self._jaxpr.outvars[program.num_stream :]
        self._places = [(*place(v), v.aval) for v in self._leaves if not isinstance(v, Literal)]
        same_for_all = [eqn for eqn in self._jaxpr.eqns if eqn.outvars and varying.isdisjoint(eqn.outvars)]
        self._fixed_jaxpr = self._jaxpr.replace(eqns=same_for_all, outvars=list(self._fixed))
        self.is_plain = any(
            v.aval.memory_space != jax.memory.Space.Device or jnp.issubdtype(v.aval.dtype, jax.dtypes.extended)
            for v in self._slots
        )

    def _layer(self, *xs: jax.Array) -> list[Any]:
        """One layer: the next stream, and the leaves of its pullback to the operands that move."""

        def of_moving(*moving: jax.Array) -> Any:
            outs = self._program.layer(*_replaced(xs, self._moves, moving))
            return list(compress(outs, self._stream_moves)), outs

        _, pullback, outs = jax.vjp(of_moving, *compress(xs, self._moves), has_aux=True)
        leaves, self._pullback = jax.tree.flatten(pullback)
        return [*outs, *leaves]

    def forward(self, operands: Sequence[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns the stream after the last layer, and what the backward pass needs beside the operands."""
        program, num_layers = self._program, self._program.num_layers
        stream, stacked, closed_over = program.parts(operands)
        # A layer writes the stream where the next layer keeps it, if that keeps it.
        slots = [self._slots.get(v) for v in self._jaxpr.invars[: program.num_stream]]

        def body(i: jax.Array, carry: Any) -> Any:
            stream, stacks = carry
            kept = _Kept(stacks, i)
            stream = [x if k is None else _Slice(kept, k, old.shape) for x, old, k in zip(stream, operands, slots)]
            one = [*stream, *_slices(stacked, i), *closed_over]
            outs = _evaluate(self._jaxpr, self._consts, one, self._slots, kept)
            for out, k in zip(outs, slots):
                if k is not None:
                    kept.write(k, _read(out), i + 1)
            return [_read(out) if k is None else () for out, k in zip(outs, slots)], kept.stacks

        stacks = [
            _jax.uninitialized((num_layers + (k in slots), *v.aval.shape), v.aval.dtype) for v, k in self._slots.items()
        ]
        start = _Kept(stacks, jnp.int32(0))
        for x, k in zip(stream, slots):
            if k is not None:
                start.write(k, x, 0)
        carry = [x if k is None else () for x, k in zip(stream, slots)], start.stacks
        outs, stacks = lax.fori_loop(0, num_layers, body, carry)
        outs = [out if k is None else stacks[k][num_layers] for out, k in zip(outs, slots)]
        fixed = jaxpr_as_fun(ClosedJaxpr(self._fixed_jaxpr, self._consts))(*program.one(operands, 0))
        return outs, [*stacks, *fixed]

    def tangents(self, *xs: jax.Array) -> list[jax.Array]:
        """The tangents of the stream after the last layer, from operands, what is kept, and moving tangents."""
        operands, tangents = xs[: self._num_operands], xs[len(xs) - sum(self._moves) :]

        def of_moving(*moving: jax.Array) -> list[jax.Array]:
            return list(compress(self._program.scan(*_replaced(operands, self._moves, moving)), self._stream_moves))

        return jax.jvp(of_moving, list(compress(operands, self._moves)), list(tangents))[1]

    def transpose(self, *xs: jax.Array) -> list[jax.Array]:
        """The cotangents of moving operands, from operands, what is kept, and cotangents of the stream."""
        operands, stacks, fixed, cotangents = _split(xs, self._num_operands, len(self._slots), len(self._fixed))
        _, stacked, closed_over = self._program.parts(operands)
        moving_stacked = list(compress(stacked, self._stacked_moves))
        moving_closed_over = list(compress(closed_over, self._closed_over_moves))
        num_layers, num_stream, num_stacked = self._program.num_layers, len(cotangents), len(moving_stacked)
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        closed = jax.make_jaxpr(self._pull_back)([like(aval) for *_, aval in self._places], list(map(like, cotangents)))
        # A product writes a gradient of the parameters where the gradients of all layers are.
        root = _roots(closed.jaxpr)
        results = [root(v) for v in closed.jaxpr.outvars]
        of_stacked = results[num_stream : num_stream + num_stacked]
        slots = {v: k for k, v in enumerate(of_stacked) if _is_computed(closed.jaxpr, v)}

        def body(step: jax.Array, carry: Any) -> Any:
            cotangents, gradients, sums = carry
            i = num_layers - 1 - step
            here = dict(parameter=_slices(stacked, i), stack=_slices(stacks, i), fixed=fixed)
            leaves = [_reshaped(here[kind][what], aval) for kind, what, aval in self._places]
            kept = _Kept(gradients, i)
            outs = _evaluate(closed.jaxpr, closed.consts, [*leaves, *cotangents], slots, kept)
            cotangents, of_one, of_closed_over = _split(outs, num_stream, num_stacked)
            for k, (v, ct) in enumerate(zip(of_stacked, of_one)):
                if not (_is_computed(closed.jaxpr, v) and slots[v] == k):
                    kept.write(k, _read(ct), i)
            return list(map(_read, cotangents)), kept.stacks, [x + _read(ct) for x, ct in zip(sums, of_closed_over)]

        gradients = [_jax.uninitialized(x.shape, x.dtype) for x in moving_stacked]
        start = list(cotangents), gradients, [jnp.zeros_like(x) for x in moving_closed_over]
        cotangents, gradients, sums = lax.fori_loop(0, num_layers, body, start)
        return [*cotangents, *gradients, *sums]

    def _pull_back(self, leaves: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> Any:
        rest = iter(leaves)
        every = [v.val if isinstance(v, Literal) else next(rest) for v in self._leaves]
        return self._pullback.unflatten(every)(list(cotangents))


class _Kept:
    """Arrays for all layers while layer `i` is computed."""

    def __init__(self, stacks: Sequence[jax.Array], i: jax.Array):
        self.stacks, self.i = [*stacks], i

    def write(self, k: int, x: jax.Array, i: Any) -> None:
        """Writes what layer `i` keeps into array `k`."""
        x = x.reshape(self.stacks[k].shape[1:])
        self.stacks[k] = lax.dynamic_update_index_in_dim(self.stacks[k], x, i, 0)


@dataclasses.dataclass(frozen=True)
class _Slice:
    """What this layer has in one array for all layers, in the shape that its readers expect.

    Attributes:
      value: the same as an array of its own, if this layer computes it.
    """

    kept: _Kept
    k: int
    shape: tuple[int, ...]
    value: jax.Array | None = None

    def read(self) -> jax.Array:
        x = _at(self.kept.stacks[self.k], self.kept.i).reshape(self.shape)
        return x if self.value is None else _same_p.bind(self.value.reshape(self.shape), x)


def _lower_same(ctx: mlir.LoweringRuleContext, value: Any, x: Any) -> Any:
    """A kernel's result, or the slice where it is kept, which is the same.

    On Hopper, kernels read and write slices. Other chips' kernels are Triton's, and XLA would copy the slice.
    """
    return [x if hardware.cuda_target(_jax.devices_during_lowering(ctx)).is_hopper else value]


_same_p = jax.extend.core.Primitive("same_as_slice")
_same_p.def_impl(lambda value, x: value)
_same_p.def_abstract_eval(lambda value, x: value)
ad.primitive_jvps[_same_p] = lambda primals, tangents: (_same_p.bind(*primals), tangents[0])
batching.primitive_batchers[_same_p] = lambda args, dims: (args[0], dims[0])
mlir.register_lowering(_same_p, lambda ctx, value, x: [value])
mlir.register_lowering(_same_p, _lower_same, platform="cuda")


def _read(x: Any) -> Any:
    return x.read() if isinstance(x, _Slice) else x


def _evaluate(
    jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any], slots: Mapping[Var, int], kept: _Kept
) -> list[Any]:
    """Evaluates one layer and writes the variables in `slots` to what is kept. Arguments and results may be slices.

    Readers of a kernel's result read it from there: then the kernel can write its result there.
    """
    env: dict[Var, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args)))
    lookup = lambda v: v.val if isinstance(v, Literal) else env[v]
    for eqn in jaxpr.eqns:
        values = [lookup(v) for v in eqn.invars]
        if (inner := _inner(eqn)) is not None:  # The kernel is inside, and so is the writing.
            root = _roots(inner.jaxpr)
            results = {v: root(result) for v, result in zip(eqn.outvars, inner.jaxpr.outvars) if v in slots}
            inner_slots = {result: slots[v] for v, result in results.items() if _is_computed(inner.jaxpr, result)}
            env.update(zip(eqn.outvars, _evaluate(inner.jaxpr, inner.consts, values, inner_slots, kept)))
            for v, result in results.items():
                if not _is_computed(inner.jaxpr, result):
                    kept.write(slots[v], _read(env[v]), kept.i)
            continue
        if _is_view(eqn) and isinstance(values[0], _Slice) and eqn.outvars[0] not in slots:
            env[eqn.outvars[0]] = _reshaped(values[0], eqn.outvars[0].aval)
            continue
        eqn = _without_copies(eqn, values, slots)
        env.update(zip(eqn.outvars, _jax.evaluate(jaxpr, eqn, list(map(_read, values)))))
        for v in eqn.outvars:
            if v in slots:
                kept.write(slots[v], env[v], kept.i)
                if eqn.primitive in _KERNELS:
                    env[v] = _Slice(kept, slots[v], env[v].shape, env[v])
    return list(map(lookup, jaxpr.outvars))


def _slices(stacks: Sequence[jax.Array], i: jax.Array) -> list[_Slice]:
    """What layer `i` has of arrays for all layers."""
    kept = _Kept(stacks, i)
    return [_Slice(kept, k, stack.shape[1:]) for k, stack in enumerate(stacks)]


def _reshaped(x: Any, aval: Any) -> Any:
    return dataclasses.replace(x, shape=aval.shape) if isinstance(x, _Slice) else x.reshape(aval.shape)


def _without_copies(eqn: JaxprEqn, values: Sequence[Any], slots: Mapping[Var, int]) -> JaxprEqn:
    """The equation. A product knows which of its arrays only our kernels read and write without a copy."""
    if eqn.primitive not in _PRODUCTS:
        return eqn
    copied = [name for name, x in zip(("lhs", "rhs"), values) if isinstance(x, _Slice)]
    copied += ["out"] if eqn.outvars[0] in slots else []
    static = dataclasses.replace(eqn.params["static"], copied=tuple(copied))
    return eqn.replace(params=eqn.params | dict(static=static))


def _inner(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The program that the equation calls."""
    if eqn.primitive.name not in _CALLS or (eqn.params.get("differentiated") and eqn.params["prevent_cse"]):
        return None
    inner: Any = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def _roots(jaxpr: Jaxpr) -> Callable[[Any], Any]:
    """The function that returns the variable of which a variable is a view: another name, or another shape.

    `jax.checkpoint` gives what it saves another name. A kernel can write into the array for all layers only if its
    readers and the backward pass have the same one.
    """
    views: dict[Var, Var] = {}

    def root(v: Any) -> Any:
        while not isinstance(v, Literal) and v in views:
            v = views[v]
        return v

    def see(v: Var, x: Any) -> None:
        if x is not v and not isinstance(x, Literal):
            views[v] = x

    for eqn in jaxpr.eqns:
        if _is_view(eqn):
            see(eqn.outvars[0], eqn.invars[0])
        elif (inner := _inner(eqn)) is not None:
            inner_root = _roots(inner.jaxpr)
            outside = dict(zip(inner.jaxpr.invars, eqn.invars))
            for v, result in zip(eqn.outvars, map(inner_root, inner.jaxpr.outvars)):
                if not isinstance(result, Literal):  # It may be an operand of the call, or a result once more.
                    see(v, outside.setdefault(result, v))
    return root


def _is_view(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name == "reduce_precision":  # By `jax.checkpoint`, to the precision that the operand has.
        operand: Any = eqn.invars[0].aval
        info = jnp.finfo(operand.dtype)
        return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)
    if eqn.primitive.name == "reshape":
        return eqn.params["dimensions"] is None
    return eqn.primitive.name in _VIEWS


def _is_computed(jaxpr: Jaxpr, v: Any) -> bool:
    """Whether an equation of the program has this result, which is then no literal and no argument."""
    return not isinstance(v, Literal) and v not in jaxpr.invars


def _depend_on(jaxpr: Jaxpr, variables: Sequence[Var]) -> set[Var]:
    """The variables that depend on the given ones, including these."""
    dependent = set(variables)
    for eqn in jaxpr.eqns:
        if any(v in dependent for v in eqn.invars if not isinstance(v, Literal)):
            dependent.update(eqn.outvars)
    return dependent


def _at(stack: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(stack, i, keepdims=False)


def _split(xs: Sequence[Any], *sizes: int) -> list[list[Any]]:
    """Splits `xs` into parts of the given sizes and the rest."""
    rest = iter(xs)
    return [*([next(rest) for _ in range(size)] for size in sizes), list(rest)]


def _replaced(xs: Sequence[Any], are_replaced: Sequence[bool], by: Sequence[Any]) -> list[Any]:
    rest = iter(by)
    return [next(rest) if replaced else x for x, replaced in zip(xs, are_replaced)]


def _no_tangent(x: jax.Array) -> Any:
    return jnp.zeros_like(x) if jnp.issubdtype(x.dtype, jnp.inexact) else np.zeros(x.shape, jax.dtypes.float0)


def _num_layers(params: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError("scan_layers: params must have an array for each parameter of the layers; got none.")
    (first, one), *_ = leaves
    for path, x in leaves:
        if x.ndim == 0 or one.ndim == 0 or len(x) != len(one):
            name, other = (f"params{jax.tree_util.keystr(p)}" for p in (path, first))
            raise ValueError(
                f"scan_layers: the first axis of every array of params is that of the layers; got {name} of shape "
                f"{x.shape} and {other} of shape {one.shape}. Stack the parameters of all layers."
            )
    return len(one)


def _checked(out: Any, x: Any) -> list[Any]:
    """The leaves of what `layer` returned, which must be like the stream."""
    describe = lambda tree: jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)
    if describe(out) != describe(x):
        raise TypeError(
            f"scan_layers: layer must return arrays like x, {describe(x)}; got {describe(out)}. "
            "Cast the result, or give x in the dtype that the layers compute in."
        )
    return jax.tree.leaves(out)
