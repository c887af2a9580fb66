"""The report of `jaxkernels doctor`: which backends run on this machine, and why the others do not."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import pathlib
import platform
import re

import jax

from jaxkernels.core import dispatch, hardware, registry, times, winners
from jaxkernels.core.folders import cache_root
from jaxkernels.core.versions import installed_version
from jaxkernels.cudnn import calls as cudnn_calls
from jaxkernels.ffi import assembler
from jaxkernels.triton import calls as triton_calls

__all__ = ["Availability", "Report", "as_json", "as_text", "examine"]

_PACKAGES = (
    "jaxkernels", "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "orbax-checkpoint",
    "numpy", "tokenizers", "triton", "cuda-bindings", "nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12",
    "nvidia-nvjitlink", "nvidia-nvjitlink-cu12", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Availability:
    """Whether a backend runs here.

    Attributes:
      name: the backend.
      reasons: the reasons why it does not run; empty if it runs.
      note: versions of its parts, and what a user should know of them.
    """

    name: str
    reasons: tuple[str, ...]
    note: str = ""

    @property
    def available(self) -> bool:
        return not self.reasons


@dataclasses.dataclass(frozen=True)
class Report:
    """The report.

    Attributes:
      system: Python and the operating system.
      versions: package -> version; None if it is not installed.
      devices: JAX's devices, one line each; the error if JAX finds none.
      driver: the version of the NVIDIA driver, or the reason why there is none.
      backends: all backends.
      caches: folder -> bytes in it.
    """

    system: str
    versions: dict[str, str | None]
    devices: tuple[str, ...]
    driver: str
    backends: tuple[Availability, ...]
    caches: dict[str, int]


def examine() -> Report:
    """Examines this machine. Nothing is compiled or run on the device."""
    devices, chip = _devices()
    return Report(
        system=f"Python {platform.python_version()} on {platform.platform()}",
        versions={package: installed_version(package) for package in _PACKAGES},
        devices=devices,
        driver=_driver(),
        backends=tuple(_availability(name, chip) for name in dispatch.backend_names()),
        caches=_caches(),
    )


def as_json(report: Report) -> str:
    """The report as JSON. Each backend also has the field `available`."""
    values = dataclasses.asdict(report)
    values["backends"] = {
        backend.name: dict(available=backend.available, reasons=list(backend.reasons), note=backend.note)
        for backend in report.backends
    }
    return json.dumps(values, indent=2)


def as_text(report: Report) -> str:
    """The report for a reader."""
    installed = [f"{name:24} {version}" for name, version in report.versions.items() if version is not None]
    backends = []
    for backend in report.backends:
        state = "available" if backend.available else "not here: " + "; ".join(backend.reasons)
        backends.append(f"{backend.name:10}{state}" + (f" ({backend.note})" if backend.note else ""))
    sections = {
        "versions": [report.system, *installed],
        "devices": report.devices,
        "driver": [report.driver],
        "backends": backends,
        "caches": [f"{size / 1e6:8.1f} MB  {folder}" for folder, size in report.caches.items()] or ["empty"],
    }
    return "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in sections.items())


def _devices() -> tuple[tuple[str, ...], hardware.Chip]:
    try:
        devices = jax.devices()
    except RuntimeError as e:  # A plugin is installed but cannot start.
        return (f"none: {e}",), hardware.host("no device")
    lines = []
    for device in devices:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f", {limit / 2**30:.1f} GiB for JAX" if limit else ""
        lines.append(f"{device.platform}:{device.id}  {hardware.chip_of(device)}{memory}")
    return tuple(lines), hardware.chip_of(devices[0])


def _driver() -> str:
    """The version of the driver, and the newest CUDA version that it supports."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError as e:
        return f"none: {e}"
    number = ctypes.c_int()
    status = libcuda.cuDriverGetVersion(ctypes.byref(number))
    if status != 0:
        return f"libcuda.so.1 does not report its version (error {status})"
    cuda = f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"
    module = pathlib.Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+(?:\.\d+)?", module.read_text()) if module.exists() else None
    return f"NVIDIA {found.group()}, supports up to {cuda}" if found else f"supports up to {cuda}"


def _availability(name: str, chip: hardware.Chip) -> Availability:
    if name == "cuda":
        return _cuda(chip)
    if name == "triton":
        return _triton(chip)
    if name == "cudnn":
        return _cudnn(chip)
    return Availability(name, tuple(_kernel_reasons(name, chip)))


def _kernel_reasons(name: str, chip: hardware.Chip) -> list[str]:
    """Why a backend's kernels do not run on the chip: they do not load, or they do not support it."""
    reasons = []
    for op, backend in dispatch.REGISTRY:
        if backend != name:
            continue
        try:
            part = registry.part(registry.operation_of(op), "tuning")
            reason = None if part is None else dispatch.load(op, name).unsupported(part.probe(chip))
        except ImportError as e:
            reason = str(e)
        platforms = dispatch.REGISTRY[op, name].platforms
        if reason is None and platforms is not None and chip.platform not in platforms:
            reason = f"runs on {' or '.join(platforms)} devices, this machine has {chip}"
        if reason is not None and reason not in reasons:
            reasons.append(reason)
    return reasons


def _cuda(chip: hardware.Chip) -> Availability:
    """Whether the CUDA backend runs: launcher, NVRTC, chip, and the limits of its kernels."""
    try:
        from jaxkernels.ffi.compiler import nvrtc_version
        from jaxkernels.ffi.handler import status as launcher_status
    except ImportError as e:
        return Availability("cuda", (f"the engine cannot be imported: {e}",))
    reasons, notes = [], []
    launcher = launcher_status()
    (reasons if launcher.library is None else notes).append(f"launcher: {launcher}")
    try:
        notes.append("NVRTC {}.{}".format(*nvrtc_version()))
    except ImportError as e:
        reasons.append(str(e))
    if not chip.is_hopper:
        reasons.append(f"needs a GPU of compute capability 9.0 (Hopper), this machine has {chip}")
    reasons += [reason for reason in _kernel_reasons("cuda", chip) if reason not in reasons]
    return Availability("cuda", tuple(reasons), ", ".join(notes))


def _triton(chip: hardware.Chip) -> Availability:
    """Whether the Triton backend runs: Triton, nvJitLink, the launcher, the chip, and the limits of its kernels."""
    reasons = [] if (missing := triton_calls.missing()) is None else [missing]
    reasons += [reason for reason in _kernel_reasons("triton", chip) if reason not in reasons]
    version = triton_calls.version()
    notes = [] if version is None else [f"triton {version}"]
    with contextlib.suppress(ImportError):  # Then it is the reason above.
        notes.append("nvJitLink {}.{}".format(*assembler.version()))
    measured = winners.measured_backends(chip) | times.measured_backends(chip)
    if chip.platform == "cuda" and "triton" not in measured:
        notes.append(f"no configuration was measured on {chip.name}: a cost model chooses, `jaxkernels tune` measures")
    return Availability("triton", tuple(reasons), ", ".join(notes))


def _cudnn(chip: hardware.Chip) -> Availability:
    """Whether cuDNN's attention runs: cuDNN, chip, and the limits of its kernels."""
    found = cudnn_calls.version()
    reasons = ["JAX finds no cuDNN"] if found is None else []
    reasons += [reason for reason in _kernel_reasons("cudnn", chip) if reason not in reasons]
    return Availability("cudnn", tuple(reasons), "" if found is None else f"cuDNN {'.'.join(map(str, found))}")


def _caches() -> dict[str, int]:
    """Folder -> bytes: the folders in the package's cache, and JAX's compilation cache if it is set."""
    root = cache_root()
    folders = [path for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    if jax.config.jax_compilation_cache_dir:
        folders.append(pathlib.Path(jax.config.jax_compilation_cache_dir))
    return {str(folder): _size(folder) for folder in folders}


def _size(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
