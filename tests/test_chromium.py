"""Finding and installing the browser, with stubs in place of apt-get and Playwright's download."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import chromium
import processes
import pytest


def program(path: Path, text: str = "exit 0") -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty PATH, and a download that fails."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path / "downloads"))
    for name in ("CHROMIUM", "REQUIRE_BROWSER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(chromium, "DOWNLOAD", [str(program(tmp_path / "offline", "echo no network >&2; exit 1"))])
    return folder


def test_one_that_is_there_is_taken(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chromium.find() is None
    there = program(bare / "google-chrome")
    assert chromium.get() == str(there)
    shell = program(bare / "chromium-headless-shell")
    assert chromium.get() == str(shell)  # the quickest first
    monkeypatch.setenv("CHROMIUM", "/opt/mine")
    assert chromium.get() == "/opt/mine"  # and the user's own before all


@pytest.mark.parametrize("root", [True, False])
def test_the_package_manager_is_asked_as_root_alone(bare: Path, monkeypatch: pytest.MonkeyPatch, root: bool) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0 if root else 1000)
    (bare / "sh").symlink_to("/bin/sh")
    program(bare / "apt-get", f'case "$*" in *install*) /bin/cp "$0" {bare}/chromium ;; esac')
    assert chromium.get() == (str(bare / "chromium") if root else None)


def test_playwright_downloads_one_where_no_package_manager_may(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import pathlib; from playwright.sync_api import sync_playwright\n"
        "with sync_playwright() as playwright: path = pathlib.Path(playwright.chromium.executable_path)\n"
        "path.parent.mkdir(parents=True); path.touch()"
    )
    monkeypatch.setattr(chromium, "DOWNLOAD", [sys.executable, "-c", code])
    found = chromium.get()
    assert found is not None
    assert Path(found).is_relative_to(os.environ["PLAYWRIGHT_BROWSERS_PATH"])


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("required", "status"), [("", 0), ("1", 1)])
def test_none_at_all_is_one_line_and_an_error_where_one_is_required(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], required: str, status: int
) -> None:
    monkeypatch.setenv("REQUIRE_BROWSER", required)
    monkeypatch.setattr(sys, "argv", ["chromium.py", "--get"])
    assert chromium.main() == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count(chromium.MISSING) == 1
    assert "Playwright did not install it: no network" in err


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("required", "outcome"), [("", "1 skipped"), ("1", "1 error")])
def test_the_tests_of_the_page_are_skipped_loudly_or_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, required: str, outcome: str
) -> None:
    monkeypatch.setenv("REQUIRE_BROWSER", required)
    (tmp_path / "test_one.py").write_text("def test_page(browser):\n    raise AssertionError('it ran')\n")
    plugins = ["-p", "conftest", "-p", "page.conftest", "-c", os.devnull, "-p", "no:cacheprovider"]
    said = tmp_path / "said.txt"
    code = processes.run(call_pytest, dict(os.environ), said, [*plugins, str(tmp_path / "test_one.py")])
    assert code == (1 if required else 0)
    assert outcome in said.read_text(), said.read_text()
    assert said.read_text().count(f"1 tests skipped. {chromium.MISSING}") == (required == "")


def call_pytest(environment: dict[str, str], said: Path, words: list[str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(Path(__file__).parent))  # each folder of tests has a conftest
    with said.open("w") as out, contextlib.redirect_stdout(out):
        code = pytest.main(["-q", *words])
    sys.exit(code)
