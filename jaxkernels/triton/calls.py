"""Calls of Triton kernels through jax-triton: the one place that knows its versions.

jax-triton 0.3 fits Triton 3.6, and jax-triton 0.4 fits Triton 3.7 and newer. They differ in the names of two arguments.
jax-triton compiles for the chip that a call names, so no GPU is needed to lower a program. Its own primitive has no
derivative, no rule for vmap and none for meshes: ours has them, and reaches a kernel only when it is lowered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax

from jaxkernels.core import _jax
from jaxkernels.core.hardware import Chip, needs_capability
from jaxkernels.core.types import ArrayType

__all__ = ["OLDEST_CAPABILITY", "TARGETS", "call_kernel", "check_schedule", "missing", "unsupported_chip", "versions"]

#: Compute capability from which on Triton compiles 16-bit products for tensor cores with asynchronous copies.
OLDEST_CAPABILITY = (8, 0)

#: Names of the custom call of jax-triton 0.3 and 0.4. `jax.export` takes it only with its check disabled.
TARGETS = ("triton_kernel_call", "triton_kernel_call_ffi")

#: jax-triton from here on takes the results as `out_type` and needs Triton 3.7; before, `out_shape` and Triton 3.6.
_OUT_TYPE_SINCE = (0, 4)
_TRITON_OF_OUT_TYPE = (3, 7)
_OLDEST_TRITON = (3, 6)
_OLDEST_JAX_TRITON = (0, 3)


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
    found = versions()
    if absent := [name for name, version in found.items() if version is None]:
        return f"needs {' and '.join(absent)}: pip install 'jaxkernels[triton]'"
    jax_triton, triton = (_number(version or "") for version in found.values())
    if triton < _OLDEST_TRITON:
        return f"needs triton 3.6 or newer, found {found['triton']}: pip install -U 'jaxkernels[triton]'"
    if jax_triton < _OLDEST_JAX_TRITON:
        return f"needs jax-triton 0.3 or newer, found {found['jax-triton']}: pip install -U 'jaxkernels[triton]'"
    if (jax_triton >= _OUT_TYPE_SINCE) != (triton >= _TRITON_OF_OUT_TYPE):
        fitting = "'jax-triton>=0.4'" if triton >= _TRITON_OF_OUT_TYPE else "'jax-triton==0.3.*'"
        return f"jax-triton {found['jax-triton']} does not fit triton {found['triton']}: pip install {fitting}"
    if not _jax.has_triton_calls():
        return "needs JAX's CUDA plugin: pip install 'jaxkernels[cuda13]' (or cuda12)"
    try:
        _jax_triton()
    except Exception as e:
        return f"jax-triton {found['jax-triton']} cannot be imported: {type(e).__name__}: {e}"
    return None


def versions() -> dict[str, str | None]:
    """Installed versions of jax-triton and triton; None for what is not installed."""
    found: dict[str, str | None] = {}
    for name in ("jax-triton", "triton"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _number(version: str) -> tuple[int, ...]:
    """Major and minor version."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@functools.cache
def _jax_triton() -> ModuleType:
    """Imports jax-triton, and takes back or mends what the import does to others.

    - jax-triton removes or clears the variable TRITON_CACHE_DIR: it stays what it was.
    - jax-triton 0.4.1 has a rule for dead code that JAX 0.12 cannot call.
    """
    name = "TRITON_CACHE_DIR"
    before = os.environ.get(name)
    try:
        module = importlib.import_module("jax_triton")
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    _jax.adapt_dead_code_rule(module.triton_lib.triton_kernel_call_p)
    return module


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
    in_place: Any = None,
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
      in_place: if given, the last result takes the place of the first operand in memory. It is the same kernel without
        a pointer to that result, as jax-triton 0.4 calls it. jax-triton 0.3 passes the pointer.
    """
    major, minor = target.compute_capability or (0, 0)
    shapes = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    # Fused multiply-add is on by default up to Triton 3.9, and off from 3.10 on.
    options: dict[str, Any] = dict(enable_fp_fusion=True)
    has_out_type = _number(versions()["jax-triton"] or "") >= _OUT_TYPE_SINCE
    options = dict(out_type=shapes, backend_options=options) if has_out_type else dict(out_shape=shapes, **options)
    if in_place is not None:
        options |= dict(input_output_aliases={0: len(results) - 1})
        kernel = in_place if has_out_type else kernel
    # jax-triton 0.4 would have mutable arrays here, which our primitives do not take.
    with contextlib.nullcontext() if in_place is None else _without_warning("input_output_aliases"):
        return list(
            _jax_triton().triton_call(
                *operands,
                kernel=kernel,
                grid=grid,
                num_warps=num_warps,
                num_stages=num_stages,
                compute_capability=10 * major + minor,
                **options,
                **constants,
            )
        )


@contextlib.contextmanager
def _without_warning(name: str) -> Iterator[None]:
    """Without the warning that an argument is deprecated. It changes the warnings of all threads meanwhile."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", name, DeprecationWarning)
        yield
