"""/v1/responses, without state: nothing is stored, so a client sends the whole conversation each time."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from functools import partial
from itertools import count

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.generation.request import Request
from glasshouse.serve.answers.answer import EventStream, collect, event, make_exchange
from glasshouse.serve.api import KEY, USAGE, Api
from glasshouse.serve.endpoints.chat import chat_requests
from glasshouse.serve.runtime.exchange import DisconnectedError, Exchange, Piece
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import RESPONSES, Values, message_texts
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import json_response


class ResponseAnswer:
    """The answer of this endpoint: one message of one text."""

    def __init__(self, served: ServedModel, values: Values, prompt_tokens: int) -> None:
        self.served, self.values, self.prompt_tokens = served, values, prompt_tokens
        self.completion_tokens = 0
        self._incomplete = "max_output_tokens"  # why, if it is
        self.text = ""
        self.id, self.item_id = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self.created = time.time()

    def add(self, piece: Piece) -> None:
        """Add what was generated."""
        self.text += piece.text
        self.completion_tokens += len(piece.ids)
        if piece.finish_reason == "content_filter":
            self._incomplete = "content_filter"

    def part(self, text: str) -> JsonDict:
        """Return the text as a part of a message."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def message(self, status: str) -> JsonDict:
        """Return the message: its text once it is complete."""
        content = [] if status == "in_progress" else [self.part(self.text)]
        return {"id": self.item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def table(self, status: str) -> JsonDict:
        """Return the response; with its output, unless it is in progress."""
        total = self.prompt_tokens + self.completion_tokens
        done = status != "in_progress"
        usage = {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": total,
        }
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": self._incomplete} if status == "incomplete" else None,
            "instructions": self.values["instructions"],
            "max_output_tokens": self.values["max_output_tokens"],
            "metadata": {},
            "model": self.served.name,
            "output": [self.message(status)] if done else [],
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": self.values["temperature"],
            "tool_choice": "none",
            "tools": [],
            "top_p": self.values["top_p"],
            "truncation": "disabled",
            "usage": usage if done else None,
        }

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """Yield the answer as the events that OpenAI's client knows."""
        numbers = count()
        place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}

        def make(name: str, **more: object) -> bytes:
            return event({"type": name, "sequence_number": next(numbers), **more}, name)

        async with exchange:
            yield make("response.created", response=self.table("in_progress"))
            yield make("response.in_progress", response=self.table("in_progress"))
            yield make("response.output_item.added", output_index=0, item=self.message("in_progress"))
            yield make("response.content_part.added", **place, part=self.part(""))
            status = ""
            try:
                async for taken in exchange.pieces():
                    for _, piece in taken:
                        self.add(piece)
                        status = status_of(piece)
                        if piece.text:
                            yield make("response.output_text.delta", **place, delta=piece.text, logprobs=[])
            except ApiError as error:
                told = {name: error.body()["error"][name] for name in ("code", "message", "param", "request_id")}
                yield make("error", **told)
                return
            except DisconnectedError:
                return
            yield make("response.output_text.done", **place, text=self.text, logprobs=[])
            yield make("response.content_part.done", **place, part=self.part(self.text))
            yield make("response.output_item.done", output_index=0, item=self.message(status))
            yield make(f"response.{status}", response=self.table(status))


def status_of(piece: Piece) -> str:
    """Return the status of a response that ends with a piece."""
    return "incomplete" if piece.finish_reason in ("length", "content_filter") else "completed"


async def responses(api: Api, http: HttpRequest) -> Response:
    """Answer a request to /v1/responses."""
    answer, requests = await api.prepare(http, RESPONSES, partial(_read, api, http.scope[KEY]))
    http.scope[USAGE] = answer
    streamed = answer.values["stream"]
    exchange = make_exchange(api, http, answer.id, answer.served, requests, streamed)
    exchange.submit(http.receive)
    if streamed:
        return EventStream(answer.events(exchange))
    (piece,) = await collect(exchange)
    answer.add(piece)
    return json_response(answer.table(status_of(piece)))


def _read(api: Api, key: str, values: Values) -> tuple[ResponseAnswer, list[Request]]:
    served = api.model(values["model"])
    given = values["input"]
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else message_texts(given)
    if values["instructions"] is not None:
        messages = [{"role": "system", "content": values["instructions"]}, *messages]
    n_ids, requests = chat_requests(api, served, messages, values, values["max_output_tokens"], key)
    return ResponseAnswer(served, values, n_ids), requests
