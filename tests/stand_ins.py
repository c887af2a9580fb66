"""The package's XLA FFI handlers on the CPU backend, with libraries of the tests that stand in for CUDA's."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
from typing import ClassVar

import jax
import pytest
from cuda import pathfinder

from jaxkernels.ffi import handler

__all__ = ["CUDA", "FFI", "StandIn", "build"]

CUDA = pathlib.Path(__file__).parent / "cuda"
FFI = pathlib.Path(__file__).parent.parent / "ffi"


def build(library: pathlib.Path, *sources: pathlib.Path) -> pathlib.Path:
    """Compiles with the compiler the installation would take, and lets no warning pass."""
    includes = [jax.ffi.include_dir(), pathfinder.find_nvidia_header_directory("cudart")]
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O0", "-shared", "-fPIC", "-fvisibility=hidden"]
    command += ["-Wall", "-Wextra", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror", f"-I{FFI}"]
    command += [flag for folder in includes for flag in ("-isystem", str(folder))]
    subprocess.run([*command, *map(str, sources), "-o", str(library), "-ldl"], check=True)
    return library


class StandIn:
    """The handlers registered with the CPU backend, and the libraries that stand in for the driver and cuBLASLt."""

    _only: ClassVar[StandIn | None] = None

    @classmethod
    def of_process(cls, folders: pytest.TempPathFactory) -> StandIn:
        """The only one: a registered library stays for the life of the process."""
        if cls._only is None:
            cls._only = StandIn(folders.mktemp("stand_in"))
        return cls._only

    def __init__(self, folder: pathlib.Path):
        self.driver = build(folder / "libstand_in.so", CUDA / "stand_in_driver.cc")
        self.cublaslt = build(folder / "libstand_in_cublaslt.so", CUDA / "stand_in_cublaslt.cc")
        self.library = build(folder / "libhost.so", CUDA / "host_launcher.cc", CUDA / "host_cublaslt.cc")
        os.environ |= {"STAND_IN_DRIVER": str(self.driver), "STAND_IN_CUBLASLT": str(self.cublaslt)}
        self.device = jax.devices("cpu")[0]
        handler.register_library(self.library, "cpu")
        self._libraries = ctypes.CDLL(str(self.driver)), ctypes.CDLL(str(self.cublaslt))
        for library in self._libraries:
            library.stand_in_events.restype = ctypes.c_char_p

    def events(self) -> list[str]:
        """The calls of the driver since the last call of this function."""
        return self._libraries[0].stand_in_events().decode().splitlines()

    def fail(self, function: str, code: int) -> None:
        """Makes a function of the driver fail, with 0 no more."""
        self._libraries[0].stand_in_fail(function.encode(), code)

    def cublaslt_events(self) -> list[str]:
        """The calls of cuBLASLt since the last call of this function."""
        return self._libraries[1].stand_in_events().decode().splitlines()

    def fail_in_cublaslt(self, function: str, status: int) -> None:
        """The same of cuBLASLt."""
        self._libraries[1].stand_in_fail(function.encode(), status)
