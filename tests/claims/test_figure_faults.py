"""The list of mistakes to plant in the figures keeps up with them, and every figure has a test."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from claims.figure_faults import faults
from glasshouse.page.views.notes import FIGURES

FAULTS = faults()


def test_every_figure_has_a_test_and_mistakes() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_figures_*.py"))
    tested = [name.upper() for name in re.findall(r"^def test_figure_(\w+)\(", source, re.MULTILINE)]
    assert sorted(tested) == sorted(FIGURES)
    counts = Counter(one.card for one in FAULTS)
    assert counts.keys() == FIGURES.keys()
    assert min(counts.values()) >= 2


def test_the_line_of_a_mistake_is_there_once() -> None:
    for one in FAULTS:
        assert one.source().count(one.line) == 1, one
        assert one.fault != one.line
