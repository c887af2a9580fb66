"""Runs Pallas Mosaic GPU kernels on the CPU, under a race detector.

    with interpret():
        out = kernel(x)

This is JAX's own interpret mode for Mosaic GPU (each warpgroup is a thread of the host, shared memory and barriers
are simulated, vector clocks tell which accesses are ordered) with what Hopper kernels need and it lacks: wgmma with
an operand in registers, initialised and stored accumulators, predicated and reducing stores, commit groups,
multicast. It sees what stock interpret mode does not: the reads of a wgmma until it is waited for, multicast into
the other blocks of a cluster, blocks of different clusters as unordered, deadlocks, stores that overrun a row.

What no run under it can see, and lowering the kernel for CUDA or running it on a GPU must check:

- layouts in registers, swizzles and tilings, the alignment and the 256 elements a side of TMA;
- how much shared memory and how many registers a kernel uses;
- the precision of the tensor core and of approximate functions (here products and sums are float32, also those of
  float32 operands, which wgmma rounds to TF32);
- buffers of different `run_scoped`s that share storage (each has its own), and a collective `run_scoped` that some
  warpgroups do not enter, where the others would wait;
- races on registers, and among the threads of a warpgroup.

It does not run: loads with a predicate, without a barrier or tracked by a leader, references into another block's
shared memory, semaphores, `barrier_test`, bitcast or reshaped views of shared memory, more than one device, more
than 31 warpgroups a cluster.

On few cores XLA_FLAGS must have --xla_force_host_platform_device_count=8, as conftest.py sets it: XLA else has fewer
threads than a kernel has warpgroups, and one that waits for another which has no thread looks like a deadlock.

JAX is patched by private names; `patches.check_jax` refuses a version in which they have changed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from . import memory
from .interpreter import Parameters
from .patches import install

__all__ = ["RaceError", "interpret"]


class RaceError(AssertionError):
    """Two accesses that nothing orders; the message has each pair of source lines."""


@contextlib.contextmanager
def interpret(
    *, emulations: Mapping[str, Callable[..., Any]] | None = None, deadlock_after: float = 20.0
) -> Iterator[None]:
    """Interprets every Mosaic GPU kernel called inside, on the first CPU device.

    Args:
      emulations: for each `plgpu.inline_mgpu` function, by its name: a function of the same arrays that returns the
        same results with JAX operations; or, if it takes references alone, one of NumPy arrays that returns what they
        then hold.
      deadlock_after: seconds that a thread may wait at a barrier.

    Raises:
      RaceError: on exit, where kernels raced.
      TimeoutError: a kernel is deadlocked.
      Exception: whatever else a kernel's thread raised (out of bounds, a rule of barriers broken), instead of the
        error that XLA makes of it.
    """
    install()
    parameters = Parameters(
        detect_races=True,
        # Operations in flight that share a position in the clocks can hide each other's races.
        num_tma_threads_per_device=128,
        emulations=tuple(sorted((emulations or {}).items())),
    )
    session = memory.session = memory.Session(deadlock_after=deadlock_after)
    try:
        with jax.default_device(jax.devices("cpu")[0]), plgpu.force_gpu_interpret_mode(parameters):
            yield
            jax.effects_barrier()
    except jax.errors.JaxRuntimeError as e:
        failure = session.failure or e
        if session.races:
            raise RaceError("\n".join(session.races.values())) from failure
        raise failure from None
    except Exception as e:
        for race in session.races.values():
            e.add_note(race)
        raise
    finally:
        gpu_callbacks.reset_gpu_interpret_mode_state()
    if session.races:
        raise RaceError("\n".join(session.races.values()))
