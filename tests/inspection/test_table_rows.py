"""Every row of the tables "Coming from ..." of docs/inspection.md is run by a test.

Most of these need the other library (`make inspection`), so their files are read, not imported.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "inspection.md"


def rows(page: str) -> list[str]:
    """Return the first cells of the tables below headings that begin with "Coming from"."""
    found: list[str] = []
    for section in re.split(r"^## ", page, flags=re.M):
        if section.startswith("Coming from"):
            lines = [line for line in section.splitlines() if line.startswith("|")]
            found += [line.split("|")[1].strip() for line in lines if "---" not in line]
    return [one for one in found if one not in ("theirs", "TransformerLens")]


def named_rows() -> list[str]:
    """Return the rows that tests name."""
    found: list[str] = []
    for path in HERE.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "table_row":
                found += [ast.literal_eval(one) for one in node.args]
    return found


def test_every_row_is_run_by_a_test() -> None:
    cells, named = rows(PAGE.read_text()), named_rows()
    assert len(cells) > 25
    assert [one for one in cells if not any(one.startswith(name) for name in named)] == []
    assert [name for name in named if not any(one.startswith(name) for one in cells)] == []
