"""Allocation of cache slots to sequences, with prefix caching."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from glasshouse.generation.request import Request
from glasshouse.layers.cache import Cache

MIN_SHARED_PREFIX = 16  # tokens; fewer are faster to compute than to copy


@dataclass(eq=False)
class SequenceState:
    """One sequence in a slot of the cache: that of a request, or one beam of its search."""

    request: Request | None = None  # None: the slot is free, and its cached prefix may be reused
    slot: int = 0
    tokens: list[int] = field(default_factory=list)  # the prompt and the generated tokens
    n_cached: int = 0  # tokens whose keys and values are in the cache
    max_cached: int = 0  # the maximum of n_cached since the slot was filled: rejected drafts lower n_cached
    n_scheduled: int = 0  # new tokens launched, processed on the host or not

    @property
    def limit(self) -> float:
        """The maximum number of new tokens; a beam search decides itself when it is done."""
        return math.inf if self.request is None or self.request.options.beams > 1 else self.request.limit

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is not cached yet; its last token is the input of the first decode step."""
        return self.request is not None and self.n_cached < len(self.request.prompt) - 1


class Slots:
    """The slots of a KV cache: 0 to n - 1 are running, without a gap, so that no step computes an empty slot.

    A released slot is filled with the last sequence. Cached keys and values stay until the slot is reused, and a
    request whose prompt starts like a cached sequence, running or free, copies that prefix instead of computing it.
    """

    def __init__(self, cache: Cache, count: int, *, prefix_caching: bool) -> None:
        self.cache = cache
        self.running: list[SequenceState] = []
        self.free = [SequenceState(slot=slot) for slot in range(count)]  # by slot, from len(running) on
        self.prefix_caching = prefix_caching
        self._count = count

    def __len__(self) -> int:
        return self._count  # not a sum: another thread could read it while a sequence moves between the lists

    def clear(self) -> None:
        """Release every slot and drop the cached prefixes."""
        self.running = []
        self.free = [SequenceState(slot=slot) for slot in range(self._count)]
        self.cache.lengths.zero_()

    def clear_slot(self, seq: SequenceState) -> None:
        """Overwrite the cache of a slot.

        A masked key has weight 0, but 0 times NaN is NaN: a NaN left in the cache would reach the next request there.
        """
        seq.tokens, seq.n_cached = [], 0
        self.cache.clear_row(seq.slot)

    def purge(self, failed: Sequence[SequenceState]) -> None:
        """Overwrite the cache of sequences that had NaN or infinite values, and copies past the end of others."""
        for seq in (*self.running, *self.free):
            if seq.request is None or seq in failed:
                self.clear_slot(seq)
            else:
                self.cache.clear_row(seq.slot, seq.n_cached)

    def allocate(self, request: Request) -> SequenceState:
        """Give the first free slot to a request, with the longest cached prefix of its prompt."""
        free = self.free.pop(0)
        source, common = self._best_prefix(request.prompt, free)
        if source is free:
            self.cache.lengths[free.slot] = common
        else:
            self.cache.copy_row(source.slot, free.slot, 0, common)
        seq = SequenceState(request, free.slot, request.prompt[:], common, source.max_cached if common else 0)
        self.running.append(seq)
        return seq

    def fork(self, seq: SequenceState) -> SequenceState:
        """Give the first free slot to a copy of a sequence."""
        free = self.free.pop(0)
        fork = SequenceState(seq.request, free.slot, seq.tokens[:], seq.n_cached, seq.max_cached, seq.n_scheduled)
        self.cache.copy_row(seq.slot, fork.slot, 0, seq.n_cached)
        self.running.append(fork)
        return fork

    def release(self, seq: SequenceState) -> list[tuple[int, int]]:
        """Release a slot and close the gap; return the moves in order, as (old slot, new slot).

        A sequence that is being prefilled is the last and stays the last.
        """
        seq.request = None
        moves = []
        ends = self.running[-2:] if self.running[-1].is_prefilling else self.running[-1:]
        gap, followers = seq.slot, [other for other in ends if other.slot > seq.slot]
        del self.running[seq.slot]
        for follower in followers:
            self.cache.copy_row(follower.slot, gap, 0, follower.n_cached)
            moves.append((follower.slot, gap))
            released = SequenceState(
                None, follower.slot, follower.tokens[: follower.n_cached], follower.n_cached, follower.max_cached
            )
            gap, follower.slot, seq = follower.slot, gap, released
        self.cache.lengths[seq.slot] = 0
        self.free.insert(0, seq)
        self.running.sort(key=lambda other: other.slot)
        return moves

    def _best_prefix(self, prompt: Sequence[int], free: SequenceState) -> tuple[SequenceState, int]:
        """Return the sequence with the longest cached prefix of a prompt, and its length: never the last token."""
        best, common, beginning = free, 0, list(prompt[:MIN_SHARED_PREFIX])
        for seq in (free, *self.running, *self.free) if self.prefix_caching else ():
            cached = min(seq.n_cached, len(seq.tokens), len(prompt) - 1)
            if cached < MIN_SHARED_PREFIX or cached <= common or seq.tokens[:MIN_SHARED_PREFIX] != beginning:
                continue
            shared = common_prefix_length(seq.tokens, prompt, cached)
            if shared > common and self._window_is_cached(seq, shared):
                best, common = seq, shared
        return best, common

    def _window_is_cached(self, seq: SequenceState, count: int) -> bool:
        """Whether a ring buffer still has the window before token `count`."""
        return self.cache.has_window(count, seq.max_cached)


def common_prefix_length(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """Return the length of the common prefix of two sequences, at most `limit`.

    >>> common_prefix_length([1, 2, 3, 4], [1, 2, 5], 3)
    2
    """
    low, high = 0, limit
    while low < high:  # slices are compared far faster than items in a loop
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
