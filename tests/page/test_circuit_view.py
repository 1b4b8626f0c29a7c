"""The circuit in a browser: two texts, the search, the graph, the slider, one edge, and saved pages.

Models run in float32: sums in other batches differ in their last digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Trained, Visit, settle
from playwright.sync_api import Browser, Page, Route, expect
from test_html_export import opened as opened_offline
from test_residual_stream_view import Picture, asked_on_opening, state_of

import glasshouse as gh
from glasshouse.inspection import Circuit, edge_attribution, edge_attribution_by_position, edge_patching
from glasshouse.inspection.patching.edge_graph import EdgeGraph
from glasshouse.inspection.steering import model_fingerprint
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, with_defaults
from glasshouse.page.views import circuit

CLEAN, CORRUPTED = "the dog and the cat sat", "the dog and the cat saw"
WIDTHS = [1366, 400]


def near(value: float) -> object:
    return pytest.approx(value, abs=2e-3)


def number(page: Page, name: str) -> float:
    return float(page.get_by_test_id(name).get_attribute("data-value") or "")


def prompts(trained: Trained, *texts: str) -> list[tuple[torch.Tensor, ...]]:
    traces = TraceCache(ModelLoader.from_model(*trained))
    return [traces.trace(ForwardPass(PagePrompt(one))).inputs for one in texts]


def drawn(page: Page) -> dict[tuple[str, str], float]:
    """Return the edges of the graph."""
    found = page.eval_on_selector_all(".circuit-graph .edge", "all => all.map(one => ({...one.dataset}))")
    return {(one["writer"], one["reader"]): float(one["value"]) for one in found}


def find(page: Page) -> None:
    page.get_by_test_id("find-circuit").click()
    expect(page.get_by_test_id("completeness")).to_be_visible()
    settle(page)


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1366, pytest.param(400, marks=pytest.mark.long)])
def test_the_circuit_of_two_texts(width: int, decoder: Trained, visit: Visit, picture: Picture) -> None:
    model = decoder[0]
    page = visit(decoder, view="circuit", text=CLEAN, width=width)
    expect(page.get_by_test_id("circuit-note")).to_contain_text("Enter a second text")
    page.get_by_test_id("patch-from").fill(CORRUPTED)
    expect(page.get_by_test_id("circuit-note")).to_contain_text("and the corrupted text")
    find(page)
    clean, corrupted = prompts(decoder, CLEAN, CORRUPTED)
    found = gh.circuit(model, corrupted, clean)
    assert drawn(page) == {edge: near(effect) for edge, effect in found.edges.items()}
    assert number(page, "faithfulness") == near(found.faithfulness)
    assert number(page, "completeness") == near(found.completeness)
    assert number(page, "random") == near(found.random_faithfulness)
    picture(page, f"circuit-decoder-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # An edge of the list by the keyboard: alone, patched exactly, and marked in the graph.
    page.get_by_test_id("circuit-list").locator("button").first.focus()
    page.keyboard.press("Enter")
    edge = next(iter(found.edges))
    exact = page.get_by_test_id("edge-exact")
    expect(exact).not_to_have_text("…")
    assert number(page, "edge-exact") == near(edge_patching(model, corrupted, clean, [edge])[edge])
    assert number(page, "edge-estimate") == near(found.edges[edge])
    settle(page)
    values = page.eval_on_selector_all(
        "[data-testid=edge-positions] .token", "all => all.map(one => Number(one.dataset.value))"
    )
    assert values == near(edge_attribution_by_position(model, corrupted, clean, edge).tolist())
    assert state_of(page)["circuit_edge"] == " ".join(edge)
    expect(page.locator(".circuit-graph .edge.chosen")).to_have_attribute("data-writer", edge[0])
    # The slider: so many of the largest edges.
    effects = edge_attribution(model, corrupted, clean)
    slider = page.get_by_label("number of edges")
    slider.fill("9")
    settle(page)
    size = state_of(page)["circuit_size"]
    assert isinstance(size, int)
    assert size > 8
    some = Circuit(dict.fromkeys(effects.top(size), 0.0), 0.0, 0.0, 0.0, 0, model_fingerprint(model))
    assert number(page, "faithfulness") == near(some.effect(model, corrupted, clean))
    graph, mask = EdgeGraph(model), torch.zeros_like(EdgeGraph(model).exists)
    for one in effects.top(size):
        mask[graph.place(*one)] = True
    kept = graph.connected(mask)
    assert drawn(page).keys() == {one for one in effects.top(size) if kept[graph.place(*one)]}
    assert 0 < kept.sum() < graph.exists.sum()
    page.get_by_role("radio", name="circuit found").click()
    settle(page)
    assert "circuit_size" not in state_of(page)
    assert drawn(page).keys() == found.edges.keys()


def test_a_component_is_a_link_to_its_view(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from=CORRUPTED)
    find(page)
    heads = page.locator(".circuit-graph a[data-node^='z.']")
    names = heads.evaluate_all("all => all.map(one => one.dataset.node)")
    name = next(one for one in names if one[2] != one[-2])  # layer and head
    heads.nth(names.index(name)).focus()
    page.keyboard.press("Enter")
    expect(page.locator("body")).to_have_attribute("data-view", "attention")
    state = state_of(page)
    assert f"z.{state.get('layer', 0)}[head={state.get('head', 0)}]" == name
    page.go_back()
    settle(page)
    expect(page.get_by_test_id("completeness")).to_be_visible()  # what was found is kept
    page.locator(".circuit-graph a[data-node^=ffn_out]").first.click()
    expect(page.locator("body")).to_have_attribute("data-view", "overview")
    assert state_of(page)["overview_zoom"] == "layer"


def test_an_edge_is_chosen_in_the_graph(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from=CORRUPTED)
    find(page)
    page.locator(".circuit-graph .edge").last.dispatch_event("click")  # the largest
    settle(page)
    assert state_of(page)["circuit_edge"] == " ".join(next(reversed(drawn(page))))
    page.locator(".circuit-graph .edge").last.dispatch_event("click")
    settle(page)
    assert "circuit_edge" not in state_of(page)


def test_a_search_is_stopped(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from=CORRUPTED)
    held: list[Route] = []
    page.route("**/find_circuit", lambda route: held.append(route))
    button = page.get_by_test_id("find-circuit")
    button.click()
    page.wait_for_selector(".circuit-graph")  # the largest edges are there before
    expect(button).to_have_text("stop")
    button.click()
    expect(page.get_by_test_id("circuit-progress")).to_contain_text("Stopped")
    for one in held:
        one.continue_()
    settle(page)
    expect(button).to_have_text("find the circuit")
    expect(page.get_by_test_id("completeness")).to_have_count(0)
    assert number(page, "faithfulness") is not None
    page.unroute("**/find_circuit")
    find(page)
    page.get_by_label("token: one less").click()  # another circuit
    settle(page)
    expect(page.locator(".circuit-graph")).not_to_be_visible()


def test_without_a_difference_it_names_the_tokens_with_one(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=f"{CLEAN} on the mat", patch_from=f"{CORRUPTED} on the mat")
    clean, corrupted = prompts(decoder, f"{CLEAN} on the mat", f"{CORRUPTED} on the mat")
    with torch.no_grad():
        first, second = (decoder[0](*one)[0].argmax(-1) for one in (clean, corrupted))
    differ = (first != second).nonzero().flatten().tolist()
    same = next(place for place in range(len(first)) if place not in differ)
    page.get_by_label("token", exact=True).fill(str(same))
    page.get_by_label("token", exact=True).press("Enter")
    settle(page)
    note = page.get_by_test_id("circuit-note")
    expect(note).to_contain_text(f"At token {same} both texts predict")
    expect(page.get_by_test_id("find-circuit")).not_to_be_visible()
    assert [int(one.get_attribute("data-place") or "") for one in note.get_by_role("button").all()] == differ[-8:]
    note.get_by_role("button").first.click()
    settle(page)
    expect(page.get_by_test_id("find-circuit")).to_be_visible()


@pytest.mark.parametrize("width", WIDTHS)
def test_an_encoder_decoder(width: int, visit: Visit, picture: Picture) -> None:
    trained: Any = gh.load("dates-1m")
    page = visit(trained, view="circuit", text="4 March 1997", patch_from="4 March 1999", width=width)
    page.get_by_test_id("circuit-note").get_by_role("button", name="token 0").click()
    settle(page)
    find(page)
    stacks = {edge[0].partition(".")[0] for edge in drawn(page)}
    assert stacks == {"encoder", "decoder"}
    assert any(writer.startswith("encoder") and "cross" in reader for writer, reader in drawn(page))
    picture(page, f"circuit-pair-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_models_without_edges_say_so(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="circuit", text="one five two")  # post-norm
    expect(page.get_by_test_id("circuit-note")).to_contain_text("norm_placement is 'post', but edges need 'pre'")
    expect(page.get_by_test_id("patch-from")).not_to_be_visible()


def test_texts_of_different_length(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from="the dog")
    expect(page.get_by_test_id("circuit-note")).to_contain_text("give texts of the same length")
    expect(page.get_by_test_id("patch-from")).to_be_visible()


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1366, pytest.param(400, marks=pytest.mark.long)])
def test_a_saved_page_has_the_circuit(
    width: int, decoder: Trained, browser: Browser, tmp_path: Path, picture: Picture
) -> None:
    gh.look(*decoder, CLEAN, view="circuit", patch_from=CORRUPTED).save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened_offline(browser, tmp_path / "page.html", troubles)
    page.set_viewport_size({"width": width, "height": 900})
    clean, corrupted = prompts(decoder, CLEAN, CORRUPTED)
    found = gh.circuit(decoder[0], corrupted, clean)
    assert drawn(page).keys() == found.edges.keys()
    why = "needs the running page: gh.look(model, tok).open()"
    expect(page.get_by_test_id("find-circuit")).to_be_disabled()
    expect(page.get_by_test_id("patch-from")).to_be_disabled()
    assert page.get_by_test_id("find-circuit").get_attribute("title") == why
    page.get_by_test_id("circuit-list").locator("button").first.click()
    settle(page)
    expect(page.get_by_test_id("edge-exact")).to_have_text(why)
    page.get_by_label("number of edges").fill("6")
    settle(page)
    assert drawn(page).keys() != found.edges.keys()
    picture(page, f"circuit-saved-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("token: one less").click()  # of which there is no circuit: nothing old is shown
    settle(page)
    expect(page.locator(".circuit-graph")).not_to_be_visible()
    assert not troubles
    page.context.close()


def test_the_save_button_keeps_what_was_found(
    decoder: Trained, visit: Visit, browser: Browser, tmp_path: Path
) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from=CORRUPTED)
    find(page)
    page.get_by_test_id("circuit-list").locator("button").first.click()
    expect(page.get_by_test_id("edge-exact")).not_to_have_text("…")
    exact = number(page, "edge-exact")
    page.get_by_role("tab", name="Tokens").click()  # saved at another view
    settle(page)
    with page.expect_download() as coming:
        page.get_by_role("button", name="Save").click()
        page.get_by_role("button", name="Snapshot").click()
    coming.value.save_as(tmp_path / "page.html")
    troubles: list[str] = []
    saved = opened_offline(browser, tmp_path / "page.html", troubles)
    saved.get_by_role("tab", name="Circuit").click()
    settle(saved)
    assert drawn(saved) == drawn_in(decoder)
    assert number(saved, "edge-exact") == near(exact)
    assert not troubles
    saved.context.close()


def drawn_in(decoder: Trained) -> dict[tuple[str, str], object]:
    clean, corrupted = prompts(decoder, CLEAN, CORRUPTED)
    return {edge: near(effect) for edge, effect in gh.circuit(decoder[0], corrupted, clean).edges.items()}


def test_a_saved_page_includes_the_requests_of_the_view(decoder: Trained, visit: Visit) -> None:
    given = {"text": CLEAN, "patch_from": CORRUPTED}
    traces = TraceCache(ModelLoader.from_model(*decoder))
    state = with_defaults(traces, given)
    known = {
        request_key(*one)
        for one in circuit.initial_requests(traces, forward_pass_of(traces.loader.get(""), state), state)
    }
    page = visit(decoder, view="tokens", **given)
    asked = asked_on_opening(page, "circuit")
    assert {one for one in asked if not one.startswith("tokenize")} == known


def test_the_same_in_python(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="circuit", text=CLEAN, patch_from=CORRUPTED)
    find(page)
    page.click(".python summary")
    names: dict[str, Any] = {"model": decoder[0], "tok": decoder[1]}
    exec(page.locator(".python code").inner_text(), names)
    assert drawn(page) == {edge: near(effect) for edge, effect in names["found"].edges.items()}
