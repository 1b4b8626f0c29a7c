"""Saliency in the tokens view: the colours and figures over the text, or over source and target, live and saved.

Models run in float32: sums in other batches differ in their last digits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Trained, Visit, settle
from playwright.sync_api import Browser, Page, expect
from test_html_export import opened as opened_offline
from test_residual_stream_view import Picture, asked_on_opening, state_of

import glasshouse as gh
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import forward_pass_of, with_defaults
from glasshouse.page.views import saliency, tokenization

PRODUCT = "gradient \u00d7 input"
TEXT, SOURCE = "the cat sat on the mat", "one five two"
STEPS = 100  # of short texts and small models


def scores(page: Page, testid: str = "saliency") -> torch.Tensor:
    found = page.eval_on_selector_all(
        f"[data-testid={testid}] .token", "all => all.map(one => Number(one.dataset.value))"
    )
    return torch.tensor(found)


def near(shown: torch.Tensor, value: torch.Tensor) -> None:
    torch.testing.assert_close(shown, value, rtol=1e-3, atol=1e-4)


def number(page: Page, name: str) -> float:
    return float(page.get_by_test_id(name).get_attribute("data-value") or "")


@pytest.mark.smoke
@pytest.mark.parametrize("width", [1366, pytest.param(400, marks=pytest.mark.long)])
def test_saliency_of_a_decoder(width: int, decoder: Trained, visit: Visit, picture: Picture) -> None:
    model, tok = decoder
    page = visit(decoder, view="tokens", text=TEXT, width=width)
    expect(page.get_by_test_id("saliency")).to_be_hidden()
    page.get_by_role("radio", name="integrated gradients").click()
    settle(page)
    ids = torch.tensor([tok.encode(TEXT)])
    last = ids.shape[1] - 1
    token = int(model(ids)[0, last].argmax())
    found = gh.saliency(model, ids, positions=[last], token=token, steps=STEPS)
    near(scores(page), found.scores[0, 0])
    assert number(page, "saliency-value") == pytest.approx(float(found.target_value), abs=1e-3)
    assert number(page, "saliency-baseline") == pytest.approx(float(found.baseline_value), abs=1e-3)
    assert number(page, "saliency-gap") == pytest.approx(abs(float(found.completeness_gap)), abs=1e-3)
    picture(page, f"saliency-decoder-{width}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    # A click selects a token, whose prediction is explained then; nothing after it counts.
    page.get_by_test_id("saliency").locator(".token").nth(2).click()
    settle(page)
    assert state_of(page)["token"] == 2
    page.get_by_test_id("saliency-output").select_option(index=2)
    page.get_by_test_id("saliency-incorrect").select_option(index=1)
    settle(page)
    logits = model(ids)[0, 2].detach()
    incorrect, token = logits.topk(2).indices.tolist()
    found = gh.saliency(model, ids, positions=[2], token=token, incorrect_token=incorrect, steps=STEPS)
    near(scores(page), found.scores[0, 0])
    assert not scores(page)[3:].any()
    assert number(page, "saliency-value") == pytest.approx(float(logits[token] - logits[incorrect]), abs=1e-3)


def colours(page: Page, testid: str) -> list[str]:
    return page.eval_on_selector_all(
        f"[data-testid={testid}] .token", "all => all.map(one => getComputedStyle(one).backgroundColor)"
    )


def test_over_source_and_target(pair: Trained, visit: Visit, picture: Picture) -> None:
    model, tok = pair
    page = visit(pair, view="tokens", text=SOURCE, tokens_saliency="integrated_gradients")
    (made,) = gh.generate(model, tok, SOURCE)
    source = torch.tensor([[*tok.encode(SOURCE), model.spec.end_ids[0]]])
    target = torch.tensor([[model.spec.start_id, *made.ids]])
    last = target.shape[1] - 1
    token = int(model(source, target)[0, last].argmax())
    found = gh.saliency(model, source, target, positions=[last], token=token, steps=STEPS)
    near(scores(page), found.scores[0, 0])
    assert found.source_scores is not None
    near(scores(page, "saliency-source"), found.source_scores[0, 0])
    expect(page.get_by_role("radio", name="attention rollout")).to_have_count(0)
    picture(page, "saliency-pair")
    # One scale for both: the largest score alone has the full colour, which changes with the theme.
    rows = ["saliency-source", "saliency"]
    both = torch.cat([scores(page, one) for one in rows]).abs()
    shown = [one for row in rows for one in colours(page, row)]
    assert shown.count(shown[int(both.argmax())]) == 1
    page.locator("button[aria-label*=theme], button[title*=dark], button[title*=theme]").first.click()
    assert [one for row in rows for one in colours(page, row)] != shown


def test_a_masked_token_and_rollout(encoder: Trained, visit: Visit) -> None:
    model, tok = encoder
    page = visit(encoder, view="tokens", text=TEXT, token=1, masked=[1], tokens_saliency="attention_rollout")
    ids = torch.tensor([tok.encode(TEXT)])
    ids[0, 1] = tok.special_id("mask")
    near(scores(page), gh.inspection.attention_rollout(model, ids)[-1, 0, 1])
    page.get_by_role("radio", name=PRODUCT).click()
    settle(page)
    found = gh.saliency(model, ids, positions=[1], token=int(model(ids)[0, 1].argmax()), method="gradient_x_input")
    near(scores(page), found.scores[0, 0])


def test_a_saved_page_has_every_method(
    decoder: Trained, visit: Visit, browser: Browser, tmp_path: Path, picture: Picture
) -> None:
    model, tok = decoder
    gh.look(model, tok, TEXT, view="tokens").save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened_offline(browser, tmp_path / "page.html", troubles)
    ids = torch.tensor([tok.encode(TEXT)])
    last = ids.shape[1] - 1
    for name in ("integrated gradients", PRODUCT, "attention rollout"):
        page.get_by_role("radio", name=name).click()
        settle(page)
        token = int(model(ids)[0, last].argmax())
        method: Any = name.replace(" ", "_").replace("\u00d7", "x")
        found = gh.saliency(model, ids, positions=[last], token=token, method=method, steps=STEPS)
        near(scores(page), found.scores[0, 0])
    picture(page, "saliency-saved")
    # Of another token there is none: the methods are disabled, and say why.
    page.get_by_test_id("saliency").locator(".token").first.click()
    settle(page)
    expect(page.get_by_test_id("saliency")).to_be_hidden()
    expect(page.get_by_role("radio", name="integrated gradients")).to_be_disabled()
    assert not troubles
    page.context.close()


def test_a_saved_page_includes_the_requests_of_the_panel(decoder: Trained, visit: Visit) -> None:
    given = {"text": TEXT, "tokens_saliency": "gradient_x_input", "tokens_output": 5}
    traces = TraceCache(ModelLoader.from_model(*decoder))
    state = with_defaults(traces, given)
    requests = tokenization.initial_requests(traces, forward_pass_of(traces.loader.get(""), state), state)
    page = visit(decoder, view="attention", **given)
    assert asked_on_opening(page, "tokens") >= {request_key(*one) for one in requests if one[0] == "token_saliency"}


def test_the_same_in_python(decoder: Trained, visit: Visit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saliency, "WORK", 0.0)  # few steps, as with a large model, whose scores are others
    page = visit(decoder, view="tokens", text=TEXT, tokens_saliency="integrated_gradients")
    page.click(".python summary")
    names: dict[str, Any] = {"model": decoder[0], "tok": decoder[1]}
    exec(page.locator(".python code").inner_text(), names)
    near(scores(page), names["saliency"].scores[0, 0])
