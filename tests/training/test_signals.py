"""Signals: announced at once, also while the main thread is inside one long call, and handlers restored."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time

import pytest

from glasshouse.training.signals import Signals, StoppedError

PATIENCE = 60.0  # seconds, ten times more than needed


def test_a_signal_is_announced_while_the_main_thread_is_inside_one_call() -> None:
    announced: list[bool] = []
    inside = True
    told = threading.Event()

    def announce() -> None:
        announced.append(inside)
        told.set()

    before, rounds = signal.getsignal(signal.SIGINT), 2**19
    with Signals(announce) as signals:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        end = time.monotonic() + PATIENCE
        while signals.received is None and time.monotonic() < end:
            rounds *= 2  # until one call outlasts the timer
            hashlib.pbkdf2_hmac("sha256", b"", b"", rounds)  # no bytecode of the main thread runs meanwhile
        inside = False
        assert told.wait(PATIENCE)
        with pytest.raises(StoppedError, match="SIGINT"):
            signals.check()
    assert announced == [True]
    assert signal.getsignal(signal.SIGINT) is before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [one for one in threading.enumerate() if one.name == "signals"]


def test_without_a_signal_nothing_is_announced() -> None:
    announced: list[int] = []
    with Signals(lambda: announced.append(1)) as signals:
        signals.check()
    assert not announced


def test_in_another_thread_nothing_is_handled() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def use() -> None:
        with Signals():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert found == [before]
