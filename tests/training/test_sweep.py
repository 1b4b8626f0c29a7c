"""Sweeps: which trials there are, where they run, and how their losses are put together."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from glasshouse.errors import InputError
from glasshouse.training import sweep as sweeps
from glasshouse.training.sweep import Outcome, by_settings, sweep, trials


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], str | None]]:
    """Instead of training, write a validation loss that is the sum of the numbers that are swept."""
    calls: list[tuple[list[str], str | None]] = []
    lock, most = threading.Lock(), threading.Semaphore(2)

    def run(command: list[str], *, stdout: Any, env: dict[str, str], **_: object) -> Any:  # noqa: ANN401
        assert most.acquire(blocking=False), "more at once than there are devices"
        with lock:
            calls.append((command, env.get("CUDA_VISIBLE_DEVICES")))
        given = dict(one.split("=", 1) for one in command if "=" in one)
        folder = Path(json.loads(given["train.out"]))
        folder.mkdir(parents=True)
        loss = float(given["train.lr"]) + float(given["train.seed"]) / 10
        lines = [
            {"step": 1, "loss": 9.0},
            {"step": 2, "validation_loss": loss / 2},
            {"step": 3, "validation_loss": loss},
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        failed = given["train.seed"] == "9"
        stdout.write("error: it burns.\n" if failed else "")
        stdout.flush()
        most.release()
        return subprocess.CompletedProcess(command, int(failed))

    monkeypatch.setattr(sweeps.subprocess, "run", run)
    return calls


def test_every_combination_is_trained_on_the_devices(
    tmp_path: Path, started: list[tuple[list[str], str | None]]
) -> None:
    said: list[Outcome] = []
    outcomes = sweep(
        ["train", "run.toml"],
        ["train.lr=1,2", "train.seed=0,1,9", "train.steps=3"],
        tmp_path,
        ["4", "6"],
        said.append,
    )
    assert [one.trial.name for one in outcomes] == [f"lr={lr},seed={seed}" for lr in "12" for seed in "019"]
    assert {device for _, device in started} == {"4", "6"}
    assert all(command[:2] == ["train", "run.toml"] for command, _ in started)
    assert all("train.steps=3" in command for command, _ in started)
    assert len(said) == 6
    assert [one.lowest for one in outcomes[:2]] == [(2, 0.5), (2, 0.55)]
    assert [one.error is None for one in outcomes] == [True, True, False] * 2
    assert "it burns" in str(outcomes[2].error)
    groups = by_settings(outcomes)
    assert [swept for swept, _ in groups] == [{"train.lr": "1"}, {"train.lr": "2"}]
    assert [[one.last for one in found] for _, found in groups] == [[1.0, 1.1, 1.9], [2.0, 2.1, 2.9]]
    kept = json.loads((tmp_path / "sweep.json").read_text())
    assert kept[1]["losses"] == [[2, 0.55], [3, 1.1]]


def test_trials_without_a_loss_come_last(tmp_path: Path) -> None:
    first, second = trials(["train.lr=1,2"])
    assert by_settings([Outcome(first), Outcome(second, losses=[(1, 5.0)])])[0][0] == {"train.lr": "2"}


@pytest.mark.parametrize(("settings", "message"), [(["a=1", "a=2"], "twice"), (["a=x/y,x:y"], "the same folder")])
def test_trials_that_cannot_be_told_apart(settings: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        trials(settings)


def test_the_plot_has_a_line_for_each_trial(tmp_path: Path) -> None:
    outcomes = [Outcome(one, losses=[(1, 2.0), (2, 1.0)]) for one in trials(["train.lr=1,2", "train.seed=0,1"])]
    assert sweeps.draw(outcomes, tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text()
    assert drawn.count("train.lr=") == 2  # the labels
