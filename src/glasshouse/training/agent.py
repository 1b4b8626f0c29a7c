"""When torchrun's agent is gone: nobody would end its processes, so each stops by itself, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

POLL_SECONDS = 1.0
GRACE_SECONDS = 600.0  # for the step that runs and its checkpoint


@contextmanager
def watch_agent() -> Iterator[None]:
    """Stop this process as SIGTERM does when the agent that started it is gone; where that hangs, end it.

    Signals are what all processes of a run agree on, and torchrun itself sends SIGTERM when it is stopped. A killed
    agent is noticed by the operating system giving its processes another parent.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    agent, ended = os.getppid(), threading.Event()

    def watch() -> None:
        while os.getppid() == agent:
            if ended.wait(POLL_SECONDS):
                return
        os.kill(os.getpid(), signal.SIGTERM)
        if not ended.wait(GRACE_SECONDS):
            os._exit(128 + signal.SIGTERM)

    thread = threading.Thread(target=watch, name="agent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
