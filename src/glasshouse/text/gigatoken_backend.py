"""gigatoken, where it is installed: kept off the terminal, and known to be without its threads in a forked child."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

# A child that was forked has none of gigatoken's threads, and would wait for them for ever.
in_forked_child = threading.Event()

gigatoken: Any
try:
    import gigatoken.gigatoken_rs as gigatoken
except ImportError:
    gigatoken = None


class _Quiet:
    """Keeps what gigatoken's Rust prints for its own developers off the terminal."""

    lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()
        sys.stderr.flush()
        self.kept = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.kept, 2)
        os.close(self.kept)
        self.lock.release()


suppress_stderr = _Quiet()


def _in_child() -> None:
    in_forked_child.set()
    _Quiet.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
