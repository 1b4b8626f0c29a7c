"""Datasets of packed text: sequences of one length, cut from the concatenated documents (sequence packing).

Each epoch cuts at other offsets. Documents in one sequence do not attend to each other: a start token starts a new
document. A token that both ends a document and starts the next belongs to the next: the model learns to predict it
after a document, and from it alone how a document begins.
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

MLM_PROBABILITY = 0.15  # fraction of tokens to predict
MASK_REPLACE_PROB, RANDOM_REPLACE_PROB = 0.8, 0.1  # of those, replaced by the mask or a random token; others stay


class CausalLMDataset:
    """Causal language modelling: sequences of `seq_len` ids, whose targets are the next ids.

    With `mask_documents`, documents packed into one sequence do not attend to each other.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> folder = tempfile.mkdtemp()
    >>> for name in ("one", "two"):
    ...     _ = Path(f"{folder}/{name}.txt").write_text("to be or not")
    >>> dataset = CausalLMDataset(gh.data.prepare(folder, tok, f"{folder}/corpus"), seq_len=13)
    >>> dataset.batch([0]).documents.tolist()
    [[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]]
    """

    def __init__(self, corpus: Corpus, seq_len: int, *, seed: int = 0, mask_documents: bool = True) -> None:
        if corpus.kind != "text":
            raise InputError(f"the corpus is of kind {corpus.kind}, not text; prepare it as text.")
        if (seq_len := operator.index(seq_len)) < 1:
            raise InputError(f"seq_len is {seq_len}, but it must be at least 1.")
        if corpus.n_tokens <= seq_len:
            raise InputError(
                f"the corpus has {corpus.n_tokens} tokens, but a sequence of {seq_len} and its last target need "
                f"{seq_len + 1}; add text, or lower seq_len."
            )
        self.corpus, self.seq_len, self.seed = corpus, seq_len, checked_seed(seed)
        self.mask_documents = mask_documents
        self.start, self.end = corpus.manifest["start_id"], corpus.manifest["end_id"]
        self.boundary = self.end if self.start is None else self.start
        self.order = Shuffled(corpus.n_tokens // seq_len, seed)

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return self.order.n

    def offsets(self, indices: Sequence[int]) -> list[int]:
        """Return the offset of each sample in the corpus."""
        epochs, items = self.order(np.asarray(indices, np.int64))
        shifts = [random_below(self.seq_len, self.seed, epoch) if epoch else 0 for epoch in epochs.tolist()]
        return [
            (item * self.seq_len + shift) % self.corpus.n_tokens
            for item, shift in zip(items.tolist(), shifts, strict=True)
        ]

    def token_blocks(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return the ids of samples with the last target, [n, seq_len + 1]; the corpus wraps around."""
        width, tokens = self.seq_len + 1, self.corpus.n_tokens
        blocks = np.empty((len(indices), width), np.int64)
        for block, offset in zip(blocks, self.offsets(indices), strict=True):
            before_the_end = self.corpus.read(offset, min(offset + width, tokens))
            block[: len(before_the_end)] = before_the_end
            block[len(before_the_end) :] = self.corpus.read(0, width - len(before_the_end))
        return blocks

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices."""
        blocks = torch.from_numpy(self.token_blocks(indices))
        ids, targets = blocks[:, :-1].contiguous(), blocks[:, 1:].contiguous()
        loss_mask = torch.ones_like(targets, dtype=torch.bool)
        if self.mask_documents and self.start not in (None, self.end):
            loss_mask = targets != self.start  # a document does not predict how the next begins
        return Batch(ids, targets, loss_mask, self._documents(ids))

    def _documents(self, ids: torch.Tensor) -> torch.Tensor | None:
        starts = ids == self.boundary
        # Sequences of one document each need no document mask, and attention without one is faster.
        return starts.cumsum(1) if self.mask_documents and starts[:, 1:].any() else None

    def origin(self, index: int) -> str:
        """Describe where in the corpus a sample comes from."""
        (offset,) = self.offsets([index])
        first, last = (self.corpus.item_at(at % self.corpus.n_tokens) for at in (offset, offset + self.seq_len - 1))
        texts = f"text {first}" if first == last else f"texts {first} to {last}"
        return f"{texts}, ids {offset:,} to {(offset + self.seq_len - 1) % self.corpus.n_tokens:,}"


class MaskedLMDataset:
    """Masked language modelling: some ids are masked and predicted, chosen by the seed and the sample index.

    Of all ids but special ones, 15% on average are predicted, and at least one per sequence; of those, 80% are
    replaced by the mask token, 10% by a random id, and the rest are unchanged.
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
            raise InputError(f"mlm_probability is {mlm_probability}, but it must be above 0 and at most 1.")
        self.text = CausalLMDataset(corpus, seq_len, seed=seed, mask_documents=mask_documents)
        self.mask, self.mlm_probability, self.seed = mask, mlm_probability, self.text.seed
        self.special = np.array(sorted(corpus.tokenizer.special_ids), np.int64)
        self.ordinary = np.array(sorted(set(corpus.tokenizer.ids) - corpus.tokenizer.special_ids), np.int64)

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        return len(self.text)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices."""
        targets = self.text.token_blocks(indices)[:, :-1]
        ids, loss_mask = targets.copy(), np.zeros(targets.shape, bool)
        for sequence, mask, index in zip(ids, loss_mask, indices, strict=True):
            rng = np.random.Generator(np.random.Philox(key=[self.seed, index]))
            candidates = np.flatnonzero(~np.isin(sequence, self.special))
            if not len(candidates):
                continue
            # Stochastic rounding, so that the mean is mlm_probability at every length.
            count = max(1, int(self.mlm_probability * len(candidates) + rng.random()))
            chosen = rng.permutation(candidates)[:count]
            draw = rng.random(len(chosen))
            others = rng.choice(self.ordinary, len(chosen))
            sequence[chosen] = np.where(
                draw < MASK_REPLACE_PROB,
                self.mask,
                np.where(draw < MASK_REPLACE_PROB + RANDOM_REPLACE_PROB, others, sequence[chosen]),
            )
            mask[chosen] = True
        original = torch.from_numpy(targets.copy())
        most = int(self.mlm_probability * self.text.seq_len) + 1  # so that all batches have the same shape
        positions = np.argsort(~loss_mask, axis=1, kind="stable")[:, :most]
        return Batch(
            torch.from_numpy(ids),
            original,
            torch.from_numpy(loss_mask),
            self.text._documents(original),
            target_positions=torch.from_numpy(positions),
        )

    def origin(self, index: int) -> str:
        """Describe where in the corpus a sample comes from."""
        return self.text.origin(index)
