"""`glasshouse demo`: two pages and a run."""

from __future__ import annotations

import http.cookiejar
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest

import glasshouse as gh
from cli.runner import Call
from glasshouse.cli import demo


@pytest.mark.long
@pytest.mark.slow
def test_both_pages_answer_while_a_model_is_trained(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "library"
    library.mkdir()
    for number in range(30):
        (library / f"module_{number}.py").write_text(f"def f_{number}(x):\n    return x + {number}\n" * 40)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(library))
    monkeypatch.setattr(demo, "SECONDS", 0)
    monkeypatch.setattr(demo, "FEWEST", 3)
    monkeypatch.chdir(tmp_path)
    answers: list[tuple[str, int]] = []
    log = demo.gh.training.Display.log

    def visit(address: str) -> None:
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        answers.append((address, urllib.request.build_opener(jar).open(address.partition("#")[0], timeout=20).status))

    def logged(self: object, text: str) -> None:
        log(self, text)  # type: ignore[arg-type]
        if text.startswith("page of the run: "):
            visit(text.removeprefix("page of the run: "))

    def wait_for_second(result: object, bits: object) -> None:
        for _ in range(600):
            if len(answers) == 2:
                return
            time.sleep(0.1)

    monkeypatch.setattr(demo, "_print_address", visit)
    monkeypatch.setattr(demo.gh.training.Display, "log", logged)
    monkeypatch.setattr(demo.training, "print_summary", wait_for_second)
    done = call("demo", "--no-browser")
    assert done.code == 0, done.err
    assert "3 steps of" in done.out
    assert [status for _, status in answers] == [200, 200]
    assert answers[0][0].endswith("#view=attention")
    assert answers[1][0].endswith("#view=run")
    assert (tmp_path / "runs" / "demo" / "model" / "config.json").is_file()
    for address, _ in answers:  # the pages have stopped
        with pytest.raises(OSError, match=r"refused|reset"):
            urllib.request.urlopen(address.partition("?")[0], timeout=5)


def test_an_earlier_run_is_kept(tmp_path: Path) -> None:
    assert demo._unused(tmp_path / "demo") == tmp_path / "demo"
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo-2").mkdir()
    assert demo._unused(tmp_path / "demo") == tmp_path / "demo-3"


def test_steps_fit_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    small = gh.Run.load("demo", "model.n_layers=1", "data.vocab_size=512", "train.batch_tokens=256")
    monkeypatch.setattr(gh.Run, "load", lambda name: small)
    monkeypatch.setattr(demo, "FEWEST", 1)
    steps, seconds = demo._steps_for(10)
    assert steps == max(1, min(demo.MOST, round(10 / seconds)))
