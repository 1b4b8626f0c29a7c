"""Norms frozen at an input: the direction before the norm stands for the one after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glasshouse import spec
from glasshouse.layers.norm import Norm, make_norm


@pytest.mark.parametrize("choice", [spec.LayerNorm(), spec.LayerNorm(bias=False), spec.RMSNorm()], ids=str)
def test_a_frozen_norm_gives_the_product_with_the_norms_output(choice: spec.Norm) -> None:
    torch.manual_seed(0)
    norm = make_norm(choice, 5).double()
    assert isinstance(norm, Norm)
    for weight in norm.parameters():
        nn.init.normal_(weight)
    x, direction = torch.randn(2, 3, 5).double()
    before, constant = norm.frozen(x, direction)
    assert torch.allclose((x * before).sum(-1) + constant, (norm(x) * direction).sum(-1))
