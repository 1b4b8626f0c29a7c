"""What a live page answers, beside what the server answers on the same rounded weights."""

from __future__ import annotations

import base64
import logging
import math
from collections.abc import Iterator

import numpy as np

from glasshouse import config
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.page.endpoints import endpoints
from glasshouse.page.html_export import _initial_requests
from glasshouse.page.live.file import LIVE_ENDPOINTS
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import with_defaults
from glasshouse.web import strict_loads, to_json

Request = tuple[str, JsonDict]

logging.getLogger("torch.__trace").setLevel(logging.WARNING)  # pytest would keep each of thousands of lines


def initial_requests(traces: TraceCache, *states: JsonDict) -> list[Request]:
    """Return what all live views ask when they open at some states."""
    found: dict[bytes, Request] = {}
    for state in states:
        for name, body in _initial_requests(traces, with_defaults(traces, state)):
            if name in LIVE_ENDPOINTS:
                found[to_json([name, body])] = (name, body)
    return [*found.values()]


def answer(traces: TraceCache, request: Request) -> object:
    """Return what the server answers."""
    name, body = request
    endpoint = endpoints()[name]
    try:
        return decoded(strict_loads(to_json(endpoint.handler(traces, config.parse(endpoint.params, body)))))
    except GlasshouseError as error:
        return {"error": str(error)}


def decoded(value: object) -> object:
    """Return an answer with its tensors as arrays: those of the server are base64, those of the worker lists."""
    match value:
        case {"shape": shape, "f32": str(data)}:
            return np.frombuffer(base64.b64decode(data), np.float32).reshape(shape)
        case {"shape": shape, "u8": str(data)}:
            return np.frombuffer(base64.b64decode(data), np.uint8).reshape(shape)
        case {"shape": list(shape), "data": list(data)}:
            return np.array([math.nan if one is None else float(one) for one in data], np.float64).reshape(shape)
        case dict():
            return {name: decoded(one) for name, one in value.items()}
        case list():
            return [decoded(one) for one in value]
    return value


def differences(live: object, served: object, path: str = "", *, tolerance: float = 1e-4) -> Iterator[str]:
    """Yield where two answers differ by more than rounding, relative to the largest number of a tensor."""
    match live, served:
        case np.ndarray(), np.ndarray():
            if live.shape != served.shape:
                yield f"{path}: shape {live.shape} instead of {served.shape}"
            elif live.size:
                a, b = live.astype(np.float64), served.astype(np.float64)
                same = (np.isnan(a) & np.isnan(b)) | (a == b)
                finite = b[np.isfinite(b)]
                allowed = tolerance * max(1.0, float(np.abs(finite).max()) if finite.size else 1.0)
                off = np.abs(np.subtract(a, b, where=~same, out=np.zeros_like(a)))
                if served.dtype == np.uint8:
                    allowed = 1
                if not (off <= allowed).all():
                    yield f"{path}: off by {np.nanmax(off)} of {allowed}"
        case dict(), dict():
            for name in served.keys() | live.keys():
                if name not in live or name not in served:
                    yield f"{path}.{name}: only in {'served' if name in served else 'live'}"
                else:
                    yield from differences(live[name], served[name], f"{path}.{name}", tolerance=tolerance)
        case list(), list():
            if len(live) != len(served):
                yield f"{path}: {len(live)} instead of {len(served)}"
            for number, (one, other) in enumerate(zip(live, served, strict=False)):
                yield from differences(one, other, f"{path}[{number}]", tolerance=tolerance)
        case (bool() | None | str(), _) | (_, bool() | None | str()):
            if live != served:
                yield f"{path}: {live!r} instead of {served!r}"
        case int() | float(), int() | float():
            if abs(live - served) > tolerance * max(1.0, abs(served)):
                yield f"{path}: {live} instead of {served}"
        case _:
            yield f"{path}: {live!r} instead of {served!r}"
