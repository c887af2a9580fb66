"""Which kernel runs an operation: the registry of backends, the choice, and the record of it.

A backend is a module for one operation with four names:

- `Config`: a frozen dataclass, this kernel's knobs;
- `unsupported(spec) -> str | None`: the one statement of its limits, a reason for each;
- `default_config(spec) -> Config`;
- `run(spec, config, *arrays)`: the result, computed with JAX operations or a kernel call.

`REGISTRY` lists them in order of preference. A call that names a backend gets that backend or an
error; a call that names none gets the first that supports its spec on the platform being lowered.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Protocol

from jaxkernels.hardware import Chip

__all__ = ["REGISTRY", "Choice", "Entry", "backend_names", "check_backend", "choose", "recording"]


class Spec(Protocol):
    """What every kernel spec has in common: the chip it is compiled for."""

    @property
    def target(self) -> Chip: ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a backend's module is, and the lowering platforms it can run on (None: all)."""

    module: str
    platforms: tuple[str, ...] | None = None


_CUDA = ("cuda",)

#: (operation, backend) -> where it lives; for one operation, first listed is first preferred.
REGISTRY: dict[tuple[str, str], Entry] = {
    ("matmul", "pallas"): Entry("jaxkernels.pallas.matmul", _CUDA),
    ("matmul", "xla"): Entry("jaxkernels.xla.matmul"),
    ("attention_forward", "pallas"): Entry("jaxkernels.pallas.attention_forward", _CUDA),
    ("attention_forward", "xla"): Entry("jaxkernels.xla.attention_forward"),
    ("attention_backward", "pallas"): Entry("jaxkernels.pallas.attention_backward", _CUDA),
    ("attention_backward", "xla"): Entry("jaxkernels.xla.attention_backward"),
    ("attention_tangent", "xla"): Entry("jaxkernels.xla.attention_tangent"),
}


def backend_names() -> tuple[str, ...]:
    """Every backend's name, for messages and for the command line."""
    return tuple(dict.fromkeys(backend for _, backend in REGISTRY))


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel chosen for one operation, and why the ones before it in order were not."""

    op: str
    backend: str
    config: Any
    spec: Any
    passed_over: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.op}  {self.spec}", f"  -> {self.backend}  {self.config}"]
        lines += [f"     not {backend}: {reason}" for backend, reason in self.passed_over]
        return "\n".join(lines)


@functools.cache
def load(op: str, backend: str) -> ModuleType:
    """Imports the backend's module; a module that fails to import raises with its cause."""
    entry = REGISTRY[op, backend]
    try:
        return importlib.import_module(entry.module)
    except Exception as e:
        raise ImportError(f"{op}[{backend}]: the backend failed to load ({entry.module}): {e}") from e


def _refusal(op: str, backend: str, spec: Spec) -> str | None:
    """Why this backend cannot run the spec, or None if it can."""
    entry = REGISTRY.get((op, backend))
    if entry is None:
        return "no such kernel in this backend"
    if entry.platforms is not None and spec.target.platform not in entry.platforms:
        wanted = " or ".join(entry.platforms)
        return f"runs on {wanted} devices only, this program is lowered for {spec.target.platform}"
    return load(op, backend).unsupported(spec)


def check_backend(op: str, backend: str | None) -> None:
    """Raises ValueError unless `backend` is None or the name of a backend."""
    if backend is not None and backend not in backend_names():
        known = ", ".join(repr(name) for name in backend_names())
        raise ValueError(f"{op}: unknown backend={backend!r}; use one of {known}, or None to let the op choose.")


def choose(op: str, spec: Spec, backend: str | None, config: Any = None) -> Choice:
    """Picks the kernel for `spec`.

    Args:
      op: the operation's name in `REGISTRY`.
      spec: what is to be computed, and for which chip.
      backend: a name, which is then binding, or None for the first that supports the spec.
      config: a configuration for a named backend; None for its default.

    Raises:
      ValueError: no backend has this name, or the configuration is not this backend's.
      NotImplementedError: the named backend cannot run the spec, or none can. The message has the
        reason (for None, every backend's reason) and the way out.
    """
    check_backend(op, backend)
    if config is not None and backend is None:
        raise ValueError(f"{op}: config={config!r} needs the backend it is for. Name it with backend=.")
    passed_over: list[tuple[str, str]] = []
    for name in [backend] if backend is not None else [b for o, b in REGISTRY if o == op]:
        reason = _refusal(op, name, spec)
        if reason is None:
            module = load(op, name)
            if config is not None and not isinstance(config, module.Config):
                raise ValueError(f"{op}[{name}]: config must be a {module.__name__}.Config; got {config!r}.")
            chosen = config if config is not None else module.default_config(spec)
            choice = Choice(op, name, chosen, spec, tuple(passed_over))
            if (record := _record.get()) is not None:
                record.append(choice)
            return choice
        passed_over.append((name, reason))
    if backend is not None:
        raise NotImplementedError(
            f'{op}[{backend}]: {passed_over[0][1]}. Use backend=None (chooses by itself) or backend="xla".'
        )
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    raise NotImplementedError(f"{op}: no backend supports {spec}: {reasons}.")


_record: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar("choices", default=None)


@contextlib.contextmanager
def recording() -> Iterator[list[Choice]]:
    """Collects the choices made while programs are lowered inside the block."""
    choices: list[Choice] = []
    token = _record.set(choices)
    try:
        yield choices
    finally:
        _record.reset(token)
