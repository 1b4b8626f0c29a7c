"""Two things at once: work on one item while the next is being made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch_map(work: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[tuple[Item, Result]]:
    """Yield each item and what a thread made of it, while the items are read one ahead.

    >>> list(ahead(str.upper, iter("ab")))
    [('a', 'A'), ('b', 'B')]
    """
    with ThreadPoolExecutor(1) as pool:
        waiting: tuple[Item, Future[Result]] | None = None
        for item in items:
            begun = item, pool.submit(work, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = begun
        if waiting is not None:
            yield waiting[0], waiting[1].result()
