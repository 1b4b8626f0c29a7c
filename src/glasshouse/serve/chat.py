"""/v1/chat/completions: a conversation is rendered by the model's chat template, and the reply generated."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.generation.request import Request
from glasshouse.serve.answer import Answer, check_fan_out, respond
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.api_errors import ApiError
from glasshouse.serve.job import Piece
from glasshouse.serve.logprobs import chat_logprobs
from glasshouse.serve.protocol import CHAT, Values, message_texts, sampling_params
from glasshouse.serve.served_model import ServedModel


class ChatAnswer(Answer):
    """The answer of this endpoint."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, index: int, piece: Piece, *, first: bool, chunk: bool) -> JsonDict:
        message: JsonDict = {"content": piece.text}
        if first:
            message = {"role": "assistant", **message}
        if not chunk:
            message["refusal"] = None
        logprobs = None
        if self.values["logprobs"]:
            logprobs = chat_logprobs(self.served.tok, piece.ids, piece.logprobs, piece.top_logprobs)
        name = "delta" if chunk else "message"
        return {"index": index, name: message, "logprobs": logprobs, "finish_reason": piece.finish_reason}


async def chat_completions(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/chat/completions."""
    answer, requests = await api.prepare(http, CHAT, partial(_read, api, http.scope[KEY]))
    return await respond(api, http, answer, requests)


def _read(api: Api, key: str, values: Values) -> tuple[ChatAnswer, list[Request]]:
    served = api.model(values["model"])
    check_fan_out(api, values["n"])
    if values["top_logprobs"] and not values["logprobs"]:
        raise ApiError("top_logprobs was given without logprobs; set logprobs to true.", param="top_logprobs")
    limits = [values[name] for name in ("max_tokens", "max_completion_tokens") if values[name] is not None]
    messages = message_texts(values["messages"])
    top = values["top_logprobs"]
    n_ids, requests = chat_requests(served, messages, values, min(limits, default=None), key, values["n"], top)
    return ChatAnswer(served, values, n_ids), requests


def chat_requests(
    served: ServedModel,
    messages: list[dict[str, str]],
    values: Values,
    max_tokens: int | None,
    key: str,
    n: int = 1,
    top_logprobs: int = 0,
) -> tuple[int, list[Request]]:
    """Return the engine's requests for `n` replies to a conversation, and how many tokens that has."""
    engine = served.generator()
    ids = served.encode_chat(messages)
    params = sampling_params(values, served.fit(ids, max_tokens), top_logprobs)
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *served.end_of_turn()))
    return len(ids), [engine.make_request(ids, sample, namespace=key) for sample in params.with_seeds(n)]
