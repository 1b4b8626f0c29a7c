"""Speculative decoding: cheap draft tokens, which the model verifies in one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from glasshouse.errors import InputError, check_count
from glasshouse.generation.engine.inference_model import prepare_for_inference
from glasshouse.generation.engine.slots import SequenceState, common_prefix_length
from glasshouse.generation.sampling.logits_kernels import argmax
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.models import Decoder, Seq2Seq
from glasshouse.models.checks import check_length
from glasshouse.models.heads import LMHead


@dataclass(frozen=True)
class Drafts:
    """Draft tokens of each sequence."""

    tokens: Tensor  # [n, K]
    counts: Tensor  # [n], drafts of each sequence
    probabilities: Tensor | None = None  # [n, K, V], the draft distributions; None: each draft was certain


class Speculator(Protocol):
    """A source of draft tokens."""

    n_draft_tokens: int  # per sequence and step, at most

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Prepare for an engine, which runs this copy of its model."""

    def propose(self, seqs: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Return drafts for the sequences in the first slots; None if there are none."""

    def move(self, old: int, new: int) -> None:
        """Follow a sequence to another slot."""


@dataclass
class SpeculationStats:
    """How far drafts were accepted, over all sequences and forward passes in which they decoded with a speculator.

    >>> stats = SpeculationStats()
    >>> stats.add(kept=[3, 1], written=[4, 4])  # three drafts each, of which two and none were accepted
    >>> stats.tokens_per_pass, round(stats.acceptance_rate, 3)
    (2.0, 0.333)
    """

    n_passes: int = 0  # one for each sequence that takes part in a forward pass
    n_tokens: int = 0
    n_drafts: int = 0

    def add(self, kept: Sequence[int], written: Sequence[int]) -> None:
        """Count a pass, after which each sequence has kept some of the tokens that were written to its cache."""
        self.n_passes += len(kept)
        self.n_tokens += sum(kept)
        self.n_drafts += sum(written) - len(written)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per sequence and pass: 1 without drafts."""
        return self.n_tokens / self.n_passes if self.n_passes else 1.0

    @property
    def acceptance_rate(self) -> float:
        """The fraction of drafts that were accepted."""
        return (self.n_tokens - self.n_passes) / max(1, self.n_drafts)


class PromptLookup:
    """Prompt lookup decoding: propose what followed the last n-gram earlier in the sequence."""

    def __init__(self, n_draft_tokens: int = 8, max_ngram: int = 3) -> None:
        self.n_draft_tokens = check_count("n_draft_tokens", n_draft_tokens)
        self.max_ngram = check_count("max_ngram", max_ngram)

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Do nothing: there is no state."""

    def propose(self, seqs: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Look up the last tokens of each sequence in the tokens before them."""
        found = [lookup_ngram(seq.tokens, self.max_ngram, max_draft_tokens(seq, self.n_draft_tokens)) for seq in seqs]
        width = max(map(len, found))
        if width == 0:
            return None
        tokens = torch.tensor([guess + [0] * (width - len(guess)) for guess in found], device=sampler.slots.device)
        return Drafts(tokens, torch.tensor([len(guess) for guess in found], device=sampler.slots.device))

    def move(self, old: int, new: int) -> None:
        """Do nothing: there is no state per slot."""


class DraftModel:
    """A small draft model with the same vocabulary."""

    def __init__(self, model: Decoder, n_draft_tokens: int = 4) -> None:
        if not isinstance(model, Decoder):
            raise InputError(f"the draft model is a {type(model).__name__}, but it must be a decoder.")
        self.model = model
        self.n_draft_tokens = check_count("n_draft_tokens", n_draft_tokens)

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Make a cache with the engine's slots."""
        if not isinstance(model, Decoder):
            raise InputError(
                "the model is an encoder-decoder, for which draft models are not supported; leave it out."
            )
        if self.model.spec.vocab_size != model.spec.vocab_size:
            raise InputError(
                f"the draft model has a vocab_size of {self.model.spec.vocab_size}, but the model has "
                f"{model.spec.vocab_size}; they must be the same."
            )
        length = check_length(self.model.spec, max_len, "the engine's max_len", "the draft model")
        self._model = prepare_for_inference(self.model, "copy", slots)
        self._cache = self.model.make_cache(slots, length)
        self._cached: list[list[int]] = [[] for _ in range(slots)]  # tokens whose keys and values are in the cache

    def propose(self, seqs: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Sample up to `n_draft_tokens` draft tokens per sequence, with the request's sampling parameters."""
        limits = [max_draft_tokens(seq, self.n_draft_tokens) for seq in seqs]
        if max(limits) == 0:
            return None
        n = len(seqs)
        self._catch_up(seqs)
        ids = torch.tensor([seq.tokens[-1:] for seq in seqs], device=sampler.slots.device)
        drafts = ids[:, :0]
        probabilities = []
        for _ in range(max(limits)):
            view = self._cache.narrow(slice(0, n), max(map(len, self._cached[:n])) + 1)
            new, probs = sampler.sample_draft(self._model(ids, cache=view)[:, 0], drafts)
            for cached, token in zip(self._cached, ids[:, 0].tolist(), strict=False):
                cached.append(token)
            ids, drafts = new[:, None], torch.cat([drafts, new[:, None]], 1)
            probabilities.append(probs)
        counts = torch.tensor(limits, device=sampler.slots.device)
        return Drafts(drafts, counts, torch.stack(probabilities, 1))

    def _catch_up(self, seqs: Sequence[SequenceState]) -> None:
        """Prefill the tokens that the draft cache lacks, all but each sequence's last; drop rejected drafts."""
        for seq, cached in zip(seqs, self._cached, strict=False):
            del cached[common_prefix_length(cached, seq.tokens, min(len(cached), len(seq.tokens) - 1)) :]
        n = len(seqs)
        self._cache.lengths[:n] = torch.tensor(
            [len(cached) for cached in self._cached[:n]], device=self._cache.lengths.device
        )
        missing = [seq.tokens[len(cached) : -1] for seq, cached in zip(seqs, self._cached, strict=False)]
        width = max(map(len, missing))
        if width:
            ids = torch.tensor([new + [0] * (width - len(new)) for new in missing], device=self._cache.lengths.device)
            lengths = torch.tensor([len(new) for new in missing], device=ids.device)
            view = self._cache.narrow(slice(0, n), max(len(seq.tokens) for seq in seqs))
            self._model(ids, lengths=lengths, cache=view, logits_to_keep=lengths[:0])
            for cached, new in zip(self._cached, missing, strict=False):
                cached.extend(new)

    def move(self, old: int, new: int) -> None:
        """Copy the draft cache."""
        self._cache.copy_row(old, new, 0, len(self._cached[old]))
        self._cached[new] = self._cached[old][:]


class DraftHeads:
    """Self-speculative decoding: drafts from the model's own heads, as multi-token prediction trains them.

    They read the hidden state from which the last token was sampled, so drafts cost no pass of their own.
    """

    def __init__(self, model: Decoder) -> None:
        drafts = model.head.drafts if isinstance(model, Decoder) and isinstance(model.head, LMHead) else None
        if drafts is None:
            raise InputError(
                'the model has no draft heads; train them with train.objective = { kind = "multi_token" }, or use '
                "another speculator."
            )
        self.spec, self.drafts, self.n_draft_tokens = model.spec, drafts, len(drafts)

    def setup(self, model: Decoder | Seq2Seq, slots: int, max_len: int) -> None:
        """Keep what the head is given in each forward pass of the engine's copy of the model."""
        if model.spec != self.spec:
            raise InputError("the draft heads belong to another model; make them from the model of the engine.")
        self._model = model
        self._hidden: Tensor | None = None  # of the last pass, [n, T, D]
        self._seqs: dict[SequenceState, tuple[int, int]] = {}  # row there, and tokens cached before
        model.head.register_forward_pre_hook(self._keep)

    def _keep(self, head: object, inputs: tuple[Tensor, ...]) -> None:
        if inputs[0].shape[1]:  # in prefill, the head is given nothing
            self._hidden = inputs[0]

    def propose(self, seqs: Sequence[SequenceState], sampler: Sampler) -> Drafts | None:
        """Draft what each head finds most likely; a sequence has none in its first pass."""
        before, self._seqs = self._seqs, {seq: (row, seq.n_cached) for row, seq in enumerate(seqs)}
        limits = [max_draft_tokens(seq, self.n_draft_tokens) if seq in before else 0 for seq in seqs]
        device, width = sampler.slots.device, max(limits)
        if width == 0:  # and yet not None: CUDA graphs, which bypass the hook, decode without drafts
            return Drafts(
                torch.zeros(len(seqs), 0, dtype=torch.long, device=device), torch.tensor(limits, device=device)
            )
        found = [before.get(seq, (0, seq.n_cached - 1)) for seq in seqs]
        rows = torch.tensor([row for row, _ in found], device=device)
        last = torch.tensor(
            [seq.n_cached - start - 1 for seq, (_, start) in zip(seqs, found, strict=True)], device=device
        )
        assert self._hidden is not None
        x = self._hidden[rows, last]
        x = torch.stack([draft(x) for draft in self.drafts[:width]], 1)
        # Not called as a module, which would call the hook.
        logits = self._model.head.forward(x, None, self._model.token_embedding.table.weight)
        return Drafts(argmax(logits), torch.tensor(limits, device=device))

    def move(self, old: int, new: int) -> None:
        """Do nothing: sequences are known by themselves, not by their slots."""


def max_draft_tokens(seq: SequenceState, n_draft_tokens: int) -> int:
    """Return how many drafts are useful: one token comes without any, and the length limit must hold."""
    if seq.request.options.beams > 1:
        return 0
    return max(0, min(n_draft_tokens, seq.request.limit - seq.n_generated - 1))


def lookup_ngram(tokens: Sequence[int], max_ngram: int, n_draft_tokens: int) -> list[int]:
    """Return what followed the latest earlier occurrence of the longest n-gram at the end of the sequence.

    Where fewer tokens followed than `n_draft_tokens`, they are repeated: the sequence has been repeating itself.

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
                return [found[i % len(found)] for i in range(n_draft_tokens)]
    return []
