"""Snapshots and the list of checkpoints: evenly spaced over the run, and complete after any failure."""

from __future__ import annotations

import errno
import os
import random
import time
from itertools import combinations, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import RecordingReporter, assert_same, killed, table

import glasshouse as gh
from glasshouse import store
from glasshouse.errors import ConfigError, InputError
from glasshouse.hub.run_checkpoints import saved_steps, step_folder_name
from glasshouse.training import Run, SavedCheckpoint, is_run, list_checkpoints, train
from glasshouse.training.checkpoint.store import STATE, TENSORS, CheckpointData, Checkpoints, Snapshots, steps_to_drop

pytestmark = pytest.mark.slow


def many(data_folder: Path, out: str = "run", **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    """A run of 12 checkpoints, of which one is kept."""
    return table(data_folder, out=out, save_every=1, eval_every=100, keep_checkpoints=1, **choices)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(gh.load(folder)[0].state_dict())


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, weight in one.items():
        assert weight.equal(other[name]), name


# Which are kept


def test_steps_to_drop_by_hand() -> None:
    assert steps_to_drop([0, 1, 2, 3, 4], limit=5) == []
    assert steps_to_drop([0, 1, 2, 4], limit=3) == [1]  # gaps 2, 2 instead of 1, 3
    assert steps_to_drop([0, 10, 11, 20], limit=3) == [11]  # gaps 10, 10 instead of 11, 9
    assert steps_to_drop([0, 1, 2, 3], limit=3) == [1]  # the first of equals
    assert steps_to_drop([0, 50, 100], limit=2) == [50]
    assert steps_to_drop([0, 50, 100], limit=1) == [50, 0]  # the newest is the last to go
    assert steps_to_drop([0, 50, 100], limit=0) == [50, 0, 100]


@given(st.sets(st.integers(0, 1000), min_size=3, max_size=9))
def test_dropping_one_step_leaves_the_most_even_gaps(found: set[int]) -> None:
    steps = sorted(found)
    (gone,) = steps_to_drop(steps, len(steps) - 1)
    left = tuple(step for step in steps if step != gone)

    def unevenness(kept: tuple[int, ...]) -> int:
        return sum((after - before) ** 2 for before, after in pairwise(kept))

    choices = [kept for kept in combinations(steps, len(steps) - 1) if {steps[0], steps[-1]} <= set(kept)]
    assert unevenness(left) == min(map(unevenness, choices))


# A run


@pytest.mark.long
def test_snapshots_have_the_weights_of_the_checkpoints(data_folder: Path) -> None:
    train(Run.from_dict(many(data_folder, "whole")))
    settings = many(data_folder, "all")
    settings["train"]["keep_checkpoints"] = 100
    result = train(Run.from_dict(settings))
    snapshots, kept = data_folder / "whole" / "snapshots", data_folder / "all" / "checkpoints"
    assert saved_steps(snapshots) == list(range(12))  # the last is still a checkpoint
    torch.manual_seed(0)
    assert_equal(weights(snapshots / step_folder_name(0)), dict(gh.build(result.model.spec).state_dict()))
    for step in range(1, 12):
        assert_equal(weights(snapshots / step_folder_name(step)), weights(kept / step_folder_name(step)))
        assert gh.load(snapshots / step_folder_name(step))[1] is not None  # with its tokenizer
        files = {path.name for path in (kept / step_folder_name(step)).iterdir()}
        assert {path.name for path in (snapshots / step_folder_name(step)).iterdir()} == files - {TENSORS, STATE}
    assert_same(data_folder, "whole", "all")
    assert saved_steps(data_folder / "all" / "snapshots") == [0]


@pytest.mark.long
def test_keep_snapshots_limits_their_number_and_does_not_change_training(data_folder: Path) -> None:
    for out, limit in (("few", 4), ("none", 0)):
        train(Run.from_dict(many(data_folder, out, keep_snapshots=limit)))
    there = saved_steps(data_folder / "few" / "snapshots")
    assert len(there) == 4
    assert (there[0], there[-1]) == (0, 11)
    assert not (data_folder / "none" / "snapshots").exists()
    assert_same(data_folder, "few", "none")
    train(Run.from_dict(many(data_folder, "few", keep_snapshots=9)))  # which does not change training
    assert saved_steps(data_folder / "few" / "snapshots") == there
    with pytest.raises(ConfigError, match=r"train\.keep_snapshots is -1, but it must be 0 or more"):
        Run.from_dict(many(data_folder, keep_snapshots=-1))


@pytest.mark.long
def test_killed_and_resumed_has_the_same_snapshots(data_folder: Path) -> None:
    choices = {"save_every": 2, "eval_every": 100, "keep_checkpoints": 1, "keep_snapshots": 3}
    train(Run.from_dict(table(data_folder, out="whole", **choices)))
    settings = table(data_folder, **choices)
    killed(settings)
    train(Run.from_dict(settings))
    assert_same(data_folder, "whole", "run")
    one, other = (data_folder / out / "snapshots" for out in ("whole", "run"))
    assert saved_steps(one) == saved_steps(other) == [0, 4, 10]  # by hand: 0 2 4, 0 4 6, 0 4 8, 0 4 10
    for step in saved_steps(one):
        assert_equal(weights(one / step_folder_name(step)), weights(other / step_folder_name(step)))


@pytest.mark.long
def test_lora_is_merged(data_folder: Path) -> None:
    base = train(Run.from_dict(table(data_folder, out="base", steps=2)))
    settings = many(data_folder, lora={"rank": 2}, lr=0.05)
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    train(Run.from_dict(settings))
    first, last = (weights(data_folder / "run" / "snapshots" / step_folder_name(step)) for step in (0, 11))
    for name, weight in base.model.state_dict().items():
        assert weight.equal(first[name]), name
        assert last[name].shape == weight.shape
        assert last[name].equal(weight) == (".query.weight" not in name and ".value.weight" not in name), name


# Failures


def save(checkpoints: Checkpoints, step: int) -> None:
    """Write a checkpoint whose model is one file with its step."""

    def fill(folder: Path) -> None:
        (folder / "config.json").write_text(str(step))

    checkpoints.save(step, fill, CheckpointData({"a": torch.full((1000,), float(step))}))
    checkpoints.wait()


def assert_intact(data_folder: Path) -> None:
    snapshots = data_folder / "snapshots"
    for step in saved_steps(snapshots):
        assert {path.name for path in (snapshots / step_folder_name(step)).iterdir()} == {"config.json"}
        assert (snapshots / step_folder_name(step) / "config.json").read_text() == str(step)


def save_endlessly(data_folder: Path, connection: Connection) -> None:
    checkpoints = Checkpoints(data_folder / "checkpoints", 1, 3)
    for step in range(1, 100_000):
        save(checkpoints, step)
        connection.send(step)


def test_killed_while_moving(tmp_path: Path) -> None:
    source = random.Random(0)
    for number in range(2):
        data_folder = tmp_path / str(number)
        with processes.started(save_endlessly, data_folder) as (process, connection):
            assert connection.recv() == 1
            time.sleep(source.uniform(0, 0.2))
            process.kill()
            reported = [1, *processes.received(connection)]
        checkpoints = Checkpoints(data_folder / "checkpoints", 1, 3)
        found = checkpoints.newest()
        assert found is not None
        assert found[0] in (reported[-1], reported[-1] + 1)
        assert found[2] == []
        assert_intact(data_folder)
        assert len(checkpoints.snapshots.steps()) <= 4  # one may not be deleted yet
        checkpoints.snapshots.truncate(found[0] + 1)
        assert not list((data_folder / "snapshots").glob(".*"))
        save(checkpoints, found[0] + 1)
        assert len(checkpoints.snapshots.steps()) <= 3
        assert_intact(data_folder)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["rename", "unlink", "mkdir"])
def test_killed_at_each_call(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Snapshots are complete after every call that moves files, and leftovers are deleted."""

    class KilledError(BaseException):
        pass

    original: Any = getattr(Path, name)
    for fatal in range(100):
        data_folder = tmp_path / str(fatal)
        checkpoints = Checkpoints(data_folder / "checkpoints", 1, 2)
        for step in range(1, 5):
            save(checkpoints, step)
        assert checkpoints.snapshots.steps() == [1, 3]
        calls = 0

        def dies(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            nonlocal calls
            calls += 1
            if calls > fatal:  # noqa: B023 (called within this round)
                raise KilledError
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Path, name, dies)
            try:
                save(checkpoints, 5)
                survived = True
            except KilledError:
                survived = False
        assert_intact(data_folder)
        found = Checkpoints(data_folder / "checkpoints").newest()
        assert found is not None
        assert found[0] in (4, 5)
        assert found[2] == []
        again = Checkpoints(data_folder / "checkpoints", 1, 2)
        again.snapshots.truncate(found[0] + 1)
        assert not list((data_folder / "snapshots").glob(".*"))
        for step in range(found[0] + 1, 8):
            save(again, step)
        assert again.steps() == [7]
        assert again.snapshots.steps()[-1] == 6
        assert len(again.snapshots.steps()) == 2
        assert_intact(data_folder)
        if survived:
            break
    assert fatal > 0


def test_a_checkpoint_that_cannot_be_moved_is_deleted(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("a file where a folder should be")
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 2)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.steps() == [3]


def test_snapshots_are_deleted_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 8)
    for step in range(1, 8):
        save(checkpoints, step)
    assert checkpoints.snapshots.steps() == [1, 2, 3, 4, 5, 6]
    real = store.save_file

    def save_file(*arguments: Any) -> None:  # noqa: ANN401
        """A disk with space for a checkpoint and two models."""
        if len(checkpoints.snapshots.steps()) > 2:
            raise store.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        real(*arguments)

    monkeypatch.setattr(store, "save_file", save_file)
    save(checkpoints, 8)  # six are too many, and so are three
    assert checkpoints.steps() == [8]
    assert len(checkpoints.snapshots.steps()) == 2
    assert checkpoints.snapshots.steps()[-1] == 7
    assert_intact(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_other_errors_are_raised(number: int, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 8)
    for step in (1, 2, 3):
        save(checkpoints, step)

    def fails(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    checkpoints.save(4, fails, CheckpointData())
    with pytest.raises(OSError, match=os.strerror(number)):
        checkpoints.wait()
    assert checkpoints.steps() == [3]
    assert checkpoints.snapshots.steps() == ([] if number == errno.ENOSPC else [1, 2])


def test_truncate_drops_later_snapshots(tmp_path: Path) -> None:
    snapshots = Snapshots(tmp_path / "snapshots", 8)
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 8)
    for step in range(1, 6):
        save(checkpoints, step)
    snapshots.truncate(3)
    assert snapshots.steps() == [1, 2]
    Snapshots(tmp_path / "nowhere", 8).truncate(0)


def test_leftovers_of_a_killed_run_are_finished_or_deleted(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", 1, 8)
    for step in (1, 2):
        save(checkpoints, step)
    (tmp_path / "checkpoints" / step_folder_name(2)).rename(tmp_path / "snapshots" / f".{step_folder_name(2)}.moved")
    for name in (".step-00000000.new", ".step-00000003.gone"):
        (tmp_path / "snapshots" / name).mkdir()
    checkpoints.snapshots.truncate(3)
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
        step_folder_name(1),
        step_folder_name(2),
    ]
    assert_intact(tmp_path)


# The list of checkpoints


def test_list_checkpoints_of_a_run(data_folder: Path) -> None:
    assert not is_run(data_folder / "run")
    assert list_checkpoints(data_folder / "run") == []
    train(Run.from_dict(many(data_folder, keep_snapshots=4, ema=0.9)))
    folder = data_folder / "run"
    assert is_run(folder)
    assert not is_run(folder / "model")
    found = list_checkpoints(str(folder))
    there = saved_steps(folder / "snapshots")
    assert [checkpoint.step for checkpoint in found] == [*there, 12, 12]
    assert [checkpoint.name for checkpoint in found] == [*(f"step {step}" for step in there), "step 12", "final"]
    for checkpoint in found:
        assert gh.load(checkpoint.folder)[0].spec == gh.load(folder / "model")[0].spec
    last, final = found[-2:]
    assert last.folder == folder / "checkpoints" / step_folder_name(12)
    assert final == SavedCheckpoint(12, "final", folder / "model")
    assert any(not weight.equal(weights(final.folder)[name]) for name, weight in weights(last.folder).items())


@pytest.mark.long
def test_list_checkpoints_during_training(data_folder: Path) -> None:
    listed: list[SavedCheckpoint] = []
    train(
        Run.from_dict(many(data_folder)),
        RecordingReporter(8, lambda: listed.extend(list_checkpoints(data_folder / "run"))),
    )
    steps = [checkpoint.step for checkpoint in listed]
    assert steps[:6] == [*range(6)]
    assert steps[6:] in ([6], [6, 7], [7])  # step 7 may still be being written, and then step 6 becomes a snapshot
    assert {checkpoint.name for checkpoint in listed} == {f"step {checkpoint.step}" for checkpoint in listed}
    for checkpoint in listed:
        if checkpoint.folder.parent.name == "snapshots":
            gh.load(checkpoint.folder)
        else:  # it has moved since
            with pytest.raises(InputError, match="there is no folder"):
                gh.load(checkpoint.folder)


def test_a_step_in_both_folders_is_listed_once(tmp_path: Path) -> None:
    for part in ("checkpoints", "snapshots"):
        for step in (0, 5 if part == "snapshots" else 7):
            (tmp_path / part / step_folder_name(step)).mkdir(parents=True)
    (tmp_path / "checkpoints" / ".step-00000009.new").mkdir()
    (tmp_path / "snapshots" / ".step-00000003.moved").mkdir()
    (tmp_path / "model").mkdir()  # which has no model yet
    assert [(checkpoint.step, checkpoint.folder.parent.name) for checkpoint in list_checkpoints(tmp_path)] == [
        (0, "snapshots"),
        (5, "snapshots"),
        (7, "checkpoints"),
    ]
