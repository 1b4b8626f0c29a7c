"""Graceful shutdown: Ctrl-C, SIGTERM and SIGHUP take effect at the next safe point, a second Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StoppedError(Exception):
    """A run was stopped by a signal and has saved a checkpoint."""

    def __init__(self, number: int, step: int = 0) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number, self.step = number, step


def _handled_signals() -> list[int]:
    """Return the signals to handle; SIGHUP, of a closed terminal, unless `nohup` ignores it."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    return numbers


class Signals:
    """Handles signals while open; does nothing outside the main thread, where Python delivers no signals."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise `StoppedError` if a signal was received."""
        if self.received is not None:
            raise StoppedError(self.received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # the default action: exit without waiting for threads
            os.kill(os.getpid(), number)
        self.received = number

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _handled_signals():
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
