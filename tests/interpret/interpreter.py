"""The primitives of Pallas' Mosaic GPU dialect that JAX's interpret mode lacks, or models too simply.

A rule (`_..._rule`) runs while the kernel is traced and binds a callback; the callback (`@_host`) runs when the
kernel does, on the memory of `memory.py`.
"""

from __future__ import annotations

import dataclasses
import fractions
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import callback, core, source_info_util
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import primitives as gpu_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory
from jax._src.state import discharge
from jax._src.state import types as state_types
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["Interpreter", "Parameters"]

#: A CPU device runs at most 32 computations at a time (PJRT); the call of the kernel is one, each warpgroup another.
_MAX_THREADS = 31

_REDUCTIONS = {"add": np.add, "min": np.minimum, "max": np.maximum}
_reducing = threading.Lock()
_GMEM = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM)
_Key = shared_memory.HostAllocationKey


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parameters(plgpu.InterpretGPUParams):
    """Settings of interpret mode, which are part of the key under which jit caches a trace.

    Attributes:
      emulations: (name, function) of each `inline_mgpu` function the kernels use.
    """

    emulations: tuple[tuple[str, Callable[..., Any]], ...] = ()


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    """Interprets the kernel of one thread: by `_RULES`, and for the rest as JAX does."""

    def interpret(self, jaxpr, token, *args):
        num_devices, num_threads = self.device_info.num_devices, self.num_concurrent_threads
        if num_devices != 1 or num_threads > _MAX_THREADS:
            raise NotImplementedError(
                f"interpret: runs one device and at most {_MAX_THREADS} warpgroups a cluster; got {num_devices} and"
                f" {num_threads}. Call the kernel outside of shard_map, with a smaller cluster."
            )
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))
        read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
        for eqn in jaxpr.eqns:
            if rule := _RULES.get(eqn.primitive):
                with source_info_util.user_context(eqn.source_info.traceback, name_stack=eqn.source_info.name_stack):
                    token, outs = rule(self, eqn, token, [read(v) for v in eqn.invars])
            else:
                invars = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
                single = types.SimpleNamespace(constvars=[], invars=invars, eqns=[eqn], outvars=eqn.outvars)
                token, outs = super().interpret(single, token, *(env[v] for v in invars))
            env.update(zip(eqn.outvars, outs, strict=True))
        return token, [read(v) for v in jaxpr.outvars]

    def call(self, function, eqn, token, *operands, results=()):
        """Calls `function` on the host; returns the token and the results."""
        function = functools.partial(function, source_info=eqn.source_info)
        out_types = (gpu_callbacks.TOKEN_SHAPE_DTYPE, *results)
        token, *outs = callback.io_callback(function, out_types, token, self.thread, self.mesh_location, *operands)
        return token, outs

    def resolve(self, eqn, refs, trees, leaves):
        """Returns (allocation, transforms) of each of `refs`, which are the first operands of `eqn`."""
        trees = [tree or jax.tree.structure(()) for tree in trees]
        transforms = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
        return [jaxpr_interpret.resolve_ref(v.aval, ref, t) for v, ref, t in zip(eqn.invars, refs, transforms)]


def _host(function):
    """Makes a callback of `function(memory, thread, info, *operands)`, which returns the results, or None for none."""

    @gpu_callbacks.fail_on_exception
    def wrapper(token, thread, mesh_location, *operands, source_info, **options):
        info = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
        return token, *(function(gpu_callbacks._get_shared_memory(), thread, info, *operands, **options) or ())

    return wrapper


def _calls(function, *params):
    """The rule that passes a primitive's operands, and some of its parameters, to a callback."""

    def rule(self, eqn, token, invals):
        bound = functools.partial(function, **{name: eqn.params[name] for name in params})
        return self.call(bound, eqn, token, *invals, results=[v.aval for v in eqn.outvars])

    return rule


def _view(memory, ref):
    """Returns the allocation that `ref` names and what its transforms select of it."""
    array, transforms = ref
    key = _Key.from_array(array)
    return key, memory.access(key, jax.tree.map(int, gpu_callbacks._remove_noop_transforms(transforms)))


def _read(memory, key, access):
    """Returns the selected values. All must be in bounds."""
    value, (shape, _), _ = memory.get_buffer_content(key, access, None)
    if value is None or value.shape != access.shape:
        raise IndexError(f"reads [{access.range}] of a buffer of shape {tuple(shape)}.")
    return value


def _write(memory, thread, key, access, value):
    try:
        memory.store_buffer_content(key, access, value, thread, increment_clock=False)
    except KeyError:  # It was there when it was looked for.
        raise memory.has_left(key) from None


# Matrix products: issued, then waited for.


def _wgmma_rule(self, eqn, token, invals):
    acc, a, b, *leaves = invals
    trees = [eqn.params[f"{name}_transforms_tree"] for name in ("acc", "a", "b")]
    acc, a, b = self.resolve(eqn, (acc, a, b), trees, leaves)
    if isinstance(eqn.invars[1].aval, state_types.AbstractRef):
        return self.call(_wgmma, eqn, token, acc, b, a, None)
    return self.call(_wgmma, eqn, token, acc, b, None, a[0])


@_host
def _wgmma(memory, thread, info, acc, b, a_ref, a_values):
    clock, _ = memory.start_async(thread)
    operands = [] if a_ref else [a_values]
    for ref in (a_ref, b) if a_ref else (b,):
        key, access = _view(memory, ref)
        gpu_callbacks.get_races().check_read(
            thread, clock.async_smem_clock.copy(), key, access, source_info=info.source_info
        )
        operands.append(_read(memory, key, access))
    key, access = _view(memory, acc)
    total = _read(memory, key, access)
    total += _product(*(x.astype(total.dtype) for x in operands))
    _write(memory, thread, key, access, total)
    memory.issue_wgmma(thread, key, clock)


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a @ b, in pieces that OpenBLAS computes in the calling thread: its own can wait milliseconds for a busy core."""
    rows = max(1, 2**18 // b.size)
    with np.errstate(invalid="ignore"):  # Infinities and NaN are as good as on the chip.
        return np.concatenate([a[i : i + rows] @ b for i in range(0, len(a), rows)])


@_host
def _wgmma_wait(memory, thread, info, *, n):
    memory.wait_wgmma(thread, n)


@_host
def _accumulator_load(memory, thread, info, acc, *, wait_n):
    key = _Key.from_array(acc)
    if wait_n is not None:
        memory.wait_wgmma(thread, wait_n)
    if any(key == pending for pending, _ in memory.wgmmas[thread]):
        raise ValueError("an accumulator is read while a wgmma that adds to it is in flight.")
    return [_read(memory, key, memory.access(key, ()))]


@_host
def _accumulator_store(memory, thread, info, acc, value):
    key = _Key.from_array(acc)
    _write(memory, thread, key, memory.access(key, ()), value)
    return [value]


def _run_state_rule(self, eqn, token, invals):
    """Makes references of the operands that are values, runs the body, and returns their last values."""
    if not all(eqn.params["is_initialized"]):
        raise NotImplementedError("interpret: run_state with uninitialized references.")
    are_values = [not isinstance(v.aval, state_types.AbstractRef) for v in eqn.invars]
    outs = list(invals)
    space = shared_memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)
    for i in np.flatnonzero(are_values):
        token, request = gpu_callbacks.call_make_allocation_request_array(
            token=token, compute_unit=self.thread, memory_space_id=space
        )
        token, outs[i] = gpu_callbacks.call_allocate_buffer(
            token, self.mesh_location, self.thread, request, invals[i], eqn.source_info
        )
    token, _ = self.interpret(eqn.params["jaxpr"], token, *outs)
    last_value = functools.partial(_accumulator_load, wait_n=0)
    for i in np.flatnonzero(are_values):
        key = outs[i]
        token, (outs[i],) = self.call(last_value, eqn, token, key, results=[eqn.invars[i].aval])
        token = gpu_callbacks.call_deallocate_buffer(token, self.mesh_location, self.thread, key, eqn.source_info)
    return token, outs


# Copies by the Tensor Memory Accelerator.


def _copy_gmem_to_smem_rule(self, eqn, token, invals):
    params = eqn.params
    if not params["has_barrier"] or params["has_user_predicate"] or params["leader_tracked"] is not None:
        raise NotImplementedError("interpret: a load without barrier, with a predicate, or tracked by a leader.")
    src, dst, barrier, *leaves = invals
    trees = [params["src_transforms_treedef"], params["dst_transforms_treedef"]]
    num_transforms = sum(tree.num_leaves for tree in trees)
    src, dst = self.resolve(eqn, (src, dst), trees, leaves[:num_transforms])
    barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(
        barrier, params["barrier_transforms_treedef"], leaves[num_transforms:]
    )
    axes = params["collective_axes"] or ()
    *is_collective, _ = self.are_thread_cluster_axes_collective((axes,) if isinstance(axes, str) else tuple(axes))
    function = functools.partial(
        _copy_gmem_to_smem, cluster=self.cluster_dims, is_collective=is_collective, oob_mode=params["oob_mode"]
    )
    return self.call(function, eqn, token, src, dst, barrier)


@_host
def _copy_gmem_to_smem(memory, thread, info, src, dst, barrier, *, cluster, is_collective, oob_mode):
    races = gpu_callbacks.get_races()
    clock, _ = memory.start_async(thread)
    key, access = _view(memory, src)
    races.check_read(thread, clock.generic_clock.copy(), key, access, source_info=info.source_info)
    value, (shape, dtype), _ = memory.get_buffer_content(key, access, None)
    if value is None or value.shape != access.shape:
        if oob_mode == plgpu.OOBFillMode.PROMISE_IN_BOUNDS:
            raise IndexError(f"loads [{access.range}] of an array of shape {tuple(shape)}, and promised not to.")
        value = gpu_callbacks._pad_to_requested(value, access.shape, dtype, 0)

    # Each block of the collective loads its part of the tile, and writes it into the shared memory of all of them.
    blocks = memory.peers(thread, cluster, is_collective)
    key, access = _view(memory, dst)
    access, value = _part(access, value, blocks.index(thread.block_id), len(blocks))
    for block in blocks:
        there = memory.of_peer(key, block)
        races.check_write(
            thread,
            clock.async_smem_clock.copy(),
            there,
            access,
            source_info=info.source_info,
            clock_for_reads=clock.generic_clock.copy(),
        )
        _write(memory, thread, there, access, value)
    for block in blocks:
        there = memory.get_barrier(memory.of_peer(_Key.from_array(barrier), block))
        there.arrive(thread, clock.copy(), info, share=fractions.Fraction(1, len(blocks)))


def _part(access, value, index: int, count: int):
    """Returns part `index` of `count` of an access and its value, cut along the first dimension that divides."""
    if count == 1:
        return access, value
    dim = next((d for d, size in enumerate(value.shape) if size % count == 0), None)
    if dim is None or access.permutation is not None:
        raise ValueError(f"a multicast cannot cut a tile of shape {value.shape} into {count} parts.")
    size = value.shape[dim] // count
    ranges = list(access.range)
    position = [i for i, r in enumerate(ranges) if not isinstance(r, int)][dim]
    start = ranges[position].start + index * size
    ranges[position] = slice(start, start + size, 1)
    return dataclasses.replace(access, range=tuple(ranges)), np.split(value, count, axis=dim)[index]


def _copy_smem_to_gmem_rule(self, eqn, token, invals):
    params = eqn.params
    src, dst, *leaves = invals
    predicate = leaves.pop() if params["has_user_predicate"] else True
    trees = [params["src_transforms_treedef"], params["dst_transforms_treedef"]]
    src, dst = self.resolve(eqn, (src, dst), trees, leaves)
    function = functools.partial(
        _copy_smem_to_gmem, commit_group=params["commit_group"], reduction_op=params["reduction_op"]
    )
    return self.call(function, eqn, token, src, dst, predicate)


@_host
def _copy_smem_to_gmem(memory, thread, info, src, dst, predicate, *, commit_group, reduction_op):
    if predicate:
        races = gpu_callbacks.get_races()
        clock, position = memory.start_async(thread)
        key, access = _view(memory, src)
        races.check_read(thread, clock.async_smem_clock.copy(), key, access, source_info=info.source_info)
        value = _read(memory, key, access)
        has_been_read = clock.copy()

        clock.inc(position)
        key, access = _view(memory, dst)
        written_at, reduces = clock.async_smem_clock.copy(), reduction_op is not None
        races.check_write(thread, written_at, key, access, source_info=info.source_info, reduction=reduces)
        shape = tuple(memory.buffer_shape_and_dtype(key).shape)
        if any(isinstance(t, shared_memory.LAYOUT_TRANSFORMS) for t in src[1]):
            _check_single_tile(access, shape)
        elif not reduces:
            _check_overrun(access, shape)
        if clipped := gpu_callbacks._clip_store_to_shape(access, value, shape):
            access, value = clipped
            with _reducing:
                if reduces:
                    value = _REDUCTIONS[reduction_op](_read(memory, key, access), value)
                _write(memory, thread, key, access, value)
        memory.add_copy_smem_to_gmem_clocks(thread, has_been_read, clock)
    if commit_group:
        memory.commit_group(thread)


def _check_single_tile(access, shape: tuple[int, ...]) -> None:
    """Raises if a tiled store past the last column would overwrite the first columns.

    Mosaic GPU drops a dimension of which the array has one tile and the slice too, and with it the index.
    Tiles are as wide as the slices here: rows are tiled by 8, and slices have more of them.
    """
    columns = access.range[-1]
    if not isinstance(columns, int) and columns.stop - columns.start >= shape[-1] and columns.start >= shape[-1]:
        raise IndexError(
            f"stores [{access.range}] to an array of shape {shape}: the array has a single tile of columns, so a"
            " store outside is not dropped; it overwrites that tile."
        )


def _check_overrun(access, shape: tuple[int, ...]) -> None:
    """Raises if a store that is not tiled would extend past the end of a row into the next row.

    Mosaic GPU copies a contiguous slice as one run of bytes, which is clipped at the end of the array only.
    """
    ranges = [(r, r + 1) if isinstance(r, int) else (r.start, r.stop) for r in access.range]
    dim = next((d for d, (start, stop) in enumerate(ranges) if stop - start > 1), len(shape) - 1)
    is_contiguous = all(r == (0, size) for r, size in zip(ranges[dim + 1 :], shape[dim + 1 :]))
    is_last_row = all(start == size - 1 for (start, _), size in zip(ranges[:dim], shape[:dim]))
    if is_contiguous and ranges[dim][1] > shape[dim] and not is_last_row:
        raise IndexError(
            f"stores [{access.range}] to an array of shape {shape}: a contiguous store without tiling is not clipped"
            f" at the end of dimension {dim}; it overwrites what follows."
        )


@_host
def _commit_group(memory, thread, info):
    memory.commit_group(thread)


def _inline_mgpu_rule(self, eqn, token, invals):
    name, tree = eqn.params["mgpu_fn"].__name__, eqn.params["pytree_args"]
    emulate = dict(self.interpret_params.emulations).get(name)
    if emulate is None:
        raise NotImplementedError(f"interpret: inline_mgpu of {name}; pass emulations={{{name!r}: function}}.")
    args, leaves = invals[: tree.num_leaves], invals[tree.num_leaves :]
    are_refs = [isinstance(v.aval, state_types.AbstractRef) for v in eqn.invars[: tree.num_leaves]]
    if not any(are_refs):
        outs = jax.tree.leaves(emulate(*tree.unflatten(args)))
        return token, [out.astype(v.aval.dtype) for out, v in zip(outs, eqn.outvars, strict=True)]
    if not all(are_refs) or eqn.outvars:
        raise NotImplementedError(f"interpret: inline_mgpu of {name} takes references beside arrays, or returns any.")
    transforms = eqn.params["pytree_ref_transforms"].unflatten(leaves)
    refs = [jaxpr_interpret.resolve_ref(v.aval, arg, t) for v, arg, t in zip(eqn.invars, args, transforms)]
    return self.call(functools.partial(_update, emulate=emulate), eqn, token, refs)


@_host
def _update(memory, thread, info, refs, *, emulate):
    """Replaces what references hold by what `emulate` makes of it; in global memory atomically."""
    races, clock = gpu_callbacks.get_races(), memory.incr_clock(thread).generic_clock
    views = [_view(memory, ref) for ref in refs]
    with _reducing:
        values = emulate(*(_read(memory, key, access) for key, access in views))
        for (key, access), value in zip(views, values, strict=True):
            is_atomic = key.memory_space_id == _GMEM
            races.check_write(thread, clock, key, access, source_info=info.source_info, reduction=is_atomic)
            _write(memory, thread, key, access, np.asarray(value))


# Semaphores in global memory: counters that the blocks of a launch share. Clusters run one after the other here, so
# that one which waits for a later one waits for ever.


def _get_global_rule(self, eqn, token, invals):
    """A launch has one array of semaphores: which it is need not be told."""
    return token, [np.zeros((), np.int32)]


def _semaphore_rule(function):
    def rule(self, eqn, token, invals):
        _, transforms, value, *options = jax.tree.unflatten(eqn.params["args_tree"], invals)
        place = [index for transform in transforms for index in transform.indices]
        bound = functools.partial(function, decrement=bool(options[0])) if function is _semaphore_wait else function
        return self.call(bound, eqn, token, value, *place)

    return rule


@_host
def _semaphore_signal(memory, thread, info, value, *place):
    memory.signal_semaphore(thread, tuple(map(int, place)), int(value))


@_host
def _semaphore_wait(memory, thread, info, value, *place, decrement):
    memory.wait_semaphore(thread, tuple(map(int, place)), int(value), decrement=decrement)


_RULES: dict[core.Primitive, Callable[..., Any]] = {
    primitives.get_global_p: _get_global_rule,
    gpu_primitives.semaphore_signal_p: _semaphore_rule(_semaphore_signal),
    gpu_primitives.semaphore_wait_p: _semaphore_rule(_semaphore_wait),
    discharge.run_state_p: _run_state_rule,
    gpu_primitives.commit_group_p: _calls(_commit_group),
    gpu_primitives.copy_gmem_to_smem_p: _copy_gmem_to_smem_rule,
    gpu_primitives.copy_smem_to_gmem_p: _copy_smem_to_gmem_rule,
    gpu_primitives.inline_mgpu_p: _inline_mgpu_rule,
    gpu_primitives.wgmma_accumulator_deref_p: _calls(_accumulator_load, "wait_n"),
    gpu_primitives.wgmma_accumulator_store_p: _calls(_accumulator_store),
    gpu_primitives.wgmma_ref_p: _wgmma_rule,
    gpu_primitives.wgmma_wait_p: _calls(_wgmma_wait, "n"),
}
