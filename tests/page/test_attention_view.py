"""The attention view in a browser: all heads, one head as a map and as lines, and one query with one key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from conftest import Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Browser, Locator, Page, Request, expect
from torch import Tensor

import glasshouse as gh
from glasshouse.page.forward_pass import PagePrompt
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, with_defaults
from glasshouse.page.views import attention

TEXT = "the cat sat on the mat and the bird flew to the tree"
SOURCE, TARGET = "one five two", "eins fünf zwei"
LAYER, HEAD = 1, 2
DASH = "\N{EN DASH}"
CLOSE = {"rel": 1e-5, "abs": 1e-6}  # float32, a few operations apart

Picture = Callable[[Page, str], Path]
# Every kind of attention: the model that has it, and the site.
ATTENTIONS = [
    ("decoder", "pattern"),
    ("encoder", "pattern"),
    ("pair", "decoder.cross_pattern"),
    ("pair", "decoder.pattern"),
    ("pair", "encoder.pattern"),
]
each_attention = pytest.mark.parametrize(("kind", "site"), first_of(ATTENTIONS))
two_attentions = pytest.mark.parametrize(
    ("kind", "site"),
    first_of([ATTENTIONS[0], ATTENTIONS[2], ATTENTIONS[1], *ATTENTIONS[3:]], 2),
)


class Seen:
    """What a pass of its own shows of one head."""

    def __init__(self, trained: Trained, site: str, layer: int = LAYER, head: int = HEAD) -> None:
        self.model, self.tok = trained
        self.inputs = ModelLoader.from_model(*trained).get("").inputs(PagePrompt(**texts(trained)))
        names = {
            name: f"{site.replace('pattern', name)}.{layer}" for name in ("pattern", "scores", "z", "q", "k", "v")
        }
        with gh.record(self.model, *names.values()) as seen, torch.no_grad():
            self.model(*self.inputs)
        found = {name: seen[full][0] for name, full in names.items()}
        self.weights: Tensor = found["pattern"][head]
        self.scores: Tensor = found["scores"][head]
        self.q, self.z = found["q"][head], found["z"][head]
        shared = head * self.model.spec.n_kv_heads // self.model.spec.n_heads
        self.k, self.v = found["k"][shared], found["v"][shared]


def texts(trained: Trained) -> dict[str, str]:
    return {"text": SOURCE, "target": TARGET} if trained[0].spec.kind == "seq2seq" else {"text": TEXT}


def state_of(page: Page) -> dict[str, Any]:
    """Return the state that stands in the address."""
    state: dict[str, Any] = {}
    for name, (value,) in parse_qs(urlsplit(page.url).fragment).items():
        try:
            state[name] = json.loads(value)
        except ValueError:
            state[name] = value
    return state


def opened(request: pytest.FixtureRequest, visit: Visit, kind: str, site: str, **more: Any) -> tuple[Page, Seen]:  # noqa: ANN401
    trained: Trained = request.getfixturevalue(kind)
    given = {"layer": LAYER, "head": HEAD, "attention": site, **more}
    page = visit(trained, view="attention", **texts(trained), **given)
    return page, Seen(trained, site, given["layer"], given["head"])


def value(found: Locator) -> float:
    """Return the number that an element shows, in full."""
    return float(found.get_attribute("data-value") or "nan")


def values(found: Locator) -> list[float]:
    return [value(one) for one in found.all()]


def point(page: Page, query: int, key: int) -> dict[str, float]:
    """Return where a cell of the large map lies in it."""
    data = page.get_by_test_id("map").evaluate("node => ({...node.dataset, x: node.scrollLeft, y: node.scrollTop})")
    cell = float(data["cell"])
    return {
        "x": float(data["left"]) + (key + 0.5) * cell - data["x"],
        "y": float(data["top"]) + (query + 0.5) * cell - data["y"],
    }


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(
    ("kind", "width", "dark"),
    first_of(
        [(*look, dark) for dark in (False, True) for look in product(("decoder", "encoder", "pair"), (1280, 400))]
    ),
)
def test_it_opens(
    kind: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    trained: Trained = request.getfixturevalue(kind)
    page = visit(trained, width=width, dark=dark, view="attention", layer=LAYER, key=2, **texts(trained))
    picture(page, f"attention-{kind}-{width}{'-dark' if dark else ''}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@two_attentions
def test_heads_are_labelled_by_their_scores(
    kind: str, site: str, request: pytest.FixtureRequest, visit: Visit
) -> None:
    page, seen = opened(request, visit, kind, site)
    if "cross" in site:
        other = [[Seen((seen.model, seen.tok), site, layer, head).weights for head in range(4)] for layer in range(2)]
        entropy = torch.tensor([[float(torch.special.entr(one).sum(-1).mean()) for one in row] for row in other])
        most = torch.tensor(other[0][0].shape[1]).log()
        scores = {"broad": entropy / most}
        names = [["broad" if float(most - one) < math.log(2) else "" for one in layer] for layer in entropy]
    else:
        stack = site.partition(".")[0] if kind == "pair" else None
        found = gh.head_scores(seen.model, *seen.inputs, stack=stack)
        scores = {name: getattr(found, field) for name, field in attention.SCORE_FIELDS.items() if name != "entropy"}
        names = found.head_types
    for layer in range(2):
        for head in range(4):
            small = page.get_by_test_id(f"head-{layer}-{head}")
            called = names[layer][head]
            expect(small).to_have_attribute("data-label", called)
            if called:
                assert value(small) == pytest.approx(float(scores[called][layer, head]), **CLOSE)
            label = small.get_attribute("aria-label") or ""
            known = called.replace("_token", "") or DASH + " no label"
            assert label.startswith(f"layer {layer}, head {head}: {known}")
    for name, known in scores.items():
        assert value(page.get_by_test_id(f"score-{name}")) == pytest.approx(
            float(known[LAYER, HEAD]), nan_ok=True, **CLOSE
        )


def test_a_small_map_is_selected_by_mouse_and_keys(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="attention", text=TEXT)
    page.get_by_test_id("head-1-2").click()
    settle(page)
    assert (state_of(page)["layer"], state_of(page)["head"]) == (1, 2)
    expect(page.get_by_test_id("head-title")).to_have_text("Layer 1, head 2")
    expect(page.get_by_test_id("head-1-2")).to_have_attribute("aria-pressed", "true")
    for press, layer, head in (("ArrowRight", 1, 3), ("ArrowRight", 1, 3), ("ArrowUp", 0, 3), ("ArrowLeft", 0, 2)):
        page.keyboard.press(press)
        settle(page)
        expect(page.get_by_test_id(f"head-{layer}-{head}")).to_be_focused()
        expect(page.get_by_test_id("head-title")).to_have_text(f"Layer {layer}, head {head}")


def test_small_maps_show_the_weights(decoder: Trained, visit: Visit, request: pytest.FixtureRequest) -> None:
    page, seen = opened(request, visit, "decoder", "pattern")
    read = """button => { const canvas = button.querySelector("canvas");
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext("2d", { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
        return [canvas.width, canvas.height, Array.from(data)]; }"""
    small = page.get_by_test_id(f"head-{LAYER}-{HEAD}")
    for scale in ("linear", "root"):
        page.get_by_test_id("scale").locator(f"[data-value={scale}]").click()
        settle(page)
        wide, tall, data = small.evaluate(read)
        n = len(seen.weights)
        assert (wide, tall) == (n, n)
        pixels = torch.tensor(data).view(n, n, 4)
        assert torch.equal(pixels[..., 3] == 0, seen.scores == -torch.inf)  # paper, not zero
        # From paper to dark: the order of the weights is that of the light.
        light = pixels[..., 1][seen.scores > -torch.inf]
        weights = seen.weights[seen.scores > -torch.inf]
        assert (light[weights.argsort()].diff() <= 1).all()
    assert state_of(page)["attention_scale"] == "root"


@each_attention
def test_the_map_is_read_out_and_selected(kind: str, site: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page, seen = opened(request, visit, kind, site)
    cell, heat = page.get_by_test_id("cell"), page.get_by_test_id("map")
    for query, key in ((2, 1), (3, 3), (0, 2)):
        heat.hover(position=point(page, query, key))
        expect(cell).to_have_attribute("data-query", str(query))
        expect(cell).to_have_attribute("data-key", str(key))
        if seen.scores[query, key] == -torch.inf:
            expect(cell).to_have_attribute("data-value", "")
            expect(cell).to_contain_text("masked")
        else:
            assert value(cell) == pytest.approx(float(seen.weights[query, key]), **CLOSE)
    heat.click(position=point(page, 3, 1))
    settle(page)
    names = {"decoder.pattern": ("token", "attention_key"), "encoder.pattern": ("attention_query", "key")}
    first, second = names.get(site, ("token", "key"))
    assert (state_of(page)[first], state_of(page)[second]) == (3, 1)
    assert value(page.get_by_test_id("pair-weight")) == pytest.approx(float(seen.weights[3, 1]), **CLOSE)


def test_the_map_is_walked_by_keys(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, seen = opened(request, visit, "decoder", "pattern", token=5, key=3)
    cell, heat = page.get_by_test_id("cell"), page.get_by_test_id("map")
    heat.focus()
    for press in ("ArrowDown", "ArrowLeft"):
        page.keyboard.press(press)
    expect(cell).to_have_attribute("data-query", "6")
    expect(cell).to_have_attribute("data-key", "2")
    assert value(cell) == pytest.approx(float(seen.weights[6, 2]), **CLOSE)
    page.keyboard.press("Enter")
    settle(page)
    assert (state_of(page)["token"], state_of(page)["key"]) == (6, 2)


def test_the_map_is_zoomed(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, seen = opened(request, visit, "decoder", "pattern")
    heat = page.get_by_test_id("map")

    def size() -> float:
        return float(heat.get_attribute("data-cell") or 0)

    whole = size()
    page.get_by_test_id("zoom-in").click()
    assert size() == pytest.approx(min(72, 2 * whole))
    page.get_by_test_id("zoom-out").click()
    assert size() == pytest.approx(whole)
    heat.focus()
    page.keyboard.press("+")
    assert size() > whole
    heat.hover(position=point(page, 8, 6))  # still the cell that it says, when scrolled
    expect(page.get_by_test_id("cell")).to_have_attribute("data-query", "8")
    assert value(page.get_by_test_id("cell")) == pytest.approx(float(seen.weights[8, 6]), **CLOSE)
    page.keyboard.press("-")
    assert size() == pytest.approx(whole)
    page.keyboard.press("+")
    page.keyboard.press("0")
    assert size() == pytest.approx(whole)
    heat.hover(position=point(page, 5, 2))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    page.keyboard.up("Control")
    expect(heat).not_to_have_attribute("data-cell", str(whole))
    page.get_by_test_id("whole-map").click()
    assert size() == pytest.approx(whole)


# How many pixels above or below the middle of their tokens lines begin and end.
OFF = """(lines) => {
  const middle = (side, place) => {
    const box = lines.querySelector(`.${side}-side [data-place="${place}"]`).getBoundingClientRect();
    return (box.top + box.bottom) / 2;
  };
  return [...lines.querySelectorAll(".strand")].flatMap((one) => {
    const at = (length) => one.getPointAtLength(length).matrixTransform(one.getScreenCTM()).y;
    const { query, key } = one.dataset;
    return [at(0) - middle("query", query), at(one.getTotalLength()) - middle("key", key)];
  });
}"""


@pytest.mark.parametrize("width", first_of([400, 1280]))
@pytest.mark.parametrize("lines", ["one", "all"])
def test_lines_join_their_tokens(lines: str, width: int, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="attention", text="the cat sat on the mat", width=width, attention_lines=lines)
    assert all(abs(pixels) <= 2 for pixels in page.get_by_test_id("lines").evaluate(OFF))


@pytest.mark.few(1)
@pytest.mark.smoke
@two_attentions
def test_lines_carry_the_weights(kind: str, site: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page, seen = opened(request, visit, kind, site, token=3, attention_query=3)
    lines = page.get_by_test_id("lines")

    def strands() -> dict[tuple[int, int], tuple[float, float]]:
        found = lines.locator(".strand").evaluate_all(
            "all => all.map(one => [one.dataset.query, one.dataset.key, one.dataset.value,"
            " one.getAttribute('stroke-opacity')].map(Number))"
        )
        return {(int(query), int(key)): (weight, opacity) for query, key, weight, opacity in found}

    row = seen.weights[3]
    most = float(row.max())
    known = {(3, key): float(weight) for key, weight in enumerate(row) if weight >= 0.02 * most}
    drawn = strands()
    assert drawn.keys() == known.keys()
    for place, weight in known.items():
        assert drawn[place] == pytest.approx((weight, weight / most), rel=1e-4, abs=1e-4)
    seeing = [float(weight) for weight, score in zip(row, seen.scores[3], strict=True) if score > -torch.inf]
    assert values(lines.locator(".key-side .figure:not([data-value=''])")) == pytest.approx(seeing, **CLOSE)
    page.get_by_test_id("lines-of").locator("[data-value=all]").click()
    settle(page)
    known = {
        (query, key): float(weight)
        for query, row in enumerate(seen.weights)
        for key, weight in enumerate(row)
        if weight >= 0.02
    }
    drawn = strands()
    assert drawn.keys() == known.keys()
    for place, weight in known.items():
        assert drawn[place] == pytest.approx((weight, weight), rel=1e-4, abs=1e-4)
    lines.locator(".query-side .token").nth(2).click()
    lines.locator(".key-side .token").nth(1).click()
    settle(page)
    assert value(page.get_by_test_id("pair-weight")) == pytest.approx(float(seen.weights[2, 1]), **CLOSE)


@each_attention
def test_a_pair_is_told_number_by_number(kind: str, site: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    where = {"token": 3, "attention_query": 3, "key": 1, "attention_key": 1}
    page, seen = opened(request, visit, kind, site, **where)
    q, k, v, z = seen.q[3], seen.k[1], seen.v[1], seen.z[3]
    weight, score = float(seen.weights[3, 1]), float(seen.scores[3, 1])
    weighted = weight * v
    for name, known in (("q", q), ("k", k), ("products", q * k), ("v", v), ("weighted_value", weighted), ("z", z)):
        cells = page.get_by_test_id(f"pair-{name}").locator("td")
        assert values(cells) == pytest.approx(known.tolist(), rel=1e-4, abs=1e-5)
    numbers = {
        "sum": float(q @ k),
        "scale": seen.model.spec.d_head**-0.5,
        "score": score,
        "largest": float(seen.scores[3].max()),
        "total": float((seen.scores[3] - seen.scores[3].max()).exp().sum()),
        "weight": weight,
    }
    for name, number in numbers.items():
        assert value(page.get_by_test_id(f"pair-{name}")) == pytest.approx(number, rel=1e-4, abs=1e-5)
    shared = seen.model.spec.n_heads // seen.model.spec.n_kv_heads
    if shared > 1:
        expect(page.get_by_test_id("pair-shares")).to_contain_text(f"key-value head {HEAD // shared}")
    else:
        expect(page.get_by_test_id("pair-shares")).to_be_hidden()


@two_attentions
def test_the_row_lists_its_largest_weights(
    kind: str, site: str, request: pytest.FixtureRequest, visit: Visit
) -> None:
    page, seen = opened(request, visit, kind, site, token=3, attention_query=3)
    top = page.get_by_test_id("row-top").locator("[role=listitem]")
    shown = [int(one.get_attribute("data-key") or "") for one in top.all()]
    there = [key for key in range(seen.weights.shape[1]) if seen.scores[3, key] > -torch.inf]
    assert values(top.locator(".figure")) == pytest.approx([float(seen.weights[3, key]) for key in shown], **CLOSE)
    largest = sorted((float(seen.weights[3, key]) for key in there), reverse=True)[:8]
    assert values(top.locator(".figure")) == pytest.approx(largest, **CLOSE)
    top.nth(1).locator("button").click()
    settle(page)
    name = "attention_key" if site == "decoder.pattern" else "key"
    assert state_of(page).get(name, 0) == shown[1]
    # The strip has a bar for each key: the one that is clicked is chosen.
    strip = page.get_by_test_id("row").locator("canvas")
    box = strip.bounding_box()
    assert box is not None
    strip.click(position={"x": box["width"] * 2.5 / seen.weights.shape[1], "y": 20})
    settle(page)
    assert state_of(page)[name] == 2


def test_masked_pairs_are_marked(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, _ = opened(request, visit, "decoder", "pattern", token=2, key=6)
    expect(page.get_by_test_id("pair-masked")).to_be_visible()
    expect(page.get_by_test_id("pair-score")).to_have_text("\N{MINUS SIGN}∞")
    assert value(page.get_by_test_id("pair-weight")) == 0
    expect(page.get_by_test_id("cell")).to_contain_text("masked")
    page.get_by_test_id("map").click(position=point(page, 6, 2))
    settle(page)
    expect(page.get_by_test_id("pair-masked")).to_be_hidden()


def test_attentions_of_an_encoder_decoder_are_chosen(pair: Trained, visit: Visit, picture: Picture) -> None:
    page = visit(pair, view="attention", **texts(pair))
    for site in ("encoder.pattern", "decoder.pattern", "decoder.cross_pattern"):
        page.get_by_test_id("kinds").locator(f"[data-value='{site}']").click()
        settle(page)
        seen = Seen(pair, site, 0, 0)
        picture(page, f"attention-pair-{site}")
        page.get_by_test_id("map").hover(position=point(page, 2, 2))
        assert value(page.get_by_test_id("cell")) == pytest.approx(float(seen.weights[2, 2]), **CLOSE)


def test_edits_change_the_maps(decoder: Trained, visit: Visit) -> None:
    edits = [{"kind": "scale", "site": "z.0[head=1]", "factor": 0}]
    page = visit(decoder, view="attention", text=TEXT, layer=1, head=0, token=5, key=2, edits=edits)
    model, tok = decoder
    with gh.edit(model, {"z.0[head=1]": 0.0}), gh.record(model, "pattern.1") as seen, torch.no_grad():
        model(torch.tensor([tok.encode(TEXT)]))
    changed = float(seen["pattern.1"][0, 0, 5, 2])
    assert value(page.get_by_test_id("pair-weight")) == pytest.approx(changed, **CLOSE)
    assert float(Seen(decoder, "pattern", 1, 0).weights[5, 2]) != pytest.approx(changed, **CLOSE)


def long_model() -> tuple[Trained, str]:
    """Return a decoder without a tokenizer whose heads differ, and a text that says everything twice."""
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=300, max_len=4096, n_kv_heads=4)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query" in name or "key" in name:
                weight.mul_(6)
    half = torch.randint(300, (750,), generator=torch.Generator().manual_seed(0)).tolist()
    return (model, None), " ".join(map(str, half + half))  # type: ignore[return-value]


def test_a_long_map_is_fetched_as_it_comes_into_view(visit: Visit, picture: Picture) -> None:
    trained, text = long_model()
    asked: list[dict[str, Any]] = []
    sizes: list[int] = []

    def look(request: Request) -> None:
        if request.url.endswith("/api/tile"):
            asked.append(json.loads(request.post_data or ""))

    page = visit(trained, view="attention", text="5 7 11")
    page.on("request", look)
    page.on("response", lambda one: sizes.append(int(one.headers["content-length"])) if "/api/" in one.url else None)
    page.get_by_test_id("box-text").fill(text)
    expect(page.get_by_test_id("head-facts")).to_contain_text("entropy")
    expect(page.get_by_test_id("heads-note")).to_contain_text(
        "Head scores are computed on the first 512 of 1,500 tokens."
    )
    settle(page)
    picture(page, "attention-long")
    assert 0 < len(asked) <= 3  # 2 x 2 tiles, less the one above the diagonal
    assert {one["level"] for one in asked} == {2}
    assert max(sizes) < 360_000  # a tile: 256 x 256 numbers of four bytes, four letters for three bytes
    with gh.record(trained[0], "pattern.0[head=0]") as seen, torch.no_grad():
        trained[0](torch.tensor([[int(one) for one in text.split()]]))
    weights = seen["pattern.0"][0]
    cell, heat = page.get_by_test_id("cell"), page.get_by_test_id("map")
    heat.hover(position=point(page, 1000, 333))
    side = int(cell.get_attribute("data-side") or 0)
    row, column = int(cell.get_attribute("data-query") or 0), int(cell.get_attribute("data-key") or 0)
    assert side == 4
    square = weights[row : row + side, column : column + side]
    assert value(cell) == pytest.approx(float(square.max()), **CLOSE)
    # Close by, the cells are those of single tokens, and only tiles in view are asked for.
    asked.clear()
    page.get_by_test_id("close-up").click()
    heat.evaluate("node => node.scrollTo(333 * 30, 1000 * 30)")
    page.wait_for_timeout(300)
    settle(page)
    heat.hover(position=point(page, 1004, 338))
    expect(cell).to_have_attribute("data-side", "1")
    assert value(cell) == pytest.approx(float(weights[1004, 338]), **CLOSE)
    assert len(asked) <= 8
    picture(page, "attention-long-close")


def test_a_long_text_has_lines_around_the_selection(visit: Visit) -> None:
    trained, text = long_model()
    page = visit(trained, view="attention", text=text, token=900)
    lines = page.get_by_test_id("lines")
    expect(lines.locator(".query-side .token")).to_have_count(60)
    expect(lines.locator(".query-side .token.selected")).to_have_attribute("data-place", "900")
    shown = values(lines.locator(".key-side .figure:not([data-value=''])"))
    expect(page.get_by_test_id("lines-note")).to_contain_text("before or after these 60")
    assert sum(shown) <= 1


def test_many_heads_have_the_whole_width(visit: Visit, picture: Picture) -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=60, n_layers=12, d_model=192, n_heads=12, n_kv_heads=12))
    asked: list[str] = []
    page = visit((model.eval(), None), view="tokens", text="5 7 11 5 7 13")
    page.on("request", lambda one: asked.append(one.post_data or "") if one.url.endswith("/api/maps") else None)
    page.locator("#tab-attention").click()
    settle(page)
    picture(page, "attention-many")
    assert len(asked) == 12  # all layers, which are in view
    page.get_by_test_id("head-11-7").click()
    settle(page)
    expect(page.get_by_test_id("head-title")).to_have_text("Layer 11, head 7")


def test_hostile_tokens_are_text(decoder: Trained, visit: Visit, picture: Picture) -> None:
    text = "<img src=x onerror=alert(1)> \u202egnp.exe \u200b\u0000\x1b[31m " + "w" * 3000
    page = visit(decoder, view="attention", text=text, width=400)
    picture(page, "attention-hostile")
    assert page.locator("main img").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.long  # test_html_export.py opens every view of a saved page
@each_attention
def test_a_saved_page_includes_the_requests_of_the_view(
    kind: str, site: str, request: pytest.FixtureRequest, visit: Visit
) -> None:
    trained: Trained = request.getfixturevalue(kind)
    given = {"attention": site, "layer": 1, "head": 9, "token": 2, "key": 1, **texts(trained)}
    traces = TraceCache(ModelLoader.from_model(*trained))
    state = with_defaults(traces, {"view": "attention", **given})
    forward_pass = forward_pass_of(traces.loader.get(""), state)
    known = {request_key(*one) for one in attention.initial_requests(traces, forward_pass, state)}
    asked: set[str] = set()

    def look(one: Request) -> None:
        name = urlsplit(one.url).path.removeprefix("/api/")
        if name in ("query_key", "tile", "scores", "maps"):
            asked.add(request_key(name, json.loads(one.post_data or "")))

    page = visit(trained, view="tokens", **given)
    page.on("request", look)
    page.locator("#tab-attention").click()
    settle(page)
    assert asked == known


def test_a_long_text_in_a_saved_page_is_coarse(browser: Browser, tmp_path: Path) -> None:
    (model, _), text = long_model()
    given = " ".join(text.split()[:300])
    gh.look(model, None, given, view="attention", layer=1).save(tmp_path / "page.html")
    page = browser.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto((tmp_path / "page.html").as_uri())
    settle(page)
    heat, cell = page.get_by_test_id("map"), page.get_by_test_id("cell")
    heat.hover(position=point(page, 200, 100))
    expect(cell).to_have_attribute("data-side", "2")
    with gh.record(model, "pattern.1[head=0]") as seen, torch.no_grad():
        model(torch.tensor([[int(one) for one in given.split()]]))
    assert value(cell) == pytest.approx(float(seen["pattern.1"][0, 200:202, 100:102].max()), **CLOSE)
    page.close()
    assert not troubles


def test_two_checkpoints_side_by_side(run_folder: Path, visit: Visit, picture: Picture) -> None:
    page = visit(run_folder, view="attention", text=TEXT)
    checkpoints = page.locator("[data-testid=compare-with] option").all_inner_texts()
    page.get_by_test_id("compare-with").select_option(checkpoints[1])
    settle(page)
    expect(page.get_by_test_id("map")).to_have_count(2)
    picture(page, "attention-beside")


def test_lines_of_all_heads_in_their_colours(decoder: Trained, visit: Visit) -> None:
    model, tok = decoder
    text = "the cat sat on the mat"
    page = visit(decoder, view="attention", text=text, layer=1, attention_lines="heads", token=4)
    with torch.no_grad(), gh.record(model, "pattern.1") as seen:
        model(torch.tensor([tok.encode(text)]))
    strands = page.get_by_test_id("lines").locator(".strand")
    drawn = strands.evaluate_all("all => all.map(one => [+one.dataset.head, +one.dataset.key, +one.dataset.value])")
    expected = seen["pattern.1"][0, :, 4]
    assert {(head, key) for head, key, _ in drawn} == {(int(h), int(k)) for h, k in (expected >= 0.02).nonzero()}
    for head, key, value in drawn:
        assert value == pytest.approx(float(expected[head, key]), rel=1e-4)
    colours = strands.evaluate_all("all => all.map(one => [one.dataset.head, one.style.stroke])")
    assert len({colour for _, colour in colours}) == len({head for head, _ in colours}) > 1
    page.locator(".line-head[data-head='0']").click()  # without head 0
    expect(page.locator(".strand[data-head='0']")).to_have_count(0)
    assert strands.count() == sum(head != 0 for head, _, _ in drawn)


@pytest.mark.parametrize("name", ["python-3m"])
def test_the_page_opens_on_an_induction_head(name: str, visit: Visit) -> None:
    model, tok = gh.load(name)
    ids = torch.tensor([tok.encode(gh.pretrained.PROMPTS[name])])
    scores = gh.head_scores(model, ids).induction
    layer, head = divmod(int(scores.argmax()), scores.shape[1])
    with torch.no_grad(), gh.record(model, f"pattern.{layer}") as seen:
        model(ids)
    key = int(seen[f"pattern.{layer}"][0, head, -1].argmax())
    assert ids[0, key - 1] == ids[0, -1]  # it follows an earlier occurrence of the last token
    page = visit(name, view="attention", width=1366)
    expect(page.get_by_test_id("head-title")).to_have_text(f"Layer {layer}, head {head}")
    assert state_of(page)["key"] == key
    grid = page.get_by_test_id("heads")  # all layers in view, without a scroll bar of its own
    assert grid.evaluate("one => one.scrollHeight <= one.clientHeight")
