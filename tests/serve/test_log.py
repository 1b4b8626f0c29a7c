"""The log: lines with fields, and nothing fails or waits where they cannot be written."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from serve.conftest import KEYS
from serve.plain_http import ask, eventually
from serve.runtime.test_runner import complete, engine_of, small  # noqa: F401 - a fixture

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server
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
    monkeypatch.setattr(small.api, "http_counts", None)  # a bug of ours: its traceback cannot be written either
    assert ask(small, "/metrics").status == 500
    assert ask(small, "/health", key=None).status == 200
    # Lines are written by a thread: what it has not tried by now it would write to the stderr given back.
    assert eventually(lambda: small.api.log.n_lost == 3)
    monkeypatch.undo()
    assert complete(small).status == 200


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


@pytest.mark.long
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


@pytest.fixture
def logged(tok: gh.Tokenizer, decoder: gh.models.Decoder, encoder: gh.models.Encoder) -> Iterator[Server]:
    """A server that logs every request as JSON."""
    models = [ServedModel("decoder", decoder, tok, slots=2), ServedModel("encoder", encoder, tok)]
    made = Server(models, keys=KEYS, log=Log("info", "json"))
    made.start()
    assert eventually(lambda: made.api.runner.ready)
    yield made
    made.close()


def lines_of(server: Server, capfd: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return what was logged so far."""
    assert eventually(lambda: server.gate.n_requests == 0)
    server.api.log.close()
    return [json.loads(line) for line in capfd.readouterr().err.splitlines()]


def test_every_request_has_a_line(logged: Server, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "suffer nobler"
    body = {"model": "decoder", "prompt": secret, "max_tokens": 3, "min_tokens": 3}
    answers = [
        ask(logged, "/v1/completions", body, key=KEYS[1]),
        ask(logged, "/v1/completions", {**body, "stream": True}),
        ask(logged, "/v1/embeddings", {"model": "encoder", "input": [secret, secret]}),
        ask(logged, "/v1/completions", body, key="not-a-key-of-this-server"),
        ask(logged, f"/nowhere%0a?{secret.replace(' ', '+')}", method="DELETE"),
        ask(logged, "/health", key=None, X_Request_Id="from-a-proxy.1"),
        ask(logged, "/health", key=None, X_Request_Id="two words\t" + "x" * 100),
    ]
    n_prompt = answers[0].json()["usage"]["prompt_tokens"]
    lines = lines_of(logged, capfd)
    assert secret not in json.dumps(lines)
    assert secret.replace(" ", "+") not in json.dumps(lines)
    assert [answer.status for answer in answers] == [200, 200, 200, 401, 404, 200, 200]
    assert [line["status"] for line in lines] == [answer.status for answer in answers]
    assert [line["request_id"] for line in lines] == [answer.headers["x-request-id"] for answer in answers]
    assert len({line["request_id"] for line in lines}) == len(lines)
    assert lines[5]["request_id"] == "from-a-proxy.1"
    assert lines[6]["request_id"].startswith("req_")
    assert [line["key"] for line in lines] == ["key-2", "key-1", "key-1", "", "key-1", "", ""]
    assert [(line["prompt_tokens"], line["completion_tokens"]) for line in lines[:2]] == [(n_prompt, 3)] * 2
    assert (lines[2]["prompt_tokens"], lines[2]["completion_tokens"]) == (2 * n_prompt, 0)
    assert (lines[4]["method"], lines[4]["path"]) == ("DELETE", "/nowhere\n")
    assert all(line["seconds"] > 0 for line in lines)
    for answer in answers[3:5]:
        assert answer.json()["error"]["request_id"] == answer.headers["x-request-id"]


def test_errors_of_a_stream_have_the_id_of_their_request(logged: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged.api, "limits", Limits(timeout=0.2))
    step = engine_of(logged).step
    monkeypatch.setattr(engine_of(logged), "step", lambda: time.sleep(0.02) or step())
    for path, more in (
        ("/v1/completions", {"prompt": "a", "max_tokens": 200}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 200}),
    ):
        answer = ask(logged, path, {"model": "decoder", "stream": True, "min_tokens": 200, **more})
        assert f'"request_id":"{answer.headers["x-request-id"]}"'.encode() in answer.body


def test_http_requests_are_counted(logged: Server) -> None:
    for _ in range(3):
        ask(logged, "/v1/models/decoder")
    ask(logged, "/v1/models/none")
    ask(logged, "/v1/models", key=None)
    ask(logged, "/v1/completions", key=None, method="BREW")
    for number in range(3):
        ask(logged, f"/nowhere/{number}")
    text = ask(logged, "/metrics").body.decode()
    counted = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("glasshouse_http_requests"))

    def count(route: str, method: str, status: int) -> str | None:
        return counted.get(f'glasshouse_http_requests_total{{route="{route}",method="{method}",status="{status}"}}')

    assert count("/v1/models/{name:path}", "GET", 200) == "3"
    assert count("/v1/models/{name:path}", "GET", 404) == "1"
    assert count("/v1/models", "GET", 401) == "1"
    assert count("/v1/completions", "other", 401) == "1"
    assert count("other", "GET", 404) == "3"
    assert len(counted) == 5  # as many as there are routes, whatever is asked for


def test_a_target_beyond_the_limit_of_headers_is_refused(logged: Server) -> None:
    for target in ("/health?" + "x" * 20_000, "/" + "x" * 20_000, "/v1/models?" + "%41" * 7000):
        answer = ask(logged, target)
        assert (answer.status, answer.json()["error"]["type"]) == (414, "invalid_request_error")
    assert ask(logged, "/health?" + "x" * 10_000).status == 200
