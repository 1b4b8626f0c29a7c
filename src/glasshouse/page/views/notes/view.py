"""Endpoints of the notes: the cards, and the figure of one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path

import torch

from glasshouse import notes
from glasshouse.config import JsonDict, Settings, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.notes import (
    attention,
    block,
    embedding,
    families,
    heads,
    inspection,
    models,
    positions,
    text,
    training,
)
from glasshouse.page.views.notes.figure import Scene, lines
from glasshouse.page.views.notes.worked import EXAMPLES

FIGURES = {
    **text.FIGURES,
    **embedding.FIGURES,
    **positions.FIGURES,
    **attention.FIGURES,
    **heads.FIGURES,
    **families.FIGURES,
    **block.FIGURES,
    **models.FIGURES,
    **training.FIGURES,
    **inspection.FIGURES,
}
COLOURS = 4  # of the curves of a chart
PACKAGE = Path(notes.__file__).parents[1]


@dataclass(frozen=True)
class Notes(Settings):
    """Parameters of the list of cards: none."""


def list_notes(traces: TraceCache, params: Notes) -> JsonDict:
    """Return the parts of the lectures with their statements and questions, and what each figure depends on."""
    return _listed()


@cache
def _listed() -> JsonDict:
    return {
        "parts": [
            {
                "name": part.name,
                "title": part.title,
                "measured_on": part.measured_on,
                "statements": [_card(part, one) for one in part.statements],
                "questions": [asdict(one) for one in part.questions],
            }
            for part in notes.parts()
        ],
        "examples": [asdict(one) for one in notes.EXAMPLES],
    }


def _card(part: notes.Part, one: notes.Statement) -> JsonDict:
    figure = FIGURES.get(one.number)
    path, line = source_line(one)
    return {
        **{
            name: getattr(one, name)
            for name in ("number", "title", "why", "says", "slip", "shown_by", "measured", "try_it")
        },
        "read": list(one.read),
        "code": {"path": path, "line": line, "name": one.code.partition(":")[2], "text": one.line},
        "measured_pieces": [*measured_lines(one), *measured_table(part, one.number)],
        "verdicts": claimed(one),
        "figure": None
        if figure is None
        else {"reads": list(figure.reads), "control": None if figure.control is None else asdict(figure.control)},
    }


def source_line(one: notes.Statement) -> tuple[str, int]:
    """Return the file of a statement's code, relative to the package, and the line that does it.

    >>> source_line(notes.statement("B1"))[0]
    'layers/residual.py'
    """
    module, _, name = one.code.partition(":")
    found = importlib.util.find_spec(module)
    assert found is not None
    assert found.origin is not None
    lines = Path(found.origin).read_text(encoding="utf-8").splitlines()
    owner, _, inner = name.rpartition(".")
    starts = [rf"\s*(def|class) {part}\b" for part in (owner, inner) if part]
    at = 0
    for pattern in starts:
        at = next(number for number in range(at, len(lines)) if re.match(pattern, lines[number]))
    if one.line:
        at = next(number for number in range(at, len(lines)) if one.line in lines[number])
    return Path(found.origin).relative_to(PACKAGE).as_posix(), at + 1


def measured_table(part: notes.Part, number: str) -> list[JsonDict]:
    """Return the table of measured values that follows a paragraph about a statement, if there is one."""
    blocks = part.details.split("\n\n")
    for caption, rows in pairwise(blocks):
        if caption.startswith(f"{number},") and rows.startswith("|"):
            head, _, *body = (
                [cell.strip() for cell in line.strip().strip("|").split("|")] for line in rows.splitlines()
            )
            return [{"kind": "table", "title": caption, "head": head, "rows": body}]
    return []


def measured_lines(one: notes.Statement) -> list[JsonDict]:
    """Return the curves that `make claims` measured last for a statement: one chart, or one for each kind of model.

    An experiment may measure several things, each of which is another statement's; its curves then name them.
    """
    found = notes.measurements().get(one.number)
    if found is None or not found.curves:
        return []
    ending = f": {one.curves}"
    own = {name.removesuffix(ending): curve for name, curve in found.curves.items() if name.endswith(ending)}
    charts: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for name, curve in (own or found.curves).items():
        kind = name.partition(", ")[0] if len(found.curves) > COLOURS else ""
        charts.setdefault(kind, []).append((name, [x for x, _ in curve], [y for _, y in curve]))
    said = f"{one.curves} (measured {found.on})"
    return [lines(f"{kind}: {said}" if kind else said, found.along, series) for kind, series in charts.items()]


def claimed(one: notes.Statement) -> JsonDict | None:
    """Return the figures that `make claims` compared with thresholds last, and when; None if there are none."""
    found = notes.measurements().get(one.number)
    if found is None:
        return None
    return {"on": found.on, "figures": [str(each) for each in notes.verdicts(one, found.figures)]}


@dataclass(frozen=True)
class NoteFigure(Settings):
    """Parameters of the figure of a card; those that it does not depend on are left out."""

    number: str = ""
    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    layer: int = 0
    head: int = 0
    position: int = 0
    value: float | None = None  # of its slider


def note_figure(traces: TraceCache, params: NoteFigure) -> JsonDict:
    """Return the pieces of a figure, and of the example that the card works through, on the model that is open."""
    if params.number not in FIGURES:
        raise InputError(f"there is no live figure {params.number!r}; {did_you_mean(params.number, FIGURES)}")
    figure = FIGURES[params.number]
    trace = traces.trace(params.forward_pass if "pass" in figure.reads else _any_pass(traces))
    s, length = trace.model.spec, len(trace.ids)
    require(0 <= params.layer < s.n_layers, "layer", params.layer, f"within 0 and {s.n_layers - 1}")
    require(0 <= params.head < s.n_heads, "head", params.head, f"within 0 and {s.n_heads - 1}")
    require(0 <= params.position < length, "position", params.position, f"within 0 and {length - 1}")
    value = 0.0
    if (control := figure.control) is not None:
        value = control.start if params.value is None else params.value
        require(control.low <= value <= control.high, "value", value, f"within {control.low:g} and {control.high:g}")
    scene = Scene(trace, params.layer, params.head, params.position, value)
    with traces.lock, eval_mode(trace.model), torch.no_grad():
        worked = EXAMPLES[params.number](scene) if params.number in EXAMPLES else []
        limit = None if figure.limit is None else figure.limit(scene)
        return {"pieces": figure.draw(scene), "worked": worked, "limit": limit}


def _any_pass(traces: TraceCache) -> ForwardPass:
    """Return a forward pass for figures that read none; it is never run."""
    return ForwardPass(PagePrompt(traces.loader.example()))


def figure_requests(number: str, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the page sends for a card: one for each position of its slider."""
    figure = FIGURES[number]
    body: JsonDict = {"number": number}
    if "pass" in figure.reads:
        body["forward_pass"] = forward_pass.to_json()
    for name, given in (("layer", "layer"), ("head", "head"), ("position", "token")):
        if name in figure.reads:
            body[name] = state[given]
    control = figure.control
    moved = [] if control is None else [value for value in control.positions() if value != control.start]
    return [("note_figure", body), *(("note_figure", body | {"value": value}) for value in moved)]


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened: the cards, and the figures of those that are open."""
    return [("notes", {}), *(first for first, *_ in _open_figures(traces, forward_pass, state))]


def control_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests of the sliders of the open cards."""
    return [one for _, *moved in _open_figures(traces, forward_pass, state) for one in moved]


def _open_figures(
    traces: TraceCache, forward_pass: ForwardPass, state: JsonDict
) -> Iterator[list[tuple[str, JsonDict]]]:
    s = traces.loader.get(forward_pass.checkpoint).model.spec
    at = {**state, "layer": min(state["layer"], s.n_layers - 1), "head": min(state["head"], s.n_heads - 1)}
    chosen = state.get("notes_cards") or state.get("notes_card") or notes.parts()[0].statements[0].number
    wanted = FIGURES if state.get("notes_all") else [one for one in chosen.split(",") if one in FIGURES]
    return (figure_requests(number, forward_pass, at) for number in wanted)


VIEW = View(
    name="notes",
    title="Notes",
    endpoints={
        "notes": Endpoint(Notes, list_notes, needs_model=False),
        "note_figure": Endpoint(NoteFigure, note_figure),
    },
    initial_requests=initial_requests,
    control_requests=control_requests,
    state_keys=("all", "card", "cards", "large", "value"),
)
