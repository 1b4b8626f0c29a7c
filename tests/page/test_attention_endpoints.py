"""Attention as the page is told it: every number is the one that record and head_scores give."""

from __future__ import annotations

import base64
import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from examples import first_of
from torch import Tensor

import glasshouse as gh
from glasshouse.errors import ConfigError, InputError
from glasshouse.inspection import attention_map
from glasshouse.models import Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import Trace, TraceCache
from glasshouse.page.views import attention
from glasshouse.page.views.attention import SCORE_FIELDS, TILE, Maps, QueryKey, Scores, Tile, head_scoring, map_tiles

SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned, norm before": ("tiny-decoder", {"position": "learned"}),
    "rotary, grouped, window": ("tiny-decoder", {"position": "rotary", "n_kv_heads": 2, "windows": (4, 0)}),
    "alibi, one key-value head, soft-cap": (
        "tiny-decoder",
        {"position": "alibi", "n_kv_heads": 1, "attention_softcap": 2.0},
    ),
    "sandwich": ("tiny-decoder", {"norm_placement": "sandwich"}),
    "parallel": ("tiny-decoder", {"position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel"}),
    "output": ("tiny-decoder", {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"}),
    "encoder, sinusoidal, norm after": ("tiny-encoder", {"position": "sinusoidal", "norm_placement": "post"}),
    "encoder, relative": ("tiny-encoder", {"position": "relative"}),
    "pair, relative": ("tiny-seq2seq", {"position": "relative", "n_kv_heads": 2}),
    "pair, sinusoidal": ("tiny-seq2seq", {}),
}
SHORT = ForwardPass(PagePrompt("5 7 11 5 7 13 17 5 7 9", target="8 9 10 8 9"))


def made(name: str) -> TraceCache:
    preset, changes = SPECS[name]
    return built(preset, **changes)


def built(preset: str, **changes: Any) -> TraceCache:  # noqa: ANN401
    torch.manual_seed(0)
    if preset == "tiny-seq2seq":
        changes = {"start_id": 1, "end_ids": (2,), **changes}
    model = gh.build(gh.preset(preset, vocab_size=40, **changes)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)  # heads that differ, and biases that are something
    return TraceCache(ModelLoader.from_model(model, None))


def long(n: int) -> ForwardPass:
    numbers = torch.randint(40, (n,), generator=torch.Generator().manual_seed(1)).tolist()
    return ForwardPass(PagePrompt(" ".join(map(str, numbers))))


def unpacked(packed: dict[str, Any]) -> Tensor:
    name, kind = ("u8", np.uint8) if "u8" in packed else ("f32", np.float32)
    return torch.tensor(np.frombuffer(base64.b64decode(packed[name]), dtype=kind)).reshape(packed["shape"])


def sites_of(trace: Trace) -> list[str]:
    if isinstance(trace.model, Seq2Seq):
        return ["decoder.cross_pattern", "decoder.pattern", "encoder.pattern"]
    return ["pattern"]


def recorded(trace: Trace, site: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return what a pass of its own shows: weights, scores [head, query, key] and what heads gather."""
    names = [site, site.replace("pattern", "scores"), site.replace("pattern", "z")]
    with gh.record(trace.model, *names) as seen, torch.no_grad():
        trace.model(*trace.inputs)
    weights, scores, z = (seen[name][0] for name in names)
    return weights, scores, z


def largest(weights: Tensor, tall: int, wide: int) -> Tensor:
    """Return the largest in each block, looked up block by block."""
    if tall == wide == 1:
        return weights
    queries, keys = weights.shape
    rows = [
        [weights[r : r + tall, c : c + wide].max() for c in range(0, keys, wide)] for r in range(0, queries, tall)
    ]
    return torch.tensor(rows)


def same(told: Tensor, known: Tensor) -> None:
    torch.testing.assert_close(told, known, rtol=0, atol=4e-7)  # a few roundings of numbers below 1


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPECS)
def test_a_short_map_is_the_pattern_in_both_sizes(name: str) -> None:
    traces = made(name)
    trace = traces.trace(SHORT)
    for site, layer in product(sites_of(trace), range(2)):
        weights, scores, _ = recorded(trace, f"{site}.{layer}")
        seen = torch.where(scores == -torch.inf, -1.0, weights)
        small = attention.maps(traces, Maps(SHORT, site, layer))
        assert (small["pool_size"], small["stride"]) == ([1, 1], 1)
        shades = unpacked(small["maps"]).float()
        assert torch.equal(shades == 0, seen < 0)
        # A step of the root of a weight is 1/254, half of which is lost; that of a weight is at most twice that.
        torch.testing.assert_close(((shades - 1) / 254).square()[seen >= 0], seen[seen >= 0], rtol=0, atol=1 / 254)
        for head in range(4):
            told = unpacked(attention.tile(traces, Tile(SHORT, site, layer, head))["cells"])
            assert torch.equal(told < 0, seen[head] < 0)
            same(told, seen[head])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("preset", "kept_from"), first_of([("tiny-encoder", 9), ("tiny-decoder", 0)]))
def test_tiles_are_max_pooled(preset: str, kept_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_tiles, "KEPT_FROM", kept_from)
    n = 600
    traces, forward_pass = built(preset, position="alibi" if preset == "tiny-decoder" else "rotary"), long(n)
    weights, scores, _ = recorded(traces.trace(forward_pass), "pattern.1")
    whole = torch.where(scores[2] == -torch.inf, -1.0, weights[2])
    assert attention.levels(n, n) == 3
    for level in range(3):
        pooled = largest(whole, 2**level, 2**level)
        for row, column in product(range(math.ceil(n / TILE / 2**level)), repeat=2):
            told = unpacked(attention.tile(traces, Tile(forward_pass, "pattern", 1, 2, level, row, column))["cells"])
            same(told, pooled[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE])


def test_strips_are_seamless(monkeypatch: pytest.MonkeyPatch) -> None:
    traces, forward_pass = built("tiny-decoder"), long(600)
    asks = [Tile(forward_pass, "pattern", 0, 1, level) for level in range(3)]
    at_once = [unpacked(attention.tile(traces, ask)["cells"]) for ask in asks]
    monkeypatch.setattr(map_tiles, "STRIP", 5000)  # eight rows
    anew = built("tiny-decoder")
    for ask, known in zip(asks, at_once, strict=True):
        same(unpacked(attention.tile(anew, ask)["cells"]), known)


def test_small_maps_of_a_text_that_is_not_short() -> None:
    traces, forward_pass = built("tiny-encoder", max_len=500), long(130)
    weights, _, _ = recorded(traces.trace(forward_pass), "pattern.0")
    told = attention.maps(traces, Maps(forward_pass))
    assert (told["pool_size"], told["stride"]) == ([4, 4], 1)
    known = torch.stack([largest(one, 4, 4) for one in weights])
    assert torch.equal(unpacked(told["maps"]), (1 + (254 * known.sqrt()).round()).to(torch.uint8))


@pytest.mark.parametrize("position", ["rotary", "alibi"])
def test_small_maps_of_a_long_text_come_from_some_queries(position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_tiles, "STRIP", 130 * 50)  # every third query
    traces, forward_pass = built("tiny-decoder", position=position), long(130)
    told = attention.maps(traces, Maps(forward_pass, layer=1))
    assert (told["pool_size"], told["stride"]) == ([4, 4], 3)
    weights, scores, _ = recorded(traces.trace(forward_pass), "pattern.1")
    seen = torch.where(scores == -torch.inf, -1.0, weights)
    seen[:, [place for place in range(130) if place % 3]] = -1.0  # not looked at
    known = torch.stack([largest(one, 4, 4) for one in seen])
    shades = torch.where(known < 0, 0, 1 + (254 * known.clamp(min=0).sqrt()).round())
    assert (unpacked(told["maps"]).int() - shades.int()).abs().max() <= 1  # a rounding may fall on the other side
    assert torch.equal(unpacked(told["maps"]) == 0, known < 0)


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPECS)
def test_a_query_key_pair_adds_up(name: str) -> None:
    traces = made(name)
    trace = traces.trace(SHORT)
    for site, head in product(sites_of(trace), range(4)):
        weights, scores, z = recorded(trace, f"{site}.1")
        for query, key in ((4, 2), (2, 4), (0, 0)):
            told = attention.query_key(traces, QueryKey(SHORT, site, 1, head, query, key))
            score, weight = scores[head, query, key], weights[head, query, key]
            assert told["weight"] == pytest.approx(float(weight), abs=4e-7)
            assert told["kv_head"] == head * trace.model.spec.n_kv_heads // 4
            # The score, from its parts.
            q, k, products = (unpacked(told[one]) for one in ("q", "k", "products"))
            assert torch.equal(products, q * k)
            assert told["sum"] == pytest.approx(float(q @ k), rel=1e-5, abs=1e-5)
            scaled = told["sum"] * told["scale"]
            if told["softcap"] is not None:
                scaled = told["softcap"] * math.tanh(scaled / told["softcap"])
            if score == -torch.inf:
                assert told["bias"] is told["score"] is None
            else:
                assert told["score"] == pytest.approx(float(score), rel=1e-5, abs=1e-5)
                assert scaled + told["bias"] == pytest.approx(told["score"], rel=1e-5, abs=1e-5)
                # The weight, from the score.
                assert math.exp(told["score"] - told["largest"]) / told["total"] == pytest.approx(
                    told["weight"], abs=1e-6
                )
            # What is gathered, from the row.
            row = unpacked(told["weights"])
            assert torch.equal(row < 0, scores[head, query] == -torch.inf)
            assert told["seen"] == int((row >= 0).sum())
            same(row.clamp(min=0), weights[head, query])
            v = trace.attention_map(f"{site}.1").kernel.v[0, told["kv_head"]]
            torch.testing.assert_close(unpacked(told["v"]), v[key])
            torch.testing.assert_close(unpacked(told["weighted_value"]), float(weight) * v[key], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(unpacked(told["z"]), z[head, query], rtol=1e-5, atol=1e-5)
            order = sorted((k for k in range(len(row)) if row[k] >= 0), key=lambda k: -float(row[k]))[:8]
            assert [one["key"] for one in told["top"]] == order
            assert [one["weight"] for one in told["top"]] == [float(row[k]) for k in order]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPECS)
def test_scores_are_those_of_head_scores(name: str) -> None:
    traces = made(name)
    trace = traces.trace(SHORT)
    for site in sites_of(trace):
        told = attention.scores(traces, Scores(SHORT, site))
        assert told == attention.scores(traces, Scores(SHORT, site))  # kept
        if "cross" in site:
            weights = torch.stack([recorded(trace, f"{site}.{layer}")[0] for layer in range(2)])
            entropy = torch.special.entr(weights).sum(-1).mean(-1)
            most = math.log(weights.shape[-1])
            known, even = {"entropy": entropy, "broad": entropy / most}, {"entropy": [most] * 2, "broad": [1.0] * 2}
            names = [["broad" if most - float(one) < math.log(2) else "" for one in layer] for layer in entropy]
        else:
            stack = site.partition(".")[0] if isinstance(trace.model, Seq2Seq) else None
            found = gh.head_scores(trace.model, *trace.inputs, stack=stack)
            known, even, names = (
                {each: getattr(found, field) for each, field in SCORE_FIELDS.items()},
                {each: found.uniform_baseline[field] for each, field in SCORE_FIELDS.items()},
                found.head_types,
            )
        for layer, head in product(range(2), range(4)):
            one = told["heads"][layer][head]
            for each, value in known.items():
                assert one[each] == pytest.approx(float(value[layer, head]), abs=1e-6)
            assert one["label"] == (names[layer][head] or None)
            for each in known:
                assert told["uniform"][layer][each] == pytest.approx(float(even[each][layer]), abs=1e-6)


def test_head_types() -> None:
    traces = built("tiny-decoder", n_layers=1, n_heads=1, n_kv_heads=1)
    attend = traces.loader.get("").model.stack.blocks[0].attention.layer

    def called(text: str) -> tuple[str | None, dict[str, float | None]]:
        ((one,),) = attention.scores(traces, Scores(ForwardPass(PagePrompt(text))))["heads"]
        return one["label"], one

    with torch.no_grad():
        attend.query.weight.zero_()
    # All scores are 0: the head spreads its weight evenly, half of it on the token before in a text of two.
    for text in ("5 7", "5 7 11", "5 7 11 13", " ".join(map(str, range(30)))):
        name, scores = called(text)
        assert name == "broad"
        assert scores["broad"] == pytest.approx(1, abs=1e-6)
    assert called("5 7")[1]["previous"] == 0.5
    # A single token has nothing else to look at, so that nothing can be said of the head.
    name, scores = called("5")
    assert name is scores["previous"] is scores["current_token"] is scores["broad"] is None
    # Without positions, queries and keys that are the same large vectors find themselves.
    traces = built("tiny-decoder", n_layers=1, n_heads=1, n_kv_heads=1, position="none", qk_norm=False)
    attend = traces.loader.get("").model.stack.blocks[0].attention.layer
    with torch.no_grad():
        attend.query.weight.copy_(10 * torch.eye(64))
        attend.key.weight.copy_(10 * torch.eye(64))
    for text in ("5 7", "5 7 11", "5 7 11 13"):
        name, scores = called(text)
        assert scores["current_token"] == pytest.approx(1, abs=1e-3)
        assert name == "current_token"


def test_long_texts_are_scored_on_their_first_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_scoring, "SCORED", 20)
    for preset, site in (("tiny-decoder", "pattern"), ("tiny-seq2seq", "encoder.pattern")):
        traces, forward_pass = built(preset), long(30)
        trace = traces.trace(forward_pass)
        told = attention.scores(traces, Scores(forward_pass, site))
        assert told["scored"] == 20
        assert told["of"] == trace.inputs[0].shape[1]
        stack = "encoder" if site.startswith("encoder") else None
        cut = (trace.inputs[0][:, :20], *trace.inputs[1:])
        found = gh.head_scores(trace.model, *cut, stack=stack)
        previous = [[one["previous"] for one in layer] for layer in told["heads"]]
        torch.testing.assert_close(torch.tensor(previous), found.previous)


def test_edits_change_the_maps() -> None:
    traces = built("tiny-decoder")
    changed = ForwardPass(SHORT.prompt, edits=(Scale("z.0[head=1]", 0.0),))
    trace = traces.trace(changed)
    with gh.edit(trace.model, {"z.0[head=1]": 0.0}):
        weights, _, _ = recorded(trace, "pattern.1")
        found = gh.head_scores(trace.model, *trace.inputs)
    same(unpacked(attention.tile(traces, Tile(changed, layer=1, head=3))["cells"]).clamp(min=0), weights[3])
    told = attention.scores(traces, Scores(changed))
    assert told["heads"][1][3]["previous"] == pytest.approx(float(found.previous[1, 3]), abs=1e-6)
    assert told != attention.scores(traces, Scores(SHORT))


def test_one_forward_pass_serves_all_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = built("tiny-decoder")
    passes = []
    traces.loader.get("").model.register_forward_hook(lambda *_: passes.append(1))
    for layer, head in product(range(2), range(4)):
        attention.maps(traces, Maps(SHORT, layer=layer))
        attention.tile(traces, Tile(SHORT, layer=layer, head=head))
        attention.query_key(traces, QueryKey(SHORT, layer=layer, head=head, query=3, key=1))
    assert len(passes) <= 1  # one that stops early is not even counted


def test_a_long_map_is_never_materialized(monkeypatch: pytest.MonkeyPatch) -> None:
    n, sizes = 1100, []
    traces, forward_pass = built("tiny-decoder", position="rotary"), long(n)
    traces.trace(forward_pass).attention_map("pattern.1")
    recompute_attention = attention_map.recompute_attention

    def watched(*given: Any) -> Tensor:  # noqa: ANN401
        made = recompute_attention(*given)
        sizes.append(made.numel())
        return made

    monkeypatch.setattr(attention_map, "recompute_attention", watched)
    monkeypatch.setattr(map_tiles, "STRIP", 2**17)
    for level in range(attention.levels(n, n)):
        attention.tile(traces, Tile(forward_pass, level=level))
    attention.maps(traces, Maps(forward_pass))
    attention.query_key(traces, QueryKey(forward_pass, query=n - 1))
    assert max(sizes) <= 2**17 + 128 * n  # a strip, or one row of tiles


@pytest.mark.parametrize(
    ("ask", "sentence"),
    [
        (Tile(SHORT, head=4), "head is 4, but it must be within 0 and 3"),
        (Tile(SHORT, layer=2), "layer is 2, but it must be within 0 and 1"),
        (Tile(SHORT, level=1), "level is 1, but it must be within 0 and 0"),
        (Tile(SHORT, row=1), "row is 1, but it must be within 0 and 0"),
        (Tile(SHORT, column=-1), "column is -1, but it must be within 0 and 0"),
        (Tile(SHORT, attention="patern"), "no attention 'patern'; did you mean pattern"),
        (Tile(SHORT, attention="scores"), "no attention 'scores'"),
    ],
)
def test_invalid_tiles_are_rejected(ask: Tile, sentence: str) -> None:
    with pytest.raises((ConfigError, InputError), match=sentence):
        attention.tile(built("tiny-decoder"), ask)


def test_a_pair_outside_the_text_is_rejected() -> None:
    traces = built("tiny-decoder")
    with pytest.raises(ConfigError, match="query is 10, but it must be within 0 and 9"):
        attention.query_key(traces, QueryKey(SHORT, query=10))
    with pytest.raises(ConfigError, match="key is -1, but it must be within 0 and 9"):
        attention.query_key(traces, QueryKey(SHORT, key=-1))
