"""`train.minutes`, by a clock that only tests move: what is chosen, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from examples import first_of
from hypothesis import example, given
from hypothesis import strategies as st
from process_groups import in_processes
from runs import SAYING, assert_same, losses, write_data

import glasshouse as gh
from glasshouse import config, device
from glasshouse.errors import ConfigError, InputError
from glasshouse.training import Run, StoppedError, budget, launch
from glasshouse.training.budget import Budget, decay_from
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.logging.progress import SilentReporter
from glasshouse.training.plan.scaling_law import effective_tokens, predicted_loss
from glasshouse.training.schedule import WSD
from glasshouse.training.setup import choice
from glasshouse.training.setup.choice import best, find_candidates
from glasshouse.training.setup.custom import Custom
from glasshouse.training.setup.datasets import Datasets, prepare_datasets
from glasshouse.training.setup.resolve import Resolved, resolve
from glasshouse.training.signals import Signals


class Clock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (budget, launch, choice):
        monkeypatch.setattr(module, "clock", made)
    return made


# The law


def test_repeated_text_is_worth_less_the_more_often_it_is_read() -> None:
    # By hand: 4 epochs of 100 tokens are 3 repeats, worth 100 * 15.4 * (1 - exp(-3 / 15.4)) = 272.6 of new text.
    assert effective_tokens(400, 100) == pytest.approx(100 + 272.6, abs=0.1)
    assert effective_tokens(70, 100) == 70


@given(st.floats(1, 1e12), st.floats(1.01, 100), st.floats(1, 1e12))
def test_more_tokens_never_hurt_and_repeats_never_beat_new_text(tokens: float, more: float, unique: float) -> None:
    assert effective_tokens(tokens, unique) <= min(tokens, 16.4 * unique) * (1 + 1e-9)
    assert effective_tokens(tokens * more, unique) >= effective_tokens(tokens, unique) * (1 - 1e-9)
    assert predicted_loss(1e6, tokens, unique) >= predicted_loss(2e6, tokens, unique)


# When the decay begins


def test_the_steps_are_decided_by_hand(clock: Clock) -> None:
    ten = Budget(10, clock.now)
    clock.now += 40  # preparation
    ten.begin_loop()
    clock.now += 300  # 150 steps of 2 s
    schedule = WSD(warmup=10, decay_fraction=0.4, final_factor=0.0)
    size = {"batch_size": 4, "samples": 10**6, "val_samples": 60}
    # A sample takes 2 / 4 / 3 s in the last report, 60 of them 10 s; 1% and 3 s are for the rest of the end: of the
    # 260 s that are left, 241 are for 120 steps. The decay takes 0.4 of 541 s, 216.4, so it need not begin.
    assert ten.decide(150, 400, schedule, **size) is None
    decided = ten.decide(150, 240, schedule, **size)  # where the plan begins it: 10 + 0.6 * 229 = 147
    assert decided is not None
    assert (decided.steps, decided.report_samples) == (270, 60)
    clock.now += 30
    late = ten.decide(150, 400, schedule, **size)  # 2.2 s a step: 211 - 1 s are left of 541, and the decay takes 216
    assert late is not None
    assert late.steps == 150 + int((230 - 9 - 60 * 2.2 / 12) / 2.2)
    many = ten.decide(150, 240, schedule, **size | {"val_samples": 10**6})  # a report of at most 18 s
    assert many is not None
    assert many.report_samples == int(18 / (2.2 / 12))
    few = ten.decide(150, 240, schedule, **size | {"samples": 130})  # of which five epochs are 162 steps
    assert few is not None
    assert few.steps == 162
    assert ten.decide(10, 10, schedule, **size) is None  # still warming up


def test_a_machine_that_became_slower_is_believed(clock: Clock) -> None:
    size = {"batch_size": 1, "samples": 10**6, "val_samples": 3}
    schedule = WSD(warmup=0, decay_fraction=0.5, final_factor=0.0)
    one = Budget(10, clock.now)
    one.begin_loop()
    for done in range(100):
        assert one.decide(done, 200, schedule, **size) is None
        clock.now += 1 if done < 50 else 3
    # 200 s are used. At 3 s a step 400 - 6 - 3 - 3 * 1 s are for 129 steps; at 2 s, the mean of all, it would be 194.
    decided = one.decide(100, 200, schedule, **size)
    assert decided is not None
    assert decided.steps == 100 + 129


@example(0, 3, 9, 0.0)  # where a decay over the steps left would have begun at a factor of 1 - 2^-53
@given(st.integers(0, 100), st.integers(1, 2000), st.integers(1, 2000), st.floats(0, 0.5))
def test_the_decay_changes_no_step_before_it(warmup: int, stable: int, decay: int, final: float) -> None:
    done = warmup + stable
    one = Budget(1e9, 0.0)
    one.resume(0.0, 1.0 * done)
    schedule = WSD(warmup=warmup, decay_fraction=0.4, final_factor=final)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "clock", lambda: 0.0)
        one.seconds = (one.used + done + decay + 3 + 0.5 + 1 / 3) / (1 - budget.FINISH)
        one.spent = float(done)
        decided = one.decide(done, done, schedule, batch_size=1, samples=done + decay, val_samples=1)
    assert decided is not None
    assert decided.steps == done + decay
    after_all = decay_from(schedule, done, decided.steps)
    factors = [after_all.factor(step, decided.steps) for step in range(decided.steps)]
    assert factors[warmup:done] == [1.0] * stable
    assert factors[:warmup] == [schedule.factor(step, 10**6) for step in range(warmup)]
    after = factors[done:]
    assert after == sorted(after, reverse=True)
    assert after[0] < 1
    assert after[-1] == pytest.approx(final)


# What is chosen


def prepared(folder: Path, **settings: object) -> tuple[Resolved, Datasets]:
    write_data(folder)
    train = {"minutes": 10, "out": str(folder / "run"), **settings}
    data = {"path": str(folder / "a.txt"), "seq_len": 16, "vocab_size": 270, "val_fraction": 0.1}
    run = Run.from_dict({"model": {}, "data": data, "train": train})
    resolved = resolve(run, Custom(), Processes(), torch.device("cpu"), SilentReporter())
    return resolved, prepare_datasets(run.data, folder / "prepared", None, lambda *_: None)


def fake_timing(clock: Clock, flops: float) -> Callable[[Resolved, Datasets, Signals], float]:
    """Return a `time_step` for a machine of so many FLOPs per second, which takes the time that it says."""

    def time_step(resolved: Resolved, datasets: Datasets, signals: Signals) -> float:
        model, batch = resolved.run.model.to_dict(), resolved.run.train.batch_tokens
        per_token = 6 * (choice.block_parameters(model) + len(datasets.tok) * model["d_model"])
        clock.now += 3 * batch * per_token / flops
        return batch * per_token / flops

    return time_step


@pytest.mark.parametrize("flops", [1e8, 1e9, 1e11, 1e15])
def test_the_lowest_predicted_loss_is_chosen(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, flops: float
) -> None:
    monkeypatch.setattr(choice, "time_step", fake_timing(clock, flops))
    resolved, datasets = prepared(tmp_path)
    began, one = clock.now, Budget(10, clock.now)
    found = find_candidates(resolved, datasets, one, Signals(), SilentReporter())
    assert clock.now - began <= 0.05 * 600
    chosen = best(found)
    assert all(chosen.loss <= other.loss for other in found)
    for other in found:
        tokens = other.steps * other.batch_tokens
        wanted = min(0.85 * 0.95 * 600 * other.tokens_per_second, 5 * datasets.train.n_tokens)
        assert other.steps == 1 or wanted - other.batch_tokens <= tokens <= wanted * (1 + 1e-9)
        assert other.epochs == tokens / datasets.train.n_tokens
    run = chosen.apply(resolved.run)
    assert run.model.to_dict()["n_layers"] == chosen.depth
    assert (run.train.batch_tokens, run.train.steps) == (chosen.batch_tokens, chosen.steps)
    assert (run.train.minutes, run.unchosen) == (10, None)


def test_a_faster_machine_gets_a_deeper_model(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved, datasets = prepared(tmp_path)
    depths = []
    for flops in (1e8, 1e10, 1e12):
        monkeypatch.setattr(choice, "time_step", fake_timing(clock, flops))
        found = find_candidates(resolved, datasets, Budget(10, clock.now), Signals(), SilentReporter())
        depths.append(best(found).depth)
    assert depths == sorted(depths)
    assert depths[0] < depths[-1]


def test_what_is_set_is_not_chosen(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "time_step", fake_timing(clock, 1e10))
    resolved, datasets = prepared(tmp_path, batch_tokens=64)
    found = find_candidates(resolved, datasets, Budget(10, clock.now), Signals(), SilentReporter())
    assert {one.batch_tokens for one in found} == {64}


def test_steps_are_timed_after_one_that_warms_up(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolved, datasets = prepared(tmp_path)
    seconds = iter((100.0, 2.0, 4.0))

    def step(batch: object, grad_accum: int) -> None:
        clock.now += next(seconds)

    monkeypatch.setattr(choice, "make_train_step", lambda *_: step)
    one = choice.replace(resolved, run=resolved.run.choose(1, 64, 1))
    assert choice.time_step(one, datasets, Signals()) == 3


def test_data_that_use_up_the_time_are_an_error(tmp_path: Path, clock: Clock) -> None:
    resolved, datasets = prepared(tmp_path)
    ten = Budget(10, clock.now)
    clock.now += 590
    with pytest.raises(InputError, match=r"train.minutes is 10, which preparing the data has used up"):
        find_candidates(resolved, datasets, ten, Signals(), SilentReporter())


# Whole runs, in which a step takes as many seconds as its reporter says


class Steps(SilentReporter):
    """Moves the clock at each step, and sends a signal after some."""

    def __init__(self, clock: Clock, seconds: float, stop_at: int = -1) -> None:
        self.clock, self.seconds, self.stop_at = clock, seconds, stop_at
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        self.messages.append(text)

    def on_step_end(self, step: int, *_: object) -> None:
        self.clock.now += self.seconds
        if step == self.stop_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def settings(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, object]]:
    """A minute of the smallest model, whose steps were timed at 1 s."""
    monkeypatch.setattr(choice, "time_step", lambda *_: 1.0)
    (tmp_path / "a.txt").write_text(SAYING * 400)
    quiet = {"probes": [], "sample_prompts": 0, "workers": 0, "keep_snapshots": 0}
    return {
        "model": {"depth": 1, "dropout": 0.2},
        "data": {"path": str(tmp_path / "a.txt"), "seq_len": 16, "vocab_size": 270, "val_fraction": 0.1},
        "train": {"minutes": 1, "batch_tokens": 64, "out": str(tmp_path / "run"), "save_every": 5, **quiet},
    }


def with_out(settings: dict[str, dict[str, object]], folder: Path) -> dict[str, dict[str, object]]:
    return {**settings, "train": {**settings["train"], "out": str(folder)}}


@pytest.mark.slow
@pytest.mark.parametrize("seconds", first_of([2.5, 0.4, 1.0]))  # a step, which was timed at 1 s
def test_a_run_ends_on_time(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path, seconds: float
) -> None:
    began, reporter = clock.now, Steps(clock, seconds)
    result = gh.train(Run.from_dict(settings), reporter)
    assert result.steps == len(losses(tmp_path))
    # The clock stands still in the last report, for which time is left.
    report = result.val_coverage[1] * seconds / 4 / 3
    assert 0.95 * 60 <= clock.now - began + min(report, 0.03 * 60) + 0.01 * 60 + 3 <= 60
    written = config.read(tmp_path / "run" / "run.toml")
    assert written["train"]["steps"] == result.steps
    assert "minutes" not in written["train"]
    assert [line for line in reporter.messages if "planned" in line] == [
        f"steps    {result.steps:,}, now that the learning rate decays (planned: 48)"
    ]


@pytest.mark.slow
def test_stopped_resumed_and_reproduced_runs_are_the_same(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path
) -> None:
    gh.train(Run.from_dict(with_out(settings, tmp_path / "whole")), Steps(clock, 0.875))
    steps = len(losses(tmp_path, "whole"))
    for stop in (8, steps - 3):  # before the decay begins, and in it
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        with pytest.raises(StoppedError, match=f"after step {stop}"):
            gh.train(Run.from_dict(settings), Steps(clock, 0.875, stop))
        assert ("minutes" in config.read(tmp_path / "run" / "run.toml")["train"]) == (stop == 8)
        clock.now += 5000  # in which nothing runs
        gh.train(Run.from_dict(settings), Steps(clock, 0.875))  # the same command
        assert_same(tmp_path, "whole", "run")
    gh.train(Run.load(tmp_path / "whole", f"train.out={tmp_path / 'again'}"), Steps(clock, 123.0))
    assert_same(tmp_path, "whole", "again")


@pytest.mark.slow
def test_a_rerun_uses_what_is_left_of_the_minutes(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path
) -> None:
    began = clock.now
    with pytest.raises(StoppedError):
        gh.train(Run.from_dict(settings), Steps(clock, 1.0, 10))
    assert clock.now - began == 10
    gh.train(Run.from_dict(settings), Steps(clock, 2.0))  # on a machine of half the speed
    assert 0.8 * 60 <= clock.now - began <= 60


@pytest.mark.slow
def test_more_steps_than_the_minutes_took(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(StoppedError):
        gh.train(Run.from_dict(settings), Steps(clock, 1.0, 10))
    result = gh.train(Run.load(tmp_path / "run", "train.steps=60"), Steps(clock, 5.0))
    assert result.steps == 60
    with pytest.raises(InputError, match=r"train.steps was 60 and is 90, but of the 60 steps"):
        gh.train(Run.load(tmp_path / "run", "train.steps=90"), Steps(clock, 1.0))


def test_other_settings_are_refused_on_a_rerun(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path
) -> None:
    with pytest.raises(StoppedError):
        gh.train(Run.from_dict(settings), Steps(clock, 1.0, 2))
    other = {**settings, "model": {"depth": 1, "dropout": 0.3}}
    with pytest.raises(InputError, match=r"model.dropout was 0.2 and is 0.3"):
        gh.train(Run.from_dict(other), Steps(clock, 1.0))


def _train_by_own_clock(rank: int, world_size: int, settings: dict[str, dict[str, object]]) -> int:
    """Train in one of several processes, whose steps take longer by its own clock the higher its rank."""
    device.measure_peak_flops = lambda *_, **__: 1e12
    own = Clock()
    for module in (budget, launch, choice):
        module.clock = own  # type: ignore[attr-defined]
    choice.time_step = lambda *_: 1.0 + rank

    class Tick(gh.training.Callback):
        def on_step_end(self, *_: object) -> None:
            own.now += 1.0 + rank

    return gh.train(Run.from_dict(settings), progress=False, callbacks=[Tick()]).steps


@pytest.mark.long
def test_the_clock_of_the_main_process_decides_for_all(
    settings: dict[str, dict[str, object]], clock: Clock, tmp_path: Path
) -> None:
    found = in_processes(tmp_path, 2, _train_by_own_clock, settings)
    alone = gh.train(Run.from_dict(with_out(settings, tmp_path / "alone")), Steps(clock, 1.0))
    assert found == [alone.steps, alone.steps]


# Settings


@pytest.mark.parametrize(
    ("given_settings", "says"),
    [
        (("dates", "train.minutes=3"), "train.minutes is 3, .* but model.preset is 'vaswani-base'; give train.steps"),
        (("stdlib", "train.minutes=3", "model.from=gpt2"), "train.minutes is 3, .* but model.from is 'gpt2'"),
        (("stdlib", "train.minutes=0"), "train.minutes is 0.0, but it must be above 0"),
        (
            ("stdlib", "train.minutes=3", "train.epochs=2"),
            "train.epochs is 2 and train.minutes is 3; give one of them",
        ),
        (("stdlib", "train.minutes=3", "train.steps=9"), "train.steps is 9 and train.minutes is 3; give one of them"),
        (
            ("stdlib", "train.minutes=3", "train.schedule=cosine"),
            "train.schedule.kind is 'cosine', but it must be wsd",
        ),
    ],
)
def test_what_does_not_go_with_minutes_is_refused(given_settings: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Run.load(*given_settings)


def test_a_run_that_has_not_chosen_is_loaded_as_it_was_given(tmp_path: Path) -> None:
    run = Run.load("stdlib", "data.path=my", "train.minutes=2", "model.qk_norm=false", "train.optimizer.lr=0.01")
    table = run.to_dict()
    assert table["model"] == {"qk_norm": False}
    assert (table["train"]["minutes"], table["train"]["optimizer"]) == (2, {"lr": 0.01})
    assert not {"steps", "batch_tokens", "schedule"} & table["train"].keys()
    path = tmp_path / "run.toml"
    path.write_text(config.to_toml(table))
    assert json.dumps(Run.load(path).to_dict()) == json.dumps(table)
