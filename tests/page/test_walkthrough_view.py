"""The steps of a token in a browser: walking through them, and numbers that are those of Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Locator, Page, expect

import glasshouse as gh
from glasshouse.inspection import scale, walkthrough
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.layers.sublayer import Sublayer
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.walkthrough import initial_requests

TEXT = "the cat sat on the mat and the bird"
Picture = Callable[[Page, str], Path]


def card(page: Page, key: str) -> Locator:
    return page.locator(f'.step[data-key="{key}"]')


def values(where: Locator) -> list[float]:
    """Return the exact values of what is shown."""
    found: list[str] = where.evaluate_all("nodes => nodes.map((one) => one.dataset.value)")
    return [float(one) for one in found]


def vector(page: Page, key: str, name: str) -> list[float]:
    return values(card(page, key).get_by_test_id(f"vector-{name}").locator(".cell"))


def shown(tensor: torch.Tensor) -> list[float]:
    """Return the first numbers of a tensor as float32 has them."""
    return tensor.detach().float().flatten()[:8].tolist()


def go(page: Page, key: str) -> None:
    card(page, key).locator(".head").click()
    settle(page)


def inputs_of(trained: Trained, page: Page) -> tuple[torch.Tensor, ...]:
    """Return what the model reads: the ids that the page shows."""
    sides = ("source", "target") if isinstance(trained[0], gh.models.Seq2Seq) else ("text",)
    rows = [page.get_by_test_id(f"strip-{side}").locator(".token") for side in sides]
    return tuple(torch.tensor([row.evaluate_all("all => all.map((one) => Number(one.dataset.id))")]) for row in rows)


def asked(kind: str) -> dict[str, str]:
    """Return what to open the page with; a target that is given is not written anew."""
    return {"text": "one five two", "target": "eins fünf"} if kind == "pair" else {"text": TEXT}


LOOKS = [("decoder", 1280, False), ("decoder", 1280, True), ("decoder", 400, False), ("decoder", 400, True)]
LOOKS += [(kind, width, dark) for kind in ("encoder", "pair") for width, dark in ((1280, False), (400, True))]


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("kind", "width", "dark"), LOOKS)
def test_it_opens(
    kind: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    trained: Trained = request.getfixturevalue(kind)
    page = visit(trained, **asked(kind), view="walkthrough", layer=1, head=1, width=width, dark=dark)
    tone = "dark" if dark else "light"
    picture(page, f"walkthrough-{kind}-{width}-{tone}")
    page.get_by_test_id("walkthrough-all").click()
    settle(page)
    folded = page.locator(".step .head[aria-expanded=false]")
    expect(folded).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    picture(page, f"walkthrough-{kind}-all-{width}-{tone}")


@pytest.mark.smoke
@pytest.mark.parametrize("kind", first_of(["decoder", "encoder", "pair"]))
def test_numbers_are_those_of_record(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    trained: Trained = request.getfixturevalue(kind)
    model = trained[0]
    page = visit(trained, **asked(kind), view="walkthrough", layer=1, head=2, token=2, walkthrough_all=1)
    prefix = "decoder." if kind == "pair" else ""
    here = {"resid_pre.1": "layers:arrive", "attn_out.1": "attention:out", "ffn_out.1": "feedforward:down"}
    names = {"layers:arrive": "x", "attention:out": "a", "feedforward:down": "f"}
    if kind == "pair":
        here["cross_attn_out.1"], names["cross:out"] = "cross:out", "c"
    inputs = inputs_of(trained, page)
    with (
        torch.no_grad(),
        gh.record(
            model, *(prefix + site for site in here), f"{prefix}z.1", f"{prefix}pattern.1", f"{prefix}v.1"
        ) as seen,
    ):
        logits = model(*inputs)
    for site, key in here.items():
        assert vector(page, key, names[key]) == pytest.approx(shown(seen[prefix + site][0, 2]), rel=1e-5, abs=1e-6)
    assert vector(page, "attention:gather", "z") == pytest.approx(
        shown(seen[f"{prefix}z.1"][0, 2, 2]), rel=1e-5, abs=1e-6
    )
    shared = 2 * model.spec.n_kv_heads // model.spec.n_heads
    assert vector(page, "attention:value", "v") == pytest.approx(
        shown(seen[f"{prefix}v.1"][0, shared, 2]), rel=1e-5, abs=1e-6
    )
    weights = values(card(page, "attention:softmax").locator(".weighted"))
    assert weights == pytest.approx(seen[f"{prefix}pattern.1"][0, 2, 2].tolist()[: len(weights)], rel=1e-5, abs=1e-7)
    chances = logits[0, 2].softmax(-1)
    said = card(page, "head:probabilities").locator(".bars [data-id]")
    ids = [int(one) for one in said.evaluate_all("all => all.map((one) => one.dataset.id)")]
    assert ids == chances.topk(8).indices.tolist()
    found = values(card(page, "head:probabilities").locator(".bars .figure"))
    assert found == pytest.approx(chances.topk(8).values.tolist(), rel=1e-4)


def test_a_step_with_a_title_is_drawn_from_its_vectors(
    decoder: Trained, visit: Visit, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Unregistered(GatedFeedForward):
        """One that the walkthrough knows no steps of."""

    walkthrough.steps.register(Unregistered, walkthrough.steps.dispatch(Sublayer))
    monkeypatch.setattr(decoder[0].stack.blocks[1].feedforward.layer, "__class__", Unregistered)
    page = visit(decoder, text=TEXT, view="walkthrough", layer=1, token=2, walkthrough_all=1)
    expect(card(page, "feedforward:layer").locator(".stepname")).to_contain_text("Unregistered")
    with torch.no_grad(), gh.record(decoder[0], "ffn_out.1[position=2]") as seen:
        decoder[0](*inputs_of(decoder, page))
    (expected,) = seen["ffn_out.1[position=2]"]
    assert vector(page, "feedforward:layer", "y") == pytest.approx(shown(expected), rel=1e-5, abs=1e-6)


def test_next_and_previous_step_through_every_card(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", layer=1)
    back, onward, at = (page.get_by_test_id(f"walkthrough-{one}") for one in ("back", "next", "at"))
    count = page.locator(".step").count()
    expect(back).to_be_disabled()
    for number in range(1, count + 1):
        expect(at).to_contain_text(f"{number} of {count}")
        expect(page.locator(".step.present .number")).to_have_text(str(number))
        expect(page.locator(".step .inside:visible")).to_have_count(1)
        expect(page.locator(".step.present .head")).to_be_in_viewport()
        node = page.locator(".step.present").get_attribute("data-node")
        expect(page.locator(".place.lit")).to_have_attribute("data-node", str(node))
        if number < count:
            onward.click()
    expect(onward).to_be_disabled()
    back.click()
    expect(at).to_contain_text(f"{count - 1} of {count}")


def test_arrow_keys_step_and_update_the_url(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", layer=1)
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    settle(page)
    expect(page.locator(".step.present .number")).to_have_text("3")
    assert "walkthrough_card=attention.norm%3Anorm" in page.url
    page.reload()
    settle(page)
    expect(page.locator(".step.present .number")).to_have_text("3")
    page.get_by_test_id("strip-text").focus()
    page.keyboard.press("ArrowLeft")  # among tokens, arrows choose tokens
    settle(page)
    before_last = len(decoder[1].encode(TEXT)) - 2
    expect(page.get_by_test_id("walkthrough-title")).to_contain_text(f"token {before_last},")
    expect(page.locator(".step.present .number")).to_have_text("3")


def test_show_all_expands_and_collapses(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough")
    every = page.get_by_test_id("walkthrough-all")
    every.click()
    expect(every).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".step .inside:visible")).to_have_count(page.locator(".step").count())
    every.click()
    expect(page.locator(".step .inside:visible")).to_have_count(1)


@pytest.mark.parametrize("width", [1280, 400])
def test_the_diagram_selects_cards(width: int, pair: Trained, visit: Visit) -> None:
    page = visit(pair, **asked("pair"), view="walkthrough", layer=1, width=width)
    labels = page.locator(".place text").all_text_contents()
    block = ["attention", "+", "norm", "cross-attention", "+", "norm", "feed-forward", "+", "norm"]
    assert labels == ["embed", "layer 0", *block, "unembed"]
    page.locator('.place[data-node="cross"]').click()
    expect(page.locator(".step.present")).to_have_attribute("data-key", "cross:query")
    page.locator('.place[data-node="feedforward.add"]').focus()
    page.keyboard.press("Enter")
    expect(page.locator(".step.present")).to_have_attribute("data-key", "feedforward.add:add")
    expect(page.locator('.place[aria-current="step"]')).to_have_attribute("data-node", "feedforward.add")


def test_numbers_show_all_digits(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", token=1)
    told = page.get_by_test_id("walkthrough-value")
    row = page.get_by_test_id("vector-x")
    ids = torch.tensor(decoder[1].encode(TEXT))
    expected = decoder[0].token_embedding.table.weight[ids[1]].detach()

    def number() -> float:
        return float(re.sub(".* = ", "", told.inner_text()).replace("\N{MINUS SIGN}", "-"))

    row.locator(".cell").nth(5).hover()
    expect(told).to_contain_text("x[5] = ")
    assert number() == pytest.approx(float(expected[5]), rel=1e-6)
    row.locator(".cell").first.focus()
    page.keyboard.press("ArrowRight")
    expect(told).to_contain_text("x[1] = ")
    assert number() == pytest.approx(float(expected[1]), rel=1e-6)
    expect(page.locator(".step.present .number")).to_have_text("1")  # the arrow stayed within the numbers
    page.get_by_test_id("more-x").click()
    strip = page.get_by_role("slider", name="x, all 64")
    strip.focus()
    page.keyboard.press("End")
    expect(told).to_contain_text("x[63] = ")
    assert number() == pytest.approx(float(expected[63]), rel=1e-6)
    page.get_by_test_id("more-x").click()
    expect(strip).to_have_count(0)


def test_arrows_go_down_in_a_matrix_of_few_rows(decoder: Trained, visit: Visit) -> None:
    tok = decoder[1]
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), n_heads=16, n_kv_heads=16)).eval()
    assert model.spec.d_head == 4  # so the corner of W_Q has four rows of eight numbers
    page = visit((model, tok), text=TEXT, view="walkthrough", walkthrough_card="attention:query")
    page.get_by_test_id("matrix-WQ").locator(".cell").first.focus()
    page.keyboard.press("ArrowDown")
    expect(page.get_by_test_id("walkthrough-value")).to_contain_text("WQ[1, 0] = ")


def test_the_selection_is_that_of_the_page(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", walkthrough_card="attention:query")
    before = vector(page, "attention:query", "q")
    page.keyboard.press("]")
    settle(page)
    expect(page.get_by_test_id("walkthrough-title")).to_contain_text("layer 1, head 0")
    expect(page.locator(".step.present")).to_have_attribute("data-key", "attention:query")
    deeper = vector(page, "attention:query", "q")
    page.keyboard.press(".")
    settle(page)
    expect(page.get_by_test_id("walkthrough-title")).to_contain_text("layer 1, head 1")
    assert len({tuple(before), tuple(deeper), tuple(vector(page, "attention:query", "q"))}) == 3


def test_masked_scores_are_marked(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", token=3, walkthrough_card="attention:mask")
    rows = card(page, "attention:mask").locator("tbody tr")
    length = len(decoder[1].encode(TEXT))
    expect(rows).to_have_count(min(12, length))
    expect(card(page, "attention:mask").get_by_text("masked", exact=True)).to_have_count(length - 4)
    expect(rows.nth(3)).to_have_class("own")


def test_an_encoder_decoder_shows_both_stacks(pair: Trained, visit: Visit, picture: Picture) -> None:
    page = visit(pair, **asked("pair"), view="walkthrough", key=1, walkthrough_all=1)
    source = page.get_by_test_id("strip-source").locator(".token").count()
    expect(card(page, "cross:softmax").locator("tbody tr")).to_have_count(source)
    page.get_by_role("radio", name="encoder (source)").click()
    settle(page)
    expect(page.get_by_test_id("walkthrough-title")).to_contain_text("token 1,")
    expect(page.locator(".step").last).to_have_attribute("data-key", "memory:memory")
    inputs = inputs_of(pair, page)
    with torch.no_grad(), gh.record(pair[0], "encoder.final") as seen:
        pair[0](*inputs)
    assert vector(page, "memory:memory", "e1") == pytest.approx(
        shown(seen["encoder.final"][0, 1]), rel=1e-5, abs=1e-6
    )
    picture(page, "walkthrough-source")


def test_edited_sites_are_marked(decoder: Trained, visit: Visit) -> None:
    edits = [{"kind": "scale", "site": "z.0[head=1]", "factor": 0.5}]
    page = visit(
        decoder, text=TEXT, view="walkthrough", head=1, token=2, edits=edits, walkthrough_card="attention:gather"
    )
    expect(card(page, "attention:gather").locator(".changed")).to_contain_text("z.0 is edited")
    ids = torch.tensor([decoder[1].encode(TEXT)])
    with torch.no_grad(), gh.edit(decoder[0], {"z.0[head=1]": scale(0.5)}), gh.record(decoder[0], "z.0") as seen:
        decoder[0](ids)
    assert vector(page, "attention:gather", "z") == pytest.approx(shown(seen["z.0"][0, 1, 2]), rel=1e-5, abs=1e-6)


@pytest.mark.smoke
@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_same_in_python_gives_the_same(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    trained: Trained = request.getfixturevalue(kind)
    page = visit(trained, **asked(kind), view="walkthrough", layer=1, token=1, walkthrough_card="attention:out")
    code = page.locator(".python code").text_content() or ""
    told: dict[str, Any] = {"model": trained[0], "tok": trained[1]}
    exec(re.sub(r"model, tok = .*\n", "", code).replace("print(site,", "(site,"), told)
    prefix = "decoder." if kind == "pair" else ""
    expected = shown(told["seen"][f"{prefix}attn_out.1[position=1]"][0])
    assert vector(page, "attention:out", "a") == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_python_code_has_masks_and_patches(encoder: Trained, visit: Visit) -> None:
    edits = [{"kind": "patch", "site": "resid_post.0[position=1]"}]
    state = {"masked": [2], "edits": edits, "patch_from": "a dog ran to the tree"}
    page = visit(encoder, text=TEXT, view="walkthrough", layer=1, token=1, walkthrough_card="attention:out", **state)
    told: dict[str, Any] = {"model": encoder[0], "tok": encoder[1]}
    exec((page.locator(".python code").text_content() or "").replace("print(site,", "(site,"), told)
    expected = shown(told["seen"]["attn_out.1[position=1]"][0])
    assert vector(page, "attention:out", "a") == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.long  # test_html_export.py opens every view of a saved page
@pytest.mark.parametrize("side", ["", "source"])
def test_a_saved_page_includes_the_requests_of_the_view(side: str, pair: Trained, visit: Visit) -> None:
    state = {"layer": 1, "head": 2, "key": 1, "target": "eins", **({"walkthrough_side": side} if side else {})}
    sent: list[str] = []
    page = visit(pair, wait=False, text="one two", view="walkthrough", **state)
    page.on("request", lambda one: sent.append(one.post_data or "") if one.url.endswith("/api/walkthrough") else None)
    page.reload()
    settle(page)
    place = len(page.get_by_test_id("strip-target").locator(".token").all()) - 1
    forward_pass = ForwardPass(PagePrompt("one two", "eins"))
    ((name, body),) = initial_requests(
        TraceCache(ModelLoader.from_model(*pair)), forward_pass, {**state, "token": place}
    )
    assert {f"{name} {one}" for one in sent} == {request_key(name, body)}


def test_hostile_text_breaks_nothing(decoder: Trained, visit: Visit) -> None:
    text = "<img src=x onerror=alert(1)> \u202e\u200b \x07" + "x" * 400
    page = visit(decoder, text=text, view="walkthrough", width=400, token=3, walkthrough_all=1)
    expect(page.locator(".step img")).to_have_count(0)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_theme_change_redraws(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, view="walkthrough", walkthrough_card="attention:query")
    cell = card(page, "attention:query").get_by_test_id("vector-q").locator(".cell").first
    before = cell.evaluate("one => one.style.backgroundColor")
    page.get_by_label("light or dark").click()
    assert cell.evaluate("one => one.style.backgroundColor") != before
