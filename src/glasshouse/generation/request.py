"""A generation request: its prompt and parameters, the tokens so far, and why it ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.beam.hypothesis import Hypothesis, Node
from glasshouse.generation.constraints.constraint import ConstraintState
from glasshouse.generation.detokenizer import Detokenizer
from glasshouse.generation.editing import RequestEdit
from glasshouse.generation.recording import RequestRecording
from glasshouse.generation.rules import Firing, RuleState
from glasshouse.generation.sampling.candidates import Draws
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.tops import Attended, LensReading, Top, unpack
from glasshouse.inspection import Recording
from glasshouse.text import Tokenizer

FinishReason = Literal["stop", "length", "content_filter", "cancelled", "error"]
TopLogprobs = list[tuple[int, float]]  # the most probable tokens at a position, and their log-probabilities

SHOWN = 60  # characters of a text in a repr
NOT_FINITE = (
    "the model's log-probabilities are NaN: its weights, or its activations on this prompt, are not finite; check "
    "the weights for NaN, or load float16 weights as float32."
)
NOTHING_ALLOWED = (
    "no next token is allowed: logit_bias, min_new_tokens, a constraint or the model's own logits forbid all of "
    "them; allow at least one."
)


@dataclass(frozen=True, repr=False)
class Completion:
    """A finished generation: the new tokens only, without the end token or stop string that ended it."""

    text: str  # "" where there was no tokenizer
    ids: list[int]
    logprobs: list[float]  # of each id, from the model's raw logits
    finish_reason: FinishReason
    score: float | None = None  # of a beam search: the log-probability over the length to the power of length_penalty
    tree: list[Node] | None = None  # of a beam search, with keep_tree
    recording: Recording | None = field(default=None, compare=False)  # recorded activations, by position
    top_logprobs: list[TopLogprobs] | None = None  # for each id, where SamplingParams.top_logprobs is set
    # For each id, and the token that ended it, where SamplingParams.candidates is set.
    draws: Draws | None = field(default=None, compare=False)
    # By the name of each probe of SamplingParams.probes, for each id: its activation is read when the next token is
    # sampled, so the last id has none unless an end token or a stop string came after it.
    scores: dict[str, list[float]] | None = None
    firings: tuple[Firing, ...] = ()  # of SamplingParams.rules, where each began to apply
    # With SamplingParams.lens, the probabilities and tokens [id, layer, rank] that the model would have predicted in
    # place of each id after each layer; the first is the embedding. With `attended`, weights and positions by site.
    lens: Top | None = field(default=None, compare=False)
    attention: Mapping[str, Top] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        """Show it in one line: ids and log-probabilities would be pages."""
        text = self.text if len(self.text) <= SHOWN else f"{self.text[:SHOWN]}..."
        ids = f"{len(self.ids)} token{'s' * (len(self.ids) != 1)}"
        score = "" if self.score is None else f", score={self.score:.4g}"
        return f"Completion({text!r}, {ids}, finish_reason={self.finish_reason!r}{score})"


class EndToken(NamedTuple):
    """A token that ended a generation."""

    token: int
    logprob: float
    top_logprobs: TopLogprobs


class Request:
    """A running generation, to which the steps of the engine add tokens.

    `ids` and `logprobs` grow while it runs. `finish_reason` is set at the end; where it is "error", `error` has the
    message.

    >>> import glasshouse as gh
    >>> engine = gh.Engine(gh.build(gh.preset("tiny-decoder")), slots=2, max_len=32)
    >>> request = engine.submit([1, 2, 3], max_new_tokens=4)
    >>> engine.run()
    >>> len(request.ids), request.finish_reason
    (4, 'length')
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
        edits: Sequence[RequestEdit] = (),
        attended: Sequence[Attended] = (),
        namespace: str = "",
        constraint: ConstraintState | None = None,
    ) -> None:
        self.prompt = list(prompt)
        self.source = list(source)  # the encoder's input
        self.options = options
        self.end_ids = end_ids
        self.limit = limit  # maximum number of new tokens: max_new_tokens, or as many as fit
        self.n_best = n_best
        self.keep_tree = keep_tree
        self.recording, self.edits, self.attended = recording, edits, attended
        self.constraint = constraint
        self.namespace = namespace  # only requests of the same one share cached prefixes
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[TopLogprobs] = []  # for each id, with the parameter of that name
        self.end_token: EndToken | None = None  # the one that ended it, if one did; it is not among the ids
        self.draws = Draws(options.candidates) if options.candidates else None
        self.scores: dict[str, list[float]] = {name: [] for name in options.scored}
        self.firings: list[Firing] = []  # of its rules
        self.lens: list[Tensor] = []  # for each id, as `unpack` takes it
        self.attention: dict[str, list[Tensor]] = {one.site.name: [] for one in attended}
        self._rules = [RuleState(rule) for rule in options.rules]
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.hypotheses: list[Hypothesis] = []  # of a beam search
        self.tree: list[Node] | None = None
        self._tok = tok
        self._detokenizer = self._new_detokenizer()
        self._n_decoded = 0  # ids passed to the detokenizer
        self._new_text: list[str] = []
        # Tokens sampled only if no other is allowed; end tokens before min_new_tokens.
        self._forbidden = options.forbidden_ids
        self._suspects = self._forbidden | (end_ids if options.min_new_tokens else frozenset())

    @property
    def done(self) -> bool:
        """Whether the request is finished."""
        return self.finish_reason is not None

    @cached_property
    def can_mix(self) -> bool:
        """Whether its decode steps may have tokens of another prompt, by what is read and edited in them."""
        readable = self.recording is None or self.recording.of_single_tokens
        return readable and not self.attended and not any(edit.is_function for edit in self.edits)

    @cached_property
    def records_prompt(self) -> bool:
        """Whether positions of the prompt are recorded: it is then prefilled alone, without a CUDA graph."""
        return self.recording is not None and self.recording.of_prompt

    @property
    def truncated(self) -> bool:
        """Whether it reached the maximum length before `max_new_tokens`."""
        return self.finish_reason == "length" and self.limit < self.options.max_new_tokens

    def add(
        self,
        token: int,
        logprob: float,
        top: TopLogprobs | None = None,
        candidates: np.ndarray | None = None,
    ) -> bool:
        """Add the next token; return whether it was added, which it is not once the request is done."""
        if self.finish_reason is not None:
            return False
        # NaN compares as false. The check is on the host, so that a GPU is not waited for.
        if (token in self._suspects or not logprob > -math.inf) and (problem := self._problem(token, logprob)):
            self.fail(problem)
            return False
        try:
            refused = self.constraint is not None and not self.constraint.accept(token)
        except InputError as error:
            self.fail(str(error))
            return False
        if refused:
            self.fail(NOTHING_ALLOWED)
            return False
        if self.draws is not None and candidates is not None:
            self.draws.add(candidates)
        if token in self.end_ids:
            self.end_token = EndToken(token, logprob, top or [])
            self.finish("stop")
            return True
        self.ids.append(token)
        self.logprobs.append(logprob)
        if top is not None:
            self.top_logprobs.append(top)
        if self.options.stop:
            self._detokenize()
            if self._detokenizer is not None and self._detokenizer.stopped:
                self.finish("stop")
                return True
        if self.constraint is not None and self.constraint.complete:
            self.finish("stop")
        elif len(self.ids) >= self.limit:
            self.finish("length")
        return True

    def add_scores(self, columns: Mapping[str, int], row: Sequence[float]) -> None:
        """Add the scores of the last token by some probes, each in its column of a row."""
        for name, scores in self.scores.items():
            if (column := columns.get(name)) is not None:
                scores.append(row[column])

    def apply_rules(self) -> bool:
        """Apply the rules to the scores of the last token; return whether steering changed."""
        before = self.steering
        for state, scores in [(state, self.scores[state.rule.probe]) for state in self._rules]:  # one may end them
            rule = state.rule
            if state.add(scores[-1]) and not self.done:
                self.firings.append(Firing(rule, len(scores) - 1, scores[-1]))
                if rule.then == "stop":
                    self.finish("stop")
                elif rule.then == "refuse":
                    self._withhold()
        return self.steering != before

    def add_tops(self, reading: LensReading | Attended, values: Tensor) -> None:
        """Keep what was read for the next token, if it was asked for."""
        if isinstance(reading, Attended):
            name = reading.site.name  # another request may want more of it
            for own in self.attended:
                if own.site.name == name:
                    self.attention[name].append(values[..., : own.count, :].clone())
        elif self.options.lens:
            self.lens.append(values[..., : self.options.lens, :].clone())

    @property
    def has_rules(self) -> bool:
        """Whether its scores may stop, refuse or steer it."""
        return bool(self._rules)

    @property
    def rules_steer(self) -> bool:
        """Whether a rule may steer: then each step waits for the scores of the one before."""
        return any(state.rule.steer for state in self._rules)

    @property
    def steering(self) -> dict[str, float]:
        """The scales of the steering vectors that are added to the next token."""
        total = Counter(self.options.steer)
        for state in self._rules:
            if state.applies:
                total.update(state.rule.steer)
        return dict(total)

    def finish_search(self, found: list[Hypothesis], tree: list[Node] | None) -> None:
        """Finish with the hypotheses of a beam search, best first."""
        if self.done:
            return
        if not found:
            self.fail(NOTHING_ALLOWED)
            return
        self.hypotheses, self.tree = found, tree
        self.ids, self.logprobs = list(found[0].ids), list(found[0].logprobs)
        self.finish(found[0].finish_reason)

    def _withhold(self) -> None:
        """Finish without the tokens so far, as a rule refuses the answer; what was streamed is not taken back."""
        self.finish("content_filter")
        self._new_text.clear()
        self.ids, self.logprobs, self.top_logprobs = [], [], []
        self.scores = {name: [] for name in self.scores}
        self._keep_tops(0)
        self._detokenizer = self._new_detokenizer()
        if self.draws is not None:
            self.draws.truncate(0)

    def _keep_tops(self, count: int) -> None:
        """Drop what was read for an end token, and for those of a stop string."""
        self.lens = self.lens[:count]
        self.attention = {name: tops[:count] for name, tops in self.attention.items()}

    def fail(self, error: str) -> None:
        """Finish with an error message; the tokens so far are kept."""
        if not self.done:
            self.error = error
            self.finish("error")

    def finish(self, reason: FinishReason) -> bool:
        """Finish the request; return False if it already was."""
        if self.done:
            return False
        self._detokenize()
        if self._detokenizer is not None:
            self._new_text.append(self._detokenizer.finish())
            if self._detokenizer.stopped:
                reason = "stop"
            kept = self._detokenizer.n_kept
            if self.draws is not None and kept < len(self.ids):
                self.draws.truncate(kept)
            self.ids, self.logprobs = self.ids[:kept], self.logprobs[:kept]
            self.top_logprobs = self.top_logprobs[:kept]
            self.scores = {name: scores[:kept] for name, scores in self.scores.items()}
        self._keep_tops(len(self.ids))
        self.finish_reason = reason
        return True

    @property
    def text(self) -> str:
        """The text generated so far that will not change."""
        self._detokenize()
        return "" if self._detokenizer is None else self._detokenizer.text

    def take_text(self) -> str:
        """Return the new text since the last call: whole characters, and nothing of a stop string."""
        self._detokenize()
        new = "".join(self._new_text)
        self._new_text.clear()
        return new

    @property
    def n_final(self) -> int:
        """How many of the ids will not be dropped by a stop string: those whose text was returned."""
        return len(self.ids) if self.done or self._detokenizer is None else self._detokenizer.n_final

    def raise_on_error(self) -> None:
        """Raise the error of a failed request."""
        if self.error is not None:
            raise InputError(self.error)

    def recorded(self) -> Recording | None:
        """Return the activations of a finished request, if any are recorded."""
        return None if self.recording is None else self.recording.result(len(self.prompt) + len(self.ids))

    def tops(self, ids: slice) -> tuple[Top | None, dict[str, Top]]:
        """Return what was read for some of the ids: the lens, and attention by site."""
        lens = unpack(self.lens[ids]) if self.lens[ids] else None
        return lens, {name: unpack(tops[ids]) for name, tops in self.attention.items() if tops[ids]}

    def completions(self) -> list[Completion]:
        """Return the result, or the `n_best` of a beam search."""
        if self.finish_reason is None:
            raise InputError("the request is not done; step the engine until it is.")
        if not self.hypotheses:
            top = self.top_logprobs if self.options.top_logprobs else None
            found = (self.text, self.ids, self.logprobs, self.finish_reason)
            scores = {name: self.scores[name] for name in self.options.probes} or None
            lens, attention = self.tops(slice(None))
            return [
                Completion(
                    *found,
                    recording=self.recorded(),
                    top_logprobs=top,
                    draws=self.draws,
                    scores=scores,
                    firings=tuple(self.firings),
                    lens=lens,
                    attention=attention,
                )
            ]
        return [self._completion(one) for one in self.hypotheses]

    def _problem(self, token: int, logprob: float) -> str | None:
        """Return the error of a token that must not be sampled: the sampler returns one even if none is allowed."""
        if math.isnan(logprob):
            return NOT_FINITE
        early = token in self.end_ids and len(self.ids) < self.options.min_new_tokens
        return NOTHING_ALLOWED if early or logprob == -math.inf or token in self._forbidden else None

    def _completion(self, one: Hypothesis) -> Completion:
        detokenizer = self._new_detokenizer()
        ids, logprobs, reason = one.ids, one.logprobs, one.finish_reason
        if detokenizer is not None:
            for token in ids:
                detokenizer.add(token)
            detokenizer.finish()
            ids, logprobs = ids[: detokenizer.n_kept], logprobs[: detokenizer.n_kept]
            reason = "stop" if detokenizer.stopped else reason
        text = "" if detokenizer is None else detokenizer.text
        return Completion(text, ids, logprobs, reason, one.score, self.tree)

    def _new_detokenizer(self) -> Detokenizer | None:
        return None if self._tok is None else Detokenizer(self._tok, self.options.stop)

    def _detokenize(self) -> None:
        if self._detokenizer is not None:
            self._new_text += [self._detokenizer.add(token) for token in self.ids[self._n_decoded :]]
        self._n_decoded = len(self.ids)
