"""The claims of docs/claims.md that only training can show, on small models, within half an hour on one core.

    python benchmarks/claims.py [--parts p6 a13 b6 m7 l1]

Text is the Python standard library, byte by byte, or the language samples that come with the package. Every model
sees batches that its seed alone decides, so models of one seed are trained on the same.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse.data import Batch, builtin_dataset
from glasshouse.data.builtin import langid
from glasshouse.evaluation.eval_loop import MetricSums, evaluate_batch
from glasshouse.models import Encoder, Model, with_classifier
from glasshouse.training.optimizer import AdamW, make_optimizer, set_lr
from glasshouse.training.schedule import Linear
from glasshouse.training.step import NonFiniteError, TrainStep

Draw = Callable[[torch.Generator], Batch]  # a batch, by chance
SMALL: dict[str, Any] = {"d_ff": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_len": 64}


def show(name: str, **figures: object) -> None:
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in figures.items())}", flush=True)


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def mean_and_spread(values: list[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"


def dice(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def build(seed: int, **table: object) -> Model:
    torch.manual_seed(seed)
    return gh.build(gh.spec.parse(table))


def learn(
    model: nn.Module, draw: Draw, steps: int, lr: float, *, seed: int, warmup: int = 20, clip: float | None = 1.0
) -> None:
    """Train by Adam, at a rate that rises over `warmup` steps and falls to 0."""
    # Adam as the original transformer used it, without decay.
    optimizer = make_optimizer(model, AdamW(lr=lr, beta2=0.98, weight_decay=0.0))
    update, schedule, chance = (
        TrainStep(model, optimizer, grad_clip=clip),
        Linear(warmup=warmup, final_factor=0.0),
        dice(seed),
    )
    model.train()
    for step in range(steps):
        set_lr(optimizer, schedule.factor(step, steps))
        update(draw(chance))
    model.eval()


def ask(model: nn.Module, batches: Iterable[Batch]) -> dict[str, float]:
    return sum((evaluate_batch(model, batch) for batch in batches), MetricSums()).metrics()


# Text, byte by byte


@cache
def library(split: str) -> Tensor:
    """Return the standard library as one row of bytes."""
    data = "\n".join(text for _, text in builtin_dataset("stdlib").items(split)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def text_rows(split: str, rows: int, length: int) -> Draw:
    """Draw rows of text, each byte with the one after it as its target."""
    text = library(split)

    def draw(chance: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - length, (rows, 1), generator=chance)
        ids = text[starts + torch.arange(length + 1)].long()
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, length, dtype=torch.bool))

    return draw


@cache
def validation(length: int) -> list[Batch]:
    """Return the same 512 rows of the validation split for every model."""
    draw, chance = text_rows("validation", 64, length), dice(0)
    return [draw(chance) for _ in range(8)]


# P6


def p6() -> None:
    """Measure how long the position part is beside the token part, before and after training."""
    width, steps = 128, 300
    found: dict[str, list[float]] = {"at_the_start": [], "trained": [], "loss": []}
    for seed in range(3):
        model = build(
            seed,
            kind="decoder",
            vocab_size=256,
            position="sinusoidal",
            embed_scale=True,
            init="xavier",
            **(SMALL | {"d_model": width}),
        )
        found["at_the_start"].append(position_share(model))
        learn(model, text_rows("train", 32, 64), steps, 1e-3, seed=seed)
        found["trained"].append(position_share(model))
        found["loss"].append(ask(model, validation(64))["loss"])
        say(f"p6: seed {seed}, { ({name: round(each[-1], 3) for name, each in found.items()}) }")
    show("p6", width=width, **{name: mean_and_spread(each) for name, each in found.items()})


@torch.no_grad()
def position_share(model: Model) -> float:
    """Return |position| over |token vector|, the mean over held-out text; the sum is as wide as either."""
    (batch, *_) = validation(64)
    tokens = model.token_embedding(batch.ids)
    places = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    both = model.stack.position.embed(tokens, places)
    assert both.shape == tokens.shape
    return float(((both - tokens).norm(dim=-1) / tokens.norm(dim=-1)).mean())


# A13


def a13() -> None:
    """Compare one group of key-value heads, several and all after the same training."""
    heads, steps = 8, 300
    for groups in (1, 2, 8):
        losses = []
        for seed in range(3):
            model = build(
                seed,
                kind="decoder",
                vocab_size=256,
                position="rotary",
                n_kv_heads=groups,
                **(SMALL | {"n_heads": heads}),
            )
            learn(model, text_rows("train", 16, 64), steps, 3e-3, seed=seed)
            losses.append(ask(model, validation(64))["loss"])
            say(f"a13: {groups} of {heads}, seed {seed}, loss {losses[-1]:.4f}")
        weights = sum(weight.numel() for weight in model.parameters())
        show("a13", kv_heads=f"{groups} of {heads}", loss=mean_and_spread(losses), parameters=f"{weights:,}")


# B6


STATES, DEEP_LENGTH = 32, 16


def b6() -> None:
    """Train twelve layers on a Markov chain at several rates, with warm-up and without, norms before and after."""
    steps = 280
    moves, shares = chain()
    unigram = float(-(shares * shares.log()).sum())
    floor = float(-(shares[:, None] * moves * moves.log()).sum())  # what knowing the last state leaves open
    stalled = unigram - (unigram - floor) / 10
    show("b6", unigram_entropy=f"{unigram:.3f}", entropy_of_the_chain=f"{floor:.3f}", stalled_above=f"{stalled:.3f}")
    for order in ("before", "after"):
        for warmup in (0, steps // 4):
            for lr in (3e-4, 1e-3, 3e-3):
                losses = [deep_loss(order, warmup, lr, steps, seed) for seed in range(3)]
                count = sum(not loss < stalled for loss in losses)  # what is no number counts, too
                each = " ".join(f"{loss:.2f}" for loss in losses)
                show("b6", norm=order, warmup=warmup, lr=lr, losses=each, stalled=f"{count} of 3")


@cache
def chain() -> tuple[Tensor, Tensor]:
    """Return a chain's chances to go from each state to each, and how often it is in each in the long run."""
    moves = (3 * torch.randn(STATES, STATES, generator=dice(0))).softmax(-1)
    return moves, torch.linalg.matrix_power(moves.double(), 1000)[0].float()


def walks(rows: int) -> Draw:
    """Draw walks along the chain, each state with the one after it as its target."""
    moves, shares = chain()

    def draw(chance: torch.Generator) -> Batch:
        states = [torch.multinomial(shares, rows, replacement=True, generator=chance)]
        for _ in range(DEEP_LENGTH):
            states.append(torch.multinomial(moves[states[-1]], 1, generator=chance)[:, 0])
        ids = torch.stack(states, 1)
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, DEEP_LENGTH, dtype=torch.bool))

    return draw


def deep_loss(order: str, warmup: int, lr: float, steps: int, seed: int) -> float:
    """Return the loss of twelve layers on new walks, after training; not a number where that broke off."""
    shape = SMALL | {"n_layers": 12, "d_model": 32, "d_ff": 128, "max_len": DEEP_LENGTH}
    parts = {"norm_placement": order, "final_norm": order == "before", "init": "xavier"}
    model = build(seed, kind="decoder", vocab_size=STATES, **parts, **shape)
    try:
        learn(model, walks(16), steps, lr, seed=seed, warmup=warmup, clip=None)
        loss = ask(model, [walks(512)(dice(10**6))])["loss"]
    except NonFiniteError:
        loss = math.nan
    say(f"b6: {order}, warm-up {warmup}, rate {lr}, seed {seed}: {loss:.3f}")
    return loss


# M7


LETTERS = 26  # small, then as many capitals, then the query
QUERY = 2 * LETTERS


def m7() -> None:
    """Train one layer on recall, and ask for a letter at every distance: with one layer there is no second step."""
    steps, context = 800, 128
    for seed in range(3):
        shape = SMALL | {"n_layers": 1, "max_len": context}
        model = build(seed, kind="decoder", vocab_size=QUERY + 1, position="rotary", **shape)
        learn(model, recall(context, 32), steps, 3e-3, seed=seed)
        right = {}
        for distance in range(1, context):
            draw, chance = recall(context, 200, distance), dice(10**6 + distance)
            right[distance] = ask(model, [draw(chance)])["accuracy"]
        worst = min(right, key=right.__getitem__)
        buckets = {
            f"{low}-{high}": f"{statistics.mean(right[at] for at in range(low, high + 1)):.4f}"
            for low, high in ((1, 31), (32, 63), (64, 95), (96, 127))
        }
        show("m7", seed=seed, **buckets, worst=f"{right[worst]:.4f} at distance {worst}")


def recall(context: int, rows: int, distance: int | None = None) -> Draw:
    """Draw rows of small letters; one is a capital, and the query at the end, so far after it, asks which."""

    def draw(chance: torch.Generator) -> Batch:
        ids = torch.randint(LETTERS, (rows, context), generator=chance)
        row, apart = torch.arange(rows), torch.full((rows,), distance or 0)
        if distance is None:
            apart = torch.randint(1, context, (rows,), generator=chance)
        place = context - 1 - apart
        targets, loss = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        targets[:, -1], loss[:, -1] = ids[row, place], True
        ids[row, place] += LETTERS
        ids[:, -1] = QUERY
        return Batch(ids, targets, loss)

    return draw


# L1


LATIN = langid.LANGUAGES[:20]
LONGEST, VOCABULARY, UNLABELLED = 48, 512, 10_000


def l1() -> None:
    """Pretrain on texts without their labels, and fine-tune; beside it, train on the labels alone."""
    items = latin("train", UNLABELLED + 5 * 1000)
    unlabelled = [text for text, _ in items[:UNLABELLED]]
    tok = gh.Tokenizer.train(texts=unlabelled, vocab_size=VOCABULARY)
    test = labelled(tok, latin("test", 1000))

    parts = {"position": "rotary", "embed_scale": True, "init": "xavier", "head": "masked_token"}
    fresh, encoder = (build(seed, kind="encoder", vocab_size=len(tok), **parts, **SMALL) for seed in (0, 1))
    hidden = masked(*encoded(tok, unlabelled), tok.special_id("mask"), 32)
    learn(encoder, hidden, 7000, 3e-3, seed=0, warmup=100)
    say(f"l1: pretrained to a loss of {ask(encoder, [hidden(dice(10**6))])['loss']:.3f}")

    for count in (100, 1000):
        sides = {"pretrained_1e-3": (encoder, 1e-3), "pretrained_3e-3": (encoder, 3e-3)}
        sides |= {"alone_3e-3": (fresh, 3e-3), "alone_1e-2": (fresh, 1e-2)}
        found: dict[str, list[float]] = {name: [] for name in sides}
        for seed in range(5):
            first = UNLABELLED + seed * count  # none of them was pretrained on
            examples = labelled(tok, items[first : first + count])
            for name, (base, lr) in sides.items():
                found[name].append(fine_tuned(base, examples, test, lr, seed))
            say(f"l1: {count} labels, seed {seed}, { ({name: each[-1] for name, each in found.items()}) }")
        show("l1", labels=count, **{name: mean_and_spread(each) for name, each in found.items()})


def latin(split: str, count: int) -> list[tuple[str, str]]:
    """Return samples of the languages in Latin letters; of others, the script alone gives many away."""
    drawn = (langid.item(split, number) for number in itertools.count())
    return list(itertools.islice((item for item in drawn if item[1] in LATIN), count))


def encoded(tok: gh.Tokenizer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return ids [N, LONGEST], padded or cut, and how many of each row are real."""
    rows = [row[:LONGEST] for row in tok.encode_batch(texts)]
    ids = torch.zeros(len(rows), LONGEST, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) for row in rows])


def masked(ids: Tensor, lengths: Tensor, mask: int, rows: int) -> Draw:
    """Draw texts of which two tokens in five are hidden and asked for."""

    def draw(chance: torch.Generator) -> Batch:
        chosen = torch.randint(len(ids), (rows,), generator=chance)
        longest = int(lengths[chosen].max())
        real = torch.arange(longest) < lengths[chosen, None]
        hidden = (torch.rand(rows, longest, generator=chance) < 0.4) & real
        targets = ids[chosen, :longest]
        return Batch(targets.masked_fill(hidden, mask), targets, hidden, lengths=lengths[chosen])

    return draw


def labelled(tok: gh.Tokenizer, items: list[tuple[str, str]]) -> Batch:
    """Return all the items as one batch."""
    ids, lengths = encoded(tok, [text for text, _ in items])
    targets = torch.tensor([LATIN.index(label) for _, label in items])
    return Batch(ids, targets, torch.ones(len(items), dtype=torch.bool), lengths=lengths)


def fine_tuned(base: Encoder, examples: Batch, test: Batch, lr: float, seed: int) -> float:
    """Teach a copy of an encoder the labels of a few examples, and return how often it is right on the test set."""
    torch.manual_seed(seed)
    # Labels are read off the mean of all vectors, since no token that begins a text was pretrained to stand for it.
    pooled = gh.build(replace(base.spec, head=gh.spec.Pooled("mean")))
    pooled.load_state_dict({name: one for name, one in base.state_dict().items() if not name.startswith("head.")})
    model = with_classifier(pooled, len(LATIN))

    def draw(chance: torch.Generator) -> Batch:
        chosen = torch.randint(len(examples), (32,), generator=chance)
        ids, targets, lengths = (one[chosen] for one in (examples.ids, examples.targets, examples.lengths))
        return Batch(ids, targets, torch.ones_like(targets, dtype=torch.bool), lengths=lengths)

    learn(model, draw, 150, lr, seed=seed)
    return ask(model, test.microbatches(10))["accuracy"]


PARTS: dict[str, Callable[[], None]] = {"p6": p6, "a13": a13, "b6": b6, "m7": m7, "l1": l1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    choice = parser.parse_args()
    torch.set_num_threads(1)  # models as small as these gain nothing from more
    print(f"torch {torch.__version__}")
    for part in choice.parts:
        begun = time.perf_counter()
        PARTS[part]()
        say(f"{part} took {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
