"""One sequence to generate for a client: filled by the thread that steps the engine, awaited on the event loop."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from glasshouse.errors import InputError
from glasshouse.generation.request import EndToken, FinishReason, Request, TopLogprobs


class Piece(NamedTuple):
    """What was generated since the piece before; the last one has the reason."""

    text: str
    ids: list[int]
    logprobs: list[float]
    top_logprobs: list[TopLogprobs]
    finish_reason: FinishReason | None = None
    error: str | None = None  # where the reason is "error"
    end_token: EndToken | None = None  # where one ended it

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


class Outbox:
    """Pieces of all jobs of one HTTP request, for the event loop that waits for them."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, Piece]] = []
        self._changed = asyncio.Event()

    def put(self, index: int, piece: Piece) -> None:
        """Add a piece of the job with an index; on the event loop only."""
        self._pieces.append((index, piece))
        self._changed.set()

    async def take(self) -> list[tuple[int, Piece]]:
        """Wait for pieces, and return all there are."""
        await self._changed.wait()
        self._changed.clear()
        taken, self._pieces = self._pieces, []
        return taken


@dataclass(eq=False)
class Job:
    """A request of the engine, what of it was sent, and where to."""

    request: Request
    key: str
    index: int  # of its choice
    outbox: Outbox
    streamed: bool
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None  # when there was one
    n_sent: int = 0  # ids in the pieces so far
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
        if not done:
            return piece
        return piece._replace(finish_reason=request.finish_reason, error=request.error, end_token=request.end_token)

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
