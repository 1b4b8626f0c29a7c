"""HTML displays: escaped, self-contained, and equal to the values."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from inspected_models import IDS
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection.display import html as html_display
from glasshouse.inspection.display import svg
from glasshouse.inspection.display.html import Bars, Drawing, Heatmap, HtmlDisplay, labels, shown

HOSTILE = ["<img src=x onerror=alert(1)>", '"><script>alert(1)</script>', "\u202eevil", "a\0b", "&amp;", "x" * 10_000]


class Parts(HTMLParser):
    """Collects the tags, their links, and the text of cells."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href") or name.startswith("on")]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


def test_tokens_are_escaped() -> None:
    page = Heatmap(torch.ones(1, len(HOSTILE)), ["<b>"], HOSTILE, "<i>", [HOSTILE]).html()
    page += Bars(torch.ones(len(HOSTILE)), HOSTILE, "<i>").html()
    parts = Parts(page)
    assert set(parts.tags) <= {"table", "caption", "tr", "th", "td", "i"}
    assert parts.tags.count("i") == len(HOSTILE)  # the bars themselves
    assert parts.links == []
    assert "\u202e" not in page
    assert "\0" not in page
    assert max(map(len, parts.cells)) <= 81 + len("<i>")  # the second caption follows the last cell
    assert any("<img src=x" in cell for cell in parts.cells)


def test_numbers_and_shades_match_the_values() -> None:
    page = Heatmap(torch.tensor([[0.5, -1.0], [0.0, torch.nan]]), ["a", "b"], ["c", "d"]).html()
    assert Parts(page).cells == ["", "c", "d", "a", "0.50", "-1.00", "b", "0.00", ""]
    shades = [float(share) for share in re.findall(r"rgba\([\d,]+,([\d.]+)\)", page)]
    assert shades == [0.375, 0.75, 0.0, 0.0]


def bar_places(values: list[float]) -> list[tuple[float, float, str]]:
    """Return start and width of each bar in em, and the side of the line at 0."""
    page = Bars(torch.tensor(values), [""] * len(values)).html()
    found = re.findall(r"margin-left:([\d.]+)em;width:([\d.]+)em;border-(\w+)", page)
    return [(float(start), float(width), side) for start, width, side in found]


def test_negative_bars_go_left_from_zero() -> None:
    # From -2 to 3 on 15 em: 3 em each, 0 at 6.
    assert bar_places([3.0, -2.0, 0.0]) == [(6, 9, "left"), (0, 6, "right"), (6, 0, "left")]
    assert bar_places([1.0, 0.5]) == [(0, 15, "left"), (0, 7.5, "left")]
    assert bar_places([-1.0, -0.5]) == [(0, 15, "right"), (7.5, 7.5, "right")]
    assert bar_places([torch.nan, 0.0]) == [(0, 0, "left")] * 2


def pixels(page: str) -> Tensor:
    """Decode the PNG: lines of bytes, each after a filter byte of 0."""
    image = base64.b64decode(re.search(r"base64,([^\"]+)", page)[1])
    assert image[:8] == b"\x89PNG\r\n\x1a\n"
    chunks, rest = {}, image[8:]
    while rest:
        (length,) = struct.unpack(">I", rest[:4])
        kind, data, check = rest[4:8], rest[8 : 8 + length], rest[8 + length : 12 + length]
        assert struct.unpack(">I", check) == (zlib.crc32(kind + data),)
        chunks[kind], rest = data, rest[12 + length :]
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = torch.frombuffer(bytearray(zlib.decompress(chunks[b"IDAT"])), dtype=torch.uint8).view(height, -1)
    assert not lines[:, 0].any()
    return lines[:, 1:].view(height, width, 3)


def test_a_large_heatmap_is_an_image() -> None:
    values = torch.rand(100, 120)
    values[3, 5] = -2.0
    page = Heatmap(values, [""] * 100, [""] * 120, "a map").html()
    assert "a map, 100 by 120: from -2 to" in page
    drawn = pixels(page).long()
    assert drawn.shape == (100, 120, 3)
    assert drawn[3, 5].tolist() == list(html_display.NEGATIVE)  # the largest has the full colour
    # Elsewhere white fades into the colour by the share of the largest.
    expected = 255 + (torch.tensor(html_display.POSITIVE) - 255) * values.clamp(min=0)[..., None] / 2
    kept = torch.ones(100, 120, dtype=torch.bool)
    kept[3, 5] = False
    assert (drawn - expected)[kept].abs().max() <= 1  # bytes


def test_labels_are_the_token_or_its_id() -> None:
    tok = gh.Tokenizer.train(texts=["to be"], vocab_size=263)
    be = tok.encode("b")[0]
    assert labels(torch.tensor([be, 5000]), tok) == ["b", "5000"]
    assert labels(torch.tensor([be]), None) == [str(be)]
    assert labels(torch.tensor(tok.encode(b"\xff")), tok) == ["\\xff"]
    assert labels(torch.tensor(tok.encode(" ")), tok) == ["␣"]
    assert labels(torch.tensor(tok.encode("\n")), tok) == ["⏎"]  # as on the page
    assert shown("a b\t") == "a b\\x09"


def test_a_recording_shows_its_attention_maps() -> None:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=300)).eval()
    with gh.record(model, "pattern.0", "pattern.1[batch=1, head=2]", "z.0", "scores.1") as seen:
        model(IDS)
    drawn = seen._repr_html_()
    assert [pixels(f"base64,{one}").shape for one in re.findall(r"base64,([^\"]+)", drawn)] == [(6, 6, 3)] * 5
    assert "pattern.0, head 3, 6 by 6" in drawn
    assert "batch 2, head 4, position 6, width 16" in drawn


def names_of_maps(page: str) -> list[tuple[list[str], list[str]]]:
    """Return the names of the columns and of the rows of each map."""
    maps = re.findall(r'<figure class="map">.*?</figure>', page)
    return [
        (re.findall(r'<th class="up">(.*?)</th>', one), re.findall(r"<tr><th>(.+?)</th>", one.partition("</tr>")[2]))
        for one in maps
    ]


def test_maps_have_the_tokens_of_their_row() -> None:
    tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263)).eval()
    with gh.record(model, "pattern.0[head=1]", "pattern.1[batch=1, head=2]", tok=tok) as seen:
        gh.inspection.run(model, ["to be", "or to"], tok=tok)
    first, second = (labels(torch.tensor(tok.encode(text)), tok) for text in ("to be", "or to"))
    assert len(first) == len(second)
    assert names_of_maps(seen._repr_html_()) == [(first, first), (second, second)]
    with gh.record(model, "pattern.0[head=1]", "pattern.1[head=1, query=0:2]") as seen:  # ids; a slice has no names
        model(IDS[:1] % 263)
    numbers = [str(number) for number in (IDS[0] % 263).tolist()]
    assert names_of_maps(seen._repr_html_()) == [(numbers, numbers)]
    with gh.record(model, "pattern.0[head=1]") as seen:  # too many to read
        model(torch.zeros(1, html_display.MAX_COLUMNS + 1, dtype=torch.long))
    assert names_of_maps(seen._repr_html_()) == []


def test_maps_of_cross_attention_have_the_tokens_of_the_source() -> None:
    model = gh.build(gh.preset("tiny-seq2seq", vocab_size=300)).eval()
    with gh.record(
        model, "encoder.pattern.0[head=0]", "decoder.pattern.0[head=0]", "decoder.cross_pattern.0[head=0]"
    ) as seen:
        model(torch.tensor([[7, 8, 9]]), torch.tensor([[5, 6]]))
    source, target = ["7", "8", "9"], ["5", "6"]
    assert names_of_maps(seen._repr_html_()) == [(source, source), (target, target), (source, target)]


def test_a_map_in_a_picture_has_its_tokens(tmp_path: Path) -> None:
    model = gh.build(gh.preset("tiny-decoder", vocab_size=300)).eval()
    with gh.record(model, "pattern.0[head=1]") as seen:
        model(torch.tensor([[7, 8, 9]]))
    elements, texts = pictured(seen, tmp_path / "x.svg")
    assert texts[1:7] == ["7", "8", "9"] * 2
    (image,) = [one for one in elements if one.tag == f"{SVG}image"]
    top, pixel = float(image.get("y", "nan")), float(image.get("height", "nan")) / 3
    rows = [float(one.get("y", "nan")) for one in elements if one.tag == f"{SVG}text"][4:7]
    for number, y in enumerate(rows):
        assert top + number * pixel < y < top + (number + 1) * pixel


RESULTS = ["lens", "attribute", "head_scores", "compare", "sweep", "ablation", "path", "record"]


def result_of(tool: str) -> HtmlDisplay:
    torch.manual_seed(0)
    model, other = (gh.build(gh.preset("tiny-decoder", vocab_size=300, init="normal")).eval() for _ in range(2))
    if tool == "record":
        with gh.record(model, "pattern.0[head=1]", "z.0") as seen:
            model(IDS)
        return seen
    made: dict[str, Callable[[], HtmlDisplay]] = {
        "lens": lambda: gh.lens(model, IDS),
        "attribute": lambda: gh.attribute(model, IDS, token=5),
        "head_scores": lambda: gh.head_scores(model, IDS),
        "compare": lambda: gh.compare(model, other, IDS),
        "sweep": lambda: gh.inspection.activation_patching(
            model, IDS[:1], IDS[1:], "resid_post", metric=lambda out: out[0, -1, 3] - out[0, -1, 4]
        ),
        "ablation": lambda: gh.inspection.ablation_effects(model, IDS),
        "path": lambda: gh.inspection.path_patching(
            model, IDS[:1], IDS[1:], "z.0[head=1]", "q.1[head=2]", metric=lambda out: out[0, -1, 3] - out[0, -1, 4]
        ),
    }
    return made[tool]()


@pytest.mark.parametrize("tool", RESULTS[:6])
def test_every_result_is_a_self_contained_page(tool: str, tmp_path: Path) -> None:
    result: Any = result_of(tool)
    result.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert result._repr_html_() in page
    parts = Parts(page)
    assert not {"script", "link", "iframe", "object", "form"} & set(parts.tags)
    assert all(link.startswith("data:image/png") for link in parts.links)
    assert "http" not in page
    assert len(page) < 100_000
    for name, axes in result.axes.items():
        value = getattr(result, name)
        if isinstance(value, Tensor):
            assert value.dim() == len(axes), name
            assert not axes or f"{name} {list(value.shape)}" in repr(result)
    assert "\n" not in repr(result)


SVG = "{http://www.w3.org/2000/svg}"


def pictured(result: HtmlDisplay, path: Path, caption: str = "") -> tuple[list[ET.Element], list[str]]:
    """Save a picture; return its elements and its texts."""
    result.save(path, caption=caption)
    elements = list(ET.parse(path).getroot().iter())
    return elements, [one.text or "" for one in elements if one.tag == f"{SVG}text"]


@pytest.mark.parametrize("tool", RESULTS)
def test_every_result_is_saved_as_a_picture(tool: str, tmp_path: Path) -> None:
    result = result_of(tool)
    elements, texts = pictured(result, tmp_path / "x.svg", "tiny <model> & more")
    assert {one.tag.removeprefix(SVG) for one in elements} <= {"svg", "title", "g", "rect", "text", "image"}
    assert "tiny <model> & more" in texts
    paper = next(one for one in elements if one.tag == f"{SVG}rect")
    assert paper.get("fill") == "#ffffff"  # whatever the theme
    for drawing in result._drawings():
        for named in ("rows", "columns", "names"):
            assert {name for name in getattr(drawing, named, ()) if name} <= set(texts)
        assert not drawing.caption or drawing.caption[:100] in "".join(texts)  # longer ones are wrapped
    assert max(float(one.get("x", 0)) for one in elements) < float(elements[0].get("width", 0))
    assert max(float(one.get("y", 0)) for one in elements) < float(elements[0].get("height", 0))


def test_a_picture_has_the_numbers_of_the_result(tmp_path: Path) -> None:
    values = torch.tensor([[0.5, -1.0], [0.25, torch.nan]])
    (_, *cells), texts = _rects(Heatmap(values, ["a", "b"], ["c", "d"]), tmp_path)
    assert [one for one in texts if one] == ["c", "d", "a", "0.50", "-1.00", "b", "0.25"]
    # White fades into the colour by three quarters of the share of the largest.
    for cell, value, ink in zip(cells, (0.5, -1.0, 0.25, 0.0), "pnpp", strict=True):
        colour = html_display.POSITIVE if ink == "p" else html_display.NEGATIVE
        expected = [255 + (one - 255) * 0.75 * abs(value) for one in colour]
        fill = bytes.fromhex((cell.get("fill") or "")[1:])
        assert all(abs(a - b) <= 0.5 for a, b in zip(fill, expected, strict=True))
    (_, *bars, zero), texts = _rects(Bars(torch.tensor([3.0, -1.5, 0.0]), ["up", "down", "none"]), tmp_path)
    starts, widths = ([float(one.get(name, "nan")) for one in bars] for name in ("x", "width"))
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.5, 0], abs=1e-4)  # six digits are written
    line = float(zero.get("x", "nan")) + 0.5  # its middle, from which positive bars go right and negative ones left
    assert [starts[0], starts[1] + widths[1], starts[2]] == pytest.approx([line] * 3, abs=1e-2)
    assert texts == ["up", "3.00", "down", "-1.50", "none", "0.00"]


def _rects(drawing: Drawing, folder: Path) -> tuple[list[ET.Element], list[str]]:
    class One(HtmlDisplay):
        def _drawings(self) -> list[Drawing]:
            return [drawing]

    elements, texts = pictured(One(), folder / "x.svg")
    return [one for one in elements if one.tag == f"{SVG}rect"], texts


def test_a_large_map_in_a_picture_is_an_image_with_labels(tmp_path: Path) -> None:
    values = torch.rand(100, 120)
    drawing = Heatmap(values, [""] * 100, [""] * 120, "a map")
    page = svg.document([drawing.svg()], [])
    assert (pixels(page) == pixels(drawing.html())).all()
    texts = [one.text for one in ET.fromstring(page).iter(f"{SVG}text")]
    assert texts[1:] == ["0", "119", "0", "99"]


def test_hostile_names_are_valid_in_a_picture() -> None:
    names = [*HOSTILE, "\ud800", "\uffff", "\x1b[0m"]
    page = svg.document([Bars(torch.ones(len(names)), names, "<i>").svg()], names)
    tags = {one.tag.removeprefix(SVG) for one in ET.fromstring(page).iter()}
    assert tags == {"svg", "title", "rect", "g", "text"}


def test_a_picture_names_the_text(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=263)).eval()
    _, texts = pictured(gh.lens(model, "to be", tok=tok), tmp_path / "x.svg")
    assert "text 0: to␣be" in texts


@pytest.mark.parametrize("name", ["x.png", "x.pdf", "x"])
def test_other_formats_are_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(gh.InputError, match=rf"Ablation cannot be saved as '{name}'; name a file .svg.* or .html.$"):
        result_of("ablation").save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_printed_result_has_shapes_and_single_numbers() -> None:
    zeros = torch.zeros(3, 2)
    result = gh.inspection.Ablation(zeros, torch.tensor(2.5), "head")
    assert repr(result) == "Ablation(metric_increase [3, 2], baseline 2.5, component 'head')"
