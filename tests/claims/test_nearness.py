"""Vectors and their neighbours: statements E4, P8 and P9."""

from __future__ import annotations

import keyword
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.layers.position import Position, SinusoidalPosition

NEIGHBOURS = 5


def nearest(table: Tensor, token: int, count: int) -> list[int]:
    """Return the tokens with the largest cosine to a token, by a loop over all of them."""

    def cosine(other: int) -> float:
        a, b = table[token].tolist(), table[other].tolist()
        product = sum(x * y for x, y in zip(a, b, strict=True))
        return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))

    others = sorted((other for other in range(len(table)) if other != token), key=cosine, reverse=True)
    return others[:count]


def neighbours(table: Tensor, tokens: list[int]) -> Tensor:
    """Return the nearest tokens of each of some tokens, [tokens, NEIGHBOURS]."""
    unit = F.normalize(table, dim=-1)
    cosine = unit[tokens] @ unit.T
    cosine[torch.arange(len(tokens)), tokens] = -math.inf
    return cosine.topk(NEIGHBOURS).indices


def test_e4_nearest_tokens_by_a_slow_loop() -> None:
    table = torch.randn(40, 6, dtype=torch.float64)
    assert neighbours(table, [3, 17]).tolist() == [nearest(table, token, NEIGHBOURS) for token in (3, 17)]


@pytest.mark.parametrize("kind", ["digits", "keywords"])
def test_e4_nearest_tokens_are_of_the_same_kind_after_training(kind: str) -> None:
    """In a model of Python code; drawn anew, the same table knows no kinds."""
    model, tok = gh.load("python-3m")
    assert tok is not None
    is_one = {"digits": str.isdigit, "keywords": keyword.iskeyword}[kind]
    chosen = [number for number in range(len(tok)) if is_one(tok.decode([number]).strip())]
    table = model.token_embedding.table.weight.detach().float()
    shares = {}
    for name, each in (("trained", table), ("drawn anew", torch.randn(table.shape) * table.std())):
        shares[name] = torch.isin(neighbours(each, chosen), torch.tensor(chosen)).double().mean().item()
    chance = (len(chosen) - 1) / (len(table) - 1)
    print(f"\nE4 {len(chosen)} {kind}: {shares} of their {NEIGHBOURS} nearest are {kind}, {chance:.3f} by chance")
    assert shares["trained"] > 10 * chance
    # By chance it is a mean of binomial draws, here within five standard deviations.
    spread = math.sqrt(chance * (1 - chance) / (NEIGHBOURS * len(chosen)))
    assert abs(shares["drawn anew"] - chance) < 5 * spread


@pytest.mark.few(1)
@pytest.mark.parametrize("trained", [False, True])
def test_p8_nearest_token_of_the_sum_is_the_token(trained: bool) -> None:
    """Every token at every position; the position is not small beside it."""
    model = gh.load("dates-1m")[0] if trained else gh.build(gh.preset("tiny-seq2seq"))
    tokens = model.token_embedding(torch.arange(model.spec.vocab_size)[None])[0].detach().float()
    places = torch.arange(model.spec.max_len)[None]
    encoded = model.encoder.position.embed(torch.zeros(1, places.shape[1], tokens.shape[1]), places)[0]
    for place in encoded:
        found = torch.cdist(tokens + place, tokens).argmin(-1)
        assert found.tolist() == list(range(len(tokens)))
    ratio = (encoded.norm(dim=-1).mean() / tokens.norm(dim=-1).mean()).item()
    sums = tokens + encoded[:, None]  # at each position, each token
    angles = torch.rad2deg(F.cosine_similarity(sums, tokens.expand_as(sums), dim=-1).clamp(-1, 1).acos())
    name = "dates-1m" if trained else "as initialised"
    print(f"\nP8 {name}: position has {ratio:.3f} of the token's norm, and turns it by {angles.mean():.1f} degrees")
    # A step of the length |p| turns a vector of the length |t| > |p| by at most asin(|p| / |t|).
    most = encoded.norm(dim=-1)[:, None] / tokens.norm(dim=-1)
    assert bool((angles <= torch.rad2deg(most.clamp(max=1).asin()) + 0.1)[most < 1].all())
    assert angles.mean() > 20
    assert ratio > 0.4  # by no means small
    if not trained:
        # sqrt(D / 2) over sqrt(D), the norm of unit-variance vectors; 256 of width 64 vary by 1 / sqrt(2 * 64 * 256).
        assert ratio == pytest.approx(math.sqrt(1 / 2), abs=5 / math.sqrt(2 * 64 * 256))
        # A position is at a right angle to a random token on average: atan(0.71), 35 degrees.
        assert angles.mean() == pytest.approx(math.degrees(math.atan(math.sqrt(1 / 2))), abs=2)


# P9


class ConstantVector(Position):
    """Position t as the vector (t, ..., t)."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions[..., None].to(x.dtype)


class LengthFraction(Position):
    """Position t as (t / length, ..., t / length)."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (positions / positions.shape[1])[..., None].to(x.dtype)


def test_p9_naive_codes_are_unbounded_or_ambiguous() -> None:
    tokens, short, long = torch.randn(1, 64, 16), torch.arange(32)[None], torch.arange(64)[None]
    counted = ConstantVector().embed(torch.zeros(1, 64, 16), long)[0]
    assert counted[63].norm() == 63 * math.sqrt(16)
    # The token at the end is a sixtieth of the sum, which points along (1, ..., 1) whatever the token is.
    last = F.normalize(tokens[0, -1] + counted[-1], dim=0)
    assert F.cosine_similarity(last, torch.ones(16), dim=0) > 0.999
    at_5 = [LengthFraction().embed(torch.zeros(1, n.shape[1], 16), n)[0, 5] for n in (short, long)]
    assert not torch.equal(*at_5)
    assert torch.equal(LengthFraction().embed(torch.zeros(1, 64, 16), long)[0, 10], at_5[0])  # position 5 of 32
    sinusoids = SinusoidalPosition(16, interleaved=True)
    coded = [sinusoids.embed(torch.zeros(1, n.shape[1], 16), n)[0] for n in (short, long)]
    assert torch.equal(coded[0][5], coded[1][5])
    assert torch.cat(coded).abs().max() <= 1
