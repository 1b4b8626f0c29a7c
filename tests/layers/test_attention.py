"""Attention settings of a spec: QK norm, scale, soft-cap, and sliding windows per layer."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.layers.attention import Attention

IDS = torch.randint(0, 256, (2, 6), generator=torch.Generator().manual_seed(0))


def run_attention(**settings: object) -> tuple[Attention, Tensor, tuple[Tensor, ...]]:
    """Run a model and return its last attention layer, its input, and the inputs of its kernel."""
    torch.manual_seed(0)
    model = gh.build(
        gh.preset("tiny-decoder", init="normal", position="none", **settings), dtype=torch.float64
    ).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(weight, mean=1)
    inputs: dict[str, tuple[Tensor, ...]] = {}
    attention = model.stack.blocks[-1].attention.layer
    attention.register_forward_pre_hook(lambda _, args: inputs.update(x=args))
    attention.attend.register_forward_pre_hook(lambda _, args: inputs.update(qkv=args))
    model(IDS)
    return attention, inputs["x"][0], inputs["qkv"]


def test_qk_norm_is_per_head() -> None:
    attention, x, (q, k, v, _) = run_attention(qk_norm=True, norm="rms")
    parts = [x @ project.weight.T for project in (attention.query, attention.key, attention.value)]
    for result, part, norm in zip((q, k), parts, (attention.q_norm, attention.k_norm), strict=False):
        heads = part.view(2, 6, -1, attention.d_head).transpose(1, 2)
        expected = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight
        assert (result - expected).abs().max() < 1e-12
    assert torch.equal(v, parts[2].view(2, 6, -1, attention.d_head).transpose(1, 2))


def test_qk_norm_over_all_heads_together() -> None:
    attention, x, (q, k, _, _) = run_attention(qk_norm=True, qk_norm_over="projection", norm="rms", n_kv_heads=2)
    for result, project, norm in ((q, attention.query, attention.q_norm), (k, attention.key, attention.k_norm)):
        part = x @ project.weight.T
        expected = part / (part.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.norm.weight
        assert norm.norm.weight.shape == part.shape[-1:]
        assert (result - expected.view(2, 6, -1, attention.d_head).transpose(1, 2)).abs().max() < 1e-12


def test_value_embeddings_are_added_to_the_values_of_every_second_layer() -> None:
    attention, x, (_, _, v, _) = run_attention(value_embeddings=True, n_layers=4, n_kv_heads=2)
    added, plain = attention.value_embedding, x @ attention.value.weight.T
    for row, position, head in itertools.product(range(2), range(6), range(2)):
        gate = 2 / (1 + math.exp(-(added.gate.weight[head] @ x[row, position]).item()))
        own = added.table.weight[IDS[row, position], 16 * head : 16 * (head + 1)]
        expected = plain[row, position, 16 * head : 16 * (head + 1)] + gate * own
        assert (v[row, head, position] - expected).abs().max() < 1e-12
    s = gh.preset("tiny-decoder", value_embeddings=True, n_layers=5)
    blocks = gh.build(s).stack.blocks
    assert ["value_embedding.gate" in dict(b.attention.layer.named_modules()) for b in blocks] == [0, 1, 0, 1, 0]


@pytest.mark.parametrize(("given", "scale"), [(None, 16**-0.5), (1.0, 1.0)])
def test_attention_scale(given: float | None, scale: float) -> None:
    attention, _, _ = run_attention(attention_scale=given)
    assert attention.attend.scale == scale


def test_soft_cap() -> None:
    attention, _, (_, _, _, backend) = run_attention(attention_softcap=3.0)
    assert backend.name == "explicit"
    assert attention.attend.softcap == 3.0


def test_windows_repeat_over_the_layers() -> None:
    s = gh.preset("tiny-decoder", n_layers=5, windows=[3, 0])
    model = gh.build(s)
    assert [block.attention.layer.window for block in model.stack.blocks] == [3, 0, 3, 0, 3]


def test_sliding_window_limits_the_receptive_field() -> None:
    """With one layer and a window of 3, a change three tokens back has no effect; through two layers it has."""
    for n_layers, reach in ((1, 3), (2, 5)):
        torch.manual_seed(0)
        s = gh.preset("tiny-decoder", init="normal", n_layers=n_layers, windows=[3])
        model = gh.build(s, dtype=torch.float64).eval()
        ids = torch.randint(0, 256, (1, 10))
        changed = ids.clone()
        changed[0, 2] += 1
        moved = (model(changed % 256) - model(ids)).abs().amax(-1)[0] > 0
        assert moved.tolist() == [2 <= i < 2 + reach for i in range(10)]
