"""Linear layers in fp8: products of the rounded operands, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.layers.linear.float8 import FINE, WIDE, Float8Linear, convert_to_float8, quantize
from glasshouse.layers.linear.linear import is_plain_linear


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as fp8 stores it: to the nearest multiple of the last bit of its mantissa, in float64."""
    mantissa, smallest = {FINE: (3, -6), WIDE: (2, -14)}[dtype]  # bits of it, and the exponent of subnormal numbers
    scaled = x.double() * torch.finfo(dtype).max / x.double().abs().max()
    exponent = scaled.abs().clamp(min=1e-30).log2().floor().clamp(min=smallest)
    unit = 2.0 ** (exponent - mantissa)
    return (scaled / unit).round() * unit * x.double().abs().max() / torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [FINE, WIDE])
def test_quantized_values_are_the_nearest(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 40) * torch.logspace(-5, 5, 40)
    values, scale = quantize(x, dtype)
    assert values.dtype == dtype
    assert values.double().abs().max() == torch.finfo(dtype).max
    found, exact = values.double() * scale.double(), rounded(x, dtype)
    # Division by a float32 scale may round a number near the middle of two to the other one.
    assert ((found - exact).abs() <= 2**-20 * exact.abs()).double().mean() > 0.999
    assert torch.allclose(found, exact, rtol=2 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("tokens", [(2, 8), (3, 7), (1,), (5, 1, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_multiplies_rounded_operands(tokens: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = Float8Linear(48, 32, bias=bias, dtype=torch.bfloat16)
    x = torch.randn(*tokens, 48, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    x8, w8, g8 = (
        (values.double() * scale.double()).flatten(0, -2)
        for values, scale in (quantize(x, FINE), quantize(layer.weight, FINE), quantize(upstream, WIDE))
    )
    expected = x8 @ w8.T + (0 if layer.bias is None else layer.bias.double())
    for found, exact in ((y, expected), (x.grad, g8 @ w8), (layer.weight.grad, g8.T @ x8)):
        assert found is not None
        assert found.dtype == torch.bfloat16
        # The product is rounded to bfloat16, and again after the bias is added.
        assert (found.flatten(0, -2) - exact).abs().max() <= 2 * 2**-8 * exact.abs().max()
    if layer.bias is not None:
        assert torch.allclose(layer.bias.grad, upstream.flatten(0, -2).sum(0), rtol=2**-6, atol=2**-6)


def test_zeros_stay_zeros() -> None:
    layer = Float8Linear(16, 16, bias=False, dtype=torch.bfloat16)
    assert layer(torch.zeros(2, 16, dtype=torch.bfloat16)).equal(torch.zeros(2, 16, dtype=torch.bfloat16))


def test_a_converted_model_keeps_its_parameters() -> None:
    model = gh.build(gh.preset("tiny-decoder", d_ff=72)).to(torch.bfloat16)
    before = dict(model.named_parameters())
    convert_to_float8(model)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is weight for name, weight in before.items())
    block = model.stack.blocks[0]
    assert type(block.attention.layer.query) is Float8Linear
    assert is_plain_linear(block.feedforward.layer.up)  # 72 is no multiple of 16
