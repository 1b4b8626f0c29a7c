"""Samples that are items of their own: pairs, labels, tags, conversations; those of like length share a batch."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse.data.batch import Batch
from glasshouse.data.corpus import Corpus, IdArray, Kind
from glasshouse.data.shuffle import Bucketed
from glasshouse.errors import InputError


class _BucketedDataset(ABC):
    kind: ClassVar[Kind]
    min_len: ClassVar[int] = 1  # that a row can be

    def __init__(
        self, corpus: Corpus, batch_size: int, *, max_len: int, seed: int = 0, start: int | None = None
    ) -> None:
        if corpus.kind != self.kind:
            raise InputError(f"the corpus is of kind {corpus.kind}, not {self.kind}; prepare it as {self.kind}.")
        batch_size, max_len = operator.index(batch_size), operator.index(max_len)
        if max_len < self.min_len:
            raise InputError(f"max_len is {max_len}, but a row has at least {self.min_len} ids.")
        self.corpus, self.max_len, self.batch_size = corpus, max_len, batch_size
        self.end = corpus.manifest["end"]
        if self.end is None:
            raise InputError("the tokenizer has no token that ends a text (eos or sep); choose one that has.")
        starts = (start, corpus.manifest["start"], self.end)
        self.start = next(one for one in starts if one is not None)
        lengths = self._lengths(corpus.lengths)
        self.item_indices = np.flatnonzero((lengths <= max_len).all(1))
        if batch_size < 1 or len(self.item_indices) < batch_size:
            raise InputError(
                f"batch_size is {batch_size}, but {len(self.item_indices)} items have at most {max_len} tokens; "
                "choose a smaller batch, or add items."
            )
        self.n_too_long = len(corpus) - len(self.item_indices)  # items longer than max_len
        self.order = Bucketed(lengths[self.item_indices], batch_size, seed)
        pad = corpus.tokenizer.special_id("pad")
        self.pad = 0 if pad is None else pad  # lengths say what is padding, so any id will do

    def __len__(self) -> int:
        """How many samples there are in an epoch."""
        return self.order.n

    def items(self, numbers: Sequence[int]) -> list[int]:
        """Return which item of the corpus each sample is."""
        return self.item_indices[self.order(np.asarray(numbers, np.int64))[1]].tolist()

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples with these numbers, padded at the end to the longest."""
        return self._batch(self.items(numbers))

    def origin(self, number: int) -> str:
        """Say where in the corpus a sample comes from."""
        (item,) = self.items([number])
        return f"item {item} of {self.corpus.source_name(item)}"

    @abstractmethod
    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many ids the rows of each item have, [items, rows], from those of its parts."""

    @abstractmethod
    def _batch(self, items: list[int]) -> Batch:
        """Return items of the corpus as a batch."""

    def _pad(
        self, ids: IdArray, lengths: IdArray, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Put ids that stand one after the other in rows, each between some before and some after; return lengths."""
        first, more = len(before), len(before) + len(after)
        padded = np.full((len(lengths), lengths.max() + more), self.pad, np.int64)
        inside = padded[:, first:]
        inside[np.arange(inside.shape[1]) < lengths[:, None]] = ids
        padded[:, :first] = before
        padded[np.arange(len(lengths))[:, None], lengths[:, None] + first + np.arange(len(after))] = after
        return torch.from_numpy(padded), torch.from_numpy(lengths + more)


def _real(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]


class Seq2SeqDataset(_BucketedDataset):
    r"""Sources and targets for an encoder-decoder, whose decoder reads a start token and the target.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(place, "a.tsv").write_text("source\ttarget\n1\tone\n2\ttwo\n")
    >>> tok = gh.Tokenizer.train(texts=["one two"], vocab_size=263)
    >>> samples = Pairs(gh.data.prepare(f"{place}/a.tsv", tok, f"{place}/ids", kind="pairs"), 2, max_len=8)
    >>> sorted(tok.decode(row) for row in samples.batch([0, 1]).ids)
    ['<|endoftext|>one', '<|endoftext|>two']
    """

    kind = "pairs"

    def source(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text as the encoder reads them: as `tokenizer.encode` gives them, and ended."""
        before, after = source_prefix_suffix(self.corpus)
        return [*before, *ids, *after]

    @cached_property
    def _opening(self) -> list[int]:
        """What a target begins with, after the start: published decoders also write what a tokenizer puts there."""
        before, _ = source_prefix_suffix(self.corpus)
        return [] if before == [self.start] else before

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + np.array([len(self.source(())), len(self._opening) + 1])

    def _batch(self, items: list[int]) -> Batch:
        target = self.corpus.gather(items, 1)
        source, source_lengths = self._pad(*self.corpus.gather(items, 0), *source_prefix_suffix(self.corpus))
        ids, lengths = self._pad(*target, before=[self.start, *self._opening])
        targets, _ = self._pad(*target, before=self._opening, after=[self.end])
        loss = _real(lengths, ids.shape[1])
        return Batch(ids, targets, loss, lengths=lengths, source=source, source_lengths=source_lengths)


def source_prefix_suffix(corpus: Corpus) -> tuple[list[int], list[int]]:
    """Return the ids before and after each source of a corpus: those of its tokenizer, and the end if it has none."""
    before, after = corpus.tokenizer.prefix_suffix_ids
    end = corpus.manifest["end"]
    return before, after if end in after[-1:] else [*after, end]


class ClassificationDataset(_BucketedDataset):
    """Texts between a start token and an end token, and the numbers of their labels; long ones are cut."""

    kind = "labelled"
    min_len = 2

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths[:, :1] + 2, self.max_len)

    def _batch(self, items: list[int]) -> Batch:
        texts = self.corpus.gather(items, 0, most=self.max_len - 2)
        ids, lengths = self._pad(*texts, before=[self.start], after=[self.end])
        targets = torch.from_numpy(self.corpus.gather(items, 1)[0])
        return Batch(ids, targets, torch.ones_like(targets, dtype=torch.bool), lengths=lengths)


class TokenClassificationDataset(_BucketedDataset):
    """Words between a start token and an end token, asked for a tag at the first id of each; long ones are cut.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> place = tempfile.mkdtemp()
    >>> _ = Path(place, "a.jsonl").write_text('{"words": ["I", "do"], "tags": ["who", "what"]}')
    >>> tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{place}/a.jsonl", tok, f"{place}/ids", kind="tagged")
    >>> batch = Tagged(corpus, 1, max_len=8).batch([0])
    >>> [corpus.labels[tag] for tag in batch.targets[batch.loss]], tok.decode(batch.ids[batch.loss])
    (['who', 'what'], 'I ')
    """

    kind = "tagged"
    min_len = 3

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths[:, :1] + 2, self.max_len)

    def _batch(self, items: list[int]) -> Batch:
        words, tags = (self.corpus.gather(items, part, most=self.max_len - 2) for part in (0, 1))
        ids, lengths = self._pad(*words, before=[self.start], after=[self.end])
        numbers, _ = self._pad(*tags, before=[0], after=[0])
        loss = (numbers > 0) & _real(lengths, ids.shape[1])
        return Batch(ids, torch.where(loss, numbers - 1, 0), loss, lengths=lengths)


class ChatDataset(_BucketedDataset):
    """Conversations, or prompts and their completions; only what the assistant wrote carries loss."""

    kind = "chat"

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths[:, :1] - 1

    def _batch(self, items: list[int]) -> Batch:
        both = self.corpus.gather(items, 0)
        runs, counts = self.corpus.gather(items, 1)
        place = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a run in its item
        rows, lengths = self._pad(*both)
        answers, _ = self._pad(np.repeat(place % 2, runs), both[1])
        real = _real(lengths - 1, rows.shape[1] - 1)
        ids, targets = (side.where(real, torch.tensor(self.pad)) for side in (rows[:, :-1], rows[:, 1:]))
        return Batch(ids, targets, answers[:, 1:].bool() & real, lengths=lengths - 1)
