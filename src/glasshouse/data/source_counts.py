"""How many tokens of each source a range of samples has, computed from the samples' numbers alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from glasshouse.data.item_datasets import BucketedDataset
from glasshouse.data.text_datasets import CausalLMDataset, MaskedLMDataset

CHUNK = 2**16  # samples at a time
Counted = CausalLMDataset | MaskedLMDataset | BucketedDataset


def count_source_tokens(
    samples: Counted, indices: Sequence[int] | NDArray[np.int64], sources: Sequence[Collection[str]]
) -> list[int]:
    """Return how many tokens of each source, given by the names of its files, samples of a dataset have.

    >>> import tempfile, glasshouse as gh
    >>> from pathlib import Path
    >>> folder = tempfile.mkdtemp()
    >>> for name in ("a", "b"):
    ...     _ = Path(folder, f"{name}.txt").write_text(name * 9)
    >>> tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    >>> names = [f"{folder}/a.txt", f"{folder}/b.txt"]
    >>> corpus = gh.data.prepare(folder, tok, f"{folder}/corpus").weighted(dict(zip(names, (1, 3))))
    >>> samples = gh.data.CausalLMDataset(corpus, seq_len=10)
    >>> count_source_tokens(samples, range(len(samples)), [names[:1], names[1:]])  # nine letters, and an end
    [10, 30]
    """
    if isinstance(samples, MaskedLMDataset):
        samples = samples.text
    corpus = samples.corpus
    names = {name: number for number, some in enumerate(sources) for name in some}
    groups = np.array([names[one["name"]] for one in corpus.manifest["sources"]])[corpus.source_indices()]
    totals = np.zeros(len(sources), np.int64)
    for start in range(0, len(indices), CHUNK):
        chunk = np.asarray(indices[start : start + CHUNK]).tolist()
        if isinstance(samples, BucketedDataset):
            items = samples.items(chunk)
            totals += np.bincount(groups[items], corpus.token_counts[items], len(sources)).astype(np.int64)
        else:
            totals += _in_sequences(samples, chunk, groups, len(sources))
    return totals.tolist()


def _in_sequences(
    samples: CausalLMDataset, indices: Sequence[int], groups: NDArray[np.int64], count: int
) -> NDArray[np.int64]:
    """Count the tokens of packed sequences, which may begin and end within a text, and wrap around the corpus."""
    lengths = samples.corpus.token_counts
    ends = np.concatenate([[0], np.cumsum(lengths)])
    starts = np.asarray(samples.offsets(indices), np.int64)
    totals = np.zeros(count, np.int64)
    for group in range(count):
        before = np.concatenate([[0], np.cumsum(np.where(groups == group, lengths, 0))])  # its tokens up to each end

        def up_to(positions: NDArray[np.int64], before: NDArray[np.int64] = before) -> NDArray[np.int64]:
            rounds, inside = np.divmod(positions, ends[-1])
            item = np.searchsorted(ends, inside, side="right") - 1
            # Within a text the count grows by one each token, or not at all.
            grows = before[item + 1] > before[item]
            return rounds * before[-1] + before[item] + np.where(grows, inside - ends[item], 0)

        totals[group] = (up_to(starts + samples.seq_len) - up_to(starts)).sum()
    return totals
