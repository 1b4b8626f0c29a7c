"""Non-blocking log of a server on stderr: a full disk, or a pipe that is not read, only loses lines."""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
import traceback
from datetime import UTC, datetime
from typing import Literal

from glasshouse.escaping import escape_control

Level = Literal["error", "warning", "info"]
Format = Literal["text", "json"]

LEVELS: tuple[Level, ...] = ("error", "warning", "info")  # each shows those before it too
MAX_LINES = 1000  # that wait to be written; more are lost
LAST_LINES = 2.0  # seconds to write what waits at the end


class Log:
    r"""Lines with fields, as text or JSON, written by a thread of their own: no call of it waits or raises.

    >>> line = Log(format="json").line("info", "draining", {"requests": 2})
    >>> json.loads(line)["message"], json.loads(line)["requests"]
    ('draining', 2)
    >>> print(Log().line("error", "no such path", {"path": "/\n", "key": ""}).partition(" ")[2])
    error: no such path path=/\x0a key=-
    """

    def __init__(self, level: Level = "warning", format: Format = "text") -> None:  # noqa: A002 - the option's name
        self._shown = LEVELS[: LEVELS.index(level) + 1]
        self._format = format
        self._lines: queue.Queue[str | None] = queue.Queue(MAX_LINES)
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.n_lost = 0  # lines

    def error(self, message: str, **fields: object) -> None:
        """Log at level error: an operator should act."""
        self._put("error", message, fields)

    def warning(self, message: str, **fields: object) -> None:
        """Log at level warning: an operator may want to know."""
        self._put("warning", message, fields)

    def info(self, message: str, **fields: object) -> None:
        """Log at level info: normal operation."""
        self._put("info", message, fields)

    def exception(self, error: BaseException, **fields: object) -> None:
        """Log where an error came from, without its message, which may contain what a client sent."""
        trace = "".join(traceback.format_exception(type(error), None, error.__traceback__)).rstrip()
        self._put("error", f"internal error\n{trace}", fields)

    def line(self, level: Level, message: str, fields: dict[str, object]) -> str:
        """Return a line without its end."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        if self._format == "json":
            return json.dumps({"time": now, "level": level, "message": message, **fields}, default=str)
        message = "\n".join(map(escape_control, message.split("\n")))
        shown = "".join(f" {name}={escape_control(str(value)) or '-'}" for name, value in fields.items())
        return f"{now} {level}: {message}{shown}"

    def _put(self, level: Level, message: str, fields: dict[str, object]) -> None:
        if level not in self._shown:
            return
        try:
            self._lines.put_nowait(self.line(level, message, fields))
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._write, name="log", daemon=True)
                    self._thread.start()
        except Exception:  # the queue is full, or no thread can be started
            self.n_lost += 1

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                sys.stderr.write(f"{line}\n")
                sys.stderr.flush()
            except Exception:  # no space, a closed pipe, or no stderr
                self.n_lost += 1

    def close(self) -> None:
        """Flush the pending lines, in bounded time; logging again starts another thread."""
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            with contextlib.suppress(queue.Full):
                self._lines.put(None, timeout=LAST_LINES)
                thread.join(LAST_LINES)


class QuietHandler(logging.StreamHandler):  # type: ignore[type-arg]  # of stderr
    """Where uvicorn logs: a line that cannot be written is lost, instead of failing the request it is about."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's
        pass


UVICORN = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"quiet": {"class": f"{__name__}.{QuietHandler.__name__}"}},
    "loggers": {"uvicorn": {"handlers": ["quiet"], "level": "ERROR", "propagate": False}},
}
