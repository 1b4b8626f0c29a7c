"""What all endpoints share: models by name, the runner, and reading requests off the event loop in bounded time."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.requests import Request

from glasshouse.config import did_you_mean
from glasshouse.errors import GlasshouseError
from glasshouse.serve.answers.internals import RecordingQuota
from glasshouse.serve.answers.kept import CANDIDATES, KeptAnswers
from glasshouse.serve.metrics import HttpCount, ModelMetrics
from glasshouse.serve.runtime.exchange import DisconnectedError
from glasshouse.serve.runtime.grammars import Asked, Grammars, asked_grammar
from glasshouse.serve.runtime.preparation import Preparation
from glasshouse.serve.runtime.runner import Runner
from glasshouse.serve.schema.errors import ApiError
from glasshouse.serve.schema.fields import Table
from glasshouse.serve.schema.requests import Values
from glasshouse.serve.served_model import ServedModel
from glasshouse.web import Log, strict_loads
from glasshouse.web import read_body as read_at_most

T = TypeVar("T")

# In the scope of a request: whose it is, a name that is not the key itself; and what counts its tokens.
KEY, USAGE = "glasshouse-key", "glasshouse-usage"


@dataclass(frozen=True)
class Limits:
    """Limits of requests, queues and kept answers."""

    max_waiting: int = 256  # jobs in the queue, of each model and key
    timeout: float = 600.0  # seconds from a request to the end of its answer
    max_body: int = 4 * 2**20  # bytes
    body_timeout: float = 30.0  # seconds to send it
    prepare_timeout: float = 20.0  # seconds to wait until a request is read, and again to parse and tokenize it
    max_answers: int = 1000  # that can be opened, of all keys together; the oldest go first
    max_answer_bytes: int = 256 * 2**20  # of those, roughly
    max_recorded: int = 64 * 2**20  # bytes of activations that a request may record
    max_recorded_by_key: int = 256 * 2**20  # and the requests of a key at once


class Api:
    """The served models, and how a request to one is read."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        limits: Limits,
        *,
        look: bool = False,
        internals: bool = False,
        log: Log | None = None,
    ) -> None:
        self.log = log or Log()
        self.models = {one.name: one for one in models}
        self.limits, self.internals = limits, internals
        self.recording_quota = RecordingQuota(limits.max_recorded, limits.max_recorded_by_key)
        self.metrics = {one.name: ModelMetrics() for one in models}
        self.runner = Runner(models, self.metrics, limits.max_waiting, CANDIDATES if look else 0, self.log)
        self.answers = KeptAnswers(limits.max_answers, limits.max_answer_bytes) if look else None
        self.started = int(time.time())
        self.http_counts: Counter[HttpCount] = Counter()
        self.grammars = Grammars()
        self._preparation = Preparation(limits.max_waiting)

    def model(self, name: str) -> ServedModel:
        """Return a model by name; raise the error that OpenAI's clients know."""
        if name not in self.models:
            message = f"there is no model {name[:100]!r}; {did_you_mean(name[:100], self.models)}"
            raise ApiError(message, 404, code="model_not_found", param="model")
        return self.models[name]

    @property
    def candidates(self) -> int:
        """How many candidates of each token are kept: none where answers are not."""
        return 0 if self.answers is None else CANDIDATES

    async def prepare(self, request: Request, table: Table, work: Callable[[Values], T]) -> T:
        """Parse a request's body, and run `work` on it in another thread; cancelled when the client disconnects."""
        body = await self.read_body(request)
        return await while_connected(request, self._read(request, table, work, body))

    async def _read(self, request: Request, table: Table, work: Callable[[Values], T], body: bytes) -> T:
        def read() -> tuple[T | None, Values, Asked | None]:
            values = table.parse(parse_json(body), "")
            asked = asked_grammar(values)
            return (work(values) if asked is None else None), values, asked

        result, values, asked = await self.in_thread(request, read)
        if asked is None:
            return cast(T, result)
        constraint = await self.grammars.compile(self.model(values["model"]), request.scope[KEY], asked)
        return await self.in_thread(request, lambda: work({**values, "constraint": constraint}))

    async def read_body(self, request: Request) -> bytes:
        """Return the body of a JSON request; raise ApiError if it is of another type, too long or too slow."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise ApiError("the Content-Type is not application/json; set it.", 415)
        try:
            async with asyncio.timeout(self.limits.body_timeout):
                body = await read_at_most(request, self.limits.max_body)
        except TimeoutError:
            raise ApiError(
                f"the body did not come within {self.limits.body_timeout:g} s; send it again.", 408
            ) from None
        if body is None:
            raise ApiError(f"the request is larger than {self.limits.max_body / 2**20:g} MiB; send less.", 413)
        return body

    async def in_thread(self, request: Request, work: Callable[[], T]) -> T:
        """Run CPU work in another thread, round-robin with other keys, and return its result."""
        try:
            return await self._preparation.run(request.scope[KEY], work, self.limits.prepare_timeout)
        except GlasshouseError as error:
            raise ApiError(str(error)) from None

    def deadline(self) -> float:
        """Return when a request that begins now has to be done, by the event loop's clock, for `Runner.call`."""
        return asyncio.get_running_loop().time() + self.limits.timeout

    def close(self) -> None:
        """End all jobs and threads."""
        self.runner.close()
        self.grammars.close()
        self._preparation.close()
        self.log.close()


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of work, which is cancelled when the client disconnects; the body must have been read."""

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise DisconnectedError
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


def parse_json(body: bytes) -> object:
    """Parse a JSON body; raise ApiError also for NaN and Infinity, which JSON lacks.

    >>> parse_json(b'{"temperature": NaN}')
    Traceback (most recent call last):
    ...
    glasshouse.serve.schema.errors.ApiError: the request is not valid JSON: NaN is not a JSON value.
    """
    try:
        return strict_loads(body)
    except RecursionError:
        raise ApiError("the request is nested too deep; flatten it.") from None
    except ValueError as error:
        raise ApiError(f"the request is not valid JSON: {error}.") from None
