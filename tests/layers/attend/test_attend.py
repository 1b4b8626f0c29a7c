"""Backends agree on any mask, and with attention written as loops; masks agree with their definition."""

from __future__ import annotations

import math

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glasshouse.layers.attend.backends import Explicit, Sdpa
from glasshouse.layers.attend.kernel import Attend, Situation
from glasshouse.layers.attend.layout import Layout, make_layout
from glasshouse.layers.attend.mask import Mask, make_mask


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, bias: Tensor | None = None) -> Tensor:
    """One query of one head at a time; query heads share key heads in runs."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                js = [j for j in range(k.shape[2]) if seen[b, i, j]]
                scores = [scale * float(q[b, h, i] @ k[b, h // group, j]) for j in js]
                if bias is not None:
                    scores = [s + float(bias[h, i, j]) for s, j in zip(scores, js, strict=True)]
                total = sum(math.exp(s) for s in scores)
                for s, j in zip(scores, js, strict=True):
                    out[b, h, i] += math.exp(s) / total * v[b, h // group, j]
    return out


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw q, k, v with any number of groups and a mask that may hide every key of a query."""
    torch.manual_seed(draw(st.integers(0, 10_000)))
    n_kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    n_queries, n_keys = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    q = torch.randn(2, n_kv_heads * group, n_queries, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, n_kv_heads, n_keys, 4, dtype=torch.float64)
    seen = torch.rand(2, n_queries, n_keys) < draw(st.sampled_from([0.1, 0.5, 0.9]))
    return q, k, v, seen


@settings(max_examples=up_to(150), derandomize=True, deadline=None)
@given(cases(), st.booleans())
def test_sdpa_and_explicit_equal_loops_on_random_masks(case: tuple[Tensor, ...], biased: bool) -> None:
    q, k, v, seen = case
    bias = torch.randn(q.shape[1], q.shape[2], k.shape[2], dtype=torch.float64) if biased else None
    dense = seen[:, None] if bias is None else bias.masked_fill(~seen[:, None], -torch.inf)
    expected = by_hand(q, k, v, seen, 0.7, bias)
    gradients = []
    for backend in (Sdpa, Explicit):
        inputs = [t.clone().requires_grad_() for t in (q, k, v)]
        out = Attend(0.7, 0.0)(*inputs, backend(Mask(), dense=dense))
        assert (out - expected).abs().max() <= 1e-13 * max(1.0, float(expected.abs().max()))
        gradients.append(torch.autograd.grad(out.square().sum(), inputs))
    for sdpa, explicit in zip(*gradients, strict=True):
        assert (sdpa - explicit).abs().max() <= 1e-12 * max(1.0, float(explicit.abs().max()))


@settings(max_examples=up_to(60), derandomize=True, deadline=None)
@given(st.integers(1, 20), st.booleans(), st.sampled_from([torch.float32, torch.float64]))
def test_backends_agree_on_gradients_without_a_dense_mask(length: int, causal: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(length)
    results = []
    inputs = torch.randn(3, 2, 4, length, 8, dtype=dtype)
    for backend in (
        Sdpa(Mask(), causal),
        Explicit(Mask(), torch.ones(length, length).tril() > 0 if causal else None),
    ):
        q, k, v = inputs.clone().requires_grad_()
        out = Attend(0.3, 0.0)(q, k, v, backend)
        results.append((out.detach(), *torch.autograd.grad(out.square().sum(), (q, k, v))))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13  # a hundred roundings
    for a, b in zip(*results, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max()))


def test_scores_apply_the_soft_cap_before_the_mask() -> None:
    q, k = torch.tensor([[[[3.0]]]]), torch.tensor([[[[1.0], [-2.0], [5.0]]]])
    scores = Attend(2.0, 0.0, softcap=4.0).scores(q, k, torch.tensor([True, True, False]))
    expected = [4 * math.tanh(6 / 4), 4 * math.tanh(-12 / 4), -math.inf]
    assert scores.flatten().tolist() == pytest.approx(expected)


def test_dropout_drops_whole_weights_in_training_only() -> None:
    torch.manual_seed(0)
    q, k = torch.zeros(1, 1, 200, 4), torch.zeros(1, 1, 200, 4)
    v = torch.eye(200)[None, None]
    attend = Attend(1.0, 0.25)
    for backend in (Sdpa(Mask()), Explicit(Mask())):
        weights = attend.train()(q, k, v, backend)  # with unit values the output is the weights themselves
        kept = weights > 0
        torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 200 / 0.75))
        # 40,000 draws: the share kept lies within 5 standard deviations of 0.0022.
        assert abs(kept.double().mean() - 0.75) < 0.011
        torch.testing.assert_close(attend.eval()(q, k, v, backend), torch.full_like(weights, 1 / 200))


@settings(max_examples=200, derandomize=True, deadline=None)  # milliseconds each
@given(st.data())
def test_masks_equal_the_definition_pair_by_pair(data: st.DataObject) -> None:
    """Any mix of causal mask, window, padding, documents and prefix, compared with the definition."""
    length, batch = data.draw(st.integers(1, 8)), 2
    draw_row = st.lists(st.integers(0, 1), min_size=length, max_size=length)
    causal, window = data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 2, 5]))
    real = (
        torch.tensor([data.draw(draw_row) for _ in range(batch)], dtype=torch.bool)
        if data.draw(st.booleans())
        else None
    )
    documents = None
    if data.draw(st.booleans()):
        documents = torch.tensor([data.draw(draw_row) for _ in range(batch)]).cumsum(1)
    prefix = torch.tensor([data.draw(st.integers(0, 4)) for _ in range(batch)]) if data.draw(st.booleans()) else None

    layout = make_layout(torch.zeros(batch, length), mask=real, documents=documents, prefix_lengths=prefix)
    mask = make_mask(layout, layout, causal=causal, window=window)
    dense = mask.to_dense(length, length, torch.device("cpu"))
    if dense is None:
        dense = torch.ones(length, length, dtype=torch.bool)
    dense = dense.expand(batch, 1, length, length)[:, 0]
    some = mask.to_dense(length, length, torch.device("cpu"), slice(1, length, 2))
    assert some is None or torch.equal(some.expand(batch, 1, length // 2, length)[:, 0], dense[:, 1::2])

    for b in range(batch):
        position, count = [], {}
        for i in range(length):
            number = int(documents[b, i]) if documents is not None else 0
            position.append(count.get(number, 0))
            count[number] = count.get(number, 0) + (real is None or bool(real[b, i]))
        for i in range(length):
            for j in range(length):
                if real is not None and not (real[b, i] and real[b, j]):
                    assert (
                        real[b, j] or not dense[b, i, j]
                    )  # padding is never attended to; what it attends to does not matter
                    continue
                both_in_prefix = prefix is not None and max(position[i], position[j]) < prefix[b]
                expected = (
                    (not causal or j <= i or both_in_prefix)
                    and (window == 0 or abs(position[i] - position[j]) < window)
                    and (documents is None or documents[b, i] == documents[b, j])
                )
                assert bool(dense[b, i, j]) == expected, (b, i, j)


def prepare(mask: Mask, n_queries: int, n_keys: int) -> Sdpa:
    return Sdpa.prepare(Situation(mask, n_queries, n_keys, torch.device("cpu"), torch.float32, d_head=8))


def test_simple_masks_are_not_materialised() -> None:
    """The fast paths of the kernels are used whenever possible."""

    def make(queries: Layout, keys: Layout, causal: bool, window: int = 0) -> Mask:
        return make_mask(queries, keys, causal=causal, window=window)

    row = make_layout(torch.zeros(2, 6))
    assert make(row, row, causal=True) == Mask(causal=True)
    assert make(row, row, causal=False) == Mask()
    assert make(row, row, causal=True, window=6) == Mask(causal=True)
    assert prepare(Mask(causal=True), 6, 6) == Sdpa(Mask(causal=True), causal=True)
    assert prepare(Mask(), 6, 6) == Sdpa(Mask())
    padded = make_layout(torch.zeros(2, 6), lengths=torch.tensor([6, 2]))
    assert make(padded, padded, causal=True) == Mask(causal=True)
    assert prepare(make(padded, padded, causal=False), 6, 6).dense is not None
    assert prepare(make(row, Layout(torch.arange(9)[None]), causal=True), 6, 9).dense is not None


def test_last_query_needs_no_mask() -> None:
    def make(positions: list[int], n_keys: int, window: int = 0, bias: Tensor | None = None) -> Tensor | None:
        queries = Layout(torch.tensor(positions)[:, None])
        keys = Layout(torch.arange(n_keys)[None], ordered=True)
        return prepare(make_mask(queries, keys, causal=True, window=window, bias=bias), 1, n_keys).dense

    assert make([4, 4], 5) is None
    bias = torch.randn(1, 2, 1, 5)
    assert make([4, 4], 5, bias=bias) is bias
    hidden = [[0.0] * 5, [0.0] * 4 + [-math.inf]]
    ragged = make([4, 3], 5)
    assert ragged is not None
    assert ragged[:, 0, 0].tolist() == hidden
    windowed = make([4, 4], 5, window=2)
    assert windowed is not None
    assert windowed[0, 0, 0].tolist() == [-math.inf] * 3 + [0.0, 0.0]


def test_bias_of_a_mask_is_added_where_it_hides_nothing() -> None:
    row, bias = make_layout(torch.zeros(1, 4)), torch.randn(1, 2, 4, 4)
    dense = make_mask(row, row, causal=True, bias=bias).to_dense(4, 4, torch.device("cpu"), slice(1, 3))
    assert dense is not None
    expected = bias.masked_fill(~(torch.ones(4, 4).tril() > 0), -math.inf)[:, :, 1:3]
    assert torch.equal(dense, expected)
    assert make_mask(row, row, causal=False, bias=bias).to_dense(4, 4, torch.device("cpu")) is bias
