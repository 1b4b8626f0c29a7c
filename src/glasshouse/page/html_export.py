"""Export of the page, or of a plan, as one HTML file with its scripts, styles and responses."""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from glasshouse import config
from glasshouse.config import JsonDict, Settings
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.page.endpoints import endpoints
from glasshouse.page.files import data_script, index_page, static_files
from glasshouse.page.trace import TraceCache
from glasshouse.training.plan import TrainingPlan
from glasshouse.web import to_json

LARGEST, ROOM = 64 * 2**20, 8 * 2**20  # bytes of responses: the limit, and the limit with prefetched ones
# A standalone file sets its own policy: nothing may be fetched.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Save(Settings):
    """Parameters of an export: the URL fragment and the requests of the page.

    A request is "name index body", where the index refers to `forward_passes`, or is "-": a long text is sent once,
    however many tiles were requested.
    """

    fragment: str = ""
    forward_passes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


def save(traces: TraceCache, params: Save) -> JsonDict:
    """Return the current page as one HTML file."""
    forward_passes = {str(number): _parsed(one) for number, one in enumerate(params.forward_passes)}
    requests = []
    for one in params.requests:
        name, number, body = (*one.split(" ", 2), "", "")[:3]
        known = forward_passes.get(number)
        requests.append((name, _parsed(body) | ({} if known is None else {"forward_pass": known})))
    return {"html": export_html(traces, params.fragment, requests)}


def export_html(
    traces: TraceCache,
    fragment: str,
    requests: Iterable[tuple[str, JsonDict]],
    more: Iterable[tuple[str, JsonDict]] = (),
) -> str:
    """Return a page with the responses to some requests that opens at a state.

    Responses to `more` requests are added while there is room.
    """
    known = endpoints()
    responses: dict[str, object] = {}
    size = 0

    def add(name: str, body: JsonDict) -> None:
        nonlocal size
        key = request_key(name, body)
        if name not in known or key in responses:
            return
        try:
            given = to_json(known[name].handler(traces, config.parse(known[name].params, body)))
        except GlasshouseError:  # already reported to the page
            return
        size += len(given)
        responses[key] = json.loads(given)

    for name, body in requests:
        add(name, body)
        if size > LARGEST:
            raise InputError(
                f"the page would exceed {LARGEST // 2**20} MiB; reload it at the view you want, then save."
            )
    for name, body in more:
        if size > ROOM:
            break
        add(name, body)
    return standalone(index_page(), "saved", {"fragment": fragment, "responses": responses}, "main.js")


def request_key(name: str, body: JsonDict) -> str:
    """Return the key under which the page looks up a response: the request as it would send it.

    >>> request_key("next", {"position": 3.0, "prompt": {"text": "é", "appended": [1]}})
    'next {"position":3,"prompt":{"appended":[1],"text":"é"}}'
    """
    return f"{name} {json.dumps(_js_numbers(body), sort_keys=True, separators=(',', ':'), ensure_ascii=False)}"


def _js_numbers(value: object) -> object:
    """Format numbers as JavaScript does: 1.0 is 1."""
    if isinstance(value, dict):
        return {name: _js_numbers(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_js_numbers(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def standalone(page: str, name: str, data: object, main: str) -> str:
    """Put styles, scripts and data into a page that begins with the script `main`, in place of its links to them."""
    files = static_files()
    styles = re.findall(r'<link rel="stylesheet" href="/static/([^"]+)">', page)
    css = "\n".join(files[name].decode() for name in styles)
    scripts = {f"glasshouse/{name}": _script(text) for name, text in files.items() if name.endswith(".js")}
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="/static/main.js"></script>\n', "")
    page = re.sub(
        r'<script type="importmap">.*?</script>',
        lambda _: f'<script type="importmap">{json.dumps({"imports": scripts})}</script>',
        page,
    )
    head = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>\n{css}</style>\n'
    foot = data_script(name, data) + f'<script type="module">import "glasshouse/{main}";</script>\n'
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{foot}</body>")


def _script(text: bytes) -> str:
    return f"data:text/javascript;base64,{base64.b64encode(text).decode()}"


def _parsed(body: str) -> JsonDict:
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not valid JSON: {error}.") from None
    return table if isinstance(table, dict) else {}


def plan_page(name: str, plan: TrainingPlan) -> str:
    """Return a page with the picture of a plan that needs no server.

    >>> import glasshouse as gh
    >>> planner = gh.training.plan
    >>> page = plan_page("stdlib", planner.plan_training(gh.Run.load("stdlib"), planner.find_gpu("h200")))
    >>> page.count("<title>Plan of stdlib</title>"), "http://" in page.replace("http://www.w3.org", "")
    (1, False)
    """
    page = static_files()["index.html"].decode()
    page = page.replace("</head>", '<link rel="stylesheet" href="/static/views/run/view.css">\n</head>')
    page = page.replace("<title>Glasshouse</title>", f"<title>Plan of {html.escape(name)}</title>")
    return standalone(page, "plan", {"name": name, "plan": plan.to_dict()}, "plan_page.js")
