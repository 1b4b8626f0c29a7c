"""A run as the page tells it: curves that are the journal's, also while it grows and after it was cut."""

from __future__ import annotations

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from corrupt_journals import DAMAGED
from examples import first_of

import glasshouse as gh
from glasshouse.errors import ConfigError, InputError
from glasshouse.page.forward_pass import ForwardPass, PagePrompt
from glasshouse.page.model_loader import ModelLoader
from glasshouse.page.trace import TraceCache
from glasshouse.page.views import training_run
from glasshouse.page.views.metric_curves import POINTS, Curves
from glasshouse.page.views.training_run import (
    CHECKPOINTS,
    CheckpointLog,
    CompareCheckpoints,
    Metrics,
    RunSettings,
)
from glasshouse.training import Run, list_checkpoints, train
from glasshouse.training.checkpoint.folder import lock_folder
from glasshouse.training.logging.journal import Journal

pytestmark = pytest.mark.slow

SAYING = "to be or not to be, that is the question whether it is nobler. "
KINDS = {
    "decoder": {"preset": "tiny-decoder", "n_layers": 2},
    "encoder": {"preset": "tiny-encoder", "n_layers": 1, "head": "masked_token"},
    "seq2seq": {"preset": "tiny-seq2seq", "n_layers": 1},
}
# Each trains a run.
FIRST = ["decoder", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("encoder", "seq2seq"))]


def trained(place: Path, kind: str = "decoder", **choices: Any) -> Path:  # noqa: ANN401
    """Return the folder of a short run."""
    (place / "a.txt").write_text(SAYING * 40)
    pairs = (f"{number}\t{' '.join(str(number))}" for number in range(10, 210, 3))
    (place / "a.tsv").write_text("source\ttarget\n" + "\n".join(pairs) + "\n")
    data = {"path": str(place / "a.tsv"), "kind": "pairs"} if kind == "seq2seq" else {"path": str(place / "a.txt")}
    table = {
        "model": KINDS[kind],
        "data": {**data, "seq_len": 16, "vocab_size": 270, "val_fraction": 0.1},
        "train": {"steps": 12, "batch_tokens": 96, "save_every": 3, "eval_every": 4, "lr": 0.01}
        | {"out": str(place / "run"), **choices},
    }
    return train(Run.from_dict(table)).folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return shutil.copytree(folder, tmp_path / "run")


@pytest.fixture
def traces(folder: Path) -> TraceCache:
    return TraceCache(ModelLoader(folder))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def follow(curves: Curves, held: dict[str, Any]) -> None:
    """Do as the page does: ask for what is new, and put it in the place of what it replaces."""
    curves.read_new()
    since = held.get("last", 0) if held.get("version") == curves.version else 0
    told = curves.since(since)
    since = since // curves.steps_per_point * curves.steps_per_point
    old = held.get("curves", {})
    held["curves"] = {}
    for name, new in told.items():
        kept = [at for at, step in enumerate(old.get(name, {"step": []})["step"]) if step < since]
        held["curves"][name] = {part: [old[name][part][at] for at in kept] + new[part] for part in new}
    held["version"], held["last"] = curves.version, curves.last


# Curves


def test_short_curves_are_the_journal(traces: TraceCache, folder: Path) -> None:
    told = training_run.metrics(traces, Metrics())
    journal = lines(folder / "metrics.jsonl")
    assert told["steps_per_point"] == 1
    assert told["step"] == told["steps"] == 12
    for name in ("loss", "lr", "grad_norm", "tokens_per_second", "validation_loss", "validation_bits_per_byte"):
        having = [line for line in journal if name in line]
        assert having
        assert told["curves"][name] == {
            "step": [one["step"] for one in having],
            "mean": [one[name] for one in having],
        }
    best = min((line for line in journal if "validation_loss" in line), key=lambda line: line["validation_loss"])
    assert told["best"] == {"step": best["step"], "value": best["validation_loss"]}


def test_only_new_metrics_are_sent(traces: TraceCache) -> None:
    first = training_run.metrics(traces, Metrics())
    later = training_run.metrics(traces, Metrics(since=10, version=first["version"]))
    assert later["since"] == 10
    assert later["curves"]["loss"]["step"] == [10, 11, 12]
    assert training_run.metrics(traces, Metrics(since=10, version="of another time"))["since"] == 0


def test_long_curves_by_hand(tmp_path: Path) -> None:
    """Of 2,500 steps, 4 make a point: 2500 // 4 is below 1,000, and 2500 // 2 is not."""
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 2501):
        journal.write(step, loss=float(step), rare=1.5 if step == 7 else None)
    curves = Curves(tmp_path / "metrics.jsonl")
    curves.read_new()
    loss = curves.since(0)["loss"]
    assert curves.steps_per_point == 4
    assert [loss[part][0] for part in ("step", "mean", "low", "high")] == [3, 2.0, 1.0, 3.0]  # steps 1, 2, 3
    assert [loss[part][1] for part in ("step", "mean", "low", "high")] == [7, 5.5, 4.0, 7.0]  # steps 4 to 7
    assert [loss[part][-1] for part in ("step", "mean")] == [2500, 2500.0]
    assert curves.since(0)["rare"] == {"step": [7], "mean": [1.5], "low": [1.5], "high": [1.5]}


@pytest.mark.parametrize("seed", first_of([0, 1, 2]))
def test_incremental_updates_match_a_full_read(tmp_path: Path, seed: int) -> None:
    """Growth, half-written lines, cuts and widths that double: what was put together is what is told at once."""
    chance = random.Random(seed)
    path = tmp_path / "metrics.jsonl"
    journal, curves, held = Journal(path), Curves(path), {}
    step = 0
    for _ in range(16):
        if chance.random() < 0.2 and step:
            step = chance.randrange(step)
            journal.truncate(step + 1)
        for _ in range(chance.choice([0, 1, 30, 300])):
            step += 1
            values = {"loss": chance.random(), "grad_norm": chance.choice([None, 2.0])}
            journal.write(step, **values | ({"validation_loss": chance.random()} if step % 50 == 0 else {}))
        half = chance.random() < 0.3
        if half:  # a line that is being written
            with path.open("a") as file:
                file.write('{"step": 1')
        follow(curves, held)
        fresh: dict[str, Any] = {}
        follow(Curves(path), fresh)
        assert held["curves"] == fresh["curves"]
        for name, curve in fresh["curves"].items():
            having = [line for line in journal.lines() if line.get(name) is not None]
            assert len(curve["step"]) <= POINTS + 1
            if curves.steps_per_point == 1:
                assert list(zip(curve["step"], curve["mean"], strict=True)) == [(e["step"], e[name]) for e in having]
            else:
                assert min(curve["low"]) == min(line[name] for line in having)
                assert max(curve["high"]) == max(line[name] for line in having)
        if half:
            journal.truncate(step + 1)


def test_a_rewritten_journal_is_read_from_the_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = Curves(path)
    curves.read_new()  # not there yet
    assert curves.since(0) == {}
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    curves.read_new()
    path.write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": 8.0}\n{"step": 3, "loss": 7.0}\n')
    curves.read_new()
    assert curves.since(0)["loss"]["mean"] == [9.0, 8.0, 7.0]
    path.unlink()
    curves.read_new()
    assert curves.since(0) == {}


def test_incomplete_lines_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    curves = Curves(path)
    for part in ('{"step": 1, "loss": 3.0}\n{"step": 2, "lo', 'ss": 2.5', "}\n"):
        with path.open("a") as file:
            file.write(part)
        curves.read_new()
    assert curves.since(0)["loss"] == {"step": [1, 2], "mean": [3.0, 2.5]}
    assert curves.truncations == 0


def test_nan_values_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": null}\nnonsense\n[1]\n7\n{"loss": 1}\n{"step": 2, "loss": NaN, "note": "x"}\n'
    )
    curves = Curves(path)
    curves.read_new()
    assert curves.since(0) == {}
    assert curves.last == 1
    with path.open("a") as file:
        file.write('{"step": 3, "loss": NaN, "lr": 0.5}\n')
    curves.read_new()
    assert curves.since(0)["lr"] == {"step": [3], "mean": [0.5]}  # a number that is none costs no other


def test_malformed_lines_are_skipped(folder: Path, tmp_path: Path) -> None:
    """What was written by no run is not shown, and the page says all else as if it were not there."""
    folder = shutil.copytree(folder, tmp_path / "run")
    traces = TraceCache(ModelLoader(folder))

    def told() -> list[object]:
        curves = training_run.metrics(traces, Metrics())
        inside = [training_run.probes(traces, CheckpointLog()), training_run.samples(traces, CheckpointLog())]
        return [curves["curves"], curves["step"], *inside, traces.loader.example()]

    before = told()
    for name, damaged in DAMAGED.items():
        lines = "".join(f"{line}\n" for line in damaged)
        (folder / name).write_text(lines + (folder / name).read_text() + lines)
    assert told() == before
    (folder / ".lock").unlink()
    (folder / ".lock").mkdir()  # which nobody can hold
    assert training_run.metrics(traces, Metrics())["status"] == "finished"


# How it stands


def test_running_finished_stopped(copied: Path) -> None:
    traces = TraceCache(ModelLoader(copied))

    def state() -> str:
        return training_run.metrics(traces, Metrics())["status"]

    assert state() == "finished"
    with lock_folder(copied):
        assert state() == "running"
    assert state() == "finished"
    settings = (copied / "run.toml").read_text()
    (copied / "run.toml").write_text(settings.replace("steps = 12\n", "steps = 20\n"))  # it resumes, and is stopped
    assert state() == "stopped"
    (copied / "run.toml").write_text(settings)
    (copied / "model").rename(copied / "elsewhere")
    assert state() == "stopped"
    with lock_folder(copied):  # a look keeps nobody out
        pass


def test_checkpoints_and_run_settings(traces: TraceCache, folder: Path) -> None:
    told = training_run.metrics(traces, Metrics())
    assert told["checkpoints"] == [{"name": one.name, "step": one.step} for one in list_checkpoints(folder)]
    facts = {one["name"]: one["value"] for one in training_run.run_settings(traces, RunSettings())["settings"]}
    assert facts["model.preset"] == "tiny-decoder"
    assert facts["train.steps"] == "12"
    assert facts["train.lr"] == "0.01"


def test_no_run() -> None:
    traces = TraceCache(ModelLoader.from_model(gh.build(gh.preset("tiny-decoder")).eval(), None))
    with pytest.raises(InputError, match="not a run"):
        training_run.metrics(traces, Metrics())


# Inside


@pytest.mark.parametrize("kind", FIRST)
def test_probes_and_samples_match_their_journals(tmp_path: Path, folder: Path, kind: str) -> None:
    folder = folder if kind == "decoder" else trained(tmp_path, kind)
    traces = TraceCache(ModelLoader(folder))
    written = lines(folder / "probes.jsonl")
    told = training_run.probes(traces, CheckpointLog())
    assert told["steps"] == [line["step"] for line in written]
    assert told["steps"][0] == 0
    for name, values in {**told["heads"], **told["layers"]}.items():
        assert values == [line[name] for line in written]
    assert ("induction" in told["heads"]) == (kind == "decoder")
    said = training_run.samples(traces, CheckpointLog())
    written = lines(folder / "samples.jsonl")
    assert said["steps"] == [line["step"] for line in written]
    for mine, line in zip(said["samples"], written, strict=True):
        assert [set(one) for one in mine] == [set(one) for one in line["samples"]]
        assert [one["prompt"] for one in mine] == [one["prompt"] for one in line["samples"]]


def test_many_checkpoints_are_subsampled(copied: Path) -> None:
    journal = Journal(copied / "samples.jsonl")
    for step in range(13, 1000):
        journal.write(step, samples=[{"prompt": "a", "text": "b\x1b[31m\n\tc\u202e"}])
    told = training_run.samples(TraceCache(ModelLoader(copied)), CheckpointLog())
    assert len(told["steps"]) == CHECKPOINTS
    assert (told["steps"][0], told["steps"][-1]) == (0, 999)
    assert told["left_out"] == len(lines(copied / "samples.jsonl")) - CHECKPOINTS
    assert told["samples"][-1][0]["text"] == "b\\x1b[31m\n    c\\u202e"


# Two checkpoints


@pytest.mark.parametrize("kind", FIRST)
def test_compare_checkpoints_matches_compare(tmp_path: Path, folder: Path, kind: str) -> None:
    folder = folder if kind == "decoder" else trained(tmp_path, kind)
    loader = ModelLoader(folder)
    text = {"decoder": "to be or", "encoder": "to be or", "seq2seq": "31"}[kind]
    asked = PagePrompt(text=text, target="3 1" if kind == "seq2seq" else "")
    first, last = loader.checkpoints()[0], "final"
    told = training_run.compare_checkpoints(
        TraceCache(loader), CompareCheckpoints(ForwardPass(asked, checkpoint=first), compare_with=last)
    )
    one, other = (gh.load({m.name: m.folder for m in list_checkpoints(folder)}[name])[0] for name in (first, last))
    seen = gh.compare(one, other, *loader.get(first).inputs(asked))
    for name, value in (
        ("pattern_distance", seen.pattern_distance),
        ("z_distance", seen.z_distance),
        ("ffn_out_distance", seen.ffn_out_distance),
        ("residual_distance", seen.residual_distance[:, 0]),
    ):
        assert told[name] == training_run.serialization.encode_tensor(value), name
    assert told["kl_divergence"] == training_run.serialization.encode_tensor(seen.kl_divergence[0])
    assert seen.pattern_distance.max() > 0
    if kind == "encoder":
        assert told["losses"] == [None, None]
    else:
        for mine, theirs in zip(told["losses"], (seen.loss_a, seen.loss_b), strict=True):
            assert math.isclose(mine, torch.nanmean(theirs.double()).item(), rel_tol=1e-6)  # sums in another order


@pytest.mark.parametrize("text", ["a." * 50_000 + "a = 1", "[train]\nsteps = " + "1" * 5_000], ids=["deep", "digits"])
def test_a_strangers_settings_are_one_sentence(text: str, copied: Path) -> None:
    (copied / "run.toml").write_text(text)
    traces = TraceCache(ModelLoader(str(copied)))  # the model itself is not in that file
    with pytest.raises(ConfigError, match="is not valid TOML"):
        training_run.metrics(traces, Metrics())
    with pytest.raises(ConfigError, match="is not valid TOML"):
        training_run.run_settings(traces, RunSettings())
