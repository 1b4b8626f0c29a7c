"""`glasshouse sweep` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.runner import Call

RUN = """
[model]
preset = "tiny-decoder"
[data]
path = "a.txt"
seq_len = 16
vocab_size = 270
[train]
batch_tokens = 64
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 50)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.mark.slow
def test_a_sweep_trains_each_and_shows_one_table(place: Path, call: Call) -> None:
    done = call("sweep", "run.toml", "train.steps=1,2", "train.eval_every=1", "--out", "tried")
    assert done.code == 0
    kept = {row["train.steps"]: row["losses"] for row in json.loads((place / "tried/sweep.json").read_text())}
    assert [step for step, _ in kept["2"]] == [1, 2]
    lines = done.out.splitlines()
    assert lines[0].split()[0] == "train.steps"
    assert {line.split()[0] for line in lines[1:3]} == {"1", "2"}
    assert (place / "tried/steps=2/model/config.json").exists()
    assert "2/2" in done.err


def test_a_mistake_in_one_trial_is_found_before_the_first(place: Path, call: Call) -> None:
    done = call("sweep", "run.toml", "train.lr=1e-3,much", "--out", "tried")
    assert done.code == 1
    assert "much" in done.err
    assert not (place / "tried").exists()
