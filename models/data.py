"""Makes batches of tokens of text on disk: finds the text, tokenises it once into a cache, and draws from the cache.

The cache has a folder for each text and tokenizer; its files are memory-mapped. Its meta.json has the size and the
SHA-256 of every other file. Each load checks them (at 1.6 GB/s on one core; the text itself is hashed, too), and a
cache that differs is made again. A cache is read only if this user or root wrote it (`jaxkernels.core.folders`).

A batch is a pure function of (seed, step), so a resumed run gets the same batches as an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import itertools
import json
import os
import pathlib
import shutil
import sysconfig
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

from jaxkernels.core.errors import InputError
from jaxkernels.core.folders import cache_root, make_private, open_entry, part_of, read_entry
from jaxkernels.models import tokenizer as tokenizer_lib
from jaxkernels.models.progress import waiting
from jaxkernels.models.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer

__all__ = ["Document", "TokenData", "batch_at", "find_documents", "load", "validation_batches"]

#: Share of the text, in bytes, for validation.
_VALIDATION_SHARE = 0.05

#: Raise this when the cache's layout, or how text becomes tokens, changes.
_CACHE_FORMAT = 1

#: Long documents are encoded in pieces of about this many characters, cut at line ends. That bounds the memory, and
#: the tokenizer can work on several pieces at once.
_PIECE_CHARS = 1 << 18

#: Pieces in one call of the tokenizer.
_PIECES_AT_ONCE = 64

_META = "meta.json"
_STREAMS = ("train.bin", "validation.bin")

#: How many of the skipped files a message names.
_NUM_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Document:
    """A text file.

    Attributes:
      path: its path.
      digest: the SHA-256 of its bytes.
      num_bytes: its size.
    """

    path: pathlib.Path
    digest: str
    num_bytes: int

    def read(self) -> bytes:
        """Returns the bytes. Raises InputError if they no longer match the digest."""
        content = _read(self.path)
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise InputError(f"data: {self.path} changed while it was being read. Start again.")
        return content


def find_documents(source: pathlib.Path | None, console: Console | None = None) -> list[Document]:
    """Lists the text files of `source`, ordered by the digest of their content.

    That order is a shuffle that depends on the text only. It spreads every kind of file over training and validation.

    Args:
      source: a UTF-8 text file; or a folder, whose UTF-8 files are taken (hidden files and symbolic links are skipped);
        or None for the Python standard library's own source.
      console: prints which files of a folder are skipped because they are not UTF-8; None: prints nothing.

    Raises:
      InputError: the source does not exist, is not readable, is empty, or is not text.
    """
    if source is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = [path for path in _walk(root) if path.suffix == ".py"]
    elif source.is_dir():
        root, files = source, list(_walk(source))
    elif source.is_file():
        root, files = source, [source]
    elif source.exists():  # A pipe or a device cannot be read twice, or has no end.
        raise InputError(f"data: {source} must be a regular file or a folder. Write the text to a file.")
    else:
        raise InputError(f"data: no such file or folder: {source}.")

    documents, skipped = [], []
    console = console or Console(quiet=True)
    with waiting(console, f"reading {len(files):,} files", len(files)) as advance:
        for path in files:
            content = _read(path)
            if not is_text(content):
                skipped.append(path)
            elif content:
                documents.append(Document(path, hashlib.sha256(content).hexdigest(), len(content)))
            advance(1)
    if skipped == [root]:
        raise InputError(f"data: {root} is not text: it is not valid UTF-8, or has NUL bytes.")
    # The standard library has files that are not UTF-8, for its own tests: they are not reported.
    if skipped and source is not None:
        names = [str(path.relative_to(root)) for path in skipped[:_NUM_NAMED]]
        names += [f"{len(skipped) - _NUM_NAMED:,} more"] if len(skipped) > _NUM_NAMED else []
        console.print(
            f"data: skipped {len(skipped):,} of {len(files):,} files, which are not UTF-8 text: " + ", ".join(names)
        )
    if not documents:
        if root in files:
            raise InputError(f"data: {root} is empty.")
        raise InputError(f"data: {root} must hold non-empty UTF-8 files; got none among {len(files)} files.")
    return sorted(documents, key=lambda document: document.digest)


def is_text(content: bytes) -> bool:
    """Whether the bytes are UTF-8 without NUL (which separates documents)."""
    if b"\0" in content:
        return False
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _walk(root: pathlib.Path) -> Iterator[pathlib.Path]:
    """Regular files under `root`, without hidden ones, links, and packages installed beside the standard library."""

    def fail(error: OSError) -> None:
        raise InputError(f"data: cannot read {error.filename}: {error.strerror}.") from error

    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name not in ("site-packages", "dist-packages")
        )
        for name in sorted(names):
            path = pathlib.Path(folder, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as e:
        raise InputError(f"data: cannot read {path}: {e.strerror}.") from e


@dataclasses.dataclass(frozen=True)
class TokenData:
    """Tokenised text.

    Attributes:
      train, validation: token streams, memory-mapped; documents end with `END_OF_TEXT`.
      tokenizer: their tokenizer.
      key: a digest of the content and the tokenizer: equal keys mean equal tokens.
      num_documents: the number of text files.
      num_bytes: the size of the text.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    key: str
    num_documents: int
    num_bytes: int


def load(
    source: pathlib.Path | None,
    *,
    tokenizer: str,
    vocab_size: int,
    sequence_length: int,
    console: Console | None = None,
) -> TokenData:
    """Returns the tokens of `source`, from the cache if it has them.

    Args:
      source: as in `find_documents`.
      tokenizer: "bytes" or "bpe".
      vocab_size: entries of the BPE vocabulary.
      sequence_length: tokens of a training sequence; both splits must hold at least one.
      console: prints the steps that take long, and why a cache is made again; None: prints nothing.

    Raises:
      InputError: the text cannot be used, or the cache cannot be written.
    """
    console = console or Console(quiet=True)
    if tokenizer == "bpe":
        tokenizer_lib.check_bpe_vocab_size(vocab_size)
    documents = find_documents(source, console)
    version = importlib.metadata.version("tokenizers")
    settings = ["bytes"] if tokenizer == "bytes" else ["bpe", vocab_size, version]
    content = [_CACHE_FORMAT, _VALIDATION_SHARE, settings, [document.digest for document in documents]]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    try:
        folder = cache_root() / "tokens" / key
    except ValueError as e:
        raise InputError(str(e)) from e
    streams, learnt = _from_cache(folder, documents, tokenizer, vocab_size, console)
    train, validation = streams
    needed = sequence_length + 1
    if min(map(len, streams)) < needed:
        raise InputError(
            f"data: training and validation text must have at least {needed} tokens each (one sequence); "
            f"got {len(train)} and {len(validation)}. Give more text or a smaller --sequence-length."
        )
    return TokenData(
        train=train,
        validation=validation,
        tokenizer=learnt,
        key=key,
        num_documents=len(documents),
        num_bytes=sum(document.num_bytes for document in documents),
    )


class _UnusableError(Exception):
    """A cache is not as it was written. The message has the reason."""


def _from_cache(
    folder: pathlib.Path, documents: list[Document], kind: str, vocab_size: int, console: Console
) -> tuple[list[np.ndarray], Tokenizer]:
    """Reads the cache. Makes it first if there is none, or if it cannot be used."""
    if os.path.lexists(folder):
        try:
            return _read_cache(folder, kind, console)
        except _UnusableError as e:
            console.print(f"data: making the token cache {folder} again: {e}")
    try:
        _fill_cache(folder, documents, kind, vocab_size, console)
    except OSError as e:
        raise InputError(
            f"data: cannot write the token cache {folder.parent}: {e.strerror}. "
            "Set JAXKERNELS_CACHE_DIR to a folder that can be written."
        ) from e
    try:
        return _read_cache(folder, kind, console)
    except _UnusableError as e:
        raise InputError(
            f"data: the token cache {folder} was just made, but cannot be used: {e}. "
            "Set JAXKERNELS_CACHE_DIR to another folder."
        ) from e


def _read_cache(folder: pathlib.Path, kind: str, console: Console) -> tuple[list[np.ndarray], Tokenizer]:
    """Returns the two memory-mapped streams and their tokenizer. Raises _UnusableError if a check fails."""
    names = [*_STREAMS, *([] if kind == "bytes" else [tokenizer_lib.FILE_NAME])]
    with contextlib.ExitStack() as stack:
        files: dict[str, io.BufferedReader] = {}
        name = _META
        try:
            meta = json.loads(read_entry(folder / _META))
            for name in names:
                files[name] = stack.enter_context(open_entry(folder / name))
            with waiting(console, "checking the token cache"):
                found = {name: _fingerprint(file) for name, file in files.items()}
        except OSError as e:
            raise _UnusableError(f"{name}: {e.strerror}") from e
        except (ValueError, RecursionError) as e:
            raise _UnusableError(f"{_META}: it is not JSON") from e
        if not isinstance(meta, dict) or not isinstance(meta.get("files"), dict):
            raise _UnusableError(f"{_META}: it has no checksums")
        if changed := [name for name in names if meta["files"].get(name) != found[name]]:
            raise _UnusableError(f"{', '.join(changed)}: size or checksum differs from {_META}")
        learnt = ByteTokenizer() if kind == "bytes" else tokenizer_lib.from_json(files[tokenizer_lib.FILE_NAME].read())
        dtype = _dtype(learnt)
        if meta.get("dtype") != dtype.name:
            raise _UnusableError(f"{_META}: dtype must be {dtype.name} for {learnt.vocab_size:,} tokens")
        return [_map(files[name], dtype) for name in _STREAMS], learnt


def _dtype(tokenizer: Tokenizer) -> np.dtype[Any]:
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _fingerprint(file: io.BufferedReader) -> dict[str, Any]:
    """Size and digest of an open file. Afterwards the file is at its beginning."""
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    num_bytes = file.tell()
    file.seek(0)
    return {"bytes": num_bytes, "sha256": digest}


def _map(file: io.BufferedReader, dtype: np.dtype[Any]) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, mode="r") if os.fstat(file.fileno()).st_size else np.zeros(0, dtype)


def _fill_cache(folder: pathlib.Path, documents: list[Document], kind: str, vocab_size: int, console: Console) -> None:
    """Writes the cache into a temporary folder and renames it, so that other processes see all of it or nothing.

    Two processes may write the same cache. The second finds it there, and deletes its own copy.
    """
    num_bytes = sum(document.num_bytes for document in documents)
    make_private(folder.parent)
    part = part_of(folder)
    part.mkdir(mode=0o700)
    try:
        if kind == "bytes":
            tokenizer: Tokenizer = ByteTokenizer()
        else:
            console.print(
                f"learning a byte-pair encoding of {vocab_size:,} tokens from {num_bytes / 1e6:.1f} MB of text"
            )
            with waiting(console, "learning"):
                pieces = (piece for text, _ in _split(documents)[0] for piece in _pieces(text))
                tokenizer = tokenizer_lib.train_bpe(pieces, vocab_size)
        console.print(f"tokenising {num_bytes / 1e6:.1f} MB of text from {len(documents):,} files")
        dtype = _dtype(tokenizer)
        with waiting(console, "tokenising", num_bytes) as advance:
            for name, texts in zip(_STREAMS, _split(documents)):
                with open(part / name, "wb") as file:
                    for text, ends in texts:
                        for batch in itertools.batched(_pieces(text), _PIECES_AT_ONCE):
                            for tokens in tokenizer.encode(batch):
                                file.write(tokens.astype(dtype).tobytes())
                            advance(sum(len(piece.encode()) for piece in batch))
                        if ends:
                            file.write(np.array([END_OF_TEXT], dtype).tobytes())
        tokenizer.save(part)
        found = {}
        for path in part.iterdir():
            with open(path, "rb") as file:
                found[path.name] = _fingerprint(file)
        (part / _META).write_text(json.dumps({"dtype": dtype.name, "files": found}, indent=1) + "\n")
        for path in part.iterdir():
            path.chmod(0o600)
        _put_in_place(part, folder, kind)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _put_in_place(part: pathlib.Path, folder: pathlib.Path, kind: str) -> None:
    """Renames `part` to `folder`. A valid cache that is already there stays; anything else is deleted."""
    try:
        part.rename(folder)
        return
    except OSError:
        if not os.path.lexists(folder):  # The failure has another cause than an existing folder.
            raise
    try:
        _read_cache(folder, kind, Console(quiet=True))
        return  # Another process has made the cache meanwhile.
    except _UnusableError:
        aside = part_of(folder)
        folder.rename(aside)
    try:
        part.rename(folder)
    except OSError:
        if not os.path.lexists(folder):
            raise
    finally:
        if aside.is_dir() and not aside.is_symlink():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def _split(documents: list[Document]) -> tuple[Iterator[tuple[str, bool]], Iterator[tuple[str, bool]]]:
    """Splits the documents, in order, at 95 % of the bytes. Yields (text, whether the document ends there)."""
    cut = round(sum(document.num_bytes for document in documents) * (1 - _VALIDATION_SHARE))

    def texts(training: bool) -> Iterator[tuple[str, bool]]:
        start = 0
        for document in documents:
            end = start + document.num_bytes
            if (start < cut) if training else (end > cut):
                content = document.read()
                split = max(0, min(len(content), cut - start))
                while 0 < split < len(content) and content[split] & 0xC0 == 0x80:
                    split -= 1  # Do not cut inside a character.
                part = content[:split] if training else content[split:]
                if part:
                    yield part.decode(), not training or split == len(content)
            start = end

    return texts(True), texts(False)


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_CHARS) + 1 or len(text)
        yield text[start:end]
        start = end


def batch_at(tokens: np.ndarray, *, seed: int, step: int, batch_size: int, sequence_length: int) -> np.ndarray:
    """Draws the batch of one step: windows at random positions, int32 (batch_size, sequence_length + 1).

    Inputs are `[:, :-1]`, targets `[:, 1:]`. The batch depends on the arguments only.
    """
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - sequence_length, size=batch_size)
    return _windows(tokens, starts, sequence_length)


def validation_batches(
    tokens: np.ndarray, *, num_batches: int, batch_size: int, sequence_length: int
) -> Iterator[np.ndarray]:
    """Yields batches like `batch_at`, of windows evenly spread over the stream. They are always the same.

    A short stream has fewer batches: as many as its tokens fill.
    """
    num_batches = min(num_batches, -(-len(tokens) // (batch_size * sequence_length)))
    starts = np.linspace(0, len(tokens) - sequence_length - 1, num_batches * batch_size).astype(np.int64)
    for chunk in starts.reshape(num_batches, batch_size):
        yield _windows(tokens, chunk, sequence_length)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence_length: int) -> np.ndarray:
    return np.stack([tokens[start : start + sequence_length + 1] for start in starts]).astype(np.int32)
