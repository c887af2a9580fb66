"""Compiles the kernels of a program side by side, before the program is lowered."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxkernels.core import dispatch, hardware, kernel_op
from jaxkernels.core.types import ArrayType
from jaxkernels.tuning import tuner

__all__ = ["compile_ahead", "compile_kernels"]

#: Compilers run outside of Python's lock, each in its thread.
_THREADS = min(os.cpu_count() or 1, 16)


def compile_ahead(traced: jax.stages.Traced) -> None:
    """Compiles the CUDA and Triton kernels of a traced program side by side, in threads.

    >>> traced = jax.jit(train_step).trace(state, batch)
    >>> jk.compile_ahead(traced)
    >>> step = traced.lower().compile()

    JAX lowers one operation after the other. When an operation is lowered, its CUDA or Triton kernel is compiled, and
    backends are compared (`jk.comparing`). After this call, the lowering finds the kernels and the programs to compare
    compiled. The program is the same without this call.

    Kernels are chosen for JAX's default device. XLA compiles the kernels of Pallas itself, so they are left out. If a
    kernel does not compile, the lowering raises the error. Nothing is done if the default device is no GPU.

    Args:
      traced: a function traced by `jax.jit(f).trace(...)`. On Auto mesh axes of several devices, XLA splits the arrays
        later and asks for kernels for the shards, which may be other ones.

    Raises:
      TypeError: `traced` is not a traced function.
    """
    if not isinstance(traced, jax.stages.Traced):
        raise TypeError(
            f"compile_ahead: traced must be a traced function; got {type(traced).__name__}. Pass jax.jit(f).trace(...)."
        )
    if jax.default_backend() in hardware.GPU_PLATFORMS:
        compile_kernels(traced.jaxpr, hardware.cuda_target())


def compile_kernels(
    program: ClosedJaxpr,
    target: hardware.Chip,
    turn: Callable[[str], contextlib.AbstractContextManager[None]] = lambda backend: contextlib.nullcontext(),
) -> None:
    """Compiles the kernels of a program for a chip, and the programs that its lowering will compare.

    Args:
      turn: backend -> a context in which its kernels are compiled.
    """
    now, begun = dispatch.policy.value, set[_Kernel]()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for call in dict.fromkeys(_calls(program.jaxpr, set())):
            # While one operation's kernel is chosen, those of others are compiled.
            for kernel in _kernels(call, target):
                if kernel not in begun:
                    begun.add(kernel)
                    pool.submit(_compile, kernel, now, turn)


@dataclasses.dataclass(frozen=True)
class _Call:
    """An operation in a program.

    Attributes:
      op: the kernel's name in `dispatch.REGISTRY`.
      types: of the operands.
      static, backend, config: the primitive's parameters.
    """

    op: str
    types: tuple[ArrayType, ...]
    static: Any
    backend: str | None
    config: Any


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel that an operation may get.

    Attributes:
      op, types: as in `_Call`.
      backend, spec, config: the kernel.
      is_compared: whether the lowering will compare it with others.
    """

    op: str
    types: tuple[ArrayType, ...]
    backend: str
    spec: Any
    config: Any
    is_compared: bool


def _calls(jaxpr: Jaxpr, visited: set[int]) -> Iterator[_Call]:
    """The operations of a program.

    Args:
      visited: the `id` of each program inside it that was visited: a function may be called in many places.
    """
    if id(jaxpr) in visited:
        return
    visited.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        if (op := kernel_op.OPS.get(eqn.primitive)) is not None:
            yield _Call(op.name, tuple(ArrayType.of(v.aval) for v in eqn.invars), **eqn.params)
        for inner in _programs(eqn.params):
            yield from _calls(inner, visited)


def _programs(params: Any) -> Iterable[Jaxpr]:
    """The programs among the parameters of an equation: of calls, loops and branches."""
    for value in jax.tree.leaves(params):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _kernels(call: _Call, target: hardware.Chip) -> Iterator[_Kernel]:
    """The kernels to compile for an operation: the chosen one, or those that its lowering will compare."""
    spec = call.static.typed(call.op, call.types, target)
    now = dispatch.policy.value
    try:
        # The choices are not those of a lowering: they are recorded here, and dropped.
        with dispatch.policy(now.without_measurements()), dispatch.recording():
            choice = dispatch.choose(call.op, spec, call.backend, call.config)
    except (NotImplementedError, ValueError):
        return  # The lowering raises it.
    if now.makes_comparisons and choice.close and tuner.device_for(target) is not None:
        for backend in choice.close:
            for config in dispatch.contenders(call.op, backend, spec):
                yield _Kernel(call.op, call.types, backend, spec, config, True)
    elif dispatch.REGISTRY[call.op, choice.backend].compiles_in_lowering:
        yield _Kernel(call.op, call.types, choice.backend, spec, choice.config, False)


def _compile(
    kernel: _Kernel, now: dispatch.Policy, turn: Callable[[str], contextlib.AbstractContextManager[None]]
) -> None:
    run = dispatch.load(kernel.op, kernel.backend).run
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.types]
    results = kernel.spec.results(kernel.op)
    with contextlib.suppress(Exception), turn(kernel.backend):  # The lowering raises what is wrong.
        if kernel.is_compared:
            tuner.compile_to_compare(kernel.op, kernel.spec, kernel.backend, kernel.config, operands, results)
            return
        with dispatch.policy(now), kernel_op.tracing([*operands, *results]):
            traced = jax.jit(functools.partial(run, kernel.spec, kernel.config)).trace(*operands)
            traced.lower(lowering_platforms=(kernel.spec.target.platform,))
