"""The access log: a line for each request, and counts of them by route, method and status."""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from glasshouse.serve.api import KEY, USAGE
from glasshouse.serve.metrics import HttpCount
from glasshouse.serve.schema.errors import REQUEST_ID
from glasshouse.web import Log

METHODS = ("GET", "POST", "OPTIONS", "HEAD")  # that are counted by name; a client may send any word
LONGEST_PATH = 200  # characters of it in a line
CALLERS_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")  # of a proxy or a client, used in place of our own


class Counted(Protocol):
    """What counts the tokens of a request while it is answered."""

    prompt_tokens: int
    completion_tokens: int


class AccessLog:
    """Gives each request an id, and logs a line once it is answered, without the contents of request and answer."""

    def __init__(self, log: Log, counts: Counter[HttpCount], routes: Sequence[BaseRoute]) -> None:
        self._log, self._counts, self._routes = log, counts, routes

    def begin(self, scope: Scope) -> Entry:
        """Begin the entry of a request."""
        given = Headers(scope=scope).get("x-request-id", "")
        name = given if CALLERS_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        REQUEST_ID.set(name)
        return Entry(self, scope, name)

    def write(self, entry: Entry) -> None:
        """Count a request, and write its line."""
        scope = entry.scope
        route = next((one.path for one in self._routes if isinstance(one, Route) and _matches(one, scope)), "other")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self._counts[HttpCount(route, method, entry.status)] += 1
        counted: Counted | None = scope.get(USAGE)
        tokens = {}
        if counted is not None:
            tokens = {"prompt_tokens": counted.prompt_tokens, "completion_tokens": counted.completion_tokens}
        self._log.info(
            "request",
            method=scope["method"][:20],
            path=scope["path"][:LONGEST_PATH],
            status=entry.status,
            seconds=round(time.perf_counter() - entry.began, 4),
            **tokens,
            key=scope.get(KEY) or "",
            request_id=entry.name,
        )


class Entry:
    """One request, from its headers to the end of its answer."""

    def __init__(self, log: AccessLog, scope: Scope, name: str) -> None:
        self._log, self.scope, self.name = log, scope, name
        self.began = time.perf_counter()
        self.status = 500  # where there is no answer, which is an error of ours

    def __enter__(self) -> Entry:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.write(self)


def _matches(route: Route, scope: Scope) -> bool:
    return route.matches(scope)[0] is not Match.NONE
