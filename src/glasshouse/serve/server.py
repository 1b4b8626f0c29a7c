"""The HTTP server: its socket, its access control, and its graceful shutdown."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import FrameType

import uvicorn

from glasshouse.errors import GlasshouseError, InputError
from glasshouse.serve.access_log import AccessLog
from glasshouse.serve.api import Api, Limits
from glasshouse.serve.app import make_app
from glasshouse.serve.gate import Gate, Keys
from glasshouse.serve.look import ServedPage
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import Log, host_headers, http_config, is_loopback, listen, url_host

WILDCARDS = ("0.0.0.0", "::", "")


class _Uvicorn(uvicorn.Server):
    """Drains on SIGTERM and Ctrl-C: what was begun is finished, newcomers get 503; a second signal stops at once."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float) -> None:
        super().__init__(config)
        self.drain_seconds = drain_seconds
        self.drain_began: float | None = None
        self.n_requests: Callable[[], int] = lambda: 0
        self.stop_jobs: Callable[[], None] = lambda: None
        self.has_failed: Callable[[], bool] = lambda: False
        self.log: Log = Log()
        self._drain_was_logged = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.drain_began is None:
            self._captured_signals.append(sig)
        self.drain()

    def drain(self) -> None:
        """Begin to shut down; the second time, stop at once."""
        if self.drain_began is None:
            self.drain_began = time.monotonic()
        else:
            self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        self.should_exit = self.should_exit or self.has_failed()
        if self.drain_began is not None:
            if not self._drain_was_logged:  # not in the handler of a signal, which may interrupt the log itself
                self._drain_was_logged = True
                self.log.info("draining", requests=self.n_requests(), seconds=self.drain_seconds)
            late = time.monotonic() - self.drain_began > self.drain_seconds
            self.should_exit = self.should_exit or late or self.n_requests() == 0
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.log.info("stopping", requests=self.n_requests())
        self.stop_jobs()  # so that their clients get an answer before the connections close
        await super().shutdown(sockets)
        self.log.info("stopped")
        self.log.close()  # now: the signal that was caught is sent again


class Server:
    """An HTTP server for models, on localhost by default; any other address requires API keys.

    With `look` it also serves the page, in which the last answers can be opened, each with its own API key; with
    `internals` requests may record activations, score their tokens by probes, and have rules on the scores.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder")).eval()
    >>> server = Server([ServedModel("tiny", model, None, slots=2, max_len=64)])
    >>> server.address.startswith("http://127.0.0.1:")
    True
    >>> server.close()
    >>> Server([ServedModel("tiny", model, None, slots=2, max_len=64)], host="0.0.0.0")
    Traceback (most recent call last):
    ...
    glasshouse.errors.InputError: host is '0.0.0.0', which other machines reach, but there is no key; give one.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        keys: Sequence[str] = (),
        allowed_hosts: Collection[str] = (),
        allowed_origins: Collection[str] = (),
        limits: Limits | None = None,
        drain_seconds: float = 30.0,
        look: bool = False,
        internals: bool = False,
        log: Log | None = None,
    ) -> None:
        if not models:
            raise InputError("there is no model to serve; give at least one.")
        names = [one.name for one in models]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(f"two models are named {twice!r}; give them names, as NAME=MODEL.")
        if not is_loopback(host) and not keys:
            raise InputError(f"host is {host!r}, which other machines reach, but there is no key; give one.")
        accepted = Keys(keys)
        self.socket = listen(host, port)
        self.port = self.socket.getsockname()[1]
        self.api = Api(models, limits or Limits(), look=look, internals=internals, log=log)
        # Behind all interfaces the names are not known; a key is needed there, which no rebound name has.
        hosts = None
        if host not in WILDCARDS or allowed_hosts:
            hosts = host_headers(host, self.port) | {name.lower() for name in allowed_hosts}
            hosts |= {f"{name.lower()}:{self.port}" for name in allowed_hosts}
        app = make_app(self.api, ServedPage(self.api, len(accepted)) if look else None)
        config = http_config(lambda scope, receive, send: self.gate(scope, receive, send), lifespan="on")
        self._uvicorn = _Uvicorn(config, drain_seconds)
        draining = lambda: self._uvicorn.drain_began is not None  # noqa: E731
        access_log = AccessLog(self.api.log, self.api.http_counts, app.routes)
        self.gate = Gate(app, access_log, accepted, hosts, allowed_origins, draining, has_page=look)
        self._uvicorn.n_requests = lambda: self.gate.n_requests
        self._uvicorn.stop_jobs = self.api.runner.stop
        self._uvicorn.log = self.api.log
        self.address = f"http://{url_host(host)}:{self.port}"
        self._thread: threading.Thread | None = None

    def run(self, started: Callable[[], None] = lambda: None) -> None:
        """Serve until SIGTERM or Ctrl-C; `started` is called once connections are accepted.

        Raises if the engine thread died of an error, which ends the process as well.
        """
        self._uvicorn.has_failed = lambda: self.api.runner.has_failed
        self.socket.listen()
        started()
        with contextlib.suppress(KeyboardInterrupt):
            self._uvicorn.run(sockets=[self.socket])
        self.close()
        if self.api.runner.has_failed:
            raise GlasshouseError(self.api.runner.closed_reason)

    def start(self) -> None:
        """Serve in a background thread until `close`, or until `drain` is done."""
        self.socket.listen()
        self._thread = threading.Thread(target=self._uvicorn.run, kwargs={"sockets": [self.socket]}, daemon=True)
        self._thread.start()

    def drain(self) -> None:
        """Finish the requests that were begun, refuse others, and stop."""
        self._uvicorn.drain()

    def close(self) -> None:
        """Stop now: unfinished requests get an error."""
        self._uvicorn.should_exit = True
        self.api.close()
        if self._thread is not None:
            self._thread.join(timeout=30)
        self.socket.close()
