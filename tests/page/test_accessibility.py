"""axe-core on every view: names for screen readers, contrast, roles, and a keyboard that reaches everything."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import Trained, Visit, settle
from playwright.sync_api import Page

import glasshouse as gh

AXE = Path(__file__).parents[2] / "node_modules" / "axe-core" / "axe.min.js"  # by `npm ci`, which `make page` runs
TEXTS = {"decoder": "the cat sat on the mat", "encoder": "the cat sat on the mat", "pair": "one five two"}
SERIOUS = ("serious", "critical")

pytestmark = pytest.mark.long


def findings(page: Page) -> list[str]:
    """Return what axe finds serious or critical, each with the element."""
    page.evaluate(AXE.read_text(encoding="utf-8"))
    found = page.evaluate("axe.run(document, { resultTypes: ['violations'] })")
    return [
        f"{one['id']}: {node['html'][:160]} ({node['failureSummary'][:240]})"
        for one in found["violations"]
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1366, 400])
@pytest.mark.parametrize("kind", ["decoder", "encoder", "pair"])
def test_no_serious_finding(kind: str, width: int, dark: bool, request: pytest.FixtureRequest, visit: Visit) -> None:
    trained: Trained = request.getfixturevalue(kind)
    page = visit(trained, text=TEXTS[kind], width=width, dark=dark)
    found = {}
    for tab in page.get_by_role("tab").all():
        tab.click()
        settle(page)
        found[tab.inner_text()] = findings(page)
    assert {name: some for name, some in found.items() if some} == {}


@pytest.mark.parametrize("level", ["layer", "head", "product"])
def test_no_serious_finding_in_the_levels_of_the_overview(level: str, decoder: Trained, visit: Visit) -> None:
    page = visit(decoder, text=TEXTS["decoder"], overview_zoom=level)
    assert findings(page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1366, 400])
def test_no_serious_finding_in_a_circuit(width: int, dark: bool, decoder: Trained, visit: Visit) -> None:
    texts = {"text": "the dog and the cat sat", "patch_from": "the dog and the cat saw"}
    page = visit(decoder, view="circuit", **texts, width=width, dark=dark)
    page.get_by_test_id("find-circuit").click()
    page.get_by_test_id("completeness").wait_for()
    settle(page)
    page.get_by_test_id("circuit-list").locator("button").first.click()
    settle(page)
    assert findings(page) == []
    page.get_by_role("tab", name="Interventions").click()
    page.get_by_test_id("patch-site").select_option("heads")
    page.get_by_test_id("estimate").click()
    page.wait_for_selector(".patches .part[data-value]")
    settle(page)
    assert findings(page) == []


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1366, 400])
def test_no_serious_finding_in_saliency(width: int, dark: bool, pair: Trained, visit: Visit) -> None:
    state = {"text": "one five two", "tokens_saliency": "integrated_gradients"}
    assert findings(visit(pair, view="tokens", **state, width=width, dark=dark)) == []


def test_no_serious_finding_in_a_run(run_folder: Path, visit: Visit) -> None:
    assert findings(visit(run_folder, view="run")) == []


def test_no_serious_finding_in_a_saved_page(decoder: Trained, browser: object, tmp_path: Path) -> None:
    gh.look(*decoder, TEXTS["decoder"]).save(tmp_path / "page.html")
    page = browser.new_page()  # type: ignore[attr-defined]
    page.goto((tmp_path / "page.html").as_uri())
    settle(page)
    assert findings(page) == []
    page.close()
