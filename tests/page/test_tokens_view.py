"""The text view in a browser: tokens, merges, what comes next, and going on."""

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
from playwright.sync_api import Page, expect

import glasshouse as gh
from glasshouse.page.model_loader import NUMBERS
from glasshouse.text.bpe import algorithm as bpe

TEXT = "the cat sat on the mat and the bird"
SOURCE = "one five two"


def state_of(page: Page) -> dict[str, object]:
    """Return the state that stands in the address."""
    found = parse_qs(urlsplit(page.url).fragment)
    state: dict[str, object] = {}
    for name, (value,) in found.items():
        try:
            state[name] = json.loads(value)
        except ValueError:
            state[name] = value
    return state


def candidates(page: Page) -> dict[int, float]:
    """Return the probabilities shown, by id."""
    rows = page.locator("[data-testid=next] [role=listitem]").all()
    return {
        int(row.get_attribute("data-id") or ""): float(row.locator(".figure").get_attribute("data-value") or "")
        for row in rows
    }


@pytest.mark.smoke
@pytest.mark.parametrize("kind", first_of(["decoder", "encoder", "pair"]))
def test_tokens_and_probabilities_are_those_of_the_model(
    kind: str, request: pytest.FixtureRequest, visit: Visit, picture: Callable[[Page, str], Path]
) -> None:
    model, tok = request.getfixturevalue(kind)
    page = visit((model, tok), view="tokens", text=SOURCE if kind == "pair" else TEXT)
    picture(page, f"text-{kind}")
    if kind == "pair":
        (made,) = gh.generate(model, tok, SOURCE)
        source, target = [*tok.encode(SOURCE), model.spec.end_ids[0]], [model.spec.start_id, *made.ids]
        sides, logits = {"source": source, "target": target}, model(torch.tensor([source]), torch.tensor([target]))
    else:
        sides, logits = {"text": tok.encode(TEXT)}, model(torch.tensor([tok.encode(TEXT)]))
    for side, ids in sides.items():
        shown = [
            int(one.get_attribute("data-id") or "")
            for one in page.locator(f"[data-testid=strip-{side}] .token").all()
        ]
        assert shown == ids
    expected = logits[0, -1].softmax(-1).detach()
    found = candidates(page)
    assert list(found)[:3] == expected.topk(3).indices.tolist()
    for token, probability in found.items():
        assert probability == pytest.approx(float(expected[token]), rel=1e-4, abs=1e-7)


def test_a_token_is_chosen_by_click_and_by_key(decoder: Trained, visit: Visit) -> None:
    model, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT)
    ids = tok.encode(TEXT)
    expected = model(torch.tensor([ids]))[0].softmax(-1)
    page.locator("[data-testid=strip-text] .token").nth(2).click()
    settle(page)
    assert state_of(page)["token"] == 2
    assert candidates(page)[int(expected[2].argmax())] == pytest.approx(float(expected[2].max()), rel=1e-4)
    page.locator("[data-testid=strip-text]").press("ArrowRight")
    settle(page)
    assert state_of(page)["token"] == 3
    expect(page.locator("[data-testid=strip-text] .selected")).to_have_attribute("data-place", "3")
    assert candidates(page)[int(expected[3].argmax())] == pytest.approx(float(expected[3].max()), rel=1e-4)
    following = page.locator("[data-testid=next] .true")
    expect(following).to_have_attribute("data-id", str(ids[4]))


def test_typing_tokenizes_the_text(decoder: Trained, visit: Visit) -> None:
    _, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT)
    page.get_by_test_id("box-text").fill("the dog ran")
    page.wait_for_url(lambda url: "dog" in url)
    settle(page)
    assert page.locator("[data-testid=strip-text] .token").count() == len(tok.encode("the dog ran"))
    page.go_back()
    page.wait_for_url(lambda url: "mat" in url)
    settle(page)
    assert page.locator("[data-testid=strip-text] .token").count() == len(tok.encode(TEXT))


def test_a_candidate_branches_the_text_at_the_selected_token(decoder: Trained, visit: Visit) -> None:
    _, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT)
    ids = tok.encode(TEXT)
    second = list(candidates(page))[1]
    page.locator(f"[data-testid=next] [data-id='{second}'] button").click()
    settle(page)
    assert state_of(page)["appended"] == [second]
    assert page.locator("[data-testid=strip-text] .token").count() == len(ids) + 1
    page.get_by_test_id("remove-last").click()
    settle(page)
    page.locator("[data-testid=strip-text] .token").nth(1).click()
    settle(page)
    third = list(candidates(page))[2]
    page.locator(f"[data-testid=next] [data-id='{third}'] button").click()
    settle(page)
    assert state_of(page)["appended"] == [*ids[:2], third]
    shown = [int(one.get_attribute("data-id") or "") for one in page.locator("[data-testid=strip-text] .token").all()]
    assert shown == [*ids[:2], third]


@pytest.mark.parametrize("kind", first_of(["pair", "decoder"]))
def test_generation_matches_generate(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    model, tok = request.getfixturevalue(kind)
    if kind == "decoder":
        page = visit((model, tok), view="tokens", text=TEXT, temperature=0)
        (expected,) = gh.generate(model, tok, TEXT, max_new_tokens=20)
        begun: list[int] = []
    else:
        (whole,) = gh.generate(model, tok, SOURCE, max_new_tokens=20)
        begun = whole.ids[:1]
        page = visit((model, tok), view="tokens", text=SOURCE, appended=begun, temperature=0)
        expected = whole
    page.get_by_test_id("generate-20").click()
    page.wait_for_url(lambda url: "seed=1" in url)
    settle(page)
    assert state_of(page)["appended"] == expected.ids


def test_sampling_depends_on_temperature_top_k_and_top_p(
    decoder: Trained, visit: Visit, picture: Callable[[Page, str], Path]
) -> None:
    model, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT, temperature=1.5, top_k=5, top_p=0.9)
    picture(page, "text-sampling")
    logits = model(torch.tensor([tok.encode(TEXT)]))[0, -1]
    hot = (logits / 1.5).softmax(-1)
    order = hot.argsort(descending=True)[:5]
    kept = hot[order] / hot[order].sum()
    inside = (kept.cumsum(0) - kept) < 0.9  # the likeliest that together reach it
    kept = kept * inside / (kept * inside).sum()
    for token, expected in zip(order.tolist(), kept.tolist(), strict=True):
        row = page.locator(f"[data-testid=next] [data-id='{token}']")
        assert float(row.get_attribute("data-sampling") or "") == pytest.approx(expected, abs=1e-5)
    expect(page.get_by_test_id("next-facts")).to_contain_text(f"{int(inside.sum())} candidate")
    slider = page.get_by_label("temperature")
    slider.focus()
    slider.press("Home")
    settle(page)
    likeliest = page.locator("[data-testid=next] [role=listitem]").first
    assert float(likeliest.get_attribute("data-sampling") or "") == 1.0
    page.get_by_test_id("generate-1").click()
    page.wait_for_url(lambda url: "seed=1" in url)
    assert state_of(page)["appended"] == [int(logits.argmax())]


def test_masked_tokens_are_predicted(encoder: Trained, visit: Visit, picture: Callable[[Page, str], Path]) -> None:
    model, tok = encoder
    page = visit(encoder, view="tokens", text=TEXT, token=3)
    page.get_by_test_id("mask").click()
    settle(page)
    ids = tok.encode(TEXT)
    ids[3] = tok.special_id("mask") or 0
    expected = model(torch.tensor([ids]))[0, 3].softmax(-1)
    assert candidates(page)[int(expected.argmax())] == pytest.approx(float(expected.max()), rel=1e-4)
    picture(page, "tokens-masked")
    page.get_by_test_id("mask").click()
    settle(page)
    assert "masked" not in state_of(page)


def test_the_merge_tree_of_a_word(decoder: Trained, visit: Visit) -> None:
    _, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT)
    word = tok.pretokenize(TEXT)[-1]
    states = list(bpe.merge_steps(word, tok.merge_ranks))
    rows = page.locator("[data-testid=merges] tbody tr")
    assert rows.count() == len(states)
    for row, state in zip(rows.all(), states, strict=True):
        shown = [one.replace("␣", " ") for one in row.locator(".token").all_inner_texts()]
        assert shown == [one.decode() for one in state]
    assert page.locator("[data-testid=tree] rect").count() == 2 * len(word) - len(states[-1])  # of binary trees


def test_bpe_training_on_the_text(decoder: Trained, visit: Visit) -> None:
    text = "low lower lowest low low"
    page = visit(decoder, view="tokens", text=text)
    counts: dict[bytes, int] = {}
    for word in gh.text.bpe.pretokenizer.split(text, "gpt2"):
        counts[word.encode()] = counts.get(word.encode(), 0) + 1
    merges = list(bpe.learn(counts, 256 + 200))
    slider = page.get_by_label("merge", exact=True)
    slider.focus()
    slider.press("Home")
    now = [[bytes([byte]) for byte in word.encode()] for word in gh.text.bpe.pretokenizer.split(text, "gpt2")]
    for number, merge in enumerate(merges, 1):
        slider.press("ArrowRight")
        now = [bpe.merge_pair(word, merge.pair, merge.pair[0] + merge.pair[1]) for word in now]
        shown = [
            one.replace("␣", " ").encode() for one in page.locator("[data-testid=learned] .token").all_inner_texts()
        ]
        assert shown == [token for word in now for token in word]
        expect(page.get_by_test_id("merge")).to_contain_text(f"Merge {number}")
    slider.press("Home")
    page.get_by_test_id("play").click()
    expect(page.get_by_test_id("merge")).to_contain_text(f"Merge {len(merges)}")


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "</script><script>alert(1)</script>",
    "left \u202eright to left\u202c and \u200b\u200d\ufeff zero",
    "x" * 10_000,
    "\x00\x1b[31m\x07\x7f",
    "e" + "\u0301" * 300,
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd",
]
LONG = (1, 5, 6)  # much like others
LOOKED_AT = [pytest.param(text, marks=[pytest.mark.long] * (at in LONG)) for at, text in enumerate(HOSTILE)]


@pytest.mark.parametrize("text", LOOKED_AT, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("width", [pytest.param(1280, marks=pytest.mark.long), 400])
def test_hostile_tokens_are_text(text: str, width: int, decoder: Trained, visit: Visit) -> None:
    model, _ = decoder
    # A vocabulary with the text as one token is the worst case: nothing is broken up.
    tok = hostile_tokenizer(text)
    small = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), n_layers=1)).eval()
    for loaded, given in (((model, decoder[1]), text), ((small, tok), text)):
        page = visit(loaded, view="tokens", width=width, text=given)
        page.on("dialog", lambda dialog: pytest.fail(f"the text acted: {dialog.message}"))
        assert page.locator("[data-testid=strip-text] .token").count() > 0
        assert page.locator("#page img").count() == 1  # the house in the corner, and no other
        assert page.locator("script").count() == 3  # the import map, the manifest and main.js
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        shown = page.locator("[data-testid=strip-text]").inner_text()
        assert not any(sign in shown for sign in "\u202e\u200b\u200d\ufeff\x00\x1b\x07\x7f")


def hostile_tokenizer(text: str) -> gh.Tokenizer:
    """Return a tokenizer that knows a text as one token."""
    words = {"type": "WordLevel", "vocab": {text: 0, "a": 1, "b": 2}, "unk_token": "a"}
    return gh.Tokenizer.from_json(json.dumps({"version": "1.0", "model": words}))


@pytest.mark.long  # test_page.py has one picture of each
@pytest.mark.parametrize(("width", "dark"), [(400, False), (400, True), (1280, True)])
def test_it_fits_small_screens_and_the_dark(
    width: int, dark: bool, decoder: Trained, visit: Visit, picture: Callable[[Page, str], Path]
) -> None:
    page = visit(decoder, view="tokens", width=width, dark=dark, text=TEXT)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    picture(page, f"text-{width}-{'dark' if dark else 'light'}")


def test_a_model_without_a_tokenizer_takes_ids(visit: Visit) -> None:
    model = gh.build(gh.preset("tiny-decoder")).eval()
    page = visit((model, None), view="tokens")
    assert page.locator("[data-testid=strip-text] .token").all_inner_texts() == NUMBERS.split()
    page.get_by_test_id("box-text").fill("five")
    expect(page.locator(".status")).to_contain_text("no tokenizer")


def test_keys_walk_through_layers_heads_and_views(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="tokens", text=TEXT)
    page.locator("body").press("]")
    page.locator("body").press(".")
    page.locator("body").press(".")
    page.locator("body").press(",")
    settle(page)
    assert {name: state_of(page)[name] for name in ("layer", "head")} == {"layer": 1, "head": 1}
    page.locator("body").press("3")
    settle(page)
    assert state_of(page)["view"] == "attention"
    page.locator("body").press("?")
    expect(page.get_by_role("dialog")).to_be_visible()


def test_the_url_has_the_state_but_no_access_token(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="tokens", text=TEXT, layer=1)
    assert "token=" not in urlsplit(page.url).query
    assert state_of(page) == {"view": "tokens", "text": TEXT, "layer": 1}


@pytest.mark.parametrize("kind", ONE_KIND)
def test_the_same_in_python(kind: str, request: pytest.FixtureRequest, visit: Visit) -> None:
    """The code on the page runs, and gives what the page shows, also of a long text or with something hidden."""
    model, tok = request.getfixturevalue(kind)
    asked: dict[str, dict[str, object]] = {
        "decoder": {"text": f"{TEXT}. " * 40, "appended": [7]},
        "encoder": {"text": TEXT, "masked": [2, 4], "token": 2},
        "pair": {"text": SOURCE, "target": "eins fünf"},
    }
    site = "decoder.z.0[head=1]" if kind == "pair" else "z.0[head=1]"
    page = visit((model, tok), view="tokens", edits=[{"kind": "scale", "site": site, "factor": 0.5}], **asked[kind])
    names: dict[str, Any] = {"model": model, "tok": tok}
    exec(page.locator(".python code").text_content() or "", names)
    for token, probability in candidates(page).items():
        assert probability == pytest.approx(float(names["probabilities"][token]), rel=1e-4, abs=1e-7)


def test_a_full_bar_is_a_probability_of_one(decoder: Trained, visit: Visit) -> None:
    """An untrained model's best token, of one percent, must not look like certainty."""
    page = visit(decoder, view="tokens", text="one two")
    expect(page.locator(".full-bar").first).to_have_text("full bar: 100%")
    widths = page.locator(".bar").evaluate_all(
        """all => all.map((one) => [
          one.querySelector(".filled").getBoundingClientRect().width / one.querySelector(".track").clientWidth,
          Number(one.querySelector(".figure").dataset.value)])"""
    )
    assert len(widths) > 3
    for width, probability in widths:
        assert width == pytest.approx(probability, abs=0.01)


def test_generated_tokens_are_shown_beside_the_button(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, view="tokens", text=TEXT, temperature=0)
    page.get_by_test_id("generate-20").click()
    settle(page)
    (made,) = gh.generate(*decoder, TEXT, max_new_tokens=20, temperature=0)
    shown = page.locator(".written .token")
    expect(shown).to_have_count(len(made.ids))
    assert [int((one.get_attribute("title") or "").split("id ")[-1]) for one in shown.all()] == made.ids
