"""What the page shows, as it stands in its address after the #: a state, and the question that it asks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from glasshouse import config
from glasshouse.config import JsonDict
from glasshouse.models import Seq2Seq
from glasshouse.page.following import Write, write
from glasshouse.page.question import Question, Text
from glasshouse.page.subject import Sitter
from glasshouse.page.trace import Traces

WRITTEN = 48  # tokens that a target is given at first
# As in static/state.js, where a comment says what each is.
DEFAULTS: JsonDict = {
    "view": "text",
    "text": "",
    "target": "",
    "added": [],
    "hidden": [],
    "token": -1,
    "key": 0,
    "layer": 0,
    "head": 0,
    "attention": "",
    "edits": [],
    "other": "",
    "moment": "",
    "beside": "",
    "temperature": 1,
    "top_k": 0,
    "top_p": 1,
    "seed": 0,
}
# What single views keep for themselves, each named after its view.
OF_VIEWS = (
    *(f"alignment_{name}" for name in ("beams", "dropped", "of", "penalty")),
    *(f"attention{name}" for name in ("Key", "Lines", "Query", "Scale")),
    *(f"experiment{name}" for name in ("How", "Site", "Stack")),
    *(f"run_{name}" for name in ("figure", "left", "right", "scale", "smooth", "step")),
    *(f"steps{name}" for name in ("All", "Card", "Side")),
    *(f"stream{name}" for name in ("Against", "Colour", "Embed", "Token")),
)


def fragment(state: Mapping[str, object]) -> str:
    """Return a state as it stands in an address; what is as always is left out.

    >>> fragment({"text": "to be", "layer": 3, "head": 0})
    '#text=to+be&layer=3'
    """
    given = {name: one for name, one in state.items() if one != DEFAULTS.get(name)}
    said = {
        name: one if isinstance(one, str) else json.dumps(one, separators=(",", ":")) for name, one in given.items()
    }
    return f"#{urlencode(said, errors='surrogateescape')}" if said else ""


def question_of(sitter: Sitter, state: Mapping[str, Any]) -> Question:
    """Return what a state asks of a model."""
    asked = {name: state[name] for name in ("text", "target", "added", "hidden")}
    table: JsonDict = {"asked": asked, "moment": state["moment"], "edits": state["edits"]}
    if state["other"] and any(one["kind"] == "patch" for one in state["edits"]):
        # In an encoder-decoder it is another source; the target is the same.
        pair = isinstance(sitter.model, Seq2Seq)
        table["other"] = {**asked, "text": state["other"]} if pair else {"text": state["other"]}
    return config.parse(Question, table)


def filled(traces: Traces, given: Mapping[str, object]) -> JsonDict:
    """Return a whole state: what was not given is as the page itself would begin."""
    state: JsonDict = {**DEFAULTS, **given}
    state["moment"] = state["moment"] or traces.subject.latest()
    sitter = traces.subject.at(state["moment"])
    if not state["text"] and not state["added"]:
        state["text"] = traces.subject.example()
    pair = isinstance(sitter.model, Seq2Seq)
    state["attention"] = state["attention"] or ("decoder.cross_pattern" if pair else "pattern")
    if pair and not state["target"] and not state["added"]:
        question = Question(Text(state["text"]), state["moment"])
        made = write(traces, Write(question, max_new_tokens=WRITTEN))
        state["added"] = [one["id"] for one in made["tokens"]]
    row = sitter.inputs(question_of(sitter, state).asked)[-1]
    last = row.shape[1] - 1
    state["token"] = state["token"] if 0 <= state["token"] <= last else last  # as the page has it
    return state
