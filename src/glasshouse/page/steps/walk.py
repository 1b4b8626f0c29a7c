"""The whole way of one token, in order."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.models import Seq2Seq
from glasshouse.page import wire
from glasshouse.page.question import Question
from glasshouse.page.steps.block import block_steps
from glasshouse.page.steps.embedding import embedding_steps
from glasshouse.page.steps.reading import reading_steps
from glasshouse.page.steps.way import Way
from glasshouse.page.trace import Trace, Traces


@dataclass(frozen=True)
class Steps(Settings):
    """What happens to one token on its way through the model, in one layer and one head?"""

    question: Question = field(default_factory=Question)
    position: int = -1
    layer: int = 0
    head: int = 0
    side: str = ""  # source: the way through the encoder of an encoder-decoder


def steps(traces: Traces, ask: Steps) -> JsonDict:
    """Return the steps of a token in order: each with what goes in, what comes out and the weights between."""
    trace = traces.of(ask.question)
    way = _way(trace, ask)
    with torch.no_grad():
        cards = [*embedding_steps(way), *block_steps(way), *reading_steps(way)]
    edited = {one.site.partition("[")[0] for one in ask.question.edits}
    for card in cards:
        card["changed"] = str(card["site"]).partition("[")[0] in edited
    return {
        "position": way.position,
        "layer": way.layer,
        "head": way.head,
        "side": ask.side,
        "n_layers": len(way.stack.blocks),
        "token": wire.tokens([int(way.ids[0, way.position])], trace.tok)[0],
        "cards": cards,
    }


def _way(trace: Trace, ask: Steps) -> Way:
    model = trace.model
    if ask.side not in ("", "source"):
        raise InputError(f"side is {ask.side!r}, but it must be 'source' or left out.")
    if ask.side and not isinstance(model, Seq2Seq):
        raise InputError("side is 'source', but only an encoder-decoder has a source; leave it out.")
    source = isinstance(model, Seq2Seq) and ask.side == "source"
    prefix, stack = trace.prefix, trace.stack
    if isinstance(model, Seq2Seq) and source:
        prefix, stack = "encoder.", model.encoder
    ids = trace.inputs[0 if source else -1]
    length, depth, n_heads = ids.shape[1], len(stack.blocks), model.spec.n_heads
    require(-length <= ask.position < length, "position", ask.position, f"within 0 and {length - 1}")
    require(0 <= ask.layer < depth, "layer", ask.layer, f"within 0 and {depth - 1}")
    require(0 <= ask.head < n_heads, "head", ask.head, f"within 0 and {n_heads - 1}")
    return Way(trace, prefix, stack, ids, ask.position % length, ask.layer, ask.head)


def opening(traces: Traces, question: Question, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return what the view asks when it opens."""
    model = traces.subject.at(question.moment).model
    source = isinstance(model, Seq2Seq) and state.get("stepsSide") == "source"
    depth = model.spec.n_encoder_layers if source else model.spec.n_layers  # type: ignore[union-attr]
    at: JsonDict = {"layer": min(state["layer"], depth - 1), "head": min(state["head"], model.spec.n_heads - 1)}
    if source:
        length = traces.of(question).inputs[0].shape[1]
        at |= {"position": min(state["key"], length - 1), "side": "source"}
    else:
        at["position"] = state["token"]
    return [("steps", {"question": question.table(), **at})]
