"""The thread that steps: clients that leave, full queues, fair turns, failing steps, deadlines, shutting down."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace as Item
from typing import Any

import openai
import pytest
import torch
from serve.conftest import KEYS
from serve.plain_http import Answer, ask, begin, eventually, is_idle

import glasshouse as gh
from glasshouse.serve import Limits, ServedModel, Server
from glasshouse.serve.runtime.exchange import Job, Piece
from glasshouse.serve.runtime.fair_queue import FairQueue
from glasshouse.serve.schema.errors import ApiError

SLOTS, WAITING = 4, 6


@pytest.fixture
def small(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> Iterator[Server]:
    """A server with few slots and a short queue."""
    made = Server([ServedModel("decoder", decoder, tok, slots=SLOTS)], keys=KEYS, limits=Limits(max_waiting=WAITING))
    made.start()
    assert eventually(lambda: made.api.runner.ready)
    yield made
    made.close()


def engine_of(server: Server) -> gh.Engine:
    engine = server.api.models["decoder"].engine
    assert engine is not None
    return engine


def long(**more: object) -> dict[str, object]:
    return {"model": "decoder", "prompt": "to be", "max_tokens": 250, "min_tokens": 250, "temperature": 0, **more}


def complete(server: Server, key: str = KEYS[0], **body: object) -> Answer:
    return ask(server, "/v1/completions", {"model": "decoder", "prompt": "to be", **body}, key=key)


class Held:
    """Holds the engine before its steps, so that what happens meanwhile happens at a known moment."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.entered = threading.Event(), threading.Event()
        engine = engine_of(server)
        step = engine.step

        def held() -> bool:
            self.entered.set()
            assert self.free.wait(60)
            return step()

        monkeypatch.setattr(engine, "step", held)


def test_requests_run_between_the_steps_of_a_warm_up(
    tok: gh.Tokenizer, decoder: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready after the largest batch, the server captures the others while it has nothing to do."""
    done, allowed = [], threading.Semaphore(0)

    def warm_up_steps(engine: gh.Engine, options: gh.SamplingParams) -> Iterator[None]:
        for number in range(3):
            if number:  # until a request has been answered
                assert allowed.acquire(timeout=60)
            done.append((options.temperature, number))
            yield

    monkeypatch.setattr(gh.Engine, "warm_up_steps", warm_up_steps)
    made = Server([ServedModel("decoder", decoder, tok, slots=SLOTS)], keys=KEYS)
    made.start()
    try:
        assert eventually(lambda: made.api.runner.ready)
        assert done == [(1.0, 0), (0.0, 0)]
        allowed.release()
        assert eventually(lambda: len(done) == 3)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(complete, made, max_tokens=3)
            allowed.release(3)
            assert answer.result().status == 200
        assert eventually(lambda: len(done) == 6)
        assert complete(made, max_tokens=3).status == 200
    finally:
        allowed.release(9)
        made.close()


def test_disconnects_leave_the_cache_as_it_was(small: Server) -> None:
    engine = engine_of(small)
    reference = complete(small, max_tokens=20, temperature=0).json()["choices"][0]["text"]
    draw = random.Random(0)
    n_bytes = engine.n_bytes

    def leave(number: int) -> None:
        body = long(stream=bool(number % 2), n=draw.randint(1, 2), prompt="to be, or not " * draw.randint(1, 10))
        body |= {"max_tokens": 100, "min_tokens": 100}
        made = begin(small, "/v1/completions", body, draw.choice(KEYS))
        time.sleep(draw.choice((0, 0.001, 0.01, 0.05)))  # in the queue, in prefill, in decode
        made.close()

    for number in range(100):
        leave(number)
    assert eventually(lambda: is_idle(small))
    assert eventually(lambda: not engine.slots.running)
    assert len(engine.slots.free) == SLOTS
    assert engine.n_waiting == 0
    assert eventually(lambda: engine._runner.cache.lengths.tolist() == [0] * SLOTS)
    assert engine.n_bytes == n_bytes
    assert eventually(lambda: small.gate.n_requests == 0)
    assert complete(small, max_tokens=20, temperature=0).json()["choices"][0]["text"] == reference


@pytest.mark.parametrize("stream", [False, True])
def test_a_slot_is_free_a_step_after_its_client_left(small: Server, stream: bool) -> None:
    engine = engine_of(small)
    made = begin(small, "/v1/completions", long(stream=stream))
    assert eventually(lambda: len(engine.slots.running) == 1)
    made.close()
    assert eventually(lambda: not engine.slots.running)
    reasons = small.api.metrics["decoder"].finish_reasons
    assert eventually(lambda: reasons["cancelled"] == 1)
    assert reasons["length"] == 0  # it did not simply run to its end


def test_a_full_queue_says_how_long_it_will_take(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("glasshouse.serve.runtime.fair_queue.time.monotonic", lambda: now)
    queue: FairQueue[Any] = FairQueue(limit=10)

    def refused() -> str:
        with pytest.raises(ApiError) as error:
            queue.put([Item(key="a")])
        assert f"try again in {error.value.headers['Retry-After']} s" in error.value.message
        return error.value.headers["Retry-After"]

    queue.put([Item(key="a") for _ in range(10)])
    assert refused() == "1"  # nothing is known yet
    for _ in range(4):  # a turn every half second
        queue.pop()
        now += 0.5
    queue.put([Item(key="a") for _ in range(4)])
    assert refused() == "5"
    queue.put([Item(key="b") for _ in range(6)])
    assert refused() == "8"  # those of other keys take turns as well
    now += 1000
    assert refused() == "60"
    while len(queue):
        queue.pop()
    now += 1000  # idle
    queue.put([Item(key="a") for _ in range(10)])
    assert refused() == "1"


def test_a_full_queue_is_answered_at_once(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(small, monkeypatch)
    lane = small.api.runner.lanes["decoder"]
    with ThreadPoolExecutor(SLOTS + WAITING) as many:
        first = [many.submit(complete, small, max_tokens=5)]
        assert held.entered.wait(30)  # in a step, so that the others wait
        waiting = [many.submit(complete, small, max_tokens=5) for _ in range(WAITING)]
        assert eventually(lambda: len(lane.queue) == WAITING)
        refused = complete(small, max_tokens=5)
        assert refused.status == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        client = openai.OpenAI(base_url=f"{small.address}/v1", api_key=KEYS[0], max_retries=0)
        with pytest.raises(openai.RateLimitError):
            client.completions.create(model="decoder", prompt="a", stream=True)
        other = many.submit(complete, small, KEYS[1], max_tokens=5)  # one key does not fill another one's queue
        assert eventually(lambda: len(lane.queue) == WAITING + 1)
        held.free.set()
        assert [one.result().status for one in (*first, *waiting, other)] == [200] * (WAITING + 2)


def test_keys_take_turns() -> None:
    queue: FairQueue[Any] = FairQueue(limit=10)
    queue.put([Item(key="a", name=f"a{n}") for n in range(5)])
    queue.put([Item(key="b", name=f"b{n}") for n in range(2)])
    queue.put([Item(key="c", name="c0")])
    assert [queue.pop().name for _ in range(8)] == ["a0", "b0", "c0", "a1", "b1", "a2", "a3", "a4"]
    assert len(queue) == 0
    queue.put([item := Item(key="a", name="a"), Item(key="a", name="b")])
    assert queue.remove(item)
    assert not queue.remove(item)
    assert queue.pop().name == "b"
    queue.put([Item(key="a")] * 10)
    with pytest.raises(ApiError):
        queue.put([Item(key="a")])
    queue.put([Item(key="b")] * 10)


def test_prefixes_are_reused_within_a_key_only(small: Server) -> None:
    slots = engine_of(small).slots
    prompt = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer"
    first = complete(small, prompt=prompt, temperature=0).json()["choices"]
    assert slots.n_reused == 0
    assert complete(small, KEYS[1], prompt=prompt, temperature=0).json()["choices"] == first
    assert slots.n_reused == 0  # the other key must not know that this was asked before
    assert complete(small, KEYS[1], prompt=prompt, temperature=0).json()["choices"] == first
    assert slots.n_reused > 16


def test_keys_that_take_turns_keep_their_prefixes(small: Server) -> None:
    """Each conversation goes on from what is cached, though the other was answered meanwhile."""
    slots = engine_of(small).slots
    prompts = ["to be, or not to be, that is the question", "whether 'tis nobler in the mind to suffer é ü 漢字"]
    reused = []
    for _ in range(4):
        for number, key in enumerate(KEYS):
            before = slots.n_reused
            answer = complete(small, key, prompt=prompts[number], max_tokens=5, min_tokens=5, temperature=0)
            prompts[number] += answer.json()["choices"][0]["text"] + ", and what then?"
            reused.append(slots.n_reused - before)
    assert reused[:2] == [0, 0]
    assert all(now > before for before, now in zip(reused, reused[2:], strict=False)), reused  # they grow


class FailsFor:
    """Makes steps of the engine raise while a sequence with a certain prompt runs."""

    def __init__(self, server: Server, monkeypatch: pytest.MonkeyPatch, prompt: list[int], error: Exception) -> None:
        runner = engine_of(server)._runner
        run = runner.run

        def failing(step: Any) -> Any:  # noqa: ANN401
            if any(seq.request.prompt == prompt for seq in step.decoding):
                raise error
            return run(step)

        monkeypatch.setattr(runner, "run", failing)


@pytest.mark.few(1)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("out of memory"), RuntimeError("kernel")])
def test_a_failing_request_fails_no_other(
    small: Server, monkeypatch: pytest.MonkeyPatch, tok: gh.Tokenizer, error: Exception
) -> None:
    bad = "suffer"
    good = [f"{word} to be" for word in ("or", "not", "that")]
    settings: dict[str, Any] = {"max_tokens": 40, "min_tokens": 40, "seed": 3}
    alone = [complete(small, prompt=prompt, **settings).json()["choices"] for prompt in good]
    FailsFor(small, monkeypatch, tok.encode(bad), error)
    client = openai.OpenAI(base_url=f"{small.address}/v1", api_key=KEYS[0], max_retries=0)

    def streamed(prompt: str) -> str:
        chunks = client.completions.create(
            model="decoder", prompt=prompt, max_tokens=40, seed=3, stream=True, extra_body={"min_tokens": 40}
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(8) as many:
        texts = [many.submit(streamed, prompt) for prompt in good]
        assert eventually(lambda: len(engine_of(small).slots.running) > 0)
        failing = many.submit(complete, small, prompt=bad, **settings)
        answers = [many.submit(complete, small, prompt=prompt, **settings) for prompt in good]
        assert failing.result().status == 500
        assert [one.result().json()["choices"] for one in answers] == alone
        assert [one.result() for one in texts] == [choices[0]["text"] for choices in alone]
    assert ask(small, "/ready").status == 200


def test_an_engine_that_fails_for_all_says_so(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(step: Any) -> Any:  # noqa: ANN401
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine_of(small)._runner, "run", broken)
    assert [complete(small).status for _ in range(8)] == [500] * 5 + [503] * 3
    assert ask(small, "/ready").status == 503
    assert ask(small, "/health", key=None).status == 200


def test_deadlines(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small.api, "limits", Limits(max_waiting=WAITING, timeout=1.0))
    held = Held(small, monkeypatch)

    def free() -> None:
        assert held.entered.wait(60)  # on a busy machine, long after the request was sent
        time.sleep(1.2)
        held.free.set()

    threading.Thread(target=free).start()
    answer = complete(small, **{"max_tokens": 250})
    assert (answer.status, answer.headers["x-should-retry"]) == (504, "false")
    assert eventually(lambda: not engine_of(small).slots.running)
    assert complete(small, max_tokens=1).status == 200


def test_a_request_that_only_waited_is_told_to_come_again(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(small, monkeypatch)
    with ThreadPoolExecutor(1) as many:
        first = many.submit(complete, small, max_tokens=1)
        assert held.entered.wait(30)
        with monkeypatch.context() as shorter:
            shorter.setattr(small.api, "limits", Limits(max_waiting=WAITING, timeout=0.2))
            late = complete(small, max_tokens=1)
        assert (late.status, late.headers["retry-after"]) == (503, "1")
        assert "other requests took all the time" in late.json()["error"]["message"]
        held.free.set()
        assert first.result().status == 200


class Blocked:
    """Keeps the thread of the engine busy with a task, so that other tasks wait."""

    def __init__(self, server: Server) -> None:
        self.free, self.entered = threading.Event(), threading.Event()
        runner = server.api.runner
        assert runner._loop is not None
        self.done = asyncio.run_coroutine_threadsafe(
            runner.call(self._wait, "", runner._loop.time() + 60), runner._loop
        )
        assert self.entered.wait(30)

    def _wait(self) -> bool:
        self.entered.set()
        return self.free.wait(60)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["to be", "or not"]}),
        ("/v1/completions", {"prompt": "to be", "echo": True, "logprobs": 1, "max_tokens": 1}),
    ],
)
def test_deadlines_of_tasks(small: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]) -> None:
    body |= {"model": "decoder"}
    blocked = Blocked(small)
    with monkeypatch.context() as shorter:
        shorter.setattr(small.api, "limits", Limits(max_waiting=WAITING, timeout=0.3))
        late = [ask(small, path, body) for _ in range(WAITING + 1)]  # one that expired makes room for another
    assert [(one.status, one.headers["retry-after"]) for one in late] == [(503, "1")] * (WAITING + 1)
    blocked.free.set()
    assert blocked.done.result(30)
    assert ask(small, path, body).status == 200


def test_a_task_that_takes_too_long(small: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    free = threading.Event()
    monkeypatch.setattr(small.api, "limits", Limits(max_waiting=WAITING, timeout=0.2))
    monkeypatch.setattr("glasshouse.serve.endpoints.embeddings._embed", lambda model, rows: free.wait(60))
    late = ask(small, "/v1/embeddings", {"model": "decoder", "input": "to be"})
    free.set()
    assert (late.status, late.headers["x-should-retry"]) == (504, "false")


def test_tasks_of_keys_take_turns(small: Server) -> None:
    blocked = Blocked(small)
    queue = small.api.runner._tasks
    body = {"model": "decoder", "input": "to be"}
    with ThreadPoolExecutor(2 * WAITING) as many:
        first = [many.submit(ask, small, "/v1/embeddings", body) for _ in range(WAITING)]
        assert eventually(lambda: len(queue) == WAITING)
        assert ask(small, "/v1/embeddings", body).status == 429
        other = many.submit(ask, small, "/v1/embeddings", body, key=KEYS[1])
        assert eventually(lambda: len(queue) == WAITING + 1)
        blocked.free.set()
        assert [one.result().status for one in (*first, other)] == [200] * (WAITING + 1)


def test_text_that_changes_after_a_retry_is_an_error(tok: gh.Tokenizer, decoder: gh.models.Decoder) -> None:
    engine = gh.Engine(decoder, tok, slots=1)
    first, other = (
        engine.make_request(tok.encode(text), gh.SamplingParams(max_new_tokens=8)) for text in ("to be", "mind")
    )
    job = Job(first, "", 0, lambda index, piece: None, streamed=True)
    engine.enqueue(first)
    engine.run()
    assert isinstance(job.take(), Piece)
    engine.enqueue(other)
    engine.run()
    job.retry(other)
    with pytest.raises(gh.InputError, match="could not be continued"):
        job.take()


def test_draining_finishes_what_was_begun(
    tok: gh.Tokenizer, decoder: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Server([ServedModel("decoder", decoder, tok, slots=2)], keys=KEYS)
    made.start()
    held = Held(made, monkeypatch)
    with ThreadPoolExecutor(2) as many:
        begun = many.submit(complete, made, max_tokens=30)
        assert held.entered.wait(30)
        made.drain()
        refused = complete(made, max_tokens=1)
        assert (refused.status, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert ask(made, "/health", key=None).status == 200
        held.free.set()
        assert begun.result().status == 200
    assert made._thread is not None
    made._thread.join(timeout=30)
    assert not made._thread.is_alive()
    made.close()


def test_what_is_not_done_in_time_is_ended_by_the_drain(
    tok: gh.Tokenizer, decoder: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Server([ServedModel("decoder", decoder, tok, slots=2)], drain_seconds=0.2)
    made.start()
    engine = engine_of(made)
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: time.sleep(0.05) or step())  # a long answer
    with ThreadPoolExecutor(1) as many:
        begun = many.submit(complete, made, max_tokens=250, min_tokens=250)
        assert eventually(lambda: bool(engine.slots.running))
        made.drain()
        assert begun.result().status == 503
    made.close()


def test_metrics(small: Server) -> None:
    complete(small, max_tokens=3, min_tokens=3)
    complete(small, max_tokens=5, min_tokens=5)
    text = ask(small, "/metrics").body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model="decoder"}'
    assert float(values[f"glasshouse_generation_tokens_total{label}"]) == 8
    assert float(values[f"glasshouse_prompt_tokens_total{label}"]) == 6
    assert float(values[f"glasshouse_requests_running{label}"]) == 0
    assert float(values[f"glasshouse_time_to_first_token_seconds_count{label}"]) == 2
    assert values['glasshouse_requests_finished_total{model="decoder",finish_reason="length"}'] == "2"
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    guide = (Path(__file__).parents[3] / "docs" / "serve.md").read_text(encoding="utf-8")
    assert {name for name in helped if f"`{name}`" not in guide} == set()


def test_nothing_of_a_prompt_is_printed(small: Server, capfd: pytest.CaptureFixture[str]) -> None:
    secret = "suffer nobler"
    complete(small, prompt=secret, max_tokens=2)
    complete(small, prompt=secret, n=10**9)
    complete(small, "wrong-key-wrong-key", prompt=secret)
    ask(small, "/v1/completions", json.dumps({"prompt": secret}).encode() + b"x")
    assert capfd.readouterr() == ("", "")
