"""Being asked to stop: Ctrl-C, SIGTERM and SIGHUP are heard at the next good moment, a second Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StoppedError(Exception):
    """A run was asked to stop, and has saved what it had."""

    def __init__(self, number: int, step: int = 0) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")
        self.number, self.step = number, step


def _heard() -> list[int]:
    """Return the signals to listen to; SIGHUP, of a terminal that is closed, unless `nohup` has it ignored."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # Windows has none
        numbers.append(signal.SIGHUP)
    return numbers


class Signals:
    """Listens while it is open; elsewhere than in the main thread, where Python hears no signals, it does nothing."""

    def __init__(self) -> None:
        self.heard: int | None = None
        self._before: dict[int, Any] = {}

    def check(self) -> None:
        """Raise `StoppedError` if a signal was heard."""
        if self.heard is not None:
            raise StoppedError(self.heard)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard is not None and number == signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)  # as if nobody had listened: no thread is waited for
            os.kill(os.getpid(), number)
        self.heard = number

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in _heard():
                self._before[number] = signal.signal(number, self._hear)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
