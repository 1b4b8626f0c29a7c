"""Data loader: step k always gets samples k * batch_size to (k + 1) * batch_size - 1."""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol

from glasshouse.data.batch import Batch
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.errors import InputError


class Dataset(Protocol):
    """A map-style dataset: sample k is a pure function of the seed and k."""

    def __len__(self) -> int:
        """Return the number of samples in an epoch."""
        ...

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples with these indices."""
        ...

    def origin(self, index: int) -> str:
        """Describe where in the corpus a sample comes from."""
        ...


class Share:
    """A process's share of the first `count` samples: all shares have the same size.

    Where the samples do not divide, the last shares are filled up with a sample whose targets do not count.
    """

    def __init__(self, samples: Dataset, count: int, *, rank: int = 0, world_size: int = 1) -> None:
        if not 0 <= rank < world_size:
            raise InputError(
                f"rank is {rank}, but with {world_size} processes it must be from 0 to {world_size - 1}."
            )
        self.samples, self.count = samples, count
        self.size = -(-count // world_size)
        self.first = rank * self.size

    def __len__(self) -> int:
        return self.size

    def batch(self, indices: Sequence[int], start: int = 0) -> Batch:
        """Return samples of the share, counted from its first; `start` is added to the indices of the dataset."""
        own = [start + self.first + index for index in indices if self.first + index < self.count]
        if len(own) == len(indices):
            return self.samples.batch(own)
        batch = self.samples.batch([*own, *[start] * (len(indices) - len(own))])
        counted = batch.loss_mask.clone()
        counted[len(own) :] = False
        return replace(batch, loss_mask=counted)

    def origin(self, index: int) -> str:
        """Describe where in the corpus a sample of the share comes from."""
        return self.samples.origin(min(self.first + index, self.count - 1))


class Batches:
    """The batches of one process: its share of each global batch.

    As a sequence they are those of the first epoch, which torch's DataLoader takes with `batch_size=None`.

    >>> class Squares:
    ...     def __len__(self):
    ...         return 8
    ...     def batch(self, indices):
    ...         return [index**2 for index in indices]
    >>> [Batches(Squares(), 4, rank=rank, world_size=2).at(step=1) for rank in (0, 1)]
    [[16, 25], [36, 49]]
    >>> list(Batches(Squares(), 4))
    [[0, 1, 4, 9], [16, 25, 36, 49]]
    """

    def __init__(self, samples: Dataset, batch_size: int, *, rank: int = 0, world_size: int = 1) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}, but it must be at least 1.")
        if (sorted_for := getattr(samples, "batch_size", batch_size)) != batch_size:
            raise InputError(
                f"batch_size is {batch_size}, but the dataset was bucketed for {sorted_for}; give both the same."
            )
        self.samples, self.batch_size = samples, operator.index(batch_size)
        self.share = Share(samples, self.batch_size, rank=rank, world_size=world_size)

    def __len__(self) -> int:
        """Return the number of batches in an epoch; the last may go on into the next."""
        return -(-len(self.samples) // self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step of the first epoch."""
        if not 0 <= step < len(self):
            raise IndexError(f"step is {step}, but the first epoch has steps 0 to {len(self) - 1}; see Batches.at.")
        return self.at(step)

    def epochs(self, steps: int) -> float:
        """Return how many epochs this many steps are; NaN for a stream without a length."""
        known = not isinstance(self.samples, StreamDataset) or self.samples.size is not None
        return steps * self.batch_size / max(1, len(self.samples)) if known else math.nan

    def sample_indices(self, step: int) -> range:
        """Return the sample indices of a step for this process."""
        first = self._first(step)
        return range(first, first + self.batch_size)[self.share.first : self.share.first + len(self.share)]

    def at(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self.share.batch(range(len(self.share)), start=self._first(step))

    def _first(self, step: int) -> int:
        if not 0 <= step < 2**62 // self.batch_size:
            raise InputError(
                f"step is {step}, but it must be from 0 to {2**62 // self.batch_size - 1}: sample indices end there."
            )
        return step * self.batch_size

    def iterate(self, step: int = 0, *, workers: int = 1, prefetch_factor: int = 2) -> Generator[Batch]:
        """Yield the batches from a step on, without end; threads prefetch `workers * prefetch_factor` of them."""
        if workers < 1 or prefetch_factor < 1:
            raise InputError(
                f"workers is {workers} and prefetch_factor is {prefetch_factor}, but both must be at least 1."
            )
        with ThreadPoolExecutor(workers, thread_name_prefix="batches") as pool:
            pending: deque[Future[Batch]] = deque()
            try:
                while True:
                    while len(pending) < workers * prefetch_factor:
                        pending.append(pool.submit(self.at, step + len(pending)))
                    yield pending.popleft().result()
                    step += 1
            finally:
                for future in pending:
                    future.cancel()
