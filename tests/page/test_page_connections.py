"""Clients of the page's server that send part of a request: each has a time limit, and none holds up its end."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest
from test_guard import ask, cookie

import glasshouse as gh
from glasshouse.page import app
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.server import Server
from glasshouse.page.trace import TraceCache
from glasshouse.web import connection


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None)))
    made.start()
    yield made
    made.close()


def half_sent(server: Server, part: bytes) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    made.sendall(part)
    return made


def head_of(server: Server, length: int) -> bytes:
    return (
        f"POST /api/model HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nCookie: {cookie(server)}\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def received(made: socket.socket) -> bytes:
    """Return what comes until the server closes the connection."""
    answer = b""
    try:
        while part := made.recv(2**16):
            answer += part
    except ConnectionError:
        pass
    finally:
        made.close()
    return answer


def test_requests_have_to_come_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_TIMEOUT", 0.2)
    monkeypatch.setattr(connection, "LINGER", 0.2)
    monkeypatch.setattr(app, "BODY_TIMEOUT", 0.2)
    assert received(half_sent(server, b"GET / HTTP/1.1\r\nHost:")) == b""
    assert received(half_sent(server, head_of(server, 10) + b"{")).startswith(b"HTTP/1.1 408")


def test_a_half_sent_request_does_not_hold_up_the_end(server: Server) -> None:
    parts = [b"", b"POST /api", head_of(server, 10), head_of(server, 10) + b"{"]
    many = [half_sent(server, part) for part in parts]
    assert ask(server, "/")[0] == 401  # those before have been read
    server.close()
    assert server._thread is not None
    assert not server._thread.is_alive()
    for one in many:
        one.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", ["²", "9" * 5000, "٣", "-", "", "-1", "0.5"])
def test_a_request_to_save_without_a_number(server: Server, number: str) -> None:
    data = json.dumps({"requests": [f"model {number} {{}}"], "forward_passes": ["{}"]}).encode()
    status, _, body = ask(server, "/api/save", "POST", data, Cookie=cookie(server))
    assert status == 200, body
