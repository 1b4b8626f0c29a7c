"""Figures of ids to vectors: E1 to E4, and what positions do to a token's vector, P5, P6 and P8."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse.config import JsonDict
from glasshouse.inspection import record
from glasshouse.inspection.inputs.forward_pass import eval_mode
from glasshouse.layers.position import LearnedPosition, Position
from glasshouse.models import Model, Seq2Seq
from glasshouse.models.stack import Stack
from glasshouse.page.views.notes.figure import (
    LIMIT,
    WIDE,
    Control,
    Figure,
    Scene,
    bars,
    bundled,
    decoder_scene,
    encoder_of,
    facts,
    generator,
    initialised,
    largest_difference,
    matrix,
    sentence,
    shapes,
    strongest,
    token_labels,
)

NEAREST = 8
VOCABULARY = 1024  # tokens whose neighbours are searched
PLACES = (0, 1, 2, 4, 8, 16, 32, 48)  # positions at which they are


def batch(scene: Scene) -> list[JsonDict]:
    """E1."""
    x = scene.trace.activation(f"{scene.trace.prefix}embed").float()
    title = f"the first {min(WIDE, x.shape[1])} coordinates of each row"
    return [
        shapes(("ids", [1, len(x)]), ("embedding", [1, *x.shape])),
        matrix(title, x[: scene.length, :WIDE], rows=scene.labels, signed=True, row=scene.place),
    ]


def one_hot(scene: Scene) -> list[JsonDict]:
    """E2."""
    weight = scene.model.token_embedding.table.weight
    ids = scene.trace.inputs[-1][0][: scene.length]
    used = sorted(set(ids.tolist()))
    rows = F.one_hot(ids, weight.shape[0]).float()
    product = rows.to(weight.device) @ weight.float()
    found = scene.model.token_embedding.table(ids)
    names = [f"id {one}" for one in used]
    title = f"one-hot rows: the {len(used)} columns in use, of {weight.shape[0]:,}"
    return [
        shapes(("one-hot", list(rows.shape)), ("E", list(weight.shape)), ("x", list(found.shape))),
        matrix(title, rows[:, used], rows=scene.labels, columns=names, row=scene.place),
        facts(("largest difference from the lookup", largest_difference(product, found))),
    ]


def padding(scene: Scene) -> list[JsonDict]:
    """E3."""
    scene, why = decoder_scene(scene)
    ids = scene.trace.inputs[0][:, : scene.length]
    length, limit = ids.shape[1], scene.model.spec.position_limit
    count = int(scene.value) if limit is None else min(int(scene.value), limit - length)
    row = torch.cat([ids[:, :1].expand(1, count), ids], 1)  # any id will do as padding
    real = torch.arange(count + length, device=ids.device) >= count
    site = f"pattern.{scene.layer}"
    with eval_mode(scene.model):
        alone = scene.model(ids)
        with record(scene.model, site) as seen:
            padded = scene.model(row, mask=real[None])
    weights = seen[site][0, scene.head][count:]
    names = [*["pad"] * count, *scene.labels]
    return [
        *why,
        facts(
            ("padding", count),
            ("largest change of a logit", largest_difference(padded[:, count:], alone)),
            ("largest logit", float(alone.abs().max())),
            ("largest weight on padding", float(weights[:, :count].max()) if count else 0.0),
        ),
        matrix(
            "attention weights; hatched: padding",
            weights.masked_fill(~real.to(weights.device), -math.inf),
            rows=scene.labels,
            columns=names,
        ),
        sentence(
            "Padding is on the left, where only its mask hides it; on the right, a causal mask does so already."
        ),
    ]


def neighbours(scene: Scene) -> list[JsonDict]:
    """E4."""
    table = scene.model.token_embedding.table.weight.detach().float().cpu()
    one = scene.trace.ids[scene.position]
    drawn = torch.randn(min(len(table), VOCABULARY), table.shape[1], generator=generator())
    name = token_labels([one], scene.trace.tok)[0]
    return [
        bars(f"nearest to {name}: cosine of the vectors", _nearest(scene, table, one), most=1.0),
        bars(f"the same in {len(drawn):,} rows drawn at random", _nearest(scene, drawn, one % len(drawn)), most=1.0),
    ]


def _nearest(scene: Scene, table: Tensor, one: int) -> list[tuple[str, float]]:
    cosine = table @ table[one] / (table.norm(dim=-1) * table[one].norm()).clamp(min=1e-12)
    cosine[one] = -math.inf
    best = cosine.topk(min(NEAREST, len(table) - 1))
    return list(zip(token_labels(best.indices.tolist(), scene.trace.tok), best.values.tolist(), strict=True))


def learned_table(scene: Scene) -> list[JsonDict]:
    """P5."""
    position = scene.stack.position
    if isinstance(position, LearnedPosition):
        why = sentence("The rows of the open model's table.")
        rows = position.table.weight[position.offset :].float()
    else:
        why = sentence("The open model has no learned positions; this is a new table, as it is before training.")
        position = initialised("decoder", position="learned").stack.position
        assert isinstance(position, LearnedPosition)
        rows = position.table.weight.float()
    return [
        why,
        shapes(("table", list(rows.shape))),
        matrix("position by coordinate", rows[:LIMIT, :WIDE], signed=True, row=scene.place),
        facts(("mean norm of a row", float(rows.norm(dim=-1).mean()))),
    ]


def added_positions(scene: Scene) -> tuple[Model, Stack, Tensor, list[str], list[JsonDict]]:
    """Return a model whose positions are added, the stack they enter, ids and their tokens."""
    if type(scene.stack.position).embed is not Position.embed:
        return scene.model, scene.stack, scene.trace.inputs[-1][:, : scene.length], scene.labels, []
    model, stack, _, ids, tok, why = encoder_of(scene)
    if type(stack.position).embed is Position.embed:
        loaded = bundled("dates-1m")
        assert isinstance(loaded.model, Seq2Seq)
        model, stack, tok = loaded.model, loaded.model.encoder, loaded.tok
        ids = torch.tensor([[*range(10, 20)]])
    said = sentence(
        f"The open model's positions ({scene.model.spec.position.kind}) add nothing to the embeddings; "
        "this shows dates-1m, which comes with the package."
    )
    return model, stack, ids, token_labels(ids[0].tolist(), tok), [said] if why or stack is not scene.stack else []


def norm_ratio(scene: Scene) -> list[JsonDict]:
    """P6."""
    model, stack, ids, names, why = added_positions(scene)
    token = model.token_embedding(ids)[0].float()
    place = positions_of(stack, ids.shape[1], token.shape[1])
    ratio = place.norm(dim=-1) / token.norm(dim=-1)
    return [
        *why,
        facts(
            ("mean of |position| / |token|, over this text", float(ratio.mean())),
            ("at the start, by arithmetic (sinusoids, scaled embeddings)", math.sqrt(1 / 2)),
            ("width before", token.shape[1]),
            ("width after", (token + place).shape[1]),
        ),
        strongest("|position| / |token|", names, ratio.tolist()),
    ]


def positions_of(stack: Stack, length: int, width: int) -> Tensor:
    """Return what a position encoding adds, [S, D]."""
    weight = next(stack.parameters())
    zero = torch.zeros(1, length, width, device=weight.device)
    return stack.position.embed(zero, torch.arange(length, device=weight.device)[None])[0].float()


def survival(scene: Scene) -> list[JsonDict]:
    """P8."""
    model, stack, _, _, why = added_positions(scene)
    known = min(VOCABULARY, model.spec.vocab_size)
    table = model.token_embedding(torch.arange(known, device=next(model.parameters()).device)[None])[0].float()
    limit = model.spec.position_limit
    at = [one for one in PLACES if limit is None or one < limit]
    encoded = positions_of(stack, max(at) + 1, table.shape[1])[at] * scene.value
    lost = []
    for place in encoded:
        product = (table + place) @ table.T
        distance = table.square().sum(-1) - 2 * product  # from each sum, but for what is the same for all tokens
        lost.append(float((distance.argmin(-1) == torch.arange(known, device=table.device)).float().mean()))
    ratio = float(encoded.norm(dim=-1).mean() / table.norm(dim=-1).mean())
    cosine = F.cosine_similarity((table + encoded[:, None]).double(), table.double(), dim=-1)  # [position, token]
    turned = torch.rad2deg(cosine.clamp(-1, 1).acos())
    return [
        *why,
        facts(
            ("|position| / |token|, over the vocabulary", ratio),
            ("the token's vector is turned by, in degrees", float(turned.mean())),
            ("nearest token is the token itself", f"{100 * sum(lost) / len(lost):.1f}%"),
            ("of so many tokens", known),
        ),
        bars(
            "share of tokens that survive, by position",
            ((f"position {p}", s) for p, s in zip(at, lost, strict=True)),
            most=1,
        ),
    ]


FIGURES = {
    "E1": Figure(batch, ("pass", "position")),
    "E2": Figure(one_hot, ("pass", "position")),
    "E3": Figure(padding, ("pass", "layer", "head"), Control("padding", 3, 0, 12)),
    "E4": Figure(neighbours, ("pass", "position")),
    "P5": Figure(learned_table, ("pass", "position")),
    "P6": Figure(norm_ratio, ("pass",)),
    "P8": Figure(survival, ("pass",), Control("times the position", 1, 0, 8, 0.5)),
}
