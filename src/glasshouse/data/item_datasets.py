"""Datasets whose samples are whole items, such as pairs and conversations; batches are bucketed by length."""

from __future__ import annotations

import hashlib
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from glasshouse.data.batch import Batch, PairBatch, PreferenceBatch
from glasshouse.data.corpus import Corpus, IdArray, Kind
from glasshouse.data.shuffle import Bucketed
from glasshouse.errors import InputError


class BucketedDataset(ABC):
    """Base class: items of one kind, in batches of similar length."""

    kind: ClassVar[Kind]
    min_len: ClassVar[int] = 1  # smallest max_len that makes sense

    def __init__(
        self, corpus: Corpus, batch_size: int, *, max_len: int, seed: int = 0, start: int | None = None
    ) -> None:
        if corpus.kind != self.kind:
            raise InputError(f"the corpus is of kind {corpus.kind}, not {self.kind}; prepare it as {self.kind}.")
        batch_size, max_len = operator.index(batch_size), operator.index(max_len)
        if max_len < self.min_len:
            raise InputError(f"max_len is {max_len}, but a sequence has at least {self.min_len} ids.")
        self.corpus, self.max_len, self.batch_size = corpus, max_len, batch_size
        self.end = corpus.manifest["end_id"]
        if self.end is None:
            raise InputError("the tokenizer has no end token (eos or sep); choose one that has.")
        starts = (start, corpus.manifest["start_id"], self.end)
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
        self.pad = 0 if pad is None else pad  # padding is masked by lengths, so any id will do

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self.order.n

    def items(self, indices: Sequence[int]) -> list[int]:
        """Return the item of the corpus that each sample is."""
        return self.item_indices[self.order(np.asarray(indices, np.int64))[1]].tolist()

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices, padded on the right to the longest."""
        return self._batch(self.items(indices))

    def origin(self, index: int) -> str:
        """Describe where in the corpus a sample comes from."""
        (item,) = self.items([index])
        return f"item {item} of {self.corpus.source_name(item)}"

    @abstractmethod
    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequence lengths of each item, [items, sequences], from the lengths of its arrays."""

    @abstractmethod
    def _batch(self, items: list[int]) -> Batch:
        """Return items of the corpus as a batch."""

    def _pad(
        self, ids: IdArray, lengths: IdArray, before: Sequence[int] = (), after: Sequence[int] = ()
    ) -> tuple[Tensor, Tensor]:
        """Pad concatenated ids to one width, with ids added before and after each; return them and their lengths."""
        first, more = len(before), len(before) + len(after)
        padded = np.full((len(lengths), lengths.max() + more), self.pad, np.int64)
        inside = padded[:, first:]
        inside[np.arange(inside.shape[1]) < lengths[:, None]] = ids
        padded[:, :first] = before
        padded[np.arange(len(lengths))[:, None], lengths[:, None] + first + np.arange(len(after))] = after
        return torch.from_numpy(padded), torch.from_numpy(lengths + more)


def _length_mask(lengths: Tensor, width: int) -> Tensor:
    return torch.arange(width) < lengths[:, None]


class Seq2SeqDataset(BucketedDataset):
    r"""Sources and targets for an encoder-decoder; the decoder's input is a start token and the target.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(folder, "a.tsv").write_text("source\ttarget\n1\tone\n2\ttwo\n")
    >>> tok = gh.Tokenizer.train(texts=["one two"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{folder}/a.tsv", tok, f"{folder}/ids", kind="pairs")
    >>> dataset = Seq2SeqDataset(corpus, 2, max_len=8)
    >>> sorted(tok.decode(ids) for ids in dataset.batch([0, 1]).ids)
    ['<|endoftext|>one', '<|endoftext|>two']
    """

    kind = "pairs"

    def source(self, ids: Sequence[int]) -> list[int]:
        """Return the encoder's input for a text: as `tokenizer.encode` gives it, with an end token."""
        before, after = source_prefix_suffix(self.corpus)
        return [*before, *ids, *after]

    @cached_property
    def _opening(self) -> list[int]:
        """The prefix of a target after the start token: pretrained decoders also generate the tokenizer's prefix."""
        before, _ = source_prefix_suffix(self.corpus)
        return [] if before == [self.start] else before

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + np.array([len(self.source(())), len(self._opening) + 1])

    def _batch(self, items: list[int]) -> Batch:
        target = self.corpus.gather(items, 1)
        source, source_lengths = self._pad(*self.corpus.gather(items, 0), *source_prefix_suffix(self.corpus))
        ids, lengths = self._pad(*target, before=[self.start, *self._opening])
        targets, _ = self._pad(*target, before=self._opening, after=[self.end])
        loss_mask = _length_mask(lengths, ids.shape[1])
        return Batch(ids, targets, loss_mask, lengths=lengths, source=source, source_lengths=source_lengths)


def source_prefix_suffix(corpus: Corpus) -> tuple[list[int], list[int]]:
    """Return the special ids before and after each source: as the tokenizer adds them, and always an end token."""
    before, after = corpus.tokenizer.prefix_suffix_ids
    end = corpus.manifest["end_id"]
    return before, after if end in after[-1:] else [*after, end]


class ContrastiveDataset(BucketedDataset):
    r"""Pairs of texts for an encoder that embeds them, each as `tokenizer.encode` gives it.

    >>> import tempfile, glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["sold bought"], vocab_size=263)
    >>> corpus = gh.data.prepare("paraphrases", tok, tempfile.mkdtemp(), split="test")
    >>> batch = ContrastiveDataset(corpus, 8, max_len=128).batch(range(8))
    >>> len(batch), len(batch.ids)
    (8, 16)
    """

    kind = "pairs"

    def __init__(self, corpus: Corpus, batch_size: int, *, max_len: int, seed: int = 0) -> None:
        super().__init__(corpus, batch_size, max_len=max_len, seed=seed)
        if len(empty := np.flatnonzero((corpus.lengths == 0).any(1))):
            raise InputError(
                f"item {empty[0]} of {corpus.source_name(int(empty[0]))} has an empty text, which has nothing to "
                "embed; remove it."
            )

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths + sum(map(len, self.corpus.tokenizer.prefix_suffix_ids))

    def _batch(self, items: list[int]) -> Batch:
        texts = [part for item in items for part in self.corpus.item(item)]
        ids, lengths = self._pad(
            np.concatenate(texts), np.array(list(map(len, texts))), *self.corpus.tokenizer.prefix_suffix_ids
        )
        numbers = [
            int.from_bytes(hashlib.blake2b(text.tobytes(), digest_size=8).digest(), "big", signed=True)
            for text in texts
        ]
        targets = torch.tensor(numbers).view(-1, 2)
        return PairBatch(ids, targets, torch.ones(len(items), dtype=torch.bool), lengths=lengths)


class ClassificationDataset(BucketedDataset):
    """Sequence classification: texts and label ids; long texts are truncated.

    A text stands between a start and an end token, or between `ends`, the ids before it and those after it.
    """

    kind = "labelled"
    min_len = 2

    def __init__(
        self,
        corpus: Corpus,
        batch_size: int,
        *,
        max_len: int,
        seed: int = 0,
        ends: tuple[list[int], list[int]] | None = None,
    ) -> None:
        self._given = ends
        super().__init__(corpus, batch_size, max_len=max_len, seed=seed)

    @cached_property
    def ends(self) -> tuple[list[int], list[int]]:
        """The ids before a text and those after it."""
        return self._given or ([self.start], [self.end])

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        added = sum(map(len, self.ends))
        if added == 0 and not lengths[:, 0].all():
            item = int((lengths[:, 0] == 0).nonzero()[0][0])
            raise InputError(
                f"item {item} of {self.corpus.source_name(item)} is an empty text, which has no tokens; remove it."
            )
        return np.minimum(lengths[:, :1] + added, self.max_len)

    def _batch(self, items: list[int]) -> Batch:
        before, after = self.ends
        texts = self.corpus.gather(items, 0, max_len=self.max_len - len(before) - len(after))
        ids, lengths = self._pad(*texts, before=before, after=after)
        targets = torch.from_numpy(self.corpus.gather(items, 1)[0])
        return Batch(ids, targets, torch.ones_like(targets, dtype=torch.bool), lengths=lengths)


class TokenClassificationDataset(BucketedDataset):
    """Token classification: words between a start and an end token, tagged at the first id of each; truncated.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(folder, "a.jsonl").write_text('{"words": ["I", "do"], "tags": ["who", "what"]}')
    >>> tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    >>> corpus = gh.data.prepare(f"{folder}/a.jsonl", tok, f"{folder}/ids", kind="tagged")
    >>> batch = TokenClassificationDataset(corpus, 1, max_len=8).batch([0])
    >>> mask = batch.loss_mask
    >>> [corpus.labels[tag] for tag in batch.targets[mask]], tok.decode(batch.ids[mask])
    (['who', 'what'], 'I ')
    """

    kind = "tagged"
    min_len = 3

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.minimum(lengths[:, :1] + 2, self.max_len)

    def _batch(self, items: list[int]) -> Batch:
        words, tags = (self.corpus.gather(items, array, max_len=self.max_len - 2) for array in (0, 1))
        ids, lengths = self._pad(*words, before=[self.start], after=[self.end])
        tag_ids, _ = self._pad(*tags, before=[0], after=[0])
        loss_mask = (tag_ids > 0) & _length_mask(lengths, ids.shape[1])
        return Batch(ids, torch.where(loss_mask, tag_ids - 1, 0), loss_mask, lengths=lengths)


class ChatDataset(BucketedDataset):
    """Conversations, or prompts and completions; the loss is computed on assistant turns only."""

    kind = "chat"

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths[:, :1] - 1

    def _batch(self, items: list[int]) -> Batch:
        gathered = self.corpus.gather(items, 0)
        runs, counts = self.corpus.gather(items, 1)
        run_index = np.arange(len(runs)) - np.repeat(np.cumsum(counts) - counts, counts)  # within its item
        tokens, lengths = self._pad(*gathered)
        assistant_mask, _ = self._pad(np.repeat(run_index % 2, runs), gathered[1])
        mask = _length_mask(lengths - 1, tokens.shape[1] - 1)
        ids, targets = (side.where(mask, torch.tensor(self.pad)) for side in (tokens[:, :-1], tokens[:, 1:]))
        return Batch(ids, targets, assistant_mask[:, 1:].bool() & mask, lengths=lengths - 1)


class PreferenceDataset(BucketedDataset):
    r"""Prompts with two answers each, of which the first is preferred; both sequences must fit.

    >>> import json, tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> folder = tempfile.mkdtemp()
    >>> pair = {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}
    >>> _ = Path(folder, "a.jsonl").write_text(json.dumps(pair))
    >>> tok = gh.Tokenizer.train(texts=["x"], vocab_size=257, special_tokens={"eos": "<|endoftext|>"})
    >>> corpus = gh.data.prepare(f"{folder}/a.jsonl", tok, f"{folder}/ids", kind="preferences")
    >>> batch = PreferenceDataset(corpus, 1, max_len=16).batch([0])
    >>> [tok.decode(row[mask]) for row, mask in zip(batch.answers, batch.answer_mask)]
    [' 4<|endoftext|>', ' 5<|endoftext|>']
    """

    kind = "preferences"

    def _lengths(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        return lengths[:, :1] + lengths[:, 1:] - 1

    def _batch(self, items: list[int]) -> PreferenceBatch:
        rows: list[IdArray] = []
        starts: list[int] = []  # of the answers
        for item in items:
            prompt, *answers = self.corpus.item(item)
            rows += [np.concatenate([prompt, answer]) for answer in answers]
            starts += [len(prompt)] * len(answers)
        tokens, lengths = self._pad(np.concatenate(rows), np.array([len(row) for row in rows]))
        mask = _length_mask(lengths - 1, tokens.shape[1] - 1)
        ids, answers_ = (side.where(mask, torch.tensor(self.pad)) for side in (tokens[:, :-1], tokens[:, 1:]))
        in_answer = torch.arange(ids.shape[1]) >= torch.tensor(starts)[:, None] - 1
        pairs = torch.zeros(len(items), dtype=torch.long)  # the first of two is preferred
        return PreferenceBatch(
            ids, pairs, pairs == 0, lengths=lengths - 1, answers=answers_, answer_mask=in_answer & mask
        )
