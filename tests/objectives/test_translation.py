"""BLEU and chrF: by hand, and against sacrebleu's own functions."""

from __future__ import annotations

import importlib.metadata
import math
import sys

import pytest
import sacrebleu
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.errors import InputError
from glasshouse.evaluation import bleu, chrf

VERSION = importlib.metadata.version("sacrebleu")
CLOSE = 1e-14  # some twenty roundings of 2**-53, through a logarithm and back

sentences = st.lists(st.sampled_from(["the", "cat", "sat", "on", "a", "mat", "."]), min_size=1).map(" ".join)
cases = st.lists(st.tuples(sentences, sentences, sentences), min_size=1, max_size=4)


def test_bleu_by_hand() -> None:
    # Of 1 to 4 words in a row 5 of 6, 3 of 5, 2 of 4 and 1 of 3 are right; the lengths are the same.
    score = bleu(["the cat sat on the mat"], ["the cat sat on a mat"])
    assert score.value == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** (1 / 4), rel=CLOSE, abs=0)
    assert score.signature == f"nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:{VERSION}"


def test_bleu_of_a_short_text_by_hand() -> None:
    # All words are right, but 5 stand for 6: e to the 1 - 6/5.
    score = bleu(["the cat sat on the"], ["the cat sat on the mat"])
    assert score.value == pytest.approx(100 * math.exp(1 - 6 / 5), rel=CLOSE, abs=0)


def test_chrf_by_hand() -> None:
    # One letter: "a" is right, of 1 predicted and 2 in the reference. Longer n-grams do not count.
    # F2 of precision 1 and recall 1/2 is (1 + 4) * 1/2 / (4 * 1 + 1/2) = 5/9.
    score = chrf(["a"], ["ab"])
    assert score.value == pytest.approx(100 * 5 / 9, rel=CLOSE, abs=0)
    assert score.signature == f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{VERSION}"


def test_a_second_reference_can_only_raise_the_score() -> None:
    given = ["on the mat sat the cat", "a cat sat there all day"]
    first, second = ["the cat sat on the mat", "a cat sat there all day"], ["on the mat sat the cat", "no such thing"]
    for measure in (bleu, chrf):
        one, both = measure(given, first), measure(given, [first, second])
        assert one.value < both.value
        assert both.value == pytest.approx(100, rel=CLOSE, abs=0)
        assert both.signature.startswith("nrefs:2|")


@given(cases)
def test_equals_sacrebleu(drawn: list[tuple[str, str, str]]) -> None:
    given, first, second = (list(column) for column in zip(*drawn, strict=True))
    for ours, theirs in ((bleu, sacrebleu.corpus_bleu), (chrf, sacrebleu.corpus_chrf)):
        assert ours(given, first) == ours(given, [first])
        assert ours(given, first).value == theirs(given, [first]).score
        assert ours(given, [first, second]).value == theirs(given, [first, second]).score


@pytest.mark.parametrize("measure", [bleu, chrf])
def test_invalid_arguments_are_refused(measure: object) -> None:
    assert callable(measure)
    with pytest.raises(InputError, match="predictions are empty; pass at least one"):
        measure([], [])
    for references, where, count in (([], 1, 0), (["a"], 1, 1), ([["a", "b"], ["a"]], 2, 1), (["a", "b", "c"], 1, 3)):
        with pytest.raises(
            InputError, match=f"list {where} of the references has {count} texts for 2 predictions, but"
        ):
            measure(["a", "b"], references)
    for references in ("ab", ["a", ["b"]], [["a"], "b"]):
        with pytest.raises(InputError, match="pass one list of texts or several"):
            measure(["a", "b"], references)
    for texts in ("ab", ["a", None]):
        with pytest.raises(InputError, match="predictions must be a list of texts, but is"):
            measure(texts, ["a", "b"])
    for translations in (["a", 7], None):
        with pytest.raises(InputError, match="list 2 of the references must be a list of texts"):
            measure(["a", "b"], [["a", "b"], translations])


@pytest.mark.parametrize("measure", [bleu, chrf])
def test_without_sacrebleu_the_error_says_what_to_install(measure: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(measure)
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(InputError, match=r"not installed; run pip install 'glasshouse\[translation\]'\."):
        measure(["a"], ["a"])
