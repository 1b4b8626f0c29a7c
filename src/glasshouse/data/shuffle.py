"""Which item is seen when: sample k of a run is a pure function of the seed and k, found in constant time.

So a run is resumed by going on at another k, and neither workers nor processes nor accumulation can change what is
seen. A shuffle that has to be drawn and kept would do neither.
"""

from __future__ import annotations

import operator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from glasshouse.errors import InputError

Indices = NDArray[np.int64]
ROUNDS = 6


def permute(numbers: Indices, n: int, seed: int, epoch: int) -> Indices:
    """Map numbers below `n` to others below `n`, one to one, by an order drawn from the seed and the epoch.

    A Feistel network shuffles the numbers below the next power of four; one that lands at `n` or above goes through
    it again until it does not.

    >>> sorted(permute(np.arange(10), 10, seed=0, epoch=0).tolist()) == list(range(10))
    True
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = _keys(seed, epoch)
    result = numbers.astype(np.uint64)
    astray = np.ones(len(result), bool)
    while astray.any():
        left, right = result[astray] >> half, result[astray] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        result[astray] = left << half | right
        astray = result >= n
    return result.astype(np.int64)


@lru_cache(64)
def _keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    return np.random.SeedSequence([seed, epoch]).generate_state(ROUNDS, np.uint64).astype(np.uint64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread each bit over all others (the finalizer of splitmix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Shuffled:
    """All `n` items in a new order each epoch.

    >>> order = Shuffled(3, seed=0)
    >>> epochs, items = order(np.arange(6))
    >>> epochs.tolist(), sorted(items[:3].tolist()), sorted(items[3:].tolist())
    ([0, 0, 0, 1, 1, 1], [0, 1, 2], [0, 1, 2])
    """

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, checked_seed(seed)

    def __call__(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the item of each sample."""
        epochs, places = np.divmod(numbers, self.n)
        items = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            items[here] = permute(places[here], self.n, self.seed, epoch)
        return epochs, items


class Bucketed:
    """Items of like length beside each other, so that batches need little padding, in a new order each epoch.

    Items stand sorted by length. Batches are cut from that order at a place that is drawn anew each epoch, and come
    in an order that is; items of equal length change places. An epoch leaves out what fills no batch, at most
    `batch_size` - 1 items, others each time.

    >>> order = Bucketed(np.array([[5], [2], [5], [2]]), batch_size=2, seed=0)
    >>> [sorted(order(np.arange(k, k + 2))[1].tolist()) for k in (0, 2)] in ([[1, 3], [0, 2]], [[0, 2], [1, 3]])
    True
    """

    def __init__(self, lengths: Indices, batch_size: int, seed: int) -> None:
        self.batch_size, self.seed = batch_size, checked_seed(seed)
        # By the first length, then by the last: up and down in turns, as the next length goes on where this one ends.
        turns = np.where(lengths[:, 0] % 2, -lengths[:, -1], lengths[:, -1])
        self.sorted = np.lexsort((turns, lengths[:, 0]))
        changes = np.any(np.diff(lengths[self.sorted], axis=0), axis=1)
        self.starts = np.concatenate(([0], np.flatnonzero(changes) + 1, [len(lengths)]))  # of runs of equal length
        self.n = len(lengths) // batch_size * batch_size

    def __call__(self, numbers: Indices) -> tuple[Indices, Indices]:
        """Return the epoch and the item of each sample."""
        epochs, places = np.divmod(numbers, self.n)
        items = np.empty_like(places)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            batches, rows = np.divmod(places[here], self.batch_size)
            batches = permute(batches, self.n // self.batch_size, self.seed, epoch)
            spare = len(self.sorted) - self.n
            items[here] = self._at(
                batches * self.batch_size + rows + random_below(spare + 1, self.seed, epoch), epoch
            )
        return epochs, items

    def _at(self, places: Indices, epoch: int) -> Indices:
        runs = np.searchsorted(self.starts, places, side="right") - 1
        moved = np.empty_like(places)
        for run in np.unique(runs).tolist():
            here, start, end = runs == run, self.starts[run], self.starts[run + 1]
            # Each run has an order of its own: that of another seed.
            moved[here] = start + permute(places[here] - start, int(end - start), self.seed + 1 + run, epoch)
        return self.sorted[moved]


def checked_seed(seed: int) -> int:
    """Return a seed that every generator takes."""
    if not 0 <= (seed := operator.index(seed)) < 2**63:
        raise InputError(f"seed is {seed}, but it must be 0 or above, and below 2**63.")
    return seed


def random_below(n: int, seed: int, epoch: int) -> int:
    """Draw a number below `n` for an epoch."""
    return int(_keys(seed, epoch)[0] % np.uint64(n))
