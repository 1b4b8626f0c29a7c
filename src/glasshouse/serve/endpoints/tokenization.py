"""/tokenize and /detokenize: text to the token ids of a model, and back."""

from __future__ import annotations

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.serve.api import Api
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import DETOKENIZE, TOKENIZE, Values, message_texts
from glasshouse.text import Tokenizer
from glasshouse.web import json_response


async def tokenize(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /tokenize."""
    return json_response(await api.prepare(http, TOKENIZE, partial(_tokenize, api)))


async def detokenize(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /detokenize."""
    return json_response(await api.prepare(http, DETOKENIZE, partial(_detokenize, api)))


def _tokenize(api: Api, values: Values) -> JsonDict:
    served = api.model(values["model"])
    if (values["prompt"] is None) == (values["messages"] is None):
        raise ApiError("there is no prompt, or messages too; give one of them.", param="prompt")
    if values["messages"] is not None:
        ids = served.encode_chat(message_texts(values["messages"]), values["add_generation_prompt"])
    else:
        ids = _tokenizer(api, values).encode(values["prompt"], values["add_special_tokens"])
    return {"tokens": ids, "count": len(ids), "max_model_len": served.max_len}


def _detokenize(api: Api, values: Values) -> JsonDict:
    return {"prompt": _tokenizer(api, values).decode(values["tokens"])}


def _tokenizer(api: Api, values: Values) -> Tokenizer:
    served = api.model(values["model"])
    if served.tok is None:
        raise ApiError(f"{served.name!r} has no tokenizer; send token ids to it.", param="model")
    return served.tok
