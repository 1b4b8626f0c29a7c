"""What the page says of saliency is what `gh.saliency` gives, in models of every kind. Models run in float64."""

from __future__ import annotations

import pytest
import torch
from test_residual_stream import EDITED, FORWARD_PASS, SPECS, asked, inputs, laid_open, near, unpacked

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import saliency as view

AT = 1
METHODS = ["integrated_gradients", "gradient_x_input", "attention_rollout"]


def test_without_sublayers_only_the_token_itself_counts() -> None:
    traces = laid_open("tiny-decoder", {"norm": "layer", "position": "none"})
    model = traces.loader.get("").model
    with torch.no_grad():
        for block in model.stack.blocks:
            for sublayer in (block.attention, block.feedforward):
                for weight in sublayer.parameters():
                    weight.zero_()
    found = asked(traces, "token_saliency", forward_pass=FORWARD_PASS, position=AT)
    scores = unpacked(found["scores"])
    assert (scores[:AT] == 0).all()
    assert (scores[AT + 1 :] == 0).all()
    change = found["value"] - found["baseline"]
    assert float(scores[AT]) - found["gap"] == pytest.approx(change, rel=1e-6)
    assert abs(found["gap"]) < 0.01 * abs(change)


@pytest.mark.few(6)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
@pytest.mark.parametrize("method", METHODS)
def test_a_prediction_of_every_kind_of_model(kind: str, choices: JsonDict, method: str) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    body = {"forward_pass": FORWARD_PASS, "position": AT, "method": method}
    if isinstance(model, Seq2Seq) and method == "attention_rollout":
        with pytest.raises(GlasshouseError, match="attention_rollout"):
            asked(traces, "token_saliency", **body)
        return
    with torch.no_grad():
        logits = model(*given)[0, AT]
    best, second = logits.topk(2).indices.tolist()
    for chosen in ({}, {"output": 5, "incorrect_token": second}):
        found = asked(traces, "token_saliency", **body, **chosen)
        token = chosen.get("output", best)
        incorrect = {"incorrect_token": second} if chosen else {}
        steps = found["steps"]
        expected = gh.saliency(model, *given, positions=[AT], token=token, method=method, steps=steps, **incorrect)
        near(unpacked(found["scores"]), expected.scores[0, 0])
        assert found["output"]["id"] == token
        value = float(logits[token] - logits[second]) if chosen else float(logits[token])
        assert found["value"] == pytest.approx(value, abs=1e-9)
        assert (found["source_scores"] is None) == (not isinstance(model, Seq2Seq))
        if expected.source_scores is not None:
            near(unpacked(found["source_scores"]), expected.source_scores[0, 0])
        if expected.completeness_gap is not None:
            assert found["gap"] == pytest.approx(float(expected.completeness_gap), abs=1e-9)
        else:
            assert found["gap"] is found["baseline"] is None


def test_edits_apply() -> None:
    traces = laid_open("tiny-decoder", {})
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    found = asked(traces, "token_saliency", forward_pass=EDITED, position=AT, output=5)
    with gh.edit(model, {one.site: gh.inspection.scale(one.factor) for one in EDITED.edits}):
        expected = gh.saliency(model, *given, positions=[AT], token=5, steps=found["steps"])
    near(unpacked(found["scores"]), expected.scores[0, 0])
    plain = asked(traces, "token_saliency", forward_pass=FORWARD_PASS, position=AT, output=5)
    assert plain["value"] != pytest.approx(found["value"], abs=1e-3)


@pytest.mark.parametrize("pooling", ["first", None])
def test_labels(pooling: str | None) -> None:
    head = {"kind": "sequence_classification", "n_labels": 3, "pooling": pooling}
    traces = laid_open("tiny-encoder", {"head": head if pooling else {"kind": "token_classification", "n_labels": 3}})
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    with torch.no_grad():
        logits = model(*given)[0] if pooling else model(*given)[0, AT]
    found = asked(traces, "token_saliency", forward_pass=FORWARD_PASS, position=AT)
    assert found["output"]["id"] == int(logits.argmax())
    where = {} if pooling else {"positions": [AT]}
    expected = gh.saliency(model, *given, label=int(logits.argmax()), steps=found["steps"], **where)
    near(unpacked(found["scores"]), expected.scores[0, 0])
    with pytest.raises(GlasshouseError, match="language-model head"):
        asked(traces, "token_saliency", forward_pass=FORWARD_PASS, position=AT, incorrect_token=1)


def test_a_long_text_takes_fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = laid_open("tiny-decoder", {})
    parameters = gh.models.count_parameters(traces.loader.get("").model.spec)
    monkeypatch.setattr(view, "WORK", parameters * 40 * 10.0)

    def steps(n_tokens: int) -> int:
        text = ForwardPass(PagePrompt(" ".join(["3"] * n_tokens)))
        return asked(traces, "token_saliency", forward_pass=text, position=0)["steps"]

    assert [steps(n) for n in (1, 20, 40, 60)] == [view.MAX_STEPS, 20, 10, view.MIN_STEPS]


@pytest.mark.parametrize(
    ("body", "words"),
    [({"position": 10}, "position"), ({"output": 40}, "40"), ({"method": "gradients"}, "gradients")],
)
def test_what_is_refused(body: JsonDict, words: str) -> None:
    traces: TraceCache = laid_open("tiny-decoder", {})
    with pytest.raises(GlasshouseError, match=words):
        asked(traces, "token_saliency", **{"forward_pass": FORWARD_PASS, "position": AT, **body})
