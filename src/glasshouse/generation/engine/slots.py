"""Allocation of KV cache slots to sequences, and the tokens cached in each for prefix caching.

This is bookkeeping on the host; the model runner copies and clears what the slots have on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from glasshouse.generation.request import Request

MIN_SHARED_PREFIX = 16  # tokens; fewer are faster to compute than to copy


@dataclass(eq=False)
class CachedTokens:
    """The contents of a slot. They outlive a request: its tokens may be the prefix of a later prompt."""

    slot: int
    tokens: list[int] = field(default_factory=list)  # the prompt and the generated tokens that the host knows
    n_cached: int = 0  # tokens whose keys and values are cached, once the steps planned so far have run
    max_cached: int = 0  # the maximum of n_cached since the slot was filled: rejected drafts lower n_cached
    namespace: str = ""  # that of the request: another one's requests do not reuse the contents
    last_used: int = 0  # when it was released or copied from, counted in releases; 0: nothing that is worth keeping

    def advance(self, kept: int, written: int | None = None) -> None:
        """Count `kept` more tokens as cached, of `written` whose keys and values were written."""
        self.max_cached = max(self.max_cached, self.n_cached + (kept if written is None else written))
        self.n_cached += kept

    def forget(self) -> None:
        """Let no later prompt reuse the contents."""
        self.tokens, self.n_cached = [], 0


@dataclass(eq=False, kw_only=True)
class SequenceState(CachedTokens):
    """A running sequence: that of a request, or one beam of its search. What a caller sees is the request's."""

    request: Request

    @property
    def is_prefilling(self) -> bool:
        """Whether part of the prompt is not cached yet; its last token is the input of the first decode step."""
        return self.n_cached < len(self.request.prompt) - 1

    @property
    def n_generated(self) -> int:
        """New tokens of the steps launched so far, on the host or not."""
        return self.n_cached - (len(self.request.prompt) - 1)

    @property
    def is_complete(self) -> bool:
        """Whether all new tokens were launched; a beam search decides itself when it is done."""
        return self.request.options.beams == 1 and self.n_generated >= self.request.limit


class Move(NamedTuple):
    """The move of a sequence with `n_cached` cached tokens to another slot."""

    source: int
    target: int
    n_cached: int


class Allocation(NamedTuple):
    """A sequence that is being prefilled; of a new one also what must be copied before it runs, the move first."""

    seq: SequenceState
    prefix_slot: int | None = None  # has the `n_cached` first tokens of the prompt
    saved: Move | None = None  # of what its slot had cached, to another free slot


class Slots:
    """The slots of a KV cache: 0 to n - 1 are running, without a gap, so that no step computes an empty slot.

    A released slot is filled with the last sequence. Cached keys and values stay until the slot is reused, and a
    request whose prompt starts like a cached sequence of its namespace, running or free, copies that prefix instead
    of computing it. Before a slot is filled, what it has cached moves to the free slot that was used least recently,
    so that conversations do not evict each other while there are free slots.
    """

    def __init__(self, count: int, *, prefix_caching: bool, max_rollback: float) -> None:
        self.running: list[SequenceState] = []  # by slot
        self.free = [CachedTokens(slot) for slot in range(count)]  # by slot, from len(running) on
        self.prefix_caching = prefix_caching
        self.max_rollback = max_rollback  # tokens a slot can drop and still have the windows before them
        self.n_reused = 0  # prompt tokens that were copied instead of computed, in all
        self._count = count
        self._n_released = 0

    def __len__(self) -> int:
        return self._count  # not a sum: another thread could read it while a sequence moves between the lists

    def clear(self) -> None:
        """Release every slot and drop the cached prefixes."""
        self.running = []
        self.free = [CachedTokens(slot) for slot in range(self._count)]

    def allocate(self, request: Request) -> Allocation:
        """Give the first free slot to a request, with the longest cached prefix of its prompt."""
        free = self.free.pop(0)
        source, common = self._best_prefix(request, free)
        most = source.max_cached if common else 0
        if common:
            source.last_used = self._n_released  # the latest: what is saved does not move there
        saved = self._save(free, free.n_cached - common if source is free else free.n_cached)
        if common == source.n_cached:  # the new sequence has all of it
            source.last_used = 0
        seq = SequenceState(free.slot, request.prompt[:], common, most, request.namespace, request=request)
        self.running.append(seq)
        self.n_reused += common
        return Allocation(seq, source.slot, saved)

    def _save(self, cached: CachedTokens, lost: int) -> Move | None:
        """Move what a slot has cached, before `lost` tokens are overwritten, to the free slot used least recently."""
        oldest = min(self.free, key=lambda one: one.last_used, default=cached)
        if not self.prefix_caching or lost < MIN_SHARED_PREFIX or oldest.last_used >= cached.last_used:
            return None
        self.free[self.free.index(oldest)] = replace(cached, slot=oldest.slot)
        return Move(cached.slot, oldest.slot, cached.n_cached)

    def fork(self, seq: SequenceState) -> SequenceState:
        """Give the first free slot to a copy of a sequence."""
        free = self.free.pop(0)
        fork = SequenceState(
            free.slot, seq.tokens[:], seq.n_cached, seq.max_cached, seq.namespace, request=seq.request
        )
        self.running.append(fork)
        return fork

    def release(self, seq: SequenceState) -> tuple[Move | None, list[Move]]:
        """Release the slot of a sequence and close the gap; return where its contents go, then the moves, in order.

        A sequence that is being prefilled is the last and stays the last.
        """
        ends = self.running[-2:] if self.running[-1].is_prefilling else self.running[-1:]
        self._n_released += 1
        freed = CachedTokens(
            seq.slot, seq.tokens, seq.n_cached, seq.max_cached, seq.namespace, last_used=self._n_released
        )
        followers = [other for other in ends if other.slot > seq.slot]
        saved = self._save(freed, freed.n_cached) if followers else None
        moves = []
        for follower in followers:
            moves.append(Move(follower.slot, freed.slot, follower.n_cached))
            self.running[freed.slot] = follower
            tokens = follower.tokens[: follower.n_cached]
            left = CachedTokens(follower.slot, tokens, follower.n_cached, follower.max_cached, follower.namespace)
            follower.slot, freed = freed.slot, left
        self.running.pop()
        self.free.insert(0, freed)
        return saved, moves

    def _best_prefix(self, request: Request, free: CachedTokens) -> tuple[CachedTokens, int]:
        """Return the slot with the longest cached prefix of a prompt, and its length: never the last token."""
        prompt = request.prompt
        best, common, beginning = free, 0, list(prompt[:MIN_SHARED_PREFIX])
        for one in (free, *self.running, *self.free) if self.prefix_caching else ():
            if one.namespace != request.namespace:
                continue
            cached = min(one.n_cached, len(one.tokens), len(prompt) - 1)
            if cached < MIN_SHARED_PREFIX or cached <= common or one.tokens[:MIN_SHARED_PREFIX] != beginning:
                continue
            shared = common_prefix_length(one.tokens, prompt, cached)
            if shared > common and shared >= one.max_cached - self.max_rollback:
                best, common = one, shared
        return best, common


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
