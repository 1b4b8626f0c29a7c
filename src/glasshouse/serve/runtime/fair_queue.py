"""A bounded queue, round-robin over API keys."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from glasshouse.serve.schema.errors import RETRY_AFTER, queue_full

TURNS = 32  # the last ones, from which the time of a turn is estimated
LONGEST_WAIT = 60  # seconds of Retry-After, at most


class HasKey(Protocol):
    """Something that waits in a queue, on behalf of a key."""

    key: str


T = TypeVar("T", bound=HasKey)


class FairQueue(Generic[T]):
    """Waiting items, at most `limit` of each key; keys are served round-robin, however many items each has.

    >>> from types import SimpleNamespace as Item
    >>> queue = FairQueue(limit=3)
    >>> queue.put([Item(key="a", number=n) for n in range(3)])
    >>> queue.put([Item(key="b", number=3)])
    >>> [queue.pop().number for _ in range(4)]
    [0, 3, 1, 2]
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_key: dict[str, deque[T]] = {}  # in the order of their turns; none is empty
        self._taken: deque[float] = deque(maxlen=TURNS)  # when items were taken, since it was last empty

    def __len__(self) -> int:
        return sum(map(len, list(self._by_key.values())))

    def put(self, items: Sequence[T]) -> None:
        """Add all items, which are of one key, or raise ApiError if they are too many."""
        if items:
            waiting = self._by_key.get(items[0].key, deque())
            if len(waiting) + len(items) > self.limit:
                raise queue_full(len(waiting), self.seconds_until_empty())
            if not self._by_key:
                self._taken.clear()  # idle time is no part of the pace
            waiting.extend(items)
            self._by_key[items[0].key] = waiting

    def pop(self) -> T:
        """Remove and return the next item."""
        return self._take(next(iter(self._by_key)))

    def pop_except(self, keys: Collection[str]) -> T | None:
        """Remove and return the next item that is of none of some keys, or None."""
        key = next((key for key in self._by_key if key not in keys), None)
        return None if key is None else self._take(key)

    def _take(self, key: str) -> T:
        waiting = self._by_key.pop(key)
        item = waiting.popleft()
        self._taken.append(time.monotonic())
        if waiting:
            self._by_key[key] = waiting  # to the end
        return item

    def seconds_until_empty(self) -> int:
        """Return how long what waits will take at the pace of the last turns, within 1 and 60 seconds."""
        if len(self._taken) < 2:
            return RETRY_AFTER
        pace = (time.monotonic() - self._taken[0]) / len(self._taken)
        return max(RETRY_AFTER, min(LONGEST_WAIT, math.ceil(pace * len(self))))

    def remove(self, item: T) -> bool:
        """Remove an item; return whether it was waiting."""
        waiting = self._by_key.get(item.key, deque())
        if item not in waiting:
            return False
        waiting.remove(item)
        if not waiting:
            del self._by_key[item.key]
        return True
