"""Prefetching: process one item in a thread while the next is being read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetch_map(work: Callable[[Item], Result], items: Iterator[Item]) -> Iterator[tuple[Item, Result]]:
    """Yield each item with its result, computed in a thread, reading one item ahead.

    >>> list(prefetch_map(str.upper, iter("ab")))
    [('a', 'A'), ('b', 'B')]
    """
    with ThreadPoolExecutor(1) as pool:
        pending: tuple[Item, Future[Result]] | None = None
        for item in items:
            submitted = item, pool.submit(work, item)
            if pending is not None:
                yield pending[0], pending[1].result()
            pending = submitted
        if pending is not None:
            yield pending[0], pending[1].result()
