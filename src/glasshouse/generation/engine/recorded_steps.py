"""Recorded sites of decode steps, handed to their requests many steps at once: one copy for each token is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from glasshouse.generation.engine.slots import SequenceState
from glasshouse.generation.engine.step import ReadStep
from glasshouse.generation.recording import RecordedSite

MOST_STEPS, MOST_BYTES = 8, 2**26  # that are held, at most: with more, the last of them keep the result waiting


class RecordedSteps:
    """Holds the recorded sites of consecutive steps of the same sequences, until one of their results is wanted."""

    def __init__(self) -> None:
        self._seqs: list[SequenceState] = []
        self._starts: list[int] = []  # the position of each sequence's first token that is held
        self._sites: list[RecordedSite] = []
        self._values: list[list[Tensor]] = []  # by step and site, [n, ...]
        self._thread = ThreadPoolExecutor(1, "recordings")
        self._handed: deque[Future[None]] = deque()  # what the thread has yet to do, or whose error is not raised

    def add(self, seqs: Sequence[SequenceState], read: ReadStep) -> None:
        """Hold what was recorded in a decode step."""
        named = dict(zip(read.readings, read.values, strict=True))
        found = {site: value for site, value in named.items() if isinstance(site, RecordedSite)}
        if not found:
            return
        while self._handed and self._handed[0].done():
            self._handed.popleft().result()
        next_starts = [start + len(self._values) for start in self._starts]
        if (list(found), list(seqs), read.starts) != (self._sites, self._seqs, next_starts):
            self.flush()
            self._seqs, self._starts, self._sites = list(seqs), read.starts, list(found)
            for seq in seqs:
                if seq.request.recording is not None:
                    seq.request.recording.on_result = self.finish
        self._values.append(list(found.values()))
        held = len(self._values) * sum(value.nbytes for value in found.values())
        if not all(site.joins_steps for site in found) or len(self._values) == MOST_STEPS or held > MOST_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what is held to the recordings of its requests, in a thread that leaves the next step to this one."""
        if self._values:
            work = self._thread.submit(_hand_over, self._seqs, self._starts, self._sites, self._values)
            self._handed.append(work)
        self._seqs, self._starts, self._sites, self._values = [], [], [], []

    def finish(self) -> None:
        """Hand over what is held, and wait until the recordings have it."""
        self.flush()
        while self._handed:
            self._handed.popleft().result()


def _hand_over(
    seqs: Sequence[SequenceState], starts: Sequence[int], sites: Sequence[RecordedSite], steps: Sequence[list[Tensor]]
) -> None:
    """Give each sequence its part of consecutive steps."""
    for site, *values in zip(sites, *steps, strict=True):
        joined = torch.cat(values, site.seq_dim + 1) if len(values) > 1 else values[0]
        for seq, start, value in zip(seqs, starts, joined, strict=True):
            if seq.request.recording is not None:
                seq.request.recording.add_steps(site.name, value, start, len(values))
