"""HTTP connections: each has a deadline whenever it waits for its client, and their number is bounded."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glasshouse.web.log import UVICORN

HEADER_TIMEOUT = 10.0  # seconds to send the headers of a request; uvicorn has no limit of its own
KEEP_ALIVE = 30.0  # seconds between two requests
SEND_TIMEOUT = 60.0  # seconds for a client to take the next part of an answer
LINGER = 2.0  # seconds to read on after an answer to a request that was not read: closed at once, it could be lost
SHUTDOWN = 5  # seconds for answers that are being sent when the server ends
PART = 2**18  # bytes
MAX_HEADER_BYTES = 16 * 2**10
MAX_CONNECTIONS = 2000
OTHER_FILES = 128  # descriptors that are left for everything but connections
TOO_MANY = b"too many connections; close some, or try again later.\n"
REFUSAL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Type: text/plain\r\n"


class Connections:
    """The open connections by client address, at most half of the total of one address.

    Where there is no room, the connection that has waited longest makes it, of the address that has most of them
    waiting; connections whose request runs are left alone. So whoever opens many keeps none that does nothing.
    """

    def __init__(self, most: int) -> None:
        self.most, self.most_of_address = most, max(1, most // 2)
        self._open: dict[str, set[HttpConnection]] = {}
        self._waiting: dict[str, dict[HttpConnection, None]] = {}  # the longest first

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, one: HttpConnection) -> bool:
        """Add a connection; return False where there is no room."""
        if len(self._open.get(one.address, ())) >= self.most_of_address:
            made_room = self._drop(one.address)
        elif len(self) >= self.most:
            made_room = bool(self._waiting) and self._drop(max(self._waiting, key=lambda at: len(self._waiting[at])))
        else:
            made_room = True
        if made_room:
            self._open.setdefault(one.address, set()).add(one)
        return made_room

    def _drop(self, address: str) -> bool:
        for longest in self._waiting.get(address, {}):
            self.remove(longest)
            longest.transport.abort()
            return True
        return False

    def set_waiting(self, one: HttpConnection, waiting: bool) -> None:
        """Note that a connection begins to wait for its client, or no longer does."""
        rows = self._waiting.setdefault(one.address, {})
        if waiting and one in self._open.get(one.address, ()):
            rows[one] = None
        else:
            rows.pop(one, None)
        if not rows:
            del self._waiting[one.address]

    def remove(self, one: HttpConnection) -> None:
        """Forget a connection that ends."""
        self.set_waiting(one, False)
        rows = self._open.get(one.address, set())
        rows.discard(one)
        if not rows:
            self._open.pop(one.address, None)


class HttpConnection(H11Protocol):
    """Closes a connection that sends nothing, or part of a request, for too long, or that reads no answers.

    After an answer to a request whose body was not read to its end, the connection ends too.
    """

    def __init__(self, open_connections: Connections, **settings: Any) -> None:  # noqa: ANN401 - uvicorn's own
        super().__init__(**settings)
        self._served, self.app = self.app, self._serve
        self._open_connections = open_connections
        self._deadline: asyncio.TimerHandle | None = None
        self._ended = False  # nothing of what still comes is read
        self.address = ""

    def connection_made(self, transport: Any) -> None:  # noqa: ANN401 - asyncio's transport, as uvicorn types it
        super().connection_made(transport)
        self.address = address_group(self.client[0] if self.client else "")
        if self._open_connections.add(self):
            self._wait(HEADER_TIMEOUT)
        else:
            transport.write(REFUSAL + b"Content-Length: %d\r\n\r\n" % len(TOO_MANY) + TOO_MANY)
            self._end()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        idle = self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]
        super().data_received(data)
        if self._is_running():
            self._stop_waiting()
        elif idle or self._deadline is None:
            self._wait(HEADER_TIMEOUT)  # from the first byte of a request to the last of its headers

    def on_response_complete(self) -> None:
        unread = self.conn.their_state is h11.SEND_BODY
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if unread:
            self._end()
        elif not self._is_running():
            self._wait(KEEP_ALIVE)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._open_connections.remove(self)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """End a connection as the server does: at once, unless its request has come and is being answered."""
        if self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()
        else:
            super().shutdown()

    def _is_running(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _end(self) -> None:
        """Half-close the connection, and discard for a moment what the client still sends."""
        self._ended = True
        self._unset_keepalive_if_required()
        self.transport.write_eof()
        self._wait(LINGER)

    def _wait(self, seconds: float) -> None:
        self._stop_waiting()
        self._open_connections.set_waiting(self, True)
        # Not `close`, which would wait for a client that reads nothing.
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_waiting(self) -> None:
        self._open_connections.set_waiting(self, False)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; a large body is sent in parts, and a client that does not read one in time disconnected."""

        async def send_parts(message: Message) -> None:
            body, more = message.get("body", b""), message.get("more_body", False)
            starts = range(0, max(1, len(body)), PART)
            for start in starts:
                part = message
                if len(starts) > 1:
                    part = {**message, "body": body[start : start + PART], "more_body": more or start != starts[-1]}
                try:
                    async with asyncio.timeout(SEND_TIMEOUT):
                        await send(part)
                except TimeoutError:
                    self.transport.abort()
                    return

        await self._served(scope, receive, send_parts)


def address_group(address: str) -> str:
    """Return what connections are counted by: an address, of IPv6 its /64, all of which one client may have.

    >>> address_group("192.0.2.7"), address_group("2001:db8::1:2:3:4"), address_group("::ffff:192.0.2.7")
    ('192.0.2.7', '2001:db8::', '192.0.2.7')
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.IPv6Network((found, 64), strict=False).network_address)
    return address


def http_config(app: ASGIApp, **settings: Any) -> uvicorn.Config:  # noqa: ANN401 - uvicorn's own
    """Return the settings of a server of such connections."""
    return uvicorn.Config(
        app,
        http=partial(HttpConnection, Connections(max_connections())),  # type: ignore[arg-type]  # called as the class
        ws="none",
        access_log=False,
        log_config=UVICORN,
        server_header=False,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=int(KEEP_ALIVE),
        timeout_graceful_shutdown=SHUTDOWN,
        interface="asgi3",
        **settings,
    )


def max_connections() -> int:
    """Return how many connections may be open: fewer where the process may not have as many files."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    import resource

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if files < 0 else max(2, min(MAX_CONNECTIONS, files - OTHER_FILES))


async def read_body(request: Request, limit: int) -> bytes | None:
    """Return the body of a request; None if it has more than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
    return b"".join(parts)
