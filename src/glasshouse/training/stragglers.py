"""Stragglers: processes that the others wait for at the start of a step, as their data or machines are slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from glasshouse.training.processes import Processes

EVERY = 100  # steps between two comparisons
SHARE = 0.1  # of the time that the others wait before a process is called a straggler


class Stragglers:
    """Compares, once in a while, how long each process has waited for the others; a straggler waits for nobody."""

    def __init__(self, processes: Processes, log: Callable[[str], None]) -> None:
        self.processes, self.log = processes, log
        self.rank: int | None = None  # of the straggler that was found last, if there is one
        self._waited, self._steps, self._since, self._excluded = 0.0, 0, time.monotonic(), False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure how long this process waits for the others, once per step."""
        start = time.monotonic()
        yield
        self._waited += 0.0 if self._excluded else time.monotonic() - start
        self._steps, self._excluded = self._steps + 1, False
        if self._steps == EVERY:
            self._compare()

    def exclude_next(self) -> None:
        """Leave out the next wait: for what the main process alone has to do."""
        self._excluded = True

    def _compare(self) -> None:
        shares = self.processes.gather(self._waited / max(time.monotonic() - self._since, 1e-9))
        self.rank, share = find_straggler(shares)
        if self.rank is not None:
            self.log(f"straggler: rank {self.rank}; the others waited for it {share:.0%} of the last {EVERY} steps")
        self._waited, self._steps, self._since = 0.0, 0, time.monotonic()


def find_straggler(waited: Sequence[float]) -> tuple[int | None, float]:
    """Return the rank that the others wait for, if there is one, and for which share of the time.

    Given is the share of the time that each process waited.

    >>> find_straggler([0.5, 0.375, 0.125, 0.5]), find_straggler([0.05, 0.08, 0.02, 0.06])[0]
    ((2, 0.25), None)
    """
    least = min(range(len(waited)), key=waited.__getitem__)
    share = min((share for rank, share in enumerate(waited) if rank != least), default=0.0) - waited[least]
    return (least if share > SHARE else None), share
