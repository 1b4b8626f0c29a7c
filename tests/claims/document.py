"""Reads docs/claims.md, for tests that compare it with what they measure."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "claims.md"


def documented_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose heading starts with this, row by row."""
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
