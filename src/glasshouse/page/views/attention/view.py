"""The declaration of the attention view."""

from __future__ import annotations

from glasshouse.config import JsonDict
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.attention.head_scoring import Scores, scores
from glasshouse.page.views.attention.layer_map import attention_kinds
from glasshouse.page.views.attention.map_tiles import Maps, Tile, levels, maps, tile
from glasshouse.page.views.attention.query_key_pair import QueryKey, query_key


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened; the map is requested as a single tile."""
    trace = traces.trace(forward_pass)
    pair = isinstance(trace.model, Seq2Seq)
    kinds = attention_kinds(trace)
    kind = state["attention"] if state["attention"] in kinds else "decoder.cross_pattern" if pair else "pattern"
    source, text = trace.inputs[0].shape[1], trace.inputs[-1].shape[1]
    queries = source if kind.startswith("encoder.") else text
    keys = text if kind == "decoder.pattern" else source
    # In an encoder-decoder, `token` is a target position and `key` a source position.
    query = state.get("attention_query", -1) if kind.startswith("encoder.") else state["token"]
    key = state.get("attention_key", 0) if kind == "decoder.pattern" else state["key"]
    layer = max(0, min(state["layer"], kinds.count(kind) - 1))
    head = max(0, min(state["head"], trace.model.spec.n_heads - 1))
    every: JsonDict = {"forward_pass": forward_pass.to_json(), "attention": kind}
    one: JsonDict = {**every, "layer": layer, "head": head}
    return [
        ("query_key", {**one, "query": _within(query, queries), "key": _within(key, keys)}),
        ("tile", {**one, "level": levels(queries, keys) - 1, "row": 0, "column": 0}),
        ("scores", every),
        *(("maps", {**every, "layer": each}) for each in range(kinds.count(kind))),
    ]


def _within(place: int, length: int) -> int:
    return place if 0 <= place < length else length - 1


VIEW = View(
    name="attention",
    title="Attention",
    endpoints={
        "maps": Endpoint(Maps, maps),
        "tile": Endpoint(Tile, tile),
        "scores": Endpoint(Scores, scores),
        "query_key": Endpoint(QueryKey, query_key),
    },
    initial_requests=initial_requests,
    state_keys=("key", "lines", "query", "scale"),
)
