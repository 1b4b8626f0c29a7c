"""Firefox, driven by WebDriver BiDi: as much of Playwright's `Page` as the comparisons of live pages use."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("firefox-esr", "firefox")
MISSING = "NO BROWSER: this test needs Firefox. Install it (apt-get install firefox-esr)."
PREFERENCES = {
    "app.normandy.enabled": False,
    "app.update.enabled": False,
    "browser.shell.checkDefaultBrowser": False,
    "datareporting.policy.dataSubmissionEnabled": False,
    "network.captive-portal-service.enabled": False,
    "network.connectivity-service.enabled": False,
    # A proxy that nothing listens at: no connection leaves this machine.
    "network.proxy.http": "127.0.0.1",
    "network.proxy.http_port": 9,
    "network.proxy.ssl": "127.0.0.1",
    "network.proxy.ssl_port": 9,
    "network.proxy.type": 1,
    "services.settings.server": "data:,#",
    "toolkit.telemetry.enabled": False,
}
READY = "WebDriver BiDi listening on "
PATIENCE = 600  # seconds for an answer


def find() -> str | None:
    """Return the path of Firefox on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class FirefoxError(Exception):
    """What Firefox, or a script in it, answered instead of a result."""


class FirefoxPage:
    """A page in Firefox, without a network; `troubles` collects errors, warnings and requests of the network."""

    def __init__(self, connection: ClientConnection, troubles: list[str]) -> None:
        self._connection, self._numbers, self._troubles = connection, itertools.count(), troubles
        self._send("session.new", capabilities={})
        self._send("session.subscribe", events=["log.entryAdded", "network.beforeRequestSent"])
        self._tab = self._send("browsingContext.getTree")["contexts"][0]["context"]

    def _send(self, method: str, **params: object) -> Any:  # noqa: ANN401 - any JSON
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._connection.recv(timeout=PATIENCE))
            if message.get("type") == "event":
                self._note(message["method"], message["params"])
            elif message["id"] == number:
                if message["type"] == "error":
                    raise FirefoxError(f"{method}: {message['message']}")
                return message["result"]

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "log.entryAdded" and params["level"] in ("error", "warn"):
            self._troubles.append(params["text"])
        elif method == "network.beforeRequestSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "blob:")):
                self._troubles.append(url)

    def goto(self, url: str) -> None:
        """Open a page, and wait until it has loaded."""
        self._send("browsingContext.navigate", context=self._tab, url=url, wait="complete")

    def evaluate(self, function: str, argument: object = None) -> Any:  # noqa: ANN401 - any JSON
        """Call a function of JavaScript with a plain value, and return what it returns or promises."""
        called = f"async () => JSON.stringify((await ({function})({json.dumps(argument)})) ?? null)"
        target = {"context": self._tab}
        answer = self._send("script.callFunction", functionDeclaration=called, target=target, awaitPromise=True)
        if answer["type"] == "exception":
            raise FirefoxError(answer["exceptionDetails"]["text"])
        return json.loads(answer["result"]["value"])


@contextmanager
def opened(path: Path, troubles: list[str]) -> Iterator[FirefoxPage]:
    """Open a file in a Firefox of its own, with a fresh profile and every connection refused."""
    program = find()
    assert program is not None
    with tempfile.TemporaryDirectory() as profile:
        proxy = {"network.proxy.type": 1, "network.proxy.http": "127.0.0.1", "network.proxy.http_port": 9}
        proxy |= {"network.proxy.ssl": "127.0.0.1", "network.proxy.ssl_port": 9}
        lines = [
            f"user_pref({json.dumps(name)}, {json.dumps(value)});" for name, value in (PREFERENCES | proxy).items()
        ]
        (Path(profile) / "user.js").write_text("\n".join(lines))
        command = [program, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            address = next(line.split(READY)[1].strip() for line in process.stderr if READY in line)
            threading.Thread(target=process.stderr.read, daemon=True).start()  # a full pipe would stop it
            try:
                with connect(f"{address}/session", max_size=None, ping_interval=None) as connection:
                    page = FirefoxPage(connection, troubles)
                    page.goto(path.as_uri())
                    yield page
            finally:
                process.kill()
