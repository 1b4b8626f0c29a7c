"""Int8 weights: by hand, exact on the grid, within the rounding bound, and independent of the batch."""

from __future__ import annotations

import gc
import math
import platform
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from examples import up_to
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from spec_strategy import VOCABULARY, specs
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import spec
from glasshouse.layers.linear import int8
from glasshouse.layers.linear.int8 import (
    PEAK,
    Int8Embedding,
    Int8Linear,
    Int8Weight,
    OneDNNInt8Matmul,
    WeightOnlyInt8Matmul,
    onednn_int8_is_exact,
    quantize_int8,
    quantize_rows,
)
from glasshouse.layers.module_swap import SwappedUnembedding, clone_sharing_parameters
from glasshouse.models import Model, Seq2Seq

Matmul = Callable[[Int8Weight], Callable[[Tensor], Tensor]]
MATMULS: list[Matmul] = [*([OneDNNInt8Matmul] if onednn_int8_is_exact() else []), WeightOnlyInt8Matmul]
each_matmul = pytest.mark.parametrize("matmul", MATMULS)


@pytest.fixture
def fresh_cache() -> Iterator[None]:
    onednn_int8_is_exact.cache_clear()
    yield
    onednn_int8_is_exact.cache_clear()


def dense(rows: Int8Weight) -> Tensor:
    return rows.values.double() * rows.scale.double()[:, None]


def matrices(model: Model) -> list[Tensor]:
    """Return the weights that become int8."""
    own = [model.head.weight] if hasattr(model.head, "weight") else []
    return [
        model.token_embedding.table.weight,
        *own,
        *(m.weight for m in model.modules() if isinstance(m, nn.Linear)),
    ]


@torch.no_grad()
def round_matrices(model: Model) -> None:
    for weight in matrices(model):
        weight.copy_(dense(quantize_rows(weight)))


def run(model: nn.Module) -> Tensor:
    ids = torch.randint(0, VOCABULARY, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids, ids) if isinstance(model, Seq2Seq) else model(ids)


def test_rounding_by_hand() -> None:
    rows = quantize_rows(
        torch.tensor(
            [
                [127.0, 0.5, 1.5, 2.5, -0.5, -1.5],  # halves go to the even neighbour
                [0.0, -63.5, 31.75, 0.1, -0.25, 15.875],  # in steps of 0.5
                [0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
                [1e-3, -1e-3, 1.0, 4e-3, -3.9e-3, 0.0],  # an outlier flattens the rest: a step is 0.00787
                [1e30, -1e30, 0.0, 1e28, 0.0, 1.0],
            ]
        )
    )
    assert rows.values.tolist() == [
        [127, 0, 2, 2, 0, -2],
        [0, -127, 64, 0, 0, 32],
        [0, 0, 0, 0, 0, 0],
        [0, 0, 127, 1, 0, 0],
        [127, -127, 0, 1, 0, 0],
    ]
    assert rows.values.dtype == torch.int8
    assert rows.scale[:3].tolist() == [1.0, 0.5, 0.0]
    assert rows.scale[3:].tolist() == pytest.approx([1 / 127, 1e30 / 127])


def test_subnormal_rows_keep_their_signs() -> None:
    """The scale, 190 / 127 of the smallest number, is rounded to 1 of it, so that there are 190 steps: too many."""
    rows = quantize_rows(torch.tensor([[190.0, -190.0, 3.0]]) * 2.0**-149)
    assert rows.values.tolist() == [[127, -127, 3]]


@settings(max_examples=up_to(50), deadline=None)
@given(st.integers(1, 9), st.integers(1, 20), st.floats(1e-6, 1e6), st.integers(0, 99))
def test_every_weight_is_within_half_a_step(n: int, k: int, size: float, seed: int) -> None:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * size
    rows = quantize_rows(weight)
    assert rows.values.int().abs().amax(1).eq(127).all()
    step = weight.double().abs().amax(1, keepdim=True) / 127
    assert ((dense(rows) - weight).abs() <= 0.5 * step * (1 + 1e-5)).all()  # scale and quotient are float32


@each_matmul
def test_matmul_by_hand(matmul: Matmul) -> None:
    rows = Int8Weight(torch.tensor([[1, 2, 3], [-4, 0, 127]], dtype=torch.int8), torch.tensor([0.5, 2.0]))
    x = torch.tensor([[2.0, 4.0, -6.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    expected = [-4.0, -1540.0, 0.0, 0.0, 1.5, 254.0]  # 2 + 8 - 18 halved, -8 - 762 doubled
    assert matmul(rows)(x).flatten().tolist() == pytest.approx(expected, rel=1e-6)


@each_matmul
@settings(max_examples=up_to(30), deadline=None)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 300), st.integers(0, 999))
def test_integers_are_exact(matmul: Matmul, n: int, m: int, k: int, seed: int) -> None:
    """Weights and activations on their grids: nothing is rounded, and the result is exact."""
    torch.manual_seed(seed)
    values = torch.randint(-127, 128, (n, k))
    values[torch.arange(n), torch.randint(0, k, (n,))] = 127
    x = torch.randint(-15, 16, (m, k))
    x[torch.arange(m), torch.randint(0, k, (m,))] = PEAK  # so that the sums stay below 2 ** 24
    rows = quantize_rows(values.float())
    assert rows.values.equal(values.to(torch.int8))
    assert rows.scale.eq(1).all()
    assert matmul(rows)(x.float()).long().equal(x @ values.T)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="digits are for x86")
def test_onednn_is_used_on_x86() -> None:
    assert isinstance(int8.make_int8_matmul(quantize_rows(torch.ones(1, 1))), OneDNNInt8Matmul)


@pytest.mark.skipif(not onednn_int8_is_exact(), reason="needs oneDNN")
@pytest.mark.parametrize("k", [64, 1000, 5000])
@pytest.mark.parametrize("m", [1, 2, 7, 40])
def test_the_largest_digits_do_not_saturate(m: int, k: int) -> None:
    values = torch.full((48, k), 127)
    values[::2] = -127
    x = torch.full((m, k), PEAK)
    x[::3] = -PEAK
    x[1::3, ::2] = -PEAK
    result = OneDNNInt8Matmul(Int8Weight(values.to(torch.int8), torch.ones(48)))(x.float())
    # Each digit's sum, its offset and the sum of both are rounded once: by at most 2 ** -24 of all that was added.
    assert (result.long() - x @ values.T).abs().max() <= 3 * 2**-24 * 127 * 2 * PEAK * k


@pytest.mark.skipif(not onednn_int8_is_exact(), reason="needs oneDNN")
def test_activations_are_rounded_to_nearest() -> None:
    """The identity matrix returns the quantized activations."""
    torch.manual_seed(0)
    x = torch.randn(50, 64) * 10 ** torch.randn(50, 1)
    seen = OneDNNInt8Matmul(quantize_rows(torch.eye(64)))(x)
    half = x.abs().amax(1, keepdim=True) / PEAK / 2
    assert ((seen - x).abs() <= half * (1 + 2**-9) + x.abs() * 2**-22).all()


@each_matmul
@settings(max_examples=up_to(30), deadline=None)
@given(
    st.integers(1, 70),
    st.integers(1, 20),
    st.sampled_from([1, 3, 8, 100, 768]),
    st.sampled_from([1e-20, 1e-3, 1.0, 1e4]),
    st.sampled_from([0.0, 50.0]),
    st.integers(0, 999),
)
def test_error_bound(matmul: Matmul, n: int, m: int, k: int, size: float, outlier: float, seed: int) -> None:
    torch.manual_seed(seed)
    weight, bias, x = torch.randn(n, k) * 0.05, torch.randn(n), torch.randn(m, k) * size
    x[:, 0] += outlier * size
    rows = quantize_rows(weight)
    result = Int8Linear(rows, bias)
    result.matmul = matmul(rows)
    truth = x.double() @ weight.double().T + bias
    of_weights = rows.scale / 2 * x.abs().sum(1, keepdim=True)
    of_activations = x.abs().amax(1, keepdim=True) / PEAK / 2 * dense(rows).abs().sum(1)
    if matmul is WeightOnlyInt8Matmul:
        of_activations = 0 * of_activations
    largest = x.abs().amax(1, keepdim=True) * dense(rows).abs().sum(1) + bias.abs()
    rounding = (k + 8) * 2**-24 * largest
    # Where an activation becomes a whole number, float32 has ten bits left below it: 1 + 2 ** -9 half steps.
    assert ((result(x) - truth).abs() <= of_weights * (1 + 1e-5) + of_activations * (1 + 2**-9) + rounding).all()


@each_matmul
@settings(max_examples=up_to(25), deadline=None)
@given(
    st.sampled_from([1, 5, 64, 257]),
    st.integers(2, 70),
    st.sampled_from([1, 7, 64, 768, 3072]),
    st.booleans(),
    st.integers(0, 999),
)
@example(257, 40, 3072, True, 0)
def test_result_does_not_depend_on_the_batch(
    matmul: Matmul, n: int, m: int, k: int, positive: bool, seed: int
) -> None:
    """Bit-exact, also where all numbers are positive and sums exceed what float32 represents exactly."""
    torch.manual_seed(seed)
    if matmul is WeightOnlyInt8Matmul:
        n, k = min(n, 64), min(k, 768)  # slow here
    weight, x = torch.randn(n, k), torch.randn(m, k) * 10 ** torch.randn(m, 1)
    if positive:
        weight, x = 1 + torch.rand(n, k) / 4, 1 + torch.rand(m, k) / 4
    linear = Int8Linear(quantize_rows(weight), torch.randn(n))
    linear.matmul = matmul(quantize_rows(weight))
    together = linear(x)
    alone = torch.cat([linear(row[None]) for row in x])
    assert together.equal(alone)
    assert linear(x.flip(0)).flip(0).equal(alone)
    if m % 2 == 0:
        assert linear(x.view(2, -1, k)).view(m, n).equal(alone)


@each_matmul
def test_nan_and_infinite_rows_do_not_affect_others(matmul: Matmul) -> None:
    torch.manual_seed(0)
    rows = quantize_rows(torch.randn(6, 40))
    plain = torch.randn(4, 40)
    expected = matmul(rows)(plain)
    unusual = torch.randn(8, 40)
    # The ARM kernel scales the sum: 127 times 40 times the largest value must be finite.
    huge = 1e38 if matmul is OneDNNInt8Matmul else 1e34
    unusual[0, 3], unusual[1, 3], unusual[2, 3] = math.nan, math.inf, -math.inf
    unusual[3] = 0
    unusual[4] *= 1e-42
    unusual[5] *= huge / 10
    unusual[6, 0] = 3 * huge
    unusual[7] = -0.0
    result = matmul(rows)(torch.cat([unusual, plain]))
    assert result[8:].equal(expected)
    assert not result[:3].isfinite().any()
    assert result[3].eq(0).all()
    assert result[7].eq(0).all()
    assert (result[4].abs() <= 40 * 4 * 1e-41).all()
    assert (result[5].double() - unusual[5].double() @ dense(rows).T).abs().max() < huge * 4 / PEAK
    assert (result[6].double() / (3 * huge * dense(rows)[:, 0]) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("k", range(1, 18))
def test_padding_for_the_arm_kernel(k: int) -> None:
    """It loads values by eights and scales by fours, and would read past the end."""
    matmul = WeightOnlyInt8Matmul(quantize_rows(torch.randn(k, k)))
    assert matmul.values.shape[1] in range(k, k + 8)
    assert matmul.values.shape[1] % 8 == 0
    assert matmul.scale.untyped_storage().nbytes() // 4 in range(k, k + 4)
    assert matmul.scale.untyped_storage().nbytes() % 16 == 0


def test_shapes_and_bias() -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(6, 10), torch.randn(6)
    plain, biased = Int8Linear(quantize_rows(weight)), Int8Linear(quantize_rows(weight), bias)
    for shape in [(10,), (1, 10), (3, 10), (2, 3, 10), (2, 3, 4, 10), (0, 10), (2, 0, 10)]:
        x = torch.randn(shape)
        assert plain(x).shape == (*shape[:-1], 6)
        assert biased(x).equal(plain(x) + bias)
    transposed = torch.randn(10, 3).T
    assert plain(transposed).equal(plain(transposed.contiguous()))


def test_no_gradients() -> None:
    x = torch.randn(2, 10, requires_grad=True)
    assert not Int8Linear(quantize_rows(torch.randn(6, 10)), nn.Parameter(torch.randn(6)))(x).requires_grad


def test_embedding_lookup() -> None:
    table = Int8Embedding(quantize_rows(torch.tensor([[127.0, 1.0], [0.0, 0.0], [-0.5, 63.5]])))
    assert table(torch.tensor([[2, 0], [1, 2]])).tolist() == [[[-0.5, 63.5], [127, 1]], [[0, 0], [-0.5, 63.5]]]
    assert table.num_embeddings == 3


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_and_head(tied: bool) -> None:
    """The head maps the identity to its weight: that of the embedding if tied."""
    torch.manual_seed(0)
    head = spec.NextToken(tied=tied, bias=True)
    model = gh.build(gh.preset("tiny-decoder", head=head)).eval()
    for weight in model.parameters():
        nn.init.normal_(weight)
    clone = clone_sharing_parameters(model)
    quantize_int8(clone)
    assert isinstance(clone.token_embedding.table, Int8Embedding)
    assert isinstance(clone.head, SwappedUnembedding)
    table = clone.token_embedding(torch.arange(256)[None])[0]
    columns = clone.head(torch.eye(64), None, None) - model.head.bias
    matrix = dense(quantize_rows(model.token_embedding.table.weight if tied else model.head.weight)).float()
    assert table.equal(dense(quantize_rows(model.token_embedding.table.weight)).float())
    assert (columns.T - matrix).abs().max() < 1e-6  # a bias of up to 4 was added and subtracted


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(s=specs(), seed=st.integers(0, 99))
def test_int8_model_equals_the_model_with_rounded_weights(
    monkeypatch: pytest.MonkeyPatch, s: spec.Spec, seed: int
) -> None:
    """For any spec; with float activations, so that only float32 rounding differs."""
    monkeypatch.setattr(int8, "make_int8_matmul", WeightOnlyInt8Matmul)
    torch.manual_seed(seed)
    model = gh.build(s).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = run(model)
    clone = clone_sharing_parameters(model)
    quantize_int8(clone)
    assert run(model).equal(before)
    assert all(tensor.equal(state[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(module, nn.Linear) for module in clone.modules())
    assert not {*map(id, matrices(model))} & {*map(id, clone.parameters())}
    round_matrices(model)
    expected = run(model)
    # Rounding at 6e-8 a sum; norms of tiny vectors and three layers make it a few hundred times as large.
    assert (run(clone) - expected).abs().max() <= 1e-4 * (1 + expected.abs().max())


def test_quantized_activations_are_accurate_in_a_model() -> None:
    """Each of the 13 matmuls is off by at most 2 ** -14 of a row's maximum; with int8 it would be 2 ** -8."""
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", init="normal")).eval()
    clone = clone_sharing_parameters(model)
    quantize_int8(clone)
    round_matrices(model)
    expected = run(model)
    assert (run(clone) - expected).abs().max() <= 2**-9 * expected.abs().max()


def test_original_weights_can_be_freed() -> None:
    model = gh.build(gh.preset("tiny-seq2seq"))
    clone = clone_sharing_parameters(model)
    quantize_int8(clone)
    gone = [weakref.ref(weight) for weight in matrices(model)]
    assert len(gone) > 10
    kept = {name for name, _ in model.named_parameters() if "norm" in name}
    del model
    gc.collect()
    assert all(weight() is None for weight in gone)
    assert kept <= {name for name, _ in clone.named_parameters()}


def test_tied_embedding_is_stored_once_unless_prepacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "make_int8_matmul", WeightOnlyInt8Matmul)
    clone = clone_sharing_parameters(gh.build(gh.preset("tiny-decoder", head=spec.NextToken(tied=True))))
    quantize_int8(clone)
    assert clone.head.matmul.matmul.values is clone.token_embedding.table.quantized.values


def test_int8_model_with_a_cache() -> None:
    torch.manual_seed(0)
    clone = clone_sharing_parameters(gh.build(gh.preset("tiny-decoder", init="normal")).eval())
    quantize_int8(clone)
    ids = torch.randint(0, 256, (2, 6))
    with torch.no_grad():
        whole = clone(ids)
        cache = clone.make_cache(2, 6)
        parts = torch.cat(
            [clone(ids[:, :4], cache=cache), clone(ids[:, 4:5], cache=cache), clone(ids[:, 5:], cache=cache)], 1
        )
    # Attention sums in another order, and an activation may round differently: 2 ** -14 of a maximum.
    assert (parts - whole).abs().max() <= 2**-9 * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_raise(dtype: torch.dtype) -> None:
    model = gh.build(gh.preset("tiny-decoder"), dtype=dtype)
    with pytest.raises(gh.InputError, match=f"a weight is {dtype} on cpu"):
        quantize_int8(clone_sharing_parameters(model))
    with pytest.raises(gh.InputError, match="on meta"):
        quantize_int8(gh.build(gh.preset("tiny-decoder"), device="meta"))


@pytest.mark.usefixtures("fresh_cache")
def test_weight_only_matmul_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = quantize_rows(torch.randn(3, 5))
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert isinstance(int8.make_int8_matmul(rows), WeightOnlyInt8Matmul)
    monkeypatch.undo()
    onednn_int8_is_exact.cache_clear()
    monkeypatch.setattr(torch.ops, "onednn", object())
    assert isinstance(int8.make_int8_matmul(rows), WeightOnlyInt8Matmul)


@pytest.mark.usefixtures("fresh_cache")
def test_saturating_kernel_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As processors without VNNI do: two products of bytes are added in sixteen bits."""

    class Saturating:
        @staticmethod
        def qlinear_prepack(values: Tensor, _: None) -> Tensor:
            return values

        class qlinear_pointwise:  # noqa: N801
            @staticmethod
            def default(digits: Tensor, *rest: object) -> Tensor:
                weight, shift = rest[2], rest[5]
                assert isinstance(weight, Tensor)
                pairs = (digits[:, None].int() * weight.int()).view(len(digits), len(weight), -1, 2).sum(-1)
                return pairs.clamp(-limit, limit - 1).sum(-1).float() + shift

    monkeypatch.setattr(torch.ops, "onednn", Saturating)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    limit = 2**15
    assert onednn_int8_is_exact()  # digits of seven bits are small enough
    onednn_int8_is_exact.cache_clear()
    limit = 2**14
    assert not onednn_int8_is_exact()
