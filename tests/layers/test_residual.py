"""Sandwich norm, output norm and parallel blocks; pre-norm and post-norm are in tests/claims/test_block.py."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.layers.residual import OutputNorm, SandwichNorm


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


def test_an_output_norm_normalises_the_output_alone() -> None:
    torch.manual_seed(0)
    s = gh.preset("tiny-decoder", norm={"kind": "rms", "eps": 1e-3}, norm_placement="output")
    layer = torch.nn.Linear(64, 64).double()
    residual = OutputNorm(s, lambda x, ctx: layer(x)).double().eval()
    torch.nn.init.normal_(residual.norm_out.weight, mean=1)
    x = torch.randn(2, 3, 64, dtype=torch.float64)
    y = layer(x)
    expected = x + y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * residual.norm_out.weight
    assert (residual(x, None) - expected).abs().max() < 1e-12
    assert [name for name, _ in residual.named_parameters()] == ["norm_out.weight"]


def test_both_sublayers_of_a_parallel_block_read_its_input() -> None:
    torch.manual_seed(0)
    s = gh.preset("tiny-decoder", n_layers=1, norm_placement="parallel", init="normal")
    block = gh.build(s, dtype=torch.float64).eval().stack.blocks[0]
    x, other = torch.randn(2, 1, 3, 64, dtype=torch.float64)
    attended = other - x
    block.attention.forward = lambda x, ctx: x + attended
    expected = x + attended + block.feedforward.layer(block.feedforward.norm(x), None)
    assert (block(x, None) - expected).abs().max() < 1e-12


def test_a_parallel_encoder_decoder_is_refused() -> None:
    with pytest.raises(gh.ConfigError, match=r"^norm_placement is 'parallel', but it must be another in an encoder"):
        gh.preset("tiny-seq2seq", norm_placement="parallel")
