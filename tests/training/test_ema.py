"""The EMA against its recursion in plain numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from glasshouse.errors import InputError
from glasshouse.training.step import EMA


def test_by_hand() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    average = EMA(model, decay=0.8)
    expected = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for number in range(1, 60):
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_()
        average.update()
        kept = min(0.8, (1 + number) / (10 + number))
        for name, weight in model.named_parameters():
            expected[name] = kept * expected[name] + (1 - kept) * weight.detach()
    now = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    with average.applied():
        for name, weight in model.named_parameters():
            assert (weight - expected[name]).abs().max() < 1e-12
    for name, weight in model.named_parameters():
        assert weight.equal(now[name])


def test_weights_are_restored_after_an_exception() -> None:
    model = nn.Linear(2, 2)
    average = EMA(model, 0.5)
    with torch.no_grad():
        model.weight.fill_(3.0)
    with pytest.raises(RuntimeError, match="stop"), average.applied():
        raise RuntimeError("stop")
    assert (model.weight == 3.0).all()


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_an_invalid_decay_is_refused(decay: float) -> None:
    with pytest.raises(InputError, match="must be at least 0 and below 1"):
        EMA(nn.Linear(1, 1), decay)
