"""Notes: every card is drawn and fits, its numbers are those of `gh.record`, and links, sliders and keys work."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from playwright.sync_api import Browser, Page, expect
from saved_page import unpack

import glasshouse as gh
from glasshouse import notes
from glasshouse.page.forward_pass import ForwardPass, PagePrompt, Scale
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views.notes import FIGURES
from glasshouse.page.views.notes.figure import STRONGEST
from glasshouse.page.views.notes.view import NoteFigure, note_figure

TEXT = "the cat sat on the mat and the bird"
TEXTS = {"decoder": TEXT, "encoder": "the dog sat on the mat", "pair": "one five two"}
SIZES = [
    (1280, False),
    *(pytest.param(*one, marks=pytest.mark.long) for one in ((1280, True), (400, False), (400, True))),
]
# Text that is wider than its box and hidden there.
CUT = """(card) => [...card.querySelectorAll("*")].filter((one) => one.checkVisibility())
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0)
  .filter((one) => ["hidden", "clip"].includes(getComputedStyle(one).overflowX) && one.textContent.trim())
  .map((one) => one.outerHTML.slice(0, 160))"""


@pytest.fixture(scope="module")
def bundled() -> Trained:
    """A model that comes with the package, so that nothing is trained for these tests."""
    model, tok = gh.load("python-3m")
    assert tok is not None
    return model, tok


def open_card(page: Page, number: str) -> Any:  # noqa: ANN401 - a locator
    """Open a card by its address, and return its figure."""
    page.evaluate("(number) => { location.hash = `#notes/${number}` }", number)
    expect(page.locator(f"#card-{number}")).to_have_class("card open")
    settle(page)
    return page.locator(f"#card-{number}")


def fact(card: Any, name: str) -> float:  # noqa: ANN401
    """Return a named number of a card."""
    return float(card.locator(f'[data-fact="{name}"]').get_attribute("data-value"))


@pytest.mark.parametrize("part", notes.parts(), ids=[part.name for part in notes.parts()])
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_every_card_is_drawn_and_fits(
    width: int, dark: bool, part: notes.Part, bundled: Trained, visit: Visit
) -> None:
    page = visit(bundled, width=width, dark=dark, view="notes", text=TEXT)
    for one in part.statements:
        card = open_card(page, one.number)
        assert card.locator(".figure-box .piece").count() > 0, one.number
        card.locator(".known").evaluate("(known) => { known.open = true }")
        assert card.evaluate(CUT) == [], one.number
        assert one.title in card.inner_text()
        assert one.code.partition(":")[2] in card.inner_text()
        assert all(place in card.inner_text() for place in one.read), one.number
        assert page.evaluate("document.documentElement.scrollWidth") <= width, one.number
        assert not page.locator(".pane > .trouble").is_visible(), one.number


@pytest.mark.parametrize("kind", ONE_KIND[1:])
def test_every_card_is_drawn_on_other_models(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page = visit(request.getfixturevalue(kind), view="notes", notes_all=1, text=TEXTS[kind])
    for number in FIGURES:
        assert page.locator(f"#card-{number} .piece").count() > 0, number


def test_large_type_fits_and_ends_with_the_view(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", text=TEXT)
    size = "parseFloat(getComputedStyle(document.querySelector('.cardname')).fontSize)"
    before = page.evaluate(size)
    page.get_by_test_id("notes-large").click()
    settle(page)
    assert page.evaluate(size) > 1.4 * before
    assert page.evaluate("location.hash").count("notes_large") == 1  # a link opens it so
    for number in ("T3", "A6", "B6", "V1"):
        card = open_card(page, number)
        assert card.evaluate(CUT) == [], number
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, number
    page.evaluate("location.hash = '#attention'")
    settle(page)
    assert "large-type" not in (page.locator("html").get_attribute("class") or "")


@pytest.mark.smoke
def test_numbers_are_those_of_a_recording(bundled: Trained, visit: Visit) -> None:
    model, tok = bundled
    ids = torch.tensor([tok.encode(TEXT)])
    with torch.no_grad(), gh.record(model, "pattern.1", "scores.*", "embed", "attn_out.*", "ffn_out.*") as seen:
        logits = model(ids)
    page = visit(bundled, view="notes", text=TEXT, layer=1, head=2, token=4)

    card = open_card(page, "A5")  # four steps of a walk from token 4
    walk = torch.linalg.matrix_power(seen["pattern.1"][0, 2].double(), 4)[4]
    shown = [float(one.get_attribute("data-value")) for one in card.locator(".bars .figure").all()]
    kept = sorted(walk.topk(min(STRONGEST, len(walk))).indices.tolist())
    assert shown == pytest.approx(walk[kept].tolist(), abs=1e-5)
    assert fact(card, "share at the first token") == pytest.approx(float(walk[0]), abs=1e-5)

    card = open_card(page, "A15")
    first = []
    for layer in range(model.spec.n_layers):
        for head in seen[f"scores.{layer}"][0]:
            first += [row[: i + 1].argmax() == i for i, row in enumerate(head) if i]
    assert fact(card, "over all heads and tokens") == pytest.approx(sum(map(bool, first)) / len(first), abs=1e-6)

    card = open_card(page, "B4")
    parts = [
        seen["embed"],
        *(seen[f"{name}.{layer}"] for layer in range(model.spec.n_layers) for name in ("attn_out", "ffn_out")),
    ]
    shown = [float(one.get_attribute("data-value")) for one in card.locator(".bars .figure").all()]
    assert shown == pytest.approx([float(one[0, 4].norm()) for one in parts], rel=1e-4)

    card = open_card(page, "M4")
    best = logits[0, 4].softmax(-1).max()
    assert float(card.locator("tbody td.number").nth(1).get_attribute("data-value")) == pytest.approx(
        float(best), rel=1e-4
    )


def test_a_matrix_is_read_by_keys(bundled: Trained, visit: Visit) -> None:
    model, tok = bundled
    with torch.no_grad(), gh.record(model, "pattern.0") as seen:
        model(torch.tensor([tok.encode(TEXT)]))
    page = visit(bundled, view="notes", notes_card="V1", text=TEXT, token=3)
    box = page.locator("#card-V1 .matrix")
    box.focus()
    for key in ("ArrowUp", "ArrowUp", "ArrowRight"):  # the first press reads where the cursor is
        box.press(key)
    reading = page.locator("#card-V1 .reading")
    assert float(reading.get_attribute("data-value") or "nan") == pytest.approx(
        float(seen["pattern.0"][0, 0, 2, 1]), abs=1e-5
    )


def test_a_slider_plays_with_a_figure_and_is_part_of_the_link(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", notes_card="P2", text=TEXT)
    card = page.locator("#card-P2")
    assert fact(card, "offset") == 3
    card.get_by_label("offset", exact=True).focus()
    page.keyboard.press("ArrowRight")
    expect(card.locator('[data-fact="offset"]')).to_have_text("4")
    assert "notes_value=4" in page.url
    page.reload()
    settle(page)
    assert fact(page.locator("#card-P2"), "offset") == 4
    assert fact(page.locator("#card-P2"), "largest error of the rotation over 500 positions") < 1e-12


def test_keys_links_and_examples(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", text=TEXT)
    expect(page.locator("#card-T1")).to_have_class("card open")  # the first card opens by itself
    page.locator("[data-card=T1]").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("[data-card=T2]")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#card-T2")).to_have_class("card open")
    expect(page.locator("#card-T1")).to_have_class("card")
    page.locator(".index a", has_text="A14").click()
    expect(page.locator("#card-A14")).to_have_class("card open")
    assert page.get_by_test_id("box-text").input_value() == TEXT  # a link to a card leaves the text
    for example in notes.EXAMPLES:
        page.get_by_role("button", name=example.title or example.text, exact=True).click()
        settle(page)
        expect(page.locator(f"#card-{example.card}")).to_have_class("card open")
        # The ids of the last are beyond this vocabulary, so the text stays.
        said = example.text or notes.EXAMPLES[-2].text
        assert page.get_by_test_id("box-text").input_value() == said
        assert not page.locator(".trouble").filter(visible=True).count()


def test_a_card_begins_with_why_and_folds_how_we_know(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", notes_card="A13", text=TEXT)
    one, card = notes.statement("A13"), page.locator("#card-A13")
    order = [
        card.get_by_text(one.why),
        card.get_by_text(one.says),
        card.locator(".slider"),
        card.locator(".figure-box"),
    ]
    tops = [float((part.first.bounding_box() or {})["y"]) for part in order]
    assert tops == sorted(tops)
    proof = [card.get_by_test_id("measured"), card.get_by_test_id("verdicts"), card.get_by_text("make claims").first]
    assert not any(part.is_visible() for part in proof)
    card.get_by_text("How we know").focus()
    page.keyboard.press("Enter")
    assert all(part.is_visible() for part in proof)


def test_the_index_has_titles(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", text=TEXT)
    links = page.get_by_role("navigation", name="cards").get_by_role("link")
    listed = [one for part in notes.parts() for one in part.statements]
    assert [link.inner_text() for link in links.all()] == [f"{one.title} {one.number}" for one in listed]
    page.set_viewport_size({"width": 400, "height": 900})
    page.reload()  # a phone shows the parts, each of which unfolds
    settle(page)
    assert not links.first.is_visible()
    page.locator(".index summary", has_text=notes.parts()[0].title).click()
    assert links.first.is_visible()


def assert_in_view(page: Page, number: str) -> None:
    """A card begins below the bar of tabs, in the upper half of the window."""
    expect(page.locator(f"#card-{number}")).to_have_class("card open")
    settle(page)
    top = page.locator(f"#card-{number}").evaluate("(card) => card.getBoundingClientRect().top")
    bar = page.locator(".where").evaluate("(bar) => bar.getBoundingClientRect().bottom")
    assert max(bar, 0) <= top + 1 < page.evaluate("innerHeight") / 2, number


@pytest.mark.parametrize("width", [1280, 800, 400])
def test_a_link_brings_its_card_into_view(width: int, bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, width=width, view="attention", text=TEXT)
    page.goto(page.url.partition("#")[0] + "#notes/A3")  # from another view
    assert_in_view(page, "A3")
    page.reload()
    assert_in_view(page, "A3")
    start = page.locator("#card-A3 input[type=range]")
    start.focus()
    start.press("ArrowRight")
    settle(page)
    page.evaluate("location.hash = '#notes/B5'")  # after a slider was moved, while the page is open
    assert_in_view(page, "B5")
    for _ in range(2):  # a link to the card that is open shows it again
        page.evaluate("scrollTo(0, 0)")
        page.evaluate("location.hash = '#notes/B5'")
        assert_in_view(page, "B5")
    assert page.get_by_test_id("box-text").input_value() == TEXT
    page.locator(".questions summary").first.click()
    page.locator(".questions a").first.focus()
    page.keyboard.press("Enter")
    number = notes.parts()[0].questions[0].card
    assert_in_view(page, number)
    expect(page.locator(f"[data-card={number}]")).to_be_focused()


def test_a_slider_does_not_move_the_page(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", notes_all=1, text=TEXT)
    slider = page.locator("#card-P3 input[type=range]")
    slider.focus()
    before = page.evaluate("scrollY")
    slider.press("ArrowRight")
    expect(page.locator("#card-P3 [data-fact='sqrt(D / 2)']")).to_have_text("4.47")
    settle(page)
    assert page.evaluate("scrollY") == before


def test_questions_are_answered(bundled: Trained, visit: Visit) -> None:
    page = visit(bundled, view="notes", text=TEXT)
    asked = [one for part in notes.parts() for one in part.questions]
    assert page.locator(".questions details").count() == len(asked)
    first = page.locator(".questions details").first
    assert not first.locator("p").is_visible()
    first.locator("summary").click()
    expect(first.locator("p")).to_contain_text(asked[0].answer)
    first.locator("a").click()
    expect(page.locator(f"#card-{asked[0].card}")).to_have_class("card open")


@pytest.mark.long
def test_a_lecture_is_one_file(
    bundled: Trained, visit: Visit, browser: Browser, tmp_path: Path, picture: Callable[[Page, str], Path]
) -> None:
    path = tmp_path / "lecture.html"
    gh.look(*bundled, TEXT, view="notes", notes_all=1).save(path)
    one = gh.look(*bundled, TEXT, view="notes", notes_cards="A3").html()
    assert len(one) < path.stat().st_size
    page = offline(browser, path)
    live = visit(bundled, view="notes", notes_all=1, text=TEXT)
    for number, figure in FIGURES.items():
        assert page.locator(f"#card-{number} .piece").count() > 0, number
        assert drawn(page, number) == drawn(live, number), number
        if figure.control is None:
            continue
        before = drawn(page, number)
        for end in {figure.control.low, figure.control.high} - {figure.control.start}:
            for where in (page, live):
                move(where, number, end)
            assert drawn(page, number) == drawn(live, number) != before, (number, end)
    assert page.locator(".card input:disabled").count() == 0
    picture(page, "lecture")
    page.context.close()


@pytest.mark.smoke
def test_the_sliders_of_a_saved_lecture_work(bundled: Trained, browser: Browser, tmp_path: Path) -> None:
    look = gh.look(*bundled, TEXT, view="notes", notes_cards="P2,A12,T4")
    held = unpack(look.html())["responses"]
    for number in ("P2", "A12", "T4"):
        control = FIGURES[number].control
        assert control is not None
        assert sum(f'"number":"{number}"' in key for key in held) == len(control.positions())
    assert {json.loads(key.partition(" ")[2])["number"] for key in held if key.startswith("note_figure")} == {
        "P2",
        "A12",
        "T4",
    }
    look.save(tmp_path / "lecture.html")
    page = offline(browser, tmp_path / "lecture.html")
    cards = page.locator(".card")
    assert [one.get_attribute("id") for one in cards.all()] == ["card-P2", "card-A12", "card-T4"]
    move(page, "P2", 7)
    assert fact(page.locator("#card-P2"), "offset") == 7
    before = drawn(page, "T4")
    move(page, "T4", 0)
    assert drawn(page, "T4") != before
    assert fact(page.locator("#card-P2"), "offset") == 7  # the other slider stays
    move(page, "P2", FIGURES["P2"].control.start)
    assert fact(page.locator("#card-P2"), "offset") == 3
    for label in ("token", "layer", "head"):
        assert page.get_by_label(label, exact=True).is_disabled()
    page.context.close()


@pytest.mark.long
def test_cards_that_a_saved_page_lacks_are_disabled(bundled: Trained, browser: Browser, tmp_path: Path) -> None:
    gh.look(*bundled, TEXT, view="notes", notes_card="P2").save(tmp_path / "page.html")
    page = offline(browser, tmp_path / "page.html")
    move(page, "P2", 7)
    assert fact(page.locator("#card-P2"), "offset") == 7
    head = page.locator("[data-card=A3]")
    assert head.is_disabled()
    assert "needs the running page" in (head.get_attribute("title") or "")
    page.context.close()


CLIPPED = """() => [...document.querySelectorAll(".notes .piece")].filter((one) => one.checkVisibility())
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 || one.scrollWidth > one.clientWidth + 1)
  .map((one) => one.textContent.slice(0, 80))"""


@pytest.mark.long
def test_cards_print_as_a_hand_out(bundled: Trained, browser: Browser, tmp_path: Path) -> None:
    cards = ["T1", "A1", "A3", "B5", "M4"]
    gh.look(*bundled, TEXT, view="notes", notes_cards=",".join(cards)).save(tmp_path / "lecture.html")
    context = browser.new_context(offline=True, viewport={"width": 718, "height": 1000}, color_scheme="dark")
    page = context.new_page()
    page.goto((tmp_path / "lecture.html").as_uri())
    settle(page)
    page.emulate_media(media="print")
    for left_out in (".known", ".card input", ".try", ".where", ".reading", "textarea"):
        assert not page.locator(left_out).filter(visible=True).count(), left_out
    expect(page.locator("#card-A3 .slider output")).to_be_visible()  # where the slider stood
    assert page.locator("#card-A3 .bars").count() > 0
    assert page.evaluate(CLIPPED) == []
    pieces = page.locator(".piece")
    assert set(pieces.evaluate_all("(all) => all.map((one) => getComputedStyle(one).breakInside)")) == {"avoid"}
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"  # ink on paper, whatever the screen has
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    pages = len(re.findall(rb"/Type\s*/Page\b", page.pdf(format="A4")))
    assert pages < len(cards)  # more than one on a page
    context.close()


def offline(browser: Browser, path: Path) -> Page:
    page = browser.new_context(
        offline=True, reduced_motion="reduce", viewport={"width": 1280, "height": 900}
    ).new_page()
    page.goto(path.as_uri())
    settle(page)
    return page


def move(page: Page, number: str, value: float) -> None:
    """Move the slider of a card, and wait until its figure is drawn."""
    page.locator(f"#card-{number} input[type=range]").fill(f"{value:g}")
    page.wait_for_timeout(150)  # it rests before it asks
    settle(page)


def drawn(page: Page, number: str) -> list[str]:
    """Return what a card shows: text, numbers and pixels."""
    boxes = page.locator(f"#card-{number} .figure-box")
    pixels = boxes.locator("canvas").evaluate_all("(all) => all.map((one) => one.toDataURL())")
    return [*boxes.all_inner_texts(), *pixels]


@pytest.mark.long
def test_every_figure_has_numbers_alone(bundled: Trained) -> None:
    """As JSON, which has no NaN; in a browser `make page` draws them."""
    traces = TraceCache(ModelLoader.from_model(*bundled))
    for number in FIGURES:
        params = NoteFigure(number, ForwardPass(PagePrompt(TEXT)), layer=1, head=1, position=4)
        assert json.dumps(note_figure(traces, params)["pieces"], allow_nan=False) != "[]", number


@pytest.mark.parametrize("number", ["A9", "V4"])
def test_a_second_pass_has_the_edits_of_the_first(number: str) -> None:
    """So that what an edit changes is not taken for what the figure changes."""
    traces = TraceCache(ModelLoader("python-3m", device="cpu"))
    edited = ForwardPass(PagePrompt(TEXT), edits=(Scale("z.0[head=0]"),))
    (found,) = (
        piece["facts"]
        for piece in note_figure(traces, NoteFigure(number, edited, layer=1, position=3))["pieces"]
        if piece["kind"] == "facts"
    )
    unchanged = {"A9": "largest change before it", "V4": "before that layer"}[number]
    assert dict(found)[unchanged] == 0


def test_terms_of_a_card_open_the_glossary(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="notes", text="the cat sat", notes_card="M4")
    term = page.locator("#card-M4 .says .term").first
    name = (term.get_attribute("title") or "").removeprefix("glossary: ")
    term.press("Enter")  # by the keyboard
    dialog = page.get_by_test_id("glossary")
    expect(dialog).to_be_visible()
    chosen = dialog.locator(".chosen")
    expect(chosen).to_be_in_viewport()
    entry = next(one for one in gh.notes.glossary() if one.term == name)
    expect(chosen.locator("dd")).to_have_text(entry.text.replace("`", ""))
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    page.get_by_role("button", name=re.compile("glossary")).click()  # and as a whole, from every tab
    expect(dialog.locator("[data-term]")).to_have_count(len(gh.notes.glossary()))


def test_values_of_a_curve_are_read_with_a_cursor(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="notes", text="the cat sat", notes_card="B6")
    curves = notes.measurements()["B6"].curves
    chart = page.locator("#card-B6 figure.chart").first
    chart.get_by_role("slider").press("Home")
    shown = chart.locator(".chart-value").evaluate_all(
        "all => all.map(one => [+one.dataset.step, +one.dataset.value])"
    )
    firsts = {(float(points[0][0]), float(points[0][1])) for points in curves.values()}
    assert {(step, value) for step, value in shown} <= firsts
    chart.get_by_role("slider").press("End")
    assert chart.locator(".chart-value").first.get_attribute("data-step") != str(shown[0][0])


@pytest.mark.parametrize("card", ["A9", "T4"])
def test_a_slider_ends_where_its_text_ends(card: str, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="notes", text="the cat sat", notes_card=card)
    slider = page.locator(f"#card-{card} input[type=range]")
    slider.press("End")
    settle(page)
    if card == "A9":
        assert slider.input_value() == str(len(decoder[1].encode("the cat sat")) - 1)
    merged = page.locator(f"#card-{card} figcaption").first.inner_text()
    assert card == "A9" or f"after {slider.input_value()} merges" in merged
