"""/v1/embeddings: texts or token ids become vectors."""

from __future__ import annotations

import base64
from functools import partial
from typing import NamedTuple

import torch
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from torch import Tensor

from glasshouse.embeddings import check_lengths, embed_ids
from glasshouse.errors import InputError
from glasshouse.models import Decoder, Encoder
from glasshouse.models.prompt import check_ids
from glasshouse.serve.api import KEY, USAGE, Api
from glasshouse.serve.runtime.exchange import DisconnectedError
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import EMBEDDINGS, Values
from glasshouse.web import json_response

BATCH = 32  # texts per pass; requests that generate have a step between two passes


class Work(NamedTuple):
    """A request to this endpoint, checked."""

    model: Encoder | Decoder
    name: str
    rows: list[list[int]]
    as_base64: bool
    completion_tokens: int = 0

    @property
    def prompt_tokens(self) -> int:
        """The tokens of all texts."""
        return sum(map(len, self.rows))


async def embeddings(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/embeddings."""
    work = await api.prepare(http, EMBEDDINGS, partial(_read, api))
    order = sorted(range(len(work.rows)), key=lambda index: len(work.rows[index]))
    found: list[list[float] | str] = [""] * len(order)
    end = api.deadline()
    for start in range(0, len(order), BATCH):
        if await http.is_disconnected():
            raise DisconnectedError
        chosen = order[start : start + BATCH]
        rows = [work.rows[index] for index in chosen]
        vectors = await api.runner.call(partial(_embed, work.model, rows), http.scope[KEY], end)
        for index, vector in zip(chosen, vectors, strict=True):
            found[index] = _encoded(vector) if work.as_base64 else vector.tolist()
    http.scope[USAGE] = work
    tokens = work.prompt_tokens
    return json_response(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(found)],
            "model": work.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


def _read(api: Api, values: Values) -> Work:
    served = api.model(values["model"])
    model, tok = served.model, served.tok
    if not isinstance(model, Encoder | Decoder) or tok is None:
        raise ApiError(f"{served.name!r} does not embed texts; choose an encoder or a decoder.", param="model")
    if values["dimensions"] not in (None, model.spec.d_model):
        raise ApiError(f"{served.name!r} has {model.spec.d_model} dimensions, and no others.", param="dimensions")
    given = values["input"]
    many = given if isinstance(given, list) and not isinstance(given[0], int) else [given]
    if isinstance(many[0], str):
        for number, text in enumerate(many):
            if (least := served.least_tokens(text)) > (most := model.spec.max_len):
                message = f"text {number} has at least {least} tokens, but max_len is {most}; shorten it."
                raise ApiError(message, param="input")
        rows = tok.encode_batch(many)
    else:
        rows = [check_ids(one, model.spec.vocab_size) for one in many]
    if not all(rows):
        raise ApiError(f"text {rows.index([])} has no tokens; leave it out.", param="input")
    check_lengths(model, rows)
    return Work(model, served.name, rows, values["encoding_format"] == "base64")


def _embed(model: Encoder | Decoder, rows: list[list[int]]) -> Tensor:
    try:
        return embed_ids(model, rows, normalize=True).float().cpu()  # which clients of this API rely on
    except InputError as error:  # NaN: the rows were checked
        raise ApiError(str(error), 500, kind="server_error", headers={"x-should-retry": "false"}) from None


def _encoded(vector: Tensor) -> str:
    """Return a vector as base64 of its little-endian float32 numbers."""
    return base64.b64encode(vector.to(torch.float32).numpy().astype("<f4").tobytes()).decode()
