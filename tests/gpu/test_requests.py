"""What a request changes in a batch on a GPU, in CUDA graphs and compiled: its steering and its constraint."""

from __future__ import annotations

import random
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection import add

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

N_IDS = 64


class Alternating:
    """A constraint: even and odd ids take turns."""

    def start(self, vocab_size: int, end_ids: Collection[int]) -> AlternatingState:
        return AlternatingState(vocab_size)


class AlternatingState:
    complete = False

    def __init__(self, vocab_size: int) -> None:
        self.odd, self.ids = 0, torch.arange(vocab_size)

    def allowed(self) -> Tensor:
        return self.ids % 2 == self.odd

    def accept(self, token: int) -> bool:
        was_allowed = token % 2 == self.odd
        self.odd = 1 - self.odd
        return was_allowed


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(0)
    shape = {"n_layers": 3, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "vocab_size": N_IDS, "max_len": 256}
    return gh.build(gh.preset("tiny-decoder", init="normal", **shape)).eval().cuda()


@pytest.mark.parametrize("compile_", [False, True])
def test_steering_and_constraints_of_each_request(model: gh.models.Decoder, compile_: bool) -> None:
    """Twenty requests in eight slots: prompts of all lengths, prefilled alone, together and within decode steps."""
    made = gh.steering_vector(model, None, [[1, 2, 3], [4, 5, 6]], [[7, 8], [9, 10]], site="resid_post.1")
    vector = made.vector / made.vector.norm()
    vectors = {"v": gh.inspection.SteeringVector(vector, made.site, made.fingerprint)}
    engine = gh.Engine(model, slots=8, max_len=256, steering=vectors, compile=compile_)
    engine.warm_up()
    rng = random.Random(0)
    prompts = [[rng.randrange(N_IDS) for _ in range(rng.choice((1, 3, 20, 100)))] for _ in range(20)]
    scales = [rng.choice((0.0, 0.0, 6.0, -6.0)) for _ in prompts]
    constraints = [rng.choice((None, None, Alternating())) for _ in prompts]
    requests = [
        engine.submit(ids, max_new_tokens=10 + n % 7, steer={"v": scale}, constraint=constraint)
        for n, (ids, scale, constraint) in enumerate(zip(prompts, scales, constraints, strict=True))
    ]
    engine.run()
    found = set()
    for n, request in enumerate(requests):
        with gh.edit(model, {made.site: add(scales[n] * vector)}):
            (expected,) = gh.generate(model, None, [prompts[n]], max_new_tokens=10 + n % 7, constraint=constraints[n])
        assert request.ids == expected.ids, (n, scales[n], constraints[n])
        if constraints[n] is not None:
            assert [token % 2 for token in request.ids] == [at % 2 for at in range(len(request.ids))]
        found.add(tuple(request.ids))
    assert len(found) > 10


def test_engines_of_several_threads_capture_their_graphs_at_once(model: gh.models.Decoder) -> None:
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]
    expected = [done.ids for done in gh.generate(model, None, prompts, max_new_tokens=12)]

    def answers(_: int) -> list[list[int]]:
        engine = gh.Engine(model, slots=8, max_len=64)
        engine.warm_up()
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        engine.run()
        return [request.ids for request in requests]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(answers, range(8))) == [expected] * 8
