"""How much is tried: make test draws few of hypothesis' examples, and takes the first of similar cases."""

import os
from typing import Any

import pytest

SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 16  # make examples draws them all


def up_to(number: int) -> int:
    """Return the share of the full number that is drawn, at least 5."""
    return max(number // SHARE, min(number, 5))


def first_of(cases: list[Any], count: int = 1) -> list[Any]:
    """Return cases for `parametrize`, of which all but the first `count` are marked as long."""
    others = (one if isinstance(one, tuple) else (one,) for one in cases[count:])
    return [*cases[:count], *(pytest.param(*one, marks=pytest.mark.long) for one in others)]
