"""Pages that need no server: saved from Python, from the command line and from the browser."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import WAIT, Trained, Visit, settle
from examples import first_of
from playwright.sync_api import Browser, Page, expect
from saved_page import unpack

import glasshouse as gh
from glasshouse.page import manifest
from glasshouse.page.html_export import request_key
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.url_state import state_of, view_state_keys
from glasshouse.page.viewer import Look

TEXT = "the cat sat on the mat"
VIEWS = {
    "decoder": ["tokens", "attention", "residual", "interventions", "circuit", "walkthrough", "notes"],
    "encoder": ["tokens", "attention", "residual", "interventions", "circuit", "walkthrough", "notes"],
    "pair": ["tokens", "attention", "residual", "interventions", "circuit", "walkthrough", "seq2seq", "notes"],
}


def opened(browser: Browser, path: Path, troubles: list[str]) -> Page:
    """Open a file without any network."""
    context = browser.new_context(offline=True, viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(WAIT)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda line: troubles.append(line.text) if line.type in ("error", "warning") else None)
    page.on(
        "request",
        lambda request: None if request.url.startswith(("file:", "data:", "blob:")) else troubles.append(request.url),
    )
    page.goto(path.as_uri())
    settle(page)
    return page


@pytest.mark.smoke
@pytest.mark.parametrize("kind", first_of(["pair", "decoder", "encoder"]))
def test_a_saved_page_shows_every_view_without_a_server(
    kind: str, request: pytest.FixtureRequest, browser: Browser, tmp_path: Path
) -> None:
    model, tok = request.getfixturevalue(kind)
    path = tmp_path / "page.html"
    gh.look(model, tok, "one five two" if kind == "pair" else TEXT, layer=1, head=2).save(path)
    troubles: list[str] = []
    page = opened(browser, path, troubles)
    for view in VIEWS[kind]:
        page.locator(f"#tab-{view}").click()
        settle(page)
        assert not page.locator(".pane > .trouble").is_visible(), (
            view,
            page.locator(".pane > .trouble").inner_text(),
        )
    assert not troubles
    page.context.close()


def test_a_saved_page_includes_other_tokens_and_heads(decoder: Trained, browser: Browser, tmp_path: Path) -> None:
    model, tok = decoder
    gh.look(model, tok, TEXT, view="tokens").save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened(browser, tmp_path / "page.html", troubles)
    page.locator("[data-testid=strip-text] .token").nth(2).click()
    settle(page)
    expected = model(torch.tensor([tok.encode(TEXT)]))[0, 2].softmax(-1).detach()
    first = page.locator("[data-testid=next] .figure").first
    assert float(first.get_attribute("data-value") or "") == pytest.approx(float(expected.max()), rel=1e-4)
    page.locator("#tab-attention").click()
    settle(page)
    page.locator("body").press("]")
    page.locator("body").press(".")
    settle(page)
    assert not page.locator(".pane > .trouble").is_visible()
    assert not troubles
    page.context.close()


@pytest.mark.smoke
def test_the_save_button_saves_the_current_view(
    decoder: Trained, visit: Visit, browser: Browser, tmp_path: Path
) -> None:
    state = {"text": TEXT, "view": "attention", "layer": 1, "head": 3}
    page = visit(decoder, **state)
    with page.expect_download() as coming:
        page.get_by_role("button", name="Save").click()
        page.get_by_role("button", name="Snapshot").click()
    coming.value.save_as(tmp_path / "page.html")
    kept = unpack((tmp_path / "page.html").read_text(encoding="utf-8"))
    written = unpack(gh.look(*decoder, **state).html())
    assert kept["responses"].keys() >= written["responses"].keys()
    assert kept["selection"] == written["selection"] == ["token", "head"]
    troubles: list[str] = []
    saved = opened(browser, tmp_path / "page.html", troubles)
    assert not saved.locator(".pane > .trouble").is_visible()
    assert "layer=1" in saved.evaluate("document.getElementById('saved').textContent")
    assert not troubles
    saved.context.close()


def test_what_a_saved_page_lacks_is_disabled_and_says_why(decoder: Trained, browser: Browser, tmp_path: Path) -> None:
    model, tok = decoder
    long = " ".join([TEXT] * 4)  # tokens times heads are too many to have them all
    gh.look(model, tok, long, view="interventions").save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened(browser, tmp_path / "page.html", troubles)
    why = "needs the running page: gh.look(model, tok).open()"
    expect(page.get_by_text(why).first).to_be_visible()
    assert page.get_by_test_id("box-text").get_attribute("readonly") is not None
    assert page.locator(".interventions-top button:enabled").count() == 0
    assert page.get_by_test_id("sweep").get_attribute("title") == why
    page.locator("#tab-tokens").click()
    settle(page)
    for name in ("generate-1", "generate-20"):
        assert page.get_by_test_id(name).is_disabled()
        assert page.get_by_test_id(name).get_attribute("title") == why
    assert page.locator(".sampling input:enabled").count() == 0
    # Another token, and then another head: the page stays at what it has, and nothing on it is old.
    page.locator("#tab-attention").click()
    page.locator("[data-testid=strip-text] .token").nth(2).click()
    settle(page)
    before = page.url
    page.get_by_label("head: one more").click()
    expect(page.get_by_role("status").filter(has_text=why)).to_be_visible()
    settle(page)
    assert page.url == before
    assert page.get_by_label("head", exact=True).input_value() == "0"
    assert not troubles
    page.context.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dates-1m", pytest.param("python-3m", marks=pytest.mark.long)])
def test_without_a_text_the_default_one_is_saved(name: str) -> None:
    model, tok = gh.load(name)
    saved = unpack(gh.look(model, tok).html())
    tokens = next(one for key, one in saved["responses"].items() if key.startswith("tokenize"))
    row = tokens.get("text") or tokens["source"]
    example = ModelLoader.from_model(model, tok).example()
    assert "".join(tok.decode([one["id"]]) for one in row).startswith(example)
    assert state_of(saved["fragment"])["text"] == example


@pytest.mark.long
@pytest.mark.parametrize("name", ["python-3m", "english-4m", "dates-1m"])
def test_a_bundled_model_saved_without_a_text_shows_all_its_tabs(name: str, browser: Browser, tmp_path: Path) -> None:
    Look(TraceCache(ModelLoader(name)), {}).save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened(browser, tmp_path / "page.html", troubles)
    for tab in page.get_by_role("tab").all():
        tab.click()
        settle(page)
        assert page.locator(".view .panel, .view .card").count(), tab.inner_text()
        assert not page.locator(".pane > .trouble, .status.trouble").filter(visible=True).count(), tab.inner_text()
    assert not troubles
    page.context.close()


@pytest.mark.long
def test_a_pair_saved_without_a_text_shows_its_tokens(browser: Browser, tmp_path: Path) -> None:
    gh.look(*gh.load("dates-1m")).save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened(browser, tmp_path / "page.html", troubles)
    for side in ("source", "target"):
        assert page.locator(f"[data-testid=strip-{side}] .token").count() > 1
    assert not troubles
    page.context.close()


def test_a_hostile_text_is_escaped(decoder: Trained, browser: Browser, tmp_path: Path) -> None:
    model, tok = decoder
    text = "</script><script>document.title='acted'</script><!-- \u2028 ' \" \\ "
    look = gh.look(model, tok, text)
    look.save(tmp_path / "page.html")
    troubles: list[str] = []
    page = opened(browser, tmp_path / "page.html", troubles)
    assert page.title() != "acted"
    assert page.get_by_test_id("box-text").input_value() == text
    assert not troubles
    page.context.close()


def test_a_notebook_shows_the_page_in_a_frame(decoder: Trained, browser: Browser) -> None:
    model, tok = decoder
    drawn = gh.look(model, tok, TEXT, view="residual")._repr_html_()
    context = browser.new_context(offline=True)
    page = context.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.set_content(f"<p>a cell</p>{drawn}")
    frame = page.frame_locator("iframe")
    frame.locator("body[data-busy=false] .view").first.wait_for()
    assert frame.locator("[data-testid=strip-text] .token").count() == len(tok.encode(TEXT))
    assert frame.locator("#tab-residual").get_attribute("aria-selected") == "true"
    assert not troubles
    context.close()


def test_a_saved_page_is_standalone(decoder: Trained) -> None:
    page = gh.look(*decoder, TEXT).html()
    outside = re.findall(r"""(?:src|href)=["'](?!data:)([^"']+)""", page)
    assert outside == []
    assert "Content-Security-Policy" in page


def test_unknown_views_and_keys_are_rejected(decoder: Trained) -> None:
    with pytest.raises(gh.InputError, match="did you mean attention"):
        gh.look(*decoder, TEXT, view="atention")
    with pytest.raises(gh.InputError, match="no state key 'laier'; did you mean layer"):
        gh.look(*decoder, TEXT, laier=3)
    gh.look(*decoder, TEXT, attention_scale="log")  # what a view keeps for itself
    with pytest.raises(gh.InputError, match="no state key 'attention_scal'; did you mean attention_scale"):
        gh.look(*decoder, TEXT, attention_scal="log")


SELECTIONS: list[tuple[dict[str, object], str]] = [
    ({"layer": 9}, "layer is 9, but it must be within 0 and 1"),
    ({"layer": -1}, "layer is -1, but it must be within 0 and 1"),
    ({"layer": "1"}, "layer is '1', but it must be a whole number"),
    ({"head": 4}, "head is 4, but it must be within 0 and 3"),
    ({"token": 99}, "token is 99, but it must be within -1 and "),
    ({"key": -1}, "key is -1, but it must be within 0 and "),
    ({"text": 5}, "text is 5, but it must be a string"),
    ({"temperature": "hot"}, "temperature is 'hot', but it must be a number"),
    ({"attention": "patern"}, "attention is 'patern', which is unknown; did you mean pattern"),
    ({"edits": [{"kind": "scale", "site": "z.9"}]}, "the model has no site 'z.9'; its layers are 0 to 1"),
    (
        {"view": "seq2seq"},
        "the view 'seq2seq' does not apply to this model; choose one of overview, tokens, attention,",
    ),
    ({"view": "run"}, "the view 'run' does not apply to this model"),
    ({"checkpoint": "step 5"}, "checkpoint is 'step 5', but there is no such checkpoint; leave it out"),
]


@pytest.mark.parametrize(("state", "sentence"), SELECTIONS, ids=[" ".join(state) for state, _ in SELECTIONS])
def test_invalid_selections_are_rejected(state: dict[str, object], sentence: str, decoder: Trained) -> None:
    with pytest.raises(gh.GlasshouseError, match=sentence):
        gh.look(*decoder, **{"text": TEXT, **state})


def test_a_page_is_saved_as_html_alone(decoder: Trained, tmp_path: Path) -> None:
    with pytest.raises(gh.InputError, match=r"a page cannot be saved as 'x.png'; name a file .html"):
        gh.look(*decoder, TEXT).save(tmp_path / "x.png")
    assert not list(tmp_path.iterdir())


def test_wrong_types_are_rejected(decoder: Trained) -> None:
    with pytest.raises(gh.InputError, match="the model is a str, but it must be one that gh"):
        gh.look("runs/mine/model")
    with pytest.raises(gh.InputError, match="the tokenizer is a str, but it must be a gh"):
        gh.look(decoder[0], TEXT)


@pytest.mark.slow
def test_boundary_selections_are_accepted(decoder: Trained, pair: Trained) -> None:
    length = len(decoder[1].encode(TEXT))
    for token in (-1, 0, length - 1):
        gh.look(*decoder, TEXT, layer=1, head=3, token=token, key=length - 1)
    s = pair[0].spec
    deepest = max(s.n_layers, s.n_encoder_layers) - 1
    gh.look(*pair, "one five two", view="seq2seq", attention="encoder.pattern", layer=deepest)


def test_view_state_keys_match_the_scripts() -> None:
    files = Path(gh.page.__file__).parent.joinpath("static").rglob("*.js")
    form = rf"\b(?:{'|'.join(manifest.VIEWS)})_[a-z_]+\b"
    found = {name for path in files for name in re.findall(form, path.read_text())}
    # JSON keys, functions, a method of saliency and an endpoint.
    found -= {"residual_distance", "tokens_per_second", "residual_norms", "attention_rollout", "run_settings"}
    assert found == set(view_state_keys())


@pytest.mark.smoke
def test_the_page_is_served_from_python(decoder: Trained, browser: Browser) -> None:
    server = gh.look(*decoder, TEXT, view="tokens").open(browser=False)
    try:
        page = browser.new_context().new_page()
        page.goto(server.address + "#text=the+dog")
        settle(page)
        assert page.locator("[data-testid=strip-text] .token").count() == len(decoder[1].encode("the dog"))
        page.context.close()
    finally:
        server.close()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"b": 1.0, "a": 0.5}, '{"a":0.5,"b":1}'),
        ({"forward_pass": {"prompt": {"text": 'é"\u2028\n'}}}, None),
        ({"appended": [3, 1], "edits": [{"kind": "scale", "factor": 0.0, "site": "z.0"}]}, None),
    ],
)
def test_python_and_the_browser_agree_on_request_keys(
    body: dict[str, object], expected: str | None, browser: Browser
) -> None:
    page = browser.new_context().new_page()
    order = """(body) => {
      const ordered = (v) => Array.isArray(v) ? v.map(ordered) : v && typeof v === "object"
        ? Object.fromEntries(Object.keys(v).sort().map((k) => [k, ordered(v[k])])) : v;
      return JSON.stringify(ordered(body));
    }"""
    in_browser = page.evaluate(order, json.loads(json.dumps(body)))
    page.context.close()
    assert request_key("x", body) == f"x {in_browser}"
    assert expected is None or in_browser == expected


def test_the_iframe_escapes_the_text(decoder: Trained) -> None:
    drawn = gh.look(*decoder, '"><b>')._repr_html_()
    inside = re.fullmatch(r'<iframe [^>]*srcdoc="([^"]*)"></iframe>', drawn)
    assert inside is not None
    assert html.unescape(inside[1]).startswith("<!doctype html>")
