"""Sampling compared with plain Python, transformers and chi-square tests, and across batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import up_to
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from glasshouse.errors import InputError
from glasshouse.generation.sampling.logits_kernels import token_logprobs
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.generation.sampling_params import SamplingParams

CPU = torch.device("cpu")
ENDS = [2, 5]

drawn = settings(max_examples=up_to(40), derandomize=True, deadline=None)


def sampler_of(
    rows: Sequence[SamplingParams],
    vocab_size: int,
    prompts: Sequence[Sequence[int]] | None = None,
    slots: int | None = None,
) -> Sampler:
    """Return a sampler with these requests in its first slots; ids 2 and 5 are end tokens."""
    sampler = Sampler(slots or len(rows), vocab_size, CPU)
    for slot, options in enumerate(rows):
        sampler.slots.set(slot, options, prompts[slot] if prompts else [], ENDS)
    return sampler


def random_logits(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2).to(dtype)


# The slow reference: one row, Python floats.


class TooCloseError(Exception):
    """A sum or a weight is so close to a threshold that rounding would decide."""


def reference(
    logits: Sequence[float], options: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Return the probabilities of the next token."""
    scores = list(logits)
    for i in set(prompt) | set(output):
        r = options.repetition_penalty
        scores[i] = scores[i] * r if scores[i] < 0 else scores[i] / r
    for i in output:
        scores[i] -= options.frequency_penalty
    for i, bias in options.logit_bias.items():
        scores[i] += bias
    if len(output) < options.min_new_tokens:
        for i in ENDS:
            scores[i] = -math.inf
    best = scores.index(max(scores))
    if options.temperature == 0 or scores[best] == -math.inf:
        return [float(i == best) for i in range(len(scores))]

    weights = [math.exp((score - scores[best]) / options.temperature) for score in scores]
    if options.top_k is not None and options.top_k < len(weights):
        least = sorted(weights, reverse=True)[options.top_k - 1]
        weights = [w if w >= least else 0.0 for w in weights]
    if options.top_p is not None and options.top_p < 1:
        target, taken, least = options.top_p * math.fsum(weights), 0.0, math.inf
        for w in sorted(weights, reverse=True):
            if w != least and abs(taken - target) < 1e-9 * target:
                raise TooCloseError
            if taken >= target:
                break
            taken, least = taken + w, w
        weights = [w if w >= least else 0.0 for w in weights]
    if options.min_p is not None:
        if any(w != 1 and abs(w - options.min_p) < 1e-9 * options.min_p for w in weights):
            raise TooCloseError
        weights = [w if w >= options.min_p else 0.0 for w in weights]
    return [w / math.fsum(weights) for w in weights]


OPTIONS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, None, 1, 2, 3, 5, 100]),
    top_p=st.sampled_from([None, None, 0.05, 0.37, 0.71, 0.93, 1.0]),
    min_p=st.sampled_from([None, None, 0.02, 0.31, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.6, 1.9]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.4, 1.1]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-math.inf, -2.0, 0.75, 3.0]), max_size=8),
    min_new_tokens=st.sampled_from([0, 0, 1, 2, 4]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
IDS = st.integers(0, 7)
HALVES = st.integers(-6, 6).map(lambda x: x / 2)  # few values, so that ties are common


@drawn
@given(st.lists(st.tuples(OPTIONS, st.lists(IDS, max_size=3)), min_size=1, max_size=4), st.data())
def test_distribution_equals_reference(requests: list[tuple[SamplingParams, list[int]]], data: st.DataObject) -> None:
    rows, prompts = zip(*requests, strict=True)
    sampler = sampler_of(rows, 8, prompts)
    outputs: list[list[int]] = [[] for _ in rows]
    for _ in range(3):
        logits = data.draw(st.lists(st.lists(HALVES, min_size=8, max_size=8), min_size=len(rows), max_size=len(rows)))
        try:
            expected = [reference(*given) for given in zip(logits, rows, prompts, outputs, strict=True)]
        except TooCloseError:
            assume(False)
        got = sampler.distribution(torch.tensor(logits, dtype=torch.float64))
        # Eight terms, each off by a few roundings of 1e-16.
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-13, atol=0)
        chosen = sampler.sample(torch.tensor(logits, dtype=torch.float64)).tolist()
        for output, token, probabilities in zip(outputs, chosen, expected, strict=True):
            assert probabilities[token] > 0
            output.append(token)


def test_ties_are_kept_or_dropped_together() -> None:
    # By hand: of the logits 3, 1, 1, 1, 0 the two largest are the 3 and any of three 1s. Likewise, p = 0.75 needs
    # the first token (e**3 of e**3 + 3e + 1, 0.69) and one of three (0.09 each).
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for options in (SamplingParams(temperature=1.0, top_k=2), SamplingParams(temperature=1.0, top_p=0.75)):
        assert (sampler_of([options], 5).distribution(logits) > 0).tolist() == [[True, True, True, True, False]]


def test_top_p_by_hand() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for p, kept in ((0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (1.0, 3)):
        expected = torch.tensor([0.5, 0.3, 0.2]) * (torch.arange(3) < kept)
        got = sampler_of([SamplingParams(temperature=1.0, top_p=p)], 3).distribution(logits)[0]
        torch.testing.assert_close(got, expected / expected.sum())


def test_top_p_met_exactly() -> None:
    # The probabilities are 1/2, 1/4, 1/4, and the first alone reaches one half.
    logits = torch.tensor([[0.0, -math.log(2), -math.log(2)]], dtype=torch.float64)
    assert logits.exp().tolist() == [[1, 0.5, 0.5]]  # else rounding would decide
    assert sampler_of([SamplingParams(temperature=1.0, top_p=0.5)], 3).distribution(logits).tolist() == [[1, 0, 0]]


def test_top_p_of_1_keeps_every_token() -> None:
    # The second token has 4e-18 of the first's weight: the sum of both is rounded to the first alone.
    logits = torch.tensor([[0.0, -40.0]], dtype=torch.float64)
    assert (sampler_of([SamplingParams(temperature=1.0, top_p=1.0)], 2).distribution(logits) > 0).all()


def test_filters_of_one_row_do_not_affect_others() -> None:
    logits = random_logits(6, 20, dtype=torch.float32)
    combinations = itertools.product((None, 4, 9), (None, 0.6), (None, 0.1), (0.0, 1.0))
    rows = [SamplingParams(top_k=k, top_p=p, min_p=m, temperature=t) for k, p, m, t in combinations]
    alone = [sampler_of([options], 20).distribution(logits[None])[0] for options in rows]
    for (i, one), (j, other) in itertools.product(enumerate(rows), repeat=2):
        assert (
            sampler_of([one, other], 20).distribution(logits.expand(2, 20)).equal(torch.stack([alone[i], alone[j]]))
        )


def test_penalties_by_hand() -> None:
    # Seen: 0 in the prompt, 1 in the output, twice. 0: 2 / 2. 1: -1 * 2 - 2 * 0.25. 2: 1 + 0.5.
    options = SamplingParams(temperature=1.0, repetition_penalty=2.0, frequency_penalty=0.25, logit_bias={2: 0.5})
    sampler = sampler_of([options], 4, [[0, 0]])
    sampler.slots.count_tokens(torch.tensor([[1, 1, 3]]), torch.tensor([2]))
    got = sampler.distribution(torch.tensor([[2.0, -1.0, 1.0, 0.0]]))
    torch.testing.assert_close(got, torch.tensor([[1.0, -2.5, 1.5, 0.0]]).softmax(-1))


PROCESSORS: dict[str, tuple[dict[str, Any], Callable[[], list[Any]]]] = {
    "temperature": ({"temperature": 0.7}, lambda: [TemperatureLogitsWarper(0.7)]),
    "top_k": ({"top_k": 7}, lambda: [TopKLogitsWarper(7)]),
    "top_p": ({"top_p": 0.8}, lambda: [TopPLogitsWarper(0.8)]),
    "min_p": ({"min_p": 0.1}, lambda: [MinPLogitsWarper(0.1)]),
    "repetition": ({"repetition_penalty": 1.8}, lambda: [RepetitionPenaltyLogitsProcessor(1.8)]),
    "reward": ({"repetition_penalty": 0.4}, lambda: [RepetitionPenaltyLogitsProcessor(0.4)]),
    "bias": (
        {"logit_bias": {3: 2.5, 40: -math.inf}},
        lambda: [SequenceBiasLogitsProcessor({(3,): 2.5, (40,): -math.inf})],
    ),
    "minimum": ({"min_new_tokens": 4}, lambda: [MinNewTokensLengthLogitsProcessor(6, 4, ENDS)]),
    "enough": ({"min_new_tokens": 3}, lambda: [MinNewTokensLengthLogitsProcessor(6, 3, ENDS)]),
    "together": (
        {
            "temperature": 1.4,
            "top_k": 20,
            "top_p": 0.9,
            "min_p": 0.05,
            "repetition_penalty": 1.3,
            "min_new_tokens": 9,
        },
        lambda: [
            RepetitionPenaltyLogitsProcessor(1.3),
            MinNewTokensLengthLogitsProcessor(6, 9, ENDS),
            TemperatureLogitsWarper(1.4),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_distribution_equals_transformers(name: str) -> None:
    changes, processors = PROCESSORS[name]
    rows = [SamplingParams(**({"temperature": 1.0} | changes))] * 32
    prompts = torch.randint(50, (32, 6), generator=torch.Generator().manual_seed(1))
    output = torch.randint(50, (32, 3), generator=torch.Generator().manual_seed(2))
    sampler = sampler_of(rows, 50, prompts.tolist())
    sampler.slots.count_tokens(output, torch.full((32,), 3))
    logits = random_logits(3, 32, 50)
    theirs = LogitsProcessorList(processors())(torch.cat([prompts, output], 1), logits.clone()).softmax(-1)
    torch.testing.assert_close(sampler.distribution(logits), theirs, rtol=1e-12, atol=0)  # float64, 50 terms


def test_greedy_takes_the_first_on_ties() -> None:
    logits = torch.tensor([[0.0, 4.0, 4.0], [4.0, 4.0, 4.0]])
    for rows in (
        [SamplingParams()] * 2,
        [SamplingParams(), SamplingParams(), SamplingParams(temperature=1.0)],
    ):  # alone, and with a row that samples
        full = torch.cat([logits, logits[:1]])[: len(rows)]
        sampler = sampler_of(rows, 3)
        assert sampler.distribution(full)[:2].tolist() == [[0, 1, 0], [1, 0, 0]]
        assert sampler.sample(full)[:2].tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    rows = [
        SamplingParams(),
        SamplingParams(temperature=0.8, seed=4),
        SamplingParams(temperature=0.8, top_p=0.9, frequency_penalty=1.0),
    ]
    logits = random_logits(5, 3, 20, dtype=dtype)
    wide = logits if dtype == torch.float64 else logits.float()
    one, other = sampler_of(rows, 20), sampler_of(rows, 20)
    assert one.distribution(logits).dtype == wide.dtype
    assert one.distribution(logits).equal(other.distribution(wide))
    ids = one.sample(logits)
    assert ids.dtype == torch.int64
    assert ids.equal(other.sample(wide))
    before = logits.clone()
    one.verify(logits[:, None], torch.empty(3, 0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
    assert logits.equal(before)
    expected = wide.softmax(-1).log().gather(1, ids[:, None])[:, 0]
    assert token_logprobs(logits, ids).dtype == wide.dtype
    torch.testing.assert_close(token_logprobs(logits, ids), expected)


def test_logprobs_by_hand() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf], [1000.0, 0.0, 0.0]])
    assert token_logprobs(logits, torch.tensor([1, 0])).tolist() == [torch.tensor(0.5).log().item(), 0.0]
    assert token_logprobs(logits, torch.tensor([2, 1])).tolist() == [-math.inf, -1000.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_temperatures(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, 50.0, 50.0, -40.0, -math.inf]], dtype=dtype)
    for temperature in (5e-324, 1e-300, 1e-30):
        for filters in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.5}):
            got = sampler_of([SamplingParams(temperature=temperature, **filters)], 5).distribution(logits)
            assert got.tolist() == [[0, 0.5, 0.5, 0, 0]]
    for temperature in (1e30, 1e300):
        got = sampler_of([SamplingParams(temperature=temperature, top_k=100)], 5).distribution(logits)
        assert got.tolist() == [[0.25, 0.25, 0.25, 0.25, 0]]


EXTREMES = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-300, 1.0, 1e300]),
        "top_k": st.sampled_from([None, 1, 10**30]),
        "top_p": st.sampled_from([None, 1e-300, 0.5]),
        "min_p": st.sampled_from([None, 1e-300, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1e-300, 1e300]),
        "frequency_penalty": st.sampled_from([0.0, -1e300, 1e300]),
        "logit_bias": st.sampled_from([{}, {0: 1e300, 1: -1e300}, {2: -math.inf}]),
        "min_new_tokens": st.sampled_from([0, 10**30]),
    }
)


@drawn
@given(EXTREMES, st.lists(st.sampled_from([0.0, 1.0, -1.0, 6e4, -6e4, -math.inf]), min_size=6, max_size=6))
def test_extreme_settings_give_valid_probabilities(settings_: dict[str, Any], row: list[float]) -> None:
    sampler = sampler_of([SamplingParams(**settings_)], 6, [[0, 3]])
    logits = torch.tensor([row])
    for _ in range(3):
        got = sampler.distribution(logits)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got.sum(), torch.tensor(1.0))
        chosen = sampler.sample(logits)
        assert got[0, chosen] > 0
        assert row[int(chosen)] > -math.inf or got[0, 0] == 1  # a token at -inf only if all are


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_id_0_if_every_token_is_forbidden(temperature: float) -> None:
    filters = {"top_k": 2, "top_p": 0.5, "min_p": 0.5}
    nothing = dict.fromkeys(range(4), -math.inf)
    sampler = sampler_of([SamplingParams(temperature=temperature, logit_bias=nothing, **filters)], 4)
    assert sampler.distribution(torch.randn(1, 4)).tolist() == [[1, 0, 0, 0]]
    assert sampler.sample(torch.randn(1, 4)).tolist() == [0]


def test_forbidden_tokens_are_never_sampled() -> None:
    rows = [SamplingParams(temperature=5.0, logit_bias={0: -math.inf, 3: -math.inf}, seed=i) for i in range(500)]
    chosen = sampler_of(rows, 4).sample(torch.zeros(500, 4))
    assert set(chosen.tolist()) == {1, 2}


def test_bias_does_not_allow_tokens_at_minus_infinity() -> None:
    for temperature in (0.0, 1.0):
        sampler = sampler_of([SamplingParams(temperature=temperature, logit_bias={0: 1e300})], 2)
        assert sampler.distribution(torch.tensor([[-math.inf, 0.0]])).tolist() == [[0, 1]]


def test_no_end_token_before_min_new_tokens() -> None:
    # The end tokens are by far the most probable: they come as soon as allowed.
    logits = torch.tensor([[0.0, 0.0, 9.0, 0.0, 0.0, 8.0]])
    for temperature in (0.0, 0.1):
        sampler = sampler_of([SamplingParams(min_new_tokens=3, temperature=temperature)], 6)
        chosen = [sampler.sample(logits).item() for _ in range(5)]
        assert [token in ENDS for token in chosen] == [False, False, False, True, True]


def test_ids_outside_the_vocabulary() -> None:
    sampler = Sampler(1, 4, CPU)
    with pytest.raises(InputError, match=r"logit_bias names id 4, but ids go to 3; leave it out\."):
        sampler.slots.set(0, SamplingParams(logit_bias={1: 1.0, 4: 1.0}), [], [])
    assert sampler.sample(torch.tensor([[1.0, 0.5, 0.0, 0.0]])).item() == 0  # the slot was not set
    assert sampler.slots.metadata(1).idle
    sampler.slots.set(0, SamplingParams(repetition_penalty=2.0, min_new_tokens=1), prompt=[3, 9, -1], end_ids=[9, 1])
    assert sampler.sample(torch.tensor([[1.0, 5.0, 1.1, 1.9]])).item() == 2


# Random sampling.


def independent_rows(options: SamplingParams, n: int, vocab_size: int, prompt: Sequence[int] = ()) -> Sampler:
    """Return one request in n rows, a hundred steps apart, so that their samples are independent."""
    sampler = Sampler(n, vocab_size, CPU)
    sampler.slots.set(0, options, prompt, ENDS)
    for rows in sampler.slots.tensors:  # as copying each row does, but at once
        rows[1:] = rows[0]
    sampler.slots._options = [options] * n
    sampler.slots.count_tokens(torch.empty(n, 0, dtype=torch.int64), 100 * torch.arange(n))
    return sampler


def critical(cells: int) -> float:
    """The 0.9999 quantile of chi-square over `cells` cells, by Wilson and Hilferty (1% off at 3 degrees)."""
    freedom = cells - 1
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


def assert_sampled_from(probabilities: Tensor, ids: Tensor) -> None:
    """Chi-square test of samples against probabilities; all rare ids count as one cell."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    expected = probabilities.double() * len(ids)
    rare = expected < 10
    got, expected_counts = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    assert counts[expected == 0].sum() == 0
    assert len(got) > 4  # else little is tested
    if expected_counts[-1] < 5:  # too few for chi-square
        assert got[-1] <= 20  # 5 are expected at most; 20 come once in a million
        got, expected_counts = got[:-1], expected_counts[:-1]
    assert ((got - expected_counts) ** 2 / expected_counts).sum() < critical(len(got))


def test_chi_square_detects_a_small_bias() -> None:
    # One id in twelve is sampled a fifth more often than it should be. That adds 73 to the 11 expected.
    right = torch.full((12,), 1 / 12)
    wrong = right + torch.tensor([1 / 60] + [-1 / 660] * 11)
    numbers = torch.rand(20_000, generator=torch.Generator().manual_seed(0))
    assert_sampled_from(right, (numbers * 12).long())
    with pytest.raises(AssertionError):
        assert_sampled_from(right, torch.searchsorted(wrong.cumsum(0), numbers, right=True).clamp(max=11))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "options",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.6, top_k=6),
        SamplingParams(temperature=1.3, top_p=0.9),
        SamplingParams(temperature=1.3, min_p=0.05),
        SamplingParams(temperature=2.0, top_k=9, top_p=0.95, min_p=0.03, repetition_penalty=1.4, logit_bias={3: 1.0}),
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "together"],
)
def test_samples_follow_the_distribution(options: SamplingParams) -> None:
    logits = random_logits(7, 12, dtype=torch.float32)
    sampler = independent_rows(options, 8_000, 12, prompt=[1, 4])
    probabilities = sampler.distribution(logits.expand(1, 12))[0]
    assert_sampled_from(probabilities, sampler.sample(logits.expand(8_000, 12)))


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
def test_one_request_follows_the_distribution_over_steps(seed: int) -> None:
    sampler = sampler_of([SamplingParams(temperature=1.0, seed=seed)], 12)
    logits = random_logits(7, 1, 12, dtype=torch.float32)
    samples = torch.cat([sampler.sample(logits) for _ in range(1000)])
    assert_sampled_from(sampler.distribution(logits)[0], samples)


def test_sampling_does_not_use_torch_rng() -> None:
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in range(50)]
    before = torch.get_rng_state()
    one = sampler_of(rows, 12).sample(torch.zeros(50, 12))
    assert torch.get_rng_state().equal(before)
    torch.rand(1)
    assert sampler_of(rows, 12).sample(torch.zeros(50, 12)).equal(one)
    assert len(set(one.tolist())) > 6  # 50 seeds among 12 ids: far fewer would be one stream


def test_seeds_one_generator_step_apart_are_independent() -> None:
    # SplitMix64 adds 0x9E37... for each number and a token takes three: if seeds were its states, one of these
    # requests would sample what the other samples a token later.
    ahead = (3 * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    sampler = sampler_of([SamplingParams(temperature=1.0, seed=0), SamplingParams(temperature=1.0, seed=ahead)], 1000)
    one, other = torch.stack([sampler.sample(torch.zeros(2, 1000)) for _ in range(20)], 1)
    assert (one[1:] == other[:-1]).sum() <= 2  # of 19 by chance with probability 1/1000 each


# Drafts. A model of six tokens whose logits depend on the last token; the table's last row follows the prompt.

MODEL = random_logits(21, 7, 6, dtype=torch.float32)
DRAFTER = MODEL + random_logits(22, 7, 6, dtype=torch.float32) / 2
ROWS = 8_000
OPTION_SETS = {
    "plain": SamplingParams(temperature=1.2),
    "frequency": SamplingParams(temperature=1.2, frequency_penalty=1.5),
    "together": SamplingParams(temperature=1.5, top_k=4, min_p=0.02, repetition_penalty=1.7, logit_bias={1: 1.0}),
}


def logits_along(drafts: Tensor, n_drafts: Tensor) -> Tensor:
    """Return the model's logits [n, K+1, 6] before and after the drafts [n, K]; NaN past the last draft."""
    last = torch.cat([torch.full((len(drafts), 1), -1), drafts], 1)
    logits = MODEL[last].clone()
    logits[torch.arange(last.shape[1]) > n_drafts[:, None]] = math.nan
    return logits


def ragged(k: int) -> Tensor:
    return torch.arange(ROWS) % (k + 1)


def padded(drafts: Tensor, n_drafts: Tensor) -> Tensor:
    """Return the drafts, padded with an invalid id."""
    return drafts.where(torch.arange(drafts.shape[1]) < n_drafts[:, None], -(10**9))


def assert_pairs_follow(options: SamplingParams, sampler: Sampler, tokens: Tensor, kept: Tensor) -> None:
    """Chi-square test of each row's first two tokens, of which the second may still have to be sampled."""
    chosen = sampler.sample(MODEL[tokens.gather(1, kept[:, None] - 1)[:, 0]])
    pairs = tokens[:, 0] * 6 + torch.where(kept > 1, tokens[:, 1], chosen)
    first = reference(MODEL[-1].tolist(), options, [], [])
    second = [reference(MODEL[x].tolist(), options, [], [x]) for x in range(6)]
    assert_sampled_from((torch.tensor(first)[:, None] * torch.tensor(second)).flatten(), pairs)


def assert_proportion(flags: Tensor, share: float) -> None:
    """Check a proportion against a probability: more than 4.42 deviations occur once in 100,000."""
    assert abs(flags.double().mean().item() - share) < 4.42 * math.sqrt(share * (1 - share) / len(flags))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.long), 2])
def test_certain_drafts_do_not_change_the_distribution(name: str, k: int) -> None:
    options, n_drafts = OPTION_SETS[name], ragged(k)
    sampler = independent_rows(options, ROWS, 6)
    first = sampler.distribution(MODEL[-1:])[0]
    likely = int(first.argmax())
    drafts = torch.tensor([likely, likely])[:k].expand(ROWS, k)  # penalties change the second
    tokens, kept = sampler.verify(logits_along(drafts, n_drafts), padded(drafts, n_drafts), n_drafts)
    assert (kept >= 1).all()
    assert (kept <= n_drafts + 1).all()
    assert_proportion((kept > 1)[n_drafts > 0], first[likely].item())
    assert_pairs_follow(options, sampler, tokens, kept)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPTION_SETS)
@pytest.mark.parametrize("k", [pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize(
    "own", [pytest.param(True, id="own"), pytest.param(False, id="shared", marks=pytest.mark.long)]
)
def test_sampled_drafts_do_not_change_the_distribution(name: str, k: int, own: bool) -> None:
    options, n_drafts = OPTION_SETS[name], ragged(k)
    sampler = independent_rows(options, ROWS, 6)
    drafter = independent_rows(options, ROWS, 6) if own else sampler
    drafts, probs = torch.empty(ROWS, 0, dtype=torch.int64), []
    for _ in range(k):
        last = drafts[:, -1] if probs else torch.full((ROWS,), -1)
        ids, q = drafter.sample_draft(DRAFTER[last], drafts)
        drafts = torch.cat([drafts, ids[:, None]], 1)
        probs.append(q)
    assert_sampled_from(probs[0][0], drafts[:, 0])
    first = sampler.distribution(MODEL[-1:])[0]
    tokens, kept = sampler.verify(
        logits_along(drafts, n_drafts), padded(drafts, n_drafts), n_drafts, torch.stack(probs, 1)
    )
    assert (kept >= 1).all()
    assert (kept <= n_drafts + 1).all()
    assert_proportion((kept > 1)[n_drafts > 0], first.minimum(probs[0][0]).sum().item())
    assert_pairs_follow(options, sampler, tokens, kept)


def test_drafts_of_the_model_itself_are_always_accepted() -> None:
    sampler = independent_rows(OPTION_SETS["frequency"], 500, 6)
    ids, q = sampler.sample_draft(MODEL[-1:].expand(500, 6), torch.empty(500, 0, dtype=torch.int64))
    drafts, n_drafts = ids[:, None], torch.ones(500, dtype=torch.int64)
    tokens, kept = sampler.verify(logits_along(drafts, n_drafts), drafts, n_drafts, q[:, None])
    assert (kept == 2).all()
    assert tokens[:, :1].equal(drafts)


def test_empty_residual_falls_back_to_the_model() -> None:
    # q is above p everywhere, which only rounding (or a faulty draft model) can cause: p - q is empty.
    sampler = independent_rows(SamplingParams(temperature=1.0, logit_bias={3: -math.inf}), 2000, 6)
    one = torch.ones(2000, dtype=torch.int64)
    tokens, kept = sampler.verify(
        logits_along(one[:, None], one), one[:, None], one, torch.full((2000, 1, 6), 1e9, dtype=torch.float32)
    )
    assert (kept == 1).all()
    assert_sampled_from(sampler.distribution(MODEL[-1:])[0], tokens[:, 0])


ROW = st.tuples(OPTIONS, st.lists(IDS, max_size=3))


def generate_one_by_one(rows: Sequence[tuple[SamplingParams, list[int]]], table: Tensor, length: int) -> Tensor:
    """Return the tokens [n, length] of a model whose logits depend on the last token."""
    sampler = sampler_of([options for options, _ in rows], 8, [prompt for _, prompt in rows])
    last, tokens = torch.full((len(rows),), -1), []
    for _ in range(length):
        last = sampler.sample(table[last])
        tokens.append(last)
    return torch.stack(tokens, 1)


def generate_with_drafts(
    rows: Sequence[tuple[SamplingParams, list[int]]], table: Tensor, length: int, k: int, right: Tensor, guessed: bool
) -> list[list[int]]:
    """Return the same with drafts, correct where `right`; with draft probabilities if `guessed`."""
    n, places = len(rows), torch.arange(k)
    sampler = sampler_of([options for options, _ in rows], 8, [prompt for _, prompt in rows])
    plain = generate_one_by_one(rows, table, length + k)
    generated: list[list[int]] = [[] for _ in rows]
    round_ = 0
    while any(len(tokens) < length for tokens in generated):
        done = torch.tensor([min(len(tokens), length) for tokens in generated])
        drafts = plain.gather(1, done[:, None] + places)
        drafts = torch.where(right.roll(round_, 0)[:n, :k], drafts, (drafts + 1) % 8)
        n_drafts = (torch.arange(n) + round_) % (k + 1)
        last = torch.tensor([tokens[-1] if tokens else -1 for tokens in generated])
        logits = table[torch.cat([last[:, None], drafts], 1)]
        q = (torch.nn.functional.one_hot(drafts, 8) + 1.0) / 9 if guessed else None
        tokens, kept = sampler.verify(logits, drafts, n_drafts, q)
        for row, (new, count) in enumerate(zip(tokens.tolist(), kept.tolist(), strict=True)):
            assert 1 <= count <= n_drafts[row] + 1
            generated[row] += new[:count]
        round_ += 1
    return [tokens[:length] for tokens in generated]


@drawn
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(0, 3), st.integers(0, 2**32), st.floats(0, 1))
def test_certain_drafts_do_not_change_tokens(
    rows: list[tuple[SamplingParams, list[int]]], k: int, seed: int, share: float
) -> None:
    # Greedy or sampled, with any parameters: every token is the one without drafts.
    table = random_logits(seed, 9, 8, dtype=torch.float32)
    right = torch.rand(7, 3, generator=torch.Generator().manual_seed(seed)) < share
    expected = generate_one_by_one(rows, table, 10).tolist()
    assert generate_with_drafts(rows, table, 10, k, right, guessed=False) == expected


@drawn
@given(st.lists(ROW, min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 2**32), st.floats(0, 1))
def test_sampled_drafts_do_not_change_greedy_tokens(
    rows: list[tuple[SamplingParams, list[int]]], k: int, seed: int, share: float
) -> None:
    rows = [(replace(options, temperature=0.0), prompt) for options, prompt in rows]
    sampling = (SamplingParams(temperature=1.0), [1])  # makes greedy rows use probabilities too
    table = random_logits(seed, 9, 8, dtype=torch.float32)
    right = torch.rand(7, 3, generator=torch.Generator().manual_seed(seed)) < share
    expected = generate_one_by_one(rows, table, 10).tolist()
    for more in ([], [sampling]):
        assert generate_with_drafts([*rows, *more], table, 10, k, right, guessed=True)[: len(rows)] == expected


@drawn
@given(OPTIONS, st.lists(IDS, max_size=3), st.lists(IDS, max_size=3), st.integers(0, 2**32))
def test_draft_distribution_counts_earlier_drafts(
    options: SamplingParams, prompt: list[int], drafts: list[int], seed: int
) -> None:
    logits = random_logits(seed, 1, 8)
    sampler = sampler_of([options], 8, [prompt])
    before = sampler.distribution(logits)
    _, q = sampler.sample_draft(logits, torch.tensor([drafts], dtype=torch.int64))
    assert sampler.distribution(logits).equal(before)  # nothing was counted
    sampler.slots.count_tokens(torch.tensor([drafts], dtype=torch.int64), torch.tensor([len(drafts)]))
    assert sampler.distribution(logits).equal(q)


# Slots. A small engine: requests arrive, share the batch and finish, and the last row fills the gaps.


@drawn
@given(st.lists(ROW, min_size=1, max_size=5), st.integers(0, 2**32), st.data())
def test_tokens_do_not_depend_on_the_batch(
    rows: list[tuple[SamplingParams, list[int]]], seed: int, data: st.DataObject
) -> None:
    table = random_logits(seed, 9, 8, dtype=torch.float32)
    alone = [generate_one_by_one([row], table, 6)[0].tolist() for row in rows]
    sampler = Sampler(4, 8, CPU)
    waiting, running = list(range(len(rows))), []
    generated: list[list[int]] = [[] for _ in rows]
    while waiting or running:
        while waiting and len(running) < 4 and (not running or data.draw(st.booleans())):
            request = waiting.pop()
            sampler.slots.set(len(running), *rows[request], ENDS)
            running.append(request)
        last = torch.tensor([generated[request][-1] if generated[request] else -1 for request in running])
        for request, token in zip(running, sampler.sample(table[last]).tolist(), strict=True):
            generated[request].append(token)
        for row in reversed(range(len(running))):
            if len(generated[running[row]]) == 6:
                sampler.slots.clear(row)
                sampler.slots.move(len(running) - 1, row)
                running[row] = running[-1]
                running.pop()
    assert generated == alone


@drawn
@given(st.permutations(range(4)), st.lists(ROW, min_size=4, max_size=4), st.integers(0, 2**32))
def test_slots_can_be_permuted(order: list[int], rows: list[tuple[SamplingParams, list[int]]], seed: int) -> None:
    one, other = (sampler_of([row[0] for row in rows], 8, [row[1] for row in rows], slots=8) for _ in range(2))
    logits = random_logits(seed, 4, 8)
    one.sample(logits)
    other.sample(logits)
    for slot, row in enumerate(order):
        other.slots.copy(row, 4 + slot)
    for slot in range(4):
        other.slots.move(4 + slot, slot)
    assert other.slots.metadata(4) == one.slots.metadata(4)
    for _ in range(3):
        assert other.distribution(logits[order]).equal(one.distribution(logits)[order])
        assert other.sample(logits[order]).equal(one.sample(logits)[order])


def test_slot_does_not_keep_state_of_its_last_request() -> None:
    everything = SamplingParams(
        temperature=1.0,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        logit_bias={0: 2.0, 1: -math.inf},
        min_new_tokens=3,
    )
    logits = random_logits(0, 2, 8)
    for options in (
        SamplingParams(temperature=1.0),
        SamplingParams(),
        SamplingParams(temperature=1.0, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0, min_new_tokens=3),
        SamplingParams(temperature=1.0, logit_bias={7: 1.0}),
    ):
        used, fresh = sampler_of([everything] * 2, 8, [[3, 4]] * 2), Sampler(2, 8, CPU)
        for _ in range(3):
            used.sample(logits)
        used.slots.clear(0)
        for sampler in (used, fresh):
            sampler.slots.set(0, options, [6], [7])
            sampler.slots.set(1, everything, [6], [7])
        assert used.distribution(logits).equal(fresh.distribution(logits))
        assert used.sample(logits).equal(fresh.sample(logits))


def test_copied_slot_continues_like_its_source() -> None:
    options = SamplingParams(temperature=1.0, frequency_penalty=1.0, repetition_penalty=1.2, seed=3)
    sampler = sampler_of([options], 8, [[1]], slots=3)
    logits = random_logits(0, 1, 8)
    for _ in range(4):
        sampler.sample(logits)
    sampler.slots.copy(0, 1)
    sampler.slots.copy(0, 2)
    for _ in range(4):
        assert len(set(sampler.sample(logits.expand(3, 8)).tolist())) == 1


def test_metadata_has_only_required_operations() -> None:
    sampler = sampler_of([SamplingParams()], 50, slots=3)
    idle = sampler.slots.metadata(1)
    assert (idle.greedy, idle.random, idle.top, idle.needs_logits_processing) == (True, False, 0, False)
    # Filters of a greedy row, and filters that keep every token, need nothing.
    sampler.slots.set(1, SamplingParams(top_k=3, top_p=0.5, min_p=0.1), [], [])
    sampler.slots.set(2, SamplingParams(temperature=1.0, top_k=50, top_p=1.0), [], [])
    assert sampler.slots.metadata(2) == idle
    all_three = sampler.slots.metadata(3)
    assert (all_three.random, all_three.top, all_three.needs_logits_processing) == (True, 0, False)
    # top_k needs the largest k logits; top_p alone needs all.
    sampler.slots.set(1, SamplingParams(temperature=1.0, top_k=3, top_p=0.5), [], [])
    sampler.slots.set(2, SamplingParams(temperature=1.0, top_k=8), [], [])
    assert (sampler.slots.metadata(2).top, sampler.slots.metadata(3).top) == (3, 8)
    sampler.slots.set(2, SamplingParams(temperature=1.0, top_p=0.5, repetition_penalty=2.0), [], [])
    assert (sampler.slots.metadata(3).top, sampler.slots.metadata(3).needs_logits_processing) == (50, True)
    sampler.slots.move(2, 1)
    assert (sampler.slots.metadata(1), sampler.slots.metadata(2).top, sampler.slots.metadata(3).top) == (idle, 50, 50)
    sampler.slots.clear(1)
    assert sampler.slots.metadata(3) == idle


class OperationRecorder(TorchDispatchMode):
    """Records each operation over the vocabulary, and fails on one that synchronises with the host."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.names = vocab_size, list[str]()

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero"), f"{name} waits for a value"
        wide = any(isinstance(x, Tensor) and x.dim() > 1 and x.shape[-1] == self.vocab_size for x in args)
        if wide and not func.is_view:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def recorded_operations(rows: Sequence[SamplingParams], call: Callable[[Sampler], object]) -> list[str]:
    sampler = sampler_of(rows, 1000)
    with OperationRecorder(1000) as recorder:
        call(sampler)
    return recorder.names


def test_greedy_rows_cost_one_argmax() -> None:
    logits, drafts = random_logits(0, 3, 3, 1000), torch.zeros(3, 2, dtype=torch.int64)
    rows = [SamplingParams(), SamplingParams(top_p=0.5), SamplingParams(seed=4)]
    assert recorded_operations(rows, lambda sampler: sampler.sample(logits[:, 0])) == ["argmax"]
    for q in (None, torch.full((3, 2, 1000), 1e-3)):
        assert recorded_operations(
            rows, lambda sampler, q=q: sampler.verify(logits, drafts, torch.tensor([0, 1, 2]), q)
        ) == ["argmax"]


def test_no_unnecessary_sort_and_no_synchronisation() -> None:
    logits, drafts, n_drafts = (
        random_logits(0, 3, 3, 1000),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.tensor([0, 1, 2]),
    )
    calls: list[Callable[[Sampler], object]] = [
        lambda sampler: sampler.sample(logits[:, 0]),
        lambda sampler: sampler.sample_draft(logits[:, 0], drafts),
        lambda sampler: sampler.verify(logits, drafts, n_drafts),
        lambda sampler: sampler.verify(logits, drafts, n_drafts, torch.full((3, 2, 1000), 1e-3)),
    ]
    every = SamplingParams(
        temperature=1.0,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logit_bias={1: 1.0},
        min_new_tokens=2,
    )
    for call in calls:
        plain = recorded_operations([SamplingParams(temperature=1.0)] * 3, call)
        assert not {"sort", "topk"} & set(plain)
        assert "topk" in recorded_operations([SamplingParams(), every, SamplingParams(temperature=1.0)], call)
    # A few operations: the difference, the quotient, exp and the sums, and those that find the maximum and the token.
    assert len(recorded_operations([SamplingParams(temperature=1.0)] * 3, calls[0])) <= 10


def test_slots_set_in_inference_mode_can_be_used_outside() -> None:
    with torch.inference_mode():
        sampler = sampler_of([SamplingParams(frequency_penalty=1.0)], 4)
        sampler.sample(torch.zeros(1, 4))
    assert sampler.sample(torch.zeros(1, 4)).item() == 1
