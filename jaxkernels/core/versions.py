"""Which versions of packages are installed."""

from __future__ import annotations

import importlib.metadata

__all__ = ["installed_version"]


def installed_version(package: str) -> str | None:
    """The version of a distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
