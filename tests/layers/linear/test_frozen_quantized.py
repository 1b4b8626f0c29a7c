"""Frozen layers with int8 and int4 weights: against a plain layer of the dequantized weight, and what they keep."""

from __future__ import annotations

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from glasshouse.layers.linear.frozen_quantized import (
    FrozenInt4Linear,
    FrozenInt8Linear,
    FrozenQuantizedLinear,
    copy_sharing_quantized,
)

KINDS = [FrozenInt8Linear, FrozenInt4Linear]
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: type[FrozenQuantizedLinear], count: int, width: int, *, bias: bool = True) -> FrozenQuantizedLinear:
    torch.manual_seed(0)
    return kind.quantize(nn.Linear(width, count, bias=bias))


def dequantize(layer: FrozenQuantizedLinear) -> Tensor:
    """One number at a time: a byte, or a nibble of one, the first weight of two in the lower half."""
    rows = []
    for n in range(layer.out_features):
        row = []
        for k in range(layer.in_features):
            if isinstance(layer, FrozenInt8Linear):
                row.append(int(layer.values[n, k]) * float(layer.scale[n]))
            else:
                byte = int(layer.values[n, k // 2])
                row.append(((byte >> 4 if k % 2 else byte % 16) - 8) * float(layer.scale[n, k // 32]))
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


@each_kind
def test_the_weight_is_what_the_integers_stand_for(kind: type[FrozenQuantizedLinear]) -> None:
    layer = made(kind, 5, 96)
    # A product of an integer and a scale is rounded once, to the dtype of the weight.
    assert layer.weight.equal(dequantize(layer).float())
    assert layer.double().weight.equal(dequantize(layer))
    assert layer.bfloat16().weight.dtype == torch.bfloat16


@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 9),
    count=st.integers(1, 40),
    groups=st.integers(1, 3),
    bias=st.booleans(),
)
@settings(max_examples=up_to(60), deadline=None)
def test_outputs_and_gradients_are_those_of_a_plain_layer(
    kind: type[FrozenQuantizedLinear], rows: int, count: int, groups: int, bias: bool
) -> None:
    layer = made(kind, count, 32 * groups, bias=bias).double()
    plain = nn.Linear(32 * groups, count, bias=bias, dtype=torch.float64).requires_grad_(False)
    plain.weight.copy_(dequantize(layer))
    if layer.bias is not None:
        plain.bias.copy_(layer.bias)
    x, grad = torch.randn(2, rows, 32 * groups, dtype=torch.float64), torch.randn(2, rows, count, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [one(given) for one, given in zip((layer, plain), inputs, strict=True)]
    for output in outputs:
        output.backward(grad)
    for ours, theirs in ([one.detach() for one in outputs], [one.grad for one in inputs]):
        # The same numbers, in sums of at most 97 whose order may differ: 97 roundings of 1e-16 of what is summed.
        assert (ours - theirs).abs().max() <= 1e-13 * max(1.0, float(theirs.abs().max()))
    assert not any(weight.requires_grad for weight in layer.parameters())


@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *((kind, False) for kind in KINDS),
        (FrozenInt4Linear, True),
        pytest.param(FrozenInt8Linear, True, marks=pytest.mark.long),
    ],
)
def test_only_the_quantized_weight_is_kept_for_the_backward_pass(
    kind: type[FrozenQuantizedLinear], compiled: bool
) -> None:
    """Compiled, as torch's partitioner decides, which would keep a dequantized matrix that it could see."""
    layer, saved = made(kind, 48, 64), list[Tensor]()
    x = torch.randn(7, 64, requires_grad=True)

    def apply(x: Tensor) -> Tensor:
        return layer(x)

    forward = torch.compile(apply, backend="aot_eager_decomp_partition") if compiled else apply
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        y = forward(x)
    assert {one.untyped_storage().data_ptr() for one in saved} == {
        one.untyped_storage().data_ptr() for one in (layer.values, layer.scale)
    }
    grad = torch.randn(7, 48)
    y.backward(grad)
    # 48 products of numbers near 1 and below 0.13, each and each sum rounded to 6e-8.
    assert x.grad is not None
    assert (x.grad - grad @ layer.weight).abs().max() <= 48 * 48 * 6e-8


def test_an_int4_weight_takes_half_a_byte_and_a_scale_of_two_for_32() -> None:
    layer = made(FrozenInt4Linear, 48, 64)
    assert layer.values.nbytes + layer.scale.nbytes == 48 * 64 // 2 + 48 * 64 // 32 * 2
    int8 = made(FrozenInt8Linear, 48, 64)
    assert int8.values.nbytes + int8.scale.nbytes == 48 * 64 + 48 * 4


@each_kind
def test_quantized_again_it_is_the_same(kind: type[FrozenQuantizedLinear]) -> None:
    """The largest of a row or group is the whole scale's, so nothing moves."""
    layer = made(kind, 48, 64)
    again = kind.quantize(layer.to_linear())
    assert again.values.equal(layer.values)
    torch.testing.assert_close(again.scale, layer.scale, rtol=2**-23, atol=0)  # 127 times a scale, by 127


@each_kind
def test_a_copy_in_low_precision_shares_the_weight(kind: type[FrozenQuantizedLinear]) -> None:
    layer = made(kind, 48, 64)
    low = copy_sharing_quantized(nn.Sequential(layer)).to(torch.bfloat16)[0]
    assert low.values.data_ptr() == layer.values.data_ptr()
    assert layer.weight.dtype == torch.float32
    x = torch.randn(3, 64)
    y = low(x.bfloat16())
    assert y.dtype == torch.bfloat16
    # Scale, dequantized weight, input and result are rounded to eight bits: four times 2**-9, in all twice that.
    expected = x.abs() @ layer.weight.abs().T + layer.bias.abs()
    assert ((y.float() - layer(x)).abs() <= 8 * 2**-9 * expected).all()


@each_kind
def test_autocast_reaches_it(kind: type[FrozenQuantizedLinear]) -> None:
    layer, x = made(kind, 48, 64), torch.randn(3, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
