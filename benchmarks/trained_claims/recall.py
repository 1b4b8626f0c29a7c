"""M7 and M8: a letter anywhere in the context, recalled at its end by attention and by an LSTM that is no smaller."""

from __future__ import annotations

import statistics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from glasshouse.data import Batch
from glasshouse.models import Model
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


def untrained_attention(seed: int, context: int) -> Model:
    """Return one attention layer: with one layer there is no second hop."""
    shape = SMALL | {"n_layers": 1, "max_len": context}
    return build(seed, kind="decoder", vocab_size=QUERY + 1, position="rotary", **shape)


def trained_attention(seed: int, steps: int, context: int) -> Model:
    """Return one attention layer that learned to recall."""
    model = untrained_attention(seed, context)
    train(model, recall(context, 32), steps, 3e-3, seed=seed)
    return model


def by_distance(seeds: int = 3, steps: int = 800, context: int = 128) -> Result:
    """Return the accuracy of attention and of an LSTM at every distance."""
    result = Result(along="distance of the letter")
    for one in (attention_recall(seeds, steps, context), lstm_recall(seeds, steps, context)):
        result.figures |= one.figures
        result.curves |= one.curves
    return result


def attention_recall(seeds: int, steps: int, context: int) -> Result:
    """Test every distance."""
    result, worst, each = Result(), [], []
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


class Lstm(nn.Module):
    """An LSTM with the embedding and the head of the attention model, and 1.4 times its parameters."""

    def __init__(self, seed: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(QUERY + 1, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.up = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, QUERY + 1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the last position."""
        x, _ = self.lstm(self.embedding(ids))
        return self.head(x[:, -1] + self.up(x[:, -1]))


def lstm_recall(seeds: int, steps: int, context: int) -> Result:
    """Train an LSTM as long on as many sequences, and test every fourth distance."""
    result, each = Result(), []
    n_attention = sum(one.numel() for one in untrained_attention(0, context).parameters())
    for seed in range(seeds):
        model, sample, rng = Lstm(seed), recall(context, 32), make_rng(seed)
        optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
        for _ in range(steps):
            batch = sample(rng)
            loss = F.cross_entropy(model(batch.ids), batch.targets[:, -1])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        accuracy = {}
        with torch.no_grad():
            for distance in range(1, context, max(1, context // 32)):
                batch = recall(context, 200, distance)(make_rng(10**6 + distance))
                accuracy[distance] = float((model(batch.ids).argmax(-1) == batch.targets[:, -1]).float().mean())
        each.append(accuracy)
        log(f"M8: seed {seed}, accuracy {statistics.mean(accuracy.values()):.3f}")
    near = [one for one in each[0] if one <= context // 4]
    far = [one for one in each[0] if one > context // 2]
    for name, distances in (("nearest quarter", near), ("farther half", far)):
        result.add(
            f"accuracy of the LSTM, {name}",
            [statistics.mean(accuracy[at] for at in distances) for accuracy in each],
        )
    n_lstm = sum(one.numel() for one in model.parameters())
    result.figures["parameters of the LSTM / of the attention model"] = n_lstm / n_attention
    result.curves["accuracy of the LSTM"] = mean_by_distance(each)
    return result


def mean_by_distance(each: list[dict[int, float]]) -> list[tuple[float, float]]:
    return [(float(at), statistics.mean(accuracy[at] for accuracy in each)) for at in each[0]]
