"""Endpoint for the scores and types of all heads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from glasshouse.config import JsonDict, Settings
from glasshouse.inspection import head_scores
from glasshouse.inspection.head_scoring import classify_heads
from glasshouse.models import Seq2Seq
from glasshouse.page import serialization
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.views.attention.layer_map import layer_map, n_layers

SCORED = 512  # tokens that head scores are computed on
# Scores sent to the page, by head type, and their fields in `HeadScores`.
SCORE_FIELDS = {
    "broad": "normalized_entropy",
    **{name: name for name in ("entropy", "current_token", "previous", "first", "duplicate", "induction")},
}
SCORE_NAMES = tuple(SCORE_FIELDS)


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
    first = layer_map(trace, params.attention, 0)
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


def telling_selection(traces: TraceCache, forward_pass: ForwardPass) -> dict[str, int]:
    """Return the layer and head with the highest induction score, and the key that the last token attends to there.

    Empty where no head is an induction head.
    """
    found = scores(traces, Scores(forward_pass))["heads"]
    places = [(layer, head) for layer, row in enumerate(found) for head in range(len(row))]
    layer, head = max(places, key=lambda at: found[at[0]][at[1]]["induction"] or 0.0)
    if found[layer][head]["label"] != "induction":
        return {}
    key = int(layer_map(traces.trace(forward_pass), "pattern", layer).weights(head, -1)[0].argmax())
    return {"layer": layer, "head": head, "key": key}


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
    for layer in range(n_layers(trace, attention)):
        found = layer_map(trace, attention, layer)
        _, heads, queries, keys = found.shape
        span = slice(0, min(queries, SCORED))
        each = [torch.special.entr(found.weights(head, span)[0]).sum(-1).mean() for head in range(heads)]
        entropies.append(torch.stack(each))
    entropy = torch.stack(entropies)
    most = entropy.new_full(entropy.shape, math.log(keys) if keys > 1 else math.nan)
    even = [torch.ones_like(most[:, 0]), most[:, 0]]
    return [entropy / most, entropy], even, classify_heads({}, {}, most - entropy)
