"""The metrics of a run as curves, read from its journal as it grows."""

from __future__ import annotations

import math
import os
import threading
from array import array
from bisect import bisect_left
from functools import lru_cache
from pathlib import Path

import numpy as np

from glasshouse.config import JsonDict
from glasshouse.training.checkpoint.folder import METRICS
from glasshouse.training.logging.journal import Journal

POINTS = 1000  # maximum points of a curve; at least half as many for long runs


class Curves:
    """Metrics of a journal by name, read incrementally, and from the start when it was truncated."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.Lock()
        self.journal = Journal(path)
        self.truncations = 0
        self._forget()

    def _forget(self) -> None:
        self.last = 0  # last step
        self.series: dict[str, tuple[array[int], array[float]]] = {}  # steps and values, without NaN
        self._file, self._end, self._line = 0, 0, b""  # read position, and the line that ended there

    def read_new(self) -> None:
        """Read the lines appended since the last call."""
        try:
            with self.path.open("rb") as file:
                number = os.fstat(file.fileno()).st_ino
                file.seek(max(0, self._end - len(self._line)))
                if self._end and (number != self._file or file.read(len(self._line)) != self._line):
                    self.truncations += 1
                    self._forget()
                    file.seek(0)
                self._file = number
                for line in file:
                    if not line.endswith(b"\n"):  # still being written
                        break
                    self._end, self._line = self._end + len(line), line
                    self._take(line)
        except OSError:  # not created yet, or deleted
            if self._end:
                self.truncations += 1
                self._forget()

    def _take(self, line: bytes) -> None:
        entry = self.journal.entry(line)
        if entry is None:  # damaged or truncated
            return
        self.last = step = entry.pop("step")
        for name, value in entry.items():
            if value is not None:
                steps, values = self.series.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                values.append(value)

    @property
    def steps_per_point(self) -> int:
        """Steps per point: a power of two, so that old points stay valid as new ones arrive."""
        return 1 << (self.last // POINTS).bit_length()

    @property
    def version(self) -> str:
        """Changes when points already sent are no longer valid."""
        return f"{self.truncations}.{self.steps_per_point}"

    def since(self, step: int) -> JsonDict:
        """Return each curve from the point that contains a step."""
        return {name: _points(*series, step, self.steps_per_point) for name, series in self.series.items()}

    def steps_in(self, epochs: float | None) -> int | None:
        """Return the number of steps in so many epochs; None until a step logs its epoch."""
        if epochs is None or "epoch" not in self.series:
            return None
        steps, values = self.series["epoch"]
        return math.ceil(round(epochs * steps[-1] / values[-1], 6))

    def lowest(self, name: str) -> JsonDict | None:
        """Return the step with the lowest value of a metric."""
        if name not in self.series:
            return None
        steps, values = self.series[name]
        at = int(np.argmin(values))
        return {"step": steps[at], "value": values[at]}


def _points(steps: array[int], values: array[float], since: int, steps_per_point: int) -> JsonDict:
    """Return a curve with its steps, means, minima and maxima, one point per `steps_per_point` steps."""
    begin = bisect_left(steps, since // steps_per_point * steps_per_point)
    x, y = np.array(steps[begin:]), np.array(values[begin:])
    if steps_per_point == 1:
        return {"step": x.tolist(), "mean": y.tolist()}
    if not len(x):
        return {"step": [], "mean": [], "low": [], "high": []}
    starts = np.flatnonzero(np.diff(x // steps_per_point, prepend=-1))
    ends = np.append(starts[1:], len(x))
    return {
        "step": x[ends - 1].tolist(),
        "mean": (np.add.reduceat(y, starts) / (ends - starts)).tolist(),
        "low": np.minimum.reduceat(y, starts).tolist(),
        "high": np.maximum.reduceat(y, starts).tolist(),
    }


@lru_cache(maxsize=4)
def curves_of(run: Path) -> Curves:
    """Return the curves of a run, which keep their read position."""
    return Curves(run / METRICS)
