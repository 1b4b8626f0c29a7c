"""Heads, embeddings and final norm against their formulas."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.layers.attend.layout import make_layout


def make(name: str = "tiny-encoder", **settings: object) -> torch.nn.Module:
    torch.manual_seed(0)
    model = gh.build(gh.preset(name, **settings), dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def hidden_states(model: torch.nn.Module, ids: Tensor, **kwargs: Tensor) -> Tensor:
    """Return the input of the head."""
    seen: list[Tensor] = []
    handle = model.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(ids, **kwargs)
    handle.remove()
    return seen[0]


IDS = torch.tensor([[5, 6, 7, 8], [9, 1, 2, 0]])
MASK = torch.tensor([[True] * 4, [False, True, True, False]])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logit_scale", [True, False])
def test_masked_token_head_is_berts(tied: bool, bias: bool, logit_scale: bool) -> None:
    head = {"kind": "masked_token", "tied": tied, "bias": bias}
    model = make(head=head, logit_scale=logit_scale)
    x = hidden_states(model, IDS)
    dense, _, norm = model.head.transform
    x = x @ dense.weight.T + dense.bias
    x = x * 0.5 * (1 + torch.erf(x / 2**0.5))
    x = torch.nn.functional.layer_norm(x, (64,), norm.weight, norm.bias, 1e-12)
    x = x / 8 if logit_scale else x
    logits = x @ (model.token_embedding.table.weight if tied else model.head.weight).T
    logits = logits + model.head.bias if bias else logits
    assert (model(IDS) - logits).abs().max() < 1e-11 * logits.abs().max()


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_soft_capped_as_in_gemma_2(tied: bool) -> None:
    model = make("tiny-decoder", head={"kind": "next_token", "tied": tied, "bias": True}, logit_softcap=3.0)
    x = hidden_states(model, IDS)
    products = x @ (model.token_embedding.table.weight if tied else model.head.weight).T + model.head.bias
    assert products.abs().max() > 3
    expected = [[[3 * math.tanh(one / 3) for one in row] for row in rows] for rows in products.tolist()]
    torch.testing.assert_close(model(IDS), torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("kind", ["pooled", "sequence_classification"])
@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_pooling_by_hand(pooling: str, kind: str, dense: bool) -> None:
    labels = {"n_labels": 3} if kind == "sequence_classification" else {}
    model = make(head={"kind": kind, "pooling": pooling, "dense": dense, **labels})
    x = hidden_states(model, IDS, mask=MASK)
    picked = {
        "first": [x[0, 0], x[1, 1]],
        "mean": [(x[0, 0] + x[0, 1] + x[0, 2] + x[0, 3]) / 4, (x[1, 1] + x[1, 2]) / 2],
        "last": [x[0, 3], x[1, 2]],
    }[pooling]
    expected = torch.stack(picked)
    pool = model.head if kind == "pooled" else model.head.pool
    if dense:
        expected = torch.tanh(expected @ pool.dense[0].weight.T + pool.dense[0].bias)
    if labels:
        expected = expected @ model.head.classifier.weight.T + model.head.classifier.bias
    assert (model(IDS, mask=MASK) - expected).abs().max() < 1e-12


def test_token_classifications_and_no_head() -> None:
    model = make(head={"kind": "token_classification", "n_labels": 3})
    x = hidden_states(model, IDS)
    expected = x @ model.head.classifier.weight.T + model.head.classifier.bias
    assert (model(IDS) - expected).abs().max() < 1e-12
    model = make(head="none")
    assert torch.equal(model(IDS), hidden_states(model, IDS))


@pytest.mark.parametrize("segments", [None, torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])])
@pytest.mark.parametrize("embed_scale", [True, False])
@pytest.mark.parametrize("embed_norm", [True, False])
def test_the_input_of_the_first_block(embed_norm: bool, embed_scale: bool, segments: Tensor | None) -> None:
    """Token embeddings, scaled; then segments and positions added; then a norm."""
    model = make(embed_norm=embed_norm, embed_scale=embed_scale)
    seen: list[Tensor] = []
    model.stack.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(IDS, segments=segments)
    x = model.token_embedding.table.weight[IDS] * (8 if embed_scale else 1)
    x = x + model.segment.table.weight[torch.zeros_like(IDS) if segments is None else segments]
    x = x + model.stack.position.table.weight[:4]
    if embed_norm:
        norm = model.stack.embed_norm
        x = torch.nn.functional.layer_norm(x, (64,), norm.weight, norm.bias, 1e-12)
    assert (seen[0] - x).abs().max() < 1e-12


@pytest.mark.parametrize("norm_placement", ["pre", "post", "sandwich", "output", "parallel"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_the_final_norm_is_optional_with_any_norm_placement(norm_placement: str, final_norm: bool) -> None:
    model = make("tiny-decoder", norm_placement=norm_placement, final_norm=final_norm)
    seen: list[Tensor] = []
    model.stack.blocks[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    out = model.stack(model.token_embedding(IDS), make_layout(IDS))
    x = seen[0]
    if final_norm:
        x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.stack.norm.weight
    assert (out - x).abs().max() < 1e-12
