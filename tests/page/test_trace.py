"""What is kept of forward_passes: within limits, and never of weights that are gone."""

from __future__ import annotations

import gc
import json
import os
import weakref
from pathlib import Path

import pytest
import torch

import glasshouse as gh
from glasshouse.page.endpoints import endpoints
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_info import Checkpoints, ModelInfo, checkpoints, model_info
from glasshouse.page.model_loader import LONGEST, ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.next_token import Next, next_tokens
from glasshouse.web import to_json

IDS = PagePrompt("5 7 11 3 5 7")


def traces_of(memory: int = 2**30, **changes: object) -> TraceCache:
    model = gh.build(gh.preset("tiny-decoder", init="normal", **changes)).eval()
    return TraceCache(ModelLoader.from_model(model, None), memory)


def test_activations_match_record_with_edits() -> None:
    traces = traces_of()
    model = traces.loader.get("").model
    ids = torch.tensor([[5, 7, 11, 3, 5, 7]])
    with gh.edit(model, {"z.0[head=1]": 0.0}), gh.record(model, "resid_post.1", "pattern.1", "final") as seen:
        model(ids)
    trace = traces.trace(ForwardPass(IDS, edits=(Scale("z.0[head=1]"),)))
    assert torch.equal(trace.activation("resid_post.1"), seen["resid_post.1"][0])
    assert torch.equal(trace.activation("final"), seen["final"][0])
    assert torch.equal(trace.attention_map("pattern.1").weights(), seen["pattern.1"])


def test_memory_is_bounded_and_evicted_sites_are_recorded_again() -> None:
    traces = traces_of(memory=40_000)
    for number in range(20):
        trace = traces.trace(ForwardPass(PagePrompt(f"5 7 11 {number}")))
        before = trace.activation("resid_post.1")
        trace.attention_map("pattern.0")
        assert traces.n_bytes <= 40_000
        assert torch.equal(trace.activation("resid_post.1"), before)


def test_changed_weights_invalidate_the_cache() -> None:
    traces = traces_of()
    model = traces.loader.get("").model
    ask = Next(ForwardPass(IDS))
    next_tokens(traces, ask)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.5)
    expected = model(torch.tensor([[5, 7, 11, 3, 5, 7]]))[0, -1].softmax(-1)
    (first, *_) = next_tokens(traces, ask)["candidates"]
    assert first["probability"] == pytest.approx(float(expected.max()), rel=1e-5)


def test_models_of_unused_checkpoints_are_freed(run_folder: Path) -> None:
    traces = TraceCache(ModelLoader(run_folder))
    names = traces.loader.checkpoints()
    assert len(names) > 3
    models = []
    for name in names:
        traces.trace(ForwardPass(PagePrompt("the cat"), checkpoint=name)).attention_map("pattern.0")
        models.append(weakref.ref(traces.loader.get(name).model))
    gc.collect()
    assert sum(one() is not None for one in models) <= 2


def test_other_weights_under_the_same_name_are_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    gh.save(gh.build(gh.preset("tiny-decoder", init="normal")), None, folder)
    traces = TraceCache(ModelLoader(folder))
    before = next_tokens(traces, Next(ForwardPass(IDS)))
    torch.manual_seed(1)
    other = gh.build(gh.preset("tiny-decoder", init="normal")).eval()
    gh.save(other, None, folder)
    os.utime(folder, ns=(1, 1))  # file systems that count whole seconds
    after = next_tokens(traces, Next(ForwardPass(IDS)))
    assert before != after
    expected = other(torch.tensor([[5, 7, 11, 3, 5, 7]]))[0, -1].softmax(-1)
    assert after["candidates"][0]["probability"] == pytest.approx(float(expected.max()), rel=1e-5)


def test_listing_checkpoints_loads_nothing(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = TraceCache(ModelLoader(run_folder))
    monkeypatch.setattr(gh.hub, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    assert checkpoints(traces, Checkpoints())["checkpoints"][-1] == "final"


def test_checkpoint_is_ignored_without_a_run(tmp_path: Path) -> None:
    gh.save(gh.build(gh.preset("tiny-decoder")), None, tmp_path / "model")
    loader = ModelLoader(tmp_path / "model")
    assert loader.get("step 100") is loader.get("")


@pytest.mark.parametrize(
    "head", [{"kind": "token_classification", "n_labels": 3}, {"kind": "sequence_classification", "n_labels": 3}]
)
def test_a_decoder_with_labels_predicts_labels(head: object) -> None:
    if isinstance(head, dict) and head["kind"] == "sequence_classification":
        head = {**head, "pooling": "last"}
    traces = traces_of(head=head)
    said = next_tokens(traces, Next(ForwardPass(IDS), position=1))
    assert len(said["candidates"]) == 3
    assert said["actual_next"] is None


def test_nan_weights_give_valid_json() -> None:
    traces = traces_of()
    with torch.no_grad():
        traces.loader.get("").model.token_embedding.table.weight.fill_(torch.nan)
    forward_pass = {"prompt": {"text": IDS.text}}
    for name, body in [
        ("next", {}),
        ("loss", {}),
        ("lens", {"start": 0, "stop": 4}),
        ("logit_attribution", {"position": 2}),
    ]:
        endpoint = endpoints()[name]
        given = endpoint.handler(traces, gh.config.parse(endpoint.params, {"forward_pass": forward_pass, **body}))
        assert "NaN" not in to_json(given).decode()
        json.loads(to_json(given))


def test_long_texts_are_rejected_before_the_forward_pass() -> None:
    traces = traces_of()
    with pytest.raises(gh.InputError, match="shorten it"):
        traces.trace(ForwardPass(PagePrompt("1 " * (LONGEST + 1))))


@pytest.mark.parametrize("site", ["pattern.0", "scores.1", "pattern.*[head=1]"])
def test_patterns_cannot_be_edited(site: str) -> None:
    with pytest.raises(gh.InputError, match="edit z instead"):
        traces_of().trace(ForwardPass(IDS, edits=(Scale(site),))).activation("final")


def test_the_example_fits_a_small_vocabulary() -> None:
    traces = traces_of(vocab_size=4)
    text = model_info(traces, ModelInfo())["example"]
    assert traces.trace(ForwardPass(PagePrompt(text))).ids
