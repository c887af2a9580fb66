"""Compiles the kernels of a program side by side, before the program is lowered."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr

from jaxkernels.core import _jax, dispatch, hardware, kernel_op
from jaxkernels.core.types import ArrayType

__all__ = ["compile_ahead"]

#: Compilers run outside of Python's lock, each in its thread.
_THREADS = min(os.cpu_count() or 1, 16)


def compile_ahead(traced: jax.stages.Traced) -> None:
    """Compiles the CUDA and Triton kernels of a traced program side by side, in threads.

    >>> traced = jax.jit(train_step).trace(state, batch)
    >>> jk.compile_ahead(traced)
    >>> step = traced.lower().compile()

    JAX lowers one operation after the other, and a CUDA or Triton kernel is compiled when its operation is lowered.
    After this call the lowering finds the kernels compiled. The program is the same without this call. Where a lowering
    will compare backends (`jk.comparing`), the kernels to be compared are compiled.

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
        compile_kernels(traced.jaxpr)


def compile_kernels(program: ClosedJaxpr) -> None:
    """Compiles the kernels of a program for the chip of `hardware.cuda_target()`."""
    now, begun = dispatch.policy.value, set[_Kernel]()
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        for call in dict.fromkeys(_calls(program.jaxpr)):
            # While one operation's kernel is chosen, those of others are compiled.
            for kernel in _kernels(call):
                if kernel not in begun:
                    begun.add(kernel)
                    pool.submit(_compile, kernel, now)


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
    """A kernel that an operation may get."""

    op: str
    types: tuple[ArrayType, ...]
    backend: str
    spec: Any
    config: Any


def _calls(jaxpr: Jaxpr) -> Iterator[_Call]:
    """The operations of a program. A function that is called several times may have them several times."""
    for eqn in jaxpr.eqns:
        if (op := kernel_op.OPS.get(eqn.primitive)) is not None:
            yield _Call(op.name, tuple(ArrayType.of(v.aval) for v in eqn.invars), **eqn.params)
        for inner in _programs(eqn.params):
            yield from _calls(inner)


def _programs(params: Any) -> Iterable[Jaxpr]:
    """The programs among the parameters of an equation: of calls, loops and branches."""
    for value in jax.tree.leaves(params):
        if isinstance(value, ClosedJaxpr):
            yield value.jaxpr
        elif isinstance(value, Jaxpr):
            yield value


def _kernels(call: _Call) -> Iterator[_Kernel]:
    """The kernels to compile for an operation: the chosen one, or those that its lowering will compare."""
    spec = call.static.typed(call.op, call.types, hardware.cuda_target())
    now = dispatch.policy.value
    comparisons = "ignored" if now.comparisons == "ignored" else "known"
    try:
        # The choices are not those of a lowering: they are recorded here, and dropped.
        with dispatch.policy(dataclasses.replace(now, tune=None, comparisons=comparisons)), dispatch.recording():
            choice = dispatch.choose(call.op, spec, call.backend, call.config)
    except (NotImplementedError, ValueError):
        return  # The lowering raises it.
    configs = {choice.backend: choice.config}
    if now.makes_comparisons and len(choice.close) > 1:
        configs = {backend: dispatch.config_of(call.op, backend, spec) for backend in choice.close}
    for backend, config in configs.items():
        if dispatch.REGISTRY[call.op, backend].compiles_in_lowering:
            yield _Kernel(call.op, call.types, backend, choice.spec, config)


def _compile(kernel: _Kernel, now: dispatch.Policy) -> None:
    def run(*xs: jax.Array) -> Any:
        return dispatch.load(kernel.op, kernel.backend).run(kernel.spec, kernel.config, *xs)

    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in kernel.types]
    as_lowered = _jax.ignore_x64([*kernel.types, *kernel.spec.results(kernel.op)])
    # The lowering raises what is wrong.
    with contextlib.suppress(Exception), dispatch.policy(now), kernel_op.usual_promotion(), as_lowered:
        jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",))
