"""Bodies of requests, read up to a size."""

from __future__ import annotations

from starlette.requests import Request


async def read_body(request: Request, limit: int) -> bytes | None:
    """Return the body of a request; None if it has more than `limit` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            return None
    return b"".join(parts)
