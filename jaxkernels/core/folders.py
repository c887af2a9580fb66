"""Where the package keeps files that it can make again, and how it reads and writes them: one rule for every cache.

A cache belongs to one user. `write_entry` makes folders that only their owner may enter and files that only their
owner may open. `open_entry` checks the open file itself, so that the rights of the folders above it do not matter: it
takes a regular file of this user or of root that no other user may write to. An administrator may therefore share a
cache: made by root, it is read by every user.

A file is written beside its place and renamed there. A writer that is killed leaves its part behind; the next writer
in that folder deletes parts that are older than a day.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pathlib
import re
import shutil
import stat
import tempfile
import time
import uuid

import platformdirs

__all__ = [
    "cache_root", "check_writable", "distrust_folder", "make_private", "open_entry", "part_of", "read_entry",
    "write_entry", "write_whole",
]  # fmt: skip

_VARIABLE = "JAXKERNELS_CACHE_DIR"

#: The names that `part_of` gives.
_PART = re.compile(r".+\.[0-9a-f]{32}\.part")
_STALE_SECONDS = 24 * 3600

# Opening a named pipe waits for its other end, and a symbolic link may lead to anything. Windows has neither flag.
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def cache_root() -> pathlib.Path:
    """The folder of all caches: `JAXKERNELS_CACHE_DIR`, or the user's cache folder. Safe to delete.

    Raises:
      ValueError: the variable begins with the name of a user (~user) that this machine does not know.
    """
    if not (named := os.environ.get(_VARIABLE)):
        return pathlib.Path(platformdirs.user_cache_dir("jaxkernels", appauthor=False))
    try:
        return pathlib.Path(named).expanduser()
    except RuntimeError as e:
        raise ValueError(
            f"cache: {_VARIABLE} must be a folder; got {named!r}, a user without a home folder here. "
            "Write the path in full."
        ) from e


def write_whole(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file and the folders above it so that no reader, and no run that is killed, sees a part of it.

    Several processes may write the same file at once: the last one wins. Its rights are those of any new file.

    Raises:
      OSError: it cannot be written; the earlier file is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, content, 0o666)


def write_entry(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a cache's file as `write_whole` does; its user alone may open it, and the folders made for it.

    Raises:
      OSError: it cannot be written; the earlier file is unchanged.
    """
    make_private(path.parent)
    _write(path, content, 0o600)


def open_entry(path: pathlib.Path) -> io.BufferedReader:
    """Opens a cache's file for reading, if no other user can have written it.

    Raises:
      FileNotFoundError: there is none.
      OSError: it cannot be read or must not be trusted; `strerror` says why.
    """
    try:
        descriptor = os.open(path, _OPEN_FLAGS)
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise PermissionError(errno.EPERM, "it is a symbolic link", str(path)) from e
        raise
    if (reason := _distrust(os.fstat(descriptor))) is not None:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, reason, str(path))
    return os.fdopen(descriptor, "rb")


def read_entry(path: pathlib.Path) -> bytes:
    """Returns the content of a cache's file; raises what `open_entry` raises."""
    with open_entry(path) as file:
        return file.read()


def make_private(folder: pathlib.Path) -> None:
    """Makes a folder and those above it, each for this user alone; folders that exist keep their rights."""
    # `Path.mkdir` gives its mode to the last one only.
    for missing in reversed([parent for parent in (folder, *folder.parents) if not parent.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # Raises where a file stands in its place.


def distrust_folder(folder: pathlib.Path) -> str | None:
    """Why another user may have put files into a folder, or None. Files that others read and run need this check."""
    return _distrust_owner(folder.stat())


def part_of(path: pathlib.Path) -> pathlib.Path:
    """A name beside `path` for what will be renamed to it. Deletes the parts there that were left a day ago."""
    _delete_stale_parts(path.parent)
    return path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")


def _write(path: pathlib.Path, content: str | bytes, mode: int) -> None:
    part = part_of(path)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
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


def _distrust(status: os.stat_result) -> str | None:
    """Why a file must not be used, or None."""
    return _distrust_owner(status) if stat.S_ISREG(status.st_mode) else "it is not a regular file"


def _distrust_owner(status: os.stat_result) -> str | None:
    """Why another user may have written something, or None."""
    if not hasattr(os, "geteuid"):  # Windows: caches lie in the user's own profile.
        return None
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to another user (uid {status.st_uid})"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"other users may write to it (mode {stat.S_IMODE(status.st_mode):04o})"
    return None


def _delete_stale_parts(folder: pathlib.Path) -> None:
    """A part that another process is still writing is younger than a day, or holds a file that is."""
    oldest = time.time() - _STALE_SECONDS
    with contextlib.suppress(OSError):  # Another process may delete the same ones; another user's stay.
        for name in filter(_PART.fullmatch, os.listdir(folder)):
            part = folder / name
            with contextlib.suppress(OSError):
                is_folder = stat.S_ISDIR(part.lstat().st_mode)
                if max(path.lstat().st_mtime for path in (part, *(part.iterdir() if is_folder else ()))) >= oldest:
                    continue
                if is_folder:
                    shutil.rmtree(part)
                else:
                    part.unlink()
