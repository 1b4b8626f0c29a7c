"""`glasshouse sweep` as a user runs it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cli.runner import Call
from glasshouse.training import sweep as sweeps

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


@pytest.mark.long
def test_a_sweep_trains_each_and_is_not_trained_again(place: Path, call: Call) -> None:
    words = ("sweep", "run.toml", "train.steps=1,2", "train.eval_every=1", "--out", "tried")
    assert call(*words).code == 0
    kept = {row["train.steps"]: row["losses"] for row in json.loads((place / "tried/sweep.json").read_text())}
    assert [step for step, _ in kept["2"]] == [1, 2]
    weights = place / "tried/steps=2/model/model.safetensors"
    written = weights.stat().st_mtime_ns
    assert call(*words).code == 0
    assert weights.stat().st_mtime_ns == written


def test_one_table_has_the_mean_over_seeds_and_what_failed(
    place: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], *, stdout: Any, **_: object) -> Any:  # noqa: ANN401
        assert command[1:6] == ["-m", "glasshouse", "train", "--no-baselines", "run.toml"]
        given = dict(one.split("=", 1) for one in command if "=" in one)
        folder = Path(json.loads(given["train.out"]))
        folder.mkdir(parents=True)
        loss = 100 * float(given["train.lr"]) + float(given["train.seed"])
        line = {"step": 1200, "validation_loss": loss}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        failed = loss == 4
        stdout.write("error: it burns." if failed else "")
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(sweeps.subprocess, "run", run)
    done = call("sweep", "run.toml", "train.lr=3e-2,1e-2", "train.seed=0,1", "--out", "tried")
    assert done.code == 1
    assert [line.split() for line in done.out.splitlines()] == [
        ["train.lr", "validation", "loss", "sd", "over", "seeds", "lowest", "at", "step"],
        ["1e-2", "1.5000", "0.7071", "1.0000", "1,200"],
        ["3e-2", "3.5000", "0.7071", "3.0000", "1,200"],
        ["curves:", "tried/sweep.svg"],
    ]
    assert "2/4 lr=3e-2,seed=1: exit code 1: error: it burns." in done.err


def test_a_mistake_in_one_trial_is_found_before_the_first(place: Path, call: Call) -> None:
    done = call("sweep", "run.toml", "train.lr=1e-3,much", "--out", "tried")
    assert done.code == 1
    assert "much" in done.err
    assert not (place / "tried").exists()
