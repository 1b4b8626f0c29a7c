"""Which test runs which row of the tables "Coming from ..." of docs/inspection.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


def table_row(*cells: str) -> Callable[[Test], Test]:
    """Name the rows that a test runs, each by the beginning of its first cell; `test_table_rows.py` reads them."""

    def same(test: Test) -> Test:
        return test

    return same
