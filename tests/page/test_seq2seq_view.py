"""The encoder-decoder in a browser: what is drawn is what Python says, and what is chosen is chosen everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import torch
from conftest import Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Page, expect
from torch import Tensor

import glasshouse as gh

SOURCE = "one five two"
CLOSE = 2e-6  # a few roundings of numbers below 1, and eight digits in the address of a number


def state(page: Page) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(urlparse(page.url).fragment).items()}


def ids_of(page: Page, side: str) -> list[int]:
    return [
        int(one.get_attribute("data-id") or "") for one in page.locator(f"[data-testid=strip-{side}] .token").all()
    ]


def patterns(page: Page, model: gh.models.Model) -> Tensor:
    """What the Python API says of the tokens that the page shows, [layer, head, target, source]."""
    inputs = [torch.tensor([ids_of(page, side)]) for side in ("source", "target")]
    with gh.record(model, "decoder.cross_pattern.*") as seen, torch.no_grad():
        model(*inputs)
    return seen["decoder.cross_pattern.*"][:, 0]


def matrix(page: Page) -> Tensor:
    cells = page.locator("[data-testid=seq2seq-matrix] td[data-t]")
    found = cells.evaluate_all(
        "all => all.map((one) => [one.dataset.t, one.dataset.k, one.dataset.value].map(Number))"
    )
    t0, k0 = min(one[0] for one in found), min(one[1] for one in found)
    made = torch.zeros(int(max(one[0] for one in found) - t0) + 1, int(max(one[1] for one in found) - k0) + 1)
    for t, k, value in found:
        made[int(t - t0), int(k - k0)] = value
    return made


def value(page: Page, testid: str) -> float:
    return float(page.get_by_test_id(testid).get_attribute("data-value") or "nan")


def test_means_and_single_heads(pair: Trained, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    model, _ = pair
    page = visit(pair, view="seq2seq", text=SOURCE)
    picture(page, "seq2seq")
    expected = patterns(page, model)
    torch.testing.assert_close(matrix(page), expected.mean((0, 1)), rtol=0, atol=CLOSE)
    page.get_by_role("radio", name="mean of the layer").click()
    settle(page)
    torch.testing.assert_close(matrix(page), expected[0].mean(0), rtol=0, atol=CLOSE)
    page.get_by_role("radio", name="one head").click()
    page.keyboard.press("]")
    page.keyboard.press(".")
    page.keyboard.press(".")
    settle(page)
    expect(page.get_by_test_id("seq2seq-scope")).to_contain_text("layer 1, head 2")
    torch.testing.assert_close(matrix(page), expected[1, 2], rtol=0, atol=CLOSE)
    assert (state(page)["layer"], state(page)["head"], state(page)["seq2seq_scope"]) == ("1", "2", "head")


def test_a_target_token_shows_its_weights(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    expected = patterns(page, pair[0]).mean((0, 1))

    def shares() -> list[float]:
        return [value(page, f"share-{k}") for k in range(expected.shape[1])]

    assert shares() == pytest.approx(expected[-1].tolist(), abs=CLOSE)  # the last is selected
    page.get_by_test_id("target-token-1").hover()
    assert shares() == pytest.approx(expected[1].tolist(), abs=CLOSE)
    page.get_by_test_id("source-token-0").hover()
    assert shares() == pytest.approx(expected[-1].tolist(), abs=CLOSE)
    page.get_by_test_id("target-token-0").focus()
    assert shares() == pytest.approx(expected[0].tolist(), abs=CLOSE)
    page.keyboard.press("ArrowRight")
    settle(page)
    assert state(page)["token"] == "1"
    listed = page.locator("[data-testid=seq2seq-list] .figure")
    found = [float(one.get_attribute("data-value") or "") for one in listed.all()]
    assert found == pytest.approx(expected[1].tolist(), abs=CLOSE)
    strong = page.locator(".al-lines path.own")
    assert strong.count() == int((expected[1] >= min(0.03, expected[1].max().item() / 4)).sum())


def test_the_matrix_selects(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    page.get_by_test_id("weight-1-2").click()
    settle(page)
    assert (state(page)["token"], state(page)["key"]) == ("1", "2")
    page.get_by_test_id("weight-1-2").press("ArrowDown")
    settle(page)
    assert (state(page)["token"], state(page)["key"]) == ("2", "2")
    expect(page.get_by_test_id("weight-2-2")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    settle(page)
    assert state(page)["key"] == "1"
    expect(page.locator("#target-2")).to_have_class("token appended selected")


def test_edits_change_the_weights(pair: Trained, visit: Visit) -> None:
    edits = [{"kind": "scale", "site": "decoder.cross_z.0[head=0]", "factor": -2.0}]
    page = visit(pair, view="seq2seq", text=SOURCE, seq2seq_scope="head", layer=1, edits=edits)
    plain = patterns(page, pair[0])
    with gh.edit(pair[0], {"decoder.cross_z.0[head=0]": gh.inspection.scale(-2.0)}):
        expected = patterns(page, pair[0])
    assert (plain[1, 0] - expected[1, 0]).abs().max() > 0.01
    torch.testing.assert_close(matrix(page), expected[1, 0], rtol=0, atol=CLOSE)


def test_a_long_source_is_paged(pair: Trained, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    page = visit(
        pair, view="seq2seq", text=" ".join(["one two three four five six"] * 10), appended=[70, 71], width=700
    )
    picture(page, "seq2seq-long")
    length = len(ids_of(page, "source"))
    assert length > 80
    expected = patterns(page, pair[0]).mean((0, 1))
    torch.testing.assert_close(matrix(page), expected[:, :32], rtol=0, atol=CLOSE)
    page.get_by_role("button", name="later source").click()
    settle(page)
    expect(page.get_by_test_id("pager-source")).to_contain_text(f"source tokens 32 to 63 of {length}")
    torch.testing.assert_close(matrix(page), expected[:, 32:64], rtol=0, atol=CLOSE)
    page.get_by_role("button", name="earlier source").click()
    settle(page)
    torch.testing.assert_close(matrix(page), expected[:, :32], rtol=0, atol=CLOSE)


# The search


def found_by(model: gh.models.Model, tok: gh.Tokenizer, beams: int, penalty: float) -> list[gh.Completion]:
    assert isinstance(model, gh.models.Seq2Seq)
    settings = {"beams": beams, "n": beams, "length_penalty": penalty, "keep_tree": True}
    return gh.generate(model, tok, SOURCE, max_new_tokens=48, **settings)  # type: ignore[arg-type]


def check_search(page: Page, found: list[gh.Completion]) -> None:
    assert [value(page, f"score-{i}") for i in range(len(found))] == [one.score for one in found]
    for i, one in enumerate(found):
        expect(page.get_by_test_id(f"label-{i}")).to_contain_text(one.text)
    tree = found[0].tree or []
    page.get_by_test_id("pruned").check()
    settle(page)
    for at, node in enumerate(tree):
        drawn = page.get_by_test_id(f"node-{at}")
        assert drawn.get_attribute("data-outcome") == node.outcome
        assert float(drawn.get_attribute("data-value") or "") == node.logprob


@pytest.mark.long
def test_beam_search_matches_generate(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    check_search(page, found_by(*pair, 4, 1.0))
    best = page.locator(".al-node.best")
    assert best.count() == len(found_by(*pair, 4, 1.0)[0].ids) + 2  # the start and the end


def test_beams_and_penalty(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    page.get_by_test_id("beams").locator("input").press("ArrowLeft")
    page.get_by_test_id("beams").locator("input").press("ArrowLeft")
    settle(page)
    assert state(page)["seq2seq_beams"] == "2"
    check_search(page, found_by(*pair, 2, 1.0))
    page.get_by_test_id("penalty").locator("input").press("ArrowRight")
    settle(page)
    assert state(page)["seq2seq_length_penalty"] == "1.1"
    check_search(page, found_by(*pair, 2, 1.1))


def test_pruned_beams_can_be_hidden(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE, seq2seq_pruned=1)
    assert page.locator("[data-outcome=pruned]").count() > 0
    page.get_by_test_id("pruned").uncheck()
    settle(page)
    assert page.locator("[data-outcome=pruned]").count() == 0
    assert page.locator("[data-outcome=kept]").count() > 0


@pytest.mark.parametrize("way", first_of(["tree", "button"]))
def test_a_hypothesis_becomes_the_target(pair: Trained, visit: Visit, way: str) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    second = found_by(*pair, 4, 1.0)[1]
    page.get_by_test_id("choose-1" if way == "button" else "label-1").click()
    settle(page)
    assert json.loads(state(page)["appended"]) == second.ids
    assert ids_of(page, "target")[-len(second.ids) :] == second.ids
    expect(page.get_by_test_id("shown-1")).to_be_visible()
    torch.testing.assert_close(matrix(page), patterns(page, pair[0]).mean((0, 1)), rtol=0, atol=CLOSE)


def test_the_search_as_a_table(pair: Trained, visit: Visit) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE)
    page.get_by_text("every step of the search as a table").click()
    tree = found_by(*pair, 4, 1.0)[0].tree or []
    rows = page.locator("[data-testid=nodes] tbody tr")
    expect(rows).to_have_count(len(tree))
    values = rows.first.locator("td[data-value]")
    found = [float(one.get_attribute("data-value") or "") for one in values.all()]
    assert found == [tree[0].logprob, tree[0].total, tree[0].score]


def test_only_for_encoder_decoders(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="seq2seq", text="the cat")
    assert page.locator("#tab-seq2seq").count() == 0


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
def test_it_fits(pair: Trained, visit: Visit, picture: Callable[[Page, str], Path], width: int, dark: bool) -> None:
    page = visit(pair, view="seq2seq", text=SOURCE, width=width, dark=dark)
    picture(page, f"seq2seq-{width}{'-dark' if dark else ''}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_target_position_stands_for_the_token_written_there(pair: Trained, visit: Visit) -> None:
    """At a position the model reads one token and writes the next; both are named, and either can be shown."""
    page = visit(pair, view="seq2seq", text=SOURCE)
    words = [one.inner_text() for one in page.locator("[data-testid=strip-target] .token").all()]
    assert len(words) > 2
    shown = page.get_by_test_id("target-token-0")
    expect(shown).to_have_text(words[1])
    expect(shown).to_have_attribute("aria-label", f"target position 0: at “{words[0]}”, writing “{words[1]}”")
    last = page.get_by_test_id(f"target-token-{len(words) - 1}")
    expect(last).to_have_attribute("title", f"at “{words[-1]}”, writing the next token")
    before = matrix(page)
    page.get_by_role("radio", name="when it was read").click()
    settle(page)
    expect(shown).to_have_text(words[0])
    assert state(page)["seq2seq_moment"] == "reading"
    assert torch.equal(matrix(page), before)  # of the same positions
