"""One step of the engine: what the scheduler decided, and what the model runner computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from glasshouse.generation.editing import EditedSite
from glasshouse.generation.engine.slots import Move, SequenceState
from glasshouse.generation.recording import Reading, RecordedSite
from glasshouse.generation.tops import Attended
from glasshouse.inspection.hooks import Hook


@dataclass
class PrefillChunk:
    """The next tokens of a prompt, all but its last; none where all of them are cached already."""

    seq: SequenceState
    start: int  # position of the first token
    ids: list[int]
    prefix_slot: int | None = None  # in the first chunk: the slot from which the `start` tokens before are copied
    saved: Move | None = None  # in the first chunk, before that: what the slot had cached moves to a free slot
    is_last: bool = False  # the sequence decodes from this step on
    forks: list[SequenceState] = field(default_factory=list)  # in the last chunk of a beam search: its other beams


@dataclass
class ScheduledStep:
    """The work of one step, in order: prefill the chunks, then decode one token of each sequence."""

    chunks: list[PrefillChunk] = field(default_factory=list)
    mixed: PrefillChunk | None = None  # prefilled within the decode step
    decoding: list[SequenceState] = field(default_factory=list)  # those of the first slots


class DecodeOutput(NamedTuple):
    """The output of a decode step for the first n slots."""

    logits: Tensor  # [n, V]
    tokens: Tensor  # [n]
    logprobs: Tensor  # [n]
    candidates: Tensor  # [n, 1 + k, 3], as the sampler returns them
    read: tuple[Tensor, ...] = ()  # [n, ...], of the readings of the step, in their order


class PassHooks(NamedTuple):
    """What is read and edited in a forward pass of several sequences."""

    readings: Sequence[Reading] = ()
    edits: Sequence[EditedSite] = ()
    functions: Sequence[Hook] = ()  # that edit, and are Python

    @property
    def names(self) -> tuple[str, ...]:
        """Names which, with the rest of its key, identify the work of a step."""
        return *(one.name for one in self.readings), *(one.name for one in self.edits)

    @property
    def fits_graphs(self) -> bool:
        """Whether the step may be a graph: scores and patterns grow with the sequences, and functions are Python."""
        return not self.functions and not any(
            isinstance(one, Attended) or (isinstance(one, RecordedSite) and one.pairs) for one in self.readings
        )


@dataclass
class ReadStep:
    """What was read in a decode step for its sequences, which is on the host with its tokens."""

    readings: Sequence[Reading]
    values: list[Tensor]  # [n, ...], one for each
    starts: list[int]  # the position of each sequence's token


@dataclass
class SampledTokens:
    """The tokens of a step, which are on the host once `copied` has completed."""

    tokens: Tensor  # [n, T]
    logprobs: Tensor  # [n, T]
    counts: list[int]  # valid tokens of each sequence
    top_ids: Tensor  # [n, k], the k most probable tokens where some request wants them, and else k = 0
    top_logprobs: Tensor  # [n, k]
    candidates: Tensor  # [n, 1 + k, 3], where some request wants them, and else [n, 0, 3]
    read: ReadStep | None = None
    copied: torch.cuda.Event | None = None

    @classmethod
    def start_copy(
        cls,
        tokens: Tensor,
        logprobs: Tensor,
        counts: list[int],
        top: tuple[Tensor, Tensor] | None = None,
        candidates: Tensor | None = None,
        read: ReadStep | None = None,
    ) -> SampledTokens:
        """Start the copy to the host; `top` are the log-probabilities and ids of the most probable tokens."""
        top_logprobs, top_ids = (logprobs[:, :0], tokens[:, :0]) if top is None else top
        candidates = logprobs[:, :0, None] if candidates is None else candidates
        if not tokens.is_cuda:
            return cls(tokens, logprobs, counts, top_ids, top_logprobs, candidates.cpu(), read)
        values = [] if read is None else read.values
        tokens, logprobs, top_ids, top_logprobs, candidates, *values = (
            torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
            for one in (tokens, logprobs, top_ids, top_logprobs, candidates, *values)
        )
        if read is not None:
            read = replace(read, values=values)
        copied = torch.cuda.Event()
        copied.record()
        return cls(tokens, logprobs, counts, top_ids, top_logprobs, candidates, read, copied)

    def wait(self) -> list[tuple[list[int], list[float]]]:
        """Wait for the copy; return the valid tokens and log-probabilities of each sequence."""
        if self.copied is not None:
            self.copied.synchronize()
        rows = zip(self.tokens.tolist(), self.logprobs.tolist(), self.counts, strict=True)
        return [(tokens[:count], logprobs[:count]) for tokens, logprobs, count in rows]

    def top(self, row: int, count: int) -> list[tuple[int, float]]:
        """Return the `count` most probable tokens of a row and their log-probabilities; after `wait`."""
        return list(zip(self.top_ids[row, :count].tolist(), self.top_logprobs[row, :count].tolist(), strict=True))


@dataclass
class StepOutput:
    """The output of a step for the sequences that decode."""

    sampled: SampledTokens
    logits: Tensor  # [n, V], for the first new token
    written: list[int]  # tokens of each sequence whose keys and values were written, rejected drafts included
