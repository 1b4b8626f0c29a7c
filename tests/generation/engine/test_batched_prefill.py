"""Several prompts in one prefill pass: the same keys and values as one by one, in fewer passes."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.generation import SamplingParams
from glasshouse.generation.engine import engine, model_runner
from glasshouse.generation.engine.prefill import NewPrompt, for_any_shape, group_by_length

KINDS: dict[str, dict[str, Any]] = {
    "rotary": {"position": {"kind": "rotary"}, "n_kv_heads": 2},
    "learned": {"position": {"kind": "learned"}},
    "alibi": {"position": {"kind": "alibi"}},
    "relative": {"position": {"kind": "relative"}},
    "windows": {"position": {"kind": "rotary"}, "windows": (4, 0)},
    "soft-cap": {"attention_softcap": 4.0},
}


def build(kind: str = "rotary") -> gh.models.Decoder:
    torch.manual_seed(8)
    init = {"kind": "normal", "std": 0.3}
    model = gh.build(gh.preset("tiny-decoder", max_len=64, init=init, end_ids=(), **KINDS[kind])).eval()
    assert isinstance(model, gh.models.Decoder)
    return model


def draw(lengths: list[int], seed: int = 0) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("prefill_chunk", "rows"), [(64, [3, 3, 3, 5, 3]), (10, [1] * 17), (10**4, [9, 8])])
def test_a_pass_over_sources_is_limited(monkeypatch: pytest.MonkeyPatch, prefill_chunk: int, rows: list[int]) -> None:
    """A source of 11 tokens may join those of 20, as its padding costs less than another pass."""
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-seq2seq", start_id=1)).eval()
    sources = draw([20] * 8 + [11] * 9)
    alone = [gh.generate(model, None, [source], max_new_tokens=4)[0].ids for source in sources]
    engine = gh.Engine(model, slots=17, max_len=16, source_len=20, prefill_chunk=prefill_chunk)
    passes, encode = [], engine._runner.model.encode_source
    monkeypatch.setattr(
        engine._runner.model,
        "encode_source",
        lambda ids, *rest, **more: [passes.append(len(ids)), encode(ids, *rest, **more)][1],
    )
    requests = [engine.submit(source, max_new_tokens=4) for source in sources]
    engine.step()
    assert passes == rows
    engine.run()
    assert [request.ids for request in requests] == alone


def watch(monkeypatch: pytest.MonkeyPatch, runner: model_runner.ModelRunner) -> list[tuple[int, ...]]:
    """Return a list that the shape of the ids of each forward pass is appended to."""
    shapes: list[tuple[int, ...]] = []
    forward: Callable[..., Tensor] = runner._forward
    monkeypatch.setattr(
        runner,
        "_forward",
        lambda ids, *rest, **more: [shapes.append(tuple(ids.shape)), forward(ids, *rest, **more)][1],
    )
    return shapes


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_prompts_equals_one_pass_each(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(kind)
    prompts = draw([9, 13, 1, 12, 13, 30, 10])
    alone = [gh.generate(model, None, [prompt], max_new_tokens=8)[0] for prompt in prompts]
    one = gh.Engine(model, slots=8, max_len=64, prefill_chunk=128)
    shapes = watch(monkeypatch, one._runner)
    requests = [one.submit(prompt, max_new_tokens=8) for prompt in prompts]
    one.step()
    # All tokens but the last of each prompt: 29 by itself; 12, 12, 11, 9, 8 with ten of padding; then the first step.
    assert shapes == [(1, 29), (5, 12), (7, 1)]
    cache = one._runner.cache
    assert cache.lengths[:7].tolist() == sorted(map(len, prompts), reverse=True)
    one.run()
    for request, expected in zip(requests, alone, strict=True):
        assert request.ids == expected.ids  # float32, with logits that differ clearly
        assert request.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def test_padding_is_not_written_to_the_cache() -> None:
    model = build()
    one = gh.Engine(model, slots=3, max_len=64)
    for prompt in draw([12, 4, 9]):
        one.submit(prompt, max_new_tokens=1)
    one.step()
    for row, length in enumerate((12, 9, 4)):
        for kv in (*one._runner.cache.keys, *one._runner.cache.values):
            assert kv[row, :, 1 : length + 1].any(-1).all()
            assert not kv[row, :, length + 1 :].any()


def test_prompts_wait_rather_than_being_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk of 20: a prompt of 51 is read in chunks of its own, and of the three of 9 one fits beside its last."""
    one = gh.Engine(build(), slots=5, max_len=64, prefill_chunk=20)
    shapes = watch(monkeypatch, one._runner)
    requests = [one.submit(prompt, max_new_tokens=8) for prompt in draw([9, 9, 9, 51, 5])]
    expected = [
        [(1, 20)],
        [(1, 20)],
        [(1, 10), (1, 8), (2, 1)],  # its last ten attend to cached tokens, those of the next prompt do not
        [(3, 8), (5, 1)],  # 8, 8 and 4 with four of padding
    ]
    for passes in expected:
        one.step()
        assert shapes == passes
        shapes.clear()
    one.run()
    for request in requests:
        assert request.ids == gh.generate(build(), None, [request.prompt], max_new_tokens=8)[0].ids


def test_a_prefix_is_copied_after_it_was_computed_in_the_same_step() -> None:
    model, (prefix, *ends) = build(), draw([20, 1, 4, 4])
    one = gh.Engine(model, slots=3, max_len=64)
    requests = [one.submit(prefix + end, max_new_tokens=6) for end in ends]
    one.run()
    for request in requests:
        assert request.ids == gh.generate(model, None, [request.prompt], max_new_tokens=6)[0].ids


def test_recorded_prompts_have_passes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    one = gh.Engine(build(), slots=3, max_len=64, record="resid_post.0")
    shapes = watch(monkeypatch, one._runner)
    for prompt in draw([9, 9]):
        one.submit(prompt, max_new_tokens=2)
    one.step()
    assert shapes == [(1, 8), (1, 8), (2, 1)]


@pytest.mark.parametrize("max_padding", [0, 7, 1000])
def test_groups_have_every_prompt_once_and_limited_padding(max_padding: int) -> None:
    source = random.Random(3)
    prompts = [NewPrompt(slot, [0] * source.randint(1, 40)) for slot in range(30)]
    groups = group_by_length(prompts, max_padding)
    assert sorted(prompt.slot for group in groups for prompt in group) == list(range(30))
    for group in groups:
        widths = [len(prompt.ids) for prompt in group]
        assert widths[0] == max(widths)
        assert widths[0] * len(widths) - sum(widths) <= max_padding
    assert len(groups) == {0: len({len(prompt.ids) for prompt in prompts}), 1000: 1}.get(max_padding, len(groups))
    assert group_by_length([], 5) == []


def test_an_engine_compiles_only_if_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    model, compiled = build(), []
    monkeypatch.setattr(model_runner, "compile_decode", lambda tree, slots: compiled.append(slots) or tree)
    gh.Engine(model, slots=2)
    gh.generate(model, None, [[1, 2]], max_new_tokens=2)
    assert compiled == []
    gh.Engine(model, slots=4, compile=True)
    assert compiled == [4]
    with pytest.raises(gh.InputError, match="compile is 'auto', but it must be True or False"):
        gh.Engine(model, compile="auto")  # type: ignore[arg-type]
    with pytest.raises(gh.InputError, match="record and compile were both given"):
        gh.Engine(model, compile=True, record="resid_post.0")


@pytest.mark.parametrize("options", [None, SamplingParams(temperature=0.7, top_p=0.9)])
def test_warm_up_leaves_no_trace(options: SamplingParams | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, (first, second) = build(), draw([20, 25])
    monkeypatch.setattr(model_runner, "compile_decode", lambda tree, slots: tree)
    one = gh.Engine(model, slots=3, max_len=64, compile=True)
    shapes = watch(monkeypatch, one._runner)
    one.warm_up(options)
    assert shapes == [(3, 1)]
    assert not one.slots.running
    assert one._runner.cache.lengths.tolist() == [0, 0, 0]
    requests = [one.submit(prompt, max_new_tokens=6) for prompt in (first, second)]
    one.step()
    one.warm_up()  # not while requests run
    one.run()
    assert [request.ids for request in requests] == [
        gh.generate(model, None, [prompt], max_new_tokens=6)[0].ids for prompt in (first, second)
    ]
    one.warm_up()  # over a cached prefix, which must not be reused then
    again = one.submit(first, max_new_tokens=6)
    one.run()
    assert again.ids == requests[0].ids
    plain = gh.Engine(model, slots=3, max_len=64)
    shapes = watch(monkeypatch, plain._runner)
    plain.warm_up()  # nothing to compile or to capture
    assert shapes == []


def test_the_default_chunk_is_larger_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    assert gh.Engine(model, max_len=64).prefill_chunk == 256  # more than one sequence has
    monkeypatch.setattr(engine, "choose_prefill_chunk", lambda model: 4096)
    many = gh.Engine(model, slots=8, max_len=64)
    shapes = watch(monkeypatch, many._runner)
    for prompt in draw([60] * 8):
        many.submit(prompt, max_new_tokens=1)
    many.step()
    assert shapes == [(8, 59), (8, 1)]


def test_the_choice_of_attention_kernels_ends_with_the_pass() -> None:
    """It is torch's for all threads: of two that overlap, the second would restore what the first had chosen."""
    entered, second_entered, first_left = (threading.Event() for _ in range(3))

    def first() -> None:
        with for_any_shape(torch.device("cuda")):
            entered.set()
            second_entered.wait(0.2)
        first_left.set()

    def second() -> None:
        assert entered.wait(10)
        with for_any_shape(torch.device("cuda")), for_any_shape(torch.device("cuda")):
            second_entered.set()
            assert first_left.wait(10)
            assert not torch.backends.cuda.cudnn_sdp_enabled()

    before = torch.backends.cuda.cudnn_sdp_enabled()
    with ThreadPoolExecutor(2) as pool:
        for done in (pool.submit(first), pool.submit(second)):
            done.result()
    assert before
    assert torch.backends.cuda.cudnn_sdp_enabled()
