"""Decode steps on a CPU, recorded once and run without Python: the tokens and log-probabilities of eager steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from examples import first_of
from spec_strategy import SHAPES
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import glasshouse as gh
from glasshouse.generation.engine import cpu_graphs
from glasshouse.generation.engine.cpu_graphs import CpuGraphs
from glasshouse.generation.engine.engine import Engine
from glasshouse.generation.request import Request
from glasshouse.inspection.steering import model_fingerprint

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
SPECS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "grouped": {"n_heads": 4, "n_kv_heads": 2},
    "learned": {"position": "learned"},
    "alibi": {"position": "alibi"},
    "relative": {"position": "relative"},
    "soft-cap": {"attention_softcap": 20.0},  # with an operation on types alone
    "post-norm": {"norm_placement": "post", "feedforward": "relu"},
    **SHAPES,
    "encoder-decoder": {"start_id": 1},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "nucleus": {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "seed": 3},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "seed": 3},
    "listed": {"candidates": 3, "top_logprobs": 2, "temperature": 0.7},
    "minimum": {"min_new_tokens": 30, "logit_bias": {5: 2.0}},
    "beams": {"beams": 3},
}


def make(name: str, seed: int = 0) -> gh.models.Decoder | gh.models.Seq2Seq:
    torch.manual_seed(seed)
    model = gh.build(gh.preset("tiny-seq2seq" if name == "encoder-decoder" else "tiny-decoder", **SPECS[name])).eval()
    assert isinstance(model, gh.models.Decoder | gh.models.Seq2Seq)
    return model


def record_after(monkeypatch: pytest.MonkeyPatch, runs: float) -> None:
    """Record after so many runs, whether it pays or not."""
    monkeypatch.setattr(cpu_graphs, "HOT", runs)
    monkeypatch.setattr(cpu_graphs, "REPAID", 0)


def run(
    monkeypatch: pytest.MonkeyPatch, model: gh.models.Model, hot: float, lengths: tuple[int, ...], **options: object
) -> tuple[list[Request], Engine]:
    """Generate for all prompts, with so many more tokens each, and steps that are recorded after `hot` runs."""
    record_after(monkeypatch, hot)
    weights: Any = options.pop("weights", "copy")
    engine = gh.Engine(model, slots=9, max_len=64, weights=weights)
    requests = [
        engine.submit(prompt, max_new_tokens=count, **options) for prompt, count in zip(PROMPTS, lengths, strict=True)
    ]
    engine.run()
    return requests, engine


def graphs(engine: Engine) -> list[Callable[[int], Any] | None]:
    """Return the graphs of an engine, and None for each step that cannot be recorded."""
    made = engine._runner._cpu_graphs
    return [] if made is None else [*made._graphs.values(), *(None for _ in made._failed)]


def assert_same(found: list[Request], expected: list[Request]) -> None:
    for one, other in zip(found, expected, strict=True):
        for ours, theirs in zip(one.completions(), other.completions(), strict=True):
            assert ours.ids == theirs.ids
            # A mask hides the further keys of a recording, and a sum may end elsewhere: rounding alone.
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)


@pytest.mark.few(9)
@pytest.mark.parametrize("options", first_of([*OPTIONS]))
@pytest.mark.parametrize("name", SPECS)
def test_recorded_steps_equal_eager_ones(monkeypatch: pytest.MonkeyPatch, name: str, options: str) -> None:
    model = make(name)
    expected, eager = run(monkeypatch, model, 10**9, (40, 50, 45), **OPTIONS[options])
    found, recorded = run(monkeypatch, model, 2, (40, 50, 45), **OPTIONS[options])
    assert not graphs(eager)
    assert graphs(recorded)
    assert all(graph is not None for graph in graphs(recorded))
    assert_same(found, expected)


@pytest.mark.parametrize("weights", ["own", "int8", "int4"])
def test_with_every_format_of_the_weights(monkeypatch: pytest.MonkeyPatch, weights: str) -> None:
    model = make("rotary")
    expected, _ = run(monkeypatch, model, 10**9, (40, 50, 45), weights=weights)
    found, recorded = run(monkeypatch, model, 2, (40, 50, 45), weights=weights)
    assert all(graph is not None for graph in graphs(recorded))
    assert len(graphs(recorded)) > 1  # the batch gets smaller
    assert_same(found, expected)


def test_a_graph_runs_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    record_after(monkeypatch, 2)
    engine, calls = gh.Engine(make("rotary"), slots=1, max_len=64), 0
    engine.submit([1, 2, 3], max_new_tokens=20)
    forward = engine._runner._forward

    def watched(*args: Any, **more: Any) -> torch.Tensor:  # noqa: ANN401 - those of the model runner
        nonlocal calls
        calls += 1
        return forward(*args, **more)

    monkeypatch.setattr(engine._runner, "_forward", watched)
    engine.run()
    assert calls == 1 + 2 + 2  # a prefill, the steps before, and two that are recorded


def test_steered_slots_stay_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("rotary")
    vector = gh.inspection.SteeringVector(torch.randn(model.spec.d_model), "resid_post.0", model_fingerprint(model))
    results = []
    for hot in (10**9, 2):
        record_after(monkeypatch, hot)
        engine = gh.Engine(model, slots=3, max_len=64, steering={"up": vector})
        requests = [engine.submit([7], max_new_tokens=30, steer={"up": scale}) for scale in (0.0, 4.0, -4.0)]
        engine.run()
        results.append([request.ids for request in requests])
    assert results[0] == results[1]
    assert len({tuple(ids) for ids in results[1]}) == 3


def test_hooks_edits_and_foreign_modules_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Foreign(torch.nn.Identity):
        pass

    hooked, edited, foreign = (make("rotary") for _ in range(3))
    hooked.stack.register_forward_hook(lambda *_: None)
    foreign.stack.drop = Foreign()
    windows = gh.build(gh.preset("tiny-decoder", windows=(8, 0))).eval()  # a ring buffer
    for model in (hooked, foreign, windows):
        engine = gh.Engine(model, slots=1, max_len=200, prefill_chunk=4)
        assert engine._runner._cpu_graphs is None
    with gh.edit(edited, {"pattern.0": lambda pattern: pattern}):
        assert gh.Engine(edited, slots=1, max_len=64)._runner._cpu_graphs is None


def test_hooks_on_all_modules_and_replaced_forward_functions_are_called_in_every_step() -> None:
    model, calls = make("rotary"), []
    block = model.stack.blocks[0]
    forward = block.forward
    block.forward = lambda *given, **more: [calls.append(1), forward(*given, **more)][1]
    assert gh.Engine(model, slots=1, max_len=64)._runner._cpu_graphs is None
    del block.forward
    assert gh.Engine(model, slots=1, max_len=64)._runner._cpu_graphs is not None
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        handle = register(lambda module, *_: calls.append(type(module)))
        try:
            engine = gh.Engine(model, slots=1, max_len=64)
            request = engine.submit([1, 2, 3], max_new_tokens=40)
            calls.clear()
            engine.run()
        finally:
            handle.remove()
        assert calls.count(type(model)) == 1 + len(request.ids) == 41  # the prompt, and a step a token


def repeat(graphs: CpuGraphs, work: Callable[[int], tuple[torch.Tensor, ...]], times: int) -> list[float]:
    return [float(graphs.run("key", work, 3 + number, 100, left=100)[0]) for number in range(times)]


@pytest.fixture
def hot_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    record_after(monkeypatch, 0)


@pytest.mark.usefixtures("hot_at_once")
def test_integers_that_follow_the_length_are_found() -> None:
    numbers, runs = torch.arange(200.0), 0

    def work(length: int) -> tuple[torch.Tensor, ...]:
        nonlocal runs
        runs += 1
        return (numbers[length - 1] + numbers[:2].sum(),)

    # The second recording is for a length of four more, whose result it has.
    assert repeat(CpuGraphs(), work, 6) == [3.0, 8.0, 5.0, 6.0, 7.0, 8.0]
    assert runs == 2


@pytest.mark.usefixtures("hot_at_once")
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("a value that was read", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("a branch by a value", [1, 2, 3, 4, 5, 106, 107, 108]),
        ("a counter", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("a new tensor", [1, 2, 3, 4, 5, 6, 7, 8]),
        ("another operation", [2, 1, 4, 3, 6, 5, 8, 7]),
    ],
)
def test_what_changes_otherwise_is_never_replayed(what: str, expected: list[float]) -> None:
    graphs, state, count = CpuGraphs(), torch.zeros(()), 0

    def work(length: int) -> tuple[torch.Tensor, ...]:
        nonlocal count
        count += 1
        state.add_(1)
        match what:
            case "a value that was read":
                return (torch.ones(()) * int(state),)
            case "a branch by a value":
                return (state + 100 if state > 5 else state + 0,)
            case "a counter":
                return (torch.full((), count),)
            case "a new tensor":
                return (torch.tensor(float(count)) + 0,)
        return (torch.add(state, 1) if count % 2 else torch.sub(state, 1),)

    assert repeat(graphs, work, 8) == expected
    assert count == 8


@pytest.mark.usefixtures("hot_at_once")
def test_a_shorter_sequence_waits_with_its_second_recording() -> None:
    numbers, graphs = torch.arange(200.0), CpuGraphs()

    def work(length: int) -> tuple[torch.Tensor, ...]:
        return (numbers[:length].sum() * 0 + length,)

    for length in (9, 5, 5, 9, 5, 6):  # recorded at 9, then at 13
        expected = 13 if length == 9 and graphs._recorded else length
        found = float(graphs.run("key", work, length, 100, left=100)[0])
        assert found in (length, expected)
    assert float(graphs.run("key", work, 20, 100, left=100)[0]) == 20


class Counted:
    """A function of the length that counts its runs, which a graph does not."""

    def __init__(self, *, fails: bool = False) -> None:
        self.runs, self._fails, self._numbers = 0, fails, torch.arange(200.0)

    def __call__(self, length: int) -> tuple[torch.Tensor, ...]:
        self.runs += 1
        return (self._numbers[length - 1] + (float(self._numbers[1]) if self._fails else 0),)


@pytest.mark.parametrize(("limit", "recorded"), [(55, 0), (56, 1), (57, 1)])
def test_a_step_is_recorded_if_its_requests_have_enough_tokens_left(limit: int, recorded: int) -> None:
    """After 24 of 56 new tokens there are 32 left, which repay a recording; of two requests the shorter counts."""
    engine = gh.Engine(make("rotary"), slots=2, max_len=80)
    for prompt, count in (([1, 2, 3], limit), ([4, 5], 70)):
        engine.submit(prompt, max_new_tokens=count)
    engine.run()
    assert len(graphs(engine)) == recorded


def test_short_requests_are_recorded_once_there_were_many() -> None:
    graphs, work = CpuGraphs(), Counted()
    for number in range(200):
        graphs.run("key", work, 3 + number % 10, 100, left=10 - number % 10)
    assert len(graphs._graphs) == 1
    assert 4 * cpu_graphs.REPAID <= work.runs < 4 * cpu_graphs.REPAID + 10


@pytest.mark.usefixtures("hot_at_once")
def test_after_some_failures_nothing_is_recorded() -> None:
    graphs, works = CpuGraphs(), [Counted(fails=True) for _ in range(6)]
    modes = list[Any]()

    def watched(work: Counted, length: int) -> tuple[torch.Tensor, ...]:
        modes.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return work(length)

    for number, work in enumerate(works):
        for length in range(3, 9):
            value = float(graphs.run(number, partial(watched, work), length, 100, left=100)[0])
            assert value in (length, length + cpu_graphs.FURTHER)
    assert [work.runs for work in works] == [6] * 6
    assert sum(mode is not None for mode in modes) == 2 * cpu_graphs.MOST_FAILURES


@pytest.mark.usefixtures("hot_at_once")
def test_the_graph_that_was_not_used_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_graphs, "MOST_GRAPHS", 2)
    graphs, works = CpuGraphs(), {key: Counted() for key in "abc"}
    for key in "abac":
        for length in (3, 4, 5):
            graphs.run(key, works[key], length, 100, left=100)
    assert [*graphs._graphs] == ["a", "c"]
    assert {key: work.runs for key, work in works.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.usefixtures("hot_at_once")
def test_a_graph_is_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizes, make = list[bool](), torch.jit.CompilationUnit

    def compiled(source: str) -> SimpleNamespace:
        script = make(source)
        return SimpleNamespace(
            step=lambda *given: [optimizes.append(torch._C._get_graph_executor_optimize()), script.step(*given)][1]
        )

    monkeypatch.setattr(torch.jit, "CompilationUnit", compiled)
    repeat(CpuGraphs(), Counted(), 5)
    assert optimizes == [False] * 3
    assert torch._C._get_graph_executor_optimize()


@pytest.mark.usefixtures("hot_at_once")
def test_a_recording_holds_no_tensors_of_its_step() -> None:
    graphs, made = CpuGraphs(), list[weakref.ref[torch.Tensor]]()
    numbers = torch.arange(200.0)

    def work(length: int) -> tuple[torch.Tensor, ...]:
        large = numbers[:length] + 1
        made.append(weakref.ref(large))
        return (large.sum(),)

    graphs.run("key", work, 3, 100, left=100)
    assert len(graphs._recorded) == 1
    assert made[0]() is None
