"""The order in which waiting requests get their slots."""

from __future__ import annotations

import torch

import glasshouse as gh
from glasshouse.generation.request import Request


def make_engine(slots: int) -> gh.Engine:
    torch.manual_seed(0)
    return gh.Engine(gh.build(gh.preset("tiny-decoder", max_len=64)).eval(), slots=slots, prefill_chunk=8)


def submit(engine: gh.Engine, *lengths: int) -> list[Request]:
    """Queue a request for one new token after a prompt of each length; no two lengths share a prefix."""
    return [engine.submit([length] * length, max_new_tokens=1) for length in lengths]


def finished(engine: gh.Engine, requests: list[Request]) -> list[int]:
    """Run the engine; return the numbers of the requests in the order in which they ended."""
    order: list[int] = []
    while engine.step():
        order += [n for n, request in enumerate(requests) if request.done and n not in order]
    return order + [n for n, request in enumerate(requests) if n not in order]


def test_the_longest_of_those_with_a_slot_are_prefilled_first() -> None:
    engine = make_engine(slots=3)
    requests = submit(engine, 9, 25, 17, 60, 9)  # there are slots for the first three
    engine.step()
    assert [seq.request for seq in engine.slots.running] == [requests[1]]
    assert finished(engine, requests) == [1, 2, 0, 3, 4]


def test_equal_prompts_keep_their_order() -> None:
    engine = make_engine(slots=4)
    assert finished(engine, submit(engine, 9, 9, 9, 9)) == [0, 1, 2, 3]


def test_no_request_waits_for_longer_ones_that_arrive_later() -> None:
    engine = make_engine(slots=4)
    requests = submit(engine, 17, 9)
    for _ in range(20):
        engine.step()
        requests += submit(engine, 33)
        if requests[1].done:
            break
    # Two chunks for the first prompt, one for its own.
    assert len(requests) == 5
    assert [request.done for request in requests] == [True, True, False, False, False]


def test_cancelled_requests_leave_the_others_in_order() -> None:
    engine = make_engine(slots=4)
    requests = submit(engine, 9, 25, 17, 10)
    engine.step()  # sorts all four
    for number in (2, 3):
        engine.cancel(requests[number])
    requests += submit(engine, 50)
    assert finished(engine, requests)[-3:] == [1, 0, 4]
