"""A view is declared once: its tab, script, styles, endpoints and place in saved pages follow from that."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from conftest import Trained, Visit, settle
from playwright.sync_api import Browser, Page, expect

import glasshouse as gh
from glasshouse.config import JsonDict, Settings
from glasshouse.page import files as page_files
from glasshouse.page.endpoints import PAGE, endpoints
from glasshouse.page.forward_pass import ForwardPass
from glasshouse.page.manifest import PAGE_ENDPOINTS, VIEWS
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.view import Endpoint, View

TEXT = "the cat sat"


@dataclass(frozen=True)
class Letters(Settings):
    """Parameters of the letter count."""

    forward_pass: ForwardPass = field(default_factory=ForwardPass)


def letters(traces: TraceCache, params: Letters) -> JsonDict:
    return {"count": len(params.forward_pass.prompt.text)}


def initial_requests(traces: TraceCache, forward_pass: ForwardPass, state: JsonDict) -> list[tuple[str, JsonDict]]:
    return [("letters", {"forward_pass": forward_pass.to_json()})]


VIEW = View("letters", "Letters", {"letters": Endpoint(Letters, letters, needs_model=False)}, initial_requests)
SCRIPT = """export function mount(context, root) {
  return {
    async draw() {
      const { count } = await context.request("letters", { forward_pass: context.forwardPass() });
      root.replaceChildren(`${count} letters`);
      root.classList.add("letters");
    },
  };
}
"""


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a view: its line in the manifest, and its folder."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/view.js").write_text(SCRIPT)
    (tmp_path / "letters/view.css").write_text(".letters { color: rgb(1, 2, 3) }\n")
    monkeypatch.setitem(VIEWS, VIEW.name, replace(VIEW, static=tmp_path / "letters"))


def draws(page: Page) -> None:
    drawn = page.locator(".view.letters")
    expect(drawn).to_have_text(f"{len(TEXT)} letters")
    expect(drawn).to_have_css("color", "rgb(1, 2, 3)")


@pytest.mark.usefixtures("added")
def test_a_declared_view_is_a_tab_that_draws(decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXT, traces=TraceCache(ModelLoader.from_model(*decoder)))  # a server that knows it
    titles = page.get_by_role("tab").all_inner_texts()
    always = ["Overview", "Tokens", "Attention", "Residual stream", "Interventions", "Circuit", "Step through"]
    assert titles == [*always, "Notes", "Letters"]
    page.get_by_role("tab", name="Letters").click()
    draws(page)
    assert "view=letters" in page.url
    page.get_by_role("tab", name="Tokens").click()
    settle(page)
    page.keyboard.press("9")  # its place among the tabs
    draws(page)
    page.reload()
    draws(page)


@pytest.mark.smoke
@pytest.mark.usefixtures("added")
def test_a_declared_view_is_in_a_saved_page(decoder: Trained, browser: Browser, tmp_path: Path) -> None:
    gh.look(*decoder, TEXT, view="letters").save(tmp_path / "page.html")
    page = browser.new_context(offline=True).new_page()
    page.goto((tmp_path / "page.html").as_uri())
    draws(page)
    page.context.close()


def test_views_apply_to_their_models(decoder: Trained, pair: Trained, run_folder: Path, visit: Visit) -> None:
    always = ["overview", "tokens", "attention", "residual", "interventions", "circuit", "walkthrough"]
    for what, more in ((decoder, []), (pair, ["seq2seq"]), (run_folder, ["run"])):
        tabs = visit(what).get_by_role("tab").all()
        assert [tab.get_attribute("data-view") for tab in tabs] == [*always, *more, "notes"]


def test_every_view_has_a_script_and_endpoints_of_its_own() -> None:
    files = page_files.static_files()
    assert [name for name in VIEWS if f"views/{name}/view.js" not in files] == []
    folders = {name.split("/")[1] for name in files if name.startswith("views/")}
    assert folders == set(VIEWS)
    declared = [name for view in VIEWS.values() for name in view.endpoints]
    assert sorted(declared) == sorted(endpoints().keys() - PAGE_ENDPOINTS)
    assert PAGE.keys() | {"save"} == PAGE_ENDPOINTS
