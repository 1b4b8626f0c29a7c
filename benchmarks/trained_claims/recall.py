"""M7 and M8: a letter anywhere in the context, recalled at its end by attention and by recurrent models."""

from __future__ import annotations

import itertools
import statistics

import torch
from torch import Tensor, nn

from glasshouse.data import Batch
from glasshouse.models import Model
from glasshouse.training.optimizer import AdamW, make_optimizer
from glasshouse.training.step import TrainStep
from trained_claims.experiment import SMALL, BatchSampler, Result, build, evaluate, log, make_rng, train

LETTERS = 26  # lower case, then as many upper case, then the query
QUERY = 2 * LETTERS


def recall(context: int, rows: int, distance: int | None = None) -> BatchSampler:
    """Sample lower-case letters and one upper-case letter, which the query at the end, `distance` later, asks for."""

    def sample(rng: torch.Generator) -> Batch:
        ids = torch.randint(LETTERS, (rows, context), generator=rng)
        row, distances = torch.arange(rows), torch.full((rows,), distance or 0)
        if distance is None:
            distances = torch.randint(1, context, (rows,), generator=rng)
        position = context - 1 - distances
        targets, loss_mask = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        targets[:, -1], loss_mask[:, -1] = ids[row, position], True
        ids[row, position] += LETTERS
        ids[:, -1] = QUERY
        return Batch(ids, targets, loss_mask)

    return sample


def one_layer(seed: int, context: int, position: str = "rotary", d_model: int = SMALL["d_model"]) -> Model:
    """Return one attention layer: with one layer there is no second hop."""
    shape = SMALL | {"n_layers": 1, "max_len": context, "d_model": d_model, "d_ff": 4 * d_model}
    return build(seed, kind="decoder", vocab_size=QUERY + 1, position=position, **shape)


def trained_attention(seed: int, steps: int, context: int) -> Model:
    """Return one attention layer that learned to recall."""
    model = one_layer(seed, context)
    train(model, recall(context, 32), steps, 3e-3, seed=seed)
    return model


def attention_recall(seeds: int = 3, steps: int = 800, context: int = 128) -> Result:
    """Train on all distances of a context, and test every one."""
    result, worst, each = Result(along="distance of the letter"), [], []
    for seed in range(seeds):
        model = trained_attention(seed, steps, context)
        accuracy = {}
        for distance in range(1, context):
            sample, rng = recall(context, 200, distance), make_rng(10**6 + distance)
            accuracy[distance] = evaluate(model, [sample(rng)])["accuracy"]
        worst.append(min(accuracy.values()))
        each.append(accuracy)
        log(f"M7: seed {seed}, worst accuracy {worst[-1]:.4f}")
    result.figures["accuracy at the worst distance of any seed"] = min(worst)
    result.curves["accuracy of attention"] = mean_by_distance(each)
    return result


class Recurrent(nn.Module):
    """A recurrent layer between an embedding and a head."""

    def __init__(self, kind: type[nn.RNNBase], state: int, seed: int, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(QUERY + 1, width)
        self.layer = kind(width, state, batch_first=True)
        self.head = nn.Linear(state, QUERY + 1)

    def forward(self, ids: Tensor, **_: None) -> Tensor:
        """Return logits [B, S, V]."""
        return self.head(self.layer(self.embedding(ids))[0])


# Widths of the state by kind: those of a row have parameters within a tenth of each other, an LSTM's cell included.
RECURRENT: dict[str, tuple[type[nn.RNNBase], tuple[int, ...]]] = {
    "RNN": (nn.RNN, (32, 64, 128)),
    "GRU": (nn.GRU, (18, 37, 74)),
    "LSTM": (nn.LSTM, (16, 32, 64)),
}
SHORT, LONG = 8, 128
DISTANCES = (*range(1, SHORT), *(10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, LONG - 1))


def recurrent_recall(seeds: int = 2, steps: int = 3000, more: int = 200, sizes: int = 3) -> Result:
    """Train on short texts until they are right, and ask for letters that are farther away than any in training.

    One size of each is then trained for `more` steps on long texts.
    """
    result = Result(along="distance of the letter")
    short, farthest = [], {}
    for kind, (layer, widths) in RECURRENT.items():
        found = []
        for width in widths[:sizes]:
            each, trained_far = [], []
            for seed in range(seeds):
                model = Recurrent(layer, width, seed)
                short.append(train_until_right(model, steps, seed))
                each.append({at: accuracy(model, at) for at in DISTANCES})
                log(f"M8: {kind}, state of {width}, seed {seed}: right up to {right_up_to(each[-1])}")
                if width == widths[min(1, sizes - 1)]:
                    train(model, recall(LONG, 32), min(steps, more), 1e-3, seed=seed)
                    trained_far.append(right_up_to({at: accuracy(model, at) for at in DISTANCES}))
                    log(f"M8: {kind}, state of {width}, seed {seed}: {trained_far[-1]} after long texts, too")
            found += [right_up_to(one) for one in each]
            result.add(f"{kind}, state of {width}: right up to distance", [*map(right_up_to, each)])
            result.curves[f"{kind}, state of {width}"] = mean_by_distance(each)
            if trained_far:
                result.add(f"{kind}, state of {width}, trained on long texts, too: right up to distance", trained_far)
        farthest[kind] = statistics.mean(found)
        result.figures[f"{kind}: right up to distance, mean of all"] = farthest[kind]
    each = []
    for seed in range(seeds):
        model = one_layer(seed, LONG, "none", 32)
        short.append(train_until_right(model, steps, seed))
        each.append({at: accuracy(model, at) for at in DISTANCES})
        log(f"M8: attention, seed {seed}: right up to {right_up_to(each[-1])}")
    result.curves["attention"] = mean_by_distance(each)
    result.figures["attention: accuracy at the worst distance of any seed"] = min(min(one.values()) for one in each)
    result.figures["accuracy in short texts, the least of all models"] = min(short)
    for kind in ("GRU", "LSTM"):
        ratio = farthest[kind] / farthest["RNN"] if farthest["RNN"] else float("nan")
        result.figures[f"distance of the {kind} / of the RNN"] = ratio
    return result


def train_until_right(model: nn.Module, steps: int, seed: int) -> float:
    """Train on short texts until 99 answers in 100 are right, at most so many steps; return the accuracy."""
    train_step = TrainStep(model, make_optimizer(model, AdamW(lr=2e-3, weight_decay=0.0)), grad_clip=1.0)
    sample, rng = recall(SHORT, 32), make_rng(seed)
    test = recall(SHORT, 1000)(make_rng(10**6))
    for step in range(steps):
        train_step(sample(rng))
        if step % 100 == 99 and evaluate(model, [test])["accuracy"] >= 0.99:
            break
    return evaluate(model, [test])["accuracy"]


def accuracy(model: nn.Module, distance: int) -> float:
    """Return the accuracy where the letter is so far away, and at the beginning where that is beyond a short text."""
    batch = recall(max(distance + 1, SHORT), 200, distance)(make_rng(10**6 + distance))
    return evaluate(model, [batch])["accuracy"]


def right_up_to(found: dict[int, float]) -> int:
    """Return the distance up to which nine answers in ten are right; 0 if it is none."""
    right = itertools.takewhile(lambda one: one[1] >= 0.9, found.items())
    return max((at for at, _ in right), default=0)


def mean_by_distance(each: list[dict[int, float]]) -> list[tuple[float, float]]:
    return [(float(at), statistics.mean(accuracy[at] for accuracy in each)) for at in each[0]]
