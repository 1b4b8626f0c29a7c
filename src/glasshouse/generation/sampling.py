"""From logits to ids, for all rows of a batch at once: penalties, filters, draws, and the judging of drafts.

A request takes a slot, which is a row of a few tensors on the model's device. Which work its row needs is settled on
the host when it joins; a choice itself looks at no value, so the host need not wait for it and a graph may hold it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.errors import InputError
from glasshouse.generation.counter_rng import DrawPurpose, sample_categorical, seed_state, uniforms
from glasshouse.generation.logits_kernels import argmax
from glasshouse.generation.sampling_params import SamplingParams

# Settings are held to what float32 can divide and multiply by; past these nothing changes but that infinities arise.
MIN_FLOAT32, MAX_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MOST_FREQUENCY = MAX_FLOAT32 / 2**31  # so that times a count it is finite

EMPTY_SLOT = SamplingParams()  # this very object: the choices of a row that has it are not looked at


@dataclass(frozen=True)
class SamplingMetadata:
    """The work that the rows of a step need between them. Equal plans run equal kernels, so one may key a graph."""

    greedy: bool  # some row takes the likeliest token
    random: bool  # some row draws
    top: int  # so many of the likeliest tokens decide what top_k and top_p keep
    top_p: bool
    min_p: bool
    repetition: bool
    frequency: bool
    bias: bool
    minimum: bool

    @property
    def idle(self) -> bool:
        """Whether no row looks at what is chosen for it."""
        return not (self.greedy or self.random)

    @property
    def needs_token_counts(self) -> bool:
        """Whether it matters which tokens were generated before."""
        return self.repetition or self.frequency

    @property
    def needs_logits_processing(self) -> bool:
        """Whether logits change before the likeliest is known."""
        return self.needs_token_counts or self.bias or self.minimum


class Sampler:
    """Choose the next token of each row; rows 0 to n - 1 of the slots are those whose logits are handed in.

    Logits are changed in this order: repetition penalty, frequency penalty, bias, minimum length. Then a row either
    takes the likeliest token (the first of equals), or goes through temperature, top_k, top_p and min_p and draws. A
    token at -inf is never chosen; where all are at -inf, id 0 is.

    >>> sampler = Sampler(slots=2, vocab_size=3, device=torch.device("cpu"))
    >>> sampler.set_slot(0, SamplingParams(), prompt=[1], end_ids=[2])
    >>> sampler.set_slot(1, SamplingParams(temperature=1.0, top_k=2, seed=5), prompt=[1], end_ids=[2])
    >>> logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0]])
    >>> sampler.distribution(logits)
    tensor([[0.0000, 0.0000, 1.0000],
            [0.5000, 0.0000, 0.5000]])
    >>> sampler.sample(logits)[0]
    tensor(2)
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.slots, self.vocab_size, self.device = slots, vocab_size, device
        real = torch.float32 if device.type == "mps" else torch.float64
        self._rows: list[Tensor] = []  # all that a slot has a row of; at first as EMPTY_SLOT asks
        # Settings lie side by side, so that a request comes, goes and moves by one copy of each kind.
        self._reals, self._wholes = self._new(real, 0, 5), self._new(torch.int64, 0, 5)
        self._temperature, self._top_p, self._min_p, self._repetition, self._frequency = self._reals.unbind(1)
        # Whether the likeliest token is taken; where the seed's numbers start; tokens generated so far.
        self._greedy, self._top_k, self._minimum, self._stream, self._drawn = self._wholes.unbind(1)
        for slot in range(slots):
            self._settle(slot, EMPTY_SLOT)
        self._tables: dict[str, Tensor] = {}  # [slots, V], each made when first needed and then kept in its place
        self._options = [EMPTY_SLOT] * slots
        self._plans: dict[int, SamplingMetadata] = {}  # by the number of rows, until a slot changes hands

    def set_slot(self, slot: int, options: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]) -> None:
        """Give a slot to a request; none of `end_ids` is chosen before its minimum of new tokens."""
        if (largest := max(options.logit_bias, default=0)) >= self.vocab_size:
            raise InputError(f"logit_bias names id {largest}, but ids go to {self.vocab_size - 1}; leave it out.")
        self._settle(slot, options)
        self._set(slot, options)

        # A table's row is left as it was where the settings above make it count for nothing.
        plan = _plan([options], self.vocab_size)
        if plan.needs_token_counts:
            self._table("counts", torch.int32)[slot] = 0
        if plan.repetition:
            self._mark(self._table("prompt", torch.bool)[slot], prompt)
        if plan.minimum:
            self._mark(self._table("ends", torch.bool)[slot], end_ids)
        if plan.bias or "bias" in self._tables:
            row = self._table("bias", torch.float32)[slot].zero_()
            values = [_held(value, -math.inf, MAX_FLOAT32) for value in options.logit_bias.values()]
            row[self._ids(options.logit_bias)] = torch.tensor(values, dtype=row.dtype, device=self.device)

    def clear_slot(self, slot: int) -> None:
        """Take a slot back, so that what its request needed is no longer done for the others."""
        self._set(slot, EMPTY_SLOT)

    def move(self, source: int, target: int) -> None:
        """Let the request in `source` go on in `target`, as if it had always been there."""
        if source != target:
            self.copy(source, target)
            self.clear_slot(source)

    def copy(self, source: int, target: int) -> None:
        """Let `target` go on as `source` would, seed and all."""
        for rows in self._rows:
            rows[target] = rows[source]
        self._set(target, self._options[source])

    @property
    def state(self) -> list[Tensor]:
        """All tensors that a choice reads or changes; more may come when a request joins."""
        return self._rows

    def metadata(self, n: int) -> SamplingMetadata:
        """Return the work that rows 0 to n - 1 need, as joined; it is the same until a slot changes hands."""
        if n not in self._plans:
            self._plans[n] = _plan(self._options[:n], self.vocab_size)
        return self._plans[n]

    def sample(self, logits: Tensor) -> Tensor:
        """Choose a token for each row by its raw logits [n, V], and count it; returns ids [n]."""
        if self.metadata(len(logits)).idle:
            return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ids = self._choices(logits[:, None], _no_drafts(logits))
        self.count_tokens(ids, torch.ones_like(ids[:, 0]))
        return ids[:, 0]

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities [n, V] by which `choose` would draw: float32, or float64 as the logits."""
        return self._probabilities(logits[:, None], _no_drafts(logits))[:, 0]

    def sample_draft(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one more draft for each row after its drafts so far [n, K], from a draft model's logits [n, V].

        Returns the ids [n] and the probabilities [n, V] they were drawn from, as `verify` wants them. Nothing is
        counted: a draft model with a sampler of its own calls `record` when it knows what was kept. Proposals have
        random numbers of their own, or else a verdict on them would not be independent of them.
        """
        probabilities = self._probabilities(logits[:, None], drafts)
        return sample_categorical(probabilities, self._uniforms(1, drafts, DrawPurpose.DRAFT))[:, 0], probabilities[
            :, 0
        ]

    def verify(
        self, logits: Tensor, drafts: Tensor, n_drafts: Tensor, draft_probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keep of each row's drafts [n, K] as many as the model agrees with, and add one token of its own.

        `logits` [n, K+1, V] are the model's before the first draft and after each. Row i has `n_drafts[i]` drafts;
        what stands beyond them does not matter. Without `draft_probs` each draft was certain, and the tokens are the
        very ones that `choose` would give one by one. With the probabilities [n, K, V] that the drafts were drawn
        from, a draft x stays with probability min(1, p(x) / q(x)), so that tokens are distributed as by `choose`.

        Returns tokens [n, K+1] and how many of them count [n], from 1 to `n_drafts` + 1; those are counted.
        """
        n, k = drafts.shape
        real = torch.arange(k, device=drafts.device) < n_drafts[:, None]
        drafts = drafts.where(real, 0)
        if draft_probs is None or not self.metadata(n).random:
            # A token is drawn at each place, and a draft stays where it is that token: so it does with probability
            # p(x), and else the token has the distribution of p without x. That is the rule for q(x) = 1.
            tokens = self._choices(logits, drafts)
            stayed = _run(real & (tokens[:, :-1] == drafts))
        else:
            p = self._probabilities(logits, drafts)
            p_draft, q_draft = (x.gather(-1, drafts[..., None])[..., 0] for x in (p[:, :-1], draft_probs))
            verdicts = self._uniforms(k + 1, drafts, DrawPurpose.ACCEPT)[:, :-1]
            stayed = _run(real & (verdicts * q_draft < p_draft))
            # The next token is the model's own. It makes up for what a rejected draft took too much of; none was
            # rejected where a row has no more of them.
            p_next, q_next = (_at(x, stayed) for x in (p, F.pad(draft_probs, (0, 0, 0, 1))))
            rest = (p_next - q_next * (stayed < n_drafts)[:, None]).clamp(min=0)
            rest = rest.where(rest.sum(-1, keepdim=True) > 0, p_next)  # p = q but for rounding
            numbers = _at(self._uniforms(k + 1, drafts, DrawPurpose.SAMPLE)[..., None], stayed)[:, 0]
            tokens = F.pad(drafts, (0, 1)).scatter(1, stayed[:, None], sample_categorical(rest, numbers)[:, None])
        self.count_tokens(tokens, stayed + 1)
        return tokens, stayed + 1

    def count_tokens(self, tokens: Tensor, kept: Tensor) -> None:
        """Count the first `kept[i]` of each row's tokens [n, T] as generated; `choose` and `verify` have done so."""
        n, length = tokens.shape
        self._drawn[:n] += kept
        if self.metadata(n).needs_token_counts:
            counted = torch.arange(length, device=tokens.device) < kept[:, None]
            self._tables["counts"][:n].scatter_add_(1, tokens, counted.int())

    def _choices(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Choose ids [n, P] by logits [n, P, V], the last of which follow all drafts [n, K]."""
        plan = self.metadata(len(logits))
        scores = self._adjusted(logits, drafts, plan)
        if not plan.random:
            return argmax(scores)
        return sample_categorical(
            self._weights(scores, plan), self._uniforms(logits.shape[1], drafts, DrawPurpose.SAMPLE)
        )

    def _probabilities(self, logits: Tensor, drafts: Tensor) -> Tensor:
        plan = self.metadata(len(logits))
        weights = self._weights(self._adjusted(logits, drafts, plan), plan)
        return weights.div_(weights.sum(-1, keepdim=True))

    def _adjusted(self, logits: Tensor, drafts: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return logits [n, P, V] after penalties, biases and the minimum length."""
        if not metadata.needs_logits_processing:
            return logits
        n, places, _ = logits.shape
        scores = _exact(logits)
        if metadata.needs_token_counts:
            counts = self._counts(places, drafts)
        if metadata.repetition:
            penalty = _column(self._repetition, scores)
            seen = self._tables["prompt"][:n, None] | (counts > 0)
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if metadata.frequency:
            scores = scores - _column(self._frequency, scores) * counts
        if metadata.bias:
            scores = scores + self._tables["bias"][:n, None]
        if metadata.minimum:
            early = self._steps(places, drafts) < self._minimum[:n, None]
            scores = scores.masked_fill(early[..., None] & self._tables["ends"][:n, None], -math.inf)
        return scores.clamp(max=torch.finfo(scores.dtype).max)

    def _weights(self, scores: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return each token's probability [n, P, V] over that of the likeliest."""
        scores = _exact(scores)
        peak, best = scores.max(-1, keepdim=True)
        peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # where all are at -inf, the difference is not NaN
        scaled = (scores - peak).div_(_column(self._temperature, scores))
        weights = scaled.exp()
        if metadata.top:
            weights.masked_fill_(scaled < self._limit(scaled, weights, metadata), 0)
        if metadata.min_p:
            weights.masked_fill_(weights < _column(self._min_p, weights), 0)
        if metadata.greedy:
            weights.masked_fill_(self._greedy[: len(scores), None, None] > 0, 0)
        # It weighs 1 already, except in a greedy row and where all are forbidden: there it is the only one.
        return weights.scatter_(-1, best, 1)

    def _limit(self, scaled: Tensor, weights: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the least logit [n, P, 1] that top_k and top_p keep; all that equal it are kept, by both.

        So top_k may keep more than k tokens and top_p more than it needs, but never one of two equals.
        """
        n = len(scaled)
        top = scaled.topk(metadata.top).values
        k, p = self._top_k[:n, None, None], self._top_p[:n, None, None]
        limit = torch.take_along_dim(top, k.clamp(max=metadata.top) - 1, -1)
        limit = limit.masked_fill(k > metadata.top, -math.inf)
        if not metadata.top_p:
            return limit
        # A token is kept as long as those before it do not reach p. The total is the whole row's, as tokens equal to
        # the limit may go on beyond the top.
        total = weights.masked_fill(scaled < limit, 0).sum(-1, keepdim=True, dtype=p.dtype)
        before = F.pad(top.exp().cumsum(-1, dtype=p.dtype)[..., :-1], (1, 0))
        last = (before < p * total).sum(-1, keepdim=True).clamp(min=1) - 1
        return limit.maximum(top.gather(-1, last).masked_fill(p == math.inf, -math.inf))

    def _steps(self, places: int, drafts: Tensor) -> Tensor:
        """Return the number of each row's tokens before each place [n, P], drafts included."""
        n, n_drafts = drafts.shape
        return self._drawn[:n, None] + torch.arange(n_drafts + 1 - places, n_drafts + 1, device=drafts.device)

    def _counts(self, places: int, drafts: Tensor) -> Tensor:
        """Return how often each token was generated before each place [n, P, V], drafts included."""
        n, n_drafts = drafts.shape
        counts = self._tables["counts"][:n, None]
        if n_drafts == 0:
            return counts
        before = torch.ones(places, n_drafts, dtype=counts.dtype, device=drafts.device).tril(n_drafts - places)
        index = drafts[:, None].expand(n, places, n_drafts)
        return counts.repeat(1, places, 1).scatter_add_(-1, index, before.expand_as(index))

    def _uniforms(self, places: int, drafts: Tensor, use: DrawPurpose) -> Tensor:
        return uniforms(self._stream[: len(drafts), None], self._steps(places, drafts), use)

    def _settle(self, slot: int, options: SamplingParams) -> None:
        """Write what the options say about numbers into a slot's row."""
        reals = [
            _held(options.temperature, MIN_FLOAT32, MAX_FLOAT32),
            _top_p(options),
            float(options.min_p or 0),
            _held(options.repetition_penalty, MIN_FLOAT32, MAX_FLOAT32),
            _held(options.frequency_penalty, -MOST_FREQUENCY, MOST_FREQUENCY),
        ]
        minimum = min(options.min_new_tokens, 2**62)
        wholes = [
            int(options.temperature == 0),
            _top_k(options, self.vocab_size),
            minimum,
            seed_state(options.seed),
            0,
        ]
        for rows, values in ((self._reals, reals), (self._wholes, wholes)):
            row = torch.tensor(values, dtype=rows.dtype)
            rows[slot].copy_(row.pin_memory() if rows.is_cuda else row, non_blocking=True)

    def _set(self, slot: int, options: SamplingParams) -> None:
        self._options[slot] = options
        self._plans.clear()

    def _table(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._tables:
            self._tables[name] = self._new(dtype, 0, self.vocab_size)
        return self._tables[name]

    def _new(self, dtype: torch.dtype, value: float, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # what is made in that mode could not be written outside it
            self._rows.append(torch.full((self.slots, *shape), value, dtype=dtype, device=self.device))
        return self._rows[-1]

    def _mark(self, row: Tensor, ids: Sequence[int]) -> None:
        """Make `ids` the true ones of a table's row."""
        # An id that has no logit, as a source's may not, can never be chosen.
        row.zero_()[self._ids(i for i in ids if 0 <= i < self.vocab_size)] = True

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64).to(self.device)


def _plan(rows: Sequence[SamplingParams], vocab_size: int) -> SamplingMetadata:
    random = [row for row in rows if row.temperature > 0]
    tops = [k for row in random if (k := _top_k(row, vocab_size)) < vocab_size or _top_p(row) < 1]
    return SamplingMetadata(
        greedy=any(row.temperature == 0 for row in rows if row is not EMPTY_SLOT),
        random=bool(random),
        top=max(tops, default=0),
        top_p=any(_top_p(row) < 1 for row in random),
        min_p=any(row.min_p for row in random),
        repetition=any(row.repetition_penalty != 1 for row in rows),
        frequency=any(row.frequency_penalty for row in rows),
        bias=any(row.logit_bias for row in rows),
        minimum=any(row.min_new_tokens for row in rows),
    )


def _top_k(options: SamplingParams, vocab_size: int) -> int:
    return vocab_size if options.top_k is None else min(options.top_k, vocab_size)


def _top_p(options: SamplingParams) -> float:
    # A sum that is rounded to 1 too early would cut the last tokens off.
    return math.inf if options.top_p is None or options.top_p == 1 else float(options.top_p)


def _held(value: float, least: float, most: float) -> float:
    return float(min(max(value, least), most))


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _column(setting: Tensor, scores: Tensor) -> Tensor:
    """Return a setting of the rows of scores [n, P, V], as their type and to go with them: [n, 1, 1]."""
    return setting[: len(scores), None, None].to(scores.dtype)


def _no_drafts(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)


def _run(flags: Tensor) -> Tensor:
    """Return how many of each row's flags [n, K] are true before the first that is not."""
    return flags.int().cumprod(-1).sum(-1)


def _at(x: Tensor, places: Tensor) -> Tensor:
    """Return the vector [n, V] of each row of x [n, P, V] at its own place [n]."""
    return torch.take_along_dim(x, places[:, None, None], 1)[:, 0]
