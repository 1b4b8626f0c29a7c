"""Sandwich norm; pre-norm and post-norm are in tests/claims/test_block.py."""

from __future__ import annotations

import torch

import glasshouse as gh
from glasshouse.layers.residual import SandwichNorm


def test_sandwich_normalises_input_and_output() -> None:
    torch.manual_seed(0)
    s = gh.preset("tiny-decoder", norm={"kind": "layer", "eps": 1e-3}, norm_placement="sandwich")
    layer = torch.nn.Linear(64, 64).double()
    sandwich = SandwichNorm(s, lambda x, ctx: layer(x)).double().eval()
    for weight in sandwich.parameters():
        torch.nn.init.normal_(weight, mean=1)
    x = torch.randn(2, 3, 64, dtype=torch.float64)

    def normal(v: torch.Tensor, norm: torch.nn.LayerNorm) -> torch.Tensor:
        centred = v - v.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight + norm.bias

    expected = x + normal(layer(normal(x, sandwich.norm)), sandwich.norm_out)
    assert (sandwich(x, None) - expected).abs().max() < 1e-12
