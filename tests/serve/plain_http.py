"""Plain HTTP to a server under test, for what the official client would not send."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from serve.conftest import KEYS

from glasshouse.serve import Server


class Answer(NamedTuple):
    """Status, headers and body."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:  # noqa: ANN401 - any JSON value
        return json.loads(self.body)


def ask(
    server: Server,
    path: str,
    body: object = None,
    *,
    method: str | None = None,
    key: str | None = KEYS[0],
    **headers: str,
) -> Answer:
    """Send a request; a body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    own = {"Authorization": f"Bearer {key}"} if key else {}
    if data is not None:
        own["Content-Type"] = "application/json"
    own |= {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        connection.request(method or ("GET" if data is None else "POST"), path, data, own)
        answer = connection.getresponse()
        return Answer(answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read())
    finally:
        connection.close()


def post_head(server: Server, path: str, length: int, key: str = KEYS[0]) -> bytes:
    """Return the headers of a request with a body."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def open_socket(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def begin(server: Server, path: str, body: object, key: str = KEYS[0]) -> socket.socket:
    """Send a request and return its socket, without waiting for the answer."""
    data = json.dumps(body).encode()
    made = open_socket(server)
    made.sendall(post_head(server, path, len(data), key) + data)
    return made


def is_idle(server: Server) -> bool:
    """Whether no sequence waits or is generated."""
    return not any(lane.queue or lane.active or lane.retries for lane in server.api.runner.lanes.values())


def eventually(condition: Callable[[], bool], seconds: float = 30) -> bool:
    """Wait until a condition holds; return whether it does."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
