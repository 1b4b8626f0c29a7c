"""Logit lens and logit attribution: statements V2 and V3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from glasshouse.inspection.attribution import attribute
from glasshouse.inspection.logit_lens import lens

BuildModel = Callable[..., Any]
RecordCalls = Callable[..., list[Any]]
AssertClose = Callable[..., None]


def model_inputs(model: Any, ids: Tensor) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Return a model's inputs; an encoder-decoder gets the reversed ids as its source."""
    return (ids.flip(1), ids) if hasattr(model, "encoder") else (ids,)


# V2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_v2_logit_lens_at_every_layer_ends_at_the_model_output(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose, kind: str, placement: str
) -> None:
    """The residual stream after any layer, through final norm and unembedding, gives a token distribution."""
    head = {"kind": "masked_token", "transform": False} if kind == "encoder" else {"kind": "next_token"}
    model = build_model(kind, n_layers=3, norm_placement=placement, head=head)
    stack = model.decoder if kind == "seq2seq" else model.stack
    embedded, after = record_calls(stack.drop), [record_calls(block) for block in stack.blocks]
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        output = model(*model_inputs(model, ids)).softmax(-1)
        found = lens(model, *model_inputs(model, ids), top_k=23)
        probabilities = torch.zeros_like(found.probabilities).scatter(-1, found.tokens, found.probabilities)
        streams = [calls[0].output for calls in (embedded, *after)]
        bias = 0 if model.head.bias is None else model.head.bias
        for stream, row in zip(streams, probabilities, strict=True):
            exponentials = torch.exp(stack.norm(stream) @ model.token_embedding.table.weight.T + bias)
            assert_close(row, exponentials / exponentials.sum(-1, keepdim=True))
        assert_close(probabilities[-1], output)


# V3 ---------------------------------------------------------------------------------------------------------


@pytest.mark.few(4)
@pytest.mark.parametrize("placement", ["pre", "post", "sandwich"])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
def test_v3_logit_is_the_sum_of_contributions(
    build_model: BuildModel, assert_close: AssertClose, kind: str, placement: str
) -> None:
    """Contributions of heads, feed-forward layers, embedding and biases, with the norms' scales frozen."""
    head = {"kind": "masked_token"} if kind == "encoder" else {"kind": "next_token", "bias": True}
    model = build_model(kind, n_layers=3, norm_placement=placement, head=head)
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        logits = model(*model_inputs(model, ids))
    for position in range(5):
        contributions = attribute(
            model, *model_inputs(model, ids), position=position, token=7, incorrect_token=9
        ).components()
        assert len(contributions) == 1 + 3 * (4 + 1) + 1 + (3 * 4 if kind == "seq2seq" else 0)
        assert_close(sum(contributions.values()), logits[:, position, 7] - logits[:, position, 9], within=1e-10)


def test_v3_contribution_equals_the_logit_change_when_removed(
    build_model: BuildModel, record_calls: RecordCalls, assert_close: AssertClose
) -> None:
    """Pre-norm: removing a head or layer from the final residual, with the norm's scale frozen, removes that much."""
    model = build_model("decoder", n_layers=3)
    zs = [record_calls(block.attention.layer.attend) for block in model.stack.blocks]
    layers = [record_calls(block.feedforward.layer) for block in model.stack.blocks]
    last = record_calls(model.stack.blocks[-1])
    ids = torch.randint(23, (2, 5))
    with torch.no_grad():
        model(ids)
        x, norm = last[0].output[:, 4], model.stack.norm
        scale = torch.sqrt(x.var(-1, correction=0, keepdim=True) + norm.eps)

        def logit(x: Tensor) -> Tensor:
            normed = (x - x.mean(-1, keepdim=True)) / scale * norm.weight + norm.bias
            return normed @ model.token_embedding.table.weight[7]

        contributions = attribute(model, ids, position=4, token=7).components()
        for layer, block in enumerate(model.stack.blocks):
            z, out = zs[layer][0].output, block.attention.layer.out.weight
            for head in range(4):
                added = z[:, head, 4] @ out[:, 4 * head : 4 * head + 4].T
                assert_close(logit(x) - logit(x - added), contributions[f"head {layer}.{head}"], within=1e-10)
            added = layers[layer][0].output[:, 4] - block.feedforward.layer.down.bias
            assert_close(logit(x) - logit(x - added), contributions[f"ffn {layer}"], within=1e-10)
