"""Installs the harness in JAX: the private names that it replaces or uses. `install` checks all of them.

It also makes interpret mode faster. A kernel's program is compiled once, not once for each thread of each block, and
its calls to the host go without a detour over a device: a run of JAX's hopper_matmul_mgpu (256 x 512 x 256, 4 blocks)
takes 0.13 s and not 0.39 s (jax 0.12.0, two CPU cores, November 2026).
"""

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, race_detection_state, shared_memory

from . import interpreter, memory

__all__ = ["install"]

#: What the harness replaces, extends or calls, with the parameters it relies on. True of jax 0.11.2 and 0.12.0.
_EXPECTED: dict[Any, dict[str, str]] = {
    callback: {"io_callback_impl": "args result_avals callback sharding ordered"},
    thread_map: {"_run": "jaxpr consts args", "_run_jaxpr": "jaxpr consts args"},
    shared_memory: {
        "_to_int": "x",
        "get_memory_space_idx": "space",
        "GPULoggingInfo": "mesh_location thread source_info",
        "HostAllocationKey": "memory_space_id device_id block_id thread_id initial_ref_count buffer_id",
    },
    jaxpr_interpret: {
        "resolve_ref": "aval allocation_key_as_array transforms",
        "_get_barrier_allocation_key_from_inval": "inval transforms_treedef transforms_leaves",
    },
    jaxpr_interpret.JaxprInterpreter: {
        "__init__": "self mesh_location thread cluster_dims mesh warp_mesh device_info compiler_params"
        " interpret_params",
        "interpret": "self jaxpr token args",
        "are_thread_cluster_axes_collective": "self collective_axes",
    },
    gpu_callbacks: {
        "fail_on_exception": "func",
        "_get_shared_memory": "",
        "get_races": "",
        "reset_gpu_interpret_mode_state": "",
        "_remove_noop_transforms": "transforms",
        "_pad_to_requested": "val requested dtype fill_value",
        "_clip_store_to_shape": "access val shape",
        "call_make_allocation_request_array": "token compute_unit memory_space_id initial_ref_count",
        "call_allocate_buffer": "token mesh_location thread allocation_request_as_array value source_info",
        "call_deallocate_buffer": "token mesh_location thread allocation_key_as_array source_info",
    },
    race_detection_state.GPURaceDetectionState: {
        "check_read": "self thread clock buffer_key rnge source_info",
        "check_write": "self thread clock buffer_key rnge source_info",
        "tag_ref_union_member": "self key union alias_group",
    },
    shared_memory.GPUSharedMemory: {
        "__init__": "self num_devices out_of_bounds_reads dma_execution_mode uninitialized_memory detect_races barrier"
        " clean_up_barrier buffer_bounds logging_mode num_threads_per_block num_blocks_per_cluster"
        " num_tma_threads_per_device",
        "access": "self key transforms",
        "buffer_shape_and_dtype": "self key",
        "get_buffer_content": "self key access args kwargs",
        "store_buffer_content": "self key access value args kwargs",
        "deallocate_buffer": "self key logging_info",
        "get_barrier": "self key",
        "incr_clock": "self thread take_lock",
        "get_next_tma_thread_id": "self",
        "reset_per_cluster_state": "self",
        "set_failed": "self exception failed_thread top_level",
        "check_failed": "self",
        "add_copy_smem_to_gmem_clocks": "self thread read_clock write_clock",
        "wait_smem_to_gmem": "self thread n wait_read_only",
        "kernel_thread_finished": "self thread",
    },
    shared_memory.Barrier: {
        "__init__": "self shared_memory num_pallas_threads_per_block ref_count num_arrivals orders_tensor_core"
        " enable_logging",
        "arrive": "self thread clock logging_info",
        "wait": "self thread logging_info",
        "deallocate": "self",
    },
}

_HOST_MODULES = (gpu_callbacks.__name__, thread_map.__name__, interpreter.__name__)
_io_callback_impl = callback.io_callback_impl
_compiling = threading.Lock()
#: A program runs a few times: compiling it matters more than its speed (40 % of the time saved).
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


def check_jax() -> None:
    """Raises RuntimeError unless this JAX has every private name in the shape the harness was written for."""
    differences = []
    for owner, names in _EXPECTED.items():
        for name, expected in names.items():
            found = getattr(owner, name, None)
            parameters = "nothing" if found is None else " ".join(inspect.signature(found).parameters)
            if parameters != expected:
                differences.append(f"  {owner.__name__}.{name}: expected ({expected}), found ({parameters})")
    if differences:
        raise RuntimeError(
            f"interpret: written for jax 0.11.2 and 0.12.0, and jax {jax.__version__} differs:\n"
            + "\n".join(differences)
        )


@functools.cache
def install() -> None:
    """Replaces JAX's classes by ours, for the rest of the process: compiled programs hold on to them."""
    check_jax()
    jaxpr_interpret.JaxprInterpreter = interpreter.Interpreter
    gpu_callbacks.GPURaceDetectionState = memory.Races
    shared_memory.GPUSharedMemory = memory.SharedMemory
    shared_memory.Barrier = memory.Barrier
    shared_memory._to_int = _to_int
    thread_map._run_jaxpr = _run_jaxpr
    callback.io_callback_impl = _call_host


def _to_int(x: Any) -> Any:
    """Coordinates are traced while a kernel is built, and NumPy scalars when it runs."""
    return x if isinstance(x, jax.core.Tracer) else int(x)


def _call_host(*args, result_avals, callback, sharding, ordered):
    """Calls back: a function of the interpreter's with NumPy arrays as they come, any other as JAX does."""
    function = callback.callback_func
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", None) not in _HOST_MODULES:
        return _io_callback_impl(
            *args, result_avals=result_avals, callback=callback, sharding=sharding, ordered=ordered
        )
    outs = callback(*map(np.asarray, args))
    return [np.asarray(out, aval.dtype) for out, aval in zip(outs, result_avals, strict=True)]


@functools.lru_cache(maxsize=64)
def _compile(jaxpr):
    """Compiles the program of a kernel's threads. Jaxprs compare by identity, and an entry keeps its own alive."""
    consts, args = (
        [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        for avals in (map(jax.typeof, jaxpr.consts), jaxpr.in_avals)
    )
    return jax.jit(thread_map._run, static_argnums=(0,)).lower(jaxpr, consts, *args).compile(_COMPILER_OPTIONS)


def _run_jaxpr(jaxpr, consts, *args):
    with _compiling:
        program = _compile(jaxpr)
    program(consts, *args)
