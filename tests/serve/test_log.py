"""The log: lines with fields, and nothing fails or waits where they cannot be written."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.plain_http import ask, eventually
from serve.test_runner import complete, engine_of, small  # noqa: F401 - a fixture

from glasshouse.serve import Server
from glasshouse.web import Log
from glasshouse.web.log import MAX_LINES


class Full(io.StringIO):
    """A stderr on a full disk, or one that was closed."""

    error: Exception = OSError(28, "No space left on device")

    def write(self, text: str) -> int:
        raise self.error


@pytest.mark.parametrize("error", [Full.error, ValueError("I/O operation on closed file")])
def test_an_unwritable_stderr_fails_nothing(
    small: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    runner = engine_of(small)._runner
    run, left = runner.run, [1, 1]

    def fails_twice(step: Any) -> Any:  # noqa: ANN401
        if left:
            left.pop()
            raise RuntimeError("out of memory")
        return run(step)

    monkeypatch.setattr(runner, "run", fails_twice)
    stream = Full()
    stream.error = error
    monkeypatch.setattr(sys, "stderr", stream)
    assert [complete(small).status for _ in range(4)] == [500, 500, 200, 200]
    monkeypatch.setattr(small.api, "metrics", None)  # a bug of ours: its traceback cannot be written either
    monkeypatch.setattr(small.api.runner, "lanes", None)
    assert ask(small, "/metrics").status == 500
    assert ask(small, "/health", key=None).status == 200
    monkeypatch.undo()
    assert complete(small).status == 200
    assert eventually(lambda: small.api.log.n_lost == 3)


def test_where_the_thread_of_the_engines_has_ended_health_fails(
    small: Server,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(small.api.runner, "_working", lambda: 1 / 0)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(complete, small)
        assert eventually(lambda: small.api.runner.has_failed)
        assert running.result().status == 503
    for answer in (complete(small), ask(small, "/health", key=None), ask(small, "/v1/embeddings", None)):
        assert answer.status in (503, 405)
    assert "the engines have failed; restart" in complete(small).json()["error"]["message"]
    assert ask(small, "/health", key=None).status == 503


def test_lines_are_written_as_text_or_json(capfd: pytest.CaptureFixture[str]) -> None:
    for form in ("text", "json"):
        log = Log("info", form)
        log.info("POST", path="/a\nb", status=200, key="")
        log.warning("an é")
        log.close()
    quiet = Log("error")
    quiet.warning("not shown")
    quiet.close()
    first, second, third, fourth = capfd.readouterr().err.splitlines()
    assert first.endswith("info: POST path=/a\\x0ab status=200 key=-")
    assert second.endswith("warning: an é")
    fields = json.loads(third)
    assert (fields["message"], fields["path"], fields["status"]) == ("POST", "/a\nb", 200)
    assert json.loads(fourth)["level"] == "warning"


def test_a_pipe_that_nobody_reads_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        log = Log("info")
        for number in range(3 * MAX_LINES):
            log.info("x" * 1000, number=number)
        assert log.n_lost > MAX_LINES
        monkeypatch.undo()
        threading.Thread(target=drain, args=(reading,)).start()
        log.close()


def drain(reading: int) -> None:
    with os.fdopen(reading, "rb") as end:
        while end.read(2**16):
            pass
