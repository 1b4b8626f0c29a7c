"""Figures of looking inside: V1 to V4."""

from __future__ import annotations

import base64
import math
from typing import Any

import torch

from glasshouse.config import JsonDict
from glasshouse.inspection import edit, record
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.inspection.logit_lens import has_position_logits
from glasshouse.models.heads import LMHead
from glasshouse.page.views import residual_stream
from glasshouse.page.views.notes.figure import (
    Figure,
    Scene,
    bars,
    elsewhere,
    facts,
    matrix,
    sentence,
    table,
)
from glasshouse.page.views.residual_stream import Lens, LogitAttribution

SHOWN = 10
HEAD = ("pass", "layer", "head", "position")


def attention_map(scene: Scene) -> list[JsonDict]:
    """V1."""
    weights = scene.weights()[scene.head]
    hidden = torch.ones_like(weights, dtype=torch.bool).triu(1) & scene.stack.causal
    title = f"layer {scene.layer}, head {scene.head}: rows attend to columns"
    shown = weights.masked_fill(hidden, -math.inf)
    return [
        matrix(title, shown, rows=scene.labels, columns=scene.labels, row=scene.place),
        facts(("layers", len(scene.stack.blocks)), ("heads", scene.model.spec.n_heads)),
    ]


def predicting(scene: Scene) -> tuple[Scene, list[JsonDict]]:
    """Return a scene of a model that predicts tokens."""
    if isinstance(scene.model.head, LMHead) and has_position_logits(scene.model):
        return scene, []
    moved, why = elsewhere(scene, "python-3m", "The open model predicts no tokens")
    return moved, [why]


def logit_lens(scene: Scene) -> list[JsonDict]:
    """V2."""
    scene, why = predicting(scene)
    asked = Lens(scene.trace.forward_pass, None, scene.position, scene.position + 1, top_k=3)
    found: Any = residual_stream.lens(scene.trace.traces, asked)
    shares = _floats(found["probability"], 3)
    names = found["token_info"]
    rows = []
    for number, layer in enumerate(found["layers"]):
        said = [names[str(one)]["text"] for one in found["tokens"][number][0]]
        rows.append(["embedding" if layer == 0 else f"layer {layer - 1}", *said, shares[number][0]])
    return [
        *why,
        table(
            "what would be predicted if the model stopped here",
            ["after", "first", "second", "third", "P(first)"],
            rows,
        ),
    ]


def _floats(packed: JsonDict, width: int) -> list[list[float]]:
    """Return the rows of an encoded tensor."""
    data = torch.frombuffer(bytearray(base64.b64decode(packed["f32"])), dtype=torch.float32)
    return data.view(-1, width).tolist()


def logit_attribution(scene: Scene) -> list[JsonDict]:
    """V3."""
    scene, why = predicting(scene)
    found: Any = residual_stream.logit_attribution(
        scene.trace.traces, LogitAttribution(scene.trace.forward_pass, scene.position)
    )
    heads, ffn = _floats(found["heads"], scene.model.spec.n_heads), _floats(found["feedforward"], 1)
    parts = [("embedding", found["embedding"]), ("biases", found["bias"])]
    parts += [(f"head {i}.{j}", one) for i, row in enumerate(heads) for j, one in enumerate(row)]
    parts += [(f"feed-forward {i}", row[0]) for i, row in enumerate(ffn)]
    if found["cross_heads"] is not None:
        cross = _floats(found["cross_heads"], scene.model.spec.n_heads)
        parts += [(f"cross head {i}.{j}", one) for i, row in enumerate(cross) for j, one in enumerate(row)]
    total = sum(one for _, one in parts)
    strongest = sorted(parts, key=lambda one: -abs(one[1]))[:SHOWN]
    rest = total - sum(one for _, one in strongest)
    return [
        *why,
        bars(f"what pushes the logit of “{found['token']['text']}” up or down", [*strongest, ("all others", rest)]),
        facts(("sum of all parts", total), ("the logit", found["logit"]), ("parts", len(parts))),
        sentence(
            "The parts are heads, feed-forward layers, the embedding and the biases, divided as the final norm "
            "divided their sum."
        ),
    ]


def moved_information(scene: Scene) -> list[JsonDict]:
    """V4."""
    trace, prefix, ids = scene.trace, scene.trace.prefix, scene.trace.inputs[-1][0]
    if scene.length < 2:
        return [sentence("The text is too short; write a longer one.")]
    # From the last token, nothing reaches another.
    reader = scene.place if 0 < scene.place < scene.length - 1 else scene.length // 2
    weights = scene.weights()[scene.head, reader].clone()
    weights[reader] = -1
    source = int(weights.argmax())
    other = next((i for i in range(scene.length) if ids[i] != ids[source]), source)
    changed = trace.inputs[-1].clone()
    changed[0, source] = ids[other]
    z = f"{prefix}z.{scene.layer}"
    names = [f"{prefix}resid_post.{layer}" for layer in range(len(scene.stack.blocks))]
    edits = trace.edits()  # of the open text
    with eval_mode(scene.model), edit(scene.model, edits):
        with record(scene.model, z) as from_other_text:
            scene.model(*trace.inputs[:-1], changed)
        with record(scene.model, *names) as before:
            scene.model(*trace.inputs)
        patch = {f"{z}[head={scene.head}, position={reader}]": from_other_text[z][:, scene.head, reader]}
        with edit(scene.model, patch), record(scene.model, *names) as after:
            scene.model(*trace.inputs)
    change = torch.stack(
        [(after[name][0].float() - before[name][0].float())[: scene.length].norm(dim=-1) for name in names]
    )
    own = change[scene.layer].clone()
    own[reader] = 0
    at, told = scene.labels[reader], scene.labels[source]
    return [
        *(
            []
            if reader == scene.place
            else [sentence(f"Token {scene.place} cannot show this; “{at}” is taken for it.")]
        ),
        sentence(
            f"Head {scene.layer}.{scene.head} gives {100 * float(weights[source]):.0f}% of the attention of “{at}” "
            f"(token {reader}) to “{told}” (token {source}). A second run has “{scene.labels[other]}” in place of "
            f"“{told}”; what the head writes at “{at}” there is copied into the run of the open text. What changes "
            f"then has come from “{told}” through this head."
        ),
        matrix(
            f"change of the residual stream when head {scene.layer}.{scene.head} is patched at “{at}”",
            change / change.max().clamp(min=1e-12),
            rows=[f"layer {layer}" for layer in range(len(names))],
            columns=scene.labels,
            row=scene.layer,
        ),
        facts(
            (f"in layer {scene.layer}, at “{at}”", float(change[scene.layer, reader])),
            ("in its own layer, at other tokens", float(own.max())),
            ("before that layer", float(change[: scene.layer].max()) if scene.layer else 0.0),
            ("in later layers, at other tokens", _later(change, scene.layer, reader)),
        ),
        sentence("The view Interventions patches any site from another text."),
    ]


def _later(change: torch.Tensor, layer: int, place: int) -> float:
    later = change[layer + 1 :].clone()
    if len(later):
        later[:, place] = 0
    return float(later.max()) if len(later) else 0.0


FIGURES = {
    "V1": Figure(attention_map, HEAD),
    "V2": Figure(logit_lens, ("pass", "position")),
    "V3": Figure(logit_attribution, ("pass", "position")),
    "V4": Figure(moved_information, HEAD),
}
