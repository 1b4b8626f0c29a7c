"""Processes that a test may kill, forked from one that has imported torch already: to import it takes seconds."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

SECONDS = 120  # all of this takes a few; only a hang takes longer

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["glasshouse.training", "glasshouse.cli", "torch._dynamo", "hypothesis", "pytest"])


def run(target: Callable[..., object], *arguments: object) -> int:
    """Call a function of a module in a process of its own; return the exit code, which is -9 if it was killed."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, f"not done after {SECONDS} seconds"
    return process.exitcode


@contextmanager
def started(target: Callable[..., object], *arguments: object) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Start a process whose function gets a connection as its last argument; yield it and the other end."""
    ours, its = FORKS.Pipe()
    process = FORKS.Process(target=target, args=(*arguments, its))
    process.start()
    its.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()


def received(connection: Connection) -> Iterator[object]:
    """Yield what a process has sent until it ended."""
    while True:
        try:
            yield connection.recv()
        except (EOFError, OSError):  # an incomplete message: it was killed while it sent
            return
