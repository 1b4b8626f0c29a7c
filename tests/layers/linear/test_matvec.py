"""The matrix-vector layer, with its kernel written as a plain product; tests/gpu has the kernel itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.generation.engine.inference_model import prepare_for_inference
from glasshouse.layers.linear import matvec
from glasshouse.layers.linear.matvec import MatvecLinear, make_matvec_linear
from glasshouse.layers.module_swap import clone_sharing_parameters, swap_linears


@pytest.mark.parametrize("shape", [(1, 1, 6), (6,), (2, 3, 6), (1, 6), (1, 0, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_equals_linear(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    products: list[tuple[int, ...]] = []

    def multiply(weight: Tensor, x: Tensor) -> Tensor:
        products.append(tuple(x.shape))
        return weight @ x

    monkeypatch.setattr(matvec, "matvec", multiply)
    torch.manual_seed(0)
    weight, x = torch.randn(4, 6, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    added = torch.randn(4, dtype=torch.float64) if bias else None
    assert torch.allclose(MatvecLinear(weight, added)(x), F.linear(x, weight, added), rtol=0, atol=1e-14)
    assert products == ([(6,)] if x.numel() == 6 else [])


def test_a_model_of_such_layers_shares_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matvec, "matvec", lambda weight, x: weight @ x)
    model = gh.build(gh.preset("tiny-decoder"), dtype=torch.float64).eval()
    clone = clone_sharing_parameters(model)
    swap_linears(clone, MatvecLinear)
    ids = torch.tensor([[5]])
    assert torch.allclose(clone(ids), model(ids), rtol=0, atol=1e-12)
    stored = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in clone.parameters()} <= stored


def test_a_cpu_has_no_such_layers() -> None:
    assert make_matvec_linear(torch.zeros(2, 2), None) is None
    tree = prepare_for_inference(gh.build(gh.preset("tiny-decoder")), "copy", slots=1)
    assert not any(isinstance(layer, MatvecLinear) for layer in tree.modules())
