"""The figure of what is used today: A17."""

from __future__ import annotations

from collections import Counter

from glasshouse import spec
from glasshouse.config import JsonDict
from glasshouse.hub.published import published_configs, published_specs
from glasshouse.page.views.notes.figure import Figure, Scene, bars, table

ATTENTION = ("multi-head", "grouped-query", "multi-query")


def attention_kind(s: spec.Spec) -> str:
    """Return what heads share.

    >>> attention_kind(spec.preset("gpt2")), attention_kind(spec.preset("llama-1b"))
    ('multi-head', 'grouped-query')
    """
    return ATTENTION[0 if s.n_kv_heads == s.n_heads else 2 if s.n_kv_heads == 1 else 1]


def choices(name: str, family: str, s: spec.Spec) -> list[str | int]:
    """Return a model's row: its name, its family, and what it is made of."""
    norm = f"{s.norm.kind}, {s.norm_placement}"
    return [name, family, attention_kind(s), s.n_heads, s.n_kv_heads, s.position.kind, norm, s.feedforward.kind]


def families(scene: Scene) -> list[JsonDict]:
    """A17."""
    found = published_specs()
    rows = [choices(name, str(published_configs()[name]["model_type"]), s) for name, s in found.items()]
    counts = Counter(attention_kind(s) for s in found.values())
    return [
        table(
            "read from the published config.json of each model",
            ["model", "family", "attention", "heads", "key-value", "positions", "norm", "feed-forward"],
            [*rows, choices("the open model", scene.model.spec.kind, scene.model.spec)],
        ),
        bars(
            f"the {len(found)} published models, by attention",
            ((kind, float(counts[kind])) for kind in ATTENTION),
            most=len(found),
        ),
    ]


FIGURES = {"A17": Figure(families, ("pass",))}
