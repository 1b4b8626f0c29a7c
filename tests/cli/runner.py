"""Ways to run a command: as scripts do, at a terminal, and in this process or a fork, which are quicker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import processes

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


def at_terminal(*words: str | Path, **settings: str) -> str:
    """Call a command in a forked process at a terminal of its own, and return all that it draws there."""
    ours, its = os.openpty()
    process = processes.FORKS.Process(
        target=_call_at, args=(os.ttyname(its), Path.cwd(), list(map(str, words)), environment(settings))
    )
    process.start()
    drawn = b""
    while ours in wait([ours, process.sentinel], processes.SECONDS):
        drawn += os.read(ours, 2**16)
    process.join()
    os.close(its)
    os.close(ours)
    return drawn.decode().replace("\r\n", "\n")


def _call_at(terminal: str, place: Path, words: list[str], environment: dict[str, str]) -> None:
    descriptor = os.open(terminal, os.O_RDWR)
    for stream in range(3):
        os.dup2(descriptor, stream)
    sys.stdin, sys.stdout, sys.stderr = (
        open(stream, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
        for stream, mode in enumerate(("r", "w", "w"))
    )
    os.chdir(place)
    os.environ.clear()
    os.environ.update(environment)
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
