"""Ctrl-C and SIGTERM during training: after the first the loop saves and stops; the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any, Self

__all__ = ["Interrupted", "Interrupts"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal ended the training.

    Attributes:
      signum: the number of the signal. The process exits with 128 + signum.
    """

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """A context that records the first signal. The second raises `Interrupted` at once.

    Signals that the process ignores (as under nohup) stay ignored. Outside of the main thread the context has no
    effect, because Python installs handlers only there.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for signum in _SIGNALS:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is not None:
            raise Interrupted(signum)
        self.signum = signum
        # print must not be used here: the signal may have interrupted a print.
        os.write(2, b"\ninterrupted: stopping and saving after this step; interrupt again to stop at once\n")

    def check(self) -> None:
        """Raises `Interrupted` if there was a signal."""
        if self.signum is not None:
            raise Interrupted(self.signum)
