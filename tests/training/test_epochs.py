"""Runs whose length is given in epochs."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
from runs import RecordingReporter, assert_same

import glasshouse as gh
from glasshouse.errors import ConfigError, InputError
from glasshouse.page.views.metric_curves import Curves
from glasshouse.training import Run, StoppedError

MODEL = {"preset": "tiny-decoder", "n_layers": 1}


def table(data_folder: Path, **train: object) -> dict[str, object]:
    (data_folder / "a.txt").write_text("to be or not to be, that is the question whether it is nobler. " * 24)
    data = {"path": [str(data_folder / "a.txt")], "vocab_size": 280, "seq_len": 16}
    return {"model": MODEL, "data": data, "train": {"batch_tokens": 64, "out": str(data_folder / "run"), **train}}


@pytest.mark.slow
def test_epochs_are_counted_over_the_training_data(tmp_path: Path) -> None:
    run = Run.from_dict(table(tmp_path, epochs=2.5))
    result = gh.train(run, progress=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    samples = len(gh.data.CausalLMDataset(result.datasets.train, seq_len=16))
    assert result.steps == len(lines) == math.ceil(2.5 * samples / 4)
    assert [line["epoch"] for line in lines] == [step * 4 / samples for step in range(1, len(lines) + 1)]
    curves = Curves(tmp_path / "run" / "metrics.jsonl")
    assert curves.steps_in(2.5) is None
    curves.read_new()
    assert curves.steps_in(2.5) == result.steps
    again = gh.train(run, progress=False)  # nothing is left to do
    assert again.steps == result.steps
    with pytest.raises(InputError, match=r"train.epochs was 2.5 and is 3.0"):
        gh.train(Run.from_dict(table(tmp_path, epochs=3.0)), progress=False)


def test_a_warmup_longer_than_the_epochs_becomes_a_tenth(tmp_path: Path) -> None:
    train = Run.from_dict(table(tmp_path, epochs=3, schedule={"kind": "cosine", "warmup": 5000})).train
    steps, schedule = train.planned(samples=100, batch_size=10)
    assert (steps, schedule.warmup) == (30, 3)
    assert Run.from_dict(table(tmp_path, epochs=100)).train.planned(100, 4)[1].warmup == 100
    kept = Run.from_dict(table(tmp_path, epochs=3, schedule={"kind": "cosine", "warmup": 20})).train
    assert kept.planned(samples=100, batch_size=10)[1].warmup == 20


@pytest.mark.long
@pytest.mark.slow
def test_the_default_schedule_is_the_same_after_a_resume_from_the_run_folder(tmp_path: Path) -> None:
    """Of 100 to 999 steps, where a warm-up of 100 would fit and the default is a tenth of the steps."""
    quiet = {"epochs": 11.5, "probes": [], "sample_prompts": 0, "keep_snapshots": 0}
    gh.train(Run.from_dict(table(tmp_path, **{**quiet, "out": str(tmp_path / "whole")})), progress=False)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert 100 <= len(lines) < 1000
    warmup = len(lines) // 10
    assert [line["lr"] for line in lines[:warmup]] == [1e-3 * ((step + 1) / warmup) for step in range(warmup)]
    with pytest.raises(StoppedError, match="after step 3"):
        gh.train(
            Run.from_dict(table(tmp_path, **quiet)),
            RecordingReporter(3, lambda: os.kill(os.getpid(), signal.SIGTERM)),
        )
    gh.train(Run.load(tmp_path / "run"), progress=False)
    assert_same(tmp_path, "whole", "run")


def test_a_shortened_warmup_is_logged(tmp_path: Path) -> None:
    run, reporter = (
        Run.from_dict(table(tmp_path, epochs=1, schedule={"kind": "linear", "warmup": 5000})),
        RecordingReporter(),
    )
    steps = gh.train(run, reporter).steps
    line = f"the warm-up is shortened from 5000 steps to {steps // 10}, as train.epochs of 1 are {steps} steps"
    assert reporter.messages.count(line) == 1


def test_one_of_steps_and_epochs_replaces_the_other() -> None:
    train = Run.load("stdlib", "train.epochs=2").train
    assert (train.steps, train.epochs) == (None, 2.0)
    with pytest.raises(ConfigError, match=r"train.steps is 5 and train.epochs is 2; give one of them"):
        Run.load("stdlib", "train.epochs=2", "train.steps=5")


def test_steps_replace_the_epochs_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\npreset = "tiny-decoder"\n[train]\nepochs = 3\n')
    train = Run.load(tmp_path / "run.toml", "train.steps=7").train
    assert (train.steps, train.epochs) == (7, None)
    assert Run.load(tmp_path / "run.toml", "train.epochs=4").train.epochs == 4
    for bad in ("0", "-1", "nan", "inf"):
        with pytest.raises(ConfigError, match=r"train.epochs is .* but it must be above 0"):
            Run.load(tmp_path / "run.toml", f"train.epochs={bad}")
