"""The copy of a model that computes in low precision."""

from __future__ import annotations

import copy

import pytest
import torch

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.layers.linear.float8 import Float8Linear
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training.setup.model import checkpoint_activations
from glasshouse.training.setup.resolve import resolve_precision
from glasshouse.training.step import LowPrecisionCopy, TrainStep


def batches(count: int) -> list[Batch]:
    source = torch.Generator().manual_seed(0)
    drawn = (torch.randint(256, (4, 9), generator=source) for _ in range(count))
    return [Batch(ids[:, :-1], ids[:, 1:], torch.ones(4, 8, dtype=torch.bool)) for ids in drawn]


@pytest.mark.parametrize("defer", [False, True])
def test_gradients_are_summed_in_the_precision_of_the_master_weights(defer: bool) -> None:
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0))
    low = LowPrecisionCopy(model, torch.bfloat16, defer_logits=defer)
    alone = []
    for batch in batches(3):
        compute_loss(low.model, batch).backward()
        alone.append([weight.grad.float() for weight in low.model.parameters()])
        low.add_gradients()
    assert all(weight.grad is None for weight in low.model.parameters())
    assert not model.head.weight.grad.equal(model.head.weight.grad.bfloat16().float())
    for weight, *terms in zip(model.parameters(), *alone, strict=True):
        assert weight.grad.dtype == torch.float32
        assert torch.allclose(weight.grad, sum(terms), rtol=1e-6, atol=1e-6)


def test_the_copy_follows_the_master_weights_and_ties_what_they_tie() -> None:
    model = gh.build(gh.preset("gpt2", n_layers=1, d_model=32, n_heads=2, vocab_size=70))
    low = LowPrecisionCopy(model, torch.bfloat16, defer_logits=True)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight))
    low.update()
    for own, copied in zip(model.parameters(), low.model.parameters(), strict=True):
        assert copied.equal(own.bfloat16())


@pytest.mark.parametrize("grad_accum", [1, 2])
def test_a_backward_pass_that_ran_out_of_memory_leaves_no_gradient(grad_accum: int) -> None:
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0))
    plain, repeated = (
        TrainStep(one, torch.optim.SGD(one.parameters(), lr=0.1), precision=torch.bfloat16)
        for one in (model, copy.deepcopy(model))
    )
    batch, fails = batches(1)[0], [True]

    def out_of_memory(gradient: torch.Tensor) -> None:
        if fails:
            fails.clear()
            raise torch.OutOfMemoryError("CUDA out of memory.")

    copied = repeated._low.model
    copied.stack.blocks[0].attention.layer.query.weight.register_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        repeated(batch)
    assert any(weight.grad is not None for weight in copied.parameters())  # of what comes after the first block
    assert repeated(batch, grad_accum) == plain(batch, grad_accum)
    for one, other in zip(model.parameters(), repeated.model.parameters(), strict=True):
        assert one.equal(other)


def test_only_trained_weights_get_gradients() -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    lora.attach(model, lora.LoRA(rank=2))
    low = LowPrecisionCopy(model, torch.bfloat16)
    compute_loss(low.model, batches(1)[0]).backward()
    low.add_gradients()
    assert {name for name, one in model.named_parameters() if one.grad is not None} == {
        name for name, one in model.named_parameters() if one.requires_grad
    }


def test_activation_checkpointing_runs_the_copy() -> None:
    """The forward pass of a block is replaced by one that recomputes: in the copy, by that of its own block."""
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0))
    plain = LowPrecisionCopy(copy.deepcopy(model), torch.bfloat16)
    for block in model.stack.blocks:
        checkpoint_activations(block)
    low = LowPrecisionCopy(model, torch.bfloat16)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()  # not copied: no update
    for one in (plain, low):
        compute_loss(one.model, batches(1)[0]).backward()
    for one, other in zip(plain.model.parameters(), low.model.parameters(), strict=True):
        assert one.grad.equal(other.grad)


def test_bfloat16_trains_nearly_as_float32() -> None:
    results = []
    for precision in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = gh.build(gh.preset("tiny-decoder", dropout=0.0, n_layers=1, d_model=32, n_heads=2))
        update = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=precision, defer_logits=True)
        results.append([update(batch).loss for batch in batches(4) * 4])
    assert results[0][-1] < results[0][0] - 1
    assert results[1] == pytest.approx(results[0], rel=0.02)


def test_fp8_layers_train_the_master_weights() -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0, n_layers=1))
    step = TrainStep(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        precision=torch.bfloat16,
        float8=True,
        defer_logits=True,
    )
    assert step._low is not None
    assert any(isinstance(layer, Float8Linear) for layer in step._low.model.modules())
    assert not any(isinstance(layer, Float8Linear) for layer in model.modules())
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    losses = [step(batch, 2).loss for batch in batches(2) * 5]
    assert losses[-1] < losses[0] - 0.5
    assert not any(weight.equal(before[name]) for name, weight in model.named_parameters())


def test_fp8_is_refused_where_there_is_none() -> None:
    with pytest.raises(gh.GlasshouseError, match="cpu has no fp8 matrix units"):
        resolve_precision("fp8", torch.device("cpu"))
