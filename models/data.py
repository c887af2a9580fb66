"""Text on disk to batches of tokens: find the text, tokenise it once into a memory-mapped cache, draw from it.

A batch is a pure function of (seed, step), so a resumed run sees exactly the batches it would have seen.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
import sysconfig
import tempfile
from collections.abc import Callable, Iterator

import numpy as np

from jaxkernels.folders import cache_root
from jaxkernels.models import tokenizer as tokenizer_lib
from jaxkernels.models.config import InputError
from jaxkernels.models.tokenizer import END_OF_TEXT, ByteTokenizer, Tokenizer

__all__ = ["Document", "TokenData", "batch_at", "find_documents", "load", "validation_batches"]

#: Share of the text, in bytes, that is kept for validation.
_VALIDATION_SHARE = 0.05

#: Raise this when the cache's layout, or how text becomes tokens, changes.
_CACHE_FORMAT = 1

#: Long documents are encoded in pieces of about this many characters, cut at line ends: it bounds the
#: memory an encoding takes and lets the tokenizer work on several pieces at once.
_PIECE_CHARS = 1 << 18

#: Pieces handed to the tokenizer at a time.
_PIECES_AT_ONCE = 64


@dataclasses.dataclass(frozen=True)
class Document:
    """A text file, known by its content.

    Attributes:
      path: where it is.
      digest: SHA-256 of its bytes.
      num_bytes: its size.
    """

    path: pathlib.Path
    digest: str
    num_bytes: int

    def read(self) -> bytes:
        """Returns its bytes; raises InputError if they are no longer those of the digest."""
        content = _read(self.path)
        if hashlib.sha256(content).hexdigest() != self.digest:
            raise InputError(f"data: {self.path} changed while it was being read. Start again.")
        return content


def find_documents(source: pathlib.Path | None) -> list[Document]:
    """Lists the text files of `source`, ordered by the digest of their content.

    That order is a shuffle which depends on nothing but the text: it spreads every kind of file over
    training and validation.

    Args:
      source: a UTF-8 text file; or a folder, of which every UTF-8 file is taken and other files, hidden
        ones and symbolic links are passed over; or None for the Python standard library's own source.

    Raises:
      InputError: nothing there, not readable, empty, or no text.
    """
    if source is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        files = [path for path in _walk(root) if path.suffix == ".py"]
    elif source.is_dir():
        root, files = source, list(_walk(source))
    elif source.exists():
        root, files = source, [source]
    else:
        raise InputError(f"data: no such file or folder: {source}.")

    documents = []
    for path in files:
        content = _read(path)
        if is_text(content):
            if content:
                documents.append(Document(path, hashlib.sha256(content).hexdigest(), len(content)))
        elif path == root:
            raise InputError(f"data: {root} is not text: it is not valid UTF-8, or has NUL bytes.")
    if not documents:
        if root in files:
            raise InputError(f"data: {root} is empty.")
        raise InputError(f"data: {root} holds no text: none of its {len(files)} files is non-empty UTF-8.")
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
      tokenizer: what made them.
      key: names the content and the tokenizer: equal keys mean equal tokens.
      num_documents: text files.
      num_bytes: their size.
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
    log: Callable[[str], None] = lambda message: None,
) -> TokenData:
    """Returns the tokens of `source`, from the cache or made now.

    Args:
      source: as in `find_documents`.
      tokenizer: "bytes" or "bpe".
      vocab_size: entries of the BPE vocabulary.
      sequence_length: tokens of a training sequence; both splits must hold at least one.
      log: called with a line of text before each slow part.

    Raises:
      InputError: the text cannot be used, or the cache cannot be written.
    """
    documents = find_documents(source)
    version = importlib.metadata.version("tokenizers")
    settings = ["bytes"] if tokenizer == "bytes" else ["bpe", vocab_size, version]
    content = [_CACHE_FORMAT, _VALIDATION_SHARE, settings, [document.digest for document in documents]]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    folder = cache_root() / "tokens" / key
    if not folder.exists():
        try:
            _fill_cache(folder, documents, tokenizer, vocab_size, log)
        except OSError as e:
            raise InputError(
                f"data: cannot write the token cache {folder.parent}: {e.strerror}. "
                "Set JAXKERNELS_CACHE_DIR to a folder that can be written."
            ) from e
    dtype = json.loads((folder / "meta.json").read_text())["dtype"]
    streams = {name: _map(folder / f"{name}.bin", dtype) for name in ("train", "validation")}
    needed = sequence_length + 1
    if min(map(len, streams.values())) < needed:
        raise InputError(
            f"data: too little text: {len(streams['train'])} training and {len(streams['validation'])} validation "
            f"tokens, and one sequence needs {needed}. Give more text or a smaller --sequence-length."
        )
    return TokenData(
        **streams,
        tokenizer=tokenizer_lib.load(tokenizer, folder),
        key=key,
        num_documents=len(documents),
        num_bytes=sum(document.num_bytes for document in documents),
    )


def _map(path: pathlib.Path, dtype: str) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.zeros(0, dtype)


def _fill_cache(
    folder: pathlib.Path,
    documents: list[Document],
    kind: str,
    vocab_size: int,
    log: Callable[[str], None],
) -> None:
    """Writes the cache beside its place and renames it there: other processes see all of it or nothing.

    Two processes may write the same one; the second finds it in place and drops its own copy.
    """
    megabytes = sum(document.num_bytes for document in documents) / 1e6
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = pathlib.Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".part", dir=folder.parent))
    try:
        if kind == "bytes":
            tokenizer: Tokenizer = ByteTokenizer()
        else:
            log(f"learning a byte-pair encoding of {vocab_size:,} tokens from {megabytes:.1f} MB of text")
            pieces = (piece for text, _ in _split(documents)[0] for piece in _pieces(text))
            tokenizer = tokenizer_lib.train_bpe(pieces, vocab_size)
        log(f"tokenising {megabytes:.1f} MB of text from {len(documents):,} files")
        dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
        for name, texts in zip(("train", "validation"), _split(documents)):
            with open(part / f"{name}.bin", "wb") as file:
                for text, ends in texts:
                    for batch in itertools.batched(_pieces(text), _PIECES_AT_ONCE):
                        for tokens in tokenizer.encode(batch):
                            file.write(tokens.astype(dtype).tobytes())
                    if ends:
                        file.write(np.array([END_OF_TEXT], dtype).tobytes())
        tokenizer.save(part)
        (part / "meta.json").write_text(json.dumps({"dtype": dtype.name}) + "\n")
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # It failed, and not because another process was faster.
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _split(documents: list[Document]) -> tuple[Iterator[tuple[str, bool]], Iterator[tuple[str, bool]]]:
    """Cuts the documents, in order, after 95 % of the bytes; yields (text, whether its document ends with it)."""
    cut = round(sum(document.num_bytes for document in documents) * (1 - _VALIDATION_SHARE))

    def texts(training: bool) -> Iterator[tuple[str, bool]]:
        start = 0
        for document in documents:
            end = start + document.num_bytes
            if (start < cut) if training else (end > cut):
                content = document.read()
                split = max(0, min(len(content), cut - start))
                while 0 < split < len(content) and content[split] & 0xC0 == 0x80:
                    split -= 1  # Not inside a character.
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
    """Draws the batch of one step: int32 (batch_size, sequence_length + 1), windows at random places.

    A pure function of its arguments: inputs are `[:, :-1]`, targets `[:, 1:]`.
    """
    starts = np.random.default_rng((seed, step)).integers(len(tokens) - sequence_length, size=batch_size)
    return _windows(tokens, starts, sequence_length)


def validation_batches(
    tokens: np.ndarray, *, num_batches: int, batch_size: int, sequence_length: int
) -> Iterator[np.ndarray]:
    """Yields batches, as of `batch_at`, of windows evenly spread over the stream: the same every time."""
    starts = np.linspace(0, len(tokens) - sequence_length - 1, num_batches * batch_size).astype(np.int64)
    for chunk in starts.reshape(num_batches, batch_size):
        yield _windows(tokens, chunk, sequence_length)


def _windows(tokens: np.ndarray, starts: np.ndarray, sequence_length: int) -> np.ndarray:
    return np.stack([tokens[start : start + sequence_length + 1] for start in starts]).astype(np.int32)
