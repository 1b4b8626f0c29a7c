"""Recall at 1 among 1,000 paraphrases: an encoder trained on pairs, beside what needs no training or no word order.

    python benchmarks/contrastive.py [--out runs/paraphrases] [train.steps=400 ...]

Trains the recipe `paraphrases`, or takes the finished run, and evaluates on the test split: the trained encoder, the
same encoder before training, a bag of words (cosine of TF-IDF vectors), and learned word vectors (their mean, trained
by the same loss on the same batches). Words here are what is between spaces, so that both bags know whole words.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.data import builtin_dataset
from glasshouse.objectives.contrastive import contrastive_loss

Pair = tuple[str, str]


def recall(texts: Tensor, matches: Tensor) -> float:
    """Return the fraction of texts whose nearest match by cosine similarity is their own."""
    scores = F.normalize(texts, dim=-1) @ F.normalize(matches, dim=-1).T
    return float((scores.argmax(1) == torch.arange(len(texts))).double().mean())


def words(text: str) -> list[str]:
    """Return the words of a text, in lower case."""
    return re.findall(r"\w+", text.lower())


def embedded(model: gh.models.Encoder, tok: gh.Tokenizer, pairs: list[Pair]) -> float:
    """Return the recall of an encoder."""
    texts, matches = (gh.embed(model, tok, list(side)) for side in zip(*pairs, strict=True))
    return recall(texts, matches)


def tf_idf(train: list[Pair], test: list[Pair]) -> float:
    """Return the recall of a bag of words, with the inverse document frequencies of the training set."""
    seen = Counter(word for pair in train for text in pair for word in set(words(text)))
    numbers = {word: number for number, word in enumerate(seen)}
    weight = torch.tensor([math.log(2 * len(train) / count) for count in seen.values()])
    sides = torch.zeros(2, len(test), len(seen))
    for at, pair in enumerate(test):
        for side, text in enumerate(pair):
            for word in words(text):
                sides[side, at, numbers[word]] += weight[numbers[word]]
    return recall(sides[0], sides[1])


def learned_words(train: list[Pair], test: list[Pair], steps: int, batch_size: int, d_model: int) -> float:
    """Return the recall of the mean of word vectors, trained by the contrastive loss."""
    numbers = {
        word: at for at, word in enumerate(sorted({w for pair in train for text in pair for w in words(text)}))
    }
    torch.manual_seed(0)
    table = nn.EmbeddingBag(len(numbers), d_model, mode="mean")
    optimizer = torch.optim.Adam(table.parameters(), lr=0.02)

    def vectors(pairs: list[Pair]) -> Tensor:
        bags = [torch.tensor([numbers[word] for word in words(text)]) for pair in pairs for text in pair]
        starts = torch.tensor([0, *map(len, bags)]).cumsum(0)[:-1]
        return table(torch.cat(bags), starts).view(len(pairs), 2, -1)

    for step in range(steps):
        batch = [train[(step * batch_size + at) % len(train)] for at in range(batch_size)]
        distinct = torch.arange(2 * batch_size).view(batch_size, 2)
        loss = contrastive_loss(vectors(batch), distinct, torch.ones(batch_size, dtype=torch.bool), 0.05)
        optimizer.zero_grad()
        (loss / batch_size).backward()
        optimizer.step()
    with torch.no_grad():
        return recall(*vectors(test).unbind(1))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/paraphrases"))
    parser.add_argument("settings", nargs="*", help="settings of the recipe to override")
    args = parser.parse_args()
    began = time.perf_counter()
    run = gh.Run.load("paraphrases", f"train.out={args.out}", *args.settings)
    result = gh.train(run)
    minutes = (time.perf_counter() - began) / 60
    trained, tok = gh.load(args.out)
    untrained, _ = gh.load(args.out / "snapshots" / "step-00000000")
    assert isinstance(trained, gh.models.Encoder)
    assert isinstance(untrained, gh.models.Encoder)
    assert tok is not None
    dataset = builtin_dataset("paraphrases")
    train, test = (list(dataset.items(split)) for split in ("train", "test"))
    rows = [
        (f"encoder, trained for {result.steps} steps in {minutes:.1f} minutes", embedded(trained, tok, test)),
        ("the same encoder, untrained", embedded(untrained, tok, test)),
        ("bag of words (TF-IDF)", tf_idf(train, test)),
        ("learned word vectors, their mean", learned_words(train, test, 600, 128, trained.spec.d_model)),
    ]
    print(f"recall at 1 among {len(test):,} matches, {torch.get_num_threads()} threads\n")
    print("| | recall at 1 |\n|---|---|")
    for name, value in rows:
        print(f"| {name} | {value:.1%} |")


if __name__ == "__main__":
    main()
