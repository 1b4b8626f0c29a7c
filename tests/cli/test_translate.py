"""`glasshouse translate` against gh.generate, for given texts and for lines of stdin."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import Call, Done

MODEL = "dates-1m"  # the bundled encoder-decoder
TEXTS = ("3. März 2021", "May 4, 1999", "le 4 mai 1999")
DATES = ["2021-03-03", "1999-05-04", "1999-05-04"]


@pytest.fixture(scope="module")
def loaded() -> tuple[gh.models.Model, gh.Tokenizer | None]:
    return gh.load(MODEL)


@pytest.fixture(scope="module")
def tok() -> gh.Tokenizer:
    return gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)


@pytest.mark.parametrize(("flags", "beams"), [((), 4), (("--beams", "1"), 1)])
def test_each_text_is_translated(
    call: Call, loaded: tuple[gh.models.Model, gh.Tokenizer], flags: tuple[str, ...], beams: int
) -> None:
    done = call("translate", MODEL, *TEXTS, *flags)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [one.text for one in gh.generate(*loaded, TEXTS, beams=beams)] == DATES


def test_each_line_of_stdin_is_translated(lines: Callable[..., Done]) -> None:
    for words in ((), ("-",)):
        assert lines("translate", MODEL, *words, stdin="\n".join(TEXTS).encode()).out.splitlines() == DATES


def test_json_has_the_score_of_the_search(call: Call, loaded: tuple[gh.models.Model, gh.Tokenizer]) -> None:
    done = call("translate", MODEL, TEXTS[0], "--max-new-tokens", "3", "--length-penalty", "0.5", "--json")
    (one,) = gh.generate(*loaded, TEXTS[0], max_new_tokens=3, beams=4, length_penalty=0.5)
    found = json.loads(done.out)
    assert (found["prompt"], found["text"], found["ids"]) == (TEXTS[0], one.text, one.ids)
    assert found["finish_reason"] == "length"
    assert found["score"] == pytest.approx(one.score, abs=1e-4)  # float32 sums of another batch


def test_a_text_that_is_refused_leaves_its_line_empty(call: Call, tok: gh.Tokenizer, tmp_path: Path) -> None:
    spec = gh.preset("tiny-seq2seq", vocab_size=len(tok), start_id=0, end_ids=[0], position="learned", max_len=16)
    gh.save(gh.build(spec), tok, tmp_path / "learned")
    done = call("translate", tmp_path / "learned", "to be", "to be " * 90, "to be", "--max-new-tokens", "4")
    first, second, third, _ = done.out.split("\n")
    assert done.code == 1
    assert first == third
    assert second == ""
    assert done.err.startswith("error: text 2: ")


def test_a_model_of_another_kind_is_one_sentence(call: Call, tok: gh.Tokenizer, tmp_path: Path) -> None:
    for name, said in (("tiny-decoder", "use `glasshouse generate`"), ("tiny-encoder", "use `glasshouse look`")):
        gh.save(gh.build(gh.preset(name, vocab_size=len(tok))), tok, tmp_path / name)
        done = call("translate", tmp_path / name, "to be")
        assert done.code == 1
        assert f"is of kind {name[5:]}, but a translation needs an encoder-decoder" in done.err
        assert said in done.err
        assert done.err.count("\n") == 1
