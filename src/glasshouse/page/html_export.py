"""Export of the page, or of a plan, as one HTML file with its scripts, styles and responses."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping

from glasshouse import config
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError, InputError
from glasshouse.page.endpoints import endpoints
from glasshouse.page.files import index_page, is_page_script, static_files
from glasshouse.page.manifest import available_views, views
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, fragment, with_defaults
from glasshouse.training.plan import TrainingPlan
from glasshouse.web import to_json

LARGEST, ROOM = 64 * 2**20, 8 * 2**20  # bytes of responses: the limit, and the limit with prefetched ones
MOST = 128  # further selections of tokens and heads that a saved file includes
# A standalone file sets its own policy: nothing may be fetched.
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' data:; style-src 'unsafe-inline'; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)
# Scripts and data are packed: gzip makes a third of them. No module may load before the import map, so this is none.
UNPACK = """(async () => {
  const bytes = Uint8Array.from(atob(document.getElementById("packed").textContent), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const { scripts, main, elements } = await new Response(stream).json();
  const url = (text) => `data:text/javascript;charset=utf-8,${encodeURIComponent(text)}`;
  const named = Object.entries(scripts).map(([name, text]) => [`glasshouse/${name}`, url(text)]);
  const add = (type, id, text) =>
    document.body.append(Object.assign(document.createElement("script"), { type, id, textContent: text }));
  for (const [id, data] of Object.entries(elements)) add("application/json", id, data);
  add("importmap", "imports", JSON.stringify({ imports: Object.fromEntries(named) }));
  await import(`glasshouse/${main}`);
})();"""


def export_html(traces: TraceCache, given: JsonDict, requests: Iterable[tuple[str, JsonDict]] = ()) -> str:
    """Return a page that opens at a state, with the responses to all requests that it sends there and to some others.

    Those for other tokens and heads are added while there is room.
    """
    state = with_defaults(traces, given)
    loaded = traces.loader.get(state["checkpoint"])
    responses = Responses(traces)
    responses.add("model", {})
    responses.add("glossary", {})
    responses.add("tokenize", {"forward_pass": forward_pass_of(loaded, state).unedited.to_json()})
    for name, body in (*_initial_requests(traces, state), *requests):
        responses.add(name, body)
    if state["view"] in views():
        open_view = views()[state["view"]]
        for name, body in open_view.control_requests(traces, forward_pass_of(loaded, state), state):
            responses.add(name, body)
    selection = []
    # A lecture is a hand-out: its cards have their sliders, and the selection stays.
    if not state.get("notes_all") and not state.get("notes_cards"):
        for kind, others in _other_selections(traces, state).items():
            for other in others:
                for name, body in _initial_requests(traces, other):
                    if responses.size <= ROOM:
                        responses.add(name, body)
            selection += [kind] if responses.size <= ROOM else []
    shown = given | {name: state[name] for name in ("text", "appended", "checkpoint", "layer", "head", "key")}
    data = {"fragment": fragment(shown), "selection": selection, "responses": responses.known}
    return standalone(index_page(), {"saved": data}, "main.js")


class Responses:
    """Responses to requests, by the key under which the page looks them up."""

    def __init__(self, traces: TraceCache) -> None:
        self.traces, self.endpoints = traces, endpoints()
        self.known: dict[str, object] = {}
        self.size = 0  # bytes

    def add(self, name: str, body: JsonDict) -> None:
        """Handle a request, unless it fails, which it would in the page too."""
        key = request_key(name, body)
        if name not in self.endpoints or key in self.known:
            return
        endpoint = self.endpoints[name]
        try:
            given = to_json(endpoint.handler(self.traces, config.parse(endpoint.params, body)))
        except GlasshouseError:  # already reported to the page
            return
        self.size += len(given)
        self.known[key] = json.loads(given)
        if self.size > LARGEST:
            raise InputError(
                f"the page would exceed {LARGEST // 2**20} MiB; reload it at the view you want, then save."
            )


def _initial_requests(traces: TraceCache, state: JsonDict) -> Iterator[tuple[str, JsonDict]]:
    """Yield the requests that all views send when opened, and the tokens of the patch source."""
    loaded = traces.loader.get(state["checkpoint"])
    if state["patch_from"]:
        patched = forward_pass_of(loaded, {**state, "edits": [{"kind": "patch", "site": ""}]})
        yield "tokenize", {"forward_pass": patched.patch_pass.to_json()}
    forward_pass = forward_pass_of(loaded, state)
    for name in available_views(traces.loader):
        yield from views()[name].initial_requests(traces, forward_pass, state)


def _other_selections(traces: TraceCache, state: JsonDict) -> dict[str, list[JsonDict]]:
    """Return states with another token, and with another head, or with both where these are few."""
    loaded = traces.loader.get(state["checkpoint"])
    s = loaded.model.spec
    length = loaded.inputs(forward_pass_of(loaded, state).prompt)[-1].shape[1]
    tokens = [state | {"token": token} for token in range(length)]
    heads = [state | {"layer": layer, "head": head} for layer in range(s.n_layers) for head in range(s.n_heads)]
    if len(tokens) * len(heads) <= MOST:
        heads = [head | {"token": token["token"]} for token in tokens for head in heads]
    return {kind: some for kind, some in (("token", tokens), ("head", heads)) if len(some) <= MOST}


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


def standalone(
    page: str,
    elements: Mapping[str, object],
    main: str,
    *,
    policy: str = POLICY,
    texts: Mapping[str, str] | None = None,
) -> str:
    """Put styles, scripts and data into a page that begins with the script `main`, in place of its links to them.

    The page finds data by the ids of their elements; `texts` are base64, and so are not packed once more.
    """
    files = static_files()
    styles = re.findall(r'<link rel="stylesheet" href="/static/([^"]+)">', page)
    css = "\n".join(files[name].decode() for name in styles)
    scripts = {name: text.decode() for name, text in files.items() if is_page_script(name)}
    held = {name: to_json(data).decode() for name, data in elements.items()}
    packed = gzip.compress(to_json({"scripts": scripts, "main": main, "elements": held}), mtime=0)
    page = re.sub(r'<link rel="stylesheet"[^>]*>\n', "", page)
    page = page.replace('<script type="module" src="/static/main.js"></script>\n', "")
    page = re.sub(r'<script type="importmap">.*?</script>\n', "", page)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>\n{css}</style>\n'
    plain = "".join(
        f'<script type="text/plain" id="{name}">{text}</script>\n' for name, text in (texts or {}).items()
    )
    foot = (
        f'{plain}<script type="text/plain" id="packed">{base64.b64encode(packed).decode()}</script>\n'
        f"<script>{UNPACK}</script>\n"
    )
    return page.replace("</head>", f"{head}</head>").replace("</body>", f"{foot}</body>")


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
    return standalone(page, {"plan": {"name": name, "plan": plan.to_dict()}}, "plan_page.js")
