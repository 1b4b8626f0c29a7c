"""`generate` and `stream` as a caller uses them."""

from __future__ import annotations

import math
import re
import warnings
from numbers import Integral

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse.generation import PromptLookup
from glasshouse.models.prompt import encode_prompt

TEXTS = ["to be or not to be, that is the question", "naïve café, ein schöner Tag, 日本語 🌱🌱"]
TOK = gh.Tokenizer.train(texts=TEXTS, vocab_size=300)


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(5)
    spec = gh.preset(
        "tiny-decoder", vocab_size=300, max_len=64, position={"kind": "learned"}, init={"kind": "normal", "std": 0.3}
    )
    return gh.build(spec, dtype=torch.float64)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stream_equals_generate_in_whole_characters(model: gh.models.Decoder, temperature: float) -> None:
    for seed in range(3):
        settings = {"max_new_tokens": 40, "temperature": temperature, "seed": seed}
        (made,) = gh.generate(model, TOK, "to be", **settings)
        pieces = list(gh.stream(model, TOK, "to be", **settings))
        assert "".join(pieces) == made.text == TOK.decode(made.ids, skip_special_tokens=True)
        # A random model mostly generates invalid UTF-8: pieces must have the replacement characters of the text.
        assert sum(piece.count("\ufffd") for piece in pieces) == made.text.count("\ufffd")
        assert len(made.ids) == len(made.logprobs) == 40


def only_tokens_of(text: str) -> dict[int, float]:
    """Return biases that allow only the tokens of a text."""
    allowed = set(TOK.encode(text))
    return {token: -1e9 for token in range(300) if token not in allowed}


def test_stop_string_inside_a_token(model: gh.models.Decoder) -> None:
    token = max(set(range(300)) - set(TOK.special_ids), key=lambda number: len(TOK.decode([number])))
    word = TOK.decode([token])
    assert len(word) > 3
    only = {number: -1e9 for number in range(300) if number != token}
    (made,) = gh.generate(model, TOK, "be", max_new_tokens=5, stop=word[1:3], logit_bias=only)
    assert (made.text, made.finish_reason) == (word[0], "stop")
    assert made.ids == []  # no token ends before the stop string
    assert made.logprobs == []


def test_stop_string_over_several_tokens_is_not_streamed(model: gh.models.Decoder) -> None:
    (whole,) = gh.generate(model, TOK, "to", max_new_tokens=30, logit_bias=only_tokens_of("to be or"))
    stop = whole.text[9:15]
    cut = whole.text[: whole.text.index(stop)]
    settings = {"max_new_tokens": 30, "logit_bias": only_tokens_of("to be or"), "stop": [stop, "never"]}
    (made,) = gh.generate(model, TOK, "to", **settings)
    assert (made.text, made.finish_reason) == (cut, "stop")
    assert "".join(gh.stream(model, TOK, "to", **settings)) == cut
    assert cut.startswith(TOK.decode(made.ids))
    assert made.ids == whole.ids[: len(made.ids)]


def test_completions_do_not_depend_on_the_batch(model: gh.models.Decoder) -> None:
    prompts = ["to be", "or", "café 🌱", "the question that is"]
    settings = {"max_new_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3}
    alone = [outputs(gh.generate(model, TOK, prompt, **settings))[0] for prompt in prompts]
    assert outputs(gh.generate(model, TOK, prompts, **settings)) == alone
    assert outputs(gh.generate(model, TOK, prompts, slots=2, speculator=PromptLookup(), **settings)) == alone
    given = [TOK.encode(prompt) for prompt in prompts]
    assert [one.ids for one in gh.generate(model, None, given, **settings)] == [ids for ids, *_ in alone]


def outputs(made: list[gh.Completion]) -> list[tuple[list[int], str, str]]:
    """Return what must be exactly equal; log-probabilities round differently with the batch size."""
    return [(one.ids, one.text, one.finish_reason) for one in made]


def test_samples_of_one_prompt_differ_and_are_in_order(model: gh.models.Decoder) -> None:
    settings = {"max_new_tokens": 10, "temperature": 1.0}
    made = gh.generate(model, TOK, ["to", "be"], n=3, seed=7, **settings)
    assert len(made) == 6
    assert len({tuple(one.ids) for one in made[:3]}) == 3
    assert outputs(made)[4] == outputs(gh.generate(model, TOK, "be", seed=8, **settings))[0]


def test_prompts_in_every_form(model: gh.models.Decoder) -> None:
    ids = TOK.encode("to be")
    expected = gh.generate(model, TOK, "to be", max_new_tokens=4)[0]
    for prompts in ("to be", b"to be", ["to be"], [ids], torch.tensor([ids])):
        assert outputs(gh.generate(model, TOK, prompts, max_new_tokens=4)) == outputs([expected])
    assert gh.generate(model, TOK, []) == []


VALUES = st.one_of(st.integers(-2, 12), st.integers(), st.booleans(), st.floats(), st.just(np.int64(3)), st.text())


@given(values=st.lists(st.integers(0, 9)) | st.lists(VALUES), form=st.sampled_from([list, tuple]))
@example(values=[0, 9], form=list)
@example(values=[9, 10], form=list)
@example(values=[0, -1], form=list)
@example(values=[1, True], form=list)
@example(values=[1, 2.0], form=list)
@example(values=[np.int64(3), 4], form=tuple)
def test_invalid_prompt_ids_raise(values: list[object], form: type) -> None:
    spec = gh.preset("tiny-decoder", vocab_size=10, start_id=4)

    def fits(value: object) -> bool:
        return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 10

    given_ = form(values)
    wrong = [value for value in values if not fits(value)]
    if wrong:
        with pytest.raises(gh.InputError) as caught:
            encode_prompt(given_, None, spec)
        assert str(caught.value) == (
            f"the prompt contains {wrong[0]!r}, but ids are whole numbers from 0 to vocab_size - 1 = 9."
        )
    else:
        ids = encode_prompt(given_, None, spec)
        assert ids == ([int(value) for value in values] or [4])  # type: ignore[call-overload]
        assert all(type(one) is int for one in ids)
        assert ids is not given_


def test_end_token_is_appended_to_a_source() -> None:
    end = TOK.special_id("eos")
    assert end is not None
    seq2seq = gh.preset("tiny-seq2seq", vocab_size=len(TOK), start_id=end, end_ids=[end])
    assert encode_prompt("to be", TOK, seq2seq) == [*TOK.encode("to be"), end]
    assert encode_prompt(TOK.encode("to be"), TOK, seq2seq) == TOK.encode("to be")  # ids are used unchanged
    decoder = gh.preset("tiny-decoder", vocab_size=len(TOK), end_ids=[end])
    assert encode_prompt("to be", TOK, decoder) == TOK.encode("to be")


def test_beam_search_of_no_tokens_returns_the_empty_text(model: gh.models.Decoder) -> None:
    """There is one text of no tokens, with probability 1 and an empty tree."""
    empty = gh.Completion("", [], [], "length", score=0.0, tree=[])
    settings = {"max_new_tokens": 0, "beams": 3, "keep_tree": True}
    assert gh.generate(model, TOK, ["to", "be"], n=3, **settings) == [empty, empty]
    assert gh.generate(model, TOK, ["to", "be"], n=1, **settings) == [empty, empty]
    engine = gh.Engine(model, slots=3)
    full = engine.submit([1] * 64, beams=3, n_best=2)  # fills all positions
    assert full.completions() == [gh.Completion("", [], [], "length", score=0.0)]
    assert not engine.step()
    with pytest.raises(gh.InputError, match="n_best is 4, but a search of 3 beams returns 1 to 3"):
        engine.submit([1], max_new_tokens=0, beams=3, n_best=4)


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ("", {}, "the prompt is empty, and the model has no start_id"),
        ("\ud800", {}, "the text has a lone surrogate at index 0"),
        ("to be " * 40, {}, "but max_len is 64; shorten it"),
        ([1, 2, 3], {}, "prompts is a list of ids that begins with 1; put it in a list"),
        (None, {}, "prompts is None, but it must be a text, or a list"),
        (5, {}, "prompts is 5, but it must be a text, or a list"),
        ({"a": "to be"}, {}, "but it must be a text, or a list"),
        ("to", {"n": 2}, "without a temperature or beams all samples are equal"),
        ("to", {"n": 3, "beams": 2}, "n_best is 3, but a search of 2 beams returns 1 to 2"),
        ("to", {"n": 0}, "n is 0, but it must be a whole number of at least 1"),
        ("to", {"top_k": 0}, "top_k is 0"),
        ("to", {"stop": ["a", ""]}, "it must be strings, none empty"),
        ("to", {"weights": "int2"}, "weights is 'int2', but it must be one of own, copy, int8, int4."),
        ("to", {"weights": []}, "weights is [], but it must be one of own, copy, int8, int4."),
        ("to", {"max_len": 65}, "max_len is 65, but the model has positions for 64; reduce it."),
        ("to", {"beams": 10**30}, f"beams is {10**30}, but at most 300 are possible here"),
        ("to", {"logit_bias": dict.fromkeys(range(300), -math.inf)}, "logit_bias is -inf for all 300 ids"),
    ],
)
def test_invalid_arguments_raise(
    model: gh.models.Decoder, prompts: object, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(gh.InputError) as caught:
        gh.generate(model, TOK, prompts, **settings)  # type: ignore[arg-type]
    assert message in str(caught.value)


def test_beams_are_limited_by_memory(model: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one MiB to spare, for keys and values, logits, candidates, and common prefixes of beams."""
    weights = sum(one.numel() * one.element_size() for one in model.parameters())
    monkeypatch.setattr(gh.device, "memory_bytes", lambda device: 2 * weights + 2**20)

    def cost(beams: int) -> int:
        width = model.spec.n_kv_heads * model.spec.d_head
        cached = 2 * 2 * width * 8 * (2 + 5 + 1)  # of two layers, in float64, for prompt, output and padding
        return beams * (cached + 16 * 300 + 256 * min(2 * beams, 300) + 16 * beams)

    most = max(beams for beams in range(1, 99) if cost(beams) <= 2**20)
    assert 1 < most < 98
    assert len(gh.generate(model, None, [[1, 2]], max_new_tokens=5, beams=most)[0].ids) == 5
    message = f"beams is {most + 1}, but at most {most} are possible here: there are 300 ids, and each beam needs"
    with pytest.raises(gh.InputError, match=message):
        gh.generate(model, None, [[1, 2]], max_new_tokens=5, beams=most + 1)
    with pytest.raises(gh.InputError, match=message):
        list(gh.stream(model, TOK, [1, 2], max_new_tokens=5, beams=most + 1))
    engine = gh.Engine(model, slots=most + 1, max_len=7)
    with pytest.raises(gh.InputError, match=message):
        engine.submit([1, 2], max_new_tokens=5, beams=most + 1)


@pytest.mark.few(4)
@pytest.mark.parametrize("position", ["learned", "rotary", "sinusoidal", "alibi", "relative", "none"])
@pytest.mark.parametrize("preset", ["tiny-decoder", "tiny-seq2seq"])
def test_only_learned_positions_limit_the_length(preset: str, position: str) -> None:
    """A warning says so with both numbers, or that the text is longer than the model was trained for."""
    torch.manual_seed(0)
    model = gh.build(gh.preset(preset, vocab_size=300, max_len=16, position=position, start_id=0, end_ids=()))
    prompt = [1, 2, 3, 4, 5]
    before = 5 if preset == "tiny-decoder" else 1
    with pytest.warns(UserWarning, match="max_len") as caught:
        (one,) = gh.generate(model, None, [prompt], max_new_tokens=40)
    if position == "learned":
        message = (
            f"{16 - before} of 40 new tokens were generated: with the prompt of {before} they fill the model's 16 "
        )
    else:
        message = f"the text has {40 + before} tokens, but the model was trained on sequences of at most 16 (max_len)"
    assert len(one.ids) == (16 - before if position == "learned" else 40)
    assert one.finish_reason == "length"
    assert [str(one.message)[: len(message)] for one in caught] == [message]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (two,) = gh.generate(model, None, [prompt], max_new_tokens=40, max_len=12)  # as requested
        gh.generate(model, None, [prompt], max_new_tokens=16 - before)
    assert two.ids == one.ids[: 12 - before]


def test_truncated_stream_warns(model: gh.models.Decoder) -> None:
    with pytest.warns(UserWarning, match="^61 of 62 new tokens were generated: with the prompt of 3 they fill"):
        list(gh.stream(model, TOK, [1, 2, 3], max_new_tokens=62))


def test_empty_prompt_is_the_start_token() -> None:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=300, start_id=4))
    assert (
        gh.generate(model, TOK, "", max_new_tokens=3)[0].ids
        == gh.generate(model, None, [[4]], max_new_tokens=3)[0].ids
    )


def test_tokenizer_of_another_model_raises(model: gh.models.Decoder) -> None:
    other = gh.Tokenizer.train(texts=TEXTS, vocab_size=290)
    model.tokenizer_fingerprint = TOK.fingerprint
    with pytest.raises(gh.InputError, match="is not the one that the model was trained with"):
        gh.generate(model, other, "to be")
    model.tokenizer_fingerprint = TOK.fingerprint + "x"  # a file that was edited
    with pytest.raises(gh.InputError) as error:
        gh.generate(model, TOK, "to be")
    shown, known = re.findall(r"\((.*?)\)", str(error.value))
    assert shown != known
    model.tokenizer_fingerprint = None


def test_text_is_streamed_with_a_tokenizer_only(model: gh.models.Decoder) -> None:
    with pytest.raises(gh.InputError, match="there is no tokenizer, so there is no text to stream"):
        list(gh.stream(model, None, [1, 2]))


def test_a_completion_prints_as_one_line(model: gh.models.Decoder) -> None:
    (one,) = gh.generate(model, TOK, "to be", max_new_tokens=50)
    assert len(one.ids) == 50
    assert repr(one).startswith(f"Completion({one.text[:5]!r}"[:-1])
    assert "50 tokens, finish_reason='length'" in repr(one)
    assert repr(gh.Completion("a\nb", [1], [0.0], "stop", score=-1.5)) == (
        "Completion('a\\nb', 1 token, finish_reason='stop', score=-1.5)"
    )
    assert len(repr(one)) < 6 * 60  # of a text of 60 characters, each of which may be escaped
    assert "\n" not in repr(one)


def test_progress_counts_every_token(model: gh.models.Decoder) -> None:
    seen: list[int] = []
    made = gh.generate(model, TOK, ["to", "be or"], max_new_tokens=7, progress=seen.append)
    assert sum(seen) == sum(len(one.ids) for one in made) == 14


def test_forward_hooks_on_the_model_apply_in_generation(model: gh.models.Decoder) -> None:
    plain = gh.generate(model, TOK, "to be", max_new_tokens=6)[0].ids
    hook = model.stack.blocks[0].register_forward_hook(lambda block, given, out: -out)
    try:
        assert gh.generate(model, TOK, "to be", max_new_tokens=6)[0].ids != plain
    finally:
        hook.remove()
    assert gh.generate(model, TOK, "to be", max_new_tokens=6)[0].ids == plain
