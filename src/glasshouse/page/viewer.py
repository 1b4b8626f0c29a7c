"""Viewing a model in a notebook, in a file or in a browser."""

from __future__ import annotations

import sys
from collections.abc import Collection
from html import escape
from pathlib import Path
from weakref import WeakValueDictionary

from glasshouse import config
from glasshouse.config import JsonDict, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.inspection import sites
from glasshouse.inspection.sites import select, unwrap_model
from glasshouse.models import Model, check_tokenizer
from glasshouse.models.seq2seq import Seq2Seq
from glasshouse.page import html_export
from glasshouse.page.forward_pass import PagePrompt
from glasshouse.page.live import export_live
from glasshouse.page.manifest import available_views, views
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.server import Server
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import DEFAULTS, forward_pass_of, fragment, view_state_keys
from glasshouse.text import Tokenizer

MAX_SERVERS = 4  # of frames in a notebook: each keeps its model in memory
FRAME = 'width="100%" height="860" style="border:0" title="Glasshouse"'


class Look:
    """A model and a page state, displayed by notebooks.

    Where a kernel runs, that is a frame which the kernel serves; with `embed`, and elsewhere, it is the page itself.
    """

    def __init__(self, traces: TraceCache, given: JsonDict, *, embed: bool = False) -> None:
        self.traces, self.given, self.embed = traces, given, embed

    def html(self, *, live: bool = False) -> str:
        """Return the page as a standalone HTML file: with nearby selections if they fit, or with the model inside."""
        return export_live(self.traces, self.given) if live else html_export.export_html(self.traces, self.given)

    def save(self, path: str | Path, *, live: bool = False) -> None:
        """Write the page to an HTML file; each of its figures has a button that saves it as SVG or PNG.

        With `live` the model is in the file and runs in the browser: other texts can be entered, heads ablated.
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise InputError(
                f"a page cannot be saved as {Path(path).name!r}; name a file .html, whose figures can be saved "
                "as SVG or PNG."
            )
        Path(path).write_text(self.html(live=live), encoding="utf-8")

    def open(self, *, port: int = 0, browser: bool = True) -> Server:
        """Serve the full page in the background; `close` the returned server."""
        server = Server(self.traces, port=port)
        server.start()
        if browser:
            server.show(self.fragment)
        print(server.address + self.fragment)
        return server

    @property
    def fragment(self) -> str:
        """The URL fragment of the state."""
        return fragment(self.given)

    def _repr_html_(self) -> str:
        if self.embed or not _has_kernel():
            sandbox = 'sandbox="allow-scripts allow-downloads"'
            return f'<iframe {FRAME} {sandbox} srcdoc="{escape(self.html())}"></iframe>'
        address = _frame_server(self.traces).one_time_address(self.fragment)
        note = "Served by this kernel; gh.look(..., embed=True) keeps the page in the notebook."
        return f'<iframe {FRAME} src="{escape(address)}"></iframe><small>{note}</small>'


def _frame_server(traces: TraceCache) -> Server:
    """Return the server of the frames that show a model, started at the first; a model too many ends the oldest."""
    if (server := _frame_servers.get(traces)) is None:
        if len(_frame_servers) == MAX_SERVERS:
            _frame_servers.pop(next(iter(_frame_servers))).close()
        server = _frame_servers[traces] = Server(traces, framed=True)
        server.start()
    return server


_frame_servers: dict[TraceCache, Server] = {}


def _has_kernel() -> bool:
    """Return whether this is a kernel, such as Jupyter's, and not a script or a terminal."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


def look(model: Model, tok: Tokenizer | None = None, text: str = "", *, embed: bool = False, **state: object) -> Look:
    """View a model on a text: a notebook displays the page, `save` writes it, `open` serves it.

    In a notebook the page is a frame that the kernel serves on this machine. With `embed` the cell has the page
    itself (megabytes): for a notebook that is exported, or whose kernel runs on another machine. Further keyword
    arguments are keys of the URL state: `view="attention"`, `layer=3`, `head=5`, `token=7`.

    >>> import glasshouse as gh
    >>> tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    >>> model = gh.build(gh.preset("tiny-decoder", vocab_size=263)).eval()
    >>> seen = gh.look(model, tok, "to be or", view="attention", layer=1)
    >>> seen.html().startswith("<!doctype html>")
    True
    """
    model = unwrap_model(model)
    if tok is not None:
        check_tokenizer(model, tok)
    if (traces := _traces.get((id(model), id(tok)))) is None:
        _traces[id(model), id(tok)] = traces = TraceCache(ModelLoader.from_model(model, tok))
    return Look(traces, validate_state(traces, {"text": text, **state}), embed=embed)


# By the ids of model and tokenizer, which the traces keep alive: cells that show one model share server and cache.
_traces: WeakValueDictionary[tuple[int, int], TraceCache] = WeakValueDictionary()


def validate_state(traces: TraceCache, given: JsonDict) -> JsonDict:
    """Return a state after checking its keys, and its values against the model."""
    known = [*DEFAULTS, *view_state_keys()]
    for name in given:
        if name not in known:
            raise InputError(f"the page has no state key {name!r}; {did_you_mean(name, known)}")
    state: JsonDict = {name: _typed(name, value) for name, value in given.items()}
    if (view := str((DEFAULTS | state)["view"])) not in views():
        raise InputError(f"there is no view {view!r}; {did_you_mean(view, views())}")
    loader = traces.loader
    if view not in (fitting := available_views(loader)):
        raise InputError(f"the view {view!r} does not apply to this model; choose one of {', '.join(fitting)}.")
    for name in ("checkpoint", "compare_with"):
        if (checkpoint := state.get(name)) and checkpoint not in (known := loader.checkpoints()):
            advice = did_you_mean(checkpoint, known) if known else "leave it out: only a run has several."
            raise InputError(f"{name} is {checkpoint!r}, but there is no such checkpoint; {advice}")
    _check_selection(traces, DEFAULTS | state, state.keys() & {"token", "key"})
    return state


def _typed(name: str, value: object) -> object:
    """Return a value after checking its type."""
    kind = float if name in ("temperature", "top_p") else type(DEFAULTS.get(name))
    return config.parse(kind, value, name) if kind in (int, float, str) else value


def _check_selection(traces: TraceCache, state: JsonDict, places: Collection[str]) -> None:
    """Check that layer, head, attention, sites and tokens exist in the model."""
    loaded = traces.loader.get(state["checkpoint"])
    s = loaded.model.spec
    forward_pass = forward_pass_of(loaded, state)
    for edit in forward_pass.edits:
        select(loaded.model, edit.site)
    kinds = {
        name.rpartition(".")[0]: None for name, site in sites(loaded.model).items() if site.hook_point == "pattern"
    }
    if state["attention"] and state["attention"] not in kinds:
        raise InputError(
            f"attention is {state['attention']!r}, which is unknown; {did_you_mean(state['attention'], kinds)}"
        )
    sizes = {"layer": max(s.n_layers, getattr(s, "n_encoder_layers", 0)), "head": s.n_heads}
    if places and not isinstance(loaded.model, Seq2Seq):  # whose target may be generated later
        prompt = forward_pass.prompt if state["text"] or state["appended"] else PagePrompt(traces.loader.example())
        sizes |= dict.fromkeys(places, loaded.inputs(prompt)[-1].shape[1])
    for name, size in sizes.items():
        least = -1 if name == "token" else 0  # -1 is the last
        require(least <= state[name] < size, name, state[name], f"within {least} and {size - 1}")
