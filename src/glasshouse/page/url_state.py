"""The page state in the URL fragment, and its forward pass."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, urlencode

from glasshouse import config
from glasshouse.config import JsonDict
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.manifest import views
from glasshouse.page.model_info import ModelInfo, opening_selection
from glasshouse.page.model_loader import LoadedModel
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.next_token import Generate, generate_text

MAX_TARGET_TOKENS = 48  # generated for an empty target
DEFAULTS: JsonDict = {
    "view": "overview",
    "text": "",  # input text; for an encoder-decoder, the source
    "target": "",  # target prefix of an encoder-decoder
    "appended": [],  # token ids after the text or the target
    "masked": [],  # positions replaced by the mask token (encoders)
    "token": -1,  # the selection: query token (-1: the last), key token, layer, head
    "key": 0,
    "layer": 0,
    "head": 0,
    "attention": "",  # site of the attention pattern, where a model has several
    "edits": [],  # scale, mean and patch edits
    "patch_from": "",  # text that patches come from
    "checkpoint": "",  # of a run ("": the latest)
    "compare_with": "",  # second checkpoint, shown side by side
    "temperature": 1,
    "top_k": 0,  # 0: all
    "top_p": 1,
    "seed": 0,
}


def view_state_keys() -> list[str]:
    """Return the keys that belong to one view, each prefixed with its name."""
    return [f"{view.name}_{key}" for view in views().values() for key in view.state_keys]


def fragment(state: Mapping[str, object]) -> str:
    """Return the URL fragment of a state; defaults are omitted.

    >>> fragment({"text": "to be", "layer": 3, "head": 0})
    '#text=to+be&layer=3'
    """
    given = {name: one for name, one in state.items() if one != DEFAULTS.get(name)}
    said = {
        name: one if isinstance(one, str) else json.dumps(one, separators=(",", ":")) for name, one in given.items()
    }
    return f"#{urlencode(said, errors='surrogateescape')}" if said else ""


def state_of(fragment: str) -> JsonDict:
    """Return the state of a URL fragment that the page wrote.

    >>> state_of("#text=to+be&layer=3&notes_card=A3&other=1")
    {'text': 'to be', 'layer': 3, 'notes_card': 'A3'}
    """
    state: JsonDict = {}
    for name, value in parse_qsl(fragment.removeprefix("#"), keep_blank_values=True, errors="surrogateescape"):
        if isinstance(DEFAULTS.get(name), str):
            state[name] = value
        elif name in DEFAULTS or name in view_state_keys():
            try:
                state[name] = json.loads(value)
            except ValueError:
                state[name] = value
    return state


def forward_pass_of(loaded: LoadedModel, state: Mapping[str, Any]) -> ForwardPass:
    """Return the forward pass of a state."""
    prompt = {name: state[name] for name in ("text", "target", "appended", "masked")}
    table: JsonDict = {"prompt": prompt, "checkpoint": state["checkpoint"], "edits": state["edits"]}
    if state["patch_from"] and any(one["kind"] == "patch" for one in state["edits"]):
        # In an encoder-decoder, another source with the same target.
        pair = isinstance(loaded.model, Seq2Seq)
        table["patch_from"] = {**prompt, "text": state["patch_from"]} if pair else {"text": state["patch_from"]}
    return config.parse(ForwardPass, table)


def with_defaults(traces: TraceCache, given: Mapping[str, object]) -> JsonDict:
    """Return a complete state with the defaults of the page."""
    state: JsonDict = {**DEFAULTS, **given}
    state["checkpoint"] = state["checkpoint"] or traces.loader.latest()
    loaded = traces.loader.get(state["checkpoint"])
    if not state["text"] and not state["appended"]:
        state["text"] = traces.loader.example()
        if not given.keys() & {"layer", "head", "key"}:
            state |= opening_selection(traces, ModelInfo(state["checkpoint"]))
    pair = isinstance(loaded.model, Seq2Seq)
    state["attention"] = state["attention"] or ("decoder.cross_pattern" if pair else "pattern")
    if pair and not state["target"] and not state["appended"]:
        forward_pass = ForwardPass(PagePrompt(state["text"]), state["checkpoint"])
        made = generate_text(traces, Generate(forward_pass, max_new_tokens=MAX_TARGET_TOKENS))
        state["appended"] = [one["id"] for one in made["tokens"]]
    row = loaded.inputs(forward_pass_of(loaded, state).prompt)[-1]
    last = row.shape[1] - 1
    state["token"] = state["token"] if 0 <= state["token"] <= last else last  # as on the page
    return state
