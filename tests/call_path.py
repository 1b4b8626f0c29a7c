"""Follows the calls of a piece of work through the package, and reads the call paths of docs/architecture.md."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import glasshouse

PACKAGE = f"{Path(glasshouse.__file__).parent}/"
DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"
STEP = re.compile(r"^\d+\. `(?P<file>[\w/]+\.py)` `(?P<function>[\w.]+)`", re.MULTILINE)
FILE = re.compile(r"`([\w/]+\.py)`")


@dataclass(frozen=True)
class Call:
    """A call of a function of the package."""

    file: str  # within the package
    function: str  # qualified, without the names of enclosing functions

    def __str__(self) -> str:
        return f"`{self.file}` `{self.function}`"


@dataclass
class CallPath:
    """A call path as documented: the functions passed, in order, and the files that they ask besides."""

    steps: list[Call]
    besides: set[str] = field(default_factory=set)


@contextmanager
def calls() -> Iterator[list[Call]]:
    """List the calls of functions of the package made inside the block, by this thread."""
    made: list[Call] = []

    def on_event(frame: FrameType, event: str, _arg: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            made.append(Call(code.co_filename.removeprefix(PACKAGE), code.co_qualname.split(".<locals>.")[-1]))

    before = sys.getprofile()
    sys.setprofile(on_event)
    try:
        yield made
    finally:
        sys.setprofile(before)


def documented(title: str) -> CallPath:
    """Return the call path of a section of docs/architecture.md."""
    section = DOCUMENT.read_text().split(f"\n### {title}\n")[1].split("\n#")[0]
    listed, _, besides = section.partition("\nBesides:")
    steps = [Call(one["file"], one["function"]) for one in STEP.finditer(listed)]
    return CallPath(steps, set(FILE.findall(besides)))
