"""Triton kernels without a GPU: in Triton's interpreter, and compiled for any chip."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from jaxkernels.core import hardware
from jaxkernels.core.hardware import Chip
from jaxkernels.core.types import ArrayType
from jaxkernels.triton import calls

__all__ = ["CHIPS", "Compiled", "compiled", "interpreted", "planted"]

#: A chip of each compute capability that Triton compiles for.
CHIPS = tuple(
    hardware.lookup(name)
    for name in (
        "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 3090", "NVIDIA L4", "NVIDIA H200", "NVIDIA B200",
        "NVIDIA GeForce RTX 5090",
    )
)  # fmt: skip


class _Buffer:
    """A NumPy array in the place of a PyTorch tensor, as far as Triton's interpreter asks for one."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.dtype = SimpleNamespace(__str__=lambda: array.dtype.name)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    # The storage is the buffer itself, and on the host already.
    def untyped_storage(self) -> _Buffer:
        return self

    def cpu(self) -> _Buffer:
        return self

    def copy_(self, other: _Buffer) -> None:
        assert other.array is self.array

    def new_empty(self, size: int, device: str) -> _Buffer:
        return _Buffer(self.array)

    def set_(self, storage: _Buffer, *geometry: Any) -> None:
        self.array = storage.array

    storage_offset = size = stride = lambda self: None


def _pointer(buffer: _Buffer) -> tl.tensor:
    name = "*" + calls.TYPES[buffer.array.dtype.name]
    dtype = tl.str_to_ty(name, None)
    return tl.tensor(interpreter.TensorHandle(np.array([buffer.data_ptr()], np.uint64), dtype), dtype)


def _dot(self: Any, a: Any, b: Any, c: Any, *options: Any) -> Any:
    """a b + c, in float32. Triton's interpreter would multiply the bits of bfloat16 as integers."""
    wide = [
        (x.data.astype(np.uint32) << 16).view(np.float32) if x.dtype == tl.bfloat16 else x.data.astype(np.float32)
        for x in (a, b)
    ]
    return interpreter.TensorHandle(np.matmul(*wide).astype(c.data.dtype) + c.data, c.dtype.scalar)


def _inline_asm(
    self: Any, asm: str, constraints: str, operands: Sequence[Any], types: Sequence[Any], is_pure: bool, pack: int
) -> Any:
    """A move of registers, or a prefetch into L2, which changes nothing."""
    if asm != "mov.b32 $0, $1;" and "cp.async.bulk.prefetch.L2" not in asm:
        raise NotImplementedError(asm)
    return SimpleNamespace(get_result=lambda index: operands[index])


@contextlib.contextmanager
def _interpretable(modules: Sequence[ModuleType]) -> Iterator[None]:
    """Functions of these modules and of Triton's language run in Python where they call each other."""
    places = [tl, tl.standard, tl.math, tl.core, *modules]
    before = {place: dict(vars(place)) for place in places}
    # Triton would patch its language at each call, and not undo it after calls inside of kernels.
    exec("def f(): pass", languages := {"tl": tl, "core": tl.core})
    patched = interpreter._patch_lang(languages["f"])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(interpreter, "_patch_lang", lambda function: SimpleNamespace(restore=lambda: None))
            patch.setattr(interpreter.InterpretedFunction, "rewritten_fn", {})
            patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
            patch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", _inline_asm)
            # NumPy makes no number of an array with an axis, not even of size 1.
            patch.setattr(tl.tensor, "__index__", lambda self: int(self.handle.data.item()))
            convert = interpreter._implicit_cvt
            patch.setattr(interpreter, "_implicit_cvt", lambda x: _pointer(x) if isinstance(x, _Buffer) else convert(x))
            for place in places:
                for name, value in before[place].items():
                    if isinstance(value, JITFunction) and vars(place)[name] is value:
                        patch.setattr(place, name, interpreter.InterpretedFunction(value.fn))
            yield
    finally:
        patched.restore()
        for place, names in before.items():  # The interpreter leaves names of its own in modules.
            vars(place).clear()
            vars(place).update(names)


@contextlib.contextmanager
def interpreted(*modules: ModuleType) -> Iterator[None]:
    """Runs kernels in Triton's interpreter, on concrete arrays. Results begin as NaN, or the least integer.

    Args:
      modules: those that hold the kernels and what the kernels call.
    """

    def call_kernel(
        kernel: Any, operands: Sequence[jax.Array], results: Sequence[ArrayType], *, grid: tuple[int, ...],
        constants: Mapping[str, Any], **options: Any,
    ) -> list[jax.Array]:  # fmt: skip
        arrays = [np.array(x) for x in operands]
        for result in results:
            floating = jnp.issubdtype(result.dtype, jnp.floating)
            arrays.append(np.full(result.shape, np.nan if floating else np.iinfo(result.dtype).min, result.dtype))
        kernel[grid](*(_Buffer(x) for x in arrays), **constants)
        return [jnp.asarray(x) for x in arrays[len(operands) :]]

    with _interpretable(modules), pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "call_kernel", call_kernel)
        yield


@contextlib.contextmanager
def planted(module: ModuleType, name: str, right: str, wrong: str, folder: pathlib.Path) -> Iterator[None]:
    """Replaces a function of Triton code by one with a mistake, wherever it was imported.

    Args:
      right, wrong: text that occurs once in the function's source, and what takes its place.
      folder: where the faulty source is written; Triton reads it there.
    """
    function = vars(module)[name]
    source = textwrap.dedent(inspect.getsource(function.fn))
    assert source.count(right) == 1, f"{right!r} occurs {source.count(right)} times in {module.__name__}.{name}"
    path = folder / f"{name}.py"
    path.write_text(source.replace(right, wrong))
    users = [m for m in sys.modules.values() if m.__name__.startswith("jaxkernels.triton.")]
    users = [m for m in users if vars(m).get(name) is function]
    try:
        exec(compile(path.read_text(), str(path), "exec"), vars(module))
        for user in users:
            setattr(user, name, vars(module)[name])
        yield
    finally:
        for user in users:
            setattr(user, name, function)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as ptxas made it.

    Attributes:
      name: the kernel's.
      registers: of a thread.
      spilled: bytes that a thread stores in and loads from memory in place of registers.
      shared: bytes of shared memory.
      ptx: its text.
    """

    name: str
    registers: int
    spilled: int
    shared: int
    ptx: str


def compiled(chip: Chip, function: Callable[..., Any], *types: ArrayType) -> list[Compiled]:
    """Compiles the kernels that a function of these arrays calls, for a chip; runs none."""
    found: list[Compiled] = []

    def call_kernel(
        kernel: Any, operands: Sequence[Any], results: Sequence[ArrayType], *, grid: tuple[int, ...], num_warps: int,
        num_stages: int, constants: Mapping[str, Any], target: Any, in_place: bool = False,
    ) -> list[jax.Array]:  # fmt: skip
        types = [*map(ArrayType.of, operands), *results]
        capability = chip.compute_capability
        assert capability is not None
        made = calls.compile_to_ptx(kernel, types, [*constants.items()], capability, num_warps, num_stages)
        found.append(_assembled(made.metadata.name, made.asm["ptx"], made.metadata.shared, capability))
        return [jnp.zeros(x.shape, x.dtype) for x in results]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "call_kernel", call_kernel)
        jax.eval_shape(lambda *xs: function(*xs), *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in types))
    return found


def _assembled(name: str, ptx: str, shared: int, capability: tuple[int, int]) -> Compiled:
    """What ptxas says of a kernel."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [
            get_ptxas(10 * capability[0] + capability[1]).path,
            "-v",
            f"--gpu-name={calls.architecture(capability)}",
            file.name,
            "-o",
            "/dev/null",
        ]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return Compiled(name, int(re.findall(r"Used (\d+) registers", said)[0]), int(stores) + int(loads), shared, ptx)


assert ml_dtypes  # NumPy learns bfloat16.
