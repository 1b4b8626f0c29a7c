"""Every view of every kind of model: it opens, fits the screen, has a name for everything, and keeps a picture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Page, Route, expect

from glasshouse.page.url_state import DEFAULTS

TEXTS = {
    "decoder": "the cat sat on the mat and the bird",
    "encoder": "the dog sat on the mat",
    "pair": "one five two",
}
VIEWS = ["tokens", "attention", "residual", "interventions", "circuit", "walkthrough", "notes"]
REST = ["tokens", "residual", "interventions"]
VIEWS_OF = {"decoder": VIEWS, "encoder": VIEWS, "pair": [*VIEWS, "seq2seq"], "run_folder": ["run"]}
OTHERS = [("encoder", 1280, False), ("pair", 1280, False), ("decoder", 400, True), ("encoder", 400, True)]
CONTROLS = "button, input, select, textarea, [role=button], [tabindex='0'], svg[role=img]"
NAMELESS = """(controls) => [...document.querySelectorAll(controls)]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.textContent.trim()
    || one.title || one.closest("label")?.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 200))"""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "width", "dark"), first_of([("decoder", 1280, False), ("pair", 400, True), *OTHERS], 2)
)
def test_views_open_and_fit(
    kind: str,
    width: int,
    dark: bool,
    request: pytest.FixtureRequest,
    visit: Visit,
    picture: Callable[[Page, str], Path],
) -> None:
    what: Trained | Path = request.getfixturevalue(kind)
    first, *others = VIEWS_OF[kind]
    page = visit(what, width=width, dark=dark, view=first, text=TEXTS.get(kind, TEXTS["decoder"]))
    for view in (first, *others):
        page.locator(f"#tab-{view}").click()
        expect(page.locator("body")).to_have_attribute("data-view", view)
        settle(page)
        picture(page, f"{view}-{kind}-{width}{'-dark' if dark else ''}")
        assert not page.locator(".pane > .trouble").is_visible(), view
        assert page.locator(".view .panel").count() > 0, view
        assert page.evaluate("document.documentElement.scrollWidth") <= width, view
        assert page.evaluate(NAMELESS, CONTROLS) == [], view


def test_a_run_has_a_checkpoint_slider(run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    page = visit(run_folder, view="tokens", text=TEXTS["decoder"])
    first = page.locator("[data-testid=next] .figure").first.get_attribute("data-value")
    slider = page.get_by_label("checkpoint", exact=True)
    slider.focus()
    slider.press("Home")
    page.wait_for_url(lambda url: "checkpoint=step" in url)
    settle(page)
    expect(page.get_by_test_id("checkpoints")).to_contain_text("step 0")
    untrained = page.locator("[data-testid=next] .figure").first.get_attribute("data-value")
    assert float(untrained or 1) < float(first or 0)
    page.get_by_test_id("compare-with").select_option("final")
    settle(page)
    shown = [pane.locator(".figure").first.get_attribute("data-value") for pane in page.locator(".pane").all()]
    assert shown == [untrained, first]
    picture(page, "beside")


@pytest.mark.parametrize(
    "view", ["attention", "walkthrough", *(pytest.param(one, marks=pytest.mark.long) for one in REST)]
)
def test_two_checkpoints_side_by_side_in_every_view(
    view: str, run_folder: Path, visit: Visit, picture: Callable[[Page, str], Path]
) -> None:
    page = visit(run_folder, text=TEXTS["decoder"], view=view, checkpoint="step 0", compare_with="final")
    assert page.locator(".pane").count() == 2
    assert not page.locator(".pane > .trouble").first.is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    picture(page, f"beside-{view}")


def test_python_and_javascript_defaults_agree(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"])
    assert page.evaluate("import('glasshouse/state.js').then(({ State }) => new State('').values)") == DEFAULTS


def test_dark_theme(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"])
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_label("light or dark").click()
    assert page.evaluate(ground) != light
    page.reload()
    settle(page)
    assert page.evaluate(ground) != light  # it is remembered


def test_a_stopped_server_is_reported(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"])
    page.context.set_offline(True)
    page.locator("[data-testid=strip-text] .token").nth(1).click()
    expect(page.locator(".pane > .trouble")).to_contain_text("does not respond")


@pytest.mark.parametrize(
    ("path", "status"),
    first_of(
        [
            ("static/views/attention/view.js", None),
            ("api/query_key", 400),
            ("static/views/attention/map.js", 400),
            ("api/query_key", None),
        ],
        2,
    ),
)
def test_a_view_that_failed_to_load_is_retried(path: str, status: int | None, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"])
    fails = True

    def answer(route: Route) -> None:
        if not fails:
            route.continue_()
        elif status is None:
            route.abort("internetdisconnected")
        else:
            route.fulfill(status=status, body="")

    page.route(f"**/{path}", answer)
    page.locator("#tab-attention").click()
    trouble = page.locator(".pane > .trouble, .status.trouble").filter(visible=True)
    expect(trouble).to_contain_text("The server")
    page.keyboard.press("3")
    settle(page)
    expect(trouble).to_have_count(1)
    fails = False
    page.locator("#tab-attention").click()
    expect(trouble).to_have_count(0)
    expect(page.locator("#tab-attention")).to_have_attribute("aria-selected", "true")
    expect(page.get_by_test_id("head-title")).to_have_text("Layer 0, head 0")
    settle(page)
    assert float(page.get_by_test_id("cell").get_attribute("data-value") or "nan") > 0


def test_a_text_that_failed_to_load_is_retried(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"])
    page.context.set_offline(True)
    box = page.get_by_role("textbox", name="Text")
    box.fill("the dog")
    expect(page.locator(".status.trouble")).to_contain_text("does not respond")
    page.context.set_offline(False)
    page.locator("#tab-residual").click()
    expect(page.locator(".status.trouble")).to_have_count(0)
    settle(page)
    assert page.locator("[data-testid=strip-text] .token").count() == len(decoder[1].encode("the dog"))


def test_selection_does_not_redraw_a_long_text(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text="the cat sat on the mat. " * 150)
    strip = page.get_by_test_id("strip-text")
    assert strip.locator(".token").count() > 1000
    strip.evaluate("(node) => { node.firstChild.firstChild.dataset.kept = 'yes' }")
    strip.press("Home")
    settle(page)
    assert strip.locator(".selected").get_attribute("data-kept") == "yes"
