"""Stateless shuffling: sample k of a run is a pure function of the seed and k, computed in constant time.

So a run resumes from any k, and the order does not depend on workers, processes or gradient accumulation. A stored
permutation would need memory and state for that.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from glasshouse.errors import InputError

Indices = NDArray[np.int64]
ROUNDS = 6


def permute(indices: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Apply a pseudorandom permutation of range(n), determined by the seed and the epoch.

    A Feistel network permutes the numbers below the next power of four; a result of `n` or above is permuted again
    until it is below (cycle walking).

    >>> sorted(permute(np.arange(10), 10, seed=0, epoch=0).tolist()) == list(range(10))
    True
    """
    return _permute_each(indices, np.array([n]), _keys(seed, epoch)[:, None], np.zeros_like(indices))


def _permute_each(indices: Indices, sizes: Indices, keys: NDArray[np.uint64], which: Indices) -> Indices:
    """Permute each index by one of several permutations, of these sizes [P] and keys [ROUNDS, P]."""
    halves = np.array([max(1, ((size - 1).bit_length() + 1) // 2) for size in sizes.tolist()], np.uint64)[which]
    masks, ends, keys = (np.uint64(1) << halves) - np.uint64(1), sizes.astype(np.uint64)[which], keys[:, which]
    result = indices.astype(np.uint64)
    outside = np.arange(len(result))
    while len(outside):
        half, mask = halves[outside], masks[outside]
        left, right = result[outside] >> half, result[outside] & mask
        for key in keys[:, outside]:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[outside] = left << half | right
        outside = outside[result[outside] >= ends[outside]]
    return result.astype(np.int64)


@lru_cache(1024)
def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    return np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64).astype(np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix all bits (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Order(ABC):
    """An order of the items of a dataset, a new one each epoch of `n` samples."""

    n: int
    seed: int

    def __call__(self, indices: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the item of each sample."""
        epochs, positions = np.divmod(indices, self.n)
        items = np.empty_like(positions)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            items[here] = self.items_at(positions[here], epoch)
        return epochs, items

    @abstractmethod
    def items_at(self, positions: Indices, epoch: int) -> Indices:
        """Return the items at these positions of an epoch."""


class Shuffled(Order):
    """All `n` items in a new order each epoch.

    >>> order = Shuffled(3, seed=0)
    >>> epochs, items = order(np.arange(6))
    >>> epochs.tolist(), sorted(items[:3].tolist()), sorted(items[3:].tolist())
    ([0, 0, 0, 1, 1, 1], [0, 1, 2], [0, 1, 2])
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, checked_seed(seed)

    def items_at(self, positions: Indices, epoch: int) -> Indices:
        return permute(positions, self.n, self.seed, epoch)


class Bucketed(Order):
    """Length bucketing: batches of items of similar length, which need little padding, in a new order each epoch.

    Items are sorted by length and split into batches at a random offset; the batches are shuffled each epoch, as are
    items of equal length. An epoch skips the items that do not fill a batch, at most `batch_size` - 1, different
    ones each time.

    >>> order = Bucketed(np.array([[5], [2], [5], [2]]), batch_size=2, seed=0)
    >>> [sorted(order(np.arange(k, k + 2))[1].tolist()) for k in (0, 2)] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])
    True
    """

    def __init__(self, lengths: Indices, batch_size: int, seed: int) -> None:
        self.batch_size, self.seed = batch_size, checked_seed(seed)
        # By the first length, then by the last, alternately ascending and descending, so that neighbours are similar.
        turns = np.where(lengths[:, 0] % 2, -lengths[:, -1], lengths[:, -1])
        self.sorted = np.lexsort((turns, lengths[:, 0]))
        changes = np.any(np.diff(lengths[self.sorted], axis=0), axis=1)
        self.starts = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(lengths)]))  # of runs of equal length
        self.n = len(lengths) // batch_size * batch_size

    def items_at(self, positions: Indices, epoch: int) -> Indices:
        batches, rows = np.divmod(positions, self.batch_size)
        batches = permute(batches, self.n // self.batch_size, self.seed, epoch)
        spare = len(self.sorted) - self.n
        return self._at(batches * self.batch_size + rows + random_below(spare + 1, self.seed, epoch), epoch)

    def _at(self, positions: Indices, epoch: int) -> Indices:
        runs = np.searchsorted(self.starts, positions, side="right") - 1
        present, which = np.unique(runs, return_inverse=True)
        starts, ends = self.starts[present], self.starts[present + 1]
        # Each run is shuffled with its own seed.
        keys = np.stack([_keys(self.seed + 1 + run, epoch) for run in present.tolist()], 1)
        first = starts[which]
        return self.sorted[first + _permute_each(positions - first, ends - starts, keys, which)]


def checked_seed(seed: int) -> int:
    """Return the seed if every generator accepts it."""
    if not 0 <= (seed := operator.index(seed)) < 2**63:
        raise InputError(f"seed is {seed}, but it must be 0 or above, and below 2**63.")
    return seed


def random_below(n: int, seed: int, epoch: int) -> int:
    """Return a random number below `n` for an epoch."""
    return int(_keys(seed, epoch)[0] % np.uint64(n))
