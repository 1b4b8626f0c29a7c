"""What the experiments share: a result, small models, their training, and the bytes of Python's standard library."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch, builtin_dataset
from glasshouse.models import Model
from glasshouse.objectives.metrics import MetricSums, evaluate_batch
from glasshouse.training.optimizer import AdamW, make_optimizer, set_lr
from glasshouse.training.schedule import Linear
from glasshouse.training.step import TrainStep

BatchSampler = Callable[[torch.Generator], Batch]  # a random batch
Curve = list[tuple[float, float]]
SMALL: dict[str, Any] = {"d_ff": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_len": 64}


@dataclass
class Result:
    """Figures by name, some of which a statement has thresholds for, and curves to draw."""

    figures: dict[str, float] = field(default_factory=dict)
    curves: dict[str, Curve] = field(default_factory=dict)
    along: str = ""  # what the curves are drawn along

    def add(self, name: str, values: list[float]) -> None:
        """Add the mean over seeds, and their standard deviation where there are several."""
        self.figures[name] = statistics.mean(values)
        if len(values) > 1:
            self.figures[f"{name}, standard deviation"] = statistics.stdev(values)

    def rounded(self) -> Result:
        """Return it with as many digits as are of interest."""
        curves = {name: [(x, round(y, 5)) for x, y in points] for name, points in self.curves.items()}
        return Result({name: round(value, 5) for name, value in self.figures.items()}, curves, self.along)


def in_standard_errors(differences: list[float]) -> float:
    """Return the mean of differences over its standard error; NaN where there are too few to tell."""
    spread = statistics.stdev(differences) if len(differences) > 1 else 0.0
    return statistics.mean(differences) / (spread / math.sqrt(len(differences))) if spread else math.nan


def log(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def make_rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(seed: int, **spec: object) -> Model:
    torch.manual_seed(seed)
    return gh.build(gh.spec.parse(spec))


def train(
    model: nn.Module,
    sample: BatchSampler,
    steps: int,
    lr: float,
    *,
    seed: int,
    warmup: int = 20,
    grad_clip: float | None = 1.0,
) -> None:
    """Train with Adam and a linear schedule with warm-up, down to 0."""
    # Adam as the original transformer used it, without weight decay.
    optimizer = make_optimizer(model, AdamW(lr=lr, beta2=0.98, weight_decay=0.0))
    train_step = TrainStep(model, optimizer, grad_clip=grad_clip)
    schedule, rng = Linear(warmup=warmup, final_factor=0.0), make_rng(seed)
    model.train()
    for step in range(steps):
        set_lr(optimizer, schedule.factor(step, steps))
        train_step(sample(rng))
    model.eval()


def evaluate(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    return sum((evaluate_batch(model, batch) for batch in batches), MetricSums()).metrics()


@cache
def library(split: str) -> Tensor:
    """Return the standard library as one array of bytes."""
    data = "\n".join(text for _, text in builtin_dataset("stdlib").items(split)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def sequences(ids: Tensor, rows: int, length: int) -> BatchSampler:
    """Sample sequences of a long array of ids with next-token targets."""

    def sample(rng: torch.Generator) -> Batch:
        starts = torch.randint(len(ids) - length, (rows, 1), generator=rng)
        drawn = ids[starts + torch.arange(length + 1)].long()
        return Batch(drawn[:, :-1], drawn[:, 1:], torch.ones(rows, length, dtype=torch.bool))

    return sample


def validation(length: int, count: int = 8) -> list[Batch]:
    """Return the same sequences of the validation split, 64 to a batch, for every model."""
    sample, rng = sequences(library("validation"), 64, length), make_rng(0)
    return [sample(rng) for _ in range(count)]
