"""Figures of order, causality and several heads: A8 to A13, A15 and A16."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

from glasshouse import pretrained
from glasshouse.config import JsonDict
from glasshouse.inspection import edit, record
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.layers.attend.layout import make_layout
from glasshouse.models import Model, Seq2Seq
from glasshouse.page.forward_pass import PagePrompt
from glasshouse.page.views.attention.head_scoring import Scores, scores
from glasshouse.page.views.notes.figure import (
    LIMIT,
    Control,
    Figure,
    Scene,
    bars,
    bundled,
    decoder_scene,
    facts,
    generator,
    initialised,
    largest_difference,
    matrix,
    sentence,
    table,
    token_labels,
)

KV_HEADS = (1, 2, 4, 8)  # of eight heads
TARGET = 12  # tokens generated for a figure of cross-attention
NO_DROPOUT: JsonDict = {"dropout": 0.0, "embed_dropout": 0.0, "init": "xavier"}


def permutation(scene: Scene) -> list[JsonDict]:
    """A8."""
    ids = torch.tensor([[one % 256 for one in scene.trace.ids[: scene.length]]])
    order = torch.roll(torch.arange(ids.shape[1]), int(scene.value))
    found = []
    for name, model in _order_models().items():
        before, after = model(ids), model(ids[:, order])
        found.append((name, largest_difference(after, before[:, order]) / float(before.abs().max())))
    return [
        sentence("Small models as initialised, on these tokens moved around in a circle."),
        bars("how far the outputs are from the permuted ones, relative to the largest", found),
        facts(("moved by", int(scene.value)), ("without positions and mask", found[0][1])),
    ]


@cache
def _order_models() -> dict[str, Model]:
    return {
        "no positions, no mask": initialised("encoder", position="none", **NO_DROPOUT),
        "sinusoids": initialised("encoder", position="sinusoidal", **NO_DROPOUT),
        "a causal mask": initialised("decoder", position="none", **NO_DROPOUT),
    }


def causality(scene: Scene) -> list[JsonDict]:
    """A9."""
    scene, why = decoder_scene(scene)
    ids = scene.trace.inputs[0][:, : scene.length]
    at = min(int(scene.value), scene.length - 1)
    other = ids.clone()
    other[0, at] = (other[0, at] + 1) % scene.model.spec.vocab_size
    sites = ["embed", *(f"resid_post.{layer}" for layer in range(scene.model.spec.n_layers))]
    edits = scene.trace.edits()  # of the open text, which the stream has
    with eval_mode(scene.model), edit(scene.model, edits), record(scene.model, *sites) as seen:
        scene.model(other)
    after = [seen[name][0].float() for name in sites]
    change = torch.stack([(scene.stream(layer) - one).norm(dim=-1) for layer, one in enumerate(after)])
    return [
        *why,
        matrix(
            f"change of the residual stream as a share of the largest in its row, token {at} replaced by the next id",
            change / change.amax(-1, keepdim=True),
            rows=["embedding", *(f"layer {layer}" for layer in range(len(sites) - 1))],
            columns=scene.labels,
        ),
        facts(
            ("token replaced", at),
            ("largest change before it", float(change[:, :at].max()) if at else 0.0),
            ("largest change from it on", float(change[:, at:].max())),
        ),
    ]


def cross_attention(scene: Scene) -> list[JsonDict]:
    """A10."""
    model, tok, why = scene.model, scene.trace.tok, []
    layer, head, inputs = scene.layer, scene.head, scene.trace.inputs
    if not isinstance(model, Seq2Seq):
        loaded = bundled("dates-1m")
        model, tok, layer, head = loaded.model, loaded.tok, min(layer, 1), min(head, 3)
        assert isinstance(model, Seq2Seq)
        inputs = _written(model, loaded.inputs(PagePrompt(pretrained.PROMPTS["dates-1m"])))
        why = [sentence("The open model has no encoder; this shows dates-1m, which comes with the package.")]
    names = [f"decoder.cross_{one}.{layer}" for one in ("pattern", "q", "k")]
    with eval_mode(model), record(model, *names) as seen:
        model(*inputs)
    source, target = (token_labels(one[0].tolist()[:LIMIT], tok) for one in inputs)
    weights, q, k = (seen[name][0] for name in names)
    return [
        *why,
        matrix(
            f"layer {layer}, head {head}: rows of the target attend to columns of the source",
            weights[head, :LIMIT, :LIMIT],
            rows=target,
            columns=source,
        ),
        sentence("A row is where the decoder looks with that token as its last input, to write the next one."),
        facts(
            ("queries, from the decoder", q.shape[1]),
            ("keys, from the encoder", k.shape[1]),
            ("smallest row sum", float(weights[head].sum(-1).min())),
        ),
    ]


def _written(model: Seq2Seq, inputs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the source, and a target that the model writes greedily."""
    source, target = inputs
    with eval_mode(model):
        for _ in range(TARGET):
            best = model(source, target)[:, -1:].argmax(-1)
            if int(best) in model.spec.end_ids:
                break
            target = torch.cat([target, best], 1)
    return source, target


def head_types(scene: Scene) -> list[JsonDict]:
    """A11."""
    name = "decoder.pattern" if scene.trace.prefix else "pattern"
    found: Any = scores(scene.trace.traces, Scores(scene.trace.forward_pass, name))
    heads, even = found["heads"], found["uniform"]
    rows = []
    for kind, said in (
        ("current_token", "current token: itself"),
        ("previous", "previous token"),
        ("first", "first token"),
        ("duplicate", "the same token before"),
        ("induction", "what followed the same token"),
        ("broad", "broad: entropy over that of uniform attention"),
    ):
        each = [
            (one[kind], layer, head)
            for layer, row in enumerate(heads)
            for head, one in enumerate(row)
            if one[kind] is not None
        ]
        if each:
            best, layer, head = max(each)
            rows.append([said, f"{layer}.{head}", best, even[layer][kind]])
    labels = [[one["label"] or "none" for one in row] for row in heads]
    return [
        table("the head that does it most", ["looks at", "layer.head", "score", "uniform attention"], rows),
        table(
            "the type of each head",
            ["layer", *(f"head {i}" for i in range(len(labels[0])))],
            ([layer, *(one.replace("_", " ") for one in row)] for layer, row in enumerate(labels)),
        ),
        sentence(
            "The type of a head is the score that is more than halfway from uniform attention to 1; broad: its "
            "entropy is within ln 2 of that of uniform attention; none: neither."
        ),
    ]


def groups(scene: Scene) -> list[JsonDict]:
    """A12."""
    n_heads, own = KV_HEADS[-1], scene.model.spec
    chosen = KV_HEADS[int(scene.value)]
    sizes: JsonDict = {"d_model": 32, "n_heads": n_heads, "d_head": 16, "n_layers": 1, "position": "none"}
    shared, whole = (
        initialised("decoder", torch.float64, **sizes, n_kv_heads=count, qk_norm=False, **NO_DROPOUT).stack
        for count in (chosen, n_heads)
    )
    grouped, multi = shared.attention_layers("attention")[0], whole.attention_layers("attention")[0]
    multi.query.weight.copy_(grouped.query.weight)
    multi.out.weight.copy_(grouped.out.weight)
    for one, other in ((multi.key, grouped.key), (multi.value, grouped.value)):
        of_group = other.weight.chunk(chosen)
        one.weight.copy_(torch.cat([of_group[i * chosen // n_heads] for i in range(n_heads)]))
    x = torch.randn(1, 8, 32, generator=generator(), dtype=torch.float64)
    both = (grouped, shared), (multi, whole)
    layout = make_layout(torch.zeros(1, 8, dtype=torch.long))
    few, many = (layer(x, stack.context(layout, x.dtype)) for layer, stack in both)
    named = {n_heads: "multi-head", 1: "multi-query"}
    return [
        *(
            matrix(
                f"{named.get(count, f'grouped-query, {count} groups')}: which key-value head each head uses",
                torch.eye(count).repeat_interleave(n_heads // count, 0),
                rows=[f"head {i}" for i in range(n_heads)],
                columns=[f"kv {i}" for i in range(count)],
            )
            for count in dict.fromkeys([n_heads, chosen, 1])
        ),
        facts(
            ("heads", n_heads),
            ("key-value heads", chosen),
            ("the open model has", f"{own.n_kv_heads} for {own.n_heads} heads"),
            ("largest difference from multi-head with repeated keys and values", largest_difference(few, many)),
        ),
    ]


def divisors(count: int) -> list[int]:
    """Return the numbers of key-value heads that a number of heads can share.

    >>> divisors(6)
    [1, 2, 3, 6]
    """
    return [one for one in range(1, count + 1) if count % one == 0]


def cache_size(scene: Scene) -> list[JsonDict]:
    """A13."""
    s, count = scene.model.spec, int(scene.value)
    per_head = 2 * 2 * s.n_layers * s.d_head  # a key and a value of two bytes a number
    each = [(f"{kv} of {s.n_heads}", float(kv * per_head * count)) for kv in divisors(s.n_heads)]
    return [
        bars(f"bytes of the cache for {count:,} tokens, by number of key-value heads", each),
        facts(
            ("this model has", f"{s.n_kv_heads} of {s.n_heads}"),
            ("bytes a token", s.n_kv_heads * per_head),
            ("smaller than multi-head by a factor of", s.n_heads / s.n_kv_heads),
        ),
        sentence("In 16-bit numbers: 2 (key and value) x 2 bytes x layers x key-value heads x d_head."),
    ]


def own_score(scene: Scene) -> list[JsonDict]:
    """A15."""
    count, layers = int(scene.value), len(scene.stack.blocks)
    ranks, seen = [], []
    for layer in range(layers):
        found = scene.scores(layer)
        seen.append((found[0, count:] > -math.inf).sum(-1))  # keys of each query
        ranks.append((found > found.diagonal(dim1=-2, dim2=-1)[..., None]).sum(-1))  # how many score higher
    among = (torch.stack(ranks) < count).float()[..., count:]  # queries whose choice is not certain
    if among.shape[-1] == 0:
        return [sentence("The text is too short; write a longer one.")]
    share = among.mean(-1)
    even = float((count / torch.stack(seen)).mean())
    return [
        matrix(
            f"share of tokens that score themselves among the first {count}",
            share,
            rows=[f"layer {i}" for i in range(layers)],
            columns=[f"head {i}" for i in range(share.shape[1])],
        ),
        facts(
            ("over all heads and tokens", float(share.mean())),
            ("by an even choice", even),
            ("heads where most do", int((share > 0.5).sum())),
            ("of", share.numel()),
        ),
    ]


def sharing(scene: Scene) -> list[JsonDict]:
    """A16."""
    s = scene.model.spec
    patterns = scene.weights()
    apart = (patterns[:, None] - patterns).abs().sum(-1).mean(-1) / 2  # total variation, mean of the queries
    n = len(apart)
    mean = float(apart.sum() / max(1, n * (n - 1)))
    wide, narrow = s.n_heads * s.d_head, s.d_head
    rows = [[kv, 2 * s.d_model * wide + 2 * s.d_model * narrow * kv, kv * narrow * 2] for kv in divisors(s.n_heads)]
    names = [f"head {i}" for i in range(n)]
    return [
        table(
            "multiplications of the four projections per token in one layer, and numbers cached",
            ["key-value heads", "multiplications", "cached"],
            rows,
        ),
        matrix(
            f"share of its attention in which a head of layer {scene.layer} differs from another",
            apart,
            rows=names,
            columns=names,
        ),
        facts(("key-value heads of this model", s.n_kv_heads), ("two heads differ in, on average", mean)),
    ]


FIGURES = {
    "A8": Figure(permutation, ("pass",), Control("move the tokens by", 1, 0, 8)),
    "A9": Figure(
        causality,
        ("pass",),
        Control("token to replace", 3, 0, LIMIT - 1),
        limit=lambda scene: decoder_scene(scene)[0].length - 1,
    ),
    "A10": Figure(cross_attention, ("pass", "layer", "head")),
    "A11": Figure(head_types, ("pass",)),
    "A12": Figure(groups, ("pass",), Control("key-value heads", 1, 0, 3, labels=tuple(map(str, KV_HEADS)))),
    "A13": Figure(cache_size, ("pass",), Control("tokens", 1024, 128, 8192, 128)),
    "A15": Figure(own_score, ("pass",), Control("the first", 1, 1, 5)),
    "A16": Figure(sharing, ("pass", "layer")),
}
