"""A journal has one line per step, also after kills and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corrupt_journals import DAMAGED
from hypothesis import given
from hypothesis import strategies as st

from glasshouse.training.logging.journal import Journal


@given(stops=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.booleans()), max_size=5))
def test_stopped_anywhere_and_resumed(stops: list[tuple[int, int, bool]], tmp_path_factory: object) -> None:
    """A run that dies after `ahead` steps past its checkpoint, maybe within a line, and resumes."""
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
        journal.truncate(step)
    assert [(line["step"], line["loss"]) for line in journal.lines()] == [(i, float(i)) for i in range(step)]


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    assert list(journal.lines()) == []
    journal.truncate(0)
    journal.write(0, loss=1.5)
    assert list(journal.lines()) == [{"step": 0, "loss": 1.5}]


SOUND: dict[str, dict[str, Any]] = {
    "metrics.jsonl": {"loss": 2.5, "grad_norm": None, "n_targets": 96},
    "probes.jsonl": {"entropy": [[0.5, None], [1, 2.0]], "logit_lens": [4.0, None, 3]},
    "samples.jsonl": {
        "samples": [{"prompt": "to\ud800", "text": "é\n"}, {"prompt": "", "text": "", "reference": "be"}]
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_an_invalid_line_is_skipped(name: str, tmp_path: Path) -> None:
    """JSON or not, a line that was not written here is as one that was cut off; the others stay."""
    journal = Journal(tmp_path / name)
    for step, line in enumerate(DAMAGED[name]):
        assert journal.entry(line) is None, line[:99]
        assert journal.entry(line.encode()) is None
        journal.write(step, **SOUND[name])
        with journal.path.open("a") as file:
            file.write(f"{line}\n")
    journal.truncate(7)
    assert list(journal.lines()) == [{"step": step, **SOUND[name]} for step in range(7)]
    assert len(journal.path.read_text().splitlines()) == 7
