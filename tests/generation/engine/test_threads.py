"""An engine belongs to one thread, and outlives a step that raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from processes import SECONDS

import glasshouse as gh


@pytest.fixture(scope="module")
def model() -> gh.models.Decoder:
    torch.manual_seed(3)
    spec = gh.preset("tiny-decoder", vocab_size=270, max_len=40, end_ids=(7,), init={"kind": "normal", "std": 0.3})
    return gh.build(spec, dtype=torch.float64)  # so that the batch size changes no sample


def test_a_second_thread_is_refused_during_a_step(model: gh.models.Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = gh.Engine(model, slots=2, max_len=40)
    decode, inside, resume = engine._runner.decode, threading.Event(), threading.Event()

    def slow(*given: Any, **named: Any) -> Any:  # noqa: ANN401
        inside.set()
        assert resume.wait(SECONDS)
        return decode(*given, **named)

    monkeypatch.setattr(engine._runner, "decode", slow)
    first = engine.submit([1, 2], max_new_tokens=3)
    stepping = threading.Thread(target=engine.run)
    stepping.start()
    assert inside.wait(SECONDS)
    options = gh.SamplingParams(max_new_tokens=2)
    second = engine.make_request([3], options)  # which any thread may do
    for call in (
        engine.step,
        engine.close,
        engine.warm_up,
        lambda: engine.cancel(first),
        lambda: engine.enqueue(second),
    ):
        with pytest.raises(gh.InputError, match="the engine is in use by another thread; give each thread"):
            call()
    resume.set()
    stepping.join(SECONDS)
    engine.enqueue(second)  # one after the other is fine
    engine.run()
    for request, prompt in ((first, [1, 2]), (second, [3])):
        assert request.ids == gh.generate(model, None, [prompt], max_new_tokens=len(request.ids))[0].ids


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


def test_a_closed_engine_cancels_its_requests_and_takes_no_more(model: gh.models.Decoder) -> None:
    engine = gh.Engine(model, slots=1, max_len=40)
    running, queued = (engine.submit([1, 2], max_new_tokens=3) for _ in range(2))
    engine.step()
    engine.close()
    assert (running.finish_reason, queued.finish_reason) == ("cancelled", "cancelled")
    with pytest.raises(gh.InputError, match="the engine is closed"):
        engine.submit([1])
    assert not engine.step()
    engine.close()  # idempotent


def test_completions_before_the_end_raise(model: gh.models.Decoder) -> None:
    request = gh.Engine(model, slots=1, max_len=40).submit([1])
    with pytest.raises(gh.InputError, match="the request is not done; step the engine until it is"):
        request.completions()
