"""What an answer says of the internals of its requests: scores of probes, rules that fired, recorded activations."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pybase64
from safetensors.torch import save

from glasshouse.config import JsonDict
from glasshouse.generation.request import Request
from glasshouse.generation.rules import Firing
from glasshouse.generation.tops import Top
from glasshouse.inspection import Recording
from glasshouse.page.serialization import finite_or_none
from glasshouse.serve.answers.logprobs import token_text
from glasshouse.serve.runtime.exchange import Piece
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import INTERNALS, Values
from glasshouse.text import Tokenizer


class RecordingQuota:
    """The bytes that recordings may take: of a request, and of all requests of a key that are not answered yet."""

    def __init__(self, per_request: int, per_key: int) -> None:
        self._per_request, self._per_key = per_request, per_key
        self._sizes: dict[str, WeakKeyDictionary[Request, int]] = {}  # by key; a request is gone once it is answered
        self._lock = threading.Lock()  # requests are prepared in several threads

    def add(self, key: str, requests: Sequence[Request]) -> None:
        """Count the requests of a key; raise ApiError if they may record too much."""
        sizes = {request: _most_bytes(request) for request in requests if request.recording is not None}
        if not sizes:
            return
        size = sum(sizes.values())
        if size > self._per_request:
            raise ApiError(
                f"the request would record up to {size:,} bytes, but at most {self._per_request:,} are answered; "
                "record fewer sites, or generate fewer tokens.",
                param="record",
            )
        with self._lock:
            others = self._sizes.setdefault(key, WeakKeyDictionary())
            if size + (taken := sum(others.values())) > self._per_key:
                raise ApiError(
                    f"the requests of this key record up to {taken:,} bytes already, and {size:,} more would be over "
                    f"the {self._per_key:,} of a key; wait for their answers.",
                    429,
                    param="record",
                )
            others.update(sizes)


def _most_bytes(request: Request) -> int:
    assert request.recording is not None
    return request.recording.most_bytes(len(request.prompt) + request.limit)


def check_asked(values: Values, allowed: bool) -> None:
    """Raise for a request that asks for internals of a server that does not show them."""
    if not allowed and (asked := next((name for name in INTERNALS if values.get(name)), None)):
        raise ApiError(
            f"{asked} was given, but internals is off on this server; leave it out, or have it turned on.",
            403,
            param=asked,
            code="internals_off",
        )


async def internals(piece: Piece, values: Values, tok: Tokenizer | None) -> JsonDict:
    """Return what a piece says beside its text; a recording, which comes with the last one, as base64 safetensors."""
    found: JsonDict = {}
    if values.get("probes"):
        found["scores"] = {name: [finite_or_none(one) for one in scores] for name, scores in piece.scores.items()}
    if values.get("rules"):
        found["firings"] = [describe_firing(one) for one in piece.firings]
    if piece.lens is not None:
        found["lens"] = rows(piece.lens, lambda token: token_text(tok, token))
    if piece.attention:
        found["attention"] = {name: rows(top, lambda position: position) for name, top in piece.attention.items()}
    if piece.recording is not None:
        found["recording"] = await asyncio.to_thread(_encoded, piece.recording)
    return found


def _encoded(recording: Callable[[], Recording | None]) -> bytes | None:
    return None if (found := recording()) is None else encode_recording(found)


def rows(top: Top, shown: Callable[[int], object]) -> Any:  # noqa: ANN401 - nested lists
    """Return the tops of tokens as nested lists, the innermost of what was on top and its value.

    >>> import torch
    >>> rows(Top(torch.tensor([[0.5, 0.25]]), torch.tensor([[7, 3]])), str)
    [[['7', 0.5], ['3', 0.25]]]
    """
    if not top.values.dim():
        return [shown(int(top.indices)), float(top.values)]
    return [rows(Top(*one), shown) for one in zip(top.values, top.indices, strict=True)]


def describe_firing(firing: Firing) -> JsonDict:
    """Return where a rule began to apply, as JSON."""
    rule = firing.rule
    told = {"probe": rule.probe, "above": rule.above, "consecutive": rule.consecutive, "then": rule.then}
    return {**told, "token": firing.token, "score": firing.score}


def encode_recording(recording: Recording) -> bytes:
    """Return activations as base64 of a safetensors file, whose metadata has the axes of each.

    >>> import glasshouse as gh
    >>> model = gh.build(gh.preset("tiny-decoder"))
    >>> made = gh.generate(model, None, [[1, 2]], max_new_tokens=2, record="final")[0]
    >>> raw = pybase64.b64decode(encode_recording(made.recording))
    >>> from safetensors.torch import load
    >>> load(raw)["final"].shape
    torch.Size([3, 64])
    """
    tensors = {name: value.contiguous() for name, value in recording.items()}
    axes = {name: ",".join(recording.axes(name)) for name in tensors}
    return pybase64.b64encode(save(tensors, axes))
