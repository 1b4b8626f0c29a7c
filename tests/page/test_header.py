"""What stands above a view: it leaves a laptop's screen to the view, and its tokens fold into one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Page, expect

import glasshouse as gh

HIGHEST = 230  # pixels above a view at 1366 x 768
LONG = "the cat sat on the mat and the bird sang. " * 12
TEXTS = {"decoder": LONG, "encoder": LONG[:83], "pair": "one five two " * 5, "run_folder": LONG}
STRIPS = {"decoder": ["text"], "encoder": ["text"], "pair": ["source", "target"], "run_folder": ["text"]}
# Whether the selected token of a strip is within it, and how many lines its tokens take.
SEEN = """(strip) => {
  const inner = document.getElementById(strip.getAttribute("aria-activedescendant")).getBoundingClientRect();
  const outer = strip.getBoundingClientRect();
  return inner.left >= outer.left && inner.right <= outer.right
    && inner.top >= outer.top && inner.bottom <= outer.bottom;
}"""
LINES = "(strip) => new Set([...strip.querySelectorAll('.token')].map((one) => one.offsetTop)).size"
PARTS = (
    ".top > img, .top h1, .facts, .top > button, .checkpoint-picker > *, .side > .name, .side textarea, "
    ".actions > *, .fold, .strip, .tabs, .stepper, main"
)
FRAMES = "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
OVERLAPS = """(parts) => {
  const boxes = [...document.querySelectorAll(parts)].filter((one) => one.checkVisibility())
    .map((one) => [one.className || one.tagName, one.getBoundingClientRect()]);
  const over = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return boxes.flatMap(([name, a], i) =>
    boxes.slice(i + 1).filter(([, b]) => over(a, b)).map(([other]) => [name, other]));
}"""


def top_of(page: Page) -> float:
    """Return where the first view begins."""
    top: float = page.evaluate(
        "Math.min(...[...document.querySelectorAll('.view')].map((one) => one.getBoundingClientRect().top))"
    )
    return top


@pytest.mark.parametrize("kind", first_of(["pair", *(kind for kind in TEXTS if kind != "pair")]))
def test_every_view_begins_high_on_a_laptop(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    what: Trained | Path = request.getfixturevalue(kind)
    page = visit(what, width=1366, height=768, text=TEXTS[kind])
    for tab in page.get_by_role("tab").all():
        tab.click()
        settle(page)
        assert top_of(page) < HIGHEST, tab.inner_text()
    assert page.evaluate(OVERLAPS, PARTS) == []
    for side in STRIPS[kind]:
        assert page.get_by_test_id(f"strip-{side}").evaluate(LINES) == 1


def test_two_checkpoints_begin_high_on_a_laptop(run_folder: Path, visit: Visit) -> None:
    page = visit(
        run_folder, width=1366, height=768, text=LONG, view="residual", checkpoint="step 0", compare_with="final"
    )
    assert top_of(page) < HIGHEST
    expect(page.get_by_test_id("checkpoints")).to_contain_text("step 0")
    expect(page.get_by_test_id("compare-with")).to_have_value("final")


@pytest.mark.parametrize("kind", ["pair", "run_folder"])
def test_a_view_begins_high_in_a_narrower_window(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page = visit(request.getfixturevalue(kind), width=1180, height=800, text=TEXTS[kind])
    assert top_of(page) < HIGHEST


@pytest.mark.parametrize("width", first_of([400, 768, 1280]))
@pytest.mark.parametrize("kind", ["pair", "run_folder"])
def test_nothing_overlaps(kind: str, width: int, request: pytest.FixtureRequest, visit: Visit) -> None:
    page = visit(request.getfixturevalue(kind), width=width, height=800, text=TEXTS[kind])
    for unfold in (False, True):
        if unfold:
            page.get_by_test_id(f"fold-{STRIPS[kind][0]}").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate(OVERLAPS, PARTS) == []


@pytest.mark.parametrize("key", first_of(["Enter", "", " "]))
def test_tokens_unfold_and_fold_again(key: str, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, width=1366, height=768, text=LONG, token=70)
    strip, fold = page.get_by_test_id("strip-text"), page.get_by_test_id("fold-text")
    expect(fold).to_have_text(f"{len(decoder[1].encode(LONG))} tokens")

    def turn() -> None:
        if not key:
            fold.click()
            return
        page.get_by_role("textbox", name="Text").focus()
        page.keyboard.press("Tab")
        expect(fold).to_be_focused()
        page.keyboard.press(key)

    expect(fold).to_have_attribute("aria-expanded", "false")
    assert strip.evaluate(LINES) == 1
    assert strip.evaluate(SEEN)
    turn()
    expect(fold).to_have_attribute("aria-expanded", "true")
    assert strip.evaluate(LINES) > 1
    assert strip.evaluate(SEEN)
    turn()
    expect(fold).to_have_attribute("aria-expanded", "false")
    assert strip.evaluate(LINES) == 1
    assert strip.evaluate(SEEN)
    assert top_of(page) < HIGHEST


@pytest.mark.parametrize("unfolded", first_of([False, True]))
def test_the_selected_token_stays_in_view(unfolded: bool, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, width=400, height=800, text=LONG)
    strip = page.get_by_test_id("strip-text")
    if unfolded:
        page.get_by_test_id("fold-text").click()
    for press in ("Home", "End", *["ArrowLeft"] * 15):
        strip.press(press)
        settle(page)
        assert strip.evaluate(SEEN), press
    page.get_by_role("spinbutton", name="token").fill("60")
    page.get_by_role("spinbutton", name="token").press("Enter")
    expect(strip.locator(".selected")).to_have_attribute("data-place", "60")
    assert strip.evaluate(SEEN)
    page.set_viewport_size({"width": 700, "height": 800})
    page.evaluate(FRAMES)
    assert strip.evaluate(SEEN)


def test_a_saved_page_folds_its_tokens(decoder: Trained, visit: Visit, tmp_path: Path) -> None:
    page = visit(decoder, width=1366, height=768, text=LONG, token=70)
    with page.expect_download() as download:
        page.get_by_role("button", name="Save").click()
        page.get_by_role("button", name="Snapshot").click()
    download.value.save_as(tmp_path / "page.html")
    saved = page.context.new_page()
    saved.goto((tmp_path / "page.html").as_uri())
    settle(saved)
    strip = saved.get_by_test_id("strip-text")
    assert top_of(saved) < HIGHEST
    assert strip.evaluate(LINES) == 1
    assert strip.evaluate(SEEN)
    saved.get_by_test_id("fold-text").click()
    assert strip.evaluate(LINES) > 1
    assert strip.evaluate(SEEN)


def test_the_open_tab_is_in_view(run_folder: Path, visit: Visit) -> None:
    page = visit(run_folder, width=400, text=LONG, view="run")
    for width in (400, 1280, 400):
        page.set_viewport_size({"width": width, "height": 800})
        page.evaluate(FRAMES)
        tab = page.locator("#tab-run").bounding_box()
        assert tab is not None
        assert tab["x"] >= 0
        assert tab["x"] + tab["width"] <= width


def test_the_header_says_how_far_a_checkpoint_is_trained(run_folder: Path, visit: Visit) -> None:
    steps = gh.Run.load(run_folder).train.steps
    page = visit(run_folder, checkpoint="step 0")
    expect(page.get_by_test_id("stage")).to_have_text(f"step 0 of {steps}, untrained")
    later = next(one for one in gh.training.list_checkpoints(run_folder) if one.step)
    early = ", early in training" if later.step < 0.1 * (steps or 0) else ""
    page = visit(run_folder, checkpoint=later.name)
    expect(page.get_by_test_id("stage")).to_have_text(f"step {later.step} of {steps}{early}")
    page = visit(run_folder)
    expect(page.get_by_test_id("stage")).to_have_text("")  # the final model
