"""Calls of Triton kernels: compiled to PTX by Triton, assembled and launched by the package's own engine.

A call is the same custom call as that of a CUDA C++ kernel. So XLA captures it in CUDA graphs, and lets it read and
write slices of larger arrays. Triton compiles for the chip that a call names: no GPU is needed to lower a program.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxkernels.core.hardware import Chip, needs_capability
from jaxkernels.core.types import ArrayType
from jaxkernels.ffi import assembler, handler
from jaxkernels.ffi.cubin import parameter_bytes
from jaxkernels.ffi.custom_call import Pointer, launch

__all__ = [
    "OLDEST_CAPABILITY", "TARGETS", "TYPES", "architecture", "call_kernel", "check_schedule", "compile_to_ptx",
    "missing", "unsupported_chip", "version",
]  # fmt: skip

#: Compute capability from which on Triton compiles 16-bit products for tensor cores with asynchronous copies.
OLDEST_CAPABILITY = (8, 0)

#: Names of the custom calls. `jax.export` takes them only with its check disabled.
TARGETS = (handler.TARGET,)

_OLDEST = (3, 6)
_THREADS_OF_WARP = 32

#: What Triton calls the types of arrays.
TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "int8": "i8", "int16": "i16",
    "int32": "i32", "int64": "i64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64", "bool": "i1",
}  # fmt: skip


def unsupported_chip(chip: Chip) -> str | None:
    """Why the kernels cannot be compiled for a chip, or None."""
    needs = needs_capability(chip, OLDEST_CAPABILITY)
    return None if needs is None else f"{needs}, the target is {chip}"


def check_schedule(label: str, num_warps: int, num_stages: int) -> None:
    """Raises ValueError unless Triton takes these.

    Args:
      label: what messages begin with, as "matmul[triton]".
    """
    if num_warps not in (1, 2, 4, 8, 16):
        raise ValueError(f"{label}: num_warps must be 1, 2, 4, 8 or 16; got {num_warps}.")
    if not 1 <= num_stages <= 8:
        raise ValueError(f"{label}: num_stages must be from 1 to 8; got {num_stages}.")


@functools.cache
def missing() -> str | None:
    """Why no Triton kernel can be launched from this Python, or None. The reason ends with the way out."""
    if (found := version()) is None:
        return "needs triton: pip install 'jaxkernels[triton]'"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:2]) < _OLDEST:
        return f"needs triton 3.6 or newer, found {found}: pip install -U 'jaxkernels[triton]'"
    if (reason := handler.missing_launcher() or assembler.missing()) is not None:
        return reason
    try:
        importlib.import_module("triton")
    except Exception as e:
        return f"triton {found} cannot be imported: {type(e).__name__}: {e}"
    return None


def version() -> str | None:
    """The version of Triton; None if it is not installed."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None


def call_kernel(
    kernel: Any,
    operands: Sequence[jax.Array],
    results: Sequence[ArrayType],
    *,
    target: Chip,
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int,
    constants: Mapping[str, Any],
    in_place: bool = False,
) -> list[jax.Array]:
    """Launches a Triton kernel.

    Args:
      kernel: a function decorated with `triton.jit`. Its parameters are pointers to the operands, pointers to the
        results, and `constants` as `tl.constexpr`.
      operands: arrays in row-major order. Triton takes it that each begins at a multiple of 16 bytes, as XLA's do.
      results: types of what the kernel writes.
      target: the chip to compile for.
      grid: the number of programs in up to three dimensions.
      num_warps: warps of a program.
      num_stages: the depth of the pipelines that Triton makes of loops.
      constants: values known at compile time, by name; they must be hashable.
      in_place: whether the last result takes the place of the first operand in memory, where XLA can.
    """
    types = (*map(ArrayType.of, operands), *results)
    binary = _compile(kernel, types, tuple(constants.items()), target.compute_capability, num_warps, num_stages)
    pointers = [Pointer(i) for i in range(len(types))]
    return launch(
        binary.cubin,
        binary.name,
        operands,
        [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results],
        parameters=[*pointers, *[np.uint64(0)] * binary.num_hidden],
        grid=grid,
        block=(_THREADS_OF_WARP * num_warps,),
        smem_bytes=binary.smem_bytes,
        input_output_aliases={0: len(results) - 1} if in_place else None,
        target=target,
    )


@dataclasses.dataclass(frozen=True)
class _Binary:
    """A compiled kernel.

    Attributes:
      cubin, name: the code, and the kernel's symbol in it.
      smem_bytes: dynamic shared memory of a program.
      num_hidden: parameters after those of the source: pointers to memory that Triton's launcher would allocate. Our
        kernels need none.
    """

    cubin: bytes
    name: str
    smem_bytes: int
    num_hidden: int


@functools.lru_cache(maxsize=4096)
def _compile(
    kernel: Any,
    types: tuple[ArrayType, ...],
    constants: tuple[tuple[str, Any], ...],
    capability: tuple[int, int] | None,
    num_warps: int,
    num_stages: int,
) -> _Binary:
    made = compile_to_ptx(kernel, types, constants, capability, num_warps, num_stages)
    if made.metadata.global_scratch_size:
        raise NotImplementedError(f"{kernel.__name__}[triton]: needs scratch memory, which is not allocated here.")
    name = made.metadata.name
    # Not by Triton's own assembler: that of Triton 3.6 is of CUDA 12.8.
    cubin = assembler.assemble(made.asm["ptx"], name, architecture(capability))
    taken = parameter_bytes(cubin, name)
    # Triton 3.6 and newer: a pointer to scratch memory, and one to memory of its profiler.
    num_hidden = 2 if taken is None else len(taken) - len(types)
    return _Binary(cubin, name, made.metadata.shared, num_hidden)


def compile_to_ptx(
    kernel: Any,
    types: Sequence[ArrayType],
    constants: Sequence[tuple[str, Any]],
    capability: tuple[int, int] | None,
    num_warps: int,
    num_stages: int,
) -> Any:
    """What Triton makes of a kernel: `asm["ptx"]` and `metadata`. `types` are those of operands and results."""
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = dict(constants)
    signature = {name: f"*{TYPES[x.dtype.name]}" for name, x in zip((p.name for p in kernel.params), types)}
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(names, "constexpr"),
        constexprs=names,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(types))},
    )
    major, minor = capability or (0, 0)
    # Fused multiply-add is on by default up to Triton 3.9, and off from 3.10 on.
    options = dict(num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)
    return compile_source(source, target=GPUTarget("cuda", 10 * major + minor, _THREADS_OF_WARP), options=options)


def architecture(capability: tuple[int, int] | None) -> str:
    """The architecture of the code for a compute capability, as assemblers name it."""
    major, minor = capability or (0, 0)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"
