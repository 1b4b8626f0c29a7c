"""ASGI middleware in front of all routes: header limits, Host and Origin checks, API keys, and shutdown."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glasshouse.errors import InputError
from glasshouse.serve.access_log import AccessLog, Entry
from glasshouse.serve.api import KEY
from glasshouse.serve.schema.errors import ApiError, unavailable
from glasshouse.web import MAX_HEADER_BYTES

OPEN = ("/health",)  # the only paths that need no key
MAX_HEADERS = 100
SHORTEST_KEY = 16  # characters; shorter ones can be guessed
CORS_METHODS, CORS_HEADERS = "GET, POST, OPTIONS", "authorization, content-type, x-request-id"


class Keys:
    """The accepted API keys; only their hashes are kept, and a request is identified by the number of its key.

    >>> keys = Keys(["correct-horse-battery"])
    >>> keys.find("Bearer correct-horse-battery"), keys.find("Bearer wrong"), keys.find("")
    ('key-1', None, None)
    """

    def __init__(self, keys: Sequence[str]) -> None:
        for number, key in enumerate(keys, 1):
            if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
                raise InputError(
                    f"key {number} is not {SHORTEST_KEY} or more printable ASCII characters without a space; "
                    "make one by: openssl rand -hex 32."
                )
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __len__(self) -> int:
        return len(self._hashes)

    def find(self, authorization: str) -> str | None:
        """Return the name of the key in an Authorization header, in a time that does not depend on the keys."""
        scheme, _, given = authorization.partition(" ")
        digest = hashlib.sha256(given.strip().encode()).digest()
        found = None
        for number, one in enumerate(self._hashes, 1):
            if secrets.compare_digest(digest, one):
                found = f"key-{number}"
        return found if scheme.lower() == "bearer" else None


class Gate:
    """ASGI middleware: bounds of the headers, Host, Origin, key, and whether the server is shutting down.

    `hosts` are the accepted Host headers, None for any: with a key, a name that was rebound to this address is of no
    use, as a browser does not send the key by itself. A request from a page (with an Origin) is refused unless its
    origin is one of `origins`; then the CORS headers are sent. With `has_page` the server's own page may too: its
    origin is what the Host header names. The page's files need no key, as there is nothing of a model in them.
    """

    def __init__(
        self,
        app: ASGIApp,
        access_log: AccessLog,
        keys: Keys,
        hosts: Collection[str] | None,
        origins: Collection[str] = (),
        is_draining: Callable[[], bool] = lambda: False,
        *,
        has_page: bool = False,
    ) -> None:
        self.app, self.keys, self.is_draining, self.has_page = app, keys, is_draining, has_page
        self._access_log = access_log
        self.hosts = None if hosts is None else frozenset(hosts)
        self.origins = frozenset(origins)
        self.n_requests = 0  # that are not answered yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        with self._access_log.begin(scope) as entry:
            await self._answer(scope, receive, send, entry)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, entry: Entry) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["X-Request-Id"] = entry.name
                sent["X-Content-Type-Options"] = "nosniff"
                sent["Cross-Origin-Resource-Policy"] = "same-origin"
                sent.setdefault("Cache-Control", "no-store")
                if origin in self.origins:
                    sent["Access-Control-Allow-Origin"] = origin
                    sent["Access-Control-Expose-Headers"] = "x-request-id"
                    sent["Cross-Origin-Resource-Policy"] = "cross-origin"
                    sent["Vary"] = "Origin"
            await send(message)

        try:
            answer = self._pass(scope, headers, origin)
        except ApiError as error:
            answer = error.response()
        self.n_requests += 1
        try:
            await (answer or self.app)(scope, receive, sealed)
        finally:
            self.n_requests -= 1

    def _pass(self, scope: Scope, headers: Headers, origin: str | None) -> Response | None:
        """Return the answer to a preflight request, None for a request that may pass; raise ApiError for others."""
        if len(scope["raw_path"]) + len(scope["query_string"]) > MAX_HEADER_BYTES:
            raise ApiError(f"the path and query have more than {MAX_HEADER_BYTES} bytes.", 414)
        size = sum(len(name) + len(value) for name, value in scope["headers"])
        if len(scope["headers"]) > MAX_HEADERS or size > MAX_HEADER_BYTES:
            raise ApiError(f"there are more than {MAX_HEADERS} headers or {MAX_HEADER_BYTES} bytes of them.", 431)
        host = headers.get("host", "").lower()
        if self.hosts is not None and host not in self.hosts:
            raise ApiError("the Host header names another server; use the address that was printed at start-up.", 403)
        own = (f"http://{host}", f"https://{host}") if self.has_page and host else ()
        if origin is not None and origin not in self.origins and origin.lower() not in own:
            raise ApiError("requests from web pages are not accepted; the server can allow their origin.", 403)
        if origin is not None and scope["method"] == "OPTIONS":
            allowed = {
                "Access-Control-Allow-Methods": CORS_METHODS,
                "Access-Control-Allow-Headers": CORS_HEADERS,
                "Access-Control-Max-Age": "600",
            }
            return Response(status_code=204, headers=allowed)
        # Of the scope, as the router has it: a URL put together from headers could name another path.
        path = scope["path"]
        is_open = path in OPEN or (self.has_page and (path == "/" or path.startswith("/static/")))
        name = self.keys.find(headers.get("authorization", "")) if len(self.keys) else ""
        if name is None and not is_open:
            message = "there is no valid key; send the header Authorization: Bearer KEY."
            raise ApiError(message, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        if self.is_draining() and not is_open:
            raise unavailable("the server is shutting down.")
        scope[KEY] = name or ""
        return None
