"""Endpoint of the Save button."""

from __future__ import annotations

import json
from dataclasses import dataclass

from glasshouse.config import JsonDict, Settings
from glasshouse.errors import InputError
from glasshouse.page.html_export import export_html
from glasshouse.page.live import export_live
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import state_of


@dataclass(frozen=True)
class Save(Settings):
    """Parameters of an export: the URL fragment and the requests of the page.

    A request is "name index body", where the index refers to `forward_passes`, or is "-": a long text is sent once,
    however many tiles were requested.
    """

    fragment: str = ""
    forward_passes: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    live: bool = False  # with the model inside, and not with responses


def save(traces: TraceCache, params: Save) -> JsonDict:
    """Return the current page as one HTML file, with what was looked at and all that a page saved from Python has."""
    if params.live:
        return {"html": export_live(traces, state_of(params.fragment))}
    forward_passes = {str(number): _parsed(one) for number, one in enumerate(params.forward_passes)}
    requests = []
    for one in params.requests:
        name, number, body = (*one.split(" ", 2), "", "")[:3]
        known = forward_passes.get(number)
        requests.append((name, _parsed(body) | ({} if known is None else {"forward_pass": known})))
    return {"html": export_html(traces, state_of(params.fragment), requests)}


def _parsed(body: str) -> JsonDict:
    try:
        table = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is not valid JSON: {error}.") from None
    return table if isinstance(table, dict) else {}
