"""Samples of running text: rows of one length, cut from all texts as they stand one after another.

Each epoch cuts at other places. Texts that share a row do not see each other: a token that starts a text starts a new
document in its row. Where one token both ends a text and starts the next, it is counted to the next: the model learns
to say it after a text, and from it alone how a text begins.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from glasshouse.data.batch import Batch
from glasshouse.data.corpus import Corpus
from glasshouse.data.shuffle import Shuffled, checked_seed, random_below
from glasshouse.errors import InputError

MLM_PROBABILITY = 0.15  # of all tokens are asked for;
MASK_REPLACE_PROB, RANDOM_REPLACE_PROB = (
    0.8,
    0.1,
)  # of those, so many are a mask and another token; the rest stay as they are


class CausalLMDataset:
    """Rows of `length` ids, each id with the one after it as its target; `isolate` numbers the documents of a row.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> place = tempfile.mkdtemp()
    >>> for name in ("one", "two"):
    ...     _ = Path(f"{place}/{name}.txt").write_text("to be or not")
    >>> samples = CausalLMDataset(gh.data.prepare(place, tok, f"{place}/corpus"), length=13)
    >>> samples.batch([0]).documents.tolist()
    [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    """

    def __init__(self, corpus: Corpus, seq_len: int, *, seed: int = 0, mask_documents: bool = True) -> None:
        if corpus.kind != "text":
            raise InputError(f"the corpus is of kind {corpus.kind}, but rows are cut from text; prepare it as text.")
        if (seq_len := operator.index(seq_len)) < 1:
            raise InputError(f"length is {seq_len}, but a row has at least 1 id.")
        if corpus.n_tokens <= seq_len:
            raise InputError(
                f"the corpus has {corpus.n_tokens} tokens, but a row of {seq_len} and the token after it need "
                f"{seq_len + 1}; add text, or choose shorter rows."
            )
        self.corpus, self.length, self.seed, self.isolate = corpus, seq_len, checked_seed(seed), mask_documents
        self.start, self.end = corpus.manifest["start"], corpus.manifest["end"]
        self.border = self.end if self.start is None else self.start
        self.order = Shuffled(corpus.n_tokens // seq_len, seed)

    def __len__(self) -> int:
        """How many samples there are in an epoch."""
        return self.order.n

    def offsets(self, numbers: Sequence[int]) -> list[int]:
        """Return where in the corpus each sample begins."""
        epochs, items = self.order(np.asarray(numbers, np.int64))
        shifts = [random_below(self.length, self.seed, epoch) if epoch else 0 for epoch in epochs.tolist()]
        return [
            (item * self.length + shift) % self.corpus.n_tokens
            for item, shift in zip(items.tolist(), shifts, strict=True)
        ]

    def token_blocks(self, numbers: Sequence[int]) -> NDArray[np.int64]:
        """Return the ids of samples, and one more of each, [n, length + 1]; after the last text comes the first."""
        wanted, tokens = self.length + 1, self.corpus.n_tokens
        rows = np.empty((len(numbers), wanted), np.int64)
        for row, place in zip(rows, self.offsets(numbers), strict=True):
            before_the_end = self.corpus.read(place, min(place + wanted, tokens))
            row[: len(before_the_end)] = before_the_end
            row[len(before_the_end) :] = self.corpus.read(0, wanted - len(before_the_end))
        return rows

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples with these numbers."""
        rows = torch.from_numpy(self.token_blocks(numbers))
        ids, targets = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        loss = torch.ones_like(targets, dtype=torch.bool)
        if self.isolate and self.start not in (None, self.end):
            loss = targets != self.start  # no text says how the next begins
        return Batch(ids, targets, loss, self._documents(ids))

    def _documents(self, ids: torch.Tensor) -> torch.Tensor | None:
        borders = ids == self.border
        # Rows of one document each need no mask to keep documents apart, and attention without one is faster.
        return borders.cumsum(1) if self.isolate and borders[:, 1:].any() else None

    def origin(self, number: int) -> str:
        """Say where in the corpus a sample comes from."""
        (place,) = self.offsets([number])
        first, last = (self.corpus.item_at(at % self.corpus.n_tokens) for at in (place, place + self.length - 1))
        texts = f"text {first}" if first == last else f"texts {first} to {last}"
        return f"{texts}, ids {place:,} to {(place + self.length - 1) % self.corpus.n_tokens:,}"


class MaskedLMDataset:
    """Rows of text of which some ids are hidden and asked for, drawn from the seed and the sample's number.

    Of all ids but the special ones, 15% are asked for in expectation, and at least one in each row; of those 80% are
    shown as the mask, 10% as another id, and the rest as they are.
    """

    def __init__(
        self,
        corpus: Corpus,
        seq_len: int,
        *,
        seed: int = 0,
        mask_documents: bool = True,
        mlm_probability: float = MLM_PROBABILITY,
    ) -> None:
        mask = corpus.tokenizer.special_id("mask")
        if mask is None:
            raise InputError("the tokenizer has no mask token; train one with the special token 'mask'.")
        if not 0 < mlm_probability <= 1:
            raise InputError(f"rate is {mlm_probability}, but it must be above 0 and at most 1.")
        self.text = CausalLMDataset(corpus, seq_len, seed=seed, mask_documents=mask_documents)
        self.mask, self.rate, self.seed = mask, mlm_probability, self.text.seed
        self.special = np.array(sorted(corpus.tokenizer.special_ids), np.int64)
        self.ordinary = np.array(sorted(set(corpus.tokenizer.ids) - corpus.tokenizer.special_ids), np.int64)

    def __len__(self) -> int:
        """How many samples there are in an epoch."""
        return len(self.text)

    def batch(self, numbers: Sequence[int]) -> Batch:
        """Return the samples with these numbers."""
        targets = self.text.token_blocks(numbers)[:, :-1]
        ids, asked = targets.copy(), np.zeros(targets.shape, bool)
        for row, where, number in zip(ids, asked, numbers, strict=True):
            draws = np.random.Generator(np.random.Philox(key=[self.seed, number]))
            candidates = np.flatnonzero(~np.isin(row, self.special))
            if not len(candidates):
                continue
            # Rounded up as often as the fraction says, so that the mean is the rate at every length.
            count = max(1, int(self.rate * len(candidates) + draws.random()))
            chosen = draws.permutation(candidates)[:count]
            fate = draws.random(len(chosen))
            others = draws.choice(self.ordinary, len(chosen))
            row[chosen] = np.where(
                fate < MASK_REPLACE_PROB,
                self.mask,
                np.where(fate < MASK_REPLACE_PROB + RANDOM_REPLACE_PROB, others, row[chosen]),
            )
            where[chosen] = True
        original = torch.from_numpy(targets.copy())
        return Batch(torch.from_numpy(ids), original, torch.from_numpy(asked), self.text._documents(original))

    def origin(self, number: int) -> str:
        """Say where in the corpus a sample comes from."""
        return self.text.origin(number)
