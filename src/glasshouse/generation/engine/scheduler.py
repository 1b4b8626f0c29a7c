"""Continuous batching: decides which requests get slots, and which tokens each step prefills and decodes.

It computes nothing. Only the thread that runs a step uses it; thread safety is the engine's job.
"""

from __future__ import annotations

from collections import deque

from glasshouse.generation.engine.slots import Allocation, Slots
from glasshouse.generation.engine.step import PrefillChunk, ScheduledStep
from glasshouse.generation.request import Request

MIXED_PREFILL_TOKENS = 128  # prompt tokens added to one decode step; so few cost a large GPU almost nothing


class Scheduler:
    """Gives slots to waiting requests in order, and plans one step at a time.

    Of requests that get their slots together, those with the longest prompts are prefilled first: prompts of similar
    lengths share a pass, and the short ones are left to fill what remains of a chunk.
    """

    def __init__(self, slots: Slots, *, prefill_chunk: int, mixed_prefill: bool) -> None:
        self.slots = slots
        self.prefill_chunk = prefill_chunk
        self.mixed_prefill = mixed_prefill  # whether prompts may be prefilled within decode steps
        self.waiting: deque[Request] = deque()
        self._n_sorted = 0  # of the first waiting requests, which had free slots and were sorted by length

    def schedule(self) -> ScheduledStep:
        """Plan a step: up to one chunk of prompts to prefill, and one token for each sequence that decodes."""
        step = ScheduledStep()
        self._sort_waiting()
        if self._should_mix_prefill():
            self._schedule_mixed_prefill(step)
        else:
            self._schedule_prefill(step)
        step.decoding = [seq for seq in self.slots.running if not seq.is_prefilling]
        return step

    def _sort_waiting(self) -> None:
        """Sort as many waiting requests as there are free slots, once those sorted before have theirs.

        So no request waits for more than one batch of longer prompts that arrived after it.
        """
        self._n_sorted = min(self._n_sorted, len(self.waiting))
        if self._n_sorted == 0 and (count := min(len(self.slots.free), len(self.waiting))) > 1:
            batch = [self.waiting.popleft() for _ in range(count)]
            batch.sort(key=lambda request: -len(request.prompt))
            self.waiting.extendleft(reversed(batch))
            self._n_sorted = count

    def _schedule_prefill(self, step: ScheduledStep) -> None:
        """Add the prompts of waiting requests, at most one chunk in all; none is split that fits in one chunk.

        So the chunks of a prompt depend on nothing but its length, and few passes have to attend to earlier ones.
        """
        left = self.prefill_chunk
        while left > 0 and (found := self._next_prefill(left)) is not None:
            chunk = self._take_chunk(found, self.prefill_chunk)
            step.chunks.append(chunk)
            left -= len(chunk.ids)

    def _should_mix_prefill(self) -> bool:
        """Whether the batch is full enough that prompts are best prefilled within decode steps."""
        if not self.mixed_prefill or not self.slots.running:
            return False
        if not all(seq.request.can_mix for seq in self.slots.running):
            return False
        decoding = len(self.slots.running) - int(self.slots.running[-1].is_prefilling)
        return decoding > 0 and len(self.slots.free) <= max(1, len(self.slots) // 8)

    def _can_mix_prompt(self, request: Request) -> bool:
        """Whether a prompt may be prefilled within a decode step; beams start as copies of the prefilled cache."""
        return request.options.beams == 1 and request.can_mix and not request.records_prompt

    def _schedule_mixed_prefill(self, step: ScheduledStep) -> None:
        """Add prompts up to the first that is left to prefill: a chunk of that one is mixed into the decode step."""
        while (found := self._next_prefill(self.prefill_chunk)) is not None:
            seq = found.seq
            if seq.is_prefilling and self._can_mix_prompt(seq.request):
                # If it is the last chunk, the sequence decodes in this step: layers write keys before attending.
                step.mixed = self._take_chunk(found, min(MIXED_PREFILL_TOKENS, self.prefill_chunk))
                return
            step.chunks.append(self._take_chunk(found, self.prefill_chunk))
            if seq.is_prefilling or not seq.request.can_mix:  # the latter decodes in this step
                return

    def _next_prefill(self, max_tokens: int) -> Allocation | None:
        """Return the sequence that is being prefilled; or a new one, for the first waiting request.

        A new one needs free slots, and that its first chunk has at most `max_tokens`.
        """
        if self.slots.running and self.slots.running[-1].is_prefilling:
            return Allocation(self.slots.running[-1])
        while self.waiting and self.waiting[0].done:  # cancelled while it waited
            self._pop_waiting()
        if not self.waiting or len(self.slots.free) < self.waiting[0].options.beams:
            return None
        if min(len(self.waiting[0].prompt) - 1, self.prefill_chunk) > max_tokens:
            return None
        found = self.slots.allocate(self.waiting[0])
        self._pop_waiting()  # only once it has a slot, so that it can always be found
        return found

    def _pop_waiting(self) -> None:
        self.waiting.popleft()
        self._n_sorted = max(0, self._n_sorted - 1)

    def _take_chunk(self, found: Allocation, max_tokens: int) -> PrefillChunk:
        """Take the next tokens of a prompt; after the last of them, a beam search gets one slot per beam."""
        seq, prefix_slot, saved = found
        prompt = seq.request.prompt
        start = seq.n_cached
        ids = prompt[start : min(start + max_tokens, len(prompt) - 1)]
        seq.advance(len(ids))
        chunk = PrefillChunk(seq, start, ids, prefix_slot, saved, is_last=not seq.is_prefilling)
        if chunk.is_last:
            chunk.forks = [self.slots.fork(seq) for _ in range(seq.request.options.beams - 1)]
        return chunk
