"""The training step: gradient accumulation, clipping by hand, and no update on NaN or infinity."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.errors import InputError
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training.step import NonFiniteError, StepMetrics, TrainStep

# A CPU without instructions for half precision takes a hundred times as long.
SMALL = {"dropout": 0.0, "n_layers": 1, "d_model": 32, "n_heads": 2}


def ragged(seed: int, batch_size: int = 8, length: int = 12) -> Batch:
    """Sequences of very different lengths, so that micro-batches differ in their number of targets."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (batch_size, length), generator=source)
    lengths = torch.randint(1, length + 1, (batch_size,), generator=source)
    loss = torch.arange(length) < lengths[:, None]
    return Batch(ids, ids.roll(-1, 1), loss, lengths=lengths)


def make(model: nn.Module, lr: float = 0.1, **choices: object) -> TrainStep:
    return TrainStep(model, torch.optim.SGD(model.parameters(), lr), **choices)


def gradients(model: nn.Module) -> list[Tensor]:
    return [one.grad for one in model.parameters() if one.grad is not None]


@pytest.mark.parametrize("grad_accum", [2, 3, 8])
def test_gradient_accumulation_equals_one_batch(grad_accum: int) -> None:
    torch.manual_seed(0)
    models = [gh.build(gh.preset("tiny-decoder", dropout=0.0)) for _ in range(1)]
    models.append(copy.deepcopy(models[0]))
    batch = ragged(1)
    whole, cut = (make(model, grad_clip=None)(batch, n) for model, n in zip(models, (1, grad_accum), strict=True))
    assert whole.n_targets == cut.n_targets == int(batch.loss_mask.sum())
    assert cut.loss == pytest.approx(whole.loss, abs=1e-6)
    for one, other in zip(*map(gradients, models), strict=True):
        assert (one - other).abs().max() <= 1e-6


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("grad_accum", [2, 8])
def test_twenty_steps_in_float64(grad_accum: int) -> None:
    torch.manual_seed(0)
    one = gh.build(gh.preset("tiny-decoder", dropout=0.0), dtype=torch.float64)
    other = copy.deepcopy(one)
    updates = [TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2)) for model in (one, other)]
    for step in range(20):
        batch = ragged(step)
        whole, cut = (update(batch, n) for update, n in zip(updates, (1, grad_accum), strict=True))
        assert cut.loss == pytest.approx(whole.loss, abs=1e-9)
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert (a - b).abs().max() <= 1e-9


def test_a_step_by_hand() -> None:
    """The mean over targets, clipped to a norm of 0.5, times the learning rate."""
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0), dtype=torch.float64)
    batch, reference = ragged(2), copy.deepcopy(model)
    mean = compute_loss(reference, batch) / int(batch.loss_mask.sum())
    mean.backward()
    norm = sum(float(one.square().sum()) for one in gradients(reference)) ** 0.5
    assert norm > 0.5
    outcome = make(model, lr=0.1, grad_clip=0.5)(batch)
    assert outcome.loss == pytest.approx(float(mean.detach()))
    assert outcome.grad_norm == pytest.approx(norm)
    for weight, before in zip(model.parameters(), reference.parameters(), strict=True):
        if before.grad is not None:
            # clip_grad_norm_ adds 1e-6 to the norm it divides by
            assert torch.allclose(weight, before - 0.1 * before.grad * 0.5 / norm, atol=1e-7)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_or_infinity_changes_no_weight(bad: float) -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    update = make(model)
    with torch.no_grad():
        model.stack.norm.weight[0] = bad
    before = {name: one.clone() for name, one in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        update(ragged(3))
    assert all(one.equal(before[name]) or name == "stack.norm.weight" for name, one in model.state_dict().items())


def test_an_empty_loss_mask_is_refused() -> None:
    batch = ragged(4)
    empty = Batch(batch.ids, batch.targets, torch.zeros_like(batch.loss_mask), lengths=batch.lengths)
    with pytest.raises(InputError, match="the loss mask of the batch is empty"):
        make(gh.build(gh.preset("tiny-decoder")))(empty)


def test_two_processes_train_as_one() -> None:
    """Each has half of the batch, and gradients are summed between backward and update, as sharding will do."""
    torch.manual_seed(0)
    single = gh.build(gh.preset("tiny-decoder", dropout=0.0), dtype=torch.float64)
    halves = [copy.deepcopy(single) for _ in range(2)]
    batch = ragged(5)
    total = int(batch.loss_mask.sum())
    whole = make(single, grad_clip=None)(batch)
    outcomes: list[StepMetrics] = []
    for model, part in zip(halves, batch.microbatches(2), strict=True):
        counts = int(part.loss_mask.sum())
        reduce = lambda number, counts=counts: number + (total - counts) if not number.is_floating_point() else number  # noqa: E731
        outcomes.append(make(model, lr=0.0, grad_clip=None, reduce=reduce)(part))
    assert sum(one.loss for one in outcomes) == pytest.approx(whole.loss, rel=1e-12)
    for one, a, b in zip(gradients(single), *map(gradients, halves), strict=True):
        assert (one - (a + b)).abs().max() <= 1e-12


def test_bfloat16_autocast_trains() -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", **SMALL))
    update = TrainStep(model, torch.optim.AdamW(model.parameters(), 3e-2), precision=torch.bfloat16)
    batch = ragged(6)
    losses = [update(batch).loss for _ in range(12)]
    assert losses[-1] < losses[0] - 1
    assert all(one.dtype == torch.float32 for one in model.parameters())


def test_float16_skips_a_step_that_overflows() -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", **SMALL))
    update = TrainStep(model, torch.optim.AdamW(model.parameters(), 3e-2), precision=torch.float16)
    update.load_state_dict({**update.state_dict(), "scale": 2.0**24})  # too large for float16
    before = copy.deepcopy(model.state_dict())
    outcome = update(ragged(6))
    assert outcome.loss < torch.inf
    assert not outcome.grad_norm < torch.inf
    assert all(weight.equal(before[name]) for name, weight in model.state_dict().items())
    assert update.state_dict()["scale"] == 2.0**23
    losses = [update(ragged(6)).loss for _ in range(9)]
    assert losses[-1] < losses[0] - 1


def test_float16_stops_when_the_scale_cannot_go_lower() -> None:
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0))
    update = TrainStep(model, torch.optim.AdamW(model.parameters(), 1e-2), precision=torch.float16)
    with torch.no_grad():
        kept = model.token_embedding.table.weight[3].clone()
        model.token_embedding.table.weight[3] = torch.nan
    batch = ragged(6)
    batch.ids[0, 0] = 3
    with pytest.raises(NonFiniteError):
        update(batch)
    with torch.no_grad():
        model.token_embedding.table.weight[3] = kept
    assert update(batch).loss < torch.inf  # the next step is unaffected
