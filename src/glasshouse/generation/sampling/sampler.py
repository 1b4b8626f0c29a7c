"""Batched sampling from logits: penalties, top-k, top-p and min-p filters, and verification of draft tokens."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.generation.sampling.candidates import COLUMNS
from glasshouse.generation.sampling.counter_rng import DrawPurpose, sample_categorical, uniforms
from glasshouse.generation.sampling.logits_kernels import argmax, token_logprobs
from glasshouse.generation.sampling.sampling_slots import SamplingMetadata, SamplingSlots

BLOCK, MANY = 64, 2**14  # scores of which the largest is taken, and how many there are where that is faster


class Sampler:
    """Samples the next token of each row; logits are given for slots 0 to n - 1.

    Logits are processed in this order: repetition penalty, frequency and presence penalties, bias, minimum length,
    constraint. Then a row is either greedy (the first on ties), or sampled with temperature, top_k, top_p and min_p.
    A token at -inf is never chosen; where all are at -inf, id 0 is.

    >>> from glasshouse.generation.sampling_params import SamplingParams
    >>> sampler = Sampler(slots=2, vocab_size=3, device=torch.device("cpu"))
    >>> sampler.slots.set(0, SamplingParams(), prompt=[1], end_ids=[2])
    >>> sampler.slots.set(1, SamplingParams(temperature=1.0, top_k=2, seed=5), prompt=[1], end_ids=[2])
    >>> logits = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 1.0]])
    >>> sampler.distribution(logits)
    tensor([[0.0000, 0.0000, 1.0000],
            [0.5000, 0.0000, 0.5000]])
    >>> sampler.sample(logits)[0]
    tensor(2)
    """

    def __init__(self, slots: int, vocab_size: int, device: torch.device) -> None:
        self.slots = SamplingSlots(slots, vocab_size, device)
        self._nothing = torch.empty(slots, 0, COLUMNS, device=device)  # where no candidates are asked for

    def sample(self, logits: Tensor) -> Tensor:
        """Sample a token for each row from raw logits [n, V], and count it; return ids [n]."""
        return self.sample_with_candidates(logits)[0]

    def sample_with_candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Sample as `sample` does; return also what each token was drawn from, [n, 1 + k, 3].

        That is the id, the probability of being drawn and the log-probability by the raw logits: of the sampled
        token, and of the k best ones. It is empty, [n, 0, 3], where no row has the parameter `candidates`.
        """
        metadata = self.slots.metadata(len(logits))
        nothing = self._nothing[: len(logits)]
        if metadata.idle:
            return torch.zeros(len(logits), dtype=torch.int64, device=logits.device), nothing
        ids, scores, weights = self._draw(logits[:, None], _no_drafts(logits))
        self.slots.count_tokens(ids, torch.ones_like(ids[:, 0]))
        if not metadata.candidates:
            return ids[:, 0], nothing
        listed = torch.cat([ids, _top_ids(scores[:, 0], metadata.candidates)], 1)
        if weights is None:  # all rows are greedy
            probabilities = listed == ids
        else:
            probabilities = weights[:, 0].gather(1, listed) / weights[:, 0].sum(1, keepdim=True)
        columns = (listed, probabilities, token_logprobs(logits, listed))
        return ids[:, 0], torch.stack([one.to(self.slots.temperature.dtype) for one in columns], 2)

    def distribution(self, logits: Tensor) -> Tensor:
        """Return the probabilities [n, V] that `sample` samples from: float32, or float64 as the logits."""
        return self._probabilities(logits[:, None], _no_drafts(logits))[:, 0]

    def sample_draft(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor]:
        """Sample the next draft token of each row after drafts [n, K], from a draft model's logits [n, V].

        Returns the ids [n] and the probabilities [n, V] they were sampled from, for `verify`. Nothing is counted: a
        draft model with its own sampler calls `slots.count_tokens` once it knows which were accepted. Drafts use
        their own random numbers, so that accepting them is independent of sampling them.
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
        if draft_probs is None or not self.slots.metadata(n).random:
            # A token is sampled at each position, and a draft is accepted if it is that token: with probability p(x),
            # and else the token follows p without x. That is the acceptance rule for q(x) = 1.
            tokens = self._draw(logits, drafts)[0]
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
        self.slots.count_tokens(tokens, n_accepted + 1)
        return tokens, n_accepted + 1

    def _draw(self, logits: Tensor, drafts: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Sample ids [n, P] from logits [n, P, V], the last of which follow all drafts [n, K].

        Returns also the scores that the logits became, and the weights unless all rows are greedy.
        """
        metadata = self.slots.metadata(len(logits))
        scores = self._processed(logits, drafts, metadata)
        if not metadata.random:
            return argmax(scores), scores, None
        weights = self._weights(scores, metadata)
        numbers = self._uniforms(logits.shape[1], drafts, DrawPurpose.SAMPLE)
        return sample_categorical(weights, numbers), scores, weights

    def _probabilities(self, logits: Tensor, drafts: Tensor) -> Tensor:
        metadata = self.slots.metadata(len(logits))
        weights = self._weights(self._processed(logits, drafts, metadata), metadata)
        return weights.div_(weights.sum(-1, keepdim=True))

    def _processed(self, logits: Tensor, drafts: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return logits [n, P, V] after penalties, bias and minimum length."""
        if not metadata.needs_logits_processing:
            return logits
        n, n_positions, _ = logits.shape
        scores = _exact(logits)
        if metadata.needs_token_counts:
            counts = self.slots.token_counts(n_positions, drafts)
        if metadata.repetition:
            penalty = _column(self.slots.repetition, scores)
            seen = self.slots.tables["prompt"][:n, None] | (counts > 0)
            scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
        if metadata.frequency:
            scores = scores - _column(self.slots.frequency, scores) * counts
            scores = scores - _column(self.slots.presence, scores) * (counts > 0)
        if metadata.bias:
            scores = scores + self.slots.tables["bias"][:n, None]
        if metadata.minimum:
            early = self.slots.steps(n_positions, drafts) < self.slots.minimum[:n, None]
            scores = scores.masked_fill(early[..., None] & self.slots.tables["ends"][:n, None], -math.inf)
        if metadata.constrained:
            scores = scores.masked_fill(self.slots.tables["forbidden"][:n, None], -math.inf)
        return scores.clamp(max=torch.finfo(scores.dtype).max)

    def _weights(self, scores: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the probability of each token [n, P, V] relative to the most probable one."""
        scores = _exact(scores)
        peak, best = scores.max(-1, keepdim=True)
        peak = peak.clamp(min=torch.finfo(scores.dtype).min)  # avoids NaN where all are -inf
        scaled = (scores - peak).div_(_column(self.slots.temperature, scores))
        weights = scaled.exp()
        if metadata.top:
            weights.masked_fill_(scaled < self._limit(scaled, weights, metadata), 0)
        if metadata.min_p:
            weights.masked_fill_(weights < _column(self.slots.min_p, weights), 0)
        if metadata.greedy:
            weights.masked_fill_(self.slots.greedy[: len(scores), None, None] > 0, 0)
        # It is 1 already, except in a greedy row and where all are -inf: there it is the only one.
        return weights.scatter_(-1, best, 1)

    def _limit(self, scaled: Tensor, weights: Tensor, metadata: SamplingMetadata) -> Tensor:
        """Return the smallest logit [n, P, 1] that top_k and top_p keep; ties with it are kept by both.

        So top_k may keep more than k tokens and top_p more than it needs, but never one of two equal logits.
        """
        n = len(scaled)
        top = scaled.topk(metadata.top).values
        k, p = self.slots.top_k[:n, None, None], self.slots.top_p[:n, None, None]
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

    def _uniforms(self, n_positions: int, drafts: Tensor, purpose: DrawPurpose) -> Tensor:
        return uniforms(self.slots.stream[: len(drafts), None], self.slots.steps(n_positions, drafts), purpose)


def _exact(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _column(setting: Tensor, scores: Tensor) -> Tensor:
    """Return a setting as [n, 1, 1] in the dtype of scores [n, P, V]."""
    return setting[: len(scores), None, None].to(scores.dtype)


def _top_ids(scores: Tensor, k: int) -> Tensor:
    """Return the ids [n, k] of the largest scores [n, V], largest first.

    They are in the k blocks with the largest maxima, and a maximum takes far less time than topk.
    """
    n, length = scores.shape
    if length < MANY:
        return scores.topk(k).indices
    blocks = scores[:, : length - length % BLOCK].unflatten(1, (-1, BLOCK))
    places = torch.arange(length, device=scores.device)
    starts = blocks.amax(-1).topk(k).indices[..., None] * BLOCK
    ids = torch.cat([(starts + places[:BLOCK]).flatten(1), places[length - length % BLOCK :].expand(n, -1)], 1)
    return ids.gather(1, scores.gather(1, ids).topk(k).indices)


def _no_drafts(logits: Tensor) -> Tensor:
    return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)


def _count_leading(flags: Tensor) -> Tensor:
    """Return how many leading flags [n, K] of each row are true."""
    return flags.int().cumprod(-1).sum(-1)


def _at(x: Tensor, positions: Tensor) -> Tensor:
    """Return the vector [n, V] of each row of x [n, P, V] at its own position [n]."""
    return torch.take_along_dim(x, positions[:, None, None], 1)[:, 0]
