"""Endpoint for the glossary, which the page shows in a dialog and its cards link to."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from glasshouse import notes
from glasshouse.config import JsonDict, Settings
from glasshouse.page.trace import TraceCache


@dataclass(frozen=True)
class Glossary(Settings):
    """Parameters of the glossary: none."""


def glossary(traces: TraceCache, params: Glossary) -> JsonDict:
    """Return the terms of the field and what they mean."""
    return {"entries": [asdict(one) for one in notes.glossary()]}
