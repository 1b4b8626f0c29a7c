"""Endpoints for encoder-decoders: cross-attention weights and beam search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.escaping import escape_control
from glasshouse.generation import generate
from glasshouse.generation.beam.hypothesis import Node
from glasshouse.generation.request import Completion
from glasshouse.models import Seq2Seq
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.view import Endpoint, View

WINDOW = 32  # source and target tokens shown at once
MAX_TOKENS = 256  # source and target tokens per request
MAX_BEAMS, MAX_SEARCH_TOKENS = 8, 128  # per request


@dataclass(frozen=True)
class CrossAttention(Settings):
    """Parameters: forward pass, layer and head, and the ranges of source and target tokens."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    layer: int | None = None  # None: the mean over layers
    head: int | None = None  # None: the mean over heads
    source: tuple[int, ...] = (0, MAX_TOKENS)  # start and stop position
    target: tuple[int, ...] = (0, MAX_TOKENS)

    def check(self) -> None:
        for name in ("source", "target"):
            span = getattr(self, name)
            ok = len(span) == 2 and 0 <= span[0] < span[1] <= span[0] + MAX_TOKENS
            require(ok, name, list(span), f"start and stop, at most {MAX_TOKENS} apart")


def cross_attention(traces: TraceCache, params: CrossAttention) -> JsonDict:
    """Return cross-attention weights [target, source] of one head, or the mean over heads and layers."""
    trace = _require_seq2seq(traces, params.forward_pass)
    s = trace.model.spec
    for name, value, size in (("layer", params.layer, s.n_layers), ("head", params.head, s.n_heads)):
        require(value is None or 0 <= value < size, name, value, f"within 0 and {size - 1}, or null for the mean")
    if params.layer is None and params.head is not None:
        raise InputError(f"head is {params.head}, but no layer is given; set layer too.")
    sizes = [row.shape[1] for row in trace.inputs]
    (s0, s1), (t0, t1) = params.source, params.target
    queries, keys = slice(t0, min(t1, sizes[1])), slice(s0, min(s1, sizes[0]))
    require(s0 < sizes[0], "source", list(params.source), f"within {sizes[0]} tokens")
    require(t0 < sizes[1], "target", list(params.target), f"within {sizes[1]} tokens")
    layers = range(s.n_layers) if params.layer is None else [params.layer]
    return {
        "weights": serialization.encode_tensor(mean_weights(trace, layers, params.head, queries, keys)),
        "source": [keys.start, keys.stop, sizes[0]],
        "target": [queries.start, queries.stop, sizes[1]],
    }


def mean_weights(trace: Trace, layers: Sequence[int], head: int | None, queries: slice, keys: slice) -> Tensor:
    """Return the mean cross-attention [query, key] over layers, of one head or of all."""
    heads = slice(None) if head is None else slice(head, head + 1)
    maps = (trace.attention_map(f"decoder.cross_pattern.{layer}") for layer in layers)
    total = sum(one.weights(heads, queries, keys)[0].mean(0) for one in maps)
    assert isinstance(total, Tensor)
    return total / len(layers)


@dataclass(frozen=True)
class Beams(Settings):
    """Parameters of a beam search."""

    forward_pass: ForwardPass = field(
        default_factory=ForwardPass
    )  # its target is ignored: the search starts from an empty one
    beams: int = 4
    length_penalty: float = 1.0
    max_new_tokens: int = 48

    def check(self) -> None:
        require(2 <= self.beams <= MAX_BEAMS, "beams", self.beams, f"2 to {MAX_BEAMS}")
        most = f"1 to {MAX_SEARCH_TOKENS}"
        require(1 <= self.max_new_tokens <= MAX_SEARCH_TOKENS, "max_new_tokens", self.max_new_tokens, most)


def beams(traces: TraceCache, params: Beams) -> JsonDict:
    """Return the tree of a beam search, parents first, and its hypotheses, best first."""
    trace = _require_seq2seq(traces, params.forward_pass)
    model, tok = trace.model, trace.tok
    assert isinstance(model, Seq2Seq)
    source = trace.inputs[0][0].tolist()
    found = trace.run(
        lambda: generate(
            model,
            tok,
            [source],
            params.max_new_tokens,
            beams=params.beams,
            length_penalty=params.length_penalty,
            n=params.beams,
            keep_tree=True,
            weights="own",
        )
    )
    tree = found[0].tree or []
    return {
        "nodes": [
            {
                **name,
                "parent": node.parent,
                "logprob": node.logprob,
                "total": node.total,
                "score": node.score,
                "step": node.step,
                "outcome": node.outcome,
            }
            for node, name in zip(
                tree, serialization.describe_tokens([node.token for node in tree], tok), strict=True
            )
        ],
        "hypotheses": [_hypothesis(one, tree, trace) for one in found if one.score is not None],
    }


def _hypothesis(one: Completion, tree: list[Node], trace: Trace) -> JsonDict:
    return {
        "ids": one.ids,
        "text": escape_control(one.text),
        "tokens": serialization.describe_tokens(one.ids, trace.tok),
        "score": one.score,
        "finish_reason": one.finish_reason,
        "path": node_path(one, tree),
    }


def node_path(one: Completion, tree: list[Node]) -> list[int]:
    """Return the nodes of a hypothesis, including the end-of-text node if it has one."""
    children = {(node.parent, node.token): at for at, node in enumerate(tree)}
    path: list[int] = []
    for token in one.ids:
        path.append(children[path[-1] if path else None, token])
    last = path[-1] if path else None
    if one.finish_reason == "stop":
        ends = [at for at, node in enumerate(tree) if (node.parent, node.outcome) == (last, "ended")]
        path += [at for at in ends if tree[at].score == one.score][:1]
    return path


def _require_seq2seq(traces: TraceCache, forward_pass: ForwardPass) -> Trace:
    trace = traces.trace(forward_pass)
    if not isinstance(trace.model, Seq2Seq):
        raise InputError(
            f"the model is of kind {trace.model.spec.kind}, which has no source; open an encoder-decoder."
        )
    return trace


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened, and those of the other averages."""
    trace = _require_seq2seq(traces, forward_pass)
    s = trace.model.spec
    layer, head = min(state["layer"], s.n_layers - 1), min(state["head"], s.n_heads - 1)
    shown: JsonDict = {"forward_pass": forward_pass.to_json()}
    for name, place, row in zip(("source", "target"), (state["key"], state["token"]), trace.inputs, strict=True):
        start = min(place, row.shape[1] - 1) // WINDOW * WINDOW
        shown[name] = [start, start + WINDOW]
    requests = [("cross_attention", shown | part) for part in ({}, {"layer": layer}, {"layer": layer, "head": head})]
    if isinstance(s.head, spec.NextToken):
        given = replace(forward_pass, prompt=PagePrompt(forward_pass.prompt.text))
        chosen = {
            "beams": state.get("seq2seq_beams", 4),
            "length_penalty": state.get("seq2seq_length_penalty", 1),
        }
        different = {name: one for name, one in chosen.items() if one != getattr(Beams, name)}
        requests.append(("beams", {"forward_pass": given.to_json(), **different}))
    return requests


VIEW = View(
    name="seq2seq",
    title="Source and target",
    endpoints={"cross_attention": Endpoint(CrossAttention, cross_attention), "beams": Endpoint(Beams, beams)},
    initial_requests=initial_requests,
    state_keys=("beams", "length_penalty", "moment", "pruned", "scope"),
    applies=lambda loader: isinstance(loader.get("").model, Seq2Seq),
)
