"""Int4 weights: by hand, against dequantized weights in float64, and independent of the batch."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.generation.engine.inference_model import prepare_for_inference
from glasshouse.layers.linear import int4
from glasshouse.layers.linear.int4 import (
    GROUP,
    BFloat16Int4Matmul,
    DynamicInt4Matmul,
    Int4Linear,
    Int4Weight,
    choose_int4_matmul,
    quantize_groups,
    quantize_int4,
)
from glasshouse.layers.linear.int8 import Int8Linear, quantize_rows
from glasshouse.layers.module_swap import clone_sharing_parameters

SHAPE = {"d_model": 64, "n_heads": 2, "n_kv_heads": 2, "d_ff": 128, "vocab_size": 100, "n_layers": 2}
MATMULS = [BFloat16Int4Matmul, DynamicInt4Matmul]
each_matmul = pytest.mark.parametrize("matmul", MATMULS)


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    choose_int4_matmul.cache_clear()
    yield
    choose_int4_matmul.cache_clear()


def dequantize(weight: Int4Weight) -> Tensor:
    """One number at a time."""
    rows, columns = weight.values.shape
    return torch.tensor(
        [
            [int(weight.values[n, k]) * float(weight.scale[n, k // GROUP]) for k in range(columns)]
            for n in range(rows)
        ],
        dtype=torch.float64,
    )


def error_bound(x: Tensor, weight: Tensor, matmul: type) -> Tensor:
    """What rounding the activations can change, and for bfloat16 rounding the result; all in float64."""
    if matmul is BFloat16Int4Matmul:
        # Eight bits of significand: rounding to nearest is off by 2**-8 of a number at most. On ARM, where another
        # kernel is used, torch truncates the result of this one instead, which is off by up to twice that.
        half = 2**-8
        result = half if choose_int4_matmul() is matmul else 2 * half
        return half * (x.abs() @ weight.abs().T) * (1 + result) + result * (x @ weight.T).abs() + 1e-6
    steps = (x.amax(1, keepdim=True).clamp(min=0) - x.amin(1, keepdim=True).clamp(max=0)) / 255
    return steps * weight.abs().sum(1) + 1e-6  # half a step by rounding, half by the zero point


def test_a_group_by_hand() -> None:
    """The largest, -6, becomes -8 steps of 0.75; 5.5 would be 7.33 of them, 5.25 and 6 are the last two."""
    weight = torch.zeros(2, 64)
    weight[0, :4] = torch.tensor([-6.0, 5.5, 0.4, -0.3])
    weight[1, 32:35] = torch.tensor([0.8, -0.8, 0.04])
    values, scale = quantize_groups(weight)
    assert values[0, :5].tolist() == [-8, 7, 1, 0, 0]
    assert scale[0].tolist() == [0.75, 0]
    assert values[1, 32:36].tolist() == [-8, 7, 0, 0]
    assert scale[1, 1] == torch.tensor(-0.1).bfloat16().float()


@given(
    seed=st.integers(0, 999), rows=st.integers(1, 5), groups=st.integers(1, 3), size=st.sampled_from([1e-4, 1, 100])
)
@settings(max_examples=up_to(100))
def test_no_weight_is_off_by_more_than_a_step(seed: int, rows: int, groups: int, size: float) -> None:
    """By half a step, or a whole one where 8 would be needed; and by the scale's eighth bit, eight times."""
    torch.manual_seed(seed)
    weight = torch.randn(rows, groups * GROUP) * size
    quantized = quantize_groups(weight)
    assert quantized.to_float32().equal(dequantize(quantized).float())
    step = quantized.scale.abs().repeat_interleave(GROUP, 1)
    off = (quantized.to_float32() - weight).abs()
    assert (off <= step * (0.5 + 8 * 2**-8)).float().mean() > 0.9
    assert (off <= step * (1 + 8 * 2**-8)).all()


@each_matmul
@pytest.mark.parametrize(("count", "width"), [(16, 32), (48, 64), (7, 96), (100, 320), (1, 32)])
def test_products_are_those_of_dequantized_weights(
    matmul: type[BFloat16Int4Matmul] | type[DynamicInt4Matmul], count: int, width: int
) -> None:
    torch.manual_seed(0)
    weight = quantize_groups(torch.randn(count, width))
    matrix = dequantize(weight)
    for rows in (1, 2, 5, 33):
        x = torch.randn(rows, width)
        y = matmul(weight)(x).double()
        expected = x.double() @ matrix.T
        assert ((y - expected).abs() <= error_bound(x.double(), matrix, matmul)).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere a row alone may have a kernel of its own")
def test_rows_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    multiply, x = BFloat16Int4Matmul(quantize_groups(torch.randn(48, 96))), torch.randn(9, 96)
    whole = multiply(x)
    for start, stop in [(0, 1), (3, 4), (0, 4), (2, 7)]:
        assert multiply(x[start:stop]).equal(whole[start:stop])


def test_shapes_and_bias() -> None:
    torch.manual_seed(0)
    weight, bias = quantize_groups(torch.randn(6, 32)), torch.randn(6)
    plain, biased = Int4Linear(weight), Int4Linear(weight, nn.Parameter(bias))
    for shape in [(32,), (1, 32), (2, 3, 32), (0, 32)]:
        x = torch.randn(shape, requires_grad=True)
        assert plain(x).shape == (*shape[:-1], 6)
        assert biased(x).equal(plain(x) + bias)
        assert plain(x).dtype == torch.float32
        assert not biased(x).requires_grad


def rounded(model: nn.Module) -> nn.Module:
    """The same model with the weights that the integers stand for, in float32."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data = quantize_groups(module.weight).to_float32()
    tables = {id(one): one for one in (model.token_embedding.table.weight, getattr(model.head, "weight", None))}
    for table in tables.values():
        if table is not None:
            table.data = (quantize_rows(table).values * quantize_rows(table).scale[:, None]).float()
    return model


@each_matmul
@pytest.mark.parametrize("tied", [True, False])
def test_logits_and_tokens_are_those_of_the_model_with_dequantized_weights(
    monkeypatch: pytest.MonkeyPatch, matmul: type, tied: bool
) -> None:
    """With large weights; tokens, as each of them is nearly the most likely after those before it."""
    monkeypatch.setattr(int4, "choose_int4_matmul", lambda: matmul)
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", head=spec.NextToken(tied=tied), **SHAPE)).eval()
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.3)
    ids = torch.randint(0, 100, (3, 12))
    with torch.no_grad():
        quantized = prepare_for_inference(model, "int4", 1)(ids)
    completions = gh.generate(model, None, ids.tolist(), max_new_tokens=6, weights="int4", slots=2)
    texts = torch.cat([ids, torch.tensor([one.ids for one in completions])], 1)
    with torch.no_grad():
        expected = rounded(model)(texts)
    tolerance = 0.05 * expected.abs().max()
    assert (quantized - expected[:, :12]).abs().max() <= tolerance
    sampled = expected[:, 11:-1].gather(-1, texts[:, 12:, None]).squeeze(-1)
    assert (expected[:, 11:-1].amax(-1) - sampled).max() <= 2 * tolerance
    assert (expected[:, 11:-1].amax(-1) - expected[:, 11:-1].mean(-1)).min() > 3 * tolerance  # few others are


def test_the_head_and_the_embedding_are_int8() -> None:
    clone = clone_sharing_parameters(gh.build(gh.preset("tiny-decoder", **SHAPE)))
    quantize_int4(clone)
    assert isinstance(clone.head.matmul, Int8Linear)
    assert clone.token_embedding.table.quantized.values.dtype == torch.int8
    layers = [one for one in clone.stack.modules() if isinstance(one, Int4Linear | nn.Linear)]
    assert len(layers) == 2 * 4
    assert all(isinstance(one, Int4Linear) for one in layers)


def test_widths_that_are_no_multiple_of_the_group() -> None:
    with pytest.raises(gh.InputError, match=r"48 columns, but int4 needs a multiple of 32; use weights='int8'"):
        quantize_groups(torch.randn(4, 48))
    model = gh.build(gh.preset("tiny-decoder", **{**SHAPE, "d_ff": 100}))
    with pytest.raises(gh.InputError, match="100 columns"):
        gh.Engine(model, weights="int4", max_len=16)


def test_other_dtypes_and_devices() -> None:
    with pytest.raises(gh.InputError, match=r"a weight is torch.float64 on cpu, but int4 needs float32 on the CPU"):
        gh.Engine(gh.build(gh.preset("tiny-decoder"), dtype=torch.float64), weights="int4", max_len=16)
    with pytest.raises(gh.InputError, match="on meta, but int4 needs"):
        quantize_int4(gh.build(gh.preset("tiny-decoder"), device="meta"))


@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(("machine", "expected"), [("x86_64", BFloat16Int4Matmul), ("aarch64", DynamicInt4Matmul)])
def test_the_kernel_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, machine: str, expected: type) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    assert choose_int4_matmul() is expected


@pytest.mark.usefixtures("fresh_cache")
def test_a_kernel_that_is_missing_or_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    class Missing:
        def __init__(self, weight: Int4Weight) -> None:
            raise AttributeError("'_OpNamespace' 'aten' object has no such attribute")

    class Wrong(BFloat16Int4Matmul):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 1.1

    for broken in (Missing, Wrong):
        choose_int4_matmul.cache_clear()
        monkeypatch.setattr(int4, "BFloat16Int4Matmul", broken)
        assert choose_int4_matmul() is DynamicInt4Matmul
    monkeypatch.setattr(int4, "DynamicInt4Matmul", Missing)
    choose_int4_matmul.cache_clear()
    with pytest.raises(gh.InputError, match="no int4 matmul for this machine; use weights='int8'"):
        Int4Linear(quantize_groups(torch.randn(4, 32)))
