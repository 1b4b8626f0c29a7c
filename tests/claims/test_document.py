"""The statements name tests and code that exist, and docs/claims.md and docs/notes.md are written from them."""

from __future__ import annotations

import importlib
import inspect
import re
from functools import reduce
from pathlib import Path

import pytest

from claims.document import DOCS, GENERATOR
from glasshouse import notes

TESTS = Path(__file__).parents[1]
STATEMENTS = [one for part in notes.parts() for one in part.statements]
NUMBERS = [one.number for one in STATEMENTS]


@pytest.mark.parametrize("name", list(GENERATOR.PAGES))
def test_the_page_is_what_the_statements_say_today(name: str) -> None:
    written = (DOCS / name).read_text(encoding="utf-8")
    assert written == GENERATOR.PAGES[name](), "run docs/generate_notes.py, or make docs"


def test_statements_are_numbered_through() -> None:
    """T1 to T6, E1 to E4 and so on: none is missing, none is there twice."""
    counts = {"T": 6, "E": 4, "P": 9, "A": 17, "B": 8, "M": 10, "L": 2, "V": 4}
    expected = [f"{letter}{i}" for letter, count in counts.items() for i in range(1, count + 1)]
    assert expected == NUMBERS
    assert len(NUMBERS) == 60


@pytest.mark.parametrize("one", STATEMENTS, ids=NUMBERS)
def test_why_is_one_sentence_that_says_more_than_the_title(one: notes.Statement) -> None:
    assert re.fullmatch(r"[“A-Z][^.?!]+\.", one.why)
    assert len(one.why) <= 150
    assert one.title.casefold() not in one.why.casefold()
    assert [other.number for other in STATEMENTS if other.why == one.why] == [one.number]


def test_measured_curves_say_what_they_are_of() -> None:
    with_curves = {number for number, found in notes.measurements().items() if found.curves}
    assert {one.number for one in STATEMENTS if one.curves} == with_curves


def test_named_tests_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)(\*?)`", " ".join(one.shown_by for one in STATEMENTS)))
    assert len(named) > 80
    missing = [name for name, star in named if f"def {name}" + ("" if star else "(") not in source]
    assert not missing


def test_untested_statements_are_listed() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tested = {name.upper() for name in re.findall(r"def test_([a-z]\d+)_", source)}
    (listed,) = re.findall(r"([A-Z]\d+) alone is not checked there but in a browser", GENERATOR.CLAIMS)
    assert set(NUMBERS) - tested == {listed}
    assert tested <= set(NUMBERS)


@pytest.mark.parametrize("one", STATEMENTS, ids=NUMBERS)
def test_the_code_of_a_statement_exists(one: notes.Statement) -> None:
    module, _, name = one.code.partition(":")
    found = reduce(getattr, name.split("."), importlib.import_module(module))
    assert one.line in inspect.getsource(found)


def test_questions_are_answered_by_a_card() -> None:
    for part in notes.parts():
        assert part.questions
        for question in part.questions:
            assert question.ask.endswith("?")
            assert notes.statement(question.card).says
