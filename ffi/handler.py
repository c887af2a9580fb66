"""The compiled part of this package: where it is, and its registration with JAX.

`launcher.cc` and `cublaslt.cc` are built when the package is installed, where a C++ compiler and the
headers are to be had. XLA knows their handlers under the names `TARGET` and `CUBLASLT_TARGET`; a program
that calls one, also one that was exported on another machine, needs `register()` before it runs.
`jaxkernels.ffi.launch` sees to that by itself.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import importlib
import pathlib
import sys
import threading

import jax

from jaxkernels.core import _jax
from jaxkernels.core.errors import first_line
from jaxkernels.ffi import compiler

__all__ = [
    "CUBLASLT_TARGET", "TARGET", "Status", "has_cuda", "has_cuda_device", "launch_count", "load_cublaslt", "missing",
    "missing_launcher", "register", "status",
]  # fmt: skip

#: The handler's name in compiled and exported programs. Those outlive a release: a change of the
#: attributes (see launcher.cc) that an old program would not survive takes a new name.
TARGET = "jaxkernels_launch_v1"

#: The same of products by cuBLASLt (cublaslt.cc).
CUBLASLT_TARGET = "jaxkernels_cublaslt_v1"

#: Target -> the name of its state's type, and the beginnings of the symbols of that type and of the stages.
_HANDLERS = {
    TARGET: ("jaxkernels_launch_state_v1", "jaxkernels_launch", "jaxkernels"),
    CUBLASLT_TARGET: ("jaxkernels_cublaslt_state_v1", "jaxkernels_cublaslt", "jaxkernels_cublaslt"),
}
_STAGES = ("instantiate", "initialize", "execute")
_LIBRARY = "libjaxkernels_launcher.so"
_NOTE = "launcher.txt"


@dataclasses.dataclass(frozen=True)
class Status:
    """Whether the launcher of the CUDA kernels has been built; printing it says so in one line.

    Attributes:
      library: the shared library, or None.
      note: what it was built with, or why there is none and what to do.
    """

    library: pathlib.Path | None
    note: str

    def __str__(self) -> str:
        return self.note if self.library is None else f"{self.note} ({self.library})"


def status() -> Status:
    """Says whether the launcher was built when the package was installed, and if not, why."""
    # An editable install puts what it builds into a folder of its own, which the package's path lists.
    folders = [pathlib.Path(folder) for folder in sys.modules["jaxkernels.ffi"].__path__]
    library = next((folder / _LIBRARY for folder in folders if (folder / _LIBRARY).is_file()), None)
    note = next((folder / _NOTE for folder in folders if (folder / _NOTE).is_file()), None)
    if library is not None and note is not None:
        return Status(library, note.read_text().strip())
    if note is not None:
        return Status(None, f"{note.read_text().strip()}; install the package again once that is mended")
    if sys.platform != "linux":
        return Status(None, f"not built: CUDA kernels run on Linux only, this is {sys.platform}")
    return Status(None, "not built: install the package (pip install -e .)")


_lock = threading.Lock()
_libraries: dict[str, ctypes.CDLL] = {}  # by platform; a registered library must never be closed


def register() -> None:
    """Registers the launcher with JAX's CUDA backend, once in a process.

    Needed before a deserialised program (`jax.export`) that launches our kernels is run; everything
    else registers by itself. JAX's backends are created by this call if they were not yet.

    Raises:
      RuntimeError: there is neither a CUDA device nor JAX's plugin for one, the launcher was not built, or it does
        not fit the installed jaxlib.
    """
    if not has_cuda():
        raise RuntimeError("register[cuda]: JAX has no CUDA device here; got " + _devices() + ".")
    found = status()
    if found.library is None:
        raise RuntimeError(f"register[cuda]: the launcher of the CUDA kernels is missing; {found}.")
    register_library(found.library, "CUDA")
    load_cublaslt()  # Without it, programs that call it raise an error with the reason.


@functools.cache
def load_cublaslt() -> str | None:
    """Opens cuBLASLt: cublaslt.cc then finds it by its name. Returns the reason if that is impossible, else None."""
    try:
        importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("cublasLt")
    except (ImportError, RuntimeError) as e:
        return first_line(e)
    return None


def has_cuda() -> bool:
    """Whether JAX has a CUDA device, or its plugin, which compiles for one elsewhere. Creates JAX's backends."""
    return has_cuda_device() or _jax.has_plugin("CUDA")


def has_cuda_device() -> bool:
    """Whether JAX has a CUDA device. Creates JAX's backends."""
    try:
        return bool(jax.devices("cuda"))
    except RuntimeError:  # What JAX raises for a platform it has no backend for.
        return False


@functools.cache
def missing() -> str | None:
    """What this installation lacks to run the package's CUDA kernels, or None."""
    try:
        compiler.nvrtc_version()
    except ImportError as e:
        return f"needs NVRTC: {e}"
    return missing_launcher()


def missing_launcher() -> str | None:
    """The reason why no handler can be registered with JAX's CUDA backend, or None. Without one, none is needed."""
    if has_cuda() and (found := status()).library is None:
        return f"needs the launcher of the CUDA kernels: {found}"
    return None


def _devices() -> str:
    return ", ".join(sorted({device.platform for device in jax.devices()})) + " devices"


def register_library(path: pathlib.Path, platform: str) -> ctypes.CDLL:
    """Registers the launcher in `path` for one of XLA's platforms, unless that has been done.

    To be called when JAX's backends exist (`register` makes sure of it): what is registered earlier is
    kept in a queue, and one bad entry of the queue then keeps the whole backend from starting.
    """
    with _lock:
        if platform in _libraries:
            return _libraries[platform]
        library = load(path)
        try:
            for target, (state, of_type, of_stages) in _HANDLERS.items():
                part = lambda name, of_type=of_type: jax.ffi.pycapsule(getattr(library, f"{of_type}_{name}")())
                jax.ffi.register_ffi_type(
                    state, {"type_id": part("type_id"), "type_info": part("type_info")}, platform=platform
                )
                stages = {stage: jax.ffi.pycapsule(getattr(library, f"{of_stages}_{stage}")) for stage in _STAGES}
                jax.ffi.register_ffi_target(target, stages, platform=platform)
        except Exception as e:
            raise RuntimeError(
                f"register[cuda]: jaxlib {jax.lib.__version__} does not take the launcher; got {path}: {e} "
                "Install the package again with this jaxlib's headers: pip install --no-build-isolation."
            ) from e
        _libraries[platform] = library
        return library


def load(path: pathlib.Path) -> ctypes.CDLL:
    """Opens the shared library and declares its functions."""
    library = ctypes.CDLL(str(path))
    for _, of_type, _ in _HANDLERS.values():
        for part in ("type_id", "type_info"):
            getattr(library, f"{of_type}_{part}").restype = ctypes.c_void_p
    library.jaxkernels_launch_count.restype = ctypes.c_uint64
    return library


def launch_count() -> int:
    """How many kernels the launcher has launched in this process.

    A launch that XLA replays from a command buffer (CUDA graph) is not counted, which is how to tell
    whether a program runs from one.
    """
    library = _libraries.get("CUDA")
    return 0 if library is None else int(library.jaxkernels_launch_count())
