"""Errors in OpenAI's format, for which its clients raise their own exception classes."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar

from starlette.responses import Response

from glasshouse.config import JsonDict
from glasshouse.web import json_response

RETRY_AFTER = 1  # seconds, where nothing is known
REQUEST_ID = ContextVar("request_id", default="")  # of the request that this task answers


class ApiError(Exception):
    """A request that gets no answer: a status, and a message that says what is wrong and what to do."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.kind, self.code, self.param = message, status, kind, code, param
        self.headers = dict(headers or {})

    def body(self) -> JsonDict:
        """Return the error as OpenAI's API writes it.

        >>> ApiError("n is 0.", param="n").body()["error"]
        {'message': 'n is 0.', 'type': 'invalid_request_error', 'param': 'n', 'code': None, 'request_id': ''}
        """
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**error, "request_id": REQUEST_ID.get()}}

    def response(self) -> Response:
        """Return the error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def queue_full(waiting: int, seconds: int = RETRY_AFTER) -> ApiError:
    """Return the error of a request that would have to wait behind too many others, who take this many seconds."""
    return ApiError(
        f"{waiting} requests of this key are waiting, which is the limit; try again in {seconds} s.",
        429,
        kind="rate_limit_error",
        code="rate_limit_exceeded",
        headers={"Retry-After": str(seconds)},
    )


def unavailable(reason: str, seconds: int = RETRY_AFTER) -> ApiError:
    """Return the error of a server that takes no requests now, but may in so many seconds."""
    headers = {"Retry-After": str(seconds)}
    return ApiError(reason, 503, kind="server_error", code="service_unavailable", headers=headers)


def never_begun(seconds: int = RETRY_AFTER) -> ApiError:
    """Return the error of a request that only waited until its time was over: nothing is wrong with it."""
    return unavailable(f"other requests took all the time that this one had; try again in {seconds} s.", seconds)


def timed_out(seconds: float) -> ApiError:
    """Return the error of a request that was not done in time; a client should not simply send it again."""
    message = f"the request was not done within {seconds:g} s; ask for less."
    return ApiError(message, 504, kind="server_error", code="timeout", headers={"x-should-retry": "false"})
