"""/v1/chat/completions: a conversation is rendered by the model's chat template, and the reply generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.generation.request import Request
from glasshouse.serve.answers.answer import Answer, check_fan_out, respond
from glasshouse.serve.answers.internals import check_asked
from glasshouse.serve.answers.logprobs import chat_logprobs
from glasshouse.serve.answers.tool_calls import ToolCallParser, conversation, offered_tools
from glasshouse.serve.api import KEY, Api
from glasshouse.serve.runtime.exchange import Piece
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import CHAT, Values, sampling_params
from glasshouse.serve.served_model import ServedModel


class ChatAnswer(Answer):
    """The answer of this endpoint."""

    kind, object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, served: ServedModel, values: Values, prompt_tokens: int, tools: Sequence[JsonDict]) -> None:
        super().__init__(served, values, prompt_tokens)
        names = {tool["function"]["name"] for tool in tools}
        self._parsers = [ToolCallParser(names) for _ in range(values["n"])] if tools else []

    def choice(self, index: int, piece: Piece, *, first: bool, chunk: bool) -> JsonDict:
        message, reason = self._message(index, piece, chunk)
        if first:
            message = {"role": "assistant", **message}
        if not chunk:
            message["refusal"] = None
        logprobs = None
        if self.values["logprobs"]:
            logprobs = chat_logprobs(self.served.tok, piece.ids, piece.logprobs, piece.top_logprobs)
        name = "delta" if chunk else "message"
        return {"index": index, name: message, "logprobs": logprobs, "finish_reason": reason}

    def _message(self, index: int, piece: Piece, chunk: bool) -> tuple[JsonDict, str | None]:
        """Return text and calls of a piece, and the reason where it is the last."""
        reason: str | None = piece.finish_reason
        if not self._parsers:
            return {"content": piece.text}, reason
        parser = self._parsers[index]
        text, calls = parser.feed(piece.text, last=reason is not None)
        if parser.n_calls and reason == "stop":
            reason = "tool_calls"
        if not calls:
            return {"content": text}, reason
        if not chunk:  # a list is in order by itself
            calls = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        return {"content": text or None, "tool_calls": calls}, reason


async def chat_completions(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/chat/completions."""
    answer, requests = await api.prepare(http, CHAT, partial(_read, api, http.scope[KEY]))
    return await respond(api, http, answer, requests)


def _read(api: Api, key: str, values: Values) -> tuple[ChatAnswer, list[Request]]:
    check_asked(values, api.internals)
    served = api.model(values["model"])
    check_fan_out(api, values["n"])
    if values["top_logprobs"] and not values["logprobs"]:
        raise ApiError("top_logprobs was given without logprobs; set logprobs to true.", param="top_logprobs")
    limits = [values[name] for name in ("max_tokens", "max_completion_tokens") if values[name] is not None]
    messages, tools = conversation(values["messages"]), offered_tools(served, values)
    limit, top = min(limits, default=None), values["top_logprobs"]
    n_ids, requests = chat_requests(api, served, messages, values, limit, key, values["n"], top, tools)
    api.recording_quota.add(key, requests)
    return ChatAnswer(served, values, n_ids, tools), requests


def chat_requests(
    api: Api,
    served: ServedModel,
    messages: Sequence[JsonDict],
    values: Values,
    max_tokens: int | None,
    key: str,
    n: int = 1,
    top_logprobs: int = 0,
    tools: Sequence[JsonDict] = (),
) -> tuple[int, list[Request]]:
    """Return the engine's requests for `n` replies to a conversation, and how many tokens that has."""
    engine = served.generator()
    # Templates strip messages, and may leave out parts of those that are not the user's, such as earlier thoughts.
    served.check_least_tokens(*(one["content"].strip() for one in messages if one["role"] == "user"))
    ids = served.encode_chat(messages, tools=tools)
    params = sampling_params(values, served.fit(ids, max_tokens), top_logprobs, api.candidates, served.rules)
    params = replace(params, stop_token_ids=(*params.stop_token_ids, *served.end_of_turn()))
    return len(ids), [engine.make_request(ids, sample, namespace=key) for sample in params.with_seeds(n)]
