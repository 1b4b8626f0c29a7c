"""From the token to the first layer: its row of the table, and where it stands."""

from __future__ import annotations

from torch import nn

from glasshouse.config import JsonDict
from glasshouse.layers.embedding import SegmentEmbedding
from glasshouse.layers.position import LearnedPosition, SinusoidalPosition
from glasshouse.page import wire
from glasshouse.page.steps.card import CORNER, card, norm_card
from glasshouse.page.steps.way import Way


def embedding_steps(way: Way) -> list[JsonDict]:
    """Return what a token becomes before the first layer."""
    model, position = way.trace.model, way.stack.position
    one = int(way.ids[0, way.position])
    table = model.token_embedding.table.weight
    first = max(0, min(one - 2, len(table) - 5))
    rows, x = table[first : first + 5, :CORNER], table[one]
    cards = [card("embed", "embed", id=one, first=first, rows=rows, shape=list(table.shape), y=x)]
    if model.token_embedding.scale != 1.0:
        x, before = x * model.token_embedding.scale, x
        cards.append(card("embed", "scale", x=before, by=model.token_embedding.scale, y=x))
    segment = getattr(model, "segment", None)
    if isinstance(segment, SegmentEmbedding):
        x, before = segment(x[None, None], None)[0, 0], x
        cards.append(card("embed", "segment", x=before, added=segment.table.weight[0], y=x))
    if isinstance(position, LearnedPosition | SinusoidalPosition):
        x, before = position.embed(x[None, None], way.place)[0, 0], x
        if isinstance(position, LearnedPosition):
            row = int(way.place) + position.offset
            told: JsonDict = {"row": row, "added": position.table.weight[row]}
        else:
            told = {
                "layout": "pairs" if position.interleaved else "halves",
                "added": position.encodings(way.place)[0, 0],
            }
        cards.append(card("embed", "position", x=before, y=x, how=way.spec.position.kind, **told))
    if not isinstance(way.stack.embed_norm, nn.Identity):
        cards.append(norm_card("embed", way.stack.embed_norm, x))
    site = f"{way.prefix}embed[position={way.position}]"
    cards[-1] |= {"y": wire.packed(way.stream(-1)[way.position]), "site": site}
    return cards
