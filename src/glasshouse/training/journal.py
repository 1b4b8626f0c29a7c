"""A record of a run: one JSON object a line, never two of a step, also after a run that was stopped has gone on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Journal:
    """Appends to a file of metrics, of probes or of samples.

    >>> import tempfile
    >>> journal = Journal(Path(tempfile.mkdtemp(), "metrics.jsonl"))
    >>> for step in range(4):
    ...     journal.write(step, loss=5.0 - step)
    >>> journal.cut(2)  # going on from a checkpoint after steps 0 and 1
    >>> journal.write(2, loss=2.5)
    >>> [line["loss"] for line in journal.lines()]
    [5.0, 4.0, 2.5]
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, **values: Any) -> None:  # noqa: ANN401 (what JSON takes)
        """Add a line; it is there for others to read when this returns."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what was written; a last line that was cut off is passed over."""
        if not self.path.is_file():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    yield json.loads(line)
                except ValueError:
                    continue

    def cut(self, step: int) -> None:
        """Forget the lines of a step and all after it, whole or not at all."""
        if not self.path.is_file():
            return
        kept = [line for line in self.lines() if line["step"] < step]
        fresh = self.path.with_name(f".{self.path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
