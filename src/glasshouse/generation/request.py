"""One caller's generation: what was asked, what has been written so far, and why it ended."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from glasshouse.errors import InputError
from glasshouse.generation.beam import Hypothesis, Node
from glasshouse.generation.detokenizer import Detokenizer
from glasshouse.generation.recording import RequestRecording
from glasshouse.generation.sampling import MAX_FLOAT32
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.inspection import Recording
from glasshouse.text import Tokenizer

FinishReason = Literal["stop", "length", "cancelled", "error"]

NOT_FINITE = (
    "the model's log-probabilities are NaN: its weights, or what it computes from this prompt, are not finite; check "
    "the weights for NaN, or load float16 weights as float32."
)
NOTHING_ALLOWED = (
    "no token may come next: logit_bias, min_new_tokens or the model's own logits forbid all of them; allow at least "
    "one."
)


@dataclass(frozen=True)
class Completion:
    """What was generated: the new tokens alone, without the end token or stop string that ended it."""

    text: str  # "" where there was no tokenizer
    ids: list[int]
    logprobs: list[float]  # of each id, by the model's raw logits
    finish_reason: FinishReason
    score: float | None = None  # of a beam search: the log-probability over the length to the power of its penalty
    tree: list[Node] | None = None  # of a beam search, where asked for
    recording: Recording | None = field(default=None, compare=False)  # what was recorded, by position


class Request:
    """A generation under way. The thread that steps the engine adds to it; any thread may read it or wait for it.

    `ids` and `logprobs` grow while it runs. `finish_reason` is set last, once everything else is final; where it is
    "error", `error` says why in a sentence.

    >>> import threading, glasshouse as gh
    >>> engine = gh.Engine(gh.build(gh.preset("tiny-decoder")), slots=2, max_len=32)
    >>> stepping = threading.Thread(target=engine.run_forever)
    >>> stepping.start()
    >>> request = engine.submit([1, 2, 3], max_new_tokens=4)
    >>> request.wait(timeout=60), len(request.ids), request.finish_reason
    (True, 4, 'length')
    >>> engine.close()
    >>> stepping.join()
    """

    def __init__(
        self,
        prompt: Sequence[int],
        options: SamplingParams,
        *,
        tok: Tokenizer | None,
        end_ids: frozenset[int],
        limit: int,
        source: Sequence[int] = (),
        n_best: int = 1,
        keep_tree: bool = False,
        recording: RequestRecording | None = None,
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
        self.error: str | None = None
        self.hypotheses: list[Hypothesis] = []  # of a beam search
        self.tree: list[Node] | None = None
        self._tok = tok
        self._transcript = self._new_transcript()
        self._written = 0  # ids that the transcript has
        self._untaken: list[str] = []
        # Tokens that are chosen only where no other is allowed; end tokens, where they come too early.
        self._forbidden = {token for token, bias in options.logit_bias.items() if bias < -MAX_FLOAT32}
        self._suspects = self._forbidden | (end_ids if options.min_new_tokens else frozenset())
        self._lock = threading.RLock()  # guards all of the above
        self._changed = threading.Condition(self._lock)  # notified of each token and the end, if anyone waits
        self._waiting = 0

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def truncated(self) -> bool:
        """Whether it ended because the sequence was full, before all tokens asked for were written."""
        return self.finish_reason == "length" and self.limit < self.options.max_new_tokens

    def add(self, token: int, logprob: float) -> bool:
        """Take the next token of the model; return whether it was taken, which it is not once the request is done."""
        with self._lock:
            if self.finish_reason is not None:
                return False
            # Not a number compares as false. It is looked at on the host, so that a GPU need not be waited for.
            if (token in self._suspects or not logprob > -math.inf) and (problem := self._problem(token, logprob)):
                self.fail(problem)
                return False
            if token in self.end_ids:
                self.finish("stop")
                return True
            self.ids.append(token)
            self.logprobs.append(logprob)
            if self.options.stop:
                self._write()
                if self._transcript is not None and self._transcript.stopped:
                    self.finish("stop")
                    return True
            if len(self.ids) >= self.limit:
                self.finish("length")
            elif self._waiting:
                self._changed.notify_all()
            return True

    def finish_search(self, found: list[Hypothesis], tree: list[Node] | None) -> None:
        """Take what a beam search found, best first."""
        with self._lock:
            if self.done:
                return
            if not found:
                self.fail(NOTHING_ALLOWED)
                return
            self.hypotheses, self.tree = found, tree
            self.ids, self.logprobs = list(found[0].ids), list(found[0].logprobs)
            self.finish(found[0].finish_reason)

    def fail(self, error: str) -> None:
        """End it with a sentence that says what went wrong; what was written before stays."""
        with self._lock:
            if not self.done:
                self.error = error
                self.finish("error")

    def finish(self, reason: FinishReason) -> bool:
        """End it; return whether this call did, and not another before it."""
        with self._lock:
            if self.done:
                return False
            self._write()
            if self._transcript is not None:
                self._untaken.append(self._transcript.finish())
                if self._transcript.stopped:
                    reason = "stop"
                kept = self._transcript.n_kept
                self.ids, self.logprobs = self.ids[:kept], self.logprobs[:kept]
            self.finish_reason = reason
            if self._waiting:
                self._changed.notify_all()
            return True

    @property
    def text(self) -> str:
        """What has been written so far and will not change."""
        with self._lock:
            self._write()
            return "" if self._transcript is None else self._transcript.text

    def take_text(self) -> str:
        """Return the text that came since the last call: whole characters, and nothing of a stop string."""
        with self._lock:
            self._write()
            new = "".join(self._untaken)
            self._untaken.clear()
            return new

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done, at most `timeout` seconds, while another thread steps the engine; return `done`."""
        with self._lock:
            return self._wait_for(lambda: self.done, timeout)

    def stream(self) -> Iterator[str]:
        """Yield the text as it comes, in whole characters, while another thread steps the engine.

        A request that failed raises its sentence after its last text.
        """
        done = False
        while not done:
            with self._lock:
                self._wait_for(lambda: self.done or len(self.ids) > self._written or any(self._untaken))
                done = self.done
                piece = self.take_text()
            if piece:
                yield piece
        self.raise_on_error()

    def raise_on_error(self) -> None:
        """Raise the sentence of a request that failed."""
        if self.error is not None:
            raise InputError(self.error)

    def completions(self) -> list[Completion]:
        """Return the result, or the `n_best` of a beam search."""
        with self._lock:
            if self.finish_reason is None:
                raise InputError("the request is not done; step the engine until it is, or wait for it.")
            if not self.hypotheses:
                seen = None if self.recording is None else self.recording.result(len(self.prompt) + len(self.ids))
                return [Completion(self.text, self.ids, self.logprobs, self.finish_reason, recording=seen)]
            return [self._completion(one) for one in self.hypotheses]

    def _wait_for(self, what: Callable[[], bool], timeout: float | None = None) -> bool:
        self._waiting += 1
        try:
            return self._changed.wait_for(what, timeout)
        finally:
            self._waiting -= 1

    def _problem(self, token: int, logprob: float) -> str | None:
        """Say what is wrong with a token that should not have been chosen, as a sampler chooses one in any case."""
        if math.isnan(logprob):
            return NOT_FINITE
        early = token in self.end_ids and len(self.ids) < self.options.min_new_tokens
        return NOTHING_ALLOWED if early or logprob == -math.inf or token in self._forbidden else None

    def _completion(self, one: Hypothesis) -> Completion:
        transcript = self._new_transcript()
        ids, logprobs, reason = one.ids, one.logprobs, one.finish_reason
        if transcript is not None:
            for token in ids:
                transcript.add(token)
            transcript.finish()
            ids, logprobs = ids[: transcript.n_kept], logprobs[: transcript.n_kept]
            reason = "stop" if transcript.stopped else reason
        text = "" if transcript is None else transcript.text
        return Completion(text, ids, logprobs, reason, one.score, self.tree)

    def _new_transcript(self) -> Detokenizer | None:
        return None if self._tok is None else Detokenizer(self._tok, self.options.stop)

    def _write(self) -> None:
        if self._transcript is not None:
            self._untaken += [self._transcript.add(token) for token in self.ids[self._written :]]
        self._written = len(self.ids)
