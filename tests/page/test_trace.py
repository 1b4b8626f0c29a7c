"""What is kept of questions: within limits, and never of weights that are gone."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from glasshouse.page import wire
from glasshouse.page.about import About, Moments, about, moments
from glasshouse.page.answers import ANSWERS
from glasshouse.page.following import Next, next_tokens
from glasshouse.page.question import Question, Scale, Text
from glasshouse.page.subject import LONGEST, Subject
from glasshouse.page.trace import Traces

IDS = Text("5 7 11 3 5 7")


def traces_of(memory: int = 2**30, **changes: object) -> Traces:
    model = gh.build(gh.preset("tiny-decoder", init="normal", **changes)).eval()
    return Traces(Subject.of(model, None), memory)


def test_a_site_is_what_record_gives_with_the_changes_asked_for() -> None:
    traces = traces_of()
    model = traces.subject.at("").model
    ids = torch.tensor([[5, 7, 11, 3, 5, 7]])
    with gh.edit(model, {"z.0[head=1]": 0.0}), gh.record(model, "resid_post.1", "pattern.1", "final") as seen:
        model(ids)
    trace = traces.of(Question(IDS, edits=(Scale("z.0[head=1]"),)))
    assert torch.equal(trace.site("resid_post.1"), seen["resid_post.1"][0])
    assert torch.equal(trace.site("final"), seen["final"][0])
    assert torch.equal(trace.map("pattern.1").weights(), seen["pattern.1"])


def test_memory_is_bounded_and_what_was_dropped_is_asked_for_again() -> None:
    traces = traces_of(memory=40_000)
    for number in range(20):
        trace = traces.of(Question(Text(f"5 7 11 {number}")))
        before = trace.site("resid_post.1")
        trace.map("pattern.0")
        assert traces.n_bytes <= 40_000
        assert torch.equal(trace.site("resid_post.1"), before)


def test_a_model_that_learns_on_is_looked_at_anew() -> None:
    traces = traces_of()
    model = traces.subject.at("").model
    ask = Next(Question(IDS))
    next_tokens(traces, ask)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    wanted = model(torch.tensor([[5, 7, 11, 3, 5, 7]]))[0, -1].softmax(-1)
    (first, *_) = next_tokens(traces, ask)["candidates"]
    assert first["probability"] == pytest.approx(float(wanted.max()), rel=1e-5)


def test_models_of_moments_that_are_not_looked_at_are_let_go(run_folder: Path) -> None:
    traces = Traces(Subject(run_folder))
    names = traces.subject.moments()
    assert len(names) > 3
    models = []
    for name in names:
        traces.of(Question(Text("the cat"), moment=name)).map("pattern.0")
        models.append(weakref.ref(traces.subject.at(name).model))
    gc.collect()
    assert sum(one() is not None for one in models) <= 2


def test_other_weights_under_the_same_name_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    gh.save(gh.build(gh.preset("tiny-decoder", init="normal")), None, folder)
    traces = Traces(Subject(folder))
    before = next_tokens(traces, Next(Question(IDS)))
    torch.manual_seed(1)
    other = gh.build(gh.preset("tiny-decoder", init="normal")).eval()
    gh.save(other, None, folder)
    os.utime(folder, ns=(1, 1))  # file systems that count whole seconds
    after = next_tokens(traces, Next(Question(IDS)))
    assert before != after
    wanted = other(torch.tensor([[5, 7, 11, 3, 5, 7]]))[0, -1].softmax(-1)
    assert after["candidates"][0]["probability"] == pytest.approx(float(wanted.max()), rel=1e-5)


def test_asking_for_moments_loads_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = Traces(Subject(run_folder))
    monkeypatch.setattr(gh.hub, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert moments(traces, Moments())["moments"][-1] == "final"


def test_a_moment_means_nothing_where_there_is_no_run(tmp_path: Path) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    subject = Subject(tmp_path / "model")
    assert subject.at("step 100") is subject.at("")


@pytest.mark.parametrize(
    "head", [{"kind": "token_classification", "n_labels": 3}, {"kind": "sequence_classification", "n_labels": 3}]
)
def test_a_decoder_with_labels_says_labels(head: object) -> None:
    if isinstance(head, dict) and head["kind"] == "sequence_classification":
        head = {**head, "pooling": "last"}
    traces = traces_of(head=head)
    said = next_tokens(traces, Next(Question(IDS), position=1))
    assert len(said["candidates"]) == 3
    assert said["following"] is None


def test_a_run_that_diverged_is_shown_all_the_same() -> None:
    traces = traces_of()
    with torch.no_grad():
        traces.subject.at("").model.token_embedding.table.weight.fill_(torch.nan)
    question = {"asked": {"text": IDS.text}}
    for name, body in [("next", {}), ("loss", {}), ("lens", {"start": 0, "stop": 4}), ("parts", {"position": 2})]:
        answer = ANSWERS[name]
        given = answer.give(traces, gh.config.parse(answer.ask, {"question": question, **body}))
        assert "NaN" not in wire.encoded(given).decode()
        json.loads(wire.encoded(given))


def test_what_is_too_long_is_refused_before_it_is_computed() -> None:
    traces = traces_of()
    with pytest.raises(gh.InputError, match="shorten it"):
        traces.of(Question(Text("1 " * (LONGEST + 1))))


@pytest.mark.parametrize("site", ["pattern.0", "scores.1", "pattern.*[head=1]"])
def test_maps_cannot_be_changed(site: str) -> None:
    with pytest.raises(gh.InputError, match="change z instead"):
        traces_of().of(Question(IDS, edits=(Scale(site),))).site("final")


def test_a_small_vocabulary_has_an_example_it_can_read() -> None:
    traces = traces_of(vocab_size=4)
    text = about(traces, About())["example"]
    assert traces.of(Question(Text(text))).ids
