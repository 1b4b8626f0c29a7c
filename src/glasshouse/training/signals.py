"""Graceful shutdown: Ctrl-C, SIGTERM and SIGHUP take effect at the next safe point, a second Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType


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
    """Handles signals while open; does nothing outside the main thread, where Python delivers no signals.

    `announce` is called at once, by a thread: Python's own handlers wait for the main thread, which may be inside a
    backward pass for seconds.
    """

    def __init__(self, announce: Callable[[], None] = lambda: None) -> None:
        self.received: int | None = None
        self._announce = announce
        self._opened = ExitStack()

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
            handled = _handled_signals()
            for number in handled:
                self._opened.callback(signal.signal, number, signal.signal(number, self._handle))
            self._listen({*handled})
        return self

    def _listen(self, handled: set[int]) -> None:
        """Announce the first signal as soon as the process gets it: Python writes its number to a socket then."""
        readable, writable = socket.socketpair()
        writable.setblocking(False)

        def listen() -> None:
            while number := readable.recv(1):
                if number[0] in handled:
                    with suppress(OSError):  # the terminal was closed
                        self._announce()
                    return

        thread = threading.Thread(target=listen, name="signals", daemon=True)
        thread.start()
        self._opened.callback(readable.close)
        self._opened.callback(thread.join)
        self._opened.callback(writable.close)  # which ends the thread
        before = signal.set_wakeup_fd(writable.fileno(), warn_on_full_buffer=False)
        self._opened.callback(signal.set_wakeup_fd, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()
