"""Endpoints for circuits: the estimated effect of each edge, how faithful the largest of them are, and the search."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings, require
from glasshouse.errors import InputError
from glasshouse.inspection import (
    Circuit,
    circuit,
    edge_attribution,
    edge_attribution_by_position,
    edge_patching,
)
from glasshouse.inspection.inputs.call_arguments import CallArguments
from glasshouse.inspection.patching.edge_effects import ranked
from glasshouse.inspection.patching.edge_graph import EdgeGraph
from glasshouse.inspection.patching.edge_runner import EdgeScorer
from glasshouse.inspection.patching.metrics import Metric
from glasshouse.models import Encoder, Seq2Seq
from glasshouse.models.heads import Classifier, NoHead, Pooler
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.next_token import describe_outputs, logits_at, logits_of_pass

MAX_ELEMENTS = 2**25  # readers x tokens x width: what all readers are given, of which a gradient is taken
MAX_EDGES = 512  # the largest are sent
SLICE = 0.5  # seconds of a search in one request
PATIENCE = 60.0  # seconds after which a search that nobody waits for ends


@dataclass(frozen=True)
class TextPair(Settings):
    """Parameters of a comparison of two texts: `forward_pass` is the clean one."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    corrupted: PagePrompt | None = None


def text_pair(traces: TraceCache, params: TextPair) -> JsonDict:
    """Return what both texts predict at each token, or why there is no circuit of this model and these texts."""
    clean = traces.trace(params.forward_pass.unedited)
    corrupted = None if params.corrupted is None else _other(traces, params.forward_pass, params.corrupted)
    try:
        _check(clean, corrupted)
    except InputError as error:
        return {"why_not": str(error), "clean": [], "corrupted": []}
    texts = (clean, corrupted) if corrupted is not None else ()
    names = ("clean", "corrupted")[: len(texts)]
    found = {name: describe_outputs(one, _predictions(one)) for name, one in zip(names, texts, strict=True)}
    return {"why_not": None, "clean": [], "corrupted": [], **found}


@dataclass(frozen=True)
class EdgeEffects(Settings):
    """Parameters of the edges: two texts, and the token at which the prediction is read."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    corrupted: PagePrompt = field(default_factory=PagePrompt)
    position: int = 0


def edge_effects(traces: TraceCache, params: EdgeEffects) -> JsonDict:
    """Return the edges with the largest estimated effects, and how faithful so many of them are.

    The effect is 0 where the difference of the logits of both predictions is that of the corrupted text, 1 where it
    is that of the clean one.
    """
    pair = _Pair(traces, params)
    attribution = pair.attribution()
    order = ranked(attribution)

    def work() -> tuple[EdgeScorer, list[JsonDict]]:
        scorer = pair.scorer()
        return scorer, _sizes(scorer, order, _steps(min(MAX_EDGES, len(order))))

    scorer, sizes = pair.clean.run(work)
    places = order[:MAX_EDGES]
    return {
        "edges": _named(scorer.graph, places, attribution),
        "n_edges": len(order),
        "sizes": sizes,
        "before": float(scorer.corrupted_baseline),
        "after": float(scorer.clean_baseline),
    }


@dataclass(frozen=True)
class FindCircuit(EdgeEffects):
    """Parameters of the search, as of the edges; `sliced` searches for half a second and is to be sent again."""

    sliced: bool = False


def find_circuit(traces: TraceCache, params: FindCircuit) -> JsonDict:
    """Return the circuit of `gh.circuit`, or, of a search in slices, how many edges are decided."""
    pair = _Pair(traces, params)
    with traces.lock:
        edges, scores = (traces.get(pair.key, f"{name} {pair.place}") for name in ("circuit", "circuit scores"))
        if edges is None or scores is None:
            search = _search(traces, pair)
            search.advance(SLICE if params.sliced else float("inf"))
            if search.found is None:
                return {"done": search.done, "total": search.total, "found": None}
            del _searches[traces]
            edges, scores = _kept(pair.graph, search.found)
            traces.put(pair.key, f"circuit {pair.place}", edges)
            traces.put(pair.key, f"circuit scores {pair.place}", scores)
        assert isinstance(edges, Tensor)
        assert isinstance(scores, Tensor)
    places = ranked(edges)
    order = ranked(pair.attribution())
    (largest,) = pair.clean.run(lambda: _sizes(pair.scorer(), order, [len(places)]))
    return {
        "done": len(order),
        "total": len(order),
        "found": {
            "edges": _named(pair.graph, places, edges),
            **dict(zip(SCORES, scores.tolist(), strict=True)),
            "largest": largest,  # as many edges, chosen by their estimated effect alone
        },
    }


@dataclass(frozen=True)
class PatchEdge(EdgeEffects):
    """Parameters of the patch of one edge, by the names of its writer and its reader."""

    writer: str = ""
    reader: str = ""


def patch_edge(traces: TraceCache, params: PatchEdge) -> JsonDict:
    """Return the effect of patching one edge from the clean text into a run on the corrupted one.

    With it come its estimated effects by position, and whether these are positions of the source.
    """
    pair, edge = _Pair(traces, params), (params.writer, params.reader)
    prompts = pair.corrupted_inputs, pair.clean_inputs

    def work() -> JsonDict:
        found = edge_patching(pair.model, *prompts, [edge], metric=pair.metric)
        positions = edge_attribution_by_position(pair.model, *prompts, edge, metric=pair.metric)
        return {
            "effect": serialization.finite_or_none(found[edge]),
            "positions": serialization.encode_tensor(positions),
            "is_source": params.writer.startswith("encoder."),
        }

    return pair.clean.run(work)


class _Pair:
    """A clean and a corrupted text, cut after the token at which a causal model's prediction is read."""

    def __init__(self, traces: TraceCache, params: EdgeEffects) -> None:
        self.clean = traces.trace(params.forward_pass.unedited)
        corrupted = _other(traces, params.forward_pass, params.corrupted)
        _check(self.clean, corrupted)
        self.model, self.place = self.clean.model, params.position
        rows = [_predictions(one) for one in (self.clean, corrupted)]
        require(0 <= self.place < len(self.clean.ids), "position", self.place, f"below {len(self.clean.ids)}")
        right, wrong = (row[min(self.place, len(row) - 1)] for row in rows)
        if right == wrong:
            (said,) = describe_outputs(self.clean, [right])
            raise InputError(
                f"both texts predict {said['text']!r} at token {self.place}; choose another token, or a text with "
                "another prediction."
            )
        is_encoder = isinstance(self.model, Encoder)
        stop = None if is_encoder or _is_pooled(self.clean) else self.place + 1
        # The prompts as the tools take them, corrupted and clean.
        self.corrupted_inputs, self.clean_inputs = (
            (*one.inputs[:-1], one.inputs[-1][:, :stop]) for one in (corrupted, self.clean)
        )
        self.metric: Metric | None = None  # of the last token
        if is_encoder and not _is_pooled(self.clean):
            place = self.place  # alone: a search that keeps the metric is not to keep the cache
            self.metric = lambda logits: logits[0, place, right] - logits[0, place, wrong]
        self.key = ForwardPass(params.forward_pass.prompt, params.forward_pass.checkpoint, (), params.corrupted)
        self.traces, self.graph = traces, EdgeGraph(self.model)

    def scorer(self) -> EdgeScorer:
        """Return what finds the effect of edges; call it inside `run`."""
        corrupted, clean = (CallArguments(one, {}) for one in (self.corrupted_inputs, self.clean_inputs))
        return EdgeScorer(self.model, corrupted, clean, self.metric)

    def attribution(self) -> Tensor:
        """Return the estimated effect of each edge [reader, writer], which is cached."""
        name = f"edges {self.place}"
        with self.traces.lock:
            if (found := self.traces.get(self.key, name)) is None:
                prompts = self.corrupted_inputs, self.clean_inputs
                found = self.clean.run(lambda: edge_attribution(self.model, *prompts, metric=self.metric).effect)
                self.traces.put(self.key, name, found)
        assert isinstance(found, Tensor)
        return found


def _other(traces: TraceCache, forward_pass: ForwardPass, prompt: PagePrompt) -> Trace:
    return traces.trace(ForwardPass(prompt, forward_pass.checkpoint))


def _check(clean: Trace, corrupted: Trace | None) -> None:
    """Raise InputError unless there can be a circuit of a model and two texts."""
    if isinstance(clean.model.head, NoHead | Pooler):
        raise InputError(f"the head is {clean.model.spec.head.kind!r}, so there is no prediction to explain.")
    graph = EdgeGraph(clean.model)  # which says what models have no edges
    most = MAX_ELEMENTS // (len(graph.reader_names) * clean.model.spec.d_model)
    longest = max(one.shape[1] for one in clean.inputs)
    if longest > most:
        raise InputError(f"the text has {longest:,} tokens, but a circuit of this model takes {most:,}; shorten it.")
    if corrupted is not None:
        for here, there in zip(clean.inputs, corrupted.inputs, strict=True):
            if here.shape != there.shape:
                raise InputError(
                    f"the texts have {here.shape[1]:,} and {there.shape[1]:,} tokens, but a circuit compares them "
                    "token by token; give texts of the same length."
                )


def _is_pooled(trace: Trace) -> bool:
    """Whether there is one prediction for the whole text."""
    head = trace.model.head
    return isinstance(head, Classifier) and isinstance(head.pool, Pooler)


def _predictions(trace: Trace) -> list[int]:
    """Return the top prediction at each token, or of the whole text."""
    if _is_pooled(trace):
        return [int(logits_at(trace, 0).argmax())]
    return logits_of_pass(trace, slice(None)).argmax(-1).tolist()


def _steps(most: int) -> list[int]:
    """Return numbers of edges up to the most, each about 1.4 times the last.

    >>> _steps(20)
    [1, 2, 3, 4, 6, 8, 12, 16, 20]
    """
    powers = [2**one for one in range(most.bit_length())]
    return sorted({*(one for two in powers for one in (two, two * 3 // 2) if one <= most), most})


def _sizes(scorer: EdgeScorer, order: Tensor, sizes: list[int]) -> list[JsonDict]:
    """Return how faithful so many of the largest edges are, and which of them, by rank, lie on a path."""
    graph = scorer.graph
    masks = []
    for size in sizes:
        mask = torch.zeros_like(graph.exists)
        mask[tuple(order[:size].T)] = True
        masks.append(graph.connected(mask))
    chosen = torch.stack(masks)
    is_embedding = torch.tensor([name.endswith("embed") for name in graph.writer_names])
    effects = scorer.effects(chosen, chosen & is_embedding).tolist()
    return [
        {"size": size, "kept": mask[tuple(order[:size].T)].nonzero()[:, 0].tolist(), "faithfulness": effect}
        for size, mask, effect in zip(sizes, chosen, effects, strict=True)
    ]


def _named(graph: EdgeGraph, places: Tensor, effect: Tensor) -> list[JsonDict]:
    return [
        {"writer": graph.writer_names[col], "reader": graph.reader_names[row], "effect": float(effect[row, col])}
        for row, col in places.tolist()
    ]


SCORES = ("faithfulness", "completeness", "random_faithfulness")


def _kept(graph: EdgeGraph, found: Circuit) -> tuple[Tensor, Tensor]:
    """Return a circuit as it is cached: the effects of its edges [reader, writer], NaN elsewhere, and its scores."""
    edges = torch.full(graph.exists.shape, torch.nan, dtype=torch.float64)
    for edge, effect in found.edges.items():
        edges[graph.place(*edge)] = effect
    return edges, torch.tensor([getattr(found, name) for name in SCORES], dtype=torch.float64)


class _Search:
    """A search that goes on only while a request waits for it, so that other requests come between."""

    def __init__(self, work: Callable[[Callable[[int, int], None]], Circuit]) -> None:
        self.done, self.total = 0, 0
        self.found: Circuit | None = None
        self.error: Exception | None = None
        self._work, self._until = work, 0.0
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False
        threading.Thread(target=self._run, daemon=True).start()

    def advance(self, seconds: float) -> None:
        """Search for so long, or until the circuit is found."""
        self._until = time.monotonic() + seconds
        self._go.release()
        self._paused.acquire()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._go.acquire()
            self.found = self._work(self._progress)
        except Exception as error:
            self.error = error
        finally:
            self.is_over = True
            self._paused.release()

    def _progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total
        if time.monotonic() >= self._until:
            self._paused.release()
            if not self._go.acquire(timeout=PATIENCE):
                raise InputError("the search for the circuit was given up, as nobody waited for it; start it again.")


_searches: WeakKeyDictionary[TraceCache, tuple[object, _Search]] = WeakKeyDictionary()


def _search(traces: TraceCache, pair: _Pair) -> _Search:
    """Return the search for the circuit of a pair; one for another pair, or one given up, makes way for it."""
    key = (pair.key, pair.place, pair.clean.loaded)
    known = _searches.get(traces)
    if known is None or known[0] != key or known[1].is_over:
        # Not the pair itself, which keeps the cache.
        corrupted, clean, metric = pair.corrupted_inputs, pair.clean_inputs, pair.metric
        # A copy with the same weights: a search that waits would lock the model's hooks.
        shared = {id(one): one for one in [*pair.model.parameters(), *pair.model.buffers()]}
        model = copy.deepcopy(pair.model, shared)
        search = _Search(lambda progress: circuit(model, corrupted, clean, metric, progress=progress))
        _searches[traces] = known = (key, search)
    return known[1]


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the request that the view sends when opened."""
    corrupted = _corrupted(traces, forward_pass, state)
    body: JsonDict = {"forward_pass": forward_pass.unedited.to_json()}
    return [("text_pair", body if corrupted is None else {**body, "corrupted": corrupted})]


def control_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests of the circuit, which is found for a page that is saved at this view."""
    if (corrupted := _corrupted(traces, forward_pass, state)) is None:
        return []
    body: JsonDict = {"forward_pass": forward_pass.unedited.to_json(), "corrupted": corrupted}
    body |= {"position": state["token"]}
    writer, _, reader = str(state.get("circuit_edge", "")).partition(" ")
    chosen = [("patch_edge", {**body, "writer": writer, "reader": reader})] if reader else []
    return [("edge_effects", body), ("find_circuit", body), *chosen]


def _corrupted(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> JsonDict | None:
    """Return the corrupted text as the page sends it."""
    if not state["patch_from"]:
        return None
    text = {"text": state["patch_from"]}
    is_pair = isinstance(traces.loader.get(forward_pass.checkpoint).model, Seq2Seq)
    return {**forward_pass.unedited.to_json()["prompt"], **text} if is_pair else text


VIEW = View(
    name="circuit",
    title="Circuit",
    endpoints={
        "text_pair": Endpoint(TextPair, text_pair),
        "edge_effects": Endpoint(EdgeEffects, edge_effects),
        "find_circuit": Endpoint(FindCircuit, find_circuit),
        "patch_edge": Endpoint(PatchEdge, patch_edge),
    },
    initial_requests=initial_requests,
    control_requests=control_requests,
    state_keys=("edge", "size"),
    applies=lambda loader: not loader.served,  # its search would hold up the requests of others
)
