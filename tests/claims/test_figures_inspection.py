"""Figures of looking inside, V1 to V4, beside the residual stream taken apart by hand."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from claims.figures import (
    LIMIT,
    Below,
    Drawn,
    Opened,
    dot,
    labels,
    near,
    on,
    predicting,
    same,
    size,
    softmax,
    unmasked,
)


@on("V1", "gpt2", "python-3m", "bert", "dates-1m")
def test_figure_v1(drawn: Drawn) -> None:
    one = drawn.model
    pattern = one.record(f"pattern.{one.layer}")[0][one.head, :LIMIT, :LIMIT]
    (matrix,) = drawn.matrices
    assert matrix.title == f"layer {one.layer}, head {one.head}: rows attend to columns"
    same(matrix.values, unmasked(pattern) if one.causal else pattern)
    assert matrix.rows == matrix.columns == one.labels
    assert matrix.row == one.position
    assert drawn.facts == {"layers": one.model.spec.n_layers, "heads": one.model.spec.n_heads}


def final_norm(one: Opened, vector: list[float]) -> list[float]:
    """Apply the last norm to a vector, one number at a time."""
    norm, s = one.stack.norm, one.model.spec
    gain = norm.weight.tolist()
    if s.norm.kind == "rms":
        by = math.sqrt(math.fsum(value * value for value in vector) / len(vector) + s.norm.eps)
        return [g * value / by for g, value in zip(gain, vector, strict=True)]
    mean = math.fsum(vector) / len(vector)
    by = math.sqrt(math.fsum((value - mean) ** 2 for value in vector) / len(vector) + s.norm.eps)
    return [g * (v - mean) / by + b for g, v, b in zip(gain, vector, norm.bias.tolist(), strict=True)]


def unembedding(one: Opened) -> Tensor:
    head = one.model.head
    return (head.weight if hasattr(head, "weight") else one.model.token_embedding.table.weight).detach()


@on("V2", "gpt2", "python-3m", "dates-1m", "gemma", "headless")
def test_figure_v2(drawn: Drawn) -> None:
    one = predicting(drawn.model, drawn.texts)
    depth = one.model.spec.n_layers
    rows = unembedding(one).tolist()
    (table,) = drawn.tables
    assert table.head == ["after", "first", "second", "third", "P(first)"]
    assert [row[0] for row in table.rows] == ["embedding", *(f"layer {i}" for i in range(depth))]
    streams = one.record("embed", *(f"resid_post.{layer}" for layer in range(depth)))
    for stream, row in zip(streams, table.rows, strict=True):
        normed = final_norm(one, stream[one.position].tolist())
        shares = softmax([dot(normed, each) for each in rows])
        best = sorted(range(len(shares)), key=lambda i: -shares[i])[:3]
        assert row[1:4] == labels(best, one.tok)
        assert row[4] == near(shares[best[0]])


def contributions(one: Opened, token: int) -> dict[str, float]:
    """Take a logit apart: each part of the stream, scaled as the final norm scaled the sum, times the token's row."""
    s, at, stack = one.model.spec, one.position, one.stack
    kinds = {"head": ("z", "attention"), "cross head": ("cross_z", "cross")}
    if not one.prefix:
        del kinds["cross head"]
    (end,) = (stream[at].tolist() for stream in one.record(f"resid_post.{s.n_layers - 1}"))
    layer_norm = s.norm.kind != "rms"
    mean = math.fsum(end) / len(end) if layer_norm else 0.0
    by = math.sqrt(math.fsum((value - mean) ** 2 for value in end) / len(end) + s.norm.eps)
    row = unembedding(one)[token].tolist()
    gain = stack.norm.weight.tolist()

    def through(vector: list[float]) -> float:
        middle = math.fsum(vector) / len(vector) if layer_norm else 0.0
        return math.fsum(g * (v - middle) / by * w for g, v, w in zip(gain, vector, row, strict=True))

    bias = dot(stack.norm.bias.tolist(), row) if layer_norm else 0.0
    found = {"embedding": through(one.record("embed")[0][at].tolist()), "biases": 0.0}
    for layer, block in enumerate(stack.blocks):
        for name, (site, part) in kinds.items():
            (z,) = one.record(f"{site}.{layer}")
            out = getattr(block, part).layer.out
            columns = out.weight.detach().split(s.d_head, 1)
            for head, wide in enumerate(columns):
                found[f"{name} {layer}.{head}"] = through([dot(r, z[head, at].tolist()) for r in wide.tolist()])
            bias += 0.0 if out.bias is None else through(out.bias.tolist())
        down = block.feedforward.layer.down
        (added,) = one.outputs(down)
        shift = [0.0] * s.d_model if down.bias is None else down.bias.tolist()
        found[f"feed-forward {layer}"] = through([a - b for a, b in zip(added[at].tolist(), shift, strict=True)])
        bias += through(shift)
    found["biases"] = bias
    return found


@on("V3", "gpt2", "dates-1m", "python-3m", "headless")
def test_figure_v3(drawn: Drawn) -> None:
    one = predicting(drawn.model, drawn.texts)
    logits = one.logits()[one.position].tolist()
    token = max(range(len(logits)), key=logits.__getitem__)
    parts = contributions(one, token)
    total = math.fsum(parts.values())
    assert math.isclose(total, logits[token], rel_tol=1e-4)
    ranked = sorted(parts, key=lambda name: -abs(parts[name]))[:10]
    (bars,) = drawn.bars
    assert bars.title == f"what pushes the logit of “{labels([token], one.tok)[0]}” up or down"
    assert bars.names == [*ranked, "all others"]
    rest = total - math.fsum(parts[name] for name in ranked)
    same(bars.values, [*(parts[name] for name in ranked), rest], 1e-4)
    assert drawn.facts == {
        "sum of all parts": near(total),
        "the logit": near(logits[token]),
        "parts": len(parts),
    }
    assert drawn.texts[-1].startswith("The parts are heads, feed-forward layers, the embedding and the biases")


@on("V4", "gpt2", "python-3m", "dates-1m", "bert", "gemma")
def test_figure_v4(drawn: Drawn) -> None:
    one, s = drawn.model, drawn.model.model.spec
    n, ids = one.shown, one.inputs[-1][0].tolist()
    at = one.position if 0 < one.position < n - 1 else n // 2
    row = one.record(f"pattern.{one.layer}")[0][one.head, at, :n].tolist()
    source = max((i for i in range(n) if i != at), key=lambda i: row[i])
    other = next(i for i in range(n) if ids[i] != ids[source])
    changed = one.inputs[-1].clone()
    changed[0, source] = ids[other]
    names = [f"resid_post.{layer}" for layer in range(s.n_layers)]
    before = one.record(*names)
    head, out = slice(one.head * s.d_head, (one.head + 1) * s.d_head), one.stack.blocks[one.layer].attention.layer.out
    carried = {}

    def keep(_: object, args: tuple[Tensor]) -> None:
        carried["z"] = args[0][:, at, head].clone()

    def put(_: object, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()
        joined[:, at, head] = carried["z"]
        return (joined,)

    hook = out.register_forward_pre_hook(keep)
    with torch.no_grad():
        one.model(*one.inputs[:-1], changed)
    hook.remove()
    hook = out.register_forward_pre_hook(put)
    after = one.record(*names)
    hook.remove()
    change = [[size((a[i] - b[i]).tolist()) for i in range(n)] for a, b in zip(before, after, strict=True)]
    largest = max(map(max, change))
    (matrix,) = drawn.matrices
    told, reader = one.labels[source], one.labels[at]
    assert matrix.title == f"change of the residual stream when head {one.layer}.{one.head} is patched at “{reader}”"
    assert matrix.rows == [f"layer {layer}" for layer in range(s.n_layers)]
    assert (matrix.columns, matrix.row) == (one.labels, one.layer)
    same(matrix.values, [[value / largest for value in row] for row in change], 1e-4)
    later = [row[i] for row in change[one.layer + 1 :] for i in range(n) if i != at]
    assert drawn.facts == {
        f"in layer {one.layer}, at “{reader}”": near(change[one.layer][at], 1e-3),
        "in its own layer, at other tokens": Below(1e-5 * largest),
        "before that layer": Below(1e-5 * largest),
        "in later layers, at other tokens": near(max(later), 1e-3) if later else 0.0,
    }
    moved = [] if at == one.position else [f"Token {one.position} cannot show this; “{reader}” is taken for it."]
    assert drawn.texts == [
        *moved,
        f"Head {one.layer}.{one.head} gives {100 * row[source]:.0f}% of the attention of “{reader}” (token {at}) to "
        f"“{told}” (token {source}). A second run has “{one.labels[other]}” in place of “{told}”; what the head "
        f"writes at “{reader}” there is copied into the run of the open text. What changes then has come from "
        f"“{told}” through this head.",
        "The view Interventions patches any site from another text.",
    ]
