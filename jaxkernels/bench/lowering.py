"""Lowers a problem to programs that XLA can compile, in this process or in worker processes.

Lowering a Pallas kernel takes half a second of Python, and the threads of one process cannot do it at the same time.
`Workers` are processes that lower for the chip without having it. They return programs exported by `jax.export`
(StableHLO), and the process that has the chip compiles these. Workers do not touch the GPU, so they can work while
other programs are timed.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

import jaxkernels as jk
from jaxkernels import cudnn
from jaxkernels.bench.results import TimedKernel
from jaxkernels.core import dispatch, hardware, plain
from jaxkernels.core.cases import result_types
from jaxkernels.core.hardware import Chip
from jaxkernels.core.problems import Contender, Problem
from jaxkernels.tuning import ahead, tuner

__all__ = [
    "AUTO", "Lowered", "Workers", "are_same", "compile_ahead", "kernels_of", "lower", "masks", "our_function", "save",
    "shapes", "struct",
]  # fmt: skip

#: The name of the side without a named backend.
AUTO = "auto"


def our_function(problem: Problem, backend: str) -> Callable[[dict[str, jax.Array]], Any]:
    """The problem's forward pass on one of our backends, or on the one that `backend=None` takes (`AUTO`)."""
    return functools.partial(problem.case.forward, backend=None if backend == AUTO else backend)


def save(problem: Problem, function: Callable[..., Any], operands: dict[str, Any]) -> tuple[Any, Any]:
    """Returns the result and the pullback to the differentiated operands; the pullback is a pytree of residuals."""
    moving = {name: operands[name] for name in problem.case.moving}
    return jax.vjp(lambda moving: function(operands | moving), moving)


def masks(problem: Problem) -> dict[str, np.ndarray]:
    return problem.case.masks(np.random.default_rng(0))


def struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, jnp.dtype(x.dtype))


def shapes(problem: Problem) -> tuple[dict[str, Any], Any]:
    """Shapes and dtypes of the operands, and of the cotangent: an array's, or a tuple of those of several results."""
    operands = {name: struct(x) for name, x in (problem.case.draws | masks(problem)).items()}
    out, *others = map(struct, result_types(problem.case).values())
    return operands, (out, *others) if others else out


@dataclasses.dataclass(frozen=True)
class Lowered:
    """The lowered programs of a contender.

    Attributes:
      program: operands -> result, or (residuals, cotangent) -> gradients by name.
      forward: operands -> (result, residuals for the backward pass); None if the problem is a forward pass.
      kernels: the kernels chosen for our operations in both programs.
      timed: those in `program`, in a form that can be read back.
      seconds: the time that lowering took.
    """

    program: Any
    forward: Any | None
    kernels: tuple[str, ...]
    timed: tuple[TimedKernel, ...]
    seconds: float


def lower(problem: Problem, contender: Contender, num_calls: int = 1) -> Lowered:
    """Lowers in this process, for the default device. A program of several calls takes a tuple of arguments for each,
    and returns a list of results.
    """
    begin = time.perf_counter()
    make = lambda f, *xs: jax.jit(f).lower(*xs)
    return _lower(problem, contender, make, lambda x: x.out_info, begin, num_calls)


def compile_ahead(
    problem: Problem,
    contender: Contender,
    chip: Chip,
    turn: Callable[[str], contextlib.AbstractContextManager[None]],
) -> None:
    """Compiles the kernels of a contender, and the programs that `lower` will compare (`jk.compile_ahead`).

    Args:
      turn: backend -> a context in which its kernels are compiled.
    """

    def make(f: Callable[..., Any], *xs: Any) -> Any:
        traced = jax.jit(f).trace(*xs)
        ahead.compile_kernels(traced.jaxpr, chip, turn)
        return traced

    _, make_program = _lower_forward(problem, contender, make, lambda traced: traced.out_info)
    make_program()


def are_same(one: Lowered, other: Lowered) -> bool:
    """Whether XLA gets the same programs, with operands and results in the same places."""
    return _identity(one) == _identity(other)


def _identity(lowered: Lowered) -> list[Any]:
    """The programs without their names and those of results."""
    nameless = lambda text: re.sub(r'^module @\S+|jax\.result_info = "[^"]*"', "", text, flags=re.MULTILINE)
    both = (lowered.forward, lowered.program)
    return [one and (nameless(one.as_text()), one.in_tree, one.out_tree) for one in both]


def _lower(
    problem: Problem,
    contender: Contender,
    make: Callable[..., Any],
    results_of: Callable[[Any], Any],
    begin: float,
    num_calls: int = 1,
) -> Lowered:
    """Lowers the forward pass, unless the problem is one, and the program.

    Args:
      make: lowers a function for its operands' types.
      results_of: the types of the results of what `make` returns.
      begin: when lowering began.
      num_calls: the number of calls of the program.
    """
    with dispatch.recording() as first:
        forward, make_program = _lower_forward(problem, contender, make, results_of, num_calls)
    with dispatch.recording() as choices:
        program = make_program()
    timed = tuple(map(_timed, choices))
    return Lowered(program, forward, _described([*first, *choices]), timed, time.perf_counter() - begin)


def _lower_forward(
    problem: Problem,
    contender: Contender,
    make: Callable[..., Any],
    results_of: Callable[[Any], Any],
    num_calls: int = 1,
) -> tuple[Any | None, Callable[[], Any]]:
    """The forward pass (None if the problem is a forward pass), and a function that lowers the program."""
    operands, cotangent = shapes(problem)
    operands = jax.eval_shape(contender.prepare, operands)
    make_calls = make if num_calls == 1 else lambda f, *xs: make(tuner.each(f), *[xs] * num_calls)
    if problem.direction == "forward":
        return None, lambda: make_calls(contender.function, operands)
    trees = []

    def forward(operands: dict[str, jax.Array]) -> tuple[Any, list[jax.Array]]:
        out, pull = save(problem, contender.function, operands)
        saved, tree = jax.tree.flatten(pull)
        trees.append(tree)
        return out, saved

    def backward(saved: list[jax.Array], cotangent: Any) -> dict[str, jax.Array]:
        return jax.tree.unflatten(trees[-1], saved)(cotangent)[0]

    made = make(forward, operands)
    out, saved = jax.tree.map(struct, results_of(made))
    cotangent = jax.tree.map(lambda ct, x: jax.ShapeDtypeStruct(ct.shape, x.dtype), cotangent, out)
    return made, lambda: make_calls(backward, saved, cotangent)


def _described(choices: list[dispatch.Choice]) -> tuple[str, ...]:
    designs = (choice.design and f"{choice.design}." for choice in choices)
    return tuple(f"{c.op}: {c.backend} {design}{c.config}, {c.source}" for c, design in zip(choices, designs))


def _timed(choice: dispatch.Choice) -> TimedKernel:
    backend = dispatch.load(choice.op, choice.backend)
    config, spec = backend.encode(choice.config), plain.describe(choice.spec)
    return TimedKernel(choice.op, choice.backend, backend.version, config, spec)


def kernels_of(problem: Problem, backend: str | None, platform: str | None = None) -> list[tuple[str, Any]]:
    """The (operation, spec) of every kernel that a problem calls. For a forward problem, the kernels of the forward
    pass alone come first. Those of a gradient follow if one reference serves both: its forward pass may have other
    specs.

    Args:
      platform: what the program is lowered for, as in `jk.explain`. XLA refuses some precisions on a CPU.
    """
    case = problem.case
    operands: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(draw.shape, jnp.dtype(draw.dtype)) for name, draw in case.draws.items()
    }
    operands |= masks(problem)

    def program(operands: dict[str, Any]) -> Any:
        run = lambda moved: case.forward(operands | moved, backend=backend)
        is_forward = problem.direction == "forward"
        forward = run({}) if is_forward else None
        if is_forward and not case.one_reference:
            return forward
        out, pull = jax.vjp(run, {name: operands[name] for name in case.moving})
        return forward, out, pull(out)

    return [(choice.op, choice.spec) for choice in jk.explain(program, operands, platform=platform).choices]


class Workers:
    """Processes that lower our kernels for a chip. Leaving the context ends them.

    Args:
      count: the number of processes.
      chip: the chip to lower for; see `can_serve`.
    """

    def __init__(self, count: int, chip: Chip):
        if chip.platform == "cuda":
            # Registers the custom calls of compiled Pallas kernels. Lowering here would do the same.
            importlib.import_module("jax.experimental.mosaic.gpu")
            with contextlib.suppress(RuntimeError):  # No GPU or no launcher: the kernels will not run.
                jk.ffi.register()
        self._platform = chip.platform
        self._pool = concurrent.futures.ProcessPoolExecutor(
            count, multiprocessing.get_context("spawn"), _prepare, (chip.name if chip.platform == "cuda" else None,)
        )

    @staticmethod
    def can_serve(chip: Chip) -> bool:
        """Whether a process without the chip has the same description of it."""
        try:
            return chip.platform == "cpu" or (chip.platform == "cuda" and hardware.lookup(chip.name) == chip)
        except ValueError:
            return False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def start(self, problem: Problem, backend: str) -> Callable[[], Lowered]:
        """Starts to lower a kernel. The returned function waits for it, and raises the errors of `lower`."""
        future = self._pool.submit(_export, problem, backend, self._platform)

        def finish() -> Lowered:
            try:
                exported = future.result()
            except concurrent.futures.BrokenExecutor:  # A worker was killed (out of memory): lower here.
                return lower(problem, Contender(backend, our_function(problem, backend)))
            forward, program = map(_restored, (exported.forward, exported.program))
            return dataclasses.replace(exported, forward=forward, program=program)

        return finish


def _restored(blob: bytearray | None) -> Any:
    if blob is None:
        return None
    exported = export.deserialize(blob)
    args, kwargs = jax.tree.unflatten(exported.in_tree, map(struct, exported.in_avals))
    return jax.jit(exported.call).trace(*args, **kwargs).lower(lowering_platforms=exported.platforms)


def _prepare(target: str | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The process that started this one ends it.
    jax.config.update("jax_platforms", "cpu")
    if target is not None:
        os.environ["JAXKERNELS_TARGET"] = target


def _export(problem: Problem, backend: str, platform: str) -> Lowered:
    """Lowers in a worker. The programs are serialised."""
    begin = time.perf_counter()
    # The check is about other versions; both processes have the same one. Triton's kernels have the first target, too.
    targets = (jk.ffi.TARGET, jk.ffi.CUBLASLT_TARGET, *cudnn.TARGETS)
    allowed = [export.DisabledSafetyCheck.custom_call(name) for name in targets]
    make = lambda f, *xs: export.export(jax.jit(f), platforms=(platform,), disabled_checks=allowed)(*xs)
    results_of = lambda made: jax.tree.unflatten(made.out_tree, made.out_avals)
    try:
        with dispatch.policy(dispatch.Policy(exports_all=True)):
            made = _lower(problem, Contender(backend, our_function(problem, backend)), make, results_of, begin)
        forward, program = (None if one is None else one.serialize() for one in (made.forward, made.program))
    except NotImplementedError:
        raise
    except Exception as e:  # Some classes of errors cannot be pickled.
        raise RuntimeError(f"{type(e).__name__}: {e}") from None
    return dataclasses.replace(made, program=program, forward=forward, seconds=time.perf_counter() - begin)
