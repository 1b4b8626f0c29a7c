"""JSON over HTTP: strict where it comes in, and without NaN where it goes out."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from starlette.responses import Response


def json_response(answer: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(to_json(answer), status, dict(headers or {}), media_type="application/json")


def to_json(answer: object) -> bytes:
    """Encode a response as JSON; NaN and infinity become null.

    Bytes are base64, and written as a string without a search for what to escape, which takes the longest of it.

    >>> to_json({"loss": [1.5, float("nan")], "data": b"aGk="})
    b'{"loss":[1.5,null],"data":"aGk="}'
    """
    written: list[bytes] = []
    mark = uuid.uuid4().hex

    def placeholder(data: object) -> str:
        if not isinstance(data, bytes):
            raise TypeError(f"{type(data).__name__} has no JSON")
        written.append(data)
        return f"{mark} {len(written) - 1}."

    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=placeholder)
    except ValueError:
        text = json.dumps(_finite(answer), ensure_ascii=False, separators=(",", ":"), default=placeholder)
    encoded = text.encode(errors="backslashreplace")
    for number, data in enumerate(written):
        encoded = encoded.replace(f"{mark} {number}.".encode(), data)
    return encoded


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def strict_loads(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON value
    """Parse JSON; raise ValueError also for NaN and Infinity, and for numbers that a float cannot hold.

    >>> strict_loads('{"a": 1e999}')
    Traceback (most recent call last):
    ...
    ValueError: 1e999 is beyond the range of a number
    """
    return json.loads(text, parse_constant=_refuse, parse_float=_finite_float)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the range of a number")
    return value
