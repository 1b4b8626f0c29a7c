"""Samples that are items of their own: pairs, labelled texts, conversations; those of like length share a batch."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse.data.batch import Batch
from glasshouse.data.corpus import Corpus, Kind
from glasshouse.data.order import Bucketed
from glasshouse.errors import InputError

Row = NDArray[np.int64]


class _Items(ABC):
    kind: ClassVar[Kind]
    shortest: ClassVar[int] = 1  # that a row can be

    def __init__(self, corpus: Corpus, batch_size: int, *, max_len: int, seed: int = 0) -> None:
        if corpus.kind != self.kind:
            raise InputError(f"the corpus is of kind {corpus.kind}, not {self.kind}; prepare it as {self.kind}.")
        batch_size, max_len = operator.index(batch_size), operator.index(max_len)
        if max_len < self.shortest:
            raise InputError(f"max_len is {max_len}, but a row has at least {self.shortest} ids.")
        self.corpus, self.max_len, self.batch_size = corpus, max_len, batch_size
        lengths = self._lengths(corpus.lengths)
        self.kept = np.flatnonzero((lengths <= max_len).all(1))
        if batch_size < 1 or len(self.kept) < batch_size:
            raise InputError(
                f"batch_size is {batch_size}, but {len(self.kept)} items have at most {max_len} tokens; "
                "choose a smaller batch, or add items."
            )
        self.left_out = len(corpus) - len(self.kept)  # items longer than max_len
        self.order = Bucketed(lengths[self.kept], batch_size, seed)
        pad = corpus.tokenizer.special_id("pad")
        self.pad = 0 if pad is None else pad  # lengths say what is padding, so any id will do
        self.end = corpus.manifest["end"]
        if self.end is None:
            raise InputError("the tokenizer has no token that ends a text (eos or sep); choose one that has.")
        self.start = self.end if corpus.manifest["start"] is None else corpus.manifest["start"]

    def __len__(self) -> int:
        """How many samples there are in an epoch."""
        return self.order.n

    def items(self, numbers: Sequence[int]) -> list[int]:
        """Return which item of the corpus each sample is."""
        return self.kept[self.order(np.asarray(numbers, np.int64))[1]].tolist()

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples with these numbers, padded at the end to the longest."""
        return self._batch([self.corpus.item(item) for item in self.items(numbers)])

    def origin(self, number: int) -> str:
        """Say where in the corpus a sample comes from."""
        (item,) = self.items([number])
        return f"item {item} of {self.corpus.source(item)}"

    @abstractmethod
    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many ids the rows of each item have, [items, rows], from those of its parts."""

    @abstractmethod
    def _batch(self, items: list[tuple[Row, ...]]) -> Batch:
        """Return items as a batch."""

    def _pad(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.full((len(rows), int(lengths.max())), self.pad)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row)] = torch.as_tensor(row)
        return padded, lengths


def _real(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]


class Pairs(_Items):
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

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + 1

    def _batch(self, items: list[tuple[Row, ...]]) -> Batch:
        source, source_lengths = self._pad([np.append(source, self.end) for source, _ in items])
        ids, lengths = self._pad([np.insert(target, 0, self.start) for _, target in items])
        targets, _ = self._pad([np.append(target, self.end) for _, target in items])
        loss = _real(lengths, ids.shape[1])
        return Batch(ids, targets, loss, lengths=lengths, source=source, source_lengths=source_lengths)


class Labelled(_Items):
    """Texts between a start token and an end token, and the numbers of their labels; long ones are cut."""

    kind = "labelled"
    shortest = 2

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths[:, :1] + 2, self.max_len)

    def _batch(self, items: list[tuple[Row, ...]]) -> Batch:
        rows = [np.concatenate(([self.start], text[: self.max_len - 2], [self.end])) for text, _ in items]
        ids, lengths = self._pad(rows)
        targets = torch.tensor([int(label[0]) for _, label in items])
        return Batch(ids, targets, torch.ones_like(targets, dtype=torch.bool), lengths=lengths)


class Conversations(_Items):
    """Conversations, or prompts and their completions; only what the assistant wrote carries loss."""

    kind = "chat"

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths[:, :1] - 1

    def _batch(self, items: list[tuple[Row, ...]]) -> Batch:
        ids, lengths = self._pad([ids[:-1] for ids, _ in items])
        targets, _ = self._pad([ids[1:] for ids, _ in items])
        answers = [np.repeat(np.arange(len(runs)) % 2, runs)[1:] for _, runs in items]
        loss = self._pad(answers)[0].bool() & _real(lengths, ids.shape[1])
        return Batch(ids, targets, loss, lengths=lengths)
