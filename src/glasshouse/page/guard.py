"""Access control: local clients that have the token, and no cross-origin requests."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Collection
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

CLOSED = "Open the address that was printed at start-up; it contains the access token.\n"
FOREIGN = "Requests from other hosts or origins are not accepted.\n"
# The pages that may show ours in a frame, where it is served for a notebook: those of servers on this machine.
LOCAL_PAGES = " ".join(f"{scheme}://{host}:*" for scheme in ("http", "https") for host in ("127.0.0.1", "localhost"))


class Guard:
    """ASGI middleware that checks host, origin and token and sets the security headers.

    The token in the printed address becomes an HttpOnly cookie, and the address is replaced by one without it. A
    browser that is started for the user gets a one-time token, as command lines are visible to all users of the
    machine. `hosts` are the accepted values of the Host header.

    In a frame (`framed`) the page may be on another site than the notebook around it: localhost and 127.0.0.1 are
    two. Its cookie is partitioned there: it is sent only in frames of the site in which it was set.
    """

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], token: str, policy: str, *, framed: bool = False
    ) -> None:
        self.app, self.token, self.policy = app, token, policy
        # Lax, not strict: the printed address may be a link on another page, such as a web terminal.
        self.cookie_rules = "SameSite=None; Secure; Partitioned" if framed else "SameSite=Lax"
        self.tickets: set[str] = set()
        self.hosts = frozenset(hosts)
        self.origins = frozenset(f"http://{host}" for host in hosts)
        # Cookies are shared between ports, so the name contains the port.
        self.cookie = "glasshouse-" + re.sub(r"\D", "", min(hosts).rpartition(":")[2])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # only HTTP and lifespan are accepted
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)

        async def sealed(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._seal(MutableHeaders(scope=message))
            await send(message)

        answer = self._refuse(headers, scope)
        await (answer or self.app)(scope, receive, sealed)

    def _refuse(self, headers: Headers, scope: Scope) -> ASGIApp | None:
        """Return the response that rejects or redirects a request; None if it may pass."""
        if headers.get("host", "").lower() not in self.hosts:
            return PlainTextResponse(FOREIGN, 403)
        if headers.get("origin", next(iter(self.origins))).lower() not in self.origins:
            return PlainTextResponse(FOREIGN, 403)
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[-1]
        if given and scope["path"] == "/" and (self._is_token(given) or self._takes(given)):
            entered = RedirectResponse("/", 303)
            entered.headers["Set-Cookie"] = f"{self.cookie}={self.token}; HttpOnly; Path=/; {self.cookie_rules}"
            return entered
        if not self._is_token(cookie_parser(headers.get("cookie", "")).get(self.cookie, "")):
            return PlainTextResponse(CLOSED, 401)
        return None

    def ticket(self) -> str:
        """Return a token that is valid once."""
        made = new_token()
        self.tickets.add(made)
        return made

    def _takes(self, given: str) -> bool:
        """Consume a one-time token."""
        try:
            self.tickets.remove(given)
        except KeyError:
            return False
        return True

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode(), self.token.encode())

    def _seal(self, headers: MutableHeaders) -> None:
        headers.update(security_headers(self.policy))


def new_token() -> str:
    """Return a random token."""
    return secrets.token_urlsafe(32)


def security_headers(policy: str) -> dict[str, str]:
    """Return the headers of every response of a page with a Content-Security-Policy."""
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }


def policy(page: str, *, framed: bool = False) -> str:
    """Return the Content-Security-Policy of a page: its own files, and its inline scripts by hash.

    Only where it is served for a notebook, a page of this machine may show it in a frame.

    >>> policy('<script type="importmap">{}</script>').split("; ")[1]
    "script-src 'self' 'sha256-RBNvo1WzZ4oRRq0W9+hknpT7T8If536DEMBg9hyq/4o='"
    """
    inline = re.findall(r"<script[^>]*>([^<]+)</script>", page)
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in inline
    )
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'self' {hashes}".rstrip(),
            "style-src 'self'",
            "img-src 'self' data: blob:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors " + (LOCAL_PAGES if framed else "'none'"),
        ]
    )
