"""What the documents promise about themselves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("name", ["benchmarks.md", "performance.md"])
def test_every_section_of_figures_says_which_command_and_which_day(name: str) -> None:
    _, *sections = re.split(r"^## ", (DOCS / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sections
    for section in sections:
        title = section.partition("\n")[0]
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", section), f"{name}, {title!r}: no date"
        assert re.search(r"`[^`]*(make|python|glasshouse|benchmarks/)[^`]*`|script outside", section), (
            f"{title!r}: no command"
        )
