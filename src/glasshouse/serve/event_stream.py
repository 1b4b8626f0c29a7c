"""Server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glasshouse.config import JsonDict
from glasshouse.page.serialization import to_json

DONE = b"data: [DONE]\n\n"


def event(data: JsonDict, name: str | None = None) -> bytes:
    r"""Return one event.

    >>> event({"a": 1}), event({}, "response.created")
    (b'data: {"a":1}\n\n', b'event: response.created\ndata: {}\n\n')
    """
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(data) + b"\n\n"


class EventStream(Response):
    """A response whose events are sent as they come; a client that does not take them loses its connection."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]  # it is a generator
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
