"""Training steps by CUDA graphs: the same results, bit by bit, as steps whose kernels are launched one by one."""

from __future__ import annotations

import pytest
import torch

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.training.graphed_step import GraphedTrainStep
from glasshouse.training.optimizer import AdamW, Muon, Optimizer, make_optimizer
from glasshouse.training.step import EMA, NonFiniteError, StepMetrics, TrainStep

DROPOUT = {"dropout": 0.2, "embed_dropout": 0.1, "attention_dropout": 0.1}


def make(kind: type[TrainStep], preset: str, choice: Optimizer, precision: torch.dtype) -> TrainStep:
    torch.manual_seed(0)
    model = gh.build(gh.preset(preset, **DROPOUT), device="cuda").train()
    return kind(model, make_optimizer(model, choice), precision=precision, defer_logits=True, label_smoothing=0.1)


def draw(preset: str, count: int) -> list[Batch]:
    """Draw batches of three widths, padded where the model has a source."""
    source, drawn = torch.Generator().manual_seed(0), []
    for number in range(count):
        width = (9, 20, 30)[number % 3]
        ids, targets = torch.randint(1, 250, (2, 8, width), generator=source)
        if preset != "tiny-seq2seq":
            drawn.append(Batch(ids, targets, torch.rand(8, width, generator=source) < 0.9))
            continue
        lengths = torch.randint(1, width + 1, (8,), generator=source)
        mask = torch.arange(width) < lengths[:, None]
        drawn.append(Batch(ids, targets, mask, lengths=lengths, source=targets, source_lengths=lengths.flip(0)))
    return drawn


def train(step: TrainStep, batches: list[Batch], grad_accum: int) -> tuple[list[StepMetrics], list[torch.Tensor]]:
    metrics, ema = [], EMA(step.model, 0.9)
    torch.manual_seed(1)  # once: a graph must take as many random numbers as the step that it replaces
    for batch in batches:
        metrics.append(step(batch, grad_accum))
        ema.update()
    return metrics, [*step.model.parameters(), *ema.weights.values()]


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("choice", [AdamW(lr=3e-3), Muon()], ids=["adamw", "muon"])
@pytest.mark.parametrize(("preset", "grad_accum"), [("tiny-decoder", 1), ("tiny-decoder", 3), ("tiny-seq2seq", 2)])
def test_graphs_change_no_bit(preset: str, grad_accum: int, choice: Optimizer, precision: torch.dtype) -> None:
    plain, graphed = (make(kind, preset, choice, precision) for kind in (TrainStep, GraphedTrainStep))
    expected, weights = train(plain, draw(preset, 12), grad_accum)
    found, same = train(graphed, draw(preset, 12), grad_accum)
    assert isinstance(graphed, GraphedTrainStep)
    assert len(graphed._graphs) == 3
    assert found == expected
    assert all(a.equal(b) for a, b in zip(weights, same, strict=True))


def test_a_nonfinite_step_of_a_graph_updates_nothing() -> None:
    step = make(GraphedTrainStep, "tiny-decoder", AdamW(lr=3e-3), torch.bfloat16)
    good = draw("tiny-decoder", 1)[0]
    for _ in range(3):
        step(good)
    step.model.head.weight.data[0, 0] = torch.inf
    before = [weight.clone() for weight in step.model.parameters()]
    with pytest.raises(NonFiniteError):
        step(good)
    assert all(a.equal(b) for a, b in zip(before, step.model.parameters(), strict=True))
    step.model.head.weight.data[0, 0] = 0.0
    assert step(good).is_finite
