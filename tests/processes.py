"""Processes that a test may kill, forked from one that has imported torch already: to import it takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch
from torch import distributed as dist

THREADS = int(os.environ.get("TEST_THREADS", "1"))
ONEDNN = os.environ.get("TEST_ONEDNN") != "off"
SECONDS = 600  # all of this takes a few, on a busy machine a minute; only a hang takes longer

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["glasshouse.training", "glasshouse.cli", "torch._dynamo", "torch.distributed.fsdp", "hypothesis", "pytest"]
)


def set_numerics() -> None:
    """Set what sums depend on, alike in tests and their processes; `make numerics` changes both."""
    torch.set_num_threads(THREADS)
    torch.backends.mkldnn.set_flags(ONEDNN)


def run(target: Callable[..., object], *arguments: object) -> int:
    """Call a function of a module in a process of its own; return the exit code, which is -9 if it was killed."""
    process = FORKS.Process(target=target, args=arguments)
    process.start()
    process.join(SECONDS)
    if process.exitcode is None:
        process.kill()
    assert process.exitcode is not None, f"not done after {SECONDS} seconds"
    return process.exitcode


def run_ranks(
    target: Callable[..., object],
    world_size: int,
    rendezvous: Path,
    *arguments: object,
    meanwhile: Callable[[list[ForkServerProcess]], None] = lambda ranks: None,
) -> list[int]:
    """Call a function with (rank, *arguments) in processes that form a gloo group; return their exit codes."""
    rendezvous.unlink(missing_ok=True)
    started = [
        FORKS.Process(target=_join, args=(target, rank, world_size, rendezvous, arguments))
        for rank in range(world_size)
    ]
    for process in started:
        process.start()
    meanwhile(started)
    end = time.monotonic() + SECONDS
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    assert None not in codes, f"not done after {SECONDS} seconds: {codes}"
    return [code for code in codes if code is not None]


def _join(
    target: Callable[..., object], rank: int, world_size: int, rendezvous: Path, arguments: tuple[object]
) -> None:
    set_numerics()
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)}
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    target(rank, *arguments)
    dist.destroy_process_group()


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
