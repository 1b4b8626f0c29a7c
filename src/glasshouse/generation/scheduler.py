"""Continuous batching: requests take slots of the engine, prefill their prompts, decode, and release the slots.

Only the thread that runs a step uses it; thread safety is the engine's job.
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
    """A step launched on the device whose tokens the host has not processed yet."""

    seqs: list[tuple[SequenceState, Request]]
    tokens: Tensor  # [n, T], on the host once `copied` has completed
    logprobs: Tensor  # [n, T], likewise
    counts: list[int]  # accepted tokens of each sequence
    copied: torch.cuda.Event | None = None


class Scheduler:
    """Schedules the prefill and decode steps of the requests that have a slot."""

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
        self._queue = queue  # requests that wait for a slot
        self._searches: dict[Request, tuple[beam.BeamSearch, list[SequenceState]]] = {}
        self._pending: deque[_PendingStep] = deque()

    @property
    def busy(self) -> bool:
        """Whether some request has a slot, or tokens that are not processed yet."""
        return bool(self.slots.running or self._pending)

    @property
    def requests(self) -> set[Request]:
        """The requests that have a slot, or tokens that are not processed yet."""
        running = {seq.request for seq in self.slots.running if seq.request is not None}
        return running | {request for pending in self._pending for _, request in pending.seqs}

    def clear(self) -> None:
        """Release all slots."""
        self._searches.clear()
        self._pending.clear()
        for slot in range(len(self.slots)):
            self.sampler.clear_slot(slot)
        self.slots.clear()

    @torch.inference_mode()
    def drop_cancelled(self) -> None:
        """Release the slots of cancelled requests."""
        for request in [request for request in self._searches if request.done]:
            del self._searches[request]
        ended = [seq for seq in self.slots.running if seq.request is not None and seq.request.done]
        for seq in ended:
            if seq.request is not None and not seq.request.ids:  # no token has shown yet that its cache is finite
                self.slots.clear_slot(seq)
        self._release(ended)

    @torch.inference_mode()
    def step(self) -> None:
        """Schedule waiting requests, prefill up to one chunk of prompts, and decode one token per sequence."""
        mixed_prefill = None
        if self._should_mix_prefill():
            mixed_prefill = self._schedule_mixed_prefill()
        else:
            self._prefill_waiting()
        seqs = [seq for seq in self.slots.running if not seq.is_prefilling]
        if seqs:
            drafts = None if self.speculator is None else self.speculator.propose(seqs, self.sampler)
            if drafts is None:
                self._decode(seqs, mixed_prefill)
            else:
                self._verify_drafts(drafts, seqs)
        # A GPU runs a step while the host processes the one before; the host waits where the next step depends on the
        # output, or where it computes the step itself.
        ahead = self.runner.next_input_ids.is_cuda and not self._searches and self.speculator is None and bool(seqs)
        while len(self._pending) > int(ahead):
            self._process_output(self._pending[0])
            self._pending.popleft()

    def _prefill_waiting(self) -> None:
        """Give slots to waiting requests and prefill their prompts, at most one chunk in all."""
        left = self.prefill_chunk
        while left > 0 and (seq := self._next_prefill()) is not None:
            if seq.is_prefilling:
                left -= self._prefill(seq, left)
            if not seq.is_prefilling:
                self._start_decoding(seq)

    def _should_mix_prefill(self) -> bool:
        """Whether the batch is full enough that prompts are best prefilled within decode steps."""
        if not self.runner.supports_mixed_prefill or self.speculator is not None or not self.slots.running:
            return False
        decoding = len(self.slots.running) - int(self.slots.running[-1].is_prefilling)
        return decoding > 0 and len(self.slots.free) <= max(1, len(self.slots) // 8)

    def _schedule_mixed_prefill(self) -> MixedPrefill | None:
        """Give slots to requests, up to one with a prompt to prefill; return the chunk to mix into this step."""
        while (seq := self._next_prefill()) is not None:
            assert seq.request is not None
            if seq.is_prefilling and seq.request.options.beams == 1:
                stop = min(
                    seq.n_cached + MIXED_PREFILL_TOKENS,
                    seq.n_cached + self.prefill_chunk,
                    len(seq.request.prompt) - 1,
                )
                ids = seq.request.prompt[seq.n_cached : stop]
                mixed_prefill = MixedPrefill(seq.slot, seq.n_cached, ids)
                seq.n_cached += len(ids)
                seq.max_cached = max(seq.max_cached, seq.n_cached)
                self.slots.cache.lengths[seq.slot] = seq.n_cached
                if not seq.is_prefilling:
                    self._start_decoding(seq)  # it decodes in this step: layers write keys before attending
                return mixed_prefill
            if seq.is_prefilling:  # beams start as copies of the prefilled cache, so a search is never mixed
                self._prefill(seq, self.prefill_chunk)
            if seq.is_prefilling:
                return None
            self._start_decoding(seq)
        return None

    def _next_prefill(self) -> SequenceState | None:
        """Return the sequence that is being prefilled, or else one for the first request in the queue."""
        return (
            self.slots.running[-1] if self.slots.running and self.slots.running[-1].is_prefilling else self._admit()
        )

    def _admit(self) -> SequenceState | None:
        """Give the first request in the queue a slot, if as many are free as it needs."""
        while self._queue and self._queue[0].done:  # cancelled while it waited
            self._queue.popleft()
        if not self._queue or len(self.slots.free) < self._queue[0].options.beams:
            return None
        request = self._queue[0]
        seq = self.slots.allocate(request)
        self._queue.popleft()  # only once it has a slot, so that it can always be found
        if request.source:
            with self._recording([seq], len(request.source)):
                self.runner.encode_source(request.source, seq.slot)
        return seq

    def _prefill(self, seq: SequenceState, max_tokens: int) -> int:
        """Prefill the next tokens of a prompt, all but its last; return how many."""
        assert seq.request is not None
        ids = seq.request.prompt[seq.n_cached : min(seq.n_cached + max_tokens, len(seq.request.prompt) - 1)]
        with self._recording([seq], len(ids)):
            self.runner.prefill(ids, seq.slot, seq.n_cached)
        seq.n_cached += len(ids)
        seq.max_cached = max(seq.max_cached, seq.n_cached)
        return len(ids)

    def _start_decoding(self, seq: SequenceState) -> None:
        """Move a prefilled sequence to decoding; a beam search gets one slot per beam."""
        request = seq.request
        assert request is not None
        seqs = [seq, *(self.slots.fork(seq) for _ in range(request.options.beams - 1))]
        for one in seqs:
            options = request.options if len(seqs) == 1 else EMPTY_SLOT
            self.sampler.set_slot(one.slot, options, request.prompt, sorted(request.end_ids))
            self.runner.next_input_ids[one.slot] = request.prompt[-1]
        if len(seqs) > 1:
            self._searches[request] = make_beam_search(request, self.vocab_size), seqs

    def _decode(self, seqs: list[SequenceState], mixed_prefill: MixedPrefill | None) -> None:
        """Decode one token per sequence, and prefill the mixed chunk."""
        with self._recording(seqs, 1):
            output = self.runner.decode(len(seqs), *_lengths(seqs, 1), mixed_prefill)
        self._launch(seqs, output.tokens[:, None], output.logprobs[:, None], [1] * len(seqs))
        for seq in seqs:
            seq.n_cached += 1
            seq.n_scheduled += 1
            seq.max_cached = max(seq.max_cached, seq.n_cached)
        self._advance_beams(output.logits)
        # Their last tokens are already on the device, so the slots can be reused.
        self._release([seq for seq in seqs if seq.n_scheduled >= seq.limit])

    def _verify_drafts(self, drafts: Drafts, seqs: list[SequenceState]) -> None:
        """Append the accepted draft tokens of each sequence, and the token after them."""
        n, k = drafts.tokens.shape
        logits = self.runner.verify_drafts(drafts.tokens, drafts.counts, *_lengths(seqs, k + 1))
        tokens, counts = self.sampler.verify(logits, drafts.tokens, drafts.counts, drafts.probabilities)
        logprobs = token_logprobs(logits.flatten(0, 1), tokens.flatten()).view(n, k + 1)
        kept_counts = counts.tolist()
        self._launch(seqs, tokens, logprobs, kept_counts)
        for seq, kept, n_drafts in zip(seqs, kept_counts, drafts.counts.tolist(), strict=True):
            seq.max_cached = max(seq.max_cached, seq.n_cached + n_drafts + 1)
            seq.n_cached += kept
            seq.n_scheduled += kept
        self.slots.cache.lengths[:n] = torch.tensor([seq.n_cached for seq in seqs], device=logits.device)
        self.runner.next_input_ids[:n] = tokens.gather(1, counts[:, None] - 1)
        self._advance_beams(logits[:, 0])

    def _advance_beams(self, logits: Tensor) -> None:
        """Advance each beam search by one step, and copy cache seqs where beams were reordered."""
        for width in sorted({search.options.beams for search, _ in self._searches.values()}):
            group = [(search, seqs) for search, seqs in self._searches.values() if search.options.beams == width]
            slots = [seq.slot for _, seqs in group for seq in seqs]
            index = torch.tensor(slots, device=logits.device)
            own_logits = logits if slots == list(range(len(logits))) else logits[index]
            _, self.runner.next_input_ids[index, 0] = beam.advance([search for search, _ in group], own_logits)
            for search, seqs in group:
                for copy in search.cache_copies:
                    source, target = seqs[copy.source], seqs[copy.target]
                    assert target.request is not None
                    shared = len(target.request.prompt) + copy.start
                    self.slots.cache.copy_row(source.slot, target.slot, shared, source.n_cached)
        for request, (search, seqs) in list(self._searches.items()):
            if search.done:
                if search.not_finite:
                    request.fail(NOT_FINITE)
                    self.slots.purge(seqs)
                else:
                    request.finish_search(search.results(), search.tree if request.keep_tree else None)
                del self._searches[request]
                self._release(seqs)

    def _launch(self, seqs: list[SequenceState], tokens: Tensor, logprobs: Tensor, counts: list[int]) -> None:
        """Queue the output of a step, and start its copy to the host."""
        owners = [(seq, seq.request) for seq in seqs if seq.request is not None]
        copied = None
        if tokens.is_cuda:
            tokens, logprobs = (
                torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
                for one in (tokens, logprobs)
            )
            copied = torch.cuda.Event()
            copied.record()
        self._pending.append(_PendingStep(owners, tokens, logprobs, counts, copied))

    def _process_output(self, pending: _PendingStep) -> None:
        """Hand the tokens of a step to their requests, except those that ended meanwhile."""
        if pending.copied is not None:
            pending.copied.synchronize()
        tokens, logprobs = pending.tokens.tolist(), pending.logprobs.tolist()
        for (seq, request), new, values, count in zip(pending.seqs, tokens, logprobs, pending.counts, strict=True):
            if request.options.beams > 1:
                continue
            for token, logprob in zip(new[:count], values[:count], strict=True):
                if request.add(token, logprob):
                    seq.tokens.append(token)
            if request.error is not None:
                self.slots.purge([seq])
        self._release([seq for seq, request in pending.seqs if request.done and seq.request is request])

    def _recording(self, seqs: list[SequenceState], count: int) -> AbstractContextManager[None]:
        """Record the forward pass inside the block, in which each sequence has `count` new tokens."""
        if self.recorder is None:
            return nullcontext()
        return self.recorder.recording([(_recording_of(seq), seq.n_cached) for seq in seqs], count)

    def _release(self, seqs: list[SequenceState]) -> None:
        for seq in sorted(
            seqs, key=lambda seq: -seq.slot
        ):  # from the last on, so that none is moved that will be released
            self.sampler.clear_slot(seq.slot)
            for old, new in self.slots.release(seq):
                self.sampler.move(old, new)
                self.runner.next_input_ids[new] = self.runner.next_input_ids[old]
                if self.speculator is not None:
                    self.speculator.move(old, new)


def make_beam_search(request: Request, vocab_size: int) -> beam.BeamSearch:
    """Return the beam search of a request; raise for settings that cannot be searched."""
    return beam.BeamSearch(
        replace(request.options, max_new_tokens=request.limit),
        sorted(request.end_ids),
        vocab_size,
        n_best=request.n_best,
        keep_tree=request.keep_tree,
        prompt=request.prompt,
    )


def _recording_of(seq: SequenceState) -> RequestRecording:
    assert seq.request is not None
    assert seq.request.recording is not None
    return seq.request.recording


def _lengths(seqs: list[SequenceState], new: int) -> tuple[int, int]:
    """Return the length of the longest sequence with `new` more tokens, and of the longest source."""
    sources = (len(seq.request.source) for seq in seqs if seq.request is not None)
    return max(seq.n_cached for seq in seqs) + new, max(sources, default=0)
