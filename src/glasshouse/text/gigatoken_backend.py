"""Optional import of gigatoken; suppresses its stderr output and detects forked children, which lack its threads."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

# A forked child has none of gigatoken's threads and would wait for them forever.
in_forked_child = threading.Event()

gigatoken: Any
try:
    import gigatoken.gigatoken_rs as gigatoken
except ImportError:
    gigatoken = None


class _Quiet:
    """Redirects file descriptor 2 to /dev/null while gigatoken's Rust code prints debug output."""

    lock = threading.Lock()

    def __enter__(self) -> None:
        self.lock.acquire()
        sys.stderr.flush()
        self.stderr = os.dup(2)
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 2)
        os.close(devnull)

    def __exit__(self, *_: object) -> None:
        os.dup2(self.stderr, 2)
        os.close(self.stderr)
        self.lock.release()


suppress_stderr = _Quiet()


def _in_child() -> None:
    in_forked_child.set()
    _Quiet.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
