"""Beam search: several hypotheses are extended in parallel, and the most probable are kept.

The rules are those of transformers' `generate(num_beams=k, do_sample=False)`:

- A step ranks the continuations of all beams by log-probability. One that ends is finished if it is among the
  first k; the first k that do not end are the next beams.
- A hypothesis scores its summed log-probability over its length, the end token included, to the power of
  `length_penalty`. The best k finished hypotheses are kept.
- Once k have finished, a search is done at once with `early_stopping`. Without it, the search is done when the best
  beam, scored at its current length, does not beat the worst of them.
- At `max_new_tokens` the running beams count as hypotheses too.
- Biases, penalties and `min_new_tokens` act on log-probabilities, which are not normalised again. So do the
  frequency and presence penalties, which transformers does not have.

There are two differences: continuations of probability 0 are no candidates, so a search returns fewer beams or
results where there are too few continuations; and no score is too low to count, where transformers stops at -1e9.
Ties between equally likely continuations are broken by `torch.topk`, as in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.beam.hypothesis import Hypothesis, Node, Outcome
from glasshouse.generation.sampling_params import SamplingParams
from glasshouse.generation.validation import check_n_best

_SCORE = attrgetter("score")
_TOTAL = attrgetter("total")


class CacheCopy(NamedTuple):
    """A copy between rows of the cache: `target` takes the keys and values of `source` from new token `start` on.

    The first new token is 0: its position in the cache is the prompt's length plus `start`.
    """

    target: int
    source: int
    start: int


@dataclass(frozen=True, slots=True)
class _Beam:
    ids: list[int]
    logprobs: list[float]
    total: float  # -inf: the beam is idle
    node: int | None = None

    @property
    def is_running(self) -> bool:
        return self.total > -math.inf

    def idle(self) -> _Beam:
        """Return the beam as idle, with a placeholder token: all beams stay equally long."""
        return _Beam([*self.ids, 0], [*self.logprobs, 0.0], -math.inf)


class _Candidate(NamedTuple):
    total: float
    parent: int
    token: int
    logprob: float


class BeamSearch:
    """The beam search of one request, which takes `options.beams` rows of the batch.

    The caller runs the model: `advance` takes the logits of all rows and returns which row each row continues, and
    with which token. The first step uses row 0 alone, since all rows have the same prompt.

    `end_ids` and `options.stop_token_ids` end a hypothesis. A repetition penalty counts the tokens of `prompt` and
    new ones. With `keep_tree` every candidate is appended to `tree`, parents first: at least `2 * beams` a step where
    there are as many, of which `beams` are kept.

    >>> search = BeamSearch(SamplingParams(beams=2, max_new_tokens=3), end_ids=[0], vocab_size=3, n_best=2)
    >>> follows = torch.tensor([[1.0, 0.0, 0.0], [0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]).log()  # each token's next
    >>> last = torch.tensor([2, 2])
    >>> while not search.done:
    ...     parents, last = advance([search], follows[last])
    >>> [(found.ids, found.finish_reason) for found in search.results()]
    [([2, 2, 2], 'length'), ([2, 1], 'stop')]
    """

    def __init__(
        self,
        options: SamplingParams,
        end_ids: Sequence[int],
        vocab_size: int,
        n_best: int = 1,
        keep_tree: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self.options = options
        self.vocab_size = vocab_size
        self.cache_copies: list[CacheCopy] = []
        self.tree: list[Node] = []
        self.not_finite = False  # the log-probabilities of a beam were NaN and could not be ranked

        self._end_ids = frozenset((*end_ids, *options.stop_token_ids))
        self._prompt = torch.tensor(sorted(set(prompt)), dtype=torch.int64)
        self._n_best = n_best
        self._keep_tree = keep_tree
        self._check()

        self._step = 0
        self._decided = False
        idle = _Beam([], [], -math.inf)
        self._beams = [_Beam([], [], 0.0), *[idle] * (options.beams - 1)]  # by row
        self._shared = [[0] * options.beams for _ in self._beams]  # common prefix of two rows, in new tokens
        self._finished: list[Hypothesis] = []  # best first, at most `beams`

    @property
    def done(self) -> bool:
        """Whether the search is over: no continuation can improve the results, or the length limit is reached."""
        return self._decided or self._step >= self.options.max_new_tokens

    def results(self) -> list[Hypothesis]:
        """Return the best hypotheses, best first: `n_best`, or fewer where fewer exist.

        If the search was ended early, by `max_new_tokens` or by the caller, running beams count too.
        """
        found = list(self._finished)
        if not self._decided:
            found += [self._hypothesis(beam, "length") for beam in self._beams if beam.is_running]
        return sorted(found, key=_SCORE, reverse=True)[: self._n_best]

    def _check(self) -> None:
        beams, length = self.options.beams, max(self.options.max_new_tokens, 1)
        check_n_best(self._n_best, beams)
        ids = {
            "an end id": self._end_ids,
            "a biased id": self.options.logit_bias,
            "a prompt id": self._prompt.tolist(),
        }
        for name, given in ids.items():
            for token in given:
                if not 0 <= token < self.vocab_size:
                    raise InputError(f"{name} is {token}, but the vocabulary has ids 0 to {self.vocab_size - 1}.")
        if abs(self.options.length_penalty) * math.log(length) > 700:  # exp(700) is about the largest float
            raise InputError(
                f"length_penalty is {self.options.length_penalty}, but {length} to that power overflows; "
                "choose one closer to 0."
            )

    @property
    def _width(self) -> int:
        """Candidates per row: enough for 2 * beams in all, and for `beams` that do not end."""
        return self.options.beams + max(self.options.beams, len(self._end_ids))

    @property
    def _processes_logprobs(self) -> bool:
        return self.options.changes_logits or self._step < self.options.min_new_tokens

    def _process_logprobs(self, logprobs: Tensor) -> None:
        """Apply bias, penalties and minimum length in place, in transformers' order, to the logprobs [k, V]."""
        options, device = self.options, logprobs.device
        if options.logit_bias:
            biased = torch.tensor(list(options.logit_bias), device=device)
            logprobs[:, biased] += torch.tensor(
                list(options.logit_bias.values()), device=device, dtype=logprobs.dtype
            )
        new = torch.tensor([beam.ids for beam in self._beams], device=device, dtype=torch.int64)  # [k, step]
        if options.repetition_penalty != 1:
            self._prompt = self._prompt.to(device)
            seen = torch.cat((self._prompt.expand(len(new), -1), new), dim=1)
            current = logprobs.gather(1, seen)
            penalty = options.repetition_penalty
            logprobs.scatter_(1, seen, torch.where(current < 0, current * penalty, current / penalty))
        if options.frequency_penalty:
            penalty_per_use = torch.full_like(new, -options.frequency_penalty, dtype=logprobs.dtype)
            logprobs.scatter_add_(1, new, penalty_per_use)  # once per occurrence
        if options.presence_penalty:
            logprobs.scatter_(1, new, logprobs.gather(1, new) - options.presence_penalty)
        if self._step < options.min_new_tokens:
            logprobs[:, sorted(self._end_ids)] = -math.inf

    def _advance(
        self, processed: list[list[float]], logprobs: list[list[float]], tokens: list[list[int]]
    ) -> tuple[list[int], list[int]]:
        """Advance by one step from the best candidates of each row [k, width]; return each row's parent and token."""
        if self.done:
            self.cache_copies = []
            return list(range(self.options.beams)), [0] * self.options.beams
        self._step += 1
        # topk puts NaN first, and a softmax over one NaN is NaN throughout.
        if any(beam.is_running and math.isnan(row[0]) for beam, row in zip(self._beams, logprobs, strict=True)):
            self.not_finite = self._decided = True
            self.cache_copies = []
            return list(range(self.options.beams)), [0] * self.options.beams
        kept = self._choose(self._candidates(processed, logprobs, tokens))
        parents = self._place(kept)
        self._decided = not self.done and self._is_decided()
        return parents, [beam.ids[-1] for beam in self._beams]

    def _candidates(
        self, processed: list[list[float]], logprobs: list[list[float]], tokens: list[list[int]]
    ) -> list[_Candidate]:
        found = [
            _Candidate(beam.total + change, row, token, logprob)
            for row, beam in enumerate(self._beams)
            if beam.is_running
            for change, token, logprob in zip(processed[row], tokens[row], logprobs[row], strict=True)
            if change > -math.inf
        ]
        return sorted(found, key=_TOTAL, reverse=True)

    def _choose(self, candidates: list[_Candidate]) -> list[tuple[int, _Beam]]:
        """Finish hypotheses that end and return the beams that continue, each with its parent row."""
        beams = self.options.beams
        kept: list[tuple[int, _Beam]] = []
        for rank, candidate in enumerate(candidates):
            if len(kept) == beams and rank >= 2 * beams:
                break
            parent = self._beams[candidate.parent]
            if candidate.token in self._end_ids:
                outcome: Outcome = "ended" if rank < beams else "pruned"
            else:
                outcome = "kept" if len(kept) < beams else "pruned"
            node = self._record(candidate, outcome) if self._keep_tree else None
            if outcome == "ended":
                ended = _Beam(parent.ids, parent.logprobs, candidate.total, node)
                self._finished.append(self._hypothesis(ended, "stop"))
            elif outcome == "kept":
                ids, logprobs = [*parent.ids, candidate.token], [*parent.logprobs, candidate.logprob]
                kept.append((candidate.parent, _Beam(ids, logprobs, candidate.total, node)))
        self._finished.sort(key=_SCORE, reverse=True)
        del self._finished[beams:]
        return kept

    def _record(self, candidate: _Candidate, outcome: Outcome) -> int:
        total, row, token, logprob = candidate
        parent = self._beams[row].node
        self.tree.append(Node(parent, token, logprob, total, self._normalised(total), self._step, outcome))
        return len(self.tree) - 1

    def _place(self, kept: list[tuple[int, _Beam]]) -> list[int]:
        """Assign each beam to a row and return each row's parent.

        The most probable child of a row stays in it. Further children take rows that nothing continues, each the free
        one with the longest prefix in common with its parent.
        """
        before = self._beams
        parents = list(range(len(before)))
        placed: dict[int, _Beam] = {}
        moved = []
        for parent, beam in kept:
            if parent in placed:
                moved.append((parent, beam))
            else:
                placed[parent] = beam
        free = [row for row in parents if row not in placed]
        for parent, beam in moved:
            row = max(free, key=self._shared[parent].__getitem__)
            free.remove(row)
            placed[row] = beam
            parents[row] = parent

        cached = self._step - 1  # new tokens in the cache of a row
        shared = self._shared
        self.cache_copies = [
            CacheCopy(row, parent, start)
            for row, parent in enumerate(parents)
            if row != parent and (start := shared[row][parent]) < cached
        ]
        self._beams = [placed[row] if row in placed else before[row].idle() for row in range(len(before))]
        self._shared = [[cached if p == q else shared[p][q] for q in parents] for p in parents]
        return parents

    def _is_decided(self) -> bool:
        best = max(beam.total for beam in self._beams)
        if best == -math.inf:
            return True
        if len(self._finished) < self.options.beams:
            return False
        return self.options.early_stopping or self._normalised(best) <= self._finished[-1].score

    def _hypothesis(self, beam: _Beam, reason: Literal["stop", "length"]) -> Hypothesis:
        return Hypothesis(list(beam.ids), list(beam.logprobs), self._normalised(beam.total), reason, beam.node)

    def _normalised(self, total: float) -> float:
        return total / max(self._step, 1) ** self.options.length_penalty


def advance(searches: Sequence[BeamSearch], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Advance several searches of the same width by one step; return (parents [n], tokens [n]).

    logits [n, V] are the model's for the next token of each row; search i has the rows from i * beams on. New row j
    of a search continues its old row parents[j], counted from 0 within the search, with tokens[j].

    The cache need not be reordered: the `cache_copies` of each search say what to copy. No row is both a source and a
    target, so their order does not matter. The first step copies nothing if all rows have the prompt. A search that
    is done keeps its rows in place, with placeholder tokens, and so does a row without a continuation.
    """
    beams = searches[0].options.beams
    if any(search.options.beams != beams for search in searches):
        raise InputError(
            f"the searches have {[search.options.beams for search in searches]} beams; they must be equal."
        )
    if logits.shape != (len(searches) * beams, searches[0].vocab_size):
        raise InputError(
            f"the logits are {list(logits.shape)}, but {len(searches)} searches of {beams} beams need "
            f"[{len(searches) * beams}, {searches[0].vocab_size}]."
        )
    dtype, bits = (torch.float64, torch.int64) if logits.dtype == torch.float64 else (torch.float32, torch.int32)
    logprobs = torch.log_softmax(logits.detach(), dim=-1, dtype=dtype)
    processed = logprobs
    if any(search._processes_logprobs for search in searches):
        processed = logprobs.clone()
        for search, rows in zip(searches, processed.view(len(searches), beams, -1), strict=True):
            if search._processes_logprobs:
                search._process_logprobs(rows)
    width = min(max(search._width for search in searches), logits.shape[1])
    best, ids = processed.topk(width)
    own = logprobs.gather(1, ids)

    # floats are transferred as bits with the ids, so that the host waits for the device once
    host = torch.stack((best.view(bits), own.view(bits), ids.to(bits))).cpu().view(3, len(searches), beams, width)
    columns = host[0].view(dtype).tolist(), host[1].view(dtype).tolist(), host[2].tolist()
    steps = [search._advance(*rows) for search, *rows in zip(searches, *columns, strict=True)]
    chosen = torch.tensor(steps, device=logits.device)  # [searches, 2, beams]
    return chosen[:, 0].flatten(), chosen[:, 1].flatten()
