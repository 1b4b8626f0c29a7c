"""The residual stream in a browser: the lens, what adds up to a logit, lengths and angles.

Models run in float32, and the page reads vectors in other batches than the tools do: sums of some hundred products
differ in their last digits, about 1e-6 of the largest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import torch
from conftest import ONE_KIND, Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Page, Request, expect

import glasshouse as gh
from glasshouse.inspection import position_similarity, residual_norms
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, with_defaults
from glasshouse.page.views import residual_stream

TEXT = "the cat sat on the mat and the bird"
SOURCE = "one five two"
KINDS = ["decoder", "encoder", "pair"]
Picture = Callable[[Page, str], Path]


def near(value: float) -> object:
    return pytest.approx(value, rel=1e-4, abs=1e-5)


def state_of(page: Page) -> dict[str, object]:
    """Return the state that stands in the address."""
    found = {name: value for name, (value,) in parse_qs(urlsplit(page.url).fragment).items()}
    return {name: json.loads(one) if one[:1] in "-[{0123456789" else one for name, one in found.items()}


def opened(
    visit: Visit, request: pytest.FixtureRequest, kind: str, **state: object
) -> tuple[Page, gh.models.Model, tuple[torch.Tensor, ...]]:
    """Open the view on a trained model, and return what the model was called with."""
    trained: Trained = request.getfixturevalue(kind)
    text = SOURCE if kind == "pair" else TEXT
    if kind == "pair":  # what the page writes by itself
        state["appended"] = gh.generate(*trained, SOURCE)[0].ids
    page = visit(trained, view="residual", text=text, **state)
    appended, masked = (tuple(state.get(name, ())) for name in ("appended", "masked"))  # type: ignore[arg-type]
    traces = TraceCache(ModelLoader.from_model(*trained))
    return page, trained[0], traces.trace(ForwardPass(PagePrompt(text, appended=appended, masked=masked))).inputs


def cells(page: Page) -> dict[tuple[int, int], dict[str, float]]:
    """Return what each cell of the table holds, by row (0: the embedding) and place."""
    found = page.eval_on_selector_all(".lens-cell", "all => all.map(one => ({...one.dataset}))")
    return {
        (int(one["row"]), int(one["place"])): {name: float(value) for name, value in one.items()} for one in found
    }


@pytest.mark.smoke
@pytest.mark.parametrize("kind", first_of(KINDS))
def test_the_table_is_the_logit_lens(
    kind: str, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    page, model, given = opened(visit, request, kind)
    picture(page, f"stream-{kind}")
    lens = gh.lens(model, *given)
    shown = cells(page)
    assert shown.keys() == {(row, place) for row in range(3) for place in range(given[-1].shape[1])}
    for (row, place), one in shown.items():
        at = (row, 0, place)
        assert one["probability"] == near(float(lens.probabilities[at][0]))
        assert one["entropy"] == near(float(lens.entropy[at]))
        assert one["rank"] == float(lens.rank[at])
        assert one["id"] == float(lens.tokens[at][0])


def test_the_target_of_a_mask_is_the_masked_token(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "encoder", masked=[2], token=2)
    tok = request.getfixturevalue("encoder")[1]
    targets = torch.tensor([tok.encode(TEXT)])
    assert not torch.equal(targets, given[0])
    lens = gh.lens(model, *given, targets=targets)
    assert [one["rank"] for _, one in sorted(cells(page).items())] == lens.rank[:, 0].flatten().float().tolist()
    loss = page.locator("[data-testid=cell-loss]").get_attribute("data-value")
    assert float(loss or "") == near(float(lens.loss[1, 0, 2]))


def test_cells_are_chosen_by_mouse_and_keys(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "decoder")
    lens = gh.lens(model, *given, top_k=5)

    def holds(row: int, place: int) -> None:
        settle(page)
        chosen = page.locator(".lens-cell[aria-selected=true]")
        assert (chosen.get_attribute("data-row"), chosen.get_attribute("data-place")) == (str(row), str(place))
        bars = page.locator("[data-testid=cell] [role=listitem]")
        assert [int(one.get_attribute("data-id") or "") for one in bars.all()] == lens.tokens[row, 0, place].tolist()
        shown = [float(one.get_attribute("data-value") or "") for one in bars.locator(".figure").all()]
        assert shown == [near(one) for one in lens.probabilities[row, 0, place].tolist()]
        entropy = page.locator("[data-testid=cell-entropy]").get_attribute("data-value")
        assert float(entropy or "") == near(float(lens.entropy[row, 0, place]))
        rank = page.locator("[data-testid=cell-rank]").get_attribute("data-value")
        assert float(rank or "") == float(lens.rank[row, 0, place])

    page.click(".lens-cell[data-row='2'][data-place='3']")
    holds(2, 3)
    assert (state_of(page)["token"], state_of(page)["layer"]) == (3, 1)
    page.focus("[data-testid=lens]")
    for key, at in (("ArrowLeft", (2, 2)), ("ArrowDown", (1, 2)), ("ArrowDown", (0, 2)), ("ArrowDown", (0, 2))):
        page.keyboard.press(key)
        holds(*at)
    page.keyboard.press("]")  # a layer up
    settle(page)
    expect(page.locator(".lens-cell[aria-selected=true]")).to_have_attribute("data-row", "2")
    page.keyboard.press("Home")
    holds(2, 0)
    page.click(".lens-below [data-place='5']")
    holds(2, 5)


def test_colours(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "decoder")
    lens = gh.lens(model, *given)

    def shades() -> dict[tuple[int, int], str]:
        found = page.eval_on_selector_all(
            ".lens-cell", "all => all.map(one => [one.dataset.row, one.dataset.place, one.style.background])"
        )
        return {(int(row), int(place)): shade for row, place, shade in found}

    def light(shade: str) -> int:
        return sum(int(one) for one in shade.removeprefix("rgb(").removesuffix(")").split(","))

    for name, values in (
        ("probability", lens.probabilities[..., 0]),
        ("entropy", lens.entropy),
        ("rank", -lens.rank),
    ):
        page.click(f"[role=radio][data-value={name}]")
        settle(page)
        where = values[:, 0, :-1]  # the last has no true token
        most, least = (divmod(int(one), where.shape[1]) for one in (where.argmax(), where.argmin()))
        assert light(shades()[most]) < light(shades()[least]), name
        assert state_of(page).get("residual_color", "probability") == name
    assert page.locator(".lens-cell[data-row='2'][data-place='0'] .lens-figure").inner_text() == str(
        int(lens.rank[2, 0, 0])
    )
    expect(page.locator("[data-testid=lens-legend]")).to_contain_text("0: the top prediction")


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_contributions_add_up_to_the_logit(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, kind, token=1)

    def check(token: int, against: int | None) -> None:
        split = gh.attribute(model, *given, position=1, token=token, incorrect_token=against)
        parts = {name.replace("bias", "biases"): float(one) for name, one in split.components().items()}
        segments = page.eval_on_selector_all(
            ".segment", "all => all.map(one => [one.dataset.part, one.dataset.value])"
        )
        assert {name: float(value) for name, value in segments} == {name: near(one) for name, one in parts.items()}
        logit = float(page.locator("[data-testid=logit]").get_attribute("data-value") or "")
        assert logit == near(float(split.logit))
        assert sum(float(value) for _, value in segments) == pytest.approx(logit, abs=1e-4)
        rows = page.locator("[data-testid=largest] [role=listitem]").all()
        order = [abs(parts[row.get_attribute("data-part") or ""]) for row in rows]
        assert order == sorted(order, reverse=True)
        assert order == [near(one) for one in sorted(map(abs, parts.values()), reverse=True)[:10]]

    likeliest, second = gh.lens(model, *given, positions=[1]).tokens[-1, 0, 0, :2].tolist()
    check(likeliest, None)
    page.select_option("[data-testid=attributed-token]", str(second))
    settle(page)
    check(second, None)
    page.select_option("[data-testid=incorrect-token]", str(likeliest))
    settle(page)
    check(second, likeliest)
    assert (state_of(page)["residual_token"], state_of(page)["residual_incorrect_token"]) == (second, likeliest)


def test_a_head_is_selected_in_the_attribution(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, "decoder")
    segment = page.locator(".segment[data-part='head 1.2']")
    segment.dispatch_event("click")  # it may be a pixel wide
    settle(page)
    assert (state_of(page)["layer"], state_of(page)["head"]) == (1, 2)
    token = int(gh.lens(model, *given, positions=[-1]).tokens[-1, 0, 0, 0])
    split = gh.attribute(model, *given, token=token)
    shown = [
        float(one.get_attribute("data-value") or "")
        for one in page.locator("[data-testid=attribution-chosen] b").all()
    ]
    assert shown == [near(float(split.heads[0, 1, 2])), near(float(split.feedforward[0, 1]))]
    page.focus("[data-testid=attribution]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    settle(page)
    assert (state_of(page).get("layer", 0), state_of(page)["head"]) == (0, 3)
    page.click("[data-testid=largest] [data-part='ffn 1'] button")
    settle(page)
    assert state_of(page)["layer"] == 1


@pytest.mark.parametrize("kind", first_of(KINDS))
def test_norms_and_cosine_similarity(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, given = opened(visit, request, kind, token=1, layer=1)
    found = residual_norms(model, *given)[:, 0, 1].tolist()
    for row in page.locator("[data-testid=norms] [role=listitem]").all():
        shown = row.locator(".figure").get_attribute("data-value") or ""
        assert float(shown) == near(found[int(row.get_attribute("data-row") or "")])
    site = "decoder.resid_post.1" if kind == "pair" else "resid_post.1"
    cosine = position_similarity(model, *given, site=site)[0, 1]
    rows = page.locator("[data-testid=similarity] [role=listitem]").all()
    shown = {
        int(row.get_attribute("data-place") or ""): row.locator(".figure").get_attribute("data-value") for row in rows
    }
    assert {place: float(one or "") for place, one in shown.items()} == {
        place: near(float(cosine[place])) for place in shown
    }
    best = max(float(one) for place, one in enumerate(cosine) if place != 1)
    assert max(float(one or "") for one in shown.values()) == near(best)
    rows[0].locator("button").click()
    settle(page)
    assert state_of(page).get("token") == next(iter(shown))


def test_edits_change_the_table(request: pytest.FixtureRequest, visit: Visit) -> None:
    edits = [{"kind": "scale", "site": "ffn_out.0", "factor": 0}]
    page, model, given = opened(visit, request, "decoder", edits=edits)
    plain = gh.lens(model, *given)
    with gh.edit(model, {"ffn_out.0": 0.0}):
        lens = gh.lens(model, *given)
    assert not torch.allclose(plain.entropy, lens.entropy, atol=1e-2)
    for (row, place), one in cells(page).items():
        assert one["entropy"] == near(float(lens.entropy[row, 0, place]))


def test_a_long_text_is_requested_in_tiles(decoder: Trained, visit: Visit, picture: Picture) -> None:
    page = visit(decoder, view="residual", text="the cat saw the dog. " * 170, token=5, wait=False)
    asked: list[dict[str, int]] = []
    page.on("request", lambda one: asked.append(json.loads(one.post_data or "")) if "/api/lens" in one.url else None)
    settle(page)
    length = int(page.locator("[data-testid=lens]").get_attribute("aria-colcount") or "")
    assert length > 1000
    tiles = [one for one in asked if one.get("top_k") is None]
    assert all(one["stop"] - one["start"] <= 16 for one in tiles)
    assert max(one["stop"] for one in tiles) <= 64
    assert len(cells(page)) <= 3 * 64
    asked.clear()
    page.eval_on_selector("[data-testid=lens]", "box => { box.scrollLeft = box.scrollWidth }")
    page.wait_for_selector(f".lens-cell[data-place='{length - 1}']")
    settle(page)
    assert min(one["start"] for one in asked) > length - 64
    assert len(cells(page)) <= 3 * 64
    picture(page, "stream-long")
    page.focus("[data-testid=lens]")
    page.keyboard.press("ArrowRight")  # the selection comes back into view
    page.wait_for_selector(".lens-cell[data-place='6'][aria-selected=true]")
    settle(page)


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
@pytest.mark.parametrize("kind", KINDS)
def test_it_fits(
    kind: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit, picture: Picture
) -> None:
    page, _, _ = opened(visit, request, kind, width=width, dark=dark, layer=1)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture(page, f"stream-{kind}-{width}{'-dark' if dark else ''}")


@pytest.mark.parametrize(
    "head",
    ["none", pytest.param("pooled", marks=pytest.mark.long), {"kind": "sequence_classification", "n_labels": 3}],
)
def test_without_logits_there_is_something_to_see(
    head: object, encoder: Trained, visit: Visit, picture: Picture
) -> None:
    torch.manual_seed(0)
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(encoder[1]), head=head)).eval()
    page = visit((model, encoder[1]), view="residual", text=TEXT, token=2)
    expect(page.locator(".about").first).to_contain_text("no logit lens")
    found = residual_norms(model, torch.tensor([encoder[1].encode(TEXT)]))[:, 0]
    shown = cells(page)
    assert len(shown) == found.numel()
    assert all(one["norm"] == near(float(found[at])) for at, one in shown.items())
    assert page.locator("[data-testid=similarity] [role=listitem]").count() == 6
    picture(page, f"stream-{model.spec.head.kind}")


def test_labels_of_tokens(encoder: Trained, visit: Visit, picture: Picture) -> None:
    torch.manual_seed(0)
    head = {"kind": "token_classification", "n_labels": 3, "labels": ["noun", "verb", "other"]}
    model = gh.build(gh.preset("tiny-encoder", vocab_size=len(encoder[1]), head=head)).eval()
    page = visit((model, encoder[1]), view="residual", text=TEXT)
    assert set(page.locator(".lens-word").all_inner_texts()) <= {"noun", "verb", "other"}
    expect(page.locator("[data-testid=attribution]")).to_have_count(0)
    page.click("[role=radio][data-value=entropy]")
    settle(page)
    expect(page.locator("[data-testid=lens-legend]")).to_contain_text("1.10 nats")
    picture(page, "stream-token_classification")


def asked_on_opening(page: Page, view: str) -> set[str]:
    """Go from another view to this one, and return what it asks for."""
    asked: set[str] = set()

    def look(one: Request) -> None:
        path = urlsplit(one.url).path
        if path.startswith("/api/") and path != "/api/tokenize":  # which all views need
            asked.add(request_key(path.removeprefix("/api/"), json.loads(one.post_data or "{}")))

    page.reload()  # to forget what it knows
    settle(page)
    page.on("request", look)
    page.locator(f"#tab-{view}").click()
    settle(page)
    page.remove_listener("request", look)
    return asked


@pytest.mark.long  # test_html_export.py opens every view of a saved page
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_page_includes_the_requests_of_the_view(
    kind: str, request: pytest.FixtureRequest, visit: Visit
) -> None:
    trained: Trained = request.getfixturevalue(kind)
    stack = "encoder." if kind == "pair" else ""
    given = {
        "text": SOURCE if kind == "pair" else TEXT,
        "patch_from": "one six two" if kind == "pair" else "the dog sat on the mat and the bird",
        "edits": [{"kind": "patch", "site": f"{stack}resid_post.0[position=1]"}],
        "token": 1,
        "layer": 1,
        "residual_token": 7,
        "appended": gh.generate(*trained, SOURCE)[0].ids if kind == "pair" else [],
    }
    traces = TraceCache(ModelLoader.from_model(*trained))
    state = with_defaults(traces, given)
    known = {
        request_key(*one)
        for one in residual_stream.initial_requests(traces, forward_pass_of(traces.loader.get(""), state), state)
    }
    page = visit(trained, view="seq2seq" if kind == "pair" else "attention", **given)
    assert asked_on_opening(page, "residual") == known


@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_same_in_python(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    """The code on the page runs, and gives what the page shows."""
    edits = [{"kind": "scale", "site": "decoder.z.0[head=1]" if kind == "pair" else "z.0[head=1]", "factor": 0.5}]
    page, model, _ = opened(visit, request, kind, token=1, edits=edits)
    page.click(".python summary")
    code = page.locator(".python code").inner_text()
    names: dict[str, object] = {"model": model, "tok": request.getfixturevalue(kind)[1]}
    exec(code, names)
    column = {row: one for (row, place), one in cells(page).items() if place == 1}
    lens = names["lens"]
    assert isinstance(lens, gh.inspection.Lens)
    for row, one in column.items():
        assert one["probability"] == near(float(lens.probabilities[row, 0, 0, 0]))
    segments = page.eval_on_selector_all(".segment", "all => all.map(one => Number(one.dataset.value))")
    parts = names["components"]
    assert isinstance(parts, dict)
    assert sum(segments) == pytest.approx(sum(float(one) for one in parts.values()), abs=1e-4)


def test_python_code_has_the_masked_targets(request: pytest.FixtureRequest, visit: Visit) -> None:
    page, model, _ = opened(visit, request, "encoder", masked=[2, 4], token=2)
    names: dict[str, Any] = {"model": model, "tok": request.getfixturevalue("encoder")[1]}
    exec(page.locator(".python code").text_content() or "", names)
    lens = names["lens"]
    for row in range(3):
        one = cells(page)[row, 2]
        assert one["rank"] == float(lens.rank[row, 0, 0])
        assert one["probability"] == near(float(lens.probabilities[row, 0, 0, 0]))
