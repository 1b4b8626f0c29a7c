"""Figures of the shortest text, and of ids without a text."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from claims.figures import Opened, opened
from glasshouse import notes
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.views.notes import FIGURES
from glasshouse.page.views.notes.view import NoteFigure, note_figure

SHORT = ["The text is too short; write a longer one."]


def texts(one: Opened, number: str) -> list[str]:
    """Return the sentences of a card on a text, all of which is numbers."""
    pieces = note_figure(one.traces, NoteFigure(number, ForwardPass(one.prompt)))["pieces"]
    assert pieces
    assert "NaN" not in json.dumps(pieces, allow_nan=False)
    return [piece["text"] for piece in pieces if piece["kind"] == "text"]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.long)])
def test_one_token_is_drawn(name: str) -> None:
    one = replace(opened(name), prompt=PagePrompt("5"))
    for number in FIGURES:
        said = texts(one, number)
        if number in ("A15", "V4") or (number, name) == ("M6", "gpt2"):
            assert said == SHORT, number
        else:
            assert said != SHORT, number


def test_two_tokens_are_enough() -> None:
    one = replace(opened("gpt2"), prompt=PagePrompt("5 6"))
    assert texts(one, "A15") == []
    assert texts(one, "M6") == []
    assert texts(one, "V4") != SHORT


@pytest.mark.parametrize(("name", "text"), [("framed", "to be"), ("gpt2", notes.EXAMPLES[0].text)])
def test_ids_without_a_text_are_decoded(name: str, text: str) -> None:
    """Where a model has no tokenizer to decode them, cards about text show the first example."""
    one = opened(name)
    ids = (5, 6) if one.tok is None else tuple(one.tok.encode(text, add_special_tokens=False))
    asked = NoteFigure("T1", ForwardPass(PagePrompt(appended=ids)))
    (facts,) = (one["facts"] for one in note_figure(one.traces, asked)["pieces"] if one["kind"] == "facts")
    assert dict(facts)["characters"] == len(text)
