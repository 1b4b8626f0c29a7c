"""What a terminal shows that a file does not: progress bars, and tokens in colours."""

from __future__ import annotations

import io
import re
import sys

import pytest

from glasshouse.cli import batch_view, screen
from glasshouse.cli.batch_view import Token
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


def test_a_batch_is_drawn_in_colours_or_with_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in the loss alternate, others are dim; of a masked one both the input and the target are shown."""
    tokens = [
        Token("to"),
        Token(NEWLINE, in_loss=True, starts=True),
        Token("be", in_loss=True),
        Token("[M]", in_loss=True, original="or", masked=True),
        Token("x", in_loss=True, original="not"),
    ]
    terminal = at_a_terminal(monkeypatch)
    batch_view.draw([("tokens", tokens, 2)], screen.console().print)
    drawn = terminal.getvalue()
    assert re.sub(r"\x1b\[[0-9;]*m", "", drawn) == (
        f"tokens (2 padding): to\n{batch_view.DOCUMENT_BREAK}\n{NEWLINE}\nbe[M](or)x(not)\n"
    )
    text = batch_view.coloured(("tokens", tokens, 2))
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert (styles["to"], styles["be"]) == (batch_view.CONTEXT, batch_view.TARGET[0])
    assert (styles["[M]"], styles["x"]) == (batch_view.MASKED, batch_view.RANDOM)
    legend = "token in the loss  not in the loss  masked or random token (target)"
    assert str(batch_view.legend("text", masked=True)) == f"{legend}  {batch_view.DOCUMENT_BREAK} next document"
    monkeypatch.setenv("NO_COLOR", "1")
    assert str(batch_view.legend("text", masked=True)).startswith("[x] token in the loss; [x")
