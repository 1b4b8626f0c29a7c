"""JSON of strangers: without the numbers that JSON lacks."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn


def loads(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; raise ValueError also for NaN and Infinity, and for numbers that a float cannot hold.

    >>> loads('{"a": 1e999}')
    Traceback (most recent call last):
    ...
    ValueError: 1e999 is beyond the range of a number
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return value
