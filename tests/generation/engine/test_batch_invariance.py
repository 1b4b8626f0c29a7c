"""With `batch_invariant` a request has the same log-probabilities, bit for bit, alone and among any neighbours."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from examples import first_of

import glasshouse as gh
from glasshouse.generation import PromptLookup

MAX_LEN = 72
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"position": {"kind": "rotary"}, "norm": {"kind": "rms"}, "feedforward": {"kind": "swiglu"}},
    "gpt2": {"position": {"kind": "learned"}, "qkv_bias": True},
    "windows": {"position": {"kind": "rotary"}, "windows": (8, 0)},
    "encoder-decoder": {"start_id": 1},
}


def build(kind: str) -> gh.models.Decoder | gh.models.Seq2Seq:
    torch.manual_seed(2)
    preset = "tiny-seq2seq" if "start_id" in KINDS[kind] else "tiny-decoder"
    shape = {"d_model": 160, "n_heads": 5, "n_kv_heads": 5, "d_ff": 384, "vocab_size": 300}
    model = gh.build(gh.preset(preset, max_len=MAX_LEN, end_ids=(), **shape, **KINDS[kind])).eval()
    assert isinstance(model, gh.models.Decoder | gh.models.Seq2Seq)
    return model


def draw(count: int, seed: int) -> list[list[int]]:
    """Return prompts of 1 to 40 tokens, half of them with a common prefix."""
    source = random.Random(seed)
    shared = [source.randrange(300) for _ in range(24)]
    return [
        shared * source.randint(0, 1) + [source.randrange(300) for _ in range(source.randint(1, 16))]
        for _ in range(count)
    ]


@pytest.mark.few(1)
@pytest.mark.parametrize("weights", first_of(["copy", "own"]))
@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_change_no_bit(kind: str, weights: gh.generation.Weights) -> None:
    model, prompts = build(kind), draw(11, seed=1)
    source_len = 40 if kind == "encoder-decoder" else None

    def make() -> gh.Engine:
        return gh.Engine(
            model,
            slots=7,
            max_len=MAX_LEN,
            source_len=source_len,
            prefill_chunk=16,
            weights=weights,
            batch_invariant=True,
        )

    choices: list[dict[str, Any]] = [
        {"max_new_tokens": 4 + 3 * (i % 5), "temperature": 0.9 * (i % 2), "seed": i} for i in range(len(prompts))
    ]
    crowd = make()
    requests = [crowd.submit(prompt, **one) for prompt, one in zip(prompts, choices, strict=True)]
    crowd.run()
    for prompt, one, request in zip(prompts, choices, requests, strict=True):
        lonely = make()
        alone = lonely.submit(prompt, **one)
        lonely.run()
        assert (request.ids, request.logprobs) == (alone.ids, alone.logprobs)


def test_every_step_has_the_same_shape_and_no_prefix_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gh.Engine(build("llama"), slots=5, max_len=MAX_LEN, prefill_chunk=16, batch_invariant=True)
    shapes, forward = [], engine._runner._forward

    def watched(ids: torch.Tensor, view: Any, **more: Any) -> torch.Tensor:  # noqa: ANN401
        shapes.append((tuple(ids.shape), getattr(view, "max_len", None)))
        return forward(ids, view, **more)

    monkeypatch.setattr(engine._runner, "_forward", watched)
    for _ in range(2):
        engine.submit(list(range(21)), max_new_tokens=2)
    engine.run()
    # On a CPU every sequence has a step of its own, with a cache of its own length.
    first, rest, step, last = ((1, 16), None), ((1, 4), 20), ((1, 1), 21), ((1, 1), 22)
    assert shapes == [first, rest, step, first, last, rest, step, last]
    shapes.clear()
    for _ in range(2):
        engine.submit([1, 2, 3, 4], max_new_tokens=1)
    engine.run()
    assert shapes == [((1, 3), None), ((1, 3), None), ((1, 1), 4), ((1, 1), 4)]


def test_drafts_and_batch_invariance_exclude_each_other() -> None:
    with pytest.raises(gh.InputError, match="batch_invariant and speculator were both given"):
        gh.Engine(build("llama"), speculator=PromptLookup(), batch_invariant=True)
