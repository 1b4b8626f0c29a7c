"""One HTTP request while its jobs run: they end with the client, at the deadline, and when the server shuts down."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive

from glasshouse.generation.constraints.constraint import TOO_COMPLEX
from glasshouse.generation.request import NOTHING_ALLOWED, Request
from glasshouse.serve.runtime.job import Job, Outbox, Piece
from glasshouse.serve.runtime.runner import Runner
from glasshouse.serve.schema.errors import ApiError, never_begun, timed_out, unavailable


class DisconnectedError(Exception):
    """The client has gone; nobody waits for an answer."""


class Exchange:
    """The jobs of a request: `submit` queues them, `pieces` yields their output, leaving the block ends them."""

    def __init__(
        self,
        runner: Runner,
        model: str,
        outbox: Outbox,
        jobs: Sequence[Job],
        timeout: float,
        keep: Callable[[Sequence[Request]], None] | None = None,  # called with what a client has got
    ) -> None:
        self._runner, self._model, self._outbox, self.jobs, self._timeout = runner, model, outbox, jobs, timeout
        self._keep = keep
        self._disconnected = self._expired = self._waited = False  # the last: until it expired
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, receive: Receive) -> None:
        """Queue the jobs, or raise ApiError; from now on they end when the client does."""
        self._runner.submit(self._model, self.jobs)
        self._watch = asyncio.ensure_future(self._watch_client(receive))
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what is new, by the index of the job, until all are done; raise where one ended without an answer."""
        left = len(self.jobs)
        while left:
            taken = await self._outbox.take()
            for _, piece in taken:
                if piece.finish_reason in ("error", "cancelled"):
                    raise self._error(piece)
                left -= piece.finish_reason is not None
            yield taken

    def _error(self, piece: Piece) -> Exception:
        if self._disconnected:
            return DisconnectedError()
        if self._expired:
            return never_begun() if self._waited else timed_out(self._timeout)
        if piece.finish_reason == "cancelled":
            return unavailable(self._runner.closed_reason)
        message = piece.error or "the engine failed."
        if message == NOTHING_ALLOWED or message.startswith(TOO_COMPLEX):
            return ApiError(message)
        return ApiError(message, 500, kind="server_error", headers={"x-should-retry": "false"})

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._runner.cancel(self._model, self.jobs)

    def _expire(self) -> None:
        self._expired = True
        self._waited = self._runner.cancel(self._model, self.jobs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        unfinished = [job for job in self.jobs if not job.request.done]
        if unfinished:
            self._runner.cancel(self._model, unfinished)
        # A client that got an error instead of an answer has no id; one that left a stream has.
        if self._keep is not None and kind is None:
            self._keep([job.request for job in self.jobs])
