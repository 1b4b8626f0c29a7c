"""SplitMix64 random numbers compared with published output, Python integers and statistical tests."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from examples import up_to
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from glasshouse.generation.sampling.counter_rng import DrawPurpose, sample_categorical, seed_state, uniforms

WORD = 2**64
drawn = settings(max_examples=up_to(100), derandomize=True, deadline=None)
SEEDS = st.integers(-(2**63), 2**63 - 1)

# A standard normal variable leaves [-4.42, 4.42] once in 100,000. Seeds are fixed, so the tests are deterministic.
Z = 4.42


def mixed(x: int) -> int:
    """The finalizer of SplitMix64 as Steele, Lea and Flood give it, in unbounded integers."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def splitmix(state: int, number: int) -> int:
    """The number-th output, from 1, of SplitMix64 started at `state`."""
    return mixed((state + number * 0x9E3779B97F4A7C15) % WORD)


def grid(seeds: range, steps: range, purpose: DrawPurpose = DrawPurpose.SAMPLE) -> Tensor:
    """The numbers [seeds, steps] of one purpose."""
    return uniforms(torch.tensor([[seed_state(seed)] for seed in seeds]), torch.tensor(list(steps)), purpose)


def test_numbers_equal_published_output() -> None:
    # The outputs of Vigna's splitmix64.c from the state 1234567, as many implementations print them.
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    start = torch.tensor(1234567)
    got = [uniforms(start, torch.tensor(step), purpose).item() for step in (0, 1) for purpose in DrawPurpose]
    assert got[:5] == [(number >> 11) / 2**53 for number in published]


@drawn
@given(SEEDS, st.integers(0, 2**40), st.sampled_from(DrawPurpose))
def test_numbers_equal_python_integers(seed: int, step: int, purpose: DrawPurpose) -> None:
    start = splitmix(seed, 1)
    assert seed_state(seed) % WORD == start
    expected = splitmix(start, 3 * step + purpose + 1) >> 11
    assert uniforms(torch.tensor(seed_state(seed)), torch.tensor(step), purpose).item() == expected / 2**53


@drawn
@given(SEEDS, SEEDS)
def test_each_seed_has_its_own_stream(one: int, other: int) -> None:
    assert (seed_state(one) == seed_state(other)) == (one == other)


@pytest.mark.parametrize(("n_seeds", "n_steps"), [(10_000, 1), (1, 10_000)], ids=["seeds", "steps"])
def test_numbers_are_uniform(n_seeds: int, n_steps: int) -> None:
    numbers = grid(range(n_seeds), range(n_steps)).flatten()
    n = len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    # A uniform number has mean 1/2 and variance 1/12; its squared distance from the mean has variance 1/180.
    assert abs(numbers.mean() - 1 / 2) < Z * math.sqrt(1 / 12 / n)
    assert abs((numbers - 1 / 2).square().mean() - 1 / 12) < Z * math.sqrt(1 / 180 / n)
    bits = ((numbers * 2**53).long()[:, None] >> torch.arange(53)) & 1
    ones = bits.double().mean(0)
    assert (ones - 1 / 2).abs().max() < Z * math.sqrt(1 / 4 / n)


def correlation(a: Tensor, b: Tensor) -> float:
    a, b = a.flatten() - 1 / 2, b.flatten() - 1 / 2
    return (a * b).mean().item() * 12


def test_numbers_are_independent() -> None:
    # Neighbours along steps, along seeds, on both diagonals, across purposes, and of distant seeds. The product of
    # two independent numbers (mean 0, variance 1/12 each) over 1/12 has variance 1.
    seeds = [-1, 0, 1, 2, 2**31, 2**32, 2**63 - 1, -(2**63)]
    steps = torch.arange(20_000)
    a = {
        purpose: uniforms(torch.tensor([[seed_state(seed)] for seed in seeds]), steps, purpose)
        for purpose in DrawPurpose
    }
    sample = a[DrawPurpose.SAMPLE]
    limit = Z / math.sqrt(sample[0].numel() - 1)
    for row in range(len(seeds)):
        for lag in (1, 2, 3, 7):
            assert abs(correlation(sample[row, lag:], sample[row, :-lag])) < limit
        for purpose in (DrawPurpose.ACCEPT, DrawPurpose.DRAFT):
            assert abs(correlation(sample[row], a[purpose][row])) < limit
        assert abs(correlation(a[DrawPurpose.ACCEPT][row], a[DrawPurpose.DRAFT][row])) < limit
        for other in range(row):
            assert abs(correlation(sample[row], sample[other])) < limit
            assert abs(correlation(sample[row, 1:], sample[other, :-1])) < limit
            assert abs(correlation(sample[row, :-1], sample[other, 1:])) < limit


def test_numbers_are_distinct() -> None:
    # 2**16.2 numbers of 53 bits: one pair in 2**21.6 such tables would meet by chance. A sum of seed and step as the
    # state would repeat nearly all of them.
    table = torch.stack([grid(range(-50, 50), range(250), purpose) for purpose in DrawPurpose])
    assert table.unique().numel() == table.numel() == 75_000


def test_numbers_do_not_depend_on_the_batch() -> None:
    table = grid(range(3), range(5))
    for seed in range(3):
        for step in range(5):
            assert grid(range(seed, seed + 1), range(step, step + 1)).item() == table[seed, step]


@drawn
@given(st.lists(st.integers(0, 5), min_size=1, max_size=9).filter(any), st.integers(0, 2**20 - 1))
def test_sample_categorical_inverts_the_cdf(weights: list[int], number: int) -> None:
    # Small whole weights and 20 bits: every sum and product is exact, so the two must agree to the last case.
    u = Fraction(number, 2**20)
    expected = next(i for i in range(len(weights)) if sum(weights[: i + 1]) > u * sum(weights))
    got = sample_categorical(torch.tensor(weights, dtype=torch.float32), torch.tensor(float(u), dtype=torch.float64))
    assert got.item() == expected


@drawn
@given(st.integers(1, 40), st.integers(0, 9), st.integers(0, 9), st.floats(1e-30, 1e30), st.sampled_from([24, 53]))
def test_zero_weight_is_never_sampled(inner: int, before: int, after: int, weight: float, bits: int) -> None:
    wide = torch.float32 if bits == 24 else torch.float64
    weights = torch.zeros(before + inner + after)
    weights[before : before + inner] = weight
    for u in (0.0, 2.0**-bits, 1 - 2.0**-bits):
        got = int(sample_categorical(weights[None], torch.tensor([u], dtype=wide)))
        assert got == (before + inner - 1 if u > 0.5 else before)


def test_zero_weight_is_not_sampled_when_the_cumsum_grows_by_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulates a GPU's cumsum: [0, 1, 1, 2] comes out slightly larger at the third entry, whose weight is 0.
    weights = torch.tensor([[0.0, 1.0, 0.0, 1.0]])
    rounded = torch.tensor([[0.0, 1.0, 1.0 + 2**-50, 2.0]], dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda *_, **__: rounded)
    assert sample_categorical(weights, torch.tensor([0.5], dtype=torch.float64)).item() == 1


def test_all_weights_zero_samples_the_first_id() -> None:
    assert sample_categorical(torch.zeros(2, 4), torch.tensor([0.0, 0.9], dtype=torch.float64)).tolist() == [0, 0]
