"""The one place that touches JAX internals.

Everything else in the package uses JAX's public names. Each function here says which internal it
stands on, so that a JAX release that moves one breaks this file and no other.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax._src import checkify as _checkify
from jax._src import config as _config
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import sharding_impls as _sharding_impls
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import partial_eval as _pe
from jax._src.lax import lax as _lax
from jax._src.lib import xla_client as _xla_client
from jax.core import Tracer
from jax.experimental import jet as _jet
from jax.interpreters import batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

__all__ = [
    "abstract_output",
    "canonical_precision",
    "concrete_mesh_of",
    "convert",
    "cudnn_version",
    "devices_during_lowering",
    "evaluate",
    "evaluate_eagerly",
    "explicit_axes_of",
    "has_plugin",
    "ignore_x64",
    "is_auto_partitioned",
    "is_exported",
    "lower_by_device_if_unlike",
    "lower_traced",
    "match_varying_axes",
    "names_axes",
    "on_auto_axes",
    "partition_specs",
    "register_batcher",
    "register_bilinear_taylor",
    "register_nan_check",
    "register_recomputation",
    "register_taylor",
    "taylor",
    "uninitialized",
    "with_unknown_devices",
]


def evaluate_eagerly(primitive: Any) -> None:
    """Lets `primitive` run outside jit, by compiling it on its own (`dispatch.apply_primitive`)."""
    primitive.def_impl(functools.partial(_dispatch.apply_primitive, primitive))


def lower_by_device_if_unlike(primitive: Any) -> None:
    """Asks JAX to lower `primitive` for each set of devices anew, if this process has unlike GPUs.

    Kernels are chosen by chip. Usually all devices of a process are one chip, and a lowered program holds for
    all of them. With an H100 beside an L4 it does not, so JAX must know the devices while it lowers
    (`dispatch.prim_requires_devices_during_lowering`). JAX then refuses an AbstractMesh, and two meshes in one
    program: it is not asked without need. The rule for abstract evaluation calls this, before any lowering.
    """
    if _xla_bridge.backends_are_initialized() and _has_unlike_gpus():
        _dispatch.prim_requires_devices_during_lowering.add(primitive)


@functools.cache
def _has_unlike_gpus() -> bool:
    return len({device.device_kind for device in jax.local_devices() if device.platform == "gpu"}) > 1


def canonical_precision(precision: Any) -> Any:
    """Returns `precision` in lax's own form; for None what `jax.default_matmul_precision` says here and now.

    The form is None, a pair of `jax.lax.Precision`, or a dot algorithm (`lax.canonicalize_precision`); a
    ValueError where it is none of these. A kernel is chosen when the program is lowered, by which time
    the user's context manager may be gone.
    """
    return _lax.canonicalize_precision(precision)


def convert(x: jax.Array, dtype: Any, *, weak_type: bool) -> jax.Array:
    """Converts `x` to `dtype`, weakly typed or not (`lax._convert_element_type`); `astype` drops a weak type."""
    converted: Any = _lax._convert_element_type(x, dtype, weak_type)
    return converted


def match_varying_axes(*xs: jax.Array) -> tuple[jax.Array, ...]:
    """Makes all `xs` vary over the union of their manual mesh axes, as `shard_map(check_vma=True)` needs.

    A cast is differentiable. Its transpose is the psum that a replicated operand's gradient owes; of an operand
    whose type has the axis as reduced, the gradient is left unreduced.
    """
    types = [jax.typeof(x).manual_axis_type for x in xs]
    union = frozenset().union(*(t.varying for t in types))

    def cast(x: jax.Array, missing: frozenset[str], reduced: frozenset[str]) -> jax.Array:
        for axes in (missing & reduced, missing - reduced):  # JAX casts one kind at a time.
            x = jax.lax.pcast(x, tuple(sorted(axes)), to="varying") if axes else x
        return x

    return tuple(cast(x, union - t.varying, t.reduced) for x, t in zip(xs, types))


def abstract_output(
    name: str, avals: Sequence[Any], shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False
) -> Any:
    """Returns the abstract value of an output, varying over the manual axes of `avals`.

    Raises ValueError where the operands vary over different axes (`core.standard_vma_rule`).
    """
    varying = _core.standard_vma_rule(name, *avals)
    like = avals[0]
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    manual = type(like.manual_axis_type)(varying=varying)
    return like.update(
        shape=shape, dtype=jnp.dtype(dtype), weak_type=weak_type, sharding=sharding, manual_axis_type=manual
    )


def explicit_axes_of(*xs: jax.Array) -> tuple[AbstractMesh, tuple[str, ...]]:
    """Returns the operands' mesh and its free Explicit axes; none where no operand is sharded by them.

    An axis that shards the mapped dimension of an enclosing vmap is not free
    (`core.AxisEnv.explicit_mesh_axis_names`).
    """
    shardings = [jax.typeof(x).sharding for x in xs]
    mesh = next((s.mesh for s in shardings if not s.mesh.empty), shardings[0].mesh)
    taken = _core.get_axis_env().explicit_mesh_axis_names
    free = tuple(
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == jax.sharding.AxisType.Explicit and name not in taken
    )
    is_sharded = any(entry is not None for s in shardings for entry in s.spec.partitions)
    return mesh, free if is_sharded else ()


def concrete_mesh_of(mesh: AbstractMesh, *xs: jax.Array) -> AbstractMesh | Mesh:
    """Returns the mesh with devices that `mesh` describes, where an operand outside of jit lies on one.

    Outside of jit and `set_mesh`, an array on one device cannot be resharded to an AbstractMesh. Differentiation
    wraps such operands (`ad.JVPTracer`, `ad.LinearizeTracer`: `primal`).
    """

    def unwrapped(x: Any) -> Any:
        return unwrapped(x.primal) if isinstance(x, Tracer) and hasattr(x, "primal") else x

    shardings = (x.sharding for x in map(unwrapped, xs) if not isinstance(x, Tracer))
    meshes = (s.mesh for s in shardings if isinstance(s, NamedSharding) and isinstance(s.mesh, Mesh))
    return next((m for m in meshes if m.abstract_mesh == mesh), mesh)


def evaluate(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Evaluates one equation of `jaxpr`, in the context it was traced in (`core.eval_jaxpr`)."""
    operands = {v: x for v, x in zip(eqn.invars, values) if not isinstance(v, _core.Literal)}
    outs = [v for v in eqn.outvars if not isinstance(v, _core.DropVar)]
    info = jaxpr.debug_info.with_unknown_names()
    alone = jaxpr.replace(constvars=[], invars=list(operands), outvars=outs, eqns=[eqn], debug_info=info)
    results = iter(_core.eval_jaxpr(alone, (), *operands.values()))
    return [None if isinstance(v, _core.DropVar) else next(results) for v in eqn.outvars]


def register_nan_check(primitive: Any) -> None:
    """Lets `checkify.nan_checks` see whether `primitive` makes a NaN (`checkify.nan_error_check`)."""
    _checkify.error_checks[primitive] = functools.partial(_checkify.nan_error_check, primitive)


def register_taylor(primitive: Any, rule: Callable[..., Any]) -> None:
    """Sets `rule(primals, series, **params)` for `jax.experimental.jet` (`jet.jet_rules`)."""
    _jet.jet_rules[primitive] = rule


def register_bilinear_taylor(primitive: Any) -> None:
    """Sets the rule of a product (`jet._bilinear_taylor_rule`)."""
    register_taylor(primitive, functools.partial(_jet._bilinear_taylor_rule, primitive))


def taylor(fun: Callable[..., list[jax.Array]], primals: Sequence[Any], series: Sequence[Any]) -> Any:
    """`jet.jet` of `fun` in its floating arguments; integer and boolean ones are constants."""
    moving = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_moving(*xs: jax.Array) -> list[jax.Array]:
        args = list(primals)
        for i, x in zip(moving, xs):
            args[i] = x
        return fun(*args)

    inputs = (tuple(xs[i] for i in moving) for xs in (primals, series))
    return _jet.jet(of_moving, *inputs, factorial_scaled=False)


def register_batcher(primitive: Any, rule: Callable[..., tuple[list[Any], list[int]]]) -> None:
    """Sets `rule(args, dims, **params)` as the primitive's batching rule (`fancy_primitive_batchers`).

    Where an Explicit mesh axis shards the mapped dimension, the rule runs on each shard of it.
    """

    def batcher(axis_data: Any, args: Sequence[Any], dims: Sequence[int | None], **params: Any) -> Any:
        if all(d is None for d in dims):
            # JAX asks here even then, where a vmap encloses an eager derivative (jacfwd, hessian).
            outs = primitive.bind(*args, **params)
            outs = outs if primitive.multiple_results else [outs]
            return outs, [None] * len(outs)
        axes = axis_data.explicit_mesh_axis
        if not axes:
            return rule(args, dims, **params)

        def shard(*xs: jax.Array) -> list[jax.Array]:
            outs, out_dims = rule(xs, dims, **params)
            return [jnp.moveaxis(out, d, 0) for out, d in zip(outs, out_dims)]

        in_specs = tuple(PartitionSpec() if d is None else PartitionSpec(*[None] * d, axes) for d in dims)
        with _core.remove_explicit_mesh_axis_names(axes):
            outs = jax.shard_map(shard, in_specs=in_specs, out_specs=PartitionSpec(axes), axis_names=set(axes))(*args)
        return outs, [0] * len(outs)

    if primitive.multiple_results:
        batching.fancy_primitive_batchers[primitive] = batcher
    else:

        def single(*args: Any, **params: Any) -> Any:
            (out,), (dim,) = batcher(*args, **params)
            return out, dim

        batching.fancy_primitive_batchers[primitive] = single


def is_auto_partitioned(ctx: mlir.LoweringRuleContext) -> bool:
    """Says whether XLA will partition the module being lowered over several devices (Auto mesh axes)."""
    axis_context = ctx.module_context.axis_context
    return isinstance(axis_context, mlir.ShardingContext) and axis_context.num_devices > 1


def is_exported(ctx: mlir.LoweringRuleContext) -> bool:
    """Says whether the module is lowered for `jax.export` (`mlir.LoweringParameters.for_export`)."""
    return ctx.module_context.lowering_parameters.for_export


def has_plugin(platform: str) -> bool:
    """Says whether a plugin takes custom calls for XLA's `platform` ("CUDA"), be there a device or not.

    That is settled when JAX's backends have been created (`xla_client._custom_callback_handler`).
    """
    return platform in _xla_client._custom_callback_handler


def register_recomputation(primitive: Any, again: Any) -> None:
    """Sets how the backward pass of `jax.checkpoint` computes a result again (`partial_eval_jaxpr_custom_rules`).

    If the forward pass keeps the first operand, the backward pass runs `again` on the other operands. The first one is
    then not kept for this result. Otherwise it runs `primitive`. If the policy keeps the result, it runs neither.
    """

    def rule(saveable: Any, unknown: Sequence[bool], computed: Sequence[bool], eqn: Any) -> Any:
        kept = [x for x, is_computed in zip(eqn.invars, computed) if isinstance(x, _core.Var) and not is_computed]
        if any(unknown):
            return None, eqn, [True], [True], kept
        if computed[0]:
            return eqn, eqn, [False], [True], kept
        case = _pe.ensure_enum(saveable(primitive, *(x.aval for x in eqn.invars), **eqn.params))
        if isinstance(case, _pe.SaveableType):
            return eqn, None, [False], [False], []
        return eqn, eqn.replace(primitive=again, invars=eqn.invars[1:]), [False], [True], kept[1:]

    _pe.partial_eval_jaxpr_custom_rules[primitive] = rule


_WIDE_DTYPES = ("int64", "uint64", "float64", "complex128")


def cudnn_version() -> int | None:
    """The version of cuDNN as a number, 90800 for 9.8.0; None if JAX finds no cuDNN (`lib.cuda_versions`)."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except (ImportError, RuntimeError):  # No CUDA plugin, or no library beside it.
        return None


def ignore_x64(types: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Lets an operation be traced and lowered as if `jax_enable_x64` was off, whatever it is.

    Under the flag Python's integers become 64 bits wide in a kernel: the kernel is another one, or does not
    lower at all. Both steps depend on the flag, so the context must enclose both. It leaves the flag as it is

    - if one of `types` (operands and results, anything with shape and dtype) has 64 bits, which would be truncated;
    - if a shape is symbolic, as in a program for `jax.export`: sizes that are known at run time only have 64 bits then.
    """
    types = list(types)
    is_wide = any(jnp.dtype(x.dtype).name in _WIDE_DTYPES for x in types)
    is_symbolic = any(not isinstance(size, int) for x in types for size in x.shape)
    if is_wide or is_symbolic or not jax.config.jax_enable_x64:
        return contextlib.nullcontext()
    return jax.enable_x64(False)


def partition_specs(shardings: Sequence[Any], ndims: Sequence[int]) -> tuple[AbstractMesh, list[PartitionSpec]]:
    """Decodes shardings that XLA's partitioner hands to `custom_partitioning` undecoded (`GSPMDSharding`).

    XLA counts devices and knows no mesh. A sharding splits each dimension by some digits of the device's number.
    The mesh returned has the coarsest axes of which all these digits consist: for 8 devices of which one
    dimension takes the even or the odd ones, (4, 2). It needs no devices, and the partitioner may split an axis of
    the user's mesh. A sharding that fits no common mesh counts as replicated; XLA then gathers the array.
    """
    num_devices = next(sharding.num_devices for sharding in shardings if sharding is not None)
    bounds = {1, num_devices}
    decoded: list[list[_Digit]] = []
    for sharding in shardings:
        digits = _digits(sharding._hlo_sharding) if sharding is not None else []
        mixed = sorted(bounds.union(*((low, high) for _, low, high in digits)))
        fits = all(high % low == 0 for low, high in itertools.pairwise(mixed))
        decoded.append(digits if fits else [])
        bounds = set(mixed) if fits else bounds
    steps = list(itertools.pairwise(sorted(bounds)))[::-1]  # The first axis is the major digit.
    name = lambda low: f"devices{low}"
    mesh = AbstractMesh(tuple(high // low for low, high in steps), tuple(name(low) for low, _ in steps))

    def spec(digits: list[_Digit], ndim: int) -> PartitionSpec:
        entries: list[tuple[str, ...]] = [()] * ndim
        for dim, low, high in digits:
            if dim < ndim:
                entries[dim] += tuple(name(step) for step, _ in steps if low <= step < high)
        return PartitionSpec(*(entry or None for entry in entries))

    return mesh, list(map(spec, decoded, ndims))


#: A dimension, and the part of the device's number that splits it: (number % high) // low. Dimensions past the
#: array's own are those over which it is replicated.
_Digit = tuple[int, int, int]


def _digits(sharding: Any) -> list[_Digit]:
    """The digits of an `HloSharding`, major first within each dimension; none if it is replicated or irregular."""
    if not sharding.is_tiled():
        return []
    tiles = sharding.tile_assignment_dimensions()
    try:
        groups = iter(_sharding_impls.unflatten_superdims(sharding.tile_assignment_devices()))  # (size, stride)
    except NotImplementedError:
        return []
    digits: list[_Digit] = []
    size, low = 1, 1
    for dim, tile in reversed(list(enumerate(tiles))):
        while tile > 1:
            if size == 1:
                size, low = (int(number) for number in next(groups))
            step = math.gcd(tile, size)
            if step == 1:
                return []
            digits.append((dim, low, low * step))
            tile, size, low = tile // step, size // step, low * step
    return digits[::-1]


def devices_during_lowering(ctx: mlir.LoweringRuleContext) -> Sequence[Any]:
    """Returns the devices the module is lowered for; where they are not known, this process's in the same client.

    JAX lowers once for all devices of a client, unless a primitive asks for more (`lower_by_device_if_unlike`).
    """
    axis_context = ctx.module_context.axis_context
    if isinstance(axis_context, mlir.ShardingContext):
        known = axis_context.device_assignment
    else:
        mesh = getattr(axis_context, "mesh", None)
        known = None if mesh is None or isinstance(mesh, AbstractMesh) else tuple(mesh.devices.flat)
    client = ctx.module_context.backend
    if known or client is None:
        return known or ()
    return client.local_devices() or client.devices()


def with_unknown_devices(ctx: mlir.LoweringRuleContext) -> mlir.LoweringRuleContext:
    """Returns `ctx` as `custom_partitioning` needs it, which asks for devices and uses their number only.

    (`custom_partitioning._custom_partitioning_lowering_rule`, with `decode_shardings=False`.)
    """
    axis_context: Any = ctx.module_context.axis_context
    num_devices = axis_context.num_devices
    unknown = mlir.ShardingContext(num_devices, (None,) * num_devices)
    return ctx.replace(module_context=ctx.module_context.replace(axis_context=unknown))


def names_axes(jaxpr: Any) -> bool:
    """Whether a program refers to a named axis, such as that of a `jax.vmap` around it (`core.NamedAxisEffect`)."""
    return any(isinstance(effect, _core.NamedAxisEffect) for effect in jaxpr.effects)


def on_auto_axes(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `fun` traced as on Auto axes, where a caller's mesh with Explicit axes is still set.

    XLA's partitioner asks for a shard's program while the user's program is compiled, often inside `set_mesh`.
    On Explicit axes JAX would write shardings into that program, which is past partitioning.
    """

    def traced(*xs: jax.Array) -> Any:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty or mesh.are_all_axes_auto:
            return fun(*xs)
        mesh = mesh.update(axis_types=(jax.sharding.AxisType.Auto,) * len(mesh.axis_names))
        with jax.sharding.use_abstract_mesh(mesh):
            return fun(*(jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec())) for x in xs))

    return traced


def lower_traced(
    ctx: mlir.LoweringRuleContext, fun: Callable[..., Any], values: Sequence[Any], *, multiple_results: bool
) -> Any:
    """Lowers `fun`, traced on the operands' types, in place of a primitive.

    The abstract evaluation has settled over which manual axes the results vary
    (`core.ShapedArray.manual_axis_type`), so the trace runs without them and without the check
    (`config._check_vma`): a kernel call need not restate them.
    """
    avals: Sequence[Any] = ctx.avals_in  # ShapedArrays, declared as the AbstractValues they are a kind of
    plain = [a.update(manual_axis_type=type(a.manual_axis_type)()) if a.manual_axis_type else a for a in avals]
    with _config._check_vma(False):
        return mlir.lower_fun(fun, multiple_results=multiple_results)(ctx.replace(avals_in=plain), *values)


def uninitialized(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """An array whose elements must be written before they are read.

    On a GPU no kernel fills it (`jax.lax.empty`). XLA's partitioner would allocate it whole on each device, and an
    exported program must not depend on XLA's own custom calls: it is zeros there.
    """
    return _uninitialized.bind(shape=tuple(shape), dtype=jnp.dtype(dtype))


def _lower_uninitialized(ctx: mlir.LoweringRuleContext, *, shape: tuple[int, ...], dtype: Any, on_gpu: bool) -> Any:
    fill = jax.lax.empty if on_gpu and not (is_auto_partitioned(ctx) or is_exported(ctx)) else jnp.zeros
    return lower_traced(ctx, lambda: fill(shape, dtype), (), multiple_results=False)


_uninitialized = _core.Primitive("uninitialized")
_uninitialized.def_impl(lambda *, shape, dtype: jnp.zeros(shape, dtype))
_uninitialized.def_abstract_eval(lambda *, shape, dtype: _core.ShapedArray(shape, dtype))
mlir.register_lowering(_uninitialized, functools.partial(_lower_uninitialized, on_gpu=False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_uninitialized, functools.partial(_lower_uninitialized, on_gpu=True), platform=_platform)
