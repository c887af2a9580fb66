"""How tests state the exact message of an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

__all__ = ["raises_exactly"]


@contextlib.contextmanager
def raises_exactly(kind: type[Exception], message: str) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """As pytest.raises, for the whole message (and without the notes that JAX adds to it)."""
    with pytest.raises(kind) as info:
        yield info
    assert str(info.value) == message
