"""Mixed prefill on the CPU, with the GPU's decode attention written as loops."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from generation.test_request_internals import make_probes
from torch import Tensor

import glasshouse as gh
from glasshouse.generation import Completion
from glasshouse.generation.engine import model_runner, scheduler
from glasshouse.layers.attend import decode as decode_attention
from glasshouse.layers.attend.layout import make_layout
from glasshouse.layers.cache import MixedBatch


def attend_in_loops(q: Tensor, k: Tensor, v: Tensor, key_counts: Tensor, rows: Tensor, scale: float) -> Tensor:
    """Attend with one query at a time, over the leading keys of its cache row."""
    z = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for i in range(q.shape[2]):
            row, count = int(rows[0, i] if rows.dim() == 2 else rows[b]), int(key_counts[b, i])
            for head in range(q.shape[1]):
                keys, values = (kv[row, head // group, :count] for kv in (k, v))
                z[b, head, i] = torch.softmax(keys @ q[b, head, i] * scale, 0) @ values
    return z


@pytest.fixture
def mixed_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Use small chunks for mixed prefill, and record the width of each mixed step."""
    widths: list[int] = []
    decode_mixed = model_runner.ModelRunner._decode_mixed
    monkeypatch.setattr(decode_attention, "is_supported", lambda *_: True)
    monkeypatch.setattr(decode_attention, "attend", attend_in_loops)
    for module in (scheduler, model_runner):
        monkeypatch.setattr(module, "MIXED_PREFILL_TOKENS", 5)
    monkeypatch.setattr(
        model_runner.ModelRunner,
        "_decode_mixed",
        lambda self, width, hooks: [widths.append(width), decode_mixed(self, width, hooks)][1],
    )
    return widths


def make_model(**settings: object) -> gh.models.Decoder:
    torch.manual_seed(5)
    spec = gh.preset("tiny-decoder", init={"kind": "normal", "std": 0.3}, end_ids=(7,), max_len=96, **settings)
    model = gh.build(spec, dtype=torch.float64).eval()
    assert isinstance(model, gh.models.Decoder)
    return model


def draw_prompts(count: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    shared = [source.randrange(256) for _ in range(24)]  # long enough for prefix caching
    return [
        shared * source.randint(0, 1) + [source.randrange(256) for _ in range(source.randint(1, 30))]
        for _ in range(count)
    ]


@pytest.mark.parametrize("spans", [("",), ("[position=new]",), ("", "[position=new]", "[position=prompt]")])
def test_what_is_read_and_edited_is_as_without_mixing(spans: tuple[str, ...], mixed_steps: list[int]) -> None:
    model, rng = make_model(), random.Random(len(spans))
    names = [name for name, site in gh.inspection.sites(model).items() if "position" in site.axes]
    prompts = draw_prompts(14, seed=2)
    asked: list[dict[str, Any]] = [
        {"max_new_tokens": 3 + number, "lens": number % 3} for number in range(len(prompts))
    ]
    for number, one in enumerate(asked):
        if number % 2:
            one["record"] = [name + rng.choice(spans) for name in rng.sample(names, 5)]
        if number % 4 > 1:
            one["probes"] = ("b", "c")
        if number % 5 == 0:
            one["edits"] = {"z.0[head=1]": 0.0, "resid_post.0[position=new]": gh.inspection.scale(0.5)}

    def run(slots: int) -> list[Completion]:
        engine = gh.Engine(model, slots=slots, max_len=96, prefill_chunk=8, probes=make_probes(model))
        requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, asked, strict=True)]
        engine.run()
        return [request.completions()[0] for request in requests]

    alone = run(1)
    assert not mixed_steps
    for one, expected in zip(run(3), alone, strict=True):
        assert one.ids == expected.ids
        assert (one.recording is None) == (expected.recording is None)
        for name, value in (expected.recording or {}).items():
            torch.testing.assert_close(one.recording[name], value, rtol=1e-9, atol=1e-9)
        for name, scores in (expected.scores or {}).items():
            assert one.scores is not None
            assert one.scores[name] == pytest.approx(scores, rel=1e-4, abs=1e-5)  # in float32
        if expected.lens is not None:
            torch.testing.assert_close(one.lens, expected.lens, rtol=1e-5, atol=1e-6)
    assert len(mixed_steps) > 5


def test_what_needs_rows_of_its_own_keeps_its_first_step_from_being_mixed(mixed_steps: list[int]) -> None:
    model = make_model()
    first, *others = draw_prompts(17, seed=3)
    engine = gh.Engine(model, slots=16, max_len=96)
    for prompt in others[:14]:
        engine.submit(prompt, max_new_tokens=40, min_new_tokens=40)
    for _ in range(3):
        engine.step()
    first = ([*first] * 20)[:30]  # the longest gets its slot first
    recorded = engine.submit(first, max_new_tokens=4, min_new_tokens=4, record="pattern.0[head=1]")
    beside = engine.submit([*others[15], 3, 4, 5, 6][:12], max_new_tokens=2, min_new_tokens=2)
    engine.run()
    [expected] = gh.generate(model, None, [first], max_new_tokens=4, min_new_tokens=4, record="pattern.0[head=1]")
    [found] = recorded.completions()
    assert found.recording is not None
    assert expected.recording is not None
    torch.testing.assert_close(*(one.recording["pattern.0[head=1]"] for one in (found, expected)), rtol=0, atol=1e-9)
    assert found.ids == expected.ids
    plain = gh.generate(model, None, [beside.prompt], max_new_tokens=2, min_new_tokens=2)[0]
    assert beside.completions()[0].ids == plain.ids


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, {"n_kv_heads": 1, "position": {"kind": "rotary"}}, {"position": {"kind": "learned"}}]
)
def test_mixed_prefill_equals_separate_prefill(settings: dict[str, object], mixed_steps: list[int]) -> None:
    model = make_model(**settings)
    prompts = draw_prompts(14, seed=1)
    choices = [{"temperature": 0.8 * (i % 2), "seed": i, "max_new_tokens": 3 + i} for i in range(len(prompts))]
    alone = [gh.generate(model, None, [prompt], **one)[0].ids for prompt, one in zip(prompts, choices, strict=True)]
    assert not mixed_steps  # no other sequence is decoding
    engine = gh.Engine(model, slots=3, max_len=96, prefill_chunk=8)
    requests = [engine.submit(prompt, **one) for prompt, one in zip(prompts, choices, strict=True)]
    engine.run()
    assert [request.ids for request in requests] == alone
    assert len(mixed_steps) > 20
    assert not engine.slots.running
    assert int(engine._runner.cache.lengths.max()) == 0


@pytest.mark.slow
def test_beam_search_and_cancellation_during_mixed_prefill(mixed_steps: list[int]) -> None:
    model = make_model()
    prompts = draw_prompts(10, seed=2)
    alone = [
        gh.generate(model, None, [prompt], 9, beams=1 + 2 * (i % 3 == 0))[0].ids for i, prompt in enumerate(prompts)
    ]
    engine = gh.Engine(model, slots=4, max_len=96, prefill_chunk=8)
    requests = [
        engine.submit(prompt, max_new_tokens=9, beams=1 + 2 * (i % 3 == 0)) for i, prompt in enumerate(prompts)
    ]
    to_cancel = [engine.submit(prompt, max_new_tokens=60) for prompt in draw_prompts(6, seed=3)]
    step = 0
    while engine.step():
        step += 1
        if step % 7 == 0 and (left := [request for request in to_cancel if not request.done]):
            engine.cancel(left[0])
    assert [request.ids for request in requests] == alone
    assert mixed_steps
    assert not engine.slots.running


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings", [{"windows": (5, 0)}, {"attention_softcap": 5.0}, {"position": {"kind": "alibi"}}]
)
def test_models_without_key_count_masks_do_not_mix_prefill(
    settings: dict[str, object], mixed_steps: list[int]
) -> None:
    model = make_model(**settings)
    assert not model.stack.supports_mixed_prefill(model.token_embedding.table.weight)
    engine = gh.Engine(model, slots=2, max_len=96, prefill_chunk=8)
    prompts = draw_prompts(5, seed=4)
    requests = [engine.submit(prompt, max_new_tokens=6) for prompt in prompts]
    engine.run()
    assert not mixed_steps
    assert [one.ids for one in requests] == [gh.generate(model, None, [one], 6)[0].ids for one in prompts]


def test_mixed_batch_of_one_token_writes_to_its_row_only() -> None:
    cache = make_model().make_cache(3, 8)
    cache.keys[0].fill_(1.0)
    view = MixedBatch(cache, torch.tensor([1]), torch.tensor([4]))
    slots = view.write_offsets(make_layout(torch.zeros(1, 1), start=view.start_positions()))
    heads, width = cache.keys[0].shape[1], cache.keys[0].shape[3]
    k = torch.full((1, heads, 1, width), 7.0, dtype=torch.float64)
    view.update(0, slots[0], k, k)
    changed = (cache.keys[0] != 1.0).any(-1).nonzero().tolist()
    assert changed == [[1, head, 5] for head in range(heads)]
