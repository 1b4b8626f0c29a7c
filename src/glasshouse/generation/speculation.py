"""Drafts: cheap guesses at the next tokens, which the model then judges all in one pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glasshouse.errors import InputError
from glasshouse.generation.inference_model import prepare_for_inference
from glasshouse.generation.sampling import Sampler
from glasshouse.generation.slots import SequenceState, common_prefix_length
from glasshouse.generation.validation import check_count, check_length
from glasshouse.models import Decoder, Seq2Seq


@dataclass(frozen=True)
class Drafts:
    """Guesses at what each row writes next."""

    tokens: Tensor  # [n, K]
    counts: Tensor  # [n], how many of them a row has
    probabilities: Tensor | None = None  # [n, K, V] that they were drawn from; None: each was certain


class Speculator(Protocol):
    """Who makes drafts."""

    n_draft_tokens: int  # per sequence and step, at most

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Get ready for an engine."""

    def propose(self, rows: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Return drafts for rows, which stand in the first slots; None where there is none for any."""

    def move(self, old: int, new: int) -> None:
        """Follow a row to another slot."""


class PromptLookup:
    """Guess that what followed the last few tokens before will follow them again: in code, quotes and summaries."""

    def __init__(self, n_draft_tokens: int = 8, max_ngram: int = 3) -> None:
        self.n_draft_tokens = check_count("n_draft_tokens", n_draft_tokens)
        self.max_ngram = check_count("max_ngram", max_ngram)

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Nothing is needed."""

    def propose(self, rows: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Look the last tokens of each row up in what came before them."""
        found = [lookup_ngram(row.tokens, self.max_ngram, max_draft_tokens(row, self.n_draft_tokens)) for row in rows]
        width = max(map(len, found))
        if width == 0:
            return None
        tokens = torch.tensor([guess + [0] * (width - len(guess)) for guess in found], device=sampler.device)
        return Drafts(tokens, torch.tensor([len(guess) for guess in found], device=sampler.device))

    def move(self, old: int, new: int) -> None:
        """Nothing is kept by slot."""


class DraftModel:
    """Let a small model of the same vocabulary write ahead."""

    def __init__(self, model: Decoder, n_draft_tokens: int = 4) -> None:
        if not isinstance(model, Decoder):
            raise InputError(f"the draft model is a {type(model).__name__}, but it must be a decoder.")
        self.model = model
        self.n_draft_tokens = check_count("n_draft_tokens", n_draft_tokens)

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Make a cache beside the engine's, row by row."""
        if not isinstance(model, Decoder):
            raise InputError("the model is an encoder-decoder, whose source a draft model cannot read; leave it out.")
        if self.model.spec.vocab_size != model.spec.vocab_size:
            raise InputError(
                f"the draft model has a vocab_size of {self.model.spec.vocab_size}, but the model has one of "
                f"{model.spec.vocab_size}; they must be the same."
            )
        length = check_length(self.model.spec, max_len, "the engine's max_len", "the draft model")
        self._arranged = prepare_for_inference(self.model, "copy", slots)
        self._cache = self.model.make_cache(slots, length)
        self._held: list[list[int]] = [[] for _ in range(slots)]  # tokens whose keys and values are in the cache

    def propose(self, rows: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Write up to `n_draft_tokens` tokens ahead of each row, drawn as the row's options ask."""
        rooms = [max_draft_tokens(row, self.n_draft_tokens) for row in rows]
        if max(rooms) == 0:
            return None
        n = len(rows)
        self._catch_up(rows)
        ids = torch.tensor([row.tokens[-1:] for row in rows], device=sampler.device)
        drafts = ids[:, :0]
        probabilities = []
        for _ in range(max(rooms)):
            view = self._cache.narrow(slice(0, n), max(map(len, self._held[:n])) + 1)
            new, chances = sampler.sample_draft(self._arranged(ids, cache=view)[:, 0], drafts)
            for held, token in zip(self._held, ids[:, 0].tolist(), strict=False):
                held.append(token)
            ids, drafts = new[:, None], torch.cat([drafts, new[:, None]], 1)
            probabilities.append(chances)
        counts = torch.tensor(rooms, device=sampler.device)
        return Drafts(drafts, counts, torch.stack(probabilities, 1))

    def _catch_up(self, rows: Sequence[SequenceState]) -> None:
        """Read what the rows have that the cache has not, all but their last token; forget what was rejected."""
        for row, held in zip(rows, self._held, strict=False):
            del held[common_prefix_length(held, row.tokens, min(len(held), len(row.tokens) - 1)) :]
        n = len(rows)
        self._cache.lengths[:n] = torch.tensor(
            [len(held) for held in self._held[:n]], device=self._cache.lengths.device
        )
        missing = [row.tokens[len(held) : -1] for row, held in zip(rows, self._held, strict=False)]
        width = max(map(len, missing))
        if width:
            ids = torch.tensor([new + [0] * (width - len(new)) for new in missing], device=self._cache.lengths.device)
            lengths = torch.tensor([len(new) for new in missing], device=ids.device)
            view = self._cache.narrow(slice(0, n), max(len(row.tokens) for row in rows))
            self._arranged(ids, lengths=lengths, cache=view, logits_to_keep=lengths[:0])
            for held, new in zip(self._held, missing, strict=False):
                held.extend(new)

    def move(self, old: int, new: int) -> None:
        """Take what was read along."""
        self._cache.copy_row(old, new, 0, len(self._held[old]))
        self._held[new] = self._held[old][:]


def max_draft_tokens(row: SequenceState, n_draft_tokens: int) -> int:
    """Return how many drafts make sense: one token comes without any, and the row must not outgrow its limit."""
    if row.request is None or row.request.options.beams > 1:
        return 0
    return max(0, min(n_draft_tokens, row.request.limit - row.n_scheduled - 1))


def lookup_ngram(tokens: Sequence[int], max_ngram: int, n_draft_tokens: int) -> list[int]:
    """Return what followed the last time that the sequence's end, as much of it as can be found, came before.

    Where that is fewer tokens than wanted, they come round again: the sequence has repeated itself since.

    >>> lookup_ngram([1, 2, 3, 4, 5, 2, 3], max_ngram=3, n_draft_tokens=2)
    [4, 5]
    >>> lookup_ngram([1, 2, 3, 4, 5, 2, 3], max_ngram=3, n_draft_tokens=6)
    [4, 5, 2, 3, 4, 5]
    """
    if n_draft_tokens < 1:
        return []
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        end = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start] == end[0] and tokens[start : start + size] == end:
                found = tokens[start + size :]
                return [found[place % len(found)] for place in range(n_draft_tokens)]
    return []
