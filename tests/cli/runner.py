"""Ways to run a command: as scripts do, at a terminal, and in this process or a fork, which are quicker."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import processes

from glasshouse import device
from glasshouse.cli import main

GLASSHOUSE = Path(sys.executable).with_name("glasshouse")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Call = Callable[..., Done]


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([GLASSHOUSE, *map(str, words)], capture_output=True, text=True, check=False)


class Forked:
    """A command in a forked process with streams of its own, which is spoken with as with a `subprocess.Popen`."""

    def __init__(self, *words: str | Path, stderr: int | None = None, **settings: str) -> None:
        input_end, to_it = os.pipe()
        from_it, output_end = os.pipe()
        errors, error_end = os.pipe() if stderr is None else (None, os.dup(stderr))
        self._process = fork((input_end, output_end, error_end), *words, **settings)
        for one in (input_end, output_end, error_end):
            os.close(one)
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")
        self.stderr = None if errors is None else os.fdopen(errors, "rb")
        self._hanging = threading.Timer(processes.SECONDS, self._process.kill)
        self._hanging.start()

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def communicate(self) -> tuple[bytes, bytes]:
        self.stdin.close()
        return self.stdout.read(), self.stderr.read() if self.stderr else b""

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._hanging.cancel()
        for stream in filter(None, (self.stdin, self.stdout, self.stderr)):
            with suppress(BrokenPipeError):  # what it did not read
                stream.close()


def fork(streams: tuple[int, int, int], *words: str | Path, **settings: str) -> ForkServerProcess:
    """Call a command in a forked process, in this folder, with these descriptors as its streams."""
    given = [Connection(os.dup(one)) for one in streams]  # descriptors travel to the fork in connections
    process = processes.FORKS.Process(
        target=_call_with, args=(given, Path.cwd(), list(map(str, words)), environment(settings))
    )
    process.start()
    for one in given:
        one.close()
    return process


def at_terminal(*words: str | Path, **settings: str) -> str:
    """Call a command in a forked process at a terminal of its own, and return all that it draws there."""
    ours, its = os.openpty()
    process = fork((its, its, its), *words, **settings)
    drawn = b""
    while ours in wait([ours, process.sentinel], processes.SECONDS):
        drawn += os.read(ours, 2**16)
    process.join()
    os.close(its)
    os.close(ours)
    return drawn.decode().replace("\r\n", "\n")


def _call_with(streams: list[Connection], place: Path, words: list[str], environment: dict[str, str]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream.fileno(), number)
        stream.close()
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for number, mode in enumerate(("r", "w", "w"))
    )
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
    processes.set_numerics()  # as in this process, so that sums are the same to the last bit
    device.measure_peak_flops = lambda *_, **__: 1e12  # which takes its time
    sys.argv = ["glasshouse", *words]
    main()


def environment(settings: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    return {**kept, "TERM": "xterm-256color", "COLUMNS": "60", **settings}


def command_at_terminal(*words: str | Path, **settings: str) -> str:
    """Run the command itself at a terminal, and return all that it draws there."""
    ours, its = os.openpty()
    process = subprocess.Popen(
        [GLASSHOUSE, *map(str, words)], stdin=its, stdout=its, stderr=its, env=environment(settings)
    )
    os.close(its)
    drawn = b""
    try:
        while block := os.read(ours, 2**16):
            drawn += block
    except OSError:  # how Linux says that the other end is closed
        pass
    process.wait()
    os.close(ours)
    return drawn.decode().replace("\r\n", "\n")
