"""HTML displays: escaped, self-contained, and equal to the values."""

from __future__ import annotations

import base64
import re
import struct
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from inspected_models import IDS
from torch import Tensor

import glasshouse as gh
from glasshouse.inspection import html_display
from glasshouse.inspection.html_display import bars, heatmap, labels, shown

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
    page = heatmap(torch.ones(1, len(HOSTILE)), rows=["<b>"], columns=HOSTILE, caption="<i>", words=[HOSTILE])
    page += bars(torch.ones(len(HOSTILE)), names=HOSTILE, caption="<i>")
    parts = Parts(page)
    assert set(parts.tags) <= {"table", "caption", "tr", "th", "td", "i"}
    assert parts.tags.count("i") == len(HOSTILE)  # the bars themselves
    assert parts.links == []
    assert "\u202e" not in page
    assert "\0" not in page
    assert max(map(len, parts.cells)) <= 81 + len("<i>")  # the second caption follows the last cell
    assert any("<img src=x" in cell for cell in parts.cells)


def test_numbers_and_shades_match_the_values() -> None:
    page = heatmap(torch.tensor([[0.5, -1.0], [0.0, torch.nan]]), rows=["a", "b"], columns=["c", "d"])
    assert Parts(page).cells == ["", "c", "d", "a", "0.50", "-1.00", "b", "0.00", ""]
    shades = [float(share) for share in re.findall(r"rgba\([\d,]+,([\d.]+)\)", page)]
    assert shades == [0.375, 0.75, 0.0, 0.0]


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
    page = heatmap(values, rows=[""] * 100, columns=[""] * 120, caption="a map")
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


RESULTS = ["lens", "attribute", "head_scores", "compare", "sweep", "ablation"]


@pytest.mark.parametrize("tool", RESULTS)
def test_every_result_is_a_self_contained_page(tool: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, other = (gh.build(gh.preset("tiny-decoder", vocab_size=300, init="normal")).eval() for _ in range(2))
    result = {
        "lens": lambda: gh.lens(model, IDS),
        "attribute": lambda: gh.attribute(model, IDS, token=5),
        "head_scores": lambda: gh.head_scores(model, IDS),
        "compare": lambda: gh.compare(model, other, IDS),
        "sweep": lambda: gh.inspection.activation_patching(
            model, IDS[:1], IDS[1:], "resid_post", metric=lambda out: out[0, -1, 3] - out[0, -1, 4]
        ),
        "ablation": lambda: gh.inspection.ablation_effects(model, IDS),
    }[tool]()
    result.save_html(tmp_path / "page.html")
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


def test_a_printed_result_has_shapes_and_single_numbers() -> None:
    zeros = torch.zeros(3, 2)
    result = gh.inspection.Ablation(zeros, torch.tensor(2.5), "head")
    assert repr(result) == "Ablation(metric_increase [3, 2], baseline 2.5, component 'head')"
