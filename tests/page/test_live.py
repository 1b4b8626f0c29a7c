"""Live pages: the model runs in the browser, and answers as the server does on the same rounded weights."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Trained, Visit, settle
from live_comparison import Request, answer, decoded, differences, initial_requests
from playwright.sync_api import Browser, Page, expect
from test_html_export import opened

import glasshouse as gh
from glasshouse.config import JsonDict
from glasshouse.errors import InputError
from glasshouse.page.live import file
from glasshouse.page.live.file import LIVE_ENDPOINTS, LIVE_VIEWS
from glasshouse.page.live.graph import export_graph
from glasshouse.page.live.operations import ARITHMETIC, OPERATIONS
from glasshouse.page.live.program import rounded
from glasshouse.page.live.steps import describe_steps
from glasshouse.page.live.tokenizer import describe_tokenizer
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.viewer import Look

TEXT = "the cat sat on the mat"
PLAIN = """(value) => {
  const plain = (one) => {
    if (one === null || typeof one !== "object") return one;
    if (ArrayBuffer.isView(one)) return Array.from(one, (x) => (Number.isNaN(x) ? null : String(x)));
    if (Array.isArray(one)) return one.map(plain);
    return Object.fromEntries(Object.entries(one).map(([name, x]) => [name, plain(x)]));
  };
  return plain(value);
}"""
ASK = f"""async (requests) => {{
  const plain = {PLAIN};
  const {{ ask }} = await import("glasshouse/live_model.js");
  const found = requests.map(([name, body]) => ask(name, body).then(plain, (error) => ({{ error: error.message }})));
  return JSON.stringify(await Promise.all(found));
}}"""


@pytest.fixture(autouse=True, scope="module")
def _few_cards() -> Iterator[None]:
    """Put two cards of the notes into each file: all of them take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file, "CARDS", {"notes_cards": "T1,V2"})
        yield


def ask(page: Page, requests: list[Request]) -> list[Any]:
    """Return what the worker of a live page answers."""
    found: list[Any] = json.loads(page.evaluate(ASK, [list(one) for one in requests]))
    return [decoded(one) for one in found]


class LivePage:
    """A live page in a browser, and the server's answers on the same weights."""

    def __init__(self, browser: Browser, trained: Trained, path: Path, **state: object) -> None:
        model, tok = trained
        self.model, self.tok = rounded(model), tok
        self.traces = TraceCache(ModelLoader.from_model(self.model, tok))
        Look(self.traces, state).save(path, live=True)
        self.path, self.troubles = path, list[str]()
        self.page = opened(browser, path, self.troubles)

    def compare(self, requests: list[Request]) -> Counter[str]:
        """Compare all answers; return how many there were by endpoint."""
        wrong = []
        for request, live in zip(requests, ask(self.page, requests), strict=True):
            said = list(differences(live, answer(self.traces, request)))
            wrong += [f"{request[0]} {request[1]}: {said[:3]}"] if said else []
        assert not wrong, "\n".join(wrong[:10])
        return Counter(name for name, _ in requests)


@pytest.fixture(scope="module")
def live_decoder(browser: Browser, decoder: Trained, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LivePage]:
    live = LivePage(browser, decoder, tmp_path_factory.mktemp("live") / "page.html", text=TEXT)
    yield live
    live.page.context.close()
    assert not live.troubles


def edited(prefix: str) -> list[JsonDict]:
    """Return edits of each kind."""
    return [
        {"kind": "scale", "site": f"{prefix}z.0[head=1]"},  # by 0
        {"kind": "scale", "site": f"{prefix}resid_mid.0[position=-1]", "factor": 0.5},
        {"kind": "mean", "site": f"{prefix}ffn_out.1"},
    ]


def interventions(traces: TraceCache, text: str, other: str, prefix: str = "") -> list[Request]:
    """Return sweeps of ablations and patches, and texts that are generated under edits."""
    prompt: JsonDict = {"text": text, "appended": [5]}
    plain: JsonDict = {"prompt": prompt}
    scaled = {"prompt": prompt, "edits": edited(prefix)[:1]}
    everything = {"prompt": prompt, "edits": edited(prefix)}
    patched = {**everything, "edits": [{"kind": "patch", "site": f"{prefix}resid_post.0[position=0]"}]}
    patched["patch_from"] = {"text": other, "appended": [5]}
    sites = [f"{prefix}z.{layer}[head={head}]" for layer in range(2) for head in range(2)] + [f"{prefix}ffn_out.0"]
    positions = [f"{prefix}resid_post.1[position=0]", f"{prefix}z.1[head=0]"]
    requests: list[Request] = [("ablate_each", {"forward_pass": one, "sites": sites}) for one in (plain, everything)]
    requests.append(("compare_predictions", {"forward_pass": patched, "position": 0}))
    requests.append(("patch_each", {"forward_pass": {**plain, "patch_from": {"text": other}}, "sites": positions}))
    requests.append(("next", {"forward_pass": {**plain, "edits": [{"kind": "mean", "site": f"{prefix}pattern.0"}]}}))
    if traces.loader.get("").model.spec.kind != "encoder":
        placed = [{"kind": "scale", "site": f"{prefix}resid_mid.0[position=2:14]", "factor": 0.2}]
        for edits in (placed, everything["edits"]):  # the last are refused
            requests.append(("generate", {"forward_pass": {"prompt": prompt, "edits": edits}, "max_new_tokens": 12}))
        requests += [("generate", {"forward_pass": one, "max_new_tokens": 12}) for one in (plain, scaled)]
        settings = {"temperature": 4.0, "top_k": 20, "top_p": 0.9, "seed": 7}
        requests.append(("generate", {"forward_pass": plain, "max_new_tokens": 12, **settings}))
        requests.append(("next", {"forward_pass": plain, **settings} | {"show": 5}))
        del requests[-1][1]["seed"]
    return requests


@pytest.mark.smoke
def test_a_live_page_answers_as_the_server_does(live_decoder: LivePage) -> None:
    states: list[JsonDict] = [
        {"text": TEXT},
        {"text": TEXT, "layer": 1, "head": 2, "token": 2, "key": 1, "edits": edited("")},
        {"text": f"{TEXT} and the dog sat on the rug", "residual_token": 7, "residual_incorrect_token": 9},
    ]
    traces = live_decoder.traces
    requests = initial_requests(traces, *states) + interventions(traces, TEXT, "a dog ran to the tree")
    odd = "a\x7f\u200b b\xa0é 😀😀\n\t\\"  # shown with escapes
    requests.append(("train_bpe", {"text": odd, "merges": 20}))
    requests.append(("word_merges", {"forward_pass": {"prompt": {"text": odd}}, "position": 1}))
    asked = live_decoder.compare(requests)
    assert asked.keys() == {*LIVE_ENDPOINTS} - {"tokenize", "cross_attention", "beams"}


@pytest.mark.parametrize("kind", ["encoder", "pair"])
def test_encoders_and_encoder_decoders_answer_likewise(
    kind: str, request: pytest.FixtureRequest, browser: Browser, tmp_path: Path
) -> None:
    prefix, text = ("decoder.", "one five two") if kind == "pair" else ("", TEXT)
    live = LivePage(browser, request.getfixturevalue(kind), tmp_path / "page.html", text=text)
    states: list[JsonDict] = [{"text": text}, {"text": text, "layer": 1, "edits": edited(prefix)}]
    if kind == "encoder":
        states.append({"text": text, "masked": [2]})
    else:
        states.append({"text": text, "attention": "encoder.pattern", "walkthrough_side": "source"})
    other = "three six six" if kind == "pair" else "a dog ran to the tree"
    live.compare(initial_requests(live.traces, *states) + interventions(live.traces, text, other, prefix))
    live.page.context.close()
    assert not live.troubles


def test_greedy_text_is_that_of_generate(live_decoder: LivePage) -> None:
    # The same function of logits within 1e-4 of each other: the texts may part at a tie, which there is none of here.
    for text in (TEXT, "a bird", "the dog ran to"):
        body = {"forward_pass": {"prompt": {"text": text}}, "max_new_tokens": 34}
        (found,) = ask(live_decoder.page, [("generate", body)])
        assert found["text"] == gh.generate(live_decoder.model, live_decoder.tok, text, max_new_tokens=34)[0].text


def odd_strings(count: int) -> list[str]:
    """Return strings of every script, with spaces of all kinds, emoji, control characters and special tokens."""
    drawn = random.Random(0)
    characters = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) not in ("Cs", "Cn", "Co")]
    pieces = [
        " ",
        "  ",
        "\n",
        "\t",
        "\r\n",
        "\x85",
        "\ufeff",
        "\xa0",
        "\u3000",
        "'s",
        "'S",
        "'\u017f",
        "'re",
        "12",
        "1234",
    ]
    pieces += [
        "<|endoftext|>",
        "<|pad|>",
        "def f(x):",
        "é",
        "e\u0301",
        "😀",
        "👩‍👩‍👧",
        "🇩🇪",
        "\x00",
        "\u200d",
        "\ud800",
    ]

    def piece() -> str:
        kind = drawn.random()
        return drawn.choice(pieces if kind < 0.5 else characters if kind < 0.85 else "abcXYZ_.,!'0 ")

    return ["".join(piece() for _ in range(drawn.randint(0, 30))) for _ in range(count)]


def check_token_ids(live: LivePage, strings: list[str]) -> None:
    """Compare ids, which a page is given by `tokenize`, with Python's; both refuse a lone surrogate."""
    requests: list[Request] = [
        ("tokenize", {"forward_pass": {"prompt": {"text": one, "appended": [5]}}}) for one in strings
    ]
    for text, found in zip(strings, ask(live.page, requests), strict=True):
        if "\ud800" in text:
            assert "lone surrogate" in found["error"], repr(text)
            continue
        expected = [*(live.tok.encode(text) if text else []), 5]
        assert [one["id"] for one in found["text"]] == expected, repr(text)


def test_token_ids_are_those_of_python(live_decoder: LivePage, decoder: Trained) -> None:
    limit = live_decoder.model.spec.max_len
    strings = [one for one in odd_strings(600) if len(one.encode(errors="replace")) < limit]
    check_token_ids(live_decoder, strings)


def test_a_live_page_can_be_used_without_a_server(live_decoder: LivePage) -> None:
    page = live_decoder.page
    assert "weights in float16" in page.locator(".facts").inner_text()
    for view in (*LIVE_VIEWS, "circuit"):
        if page.locator(f"#tab-{view}").count():
            page.locator(f"#tab-{view}").click()
            settle(page)
            assert not page.locator(".pane > .trouble").is_visible(), view
    assert "needs the running page" in page.locator("#main").inner_text()  # of the circuit
    page.locator("#tab-tokens").click()
    page.get_by_test_id("box-text").fill("a bird sang")
    expect(page.get_by_test_id("strip-text")).to_contain_text("sang")
    settle(page)
    with torch.no_grad():
        expected = live_decoder.model(torch.tensor([live_decoder.tok.encode("a bird sang")]))[0, -1].softmax(-1).max()
    first = page.locator("[data-testid=next] .figure").first
    assert float(first.get_attribute("data-value") or "") == pytest.approx(float(expected), rel=1e-4)


def test_the_cards_of_the_notes_are_those_of_the_saved_text(live_decoder: LivePage) -> None:
    page = live_decoder.page
    page.evaluate("location.hash = '#notes/V2'")
    settle(page)
    drawn = page.get_by_test_id("figure-V2").inner_text()
    with torch.no_grad():
        best = live_decoder.model(torch.tensor([live_decoder.tok.encode(TEXT)]))[0, -1].softmax(-1).max()
    assert f"{best:.3f}" in drawn  # after the last layer
    page.get_by_test_id("box-text").fill("a bird sang")
    expect(page.get_by_test_id("strip-text")).to_contain_text("sang")
    settle(page)
    assert page.get_by_test_id("figure-V2").inner_text() == drawn
    assert not page.locator(".pane > .trouble").is_visible()
    missing = page.locator("#card-V1 .head")
    assert missing.is_disabled()  # which the file does not have
    assert "needs the running page" in (missing.get_attribute("title") or "")
    page.evaluate("location.hash = '#tokens'")
    settle(page)


def test_the_interpreter_has_the_operations_and_the_worker_the_endpoints(live_decoder: LivePage) -> None:
    ((known),) = ask(live_decoder.page, [("known", {})])
    assert {*known["endpoints"]} == {*LIVE_ENDPOINTS}
    of_sizes = {*ARITHMETIC.values(), "getitem", "size"}
    assert {*known["operations"]} == OPERATIONS | of_sizes


def test_nothing_hostile_runs(browser: Browser, tmp_path: Path) -> None:
    hostile = "</script><img src=x onerror=alert(1)><script>alert(2)</script>"
    roles = {"eos": hostile, "pad": "'-alert(3)-'"}
    tok = gh.Tokenizer.train(texts=[hostile * 9], vocab_size=300, special_tokens=roles)
    model = gh.build(gh.preset("tiny-decoder", vocab_size=len(tok), n_layers=1)).eval()
    traces = TraceCache(ModelLoader.from_model(rounded(model), tok, name=hostile))
    path = tmp_path / "page.html"
    Look(traces, {"text": hostile}).save(path, live=True)
    html = path.read_text()
    assert hostile not in html
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "default-src 'none'" in policy[1]
    assert "unsafe-eval" not in policy[1]
    troubles: list[str] = []
    page = opened(browser, path, troubles)
    page.on("dialog", lambda dialog: troubles.append(dialog.message))
    for view in ("tokens", "attention", "walkthrough"):
        page.locator(f"#tab-{view}").click()
        settle(page)
    assert page.locator("h1").inner_text() == hostile
    assert page.locator("img[src=x]").count() == 0
    page.context.close()
    assert not troubles


def test_what_a_live_page_cannot_have_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        large, small = (gh.build(gh.preset(name)) for name in ("gpt2", "tiny-decoder"))
    with pytest.raises(
        InputError, match=r"124,439,808 parameters, so that the live page would have 333 MB; it may have"
    ):
        gh.look(large).save(tmp_path / "page.html", live=True)
    with pytest.raises(InputError, match=r"no tokenizer, but a live page needs one"):
        gh.look(small).save(tmp_path / "page.html", live=True)
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1}, "unk_token": "[UNK]"}
    file = {"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    with pytest.raises(InputError, match=r"the tokenizer is WordLevel, but a live page needs byte-level BPE"):
        describe_tokenizer(gh.Tokenizer.from_json(json.dumps(file)))
    bpe = json.loads(gh.Tokenizer.train(texts=["to be"], vocab_size=263).to_json())
    bpe["normalizer"] = {"type": "Lowercase"}
    with pytest.raises(InputError, match=r"the tokenizer normalizes by Lowercase"):
        describe_tokenizer(gh.Tokenizer.from_json(json.dumps(bpe)))
    bpe = {**bpe, "normalizer": None, "pre_tokenizer": {"type": "Digits", "individual_digits": True}}
    with pytest.raises(InputError, match=r"the tokenizer splits texts by Digits in a way that"):
        describe_tokenizer(gh.Tokenizer.from_json(json.dumps(bpe)))


class Bessel(torch.nn.Module):
    """A function that no page knows."""

    def forward(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.special.bessel_j0(inputs["x"]),)


def test_an_unknown_operation_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"computes 'aten::special_bessel_j0', which the interpreter of a live page"):
        export_graph(Bessel(), {"x": torch.ones(3)}, {"x": None}, ["y"])


def test_the_save_button_saves_a_live_page(decoder: Trained, visit: Visit, browser: Browser, tmp_path: Path) -> None:
    page = visit(decoder, text=TEXT, view="attention", layer=1)
    page.get_by_role("button", name="Save").click()
    with page.expect_download() as coming:
        page.get_by_role("button", name="Live page").click()
    coming.value.save_as(tmp_path / "page.html")
    troubles: list[str] = []
    saved = opened(browser, tmp_path / "page.html", troubles)
    assert "weights in float16" in saved.locator("header .facts").inner_text()
    assert "layer=1" in saved.evaluate("document.getElementById('saved').textContent")
    assert not saved.locator(".pane > .trouble").is_visible()
    assert not troubles
    saved.context.close()


def test_each_layer_has_its_own_rotation() -> None:
    position = {"kind": "rotary", "theta": 100.0, "local_theta": 9.0}
    found = describe_steps(gh.build(gh.preset("tiny-decoder", position=position, windows=(0, 4))))
    assert found is not None
    assert [one["theta"] for one in found["rotate"]] == [100.0, 9.0]
