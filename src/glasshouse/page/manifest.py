"""The views of the page by name, in the order of their tabs."""

from __future__ import annotations

from glasshouse.page import (
    attention,
    chat,
    interventions,
    notes,
    residual_stream,
    seq2seq,
    tokenization,
    training_run,
    walkthrough,
)
from glasshouse.page.model_loader import ModelLoader

VIEWS = {
    view.name: view
    for view in (
        chat.VIEW,
        tokenization.VIEW,
        attention.VIEW,
        residual_stream.VIEW,
        interventions.VIEW,
        walkthrough.VIEW,
        seq2seq.VIEW,
        training_run.VIEW,
        notes.VIEW,
    )
}


def available_views(loader: ModelLoader) -> list[str]:
    """Return the names of the views that apply to the model."""
    return [name for name, view in VIEWS.items() if view.applies(loader)]
