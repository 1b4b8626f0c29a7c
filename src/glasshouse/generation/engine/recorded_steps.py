"""Recorded sites of decode steps, handed to their requests many steps at once: one copy for each token is slow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.engine.slots import SequenceState
from glasshouse.generation.engine.step import ReadStep
from glasshouse.generation.recording import RecordedSite

MOST_STEPS, MOST_BYTES = 16, 2**26  # that are held, at most: with more, the last of them keep the result waiting


class HeldStep(NamedTuple):
    """What was recorded in a decode step."""

    seqs: Sequence[SequenceState]
    starts: Sequence[int]  # the position of each sequence's token
    values: dict[RecordedSite, Tensor]  # [n, ...]


class RecordedSteps:
    """Holds the recorded sites of the last steps, until there are many or one of their results is wanted.

    A thread hands them over, and leaves the next step to the engine's; `finish` may be called in any thread.
    """

    def __init__(self) -> None:
        self._held: list[HeldStep] = []
        self._lock = Lock()  # guards them, and what is handed over
        self._thread = ThreadPoolExecutor(1, "recordings")
        self._handed: deque[Future[None]] = deque()  # what the thread has yet to do, or whose error is not raised

    def add(self, seqs: Sequence[SequenceState], read: ReadStep) -> None:
        """Hold what was recorded in a decode step."""
        named = dict(zip(read.readings, read.values, strict=True))
        found = {site: value for site, value in named.items() if isinstance(site, RecordedSite)}
        if not found:
            return
        for seq in seqs:
            if seq.request.recording is not None:
                seq.request.recording.on_result = self.finish
        with self._lock:
            while self._handed and self._handed[0].done():
                self._handed.popleft().result()
            self._held.append(HeldStep(list(seqs), read.starts, found))
            size = sum(value.nbytes for step in self._held for value in step.values.values())
            if not all(site.joins_steps for site in found) or len(self._held) == MOST_STEPS or size > MOST_BYTES:
                self._flush()

    def flush(self) -> None:
        """Hand what is held to the recordings of its requests, in the thread."""
        with self._lock:
            self._flush()

    def finish(self) -> None:
        """Hand over what is held, and wait until the recordings have it."""
        with self._lock:
            self._flush()
            handed = list(self._handed)
        for one in handed:
            one.result()

    def _flush(self) -> None:
        if self._held:
            self._handed.append(self._thread.submit(_hand_over, self._held))
        self._held = []


def _hand_over(steps: Sequence[HeldStep]) -> None:
    """Give each sequence what consecutive steps recorded of it."""
    sites = {site.name: site for step in steps for site in step.values}
    # By sequence and site: the first position, and values of it and those after it. None that the sequence wants is
    # missing between them, since every step in which it decodes one reads the site.
    runs: dict[tuple[SequenceState, str], tuple[int, list[Tensor]]] = {}
    for step in steps:
        for site, value in step.values.items():
            for seq, start, own in zip(step.seqs, step.starts, value.unbind(), strict=True):
                if seq.request.recording is not None:
                    runs.setdefault((seq, site.name), (start, []))[1].append(own)
    for (seq, name), (start, values) in runs.items():
        joined = torch.cat(values, sites[name].seq_dim) if len(values) > 1 else values[0]
        assert seq.request.recording is not None
        seq.request.recording.add_steps(name, joined, start, len(values))
