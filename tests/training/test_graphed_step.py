"""How CUDA graphs of training steps are kept, with a stand-in for CUDA; what they compute is in tests/gpu."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.training.graphed_step import GraphedTrainStep


class Graph:
    """A graph whose capture computes, and whose replay leaves what was computed, which suits the same batch."""

    def capture_begin(self, **_: object) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace what the step calls of CUDA, and return the names of calls."""
    made = list[str]()

    def stream(device: object) -> SimpleNamespace:
        made.append("stream")
        return SimpleNamespace(wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_stream=lambda other: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: made.append("pool"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.append("empty"))
    return made


def make(messages: list[str]) -> GraphedTrainStep:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", dropout=0.0)).train()
    step = GraphedTrainStep(model, torch.optim.SGD(model.parameters(), lr=0.0), on_fallback=messages.append)
    step._side = torch.cuda.Stream(step.device)
    return step


def draw(width: int) -> Batch:
    ids = torch.arange(4 * width).view(4, width)
    return Batch(ids, ids, torch.ones(4, width, dtype=torch.bool))


def test_captures_share_a_stream(calls: list[str]) -> None:
    step = make([])
    for width in (5, 6, 7):
        metrics = [step(draw(width)) for _ in range(3)]
        assert len({one.loss for one in metrics}) == 1
    assert len(step._graphs) == 3
    assert calls == ["stream"]


def test_more_micro_batches_drop_the_graphs(calls: list[str]) -> None:
    step = make([])
    expected = [step(draw(5)).loss for _ in range(2)]
    pools = calls.count("pool")
    assert step(draw(5), grad_accum=2).loss == pytest.approx(expected[0], rel=1e-6)
    assert not step._graphs
    assert calls.count("pool") == pools + 1
    step(draw(5), grad_accum=2)
    assert len(step._graphs) == 1


def test_out_of_memory_for_the_tensors_of_a_graph_is_no_error(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    messages = list[str]()
    step = make(messages)
    expected = step(draw(5))

    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_like", out_of_memory)
        assert step(draw(5)) == expected
    assert messages == ["no more CUDA graphs: CUDA out of memory."]
    step(draw(5))
    assert not step._graphs
    for _ in range(2):  # an ordinary step again before the one that is captured
        assert not step._graphs
        step(draw(5), grad_accum=2)
    assert len(step._graphs) == 1
