"""The engine gives each request what it would get alone, and frees all slots."""

from __future__ import annotations

import copy
import gc
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from examples import SHARE, first_of, up_to
from generation.reference import reference_generate
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from spec_strategy import SHAPES

import glasshouse as gh
from glasshouse.generation import DraftModel, PromptLookup, Request, SamplingParams
from glasshouse.generation.engine.model_runner import ModelRunner
from glasshouse.generation.engine.slots import SequenceState
from glasshouse.generation.engine.step import ScheduledStep, StepOutput
from glasshouse.generation.speculation import Speculator
from glasshouse.models import Decoder, Seq2Seq

MAX_LEN = 48
WIDE = {"kind": "normal", "std": 0.3}  # initial weights for which logits differ clearly
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"position": {"kind": "learned"}},
    "llama": {
        "position": {"kind": "rotary"},
        "norm": {"kind": "rms"},
        "feedforward": {"kind": "swiglu"},
        "n_kv_heads": 2,
        "qkv_bias": False,
    },
    "windows": {"position": {"kind": "rotary"}, "windows": (4, 0), "n_kv_heads": 1},
    "all windows": {"position": {"kind": "sinusoidal"}, "windows": (6,)},
    "alibi": {"position": {"kind": "alibi"}, "qk_norm": True},
    "relative": {"position": {"kind": "relative"}, "norm_placement": "post"},
    "soft-cap": {"attention_softcap": 4.0, "norm_placement": "sandwich", "position": {"kind": "none"}},
    **SHAPES,
    "encoder-decoder": {"start_id": 1},
    "t5": {"start_id": 0, "position": {"kind": "relative"}, "norm": {"kind": "rms"}, "n_kv_heads": 2},
}


def build(kind: str) -> Decoder | Seq2Seq:
    torch.manual_seed(sum(map(ord, kind)))
    preset = "tiny-seq2seq" if "start_id" in KINDS[kind] else "tiny-decoder"
    spec = gh.preset(preset, vocab_size=40, max_len=MAX_LEN, end_ids=(7,), init=WIDE, **KINDS[kind])
    model = gh.build(spec, dtype=torch.float64).eval()
    assert isinstance(model, Decoder | Seq2Seq)
    return model


MODELS = {kind: build(kind) for kind in KINDS}


def ragged(seed: int, count: int, shared: int = 20) -> list[list[int]]:
    """Return prompts of various lengths, most with a common prefix."""
    rng = random.Random(seed)
    beginning = [rng.randrange(40) for _ in range(shared)]
    return [
        beginning[: rng.randint(0, shared)] + [rng.randrange(40) for _ in range(rng.randint(1, 12))]
        for _ in range(count)
    ]


def random_options(seed: int) -> SamplingParams:
    rng = random.Random(seed)
    options = SamplingParams(max_new_tokens=rng.randint(1, 14), seed=seed)
    match seed % 4:
        case 0:
            return options
        case 1:
            return replace(options, temperature=0.9, top_k=12)
        case 2:
            return replace(options, temperature=1.3, top_p=0.8, frequency_penalty=0.4, min_new_tokens=3)
        case _:
            return replace(options, repetition_penalty=1.3, logit_bias={3: 1.0, 5: -2.0}, stop_token_ids=(11,))


@pytest.mark.few(3)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "chunk"), first_of([(3, 5), (1, 48), (9, 16)]))
def test_batched_chunked_prefill_equals_uncached_reference(kind: str, slots: int, chunk: int) -> None:
    model, prompts = MODELS[kind], ragged(1, 9)
    engine = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=chunk)
    requests = [engine.submit(prompt, random_options(i)) for i, prompt in enumerate(prompts)]
    engine.run()
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        assert request.ids == reference_generate(model, prompt, random_options(i), MAX_LEN), f"prompt {i}"


def speculators(kind: str) -> Iterator[Speculator]:
    yield PromptLookup(n_draft_tokens=5, max_ngram=2)
    if isinstance(MODELS[kind], Decoder):
        yield DraftModel(MODELS["gpt2"], n_draft_tokens=3)  # a poor one
        yield DraftModel(MODELS[kind], n_draft_tokens=4)  # one that is always right


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_speculative_greedy_equals_plain_greedy(kind: str) -> None:
    model, prompts = MODELS[kind], ragged(2, 7)
    for speculator in speculators(kind):
        engine = gh.Engine(model, slots=3, max_len=MAX_LEN, prefill_chunk=9, speculator=speculator)
        requests = [engine.submit(prompt, max_new_tokens=12) for prompt in prompts]
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.ids == reference_generate(model, prompt, SamplingParams(max_new_tokens=12), MAX_LEN)


def test_accepted_drafts_save_steps() -> None:
    model, steps = MODELS["llama"], {}
    for name, speculator in (("plain", None), ("draft", DraftModel(model, n_draft_tokens=4))):
        engine = gh.Engine(model, slots=1, max_len=MAX_LEN, speculator=speculator)
        request = engine.submit([1, 2, 3], max_new_tokens=20, logit_bias={7: -100.0})
        steps[name] = 1
        while engine.step():
            steps[name] += 1
        assert len(request.ids) == 20
    assert (steps["plain"], steps["draft"]) == (20, 4)


def test_prompt_lookup_gives_the_tokens_of_plain_sampling() -> None:
    model, prompts = MODELS["gpt2"], [[5, 6, 8] * 5, [9, 2] * 6]
    options = SamplingParams(max_new_tokens=14, temperature=0.6, seed=4)
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN, speculator=PromptLookup())
    requests = [engine.submit(prompt, options) for prompt in prompts]
    engine.run()
    assert [request.ids for request in requests] == [
        reference_generate(model, prompt, options, MAX_LEN) for prompt in prompts
    ]


@pytest.mark.slow
def test_speculative_sampling_follows_the_model_distribution() -> None:
    """Chi-square of the first two tokens, sampled with a draft model, against the model's probabilities."""
    model, draft = MODELS["gpt2"], MODELS["alibi"]
    assert isinstance(draft, Decoder)
    options = SamplingParams(max_new_tokens=2, temperature=1.0, top_k=4, logit_bias={7: -100.0})
    engine = gh.Engine(model, slots=64, max_len=8, speculator=DraftModel(draft, n_draft_tokens=2))
    requests = [engine.submit([3, 1], replace(options, seed=seed)) for seed in range(800)]
    engine.run()
    counts: dict[tuple[int, ...], int] = {}
    for request in requests:
        counts[tuple(request.ids)] = counts.get(tuple(request.ids), 0) + 1

    def probabilities(prompt: list[int]) -> torch.Tensor:
        with torch.no_grad():
            logits = model(torch.tensor([prompt]))[0, -1]
        logits[7] -= 100
        least = logits.topk(4).values[-1]
        return logits.masked_fill(logits < least, -torch.inf).softmax(-1)

    first = probabilities([3, 1])
    statistic, cells = 0.0, 0
    for a in first.nonzero()[:, 0].tolist():
        second = probabilities([3, 1, a])
        for b in second.nonzero()[:, 0].tolist():
            expected = len(requests) * float(first[a] * second[b])
            statistic += (counts.pop((a, b), 0) - expected) ** 2 / expected
            cells += 1
    assert not counts, "a pair of probability 0 was sampled"
    assert cells == 16
    assert statistic < 37.7  # the 0.999 quantile of chi-square with 15 degrees of freedom


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "windows", "relative", "encoder-decoder"])
def test_beam_search_and_sampling_in_one_batch(kind: str) -> None:
    model, prompts = MODELS[kind], ragged(3, 6)
    alone = [gh.generate(model, None, [prompt], beams=3, n=3, max_new_tokens=9) for prompt in prompts]
    engine = gh.Engine(model, slots=8, max_len=MAX_LEN, prefill_chunk=7)
    searches, others = [], []
    for i, prompt in enumerate(prompts):
        others.append((prompt, i, engine.submit(prompt, random_options(i))))
        searches.append(engine.submit(prompt, beams=3, n_best=3, max_new_tokens=9, keep_tree=True))
    engine.run()
    for search, expected in zip(searches, alone, strict=True):
        found = search.completions()
        assert [one.ids for one in found] == [one.ids for one in expected]
        assert [one.score for one in found] == pytest.approx([one.score for one in expected], abs=1e-9)
        assert search.tree
    for prompt, i, request in others:
        assert request.ids == reference_generate(model, prompt, random_options(i), MAX_LEN)


class EngineMachine(RuleBasedStateMachine):
    """Requests arrive, are cancelled and end in any order; each gets what it would get alone, and slots are freed."""

    @initialize(
        kind=st.sampled_from(sorted(KINDS)), slots=st.integers(1, 5), chunk=st.integers(1, 20), data=st.data()
    )
    def start(self, kind: str, slots: int, chunk: int, data: st.DataObject) -> None:
        self.model = MODELS[kind]
        options = [None, PromptLookup(n_draft_tokens=3)]
        if isinstance(self.model, Decoder):
            options.append(DraftModel(MODELS["gpt2"], n_draft_tokens=2))
        self.engine = gh.Engine(
            self.model,
            slots=slots,
            max_len=MAX_LEN,
            prefill_chunk=chunk,
            speculator=data.draw(st.sampled_from(options)),
        )
        self.slots = slots
        self.requests: list[tuple[list[int], Request]] = []

    @rule(seed=st.integers(0, 200), which=st.integers(0, 7))
    def submit(self, seed: int, which: int) -> None:
        prompt = ragged(which, 3)[seed % 3]  # prompts repeat, so that their prefixes are found in the cache
        options = random_options(seed)
        if seed % 7 == 0 and self.slots >= 2:
            options = SamplingParams(max_new_tokens=options.max_new_tokens, beams=2)
        if self.engine._runner.speculator is not None and isinstance(self.engine._runner.speculator, DraftModel):
            options = SamplingParams(
                max_new_tokens=options.max_new_tokens, beams=options.beams
            )  # samples differ, by design
        self.requests.append((prompt, self.engine.submit(prompt, options)))

    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        _, request = data.draw(st.sampled_from(self.requests))
        self.engine.cancel(request)
        assert request.done

    @invariant()
    def slots_add_up(self) -> None:
        if hasattr(self, "engine"):
            slots = self.engine.slots
            assert [seq.slot for seq in (*slots.running, *slots.free)] == list(range(self.slots))
            assert all(isinstance(seq, SequenceState) for seq in slots.running)
            assert not any(isinstance(one, SequenceState) for one in slots.free)
            assert not any(seq.is_prefilling for seq in slots.running[:-1])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert len(self.engine.slots.free) == self.slots
        assert self.engine._runner.cache.lengths.tolist() == [0] * self.slots
        for prompt, request in self.requests:
            if request.options.beams > 1:
                if request.finish_reason != "cancelled":
                    (alone,) = gh.generate(
                        self.model, None, [prompt], beams=2, max_new_tokens=min(request.limit, MAX_LEN)
                    )
                    assert request.ids == alone.ids
                continue
            expected = reference_generate(self.model, prompt, request.options, MAX_LEN)
            if request.finish_reason == "cancelled":
                assert request.ids == expected[: len(request.ids)]
            else:
                assert request.ids == expected
                assert request.finish_reason == ("length" if len(expected) == request.limit else "stop")


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=up_to(40),
    stateful_step_count=25 if SHARE == 1 else 14,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking takes minutes
)


@pytest.mark.long
@pytest.mark.slow
def test_hundreds_of_requests_leak_no_slots_or_tensors() -> None:
    model, rng = MODELS["llama"], random.Random(0)
    engine = gh.Engine(model, slots=16, max_len=MAX_LEN, prefill_chunk=32)
    tensors = _tensors()
    requests: list[Request] = []
    while len(requests) < 300 or engine.step():
        if len(requests) < 300:
            for _ in range(rng.randint(0, 12)):
                prompt = [rng.randrange(40) for _ in range(rng.randint(1, 30))]
                requests.append(engine.submit(prompt, max_new_tokens=rng.randint(0, 17)))
            engine.step()
        waiting = [request for request in requests if not request.done]
        if waiting and sum(request.finish_reason == "cancelled" for request in requests) < len(requests) / 3:
            engine.cancel(rng.choice(waiting))
    assert all(request.done for request in requests)
    assert sum(request.finish_reason == "cancelled" for request in requests) > 90
    assert len(engine.slots.free) == 16
    assert not engine.slots.running
    assert engine._runner.cache.lengths.tolist() == [0] * 16
    assert _tensors() == tensors


def _tensors() -> tuple[int, int]:
    """Return the number of live tensors and of their elements."""
    gc.collect()
    there = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return len(there), sum(one.numel() for one in there)


def test_prefix_caching_computes_a_shared_prefix_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, computed = MODELS["llama"], []
    engine = gh.Engine(model, slots=4, max_len=MAX_LEN)
    forward = engine._runner._forward
    monkeypatch.setattr(
        engine._runner,
        "_forward",
        lambda ids, *rest, **more: computed.append(ids.numel()) or forward(ids, *rest, **more),
    )
    prefix = list(range(30))
    requests = [engine.submit([*prefix, token], max_new_tokens=2) for token in (31, 32, 33)]
    engine.run()
    assert sum(computed) == 30 + 3 * 2  # the prefix, then two steps of three sequences
    computed.clear()
    later = engine.submit([*prefix, 31, *requests[0].ids, 9], max_new_tokens=1)  # as in the next turn of a chat
    engine.run()
    assert sum(computed) == 2  # the last generated token was not cached yet, and the new token
    assert later.ids == reference_generate(model, later.prompt, later.options, MAX_LEN)


@pytest.mark.few(2)
@pytest.mark.parametrize(("kind", "slots"), [("llama", 4), ("windows", 4), ("llama", 2), ("llama", 3)])
def test_conversations_that_take_turns_do_not_evict_each_other(kind: str, slots: int) -> None:
    model, rng = MODELS[kind], random.Random(0)
    engine = gh.Engine(model, slots=slots, max_len=MAX_LEN, prefill_chunk=8)
    chats = [[rng.randrange(40) for _ in range(18)] for _ in range(3)]
    computed = []
    for turn in range(4):
        for chat in rng.sample(chats, 3):
            before = engine.slots.n_reused
            request = engine.submit(chat, max_new_tokens=3)
            engine.run()
            assert request.ids == reference_generate(model, request.prompt, request.options, MAX_LEN)
            computed.append((turn, len(chat) - (engine.slots.n_reused - before)))
            chat += [*request.ids, rng.randrange(40), rng.randrange(40)]
    # The first turn has nothing to reuse; later ones reuse all but the new tokens and the last generated one, which
    # was no input yet.
    assert {count for turn, count in computed if turn == 0} == {18}
    if slots > len(chats):  # to swap the contents of two it takes a third
        assert {count for turn, count in computed if turn > 0} <= {2, 3}
    assert engine._runner.cache.lengths.tolist() == [0] * slots


def test_conversations_side_by_side_do_not_evict_each_other() -> None:
    """The first slots are released first, and filled with the sequences of the last."""
    model, rng = MODELS["llama"], random.Random(1)
    engine = gh.Engine(model, slots=6, max_len=MAX_LEN)
    chats = [[rng.randrange(40) for _ in range(18)] for _ in range(3)]
    for turn in range(3):
        before, asked = engine.slots.n_reused, sum(map(len, chats))
        requests = [engine.submit(chat, max_new_tokens=number) for number, chat in enumerate(chats, 1)]
        engine.run()
        for chat, request in zip(chats, requests, strict=True):
            assert request.ids == reference_generate(model, request.prompt, request.options, MAX_LEN)
            chat += [*request.ids, rng.randrange(40)]
        assert asked - (engine.slots.n_reused - before) <= (3 * 18 if turn == 0 else 3 * 2)
    assert engine._runner.cache.lengths.tolist() == [0] * 6


def test_short_remainders_are_not_kept() -> None:
    """What many requests for one prompt leave behind does not fill the slots."""
    engine = gh.Engine(MODELS["llama"], slots=4, max_len=MAX_LEN)
    other = engine.submit([7] * 20, max_new_tokens=1)
    engine.run()
    for token in range(8):
        engine.submit([*range(20), token], max_new_tokens=2)
        engine.run()
    before = engine.slots.n_reused
    engine.submit([*other.prompt, 8], max_new_tokens=1)
    engine.run()
    assert engine.slots.n_reused - before == 20


def test_chunked_prefill_does_not_stall_decoding() -> None:
    engine = gh.Engine(MODELS["llama"], slots=2, max_len=MAX_LEN, prefill_chunk=4)
    first = engine.submit([1], max_new_tokens=30, logit_bias={7: -100.0})
    engine.step()
    long = engine.submit([2] * 41, max_new_tokens=1)
    for step in range(9):
        engine.step()
        assert len(first.ids) == step + 2
        assert not long.ids
    engine.step()
    assert len(long.ids) == 1


def test_sliding_window_layers_use_ring_buffers() -> None:
    model = MODELS["windows"]
    engine = gh.Engine(model, slots=1, max_len=MAX_LEN, prefill_chunk=5)
    per_slot = 2 * model.spec.n_kv_heads * model.spec.d_head * 8  # float64
    layers = [model.spec.window(index) for index in range(model.spec.n_layers)]
    sizes = [window + 5 if window else MAX_LEN for window in layers]
    assert engine.n_bytes == sum(slots + 1 for slots in sizes) * per_slot


@pytest.mark.parametrize(
    ("prompt", "more", "message"),
    [
        ([], {}, "the prompt is empty, and the model has no start_id"),
        ([1] * 49, {}, "the prompt has 49 tokens, but max_len is 48"),
        ([40], {}, "the prompt contains 40, but ids are whole numbers from 0 to vocab_size - 1 = 39"),
        ([-1], {}, "the prompt contains -1"),
        ([1.5], {}, "the prompt contains 1.5"),
        ("text", {}, "the prompt is a text, but there is no tokenizer"),
        (7, {}, "the prompt is a int, but it must be a text or a list of ids"),
        ([1], {"top_k": 0.5}, "top_k is 0.5, but it must be a whole number of at least 1"),
        ([1], {"temperature": -1.0}, "temperature is -1.0, but it must be 0 or above"),
        ([1], {"temperature": float("nan")}, "temperature is nan, but it must be 0 or above"),
        ([1], {"max_new_tokens": -1}, "max_new_tokens is -1, but it must be a whole number of at least 0"),
        ([1], {"max_new_tokens": 2.5}, "max_new_tokens is 2.5"),
        ([1], {"stop": "x"}, "stop is ('x',), but there is no tokenizer"),
        ([1], {"stop": ""}, "stop is ('',), but it must be strings, none empty"),
        ([1], {"beams": 4}, "beams is 4, but the engine has 2 slots"),
        ([1], {"beams": 2, "temperature": 1.0}, "beam search does not sample"),
        ([1], {"n_best": 2}, "n_best is 2, but a search of 1 beams"),
        ([1], {"temprature": 1.0}, "there is no setting 'temprature'; did you mean temperature?"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias names id 99"),
    ],
)
def test_invalid_requests_raise_and_the_engine_continues(prompt: object, more: dict[str, Any], message: str) -> None:
    engine = gh.Engine(MODELS["gpt2"], slots=2, max_len=MAX_LEN)
    running = engine.submit([1, 2], max_new_tokens=6)
    engine.step()
    with pytest.raises(gh.InputError) as caught:
        engine.submit(prompt, **more)
    assert message in str(caught.value)
    engine.run()
    assert running.ids == reference_generate(MODELS["gpt2"], [1, 2], SamplingParams(max_new_tokens=6), MAX_LEN)


def nan_model(kind: str) -> Decoder | Seq2Seq:
    """Return a model whose embedding of token 39 is NaN."""
    model = copy.deepcopy(MODELS[kind])
    model.token_embedding.register_forward_hook(
        lambda module, ids, x: x.masked_fill((ids[0] == 39)[..., None], torch.nan)
    )
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["gpt2", "windows", "encoder-decoder"])
def test_nan_request_does_not_affect_others(kind: str) -> None:
    model, rng = nan_model(kind), random.Random(1)
    engine = gh.Engine(model, slots=4, max_len=MAX_LEN, prefill_chunk=16)
    failing, cancelled, others = [], [], []
    for number, some in enumerate(ragged(4, 12)):
        prompt = [token % 39 for token in some]
        options = random_options(number)
        options = replace(options, logit_bias={**options.logit_bias, 39: -math.inf})
        others.append((prompt, engine.submit(prompt, options)))
        broken = [39, *prompt, *range(10)]
        request = engine.submit(broken, max_new_tokens=rng.choice((1, 5)), beams=rng.choice((1, 2)))
        for _ in range(rng.randrange(4)):
            engine.step()
        if number % 3 == 0:  # most during prefill
            engine.cancel(request)
        (cancelled if request.finish_reason == "cancelled" else failing).append(request)
    engine.run()
    assert len(cancelled) > 1
    for request in failing:
        assert (request.finish_reason, request.ids) == ("error", [])
        assert request.error is not None
        assert request.error.startswith("the model's log-probabilities are NaN")
    for prompt, request in others:
        assert request.finish_reason in ("stop", "length")
        assert request.ids == reference_generate(MODELS[kind], prompt, request.options, MAX_LEN)


@pytest.mark.parametrize("kind", ["gpt2", "windows"])
def test_nan_of_a_request_cancelled_in_the_same_step_is_cleared(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gh.Engine(nan_model(kind), slots=2, max_len=MAX_LEN)
    engine.submit([5] * 16, max_new_tokens=12, logit_bias={39: -math.inf})  # keys beyond a short request are attended
    broken = engine.submit([*range(8), 39], max_new_tokens=4)
    run = engine._runner.run

    def run_and_cancel(step: ScheduledStep) -> StepOutput | None:  # as another thread would
        output = run(step)
        engine.cancel(broken)
        return output

    monkeypatch.setattr(engine._runner, "run", run_and_cancel)
    engine.step()
    monkeypatch.undo()
    assert (broken.finish_reason, broken.ids) == ("cancelled", [])
    options = SamplingParams(max_new_tokens=6, logit_bias={39: -math.inf})
    request = engine.submit([1, 2], options)
    engine.run()
    assert request.ids == reference_generate(MODELS[kind], [1, 2], options, MAX_LEN)


@pytest.mark.parametrize("kind", ["gpt2", "windows"])
def test_nan_not_yet_on_the_host_is_cleared_when_its_request_is_cancelled(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the device a step ahead: the first token was processed, and the second, from a NaN, was not."""
    engine = gh.Engine(nan_model(kind), slots=2, max_len=MAX_LEN)
    engine.submit([5] * 16, max_new_tokens=12, logit_bias={39: -math.inf})  # keys beyond a short request are attended
    monkeypatch.setattr(ModelRunner, "runs_ahead", True)
    broken = engine.submit([1, 2, 3], max_new_tokens=4, logit_bias={39: 1e4})
    engine.step()
    engine.step()
    assert broken.ids == [39]
    engine.cancel(broken)
    options = SamplingParams(max_new_tokens=6, logit_bias={39: -math.inf})
    request = engine.submit([4], options)
    engine.run()
    assert request.ids == reference_generate(MODELS[kind], [4], options, MAX_LEN)


def test_nan_model_raises() -> None:
    model = copy.deepcopy(MODELS["llama"])
    model.token_embedding.table.weight.data.fill_(torch.nan)
    for settings_ in (
        {},
        {"temperature": 1.0},
        {"beams": 3},
        {"speculator": PromptLookup()},
        {"speculator": DraftModel(model)},
    ):
        with pytest.raises(gh.InputError, match="the model's log-probabilities are NaN"):
            gh.generate(model, None, [[1, 2, 1, 2]], **settings_)
    words = '{"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}'
    tok = gh.Tokenizer.from_json(f'{{"version": "1.0", "model": {words}}}')
    with pytest.raises(gh.InputError, match="the model's log-probabilities are NaN"):
        list(gh.stream(model, tok, [1, 2], max_new_tokens=2))


@pytest.mark.parametrize("beams", [1, 2])
def test_forbidding_every_token_raises(beams: int) -> None:
    model, everything = MODELS["llama"], dict.fromkeys(range(40), -math.inf)
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN)
    for bias in (everything, dict.fromkeys(range(40), -1e39)):  # which is no float32
        with pytest.raises(gh.InputError, match="logit_bias is -inf for all 40 ids"):
            engine.submit([1], logit_bias=bias, beams=beams)
    ends = {token: bias for token, bias in everything.items() if token != 7}
    with pytest.raises(gh.InputError, match="logit_bias and min_new_tokens forbid all 40 ids"):
        engine.submit([1], logit_bias=ends, min_new_tokens=1, beams=beams)
    (nothing,) = gh.generate(model, None, [[1]], logit_bias=ends, beams=beams)
    assert (nothing.ids, nothing.finish_reason) == ([], "stop")
    almost = {token: bias for token, bias in everything.items() if token != 5}
    assert gh.generate(model, None, [[1]], logit_bias=almost, max_new_tokens=3, beams=beams)[0].ids == [5] * 3


@pytest.mark.parametrize("settings_", [{}, {"temperature": 1.0}, {"beams": 2}])
def test_no_allowed_token_fails_the_request(settings_: dict[str, Any]) -> None:
    """Its own logits are -inf but for ids 3 and 4, which the bias forbids."""
    model = copy.deepcopy(MODELS["llama"])
    only = torch.full((40,), -math.inf).index_fill(0, torch.tensor([3, 4]), 0.0)
    hook = model.head.register_forward_hook(lambda module, given, logits: logits + only)
    assert set(gh.generate(model, None, [[1]], max_new_tokens=9, **settings_)[0].ids) <= {3, 4}
    engine = gh.Engine(model, slots=2, max_len=MAX_LEN)
    request = engine.submit([1], logit_bias={3: -math.inf, 4: -math.inf}, **settings_)
    fine = engine.submit([1], logit_bias={3: -math.inf}, max_new_tokens=3)
    engine.run()
    assert request.error is not None
    assert request.error.startswith("no next token is allowed")
    assert fine.ids == [4] * 3
    hook.remove()


def test_extreme_lengths() -> None:
    engine = gh.Engine(MODELS["gpt2"], slots=2, max_len=MAX_LEN)
    nothing = engine.submit([1, 2], max_new_tokens=0)
    assert nothing.completions() == [gh.Completion("", [], [], "length")]
    full = engine.submit([1] * 48)
    assert full.finish_reason == "length"
    absurd = engine.submit([1, 2], max_new_tokens=10**30, logit_bias={7: -100.0})
    engine.run()
    assert (len(absurd.ids), absurd.finish_reason) == (46, "length")


def test_invalid_engine_arguments() -> None:
    model = MODELS["gpt2"]
    for settings_, message in (
        ({"slots": 0}, "slots is 0"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"max_len": 49}, "max_len is 49, but the model has positions for 48"),
        ({"slots": 10**9}, "1000000000 slots of 48 tokens need"),
    ):
        with pytest.raises(gh.InputError, match=message):
            gh.Engine(model, **settings_)
    with pytest.raises(gh.InputError, match="the model is of type Encoder, which does not generate"):
        gh.Engine(gh.build(gh.preset("tiny-encoder")))  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match="the model is of type str, which does not generate"):
        gh.generate("gpt2", None, [])  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match="the spec has no start_id"):
        gh.Engine(gh.build(gh.preset("tiny-seq2seq", start_id=None)))
    with pytest.raises(gh.InputError, match="the draft model has a vocab_size of 256"):
        gh.Engine(model, speculator=DraftModel(gh.build(gh.preset("tiny-decoder"))))


def test_engine_does_not_change_the_model() -> None:
    model = gh.build(gh.preset("tiny-decoder", dropout=0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one, two = (gh.generate(model, None, [[1, 2]], max_new_tokens=8)[0] for _ in range(2))
    assert one == two  # no dropout
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@given(seed=st.integers(0, 50))
@settings(max_examples=10, deadline=None)
def test_logprobs_come_from_raw_logits(seed: int) -> None:
    model, (prompt,) = MODELS["llama"], ragged(seed, 1)
    (made,) = gh.generate(
        model, None, [prompt], max_new_tokens=6, temperature=2.0, top_k=5, seed=seed, repetition_penalty=1.5
    )
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt + made.ids]))[0].log_softmax(-1)
    expected = [float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(made.ids)]
    assert made.logprobs == pytest.approx(expected, abs=1e-9)
