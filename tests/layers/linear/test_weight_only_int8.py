"""Weight-only int8 quantization: the model with rounded weights, whatever the device."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.layers.linear.int8_gpu import WeightOnlyInt8Linear, quantize_weights
from glasshouse.layers.module_swap import clone_sharing_parameters


def test_weights_are_off_by_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 7, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 5.0])[:, None]
    layer = WeightOnlyInt8Linear(weight)
    assert layer.values.dtype == torch.int8
    rounded = layer(torch.eye(7, dtype=torch.float64)).T  # the weight, column by column
    step = weight.abs().amax(1, keepdim=True) / 127
    assert ((rounded - weight).abs() <= step * (0.5 + 1e-6)).all()
    assert (layer.values.abs().amax(1) == torch.tensor([127, 127, 127, 0, 127])).all()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"feedforward": {"kind": "swiglu"}, "n_kv_heads": 2, "qkv_bias": False, "norm": {"kind": "rms"}}]
)
def test_model_equals_the_model_with_rounded_weights(tied: bool, settings: dict[str, object]) -> None:
    torch.manual_seed(1)
    spec = gh.preset("tiny-decoder", vocab_size=50, head={"kind": "next_token", "tied": tied}, **settings)
    model = gh.build(spec, dtype=torch.float64).eval()
    ids = torch.randint(50, (2, 9))
    small = clone_sharing_parameters(model)
    quantize_weights(small)
    result = small(ids)
    with torch.no_grad():
        embedded = model.token_embedding(ids)
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and not name.startswith("stack.position"):
                weight.copy_(WeightOnlyInt8Linear(weight)(torch.eye(weight.shape[1], dtype=torch.float64)).T)
        hook = model.token_embedding.register_forward_hook(lambda *_: embedded)  # the embedding is not quantized
        expected = model(ids)
        hook.remove()
    assert torch.allclose(result, expected, rtol=0, atol=1e-9 * float(expected.abs().max()))
    assert small.token_embedding.table.weight is model.token_embedding.table.weight
