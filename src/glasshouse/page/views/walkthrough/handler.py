"""Endpoint of the walkthrough."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.models import Seq2Seq
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.walkthrough.block import block_steps
from glasshouse.page.views.walkthrough.embedding import embedding_steps
from glasshouse.page.views.walkthrough.token_path import TokenPath
from glasshouse.page.views.walkthrough.unembedding import unembedding_steps


@dataclass(frozen=True)
class Walkthrough(Settings):
    """Parameters of the walkthrough of one token in one layer and head."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = -1
    layer: int = 0
    head: int = 0
    side: str = ""  # source: the encoder of an encoder-decoder


def walkthrough(traces: TraceCache, params: Walkthrough) -> JsonDict:
    """Return the steps of a token in order, each with its inputs, outputs and weights."""
    trace = traces.trace(params.forward_pass)
    path = _way(trace, params)
    with torch.no_grad():
        cards = [*embedding_steps(path), *block_steps(path), *unembedding_steps(path)]
    edited = {one.site.partition("[")[0] for one in params.forward_pass.edits}
    for card in cards:
        card["changed"] = str(card["site"]).partition("[")[0] in edited
    return {
        "position": path.position,
        "layer": path.layer,
        "head": path.head,
        "side": params.side,
        "n_layers": len(path.stack.blocks),
        "token": serialization.describe_tokens([int(path.ids[0, path.position])], trace.tok)[0],
        "cards": cards,
    }


def _way(trace: Trace, params: Walkthrough) -> TokenPath:
    model = trace.model
    if params.side not in ("", "source"):
        raise InputError(f"side is {params.side!r}, but it must be 'source' or left out.")
    if params.side and not isinstance(model, Seq2Seq):
        raise InputError("side is 'source', but only an encoder-decoder has a source; leave it out.")
    source = isinstance(model, Seq2Seq) and params.side == "source"
    prefix, stack = trace.prefix, trace.stack
    if isinstance(model, Seq2Seq) and source:
        prefix, stack = "encoder.", model.encoder
    ids = trace.inputs[0 if source else -1]
    length, depth, n_heads = ids.shape[1], len(stack.blocks), model.spec.n_heads
    require(-length <= params.position < length, "position", params.position, f"within 0 and {length - 1}")
    require(0 <= params.layer < depth, "layer", params.layer, f"within 0 and {depth - 1}")
    require(0 <= params.head < n_heads, "head", params.head, f"within 0 and {n_heads - 1}")
    return TokenPath(trace, prefix, stack, ids, params.position % length, params.layer, params.head)


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened."""
    model = traces.loader.get(forward_pass.checkpoint).model
    source = isinstance(model, Seq2Seq) and state.get("walkthrough_side") == "source"
    depth = model.spec.n_encoder_layers if source else model.spec.n_layers  # type: ignore[union-attr]
    at: JsonDict = {"layer": min(state["layer"], depth - 1), "head": min(state["head"], model.spec.n_heads - 1)}
    if source:
        length = traces.trace(forward_pass).inputs[0].shape[1]
        at |= {"position": min(state["key"], length - 1), "side": "source"}
    else:
        at["position"] = state["token"]
    return [("walkthrough", {"forward_pass": forward_pass.to_json(), **at})]


VIEW = View(
    name="walkthrough",
    title="Step through",
    endpoints={"walkthrough": Endpoint(Walkthrough, walkthrough)},
    initial_requests=initial_requests,
    state_keys=("all", "card", "side"),
)
