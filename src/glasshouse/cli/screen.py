"""Terminal output: tables, progress bars, warnings; plain text if the output is not a terminal.

Texts are untrusted, so their control characters are escaped and their brackets are not parsed as markup.
"""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, TextIO

from rich import filesize
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

import glasshouse as gh
from glasshouse.escaping import NEWLINE, escape_control

_WIDE = 100_000  # line width if the output is not a terminal


def console() -> Console:
    """Return a console on stdout without markup, which wraps lines only on a terminal."""
    width = None if sys.stdout.isatty() else _WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def in_colour() -> bool:
    """Return whether output is coloured: on a terminal with colours, unless NO_COLOR is set."""
    stdout = console()
    return sys.stdout.isatty() and stdout.color_system is not None and not stdout.no_color


def table(rows: Iterable[Sequence[str | Text]], header: Sequence[str] = (), right: Iterable[int] = ()) -> None:
    """Print rows in columns; the columns in `right` are right-aligned."""
    drawn = Table(box=None, pad_edge=False, show_header=bool(header))
    rows, right = list(rows), set(right)
    for number in range(max(map(len, [header, *rows]))):
        drawn.add_column(
            header[number] if header else "", justify="right" if number in right else "left", overflow="fold"
        )
    for row in rows:
        drawn.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    stdout = console()
    if sys.stdout.isatty():
        stdout.print(drawn)
        return
    with stdout.capture() as captured:
        stdout.print(drawn)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def alternate(tokens: Iterable[str]) -> str | Text:
    """Return tokens separated by alternating colours, or else by spaces."""
    if not in_colour():
        return " ".join(tokens)
    text = Text(overflow="fold")
    for number, token in enumerate(tokens):
        text.append(token.replace(NEWLINE, f"{NEWLINE}\n"), ("cyan", "yellow")[number % 2])
    return text


@contextmanager
def progress(**units: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar per stage on stderr, if it is a terminal; `units` are the units of stages, else bytes."""
    if not sys.stderr.isatty():
        yield gh.text.bpe.training.no_progress
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(compact=True),
    )
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, amount="")
            if stage in units:
                amount = f"{done:,} of {total:,} {units[stage]}"
            else:
                amount = f"{filesize.decimal(done)} of {filesize.decimal(total)}"
            bar.update(tasks[stage], completed=done, total=total, amount=amount)

        yield show


@contextmanager
def waiting(why: str) -> Iterator[None]:
    """Show a spinner on a terminal; of the processes that torchrun starts, the first does."""
    shows = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    with Console(stderr=True).status(why) if shows else nullcontext():
        yield


class _Terminal(io.FileIO):
    """A terminal that may be closed while a command runs: further output is discarded."""

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - any buffer
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal(stream: TextIO) -> TextIO:
    """Return a stream to the same terminal that survives closing it; a stream to a file is returned unchanged."""
    if not stream.isatty():
        return stream
    raw = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(raw, encoding=stream.encoding, errors=stream.errors, line_buffering=True)


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning as one line, without its location in the code."""
    with suppress(OSError):  # a full disk must not fail what is warned of
        print(f"warning: {escape_control(' '.join(str(message).split()))}", file=sys.stderr)
