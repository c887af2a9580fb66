"""Ctrl-C and SIGTERM during training: the first asks the loop to save and stop, the second stops at once."""

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
      signum: its number; a process that it ends exits with 128 + signum.
    """

    def __init__(self, signum: int):
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.signum = signum


class Interrupts:
    """Notes the first signal; the second raises `Interrupted` wherever the program is. A context manager.

    Signals that the process ignores stay ignored, as under nohup. Outside of the main thread, where Python installs no
    handlers, nothing changes.
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
        # Not print: the signal may have interrupted one.
        os.write(2, b"\ninterrupted: stops after this step and saves it; once more: stops at once\n")

    def check(self) -> None:
        """Raises `Interrupted` if there was a signal."""
        if self.signum is not None:
            raise Interrupted(self.signum)
