"""Training on a CUDA device: the loss kernel, the compiled step in bfloat16, and steps that run ahead of the host."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.layers.linear.float8 import FINE, WIDE, Float8Linear, quantize
from glasshouse.layers.lora import FrozenWeights, LoRA
from glasshouse.objectives.loss.softmax_gradient import softmax_gradient
from glasshouse.training.optimizer import AdamW, Muon, make_optimizer
from glasshouse.training.plan import MemoryModel
from glasshouse.training.step import NonFiniteError, TrainStep


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("cap", [None, 4.0])
@pytest.mark.parametrize(("width", "n_classes"), [(64, 64), (320, 263), (50_304, 50_257), (128_256, 128_256)])
def test_the_loss_kernel_equals_torch(width: int, n_classes: int, cap: float | None, smoothing: float) -> None:
    torch.manual_seed(0)
    logits, targets = 3 * torch.randn(50, width), torch.randint(n_classes, (50,))
    targets[3] = -100
    losses, gradient = softmax_gradient(logits.cuda(), targets.cuda(), n_classes, smoothing, cap)
    expected = softmax_gradient(logits.double(), targets, n_classes, smoothing, cap)
    assert torch.allclose(losses.cpu().double(), expected[0], rtol=1e-5, atol=1e-5)
    assert torch.allclose(gradient.cpu().double(), expected[1], rtol=1e-4, atol=1e-6)


def make(choice: AdamW | Muon, precision: torch.dtype) -> TrainStep:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0), device="cuda").train()
    return TrainStep(model, make_optimizer(model, choice), precision=precision, defer_logits=True)


def batches(count: int) -> list[Batch]:
    source = torch.Generator().manual_seed(0)
    drawn = (torch.randint(256, (8, 33), generator=source) for _ in range(count))
    return [Batch(ids[:, :-1], ids[:, 1:], torch.ones(8, 32, dtype=torch.bool)) for ids in drawn]


@pytest.mark.parametrize("compiled", [False, True])
def test_bfloat16_trains_nearly_as_float32(compiled: bool) -> None:
    results = []
    for precision in (torch.float32, torch.bfloat16):
        step = make(AdamW(lr=3e-3), precision)
        if compiled:
            step.compile()
        results.append([step(batch, 2).loss for batch in batches(4) * 8])
        assert step.compiled == compiled
    assert results[0][-1] < results[0][0] - 1
    assert results[1] == pytest.approx(results[0], rel=0.03)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_adapters_on_quantized_weights_train_in_the_memory_of_the_plan(
    weights: FrozenWeights, compiled: bool
) -> None:
    results = []
    for precision in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = gh.build(gh.preset("tiny-decoder", dropout=0.0)).train()
        lora.attach(model, LoRA(targets=("*",), weights=weights, modules_to_save=("token_embedding",)))
        planned = MemoryModel(model, AdamW(), precision=precision).at(1, 1).parts["weights"]
        before = torch.cuda.memory_allocated()
        step = TrainStep(model.cuda(), make_optimizer(model, AdamW(lr=3e-3)), precision=precision, defer_logits=True)
        # A tensor takes whole blocks of 512 bytes, in the model and in its copy.
        tensors = 2 * len([*model.parameters(), *model.buffers()])
        assert planned <= torch.cuda.memory_allocated() - before <= planned + 512 * tensors
        if compiled:
            step.compile()
        results.append([step(batch, 2).loss for batch in batches(4) * 8])
        assert step.compiled == compiled
        del step, model
    assert results[0][-1] < results[0][0] - 0.3
    assert results[1] == pytest.approx(results[0], rel=0.03)


@pytest.mark.parametrize("choice", [AdamW(lr=3e-3), Muon()])
def test_no_step_updates_the_weights_until_a_nonfinite_one_is_read(choice: AdamW | Muon) -> None:
    step = make(choice, torch.bfloat16)
    assert step.runs_ahead
    good = batches(3)
    poisoned = make(choice, torch.bfloat16)
    expected = [step(batch).loss for batch in good]

    factors = iter([1.0, torch.nan, 1.0, 1.0, 1.0])
    real = poisoned.loss_fn
    poisoned.loss_fn = lambda *inputs: real(*inputs) * next(factors)
    first, bad = poisoned.launch(good[0]), poisoned.launch(good[1])
    before = [weight.clone() for weight in poisoned.model.parameters()]
    void = poisoned.launch(good[2])
    assert first.result().loss == pytest.approx(expected[0], rel=1e-3)
    assert all(a.equal(b) for a, b in zip(before, poisoned.model.parameters(), strict=True))
    with pytest.raises(NonFiniteError):
        bad.result()
    assert void.result().loss < torch.inf  # it ran, and changed nothing
    assert [poisoned(batch).loss for batch in good[1:]] == pytest.approx(expected[1:], rel=1e-2)


def test_fp8_trains_nearly_as_bfloat16() -> None:
    results = []
    for float8 in (False, True):
        torch.manual_seed(0)
        model = gh.build(gh.preset("tiny-decoder", dropout=0.0), device="cuda").train()
        step = TrainStep(
            model, make_optimizer(model, AdamW(lr=3e-3)), precision=torch.bfloat16, float8=float8, defer_logits=True
        )
        step.compile()
        results.append([step(batch, 2).loss for batch in batches(4) * 8])
        assert step.compiled
    assert results[0][-1] < results[0][0] - 1
    assert results[1] == pytest.approx(results[0], rel=0.06)


def test_an_fp8_product_on_the_gpu_is_that_of_the_rounded_operands() -> None:
    torch.manual_seed(0)
    layer = Float8Linear(96, 64, bias=False, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(5, 7, 96, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y = layer(x)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    x8, w8, g8 = (
        value.double() * scale.double()
        for value, scale in (quantize(x, FINE), quantize(layer.weight, FINE), quantize(upstream, WIDE))
    )
    assert x.grad is not None
    assert layer.weight.grad is not None
    for found, exact in (
        (y, x8 @ w8.T),
        (x.grad, g8 @ w8),
        (layer.weight.grad, torch.einsum("bsn,bsk->nk", g8, x8)),
    ):
        # Sums of exact products, kept to 14 bits or more by the matrix units, then rounded to bfloat16.
        assert (found - exact).abs().max() <= 2**-8 * exact.abs().max()
