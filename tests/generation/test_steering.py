"""Steering by request: each row of a batch as if the model were edited, and its neighbours as if it were not."""

from __future__ import annotations

import random
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse.errors import InputError
from glasshouse.generation import PromptLookup
from glasshouse.inspection import SteeringVector, add

N_IDS = 40
SCALES: list[dict[str, float]] = [{}, {"a": 3.0}, {"b": -4.0}, {"a": -2.0, "b": 5.0, "c": 1.5}, {"c": 0.0}]


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    return gh.build(gh.preset("tiny-decoder", vocab_size=N_IDS, n_layers=3, max_len=128, init="normal")).eval()


@pytest.fixture(scope="module")
def vectors(model: gh.models.Decoder) -> dict[str, SteeringVector]:
    made = {
        name: gh.steering_vector(model, None, [[1, 2, 3], [4, 5, 6]], [[7, 8], [9, number]], site=site)
        for number, (name, site) in enumerate({"a": "resid_post.0", "b": "resid_post.2", "c": "resid_post.0"}.items())
    }
    return {name: SteeringVector(one.vector * 5 / one.vector.norm(), *_rest(one)) for name, one in made.items()}


def _rest(one: SteeringVector) -> tuple[str, str]:
    return one.site, one.fingerprint


def edited(
    model: gh.models.Decoder, vectors: Mapping[str, SteeringVector], scales: Mapping[str, float], at: str = "all"
) -> Any:  # noqa: ANN401 - a context manager
    """Edit the model itself, which is how steering is done without an engine."""
    edits: dict[str, Any] = {}
    where = "" if at == "all" else f"[position={at}]"
    for name, scale in scales.items():
        edits.setdefault(vectors[name].site + where, []).append(add(scale * vectors[name].vector))
    return gh.edit(model, edits) if edits else nullcontext()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(N_IDS) for _ in range(rng.choice((1, 2, 5, 30, 60)))] for _ in range(count)]


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}, {"beams": 3}])
@pytest.mark.parametrize("prefill_chunk", [256, 7])  # prompts in one pass, and in pieces
def test_each_request_is_steered_as_by_an_edit(
    model: gh.models.Decoder, vectors: dict[str, SteeringVector], settings: dict[str, float], prefill_chunk: int
) -> None:
    engine = gh.Engine(model, slots=6, max_len=100, steering=vectors, prefill_chunk=prefill_chunk)
    places = ("all", "prompt", "new")
    given = [(ids, SCALES[n % len(SCALES)], places[n % 3], 6 + n % 9) for n, ids in enumerate(prompts(15))]
    requests = [
        engine.submit(ids, max_new_tokens=new, steer=scales, steer_at=at, **settings)
        for ids, scales, at, new in given
    ]
    engine.run()
    found = set()
    for request, (ids, scales, at, new) in zip(requests, given, strict=True):
        with edited(model, vectors, scales, at):
            (expected,) = gh.generate(model, None, [ids], max_new_tokens=new, **settings)
        assert request.ids == expected.ids, (scales, at)
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
        found.add(tuple(request.ids))
    assert len(found) > 8


def test_what_was_new_is_not_reused_as_a_prompt(model: gh.models.Decoder, vectors: dict[str, SteeringVector]) -> None:
    """A second turn continues the first, whose answer was steered; in the second turn it is not."""
    engine = gh.Engine(model, slots=1, max_len=100, steering=vectors)
    options: dict[str, Any] = {"max_new_tokens": 6, "steer": {"a": 4.0}, "steer_at": "new"}
    ids = [random.Random(5).randrange(N_IDS) for _ in range(40)]
    first = engine.submit(ids, **options)
    engine.run()
    turn = [*ids, *first.ids, 5]
    second = engine.submit(turn, **options)
    engine.run()
    alone = gh.Engine(model, slots=1, max_len=100, steering=vectors)
    expected = alone.submit(turn, **options)
    alone.run()
    assert second.logprobs == expected.logprobs
    assert engine.slots.n_reused == 0
    with pytest.raises(InputError, match="steer_at is 'answer', but it must be one of all, prompt, new"):
        gh.SamplingParams(steer_at="answer")


@pytest.mark.few(1)
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.3, "seed": 8}])
def test_neighbours_are_bit_equal_to_alone(
    model: gh.models.Decoder, vectors: dict[str, SteeringVector], settings: dict[str, float]
) -> None:
    """Also what is steered, what is steered by 0, and an engine that has no vectors."""
    engine = gh.Engine(model, slots=6, max_len=100, steering=vectors, batch_invariant=True)
    plain = gh.Engine(model, slots=6, max_len=100, batch_invariant=True)
    given = [(prompt, SCALES[n % len(SCALES)]) for n, prompt in enumerate(prompts(6, seed=1))]

    def run(on: gh.Engine, batch: list[tuple[list[int], dict[str, float]]]) -> list[tuple[list[int], list[float]]]:
        requests = [on.submit(ids, max_new_tokens=8, steer=scales, **settings) for ids, scales in batch]
        on.run()
        return [(one.ids, one.logprobs) for one in requests]

    together = run(engine, given)
    assert together == [run(engine, [one])[0] for one in given]
    for found, (ids, scales) in zip(together, given, strict=True):
        (without,) = run(plain, [(ids, {})])
        assert (found == without) == (not any(scales.values()))


def test_a_prefix_is_not_reused_under_another_steering(
    model: gh.models.Decoder, vectors: dict[str, SteeringVector]
) -> None:
    engine = gh.Engine(model, slots=3, max_len=100, steering=vectors)
    ids = [random.Random(5).randrange(N_IDS) for _ in range(40)]

    def run(scales: dict[str, float]) -> tuple[list[int], int]:
        before = engine.slots.n_reused
        request = engine.submit(ids, max_new_tokens=8, steer=scales)
        engine.run()
        with edited(model, vectors, scales):
            assert request.ids == gh.generate(model, None, [ids], max_new_tokens=8)[0].ids
        return request.ids, engine.slots.n_reused - before

    first, reused = run({})
    assert reused == 0
    assert run({"a": 0.0}) == (first, 39)  # which is none
    steered, reused = run({"a": 4.0})
    assert reused == 0
    assert steered != first
    assert run({"a": 4.0}) == (steered, 39)
    assert run({"a": 4.5})[1] == 0


def test_drafts_are_verified_by_the_steered_model(
    model: gh.models.Decoder, vectors: dict[str, SteeringVector]
) -> None:
    engine = gh.Engine(model, slots=3, max_len=100, steering=vectors, speculator=PromptLookup())
    requests = [engine.submit([1, 2, 3, 1, 2], max_new_tokens=20, steer=scales) for scales in SCALES]
    engine.run()
    for request, scales in zip(requests, SCALES, strict=True):
        with edited(model, vectors, scales):
            assert request.ids == gh.generate(model, None, [[1, 2, 3, 1, 2]], max_new_tokens=20)[0].ids


def test_without_vectors_nothing_is_there(model: gh.models.Decoder, vectors: dict[str, SteeringVector]) -> None:
    def hooked(engine: gh.Engine) -> list[str]:
        return [name for name, module in engine._runner.model.named_modules() if module._forward_hooks]

    assert hooked(gh.Engine(model, slots=1, max_len=8)) == []
    assert hooked(gh.Engine(model, slots=1, max_len=8, steering=vectors)) == ["stack.blocks.0", "stack.blocks.2"]
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_refused(model: gh.models.Decoder, vectors: dict[str, SteeringVector]) -> None:
    engine = gh.Engine(model, slots=1, max_len=8, steering=vectors)
    with pytest.raises(InputError, match="there is no steering vector 'aa'; did you mean a"):
        engine.submit([1], steer={"aa": 1.0})
    with pytest.raises(InputError, match="there is no steering vector 'a'; none is registered"):
        gh.Engine(model, slots=1, max_len=8).submit([1], steer={"a": 1.0})
    for wrong in ({"a": float("nan")}, {"a": "much"}, ["a"]):
        with pytest.raises(InputError, match="steer is"):
            engine.submit([1], steer=wrong)
    torch.manual_seed(9)
    other = gh.build(model.spec).eval()
    with pytest.raises(InputError, match="the steering vector 'a' was made for another model"):
        gh.Engine(other, slots=1, max_len=8, steering=vectors)
    pair = gh.build(gh.preset("tiny-seq2seq", start_id=0)).eval()
    with pytest.raises(InputError, match="give a decoder"):
        gh.Engine(pair, slots=1, max_len=8, steering=vectors)


NUMBERS = ["1, 2, 3, 4, 5, 6, 7, 8", "x = [10, 20, 30, 40, 50]", "(0, 1), (2, 3), (4, 5)", "0x10, 256, 1024, 4096"]
NAMES = ["a, b, c, d, e, f, g, h", "x = [name, key, value, item]", "(self, other), (left, right)", "path, file, mode"]


@pytest.mark.long
def test_more_steering_is_more_of_it() -> None:
    """Towards numbers and away from names, python-3m writes more digits the larger the scale."""
    model, tok = gh.load("python-3m")
    vector = gh.steering_vector(model, tok, NUMBERS, NAMES)
    engine = gh.Engine(model, tok, slots=16, max_len=64, steering={"digits": vector})
    shares = []
    for scale in (-1.0, 0.0, 0.5, 1.0, 2.0):
        requests = [
            engine.submit(prompt, max_new_tokens=24, temperature=0.8, seed=seed, steer={"digits": scale})
            for prompt in ("x = [", "def main(", "values = (", "    return ")
            for seed in range(4)
        ]
        engine.run()
        text = "".join(request.text for request in requests)
        shares.append(sum(letter.isdigit() for letter in text) / len(text))
    assert shares == sorted(shares)
    assert shares[-1] > 0.5
    assert shares[1] < 0.1
