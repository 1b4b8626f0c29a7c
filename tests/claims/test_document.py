"""docs/claims.md names tests that exist, and lists the statements without a test here."""

from __future__ import annotations

import re
from pathlib import Path

from claims.document import DOCUMENT

TESTS = Path(__file__).parents[1]
TEXT = DOCUMENT.read_text(encoding="utf-8")


def test_named_tests_exist() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)(\*?)`", TEXT))
    assert len(named) > 80
    missing = [name for name, star in named if f"def {name}" + ("" if star else "(") not in source]
    assert not missing


def test_untested_statements_are_listed() -> None:
    stated = set(re.findall(r"^\| ([A-Z]\d+) \|", TEXT, re.MULTILINE))
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*.py"))
    tested = {name.upper() for name in re.findall(r"def test_([a-z]\d+)_", source)}
    (listed,) = re.findall(r"not checked there: (.*?) need training.*?, and (V\d+) is checked in a browser", TEXT)
    assert stated - tested == set(re.findall(r"[A-Z]\d+", " ".join(listed)))
    assert tested <= stated
