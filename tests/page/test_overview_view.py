"""The overview in a browser: twelve questions that a student would ask, answered from this tab alone."""

from __future__ import annotations

import re

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from playwright.sync_api import Page, expect

import glasshouse as gh
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache

TEXT = "the cat sat on the mat and the bird"


def opened(visit: Visit, trained: Trained, kind: str, **state: object) -> tuple[Page, gh.models.Model, torch.Tensor]:
    """Open the page, which begins with this tab, and return the ids of the text or the target."""
    text = TEXT
    if kind == "pair":
        text, state["appended"] = "one five two", gh.generate(*trained, "one five two")[0].ids
    page = visit(trained, text=text, **state)
    appended = tuple(state.get("appended", ()))  # type: ignore[arg-type]
    traces = TraceCache(ModelLoader.from_model(*trained))
    return page, trained[0], traces.trace(ForwardPass(PagePrompt(text, appended=appended))).inputs


@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_first_tab_is_one_picture_of_the_model(visit: Visit, request: pytest.FixtureRequest, kind: str) -> None:
    trained: Trained = request.getfixturevalue(kind)
    page, model, inputs = opened(visit, trained, kind)
    expect(page.get_by_role("tab").first).to_have_text("Overview")
    expect(page.get_by_role("tab", selected=True)).to_have_text("Overview")
    drawn = page.get_by_test_id("overview-picture")
    columns = sum(one.shape[1] for one in inputs)
    expect(drawn.locator(".word")).to_have_count(columns)  # every token goes in
    layers = model.spec.n_layers + (model.spec.n_encoder_layers or 0 if kind == "pair" else 0)
    expect(drawn.locator(".layer")).to_have_count(layers)
    boxes = sum(
        one.shape[1] * depth
        for one, depth in zip(
            inputs, [layers - model.spec.n_layers, model.spec.n_layers][-len(inputs) :], strict=True
        )
    )
    expect(drawn.locator(".box")).to_have_count(boxes)
    if kind == "decoder":  # nothing comes from later tokens
        arcs = drawn.locator(".arc").evaluate_all("all => all.map(one => [+one.dataset.key, +one.dataset.place])")
        assert arcs
        assert all(key <= place for key, place in arcs)


def test_twelve_questions(visit: Visit, decoder: Trained) -> None:
    page, model, (ids,) = opened(visit, decoder, "decoder")
    tok, last = decoder[1], ids.shape[1] - 1
    with torch.no_grad(), gh.record(model, "*") as seen:
        logits = model(ids)
    probabilities = logits[0, -1].softmax(-1)
    best = int(probabilities.argmax())
    drawn = page.get_by_test_id("overview-picture")
    # 1, 2: how large is it, and what goes in?
    expect(page.locator(".facts")).to_contain_text(f"{model.spec.n_layers} layers · {model.spec.n_heads} heads")
    expect(drawn.locator(".word")).to_have_count(ids.shape[1])
    # 3, 4, 5: where does information cross positions, what works on one alone, what may a token not see?
    about = page.locator(".about").first
    expect(about).to_contain_text("crosses from column to column only along the arcs, which are attention")
    expect(about).to_contain_text("feed-forward works within a column")
    expect(about).to_contain_text("never later ones")
    # 6, 7: what comes out, and how sure is it?
    out = page.get_by_test_id("overview-out").locator("[data-id]").first
    expect(out).to_have_attribute("data-id", str(best))
    assert float(out.locator(".figure").get_attribute("data-value") or 0) == pytest.approx(
        float(probabilities[best]), rel=1e-4
    )
    # 8: why this token? The parts add up to its logit, the largest are listed.
    found = gh.attribute(model, ids, token=best)
    parts = {name: float(value) for name, value in found.components().items()}
    listed = page.locator("[data-part]:has(.bar)")
    name, value = max(parts.items(), key=lambda one: one[1])
    expect(listed.first).to_have_attribute("data-part", name.replace("embed", "embedding").replace("bias", "biases"))
    assert float(listed.first.locator(".figure").get_attribute("data-value") or 0) == pytest.approx(value, rel=1e-3)
    # 9: what did layer 1 add?
    row = page.get_by_test_id("overview-layers").locator("tr[data-layer='1']")
    added, stream = (seen[site][0, last].norm() for site in ("ffn_out.1", "resid_mid.1"))
    shown = row.locator("[data-part=feedforward]").get_attribute("data-value")
    assert float(shown or 0) == pytest.approx(float(added / (added + stream)), rel=1e-4)
    # 10: which head looked back, and to which token?
    link = row.locator("button.head")
    head = int((link.inner_text()).split()[-1])
    source = drawn.locator(f".arc.own[data-layer='1'][data-head='{head}']").get_attribute("data-key")
    expect(row.locator(".token").first).to_contain_text(tok.decode([int(ids[0, int(source or 0)])]).strip())
    # 11: when did the model know?
    lens = gh.lens(model, ids, top_k=1, positions=[last])
    cell = row.locator("td[data-value] .token")
    expect(cell).to_have_attribute("title", re.compile(f"id {int(lens.tokens[2, 0, 0, 0])}$"))
    # 12: and at another token? The picture is of the whole text: a click on a column selects it.
    drawn.locator(".word").first.click()
    settle(page)
    expect(page.get_by_test_id("overview-out").locator("h2 .token")).to_contain_text(tok.decode([int(ids[0, 0])]))
    expect(drawn.locator(".arc.own")).to_have_count(
        drawn.locator(".arc.own[data-place='0'][data-key='0']").count()  # the first token has only itself to read
    )


def test_zoom_from_the_model_to_one_product(visit: Visit, decoder: Trained) -> None:
    page, model, (ids,) = opened(visit, decoder, "decoder", token=5)
    with torch.no_grad(), gh.record(model, "pattern.1") as seen:
        model(ids)
    page.get_by_test_id("overview-decoder-1").press("Enter")  # by the keyboard
    settle(page)
    heads = page.get_by_test_id("overview-heads-attention").locator("tbody tr")
    expect(heads).to_have_count(model.spec.n_heads)
    line = heads.first
    head, weight = int(line.get_attribute("data-head") or 0), line.locator("[data-key]").first
    key = int(weight.get_attribute("data-key") or 0)
    assert float(weight.get_attribute("data-value") or 0) == pytest.approx(
        float(seen["pattern.1"][0, head, 5, key]), rel=1e-4
    )
    line.locator("button.token").first.click()
    settle(page)
    pair = page.get_by_test_id("pair-weight").last
    assert float(pair.get_attribute("data-value") or 0) == pytest.approx(
        float(seen["pattern.1"][0, head, 5, key]), rel=1e-4
    )
    page.get_by_test_id("zoom-head").click()
    settle(page)
    expect(page.get_by_test_id("lines")).to_be_visible()
    expect(page.locator(".more a").first).to_have_attribute("href", re.compile("view=attention"))
    page.get_by_test_id("zoom-model").click()
    settle(page)
    expect(page.get_by_test_id("overview-picture")).to_be_visible()


@pytest.mark.parametrize("reduced", [True, False])
def test_play_lights_one_layer_after_the_other(visit: Visit, decoder: Trained, reduced: bool) -> None:
    page = visit(decoder, text=TEXT, wait=False)
    page.emulate_media(reduced_motion="reduce" if reduced else "no-preference")
    settle(page)
    button, lit = page.get_by_test_id("play"), page.locator(".layer.now")
    expect(lit).to_have_count(0)
    button.click()
    expect(lit).to_have_attribute("data-layer", "0")
    if reduced:  # nothing moves by itself: each press is one layer
        assert page.locator(".layer.now .arc").first.evaluate("one => getComputedStyle(one).animationName") == "none"
        button.click()
    expect(lit).to_have_attribute("data-layer", "1")
    if reduced:
        button.click()
    expect(lit).to_have_count(0)  # all again
