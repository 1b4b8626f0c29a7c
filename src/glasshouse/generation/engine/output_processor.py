"""Postprocessing of a step: tokens are appended to their requests, and the slots of finished ones released."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from glasshouse.generation.beam.driver import BeamDriver
from glasshouse.generation.engine.model_runner import ModelRunner
from glasshouse.generation.engine.recorded_steps import RecordedSteps
from glasshouse.generation.engine.slots import SequenceState, Slots
from glasshouse.generation.engine.step import ReadStep, SampledTokens, ScheduledStep, StepOutput
from glasshouse.generation.recording import ProbedSite
from glasshouse.generation.request import Request
from glasshouse.generation.tops import Attended, LensReading


class OutputProcessor:
    """Hands the output of each step to the requests, one step late where the device runs ahead of the host."""

    def __init__(self, slots: Slots, runner: ModelRunner, beams: BeamDriver) -> None:
        self.slots, self.runner, self.beams = slots, runner, beams
        self.recorded = RecordedSteps()
        # Steps launched on the device whose tokens the host has not processed yet.
        self.pending: deque[tuple[list[SequenceState], SampledTokens]] = deque()

    @property
    def requests(self) -> set[Request]:
        """The requests that have a slot, or tokens that are not processed yet."""
        return {seq.request for seqs in (self.slots.running, *(seqs for seqs, _ in self.pending)) for seq in seqs}

    def postprocess(self, step: ScheduledStep, output: StepOutput | None) -> None:
        """Advance the sequences and beam searches of a step, and process its tokens or those of the step before."""
        for chunk in step.chunks:
            if chunk.forks:
                self.beams.start([chunk.seq, *chunk.forks])
        if output is not None:
            self.pending.append((step.decoding, output.sampled))
            for seq, kept, written in zip(step.decoding, output.sampled.counts, output.written, strict=True):
                seq.advance(kept, written)
            for ended in self.beams.advance(output.logits):
                if ended.search.not_finite:
                    self._purge(ended.seqs)
                self._release(ended.seqs)
            # Their last tokens are already on the device, so the slots can be reused.
            self._release([seq for seq in step.decoding if seq.is_complete])
        # The host waits where the next step depends on the output, or where it computes the step itself.
        waits = any(seq.request.constraint is not None or seq.request.rules_steer for seq in self.slots.running)
        ahead = self.runner.runs_ahead and not self.beams.running and not waits and output is not None
        while len(self.pending) > int(ahead):
            self._process(*self.pending[0])
            self.pending.popleft()

    def drop_cancelled(self) -> None:
        """Release the slots of cancelled requests."""
        self.beams.drop_cancelled()
        ended = [seq for seq in self.slots.running if seq.request.done]
        for seq in ended:
            # Only a token that was processed has shown that the cache before it is finite.
            n_finite = len(seq.request.prompt) - 1 + len(seq.request.ids) if seq.request.ids else 0
            if n_finite < seq.n_cached:
                seq.n_cached = n_finite
                self.runner.clear_cache(seq.slot, n_finite)
        self._release(ended)

    def clear(self) -> None:
        """Release all slots."""
        self.beams.running.clear()
        self.pending.clear()
        self.recorded.flush()
        self.runner.release_all()
        self.slots.clear()

    def _process(self, seqs: list[SequenceState], sampled: SampledTokens) -> None:
        """Hand the tokens of a step to their requests, except those that ended meanwhile."""
        rows = sampled.wait()
        if sampled.read is not None:
            self.recorded.add(seqs, sampled.read)
            for seq in keep_read(seqs, sampled.read):
                if seq in self.slots.running:  # else its last step has run, and its slot may be another one's
                    self.runner.steer(seq)
        for row, (seq, (tokens, logprobs)) in enumerate(zip(seqs, rows, strict=True)):
            options = seq.request.options
            if options.beams > 1:
                continue
            top = sampled.top(row, options.top_logprobs) if options.top_logprobs else None
            drawn_from = sampled.candidates[row].numpy() if options.candidates else None
            for token, logprob in zip(tokens, logprobs, strict=True):
                if seq.request.add(token, logprob, top, drawn_from):
                    seq.tokens.append(token)
            # Also where a request was cancelled in this step, and has no error: its cache may have the same NaN.
            if not all(map(math.isfinite, logprobs)):
                self._purge([seq])
        self._release([seq for seq in seqs if seq.request.done and seq in self.slots.running])

    def _purge(self, failed: list[SequenceState]) -> None:
        """Overwrite the cache of sequences that had NaN or infinite values, and copies past the end of others."""
        for one in (*failed, *self.slots.free):
            one.forget()
        for one in (*self.slots.running, *self.slots.free):
            self.runner.clear_cache(one.slot, one.n_cached)

    def _release(self, seqs: list[SequenceState]) -> None:
        # From the last on, so that none is moved that will be released.
        for seq in sorted(seqs, key=lambda seq: -seq.slot):
            self.runner.release_slot(seq.slot, *self.slots.release(seq))


def keep_read(seqs: Sequence[SequenceState], read: ReadStep) -> list[SequenceState]:
    """Hand the scores and tops of a decode step to their requests; return those to steer anew."""
    scored: dict[SequenceState, None] = {}
    for reading, values in zip(read.readings, read.values, strict=True):
        if isinstance(reading, ProbedSite):
            for seq, start, row in zip(seqs, read.starts, values.tolist(), strict=True):
                # The last token of the prompt goes through the first decode step; it is not new.
                if seq.request.scores and start >= len(seq.request.prompt) and not seq.request.done:
                    seq.request.add_scores(reading.columns, row)
                    scored[seq] = None
    changed = [seq for seq in scored if seq.request.has_rules and seq.request.apply_rules()]
    for reading, values in zip(read.readings, read.values, strict=True):
        if isinstance(reading, LensReading | Attended):
            for row, seq in enumerate(seqs):
                if not seq.request.done:
                    seq.request.add_tops(reading, values[row])
    return [seq for seq in changed if not seq.request.done]
