"""`gh.look` in a notebook: a small frame that the kernel serves, to pages of this machine and no others."""

from __future__ import annotations

import html
import http.client
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from conftest import Trained
from playwright.sync_api import Browser

import glasshouse as gh
from glasshouse.page import viewer

TEXT = "the cat sat on the mat"


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process be a kernel, as IPython says it; the servers end with the test."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    yield
    for server in viewer._frame_servers.values():
        server.close()
    viewer._frame_servers.clear()


def source(drawn: str) -> str:
    """Return the address of the frame in a cell's HTML."""
    found = re.search(r'<iframe [^>]*src="([^"]*)"', drawn)
    assert found is not None
    return html.unescape(found[1])


def ask(address: str, **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=20)
    connection.request("GET", f"{parts.path}?{parts.query}", headers=headers)
    return connection.getresponse()


def tiny() -> gh.models.Model:
    return gh.build(gh.preset("tiny-decoder")).eval()


@pytest.mark.usefixtures("kernel")
def test_a_cell_is_small_and_one_server_does_for_a_model() -> None:
    model = tiny()
    first, second = (gh.look(model, None, text)._repr_html_() for text in ("1 2 3", "4 5 6"))
    assert max(len(first), len(second)) < 2000
    assert urlsplit(source(first)).port == urlsplit(source(second)).port
    assert urlsplit(source(first)).query != urlsplit(source(second)).query  # each has a one-time token of its own
    other = gh.look(tiny(), None, "1 2 3")._repr_html_()
    assert urlsplit(source(other)).port != urlsplit(source(first)).port


@pytest.mark.usefixtures("kernel")
def test_the_oldest_server_ends_where_too_many_models_are_shown() -> None:
    addresses = [source(gh.look(tiny(), None, "1 2")._repr_html_()) for _ in range(viewer.MAX_SERVERS + 1)]
    assert len(viewer._frame_servers) == viewer.MAX_SERVERS
    assert ask(addresses[-1]).status == 303
    with pytest.raises(OSError, match=r"refused|reset"):
        ask(addresses[0])


@pytest.mark.usefixtures("kernel")
def test_the_page_itself_is_in_the_cell_on_request() -> None:
    drawn = gh.look(tiny(), None, "1 2 3", embed=True)._repr_html_()
    assert "srcdoc=" in drawn
    assert not viewer._frame_servers


def test_a_script_and_a_terminal_have_the_page_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gh.page.Look, "html", lambda self: "the page")
    for shell in (None, SimpleNamespace()):  # IPython imported by a script; a terminal, which has no kernel
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda shell=shell: shell))
        assert 'srcdoc="the page"' in gh.look(tiny(), None, "1 2 3")._repr_html_()
    assert not viewer._frame_servers


@pytest.mark.usefixtures("kernel")
def test_the_frame_needs_its_token_once_and_its_cookie_after() -> None:
    address = source(gh.look(tiny(), None, "1 2 3")._repr_html_())
    door = address.partition("?")[0]
    assert ask(door).status == 401
    assert ask(f"{door}?token=x").status == 401
    entered = ask(address)
    assert entered.status == 303
    cookie, *rules = entered.getheader("Set-Cookie").split("; ")
    assert {*rules} == {"HttpOnly", "Path=/", "SameSite=None", "Secure", "Partitioned"}
    assert ask(address).status == 401  # once: what is saved with the notebook opens nothing
    assert ask(address, Cookie=cookie).status == 200  # a notebook loads a frame again when it is scrolled
    assert ask(door, Cookie=cookie, Host="evil.example").status == 403
    assert ask(door, Cookie=cookie, Origin="http://localhost:8888").status == 403  # the notebook shows, but reads not


@pytest.mark.usefixtures("kernel")
def test_pages_of_this_machine_alone_may_frame_it() -> None:
    rules = ask(source(gh.look(tiny(), None, "1 2 3")._repr_html_())).getheader("Content-Security-Policy")
    (ancestors,) = [rule for rule in rules.split("; ") if rule.startswith("frame-ancestors ")]
    hosts = {urlsplit(one.replace(":*", "")).hostname for one in ancestors.split()[1:]}
    assert hosts == {"127.0.0.1", "localhost"}
    server = gh.look(tiny(), None, "1 2 3").open(browser=False)  # and elsewhere none
    try:
        assert "frame-ancestors 'none'" in ask(server.address).getheader("Content-Security-Policy")
    finally:
        server.close()


@contextmanager
def notebook(cell: str) -> Iterator[int]:
    """Serve a page with a cell in it, as a notebook's server does; yield the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(f"<!doctype html><p>a cell</p>{cell}".encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.smoke
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("host", ["localhost", pytest.param("127.0.0.1", marks=pytest.mark.long)])
def test_a_notebook_on_another_port_shows_the_page(decoder: Trained, browser: Browser, host: str) -> None:
    model, tok = decoder
    page = browser.new_context().new_page()
    with notebook(gh.look(model, tok, TEXT, view="residual")._repr_html_()) as port:
        for _ in range(2):  # the second time its one-time token is used up, and the cookie lets it in
            page.goto(f"http://{host}:{port}/")
            frame = page.frame_locator("iframe")
            frame.locator("body[data-busy=false] .view").first.wait_for()
            assert frame.locator("[data-testid=strip-text] .token").count() == len(tok.encode(TEXT))
            assert frame.locator("#tab-residual").get_attribute("aria-selected") == "true"
    page.context.close()


@pytest.mark.long
@pytest.mark.usefixtures("kernel")
def test_a_page_with_another_host_name_cannot_frame_it(decoder: Trained, browser: Browser) -> None:
    page = browser.new_context().new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    with notebook(gh.look(*decoder, TEXT)._repr_html_()) as port:
        page.goto(f"http://evil.localhost:{port}/")  # on this machine, as browsers ask before others reach it at all
        page.wait_for_timeout(2000)
    assert page.frame_locator("iframe").locator(".view").count() == 0
    assert any("frame-ancestors" in line for line in said), said
    page.context.close()
