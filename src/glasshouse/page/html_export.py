"""The page as one file: its scripts and styles, and the answers it needs, so that it opens without a server."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from glasshouse import config
from glasshouse.config import JsonDict, Settings
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.page import serialization
from glasshouse.page.endpoints import ENDPOINTS
from glasshouse.page.trace import TraceCache

STATIC = Path(__file__).parent / "static"
LARGEST, ROOM = (
    64 * 2**20,
    8 * 2**20,
)  # bytes of answers in one file: at most, and with those that may be requests next
# A file has no server to say what it may do, so it says so itself: nothing is fetched, from nowhere.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Save(Settings):
    """Which page is to be kept: its address after the #, and what it has requests.

    That is "name number body", where the number is that of the question that belongs into the body, or "-": a long
    text comes once, however many tiles were requests for.
    """

    fragment: str = ""
    forward_passes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


def save(traces: TraceCache, params: Save) -> JsonDict:
    """Return what the page shows now as one HTML file."""
    forward_passes = [_parsed(one) for one in params.forward_passes]
    requests = []
    for one in params.requests:
        name, number, body = (*one.split(" ", 2), "", "")[:3]
        known = number.isdigit() and int(number) < len(forward_passes)
        requests.append((name, _parsed(body) | ({"forward_pass": forward_passes[int(number)]} if known else {})))
    return {"html": export_html(traces, params.fragment, requests)}


def export_html(
    traces: TraceCache,
    fragment: str,
    requests: Iterable[tuple[str, JsonDict]],
    more: Iterable[tuple[str, JsonDict]] = (),
) -> str:
    """Return a page that holds the answers to some forward_passes, by name and body, and opens at a state.

    Of those that may be requests next it holds as many as there is room for.
    """
    answers: dict[str, object] = {}
    size = 0

    def hold(name: str, body: JsonDict) -> None:
        nonlocal size
        key = request_key(name, body)
        if name not in ENDPOINTS or key in answers:
            return
        try:
            given = serialization.to_json(ENDPOINTS[name].handler(traces, config.parse(ENDPOINTS[name].params, body)))
        except GlasshouseError:  # the page that requests has been told
            return
        size += len(given)
        answers[key] = json.loads(given)

    for name, body in requests:
        hold(name, body)
        if size > LARGEST:
            raise InputError(
                f"the page would hold more than {LARGEST // 2**20} MiB; reload it at the view you want, then save."
            )
    for name, body in more:
        if size > ROOM:
            break
        hold(name, body)
    return assemble({"fragment": fragment, "answers": answers})


def request_key(name: str, body: JsonDict) -> str:
    """Return the name under which the page looks for an answer: the same text that it would have sent.

    >>> request_key("next", {"position": 3.0, "requests": {"text": "é", "added": [1]}})
    'next {"requests":{"added":[1],"text":"é"},"position":3}'
    """
    return f"{name} {json.dumps(_whole(body), sort_keys=True, separators=(',', ':'), ensure_ascii=False)}"


def _whole(value: object) -> object:
    """Write numbers as JavaScript does, which knows no 1.0."""
    if isinstance(value, dict):
        return {name: _whole(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def assemble(saved: JsonDict) -> str:
    """Put the page's files and what it holds into one HTML file."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    styles = re.findall(r'<link rel="stylesheet" href="/static/([^"]+)">', page)
    css = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in styles)
    scripts = {
        f"glasshouse/{path.relative_to(STATIC).as_posix()}": _script(path) for path in sorted(STATIC.rglob("*.js"))
    }
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="/static/main.js"></script>\n', "")
    page = re.sub(
        r'<script type="importmap">.*?</script>',
        lambda _: f'<script type="importmap">{json.dumps({"imports": scripts})}</script>',
        page,
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>\n{css}</style>\n'
    # What a text says must not end the script it stands in.
    held = serialization.to_json(saved).decode().replace("<", "\\u003c")
    foot = f'<script type="application/json" id="saved">{held}</script>\n'
    foot += '<script type="module">import "glasshouse/main.js";</script>\n'
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{foot}</body>")


def _script(path: Path) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _parsed(body: str) -> JsonDict:
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"what the page requests is no JSON: {error}.") from None
    return table if isinstance(table, dict) else {}
