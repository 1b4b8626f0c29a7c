"""The cross-entropy without all logits in memory, against torch's on the logits."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.models.heads import DeferredHead
from glasshouse.objectives.loss import linear as module
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.objectives.loss.linear import linear_cross_entropy


def draw(n_classes: int, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    source = torch.Generator().manual_seed(n_classes)
    x, weight = (torch.randn(rows, 5, generator=source, dtype=torch.float64) for rows in (13, n_classes))
    targets = torch.randint(n_classes, (13,), generator=source)
    targets[3] = targets[7] = -100
    offset = torch.randn(n_classes, generator=source, dtype=torch.float64) if bias else None
    return x, weight, offset, targets


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_classes", [64, 70])  # with and without classes that only fill a row of logits
@pytest.mark.parametrize("chunk", [2**29, 4 * 128])  # one chunk, and several of four or eight rows
def test_loss_and_gradients_are_those_of_torch(
    n_classes: int, bias: bool, cap: float | None, smoothing: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", chunk)
    *inputs, targets = draw(n_classes, bias)
    results = []
    for fused in (True, False):
        x, weight, offset = (None if one is None else one.clone().requires_grad_() for one in inputs)
        if fused:
            loss = linear_cross_entropy(x, weight, offset, targets, smoothing, cap)
        else:
            logits = F.linear(x, weight, offset)
            logits = logits if cap is None else cap * (logits / cap).tanh()
            loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)
        (loss / 11).backward()
        results.append([loss.detach(), *(one.grad for one in (x, weight, offset) if one is not None)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_as_one_operation_it_computes_the_same(
    bias: bool, needed: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * 128)
    x, weight, offset, targets = draw(128, bias)
    inputs = (x, weight, offset, targets, 128, 0.1, 2.0 if bias else None, *needed)
    for one, other in zip(module._compute_as_one(*inputs), module._compute(*inputs), strict=True):
        assert torch.equal(one, other)
    torch.library.opcheck(module._compute_as_one, inputs)  # shapes and strides as registered, nothing overwritten


def test_the_logits_of_one_chunk_at_a_time_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_LOGITS", 4 * 128)
    compute, gradients = module.softmax_gradient, []

    def observe(*inputs: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        assert all(earlier() is None for earlier in gradients)
        losses, gradient = compute(*inputs)
        gradients.append(weakref.ref(gradient))
        return losses, gradient

    monkeypatch.setattr(module, "softmax_gradient", observe)
    x, weight, _, targets = draw(128, bias=False)
    linear_cross_entropy(x.requires_grad_(), weight.requires_grad_(), None, targets)
    assert len(gradients) == 4  # of 13 rows


def test_frozen_weights_get_no_gradient() -> None:
    x, weight, _, targets = draw(70, bias=False)
    linear_cross_entropy(x.requires_grad_(), weight, None, targets).backward()
    assert weight.grad is None
    assert x.grad is not None


@pytest.mark.parametrize("preset", ["tiny-decoder", "tiny-seq2seq", "gpt2"])
def test_a_deferred_head_changes_neither_loss_nor_gradient(preset: str) -> None:
    small = {"n_layers": 1, "d_model": 32, "n_heads": 2, "vocab_size": 70, "dropout": 0.0, "embed_dropout": 0.0}
    model = gh.build(gh.preset(preset, **small, attention_dropout=0.0), dtype=torch.float64)
    ids = torch.randint(70, (2, 6), generator=torch.Generator().manual_seed(0))
    source = ids.flip(0) if preset == "tiny-seq2seq" else None
    batch = Batch(ids, targets=ids.roll(1, 1), loss_mask=ids > 9, source=source)
    results = []
    for head in (model.head, DeferredHead(model.head)):
        model.head = head
        model.zero_grad()
        loss = compute_loss(model, batch, 0.1)
        loss.backward()
        results.append([loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


def test_logits_at_the_target_positions_suffice() -> None:
    model = gh.build(gh.preset("tiny-encoder"), dtype=torch.float64).eval()
    ids = torch.randint(256, (3, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, 5], mask[1, [0, 7]] = True, True  # and none in the last sequence
    everywhere = Batch(ids, ids.roll(1, 1), mask)
    some = replace(everywhere, target_positions=torch.tensor([[5, 0, 1], [0, 7, 1], [3, 4, 2]]))
    model.head = DeferredHead(model.head)
    results = []
    for batch in (everywhere, some):
        model.zero_grad()
        loss = compute_loss(model, batch)
        loss.backward()
        results.append([loss.detach(), *(one.grad.clone() for one in model.parameters() if one.grad is not None)])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)
    assert [tuple(one.target_positions.shape) for one in some.microbatches(3)] == [(1, 3)] * 3


@pytest.mark.long
def test_other_numbers_of_tokens_are_not_compiled_again() -> None:
    torch.compiler.reset()
    counter = CompileCounter()
    compiled = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True)
    weight = torch.randn(70, 5, requires_grad=True)
    for count in range(3, 9):
        x, targets = torch.randn(count, 5, requires_grad=True), torch.randint(70, (count,))
        assert torch.allclose(compiled(x, weight, None, targets), linear_cross_entropy(x, weight, None, targets))
    assert counter.frame_count <= 2  # once for the first number, then for any
