"""CUDA C++ text to a cubin: NVRTC, what it has to say about the result, and a cache on disk.

Kernels travel as source and are compiled at first use, on any machine: NVRTC needs neither a GPU nor
a CUDA toolkit. It comes with the extras cuda13 and cuda12.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
import os
import pathlib
import re
import threading
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from jaxkernels.core.errors import first_line
from jaxkernels.core.folders import cache_root, read_entry, write_entry
from jaxkernels.ffi import wgmma

__all__ = [
    "CompileError", "CompiledKernel", "Report", "compile_kernel", "literal", "nvrtc_version", "read_cached",
    "write_cached",
]  # fmt: skip

#: Cycles after which a wait for a barrier traps (tma.cuh), in kernels compiled while it is set: a kernel that waits for
#: ever then fails. Watching the clock takes registers, so `strict` is not held to.
_MAX_WAIT_VARIABLE = "JAXKERNELS_MAX_WAIT_CYCLES"

#: Part of every cache key: entries of another layout, or compiled with other fixed options, are not found.
_CACHE_FORMAT = 3

#: Threads that want the same kernel wait for the first of them.
_compiling: dict[pathlib.Path, threading.Lock] = {}

# Since this version NVRTC has a cache of its own where there is a driver. What it takes from there comes without
# ptxas' account and warnings, which `strict` and `Report` stand on.
_NVRTC_CACHES = (12, 9)

# So ptxas says that it gave up on keeping the tensor cores busy: a wgmma pipeline it had to serialise (C7510 and its
# neighbours), a setmaxnreg it ignored (C7508).
_SLOW = re.compile(r"^.*Potential Performance Loss.*$", re.MULTILINE)


class CompileError(RuntimeError):
    """The source does not compile, or not into the code that `strict` asks for.

    Attributes:
      log: what NVRTC said, with the lines of the source as it was given.
    """

    def __init__(self, message: str, log: str):
        super().__init__(message)
        self.log = log


@dataclasses.dataclass(frozen=True)
class Report:
    """What one kernel uses, by ptxas' account.

    Attributes:
      registers: per thread.
      stack_bytes: per thread, of local memory: arrays indexed at run time, and spills.
      spill_store_bytes, spill_load_bytes: per thread, of registers that did not fit.
      smem_bytes: per block, of static shared memory.
    """

    registers: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int
    smem_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack_bytes} bytes of stack, spills of {self.spill_store_bytes} bytes "
            f"stored and {self.spill_load_bytes} loaded, {self.smem_bytes} bytes of static shared memory"
        )


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel, ready for `jaxkernels.ffi.launch`.

    Attributes:
      cubin: the code, an ELF image.
      name: the kernel's symbol in it; of a template, the mangled one.
      report: what it uses, or None where NVRTC's log does not tell.
      log: what NVRTC and ptxas said: warnings, and ptxas' account of every kernel of the source.
    """

    cubin: bytes
    name: str
    report: Report | None
    log: str


def compile_kernel(
    source: str,
    kernel: str,
    *,
    filename: str = "kernel.cu",
    headers: Mapping[str, str] | None = None,
    defines: Mapping[str, int | float | str] | None = None,
    options: Sequence[str] = (),
    arch: str = "sm_90a",
    strict: bool = False,
) -> CompiledKernel:
    """Compiles one kernel of a CUDA C++ source, or takes it from the cache.

    What includes files that are not given here, of the current directory or of an include path among the options, is
    compiled anew by every call: they may have changed. So is what only the preprocessor could tell (#include NAME).

    Args:
      source: CUDA C++17. CUDA's own headers (cuda_bf16.h ...) are found where they are installed, as
        they are with JAX's CUDA packages.
      kernel: the `__global__` function: "copy", or an instance of a template, "gemm<128, 256>".
      filename: what the source is called in messages.
      headers: text of what the source includes, by name. The engine's own (tma.cuh, wgmma.cuh, ...) are found without.
      defines: macros; True and False become 1 and 0.
      options: further options of NVRTC.
      arch: the architecture of the code.
      strict: refuse spilled registers and ptxas' warnings of potential performance loss (a pipeline serialised, a
        setmaxnreg ignored): the code would run, at a fraction of its speed.

    Raises:
      ValueError: an argument of another type, text with a NUL, a macro without a value.
      CompileError: the source does not compile, or `strict` refuses the result.
      ImportError: NVRTC is not installed.
    """
    check_arguments(
        "compile[nvrtc]", source=source, kernel=kernel, filename=filename, headers=headers, defines=defines,
        options=options, arch=arch, strict=strict,
    )  # fmt: skip
    defines = dict(defines or {})
    if (limit := _max_wait_cycles()) is not None:
        defines["JK_MAX_WAIT_CYCLES"] = f"{limit}ll"
        strict = False
    options = (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--ptxas-options=-v",
        *(f"--define-macro={name}={literal(value)}" for name, value in sorted(defines.items())),
        *options,
    )
    headers = _with_own_headers(source, headers or {})
    request = _Request(source, kernel, filename, tuple(sorted(headers.items())), options)
    path = cache_root() / "cubins" / f"{request.key()}.zip" if request.tells_all() else None
    with contextlib.nullcontext() if path is None else _compiling.setdefault(path, threading.Lock()):
        compiled = None if path is None else read_cached(path)
        if compiled is None:
            compiled = request.compile()
            if path is not None:
                write_cached(path, compiled)
    if strict:
        _refuse_slow(filename, compiled)
    return compiled


def check_arguments(label: str, **arguments: Any) -> None:
    """Raises ValueError unless these can be the arguments of `compile_kernel` that they are named after."""

    def require(condition: bool, what: str, got: Any, way_out: str) -> None:
        if not condition:
            raise ValueError(f"{label}: {what}; got {got!r}. {way_out}")

    def require_text(what: str, value: Any, least: int = 1) -> None:
        is_text = isinstance(value, str) and len(value) >= least
        require(is_text, f"{what} must be text", value, "Give a str" + (" that is not empty." if least else "."))
        # C takes a NUL for the end of the text.
        require("\0" not in value, f"{what} must have no NUL", f"{value.partition(chr(0))[0][-20:]}\0", "Remove it.")

    for name, value in arguments.items():
        if name in ("source", "kernel", "filename", "arch"):
            require_text(name, value, least=0 if name == "source" else 1)
        elif name == "strict":
            require(isinstance(value, bool), "strict must be True or False", value, "It judges the compiled code.")
        elif name == "options":
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            require(is_list, "options must be a list of texts", value, 'Write ["--use_fast_math"].')
            for option in value:
                require_text("an option", option)
        elif value is not None:
            require(isinstance(value, Mapping), f"{name} must be a dict", value, "None is none.")
            for key, content in value.items():
                require_text(f"a name of {name}", key)
                if name == "headers":
                    require_text(f"header {key}", content, least=0)
                else:
                    check_literal(label, f"macro {key}", content)


def check_literal(label: str, what: str, value: Any) -> None:
    """Raises ValueError unless `literal` writes the value as CUDA C++ has it."""
    is_number = isinstance(value, int | float | np.number | np.bool_) and np.isfinite(float(value))
    if not is_number and (not isinstance(value, str) or "\0" in value):
        raise ValueError(
            f"{label}: {what} must be a finite number, True, False or text without NUL; got {value!r}. "
            "Leave out a macro that is not set."
        )


def _max_wait_cycles() -> int | None:
    text = os.environ.get(_MAX_WAIT_VARIABLE)
    if text is None:
        return None
    if not text.isdecimal():
        raise ValueError(
            f"compile[nvrtc]: {_MAX_WAIT_VARIABLE} must be a number of cycles; got {text!r}. Unset it to wait for ever."
        )
    return int(text)


def nvrtc_version() -> tuple[int, int]:
    """Version of NVRTC (major, minor).

    Raises:
      ImportError: it is not installed; the message says how to install it.
    """
    return _nvrtc_version()


@functools.cache
def _nvrtc_version() -> tuple[int, int]:
    way_out = 'Install NVRTC with the package: pip install "jaxkernels[cuda13]" (or cuda12).'
    try:
        nvrtc = _nvrtc()
    except ImportError as e:
        raise ImportError(f"compile[nvrtc]: the package cuda-bindings cannot be imported; got {e}. {way_out}") from e
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as e:  # What cuda-pathfinder raises for a library it cannot find.
        raise ImportError(f"compile[nvrtc]: the library cannot be loaded; got {first_line(e)}. {way_out}") from e
    _check(nvrtc, status, "nvrtcVersion")
    return major, minor


def _nvrtc() -> ModuleType:
    return importlib.import_module("cuda.bindings.nvrtc")


@functools.cache
def _nvrtc_build() -> tuple[str, int, int] | None:
    """Tells releases of NVRTC apart that are of one version: 12.9 is also that of 12.9 Update 1."""
    path = importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path
    if path is None or not os.path.exists(path):
        return None
    stat = os.stat(path)
    return path, stat.st_size, stat.st_mtime_ns


@functools.cache
def _toolkit_headers() -> pathlib.Path | None:
    """The folder of CUDA's own headers, where they and NVRTC are installed."""
    if not nvrtc_version():
        return None
    pathfinder = importlib.import_module("cuda.pathfinder")
    folder = pathfinder.find_nvidia_header_directory("cudart")
    return None if folder is None else pathlib.Path(folder)


# Options of NVRTC that have it read files.
_INCLUDING = ("-I", "--include-path", "--pre-include", "-include")

# The first group of a line that includes: #include "tma.cuh".
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)

# What may name a file in other ways.
_OBSCURE = re.compile(
    "|".join(
        [
            r'^[ \t]*#[ \t]*include(?![ \t]*["<])',  # #include NAME
            r"^[ \t]*#[ \t]*(?:/\*|\\)|\*/[ \t]*#",  # a directive beside a comment, or over two lines
            r"\b__has_include\b(?!\s*\(\s*<)",
        ]
    ),
    re.MULTILINE,
)


def _with_own_headers(source: str, headers: Mapping[str, str]) -> dict[str, str]:
    """Adds the engine's headers that the source or one of its headers includes.

    They are the files beside this one, and the text that wgmma.py writes.
    A header that was given under the same name comes first. The cache's key covers the included headers only.
    """
    files = pathlib.Path(__file__).parent.glob("*.cuh")
    own: dict[str, Callable[[], str]] = {path.name: path.read_text for path in files}
    own[wgmma.NAME] = wgmma.instructions
    found = dict(headers)
    texts = [source, *headers.values()]
    while texts:
        for name in _INCLUDE.findall(texts.pop()):
            if name in own and name not in found:
                found[name] = own[name]()
                texts.append(found[name])
    return found


def literal(value: int | float | str) -> str:
    """A constant as CUDA C++ has it. To the preprocessor, True and False would be names it does not know: zero."""
    return str(int(value)) if isinstance(value, bool | np.bool_) else str(value)


@dataclasses.dataclass(frozen=True)
class _Request:
    """Everything that decides what the cubin is."""

    source: str
    kernel: str
    filename: str
    headers: tuple[tuple[str, str], ...]
    options: tuple[str, ...]

    def tells_all(self) -> bool:
        """Whether the compiler reads no files but CUDA's own."""
        if any(option.startswith(_INCLUDING) for option in self.options):
            return False
        given, toolkit = dict(self.headers), _toolkit_headers()
        texts = (self.source, *given.values())
        if any(map(_OBSCURE.search, texts)):
            return False
        included = {name for text in texts for name in _INCLUDE.findall(text)} - set(given)
        is_toolkits = lambda name: toolkit is not None and (toolkit / name).exists()
        return all(is_toolkits(name) and not pathlib.Path(name).exists() for name in included)

    def key(self) -> str:
        folder = _toolkit_headers()
        toolkit = None if folder is None else (str(folder), (folder / "cuda_runtime_api.h").stat().st_mtime_ns)
        parts = [_CACHE_FORMAT, nvrtc_version(), _nvrtc_build(), toolkit, dataclasses.astuple(self)]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def compile(self) -> CompiledKernel:
        nvrtc = _nvrtc()
        options = list(self.options)
        if (folder := _toolkit_headers()) is not None:
            options.append(f"--include-path={folder}")
        if nvrtc_version() >= _NVRTC_CACHES:
            options.append("--no-cache")
        status, program = nvrtc.nvrtcCreateProgram(
            self.source.encode(),
            self.filename.encode(),
            len(self.headers),
            [text.encode() for _, text in self.headers],
            [name.encode() for name, _ in self.headers],
        )
        _check(nvrtc, status, "nvrtcCreateProgram")
        try:
            _check(nvrtc, nvrtc.nvrtcAddNameExpression(program, self.kernel.encode())[0], "nvrtcAddNameExpression")
            (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            log = _fetch(nvrtc, program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if outcome != nvrtc.nvrtcResult.NVRTC_SUCCESS:
                raise CompileError(
                    f"{self.filename}[nvrtc]: the source does not compile ({outcome.name}, NVRTC "
                    f"{'.'.join(map(str, nvrtc_version()))}, {self.options[0]}); NVRTC says:\n{log}",
                    log,
                )
            status, symbol = nvrtc.nvrtcGetLoweredName(program, self.kernel.encode())
            _check(nvrtc, status, "nvrtcGetLoweredName")
            cubin = _fetch(nvrtc, program, "CUBIN")
            if not cubin:
                raise CompileError(
                    f"{self.filename}[nvrtc]: the options must ask for machine code; got {' '.join(self.options)}. "
                    "Name an architecture as sm_90a, and leave out -dlto.",
                    log,
                )
            return CompiledKernel(cubin, symbol.decode(), _report(log, symbol.decode()), log)
        finally:
            nvrtc.nvrtcDestroyProgram(program)


def _fetch(nvrtc: ModuleType, program: Any, what: str) -> bytes:
    """Asks for the size of something, then for it."""
    status, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    _check(nvrtc, status, f"nvrtcGet{what}Size")
    buffer = bytearray(size)
    (status,) = getattr(nvrtc, f"nvrtcGet{what}")(program, buffer)
    _check(nvrtc, status, f"nvrtcGet{what}")
    return bytes(buffer)


def _check(nvrtc: ModuleType, status: Any, function: str) -> None:
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"compile[nvrtc]: {function} failed; got {status.name}.")


def _report(log: str, symbol: str) -> Report | None:
    """Reads ptxas' account of one kernel: from its heading to the next kernel's."""
    _, heading, rest = log.partition(f"Compiling entry function '{symbol}'")
    account = rest.partition("Compiling entry function")[0]
    used = re.search(r"Used (\d+) registers", account)
    if not heading or used is None:
        return None
    total = lambda pattern: sum(map(int, re.findall(pattern, account)))
    return Report(
        registers=int(used[1]),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        spill_store_bytes=total(r"(\d+) bytes spill stores"),
        spill_load_bytes=total(r"(\d+) bytes spill loads"),
        smem_bytes=total(r"(\d+) bytes smem"),
    )


def _refuse_slow(filename: str, compiled: CompiledKernel) -> None:
    report = compiled.report
    if report is None:
        raise CompileError(
            f"{filename}[nvrtc]: strict needs ptxas' account of the kernel; got none for {compiled.name} from NVRTC "
            f"{'.'.join(map(str, nvrtc_version()))}. Install another version of it.",
            compiled.log,
        )
    if report.spill_store_bytes or report.spill_load_bytes:
        raise CompileError(
            f"{filename}[nvrtc]: {compiled.name} must not spill registers; got {report}. "
            "Use smaller tiles, more threads or strict=False.",
            compiled.log,
        )
    if slow := [match[0].strip() for match in _SLOW.finditer(compiled.log)]:
        raise CompileError(
            f"{filename}[nvrtc]: the source must compile without ptxas' warnings of lost performance; got\n"
            + "\n".join(slow)
            + "\nFollow the warning, or use strict=False.",
            compiled.log,
        )


# One zip file for a kernel, which any tool opens. Its comment is a digest of its name, which is the request's key, and
# of its content: an entry that is damaged, or was renamed, is compiled again.
_CUBIN = "kernel.cubin"
_ACCOUNT = "kernel.json"


def _digest(path: pathlib.Path, cubin: bytes, account: bytes) -> bytes:
    return hashlib.sha256(json.dumps([path.stem, len(cubin)]).encode() + cubin + account).hexdigest().encode()


def read_cached(path: pathlib.Path) -> CompiledKernel | None:
    """Returns the cached kernel, or None if there is none, it is damaged, or another user may have written it."""
    try:
        content = read_entry(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as e:
        warnings.warn(
            f"compile[nvrtc]: ignored the cached kernel {path}: {e.strerror}. Delete it, or set JAXKERNELS_CACHE_DIR "
            "to a folder of your own.",
            stacklevel=2,
        )
        return None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as entry:
            cubin, account_bytes = entry.read(_CUBIN), entry.read(_ACCOUNT)
            if entry.comment != _digest(path, cubin, account_bytes):
                return None
        account = json.loads(account_bytes)
        report = account["report"]
        return CompiledKernel(cubin, account["name"], None if report is None else Report(**report), account["log"])
    except Exception:
        # Damage can surface in any way zipfile has to fail; the remedy is always to compile again.
        return None


def write_cached(path: pathlib.Path, compiled: CompiledKernel) -> None:
    """Puts the kernel into the cache."""
    report = None if compiled.report is None else dataclasses.asdict(compiled.report)
    account = json.dumps({"name": compiled.name, "report": report, "log": compiled.log}).encode()
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as entry:
        entry.writestr(_CUBIN, compiled.cubin)
        entry.writestr(_ACCOUNT, account)
        entry.comment = _digest(path, compiled.cubin, account)
    try:
        write_entry(path, content.getvalue())
    except OSError as e:
        warnings.warn(
            f"compile[nvrtc]: the compiled kernel cannot be kept in {path.parent}; got {e}. It will be compiled "
            "again whenever it is needed; set JAXKERNELS_CACHE_DIR to a folder that can be written.",
            stacklevel=2,
        )
