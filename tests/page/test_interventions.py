"""What the page says of changed models is what the same edits give in Python, in models of every kind.

Models run in float64; numbers go to the page as float32 where they are packed, 6e-8 of their size.
"""

from __future__ import annotations

import math

import pytest
import torch
from test_residual_stream import FORWARD_PASS, SPECS, asked, inputs, laid_open, near, unpacked
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.errors import GlasshouseError
from glasshouse.inspection import ablation_effects, activation_patching, attribution_patching, mean_ablate, record
from glasshouse.models import Encoder, Seq2Seq
from glasshouse.page.forward_pass import ForwardPass, Mean, PagePrompt, Patch, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import interventions

OTHER = PagePrompt("3 1 4 2 5 8 2 7", appended=(7, 11))


def cross_entropy(logits: torch.Tensor, ids: torch.Tensor, encoder: bool) -> torch.Tensor:
    """Return the loss at each position by torch itself."""
    if encoder:
        return F.cross_entropy(logits[0], ids[0], reduction="none")
    return F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")


@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_the_loss_under_edits(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    stack = "decoder." if isinstance(model, Seq2Seq) else ""
    changes = (Scale(f"{stack}z.0[head=2]", 0.0), Mean(f"{stack}ffn_out.1"), Scale(f"{stack}attn_out.1", 1.5))
    with torch.no_grad(), gh.edit(model, {changes[0].site: 0.0, changes[1].site: mean_ablate()}):
        with gh.edit(model, {changes[2].site: gh.inspection.scale(1.5)}):
            after = cross_entropy(model(*given), given[-1], isinstance(model, Encoder))
        before = cross_entropy(model(*given), given[-1], isinstance(model, Encoder))
    shown = asked(traces, "loss", forward_pass=ForwardPass(FORWARD_PASS.prompt, edits=changes))
    assert (shown["measure"], shown["count"]) == ("loss", len(after))
    near(unpacked(shown["values"])[: len(after)], after)
    assert shown["mean"] == pytest.approx(float(after.mean()), abs=1e-10)
    assert not torch.allclose(after, before)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), [one for one in SPECS if one[0] != "tiny-encoder"])
def test_ablation_of_each_component(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model, inputs(traces)
    parts = {"z": "head", "ffn_out": "feedforward"} | ({"cross_z": "cross_head"} if kind == "tiny-seq2seq" else {})
    prefix = "decoder." if kind == "tiny-seq2seq" else ""
    for site, by in parts.items():
        found = ablation_effects(model, *given, component=by)
        for layer in range(2):
            heads = [f"[head={head}]" for head in range(4)] if site != "ffn_out" else [""]
            sites = [f"{prefix}{site}.{layer}{head}" for head in heads]
            shown = asked(traces, "ablate_each", forward_pass=FORWARD_PASS, sites=sites)
            assert shown["loss_increase"] == pytest.approx(found.metric_increase[layer].tolist(), abs=1e-10)
            assert shown["before"] == pytest.approx(float(found.baseline), abs=1e-10)


def test_ablation_on_top_of_edits() -> None:
    traces = laid_open("tiny-decoder", {})
    first, second = (Scale(f"z.{layer}[head=1]", 0.0) for layer in (0, 1))
    both, one = (
        asked(traces, "loss", forward_pass=ForwardPass(FORWARD_PASS.prompt, edits=edits))["mean"]
        for edits in ((first, second), (first,))
    )
    shown = asked(
        traces, "ablate_each", forward_pass=ForwardPass(FORWARD_PASS.prompt, edits=(first,)), sites=[second.site]
    )
    assert shown["loss_increase"] == pytest.approx([both - one], abs=1e-12)


@pytest.mark.parametrize("site", ["resid_post.0[position=3]", "z.1[head=2]", "attn_out.0", "ffn_out.1[position=5]"])
def test_a_patch_from_another_text(site: str) -> None:
    traces = laid_open("tiny-decoder", {})
    model, (here,), (there,) = traces.loader.get("").model, inputs(traces), inputs(traces, ForwardPass(OTHER))
    after = cross_entropy(gh.patch(model, here, there, site), here, encoder=False)
    shown = asked(
        traces, "loss", forward_pass=ForwardPass(FORWARD_PASS.prompt, edits=(Patch(site),), patch_from=OTHER)
    )
    near(unpacked(shown["values"])[:-1], after)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_predictions_before_and_after(kind: str, choices: JsonDict) -> None:
    traces = laid_open(kind, choices)
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    site = "decoder.z.0[head=3]" if kind == "tiny-seq2seq" else "z.0[head=3]"
    with torch.no_grad():
        before = model(*given)[0, 1].softmax(-1)
        with gh.edit(model, {site: 0.0}):
            after = model(*given)[0, 1].softmax(-1)
    shown = asked(
        traces,
        "compare_predictions",
        forward_pass=ForwardPass(FORWARD_PASS.prompt, edits=(Scale(site),)),
        position=1,
        show=3,
    )
    ids = [one["id"] for one in shown["candidates"]]
    assert ids[:3] == before.topk(3).indices.tolist()
    assert set(ids) == {*ids[:3], *after.topk(3).indices.tolist()}
    for name, own in (("before", before), ("after", after)):
        assert [one[name] for one in shown["candidates"]] == pytest.approx(own[ids].tolist(), abs=1e-12)
    assert shown["divergence"] == pytest.approx(float(F.kl_div(after.log(), before, reduction="sum")), abs=1e-10)


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_patching_of_each_position(kind: str, choices: JsonDict) -> None:
    """The sweep of the tools reads the end of the text, so the page is asked about the end."""
    traces = laid_open(kind, choices)
    prefix = "encoder." if kind == "tiny-seq2seq" else ""
    model, (*into, ids) = traces.loader.get("").model.eval(), inputs(traces)

    def answer(text: PagePrompt) -> int:
        return int(model(*inputs(traces, ForwardPass(text)))[0, -1].argmax())

    others = (PagePrompt(OTHER.text, appended=(7, end)) for end in range(40))
    other = next(one for one in others if answer(one) != answer(FORWARD_PASS.prompt))
    forward_pass, clean = ForwardPass(FORWARD_PASS.prompt, patch_from=other), inputs(traces, ForwardPass(other))
    found = activation_patching(model, (*into, ids), clean, f"{prefix}resid_post")
    for layer in range(2):
        sites = [f"{prefix}resid_post.{layer}[position={place}]" for place in range(found.effect.shape[1])]
        shown = asked(traces, "patch_each", forward_pass=forward_pass, sites=sites, position=ids.shape[1] - 1)
        assert shown["effect"] == pytest.approx(found.effect[layer].tolist(), abs=1e-9)
        assert (shown["before"], shown["after"]) == pytest.approx(
            (float(found.corrupted_baseline), float(found.clean_baseline)), abs=1e-12
        )


@pytest.mark.few(4)
@pytest.mark.parametrize("site", ["z", "resid_post"])
@pytest.mark.parametrize(("kind", "choices"), SPECS)
def test_estimates_of_patching(kind: str, choices: JsonDict, site: str) -> None:
    traces = laid_open(kind, choices)
    site = f"{'encoder.' if kind == 'tiny-seq2seq' else ''}{site}"
    model, given = traces.loader.get("").model.eval(), inputs(traces)
    place = given[-1].shape[1] - 1

    def answer(text: PagePrompt) -> int:
        return int(model(*inputs(traces, ForwardPass(text)))[0, -1].argmax())

    others = (PagePrompt(OTHER.text, appended=(7, end)) for end in range(40))
    other = next(one for one in others if answer(one) != answer(FORWARD_PASS.prompt))
    axis = ("head", "position") if "z" in site else "position"
    found = attribution_patching(model, given, inputs(traces, ForwardPass(other)), site, axis=axis, steps=5)
    shown = asked(traces, "estimate_patches", forward_pass=FORWARD_PASS, patch_from=other, site=site, position=place)
    near(unpacked(shown["effect"]), found.effect)
    assert (shown["here"]["id"], shown["there"]["id"]) == (answer(FORWARD_PASS.prompt), answer(other))


def test_estimates_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interventions, "MAX_ESTIMATED", 9)
    traces = laid_open("tiny-decoder", {})
    with pytest.raises(GlasshouseError, match="no second text"):
        asked(traces, "estimate_patches", forward_pass=FORWARD_PASS)
    with pytest.raises(GlasshouseError, match="10 tokens, but the limit of an estimate is 9"):
        asked(traces, "estimate_patches", forward_pass=FORWARD_PASS, patch_from=OTHER)


def test_patching_needs_different_predictions() -> None:
    traces = laid_open("tiny-decoder", {})
    with pytest.raises(GlasshouseError, match="no second text"):
        asked(traces, "patch_each", forward_pass=FORWARD_PASS, sites=["resid_post.0"])
    with pytest.raises(GlasshouseError, match="both texts predict"):
        asked(
            traces,
            "patch_each",
            forward_pass=ForwardPass(FORWARD_PASS.prompt, patch_from=FORWARD_PASS.prompt),
            sites=["resid_post.0"],
        )


def test_patching_between_texts_of_different_length() -> None:
    traces = laid_open("tiny-decoder", {})
    short = PagePrompt("3 1 4 2 5")
    whole = ForwardPass(FORWARD_PASS.prompt, edits=(Patch("resid_post.0"),), patch_from=short)
    with pytest.raises(GlasshouseError, match="give texts of the same length, or patch single positions"):
        asked(traces, "loss", forward_pass=whole)
    single = ForwardPass(FORWARD_PASS.prompt, edits=(Patch("resid_post.0[position=3]"),), patch_from=short)
    assert math.isfinite(asked(traces, "loss", forward_pass=single)["mean"])
    beyond = ForwardPass(FORWARD_PASS.prompt, edits=(Patch("resid_post.0[position=5]"),), patch_from=short)
    with pytest.raises(GlasshouseError, match="position index 5"):
        asked(traces, "loss", forward_pass=beyond)


def test_the_loss_of_masked_tokens() -> None:
    text = "the cat sat on the mat and the dog sat on the rug"
    tok = gh.Tokenizer.train(texts=[text] * 2, vocab_size=280)
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(tok), init="normal")).double()
    traces = TraceCache(ModelLoader.from_model(model, tok))
    plain, hiding = (traces.trace(ForwardPass(PagePrompt(text, masked=hidden))).inputs[0] for hidden in ((), (2, 4)))
    with torch.no_grad():
        each = F.cross_entropy(model.eval()(hiding)[0], plain[0], reduction="none")
    shown = asked(traces, "loss", forward_pass={"prompt": {"text": text, "masked": [2, 4]}})
    near(unpacked(shown["values"]), each)
    assert (shown["counted"], shown["count"]) == ("masked", 2)
    assert shown["mean"] == pytest.approx(float(each[[2, 4]].mean()), abs=1e-10)


@pytest.mark.parametrize("head", [{"kind": "none"}, {"kind": "sequence_classification", "n_labels": 3}])
def test_without_token_predictions_it_is_the_relative_change(head: JsonDict) -> None:
    traces = laid_open("tiny-encoder", {"head": head})
    model, (ids,) = traces.loader.get("").model.eval(), inputs(traces)

    def final() -> torch.Tensor:
        with torch.no_grad(), record(model, "final") as seen:
            model(ids)
        return seen["final"][0]

    before = final()
    with gh.edit(model, {"z.0[head=1]": 0.0}):
        after = final()
    moved = (after - before).square().sum(-1).sqrt() / before.square().sum(-1).sqrt()
    edited = ForwardPass(FORWARD_PASS.prompt, edits=(Scale("z.0[head=1]"),))
    shown = asked(traces, "loss", forward_pass=edited)
    assert shown["measure"] == "relative_change"
    near(unpacked(shown["values"]), moved)
    assert asked(traces, "loss", forward_pass=FORWARD_PASS)["mean"] == 0
    alone = asked(traces, "ablate_each", forward_pass=FORWARD_PASS, sites=["z.0[head=1]"])
    assert alone["loss_increase"] == pytest.approx([float(moved.mean())], abs=1e-12)


def test_one_token_has_no_loss() -> None:
    shown = asked(laid_open("tiny-decoder", {}), "loss", forward_pass={"prompt": {"text": "3"}})
    assert (shown["count"], shown["mean"]) == (0, None)


@pytest.mark.parametrize(
    ("sites", "said"), [([], "sites is 0"), (["z.9"], "layers are 0 to 1"), (["z.0[head=9]"], "head index 9")]
)
def test_invalid_parameters_are_rejected(sites: list[str], said: str) -> None:
    with pytest.raises(GlasshouseError, match=said):
        asked(laid_open("tiny-decoder", {}), "ablate_each", forward_pass=FORWARD_PASS, sites=sites)
