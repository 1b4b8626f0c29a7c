"""Connections that do nothing: each ends in bounded time, and however many there are, others are served."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from serve.conftest import KEYS
from serve.plain_http import ask, begin, eventually, open_socket, post_head
from serve.runtime.test_runner import Held, complete

import glasshouse as gh
from glasshouse.serve import ServedModel, Server
from glasshouse.web import connection

MOST = 8


@pytest.fixture
def narrow(tok: gh.Tokenizer, decoder: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server that takes few connections."""
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", MOST)
    made = Server([ServedModel("decoder", decoder, tok, slots=2)], keys=KEYS)
    made.start()
    assert eventually(lambda: made.api.runner.ready)
    yield made
    made.close()


def is_closed(made: socket.socket, seconds: float = 10) -> bool:
    """Whether the server ends a connection in a time."""
    made.settimeout(seconds)
    try:
        while made.recv(2**16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


def read_answer(made: socket.socket) -> bytes:
    answer = b""
    while b"\r\n\r\n" not in answer or not answer.endswith(b"}"):
        answer += made.recv(4096)
    return answer


def test_a_request_that_was_not_read_ends_its_connection(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER", 0.2)
    for key, length in (("", 10), ("", 10**9), ("a-wrong-key-of-enough-characters", 10), (KEYS[0], 10**9)):
        made = open_socket(narrow)
        made.sendall(post_head(narrow, "/nowhere", length, key))
        assert read_answer(made).startswith(b"HTTP/1.1 40")
        made.sendall(b"x")
        assert is_closed(made)
        made.close()


def test_an_answer_arrives_though_the_request_was_not_read(narrow: Server) -> None:
    """The client sends megabytes before it reads; the connection must not be reset meanwhile."""
    for _ in range(5):
        made = open_socket(narrow)
        made.sendall(post_head(narrow, "/nowhere", 2 * 10**6) + b"x" * 2 * 10**6)
        assert read_answer(made).startswith(b"HTTP/1.1 404")
        made.close()


def test_a_small_body_that_nobody_read_keeps_the_connection(narrow: Server) -> None:
    made = open_socket(narrow)
    for _ in range(3):
        made.sendall(post_head(narrow, "/nowhere", 2) + b"{}")
        assert read_answer(made).startswith(b"HTTP/1.1 404")
    made.close()


def test_a_connection_between_two_requests_ends(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "KEEP_ALIVE", 0.3)
    monkeypatch.setattr(connection, "HEADER_TIMEOUT", 0.3)
    for rest in (b"", b"G", b"POST / HTTP/1.1\r\n"):
        made = open_socket(narrow)
        made.sendall(post_head(narrow, "/nowhere", 2) + b"{}")
        read_answer(made)
        made.sendall(rest)
        assert is_closed(made)
        made.close()


def test_a_client_that_reads_nothing_is_dropped(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SEND_TIMEOUT", 0.3)
    monkeypatch.setattr(connection, "KEEP_ALIVE", 0.3)
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    made.connect(("127.0.0.1", narrow.port))
    data = b'{"model": "decoder", "prompt": "' + b"to be " * 200_000 + b'"}'
    made.sendall(post_head(narrow, "/tokenize", len(data)) + data)
    assert eventually(lambda: narrow.gate.n_requests == 1)
    assert eventually(lambda: narrow.gate.n_requests == 0 and not narrow._uvicorn.server_state.connections)
    made.close()


def test_silent_connections_make_room(narrow: Server) -> None:
    many = [open_socket(narrow) for _ in range(3 * MOST)]
    assert ask(narrow, "/health", key=None).status == 200
    assert complete(narrow, max_tokens=2).status == 200
    assert len(narrow._uvicorn.server_state.connections) <= MOST
    assert is_closed(many[0])  # the first to come
    with contextlib.suppress(TimeoutError):
        many[-1].settimeout(0.1)
        assert many[-1].recv(1) != b"", "the last one should still be open"
    for one in many:
        one.close()


def test_one_address_does_not_take_all_connections(narrow: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that run keep theirs; where an address has nothing but those, it is refused, and others are served."""
    held = Held(narrow, monkeypatch)
    body = {"model": "decoder", "prompt": "to be", "max_tokens": 2}
    running = [begin(narrow, "/v1/completions", body) for _ in range(MOST // 2)]
    assert eventually(lambda: narrow.gate.n_requests == MOST // 2)
    refused = ask(narrow, "/health", key=None)
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    made = socket.create_connection(("127.0.0.1", narrow.port), source_address=("127.0.0.2", 0), timeout=60)
    made.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1:%d\r\n\r\n" % narrow.port)
    assert read_answer(made).startswith(b"HTTP/1.1 200")
    made.close()
    held.free.set()
    for one in running:
        assert read_answer(one).startswith(b"HTTP/1.1 200")
        one.close()
    assert eventually(lambda: ask(narrow, "/health", key=None).status == 200)


@pytest.mark.long
def test_thousands_of_connections_without_a_key(server: Server) -> None:
    """6,000 of those that once locked everybody out: a body that is not sent, the answer read, one more byte."""
    import resource

    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= most < 10_000:
        pytest.skip(f"this process may have {most} open files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    head = post_head(server, "/v1/completions", 100, "no-key-of-this-server")
    times: list[float] = []
    open_at_end: list[socket.socket] = []

    def attack(count: int) -> None:
        for _ in range(count):
            made = open_socket(server)
            open_at_end.append(made)
            with contextlib.suppress(ConnectionError):
                made.sendall(head)
                made.recv(4096)
                made.sendall(b"x")

    def honest() -> tuple[int, float]:
        begin = time.monotonic()
        statuses = {ask(server, "/health", key=None).status}
        statuses.add(ask(server, "/v1/completions", {"model": "decoder", "prompt": "a", "max_tokens": 1}).status)
        assert statuses == {200}
        return len(statuses), time.monotonic() - begin

    begin_at = time.monotonic()
    with ThreadPoolExecutor(24) as many:
        attacks = [many.submit(attack, 250) for _ in range(24)]
        while not all(one.done() for one in attacks):
            times.append(honest()[1])
        for one in attacks:
            one.result()
    took = time.monotonic() - begin_at
    times.append(honest()[1])
    left = len(server._uvicorn.server_state.connections)
    assert eventually(lambda: not server._uvicorn.server_state.connections, connection.LINGER + 30)
    for one in open_at_end:
        one.close()
    print(
        f"\n{len(open_at_end):,} connections in {took:.1f} s; {left:,} were left at the end, 0 later; "
        f"{len(times)} times /health and a completion meanwhile, all 200, the slowest in {max(times):.2f} s"
    )
    assert len(open_at_end) == 6000
