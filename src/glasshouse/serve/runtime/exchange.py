"""An exchange: one HTTP request and the sequences that are generated for it, its jobs.

Jobs are filled by the thread that steps the engine, and their pieces awaited on the event loop. They end with the
client, at the deadline, and when the server shuts down.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from starlette.types import Receive

from glasshouse.errors import InputError
from glasshouse.generation.constraints.constraint import TOO_COMPLEX
from glasshouse.generation.request import NOTHING_ALLOWED, EndToken, FinishReason, Request, TopLogprobs
from glasshouse.generation.rules import Firing
from glasshouse.generation.tops import Top
from glasshouse.inspection import Recording
from glasshouse.serve.schema.errors import ApiError, never_begun, timed_out, unavailable


class Piece(NamedTuple):
    """What was generated since the piece before; the last one has the reason."""

    text: str
    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    finish_reason: FinishReason | None = None
    error: str | None = None  # where the reason is "error"
    end_token: EndToken | None = None  # where one ended it
    scores: Mapping[str, list[float]] = {}  # of probes; that of a token comes after it
    firings: Sequence[Firing] = ()  # of rules
    lens: Top | None = None  # of these ids
    attention: Mapping[str, Top] = {}  # by site
    recording: Callable[[], Recording | None] | None = None  # of the answer, in its last piece; waits for the engine

    def with_end_token(self) -> Piece:
        """Return the piece with the token that ended it, if one did, as the last."""
        if self.end_token is None:
            return self
        token, logprob, top = self.end_token
        return self._replace(
            ids=[*self.ids, token],
            logprobs=[*self.logprobs, logprob],
            top_logprobs=[*self.top_logprobs, top] if top else self.top_logprobs,
        )


@dataclass(eq=False)
class Job:
    """An engine request, how much of its output was sent, and the callback that receives it."""

    request: Request
    key: str
    index: int  # of its choice
    deliver: Callable[[int, Piece], None]  # called on the event loop
    streamed: bool
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # when there was one
    n_sent: int = 0  # ids in the pieces so far
    n_scored: int = 0  # and scores of each probe
    n_fired: int = 0
    text: str = ""  # in the pieces so far; needed only to try again
    retried: bool = False

    def take(self) -> Piece | None:
        """Return what is new, if there is anything to send now; without streaming that is everything, at the end."""
        request = self.request
        done = request.done
        if not (done or self.streamed):
            return None
        text = self._new_text()
        count = request.n_final
        if not (done or text or count > self.n_sent):
            return None
        new = slice(self.n_sent, count)
        self.n_sent = max(self.n_sent, count)
        self.text += text
        piece = Piece(text, request.ids[new], request.logprobs[new], request.top_logprobs[new])
        piece = piece._replace(scores=self._new_scores(count), firings=request.firings[self.n_fired :])
        if request.lens or request.attention:
            lens, attention = request.tops(new)
            piece = piece._replace(lens=lens, attention=attention)
        self.n_fired = max(self.n_fired, len(request.firings))
        if not done:
            return piece
        return piece._replace(
            finish_reason=request.finish_reason,
            error=request.error,
            end_token=request.end_token,
            recording=None if request.recording is None else request.recorded,
        )

    def _new_scores(self, count: int) -> dict[str, list[float]]:
        """Return the scores that were not sent yet, of the first `count` new tokens."""
        scores = self.request.scores
        known = min(map(len, scores.values()), default=0)
        new = slice(self.n_scored, min(count, known))
        self.n_scored = max(self.n_scored, new.stop)
        return {name: scores[name][new] for name in self.request.options.probes}

    def _new_text(self) -> str:
        if not self.retried:
            return self.request.take_text()
        text = self.request.text
        if not self.request.done and self.text.startswith(text):
            return ""  # not yet as far as before
        if not text.startswith(self.text):
            raise InputError(
                "the answer could not be continued after an error of the engine; send the request again."
            )
        return text[len(self.text) :]

    def retry(self, request: Request) -> None:
        """Start again with an equal request, which generates the same tokens; those that were sent are skipped."""
        self.request, self.retried = request, True


class JobRunner(Protocol):
    """The interface of `glasshouse.serve.runtime.runner.Runner` for jobs."""

    @property
    def closed_reason(self) -> str:
        """Why no jobs are taken any more."""

    def submit(self, name: str, jobs: Sequence[Job]) -> None:
        """Queue jobs for a model."""

    def cancel(self, name: str, jobs: Sequence[Job]) -> bool:
        """End jobs; return whether all were still waiting."""


class DisconnectedError(Exception):
    """The client has disconnected."""


class Exchange:
    """The jobs of a request: `submit` queues them, `pieces` yields their output, leaving the block ends them."""

    def __init__(
        self,
        runner: JobRunner,
        model: str,
        key: str,
        requests: Sequence[Request],
        *,
        streamed: bool,
        timeout: float,
        keep: Callable[[Sequence[Request]], None] | None = None,  # called with what a client has got
    ) -> None:
        self._runner, self._model, self._timeout, self._keep = runner, model, timeout, keep
        self.jobs = [Job(request, key, index, self._deliver, streamed) for index, request in enumerate(requests)]
        self._pieces: list[tuple[int, Piece]] = []  # delivered and not taken yet
        self._delivered = asyncio.Event()
        self._disconnected = self._expired = self._waited = False  # the last: until it expired
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, receive: Receive) -> None:
        """Queue the jobs, or raise ApiError; from now on they end when the client does."""
        self._runner.submit(self._model, self.jobs)
        self._watch = asyncio.ensure_future(self._watch_client(receive))
        self._timer = asyncio.get_running_loop().call_later(self._timeout, self._expire)

    async def pieces(self) -> AsyncIterator[list[tuple[int, Piece]]]:
        """Yield what is new, by the index of the job, until all are done; raise where one ended without an answer."""
        left = len(self.jobs)
        while left:
            await self._delivered.wait()
            self._delivered.clear()
            taken, self._pieces = self._pieces, []
            for _, piece in taken:
                if piece.finish_reason in ("error", "cancelled"):
                    raise self._error(piece)
                left -= piece.finish_reason is not None
            yield taken

    def _deliver(self, index: int, piece: Piece) -> None:
        self._pieces.append((index, piece))
        self._delivered.set()

    def _error(self, piece: Piece) -> Exception:
        if self._disconnected:
            return DisconnectedError()
        if self._expired:
            return never_begun() if self._waited else timed_out(self._timeout)
        if piece.finish_reason == "cancelled":
            return unavailable(self._runner.closed_reason)
        message = piece.error or "the engine failed."
        if message == NOTHING_ALLOWED or message.startswith(TOO_COMPLEX):
            return ApiError(message)
        return ApiError(message, 500, kind="server_error", headers={"x-should-retry": "false"})

    async def _watch_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._disconnected = True
        self._runner.cancel(self._model, self.jobs)

    def _expire(self) -> None:
        self._expired = True
        self._waited = self._runner.cancel(self._model, self.jobs)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watch is not None:
            self._watch.cancel()
        unfinished = [job for job in self.jobs if not job.request.done]
        if unfinished:
            self._runner.cancel(self._model, unfinished)
        # A client that got an error instead of an answer has no id; one that left a stream has. What is not done yet
        # is the engine's thread to change.
        elif self._keep is not None and kind is None:
            self._keep([job.request for job in self.jobs])
