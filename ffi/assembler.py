"""PTX to a cubin: nvJitLink, which comes with JAX's CUDA packages, and a cache on disk.

It needs neither a GPU nor a CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import re
from types import ModuleType
from typing import Any

from jaxkernels.core.errors import first_line
from jaxkernels.core.folders import cache_root
from jaxkernels.ffi.compiler import CompiledKernel, CompileError, read_cached, write_cached

__all__ = ["OLDEST", "assemble", "missing", "version"]

#: Older ones miscompile products of Triton: CUDA 12.8 gives a wgmma a descriptor of which it never wrote a register.
OLDEST = (12, 9)

#: nvJitLink -> the newest version of PTX that it surely takes. What declares a newer one is assembled as this one:
#: Triton declares the newest one that its own assembler takes, and uses 8.6.
_PTX = {(13, 0): (9, 0), OLDEST: (8, 8)}
_VERSION = re.compile(r"^\.version (\d+)\.(\d+)$", re.MULTILINE)

_WAY_OUT = 'Install it with the package: pip install "jaxkernels[cuda13]" (or cuda12).'


def assemble(ptx: str, kernel: str, arch: str) -> bytes:
    """Assembles PTX, or takes the result from the cache.

    Args:
      ptx: the text.
      kernel: a kernel in it, for messages.
      arch: the architecture of the code, as "sm_90a".

    Raises:
      CompileError: nvJitLink refuses the text.
      ImportError: it is not installed.
    """
    key = hashlib.sha256(repr((version(), arch, ptx)).encode()).hexdigest()
    path = cache_root() / "cubins" / f"{key}.zip"
    if (cached := read_cached(path)) is not None:
        return cached.cubin
    newest = next(ptx for linker, ptx in _PTX.items() if version() >= linker)
    declared = lambda found: ".version {}.{}".format(*min(newest, (int(found[1]), int(found[2]))))
    cubin = _assemble(_VERSION.sub(declared, ptx, count=1).encode(), kernel, arch)
    write_cached(path, CompiledKernel(cubin, kernel, None, ""))
    return cubin


def _assemble(ptx: bytes, kernel: str, arch: str) -> bytes:
    linker = _linker()
    options = [f"-arch={arch}"]
    handle = linker.create(len(options), options)
    try:
        linker.add_data(handle, linker.InputType.PTX, ptx, len(ptx), kernel)
        linker.complete(handle)
        cubin = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, cubin)
        return bytes(cubin)
    except linker.nvJitLinkError as e:
        log = _log(linker, handle)
        first = next((line for line in log.splitlines() if line.strip()), str(e))
        raise CompileError(f"assemble[nvjitlink]: {kernel} for {arch}: {first.strip()}", log) from e
    finally:
        linker.destroy(handle)


def _log(linker: ModuleType, handle: Any) -> str:
    log = bytearray(linker.get_error_log_size(handle))
    with contextlib.suppress(linker.nvJitLinkError):
        linker.get_error_log(handle, log)
    return log.rstrip(b"\0").decode(errors="replace")


@functools.cache
def version() -> tuple[int, int]:
    """Version of nvJitLink (major, minor).

    Raises:
      ImportError: it is not installed; the message says how to install it.
    """
    try:
        linker = _linker()
    except ImportError as e:
        raise ImportError(f"nvJitLink: the package cuda-bindings cannot be imported; got {e}. {_WAY_OUT}") from e
    try:
        major, minor = linker.version()
    except RuntimeError as e:  # What cuda-pathfinder raises for a library it cannot find.
        raise ImportError(f"nvJitLink: the library cannot be loaded; got {first_line(e)}. {_WAY_OUT}") from e
    return major, minor


def missing() -> str | None:
    """Why nothing can be assembled, or None. The reason ends with the way out."""
    try:
        found = version()
    except ImportError as e:
        return f"needs {e}"
    if found < OLDEST:
        listed = lambda numbers: ".".join(map(str, numbers))
        return f"needs nvJitLink {listed(OLDEST)} or newer, found {listed(found)}: pip install -U nvidia-nvjitlink-cu12"
    return None


def _linker() -> ModuleType:
    return importlib.import_module("cuda.bindings.nvjitlink")
