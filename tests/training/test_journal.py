"""A journal has one line for each step, whatever happened on the way."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from glasshouse.training.journal import Journal


@given(stops=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5))
def test_stopped_anywhere_and_gone_on(stops: list[tuple[int, int, bool]], tmp_path_factory: object) -> None:
    """A run that dies after `ahead` steps past its checkpoint, maybe within a line, and goes on from there."""
    journal = Journal(tmp_path_factory.mktemp("run") / "metrics.jsonl")  # type: ignore[attr-defined]
    step = 0
    for forward, ahead, torn in stops:
        for _ in range(forward):
            journal.write(step, loss=float(step))
            step += 1
        for lost in range(ahead):
            journal.write(step + lost, loss=-1.0)
        if torn:
            with journal.path.open("a") as file:
                file.write('{"step": 3, "lo')
        journal.cut(step)
    assert [(line["step"], line["loss"]) for line in journal.lines()] == [(i, float(i)) for i in range(step)]


def test_a_journal_that_is_not_there_yet(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    assert list(journal.lines()) == []
    journal.cut(0)
    journal.write(0, loss=1.5, note="é")
    assert list(journal.lines()) == [{"step": 0, "loss": 1.5, "note": "é"}]
