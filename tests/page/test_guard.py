"""Who gets the page: the holder of its address on this machine, and no other site."""

from __future__ import annotations

import http.client
import json
import sys
import threading
import webbrowser
from collections.abc import Iterator
from queue import Queue

import pytest

import glasshouse as gh
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.server import Server
from glasshouse.page.trace import TraceCache


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server(TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None)))
    made.start()
    yield made
    made.close()


def ask(
    server: Server, path: str, method: str = "GET", body: bytes = b"", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Send one request, with a cookie unless another is given, and return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    names = {name.replace("_", "-"): value for name, value in headers.items() if value}
    connection.putrequest(method, path, skip_host=True)
    for name, value in {"Host": f"127.0.0.1:{server.port}", **names}.items():
        connection.putheader(name, value)
    if body:
        connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body or None)
    answer = connection.getresponse()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def cookie(server: Server) -> str:
    status, headers, _ = ask(server, f"/?token={server.token}")
    assert status == 303
    return headers["set-cookie"].partition(";")[0]


def test_the_token_becomes_a_cookie_and_leaves_the_address(server: Server) -> None:
    status, headers, _ = ask(server, f"/?token={server.token}")
    assert (status, headers["location"]) == (303, "/")
    assert "httponly" in headers["set-cookie"].lower()
    assert "samesite" in headers["set-cookie"].lower()
    status, headers, page = ask(server, "/", Cookie=cookie(server))
    assert status == 200
    assert server.token.encode() not in page


@pytest.mark.parametrize("path", ["/", "/static/main.js", "/api/model", "/nowhere"])
@pytest.mark.parametrize("given", ["", "glasshouse-1=x", "{name}=wrong", "{name}="])
def test_requests_without_the_token_are_rejected(server: Server, path: str, given: str) -> None:
    name = cookie(server).partition("=")[0]
    assert ask(server, path, Cookie=given.format(name=name))[0] == 401
    assert ask(server, path, "POST", b"{}", Cookie=given.format(name=name))[0] == 401


def test_the_opened_browser_gets_a_one_time_token(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: Queue[str] = Queue()
    monkeypatch.setattr(webbrowser, "open", opened.put)
    monkeypatch.setattr(webbrowser, "get", lambda: webbrowser.GenericBrowser("firefox"))
    monkeypatch.setenv("DISPLAY", ":0")
    server.show("#layer=1")
    address = opened.get(timeout=10)
    assert server.token not in address  # everyone on the machine can read what a program is started with
    path, _, fragment = address.removeprefix(f"http://127.0.0.1:{server.port}").partition("#")
    assert fragment == "layer=1"
    status, headers, _ = ask(server, path)
    assert (status, headers["location"]) == (303, "/")
    assert ask(server, "/", Cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert ask(server, path)[0] == 401


@pytest.mark.skipif(sys.platform in ("darwin", "win32"), reason="there is always a screen")
def test_no_text_browser_is_started_where_there_is_no_screen(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    threads = threading.active_count()
    server.show("#layer=1")
    assert (opened, threading.active_count()) == ([], threads)


def test_a_wrong_token_is_rejected(server: Server) -> None:
    for wrong in ("x", server.token[:-1], server.token + "x", "%ff"):
        assert ask(server, f"/?token={wrong}")[0] == 401
    assert ask(server, f"/api/model?token={server.token}", "POST", b"{}")[0] == 401  # only the front door takes it


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "localhost"])
def test_a_foreign_host_is_rejected_even_with_the_token(server: Server, host: str) -> None:
    given = host.format(port=server.port)
    for path in ("/", f"/?token={server.token}", "/static/main.js"):
        assert ask(server, path, Host=given, Cookie=cookie(server))[0] == 403


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:{port}", "http://127.0.0.1:1"])
def test_a_foreign_origin_is_rejected_even_with_the_token(server: Server, origin: str) -> None:
    given = origin.format(port=server.port)
    assert ask(server, "/api/model", "POST", b"{}", Origin=given, Cookie=cookie(server))[0] == 403


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_own_host_names_are_accepted(server: Server, name: str) -> None:
    own = f"{name}:{server.port}"
    status, _, body = ask(
        server, "/api/model", "POST", b"{}", Host=own, Origin=f"http://{own}", Cookie=cookie(server)
    )
    assert (status, json.loads(body)["kind"]) == (200, "decoder")


def test_every_response_has_the_security_headers(server: Server) -> None:
    held = cookie(server)
    for path in ("/", "/static/main.js", "/static/none.js", "/?token=x"):
        _, headers, _ = ask(server, path, Cookie=held if path != "/?token=x" else "")
        rules = dict(rule.strip().partition(" ")[::2] for rule in headers["content-security-policy"].split(";"))
        assert rules["default-src"] == "'none'"
        assert rules["connect-src"] == "'self'"
        assert "unsafe" not in headers["content-security-policy"]
        assert "http" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static//etc/passwd", "/static/"])
def test_only_files_of_the_page_are_served(server: Server, path: str) -> None:
    assert ask(server, path, Cookie=cookie(server))[0] in (404, 405)


@pytest.mark.parametrize(
    ("name", "body", "status", "said"),
    [
        ("nxt", b"{}", 404, "did you mean next?"),
        ("next", b"{", 400, "not valid JSON"),
        ("next", b"[1]", 400, "must be a JSON object"),
        ("next", b"[" * 100_000, 400, "not valid JSON"),
        ("next", b'{"positon": 1}', 400, "did you mean position?"),
        ("next", b'{"forward_pass": {"prompt": {"text": "1 2 x"}}}', 400, "no tokenizer"),
        ("next", b'{"forward_pass": {"prompt": {"text": "1 2 999"}}}', 400, "999"),
        ("next", b'{"forward_pass": {"prompt": {"text": "1 2 3", "appended": [-1]}}}', 400, "-1"),
        ("next", b'{"forward_pass": {"prompt": {"text": "1 2 3"}}, "position": 3}', 400, "within 0 and 2"),
        (
            "next",
            b'{"forward_pass": {"prompt": {"text": "1"}, "edits": [{"kind": "scale", "site": "z.9"}]}}',
            400,
            "z.9",
        ),
        (
            "next",
            b'{"forward_pass": {"prompt": {"text": "1"}, "edits": [{"kind": "patch", "site": "z.0"}]}}',
            400,
            "second text",
        ),
        ("tokenize", b'{"forward_pass": {"prompt": {"text": ""}}}', 400, "no start_id"),
        ("tokenize", b" " * (5 * 2**20), 413, "larger"),
    ],
)
def test_errors_are_one_sentence(server: Server, name: str, body: bytes, status: int, said: str) -> None:
    found, _, answer = ask(server, f"/api/{name}", "POST", body, Cookie=cookie(server))
    assert found == status
    assert said in answer.decode()
    assert b"Traceback" not in answer


def test_another_port_has_another_cookie_and_token(server: Server) -> None:
    other = Server(server_traces(server))
    other.start()
    try:
        assert other.token != server.token
        assert cookie(other).partition("=")[0] != cookie(server).partition("=")[0]
        assert ask(other, "/", Cookie=cookie(server))[0] == 401
    finally:
        other.close()


def server_traces(server: Server) -> TraceCache:
    return TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None))


def test_a_port_in_use_is_an_error(server: Server) -> None:
    with pytest.raises(gh.InputError, match=f"port {server.port}"):
        Server(server_traces(server), port=server.port)
