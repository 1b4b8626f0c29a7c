"""Thread pool that parses requests, renders chat templates and tokenizes, round-robin over API keys."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from glasshouse.serve.runtime.fair_queue import FairQueue
from glasshouse.serve.schema.errors import ApiError, unavailable

T = TypeVar("T")

THREADS = 4
MAX_OF_KEY = THREADS - 1  # threads that one key may occupy


@dataclass(eq=False)
class Reading:
    """Work queued for a thread; `begun` resolves to the future of its result once a thread takes it."""

    key: str
    work: Callable[[], Any]
    begun: asyncio.Future[asyncio.Future[Any]]


class Preparation:
    """Runs CPU work in threads; called on the event loop. Queued work is dropped when its caller is cancelled."""

    def __init__(self, max_waiting: int) -> None:
        self._queue: FairQueue[Reading] = FairQueue(max_waiting)
        self._running: Counter[str] = Counter()
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prepare")

    async def run(self, key: str, work: Callable[[], T], timeout: float) -> T:
        """Return the result of work on behalf of a key; raise ApiError where it waits or runs for over `timeout`."""
        reading = Reading(key, work, asyncio.get_running_loop().create_future())
        self._queue.put([reading])
        self._start()
        try:
            async with asyncio.timeout(timeout):
                future = await reading.begun
        except TimeoutError:
            seconds = self._queue.seconds_until_empty()
            raise unavailable(
                f"the server was busy with other requests for {timeout:g} s; try again in {seconds} s.", seconds
            ) from None
        finally:
            self._queue.remove(reading)
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(future)
        except TimeoutError:
            raise ApiError(f"reading the request took more than {timeout:g} s; shorten the prompt.") from None

    def _start(self) -> None:
        """Start queued work while there are free threads."""
        busy = {key for key, count in self._running.items() if count >= MAX_OF_KEY}
        while self._running.total() < THREADS and (reading := self._queue.pop_except(busy)) is not None:
            if reading.begun.cancelled():  # its task is about to see that
                continue
            self._running[reading.key] += 1
            future = asyncio.get_running_loop().run_in_executor(self._threads, reading.work)
            future.add_done_callback(partial(self._ended, reading.key))
            reading.begun.set_result(future)
            if self._running[reading.key] >= MAX_OF_KEY:
                busy.add(reading.key)

    def _ended(self, key: str, future: asyncio.Future[Any]) -> None:
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        if not future.cancelled():
            future.exception()  # it was seen, also where nobody waits for it any more
        self._start()

    def close(self) -> None:
        """End the threads, after what they do now."""
        self._threads.shutdown(wait=False, cancel_futures=True)
