"""How much is tried: make test draws few of hypothesis' examples, and takes the first of similar cases."""

import os
from typing import Any

import pytest

SHARE = 1 if os.environ.get("EXAMPLES") == "all" else 24  # make examples draws them all


def up_to(number: int) -> int:
    """Return the share of the full number that is drawn, at least 5."""
    return max(number // SHARE, min(number, 5))


def first_of(cases: list[Any], count: int = 1) -> list[Any]:
    """Return cases for `parametrize`, of which all but the first `count` are marked as long."""
    others = (one if isinstance(one, tuple) else (one,) for one in cases[count:])
    return [*cases[:count], *(pytest.param(*one, marks=pytest.mark.long) for one in others)]


def choose_few(cases: list[dict[str, int]], count: int) -> set[int]:
    """Return `count` cases of a matrix, given by the indices of their parameters; values not tried yet come first.

    >>> sorted(choose_few([{"a": a, "b": b} for a in range(2) for b in range(3)], 3))
    [0, 2, 4]
    """
    chosen, tried = set[int](), set[tuple[str, int]]()
    for _ in range(min(count, len(cases))):
        left = [number for number in range(len(cases)) if number not in chosen]
        best = max(left, key=lambda number: (len(cases[number].items() - tried), -number))
        chosen.add(best)
        tried |= cases[best].items()
    return chosen
