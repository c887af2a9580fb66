"""Tokenizers: the bytes of the text, or a byte-pair encoding that is trained on the text.

In both, token 0 separates documents: the byte NUL, which the text does not contain, or "<|endoftext|>".
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import tokenizers

from jaxkernels.core.errors import InputError

__all__ = [
    "END_OF_TEXT", "FILE_NAME", "BpeTokenizer", "ByteTokenizer", "Tokenizer", "check_bpe_vocab_size", "from_json",
    "load", "train_bpe",
]  # fmt: skip

#: The token between documents.
END_OF_TEXT = 0

#: Name of the BPE's file in a run's folder and in the token cache.
FILE_NAME = "tokenizer.json"

_SEPARATOR = "<|endoftext|>"
_NUM_BYTES = 256

#: The separator, the bytes and one merge.
_MIN_BPE_VOCAB = _NUM_BYTES + 2
#: Four times the largest vocabulary in use (Gemma's 262,144). The library allocates memory for the whole vocabulary at
#: once, and aborts the process if it fails.
_MAX_BPE_VOCAB = 2**20


class Tokenizer(Protocol):
    """The interface of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        """Yields the tokens of each text, without separators."""
        ...

    def decode(self, tokens: Iterable[int]) -> str: ...

    def save(self, folder: pathlib.Path) -> None: ...


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """One token for each byte of the text in UTF-8."""

    @property
    def vocab_size(self) -> int:
        return _NUM_BYTES

    def encode(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(token for token in tokens if token != END_OF_TEXT).decode(errors="replace")

    def save(self, folder: pathlib.Path) -> None:
        """Writes nothing: the byte tokenizer has no parameters."""


@dataclasses.dataclass(frozen=True)
class BpeTokenizer:
    """Byte-level byte-pair encoding, by the `tokenizers` library."""

    model: tokenizers.Tokenizer

    @property
    def vocab_size(self) -> int:
        return self.model.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> Iterable[np.ndarray]:
        return (np.asarray(encoding.ids, np.uint32) for encoding in self.model.encode_batch_fast(list(texts)))

    def decode(self, tokens: Iterable[int]) -> str:
        return self.model.decode([int(token) for token in tokens], skip_special_tokens=True)

    def save(self, folder: pathlib.Path) -> None:
        self.model.save(str(folder / FILE_NAME))


def check_bpe_vocab_size(vocab_size: int) -> None:
    """Raises InputError if a BPE of `vocab_size` entries cannot be trained."""
    if vocab_size < _MIN_BPE_VOCAB:
        raise InputError(
            f"tokenizer: a BPE vocabulary needs at least {_MIN_BPE_VOCAB} entries (256 bytes, the separator, a merge); "
            f"got {vocab_size}. Use a larger --vocab-size, or --tokenizer bytes."
        )
    if vocab_size > _MAX_BPE_VOCAB:
        raise InputError(
            f"tokenizer: a BPE vocabulary has at most {_MAX_BPE_VOCAB:,} entries; got {vocab_size:,}. "
            "Use a smaller --vocab-size."
        )


def train_bpe(texts: Iterable[str], vocab_size: int) -> BpeTokenizer:
    """Trains a byte-level BPE of at most `vocab_size` tokens: the separator, the 256 bytes, then merges.

    Raises:
      InputError: `vocab_size` is too small for a merge, or too large.
    """
    check_bpe_vocab_size(vocab_size)
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_SEPARATOR],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    # If the text contains the separator's name, it is encoded as text, not as the separator.
    model.encode_special_tokens = True
    return BpeTokenizer(model)


def load(kind: str, folder: pathlib.Path) -> Tokenizer:
    """Reads the tokenizer in `folder`. `kind` is "bytes" or "bpe"."""
    return ByteTokenizer() if kind == "bytes" else from_json((folder / FILE_NAME).read_bytes())


def from_json(text: bytes) -> BpeTokenizer:
    """The BPE that `save` wrote as this text."""
    model = tokenizers.Tokenizer.from_buffer(text)
    model.encode_special_tokens = True
    return BpeTokenizer(model)
