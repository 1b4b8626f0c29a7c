"""One caller's generation: what was asked, what has been written so far, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from glasshouse.generation.beam import Hypothesis, Node
from glasshouse.generation.options import Options
from glasshouse.generation.recording import Recording
from glasshouse.generation.transcript import Transcript
from glasshouse.inspection import Seen
from glasshouse.text import Tokenizer

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Completion:
    """What was generated: the new tokens alone, without the end token or stop string that ended it."""

    text: str  # "" where there was no tokenizer
    ids: list[int]
    logprobs: list[float]  # of each id, by the model's raw logits
    finish_reason: FinishReason
    score: float | None = None  # of a beam search: the log-probability over the length to the power of its penalty
    tree: list[Node] | None = None  # of a beam search, where asked for
    seen: Seen | None = field(default=None, compare=False)  # what was recorded, by position


class Request:
    """A generation under way; the engine adds to it, its caller reads from it."""

    def __init__(
        self,
        prompt: Sequence[int],
        options: Options,
        *,
        tok: Tokenizer | None,
        end_ids: frozenset[int],
        limit: int,
        source: Sequence[int] = (),
        n_best: int = 1,
        keep_tree: bool = False,
        recording: Recording | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.source = list(source)  # what an encoder reads
        self.options = options
        self.end_ids = end_ids
        self.limit = limit  # new tokens at most: those asked for, or as many as there is room for
        self.n_best = n_best
        self.keep_tree = keep_tree
        self.recording = recording
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason: FinishReason | None = None
        self.found: list[Hypothesis] = []  # of a beam search
        self.tree: list[Node] | None = None
        self._tok = tok
        self._transcript = self._new_transcript()
        self._written = 0  # ids that the transcript has
        self._untaken: list[str] = []

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def add(self, token: int, logprob: float) -> None:
        """Take the next token of the model."""
        if token in self.end_ids:
            return self.finish("stop")
        self.ids.append(token)
        self.logprobs.append(logprob)
        if self.options.stop:
            self._write()
            if self._transcript is not None and self._transcript.stopped:
                return self.finish("stop")
        if len(self.ids) >= self.limit:
            self.finish("length")
        return None

    def conclude(self, found: list[Hypothesis], tree: list[Node] | None) -> None:
        """Take what a beam search found, best first."""
        self.found, self.tree = found, tree
        if not found:  # every continuation was forbidden
            return self.finish("stop")
        self.ids, self.logprobs = list(found[0].ids), list(found[0].logprobs)
        return self.finish(found[0].finish_reason)

    def finish(self, reason: FinishReason) -> None:
        """End it."""
        self.finish_reason = reason
        self._write()
        if self._transcript is not None:
            self._untaken.append(self._transcript.finish())
            if self._transcript.stopped:
                self.finish_reason = "stop"
            kept = self._transcript.kept
            self.ids, self.logprobs = self.ids[:kept], self.logprobs[:kept]

    @property
    def text(self) -> str:
        """What has been written so far and will not change."""
        self._write()
        return "" if self._transcript is None else self._transcript.text

    def take(self) -> str:
        """Return the text that came since the last call: whole characters, and nothing of a stop string."""
        self._write()
        new = "".join(self._untaken)
        self._untaken.clear()
        return new

    def completions(self) -> list[Completion]:
        """Return the result, or the `n_best` of a beam search."""
        assert self.finish_reason is not None
        if not self.found:
            seen = None if self.recording is None else self.recording.seen(len(self.prompt) + len(self.ids))
            return [Completion(self.text, self.ids, self.logprobs, self.finish_reason, seen=seen)]
        return [self._completion(one) for one in self.found]

    def _completion(self, one: Hypothesis) -> Completion:
        transcript = self._new_transcript()
        ids, logprobs, reason = one.ids, one.logprobs, one.finish_reason
        if transcript is not None:
            for token in ids:
                transcript.add(token)
            transcript.finish()
            ids, logprobs = ids[: transcript.kept], logprobs[: transcript.kept]
            reason = "stop" if transcript.stopped else reason
        text = "" if transcript is None else transcript.text
        return Completion(text, ids, logprobs, reason, one.score, self.tree)

    def _new_transcript(self) -> Transcript | None:
        return None if self._tok is None else Transcript(self._tok, self.options.stop)

    def _write(self) -> None:
        if self._transcript is not None:
            self._untaken += [self._transcript.add(token) for token in self.ids[self._written :]]
        self._written = len(self.ids)
