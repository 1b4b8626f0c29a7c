"""The views of the page by name, in the order of their tabs: ours, and those of installed packages."""

from __future__ import annotations

import warnings

from glasshouse import registry
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.view import View
from glasshouse.page.views import (
    attention,
    chat,
    circuit,
    interventions,
    notes,
    overview,
    residual_stream,
    seq2seq,
    tokenization,
    training_run,
    walkthrough,
)

# Those of no view.
PAGE_ENDPOINTS = {"model", "opening_selection", "checkpoints", "glossary", "tokenize", "next", "generate", "save"}
VIEWS = {
    view.name: view
    for view in (
        chat.VIEW,
        overview.VIEW,
        tokenization.VIEW,
        attention.VIEW,
        residual_stream.VIEW,
        interventions.VIEW,
        circuit.VIEW,
        walkthrough.VIEW,
        seq2seq.VIEW,
        training_run.VIEW,
        notes.VIEW,
    )
}


def views() -> dict[str, View]:
    """Return all views; one whose name or endpoint is taken is left out, with a warning."""
    found = dict(VIEWS)
    taken = {name for view in found.values() for name in view.endpoints} | PAGE_ENDPOINTS
    for view in registry.load_entry_points(registry.VIEWS, View).values():
        if clash := [*({view.name} & found.keys()), *sorted(view.endpoints.keys() & taken)]:
            warnings.warn(
                f"the page leaves out the view {view.name!r} of an installed package: {clash[0]!r} is the name of "
                "another view or endpoint.",
                stacklevel=2,
            )
            continue
        found[view.name] = view
        taken |= view.endpoints.keys()
    return found


def available_views(loader: ModelLoader) -> list[str]:
    """Return the names of the views that apply to the model."""
    return [name for name, view in views().items() if view.applies(loader)]
