"""Prompt lookup and draft models."""

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
    ("tokens", "max_ngram", "n_draft_tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 2, 3], 3, 2, [4, 5]),  # "2 3" came before, followed by "4 5"
        ([7, 1, 8, 1, 9, 1], 3, 2, [9, 1]),  # the latest occurrence of "1", not the first
        ([7, 1, 2, 9, 2, 4, 1, 2], 2, 3, [9, 2, 4]),  # "1 2", although "2" alone occurred later
        ([7, 1, 2, 9, 2, 4, 1, 2], 1, 3, [4, 1, 2]),  # "2" alone
        ([5, 5], 3, 4, [5, 5, 5, 5]),  # period 1
        ([4, 5, 4, 5], 3, 5, [4, 5, 4, 5, 4]),  # period 2
        ([1, 2, 3, 1, 2, 3, 1], 3, 7, [2, 3, 1, 2, 3, 1, 2]),  # period 3, cut in the middle
        ([9, 8, 1, 2, 3, 1], 3, 5, [2, 3, 1, 2, 3]),  # period 3, after other tokens
        ([4, 5, 4, 5], 3, 1, [4]),
        ([4, 5, 4, 5], 3, 0, []),
        ([1, 2, 3], 3, 4, []),  # no repetition
        ([1], 3, 4, []),
    ],
)
def test_lookup_by_hand(tokens: list[int], max_ngram: int, n_draft_tokens: int, expected: list[int]) -> None:
    assert lookup_ngram(tokens, max_ngram, n_draft_tokens) == expected


def copy_tokens(tokens: Sequence[int], max_ngram: int, n_draft_tokens: int) -> list[int]:
    """Copy token by token what followed the last occurrence of the longest suffix."""
    for size in range(max_ngram, 0, -1):
        starts = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[len(tokens) - size :]]
        if starts:
            text = list(tokens)
            for at in range(starts[-1] + size, starts[-1] + size + n_draft_tokens):
                text.append(text[at])
            return text[len(tokens) :]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    max_ngram=st.integers(1, 5),
    n_draft_tokens=st.integers(0, 12),
)
def test_lookup_equals_copying_token_by_token(tokens: list[int], max_ngram: int, n_draft_tokens: int) -> None:
    assert lookup_ngram(tokens, max_ngram, n_draft_tokens) == copy_tokens(tokens, max_ngram, n_draft_tokens)


@given(
    word=st.lists(st.integers(), min_size=1, max_size=6, unique=True),
    length=st.integers(0, 20),
    max_ngram=st.integers(1, 4),
    n_draft_tokens=st.integers(1, 12),
)
def test_periodic_sequences_are_predicted(word: list[int], length: int, max_ngram: int, n_draft_tokens: int) -> None:
    whole = word * 40
    seen = len(word) + 1 + length
    assert lookup_ngram(whole[:seen], max_ngram, n_draft_tokens) == whole[seen : seen + n_draft_tokens]


def test_repeated_token_accepts_every_draft() -> None:
    model = gh.build(gh.preset("tiny-decoder", max_len=32))
    engine = gh.Engine(model, slots=1, speculator=PromptLookup(n_draft_tokens=4))
    request = engine.submit([5, 5], max_new_tokens=20, logit_bias={5: 1000.0})
    steps = 1
    while engine.step():
        steps += 1
    assert request.ids == [5] * 20
    assert steps == 4  # four drafts and one token of the model in each


def test_draft_model_with_too_few_positions_raises() -> None:
    model = gh.build(gh.preset("tiny-decoder", max_len=48, position=LEARNED))
    short = gh.build(gh.preset("tiny-decoder", max_len=32, position=LEARNED))
    message = "the engine's max_len is 48, but the draft model has positions for 32; reduce it."
    with pytest.raises(gh.InputError, match=re.escape(message)):
        gh.Engine(model, slots=1, speculator=DraftModel(short))
    gh.Engine(model, slots=1, max_len=32, speculator=DraftModel(short))


def test_draft_model_without_learned_positions_has_no_length_limit() -> None:
    torch.manual_seed(3)
    model = gh.build(gh.preset("tiny-decoder", max_len=48))
    short = gh.build(gh.preset("tiny-decoder", max_len=8, position={"kind": "rotary"}))
    plain, drafted = (gh.Engine(model, slots=1, speculator=one) for one in (None, DraftModel(short)))
    made = [engine.submit([1, 2, 3], max_new_tokens=20) for engine in (plain, drafted)]
    plain.run()
    drafted.run()
    assert made[0].ids == made[1].ids
