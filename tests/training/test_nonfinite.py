"""NaN and infinity planted in weights, activations and gradients are located."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.training.nonfinite import locate_nonfinite


def batch() -> Batch:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    return Batch(ids, targets=ids + 1, loss_mask=ids > 2, source=ids)


class Spoiled(nn.Module):
    """Passes a layer's answer on, spoiled forwards or backwards."""

    def __init__(self, layer: nn.Module, forwards: bool) -> None:
        super().__init__()
        self.layer, self.forwards = layer, forwards

    def forward(self, *args: object) -> Tensor:
        x = self.layer(*args)
        if self.forwards:
            return x / 0
        return (x - x.detach()).abs().sqrt() + x.detach()  # the root's slope at 0 is infinite


@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-seq2seq"])
def test_planted_nonfinite_values_are_located(kind: str) -> None:
    model = gh.build(gh.preset(kind, dropout=0.0))
    given = batch() if kind == "tiny-seq2seq" else Batch(batch().ids, batch().targets, batch().loss_mask)
    stack, name = (model.decoder, "decoder") if kind == "tiny-seq2seq" else (model.stack, "stack")
    assert locate_nonfinite(model, given).startswith("nowhere")
    block = stack.blocks[1]
    whole = block.feedforward.layer

    block.feedforward.layer = Spoiled(whole, forwards=True)
    assert locate_nonfinite(model, given) == f"the output of module {name}.blocks.1.feedforward.layer"
    block.feedforward.layer = Spoiled(whole, forwards=False)
    assert locate_nonfinite(model, given).startswith(f"the gradient of {name}.blocks.1.feedforward.layer.layer.down.")
    block.feedforward.layer = whole

    with torch.no_grad():
        stack.blocks[0].attention.norm.weight[3] = torch.nan
    assert locate_nonfinite(model, given) == f"the weight {name}.blocks.0.attention.norm.weight"


def test_hooks_are_removed() -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    locate_nonfinite(model, Batch(batch().ids, batch().targets, batch().loss_mask))
    assert not any(module._forward_hooks for module in model.modules())
