"""The page over HTTP: its files, and what it asks, one answer after the other."""

from __future__ import annotations

import asyncio
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from glasshouse import config
from glasshouse.errors import GlasshouseError
from glasshouse.page import saving, wire
from glasshouse.page.answers import ANSWERS, Answer
from glasshouse.page.saving import STATIC
from glasshouse.page.trace import Traces

ASKS = ANSWERS | {"save": Answer(saving.Save, saving.save)}
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
LARGEST = 4 * 2**20  # bytes of a question


class Desk:
    """Takes what the page asks and has it answered; what needs the model waits for its turn."""

    def __init__(self, traces: Traces) -> None:
        self.traces = traces
        self.turn = asyncio.Lock()  # those who wait are served in the order they came

    async def ask(self, request: Request) -> Response:
        """Answer one question by its name."""
        name = request.path_params["name"]
        if name not in ASKS:
            return _said(f"the page has no answer {name!r}; {config.did_you_mean(name, ASKS)}", 404)
        try:
            body = await _body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return _said(f"what was asked is larger than {LARGEST // 2**20} MiB; give less.", 413)
        answer = ASKS[name]
        if not answer.waits:
            return await run_in_threadpool(answered, self.traces, answer, body)
        async with self.turn:
            if await request.is_disconnected():  # it asked for something else meanwhile
                return Response(status_code=499)
            return await run_in_threadpool(answered, self.traces, answer, body)


def answered(traces: Traces, answer: Answer, body: bytes) -> Response:
    """Return an answer as a response: what is wrong with a question is one sentence."""
    try:
        given = answer.give(traces, config.parse(answer.ask, _table(body)))
        return Response(wire.encoded(given), media_type="application/json")
    except GlasshouseError as error:
        return _said(str(error), 400)
    except Exception as error:  # a mistake of ours: the page says so and goes on
        traceback.print_exc(file=sys.stderr)
        return _said(f"something is wrong here, not with what you did ({type(error).__name__}: {error})", 500)


def make_app(traces: Traces) -> Starlette:
    """Return the page of a subject, open to everyone: a guard belongs in front of it."""
    desk = Desk(traces)
    files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in STATIC.rglob("*.*")}
    # What every view needs is fetched at once; else each module would wait for the one that names it.
    needed = [name for name in files if name.endswith(".js") and "/" not in name]
    scripts = "".join(f'<link rel="modulepreload" href="/static/{name}">\n' for name in needed)
    page = files["index.html"].decode().replace("</head>", f"{scripts}</head>")

    async def front(request: Request) -> Response:
        return HTMLResponse(page)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        return Response(files[name], media_type=KINDS[Path(name).suffix])

    return Starlette(
        routes=[
            Route("/", front),
            Route("/api/{name:path}", desk.ask, methods=["POST"]),
            Route("/static/{name:path}", file),
        ]
    )


async def _body(request: Request) -> bytes | None:
    """Return what was sent; None where it is too much, of which no more is taken in."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            return None
    return b"".join(parts)


def _table(body: bytes) -> Mapping[str, object]:
    try:
        table = json.loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise GlasshouseError(f"what was asked is no JSON: {error}.") from None
    if not isinstance(table, dict):
        raise GlasshouseError(f"what was asked is a {type(table).__name__}, but it must be an object.")
    return table


def _said(sentence: str, status: int) -> Response:
    return Response(wire.encoded({"error": sentence}), status, media_type="application/json")
