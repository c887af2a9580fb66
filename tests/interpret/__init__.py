"""Runs Pallas Mosaic GPU kernels on the CPU, under a race detector.

    with interpret():
        out = kernel(x)

This extends JAX's own interpret mode for Mosaic GPU. There each warpgroup is a thread of the host, shared memory and
barriers are simulated, and vector clocks tell which accesses are ordered. The extensions are

- features of Hopper kernels: wgmma with an operand in registers, initialised and stored accumulators, predicated and
  reducing stores, commit groups, multicast;
- further errors: reads of a wgmma until it is waited for, multicast into the other blocks of a cluster, accesses of
  different clusters (which are unordered), deadlocks, stores that overrun a row.

It cannot see the following. Lowering the kernel for CUDA, or running it on a GPU, must check them:

- layouts in registers, swizzles and tilings, alignment, and TMA's limit of 256 elements a side;
- the shared memory and the registers of a kernel;
- the precision of the tensor core and of approximate functions (here products and sums are float32, also those of
  float32 operands, which wgmma rounds to TF32);
- buffers of different `run_scoped`s that share storage (here each has its own); a collective `run_scoped` that some
  warpgroups do not enter, so that the others wait;
- races on registers, and among the threads of a warpgroup.

It does not support: loads with a predicate, without a barrier or tracked by a leader, references into another block's
shared memory, semaphores, `barrier_test`, bitcast or reshaped views of shared memory, more than one device, more
than 31 warpgroups a cluster.

On few cores XLA_FLAGS must have --xla_force_host_platform_device_count=8, as in conftest.py. Otherwise XLA has fewer
threads than a kernel has warpgroups. A warpgroup that waits for one without a thread then looks like a deadlock.

Private names of JAX are patched. `patches.check_jax` refuses a version in which they have changed.
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
    """Unordered accesses. The message has each pair of source lines."""


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
      RaceError: on exit, if kernels raced.
      TimeoutError: a kernel is deadlocked.
      Exception: any other error of a kernel's thread (out of bounds, a broken barrier rule), instead of XLA's error.
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
