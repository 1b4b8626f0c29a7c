"""An encoder-decoder on the page: cross-attention equals the patterns, searches those of gh.generate."""

from __future__ import annotations

import base64
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import glasshouse as gh
from glasshouse.errors import ConfigError, GlasshouseError, InputError
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import seq2seq
from glasshouse.page.views.seq2seq import Beams, CrossAttention

SPECS: dict[str, dict[str, Any]] = {
    "sinusoidal, norm after": {},
    "learned, norm before": {"position": "learned", "norm_placement": "pre", "final_norm": True},
    "relative, grouped": {"position": "relative", "n_kv_heads": 2, "norm_placement": "pre", "final_norm": True},
    "rotary, sandwich": {"position": "rotary", "norm_placement": "sandwich", "final_norm": True},
    "alibi": {"position": "alibi"},
}


def made(**changes: Any) -> TraceCache:  # noqa: ANN401
    torch.manual_seed(0)
    s = gh.preset("tiny-seq2seq", vocab_size=40, n_layers=3, start_id=1, end_ids=(2,), **changes)
    model = gh.build(s).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)  # heads that differ, and a search that has to choose
    return TraceCache(ModelLoader.from_model(model, None))


def unpacked(packed: dict[str, Any]) -> torch.Tensor:
    data = np.frombuffer(base64.b64decode(packed["f32"]), dtype=np.float32)
    return torch.tensor(data).reshape(packed["shape"])


FORWARD_PASS = ForwardPass(PagePrompt("5 7 11 13 17", target="8 9 10"))


@pytest.mark.parametrize("name", SPECS)
def test_weights_are_the_patterns(name: str) -> None:
    traces = made(**SPECS[name])
    trace = traces.trace(FORWARD_PASS)
    with gh.record(trace.model, "decoder.cross_pattern.*") as seen, torch.no_grad():
        trace.model(*trace.inputs)
    patterns = seen["decoder.cross_pattern.*"][:, 0]  # [layer, head, target, source]
    assert patterns.shape == (3, 4, 4, 5)  # the target has its start token
    close = {"rtol": 0, "atol": 4e-7}  # a few roundings of numbers below 1
    for layer, head in product(range(3), range(4)):
        told = seq2seq.cross_attention(traces, CrossAttention(FORWARD_PASS, layer, head))
        torch.testing.assert_close(unpacked(told["weights"]), patterns[layer, head], **close)
    told = seq2seq.cross_attention(traces, CrossAttention(FORWARD_PASS, 1))
    torch.testing.assert_close(unpacked(told["weights"]), patterns[1].mean(0), **close)
    told = seq2seq.cross_attention(traces, CrossAttention(FORWARD_PASS))
    torch.testing.assert_close(unpacked(told["weights"]), patterns.mean((0, 1)), **close)
    part = seq2seq.cross_attention(traces, CrossAttention(FORWARD_PASS, 2, 3, source=(1, 3), target=(2, 90)))
    torch.testing.assert_close(unpacked(part["weights"]), patterns[2, 3, 2:4, 1:3], **close)
    assert (part["source"], part["target"]) == ([1, 3, 5], [2, 4, 4])


def test_all_costs_one_pass() -> None:
    traces = made()
    model = traces.loader.get("").model
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    for layer, head in ((None, None), (0, None), (2, 1)):
        seq2seq.cross_attention(traces, CrossAttention(FORWARD_PASS, layer, head))
    assert len(calls) == 1


def test_edits_reach_the_weights() -> None:
    traces = made()
    changed = ForwardPass(FORWARD_PASS.prompt, edits=(Scale("decoder.resid_pre.2", -1.0),))
    asked = (seq2seq.cross_attention(traces, CrossAttention(one, 2)) for one in (FORWARD_PASS, changed))
    one, other = (unpacked(told["weights"]) for told in asked)
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        ({"layer": 3}, "layer is 3"),
        ({"layer": 0, "head": 4}, "head is 4"),
        ({"head": 1}, "no layer"),
        ({"source": (6, 9)}, "source"),
        ({"target": (0, 1000)}, "target"),
        ({"target": (0,)}, "target"),
    ],
)
def test_invalid_parameters_are_rejected(ask: dict[str, Any], what: str) -> None:
    with pytest.raises(GlasshouseError, match=what):
        seq2seq.cross_attention(made(), CrossAttention(FORWARD_PASS, **ask))


def test_only_encoder_decoders_have_cross_attention() -> None:
    traces = TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None))
    with pytest.raises(InputError, match="no source"):
        seq2seq.beams(traces, Beams(ForwardPass(PagePrompt("1 2"))))


# Searches


@pytest.mark.few(2)
@pytest.mark.parametrize(("beams", "penalty"), [(2, 1.0), (4, 0.0), (8, 2.0), (3, -1.0)])
def test_beam_search_matches_generate(beams: int, penalty: float) -> None:
    traces = made()
    told = seq2seq.beams(traces, Beams(FORWARD_PASS, beams, penalty, max_new_tokens=9))
    trace = traces.trace(FORWARD_PASS)
    settings: dict[str, Any] = {"beams": beams, "n": beams, "length_penalty": penalty, "keep_tree": True}
    source = trace.inputs[0][0].tolist()
    found = gh.generate(trace.model, None, [source], max_new_tokens=9, **settings)
    assert [(one["ids"], one["score"]) for one in told["hypotheses"]] == [(one.ids, one.score) for one in found]
    tree = found[0].tree or []
    for name in ("parent", "logprob", "total", "score", "step", "outcome"):
        assert [one[name] for one in told["nodes"]] == [getattr(node, name) for node in tree]
    assert [one["id"] for one in told["nodes"]] == [node.token for node in tree]
    assert {"kept", "pruned"} <= {one["outcome"] for one in told["nodes"]}
    for one in told["hypotheses"]:
        nodes = [told["nodes"][at] for at in one["path"]]
        assert [node["id"] for node in nodes][: len(one["ids"])] == one["ids"]
        assert [node["parent"] for node in nodes] == [None, *one["path"][:-1]]
        assert nodes[-1]["score"] == one["score"]
        assert (nodes[-1]["outcome"] == "ended") == (one["finish_reason"] == "stop") == (len(nodes) > len(one["ids"]))


def test_finish_reasons_of_hypotheses() -> None:
    reasons = set()
    for first in range(5, 12):
        told = seq2seq.beams(made(), Beams(ForwardPass(PagePrompt(f"{first} 7")), 4, max_new_tokens=9))
        reasons |= {one["finish_reason"] for one in told["hypotheses"]}
    assert reasons == {"stop", "length"}  # or the test above says little


@pytest.mark.long
def test_beam_search_ignores_the_target() -> None:
    traces = made()
    plain = seq2seq.beams(traces, Beams(ForwardPass(PagePrompt("5 7 11 13 17"))))
    assert plain == seq2seq.beams(traces, Beams(FORWARD_PASS))
    assert (
        seq2seq.beams(
            traces, Beams(ForwardPass(PagePrompt("5 7 11 13 17", appended=tuple(plain["hypotheses"][1]["ids"]))))
        )
        == plain
    )


def test_beam_search_applies_the_edits() -> None:
    traces = made()
    changed = ForwardPass(FORWARD_PASS.prompt, edits=(Scale("decoder.ffn_out.1", 0.0),))
    assert seq2seq.beams(traces, Beams(changed)) != seq2seq.beams(traces, Beams(FORWARD_PASS))


@pytest.mark.parametrize("beams", [1, 9])
def test_too_few_or_many_beams(beams: int) -> None:
    with pytest.raises(ConfigError, match="beams is"):
        Beams(FORWARD_PASS, beams)
