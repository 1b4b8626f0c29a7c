"""Answers about the stream: what would be said after each layer, what adds up to a logit, how vectors lie."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.config import JsonDict, Settings, require
from glasshouse.inspection import attribution, record
from glasshouse.inspection.forward_pass import eval_mode, layout_of, resolve_indices
from glasshouse.inspection.logit_lens import LensOutput, apply_lens, has_position_logits, n_logits, target_tokens
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead
from glasshouse.page import wire
from glasshouse.page.following import named
from glasshouse.page.question import Question
from glasshouse.page.trace import Trace, Traces

MOST_POSITIONS = 64  # in one answer
MOST_TOKENS = 20  # of one vector
WINDOW = 64  # positions around one whose parts are kept along with it
# As in static/views/stream/: positions and layers of a tile of the table, tokens a sum may be of, tokens alike.
COLUMNS, ROWS, CANDIDATES, NEAREST = 16, 12, 12, 6
BESIDE = 4  # tiles that a saved page holds on either side of the selected one


@dataclass(frozen=True)
class Lens(Settings):
    """What would be said after some layers (0: the embedding), at the positions from start to before stop?"""

    question: Question = field(default_factory=Question)
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int = 1
    top_k: int = 1


def lens(traces: Traces, ask: Lens) -> JsonDict:
    """Read the stream off, only where it is looked at."""
    require(1 <= ask.top_k <= MOST_TOKENS, "top_k", ask.top_k, f"within 1 and {MOST_TOKENS}")
    trace = traces.of(ask.question)
    layers, places = _window(trace, ask.layers, ask.start, ask.stop)
    true = goals(trace)
    with traces.lock, eval_mode(trace.model):  # in the order in which every pass takes them
        vectors = torch.stack([_as_read(trace, layer)[places] for layer in layers])
        off = read(trace, vectors, true[places].expand(vectors.shape[:2]), ask.top_k)
    shown = sorted({*off.tokens.flatten().tolist(), *(one for one in true[places].tolist() if one >= 0)})
    return {
        "layers": layers,
        "outputs": n_logits(trace.model),
        "tokens": off.tokens.tolist(),
        "true": [one if one >= 0 else None for one in true[places].tolist()],
        "words": dict(zip(map(str, shown), named(trace, shown), strict=True)),
        "probability": wire.packed(off.probabilities),
        "entropy": wire.packed(off.entropy),
        "rank": wire.packed(off.rank),
        "loss": wire.packed(off.loss),
    }


def read(trace: Trace, vectors: Tensor, true: Tensor, top_k: int = 1) -> LensOutput:
    """Read off vectors [..., D] that the head could be given."""
    return apply_lens(trace.model, vectors, true, layout_of(trace.model, trace.inputs[-1], {}), top_k)


def goals(trace: Trace) -> Tensor:
    """Return the true token at each position [S], -1 where there is none: under a mask token, the one it hides."""
    model, ids = trace.model, trace.inputs[-1]
    hidden = trace.question.asked.hidden
    if hidden and isinstance(model, Encoder):
        (ids,) = trace.sitter.inputs(replace(trace.question.asked, hidden=()))
    return target_tokens(model, ids, layout_of(model, ids, {}))[0]


@dataclass(frozen=True)
class Norms(Settings):
    """How long are the vectors after some layers (0: the embedding), at the positions from start to before stop?"""

    question: Question = field(default_factory=Question)
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int = 1


def norms(traces: Traces, ask: Norms) -> JsonDict:
    """Return the lengths of the stream's vectors."""
    trace = traces.of(ask.question)
    layers, places = _window(trace, ask.layers, ask.start, ask.stop)
    sites = trace.stream()
    lengths = [torch.linalg.vector_norm(_exact(trace.site(sites[layer])[places]), dim=-1) for layer in layers]
    return {"layers": layers, "norms": wire.packed(torch.stack(lengths))}


@dataclass(frozen=True)
class Alike(Settings):
    """Which positions hold a vector that points the same way, after a layer (0: the embedding)?"""

    question: Question = field(default_factory=Question)
    layer: int = 0
    position: int = 0
    show: int = 8


def alike(traces: Traces, ask: Alike) -> JsonDict:
    """Return the cosine of one position's vector with those of all others, and the nearest of them."""
    trace = traces.of(ask.question)
    sites, ids = trace.stream(), trace.ids
    require(0 <= ask.layer < len(sites), "layer", ask.layer, f"within 0 and {len(sites) - 1}")
    _check_position(trace, ask.position)
    vectors = F.normalize(_exact(trace.site(sites[ask.layer])), dim=-1)
    cosine = vectors @ vectors[ask.position]
    others = cosine.clone()
    others[ask.position] = -torch.inf
    nearest = others.topk(min(max(0, ask.show), len(ids) - 1)).indices.tolist()
    tokens = wire.tokens((ids[one] for one in nearest), trace.tok)
    return {
        "cosine": wire.packed(cosine),
        "nearest": [
            {**token, "position": one, "cosine": float(cosine[one])}
            for one, token in zip(nearest, tokens, strict=True)
        ],
    }


@dataclass(frozen=True)
class Parts(Settings):
    """What adds up to the logit of a token at a position (the likeliest, if none is named), or to a difference?"""

    question: Question = field(default_factory=Question)
    position: int = 0
    token: int | None = None
    against: int | None = None


def parts(traces: Traces, ask: Parts) -> JsonDict:
    """Split a logit into what the embedding, every head, every feed-forward layer and the biases add."""
    trace = traces.of(ask.question)
    model, ids = trace.model, trace.inputs[-1]
    attribution.check_tokens(model)
    _check_position(trace, ask.position)
    size = model.spec.vocab_size
    for name, given in (("token", ask.token), ("against", ask.against)):
        require(given is None or 0 <= given < size, name, given, f"within 0 and {size - 1}")
    seen = _summands(trace, ask.position)

    def at(site: str) -> Tensor:
        stem, _, layer = site.rpartition(".")
        value = seen[f"{stem}.*"][int(layer)] if f"{stem}.*" in seen else seen[site]
        return value.select(-2, ask.position % WINDOW)

    with traces.lock, eval_mode(model):
        token = ask.token
        if token is None:
            nothing = torch.full((1,), -1, device=ids.device)
            token = int(read(trace, trace.site(f"{trace.prefix}final")[ask.position][None], nothing).tokens)
        one, other = (None if given is None else ids.new_tensor([given]) for given in (token, ask.against))
        assert one is not None
        place = ids.new_tensor([ask.position])
        split = attribution.attribute_logit(model, at, layout_of(model, ids, {}), place, one, other)
    return {
        "token": named(trace, [token])[0],
        "against": None if ask.against is None else named(trace, [ask.against])[0],
        "logit": float(split.logit),
        "embedding": float(split.embedding),
        "bias": float(split.bias),
        "heads": wire.packed(split.heads[0]),
        "cross_heads": None if split.cross_heads is None else wire.packed(split.cross_heads[0]),
        "feedforward": wire.packed(split.feedforward[0]),
    }


def opening(traces: Traces, question: Question, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return what the view asks when it opens: of the table, what a wide screen shows around the selected token."""
    trace = traces.of(question)
    model, place, length = trace.model, state["token"], len(trace.ids)
    depth = len(trace.stack.blocks) + 1
    row = 0 if state.get("streamEmbed") else min(state["layer"], depth - 2) + 1
    here: JsonDict = {"question": question.table()}
    one: JsonDict = {**here, "start": place, "stop": place + 1}
    reads = has_position_logits(model)
    asks: list[tuple[str, JsonDict]] = [
        ("norms", one),
        ("alike", {**here, "layer": row, "position": place, "show": NEAREST}),
    ]
    first = max(0, place // COLUMNS - BESIDE) * COLUMNS
    for start in range(first, min(length, (place // COLUMNS + BESIDE + 1) * COLUMNS), COLUMNS):
        for top in range(depth, 0, -ROWS):
            layers = list(range(top - 1, max(0, top - ROWS) - 1, -1))
            tile = {**here, "layers": layers, "start": start, "stop": min(length, start + COLUMNS)}
            asks.append(("lens" if reads else "norms", tile))
    if reads:
        asks.append(("lens", {**one, "layers": [row], "top_k": 5}))
    if isinstance(model.head, LMHead):
        chosen = {"token": state.get("streamToken"), "against": state.get("streamAgainst")}
        given = {name: value for name, value in chosen.items() if value is not None}
        asks.append(("next", {**here, "position": place, "show": CANDIDATES}))
        asks.append(("parts", {**here, "position": place, **given}))
    return asks


def _summands(trace: Trace, position: int) -> dict[str, Tensor]:
    """Return what a logit is split by, at the positions around one: the next look there needs no pass."""
    start = position - position % WINDOW
    part = f"[position={start}:{min(start + WINDOW, len(trace.ids))}]"
    wanted = {name: f"{trace.prefix}{name}{part}" for name in attribution.attribution_sites(trace.model)}
    kept = {name: trace.traces.get(trace.question, full) for name, full in wanted.items()}
    found = {name: one for name, one in kept.items() if isinstance(one, Tensor)}
    if len(found) == len(wanted):
        return found

    def work() -> dict[str, Tensor]:
        with record(trace.model, *wanted.values(), stop=True) as seen:
            trace.model(*trace.inputs)
        return {name: seen[full] for name, full in wanted.items()}

    found = trace.run(work)
    for name, value in found.items():
        trace.traces.put(trace.question, wanted[name], value)
    return found


def _as_read(trace: Trace, layer: int) -> Tensor:
    """Return the stream after a layer as the head would be given it, [S, D]."""
    sites = trace.stream()
    if layer == len(sites) - 1:
        return trace.site(f"{trace.prefix}final")
    return trace.stack.norm.forward(trace.site(sites[layer]))


def _window(trace: Trace, layers: tuple[int, ...] | None, start: int, stop: int) -> tuple[list[int], slice]:
    """Return the layers and positions that are looked at."""
    length = len(trace.ids)
    require(0 <= start < length, "start", start, f"within 0 and {length - 1}")
    require(start < stop <= start + MOST_POSITIONS, "stop", stop, f"within {start + 1} and {start + MOST_POSITIONS}")
    shown = resolve_indices(layers, len(trace.stack.blocks) + 1, "layers")
    require(bool(shown), "layers", layers, "one at least")
    return shown, slice(start, min(stop, length))


def _check_position(trace: Trace, position: int) -> None:
    length = len(trace.ids)
    require(0 <= position < length, "position", position, f"within 0 and {length - 1}")


def _exact(vectors: Tensor) -> Tensor:
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))
