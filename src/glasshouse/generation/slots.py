"""The rows of one cache, lent to requests: who has which, what lies in it, and what a newcomer may take over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from glasshouse.generation.request import Request
from glasshouse.layers.cache import Cache

MIN_SHARED_PREFIX = 16  # tokens; fewer are computed sooner than copied


@dataclass(eq=False)
class SequenceState:
    """One sequence in a slot of the cache: a request's, or one of the beams of its search."""

    request: Request | None = None  # None: the slot is free, and what lies in it may be taken over
    slot: int = 0
    tokens: list[int] = field(default_factory=list)  # the prompt and what came after it
    n_cached: int = 0  # tokens whose keys and values are in the cache
    max_cached: int = 0  # the most there ever were since the slot was filled: drafts are taken back
    n_scheduled: int = 0  # new tokens asked of the model, whether or not they have been read yet

    @property
    def limit(self) -> float:
        """How many new tokens it may have; a search says itself when it is done."""
        return math.inf if self.request is None or self.request.options.beams > 1 else self.request.limit

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is not in the cache yet; its last token is read when the next is asked for."""
        return self.request is not None and self.n_cached < len(self.request.prompt) - 1


class Slots:
    """Rows 0 to n - 1 are in use, without a gap, so that a step reads no row in vain; the others are free.

    A row that leaves is replaced by the last one. Its keys and values stay until the slot is needed, and a request
    whose prompt begins like what lies in any slot, free or in use, copies that instead of computing it again.
    """

    def __init__(self, cache: Cache, count: int, *, shares: bool) -> None:
        self.cache = cache
        self.running: list[SequenceState] = []
        self.free = [SequenceState(slot=slot) for slot in range(count)]  # by slot, from len(rows) on
        self.prefix_caching = shares  # whether a prompt alone decides its keys and values
        self._count = count

    def __len__(self) -> int:
        return self._count  # not a sum, which other threads would read while a row goes from one list to the other

    def clear(self) -> None:
        """Take every slot back and forget what lies in them."""
        self.running = []
        self.free = [SequenceState(slot=slot) for slot in range(self._count)]
        self.cache.lengths.zero_()

    def clear_slot(self, row: SequenceState) -> None:
        """Overwrite what lies in a slot.

        A masked key has weight 0, but 0 times NaN is NaN: NaN left behind would reach the next request there.
        """
        row.tokens, row.n_cached = [], 0
        self.cache.clear_row(row.slot)

    def purge(self, failed: Sequence[SequenceState]) -> None:
        """Overwrite what rows hold that were not finite, and whatever copies of it lie beyond the ends of others."""
        for row in (*self.running, *self.free):
            if row.request is None or row in failed:
                self.clear_slot(row)
            else:
                self.cache.clear_row(row.slot, row.n_cached)

    def allocate(self, request: Request) -> SequenceState:
        """Give the first free slot to a request, with as much of its prompt as lies in some slot already."""
        place = self.free.pop(0)
        source, common = self._best_prefix(request.prompt, place)
        if source is place:
            self.cache.lengths[place.slot] = common
        else:
            self.cache.copy_row(source.slot, place.slot, 0, common)
        row = SequenceState(request, place.slot, request.prompt[:], common, source.max_cached if common else 0)
        self.running.append(row)
        return row

    def fork(self, row: SequenceState) -> SequenceState:
        """Give the first free slot to a second row with the same tokens."""
        place = self.free.pop(0)
        twin = SequenceState(row.request, place.slot, row.tokens[:], row.n_cached, row.max_cached, row.n_scheduled)
        self.cache.copy_row(row.slot, twin.slot, 0, row.n_cached)
        self.running.append(twin)
        return twin

    def release(self, row: SequenceState) -> list[tuple[int, int]]:
        """Take a slot back and close the gap; return who moved, as (old slot, new slot), in this order.

        A row that is still reading its prompt is the last and stays the last.
        """
        row.request = None
        moves = []
        ends = self.running[-2:] if self.running[-1].is_prefilling else self.running[-1:]
        gap, followers = row.slot, [other for other in ends if other.slot > row.slot]
        del self.running[row.slot]
        for follower in followers:
            self.cache.copy_row(follower.slot, gap, 0, follower.n_cached)
            moves.append((follower.slot, gap))
            ghost = SequenceState(
                None, follower.slot, follower.tokens[: follower.n_cached], follower.n_cached, follower.max_cached
            )
            gap, follower.slot, row = follower.slot, gap, ghost
        self.cache.lengths[row.slot] = 0
        self.free.insert(0, row)
        self.running.sort(key=lambda other: other.slot)
        return moves

    def _best_prefix(self, prompt: Sequence[int], place: SequenceState) -> tuple[SequenceState, int]:
        """Return the row that has most of a prompt's beginning in the cache, and how much: never the last token."""
        best, common, beginning = place, 0, list(prompt[:MIN_SHARED_PREFIX])
        for row in (place, *self.running, *self.free) if self.prefix_caching else ():
            held = min(row.n_cached, len(row.tokens), len(prompt) - 1)
            if held < MIN_SHARED_PREFIX or held <= common or row.tokens[:MIN_SHARED_PREFIX] != beginning:
                continue
            shared = common_prefix_length(row.tokens, prompt, held)
            if shared > common and self._still_there(row, shared):
                best, common = row, shared
        return best, common

    def _still_there(self, row: SequenceState, count: int) -> bool:
        """Whether the window behind the first tokens is not overwritten, where slots are used in turn."""
        whole = all(turn == self.cache.max_len for turn in self.cache.ring_sizes.values())
        return whole or count >= row.max_cached - self.cache.chunk


def common_prefix_length(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Return how many leading items two sequences share, at most so many.

    >>> common_prefix_length([1, 2, 3, 4], [1, 2, 5], 3)
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
