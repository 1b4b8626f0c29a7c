"""What an epoch had of each source, where sources have weights."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from glasshouse.data import Batches
from glasshouse.data.source_counts import Counted, count_source_tokens
from glasshouse.training.setup.datasets import WeightedSource


class SourceReport:
    """Counts the tokens of each source as epochs end, from the numbers of the batches alone.

    So a resumed run reports whole epochs.
    """

    def __init__(self, batches: Batches, sources: Sequence[WeightedSource]) -> None:
        self.batches, self.sources = batches, sources

    def lines(self, before: int, after: int, is_last: bool, skipped: Collection[int]) -> Iterator[str]:
        """Yield a line for each epoch that ends between two counts of batches, or with the last batch of the run."""
        samples, batch_size = self.batches.samples, self.batches.batch_size
        if not self.sources or not isinstance(samples, Counted):  # a registered objective may have its own samples
            return
        size, stop = len(samples), after * batch_size
        ends = [*range(before * batch_size // size + 1, stop // size + 1)]
        if is_last and stop % size:
            ends.append(stop // size + 1)
        for epoch in ends:
            seen = np.arange((epoch - 1) * size, min(epoch * size, stop))
            seen = seen[~np.isin(seen // batch_size, [*skipped])]
            counts = count_source_tokens(samples, seen, [one.names for one in self.sources])
            total = max(1, sum(counts))
            listed = ", ".join(
                f"{one.path} {count:,} tokens ({count / total:.1%})"
                for one, count in zip(self.sources, counts, strict=True)
            )
            yield f"epoch    {epoch}{'' if epoch * size <= stop else ', as far as read'}: {listed}"
