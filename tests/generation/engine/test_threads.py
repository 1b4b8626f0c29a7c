"""One engine shared by many threads: each request gets what it gets alone, and no thread waits forever."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from processes import SECONDS

import glasshouse as gh
from glasshouse.generation import Request, SamplingParams

TIMEOUT = SECONDS  # with a thousand times the switches and under coverage, a busy machine takes minutes
THREADS = 6
TOK = gh.Tokenizer.train(texts=["to be or not to be, that is the question"], vocab_size=270)


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(3)
    spec = gh.preset("tiny-decoder", vocab_size=270, max_len=40, end_ids=(7,), init={"kind": "normal", "std": 0.3})
    return gh.build(spec, dtype=torch.float64)  # so that the batch size changes no sample


@pytest.fixture(autouse=True)
def _switching() -> Iterator[None]:
    """Switch threads a thousand times as often."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def job(number: int) -> tuple[list[int], SamplingParams]:
    """Return a prompt and settings: greedy, sampled, with a stop string, or beam search."""
    rng = random.Random(number)
    prompt = [1, 2, 3, *range(20, 20 + number % 19), *(rng.randrange(270) for _ in range(rng.randint(1, 5)))]
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.2, "repetition_penalty": 1.3, "stop": "e"},
        {"beams": 2},
    ]
    return prompt, SamplingParams(max_new_tokens=rng.randint(1, 6), seed=number, **kinds[number % 4])


def in_threads(work: Callable[[int], None]) -> None:
    """Run work(0) to work(5) in parallel and raise their errors; a thread that hangs blocks nothing."""
    futures = [Future[None]() for _ in range(THREADS)]

    def run(number: int) -> None:
        try:
            futures[number].set_result(work(number))
        except BaseException as error:
            futures[number].set_exception(error)

    for number in range(THREADS):
        threading.Thread(target=run, args=(number,), daemon=True).start()
    for future in futures:
        future.result(TIMEOUT)


def output_of(request: Request) -> tuple[list[int], str, str | None]:
    return request.ids, request.text, request.finish_reason


def run_threads(model: gh.models.Decoder, each: int, stepped_by: str) -> None:
    """Let each thread submit `each` requests, and as many again that it cancels at some point."""
    engine = gh.Engine(model, TOK, slots=5, max_len=40, prefill_chunk=8)
    kept: dict[int, Request] = {}
    cancelled: dict[int, Request] = {}
    texts: dict[int, str] = {}

    def work(thread: int) -> None:
        rng = random.Random(thread)
        for count in range(each):
            number = thread * each + count
            kept[number] = engine.submit(*job(number))
            cancelled[number] = engine.submit(*job(number))
            if stepped_by == "server":
                if rng.random() < 0.5:
                    cancelled[number].wait(rng.random() / 100)
                engine.cancel(cancelled[number])
                texts[number] = "".join(kept[number].stream())
            else:
                for _ in range(rng.randrange(4)):
                    engine.step()
                engine.cancel(cancelled[number])
                texts[number] = "".join(engine.stream(kept[number]))

    if stepped_by == "server":
        server = threading.Thread(target=engine.run_forever, daemon=True)
        server.start()
    in_threads(work)
    if stepped_by == "server":
        engine.close()
        server.join(TIMEOUT)
    else:
        engine.run()
    assert len(engine.slots.free) == 5
    assert engine._runner.cache.lengths.tolist() == [0] * 5

    alone = gh.Engine(model, TOK, slots=2, max_len=40)
    for number in range(THREADS * each):
        expected = alone.submit(*job(number))
        alone.run()
        assert output_of(kept[number]) == output_of(expected), number
        assert texts[number] == expected.text
        ended = cancelled[number]
        if ended.finish_reason == "cancelled":
            assert ended.ids == expected.ids[: len(ended.ids)]
        else:
            assert output_of(ended) == output_of(expected)
    reasons = {request.finish_reason for request in cancelled.values()}
    assert "cancelled" in reasons


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("stepped_by", ["everyone", "server"])
def test_threads_sharing_an_engine(model: gh.models.Decoder, stepped_by: str) -> None:
    run_threads(model, each=10, stepped_by=stepped_by)


@pytest.mark.long
@pytest.mark.parametrize("stepped_by", ["everyone", "server"])
def test_six_hundred_requests_of_six_threads(model: gh.models.Decoder, stepped_by: str) -> None:
    run_threads(model, each=100, stepped_by=stepped_by)


def test_submit_and_cancel_do_not_wait_for_a_step(model: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gh.Engine(model, slots=2, max_len=40)
    decode, inside, resume = engine._runner.decode, threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        inside.set()
        assert resume.wait(TIMEOUT)
        return decode(*given, **named)

    monkeypatch.setattr(engine._runner, "decode", slow)
    first = engine.submit([1, 2], max_new_tokens=3)
    stepping = threading.Thread(target=engine.run)
    stepping.start()
    assert inside.wait(TIMEOUT)
    second = engine.submit([3], max_new_tokens=2)  # while the step is blocked
    engine.cancel(first)
    assert (first.finish_reason, first.ids) == ("cancelled", [])
    assert not second.wait(timeout=0.01)
    resume.set()
    assert second.wait(TIMEOUT)
    stepping.join(TIMEOUT)
    assert (first.ids, second.ids) == ([], gh.generate(model, None, [[3]], max_new_tokens=2)[0].ids)
    assert len(engine.slots.free) == 2


@pytest.mark.parametrize("beams", [1, 2])
def test_failed_step_ends_its_requests_but_not_the_engine(
    model: gh.models.Decoder, beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = gh.Engine(model, slots=2, max_len=40)
    running = [engine.submit([1, number], max_new_tokens=5, beams=beams) for number in range(2 // beams)]
    engine.step()
    waiting = engine.submit([3], max_new_tokens=4)
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    for request in running:
        assert request.finish_reason == "error"
        assert request.error == ("a step of the engine raised ZeroDivisionError: division by zero; submit it again.")
    engine.run()
    again = engine.submit([1, 0], max_new_tokens=5, beams=beams)
    engine.run()
    for prompt, request, wide in (([3], waiting, 1), ([1, 0], again, beams)):
        (alone,) = gh.generate(model, None, [prompt], max_new_tokens=len(request.ids), beams=wide)
        assert request.ids == alone.ids


def test_no_thread_waits_for_a_closed_engine(model: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gh.Engine(model, slots=1, max_len=40)
    monkeypatch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
    failed, queued = (engine.submit([1, 2], max_new_tokens=3) for _ in range(2))
    with pytest.raises(ZeroDivisionError):
        engine.run_forever()
    assert (failed.finish_reason, queued.finish_reason) == ("error", "cancelled")
    with pytest.raises(gh.InputError, match="a step of the engine raised ZeroDivisionError"):
        list(failed.stream())
    with pytest.raises(gh.InputError, match="the engine is closed"):
        engine.submit([1])
    assert not engine.step()
    engine.close()  # idempotent


def test_completions_before_the_end_raise(model: gh.models.Decoder) -> None:
    request = gh.Engine(model, slots=1, max_len=40).submit([1])
    with pytest.raises(gh.InputError, match="the request is not done; step the engine until it is"):
        request.completions()
