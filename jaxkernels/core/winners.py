"""Winners on disk: one small JSON file for each chip, operation, spec, backend and kernel version.

Files are written and read as `jaxkernels.core.folders` has it: readers see all of one or nothing, several processes may
write at once (the last one wins), and a file that another user may have written is ignored. It holds its key in clear:

    <cache>/tuning/nvidia_h200/matmul-pallas-v1/5b0d....json
    {"key": {"device": ..., "num_sms": ..., "op": ..., "backend": ..., "version": ..., "spec": {...}},
     "winner": {"block_m": 128, ...}, "seconds": 0.000168}

Under the backend "auto" the winner is the fastest backend, under "compared" the fastest of some. The package's own
table (`tables/`, a list of the same entries) stands behind the user's cache. An entry that is damaged, untrusted or not
what its name says is ignored with one warning. What one process stores, another sees when it first asks for that key;
what it found then, it keeps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from jaxkernels.core import plain
from jaxkernels.core.folders import cache_root, read_entry, write_entry
from jaxkernels.core.hardware import Chip

__all__ = ["AUTO", "COMPARED", "Key", "adopt", "entries", "lookup", "measured_backends", "slug", "store"]

#: The backend under which the fastest backend is kept; its version is 0: the winner names the versions that took part.
AUTO = "auto"

#: The backend under which the fastest of those with close estimates is kept, in the same way.
COMPARED = "compared"

_TABLES = pathlib.Path(__file__).parent / "tables"

_memo: dict[tuple[pathlib.Path, Key], Any] = {}
_memo_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Key:
    """What a winner is for.

    Attributes:
      chip: the device; its name and its number of SMs count.
      op: the operation.
      spec: what is computed.
      backend: a backend, or `AUTO`, or `COMPARED`.
      version: the kernel's version.
    """

    chip: Chip
    op: str
    spec: Any
    backend: str
    version: int

    def describe(self) -> dict[str, Any] | None:
        """The key as plain values, or None where the spec has none (a size that is not known yet)."""
        if (spec := plain.describe(self.spec)) is None:
            return None
        return {
            "device": self.chip.name,
            "num_sms": self.chip.num_sms,
            "op": self.op,
            "backend": self.backend,
            "version": self.version,
            "spec": spec,
        }


def lookup[T](key: Key, decode: Callable[[dict[str, Any]], T]) -> T | None:
    """The winner for `key`, from memory, else the user's cache, else the package's table; None where there is none.

    Args:
      key: what it is for.
      decode: makes the winner of the entry's plain values; raises ValueError or TypeError where it cannot.
    """
    folder = cache_root() / "tuning"
    with contextlib.suppress(KeyError):
        return _memo[folder, key]
    winner = None
    if (described := key.describe()) is not None:
        path = folder / _relative_path(described)
        winner = _decoded(_from_file(path, described), path, decode)
        if winner is None:
            path = _TABLES / f"{slug(key.chip.name)}.json"
            entry = _from_table(path).get(_digest(described))
            winner = _decoded(None if entry is None else entry["winner"], path, decode)
    with _memo_lock:
        # Whoever asks first decides: two threads that lower the same program must not see different winners.
        return _memo.setdefault((folder, key), winner)


def store(key: Key, winner: Any, values: Mapping[str, Any], seconds: float) -> None:
    """Keeps a winner, in memory and on disk. Where the disk cannot be written, warns and keeps it in memory.

    Args:
      key: what it is for; must have a description.
      winner: what `lookup` returns.
      values: the same as plain values, which `lookup`'s `decode` gets in other processes.
      seconds: its time.
    """
    described = key.describe()
    if described is None:
        raise ValueError(f"tuning: {key.spec} has a symbolic size; only specs of static shapes can be kept.")
    folder = cache_root() / "tuning"
    with _memo_lock:
        _memo[folder, key] = winner
    path = folder / _relative_path(described)
    text = json.dumps({"key": described, "winner": dict(values), "seconds": seconds}, indent=1) + "\n"
    try:
        write_entry(path, text)
    except OSError as e:
        warnings.warn(
            f"tuning: cannot write {path}: {e.strerror}. The choice holds for this process only; "
            "set JAXKERNELS_CACHE_DIR to a folder that can be written.",
            stacklevel=2,
        )


def entries(chip: Chip) -> list[dict[str, Any]]:
    """Every sound entry of the user's cache for a chip, ordered by path: what the package's table is made of.

    Comparisons are left out: they are brief, and of few configurations.
    """
    folder = cache_root() / "tuning"
    found = []
    for path in sorted((folder / slug(chip.name)).glob("*/*.json")):
        try:
            entry = json.loads(read_entry(path))
            if entry["key"]["backend"] == COMPARED:
                continue
            if entry["key"]["num_sms"] == chip.num_sms and folder / _relative_path(entry["key"]) == path:
                found.append(_check(entry, entry["key"]))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            continue  # `lookup` warns of it, should its key ever be asked for.
    return found


def adopt(table: Any, chip: Chip) -> None:
    """Writes the entries of a table for a chip to the user's cache, but for those that it has.

    Args:
      table: what a file of entries holds, as `entries` returns them.
      chip: the device whose entries count.

    Raises:
      ValueError: it is no list of entries.
      OSError: the cache cannot be written.
    """
    if not isinstance(table, list):
        raise ValueError("it is no list")
    folder = cache_root() / "tuning"
    for entry in table:
        try:
            key = _check(entry, entry["key"])["key"]
            is_for_chip, path = (key["device"], key["num_sms"]) == (chip.name, chip.num_sms), _relative_path(key)
        except (TypeError, KeyError, AttributeError) as e:
            raise ValueError("it holds something that is no entry") from e
        if len(path.parts) != 3 or ".." in path.parts:
            raise ValueError("it holds something that is no entry")
        if is_for_chip and not (folder / path).exists():
            write_entry(folder / path, json.dumps(entry, indent=1) + "\n")


def measured_backends(chip: Chip) -> set[str]:
    """Backends with a configuration that was measured on such a chip: in the user's cache or in the package's table."""
    table = _from_table(_TABLES / f"{slug(chip.name)}.json").values()
    keys = [entry["key"] for entry in (*entries(chip), *table)]
    return {key["backend"] for key in keys if key["num_sms"] == chip.num_sms} - {AUTO, COMPARED}


def _relative_path(described: Mapping[str, Any]) -> pathlib.Path:
    kernel = f"{described['op']}-{described['backend']}"
    if described["backend"] not in (AUTO, COMPARED):
        kernel += f"-v{described['version']}"
    return pathlib.Path(slug(described["device"])) / kernel / f"{_digest(described)}.json"


def slug(device: str) -> str:
    """A chip's name as a part of paths."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def _digest(described: Mapping[str, Any]) -> str:
    text = json.dumps(described, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _from_file(path: pathlib.Path, described: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values of the user's entry, or None."""
    try:
        text = read_entry(path).decode()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as e:
        _ignore(path, getattr(e, "strerror", None) or "it is not text")
        return None
    try:
        return _check(json.loads(text), described)["winner"]
    except (ValueError, RecursionError) as e:
        _ignore(path, "it is not JSON" if isinstance(e, json.JSONDecodeError | RecursionError) else str(e))
        return None


def _check(entry: Any, described: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entry; raises ValueError unless it is one and is for this key."""
    if not isinstance(entry, dict) or set(entry) != {"key", "winner", "seconds"}:
        raise ValueError("it is not an entry of this cache")
    if entry["key"] != described:
        raise ValueError("it is for another key than its name says")
    if not isinstance(entry["winner"], dict):
        raise ValueError("it holds no configuration")
    return entry


@functools.cache
def _from_table(path: pathlib.Path) -> dict[str, dict[str, Any]]:
    """The package's table for a chip: digest of the key -> entry."""
    try:
        table = json.loads(path.read_text())
        return {_digest(entry["key"]): _check(entry, entry["key"]) for entry in table}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError):
        _ignore(path, "it is not a list of entries")
        return {}


def _decoded[T](values: dict[str, Any] | None, path: pathlib.Path, decode: Callable[[dict[str, Any]], T]) -> T | None:
    if values is None:
        return None
    try:
        return decode(values)
    except (ValueError, TypeError) as e:
        _ignore(path, str(e))
        return None


def _ignore(path: pathlib.Path, reason: str) -> None:
    way_out = "Install jaxkernels anew." if path.parent == _TABLES else "Delete it, or tune again to replace it."
    warnings.warn(f"tuning: ignored {path}: {reason.rstrip('.')}. {way_out}", stacklevel=2)
