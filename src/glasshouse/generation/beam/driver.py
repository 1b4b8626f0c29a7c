"""Beam search over the slots of an engine: each beam of a request is a sequence in a slot of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.beam.search import BeamSearch, advance
from glasshouse.generation.engine.model_runner import ModelRunner
from glasshouse.generation.engine.slots import SequenceState
from glasshouse.generation.request import NOT_FINITE, Request


class RunningSearch(NamedTuple):
    """The search of a request, and the sequences of its beams."""

    request: Request
    search: BeamSearch
    seqs: list[SequenceState]


class BeamDriver:
    """Advances the beam searches of all running requests."""

    def __init__(self, runner: ModelRunner, vocab_size: int) -> None:
        self.runner, self.vocab_size = runner, vocab_size
        self.running: list[RunningSearch] = []

    def start(self, seqs: list[SequenceState]) -> None:
        """Start the search of a request whose prompt is cached in the slots of these sequences."""
        request = seqs[0].request
        self.running.append(RunningSearch(request, make_beam_search(request, self.vocab_size), seqs))

    def drop_cancelled(self) -> None:
        """Forget the searches of cancelled requests."""
        self.running = [one for one in self.running if not one.request.done]

    def advance(self, logits: Tensor) -> list[RunningSearch]:
        """Advance each search by one step, from the logits [n, V] of the first n slots; return those that ended.

        The requests of these are finished; their slots must be released.
        """
        for width in sorted({one.search.options.beams for one in self.running}):
            self._advance_group([one for one in self.running if one.search.options.beams == width], logits)
        ended = [one for one in self.running if one.search.done]
        self.running = [one for one in self.running if not one.search.done]
        for request, search, _ in ended:
            if search.not_finite:
                request.fail(NOT_FINITE)
            else:
                request.finish_search(search.results(), search.tree if request.keep_tree else None)
        return ended

    def _advance_group(self, group: list[RunningSearch], logits: Tensor) -> None:
        """Advance searches of the same width, and copy the cache where beams were reordered."""
        slots = [seq.slot for one in group for seq in one.seqs]
        index = torch.tensor(slots, device=logits.device)
        own_logits = logits if slots == list(range(len(logits))) else logits[index]
        _, tokens = advance([one.search for one in group], own_logits)
        self.runner.set_next_inputs(index, tokens)
        for request, search, seqs in group:
            for copy in search.cache_copies:
                source, target = seqs[copy.source], seqs[copy.target]
                shared = len(request.prompt) + copy.start
                self.runner.copy_cache(source.slot, target.slot, shared, source.n_cached)


def make_beam_search(request: Request, vocab_size: int) -> BeamSearch:
    """Return the beam search of a request; raise for settings that cannot be searched."""
    return BeamSearch(
        replace(request.options, max_new_tokens=request.limit),
        sorted(request.end_ids),
        vocab_size,
        n_best=request.n_best,
        keep_tree=request.keep_tree,
        prompt=request.prompt,
    )
