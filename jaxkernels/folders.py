"""Where the package keeps what it can make again, and how it writes: one rule for every cache and file."""

from __future__ import annotations

import os
import pathlib
import tempfile
import uuid

import platformdirs

__all__ = ["cache_root", "check_writable", "write_whole"]


def cache_root() -> pathlib.Path:
    """The folder of all caches: `JAXKERNELS_CACHE_DIR`, or the user's cache folder. Safe to delete."""
    return pathlib.Path(
        os.environ.get("JAXKERNELS_CACHE_DIR") or platformdirs.user_cache_dir("jaxkernels", appauthor=False)
    )


def write_whole(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file and the folders above it so that no reader, and no run that is killed, sees a part of it.

    Several processes may write the same file at once: the last one wins. Its rights are those of any new file.

    Raises:
      OSError: it cannot be written; what stood there still does.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def check_writable(folder: pathlib.Path) -> None:
    """Raises OSError unless files can be written to `folder`, which need not exist; leaves nothing behind."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    made: list[pathlib.Path] = []
    try:
        for path in reversed(missing):
            path.mkdir()
            made.append(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    finally:
        for path in reversed(made):
            path.rmdir()
