"""The loss against cross-entropies computed position by position, for every kind of batch."""

from __future__ import annotations

import math

import pytest
import torch
from examples import first_of
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.objectives.metrics import MetricSums, evaluate_batch

LENGTHS = torch.tensor([5, 3])


def batches(**size: int) -> dict[str, tuple[nn.Module, Batch]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (2, 5))
    real = torch.arange(5) < LENGTHS[:, None]
    source = torch.randint(0, 256, (2, 4))
    labels = gh.preset("tiny-encoder", **size, head={"kind": "sequence_classification", "n_labels": 3})
    return {
        "next token": (
            gh.build(gh.preset("tiny-decoder", **size)),
            Batch(ids, ids.roll(-1, 1), ids % 2 == 0, documents=torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 1, 2]])),
        ),
        "masked token": (
            gh.build(gh.preset("tiny-encoder", **size)),
            Batch(ids, ids.flip(1), ids % 3 == 0, lengths=LENGTHS),
        ),
        "pairs": (
            gh.build(gh.preset("tiny-seq2seq", **size)),
            Batch(ids, ids.roll(1, 1), real, lengths=LENGTHS, source=source, source_lengths=torch.tensor([4, 2])),
        ),
        "labels": (
            gh.build(labels),
            Batch(ids, torch.tensor([2, 0]), torch.tensor([True, True]), lengths=LENGTHS),
        ),
    }


def by_hand(logits: Tensor, batch: Batch, smoothing: float) -> tuple[float, int, int]:
    loss, n_correct, n_targets = 0.0, 0, 0
    rows = logits.flatten(0, -2).tolist()
    for row, target, counts in zip(
        rows, batch.targets.flatten().tolist(), batch.loss_mask.flatten().tolist(), strict=True
    ):
        if not counts:
            continue
        total = math.log(sum(math.exp(value) for value in row))
        nats = [total - value for value in row]
        loss += (1 - smoothing) * nats[target] + smoothing * sum(nats) / len(nats)
        n_correct += row.index(max(row)) == target
        n_targets += 1
    return loss, n_correct, n_targets


@pytest.mark.few(4)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["next token", "masked token", "pairs", "labels"])
def test_every_kind_of_batch(kind: str, smoothing: float) -> None:
    model, batch = batches()[kind]
    model = model.eval().double()
    loss, n_correct, n_targets = by_hand(batch.forward(model), batch, smoothing)
    assert n_targets > 0
    assert float(compute_loss(model, batch, smoothing).detach()) == pytest.approx(loss, rel=1e-12)
    if not smoothing:
        counted = evaluate_batch(model, batch)
        assert (counted.n_correct, counted.n_targets) == (n_correct, n_targets)
        assert counted.loss == pytest.approx(loss, rel=1e-12)


def test_masked_positions_do_not_affect_the_loss() -> None:
    model, batch = batches()["next token"]
    other = Batch(
        batch.ids, torch.where(batch.loss_mask, batch.targets, 7), batch.loss_mask, documents=batch.documents
    )
    assert compute_loss(model.eval(), batch).equal(compute_loss(model, other))


def test_half_precision_is_summed_in_float32() -> None:
    model, batch = batches()["masked token"]
    assert compute_loss(model.bfloat16(), batch).dtype == torch.float32


def test_metric_sums_add_up() -> None:
    assert MetricSums(1.5, 1, 2) + MetricSums(0.5, 0, 3) == MetricSums(2.0, 1, 5)
    model, batch = batches()["pairs"]
    model = model.eval().double()
    whole, parts = evaluate_batch(model, batch), [evaluate_batch(model, part) for part in batch.microbatches(2)]
    assert sum(part.n_targets for part in parts) == whole.n_targets
    assert sum(part.loss for part in parts) == pytest.approx(whole.loss, rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_of(["next token", "masked token", "pairs"]))
def test_model_and_loss_compile_as_one_graph(kind: str) -> None:
    """A graph break or a host sync would be an error; loss and gradients are eager's."""
    torch.compiler.reset()
    model, batch = batches(n_layers=1)[kind]
    model.eval()  # without dropout
    loss_fn = torch.compile(compute_loss, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compute_loss, loss_fn):
        model.zero_grad()
        loss = run(model, batch, 0.1)
        loss.backward()
        results.append([loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)])
    assert len(results[0]) == 1 + sum(one.requires_grad for one in model.parameters())
    for eager, compiled in zip(*results, strict=True):  # float32, in another order: a few roundings of 6e-8
        assert (compiled - eager).abs().max() <= 1e-6 * max(1.0, float(eager.abs().max()))
    with torch._dynamo.config.patch(error_on_recompile=True):
        loss_fn(model, batch.to("cpu"), 0.1)  # another batch of the same shape
