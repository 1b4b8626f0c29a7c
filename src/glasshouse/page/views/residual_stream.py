"""Endpoints for the residual stream: logit lens, direct logit attribution, norms and cosine similarity."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.config import JsonDict, Settings, require
from glasshouse.inspection import attribution, record
from glasshouse.inspection.inputs.forward_pass import eval_mode, layout_of, resolve_indices
from glasshouse.inspection.logit_lens import (
    LensOutput,
    apply_lens,
    has_position_logits,
    n_logits,
    summarize_logits,
    target_tokens,
)
from glasshouse.models import Encoder
from glasshouse.models.heads import LMHead
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.view import Endpoint, View
from glasshouse.page.views.next_token import describe_outputs, logits_at, logits_of_pass

MAX_POSITIONS = 64  # per request
MAX_TOKENS = 20  # top-k limit
WINDOW = 64  # positions whose attribution inputs are cached together
# As in static/views/residual/: positions and layers per tile, candidate tokens, similar positions.
COLUMNS, ROWS, CANDIDATES, NEAREST = 16, 12, 12, 6
BESIDE = 4  # tiles included in a saved page on either side of the selected one


@dataclass(frozen=True)
class Lens(Settings):
    """Parameters of the logit lens: layers (0: the embedding) and positions from start to stop."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int = 1
    top_k: int = 1


def lens(traces: TraceCache, params: Lens) -> JsonDict:
    """Apply the logit lens to the requested layers and positions."""
    require(1 <= params.top_k <= MAX_TOKENS, "top_k", params.top_k, f"within 1 and {MAX_TOKENS}")
    trace = traces.trace(params.forward_pass)
    layers, places = _window(trace, params.layers, params.start, params.stop)
    targets = target_token_ids(trace)
    with traces.lock, eval_mode(trace.model):  # same lock order as every forward pass
        read = [_read(trace, layer, places, targets[places], params.top_k) for layer in layers]
        off = LensOutput(*map(torch.stack, zip(*read, strict=True)))
    shown = sorted({*off.tokens.flatten().tolist(), *(one for one in targets[places].tolist() if one >= 0)})
    return {
        "layers": layers,
        "outputs": n_logits(trace.model),
        "tokens": off.tokens.tolist(),
        "targets": [one if one >= 0 else None for one in targets[places].tolist()],
        "token_info": dict(zip(map(str, shown), describe_outputs(trace, shown), strict=True)),
        "probability": serialization.encode_tensor(off.probabilities),
        "entropy": serialization.encode_tensor(off.entropy),
        "rank": serialization.encode_tensor(off.rank),
        "loss": serialization.encode_tensor(off.loss),
    }


def logit_lens_at(trace: Trace, vectors: Tensor, targets: Tensor, top_k: int = 1) -> LensOutput:
    """Apply the unembedding to normalized vectors [..., D]."""
    return apply_lens(trace.model, vectors, targets, layout_of(trace.model, trace.inputs[-1], {}), top_k)


def target_token_ids(trace: Trace) -> Tensor:
    """Return the target token at each position [S], -1 where there is none; for a mask token, the masked one."""
    model, ids = trace.model, trace.inputs[-1]
    masked = trace.forward_pass.prompt.masked
    if masked and isinstance(model, Encoder):
        (ids,) = trace.loaded.inputs(replace(trace.forward_pass.prompt, masked=()))
    return target_tokens(model, ids, layout_of(model, ids, {}))[0]


@dataclass(frozen=True)
class Norms(Settings):
    """Parameters of the norms: layers (0: the embedding) and positions from start to stop."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    layers: tuple[int, ...] | None = None
    start: int = 0
    stop: int = 1


def norms(traces: TraceCache, params: Norms) -> JsonDict:
    """Return the norms of the residual stream."""
    trace = traces.trace(params.forward_pass)
    layers, places = _window(trace, params.layers, params.start, params.stop)
    sites = trace.residual_sites()
    lengths = [torch.linalg.vector_norm(_exact(trace.activation(sites[layer])[places]), dim=-1) for layer in layers]
    return {"layers": layers, "norms": serialization.encode_tensor(torch.stack(lengths))}


@dataclass(frozen=True)
class CosineSimilarity(Settings):
    """Parameters of the cosine similarity after a layer (0: the embedding)."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    layer: int = 0
    position: int = 0
    show: int = 8


def cosine_similarity(traces: TraceCache, params: CosineSimilarity) -> JsonDict:
    """Return the cosine similarity of one position to all others, and the nearest of them."""
    trace = traces.trace(params.forward_pass)
    sites, ids = trace.residual_sites(), trace.ids
    require(0 <= params.layer < len(sites), "layer", params.layer, f"within 0 and {len(sites) - 1}")
    _check_position(trace, params.position)
    vectors = F.normalize(_exact(trace.activation(sites[params.layer])), dim=-1)
    cosine = vectors @ vectors[params.position]
    others = cosine.clone()
    others[params.position] = -torch.inf
    nearest = others.topk(min(max(0, params.show), len(ids) - 1)).indices.tolist()
    tokens = serialization.describe_tokens((ids[one] for one in nearest), trace.tok)
    return {
        "cosine": serialization.encode_tensor(cosine),
        "nearest": [
            {**token, "position": one, "cosine": float(cosine[one])}
            for one, token in zip(nearest, tokens, strict=True)
        ],
    }


@dataclass(frozen=True)
class LogitAttribution(Settings):
    """Parameters of the attribution of a logit (default: the most likely token), or of a logit difference."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    position: int = 0
    token: int | None = None
    incorrect_token: int | None = None


def logit_attribution(traces: TraceCache, params: LogitAttribution) -> JsonDict:
    """Split a logit into contributions of the embedding, every head, every feed-forward layer and the biases."""
    trace = traces.trace(params.forward_pass)
    model, ids = trace.model, trace.inputs[-1]
    attribution.check_tokens(model)
    _check_position(trace, params.position)
    size = model.spec.vocab_size
    for name, given in (("token", params.token), ("incorrect_token", params.incorrect_token)):
        require(given is None or 0 <= given < size, name, given, f"within 0 and {size - 1}")
    seen = _summands(trace, params.position)

    def at(site: str) -> Tensor:
        stem, _, layer = site.rpartition(".")
        value = seen[f"{stem}.*"][int(layer)] if f"{stem}.*" in seen else seen[site]
        return value.select(-2, params.position % WINDOW)

    with traces.lock, eval_mode(model):
        token = params.token
        if token is None:
            token = int(logits_at(trace, params.position).argmax())
        one, other = (None if given is None else ids.new_tensor([given]) for given in (token, params.incorrect_token))
        assert one is not None
        place = ids.new_tensor([params.position])
        split = attribution.attribute_logit(model, at, place, one, other)
    return {
        "token": describe_outputs(trace, [token])[0],
        "incorrect_token": None
        if params.incorrect_token is None
        else describe_outputs(trace, [params.incorrect_token])[0],
        "logit": float(split.logit),
        "embedding": float(split.embedding),
        "bias": float(split.bias),
        "heads": serialization.encode_tensor(split.heads[0]),
        "cross_heads": None if split.cross_heads is None else serialization.encode_tensor(split.cross_heads[0]),
        "feedforward": serialization.encode_tensor(split.feedforward[0]),
    }


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened: the table around the selected token."""
    trace = traces.trace(forward_pass)
    model, place, length = trace.model, state["token"], len(trace.ids)
    depth = len(trace.stack.blocks) + 1
    row = 0 if state.get("residual_embed") else min(state["layer"], depth - 2) + 1
    here: JsonDict = {"forward_pass": forward_pass.to_json()}
    one: JsonDict = {**here, "start": place, "stop": place + 1}
    reads = has_position_logits(model)
    requests: list[tuple[str, JsonDict]] = [
        ("norms", one),
        ("cosine_similarity", {**here, "layer": row, "position": place, "show": NEAREST}),
    ]
    first = max(0, place // COLUMNS - BESIDE) * COLUMNS
    for start in range(first, min(length, (place // COLUMNS + BESIDE + 1) * COLUMNS), COLUMNS):
        for top in range(depth, 0, -ROWS):
            layers = list(range(top - 1, max(0, top - ROWS) - 1, -1))
            tile = {**here, "layers": layers, "start": start, "stop": min(length, start + COLUMNS)}
            requests.append(("lens" if reads else "norms", tile))
    if reads:
        requests.append(("lens", {**one, "layers": [row], "top_k": 5}))
    if isinstance(model.head, LMHead):
        chosen = {"token": state.get("residual_token"), "incorrect_token": state.get("residual_incorrect_token")}
        given = {name: value for name, value in chosen.items() if value is not None}
        requests.append(("next", {**here, "position": place, "show": CANDIDATES}))
        requests.append(("logit_attribution", {**here, "position": place, **given}))
    return requests


def _summands(trace: Trace, position: int) -> dict[str, Tensor]:
    """Return the attribution inputs at the positions around one, so that neighbours need no forward pass."""
    start = position - position % WINDOW
    part = f"[position={start}:{min(start + WINDOW, len(trace.ids))}]"
    wanted = {name: f"{trace.prefix}{name}{part}" for name in attribution.attribution_sites(trace.model)}
    kept = {name: trace.traces.get(trace.forward_pass, full) for name, full in wanted.items()}
    found = {name: one for name, one in kept.items() if isinstance(one, Tensor)}
    if len(found) == len(wanted):
        return found

    def work() -> dict[str, Tensor]:
        with record(trace.model, *wanted.values(), stop=True) as seen:
            trace.model(*trace.inputs)
        return {name: seen[full] for name, full in wanted.items()}

    found = trace.run(work)
    for name, value in found.items():
        trace.traces.put(trace.forward_pass, wanted[name], value)
    return found


def _read(trace: Trace, layer: int, places: slice, targets: Tensor, top_k: int) -> LensOutput:
    """Return the predictions after a layer; after the last, those of the forward pass itself."""
    sites = trace.residual_sites()
    if layer == len(sites) - 1:
        return summarize_logits(logits_of_pass(trace, places), targets, top_k)
    vectors = trace.stack.norm.forward(trace.activation(sites[layer])[places])
    return logit_lens_at(trace, vectors, targets, top_k)


def _window(trace: Trace, layers: tuple[int, ...] | None, start: int, stop: int) -> tuple[list[int], slice]:
    """Return the requested layers and positions."""
    length = len(trace.ids)
    require(0 <= start < length, "start", start, f"within 0 and {length - 1}")
    require(start < stop <= start + MAX_POSITIONS, "stop", stop, f"within {start + 1} and {start + MAX_POSITIONS}")
    shown = resolve_indices(layers, len(trace.stack.blocks) + 1, "layers")
    require(bool(shown), "layers", layers, "one at least")
    return shown, slice(start, min(stop, length))


def _check_position(trace: Trace, position: int) -> None:
    length = len(trace.ids)
    require(0 <= position < length, "position", position, f"within 0 and {length - 1}")


def _exact(vectors: Tensor) -> Tensor:
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


VIEW = View(
    name="residual",
    title="Residual stream",
    endpoints={
        "lens": Endpoint(Lens, lens),
        "norms": Endpoint(Norms, norms),
        "cosine_similarity": Endpoint(CosineSimilarity, cosine_similarity),
        "logit_attribution": Endpoint(LogitAttribution, logit_attribution),
    },
    initial_requests=initial_requests,
    state_keys=("color", "embed", "incorrect_token", "token"),
)
