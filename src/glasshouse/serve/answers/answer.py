"""Answers in OpenAI's format, whole or as server-sent events, for completions and chat completions alike."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glasshouse.config import JsonDict
from glasshouse.generation.request import Request
from glasshouse.serve.answers.internals import internals
from glasshouse.serve.api import KEY, USAGE, Api
from glasshouse.serve.runtime.exchange import DisconnectedError, Exchange, Piece
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.requests import Values
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import json_response, to_json

DONE = b"data: [DONE]\n\n"


def event(data: JsonDict, name: str | None = None) -> bytes:
    r"""Return one event.

    >>> event({"a": 1}), event({}, "response.created")
    (b'data: {"a":1}\n\n', b'event: response.created\ndata: {}\n\n')
    """
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_json(data) + b"\n\n"


class EventStream(Response):
    """A stream of server-sent events; a client that does not read them is disconnected."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events) as events:  # type: ignore[type-var]  # it is a generator
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in events:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class Answer(ABC):
    """The answer to one request: its choices are made of pieces, and tokens are counted as they pass."""

    kind: str  # the prefix of its id
    object: str
    chunk_object: str

    def __init__(self, served: ServedModel, values: Values, prompt_tokens: int) -> None:
        self.served, self.values = served, values
        self.prompt_tokens, self.completion_tokens = prompt_tokens, 0
        self.id, self.created = f"{self.kind}-{secrets.token_hex(12)}", int(time.time())

    @abstractmethod
    def choice(self, index: int, piece: Piece, *, first: bool, chunk: bool) -> JsonDict:
        """Return a choice, or a chunk of it, which may be the `first`."""

    def usage(self) -> JsonDict:
        """Return the counts of tokens."""
        total = self.prompt_tokens + self.completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": total,
        }

    async def whole(self, pieces: Sequence[Piece]) -> JsonDict:
        """Return the answer in one piece for each choice."""
        choices = [await self._counted(index, piece, first=True, chunk=False) for index, piece in enumerate(pieces)]
        return self._table(self.object, choices) | {"usage": self.usage()}

    async def events(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """Yield the answer as server-sent events; an error on the way is the last of them."""
        begun: set[int] = set()
        include_usage = self.values["stream_options"]["include_usage"]
        extra: JsonDict = {"usage": None} if include_usage else {}
        async with exchange:
            try:
                async for taken in exchange.pieces():
                    parts = []
                    for index, piece in taken:
                        choice = await self._counted(index, piece, first=index not in begun, chunk=True)
                        parts.append(event(self._table(self.chunk_object, [choice]) | extra))
                        begun.add(index)
                    yield b"".join(parts)
            except ApiError as error:
                yield event(error.body())
                return
            except DisconnectedError:
                return
            if include_usage:
                yield event(self._table(self.chunk_object, []) | {"usage": self.usage()})
            yield DONE

    async def _counted(self, index: int, piece: Piece, *, first: bool, chunk: bool) -> JsonDict:
        self.completion_tokens += len(piece.ids)
        made = self.choice(index, piece, first=first, chunk=chunk)
        made |= await internals(piece, self.values, self.served.tok)
        return made | {"token_ids": piece.ids} if self.values["return_token_ids"] else made

    def _table(self, kind: str, choices: list[JsonDict]) -> JsonDict:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}
        return {**head, "choices": choices}


async def respond(api: Api, http: HttpRequest, answer: Answer, requests: Sequence[Request]) -> Response:
    """Generate for requests of the engine, and return the answer of them all, streamed if the client asks for it."""
    http.scope[USAGE] = answer
    exchange = make_exchange(api, http, answer.id, answer.served, requests, answer.values["stream"])
    exchange.submit(http.receive)
    if answer.values["stream"]:
        return EventStream(answer.events(exchange))
    return json_response(await answer.whole(await collect(exchange)))


def make_exchange(
    api: Api, http: HttpRequest, answer: str, served: ServedModel, requests: Sequence[Request], streamed: bool
) -> Exchange:
    """Return the exchange of requests that were made for a client; `answer` is the id of what it will get."""
    key = http.scope[KEY]
    keep = None if api.answers is None else partial(api.answers.keep_requests, key, answer, served.name)
    timeout = api.limits.timeout
    return Exchange(api.runner, served.name, key, requests, streamed=streamed, timeout=timeout, keep=keep)


async def collect(exchange: Exchange) -> list[Piece]:
    """Wait for all jobs, each of which has one piece where nothing is streamed."""
    found: dict[int, Piece] = {}
    async with exchange:
        async for taken in exchange.pieces():
            found.update(taken)
    return [found[index] for index in range(len(exchange.jobs))]


def check_fan_out(api: Api, count: int) -> None:
    """Raise for more sequences than could ever wait in the queue."""
    if count > api.limits.max_waiting:
        raise ApiError(
            f"the request asks for {count} sequences, but at most {api.limits.max_waiting} may wait; ask for fewer.",
            param="n",
        )
