"""Looking inside: statements V2 and V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glasshouse.inspection.attribution import attribute
from glasshouse.inspection.logit_lens import lens

Grow = Callable[..., Any]
Watch = Callable[..., list[Any]]
Agree = Callable[..., None]


def both(model: Any, ids: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Return what a model takes; an encoder-decoder reads the ids backwards and writes them."""
    return (ids.flip(1), ids) if hasattr(model, "encoder") else (ids,)


# V2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_v2_every_layer_has_a_prediction_and_the_last_is_the_models(
    grow: Grow, watch: Watch, agree: Agree, kind: str, order: str
) -> None:
    """The stream after any layer, times the embedding matrix behind the final norm, is a distribution over tokens."""
    head = {"kind": "masked_token", "transform": False} if kind == "encoder" else {"kind": "next_token"}
    model = grow(kind, n_layers=3, norm_placement=order, head=head)
    stack = model.decoder if kind == "seq2seq" else model.stack
    embedded, after = watch(stack.drop), [watch(block) for block in stack.blocks]
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        own = model(*both(model, ids)).softmax(-1)
        seen = lens(model, *both(model, ids), top_k=23)
        probabilities = torch.zeros_like(seen.probabilities).scatter(-1, seen.tokens, seen.probabilities)
        streams = [calls[0].output for calls in (embedded, *after)]
        bias = 0 if model.head.bias is None else model.head.bias
        for stream, row in zip(streams, probabilities, strict=True):
            odds = torch.exp(stack.norm(stream) @ model.token_embedding.table.weight.T + bias)
            agree(row, odds / odds.sum(-1, keepdim=True))
        agree(probabilities[-1], own)


# V3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after", "sandwich"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_v3_a_logit_is_the_sum_of_what_its_parts_add(grow: Grow, agree: Agree, kind: str, order: str) -> None:
    """Heads, feed-forward layers, embedding and biases, each through norms as they were in this pass."""
    head = {"kind": "masked_token"} if kind == "encoder" else {"kind": "next_token", "bias": True}
    model = grow(kind, n_layers=3, norm_placement=order, head=head)
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        logits = model(*both(model, ids))
    for position in range(5):
        parts = attribute(model, *both(model, ids), position=position, token=7, incorrect_token=9).components()
        assert len(parts) == 1 + 3 * (4 + 1) + 1 + (3 * 4 if kind == "seq2seq" else 0)
        agree(sum(parts.values()), logits[:, position, 7] - logits[:, position, 9], within=1e-10)


def test_v3_a_part_is_what_the_logit_loses_without_it(grow: Grow, watch: Watch, agree: Agree) -> None:
    """Norm-before: with a head or layer taken out of the last stream and the norm's scale kept, that is missing."""
    model = grow("decoder", n_layers=3)
    zs = [watch(block.attention.layer.attend) for block in model.stack.blocks]
    layers = [watch(block.feedforward.layer) for block in model.stack.blocks]
    last = watch(model.stack.blocks[-1])
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        model(ids)
        x, norm = last[0].output[:, 4], model.stack.norm
        scale = torch.sqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)

        def logit(x: Tensor) -> Tensor:
            normed = (x - x.mean(-1, keepdim=True)) / scale * norm.weight + norm.bias
            return normed @ model.token_embedding.table.weight[7]

        parts = attribute(model, ids, position=4, token=7).components()
        for layer, block in enumerate(model.stack.blocks):
            z, out = zs[layer][0].output, block.attention.layer.out.weight
            for head in range(4):
                added = z[:, head, 4] @ out[:, 4 * head : 4 * head + 4].T
                agree(logit(x) - logit(x - added), parts[f"head {layer}.{head}"], within=1e-10)
            added = layers[layer][0].output[:, 4] - block.feedforward.layer.down.bias
            agree(logit(x) - logit(x - added), parts[f"ffn {layer}"], within=1e-10)
