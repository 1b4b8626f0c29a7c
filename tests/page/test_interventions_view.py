"""Experiments in a browser: switches, patches, before and after, undo, and what is in the address.

Models run in float32, and the page reads vectors in other batches than the tools do: sums of some hundred products
differ in their last digits, about 1e-6 of the largest.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Page, Route, expect
from test_residual_stream_view import KINDS, SOURCE, TEXT, Picture, asked_on_opening, near, state_of
from torch.nn import functional as F

import glasshouse as gh
from glasshouse.inspection import ablation_effects, activation_patching, attribution_patching
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, with_defaults
from glasshouse.page.views import interventions

OTHER = "the dog sat on the mat and the bird"  # as many tokens as TEXT
STACK = {"decoder": "", "encoder": "", "pair": "decoder."}


def opened(
    visit: Visit, request: pytest.FixtureRequest, kind: str, **state: object
) -> tuple[Page, gh.models.Model, tuple[torch.Tensor, ...]]:
    """Open the view on a trained model, and return what the model is called with."""
    trained: Trained = request.getfixturevalue(kind)
    text = SOURCE if kind == "pair" else TEXT
    if kind == "pair":
        state["appended"] = gh.generate(*trained, SOURCE)[0].ids
    page = visit(trained, **({"view": "interventions", "text": text} | state))
    return page, trained[0], inputs_of(trained, PagePrompt(text, appended=tuple(state.get("appended", ()))))  # type: ignore[arg-type]


def inputs_of(trained: Trained, text: PagePrompt) -> tuple[torch.Tensor, ...]:
    return TraceCache(ModelLoader.from_model(*trained)).trace(ForwardPass(text)).inputs


def losses(model: gh.models.Model, given: tuple[torch.Tensor, ...], kind: str) -> torch.Tensor:
    with torch.no_grad():
        logits, ids = model(*given)[0], given[-1][0]
    return F.cross_entropy(*((logits, ids) if kind == "encoder" else (logits[:-1], ids[1:])), reduction="none")


def value(page: Page, name: str) -> float:
    return float(page.locator(f"[data-testid={name}]").get_attribute("data-value") or "")


def press(page: Page, site: str) -> None:
    page.click(f".part[data-site='{site}']")
    settle(page)


def check(
    page: Page, kind: str, model: gh.models.Model, given: tuple[torch.Tensor, ...], edits: dict[str, object]
) -> None:
    """Hold all that the page shows of before and after to the model in Python."""
    place = given[-1].shape[1] - 1
    with torch.no_grad():
        before, lens, loss = model(*given)[0, place].softmax(-1), gh.lens(model, *given), losses(model, given, kind)
        with gh.edit(model, edits):  # type: ignore[arg-type]
            after, lens_after, loss_after = (
                model(*given)[0, place].softmax(-1),
                gh.lens(model, *given),
                losses(model, given, kind),
            )
    rows = page.eval_on_selector_all("[data-testid=predictions] .twin", "all => all.map(one => ({...one.dataset}))")
    ids = [int(row["id"]) for row in rows]
    assert {int(before.argmax()), int(after.argmax())} <= set(ids)
    for row, one in zip(rows, ids, strict=True):
        assert float(row["before"]) == near(float(before[one]))
        assert float(row["after"]) == near(float(after[one]))
    assert value(page, "loss-before") == near(float(loss.mean()))
    if edits:
        assert value(page, "loss-after") == near(float(loss_after.mean()))
        assert value(page, "loss-increase") == near(float(loss_after.mean() - loss.mean()))
    tokens = page.eval_on_selector_all("[data-testid=loss-text] .token", "all => all.map(one => one.dataset.value)")
    shown = [float(one) for one in (tokens if kind == "encoder" else tokens[1:])]
    assert shown == [near(one) for one in loss_after.tolist()]
    for row in page.locator("[data-testid=column] tbody tr").all():
        layer = int(row.get_attribute("data-row") or "")
        cells = row.locator("td.number").all()
        for cell, found in zip(cells, (lens, lens_after), strict=True):
            assert int(cell.get_attribute("data-id") or "") == int(found.tokens[layer, 0, place, 0])
            assert float(cell.get_attribute("data-value") or "") == near(
                float(found.probabilities[layer, 0, place, 0])
            )


@pytest.mark.smoke
@pytest.mark.parametrize("kind", first_of(KINDS))
def test_ablation_by_click(kind: str, request: pytest.FixtureRequest, visit: Visit, picture: Picture) -> None:
    page, model, given = opened(visit, request, kind)
    stack = STACK[kind]
    expect(page.locator("[data-testid=no-edits]")).to_be_visible()
    check(page, kind, model, given, {})
    press(page, f"{stack}z.0[head=1]")
    check(page, kind, model, given, {f"{stack}z.0[head=1]": 0.0})
    page.click("[role=radio][data-value=mean]")
    press(page, f"{stack}ffn_out.1")
    both = {f"{stack}z.0[head=1]": 0.0, f"{stack}ffn_out.1": gh.inspection.mean_ablate()}
    check(page, kind, model, given, both)
    page.click("[role=radio][data-value=scale]")
    press(page, f"{stack}attn_out.0")
    check(page, kind, model, given, both | {f"{stack}attn_out.0": gh.inspection.scale(0.5)})
    assert state_of(page)["edits"] == [
        {"kind": "scale", "site": f"{stack}z.0[head=1]", "factor": 0},
        {"kind": "mean", "site": f"{stack}ffn_out.1"},
        {"kind": "scale", "site": f"{stack}attn_out.0", "factor": 0.5},
    ]
    picture(page, f"interventions-{kind}")
    slider = page.locator(f"[data-testid=edits] [data-site='{stack}attn_out.0'] input")
    slider.fill("2")
    expect(page.locator(f".part[data-site='{stack}attn_out.0']")).to_have_text("\u00d72")
    settle(page)
    check(page, kind, model, given, both | {f"{stack}attn_out.0": gh.inspection.scale(2.0)})
    press(page, f"{stack}attn_out.0")  # once more puts it back
    check(page, kind, model, given, both)
    page.click(f"[data-testid=edits] [data-site='{stack}ffn_out.1'] .remove")
    settle(page)
    check(page, kind, model, given, {f"{stack}z.0[head=1]": 0.0})


@pytest.mark.long
def test_ablation_of_cross_attention_and_encoder(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "pair")
    for site in ("decoder.cross_z.1[head=0]", "decoder.cross_attn_out.0", "encoder.z.0[head=3]", "encoder.ffn_out.1"):
        press(page, site)
        check(page, "pair", model, given, {site: 0.0})
        page.click("[data-testid=reset]")
        settle(page)


def test_undo_redo_and_reset(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, _, _ = opened(visit, request, "decoder")
    undo, redo = (page.locator(f"[data-testid={name}]") for name in ("undo", "redo"))

    def sites() -> list[str]:
        settle(page)
        edits = state_of(page).get("edits", [])
        assert isinstance(edits, list)
        return [one["site"] for one in edits]

    expect(undo).to_be_disabled()
    press(page, "z.0[head=0]")
    press(page, "z.1[head=3]")
    assert sites() == ["z.0[head=0]", "z.1[head=3]"]
    undo.click()
    assert sites() == ["z.0[head=0]"]
    page.keyboard.press("Control+z")
    assert sites() == []
    expect(undo).to_be_disabled()
    page.keyboard.press("Control+Shift+Z")
    assert sites() == ["z.0[head=0]"]
    redo.click()
    assert sites() == ["z.0[head=0]", "z.1[head=3]"]
    expect(redo).to_be_disabled()
    page.click("[data-testid=reset]")
    assert sites() == []
    page.keyboard.press("Control+z")
    assert sites() == ["z.0[head=0]", "z.1[head=3]"]
    page.click("[data-view=tokens]")  # what was done is kept while another view is looked at
    settle(page)
    page.click("[data-view=interventions]")
    settle(page)
    page.locator("[data-testid=undo]").click()
    assert sites() == ["z.0[head=0]"]
    page.focus("[data-testid=box-text]")
    page.keyboard.press("Control+z")  # in a box it is the box's own
    assert sites() == ["z.0[head=0]"]
    page.go_back()
    assert sites() == ["z.0[head=0]", "z.1[head=3]"]


def test_slider_movements_are_undone_together(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, _, _ = opened(visit, request, "decoder")
    press(page, "z.0[head=0]")
    slider = page.locator("[data-testid=edits] input")
    for by in ("0.5", "1.5", "3"):
        slider.fill(by)
        expect(page.locator(".part[data-site='z.0[head=0]']")).to_have_text(f"\u00d7{by}")
    page.click("[data-testid=undo]")
    expect(page.locator(".part[data-site='z.0[head=0]']")).to_have_text("off")


def test_edits_are_part_of_the_url(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "decoder")
    press(page, "z.0[head=2]")
    state = state_of(page)
    again = visit(request.getfixturevalue("decoder"), **state)
    check(again, "decoder", model, given, {"z.0[head=2]": 0.0})
    expect(again.locator(".part[data-site='z.0[head=2]']")).to_have_attribute("aria-selected", "true")


def test_ablation_by_keyboard(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, _, _ = opened(visit, request, "decoder")
    page.focus(".parts .part[tabindex='0']")
    for key in ("ArrowRight", "ArrowDown", "Space"):
        page.keyboard.press(key)
    settle(page)
    assert state_of(page)["edits"] == [{"kind": "scale", "site": "z.0[head=1]", "factor": 0}]
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    settle(page)
    assert [one["site"] for one in state_of(page)["edits"]] == ["z.0[head=1]", "z.1[head=1]"]  # type: ignore[index]


@pytest.mark.parametrize("kind", first_of(["pair", "decoder"]))
def test_ablation_sweep(kind: str, request: pytest.FixtureRequest, visit: Visit, picture: Picture) -> None:
    page, model, given = opened(visit, request, kind)
    stack = STACK[kind]
    page.click("[data-testid=sweep]")
    expect(page.locator("[data-testid=sweep-progress]")).to_contain_text("Most important head")
    settle(page)
    found = page.eval_on_selector_all(".parts .part", "all => all.map(one => [one.dataset.site, one.dataset.value])")
    shown = {site: float(one) for site, one in found}
    sides = [("z", "head", "decoder")] + (
        [("cross_z", "cross_head", "decoder"), ("z", "head", "encoder")] if kind == "pair" else []
    )
    for site, by, side in sides:
        growth = ablation_effects(model, *given, component=by, stack=side).metric_increase  # type: ignore[arg-type]
        prefix = f"{side}." if stack else ""
        for layer in range(2):
            for head in range(4):
                assert shown[f"{prefix}{site}.{layer}[head={head}]"] == near(float(growth[layer, head]))
    growth = ablation_effects(model, *given, component="feedforward").metric_increase[:, 0]
    assert [shown[f"{stack}ffn_out.{layer}"] for layer in range(2)] == [near(one) for one in growth.tolist()]
    colours = dict(
        page.eval_on_selector_all(".parts .part", "all => all.map(one => [one.dataset.site, one.style.background])")
    )
    most = max(shown, key=lambda site: abs(shown[site]))
    apart = [site for site in shown if abs(shown[site]) < abs(shown[most]) / 2]
    assert apart
    assert all(colours[site] != colours[most] for site in apart)  # one that is far stronger looks it
    expect(page.locator(".legend").first).to_contain_text("increases when ablated:")
    picture(page, f"interventions-sweep-{kind}")
    press(page, f"{stack}z.0[head=0]")  # what was found stays beside a change
    expect(page.locator(f".part[data-site='{stack}z.0[head=1]']")).to_have_attribute(
        "data-value", str(shown[f"{stack}z.0[head=1]"])
    )
    page.fill("[data-testid=box-text]", "six five" if kind == "pair" else "the dog")  # but not on another text
    expect(page.locator(".parts .part[data-value]")).to_have_count(0)


def test_a_sweep_is_stopped(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="interventions", text="the cat saw the dog. " * 170)  # more than one request a layer
    answered = []

    def hold_the_second(route: Route) -> None:
        answered.append(route)
        if len(answered) == 1:
            route.continue_()

    page.route("**/ablate_each", hold_the_second)  # so that there is something left to stop
    page.click("[data-testid=sweep]")
    page.wait_for_selector(".parts .part[data-value]")
    page.click("[data-testid=sweep]")
    expect(page.locator("[data-testid=sweep-progress]")).to_contain_text("Stopped after")
    for held in answered[1:]:
        held.continue_()
    settle(page)
    assert page.locator(".parts .part[data-value]").count() < page.locator(".parts .part").count()
    expect(page.locator("[data-testid=sweep]")).to_have_text("ablate each component")


def test_patches(request: pytest.FixtureRequest, visit: Visit, picture: Picture) -> None:
    page, model, given = opened(visit, request, "decoder")
    trained = request.getfixturevalue("decoder")
    other = inputs_of(trained, PagePrompt(OTHER))
    page.fill("[data-testid=patch-from]", OTHER)
    page.wait_for_selector("[data-testid=patches]")
    settle(page)
    expect(page.locator("[data-testid=patch-note]")).to_contain_text("Both have")
    for kind, site in (
        ("resid_post", "resid_post.0[position=1]"),
        ("attn_out", "attn_out.1[position=2]"),
        ("z", "z.1[head=2, position=7]"),
        ("ffn_out", "ffn_out.0"),
    ):
        page.select_option("[data-testid=patch-site]", kind)
        if kind == "z":
            page.keyboard.press("Escape")
            page.get_by_label("head", exact=True).fill("2")
            page.get_by_label("head", exact=True).press("Enter")
        settle(page)
        page.click(f".patches .part[data-site='{site}']")
        settle(page)
        with gh.record(model, site) as seen, torch.no_grad():
            model(*other)
        check(page, "decoder", model, given, {site: seen[site]})
        picture(page, f"interventions-patch-{kind}")
        page.click(f".patches .part[data-site='{site}']")
        settle(page)
        assert "edits" not in state_of(page)


@pytest.mark.long
def test_patches_into_the_encoder(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "pair", patch_from="one six two")
    site = "encoder.resid_post.1[position=1]"
    other = inputs_of(request.getfixturevalue("pair"), PagePrompt("one six two"))[0]
    page.click(f".patches .part[data-site='{site}']")
    settle(page)
    with gh.record(model, site) as seen, torch.no_grad():
        model(other, given[1])
    check(page, "pair", model, given, {site: seen[site]})
    page.click("[role=radio][data-value=decoder]")
    settle(page)
    site = "decoder.resid_post.0[position=2]"
    page.click("[data-testid=reset]")
    settle(page)
    page.click(f".patches .part[data-site='{site}']")
    settle(page)
    with gh.record(model, site) as seen, torch.no_grad():
        model(other, given[1])
    check(page, "pair", model, given, {site: seen[site]})


def test_patching_of_each_position(request: pytest.FixtureRequest, visit: Visit, picture: Picture) -> None:
    text, other = "the dog and the cat sat", "the dog and the cat saw"
    page, model, _ = opened(visit, request, "decoder", text=text, patch_from=other)
    trained = request.getfixturevalue("decoder")
    into, clean = (inputs_of(trained, PagePrompt(one)) for one in (text, other))
    found = activation_patching(model, into, clean, "resid_post")
    page.click("[data-testid=trace]")
    page.wait_for_selector(".patches .part[data-value]")
    settle(page)
    picture(page, "interventions-trace")
    for layer in range(2):
        for place in range(into[0].shape[1]):
            shown = page.locator(f".patches .part[data-site='resid_post.{layer}[position={place}]']")
            effect = float(shown.get_attribute("data-value") or "")
            assert effect == pytest.approx(float(found.effect[layer, place]), abs=1e-3)


@pytest.mark.parametrize("width", [1366, 400])
def test_every_head_at_every_position(
    width: int, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    text, other = "the dog and the cat sat", "the dog and the cat saw"
    state = {"text": text, "patch_from": other, "interventions_site": "heads", "width": width}
    page, model, _ = opened(visit, request, "decoder", **state)
    trained = request.getfixturevalue("decoder")
    into, clean = (inputs_of(trained, PagePrompt(one)) for one in (text, other))
    axis = ("head", "position")
    estimated = attribution_patching(model, into, clean, "z", axis=axis, steps=5).effect
    exact = activation_patching(model, into, clean, "z", axis=axis).effect
    assert page.locator(".patches [role=rowheader]").first.inner_text() == "head 1.0"

    def shown() -> list[str | None]:
        places = [(a, b, c) for a in range(2) for b in range(4) for c in range(into[0].shape[1])]
        sites = [f"z.{layer}[head={head}, position={place}]" for layer, head, place in places]
        cells = [page.locator(f".patches .part[data-site='{site}']") for site in sites]
        return [cell.get_attribute("data-value") for cell in cells]

    page.get_by_test_id("estimate").click()
    page.wait_for_selector(".patches .part[data-value]")
    settle(page)
    expect(page.locator(".patches .part.estimated").first).to_have_css("font-style", "italic")
    assert [float(one or "") for one in shown()] == [
        pytest.approx(one, abs=1e-3) for one in estimated.flatten().tolist()
    ]
    picture(page, f"interventions-heads-estimated-{width}")
    page.get_by_test_id("trace").click()
    expect(page.locator(".patches .part.estimated")).to_have_count(0)
    settle(page)
    assert [float(one or "") for one in shown()] == [pytest.approx(one, abs=1e-3) for one in exact.flatten().tolist()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture(page, f"interventions-heads-{width}")
    page.click(".patches .part[data-site='z.1[head=2, position=3]']")
    settle(page)
    assert [one["site"] for one in state_of(page)["edits"]] == ["z.1[head=2, position=3]"]  # type: ignore[index]
    assert (state_of(page)["layer"], state_of(page)["head"]) == (1, 2)


def test_texts_of_different_length(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, _, _ = opened(visit, request, "decoder", patch_from="the dog sat")
    expect(page.locator("[data-testid=patch-note]")).to_contain_text("only single positions that both have, 0 to 2")
    enabled = page.locator(".patches .part:not(:disabled)")
    assert enabled.count() == 2 * 3
    enabled.first.click()
    settle(page)
    expect(page.locator("[data-testid=edits] li")).to_have_count(1)
    page.fill("[data-testid=patch-from]", "")
    expect(page.locator("[data-testid=edits] li")).to_have_count(0)  # nothing is left to patch from


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fits(
    kind: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    edits = [
        {"kind": "scale", "site": f"{STACK[kind]}z.0[head=1]", "factor": 0},
        {"kind": "mean", "site": f"{STACK[kind]}ffn_out.1"},
    ]
    other = "one six two" if kind == "pair" else OTHER
    page, _, _ = opened(visit, request, kind, width=width, dark=dark, edits=edits, patch_from=other)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture(page, f"interventions-{kind}-{width}{'-dark' if dark else ''}")


@pytest.mark.parametrize(
    "head",
    [
        "none",
        {"kind": "token_classification", "n_labels": 3},
        pytest.param("pooled", marks=pytest.mark.long),
        pytest.param({"kind": "sequence_classification", "n_labels": 3}, marks=pytest.mark.long),
    ],
)
def test_without_token_predictions(head: object, encoder: Trained, visit: Visit, picture: Picture) -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(encoder[1]), head=head)).eval()
    page = visit((model, encoder[1]), view="interventions", text=TEXT)
    press(page, "z.0[head=1]")
    ids = torch.tensor([encoder[1].encode(TEXT)])
    with torch.no_grad(), gh.record(model, "final") as seen:
        model(ids)
        before = seen["final"]
        with gh.edit(model, {"z.0[head=1]": 0.0}):
            said = model(ids)
        moved = (seen["final"] - before).norm(dim=-1) / before.norm(dim=-1)
    assert value(page, "loss-after") == near(float(moved.mean()))
    if model.spec.head.kind.endswith("classification"):
        probabilities = said.reshape(-1, 3)[-1].softmax(-1)
        rows = page.eval_on_selector_all(".twin", "all => all.map(one => [one.dataset.id, one.dataset.after])")
        assert {int(one): float(after) for one, after in rows} == {
            one: near(float(probabilities[one])) for one in range(3)
        }
    else:
        expect(page.locator(".placeholder")).to_contain_text("predicts no tokens")
    page.click("[data-testid=sweep]")
    expect(page.locator("[data-testid=sweep-progress]")).to_contain_text("Most important head")
    picture(page, f"interventions-{model.spec.head.kind}")


@pytest.mark.long  # test_html_export.py opens every view of a saved page
@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_page_includes_the_requests_of_the_view(
    kind: str, patched: bool, request: pytest.FixtureRequest, visit: Visit
) -> None:
    trained: Trained = request.getfixturevalue(kind)
    given = {
        "text": SOURCE if kind == "pair" else TEXT,
        "patch_from": "one six two" if kind == "pair" else OTHER,
        "edits": [{"kind": "scale", "site": f"{STACK[kind]}z.0[head=1]", "factor": 0.5}],
        "token": 1,
        "appended": gh.generate(*trained, SOURCE)[0].ids if kind == "pair" else [],
    }
    if patched:
        site = "encoder.resid_post.0[position=1]" if kind == "pair" else "resid_post.0[position=1]"
        given["edits"] = [{"kind": "patch", "site": site}]
    traces = TraceCache(ModelLoader.from_model(*trained))
    state = with_defaults(traces, given)
    known = {
        request_key(*one)
        for one in interventions.initial_requests(traces, forward_pass_of(traces.loader.get(""), state), state)
    }
    page = visit(trained, view="tokens", **given)
    assert asked_on_opening(page, "interventions") == known


@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_same_in_python(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    """The code on the page runs, and gives what the page shows."""
    stack = STACK[kind]
    patched = "encoder.resid_post.0[position=1]" if kind == "pair" else "resid_post.0[position=1]"
    edits = [
        {"kind": "scale", "site": f"{stack}z.0[head=1]", "factor": 0},
        {"kind": "mean", "site": f"{stack}ffn_out.1"},
        {"kind": "patch", "site": patched},
    ]
    other = "one six two" if kind == "pair" else OTHER
    page, model, _ = opened(visit, request, kind, edits=edits, patch_from=other)
    page.click(".python summary")
    code = page.locator(".python code").inner_text()
    names: dict[str, Any] = {"model": model, "tok": request.getfixturevalue(kind)[1]}
    exec(code, names)
    rows = page.eval_on_selector_all(".twin", "all => all.map(one => ({...one.dataset}))")
    for row in rows:
        for name in ("before", "after"):
            assert float(row[name]) == near(float(names[name].detach()[int(row["id"])]))
    assert json.dumps(state_of(page)["edits"]) == json.dumps(edits)


def test_a_divergence_that_is_no_number_is_not_zero(decoder: Trained, visit: Visit) -> None:
    edits = [{"kind": "scale", "site": "resid_post.0", "factor": 1e39}]  # infinite in float32
    page = visit(decoder, view="interventions", text=TEXT, edits=edits)
    expect(page.locator("[data-testid=divergence]")).to_have_text("KL divergence: \N{EN DASH} nats.")


def test_a_sweep_without_a_number_for_any_head_ends(decoder: Trained, visit: Visit) -> None:
    def answer(route: Route) -> None:
        sites = json.loads(route.request.post_data or "")["sites"]
        route.fulfill(json={"before": 1, "loss_increase": [None if "head" in one else 0.5 for one in sites]})

    page = visit(decoder, view="interventions", text=TEXT)
    page.route("**/ablate_each", answer)
    page.locator("[data-testid=sweep]").click()
    settle(page)
    expect(page.locator("[data-testid=sweep-progress]")).to_contain_text("Each number is the increase in mean loss")


def test_the_last_token_is_on_the_first_page_of_patching(decoder: Trained, visit: Visit) -> None:
    text = "the cat sat on the mat and the dog sat on the rug. " * 3
    length = len(decoder[1].encode(text))
    assert 40 < length <= 48
    page = visit(decoder, view="interventions", text=text, patch_from=text.replace("mat", "rug"))

    def places() -> list[int]:
        sites = page.get_by_test_id("patches").locator("[role=row]").first.locator("[data-site*=position]")
        return sites.evaluate_all("all => all.map(one => +one.dataset.site.match(/position=(\\d+)/)[1])")

    seen = first = places()
    assert first[:19] == list(range(19))
    assert first[-1] >= length - 1
    while page.get_by_label("later tokens").is_enabled():
        page.get_by_label("later tokens").click()
        seen = seen + places()
    assert set(seen) >= set(range(length))  # none is skipped
    while page.get_by_label("earlier tokens").is_enabled():
        page.get_by_label("earlier tokens").click()
    assert places() == first
