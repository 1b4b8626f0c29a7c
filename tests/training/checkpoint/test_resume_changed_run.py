"""Resuming with more steps, after an interrupted validation or with damaged journals equals an uninterrupted run."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from corrupt_journals import DAMAGED
from runs import RecordingReporter, assert_same, losses, table

import glasshouse as gh
from glasshouse import config
from glasshouse.errors import InputError, StoreError
from glasshouse.training import Run, StoppedError, train
from glasshouse.training import trainer as validation
from glasshouse.training.checkpoint.store import read
from glasshouse.training.schedule import WSD, Constant, Cosine, InverseSqrt, Linear, Schedule
from glasshouse.training.setup import build

pytestmark = pytest.mark.slow


def bare(data_folder: Path, out: str = "run", **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run that writes no more than it must."""
    return table(data_folder, out=out, **{"probes": [], "sample_prompts": 0, "keep_snapshots": 0, **choices})


def lines(data_folder: Path, out: str = "run", name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of a journal, but for how fast it went."""
    found = [json.loads(line) for line in (data_folder / out / name).read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in found]


def stop() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


# More steps


def steps_of(taken: int, other: int, schedule: Schedule) -> int | None:
    return schedule.first_difference(100, other, taken)


def test_first_difference_by_hand() -> None:
    """From the warm-up of 10 to the last of 100 steps it is 89; the last fifth of them is from step 81.2 on."""
    for schedule in (Constant(warmup=10), InverseSqrt(warmup=10)):
        assert steps_of(100, 200, schedule) is None
        assert steps_of(100, 50, schedule) is None
    for schedule in (Cosine(warmup=10), Linear(warmup=10)):
        assert steps_of(11, 200, schedule) is None  # the first after the warm-up has the whole rate
        assert steps_of(100, 200, schedule) == 11
        assert steps_of(100, 100, schedule) is None
    assert steps_of(82, 200, WSD(warmup=10, decay_fraction=0.2)) is None
    assert steps_of(83, 200, WSD(warmup=10, decay_fraction=0.2)) == 82
    assert steps_of(100, 50, WSD(warmup=10, decay_fraction=0.2)) == 42  # 10 + 0.8 * 39 is 41.2
    assert Cosine(warmup=0, final_factor=1.0).first_difference(100, 200, 100) is None  # which never falls


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", [{"kind": "constant"}, {"kind": "wsd", "decay_fraction": 0.25, "warmup": 2}])
def test_raising_steps_equals_a_run_started_with_them(schedule: dict[str, Any], data_folder: Path) -> None:
    """A finished run where the rate stays, and one that is stopped before it falls."""
    often = {"schedule": schedule, "eval_every": 3}
    train(Run.from_dict(bare(data_folder, out="whole", steps=12, **often)))
    if schedule["kind"] == "constant":
        train(Run.from_dict(bare(data_folder, steps=6, **often)))
        assert (data_folder / "run" / "model").is_dir()
    else:
        with pytest.raises(StoppedError):
            train(Run.from_dict(bare(data_folder, steps=9, **often)), RecordingReporter(6, stop))
    reporter = RecordingReporter()
    result = train(Run.from_dict(bare(data_folder, steps=12, **often)), reporter)
    assert any("resuming from step 6 of 12" in text for text in reporter.messages)
    assert any("is not replaced until the last step" in text for text in reporter.messages) == (
        schedule["kind"] == "constant"
    )
    assert result.steps == 12
    assert lines(data_folder) == lines(data_folder, "whole")
    assert_same(data_folder, "whole", "run")
    train(Run.from_dict(bare(data_folder, steps=12, **often)))  # and again, with the same result
    assert lines(data_folder) == lines(data_folder, "whole")


def test_a_schedule_that_cannot_be_extended_is_explained(data_folder: Path) -> None:
    train(Run.from_dict(bare(data_folder, steps=6)))
    before = (data_folder / "run" / "run.toml").read_bytes()
    with pytest.raises(InputError) as refused:
        train(Run.from_dict(bare(data_folder, steps=12)))
    checkpoint = data_folder / "run" / "checkpoints" / "step-00000006"
    # The warm-up of 2 and the step after it are those of any length; the next is the fourth.
    assert str(refused.value) == (
        f"train.steps was 6 and is 12, but of the 6 steps that the run in {str(data_folder / 'run')!r} has taken, "
        "those from step 4 on would have had other learning rates under its cosine schedule (constant, "
        "inverse_sqrt, and wsd before its decay can be extended); give train.steps=6 to resume, or start "
        f"a new run from these weights by model.from={checkpoint} train.out=FOLDER."
    )
    with pytest.raises(InputError, match=r"train\.steps is 5, but the run in .* has taken 6 steps"):
        train(Run.from_dict(bare(data_folder, steps=5)))
    with pytest.raises(InputError, match=r"train\.steps was 6 and is 12; train\.lr was 0\.01 and is 1\.0"):
        train(Run.from_dict(bare(data_folder, steps=12, lr=1.0)))
    assert (data_folder / "run" / "run.toml").read_bytes() == before
    train(
        Run.load(data_folder / "run" / "run.toml", f"model.from={checkpoint}", f"train.out={data_folder / 'other'}")
    )


@pytest.mark.long
def test_default_intervals_follow_the_initial_steps(data_folder: Path) -> None:
    """Else its evaluations would be of other samples from there on, and patience of other lengths."""
    choices = {"schedule": {"kind": "constant"}, "eval_every": 0, "save_every": 0, "eval_samples": 0}
    train(Run.from_dict(bare(data_folder, steps=10, **choices)))
    seen: list[int] = []

    class Counts(build.Trainer):
        def validate(self) -> None:
            seen.append(self.state.initial_steps)
            super().validate()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "Trainer", Counts)
        train(Run.from_dict(bare(data_folder, steps=20, **choices)))
    tried = [line["step"] for line in lines(data_folder) if "validation_loss" in line]
    assert tried == list(range(1, 21))  # of 20 from the start it would be every second
    assert set(seen) == {10}


# Evaluations that were cut off


@pytest.mark.few(1)
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupted_validation_is_repeated(at: int, data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the last step: lines, the best and the count of patience are those of a run never stopped."""
    choices = {
        "steps": 6,
        "eval_every": 2,
        "save_every": 4,
        "patience": 9,
        "sample_prompts": 1,
        "keep_checkpoints": 9,
    }
    train(Run.from_dict(bare(data_folder, out="whole", **choices)))
    real, calls = validation.evaluate_samples, []

    def evaluate_samples(*arguments: Any, on_batch: Any, **rest: Any) -> Any:  # noqa: ANN401
        calls.append(1)
        if len(calls) == at:
            stop()
            on_batch()
        return real(*arguments, on_batch=on_batch, **rest)

    monkeypatch.setattr(validation, "evaluate_samples", evaluate_samples)
    with pytest.raises(StoppedError, match=f"after step {2 * at}"):
        train(Run.from_dict(bare(data_folder, **choices)))
    assert max(losses(data_folder)) == 2 * at  # logged, without its validation
    assert "validation_loss" not in lines(data_folder)[-1]
    train(Run.from_dict(bare(data_folder, **choices)))
    assert lines(data_folder) == lines(data_folder, "whole")
    assert lines(data_folder, name="samples.jsonl") == lines(data_folder, "whole", "samples.jsonl")
    states = [
        read(data_folder / out / "checkpoints" / "step-00000006").metadata["trainer_state"]
        for out in ("run", "whole")
    ]
    assert states[0] == states[1]
    assert_same(data_folder, "whole", "run")


# What a run stands on


def test_lora_resumes_only_with_its_base_model(data_folder: Path) -> None:
    train(Run.from_dict(bare(data_folder, out="base", steps=1)))
    settings = bare(data_folder, lora={"rank": 2})
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    with pytest.raises(StoppedError):
        train(Run.from_dict(settings), RecordingReporter(2, stop))
    model, tok = gh.load(data_folder / "base" / "model")
    model.state_dict()["token_embedding.table.weight"][7, 7] += 1e-3
    (data_folder / "base" / "model").rename(data_folder / "kept")
    gh.save(model, tok, data_folder / "base" / "model")
    newest = data_folder / "run" / "checkpoints" / "step-00000002"
    with pytest.raises(StoreError, match=r"model\.from\) has changed since the run began; restore the old one"):
        train(Run.from_dict(settings))
    assert read(newest)
    (data_folder / "base").rename(data_folder / "changed")
    (data_folder / "base").mkdir()
    (data_folder / "kept").rename(data_folder / "base" / "model")
    assert train(Run.from_dict(settings)).steps == 12


CHANGED_MODELS = [
    ("n_heads", "model.n_heads was 4 and is 2"),  # the weights have the same shapes
    ("dropout", "model.dropout was 0.2 and is 0.3"),
    ("d_model", "model.d_model was 64 and is 32"),
    ("position", "model.position.kind was 'rotary' and is 'alibi'"),
]
NEW_VALUES: dict[str, Any] = {"n_heads": 2, "dropout": 0.3, "d_model": 32, "position": "alibi"}


@pytest.mark.few(1)
@pytest.mark.parametrize(("field", "difference"), CHANGED_MODELS)
def test_a_changed_model_is_refused_on_resume(field: str, difference: str, data_folder: Path) -> None:
    """Given in the command, and written into run.toml, which then has no trace of the old value."""
    with pytest.raises(StoppedError):
        train(Run.from_dict(bare(data_folder)), RecordingReporter(2, stop))
    settings = bare(data_folder)
    settings["model"] = {**settings["model"], field: NEW_VALUES[field]}
    with pytest.raises(
        InputError, match=rf"started with other settings: model\.{field}.* give the old ones to resume"
    ):
        train(Run.from_dict(settings))
    folder = data_folder / "run"
    (folder / "run.toml").write_text(config.to_toml(settings))
    with pytest.raises(InputError) as refused:
        train(Run.load(folder))
    assert str(refused.value) == (
        f"{difference} in the run, but the checkpoint {str(folder / 'checkpoints' / 'step-00000002')!r} has the old "
        "value; give that to resume, or train.out=FOLDER to start a new run."
    )
    (folder / "run.toml").write_text(config.to_toml(bare(data_folder)))
    assert train(Run.load(folder)).steps == 12


@pytest.mark.long
def test_damaged_journals_do_not_prevent_a_resume(data_folder: Path) -> None:
    choices = {"sample_prompts": 1, "probes": None, "steps": 4, "save_every": 2}
    train(Run.from_dict(bare(data_folder, out="whole", **choices)))
    with pytest.raises(StoppedError):
        train(Run.from_dict(bare(data_folder, **choices)), RecordingReporter(2, stop))
    for name, damaged in DAMAGED.items():
        path = data_folder / "run" / name
        path.write_text("".join(f"{line}\n" for line in damaged) + path.read_text() + damaged[0])
    train(Run.from_dict(bare(data_folder, **choices)))
    for name in DAMAGED:
        assert lines(data_folder, name=name) == lines(data_folder, "whole", name)
    assert_same(data_folder, "whole", "run")


# A terminal that is closed


def test_a_hangup_saves_and_stops(data_folder: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests themselves may run under nohup
    try:
        with pytest.raises(StoppedError, match="SIGHUP after step 5"):
            train(Run.from_dict(bare(data_folder)), RecordingReporter(5, lambda: os.kill(os.getpid(), signal.SIGHUP)))
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (data_folder / "run" / "checkpoints" / "step-00000005").is_dir()


def test_a_hangup_that_is_ignored_stays_ignored(data_folder: Path) -> None:
    """As `nohup` asks for."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = train(
            Run.from_dict(bare(data_folder, steps=6)),
            RecordingReporter(5, lambda: os.kill(os.getpid(), signal.SIGHUP)),
        )
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert result.steps == 6


@pytest.mark.long
def test_a_closed_terminal_loses_nothing(data_folder: Path) -> None:
    """What the command prints from there on fails, and must not keep it from saving."""
    (data_folder / "run.toml").write_text(
        config.to_toml(bare(data_folder, steps=100_000, save_every=100_000, eval_every=100_000))
    )
    pid, terminal = pty.fork()
    if not pid:
        program = "from glasshouse.cli import main; main()"
        os.execv(sys.executable, [sys.executable, "-c", program, "train", str(data_folder / "run.toml")])
    seen = b""
    while not re.search(rb"step ([5-9]|\d[\d,]+) of", seen):  # the display may leave steps out
        seen += os.read(terminal, 4096)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    (checkpoint,) = (data_folder / "run" / "checkpoints").iterdir()
    assert checkpoint.name == f"step-{max(losses(data_folder)):08}"
