"""What the page says of the stream is what the tools in Python say, in models of every kind.

The page reads vectors that were kept, a few at a time, where the tools read all in one product: in float64 the sums
differ in their last digits, 1e-16 of the largest entry, and numbers go to the page as float32, 6e-8 of their size.
"""

from __future__ import annotations

import base64

import pytest
import torch
from torch import Tensor

import glasshouse as gh
from glasshouse.config import JsonDict, parse
from glasshouse.errors import GlasshouseError
from glasshouse.inspection import position_similarity, residual_norms
from glasshouse.inspection.hooks import hook_manager_of
from glasshouse.models import Encoder, Model, Seq2Seq
from glasshouse.page.endpoints import endpoints
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import residual_stream

SPECS: list[tuple[str, JsonDict]] = [
    ("tiny-decoder", {}),
    ("tiny-decoder", {"position": "learned", "norm_placement": "post"}),
    ("tiny-decoder", {"position": "alibi", "norm_placement": "sandwich", "n_kv_heads": 2}),
    ("tiny-decoder", {"position": "sinusoidal", "norm": "layer", "feedforward": "relu"}),
    ("tiny-encoder", {}),
    ("tiny-encoder", {"position": "relative", "head": {"kind": "masked_token", "transform": False}}),
    ("tiny-seq2seq", {}),
    ("tiny-seq2seq", {"position": "relative", "n_kv_heads": 1}),
    ("tiny-decoder", {"position": {"kind": "rotary", "fraction": 0.5}, "norm_placement": "parallel"}),
    ("tiny-decoder", {"norm_placement": "output", "qk_norm": True, "qk_norm_over": "projection"}),
]
FORWARD_PASS = ForwardPass(PagePrompt("3 1 4 1 5 9 2 6", appended=(7, 3)))
EDITED = ForwardPass(FORWARD_PASS.prompt, edits=(Scale("z.1[head=1]", 0.0), Scale("ffn_out.0", 0.5)))


def made(kind: str, choices: JsonDict) -> Model:
    """Build a model whose every weight was shaken, so that no part of it does nothing."""
    torch.manual_seed(0)
    model = gh.build(gh.preset(kind, vocab_size=40, **choices)).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return model


def laid_open(kind: str, choices: JsonDict) -> TraceCache:
    return TraceCache(ModelLoader.from_model(made(kind, choices), None))


def asked(traces: TraceCache, name: str, **body: object) -> JsonDict:
    endpoint = endpoints()[name]
    return endpoint.handler(traces, parse(endpoint.params, body))


def unpacked(packed: JsonDict) -> Tensor:
    data = bytearray(base64.b64decode(packed["f32"]))
    return torch.frombuffer(data, dtype=torch.float32).reshape(packed["shape"])


def near(shown: Tensor, value: Tensor) -> None:
    torch.testing.assert_close(shown, value.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def inputs(traces: TraceCache, forward_pass: ForwardPass = FORWARD_PASS) -> tuple[Tensor, ...]:
    return traces.trace(forward_pass).inputs


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
@pytest.mark.parametrize("forward_pass", [FORWARD_PASS, EDITED])
def test_a_window_of_the_logit_lens(kind: str, choices: JsonDict, forward_pass: ForwardPass) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model, inputs(traces)
    if isinstance(model, Seq2Seq):
        sites = {one.site: f"decoder.{one.site}" for one in forward_pass.edits}
        forward_pass = ForwardPass(
            forward_pass.prompt, edits=tuple(Scale(sites[one.site], one.factor) for one in forward_pass.edits)
        )
    edits = {one.site: gh.inspection.scale(one.factor) for one in forward_pass.edits}
    stop = min(3, given[-1].shape[1])
    with gh.edit(model, edits):
        lens = gh.lens(model, *given, top_k=5, layers=[0, 2], positions=range(1, stop))
    shown = asked(traces, "lens", forward_pass=forward_pass, layers=[0, 2], start=1, stop=3, top_k=5)
    assert shown["layers"] == [0, 2]
    assert shown["tokens"] == lens.tokens[:, 0].tolist()
    near(unpacked(shown["probability"]), lens.probabilities[:, 0])
    near(unpacked(shown["entropy"]), lens.entropy[:, 0])
    assert torch.equal(unpacked(shown["rank"]), lens.rank[:, 0].float())
    near(unpacked(shown["loss"]), lens.loss[:, 0])
    ids = given[-1][0].tolist()
    right = ids if isinstance(model, Encoder) else [*ids[1:], None]
    assert shown["targets"] == right[1:stop]
    told = {str(one) for one in [*lens.tokens.flatten().tolist(), *right[1:stop]] if one is not None}
    assert shown["token_info"].keys() == told


def test_the_last_layer_matches_the_model_output() -> None:
    traces = laid_open("tiny-decoder", {})
    lens = asked(traces, "lens", forward_pass=FORWARD_PASS, layers=[2], start=9, stop=10, top_k=3)
    following = asked(traces, "next", forward_pass=FORWARD_PASS, position=9)
    assert lens["tokens"][0][0] == [one["id"] for one in following["candidates"][:3]]
    assert lens["targets"] == [None]
    assert unpacked(lens["loss"]).isnan().all()


def test_targets_of_masked_tokens() -> None:
    texts = ["the cat sat on the mat and the dog sat on the rug"] * 2
    tok = gh.Tokenizer.train(texts=texts, vocab_size=280)
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(tok), init="normal")).double()
    traces = TraceCache(ModelLoader.from_model(model, tok))
    plain, hiding = (
        traces.trace(ForwardPass(PagePrompt(texts[0], masked=hidden))).inputs[0] for hidden in ((), (2, 4))
    )
    assert int(hiding[0, 2]) == tok.special_id("mask") != int(plain[0, 2])
    shown = asked(traces, "lens", forward_pass={"prompt": {"text": texts[0], "masked": [2, 4]}}, start=0, stop=6)
    assert shown["targets"] == plain[0, :6].tolist()
    near(unpacked(shown["loss"]), gh.lens(model, hiding, targets=plain, positions=range(6)).loss[:, 0])


@pytest.mark.few(5)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
@pytest.mark.parametrize("against", [None, 5])
def test_logit_attribution(kind: str, choices: JsonDict, against: int | None) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model, inputs(traces)
    split = gh.attribute(model, *given, token=11, incorrect_token=against, position=1)
    shown = asked(
        traces, "logit_attribution", forward_pass=FORWARD_PASS, position=1, token=11, incorrect_token=against
    )
    assert (shown["token"]["id"], (shown["incorrect_token"] or {}).get("id")) == (11, against)
    near(unpacked(shown["heads"]), split.heads[0])
    near(unpacked(shown["feedforward"]), split.feedforward[0])
    assert (shown["cross_heads"] is not None) == isinstance(model, Seq2Seq)
    total = shown["embedding"] + shown["bias"]
    for name in ("heads", "cross_heads", "feedforward"):
        if shown[name] is not None:
            near(unpacked(shown[name]), getattr(split, name)[0])
            total += float(unpacked(shown[name]).double().sum())
    for name in ("logit", "embedding", "bias"):
        assert shown[name] == pytest.approx(float(getattr(split, name)), abs=1e-12)
    assert total == pytest.approx(shown["logit"], abs=1e-5)


def test_logit_attribution_of_the_top_prediction() -> None:
    traces = laid_open("tiny-decoder", {})
    likeliest = asked(traces, "next", forward_pass=FORWARD_PASS, position=4)["candidates"][0]
    shown = asked(traces, "logit_attribution", forward_pass=FORWARD_PASS, position=4)
    assert shown["token"]["id"] == likeliest["id"]
    assert shown["logit"] == pytest.approx(likeliest["logit"], abs=1e-12)


@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_norms_and_cosine_similarity(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model, inputs(traces)
    shown = asked(traces, "norms", forward_pass=FORWARD_PASS, start=0, stop=3)
    near(unpacked(shown["norms"]), residual_norms(model, *given)[:, 0, :3])
    prefix = "decoder." if isinstance(model, Seq2Seq) else ""
    cosine = position_similarity(model, *given, site=f"{prefix}resid_post.0")[0, 1]
    shown = asked(traces, "cosine_similarity", forward_pass=FORWARD_PASS, layer=1, position=1, show=2)
    near(unpacked(shown["cosine"]), cosine)
    order = [one for one in cosine.argsort(descending=True).tolist() if one != 1][:2]
    assert [one["position"] for one in shown["nearest"]] == order


@pytest.mark.parametrize("head", [{"kind": "none"}, {"kind": "sequence_classification", "n_labels": 3}])
def test_without_logits_there_are_norms(head: JsonDict) -> None:
    traces = laid_open("tiny-encoder", {"head": head})
    with pytest.raises(GlasshouseError, match="the lens needs logits at every position"):
        asked(traces, "lens", forward_pass=FORWARD_PASS)
    with pytest.raises(GlasshouseError, match="has no logits over the vocabulary"):
        asked(traces, "logit_attribution", forward_pass=FORWARD_PASS)
    assert asked(traces, "norms", forward_pass=FORWARD_PASS)["norms"]["shape"] == [3, 1]
    assert asked(traces, "cosine_similarity", forward_pass=FORWARD_PASS)["cosine"]["shape"] == [10]


def test_token_labels_have_names() -> None:
    traces = laid_open(
        "tiny-encoder", {"head": {"kind": "token_classification", "n_labels": 2, "labels": ["name", "other"]}}
    )
    shown = asked(traces, "lens", forward_pass=FORWARD_PASS, stop=2, top_k=2)
    assert {one["text"] for one in shown["token_info"].values()} == {"name", "other"}
    assert shown["targets"] == [None, None]


def test_cached_activations_need_no_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = laid_open("tiny-decoder", {})
    asked(traces, "next", forward_pass=FORWARD_PASS)
    asked(traces, "logit_attribution", forward_pass=FORWARD_PASS, position=0)
    monkeypatch.setattr(traces.loader.get("").model, "forward", None)  # whoever calls it now fails
    asked(traces, "lens", forward_pass=FORWARD_PASS, start=0, stop=10, top_k=5)
    asked(traces, "norms", forward_pass=FORWARD_PASS, start=0, stop=10)
    asked(traces, "cosine_similarity", forward_pass=FORWARD_PASS, position=3)
    asked(traces, "logit_attribution", forward_pass=FORWARD_PASS, position=7, token=3, incorrect_token=8)


@pytest.mark.parametrize("name", ["lens", "logit_attribution"])
def test_lock_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever holds the model and then wants the traces would wait for a pass that holds them and wants the model."""
    traces = TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None))
    lock, model_lock = traces.lock, hook_manager_of(traces.loader.get("").model).lock
    in_order = []

    class Watched:
        def __enter__(self) -> None:
            in_order.append(lock._is_owned() or not model_lock._is_owned())
            lock.acquire()

        def __exit__(self, *error: object) -> None:
            lock.release()

    monkeypatch.setattr(traces, "lock", Watched())
    asked(traces, name, forward_pass={"prompt": {"text": "5 7 11"}})
    assert in_order
    assert all(in_order)


def test_logits_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = laid_open("tiny-decoder", {})
    whole = asked(traces, "lens", forward_pass=FORWARD_PASS, start=0, stop=10)
    monkeypatch.setattr("glasshouse.inspection.logit_lens.MAX_LOGITS", 80)  # those of two vectors
    head, most = traces.loader.get("").model.head, []
    plain = head.forward
    monkeypatch.setattr(head, "forward", lambda x, *rest: (most.append(len(x)), plain(x, *rest))[1])
    few = asked(traces, "lens", forward_pass=FORWARD_PASS, start=0, stop=10)
    assert max(most) == 2
    assert few["tokens"] == whole["tokens"]
    near(unpacked(few["entropy"]), unpacked(whole["entropy"]))


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("lens", {"start": 10, "stop": 11}, "start is 10"),
        ("lens", {"start": 2, "stop": 2}, "stop is 2"),
        ("lens", {"stop": residual_stream.MAX_POSITIONS + 1}, "stop is 65"),
        ("lens", {"layers": [3]}, "layers contains 3"),
        ("lens", {"layers": []}, "layers is"),
        ("lens", {"top_k": 0}, "top_k is 0"),
        ("logit_attribution", {"position": 10}, "position is 10"),
        ("logit_attribution", {"token": 40}, "token is 40"),
        ("cosine_similarity", {"layer": 3}, "layer is 3"),
    ],
)
def test_invalid_parameters_are_rejected(name: str, body: JsonDict, said: str) -> None:
    with pytest.raises(GlasshouseError, match=said):
        asked(laid_open("tiny-decoder", {}), name, forward_pass=FORWARD_PASS, **body)
