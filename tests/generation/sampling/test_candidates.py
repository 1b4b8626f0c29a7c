"""What a token was drawn from: the candidates and probabilities are those that the sampler used, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import glasshouse as gh
from glasshouse.generation.sampling import sampler as sampling
from glasshouse.generation.sampling.candidates import Draws
from glasshouse.generation.sampling.sampler import Sampler
from glasshouse.generation.speculation import PromptLookup

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.3, "top_k": 5, "seed": 2},
    {"temperature": 0.9, "top_p": 0.6, "seed": 3},
    {"temperature": 1.1, "min_p": 0.2, "frequency_penalty": 0.8, "seed": 4},
    {"temperature": 1.0, "repetition_penalty": 1.7, "logit_bias": {3: 2.0, 4: -float("inf")}, "seed": 5},
]


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", vocab_size=50, end_ids=(7,))).eval()


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """The raw logits and the distribution of each step, as the sampler of a second path computes them."""
    found: list[tuple[Tensor, Tensor]] = []
    sample = Sampler.sample_with_candidates

    def watched(self: Sampler, logits: Tensor) -> tuple[Tensor, Tensor]:
        found.append((logits.clone(), self.distribution(logits)))  # before the token is counted
        return sample(self, logits)

    monkeypatch.setattr(Sampler, "sample_with_candidates", watched)
    return found


@pytest.mark.parametrize("options", SETTINGS)
def test_candidates_are_those_the_sampler_used(
    options: dict[str, Any], model: gh.models.Decoder, used: list[tuple[Tensor, Tensor]]
) -> None:
    (made,) = gh.generate(model, None, [[1, 2, 3]], max_new_tokens=12, candidates=6, **options)
    assert made.draws is not None
    ended = made.finish_reason == "stop"
    assert len(made.draws) == len(made.ids) + ended  # the token that ended it was drawn too
    assert [draw.token.id for draw in made.draws][: len(made.ids)] == made.ids
    assert [draw.token.logprob for draw in made.draws][: len(made.ids)] == made.logprobs
    for draw, (logits, distribution) in zip(made.draws, used, strict=False):
        for one in (draw.token, *draw.candidates):
            assert one.probability == float(distribution[0, one.id])
            assert one.logprob == float(logits[0].log_softmax(-1)[one.id])
        listed = [one.probability for one in draw.candidates]
        assert listed == distribution[0].topk(6).values.tolist()
        assert len({one.id for one in draw.candidates}) == 6


def test_requests_of_one_batch_have_their_own(model: gh.models.Decoder) -> None:
    engine = gh.Engine(model, slots=4, max_len=32)
    counts = (0, 2, 9, 99)  # there are 50 tokens
    sampled = {"max_new_tokens": 5, "temperature": 0.8}
    requests = [engine.submit([1, 2], **sampled, seed=seed, candidates=k) for seed, k in enumerate(counts)]
    engine.run()
    plain = gh.generate(model, None, [[1, 2]], **sampled, n=4)
    for k, request, alone in zip(counts, requests, plain, strict=True):
        (found,) = request.completions()
        assert found.ids == alone.ids  # keeping changes nothing
        if k == 0:
            assert found.draws is None
            continue
        assert found.draws is not None
        assert all(len(draw.candidates) == min(k, 50) for draw in found.draws)
        assert [draw.token.id for draw in found.draws] == [*found.ids, 7][: len(found.draws)]


def test_a_stop_string_drops_the_draws_behind_it() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)  # every token is a byte
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok))).eval()
    (plain,) = gh.generate(model, tok, "to be", max_new_tokens=40, temperature=1.0)
    (found,) = gh.generate(
        model, tok, "to be", max_new_tokens=40, temperature=1.0, stop=plain.text[10:12], candidates=3
    )
    assert found.finish_reason == "stop"
    assert found.draws is not None
    assert [draw.token.id for draw in found.draws] == found.ids


@pytest.mark.parametrize("call", [{"beams": 2}, {"speculator": PromptLookup()}])
def test_not_where_tokens_are_not_drawn_one_by_one(call: dict[str, Any], model: gh.models.Decoder) -> None:
    with pytest.raises(gh.InputError, match="candidates"):
        gh.generate(model, None, [[1]], candidates=1, **call)


def test_none_are_computed_unless_asked_for(model: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("candidates were computed")

    monkeypatch.setattr(sampling, "_top_ids", refuse)
    gh.generate(model, None, [[1, 2]], max_new_tokens=3, temperature=1.0)
    with pytest.raises(AssertionError, match="computed"):
        gh.generate(model, None, [[1, 2]], max_new_tokens=3, temperature=1.0, candidates=1)


@settings(max_examples=40)
@given(st.integers(1, 3), st.integers(sampling.BLOCK, 700), st.integers(1, 9), st.integers(0, 2**31))
def test_the_largest_by_blocks_are_the_largest(n: int, length: int, k: int, seed: int) -> None:
    k = min(k, length // sampling.BLOCK)
    scores = torch.randint(0, 10**6, (n, length), generator=torch.Generator().manual_seed(seed)).float()
    scores[0, : length // 2] = -torch.inf
    limit, sampling.MANY = sampling.MANY, 0
    try:
        found = sampling._top_ids(scores, k)
    finally:
        sampling.MANY = limit
    assert scores.gather(1, found).tolist() == scores.topk(k).values.tolist()
    assert all(len(set(row)) == k for row in found.tolist())


def test_draws_are_kept_exactly() -> None:
    rng = np.random.default_rng(0)
    rows = [np.column_stack([rng.integers(0, 2**31, 4), rng.random((4, 2))]) for _ in range(5)]
    draws = Draws(3)
    for row in rows:
        draws.add(row)
    for draw, row in zip(draws, rows, strict=True):
        assert [list(one) for one in (draw.token, *draw.candidates)] == row.tolist()
    draws.truncate(2)
    assert len(draws) == 2
    assert draws.n_bytes == 2 * 4 * 3 * 8
