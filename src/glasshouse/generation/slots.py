"""The rows of one cache, lent to requests: who has which, what lies in it, and what a newcomer may take over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from glasshouse.generation.request import Request
from glasshouse.layers.cache import Cache

WORTH_COPYING = 16  # tokens; fewer are computed sooner than copied


@dataclass(eq=False)
class Row:
    """One sequence in a slot of the cache: a request's, or one of the beams of its search."""

    request: Request | None = None  # None: the slot is free, and what lies in it may be taken over
    slot: int = 0
    tokens: list[int] = field(default_factory=list)  # the prompt and what came after it
    length: int = 0  # tokens whose keys and values are in the cache
    written: int = 0  # the most there ever were since the slot was filled: drafts are taken back
    scheduled: int = 0  # new tokens asked of the model, whether or not they have been read yet

    @property
    def limit(self) -> float:
        """How many new tokens it may have; a search says itself when it is done."""
        return math.inf if self.request is None or self.request.options.beams > 1 else self.request.limit

    @property
    def reading(self) -> bool:
        """Whether part of the prompt is not in the cache yet; its last token is read when the next is asked for."""
        return self.request is not None and self.length < len(self.request.prompt) - 1


class Slots:
    """Rows 0 to n - 1 are in use, without a gap, so that a step reads no row in vain; the others are free.

    A row that leaves is replaced by the last one. Its keys and values stay until the slot is needed, and a request
    whose prompt begins like what lies in any slot, free or in use, copies that instead of computing it again.
    """

    def __init__(self, cache: Cache, count: int, *, shares: bool) -> None:
        self.cache = cache
        self.rows: list[Row] = []
        self.free = [Row(slot=slot) for slot in range(count)]  # by slot, from len(rows) on
        self.shares = shares  # whether a prompt alone decides its keys and values
        self._count = count

    def __len__(self) -> int:
        return self._count  # not a sum, which other threads would read while a row goes from one list to the other

    def clear(self) -> None:
        """Take every slot back and forget what lies in them."""
        self.rows = []
        self.free = [Row(slot=slot) for slot in range(self._count)]
        self.cache.lengths.zero_()

    def forget(self, row: Row) -> None:
        """Overwrite what lies in a slot.

        A masked key has weight 0, but 0 times NaN is NaN: NaN left behind would reach the next request there.
        """
        row.tokens, row.length = [], 0
        self.cache.clear_row(row.slot)

    def purge(self, failed: Sequence[Row]) -> None:
        """Overwrite what rows hold that were not finite, and whatever copies of it lie beyond the ends of others."""
        for row in (*self.rows, *self.free):
            if row.request is None or row in failed:
                self.forget(row)
            else:
                self.cache.clear_row(row.slot, row.length)

    def join(self, request: Request) -> Row:
        """Give the first free slot to a request, with as much of its prompt as lies in some slot already."""
        place = self.free.pop(0)
        source, common = self._best_prefix(request.prompt, place)
        if source is place:
            self.cache.lengths[place.slot] = common
        else:
            self.cache.copy_row(source.slot, place.slot, 0, common)
        row = Row(request, place.slot, request.prompt[:], common, source.written if common else 0)
        self.rows.append(row)
        return row

    def fork(self, row: Row) -> Row:
        """Give the first free slot to a second row with the same tokens."""
        place = self.free.pop(0)
        twin = Row(row.request, place.slot, row.tokens[:], row.length, row.written, row.scheduled)
        self.cache.copy_row(row.slot, twin.slot, 0, row.length)
        self.rows.append(twin)
        return twin

    def leave(self, row: Row) -> list[tuple[int, int]]:
        """Take a slot back and close the gap; return who moved, as (old slot, new slot), in this order.

        A row that is still reading its prompt is the last and stays the last.
        """
        row.request = None
        moves = []
        ends = self.rows[-2:] if self.rows[-1].reading else self.rows[-1:]
        gap, followers = row.slot, [other for other in ends if other.slot > row.slot]
        del self.rows[row.slot]
        for follower in followers:
            self.cache.copy_row(follower.slot, gap, 0, follower.length)
            moves.append((follower.slot, gap))
            ghost = Row(None, follower.slot, follower.tokens[: follower.length], follower.length, follower.written)
            gap, follower.slot, row = follower.slot, gap, ghost
        self.cache.lengths[row.slot] = 0
        self.free.insert(0, row)
        self.rows.sort(key=lambda other: other.slot)
        return moves

    def _best_prefix(self, prompt: Sequence[int], place: Row) -> tuple[Row, int]:
        """Return the row that has most of a prompt's beginning in the cache, and how much: never the last token."""
        best, common, beginning = place, 0, list(prompt[:WORTH_COPYING])
        for row in (place, *self.rows, *self.free) if self.shares else ():
            held = min(row.length, len(row.tokens), len(prompt) - 1)
            if held < WORTH_COPYING or held <= common or row.tokens[:WORTH_COPYING] != beginning:
                continue
            shared = count_common(row.tokens, prompt, held)
            if shared > common and self._still_there(row, shared):
                best, common = row, shared
        return best, common

    def _still_there(self, row: Row, count: int) -> bool:
        """Whether the window behind the first tokens is not overwritten, where slots are used in turn."""
        whole = all(turn == self.cache.max_len for turn in self.cache.turns.values())
        return whole or count >= row.written - self.cache.chunk


def count_common(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return how many leading items two sequences share, at most so many.

    >>> count_common([1, 2, 3, 4], [1, 2, 5], 3)
    2
    """
    low, high = 0, most
    while low < high:  # slices are compared far faster than items in a loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
