"""The declaration of a view: its tab, endpoints and URL state, shared by Python and JavaScript."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from glasshouse.config import JsonDict
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache


class Endpoint(NamedTuple):
    """An endpoint: its parameters and its handler."""

    params: type
    handler: Callable[[TraceCache, Any], JsonDict]
    needs_model: bool = True  # takes the model lock


def _every_model(loader: ModelLoader) -> bool:
    return True


def _none(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    return []


@dataclass(frozen=True)
class View:
    """A view: its tab, its endpoints and its part of the URL state.

    Its script is `view.js`, which exports `mount(context, root)`, and its style sheet is `view.css` beside it: in
    `static/views/NAME`, or in the folder `static` of the package that it comes from.
    """

    name: str  # in the URL, and before its state keys
    title: str  # of the tab
    endpoints: Mapping[str, Endpoint]
    # The requests that it sends when opened, for pages saved from Python.
    initial_requests: Callable[[TraceCache, ForwardPass, JsonDict], list[tuple[str, JsonDict]]]
    # Those of its sliders, for pages saved from Python at this view.
    control_requests: Callable[[TraceCache, ForwardPass, JsonDict], list[tuple[str, JsonDict]]] = _none
    state_keys: tuple[str, ...] = ()  # that no other view reads, without the name before them
    applies: Callable[[ModelLoader], bool] = _every_model
    static: Path | None = None  # the folder of its scripts and styles, if it is not one of ours
