"""A fixture of all tests: none sees the kinds that another registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import glasshouse.training  # noqa: F401 - with every sort of kinds
from glasshouse import registry


@pytest.fixture(autouse=True)
def forget_kinds() -> Iterator[None]:
    """Restore what is registered."""
    tables = [registry._BUILDERS, *(sort.kinds for sort in registry.Kind.__subclasses__())]
    before = [dict(table) for table in tables]  # type: ignore[arg-type]
    yield
    for table, own in zip(tables, before, strict=True):
        table.clear()
        table.update(own)  # type: ignore[arg-type]
