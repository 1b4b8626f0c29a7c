"""Checkpoints: resuming is bit-equal to an uninterrupted run, and damaged checkpoints are detected and skipped."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import processes
import pytest
import torch
from torch import nn

import glasshouse as gh
from glasshouse import store
from glasshouse.data import Batch
from glasshouse.errors import StoreError
from glasshouse.hub.serialization import folder_writer
from glasshouse.training import Callback, Run, Trainer
from glasshouse.training.checkpoint import store as checkpoint_folder
from glasshouse.training.checkpoint.state import load_optimizer_state, load_rng_state, optimizer_state, rng_state
from glasshouse.training.checkpoint.store import CheckpointData, Checkpoints, read, write
from glasshouse.training.optimizer import AdamW, Muon, Optimizer, make_optimizer
from glasshouse.training.step import TrainStep
from glasshouse.training.trainer import device_rng_state, load_device_rng_state

pytestmark = pytest.mark.slow

PLAIN = AdamW(lr=1e-2)
KINDS = ("tiny-decoder", "tiny-encoder", "tiny-seq2seq")


EMPTY_WITH_CHECKSUM = json.dumps({"sha256": hashlib.sha256(b"{}").hexdigest()})  # a valid checksum, and no content


def draw(kind: str, step: int) -> Batch:
    """The batch of a step, a function of its number."""
    source = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 256, (6, 7), generator=source)
    lengths = torch.randint(1, 8, (6,), generator=source)
    sides = {"source": ids.flip(1), "source_lengths": lengths} if kind == "tiny-seq2seq" else {}
    return Batch(ids, ids.roll(-1, 1), torch.arange(7) < lengths[:, None], lengths=lengths, **sides)


def make(kind: str, choice: Optimizer = PLAIN) -> tuple[nn.Module, TrainStep]:
    model = gh.build(gh.preset(kind, dropout=0.2))
    return model, TrainStep(model, make_optimizer(model, choice))


def train(kind: str, update: TrainStep, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(update(draw(kind, step), grad_accum=3).loss)
        random.random()
        np.random.rand()
    return losses


def state_of(update: TrainStep) -> CheckpointData:
    optimizer, rng = optimizer_state(update.optimizer), rng_state()
    return CheckpointData(optimizer.tensors | rng.tensors, optimizer.metadata | rng.metadata)


def save(checkpoints: Checkpoints, step: int, model: Any, update: TrainStep, **more: Any) -> None:  # noqa: ANN401
    state = state_of(update)
    snapshot = CheckpointData(
        {name: one.clone() for name, one in state.tensors.items()}, copy.deepcopy(state.metadata)
    )
    checkpoints.save(step, folder_writer(copy.deepcopy(model), None), snapshot, **more)


@pytest.mark.few(3)
@pytest.mark.parametrize("choice", [PLAIN, Muon(), Muon(beta2=0.9, cautious=True)], ids=["adamw", "muon", "normuon"])
@pytest.mark.parametrize("kind", KINDS)
def test_resumed_equals_uninterrupted(kind: str, choice: Optimizer, tmp_path: Path) -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    model, update = make(kind, choice)
    checkpoints = Checkpoints(tmp_path)
    train(kind, update, range(4))
    save(checkpoints, 4, model, update)
    expected = train(kind, update, range(4, 8))
    drawn = random.random(), np.random.rand(), float(torch.rand(()))
    checkpoints.wait()

    torch.manual_seed(99)  # another process
    found = checkpoints.newest()
    assert found is not None
    step, state, errors = found
    assert (step, errors) == (4, [])
    loaded, _ = gh.load(checkpoints.folder(4))
    other, again = make(kind, choice)
    other.load_state_dict(loaded.state_dict())
    load_optimizer_state(state, again.optimizer)
    load_rng_state(state)
    assert train(kind, again, range(step, 8)) == expected
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == drawn
    for name, weight in model.state_dict().items():
        assert weight.equal(other.state_dict()[name]), name


def test_a_resumed_run_sees_the_samples_of_an_uninterrupted_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, and none twice in an epoch: stopped within the second of three epochs of three batches."""
    seen: list[list[int]] = []
    launch = TrainStep.launch

    def spy(step: TrainStep, batch: Batch, grad_accum: int, n_targets: int) -> object:
        seen.append(batch.ids[:, 0].tolist())
        return launch(step, batch, grad_accum, n_targets)

    class Stop(Callback):
        def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
            if step == 5:
                trainer.stop()

    def run(name: str, *callbacks: Callback) -> list[list[int]]:
        seen.clear()
        table = {
            "model": {"preset": "tiny-decoder", "n_layers": 1, "vocab_size": 12},
            "data": {"seq_len": 1},
            "train": {"steps": 9, "batch_tokens": 4, "out": str(tmp_path / name), "device": "cpu", "workers": 0}
            | {"probes": [], "sample_prompts": 0, "eval_every": 9, "schedule": "constant"},
        }
        items = [[number, 0] for number in range(12)]
        gh.train(Run.from_dict(table), progress=False, dataset=(items, items[:1]), callbacks=callbacks)
        return [*seen]

    monkeypatch.setattr(TrainStep, "launch", spy)
    whole = run("whole")
    assert len(whole) == 9
    for epoch in (whole[:3], whole[3:6], whole[6:]):
        assert sorted(number for batch in epoch for number in batch) == list(range(12))
    before, after = run("stopped", Stop()), run("stopped")
    assert 5 <= len(before) < 9
    assert before + after == whole


@pytest.fixture
def two_checkpoints(tmp_path: Path) -> Checkpoints:
    """Two checkpoints, of steps 1 and 2."""
    model, update = make("tiny-decoder")
    checkpoints = Checkpoints(tmp_path / "run")
    for step in (1, 2):
        train("tiny-decoder", update, range(step, step + 1))
        save(checkpoints, step, model, update)
    checkpoints.wait()
    return checkpoints


def test_damage_is_detected_and_the_previous_checkpoint_is_used(two_checkpoints: Checkpoints, tmp_path: Path) -> None:
    newest = two_checkpoints.folder(2)
    intact = tmp_path / "intact"
    shutil.copytree(newest, intact)
    files = sorted(path.name for path in newest.iterdir())
    source = random.Random(0)
    for case in range(100):
        name = files[case % len(files)]
        data = (intact / name).read_bytes()
        position = source.randrange(len(data))
        bit = 1 << source.randrange(8)
        flipped = data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]
        damaged = data[:position] if case % 2 else flipped
        (newest / name).write_bytes(damaged)
        found = two_checkpoints.newest()
        assert found is not None
        step, _, errors = found
        if step == 2:  # changed whitespace in JSON is harmless
            assert name == checkpoint_folder.STATE
            assert damaged.split() == data.split()
        else:
            assert step == 1
            assert len(errors) == 1
            assert name in errors[0]
        (newest / name).write_bytes(data)
    assert two_checkpoints.newest()[0] == 2  # type: ignore[index]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", checkpoint_folder.TENSORS, checkpoint_folder.STATE]
)
def test_a_missing_file_is_named(two_checkpoints: Checkpoints, name: str) -> None:
    (two_checkpoints.folder(2) / name).unlink()
    with pytest.raises(StoreError, match=f"{name}.* is missing"):
        read(two_checkpoints.folder(2))
    assert two_checkpoints.newest()[0] == 1  # type: ignore[index]


@pytest.mark.few(3)
@pytest.mark.parametrize("text", ["[" * 200_000, "5", "null", "[]", "{}", '"a"', EMPTY_WITH_CHECKSUM])
def test_invalid_training_state_is_damaged(two_checkpoints: Checkpoints, text: str) -> None:
    (two_checkpoints.folder(2) / checkpoint_folder.STATE).write_text(text)
    step, _, errors = two_checkpoints.newest()  # type: ignore[misc]
    assert step == 1
    assert [sentence.endswith("training_state.json' is damaged; use another checkpoint.") for sentence in errors] == [
        True
    ]


def test_no_intact_checkpoint_is_an_error(two_checkpoints: Checkpoints) -> None:
    for step in (1, 2):
        (two_checkpoints.folder(step) / checkpoint_folder.TENSORS).write_bytes(b"")
    with pytest.raises(StoreError, match=r"no checkpoint in .* is intact"):
        two_checkpoints.newest()
    assert Checkpoints(two_checkpoints.root / "elsewhere").newest() is None


WRITES: list[tuple[Any, str]] = [
    (Path, "mkdir"),
    (Path, "write_text"),
    (Path, "rename"),
    (store, "save_file"),
    (os, "fsync"),
    (os, "open"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(("owner", "name"), WRITES, ids=[name for _, name in WRITES])
def test_a_failed_write_keeps_existing_checkpoints(
    owner: Any,  # noqa: ANN401 (a class or a module)
    name: str,
    number: int,
    two_checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every call of every function that writes fails once: the save raises, and the last checkpoint loads."""
    model, update = make("tiny-decoder")
    before = {path: path.read_bytes() for path in two_checkpoints.folder(2).iterdir()}
    original: Callable[..., Any] = getattr(owner, name)
    for fails_at in range(1000):
        calls = 0

        def broken(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            nonlocal calls
            calls += 1
            if calls == fails_at + 1:  # noqa: B023 (called within this round)
                raise OSError(number, os.strerror(number))
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            save(two_checkpoints, 3, model, update)
            try:
                two_checkpoints.wait()
            except OSError as error:
                assert error.errno == number  # noqa: PT017 (the last round must not raise)
                assert two_checkpoints.newest()[0] == (2 if 3 not in two_checkpoints.steps() else 3)  # type: ignore[index]
                assert {path: path.read_bytes() for path in two_checkpoints.folder(2).iterdir()} == before
            else:
                assert fails_at >= 1
                break
        shutil.rmtree(two_checkpoints.folder(3), ignore_errors=True)
    assert read(two_checkpoints.folder(3))


def test_a_background_error_is_raised_at_the_next_call(two_checkpoints: Checkpoints) -> None:
    def fill(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    two_checkpoints.save(3, fill, CheckpointData())
    with pytest.raises(OSError, match="no room"):
        two_checkpoints.wait()
    two_checkpoints.check()  # raised once
    assert two_checkpoints.steps() == [2, 1]


def test_latest_and_best_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(step, lambda folder: None, CheckpointData({"a": torch.ones(1)}, {"n": step}), best=2)
    checkpoints.wait()
    assert checkpoints.steps() == [6, 5, 2]
    assert read(checkpoints.folder(2)).metadata == {"n": 2}


def test_a_folder_of_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "FORMAT", 7)
    write(tmp_path / "one", lambda folder: None, CheckpointData())
    monkeypatch.undo()
    with pytest.raises(StoreError, match="has format 7, but this version reads format 2"):
        read(tmp_path / "one")


def test_the_state_of_another_optimizer_is_refused() -> None:
    model = nn.Linear(2, 2)
    state = optimizer_state(torch.optim.AdamW(model.parameters()))
    with pytest.raises(StoreError, match="does not fit this optimizer"):
        load_optimizer_state(state, torch.optim.AdamW([model.weight]))


def save_endlessly(root: Path, connection: Connection) -> None:
    checkpoints = Checkpoints(root)
    tensor = torch.arange(200_000.0)
    for step in range(1, 100_000):
        state = CheckpointData({"a": tensor + step})
        checkpoints.save(step, lambda folder, step=step: (folder / "config.json").write_text(str(step)), state)
        checkpoints.wait()
        connection.send(step)


def check_kills(folder: Path, kills: int) -> None:
    """Kill a process that only saves, at random times: every checkpoint it reported can be loaded."""
    source = random.Random(0)
    for number in range(kills):
        root = folder / str(number)
        with processes.started(save_endlessly, root) as (process, connection):
            assert connection.recv() == 1
            time.sleep(source.uniform(0, 0.3))
            process.kill()
            reported = [1, *processes.received(connection)]
        found = Checkpoints(root).newest()
        assert found is not None
        step, state, errors = found
        assert errors == []
        assert step in (reported[-1], reported[-1] + 1)
        assert state.tensors["a"].equal(torch.arange(200_000.0) + step)
        assert (root / f"step-{step:08d}" / "config.json").read_text() == str(step)


def test_killed_while_saving(tmp_path: Path) -> None:
    check_kills(tmp_path, 5)


@pytest.mark.long
def test_killed_fifty_times_while_saving(tmp_path: Path) -> None:
    check_kills(tmp_path, 50)


def test_mps_rng_state_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apple = torch.Generator().manual_seed(3)  # stands in for a device that this machine lacks
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "get_rng_state", apple.get_state)
    monkeypatch.setattr(torch.mps, "set_rng_state", apple.set_state)
    device = torch.device("mps")

    def some() -> list[list[float]]:
        return [torch.rand(4, generator=apple).tolist(), torch.rand(4).tolist()]

    before = device_rng_state(device)
    first = some()
    load_device_rng_state(before, device)
    assert some() == first
    saved = rng_state()
    second = some()
    write(tmp_path / "step", lambda folder: None, saved)
    load_rng_state(read(tmp_path / "step"))
    assert some() == second
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    load_rng_state(saved)  # on a machine without one
    assert some()[1] == second[1]
