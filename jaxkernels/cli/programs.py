"""The compiled programs that commands keep on disk."""

from __future__ import annotations

from jaxkernels.models.progress import plain_console

__all__ = ["keep_programs"]


def keep_programs() -> None:
    """Switches JAX's compilation cache on, or prints why compiled programs are not kept."""
    from jaxkernels.core import compilation_cache  # It imports JAX, which --help does not need.

    if (reason := compilation_cache.enable()) is not None:
        plain_console().print(f"compiled programs are not kept: {reason}")
