"""What all operations share: a primitive whose lowering picks a kernel, and its ways into a mesh."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.operands import Spec
from jaxkernels.core.sharding import Assignment, assign
from jaxkernels.core.types import ArrayType

__all__ = ["OPS", "KernelOp", "tracing", "usual_promotion"]

#: Primitive -> operation.
OPS: dict[Any, KernelOp] = {}


@contextlib.contextmanager
def usual_promotion() -> Iterator[None]:
    """Lets our own arithmetic promote dtypes and ranks, whatever the caller's settings forbid in theirs."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@contextlib.contextmanager
def tracing(types: Iterable[Any]) -> Iterator[None]:
    """The context in which a kernel is traced and lowered.

    Args:
      types: operands and results: anything with shape and dtype.
    """
    with usual_promotion(), _jax.ignore_x64(types):
        yield


class KernelOp:
    """A JAX primitive computed by the backends registered under one name.

    A spec (`jaxkernels.core.operands.Spec`) says what is computed, from which named operands. This class makes the
    primitive eager, lowers it for each platform with the kernel that `dispatch.choose` picks, batches it and splits it
    over a mesh. Differentiation rules are registered by the operation's module `rules`, on `primitive`.

    Every bind carries three parameters: `static` (the spec without types), `backend` (a name or None) and `config`
    (a backend's configuration or None).

    Attributes:
      name: the kernel's name in `dispatch.REGISTRY` and in messages.
      primitive: the JAX primitive.
      keeps_weak_types: whether results of weakly typed operands are weakly typed.
      loops: whether the reference loops over a dimension that may be sharded. XLA's partitioner would gather it, so the
        reference is split as the kernels are.
    """

    keeps_weak_types = False
    loops = False

    def __init__(self, name: str, primitive_name: str, *, multiple_results: bool):
        self.name = name
        self.primitive = jax.extend.core.Primitive(primitive_name)
        self.primitive.multiple_results = multiple_results
        OPS[self.primitive] = self
        _jax.evaluate_eagerly(self.primitive)
        self._whole = functools.cache(self._partition)
        self.primitive.def_abstract_eval(self._abstract_eval)
        _jax.register_batcher(self.primitive, self.batch)
        _jax.register_nan_check(self.primitive)
        for platform in hardware.PLATFORMS:
            rule = functools.partial(self._lower, platform=platform)
            mlir.register_lowering(self.primitive, rule, platform=platform)

    # What a subclass may change.

    def local(self, spec: Spec, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        """One shard's work: bind on the local operands, then add up what other shards hold a part of."""

        def body(*xs: jax.Array) -> list[jax.Array]:
            return assignment.add_up(self._list(self.bind(spec, spec.named(self.name, xs), **params)))

        return body

    def not_shared(self, spec: Spec, mapped: frozenset[str]) -> frozenset[str]:
        """The operands of which each element of a mapped axis needs its own copy: the mapped ones at least."""
        return mapped

    def batch(
        self, args: Sequence[Any], dims: Sequence[int | None], *, static: Spec, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        """The vmap rule: the mapped axis joins the axis `batch_axis` of the spec.

        Returns results, and where their mapped axis is.
        """
        num = next(x.shape[d] for x, d in zip(args, dims) if d is not None)
        mapped = frozenset(name for name, d in static.named(self.name, dims).items() if d is not None)
        xs = static.named(self.name, [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(args, dims)])
        types = [ArrayType(x.shape[name in mapped :], jnp.dtype(x.dtype)) for name, x in xs.items()]
        arrays = static.typed(self.name, types).arrays()
        place: dict[str, Any] = {name: operand.place(static.batch_axis) for name, operand in arrays.items()}
        # A kernel takes one for the whole batch, or returns one.
        if any(place[name] is None for name in (*mapped, *static.outputs(self.name))):
            outs = jax.lax.map(
                lambda given: self._list(self.bind(static, xs | given, **params)), {name: xs[name] for name in mapped}
            )
            return outs, [0] * len(outs)
        not_shared = self.not_shared(static, mapped)
        full = [name for name in xs if place[name] is not None and not arrays[name].broadcasts]
        size = arrays[full[0]].type.shape[place[full[0]]]

        def join(name: str, x: jax.Array) -> jax.Array:
            """(num?, ..., size | 1, ...) -> (..., num * size, ...)."""
            axis, shape = place[name], list(arrays[name].type.shape)
            if axis is None or (arrays[name].broadcasts and shape[axis] == 1 and name not in not_shared):
                return x  # One for the whole batch stays one.
            shape[axis] = size
            x = jnp.broadcast_to(x if name in mapped else x[None], (num, *shape))
            return jnp.moveaxis(x, 0, axis).reshape(*shape[:axis], num * size, *shape[axis + 1 :])

        outs, where = [], []
        joined = self.bind(static, {name: join(name, x) for name, x in xs.items()}, **params)
        for name, out in zip(static.outputs(self.name), self._list(joined)):
            axis = place[name]
            out = out.reshape(*out.shape[:axis], num, size, *out.shape[axis + 1 :])
            if arrays[name].broadcasts and arrays[name].type.shape[axis] == 1:  # The gradient of one for all.
                out = jnp.sum(out, axis=axis + 1, keepdims=True)
            outs.append(out)
            where.append(axis)
        return outs, where

    # What callers use.

    def __call__(
        self,
        spec: Spec,
        operands: Mapping[str, jax.Array],
        *,
        backend: str | None,
        config: Any = None,
        result_specs: Sequence[PartitionSpec] = (),
    ) -> Any:
        """Computes the operation, on whatever mesh the operands live.

        On a mesh with Explicit axes the results come sharded as `factors` implies; `result_specs`
        tells where a sum over shards may be scattered instead of replicated.
        """
        xs = spec.pack(self.name, operands)
        types = [ArrayType.of(x) for x in xs]
        if backend is not None or config is not None:  # What the kernel cannot do on any chip is said at the call.
            ideal = spec.typed(self.name, types, hardware.lookup(hardware.DEFAULT_CUDA_TARGET))
            dispatch.check(self.name, ideal, backend, config)
        mesh, explicit = _jax.explicit_axes_of(*xs)
        if not explicit:
            return self.bind(spec, operands, backend=backend, config=config)
        specs = [jax.typeof(x).sharding.spec for x in xs]
        sizes = {name: mesh.shape[name] for name in explicit}
        typed = spec.typed(self.name, types)
        factors = typed.factors(self.name)
        if len(explicit) < sum(kind == jax.sharding.AxisType.Explicit for kind in mesh.axis_types):
            # An enclosing vmap has the others. JAX cannot lower a psum_scatter beside sharded dimensions.
            factors = dataclasses.replace(factors, scatter=False)
        plan = functools.partial(
            assign,
            factors,
            types,
            specs,
            results=typed.results(self.name),
            result_specs=result_specs,
        )
        # Axes of size 1 split nothing and would only cost collectives of one device each: they stay outside,
        # and come back into the types of the results, as in jnp's.
        assignment = plan(axis_sizes={name: size for name, size in sizes.items() if size > 1})
        out_specs = plan(axis_sizes=sizes).out_specs
        place = _jax.concrete_mesh_of(mesh, *xs)
        reshard = lambda x, old, new: x if _same(old, new) else jax.sharding.reshard(x, NamedSharding(place, new))
        xs = tuple(map(reshard, xs, specs, assignment.in_specs))
        body = self.local(spec, assignment, backend=backend, config=config)
        outs = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=assignment.in_specs,
            out_specs=list(assignment.out_specs),
            axis_names=set(explicit),
        )(*xs)
        outs = list(map(reshard, outs, assignment.out_specs, out_specs))
        return outs if self.primitive.multiple_results else outs[0]

    def bind(self, spec: Spec, operands: Mapping[str, Any], *, backend: str | None, config: Any = None) -> Any:
        """Binds the primitive, with operands varying over the same manual mesh axes."""
        xs = _jax.match_varying_axes(*spec.pack(self.name, operands))
        return self.primitive.bind(*xs, static=spec.untyped(), backend=backend, config=config)

    # The rules.

    def _abstract_eval(self, *avals: Any, static: Spec, backend: str | None, config: Any) -> Any:
        _jax.lower_by_device_if_unlike(self.primitive)
        types = [ArrayType.of(aval) for aval in avals]
        weak = self.keeps_weak_types and all(aval.weak_type for aval in avals)
        outs = [
            _jax.abstract_output(self.primitive.name, avals, t.shape, t.dtype, weak_type=weak)
            for t in static.typed(self.name, types).results(self.name)
        ]
        return outs if self.primitive.multiple_results else outs[0]

    def _lower(
        self,
        ctx: mlir.LoweringRuleContext,
        *values: Any,
        platform: str,
        static: Spec,
        backend: str | None,
        config: Any,
    ) -> Any:
        types = tuple(ArrayType.of(aval) for aval in ctx.avals_in)
        devices = _jax.devices_during_lowering(ctx)
        target = hardware.cuda_target(devices) if platform == "cuda" else hardware.host(platform)
        partitioned, exported = _jax.is_auto_partitioned(ctx), _jax.is_exported(ctx)
        spec = static.typed(self.name, types, target)
        choice = dispatch.choose(self.name, spec, backend, config, is_partitioned=partitioned, is_exported=exported)
        if partitioned and (choice.backend != "xla" or (self.loops and not exported)):
            run = self._whole(static, types, backend, config)
            ctx = _jax.with_unknown_devices(ctx)
        else:
            run = functools.partial(dispatch.load(self.name, choice.backend).run, choice.spec, choice.config)
        with tracing([*ctx.avals_in, *ctx.avals_out]):
            return _jax.lower_traced(ctx, run, values, multiple_results=self.primitive.multiple_results)

    def _partition(
        self, static: Spec, types: tuple[ArrayType, ...], backend: str | None, config: Any
    ) -> Callable[..., Any]:
        """The operation as XLA's partitioner calls it back: global shapes in, one shard's program out."""
        typed = static.typed(self.name, types)
        factors, results = typed.factors(self.name), typed.results(self.name)
        params = dict(static=static, backend=backend, config=config)

        @custom_partitioning
        def whole(*xs: jax.Array) -> Any:
            return self.primitive.bind(*xs, **params)

        def partition(_: jax.sharding.Mesh, arg_shapes: Any, result_shapes: Any) -> Any:
            arrays = [*arg_shapes, *self._list(result_shapes)]
            mesh, specs = _jax.partition_specs([x.sharding for x in arrays], [x.ndim for x in arrays])
            in_specs, out_specs = specs[: len(types)], specs[len(types) :]
            assignment = assign(factors, types, in_specs, dict(mesh.shape), results, out_specs)
            local = self.local(static, assignment, backend=backend, config=config)

            def shard(*xs: jax.Array) -> Any:
                outs = local(*xs)
                return outs if self.primitive.multiple_results else outs[0]

            in_shardings = tuple(NamedSharding(mesh, spec) for spec in assignment.in_specs)
            out_shardings = [NamedSharding(mesh, spec) for spec in assignment.out_specs]
            return (
                mesh,
                _jax.on_auto_axes(shard),
                out_shardings if self.primitive.multiple_results else out_shardings[0],
                in_shardings,
            )

        rule, options = factors.shardy_rule()
        whole.def_partition(partition, sharding_rule=rule, decode_shardings=False, **options)
        return whole

    def _list(self, outs: Any) -> list[Any]:
        return list(outs) if self.primitive.multiple_results else [outs]


def _same(a: PartitionSpec, b: PartitionSpec) -> bool:
    def canonical(spec: PartitionSpec) -> list[Any]:
        entries = [e[0] if isinstance(e, tuple) and len(e) == 1 else e or None for e in spec.partitions]
        while entries and entries[-1] is None:
            entries.pop()
        return [entries, spec.reduced, spec.unreduced]

    return canonical(a) == canonical(b)
