"""Guesses that look the end of a text up in what came before it, and what is asked of a draft model."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import glasshouse as gh
from glasshouse.generation import DraftModel, PromptLookup
from glasshouse.generation.speculation import lookup_ngram

LEARNED = {"kind": "learned"}


@pytest.mark.parametrize(
    ("tokens", "longest", "count", "expected"),
    [
        ([1, 2, 3, 4, 5, 2, 3], 3, 2, [4, 5]),  # "2 3" came before, and "4 5" after it
        ([7, 1, 8, 1, 9, 1], 3, 2, [9, 1]),  # the latest time that "1" came, not the first
        ([7, 1, 2, 9, 2, 4, 1, 2], 2, 3, [9, 2, 4]),  # "1 2", although "2" alone came later
        ([7, 1, 2, 9, 2, 4, 1, 2], 1, 3, [4, 1, 2]),  # "2" alone
        ([5, 5], 3, 4, [5, 5, 5, 5]),  # period 1
        ([4, 5, 4, 5], 3, 5, [4, 5, 4, 5, 4]),  # period 2
        ([1, 2, 3, 1, 2, 3, 1], 3, 7, [2, 3, 1, 2, 3, 1, 2]),  # period 3, broken off in the middle
        ([9, 8, 1, 2, 3, 1], 3, 5, [2, 3, 1, 2, 3]),  # period 3, after something else
        ([4, 5, 4, 5], 3, 1, [4]),
        ([4, 5, 4, 5], 3, 0, []),
        ([1, 2, 3], 3, 4, []),  # nothing came twice
        ([1], 3, 4, []),
    ],
)
def test_what_follows_is_what_followed(tokens: list[int], longest: int, count: int, expected: list[int]) -> None:
    assert lookup_ngram(tokens, longest, count) == expected


def write_on(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """Copy token by token from behind the last place that ends alike, into the text that is copied from."""
    for size in range(longest, 0, -1):
        places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[len(tokens) - size :]]
        if places:
            text = list(tokens)
            for at in range(places[-1] + size, places[-1] + size + count):
                text.append(text[at])
            return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=20), longest=st.integers(1, 5), count=st.integers(0, 12)
)
def test_guesses_are_those_of_writing_on(tokens: list[int], longest: int, count: int) -> None:
    assert lookup_ngram(tokens, longest, count) == write_on(tokens, longest, count)


@given(
    word=st.lists(st.integers(), min_size=1, max_size=6, unique=True),
    length=st.integers(0, 20),
    longest=st.integers(1, 4),
    count=st.integers(1, 12),
)
def test_a_text_that_repeats_itself_is_guessed_right(word: list[int], length: int, longest: int, count: int) -> None:
    whole = word * 40
    seen = len(word) + 1 + length
    assert lookup_ngram(whole[:seen], longest, count) == whole[seen : seen + count]


def test_a_text_of_one_token_comes_as_fast_as_drafts_allow() -> None:
    model = gh.build(gh.preset("tiny-decoder", max_len=32))
    engine = gh.Engine(model, slots=1, speculator=PromptLookup(n_draft_tokens=4))
    request = engine.submit([5, 5], max_new_tokens=20, logit_bias={5: 1000.0})
    steps = 1
    while engine.step():
        steps += 1
    assert request.ids == [5] * 20
    assert steps == 4  # four drafts and a token of the model's own in each


def test_a_draft_model_too_short_for_the_engine_is_named() -> None:
    model = gh.build(gh.preset("tiny-decoder", max_len=48, position=LEARNED))
    short = gh.build(gh.preset("tiny-decoder", max_len=32, position=LEARNED))
    sentence = "the engine's max_len is 48, but the draft model has positions for 32; reduce it."
    with pytest.raises(gh.InputError, match=re.escape(sentence)):
        gh.Engine(model, slots=1, speculator=DraftModel(short))
    gh.Engine(model, slots=1, max_len=32, speculator=DraftModel(short))


def test_a_draft_model_without_learned_positions_has_no_such_limit() -> None:
    torch.manual_seed(3)
    model = gh.build(gh.preset("tiny-decoder", max_len=48))
    short = gh.build(gh.preset("tiny-decoder", max_len=8, position={"kind": "rotary"}))
    plain, drafted = (gh.Engine(model, slots=1, speculator=one) for one in (None, DraftModel(short)))
    made = [engine.submit([1, 2, 3], max_new_tokens=20) for engine in (plain, drafted)]
    plain.run()
    drafted.run()
    assert made[0].ids == made[1].ids
