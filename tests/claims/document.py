"""The pages written from the statements, for tests that compare them with what they measure."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).parents[2] / "docs"


def _generator() -> ModuleType:
    found = importlib.util.spec_from_file_location("generate_notes", DOCS / "generate_notes.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["generate_notes"] = module
    found.loader.exec_module(module)
    return module


GENERATOR = _generator()


def documented_rows(heading: str) -> list[list[str]]:
    """Return the cells of the table whose heading starts with this, row by row."""
    lines = GENERATOR.claims_page().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading)) + 2
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows
