"""The claims of docs/claims.md that need training, on small models, within half an hour on one core.

    python benchmarks/claims.py [--parts p6 a13 b6 m7 l1]

Text is the Python standard library, byte level, or the built-in langid dataset. Batches depend on the seed alone, so
models of one seed are trained on the same batches.
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
from glasshouse.models import Encoder, Model, with_classifier
from glasshouse.objectives.metric_sums import MetricSums, evaluate_batch
from glasshouse.training.optimizer import AdamW, make_optimizer, set_lr
from glasshouse.training.schedule import Linear
from glasshouse.training.step import NonFiniteError, TrainStep

BatchSampler = Callable[[torch.Generator], Batch]  # a random batch
SMALL: dict[str, Any] = {"d_ff": 256, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_len": 64}


def show(name: str, **metrics: object) -> None:
    print(f"{name}: {', '.join(f'{key} {value}' for key, value in metrics.items())}", flush=True)


def log(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


def mean_and_std(values: list[float], digits: int = 3) -> str:
    return f"{statistics.mean(values):.{digits}f} +- {statistics.stdev(values):.{digits}f}"


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


# Byte-level text


@cache
def library(split: str) -> Tensor:
    """Return the standard library as one array of bytes."""
    data = "\n".join(text for _, text in builtin_dataset("stdlib").items(split)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def text_batches(split: str, rows: int, length: int) -> BatchSampler:
    """Sample sequences of bytes with next-byte targets."""
    text = library(split)

    def sample(rng: torch.Generator) -> Batch:
        starts = torch.randint(len(text) - length, (rows, 1), generator=rng)
        ids = text[starts + torch.arange(length + 1)].long()
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, length, dtype=torch.bool))

    return sample


@cache
def validation(length: int) -> list[Batch]:
    """Return the same 512 sequences of the validation split for every model."""
    sample, rng = text_batches("validation", 64, length), make_rng(0)
    return [sample(rng) for _ in range(8)]


# P6


def p6() -> None:
    """Measure the norm of the position embedding relative to the token embedding, before and after training."""
    width, steps = 128, 300
    found: dict[str, list[float]] = {"at_initialisation": [], "trained": [], "loss": []}
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
        found["at_initialisation"].append(position_norm_ratio(model))
        train(model, text_batches("train", 32, 64), steps, 1e-3, seed=seed)
        found["trained"].append(position_norm_ratio(model))
        found["loss"].append(evaluate(model, validation(64))["loss"])
        log(f"p6: seed {seed}, { ({name: round(each[-1], 3) for name, each in found.items()}) }")
    show("p6", width=width, **{name: mean_and_std(each) for name, each in found.items()})


@torch.no_grad()
def position_norm_ratio(model: Model) -> float:
    """Return |position embedding| / |token embedding|, the mean over validation text."""
    (batch, *_) = validation(64)
    tokens = model.token_embedding(batch.ids)
    positions = torch.arange(batch.ids.shape[1]).expand_as(batch.ids)
    both = model.stack.position.embed(tokens, positions)
    assert both.shape == tokens.shape
    return float(((both - tokens).norm(dim=-1) / tokens.norm(dim=-1)).mean())


# A13


def a13() -> None:
    """Compare multi-query, grouped-query and multi-head attention after the same training."""
    heads, steps = 8, 300
    for n_kv_heads in (1, 2, 8):
        losses = []
        for seed in range(3):
            model = build(
                seed,
                kind="decoder",
                vocab_size=256,
                position="rotary",
                n_kv_heads=n_kv_heads,
                **(SMALL | {"n_heads": heads}),
            )
            train(model, text_batches("train", 16, 64), steps, 3e-3, seed=seed)
            losses.append(evaluate(model, validation(64))["loss"])
            log(f"a13: {n_kv_heads} of {heads}, seed {seed}, loss {losses[-1]:.4f}")
        weights = sum(weight.numel() for weight in model.parameters())
        show("a13", n_kv_heads=f"{n_kv_heads} of {heads}", loss=mean_and_std(losses), parameters=f"{weights:,}")


# B6


STATES, DEEP_LENGTH = 32, 16


def b6() -> None:
    """Train 12 layers on a Markov chain: pre-norm and post-norm, several learning rates, with and without warm-up."""
    steps = 280
    transitions, stationary = markov_chain()
    unigram = float(-(stationary * stationary.log()).sum())
    floor = float(-(stationary[:, None] * transitions * transitions.log()).sum())  # the chain's entropy rate
    stalled = unigram - (unigram - floor) / 10
    show("b6", unigram_entropy=f"{unigram:.3f}", entropy_rate=f"{floor:.3f}", stalled_above=f"{stalled:.3f}")
    for placement in ("pre", "post"):
        for warmup in (0, steps // 4):
            for lr in (3e-4, 1e-3, 3e-3):
                losses = [deep_loss(placement, warmup, lr, steps, seed) for seed in range(3)]
                count = sum(not loss < stalled for loss in losses)  # NaN counts, too
                each = " ".join(f"{loss:.2f}" for loss in losses)
                show("b6", norm_placement=placement, warmup=warmup, lr=lr, losses=each, stalled=f"{count} of 3")


@cache
def markov_chain() -> tuple[Tensor, Tensor]:
    """Return a Markov chain's transition matrix and its stationary distribution."""
    transitions = (3 * torch.randn(STATES, STATES, generator=make_rng(0))).softmax(-1)
    return transitions, torch.linalg.matrix_power(transitions.double(), 1000)[0].float()


def markov_batches(rows: int) -> BatchSampler:
    """Sample sequences of states with next-state targets."""
    transitions, stationary = markov_chain()

    def sample(rng: torch.Generator) -> Batch:
        states = [torch.multinomial(stationary, rows, replacement=True, generator=rng)]
        for _ in range(DEEP_LENGTH):
            states.append(torch.multinomial(transitions[states[-1]], 1, generator=rng)[:, 0])
        ids = torch.stack(states, 1)
        return Batch(ids[:, :-1], ids[:, 1:], torch.ones(rows, DEEP_LENGTH, dtype=torch.bool))

    return sample


def deep_loss(placement: str, warmup: int, lr: float, steps: int, seed: int) -> float:
    """Return the loss of 12 layers on new sequences after training; NaN where training failed."""
    shape = SMALL | {"n_layers": 12, "d_model": 32, "d_ff": 128, "max_len": DEEP_LENGTH}
    choices = {"norm_placement": placement, "final_norm": placement == "pre", "init": "xavier"}
    model = build(seed, kind="decoder", vocab_size=STATES, **choices, **shape)
    try:
        train(model, markov_batches(16), steps, lr, seed=seed, warmup=warmup, grad_clip=None)
        loss = evaluate(model, [markov_batches(512)(make_rng(10**6))])["loss"]
    except NonFiniteError:
        loss = math.nan
    log(f"b6: {placement}-norm, warm-up {warmup}, lr {lr}, seed {seed}: {loss:.3f}")
    return loss


# M7


LETTERS = 26  # lower case, then as many upper case, then the query
QUERY = 2 * LETTERS


def m7() -> None:
    """Train one layer on recall, and test every distance: with one layer there is no second hop."""
    steps, context = 800, 128
    for seed in range(3):
        shape = SMALL | {"n_layers": 1, "max_len": context}
        model = build(seed, kind="decoder", vocab_size=QUERY + 1, position="rotary", **shape)
        train(model, recall(context, 32), steps, 3e-3, seed=seed)
        accuracy = {}
        for distance in range(1, context):
            sample, rng = recall(context, 200, distance), make_rng(10**6 + distance)
            accuracy[distance] = evaluate(model, [sample(rng)])["accuracy"]
        worst = min(accuracy, key=accuracy.__getitem__)
        buckets = {
            f"{low}-{high}": f"{statistics.mean(accuracy[at] for at in range(low, high + 1)):.4f}"
            for low, high in ((1, 31), (32, 63), (64, 95), (96, 127))
        }
        show("m7", seed=seed, **buckets, worst=f"{accuracy[worst]:.4f} at distance {worst}")


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


# L1


LATIN = langid.LANGUAGES[:20]
MAX_LEN, VOCAB_SIZE, UNLABELLED = 48, 512, 10_000


def l1() -> None:
    """Pretrain on unlabelled texts and fine-tune, compared with training from scratch on the labels alone."""
    items = latin_items("train", UNLABELLED + 5 * 1000)
    unlabelled = [text for text, _ in items[:UNLABELLED]]
    tok = gh.Tokenizer.train(texts=unlabelled, vocab_size=VOCAB_SIZE)
    test = labelled_batch(tok, latin_items("test", 1000))

    choices = {"position": "rotary", "embed_scale": True, "init": "xavier", "head": "masked_token"}
    scratch, encoder = (build(seed, kind="encoder", vocab_size=len(tok), **choices, **SMALL) for seed in (0, 1))
    masked = masked_batches(*encode_padded(tok, unlabelled), tok.special_id("mask"), 32)
    train(encoder, masked, 7000, 3e-3, seed=0, warmup=100)
    log(f"l1: pretrained to a loss of {evaluate(encoder, [masked(make_rng(10**6))])['loss']:.3f}")

    for count in (100, 1000):
        variants = {"pretrained_1e-3": (encoder, 1e-3), "pretrained_3e-3": (encoder, 3e-3)}
        variants |= {"scratch_3e-3": (scratch, 3e-3), "scratch_1e-2": (scratch, 1e-2)}
        found: dict[str, list[float]] = {name: [] for name in variants}
        for seed in range(5):
            first = UNLABELLED + seed * count  # none of these was used in pretraining
            examples = labelled_batch(tok, items[first : first + count])
            for name, (base, lr) in variants.items():
                found[name].append(fine_tune(base, examples, test, lr, seed))
            log(f"l1: {count} labels, seed {seed}, { ({name: each[-1] for name, each in found.items()}) }")
        show("l1", labels=count, **{name: mean_and_std(each) for name, each in found.items()})


def latin_items(split: str, count: int) -> list[tuple[str, str]]:
    """Return samples of languages in Latin script; the script alone identifies many others."""
    drawn = (langid.item(split, number) for number in itertools.count())
    return list(itertools.islice((item for item in drawn if item[1] in LATIN), count))


def encode_padded(tok: gh.Tokenizer, texts: list[str]) -> tuple[Tensor, Tensor]:
    """Return ids [N, MAX_LEN], padded or truncated, and lengths [N]."""
    rows = [row[:MAX_LEN] for row in tok.encode_batch(texts)]
    ids = torch.zeros(len(rows), MAX_LEN, dtype=torch.long)
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return ids, torch.tensor([len(row) for row in rows])


def masked_batches(ids: Tensor, lengths: Tensor, mask: int, rows: int) -> BatchSampler:
    """Sample batches for masked language modelling, with two tokens in five masked."""

    def sample(rng: torch.Generator) -> Batch:
        chosen = torch.randint(len(ids), (rows,), generator=rng)
        longest = int(lengths[chosen].max())
        real = torch.arange(longest) < lengths[chosen, None]
        hidden = (torch.rand(rows, longest, generator=rng) < 0.4) & real
        targets = ids[chosen, :longest]
        return Batch(targets.masked_fill(hidden, mask), targets, hidden, lengths=lengths[chosen])

    return sample


def labelled_batch(tok: gh.Tokenizer, items: list[tuple[str, str]]) -> Batch:
    """Return all the items as one batch."""
    ids, lengths = encode_padded(tok, [text for text, _ in items])
    targets = torch.tensor([LATIN.index(label) for _, label in items])
    return Batch(ids, targets, torch.ones(len(items), dtype=torch.bool), lengths=lengths)


def fine_tune(base: Encoder, examples: Batch, test: Batch, lr: float, seed: int) -> float:
    """Fine-tune a copy of an encoder on labelled examples, and return its accuracy on the test set."""
    torch.manual_seed(seed)
    # Mean pooling, since no first token was pretrained to represent the text.
    pooled = gh.build(replace(base.spec, head=gh.spec.Pooled("mean")))
    pooled.load_state_dict({name: one for name, one in base.state_dict().items() if not name.startswith("head.")})
    model = with_classifier(pooled, len(LATIN))

    def sample(rng: torch.Generator) -> Batch:
        chosen = torch.randint(len(examples), (32,), generator=rng)
        ids, targets, lengths = (one[chosen] for one in (examples.ids, examples.targets, examples.lengths))
        return Batch(ids, targets, torch.ones_like(targets, dtype=torch.bool), lengths=lengths)

    train(model, sample, 150, lr, seed=seed)
    return evaluate(model, test.microbatches(10))["accuracy"]


PARTS: dict[str, Callable[[], None]] = {"p6": p6, "a13": a13, "b6": b6, "m7": m7, "l1": l1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], help="(default: all)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # models this small gain nothing from more
    print(f"torch {torch.__version__}")
    for part in args.parts:
        start = time.perf_counter()
        PARTS[part]()
        log(f"{part} took {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
