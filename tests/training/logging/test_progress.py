"""The progress display, with a fake clock, off a terminal and on one."""

from __future__ import annotations

import io
import re
import sys
import threading
from pathlib import Path

import pytest
from runs import table

from glasshouse.errors import ConfigError, InputError
from glasshouse.training import Display, Run, train
from glasshouse.training.logging import progress as module
from glasshouse.training.logging.progress import OFTEN, SILENCE

PATIENCE = 60  # seconds to wait for a thread


class Clock:
    """A clock set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class FakeThroughput:
    tokens_per_second, peak_memory, mfu = 12345.6, 377_700_000, 0.456


class FakeMetrics:
    loss = 5.14961


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def step(display: Display, number: int, of: int = 100) -> None:
    display.on_step_end(number, of, FakeMetrics(), FakeThroughput())  # type: ignore[arg-type]


# Off a terminal


def test_a_phase_prints_a_line_at_its_start_and_every_minute(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = Display({"tokenizing": "items"}, clock=clock)
    display.stage("reading", 500, 2000)
    display.stage("reading", 2000, 2000)
    assert lines(capsys) == ["reading · 25% · 500 bytes of 2.0 kB"]
    display.stage("tokenizing", 0, 400)
    assert lines(capsys) == ["tokenizing · 0% · 0 of 400 items"]
    clock.now += SILENCE - 1
    display.stage("tokenizing", 100, 400)
    display.tick()
    assert lines(capsys) == []
    clock.now += 1
    display.tick()
    assert lines(capsys) == ["tokenizing · 25% · 100 of 400 items · 1:00 elapsed"]
    for _ in range(3):  # a phase without progress prints too
        clock.now += SILENCE
        display.tick()
    assert [line[-12:] for line in lines(capsys)] == ["2:00 elapsed", "3:00 elapsed", "4:00 elapsed"]


def test_a_repeated_phase_prints_no_new_line(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(clock=Clock())
    for number in (1, 2, 3):
        display.stage("validating", 0, 10)
        step(display, number)
    assert [line[:12] for line in lines(capsys)] == ["validating ·", "step 1 of 10"]


def test_steps_print_a_line_at_intervals_and_during_a_long_step(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    display = Display(clock=clock)
    for number in range(1, 7):
        step(display, number)
        clock.now += OFTEN / 2
    assert [line[:6] for line in lines(capsys)] == ["step 1", "step 3", "step 5"]
    clock.now += SILENCE
    display.tick()
    assert lines(capsys) == ["step 5 of 100 · loss 5.1496 · 7:55 left · 12,346 tokens/s · 377.7 MB · MFU 46%"]


def test_ticks_while_open(capsys: pytest.CaptureFixture[str]) -> None:
    ticked = threading.Event()

    class Ticked(Display):
        def tick(self) -> None:
            ticked.set()

    with Ticked().open():
        assert ticked.wait(PATIENCE)
    assert not [one for one in threading.enumerate() if one.name == "display"]


# At a terminal


class Terminal(io.StringIO):
    """A terminal that sets an event after `frames` writes."""

    def __init__(self, frames: int = 0) -> None:
        super().__init__()
        self.left, self.drawn = frames, threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.left -= "waiting" in text
        if self.left <= 0:
            self.drawn.set()
        return super().write(text)


@pytest.fixture
def at_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.usefixtures("at_terminal")
def test_the_spinner_moves_without_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(frames=5)
    monkeypatch.setattr(sys, "stderr", terminal)
    with Display().open() as display:
        display.stage("reading", 10, 10)  # a finished phase does not stop the next
        display.stage("waiting", 0, 0)
        assert terminal.drawn.wait(PATIENCE)
    spinners = set(re.findall(r"([⠀-⣿])\x1b\[0m", terminal.getvalue()))
    assert len(spinners) > 1


@pytest.mark.usefixtures("at_terminal")
def test_the_time_left_is_not_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    terminal, clock = Terminal(), Clock()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Display(clock=clock).open() as display:
        step(display, 123_455, of=1_000_000)
        clock.now += 1.5
        step(display, 123_456, of=1_000_000)
        display._progress.refresh()  # type: ignore[union-attr]
    drawn = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert "step 123,456 of 1,000,000 · loss 5.1496 · 365:13:36 left" in drawn  # 876,544 steps of 1.5 s


@pytest.mark.usefixtures("at_terminal")
@pytest.mark.parametrize("width", [120, 50])
def test_the_line_fits_any_width(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(module, "QUICK", 0)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Display().open() as display:
        for number in range(1, 4):
            step(display, number, of=3)
        display._progress.refresh()  # type: ignore[union-attr]
        display.on_validation_end(3, {"bits_per_byte": 2.5})
    drawn = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    shown = [frame for frame in re.split(r"\r|\x1b\[2K|\n|\x1b\[1A", drawn) if frame.strip()]
    assert all(len(frame) <= width for frame in shown)
    assert any(frame.partition(" step ")[2].startswith("3 of 3 · loss") for frame in shown), shown
    assert "step 3: validation bits per byte 2.5000\n" in drawn
    assert "\x1b[?25l" not in drawn  # a killed process could not show the cursor again


# In Python


def test_train_shows_progress_unless_false(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(Run.from_dict(table(data_folder, steps=2)))
    shown = capsys.readouterr()
    assert shown.out == ""
    for begin in (
        "folder ",
        "data ",
        "stop ",
        "model ",
        "tokens ",
        "device ",
        "steps ",
        "step 1 of 2 ",
        "evaluating",
    ):
        assert re.search(rf"^{begin}", shown.err, re.MULTILINE), begin
    train(Run.from_dict(table(data_folder, out="quiet", steps=2)), progress=False)
    assert capsys.readouterr() == ("", "")


def test_train_takes_a_recipe_or_a_file(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data_folder)
    (data_folder / "mine.toml").write_text(
        '[model]\npreset = "tiny-decoder"\nn_layers = 1\n'
        '[data]\npath = "a.txt"\nseq_len = 16\nvocab_size = 270\n[train]\nsteps = 1\nbatch_tokens = 32\n'
    )
    assert train("mine.toml", progress=False).folder == Path("runs/mine")
    assert train(data_folder / "runs" / "mine", progress=False).steps == 1  # by its run.toml
    with pytest.raises(ConfigError, match="there is no recipe or file 'stdlb'; did you mean stdlib"):
        train("stdlb")
    with pytest.raises(
        InputError, match=r"run is \{'model': 3\}, but it must be a Run, the name of a recipe or the path"
    ):
        train({"model": 3})  # type: ignore[arg-type]


def test_the_summary_names_files_and_skipped_files(data_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (data_folder / "folder").mkdir()
    for name in ("one.txt", "two.md", "three.png", "four", ".hidden.txt"):
        (data_folder / "folder" / name).write_text((data_folder / "a.txt").read_text())
    settings = table(data_folder, steps=1)
    settings["data"]["path"] = str(data_folder / "folder")
    train(Run.from_dict(settings))
    shown = capsys.readouterr().err
    size = 2 * (data_folder / "a.txt").stat().st_size
    assert f"data     2 files, {size / 1000:.1f} kB; 2 skipped: unknown file type (" in shown
    assert "no suffix" in shown
    assert ".png" in shown
    assert "1 item for training" in shown or "2 items for training" in shown
