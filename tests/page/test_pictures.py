"""Pictures of figures: downloaded as SVG and PNG, dark on white, with a caption, and with the numbers of the page."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from playwright.sync_api import Locator, Page

import glasshouse as gh
from glasshouse.page.views.notes import FIGURES

SVG = "{http://www.w3.org/2000/svg}"
ALLOWED = {"svg", "title", "g", "rect", "text", "path", "line", "circle", "polyline", "polygon", "image", "tspan"}
TEXT = "the cat sat on the mat"
TEXTS = {"decoder": TEXT, "encoder": TEXT, "pair": "one five two"}


def downloaded(page: Page, menu: Locator, kind: str, folder: Path) -> Path:
    """Save a picture by the keys alone."""
    menu.locator("summary").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    if kind == "png":
        page.keyboard.press("Tab")
    with page.expect_download() as coming:
        page.keyboard.press("Enter")
    path = folder / f"picture.{kind}"
    coming.value.save_as(path)
    assert coming.value.suggested_filename.endswith(f".{kind}")
    return path


def read(path: Path) -> tuple[list[ET.Element], list[str]]:
    """Return the elements of a picture, which are shapes alone, and its texts."""
    elements = list(ET.parse(path).getroot().iter())
    assert {one.tag.removeprefix(SVG) for one in elements} <= ALLOWED
    paper = next(one for one in elements if one.tag == f"{SVG}rect")
    assert (paper.get("fill"), paper.get("width")) == ("#ffffff", elements[0].get("width"))
    return elements, [one.text or "" for one in elements if one.tag == f"{SVG}text"]


@pytest.mark.smoke
def test_a_picture_has_the_numbers_and_a_caption(decoder: Trained, visit: Visit, tmp_path: Path) -> None:
    model, tok = decoder
    page = visit(decoder, dark=True, view="notes", notes_card="V1", text=TEXT, layer=1, head=2, token=3)
    menu = page.locator("#card-V1 .matrix").locator("xpath=ancestor::figure").locator(".picture")
    assert "picture of" in (menu.locator("summary").get_attribute("aria-label") or "")
    elements, texts = read(downloaded(page, menu, "svg", tmp_path))
    caption = " ".join(texts)
    for said in ("V1: ", "model · layer 1 · head 2", f"text: {TEXT}"):
        assert said in caption
    words = page.locator("[data-testid=strip-text] .token").all_inner_texts()
    assert set(words) <= set(texts)
    # The cells: from paper to the darkest by weight.
    with torch.no_grad(), gh.record(model, "pattern.1") as seen:
        model(torch.tensor([tok.encode(TEXT)]))
    weights = seen["pattern.1"][0, 2]
    fills = [one.get("fill") or "" for one in elements if one.tag == f"{SVG}rect"]
    fills = [one for one in fills if re.fullmatch(r"rgb\(.*\)|#\w{6}", one)][-int((weights > 0).sum()) :]
    light = [sum(_rgb(one)) for one in fills]
    order = weights[weights > 0].tolist()
    for (a, dark), (b, darker) in zip(
        sorted(zip(order, light, strict=True)), sorted(zip(order, light, strict=True))[1:], strict=False
    ):
        assert a <= b
        assert dark >= darker
    # Ink can be read on paper, though the page is dark.
    inks = [one.get("fill") or "" for one in elements if one.tag == f"{SVG}text"]
    assert max(sum(_rgb(one)) for one in inks) < 3 * 140
    assert page.locator("html").get_attribute("data-theme") == "dark"
    png = downloaded(page, menu, "png", tmp_path).read_bytes()
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    wide, tall = struct.unpack(">II", png[16:24])
    assert (wide, tall) == tuple(2 * float(elements[0].get(name) or 0) for name in ("width", "height"))


def _rgb(colour: str) -> tuple[int, ...]:
    if colour.startswith("#"):
        return tuple(bytes.fromhex(colour[1:7]))
    return tuple(int(one) for one in re.findall(r"\d+", colour)[:3])


def test_bars_in_a_picture_are_as_long_as_their_numbers(decoder: Trained, visit: Visit, tmp_path: Path) -> None:
    page = visit(decoder, view="tokens", text=TEXT, token=2)
    panel = page.locator(".panel").first
    values = [float(one.get_attribute("data-value") or "nan") for one in panel.locator(".bars .figure").all()]
    written = panel.locator(".bars .figure").all_inner_texts()
    elements, texts = read(downloaded(page, panel.locator(".picture"), "svg", tmp_path))
    assert set(written) <= set(texts)
    assert not {"sample one token", "temperature"} & set(texts)  # controls say nothing on paper
    accent = "#17795a"
    widths = [float(one.get("width") or 0) for one in elements if one.get("fill") == accent]
    shown = [one for one in values if one > 0][: len(widths)]
    # A pixel is rounded to hundredths.
    assert [width / widths[0] for width in widths] == pytest.approx([one / shown[0] for one in shown], abs=0.001)
    assert not [one for one in texts if "layer" in one and "·" in one]  # which it does not depend on
    assert any(f"token 2 “{tok_text(page, 2)}”" in one for one in texts)


def tok_text(page: Page, place: int) -> str:
    return page.locator("[data-testid=strip-text] .token").nth(place).inner_text()


@pytest.mark.long
@pytest.mark.parametrize("kind", ONE_KIND)
def test_every_figure_of_every_view_is_saved(
    kind: str, request: pytest.FixtureRequest, visit: Visit, tmp_path: Path
) -> None:
    page = visit(request.getfixturevalue(kind), view="tokens", text=TEXTS[kind], walkthrough_all=1)
    for tab in page.locator("[role=tab]").all():
        tab.click()
        settle(page)
        menus = page.locator("main .picture").filter(visible=True)
        assert menus.count() > 0 or tab.get_attribute("data-view") == "notes"
        for number in range(menus.count()):
            _, texts = read(downloaded(page, menus.nth(number), "svg", tmp_path))
            assert any(one.startswith("model") for one in texts), (tab.inner_text(), number)


@pytest.mark.long
def test_every_piece_of_every_card_is_saved(decoder: Trained, visit: Visit, tmp_path: Path) -> None:
    page = visit(decoder, view="notes", notes_all=1, text=TEXT)
    for number in FIGURES:
        menus = page.locator(f"#card-{number} .figure-box .picture")
        assert menus.count() > 0, number
        for place in range(menus.count()):
            elements, texts = read(downloaded(page, menus.nth(place), "svg", tmp_path))
            assert any(one.startswith(f"{number}: ") for one in texts), number
            assert len(elements) > 5, number
