"""The page over HTTP: static files and API requests."""

from __future__ import annotations

import asyncio
import contextlib
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
from glasshouse.page.endpoints import endpoints
from glasshouse.page.files import index_page, static_files
from glasshouse.page.saving import Save, save
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint
from glasshouse.web import json_response, read_body, strict_loads

MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
MAX_BODY = 4 * 2**20  # bytes per request
BODY_TIMEOUT = 30.0  # seconds to send them


class Dispatcher:
    """Handles API requests; those that need the model run one at a time."""

    def __init__(self, traces: TraceCache) -> None:
        self.traces = traces
        self.endpoints = endpoints() | {"save": Endpoint(Save, save)}
        self.model_lock = asyncio.Lock()  # waiting requests are served in order

    async def handle(self, request: Request) -> Response:
        """Handle a request by endpoint name."""
        name = request.path_params["name"]
        if name not in self.endpoints:
            return _error_response(f"there is no endpoint {name!r}; {config.did_you_mean(name, self.endpoints)}", 404)
        try:
            async with asyncio.timeout(BODY_TIMEOUT):
                body = await read_body(request, MAX_BODY)
        except ClientDisconnect:
            return Response(status_code=499)
        except TimeoutError:
            return _error_response(f"the body did not come within {BODY_TIMEOUT:g} s; send it again.", 408)
        if body is None:
            return _error_response(f"the request is larger than {MAX_BODY // 2**20} MiB; send less.", 413)
        endpoint = self.endpoints[name]
        if not endpoint.needs_model:
            return await run_in_threadpool(respond, self.traces, endpoint, body)
        async with self.model_lock:
            if await request.is_disconnected():  # the client has moved on
                return Response(status_code=499)
            return await run_in_threadpool(respond, self.traces, endpoint, body)


def respond(traces: TraceCache, endpoint: Endpoint, body: bytes) -> Response:
    """Return the response of an endpoint; an error is reported in one sentence."""
    try:
        given = endpoint.handler(traces, config.parse(endpoint.params, _table(body)))
        return json_response(given)
    except GlasshouseError as error:
        return _error_response(str(error), 400)
    except Exception as error:  # a bug: report it and keep serving
        with contextlib.suppress(OSError, ValueError):  # where stderr cannot be written
            traceback.print_exc(file=sys.stderr)
        return _error_response(f"internal error ({type(error).__name__}: {error})", 500)


def make_app(traces: TraceCache) -> Starlette:
    """Return the app without access control; put a guard in front of it."""
    return Starlette(
        routes=[*page_routes(index_page()), Route("/api/{name:path}", Dispatcher(traces).handle, methods=["POST"])]
    )


def page_routes(page: str, headers: Mapping[str, str] | None = None) -> list[Route]:
    """Return the routes of the page itself, an HTML text, and of its files, which contain nothing of a model."""
    files = static_files()
    # Preload the modules that every view needs; otherwise each waits for the one that imports it.
    needed = [name for name in files if name.endswith(".js") and "/" not in name]
    scripts = "".join(f'<link rel="modulepreload" href="/static/{name}">\n' for name in needed)
    page = page.replace("</head>", f"{scripts}</head>")

    async def front(request: Request) -> Response:
        return HTMLResponse(page, headers=headers)

    async def file(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:
            return Response("there is no such file\n", 404, media_type="text/plain")
        return Response(files[name], media_type=MEDIA_TYPES[Path(name).suffix], headers=headers)

    return [Route("/", front), Route("/static/{name:path}", file)]


def _table(body: bytes) -> Mapping[str, object]:
    try:
        table = strict_loads(body or b"{}")
    except (ValueError, RecursionError) as error:
        raise GlasshouseError(f"the request is not valid JSON: {error}.") from None
    if not isinstance(table, dict):
        raise GlasshouseError(f"the request is a {type(table).__name__}, but it must be a JSON object.")
    return table


def _error_response(sentence: str, status: int) -> Response:
    return json_response({"error": sentence}, status)
