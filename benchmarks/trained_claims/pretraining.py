"""L1: masked language modelling on unlabelled texts, then a few labels, against those labels alone."""

from __future__ import annotations

import itertools
import statistics
from dataclasses import replace

import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.data.builtin import langid
from glasshouse.models import Encoder, with_classifier
from trained_claims.experiment import SMALL, BatchSampler, Result, build, evaluate, log, make_rng, train

LATIN = langid.LANGUAGES[:20]
MAX_LEN, VOCAB_SIZE = 48, 512


def fine_tuning(
    pretrainings: int = 3,
    seeds: int = 5,
    steps: int = 7000,
    unlabelled: int = 10_000,
    labels: tuple[int, ...] = (100, 1000),
    fine_tune_steps: int = 150,
    tests: int = 1000,
    languages: int = len(LATIN),
    layers: int = 2,
    rates: tuple[tuple[float, ...], tuple[float, ...]] = ((1e-3, 3e-3), (3e-3, 1e-2)),
) -> Result:
    """Compare fine-tuning with training from scratch, each at its best learning rate."""
    items = latin_items("train", unlabelled + seeds * max(labels), languages)
    texts = [text for text, _ in items[:unlabelled]]
    tok = gh.Tokenizer.train(texts=texts, vocab_size=VOCAB_SIZE)
    test = labelled_batch(tok, latin_items("test", tests, languages))
    choices = {"position": "rotary", "embed_scale": True, "init": "xavier", "head": "masked_token"}
    masked = masked_batches(*encode_padded(tok, texts), tok.special_id("mask"), 32)
    scratch, pretrained = [], []
    for number in range(pretrainings):
        fresh, encoder = (
            build(seed, kind="encoder", vocab_size=len(tok), **choices, **(SMALL | {"n_layers": layers}))
            for seed in (number, 100 + number)
        )
        train(encoder, masked, steps, 3e-3, seed=number, warmup=min(100, steps // 10))
        log(f"L1: pretrained to a loss of {evaluate(encoder, [masked(make_rng(10**6))])['loss']:.3f}")
        scratch.append(fresh)
        pretrained.append(encoder)

    result = Result(along="labels")
    for count in labels:
        runs = [(number, seed) for number in range(pretrainings) for seed in range(seeds)]
        best: dict[str, list[float]] = {}
        for name, bases, tried_rates in (("pretrained", pretrained, rates[0]), ("from scratch", scratch, rates[1])):
            tried = []
            for lr in tried_rates:
                found = []
                for number, seed in runs:
                    first = unlabelled + seed * count  # none of these was used in pretraining
                    examples = labelled_batch(tok, items[first : first + count])
                    found.append(fine_tune(bases[number], examples, test, lr, seed, fine_tune_steps))
                log(f"L1: {count} labels, {name}, lr {lr:g}: {statistics.mean(found):.3f}")
                tried.append(found)
            best[name] = max(tried, key=statistics.mean)
            result.add(f"accuracy with {count} labels, {name}", best[name])
            result.curves.setdefault(name, []).append((float(count), statistics.mean(best[name])))
        gains = [a - b for a, b in zip(best["pretrained"], best["from scratch"], strict=True)]
        spread = max(statistics.stdev(each) if len(each) > 1 else 0.0 for each in best.values())
        result.figures[f"gain with {count} labels - the larger standard deviation"] = statistics.mean(gains) - spread
        result.figures[f"share of runs with {count} labels where pretraining is ahead"] = statistics.mean(
            gain > 0 for gain in gains
        )
    return result


def latin_items(split: str, count: int, languages: int) -> list[tuple[str, str]]:
    """Return samples of the first languages in Latin script; the script alone identifies many others."""
    drawn = (langid.item(split, number) for number in itertools.count())
    return list(itertools.islice((item for item in drawn if item[1] in LATIN[:languages]), count))


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


def fine_tune(base: Encoder, examples: Batch, test: Batch, lr: float, seed: int, steps: int) -> float:
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

    train(model, sample, steps, lr, seed=seed)
    return evaluate(model, test.microbatches(10))["accuracy"]
