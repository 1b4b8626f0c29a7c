"""JSON Lines logs of a run: one object per line, one line per step, also after a resume."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from glasshouse.training.checkpoint.folder import METRICS, PROBES, SAMPLES

LAST_STEP = 2**53  # larger integers are not exact in a browser
PER_HEAD, PER_LAYER = (
    ("entropy", "induction", "previous_token"),
    ("logit_lens", "resid_norms"),
)  # shapes of probes: [layer][head] and [layer]


def _is_number(value: object) -> bool:
    """Tell whether this is a finite number, or the null written for NaN and infinity."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return abs(value) <= sys.float_info.max  # false for NaN; JSON integers can exceed every float


def _is_vector(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_number, value))


def _is_matrix(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_vector, value))


def _is_metrics(values: dict[str, Any]) -> bool:
    return all(map(_is_number, values.values()))


def _is_probes(values: dict[str, Any]) -> bool:
    return all(
        _is_matrix(value) if name in PER_HEAD else _is_vector(value) if name in PER_LAYER else _is_number(value)
        for name, value in values.items()
    )


def _is_samples(values: dict[str, Any]) -> bool:
    match values:
        case {"samples": list(samples), **more} if not more:
            return all(map(_is_sample, samples))
    return False


def _is_sample(sample: object) -> bool:
    match sample:
        case {"prompt": str(), "text": str(), **more}:
            return all(isinstance(text, str) for text in more.values())
    return False


def _is_anything(values: dict[str, Any]) -> bool:
    return True


SHAPES: dict[str, Callable[[dict[str, Any]], bool]] = {
    METRICS: _is_metrics,
    PROBES: _is_probes,
    SAMPLES: _is_samples,
}


class Journal:
    """Appends to metrics.jsonl, probes.jsonl or samples.jsonl.

    >>> import tempfile
    >>> journal = Journal(Path(tempfile.mkdtemp(), "metrics.jsonl"))
    >>> for step in range(4):
    ...     journal.write(step, loss=5.0 - step)
    >>> journal.truncate(2)  # resuming from a checkpoint after steps 0 and 1
    >>> journal.write(2, loss=2.5)
    >>> [line["loss"] for line in journal.lines()]
    [5.0, 4.0, 2.5]
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path, self.writes = path, writes  # without `writes` it is left to another process
        self._is_valid = SHAPES.get(path.name, _is_anything)

    def write(self, step: int, **values: Any) -> None:  # noqa: ANN401 (what JSON takes)
        """Append a line; other processes can read it when this returns."""
        if not self.writes:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def entry(self, line: str | bytes) -> dict[str, Any] | None:
        """Parse a line; None if it is damaged: not JSON, or not in the format of this file.

        >>> Journal(Path("metrics.jsonl")).entry('{"step": 3, "loss": 2.5}')
        {'step': 3, 'loss': 2.5}
        >>> Journal(Path("metrics.jsonl")).entry('{"step": 3, "loss": "low"}')
        """
        try:
            found = json.loads(line, parse_constant=lambda _: None)  # NaN and Infinity become null, as we write them
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or type(step := found.get("step")) is not int or not 0 <= step < LAST_STEP:
            return None
        return found if self._is_valid({name: value for name, value in found.items() if name != "step"}) else None

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the lines; damaged ones, such as the last of a killed process, are skipped."""
        if not self.path.is_file():
            return
        with self.path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if (found := self.entry(line)) is not None:
                    yield found

    def truncate(self, step: int) -> None:
        """Drop the lines from a step on, atomically."""
        if not self.writes or not self.path.is_file():
            return
        kept = [line for line in self.lines() if line["step"] < step]
        fresh = self.path.with_name(f".{self.path.name}.new")
        with fresh.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in kept)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self.path)
