"""Endpoints for attention: small maps of all heads, tiles of one head's map, head scores, and one query-key pair."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.config import JsonDict, Settings, did_you_mean, require
from glasshouse.errors import InputError
from glasshouse.inspection import AttentionMap, head_scores, sites
from glasshouse.inspection.head_scoring import classify_heads
from glasshouse.layers.mask import Mask
from glasshouse.models import Seq2Seq
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache

EVERY = slice(None)
TILE = 256  # cells per side of a tile
SMALL = 40  # maximum cells per side of a small map
STRIP = 2**20  # weights in memory at once
SCORED = 512  # tokens that head scores are computed on
LISTED = 8  # keys listed per query
KEPT_FROM = 2  # level from which a whole row of tiles is cached, as tiles are small there
MASKED = -1.0  # marks masked positions: no weight is negative

# Scores sent to the page, by head type, and their fields in `HeadScores`.
SCORE_FIELDS = {
    "broad": "normalized_entropy",
    **{name: name for name in ("entropy", "current_token", "previous", "first", "duplicate", "induction")},
}
SCORE_NAMES = tuple(SCORE_FIELDS)


@dataclass(frozen=True)
class Maps(Settings):
    """Parameters of the small maps of a layer."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    attention: str = "pattern"
    layer: int = 0


def maps(traces: TraceCache, params: Maps) -> JsonDict:
    """Return a max-pooled map of each head, [head, row, column].

    A byte is 0 where masked, else 1 + 254 times the square root of the weight, which resolves small weights. For long
    texts only every `stride`-th query is computed.
    """
    found = _map(traces.trace(params.forward_pass), params.attention, params.layer)
    _, heads, queries, keys = found.shape
    tall, wide = -(-queries // SMALL), -(-keys // SMALL)
    stride = min(tall, max(1, math.ceil(queries * keys / STRIP)))
    places = range(0, queries, stride)
    some = found if stride == 1 else _subset(found, places)
    rows = torch.tensor([place // tall for place in places], device=found.kernel.q.device)
    made = torch.zeros((heads, -(-queries // tall), -(-keys // wide)), dtype=torch.uint8)
    for head in range(heads):
        seen = _seen(some, head, slice(0, len(places)))
        columns = F.max_pool1d(seen, wide, ceil_mode=True)
        small = columns.new_full(made.shape[1:], MASKED)
        small.scatter_reduce_(0, rows[:, None].expand_as(columns), columns, "amax")
        made[head] = torch.where(small < 0, 0.0, 1 + (254 * small.clamp(min=0).sqrt()).round()).to(torch.uint8)
    return {"maps": serialization.encode_tensor(made), "pool_size": [tall, wide], "stride": stride}


@dataclass(frozen=True)
class Tile(Settings):
    """Parameters of one tile of a head's map."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    attention: str = "pattern"
    layer: int = 0
    head: int = 0
    level: int = 0
    row: int = 0
    column: int = 0


def tile(traces: TraceCache, params: Tile) -> JsonDict:
    """Return a tile of one head's map, max-pooled over squares of side 2 ** level; -1 is masked."""
    found = _map(traces.trace(params.forward_pass), params.attention, params.layer, params.head)
    queries, keys = found.shape[2:]
    top = levels(queries, keys) - 1
    require(0 <= params.level <= top, "level", params.level, f"within 0 and {top}")
    span = TILE * 2**params.level
    for name, place, size in (("row", params.row, queries), ("column", params.column, keys)):
        require(0 <= place < -(-size // span), name, place, f"within 0 and {-(-size // span) - 1}")
    if params.level < KEPT_FROM:
        cells = _pooled(found, params, slice(params.column * span, min((params.column + 1) * span, keys)))
    else:
        # A weight needs the softmax over its whole row, so one tile costs as much as the whole row of tiles.
        name = f"{found.site.name}.tiles.{params.head}.{params.level}.{params.row}"
        row = traces.get(params.forward_pass, name)
        if not isinstance(row, Tensor):
            row = _pooled(found, params, EVERY)
            traces.put(params.forward_pass, name, row)
        cells = row[:, params.column * TILE : (params.column + 1) * TILE]
    return {"cells": serialization.encode_tensor(cells)}


def _pooled(found: AttentionMap, params: Tile, keys: slice) -> Tensor:
    """Return the cells of a row of tiles over some keys, computed strip by strip."""
    side = 2**params.level
    first, last = params.row * TILE * side, min((params.row + 1) * TILE * side, found.shape[2])
    step = max(1, STRIP // (found.shape[3] * side)) * side  # a multiple of the pooling size
    strips = []
    for start in range(first, last, step):
        seen = _seen(found, params.head, slice(start, min(start + step, last)), keys)
        strips.append(seen if side == 1 else F.max_pool2d(seen[None], side, ceil_mode=True)[0])
    return torch.cat(strips)


def levels(queries: int, keys: int) -> int:
    """Return the number of zoom levels of a map: the last one is a single tile.

    >>> levels(256, 30), levels(257, 30), levels(8192, 8192)
    (1, 2, 6)
    """
    return 1 + max(0, math.ceil(math.log2(max(queries, keys) / TILE)))


@dataclass(frozen=True)
class Scores(Settings):
    """Parameters of the head scores."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    attention: str = "pattern"


def scores(traces: TraceCache, params: Scores) -> JsonDict:
    """Return head scores [layer][head] with head types; long texts are scored on their first tokens.

    `label` is the head type, None where no score exceeds the baseline of uniform attention, sent as `uniform`
    [layer]. Cross-attention has no previous or same token, so only its entropy is scored.
    """
    trace = traces.trace(params.forward_pass)
    first = _map(trace, params.attention, 0)
    length = first.shape[2]
    name = f"head_scores.{params.attention}"
    kept = traces.get(params.forward_pass, name)
    if not isinstance(kept, Tensor):
        crosses = params.attention.rpartition(".")[2].startswith("cross_")
        kept = _cacheable(*(_entropy_scores(trace, params.attention) if crosses else _scored(traces, params, length)))
        traces.put(params.forward_pass, name, kept)
    count = len(kept) // 2
    each, even = (
        [[_score_dict(head) for head in layer] for layer in some.permute(1, 2, 0).tolist()]
        for some in (kept[:count], kept[count:-1])
    )
    heads = [
        [
            {**one, "label": SCORE_NAMES[int(number)] if number >= 0 else None}
            for one, number in zip(*layer, strict=True)
        ]
        for layer in zip(each, kept[-1].tolist(), strict=True)
    ]
    return {"heads": heads, "uniform": [layer[0] for layer in even], "scored": min(length, SCORED), "of": length}


def _score_dict(values: list[float]) -> JsonDict:
    return {name: serialization.finite_or_none(one) for name, one in zip(SCORE_NAMES, values, strict=False)}


def _cacheable(scores: list[Tensor], even: list[Tensor], names: list[list[str]]) -> Tensor:
    """Return one tensor to cache: scores [layer, head] by SCORE_NAMES, the uniform baseline, and head types."""
    numbers = torch.tensor([[SCORE_NAMES.index(name) if name else -1 for name in layer] for layer in names])
    return torch.stack([*scores, *(one[:, None].expand_as(scores[0]) for one in even), numbers.to(scores[0])])


def _scored(traces: TraceCache, params: Scores, length: int) -> tuple[list[Tensor], list[Tensor], list[list[str]]]:
    """Return the results of `head_scores`: scores, uniform baseline and head types."""
    cut = length > SCORED
    # Patches and position edits do not apply to a truncated text.
    trace = traces.trace(params.forward_pass.without_position_edits() if cut else params.forward_pass)
    inputs, stack, side = list(trace.inputs), None, -1
    if isinstance(trace.model, Seq2Seq):
        stack = params.attention.partition(".")[0]
        side = 0 if stack == "encoder" else -1
    inputs[side] = inputs[side][:, :SCORED]
    found = trace.run(partial(head_scores, trace.model, *inputs, stack=stack))
    return (
        [getattr(found, field) for field in SCORE_FIELDS.values()],
        [found.uniform_baseline[field] for field in SCORE_FIELDS.values()],
        found.head_types,
    )


def _entropy_scores(trace: Trace, attention: str) -> tuple[list[Tensor], list[Tensor], list[list[str]]]:
    """Return the same for cross-attention, which only has an entropy."""
    entropies = []
    for layer in range(_layers(trace, attention)):
        found = _map(trace, attention, layer)
        _, heads, queries, keys = found.shape
        span = slice(0, min(queries, SCORED))
        each = [torch.special.entr(found.weights(head, span)[0]).sum(-1).mean() for head in range(heads)]
        entropies.append(torch.stack(each))
    entropy = torch.stack(entropies)
    most = entropy.new_full(entropy.shape, math.log(keys) if keys > 1 else math.nan)
    even = [torch.ones_like(most[:, 0]), most[:, 0]]
    return [entropy / most, entropy], even, classify_heads({}, {}, most - entropy)


@dataclass(frozen=True)
class QueryKey(Settings):
    """Parameters of one query-key pair."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)
    attention: str = "pattern"
    layer: int = 0
    head: int = 0
    query: int = 0
    key: int = 0


def query_key(traces: TraceCache, params: QueryKey) -> JsonDict:
    """Return every number of one query-key pair, the attention weights of the query, and the head output z."""
    found = _map(traces.trace(params.forward_pass), params.attention, params.layer, params.head)
    _, heads, queries, keys = found.shape
    require(0 <= params.query < queries, "query", params.query, f"within 0 and {queries - 1}")
    require(0 <= params.key < keys, "key", params.key, f"within 0 and {keys - 1}")
    kernel = found.kernel
    group = heads // kernel.k.shape[1]
    shared = params.head // group
    exact = torch.promote_types(kernel.q.dtype, torch.float32)
    q = kernel.q[0, params.head, params.query].to(exact)
    k, v = kernel.k[0, shared, params.key].to(exact), kernel.v[0, shared].to(exact)
    weights, row = found.weights(params.head, params.query)[0], found.scores(params.head, params.query)[0]
    there = (row > -torch.inf).nonzero()[:, 0]
    top = there[weights[there].argsort(descending=True, stable=True)[:LISTED]]
    largest = row.max()
    bias = _added(found, params.head, params.query, params.key)
    return {
        "q": serialization.encode_tensor(q),
        "k": serialization.encode_tensor(k),
        "products": serialization.encode_tensor(q * k),
        "sum": serialization.finite_or_none((q * k).sum()),
        "scale": float(kernel.attend.scale),
        "softcap": kernel.attend.softcap,
        "bias": serialization.finite_or_none(bias),  # None: masked
        "score": serialization.finite_or_none(row[params.key]),
        "largest": serialization.finite_or_none(largest),
        "total": serialization.finite_or_none((row - largest).exp().sum()),
        "weight": serialization.finite_or_none(weights[params.key]),
        "weights": serialization.encode_tensor(torch.where(row > -torch.inf, weights, MASKED)),
        "seen": len(there),
        "top": [{"key": int(one), "weight": float(weights[one]), "score": float(row[one])} for one in top],
        "v": serialization.encode_tensor(v[params.key]),
        "weighted_value": serialization.encode_tensor(weights[params.key] * v[params.key]),
        "z": serialization.encode_tensor(weights @ v),
        "kv_head": shared,
        "group": group,
    }


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    """Return the requests that the view sends when opened; the map is requested as a single tile."""
    trace = traces.trace(forward_pass)
    pair = isinstance(trace.model, Seq2Seq)
    kinds = _kinds(trace)
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


def _kinds(trace: Trace) -> list[str]:
    """Return the attention site of every layer, without its layer number."""
    return [name.rpartition(".")[0] for name, site in sites(trace.model).items() if site.hook_point == "pattern"]


def _layers(trace: Trace, attention: str) -> int:
    """Return the number of layers with this attention."""
    kinds = _kinds(trace)
    if attention not in kinds:
        raise InputError(f"the model has no attention {attention!r}; {did_you_mean(attention, dict.fromkeys(kinds))}")
    return kinds.count(attention)


def _map(trace: Trace, attention: str, layer: int, head: int = 0) -> AttentionMap:
    """Return the attention map of a layer after checking layer and head."""
    depth, heads = _layers(trace, attention), trace.model.spec.n_heads
    require(0 <= layer < depth, "layer", layer, f"within 0 and {depth - 1}")
    require(0 <= head < heads, "head", head, f"within 0 and {heads - 1}")
    return trace.attention_map(f"{attention}.{layer}")


def _subset(found: AttentionMap, places: range) -> AttentionMap:
    """Return the map of a subset of queries."""
    kernel = found.kernel
    queries, keys = found.shape[2:]
    part = slice(places.start, places.stop, places.step)
    dense = kernel.mask.to_dense(queries, keys, kernel.q.device, part)
    if dense is not None and dense.dtype == torch.bool:
        dense = kernel.q.new_zeros(()).masked_fill(~dense, -torch.inf)
    return AttentionMap(found.site, kernel._replace(q=kernel.q[:, :, part], mask=Mask(bias=dense)))


def _seen(found: AttentionMap, head: int, queries: slice, keys: slice = EVERY) -> Tensor:
    """Return the weights of some queries of a head on some keys [queries, keys], MASKED where masked."""
    weights = found.weights(head, queries, keys)[0]
    mask = _mask(found, head, queries)
    if mask is None:
        return weights
    part = mask[..., keys]
    return weights.masked_fill(~part if part.dtype == torch.bool else part == -torch.inf, MASKED)


def _added(found: AttentionMap, head: int, query: int, key: int) -> float:
    """Return the mask and position bias of one score."""
    mask = _mask(found, head, slice(query, query + 1))
    if mask is None:
        return 0.0
    one = mask.expand(1, found.shape[3])[0, key]
    return float(one) if one.dtype != torch.bool else 0.0 if one else -math.inf


def _mask(found: AttentionMap, head: int, queries: slice) -> Tensor | None:
    """Return the mask or bias of some queries of a head, broadcastable to [queries, keys]."""
    drawn = found.kernel.mask.to_dense(*found.shape[2:], found.kernel.q.device, queries)
    if drawn is None:
        return None
    heads = drawn[(None,) * (4 - drawn.dim())][0]
    return heads[head if len(heads) > 1 else 0]
