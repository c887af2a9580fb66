"""Names of kernels, which profilers show."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["named_kernel"]


def named_kernel(name: str, body: Callable[..., None], **options: Any) -> Callable[..., None]:
    """The body of a kernel with values for some of its arguments. A functools.partial alone would be "anonymous"."""
    kernel: Any = functools.partial(body, **options)
    kernel.__name__ = name
    return kernel
