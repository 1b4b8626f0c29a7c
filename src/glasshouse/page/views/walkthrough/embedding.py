"""Steps from the token id to the first layer."""

from __future__ import annotations

from torch import nn

from glasshouse.config import JsonDict
from glasshouse.inspection.walkthrough import embed_step
from glasshouse.layers.embedding import SegmentEmbedding
from glasshouse.page import serialization
from glasshouse.page.views.walkthrough.card import CORNER, card, norm_card, step_card
from glasshouse.page.views.walkthrough.token_path import TokenPath


def embedding_steps(path: TokenPath) -> list[JsonDict]:
    """Return the embedding steps of a token."""
    model, position = path.trace.model, path.stack.position
    one = int(path.ids[0, path.position])
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
    if (step := embed_step(position, x, path.position_ids)) is not None:
        cards.append(step_card("embed", step, ""))
        x = position.embed(x[None, None], path.position_ids)[0, 0]
    if not isinstance(path.stack.embed_norm, nn.Identity):
        cards.append(norm_card("embed", path.stack.embed_norm, x))
    site = f"{path.prefix}embed[position={path.position}]"
    cards[-1] |= {"y": serialization.encode_tensor(path.residual(-1)[path.position]), "site": site}
    return cards
