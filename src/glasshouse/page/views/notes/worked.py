"""The worked examples of the lectures, number by number: four rows of E, Thinking Machines, P(fish), and Sarah."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from glasshouse import notes, pretrained
from glasshouse.config import JsonDict
from glasshouse.escaping import show_whitespace
from glasshouse.inspection import edit, record
from glasshouse.models import Decoder, Model
from glasshouse.models.heads import LMHead
from glasshouse.page.views.notes.figure import (
    Scene,
    bars,
    elsewhere,
    facts,
    initialised,
    largest_difference,
    matrix,
    sentence,
    shapes,
    table,
    token_labels,
)
from glasshouse.text import Tokenizer

FISH, THINKING, SARAH, ROWS = notes.EXAMPLES
VOCABULARY, WIDTH = 50_257, 8  # of GPT-2, and few enough to read


def four_rows(scene: Scene) -> list[JsonDict]:
    """E2: ids are looked up as rows, in the open model if its vocabulary has them."""
    model, size = scene.model, scene.model.spec.vocab_size
    why = "in the open model"
    if size <= max(ROWS.ids):
        model = _large_vocabulary()
        why = f"in a new embedding of {VOCABULARY:,} tokens, as the open model's ids end at {size - 1:,}"
    weight = model.token_embedding.table.weight.detach().float()
    ids = torch.tensor(ROWS.ids, device=weight.device)
    one_hot = F.one_hot(ids, len(weight)).float()
    found = model.token_embedding.table(ids).float()
    return [
        sentence(f"The ids {', '.join(map(str, ROWS.ids))} {why}."),
        shapes(("one-hot", list(one_hot.shape)), ("E", list(weight.shape)), ("x", list(found.shape))),
        matrix(
            f"the four rows, their first {min(WIDTH, found.shape[1])} coordinates",
            found[:, :WIDTH],
            rows=[f"row {one}" for one in ROWS.ids],
            signed=True,
        ),
        facts(("largest difference of the product and the rows", largest_difference(one_hot @ weight, found))),
    ]


@cache
def _large_vocabulary() -> Model:
    model: Model = initialised("decoder", vocab_size=VOCABULARY, d_model=WIDTH, n_heads=2, n_kv_heads=2)
    return model


# Two tokens of width 4 and the matrices of one head of width 4, so that its square root is 2.
X = ((1, 0, 1, 0), (0, 2, 0, 1))
WQ = ((1, 0, 1, 0), (0, 1, 0, 0), (0, 0, 1, 1), (1, 0, 0, 0))
WK = ((0, 1, 0, 1), (1, 0, 0, 0), (1, 0, 1, 0), (0, 1, 0, 0))
WV = ((1, 0, 0, 2), (0, 1, 0, 0), (0, 2, 1, 0), (0, 0, 3, 0))


def thinking_machines(scene: Scene) -> list[JsonDict]:
    """A6: one head on two tokens, in numbers that can be worked on paper."""
    q, k, v = (_times(X, matrix) for matrix in (WQ, WK, WV))
    words = THINKING.text.split()
    root = math.sqrt(len(k[0]))
    products = [[_dot(query, key) for key in k] for query in q]
    scores = [[one / root for one in row] for row in products]
    raised = [[math.exp(one) for one in row] for row in scores]
    weights = [[one / sum(row) for one in row] for row in raised]
    z = _times(weights, v)
    pairs = [(i, j) for i in range(len(X)) for j in range(len(X))]
    return [
        sentence(
            f"“{THINKING.text}” as two vectors x of width 4 through a head of width 4, no mask; the numbers are ours."
        ),
        table(
            "the matrices, row by row",
            ["row", "Wq", "Wk", "Wv"],
            ([i, *(_shown(one[i]) for one in (WQ, WK, WV))] for i in range(len(WQ))),
        ),
        table(
            "q = x Wq, k = x Wk, v = x Wv",
            ["token", "x", "q", "k", "v"],
            ([word, *(_shown(one[i]) for one in (X, q, k, v))] for i, word in enumerate(words)),
        ),
        table(
            "scores, and their softmax row by row",
            ["query", "key", "q . k", "/ sqrt(4)", "exp", "weight"],
            ([words[i], words[j], products[i][j], scores[i][j], raised[i][j], weights[i][j]] for i, j in pairs),
        ),
        table(
            "the output: values by their weights",
            ["token", *(f"z{i}" for i in range(len(z[0])))],
            ([word, *row] for word, row in zip(words, z, strict=True)),
        ),
    ]


Rows = Sequence[Sequence[float]]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(a, b, strict=True))


def _times(a: Rows, b: Rows) -> list[list[float]]:
    return [[_dot(row, column) for column in zip(*b, strict=True)] for row in a]


def _shown(row: Sequence[float]) -> str:
    return "(" + ", ".join(f"{one:g}" for one in row) + ")"


def p_fish(scene: Scene) -> list[JsonDict]:
    """M4: the probability of the last word of a sentence, token by token."""
    scene, tok, why = _reader(scene, FISH.text)
    start, _, word = FISH.text.rpartition(" ")
    ids, target = _encode(tok, start), _encode(tok, f" {word}")
    shares = _next(scene.model, [*ids, *target])
    each = [float(shares[len(ids) - 1 + i, one]) for i, one in enumerate(target)]
    labels = token_labels([*ids, *target], tok)
    best = shares[len(ids) - 1].topk(5)
    likely = zip(token_labels(best.indices.tolist(), tok), best.values.tolist(), strict=True)
    whole = math.prod(each)
    return [
        *why,
        bars(
            f"P(next | {start}), the five most likely tokens, and {word}",
            [*likely, (show_whitespace(f" {word}".encode()), whole)],
            most=1,
        ),
        table(
            f"P({word} | {start}), the product over its tokens",
            ["token", "after", "P(token | those before)"],
            ([labels[len(ids) + i], labels[len(ids) + i - 1], one] for i, one in enumerate(each)),
        ),
        facts((f"P({word} | {start})", whole)),
    ]


def _reader(scene: Scene, text: str) -> tuple[Scene, Tokenizer, list[JsonDict]]:
    """Return a language model that can read a text, with its tokenizer: the open one, or a bundled one."""
    model, tok = scene.model, scene.trace.tok
    if isinstance(model, Decoder) and isinstance(model.head, LMHead) and tok is not None:
        ids, limit = _encode(tok, text), model.spec.position_limit
        if tok.decode(ids) == text and (limit is None or len(ids) <= limit):
            return scene, tok, []
    moved, _ = elsewhere(scene, pretrained.DEFAULT, "")
    assert moved.trace.tok is not None
    said = f"The open model is no language model that can read this text; this shows {pretrained.DEFAULT}."
    return moved, moved.trace.tok, [sentence(said)]


def _encode(tok: Tokenizer, text: str) -> list[int]:
    return tok.encode(text, add_special_tokens=False)


def _next(model: Model, ids: list[int]) -> Tensor:
    """Return P(next | prefix) at every position, [S, V]."""
    device = next(model.parameters()).device
    shares: Tensor = model(torch.tensor([ids], device=device))[0].float().softmax(-1)
    return shares


NAMES = ("Sarah", "cat", "Alex")


def sarah(scene: Scene) -> list[JsonDict]:
    """V4: whom does She look at, and what does it change if she cannot?"""
    scene, tok, why = _reader(scene, SARAH.text)
    ids = _encode(tok, SARAH.text)
    she = _places(tok, ids, "She")[-1]
    depth = len(scene.stack.blocks)
    sites = [f"pattern.{layer}" for layer in range(depth)]
    with record(scene.model, *sites) as seen:
        before = _next(scene.model, ids)[she]
    weights = torch.stack([seen[site][0, :, she].float() for site in sites])  # [layer, head, key]
    token = ids[she + 1]
    rows: list[list[str | float]] = []
    for name in NAMES:
        places = _places(tok, ids, name)
        looked = weights[:, :, places].sum(-1)
        layer, head = divmod(int(looked.argmax()), looked.shape[1])
        cut = {f"scores.{layer}[query={she}, key={place}]": -math.inf for layer in range(depth) for place in places}
        with edit(scene.model, cut):
            after = _next(scene.model, ids)[she]
        change = float(after[token].log() - before[token].log())
        rows.append([name, float(looked.mean()), f"{layer}.{head}", float(looked.max()), change])
    what = token_labels([token], tok)[0]
    return [
        *why,
        sentence(
            f"“{SARAH.text}” Whom does “She” look at, and what if that attention is cut in every head? "
            "A negative change means that the prediction relied on it."
        ),
        table(
            f"attention of “She”, and the change of ln P({what} | …) if it cannot look there",
            ["name", "weight, mean of all heads", "strongest head", "its weight", "change of ln P"],
            rows,
        ),
        facts((f"P({what} | … She)", float(before[token]))),
    ]


def _places(tok: Tokenizer, ids: list[int], word: str) -> list[int]:
    """Return the positions of the tokens that a word is made of, where it occurs first."""
    ends, text = [], b""
    for one in ids:
        text += tok.decode_bytes([one])
        ends.append(len(text))
    first = text.index(word.encode())
    return [i for i, end in enumerate(ends) if end > first and (ends[i - 1] if i else 0) < first + len(word)]


EXAMPLES = {"E2": four_rows, "A6": thinking_machines, "M4": p_fish, "V4": sarah}
