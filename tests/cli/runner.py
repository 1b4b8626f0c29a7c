"""Ways to run a command: as scripts do, at a terminal, and in this process, which is quicker."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    """Run a command at a terminal of its own, and return all that it draws there."""
    ours, its = os.openpty()
    environment = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    process = subprocess.Popen(
        [GLASSHOUSE, *map(str, words)],
        stdin=its,
        stdout=its,
        stderr=its,
        env={**environment, "TERM": "xterm-256color", "COLUMNS": "60", **settings},
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
