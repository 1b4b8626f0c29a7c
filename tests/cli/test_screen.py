"""What a terminal shows that a file does not: progress bars and colours."""

from __future__ import annotations

import io
import re
import sys

import pytest

from glasshouse.cli import screen
from glasshouse.escaping import NEWLINE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = Terminal()
    monkeypatch.setattr(sys, "stdout", drawn)
    monkeypatch.setattr(sys, "stderr", drawn)
    return drawn


def test_progress_has_a_bar_for_each_stage_in_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = at_a_terminal(monkeypatch)
    with screen.progress(merge="merges") as show:
        show("count", 1_500, 3_000)
        show("merge", 1, 1_234)
        show("merge", 617, 1_234)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", terminal.getvalue())
    for stage, share, amount in (("count", "50%", "1.5 kB of 3.0 kB"), ("merge", "50%", "617 of 1,234 merges")):
        assert re.search(rf"{stage} .*{share} +{amount}", shown), shown


def test_a_file_gets_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", drawn := io.StringIO())
    with screen.progress() as show:
        show("count", 1, 2)
    assert drawn.getvalue() == ""


def test_tokens_alternate_in_colour_or_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    at_a_terminal(monkeypatch)
    text = screen.alternate(["to", " be", NEWLINE])
    assert not isinstance(text, str)
    assert text.plain == f"to be{NEWLINE}\n"
    assert [str(span.style) for span in text.spans] == ["cyan", "yellow", "cyan"]
    monkeypatch.setenv("NO_COLOR", "1")
    assert screen.alternate(["to", " be"]) == "to  be"
