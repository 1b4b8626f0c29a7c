"""P4, texts longer than those of training; P6, how large positions are beside tokens; P9, naive positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.models import Model
from trained_claims.experiment import (
    SMALL,
    Result,
    build,
    evaluate,
    library,
    log,
    make_rng,
    sequences,
    train,
    validation,
)

LETTERS = 26


def position_norms(seeds: int = 3, steps: int = 300, width: int = 128, embed_scale: bool = True) -> Result:
    """Measure the norm of the position embedding relative to the token embedding, before and after training."""
    at_first, trained, losses = [], [], []
    for seed in range(seeds):
        choices = {"position": "sinusoidal", "embed_scale": embed_scale, "init": "xavier"}
        model = build(seed, kind="decoder", vocab_size=256, **choices, **(SMALL | {"d_model": width}))
        at_first.append(norm_ratio(model))
        train(model, sequences(library("train"), 32, 64), steps, 1e-3, seed=seed)
        trained.append(norm_ratio(model))
        losses.append(evaluate(model, validation(64))["loss"])
        log(f"P6: seed {seed}, {at_first[-1]:.3f} at initialisation, {trained[-1]:.3f} trained")
    result = Result()
    result.add("|position| / |token| at initialisation", at_first)
    result.add("|position| / |token| trained", trained)
    result.add("loss, nats per byte", losses)
    return result


@torch.no_grad()
def norm_ratio(model: Model) -> float:
    """Return |position embedding| / |token embedding|, the mean over validation text."""
    (batch,) = validation(64, 1)
    tokens = model.token_embedding(batch.ids)
    positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    both = model.stack.position.embed(tokens, positions)
    return float(((both - tokens).norm(dim=-1) / tokens.norm(dim=-1)).mean())


# Codes of the positions of a sequence, [S, D]


def sinusoids(length: int, width: int) -> Tensor:
    return gh.layers.position.SinusoidalPosition(width, interleaved=True).encodings(torch.arange(length)).float()


def constant(length: int, width: int) -> Tensor:
    return torch.arange(length).float()[:, None].expand(length, width)


def share(length: int, width: int) -> Tensor:
    return constant(length, width) / length


CODES: dict[str, Callable[[int, int], Tensor]] = {"sinusoids": sinusoids, "t": constant, "t / length": share}


class Reader(nn.Module):
    """An encoder without positions of its own: a code is added to its embeddings."""

    def __init__(self, code: Callable[[int, int], Tensor], seed: int, width: int = 64) -> None:
        super().__init__()
        self.code, self.width = code, width
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(LETTERS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, LETTERS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.code(ids.shape[1], self.width)
        return self.head(self.encoder(x))


def naive_positions(seeds: int = 3, steps: int = 400, length: int = 16) -> Result:
    """Train to tell the letter before each one, and read texts of twice the length.

    Attention is not causal, so that the code alone tells which letter is before which.
    """
    result = Result()
    for name, code in CODES.items():
        at_length, at_twice = [], []
        for seed in range(seeds):
            model, rng = Reader(code, seed), make_rng(seed)
            optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
            for _ in range(steps):
                ids = torch.randint(LETTERS, (32, length), generator=rng)
                loss = F.cross_entropy(model(ids)[:, 1:].flatten(0, 1), ids[:, :-1].flatten())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            for found, tried in ((at_length, length), (at_twice, 2 * length)):
                ids = torch.randint(LETTERS, (256, tried), generator=make_rng(10**6))
                with torch.no_grad():
                    found.append(float((model(ids)[:, 1:].argmax(-1) == ids[:, :-1]).float().mean()))
            log(f"P9: {name}, seed {seed}, accuracy {at_length[-1]:.3f}, at twice the length {at_twice[-1]:.3f}")
        result.add(f"{name}: accuracy at the trained length", at_length)
        result.add(f"{name}: accuracy at twice the length", at_twice)
    sinusoidal = result.figures["sinusoids: accuracy at twice the length"]
    for name in ("t", "t / length"):
        result.figures[f"the sinusoids' accuracy at twice the length - that of {name}"] = (
            sinusoidal - result.figures[f"{name}: accuracy at twice the length"]
        )
    return result


# Trained at one length and read at others


KINDS = ("sinusoidal", "rotary", "alibi", "learned")


def longer_texts(seeds: int = 2, steps: int = 400, length: int = 64) -> Result:
    """Train on texts of one length, and read the last tokens of texts of 1.5 times and twice that length.

    The same tokens are read as the second half of a text of the trained length, too: they have less context there,
    so that a model which generalises does no worse in the longer text.
    """
    result = Result(along="position in a text of twice the length")
    ids = torch.cat([batch.ids for batch in validation(2 * length)])
    half = length // 2
    for kind in KINDS:
        at_length, by_position = [], []
        excess: dict[float, list[float]] = {1.5: [], 2.0: []}
        for seed in range(seeds):
            choices = {"position": kind, "embed_scale": kind == "sinusoidal", "init": "xavier"}
            model = build(seed, kind="decoder", vocab_size=256, **choices, **(SMALL | {"max_len": length}))
            train(model, sequences(library("train"), 16, length), steps, 3e-3, seed=seed)
            at_length.append(float(losses(model, ids[:, :length])[-half:].mean()))
            try:
                for times, each in excess.items():
                    text = ids[:, : round(times * length)]
                    longer, trained = (losses(model, one)[-half:].mean() for one in (text, text[:, -length:]))
                    each.append(float(longer - trained))
                by_position.append(losses(model, ids))
            except InputError:  # learned positions end
                by_position.append(losses(model, ids[:, :length]))
            log(f"P4: {kind}, seed {seed}: {at_length[-1]:.3f} at the length, {excess} more")
        result.add(f"{kind}: loss at the trained length", at_length)
        for times, each in excess.items():
            if each:
                result.add(f"{kind}: loss at {times:g} times the length - at the length", each)
        points = torch.stack(by_position).mean(0).split(half // 2)
        result.curves[kind] = [(float(number * (half // 2)), float(one.mean())) for number, one in enumerate(points)]
        n_read = sum(len(one) for one in points) + 1
        result.figures[f"{kind}: tokens that it takes / trained length"] = round(n_read / length)
    result.figures["largest loss at the trained length"] = max(
        result.figures[f"{kind}: loss at the trained length"] for kind in KINDS
    )
    return result


@torch.no_grad()
def losses(model: Model, ids: Tensor) -> Tensor:
    """Return the mean loss of each token after the first [S - 1]."""
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(0)
