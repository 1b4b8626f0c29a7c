"""What the page says of circuits is what the same calls give in Python, in models of every kind with edges.

Models run in float64.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from test_residual_stream import FORWARD_PASS, SPECS, asked, inputs, laid_open, unpacked

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.inspection import (
    Circuit,
    edge_attribution,
    edge_attribution_by_position,
    edge_patching,
    path_patching,
)
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.models import Encoder, Model, Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import circuit as view

PRE = [
    (kind, {"norm_placement": "pre"} | choices)
    for kind, choices in SPECS
    if choices.get("norm_placement", "parallel") == "parallel"
]
OTHERS = [
    (kind, choices)
    for kind, choices in SPECS
    if choices.get("norm_placement", "parallel" if kind == "tiny-decoder" else "") != "parallel"
]
AT = 1  # the token at which the prediction is read, before the last


def near(value: float) -> object:
    return pytest.approx(value, abs=1e-9)


def opened(kind: str, choices: JsonDict) -> tuple[TraceCache, JsonDict, tuple[Any, ...], JsonDict]:
    """Return a model, what the page asks about two texts with different predictions, and the same in Python."""
    traces = laid_open(kind, choices)
    model = traces.loader.get("").model.eval()
    own = FORWARD_PASS.prompt
    is_pair = isinstance(model, Seq2Seq)

    def logits(prompt: PagePrompt) -> torch.Tensor:
        with torch.no_grad():
            return model(*inputs(traces, ForwardPass(prompt)))[0, AT]

    texts = (f"{one} 8 4 1 5 9 2 6" + ("" if is_pair else " 7 3") for one in range(40))
    others = (PagePrompt(text, appended=own.appended if is_pair else ()) for text in texts)
    wrong = next(one for one in others if logits(one).argmax() != logits(own).argmax())
    body = {"forward_pass": ForwardPass(own), "corrupted": wrong, "position": AT}
    clean, corrupted = (inputs(traces, ForwardPass(one)) for one in (own, wrong))
    if isinstance(model, Encoder):
        right, mistaken = int(logits(own).argmax()), int(logits(wrong).argmax())
        metric = {"metric": lambda found: found[0, AT, right] - found[0, AT, mistaken]}
        return traces, body, (model, corrupted, clean), metric
    cut = [(*one[:-1], one[-1][:, : AT + 1]) for one in (corrupted, clean)]
    return traces, body, (model, *cut), {}


def named(edges: list[JsonDict]) -> dict[tuple[str, str], float]:
    return {(one["writer"], one["reader"]): one["effect"] for one in edges}


def effect(model: Model, arguments: tuple[Any, ...], edges: list[tuple[str, str]], metric: JsonDict) -> float:
    """Return the faithfulness of some edges, connected or not."""
    some = Circuit(dict.fromkeys(edges, 0.0), 0.0, 0.0, 0.0, 0, model_fingerprint(model))
    return some.effect(model, *arguments, **metric)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), PRE)
def test_effects_and_faithfulness(kind: str, choices: JsonDict) -> None:
    traces, body, (model, *arguments), metric = opened(kind, choices)
    found = edge_attribution(model, *arguments, **metric)
    shown = asked(traces, "edge_effects", **body)
    edges = found.top(view.MAX_EDGES)
    assert named(shown["edges"]) == {edge: near(found[edge]) for edge in edges}
    assert list(named(shown["edges"])) == edges
    assert shown["n_edges"] == int(found.effect.isfinite().sum())
    assert (shown["before"], shown["after"]) == (
        near(float(found.corrupted_baseline)),
        near(float(found.clean_baseline)),
    )
    sizes = [one["size"] for one in shown["sizes"]]
    assert sizes[:5] == [1, 2, 3, 4, 6]
    assert sizes[-1] == len(edges)
    for one in shown["sizes"]:
        assert one["faithfulness"] == near(effect(model, tuple(arguments), edges[: one["size"]], metric))
        if one["size"] in (6, 48):  # those that are left out do nothing
            kept = [edges[rank] for rank in one["kept"]]
            assert one["faithfulness"] == near(effect(model, tuple(arguments), kept, metric))
            ends = {reader for _, reader in kept}
            assert not kept or "logits" in ends


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), PRE)
def test_the_circuit_in_slices_and_at_once(kind: str, choices: JsonDict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SLICE", 0.0)
    traces, body, (model, *arguments), metric = opened(kind, choices)
    found = gh.circuit(model, *arguments, **metric)
    done = [-1]
    while (shown := asked(traces, "find_circuit", **body, sliced=True))["found"] is None:
        assert shown["done"] > done[-1]
        assert shown["total"] == found.n_possible
        done.append(shown["done"])
        asked(traces, "text_pair", forward_pass=body["forward_pass"])
        if len(done) < 4:  # others record and edit the model meanwhile
            assert asked(traces, "ablate_each", forward_pass=body["forward_pass"], sites=SITES[kind])["before"] != 0
    assert len(done) > 2
    again = asked(traces, "find_circuit", **body)
    assert again == shown
    circuit = shown["found"]
    assert named(circuit["edges"]) == {edge: near(value) for edge, value in found.edges.items()}
    for name in ("faithfulness", "completeness", "random_faithfulness"):
        assert circuit[name] == near(getattr(found, name))
    edges = edge_attribution(model, *arguments, **metric).top(len(found.edges))
    assert circuit["largest"]["size"] == len(found.edges)
    assert circuit["largest"]["faithfulness"] == near(effect(model, tuple(arguments), edges, metric))


SITES = {"tiny-decoder": ["z.0"], "tiny-encoder": ["z.0"], "tiny-seq2seq": ["decoder.z.0"]}


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), PRE)
def test_one_edge(kind: str, choices: JsonDict) -> None:
    traces, body, (model, *arguments), metric = opened(kind, choices)
    for edge in edge_attribution(model, *arguments, **metric).top(3):
        found = asked(traces, "patch_edge", **body, writer=edge[0], reader=edge[1])
        shown = found["effect"]
        assert shown == near(edge_patching(model, *arguments, [edge], **metric)[edge])
        assert shown == near(float(path_patching(model, *arguments, *edge, **metric).effect))
        positions = edge_attribution_by_position(model, *arguments, edge, **metric)
        torch.testing.assert_close(unpacked(found["positions"]), positions.float(), rtol=1e-6, atol=1e-6)
        assert found["is_source"] == edge[0].startswith("encoder.")


@pytest.mark.parametrize(("kind", "choices"), PRE[:1] + PRE[2:3] + PRE[4:5])
def test_what_two_texts_predict(kind: str, choices: JsonDict) -> None:
    traces, body, _, _ = opened(kind, choices)
    model = traces.loader.get("").model
    del body["position"]
    shown = asked(traces, "text_pair", **body)
    for name, prompt in (("clean", FORWARD_PASS.prompt), ("corrupted", body["corrupted"])):
        with torch.no_grad():
            said = model(*inputs(traces, ForwardPass(prompt)))[0].argmax(-1).tolist()
        assert [one["id"] for one in shown[name]] == said
    assert shown["why_not"] is None


@pytest.mark.parametrize(("kind", "choices"), OTHERS)
def test_a_stream_that_is_no_sum_has_no_circuit(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    with pytest.raises(GlasshouseError) as error:
        edge_attribution(traces.loader.get("").model, inputs(traces), inputs(traces))
    shown = asked(traces, "text_pair", forward_pass=FORWARD_PASS)
    assert shown["why_not"] == str(error.value)
    assert "use path_patching" in shown["why_not"]
    with pytest.raises(GlasshouseError, match="use path_patching"):
        asked(traces, "edge_effects", forward_pass=FORWARD_PASS, corrupted=FORWARD_PASS.prompt)


def test_what_is_wrong_with_the_texts_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = laid_open("tiny-decoder", {})
    same = {"forward_pass": FORWARD_PASS, "corrupted": {"text": "3 1 4 1 5 9 2 6 7 3"}}
    with pytest.raises(GlasshouseError, match=r"both texts predict .* choose another token"):
        asked(traces, "edge_effects", **same)
    with pytest.raises(GlasshouseError, match="position is 10"):
        asked(traces, "edge_effects", **same, position=10)
    short = asked(traces, "text_pair", forward_pass=FORWARD_PASS, corrupted={"text": "3 1 4"})
    assert "10 and 3 tokens" in short["why_not"]
    monkeypatch.setattr(view, "MAX_ELEMENTS", 9 * 19 * 64)  # 19 readers
    assert "10 tokens, but a circuit of this model takes 9" in asked(traces, "text_pair", **same)["why_not"]
    no_head = laid_open("tiny-encoder", {"head": "none"})
    assert "'none', so there is no prediction" in asked(no_head, "text_pair", forward_pass=FORWARD_PASS)["why_not"]


def test_a_label_has_a_circuit() -> None:
    traces = laid_open(
        "tiny-encoder", {"norm_placement": "pre", "head": {"kind": "sequence_classification", "n_labels": 20}}
    )
    model = traces.loader.get("").model.eval()
    others = (PagePrompt(" ".join([str(one)] * 10)) for one in range(40))
    label = int(
        asked(traces, "text_pair", forward_pass=FORWARD_PASS, corrupted=FORWARD_PASS.prompt)["clean"][0]["id"]
    )
    with torch.no_grad():
        other = next(one for one in others if int(model(*inputs(traces, ForwardPass(one))).argmax()) != label)
    shown = asked(traces, "edge_effects", forward_pass=FORWARD_PASS, corrupted=other, position=9)
    found = edge_attribution(model, inputs(traces, ForwardPass(other)), inputs(traces))
    assert named(shown["edges"]) == {edge: near(found[edge]) for edge in found.top(view.MAX_EDGES)}


def test_a_search_that_nobody_waits_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SLICE", 0.0)
    monkeypatch.setattr(view, "PATIENCE", 0.05)
    traces, body, _, _ = opened("tiny-decoder", {})
    assert asked(traces, "find_circuit", **body, sliced=True)["found"] is None
    _, search = view._searches[traces]
    while not search.is_over:
        time.sleep(0.01)
    monkeypatch.setattr(view, "PATIENCE", 60.0)
    assert asked(traces, "find_circuit", **body)["found"] is not None  # it begins anew


def test_another_pair_of_texts_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "SLICE", 0.0)
    traces, body, _, _ = opened("tiny-decoder", {})
    asked(traces, "find_circuit", **body, sliced=True)
    first = view._searches[traces][1]
    swapped = {"forward_pass": ForwardPass(body["corrupted"]), "corrupted": FORWARD_PASS.prompt, "position": AT}
    assert asked(traces, "find_circuit", **swapped)["found"] is not None
    assert traces not in view._searches
    assert first.found is None
