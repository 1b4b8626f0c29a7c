"""`glasshouse look` at a terminal."""

from __future__ import annotations

import http.cookiejar
import inspect
import json
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from saved_page import unpack

import glasshouse as gh
from cli.runner import Call, Forked
from glasshouse.cli.look import look
from glasshouse.page.url_state import DEFAULTS, state_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("look") / "model"
    tok = gh.Tokenizer.train(texts=["to be or not to be"], vocab_size=263)
    gh.save(gh.build(gh.preset("tiny-decoder", vocab_size=263)), tok, place)
    return place


@pytest.mark.long
@pytest.mark.slow
def test_the_address_is_the_last_line_and_answers_until_ctrl_c(folder: Path, request: pytest.FixtureRequest) -> None:
    started = Forked("look", folder, "--no-browser", "--text", "to be")
    request.addfinalizer(started.close)
    lines = []
    for line in started.stdout:
        lines.append(line.decode().strip())
        if lines[-1].startswith("http"):
            break
    found = re.fullmatch(r"(http://127\.0\.0\.1:\d+/)\?token=[\w-]{40,}#text=to\+be", lines[-1])
    assert found, lines
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(found[1], timeout=20)
    browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar()))
    page = browser.open(lines[-1].partition("#")[0], timeout=20)
    assert page.url == found[1]  # the token has left the address
    assert page.status == 200
    started.send_signal(signal.SIGINT)
    assert (*started.communicate(), started.wait()) == (b"", b"", 0)


def test_the_command_opens_the_view_that_the_page_opens() -> None:
    assert inspect.signature(look).parameters["view"].default == DEFAULTS["view"]


def test_a_page_is_written_to_a_file(folder: Path, call: Call, tmp_path: Path) -> None:
    done = call("look", folder, "--text", "to be or", "--view", "attention", "--save", tmp_path / "page.html")
    assert done.code == 0
    assert "page.html" in done.out
    assert "view=attention" in unpack((tmp_path / "page.html").read_text())["fragment"]


@pytest.mark.slow
def test_a_lecture_is_some_cards_in_their_order(folder: Path, call: Call, tmp_path: Path) -> None:
    done = call("notes", folder, "--card", "M4, a12", "--save", tmp_path / "lecture.html")
    assert done.code == 0, done.err
    held = unpack((tmp_path / "lecture.html").read_text())
    assert state_of(held["fragment"])["notes_cards"] == "M4,A12"
    drawn = {
        json.loads(key.partition(" ")[2])["number"] for key in held["responses"] if key.startswith("note_figure")
    }
    assert drawn == {"M4", "A12"}


@pytest.mark.parametrize(
    ("cards", "said"), [("A1,A33", "there is no statement 'A33'; did you mean A3?"), ("A1,", "no statement ''")]
)
def test_a_card_that_is_not_there_is_one_sentence(folder: Path, call: Call, cards: str, said: str) -> None:
    done = call("notes", folder, "--card", cards, "--no-browser")
    assert done.code == 1
    assert said in done.err
    assert done.err.count("\n") == 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere/at/all"], "there is no folder 'nowhere/at/all'"),
        (["{folder}", "--view", "atention"], "did you mean attention?"),
        (["{folder}", "--host", "300.1.1.1"], "cannot listen on 300.1.1.1"),
        (["{folder}", "--save", "{folder}/none/page.html"], "none/page.html"),
    ],
)
def test_a_mistake_is_one_sentence(folder: Path, call: Call, words: list[str], said: str) -> None:
    done = call("look", *(word.format(folder=folder) for word in words), "--no-browser")
    assert done.code == 1
    assert said in done.err
    assert done.err.count("\n") == 1
