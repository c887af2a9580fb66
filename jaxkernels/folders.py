"""Where the package keeps what it can make again: one rule for every cache."""

from __future__ import annotations

import os
import pathlib

import platformdirs

__all__ = ["cache_root"]


def cache_root() -> pathlib.Path:
    """The folder of all caches: `JAXKERNELS_CACHE_DIR`, or the user's cache folder. Safe to delete."""
    return pathlib.Path(
        os.environ.get("JAXKERNELS_CACHE_DIR") or platformdirs.user_cache_dir("jaxkernels", appauthor=False)
    )
