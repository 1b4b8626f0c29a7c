"""Batched sampling from logits: penalties, top-k, top-p and min-p filters, and verification of draft tokens.

Each slot is a row of a few tensors on the model's device. Which operations a row needs is decided on the host when
a request takes the slot; sampling itself needs no value on the host, so it does not synchronise and can be part of
a CUDA graph.
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

# Settings are clamped to what float32 can divide and multiply by; larger values would only produce infinities.
MIN_FLOAT32, MAX_FLOAT32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
MOST_FREQUENCY = MAX_FLOAT32 / 2**31  # finite when multiplied by a token count

EMPTY_SLOT = SamplingParams()  # compared by identity: samples of such a row are ignored


@dataclass(frozen=True)
class SamplingMetadata:
    """The operations that the batch needs. Equal metadata run equal kernels, so it can key a CUDA graph."""

    greedy: bool  # some row is greedy
    random: bool  # some row samples
    top: int  # how many of the largest logits top_k and top_p need
    top_p: bool
    min_p: bool
    repetition: bool
    frequency: bool
    bias: bool
    minimum: bool

    @property
    def idle(self) -> bool:
        """Whether all samples are ignored."""
        return not (self.greedy or self.random)

    @property
    def needs_token_counts(self) -> bool:
        """Whether penalties need counts of generated tokens."""
        return self.repetition or self.frequency

    @property
    def needs_logits_processing(self) -> bool:
        """Whether logits change before the argmax."""
        return self.needs_token_counts or self.bias or self.minimum


class Sampler:
    """Samples the next token of each row; logits are given for slots 0 to n - 1.

    Logits are processed in this order: repetition penalty, frequency penalty, bias, minimum length. Then a row is
    either greedy (the first on ties), or sampled with temperature, top_k, top_p and min_p. A token at -inf is never
    chosen; where all are at -inf, id 0 is.

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
        self._slot_tensors: list[Tensor] = []  # all tensors with a row per slot
        # Settings share two tensors, so that setting or moving a slot is one copy of each.
        self._reals, self._wholes = self._new(real, 0, 5), self._new(torch.int64, 0, 5)
        self._temperature, self._top_p, self._min_p, self._repetition, self._frequency = self._reals.unbind(1)
        # _stream is the start of the seed's random numbers, _n_generated the number of tokens so far.
        self._greedy, self._top_k, self._minimum, self._stream, self._n_generated = self._wholes.unbind(1)
        for slot in range(slots):
            self._write_settings(slot, EMPTY_SLOT)
        self._tables: dict[str, Tensor] = {}  # [slots, V], each allocated when first needed
        self._options = [EMPTY_SLOT] * slots
        self._metadata: dict[int, SamplingMetadata] = {}  # by batch size, until a slot changes

    def set_slot(self, slot: int, options: SamplingParams, prompt: Sequence[int], end_ids: Sequence[int]) -> None:
        """Install the parameters of a request in a slot; no `end_ids` are sampled before `min_new_tokens`."""
        if (largest := max(options.logit_bias, default=0)) >= self.vocab_size:
            raise InputError(f"logit_bias names id {largest}, but ids go to {self.vocab_size - 1}; leave it out.")
        self._write_settings(slot, options)
        self._set(slot, options)

        # Rows of tables that these settings do not use are left as they are.
        metadata = _make_metadata([options], self.vocab_size)
        if metadata.needs_token_counts:
            self._table("counts", torch.int32)[slot] = 0
        if metadata.repetition:
            self._mark(self._table("prompt", torch.bool)[slot], prompt)
        if metadata.minimum:
            self._mark(self._table("ends", torch.bool)[slot], end_ids)
        if metadata.bias or "bias" in self._tables:
            row = self._table("bias", torch.float32)[slot].zero_()
            values = [_clamp(value, -math.inf, MAX_FLOAT32) for value in options.logit_bias.values()]
            row[self._ids(options.logit_bias)] = torch.tensor(values, dtype=row.dtype, device=self.device)

    def clear_slot(self, slot: int) -> None:
        """Clear a slot, so that its settings no longer add work to the batch."""
        self._set(slot, EMPTY_SLOT)

    def move(self, source: int, target: int) -> None:
        """Move a slot with its state."""
        if source != target:
            self.copy(source, target)
            self.clear_slot(source)

    def copy(self, source: int, target: int) -> None:
        """Copy a slot with its state, seed included."""
        for rows in self._slot_tensors:
            rows[target] = rows[source]
        self._set(target, self._options[source])

    @property
    def state(self) -> list[Tensor]:
        """All tensors that sampling reads or changes; setting a slot may add some."""
        return self._slot_tensors

    def metadata(self, n: int) -> SamplingMetadata:
        """Return what slots 0 to n - 1 need; it is the same until a slot changes."""
        if n not in self._metadata:
            self._metadata[n] = _make_metadata(self._options[:n], self.vocab_size)
        return self._metadata[n]

    def sample(self, logits: Tensor) -> Tensor:
        """Sample a token for each row from raw logits [n, V], and count it; return ids [n]."""
        if self.metadata(len(logits)).idle:
            return torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ids = self._sample(logits[:, None], _no_drafts(logits))
        self.count_tokens(ids, torch.ones_like(ids[:, 0]))
        return ids[:, 0]

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities [n, V] that `sample` samples from: float32, or float64 as the logits."""
        return self._probabilities(logits[:, None], _no_drafts(logits))[:, 0]

    def sample_draft(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next draft token of each row after drafts [n, K], from a draft model's logits [n, V].

        Returns the ids [n] and the probabilities [n, V] they were sampled from, for `verify`. Nothing is counted: a
        draft model with its own sampler calls `count_tokens` once it knows which were accepted. Drafts use their own
        random numbers, so that accepting them is independent of sampling them.
        """
        probabilities = self._probabilities(logits[:, None], drafts)
        return sample_categorical(probabilities, self._uniforms(1, drafts, DrawPurpose.DRAFT))[:, 0], probabilities[
            :, 0
        ]

    def verify(
        self, logits: Tensor, drafts: Tensor, n_drafts: Tensor, draft_probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Accept the drafts [n, K] of each row as far as the model agrees, and add one token of its own.

        `logits` [n, K+1, V] are the model's before the first draft and after each. Row i has `n_drafts[i]` drafts,
        then padding. Without `draft_probs` each draft was certain, and the tokens are exactly those that `sample`
        would give one by one. With the probabilities [n, K, V] that the drafts were sampled from, a draft x is
        accepted with probability min(1, p(x) / q(x)), so that tokens are distributed as by `sample`.

        Returns tokens [n, K+1] and how many of them are valid [n], from 1 to `n_drafts` + 1; those are counted.
        """
        n, k = drafts.shape
        real = torch.arange(k, device=drafts.device) < n_drafts[:, None]
        drafts = drafts.where(real, 0)
        if draft_probs is None or not self.metadata(n).random:
            # A token is sampled at each position, and a draft is accepted if it is that token: with probability p(x),
            # and else the token follows p without x. That is the acceptance rule for q(x) = 1.
            tokens = self._sample(logits, drafts)
            n_accepted = _count_leading(real & (tokens[:, :-1] == drafts))
        else:
            p = self._probabilities(logits, drafts)
            p_draft, q_draft = (x.gather(-1, drafts[..., None])[..., 0] for x in (p[:, :-1], draft_probs))
            thresholds = self._uniforms(k + 1, drafts, DrawPurpose.ACCEPT)[:, :-1]
            n_accepted = _count_leading(real & (thresholds * q_draft < p_draft))
            # The next token comes from the model: from the residual distribution after a rejected draft, or from p
            # where all drafts were accepted.
            p_next, q_next = (_at(x, n_accepted) for x in (p, F.pad(draft_probs, (0, 0, 0, 1))))
            residual = (p_next - q_next * (n_accepted < n_drafts)[:, None]).clamp(min=0)
            residual = residual.where(residual.sum(-1, keepdim=True) > 0, p_next)  # p = q up to rounding
            numbers = _at(self._uniforms(k + 1, drafts, DrawPurpose.SAMPLE)[..., None], n_accepted)[:, 0]
            own = sample_categorical(residual, numbers)[:, None]
            tokens = F.pad(drafts, (0, 1)).scatter(1, n_accepted[:, None], own)
        self.count_tokens(tokens, n_accepted + 1)
        return tokens, n_accepted + 1

    def count_tokens(self, tokens: Tensor, kept: Tensor) -> None:
        """Count the first `kept[i]` tokens [n, T] of each row as generated; `sample` and `verify` call it."""
        n, length = tokens.shape
        self._n_generated[:n] += kept
        if self.metadata(n).needs_token_counts:
            counted = torch.arange(length, device=tokens.device) < kept[:, None]
            self._tables["counts"][:n].scatter_add_(1, tokens, counted.int())

    def _sample(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Sample ids [n, P] from logits [n, P, V], the last of which follow all drafts [n, K]."""
        metadata = self.metadata(len(logits))
        scores = self._processed(logits, drafts, metadata)
        if not metadata.random:
            return argmax(scores)
        return sample_categorical(
            self._weights(scores, metadata), self._uniforms(logits.shape[1], drafts, DrawPurpose.SAMPLE)
        )

    def _probabilities(self, logits: Tensor, drafts: Tensor) -> Tensor:
        metadata = self.metadata(len(logits))
        weights = self._weights(self._processed(logits, drafts, metadata), metadata)
        return weights.div_(weights.sum(-1, keepdim=True))

    def _processed(self, logits: Tensor, drafts: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return logits [n, P, V] after penalties, bias and minimum length."""
        if not metadata.needs_logits_processing:
            return logits
        n, n_positions, _ = logits.shape
        scores = _exact(logits)
        if metadata.needs_token_counts:
            counts = self._counts(n_positions, drafts)
        if metadata.repetition:
            penalty = _column(self._repetition, scores)
            seen = self._tables["prompt"][:n, None] | (counts > 0)
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if metadata.frequency:
            scores = scores - _column(self._frequency, scores) * counts
        if metadata.bias:
            scores = scores + self._tables["bias"][:n, None]
        if metadata.minimum:
            early = self._steps(n_positions, drafts) < self._minimum[:n, None]
            scores = scores.masked_fill(early[..., None] & self._tables["ends"][:n, None], -math.inf)
        return scores.clamp(max=torch.finfo(scores.dtype).max)

    def _weights(self, scores: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the probability of each token [n, P, V] relative to the most probable one."""
        scores = _exact(scores)
        peak, best = scores.max(-1, keepdim=True)
        peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # avoids NaN where all are -inf
        scaled = (scores - peak).div_(_column(self._temperature, scores))
        weights = scaled.exp()
        if metadata.top:
            weights.masked_fill_(scaled < self._limit(scaled, weights, metadata), 0)
        if metadata.min_p:
            weights.masked_fill_(weights < _column(self._min_p, weights), 0)
        if metadata.greedy:
            weights.masked_fill_(self._greedy[: len(scores), None, None] > 0, 0)
        # It is 1 already, except in a greedy row and where all are -inf: there it is the only one.
        return weights.scatter_(-1, best, 1)

    def _limit(self, scaled: Tensor, weights: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the smallest logit [n, P, 1] that top_k and top_p keep; ties with it are kept by both.

        So top_k may keep more than k tokens and top_p more than it needs, but never one of two equal logits.
        """
        n = len(scaled)
        top = scaled.topk(metadata.top).values
        k, p = self._top_k[:n, None, None], self._top_p[:n, None, None]
        limit = torch.take_along_dim(top, k.clamp(max=metadata.top) - 1, -1)
        limit = limit.masked_fill(k > metadata.top, -math.inf)
        if not metadata.top_p:
            return limit
        # A token is kept while the sum before it is below p. The total is over the whole row, as ties with the limit
        # may continue beyond the top.
        total = weights.masked_fill(scaled < limit, 0).sum(-1, keepdim=True, dtype=p.dtype)
        before = F.pad(top.exp().cumsum(-1, dtype=p.dtype)[..., :-1], (1, 0))
        last = (before < p * total).sum(-1, keepdim=True).clamp(min=1) - 1
        return limit.maximum(top.gather(-1, last).masked_fill(p == math.inf, -math.inf))

    def _steps(self, n_positions: int, drafts: Tensor) -> Tensor:
        """Return the number of generated tokens before each position [n, P], drafts included."""
        n, n_drafts = drafts.shape
        steps = torch.arange(n_drafts + 1 - n_positions, n_drafts + 1, device=drafts.device)
        return self._n_generated[:n, None] + steps

    def _counts(self, n_positions: int, drafts: Tensor) -> Tensor:
        """Return how often each token was generated before each position [n, P, V], drafts included."""
        n, n_drafts = drafts.shape
        counts = self._tables["counts"][:n, None]
        if n_drafts == 0:
            return counts
        before = torch.ones(n_positions, n_drafts, dtype=counts.dtype, device=drafts.device)
        before = before.tril(n_drafts - n_positions)
        index = drafts[:, None].expand(n, n_positions, n_drafts)
        return counts.repeat(1, n_positions, 1).scatter_add_(-1, index, before.expand_as(index))

    def _uniforms(self, n_positions: int, drafts: Tensor, purpose: DrawPurpose) -> Tensor:
        return uniforms(self._stream[: len(drafts), None], self._steps(n_positions, drafts), purpose)

    def _write_settings(self, slot: int, options: SamplingParams) -> None:
        """Write the numeric parameters to a slot."""
        reals = [
            _clamp(options.temperature, MIN_FLOAT32, MAX_FLOAT32),
            _top_p(options),
            float(options.min_p or 0),
            _clamp(options.repetition_penalty, MIN_FLOAT32, MAX_FLOAT32),
            _clamp(options.frequency_penalty, -MOST_FREQUENCY, MOST_FREQUENCY),
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
        self._metadata.clear()

    def _table(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._tables:
            self._tables[name] = self._new(dtype, 0, self.vocab_size)
        return self._tables[name]

    def _new(self, dtype: torch.dtype, value: float, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # inference tensors cannot be written outside that mode
            self._slot_tensors.append(torch.full((self.slots, *shape), value, dtype=dtype, device=self.device))
        return self._slot_tensors[-1]

    def _mark(self, row: Tensor, ids: Sequence[int]) -> None:
        """Set a row of a bool table to True at `ids` and False elsewhere."""
        # An id without a logit, possible in a source, can never be sampled.
        row.zero_()[self._ids(i for i in ids if 0 <= i < self.vocab_size)] = True

    def _ids(self, ids: Iterable[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64).to(self.device)


def _make_metadata(rows: Sequence[SamplingParams], vocab_size: int) -> SamplingMetadata:
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
    # A cumulative sum that rounds to 1 early would cut off the last tokens.
    return math.inf if options.top_p is None or options.top_p == 1 else float(options.top_p)


def _clamp(value: float, least: float, most: float) -> float:
    return float(min(max(value, least), most))


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _column(setting: Tensor, scores: Tensor) -> Tensor:
    """Return a setting as [n, 1, 1] in the dtype of scores [n, P, V]."""
    return setting[: len(scores), None, None].to(scores.dtype)


def _no_drafts(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)


def _count_leading(flags: Tensor) -> Tensor:
    """Return how many leading flags [n, K] of each row are true."""
    return flags.int().cumprod(-1).sum(-1)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the vector [n, V] of each row of x [n, P, V] at its own position [n]."""
    return torch.take_along_dim(x, positions[:, None, None], 1)[:, 0]
