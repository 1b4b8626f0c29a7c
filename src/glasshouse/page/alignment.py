"""Answers about an encoder-decoder: where in the source each target token looks, and how a beam search went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from glasshouse import spec
from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.escaping import escape_control
from glasshouse.generation import generate
from glasshouse.generation.beam import Node
from glasshouse.generation.request import Completion
from glasshouse.models import Seq2Seq
from glasshouse.page import wire
from glasshouse.page.question import Question, Text
from glasshouse.page.trace import Trace, Traces

WINDOW = 32  # tokens of source and of target that the page shows at once
MOST_TOKENS = 256  # of source and of target that are answered at once
MOST_BEAMS, MOST_SEARCHED = 8, 128  # beams, and tokens of a search


@dataclass(frozen=True)
class Alignment(Settings):
    """How much does each target token look at each source token?"""

    question: Question = field(default_factory=Question)
    layer: int | None = None  # None: the mean of all
    head: int | None = None  # None: the mean of a layer's heads
    source: tuple[int, ...] = (0, MOST_TOKENS)  # from which token to before which
    target: tuple[int, ...] = (0, MOST_TOKENS)

    def check(self) -> None:
        for name in ("source", "target"):
            span = getattr(self, name)
            ok = len(span) == 2 and 0 <= span[0] < span[1] <= span[0] + MOST_TOKENS
            require(ok, name, list(span), f"two places, at most {MOST_TOKENS} apart")


def alignment(traces: Traces, ask: Alignment) -> JsonDict:
    """Return cross-attention weights [target, source] of one head, or their mean over heads and layers."""
    trace = _pair(traces, ask.question)
    s = trace.model.spec
    for name, value, size in (("layer", ask.layer, s.n_layers), ("head", ask.head, s.n_heads)):
        require(value is None or 0 <= value < size, name, value, f"within 0 and {size - 1}, or null for the mean")
    if ask.layer is None and ask.head is not None:
        raise InputError(f"head is {ask.head}, but no layer is given; name the layer it is of.")
    sizes = [row.shape[1] for row in trace.inputs]
    (s0, s1), (t0, t1) = ask.source, ask.target
    queries, keys = slice(t0, min(t1, sizes[1])), slice(s0, min(s1, sizes[0]))
    require(s0 < sizes[0], "source", list(ask.source), f"within {sizes[0]} tokens")
    require(t0 < sizes[1], "target", list(ask.target), f"within {sizes[1]} tokens")
    layers = range(s.n_layers) if ask.layer is None else [ask.layer]
    return {
        "weights": wire.packed(mean_weights(trace, layers, ask.head, queries, keys)),
        "source": [keys.start, keys.stop, sizes[0]],
        "target": [queries.start, queries.stop, sizes[1]],
    }


def mean_weights(trace: Trace, layers: Sequence[int], head: int | None, queries: slice, keys: slice) -> Tensor:
    """Return the mean of some layers' cross-attention [query, key]: of one head, or of all."""
    heads = slice(None) if head is None else slice(head, head + 1)
    maps = (trace.map(f"decoder.cross_pattern.{layer}") for layer in layers)
    total = sum(one.weights(heads, queries, keys)[0].mean(0) for one in maps)
    assert isinstance(total, Tensor)
    return total / len(layers)


@dataclass(frozen=True)
class Beams(Settings):
    """Which texts does a search consider, and which does it find?"""

    question: Question = field(default_factory=Question)  # its target says nothing here: a search begins at the start
    beams: int = 4
    length_penalty: float = 1.0
    max_new_tokens: int = 48

    def check(self) -> None:
        require(2 <= self.beams <= MOST_BEAMS, "beams", self.beams, f"2 to {MOST_BEAMS}")
        most = f"1 to {MOST_SEARCHED}"
        require(1 <= self.max_new_tokens <= MOST_SEARCHED, "max_new_tokens", self.max_new_tokens, most)


def beams(traces: Traces, ask: Beams) -> JsonDict:
    """Return the tree of a search, parents first, and what it found, best first."""
    trace = _pair(traces, ask.question)
    model, tok = trace.model, trace.tok
    assert isinstance(model, Seq2Seq)
    source = trace.inputs[0][0].tolist()
    found = trace.run(
        lambda: generate(
            model,
            tok,
            [source],
            ask.max_new_tokens,
            beams=ask.beams,
            length_penalty=ask.length_penalty,
            n=ask.beams,
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
                "fate": node.outcome,
            }
            for node, name in zip(tree, wire.tokens([node.token for node in tree], tok), strict=True)
        ],
        "found": [_hypothesis(one, tree, trace) for one in found if one.score is not None],
    }


def _hypothesis(one: Completion, tree: list[Node], trace: Trace) -> JsonDict:
    return {
        "ids": one.ids,
        "text": escape_control(one.text),
        "tokens": wire.tokens(one.ids, trace.tok),
        "score": one.score,
        "finish_reason": one.finish_reason,
        "path": path_of(one, tree),
    }


def path_of(one: Completion, tree: list[Node]) -> list[int]:
    """Return the nodes that a text that was found came by, its end included where it has one."""
    children = {(node.parent, node.token): at for at, node in enumerate(tree)}
    path: list[int] = []
    for token in one.ids:
        path.append(children[path[-1] if path else None, token])
    last = path[-1] if path else None
    if one.finish_reason == "stop":
        ends = [at for at, node in enumerate(tree) if (node.parent, node.outcome) == (last, "ended")]
        path += [at for at in ends if tree[at].score == one.score][:1]
    return path


def _pair(traces: Traces, question: Question) -> Trace:
    trace = traces.of(question)
    if not isinstance(trace.model, Seq2Seq):
        raise InputError(
            f"the model is of kind {trace.model.spec.kind}, which has no source; open an encoder-decoder."
        )
    return trace


def opening(traces: Traces, question: Question, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return what the view asks when it opens, and when the other means are chosen."""
    trace = _pair(traces, question)
    s = trace.model.spec
    layer, head = min(state["layer"], s.n_layers - 1), min(state["head"], s.n_heads - 1)
    shown: JsonDict = {"question": question.table()}
    for name, place, row in zip(("source", "target"), (state["key"], state["token"]), trace.inputs, strict=True):
        start = min(place, row.shape[1] - 1) // WINDOW * WINDOW
        shown[name] = [start, start + WINDOW]
    asks = [("alignment", shown | part) for part in ({}, {"layer": layer}, {"layer": layer, "head": head})]
    if isinstance(s.head, spec.NextToken):
        given = replace(question, asked=Text(question.asked.text))
        chosen = {"beams": state.get("alignment_beams", 4), "length_penalty": state.get("alignment_penalty", 1)}
        different = {name: one for name, one in chosen.items() if one != getattr(Beams, name)}
        asks.append(("beams", {"question": given.table(), **different}))
    return asks
