"""BPE training on a whole corpus: the same result as `bpe.learn`, mostly in array operations.

All words are stored in one array of symbols, with a gap after each, as a doubly linked list. Two things make it fast.
A pair appears when the newer of its symbols does, and from then on its count only falls: so its positions are stored
once, and a heap finds the most frequent pair. And only frequent pairs are tracked: when those are used up, the
remaining symbols are counted again, which happens a few times in all. Most pairs have a handful of positions, for
which a loop is faster than setting up arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glasshouse.text.bpe.algorithm import Pair
from glasshouse.text.bpe.byte_level import INITIAL_ALPHABET

Array = NDArray[np.int32]
GAP, GONE = -1, -2  # between words, and where a symbol was merged into the one before
FREQUENT = 3000  # pairs tracked at a time
FEW = 32  # positions up to which a loop is faster than array operations
SHIFT = 32  # a pair is stored as one integer, left << SHIFT | right, which orders pairs by their ids


def learn(words: Mapping[bytes, int], vocab_size: int) -> Iterator[tuple[Pair, int]]:
    """Yield the pairs to merge and their counts; the same as `bpe.learn`.

    >>> list(learn({b"hug": 10, b"pug": 5, b"pun": 12, b"hugs": 5}, 258))
    [((b'u', b'g'), 20), ((b'h', b'ug'), 15)]
    """
    tokens = [bytes([byte]) for byte in INITIAL_ALPHABET]
    text = _SymbolArrays(words)
    while len(tokens) < vocab_size and text.count():
        while len(tokens) < vocab_size and (found := text.most_frequent()):
            left, right, count = found
            yield (tokens[left], tokens[right]), count
            text.merge(left, right, len(tokens))
            tokens.append(tokens[left] + tokens[right])


class _SymbolArrays:
    """The words as linked symbols, and the frequent pairs with their counts and positions."""

    def __init__(self, words: Mapping[bytes, int]) -> None:
        long = [word for word, count in words.items() if len(word) > 1 and count > 0]
        lengths = np.array([len(word) + 1 for word in long], dtype=np.int64)
        rank = np.empty(256, np.int32)
        rank[list(INITIAL_ALPHABET)] = np.arange(256)
        body = rank[np.frombuffer(b"\0".join([*long, b""]), np.uint8)]
        body[lengths.cumsum() - 1] = GAP
        self.symbols: Array = np.concatenate((np.array([GAP], np.int32), body))
        counts = np.array([0, *(words[word] for word in long)], np.int64)
        self.weights = np.repeat(counts, np.concatenate(([1], lengths)))  # count of the word that each symbol is in

    def count(self) -> bool:
        """Count all pairs, and store the frequent ones with their positions; return False if none is left."""
        kept = self.symbols != GONE
        self.symbols, self.weights = self.symbols[kept], self.weights[kept]
        self.next: Array = np.arange(1, len(self.symbols) + 1, dtype=np.int32)
        self.previous: Array = self.next - 2
        # Access to single elements is twice as fast through a memoryview.
        arrays: list[Any] = [self.symbols, self.next, self.previous, self.weights]
        self.views: list[Any] = [memoryview(array) for array in arrays]
        self.counts: dict[int, int] = {}
        self.positions: dict[int, Array | list[int]] = {}
        self.heap: list[tuple[int, int]] = []
        at = np.flatnonzero((self.symbols[:-1] >= 0) & (self.symbols[1:] >= 0)).astype(np.int32)
        if not len(at):
            return False
        pairs = self.symbols[at].astype(np.int64) << SHIFT | self.symbols[at + 1]
        order, starts = _runs(pairs)
        at = at[order]
        totals = np.add.reduceat(self.weights[at], starts)
        self.floor = int(np.partition(totals, -FREQUENT)[-FREQUENT]) if len(totals) > FREQUENT else 1
        self._add_all(pairs[order[starts]], totals, at, starts)
        return True

    def most_frequent(self) -> tuple[int, int, int] | None:
        """Return the pair to merge and its count, or None if no tracked pair is left."""
        while self.heap:
            count, pair = heappop(self.heap)
            if self.counts[pair] == -count:
                return pair >> SHIFT, pair & (1 << SHIFT) - 1, -count
            if self.counts[pair] >= self.floor:  # it has become rarer since
                heappush(self.heap, (-self.counts[pair], pair))
        return None

    def merge(self, left: int, right: int, new: int) -> None:
        """Replace each adjacent `left` and `right` by the symbol `new`."""
        pair = left << SHIFT | right
        del self.counts[pair]
        at = self.positions.pop(pair)
        if len(at) < FEW:
            self._merge_few(sorted(at if isinstance(at, list) else at.tolist()), left, right, new)
        else:
            self._merge_many(np.asarray(at), left, right, new)

    def _merge_few(self, at: list[int], left: int, right: int, new: int) -> None:
        symbols, next_, previous, weights = self.views
        changes: dict[int, int] = defaultdict(int)
        positions: dict[int, list[int]] = defaultdict(list)
        for first in at:
            second = next_[first]
            if symbols[first] != left or symbols[second] != right:
                continue  # merged with another neighbour since
            before, after, weight = previous[first], next_[second], weights[first]
            symbols[first], symbols[second] = new, GONE
            next_[first], previous[after] = after, first
            x, y = symbols[before], symbols[after]
            if x >= 0:
                changes[x << SHIFT | left] -= weight
                changes[x << SHIFT | new] += weight
                positions[x << SHIFT | new].append(before)
            if y >= 0:
                changes[right << SHIFT | y] -= weight
                changes[new << SHIFT | y] += weight
                positions[new << SHIFT | y].append(first)
        for pair, change in changes.items():
            if pair in self.counts:
                self.counts[pair] += change
            elif change >= self.floor:
                self._add(pair, change, positions[pair])

    def _merge_many(self, at: Array, left: int, right: int, new: int) -> None:
        symbols, next_, previous = self.symbols, self.next, self.previous
        at = at[(symbols.take(at) == left) & (symbols.take(next_.take(at)) == right)]
        if left == right:
            at = self._every_other(at)
        second = next_.take(at)
        before, after, weights = previous.take(at), next_.take(second), self.weights.take(at)
        symbols[at], symbols[second] = new, GONE
        next_[at], previous[after] = after, at

        # Where the neighbour was merged too, as in "abab", (right, left) becomes (new, new).
        x, y = symbols.take(before), symbols.take(after)
        twins = (y == new).nonzero()[0]
        if len(twins):
            total = int(weights[twins].sum())
            self._lower([right << SHIFT | left], [total])
            if total >= self.floor:
                self._add(new << SHIFT | new, total, at[twins])

        # With the other neighbours, x before and y after, (x, left) becomes (x, new), and (right, y) (new, y).
        sides = np.concatenate((x * 2, y * 2 + 1))
        real = ((sides >= 0) & (sides != new * 2 + 1)).nonzero()[0]
        if not len(real):
            return
        order, starts = _runs(sides[real])
        real = real[order]
        totals = np.add.reduceat(np.concatenate((weights, weights))[real], starts)
        sides = sides[real[starts]].astype(np.int64)
        is_after, neighbours = sides & 1 == 1, sides >> 1
        gone = np.where(is_after, right << SHIFT | neighbours, neighbours << SHIFT | left)
        self._lower(gone.tolist(), totals.tolist())
        if totals.max() >= self.floor:
            come = np.where(is_after, new << SHIFT | neighbours, neighbours << SHIFT | new)
            self._add_all(come, totals, np.concatenate((before, at))[real], starts)

    def _every_other(self, at: Array) -> Array:
        """Of overlapping positions, as in "aaaa", keep those that a merge from left to right uses."""
        at = np.sort(at)
        first = np.append(True, at[1:] != self.next[at[:-1]])
        since = np.arange(len(at)) - np.maximum.accumulate(np.where(first, np.arange(len(at)), 0))
        return at[since % 2 == 0]

    def _lower(self, pairs: list[int], totals: list[int]) -> None:
        for pair, total in zip(pairs, totals, strict=True):
            if pair in self.counts:
                self.counts[pair] -= total

    def _add_all(
        self, pairs: NDArray[np.int64], totals: NDArray[np.int64], at: Array, starts: NDArray[np.int64]
    ) -> None:
        """Add the frequent ones of new pairs; the positions of pair i are at[starts[i]:starts[i + 1]]."""
        ends = np.append(starts[1:], len(at))
        frequent = totals >= self.floor
        columns = (array[frequent].tolist() for array in (pairs, totals, starts, ends))
        for pair, total, start, end in zip(*columns, strict=True):
            self._add(pair, total, at[start:end])

    def _add(self, pair: int, total: int, positions: Array | list[int]) -> None:
        self.counts[pair], self.positions[pair] = total, positions
        heappush(self.heap, (-total, pair))


def _runs(values: NDArray[np.signedinteger]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the sorting order, and where each run of equal values starts in it."""
    order = values.argsort()
    ordered = values.take(order)
    borders = (ordered[1:] != ordered[:-1]).nonzero()[0]
    return order, np.concatenate(([0], borders + 1))
