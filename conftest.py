"""Tests and doctests do not see the kinds that another one registered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import glasshouse.training  # noqa: F401 - with every sort of kinds
from glasshouse.registry import Kind


@pytest.fixture(autouse=True)
def _registered_kinds() -> Iterator[None]:
    before = {sort: dict(sort.kinds) for sort in Kind.__subclasses__()}
    yield
    for sort, kinds in before.items():
        sort.kinds.clear()
        sort.kinds.update(kinds)
