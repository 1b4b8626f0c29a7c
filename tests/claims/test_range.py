"""Norms keep values in range: statement B8."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse.layers.norm import LayerNorm


def test_b8_a_normed_vector_is_bounded_whatever_comes_in() -> None:
    """The largest entry of n numbers of mean 0 and variance 1 is at most sqrt(n - 1), and one vector reaches it."""
    norm = LayerNorm(16, eps=1e-12, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.uniform_(-2, 2)
        norm.bias.normal_()
        bound = math.sqrt(15) * norm.weight.abs() + norm.bias.abs()
        for size in (1e-3, 1.0, 1e6):
            assert (norm(size * torch.randn(1000, 16, dtype=torch.float64)).abs() <= bound).all()
        norm.weight.fill_(1)
        norm.bias.zero_()
        spike = norm(1e6 * torch.eye(16, dtype=torch.float64)[0])
        assert spike.max().item() == pytest.approx(math.sqrt(15), rel=1e-6)


@pytest.mark.parametrize("placement", ["pre", "post"])
@torch.no_grad()
def test_b8_without_norms_the_stream_grows_by_a_factor_a_layer(placement: str) -> None:
    """12 layers of width 64 with Xavier weights: the norm of the stream by layer, with and without norms."""
    torch.manual_seed(0)
    choices = {"norm_placement": placement, "final_norm": placement == "pre", "init": "xavier", "position": "none"}
    sizes = {"d_model": 64, "n_heads": 4, "n_kv_heads": 4, "n_layers": 12, "d_ff": 256, "qk_norm": False}
    model = gh.build(
        gh.preset("tiny-decoder", **sizes, norm="layer", feedforward="relu", embed_scale=True, **choices)
    )
    ids = torch.randint(256, (4, 32))
    norms = {}
    for name in ("with", "without"):
        if name == "without":
            for block in model.stack.blocks:
                block.attention.norm = block.feedforward.norm = nn.Identity()
        with gh.record(model, "embed", "resid_post.*") as seen:
            model(ids)
        stream = [seen["embed"], *(seen[f"resid_post.{layer}"] for layer in range(12))]
        norms[name] = [one.norm(dim=-1).mean().item() for one in stream]
        largest = max(one.abs().max().item() for one in stream)
        print(
            f"\nB8 {placement}, {name} norms: {norms[name][0]:.1f} to {norms[name][-1]:.3g}, "
            f"largest entry {largest:.3g}"
        )
    factors = [after / before for before, after in pairwise(norms["without"])]
    assert min(factors) > 1.2  # a factor a layer
    if placement == "post":
        assert max(abs(one - math.sqrt(64)) for one in norms["with"][1:]) < 1e-2  # sqrt(D) after every layer
    else:
        steps = [after - before for before, after in pairwise(norms["with"])]
        assert max(steps) < 2 * math.sqrt(64)  # each sublayer reads a vector of norm sqrt(D), so it adds as much
    assert norms["without"][-1] > 10 * norms["with"][-1]
