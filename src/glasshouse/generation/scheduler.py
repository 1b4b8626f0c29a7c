"""The batch of an engine: requests join it as slots fall free, read their prompts, write, and leave.

Only the thread that is in a step touches it; what other threads do is the engine's.
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from glasshouse.generation import beam
from glasshouse.generation.logits_kernels import token_logprobs
from glasshouse.generation.model_runner import MIXED_PREFILL_TOKENS, MixedPrefill, ModelRunner
from glasshouse.generation.recording import Recorder, RequestRecording
from glasshouse.generation.request import NOT_FINITE, Request
from glasshouse.generation.sampling import EMPTY_SLOT
from glasshouse.generation.slots import SequenceState, Slots
from glasshouse.generation.speculation import Drafts, Speculator


@dataclass
class _PendingStep:
    """A step that was given to the device, and whose tokens the host has not read yet."""

    rows: list[tuple[SequenceState, Request]]
    tokens: Tensor  # [n, T], on the host once `copied` has happened
    logprobs: Tensor  # [n, T], likewise
    counts: list[int]  # how many of a row's tokens count
    copied: torch.cuda.Event | None = None


class Scheduler:
    """The requests that have a slot, and the steps that they take together."""

    def __init__(
        self,
        slots: Slots,
        runner: ModelRunner,
        queue: deque[Request],
        *,
        prefill_chunk: int,
        vocab_size: int,
        speculator: Speculator | None,
        recorder: Recorder | None,
    ) -> None:
        self.slots, self.runner, self.sampler = slots, runner, runner.sampler
        self.prefill_chunk, self.vocab_size = prefill_chunk, vocab_size
        self.speculator, self.recorder = speculator, recorder
        self._queue = queue  # of requests that wait for a slot
        self._searches: dict[Request, tuple[beam.BeamSearch, list[SequenceState]]] = {}
        self._launched: deque[_PendingStep] = deque()

    @property
    def busy(self) -> bool:
        """Whether some request has a slot, or tokens on their way."""
        return bool(self.slots.running or self._launched)

    @property
    def requests(self) -> set[Request]:
        """The requests that have a slot, or tokens on their way."""
        rows = {row.request for row in self.slots.running if row.request is not None}
        return rows | {request for launch in self._launched for _, request in launch.rows}

    def clear(self) -> None:
        """Take all slots back at once."""
        self._searches.clear()
        self._launched.clear()
        for slot in range(len(self.slots)):
            self.sampler.clear_slot(slot)
        self.slots.clear()

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Take the slots of requests back that were cancelled."""
        for request in [request for request in self._searches if request.done]:
            del self._searches[request]
        ended = [row for row in self.slots.running if row.request is not None and row.request.done]
        for row in ended:
            if row.request is not None and not row.request.ids:  # no token has shown yet that what it holds is finite
                self.slots.clear_slot(row)
        self._leave(ended)

    @torch.inference_mode()
    def step(self) -> None:
        """Let requests join, read a chunk of prompts, and give each row its next token."""
        riders = None
        if self._should_mix_prefill():
            riders = self._schedule_mixed_prefill()
        else:
            self._prefill_waiting()
        rows = [row for row in self.slots.running if not row.is_prefilling]
        if rows:
            drafts = None if self.speculator is None else self.speculator.propose(rows, self.sampler)
            if drafts is None:
                self._decode(rows, riders)
            else:
                self._verify_drafts(drafts, rows)
        # A GPU works on a step while the host reads the one before it; where the next step depends on what is read,
        # or the host does the work itself, it waits.
        ahead = self.runner.next_input_ids.is_cuda and not self._searches and self.speculator is None and bool(rows)
        while len(self._launched) > int(ahead):
            self._process_output(self._launched[0])
            self._launched.popleft()

    def _prefill_waiting(self) -> None:
        """Let requests join while there are slots, and read their prompts, a chunk in all."""
        left = self.prefill_chunk
        while left > 0 and (row := self._next_prefill()) is not None:
            if row.is_prefilling:
                left -= self._prefill(row, left)
            if not row.is_prefilling:
                self._start_decoding(row)

    def _should_mix_prefill(self) -> bool:
        """Whether so many rows write that a newcomer had better read its prompt along with their steps."""
        if not self.runner.supports_mixed_prefill or self.speculator is not None or not self.slots.running:
            return False
        writing = len(self.slots.running) - int(self.slots.running[-1].is_prefilling)
        return writing > 0 and len(self.slots.free) <= max(1, len(self.slots) // 8)

    def _schedule_mixed_prefill(self) -> MixedPrefill | None:
        """Let requests join, up to one that has a prompt to read; return what of it is read along with this step."""
        while (row := self._next_prefill()) is not None:
            assert row.request is not None
            if row.is_prefilling and row.request.options.beams == 1:
                stop = min(
                    row.n_cached + MIXED_PREFILL_TOKENS, row.n_cached + self.prefill_chunk, len(row.request.prompt) - 1
                )
                ids = row.request.prompt[row.n_cached : stop]
                riders = MixedPrefill(row.slot, row.n_cached, ids)
                row.n_cached += len(ids)
                row.max_cached = max(row.max_cached, row.n_cached)
                self.slots.cache.lengths[row.slot] = row.n_cached
                if not row.is_prefilling:
                    self._start_decoding(row)  # its first step is this one: layers write keys before they look at any
                return riders
            if row.is_prefilling:  # the beams of a search begin as copies of what is held, so it cannot ride
                self._prefill(row, self.prefill_chunk)
            if row.is_prefilling:
                return None
            self._start_decoding(row)
        return None

    def _next_prefill(self) -> SequenceState | None:
        """Return the row that is reading its prompt, or else one for the first request in the queue."""
        return (
            self.slots.running[-1] if self.slots.running and self.slots.running[-1].is_prefilling else self._admit()
        )

    def _admit(self) -> SequenceState | None:
        """Give the first request in the queue a slot, if there are as many as it needs."""
        while self._queue and self._queue[0].done:  # cancelled while it waited
            self._queue.popleft()
        if not self._queue or len(self.slots.free) < self._queue[0].options.beams:
            return None
        request = self._queue[0]
        row = self.slots.allocate(request)
        self._queue.popleft()  # not before it has a row, so that it can always be found
        if request.source:
            with self._watching([row], len(request.source)):
                self.runner.encode_source(request.source, row.slot)
        return row

    def _prefill(self, row: SequenceState, most: int) -> int:
        """Read the next tokens of a prompt into the cache, all but its last; return how many."""
        assert row.request is not None
        ids = row.request.prompt[row.n_cached : min(row.n_cached + most, len(row.request.prompt) - 1)]
        with self._watching([row], len(ids)):
            self.runner.prefill(ids, row.slot, row.n_cached)
        row.n_cached += len(ids)
        row.max_cached = max(row.max_cached, row.n_cached)
        return len(ids)

    def _start_decoding(self, row: SequenceState) -> None:
        """Let a row that has read its prompt write; a search gets a row for each beam."""
        request = row.request
        assert request is not None
        rows = [row, *(self.slots.fork(row) for _ in range(request.options.beams - 1))]
        for one in rows:
            options = request.options if len(rows) == 1 else EMPTY_SLOT
            self.sampler.set_slot(one.slot, options, request.prompt, sorted(request.end_ids))
            self.runner.next_input_ids[one.slot] = request.prompt[-1]
        if len(rows) > 1:
            self._searches[request] = make_beam_search(request, self.vocab_size), rows

    def _decode(self, rows: list[SequenceState], riders: MixedPrefill | None) -> None:
        """Give each row its next token, and read what rides along."""
        with self._watching(rows, 1):
            written = self.runner.decode(len(rows), *_lengths(rows, 1), riders)
        self._launch(rows, written.tokens[:, None], written.logprobs[:, None], [1] * len(rows))
        for row in rows:
            row.n_cached += 1
            row.n_scheduled += 1
            row.max_cached = max(row.max_cached, row.n_cached)
        self._advance_beams(written.logits)
        # What such rows still have to come is on its way, so others may have their slots.
        self._leave([row for row in rows if row.n_scheduled >= row.limit])

    def _verify_drafts(self, drafts: Drafts, rows: list[SequenceState]) -> None:
        """Give each row its drafts as far as the model agrees, and the token after them."""
        n, k = drafts.tokens.shape
        logits = self.runner.verify_drafts(drafts.tokens, drafts.counts, *_lengths(rows, k + 1))
        tokens, counts = self.sampler.verify(logits, drafts.tokens, drafts.counts, drafts.probabilities)
        logprobs = token_logprobs(logits.flatten(0, 1), tokens.flatten()).view(n, k + 1)
        kept_by_row = counts.tolist()
        self._launch(rows, tokens, logprobs, kept_by_row)
        for row, kept, tried in zip(rows, kept_by_row, drafts.counts.tolist(), strict=True):
            row.max_cached = max(row.max_cached, row.n_cached + tried + 1)
            row.n_cached += kept
            row.n_scheduled += kept
        self.slots.cache.lengths[:n] = torch.tensor([row.n_cached for row in rows], device=logits.device)
        self.runner.next_input_ids[:n] = tokens.gather(1, counts[:, None] - 1)
        self._advance_beams(logits[:, 0])

    def _advance_beams(self, logits: Tensor) -> None:
        """Let each search choose the tokens of its rows, and put the rows in the order it asks for."""
        for width in sorted({search.options.beams for search, _ in self._searches.values()}):
            group = [(search, rows) for search, rows in self._searches.values() if search.options.beams == width]
            slots = [row.slot for _, rows in group for row in rows]
            places = torch.tensor(slots, device=logits.device)
            theirs = logits if slots == list(range(len(logits))) else logits[places]
            _, self.runner.next_input_ids[places, 0] = beam.advance([search for search, _ in group], theirs)
            for search, rows in group:
                for move in search.cache_copies:
                    source, target = rows[move.source], rows[move.target]
                    assert target.request is not None
                    shared = len(target.request.prompt) + move.start
                    self.slots.cache.copy_row(source.slot, target.slot, shared, source.n_cached)
        for request, (search, rows) in list(self._searches.items()):
            if search.done:
                if search.not_finite:
                    request.fail(NOT_FINITE)
                    self.slots.purge(rows)
                else:
                    request.finish_search(search.results(), search.tree if request.keep_tree else None)
                del self._searches[request]
                self._leave(rows)

    def _launch(self, rows: list[SequenceState], tokens: Tensor, logprobs: Tensor, counts: list[int]) -> None:
        """Note who gets the tokens of a step, and have them copied to the host when the device is so far."""
        asked = [(row, row.request) for row in rows if row.request is not None]
        copied = None
        if tokens.is_cuda:
            tokens, logprobs = (
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in (tokens, logprobs)
            )
            copied = torch.cuda.Event()
            copied.record()
        self._launched.append(_PendingStep(asked, tokens, logprobs, counts, copied))

    def _process_output(self, launch: _PendingStep) -> None:
        """Hand the tokens of a step to their requests, unless they ended meanwhile."""
        if launch.copied is not None:
            launch.copied.synchronize()
        tokens, logprobs = launch.tokens.tolist(), launch.logprobs.tolist()
        for (row, request), new, values, count in zip(launch.rows, tokens, logprobs, launch.counts, strict=True):
            if request.options.beams > 1:
                continue
            for token, logprob in zip(new[:count], values[:count], strict=True):
                if request.add(token, logprob):
                    row.tokens.append(token)
            if request.error is not None:
                self.slots.purge([row])
        self._leave([row for row, request in launch.rows if request.done and row.request is request])

    def _watching(self, rows: list[SequenceState], count: int) -> AbstractContextManager[None]:
        """Record the pass inside the block, in which each row brings so many tokens."""
        if self.recorder is None:
            return nullcontext()
        return self.recorder.recording([(_recording_of(row), row.n_cached) for row in rows], count)

    def _leave(self, rows: list[SequenceState]) -> None:
        for row in sorted(rows, key=lambda row: -row.slot):  # from the last on, so that none moves that will leave
            self.sampler.clear_slot(row.slot)
            for old, new in self.slots.release(row):
                self.sampler.move(old, new)
                self.runner.next_input_ids[new] = self.runner.next_input_ids[old]
                if self.speculator is not None:
                    self.speculator.move(old, new)


def make_beam_search(request: Request, vocab_size: int) -> beam.BeamSearch:
    """Return the beam search that a request asks for; what cannot be searched is refused."""
    return beam.BeamSearch(
        replace(request.options, max_new_tokens=request.limit),
        sorted(request.end_ids),
        vocab_size,
        n_best=request.n_best,
        keep_tree=request.keep_tree,
        prompt=request.prompt,
    )


def _recording_of(row: SequenceState) -> RequestRecording:
    assert row.request is not None
    assert row.request.recording is not None
    return row.request.recording


def _lengths(rows: list[SequenceState], new: int) -> tuple[int, int]:
    """Return the most tokens that a row will have with so many new ones, and the most that a source has."""
    sources = (len(row.request.source) for row in rows if row.request is not None)
    return max(row.n_cached for row in rows) + new, max(sources, default=0)
