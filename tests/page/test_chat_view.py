"""The chat beside the API: an answer streams, stops, opens at any token, branches there, and stands beside others."""

from __future__ import annotations

import copy
import http.client
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import WAIT, Trained, is_trouble, settle
from playwright.sync_api import Browser, Page, expect
from test_page import CONTROLS, NAMELESS

import glasshouse as gh
from glasshouse.serve import ServedModel, Server
from glasshouse.serve.answers.kept import KeptChoice
from glasshouse.text.chat.tokens import with_chat_template

KEY = "a-key-of-enough-characters"
SCREENS = [
    (1280, False),
    *(pytest.param(*one, marks=pytest.mark.long) for one in ((1280, True), (400, False), (400, True))),
]
Open = Callable[..., Page]


def serving(models: list[ServedModel], **settings: Any) -> Server:  # noqa: ANN401
    made = Server(models, look=True, **settings)
    made.start()
    while not made.api.runner.ready:
        time.sleep(0.02)
    return made


@pytest.fixture(scope="module")
def changed(decoder: Trained) -> gh.models.Model:
    """The same model after a little more of something."""
    made = copy.deepcopy(decoder[0])
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in made.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return made


@pytest.fixture(scope="module")
def server(decoder: Trained, changed: gh.models.Model) -> Iterator[Server]:
    model, plain = decoder
    tok = with_chat_template(plain)
    joy = gh.steering_vector(model, tok, ["the bird sang"], ["the cat sat"], site="resid_post.1")
    models = [("poet", model, tok), ("tuned", changed, tok)]
    steered = ServedModel("plain", model, plain, slots=2, steering={"joy": joy})
    made = serving([*(ServedModel(*one, slots=2) for one in models), steered])
    yield made
    made.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Open]:
    """Open the page of a server; what goes wrong in the browser fails the test."""
    troubles: list[str] = []
    contexts = []

    def open_page(server: Server, address: str = "/", *, width: int = 1280, dark: bool = False, **known: str) -> Page:
        scheme = "dark" if dark else "light"
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("pageerror", lambda error: troubles.append(f"an error in the page: {error}"))

        def heard(line: Any) -> None:  # noqa: ANN401
            if is_trouble(line) and not any(one in line.text for one in known.values()):
                troubles.append(line.text)

        page.on("console", heard)
        page.goto(server.address + address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not troubles, troubles


def say(page: Page, text: str, answers: int = 1) -> None:
    """Send a message, and wait until every answer to it has ended and opened."""
    settle(page)
    page.get_by_test_id("message").fill(text)
    page.get_by_test_id("send").click()
    ended(page, answers)


def ended(page: Page, answers: int = 1) -> None:
    last = page.locator(".turn").last
    expect(last.locator("[data-testid=answer][data-status=done]:has(.flow)")).to_have_count(answers)


def tokens(page: Page) -> list[int]:
    """The ids of the last answer, as it is shown."""
    shown = page.get_by_test_id("answer").last.locator(".flow:not(.end)")
    return shown.evaluate_all("(all) => all.map((one) => Number(one.dataset.id))")


def kept(server: Server, page: Page) -> KeptChoice:
    """What the server has of the answer whose token is open."""
    found = server.api.answers.find("", page.get_by_test_id("answer-id").last.inner_text())  # type: ignore[union-attr]
    assert found is not None
    return found.choices[0]


def click_token(page: Page, place: int) -> None:
    page.get_by_test_id("answer").last.locator(".flow").nth(place).click()
    expect(page.get_by_test_id("drawn").last).to_be_visible()


@pytest.mark.smoke
def test_a_token_opens_and_branches(server: Server, visit: Open, decoder: Trained) -> None:
    page = visit(server)
    say(page, "the cat sat on")
    before = tokens(page)
    assert len(before) > 5
    click_token(page, 3)
    choice = kept(server, page)
    assert list(choice.ids) == before
    assert (
        list(choice.prompt)
        == with_chat_template(decoder[1])
        .encode_chat([{"role": "user", "content": "the cat sat on"}], add_generation_prompt=True)
        .ids
    )
    draw = choice.draws[3]
    bars = page.get_by_test_id("drawn").locator("[role=listitem]")
    shown = bars.evaluate_all(
        "(all) => all.map((one) => [Number(one.dataset.id), Number(one.querySelector('.figure').dataset.value)])"
    )
    drawn_from = [[one.id, one.probability] for one in draw.candidates]
    assert shown[: len(drawn_from)] == drawn_from  # to the last bit
    other = next(one.id for one in draw.candidates if one.id != before[3] and one.id not in decoder[1].special_ids)
    bars.and_(page.locator(f"[data-id='{other}']")).get_by_role("button").click()
    expect(page.get_by_test_id("versions")).to_contain_text("2 of 2")
    ended(page)
    after = tokens(page)
    assert after[:4] == [*before[:3], other]
    expect(page.locator(".flow.chosen")).to_have_count(1)
    click_token(page, 5)
    assert list(kept(server, page).prompt) == [*choice.prompt, *before[:3], other]
    text = decoder[1].decode([one for one in after if one not in decoder[1].special_ids])
    say(page, "and the dog")  # the branch is what the next message follows
    click_token(page, 0)
    assert text in decoder[1].decode(list(kept(server, page).prompt))
    page.get_by_label("version before").first.click()
    assert tokens(page) == before  # with nothing after it


def test_stop(server: Server, visit: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = server.api.runner.lanes["plain"].engine
    step = engine.step

    def slowly() -> bool:
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(engine, "step", slowly)
    page = visit(server, "/?model=plain", known="404")  # until the server notices
    settle(page)
    page.get_by_test_id("message").fill("the dog")
    page.get_by_test_id("send").click()
    expect(page.get_by_test_id("answer")).to_contain_text(" ")
    expect(page.get_by_test_id("send")).to_be_disabled()
    page.get_by_role("tab", name="Tokens").click()  # the answer goes on meanwhile
    settle(page)
    page.get_by_role("tab", name="Chat").click()
    page.get_by_test_id("stop").click()
    expect(page.locator("[data-testid=answer][data-status=stopped]:has(.flow)")).to_be_visible()
    expect(page.get_by_test_id("stop")).to_be_hidden()
    expect(page.locator(".answer-state")).to_contain_text("stopped")
    click_token(page, 0)
    choice = kept(server, page)
    assert choice.finish_reason == "cancelled"
    assert list(choice.ids) == tokens(page)
    assert not any(lane.has_work() for lane in server.api.runner.lanes.values())


def completed(server: Server, **body: object) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return json.loads(connection.getresponse().read())


def test_an_answer_opens_by_its_id(server: Server, visit: Open, decoder: Trained, changed: gh.models.Model) -> None:
    answer = completed(server, model="tuned", prompt="a bird sang", max_tokens=8, seed=1, return_token_ids=True)
    prompt, ids = decoder[1].encode("a bird sang"), answer["choices"][0]["token_ids"]
    page = visit(server, f"/#answer={answer['id']}")
    page.wait_for_url("**/?model=tuned#**")  # the page of the model that gave it
    settle(page)
    expect(page.get_by_test_id("asked")).to_contain_text("a bird sang")
    assert tokens(page) == ids
    click_token(page, 2)
    page.get_by_test_id("look-attention").click()
    expect(page.locator("body")).to_have_attribute("data-view", "attention")
    settle(page)
    row = page.locator("[data-testid=strip-text] .token")
    assert [int(one.get_attribute("data-id") or -1) for one in row.all()] == [*prompt, *ids]
    at = len(prompt) + 2 - 1  # where the third token was drawn
    expect(row.nth(at)).to_have_attribute("aria-selected", "true")
    with torch.no_grad(), gh.record(changed, "pattern.0") as seen:
        changed(torch.tensor([[*prompt, *ids]]))
    exact = float(seen["pattern.0"][0, 0, at].max())
    shown = page.locator(".figure[data-value]").evaluate_all("(all) => all.map((one) => Number(one.dataset.value))")
    assert exact in shown  # the largest weight of the row, to the last bit
    page.reload()
    settle(page)
    assert row.count() == len(prompt) + len(ids)


def test_an_answer_that_is_not_there_is_reported(server: Server, visit: Open) -> None:
    page = visit(server, "/#view=attention&answer=cmpl-none", known="404")
    expect(page.get_by_role("alert").first).to_contain_text("there is no answer 'cmpl-none'")


def test_two_models_side_by_side(
    server: Server, visit: Open, decoder: Trained, changed: gh.models.Model, picture: Callable[[Page, str], Path]
) -> None:
    page = visit(server)
    settle(page)
    page.get_by_label("tuned", exact=True).check()
    say(page, "the cat saw the dog and", answers=2)
    cells = page.locator(".turn").last.locator(".cell")
    expect(cells).to_have_count(2)
    page.get_by_test_id("part").click()
    expect(page.get_by_test_id("parting")).to_be_visible()
    answers = list(server.api.answers._answers.values())[-2:]  # type: ignore[union-attr]
    first, second = (next(one for one in answers if one.model == name).choices[0] for name in ("poet", "tuned"))
    assert first.prompt == second.prompt
    assert first.options.seed == second.options.seed
    at = next(i for i, (a, b) in enumerate(zip(first.ids, second.ids, strict=False)) if a != b)
    expect(page.get_by_test_id("parts-at")).to_contain_text(f"They part at token {at}:")
    ids = torch.tensor([[*first.prompt, *first.ids]])
    found = gh.compare(decoder[0], changed, ids)
    shown = (
        page.get_by_test_id("divergence")
        .locator("button")
        .evaluate_all("(all) => all.map((one) => Number(one.dataset.value))")
    )
    assert shown == found.kl_divergence[0, len(first.prompt) - 1 : -1].tolist()
    picture(page, "chat-side-by-side")
    page.get_by_label("poet", exact=True).uncheck()
    expect(page.locator(".turn").last.locator(".cell")).to_have_count(1)


def test_text_is_never_html(server: Server, visit: Open) -> None:
    page = visit(server, "/?model=plain")
    hostile = "<img src=x onerror=alert(1)><b>bold</b>"
    say(page, hostile)
    expect(page.get_by_test_id("asked")).to_have_text(hostile)
    assert page.locator(".talk img, .talk b").count() == 0
    answer = completed(server, model="plain", prompt=hostile, max_tokens=2)
    page.goto(f"{server.address}/?model=plain#answer={answer['id']}")
    page.reload()
    settle(page)
    expect(page.get_by_test_id("asked").locator("pre")).to_have_text(hostile)
    assert page.locator(".talk img, .talk b").count() == 0


@pytest.mark.slow
def test_a_key_is_asked_for(decoder: Trained, visit: Open) -> None:
    made = serving([ServedModel("poet", *decoder, slots=2)], keys=[KEY])
    try:
        page = visit(made, known="401")
        for key in ("wrong-but-of-enough-characters", KEY):
            page.get_by_test_id("key").fill(key)
            with page.expect_navigation():
                page.get_by_role("button", name="Open").click()
            if key != KEY:
                expect(page.get_by_role("status").first).to_have_text("The server did not accept that key.")
        say(page, "the bird")
        assert KEY not in page.url
        assert page.evaluate("document.cookie") == ""
        page.close()  # it would ask a server that is gone
    finally:
        made.close()


def test_a_slider_for_each_steering_vector(server: Server, visit: Open) -> None:
    page = visit(server, "/?model=plain")
    settle(page)
    page.locator(".chat-settings > summary").click()
    slider = page.get_by_test_id("steer-joy").get_by_role("slider")
    page.get_by_label("poet", exact=True).check()  # which has no vector
    for scale in ("2.5", "0"):
        slider.fill(scale)
        say(page, "the cat", answers=2)
    answers = list(server.api.answers._answers.values())[-4:]  # type: ignore[union-attr]
    steered = {(one.model, tuple(one.choices[0].options.steer.items())) for one in answers}
    assert steered == {("plain", (("joy", 2.5),)), ("plain", ()), ("poet", ())}
    page.locator(".turn").first.locator(".cell", has=page.locator("text=plain")).locator(".flow").first.click()
    expect(page.get_by_test_id("drawn").first).to_contain_text("Steered by joy 2.50")


@pytest.mark.parametrize(("width", "dark"), SCREENS)
def test_it_fits_the_screen(
    server: Server, visit: Open, width: int, dark: bool, picture: Callable[[Page, str], Path]
) -> None:
    page = visit(server, width=width, dark=dark)
    say(page, "the cat sat on the mat")
    page.locator(".chat-settings > summary").click()
    click_token(page, 4)
    picture(page, f"chat-{width}{'-dark' if dark else ''}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.get_by_label("tuned", exact=True).check()
    say(page, "the dog", answers=2)
    page.get_by_test_id("part").last.click()
    expect(page.get_by_test_id("parting")).to_be_visible()
    picture(page, f"chat-two-{width}{'-dark' if dark else ''}")
    assert page.evaluate(NAMELESS, CONTROLS) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_nothing_is_sent_before_the_server_has_answered(server: Server, browser: Browser) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(WAIT)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.route("**/props", lambda route: None)  # never
    page.goto(server.address + "/")
    page.get_by_test_id("message").fill("the cat")
    page.get_by_test_id("send").click()
    page.get_by_test_id("new").click()
    expect(page.get_by_test_id("message")).to_have_value("the cat")
    assert not errors
    context.close()


def test_scores_of_a_probe_are_drawn_under_the_tokens(
    decoder: Trained, visit: Open, picture: Callable[[Page, str], Path]
) -> None:
    """Live while the answer streams, then by token, with the threshold that is set."""
    model, plain = decoder
    tok = with_chat_template(plain)
    birds, cats = ["the bird sang", "a bird flew"], ["the cat sat", "a cat slept"]
    probe = gh.probe(model, tok, birds + cats, [True, True, False, False], site="resid_post.1")
    made = serving([ServedModel("poet", model, tok, slots=2, probes={"birds": probe})], internals=True)
    try:
        page = visit(made)
        settle(page)
        page.evaluate(
            """() => {
                window.streamed = 0;
                new MutationObserver(() => {
                    const live = document.querySelector("[data-testid=answer][data-status=streaming]");
                    const scored = live ? live.querySelectorAll(".scored:not(.flow)").length : 0;
                    window.streamed = Math.max(window.streamed, scored);
                }).observe(document.body, { childList: true, subtree: true });
            }"""
        )
        say(page, "the cat sat on")
        assert page.evaluate("window.streamed") > 3
        click_token(page, 0)
        choice = kept(made, page)
        shown = page.locator(".flow.scored").evaluate_all("(all) => all.map((one) => Number(one.dataset.score))")
        assert shown == pytest.approx(list(choice.scores["birds"]))
        assert len(shown) >= len(choice.ids) - 1
        ids = [*choice.prompt, *choice.ids]
        with gh.record(model, probe.site) as seen:
            model(torch.tensor([ids]))
        expected = probe.scores(seen[probe.site][0])[len(choice.prompt) :].tolist()
        assert shown == pytest.approx(expected[: len(shown)], abs=1e-4)
        legend = page.get_by_test_id("scored")
        expect(legend).to_contain_text(f"birds: {sum(one > 0 for one in shown)} of {len(shown)} tokens above 0")
        page.locator(".chat-settings > summary").click()
        page.get_by_role("slider", name="threshold").fill("-10")
        expect(legend).to_contain_text(f"{sum(one > -10 for one in shown)} of {len(shown)} tokens above")
        page.get_by_role("radio", name="none").click()
        picture(page, "chat-probe")
        say(page, "the dog")
        expect(page.get_by_test_id("answer").last.locator(".scored")).to_have_count(0)
        answer = page.get_by_test_id("answer-id").first.inner_text()
        page.close()
        again = visit(made, f"/?model=poet#view=chat&answer={answer}")
        expect(again.locator(".flow.scored")).to_have_count(len(shown))
        again.close()
    finally:
        made.close()
