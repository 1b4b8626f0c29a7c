"""Local web server of the page."""

from __future__ import annotations

import threading
import webbrowser
from collections.abc import Callable

import uvicorn

from glasshouse import device
from glasshouse.errors import InputError
from glasshouse.page.app import make_app
from glasshouse.page.files import index_page
from glasshouse.page.guard import Guard, new_token, policy
from glasshouse.page.trace import TraceCache
from glasshouse.web import host_headers, http_config, is_loopback, listen, url_host


class Server:
    """The page of a model, served at an address with a random token; `framed` for frames in a notebook.

    >>> import glasshouse as gh
    >>> from glasshouse.page.model_loader import ModelLoader
    >>> server = Server(TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None)))
    >>> server.address.startswith("http://127.0.0.1:"), "token=" in server.address
    (True, True)
    >>> server.close()
    """

    def __init__(self, traces: TraceCache, host: str = "127.0.0.1", port: int = 0, *, framed: bool = False) -> None:
        if host in ("0.0.0.0", "::", ""):
            raise InputError(f"host is {host!r}, which means all interfaces; give one address.")
        self.socket = listen(host, port)
        self.port = self.socket.getsockname()[1]
        self.token = new_token()
        rules = policy(index_page(), framed=framed)
        self._guard = Guard(make_app(traces), host_headers(host, self.port), self.token, rules, framed=framed)
        self._door = f"http://{url_host(host)}:{self.port}/?token="
        self.address = self._door + self.token
        self.is_local = is_loopback(host)
        self._uvicorn = uvicorn.Server(http_config(self._guard, lifespan="off"))
        self._thread: threading.Thread | None = None

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C; `started` is called once the server accepts connections."""
        self.socket.listen()  # from here on connections are queued
        started()
        try:
            self._uvicorn.run(sockets=[self.socket])
        except KeyboardInterrupt:
            pass
        finally:
            self.socket.close()

    def start(self) -> None:
        """Serve in a background thread until `close`."""
        self.socket.listen()
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def show(self, fragment: str = "") -> None:
        """Open the page at a state in a browser, if there is one and a screen to show it."""
        if device.find_browser() is None:
            return
        address = self.one_time_address(fragment)
        threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()

    def one_time_address(self, fragment: str = "") -> str:
        """Return an address that opens the page at a state once; after that the browser has a cookie."""
        return self._door + self._guard.ticket() + fragment

    def close(self) -> None:
        """Stop serving."""
        self._uvicorn.should_exit = True
        if self._thread is not None:
            self._thread.join(timeout=10)
        self.socket.close()
