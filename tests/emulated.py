"""CUDA kernels on a CPU: their sources, compiled by g++ with an emulator in place of the engine's headers
(tests/cuda/emulated)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkernels.ffi import compiler, custom_call

__all__ = ["DYNAMIC_SMEM", "NEEDS_COMPILER", "Emulator"]

NEEDS_COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

#: How kernels declare dynamic shared memory, which a C++ compiler refuses, and the replacement.
DYNAMIC_SMEM = {
    "extern __shared__ __align__(1024) unsigned char dynamic_smem[];":
    "unsigned char* dynamic_smem = emulator::shared_memory();",
}  # fmt: skip

_EMULATED = pathlib.Path(__file__).parent / "cuda" / "emulated"
#: Each library has an emulator of its own.
_COMPILE = ["g++", "-std=c++20", "-O1", "-fno-strict-aliasing", "-fPIC", "-fno-gnu-unique", "-I", str(_EMULATED)]
#: The kernel's file, beside the headers it includes.
_SOURCE = "kernel.cu"
#: Compiled once, they save each library a third of its time.
_PRECOMPILED = "headers.h"

_TYPES = ("float32", "float16", "bfloat16", "int32", "uint32")


class _Map(ctypes.Structure):
    """A tensor map of emulated/tma.cuh, innermost dimension first."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("sizes", ctypes.c_longlong * 5),
        ("byte_strides", ctypes.c_longlong * 5),
        ("box", ctypes.c_int * 5),
        ("rank", ctypes.c_int),
        ("swizzle_bytes", ctypes.c_int),
        ("element_bytes", ctypes.c_int),
        ("type", ctypes.c_int),
        ("fills_nan", ctypes.c_int),
    )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """As `compiler.CompiledKernel`: the "cubin" is the path of a library."""

    cubin: str
    name: str
    report: None = None


class Emulator:
    """Takes the place of the compiler and of the launch.

    Attributes:
      seed: decides the order in which threads, copies and products run.
      edits: what to change in the kernels' text.
      is_at_once: whether the blocks of a grid run together, for kernels whose blocks wait for each other.
      smem_alignment: bytes that the kernels' dynamic shared memory is declared to be aligned to.
    """

    def __init__(self, folder: pathlib.Path, translated: Mapping[str, Mapping[str, str]], smem_alignment: int = 1024):
        """`translated`: by a kernel's name, what of its text no C++ compiler takes, and what stands for it."""
        self._folder, self._translated = folder, translated
        self.seed = 0
        self.is_at_once = False
        self.edits: dict[str, str] = {}
        self.smem_alignment = smem_alignment
        headers = folder / _PRECOMPILED
        if not headers.exists():
            headers.write_text('#include "wgmma.cuh"\n')
            subprocess.run([*_COMPILE, "-x", "c++-header", str(headers), "-o", f"{headers}.gch"], check=True)

    @contextlib.contextmanager
    def installed(self) -> Iterator[Emulator]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiler, "compile_kernel", self.compile_kernel)
            patch.setattr(custom_call, "launch", self.launch)
            yield self

    def compile_kernel(self, source: str, name: str, *, defines: Mapping[str, Any] | None = None, **_: Any) -> Compiled:
        """In place of `compiler.compile_kernel`."""
        translated = self._translated[name.partition("<")[0]]
        for old, new in translated.items():
            if old not in source:
                raise ValueError(f"to be translated, not in the kernel's text: {old!r}")
            source = source.replace(old, new)
        texts = self._edited({_SOURCE: source, **self._own_headers(source)})
        macros = [f"-D{macro}={compiler.literal(value)}" for macro, value in sorted((defines or {}).items())]
        macros += [f"-DKERNEL={name}", f'-DKERNEL_NAME="{name.rpartition("::")[2] if "<" not in name else name}"']
        key = "\0".join([*texts, *texts.values(), *macros])
        stem = self._folder / hashlib.sha256(key.encode()).hexdigest()[:16]
        library = stem.with_suffix(".so")
        if not library.exists():
            stem.mkdir(exist_ok=True)
            for file, text in texts.items():
                (stem / file).write_text(text)
            command = [*_COMPILE, "-shared", "-include", str(self._folder / _PRECOMPILED)]
            command.append(f'-DKERNEL_SOURCE="{stem / _SOURCE}"')
            subprocess.run([*command, *macros, str(_EMULATED / "run.cc"), "-o", str(library)], check=True)
        return Compiled(str(library), name)

    def _own_headers(self, source: str) -> dict[str, str]:
        """The engine's headers that the source includes and that are not emulated."""
        headers = compiler._with_own_headers(source, {path.name: path.read_text() for path in _EMULATED.glob("*.cuh")})
        return {name: text for name, text in headers.items() if not (_EMULATED / name).exists()}

    def _edited(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Plants `edits`, each of which must be in one place, unless the kernel has none of them."""
        count = {old: sum(text.count(old) for text in texts.values()) for old in self.edits}
        if not any(count.values()):
            return dict(texts)
        for old in self.edits:
            if count[old] != 1:  # No AssertionError, which some tests wait for.
                raise ValueError(f"to be replaced, {count[old]} times in the kernel's text: {old!r}")
            texts = {name: text.replace(old, self.edits[old]) for name, text in texts.items()}
        return dict(texts)

    def launch(
        self,
        cubin: str,
        name: str,
        operands: Sequence[Any],
        results: Sequence[jax.ShapeDtypeStruct],
        *,
        parameters: Sequence[custom_call.Parameter],
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int] = (1,),
        smem_bytes: int = 0,
        input_output_aliases: Mapping[int, int] | None = None,
        **_: Any,
    ) -> list[jax.Array]:
        """In place of `custom_call.launch`."""
        outs = [np.full(x.shape, 0, x.dtype) for x in results]
        for out in outs:
            out.reshape(-1).view(np.uint8)[...] = 0xFF
        for operand, result in (input_output_aliases or {}).items():
            outs[result][...] = operands[operand]
        buffers = [*(np.asarray(x) for x in operands), *outs]
        values = [_value(parameter, buffers) for parameter in parameters]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        run = ctypes.CDLL(cubin).run
        run.restype = ctypes.c_char_p
        error = run(
            pointers, grid[0], block[0], cluster[0], smem_bytes, self.smem_alignment, self.is_at_once, self.seed
        )
        if error:
            raise RuntimeError(error.decode())
        return [jnp.asarray(out) for out in outs]


def _value(parameter: custom_call.Parameter, buffers: Sequence[np.ndarray]) -> Any:
    """The argument of a kernel for a parameter."""
    if isinstance(parameter, np.generic):
        return ctypes.create_string_buffer(parameter.tobytes(), parameter.nbytes)
    if isinstance(parameter, tuple):
        return (_Map * len(parameter))(*(_map(buffers[one.buffer], one) for one in parameter))
    buffer = buffers[parameter.buffer]
    if isinstance(parameter, custom_call.Pointer):
        return ctypes.c_void_p(buffer.ctypes.data + parameter.offset)
    return _map(buffer, parameter)


def _map(buffer: np.ndarray, parameter: custom_call.TensorMap) -> _Map:
    """As the launcher encodes it, from the attributes of the custom call."""
    described = custom_call.check(
        "emulated", [jax.ShapeDtypeStruct(buffer.shape, buffer.dtype)],
        parameters=[dataclasses.replace(parameter, buffer=0)], grid=(1,), block=(1,),
    )  # fmt: skip
    sizes, strides, box = (described[f"parameter0.{what}"].tolist() for what in ("sizes", "byte_strides", "box"))
    five = lambda kind, values: (kind * 5)(*values, *[1] * (5 - len(values)))
    dtype, swizzle = described["parameter0.dtype"], described["parameter0.swizzle"]
    return _Map(
        buffer.ctypes.data + parameter.offset,
        five(ctypes.c_longlong, sizes),
        five(ctypes.c_longlong, [buffer.itemsize, *strides]),
        five(ctypes.c_int, box),
        len(box),
        16 if swizzle == "none" else int(swizzle.removesuffix("B")),
        buffer.itemsize,
        1 + _TYPES.index(dtype) if dtype in _TYPES else 0,
        described["parameter0.fill"] == "nan",
    )
