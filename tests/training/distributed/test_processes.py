"""Runs in several processes: the run folder is that of one, and is written and shown by the first alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from process_groups import in_processes
from runs import logged_table, losses, weights, write_data

import glasshouse as gh
from glasshouse import device
from glasshouse.config import to_toml
from glasshouse.layers.feedforward import GatedFeedForward
from glasshouse.training import Run, train
from glasshouse.training.distributed import fsdp as parallel
from glasshouse.training.logging import plots

pytestmark = pytest.mark.slow


def _train(rank: int, world_size: int, tables: list[dict[str, Any]]) -> list[str]:
    """Train runs one after the other; return what each raised."""
    device.measure_peak_flops = lambda *_, **__: 1e12
    plots.draw = lambda *_: []
    errors = []
    for settings in tables:
        try:
            result = train(Run.from_dict(settings), progress=False)
            assert (next(result.model.parameters()).device.type == "meta") == (rank > 0)
            errors.append("")
        except gh.GlasshouseError as error:
            errors.append(str(error))
    return errors


def runs(data_folder: Path) -> dict[str, dict[str, Any]]:
    """Return the settings of some runs, without dropout, whose draws depend on the number of processes."""
    base = {**logged_table(data_folder, steps=4), "model": {"preset": "tiny-decoder", "n_layers": 1}}
    chosen = {
        "ema": {"ema": 0.5, "parallel": {"kind": "shard"}},
        "tensor": {"parallel": {"tensor": 2}, "label_smoothing": 0.1},
        "patience": {"patience": 1, "steps": 8, "eval_every": 1, "parallel": {"kind": "replicate"}},
    }
    tables = {name: {**base, "train": {**base["train"], **more}} for name, more in chosen.items()}
    tables["lora"] = {
        **base,
        "model": {"from": str(data_folder / "base" / "model")},
        "train": {**base["train"], "lora": {"rank": 2}, "parallel": {"kind": "shard"}},
    }
    tables["quantized"] = named(tables["lora"], data_folder, lora={"rank": 2, "weights": "int4"})
    tables["seq2seq"] = {**logged_table(data_folder, "seq2seq", steps=4)}
    tables["seq2seq"]["model"] = {"preset": "tiny-seq2seq", "n_layers": 1, "dropout": 0.0, "embed_dropout": 0.0}
    return tables


def named(settings: dict[str, Any], out: Path, **choices: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**settings, "train": {**settings["train"], "out": str(out), **choices}}


def without_parallel(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        **settings,
        "train": {name: value for name, value in settings["train"].items() if name != "parallel"},
    }


def logged(folder: Path, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / file).read_text().splitlines()]


@pytest.mark.parametrize(
    "chosen",
    [
        ("ema",),
        *(
            pytest.param(one, marks=pytest.mark.long)
            for one in (("tensor", "lora", "quantized"), ("patience", "seq2seq"))
        ),
    ],
    ids=",".join,
)
def test_runs_in_two_processes_equal_those_in_one(chosen: tuple[str, ...], data_folder: Path, tmp_path: Path) -> None:
    every = runs(data_folder)
    tables = {name: every[name] for name in chosen}
    if "lora" in chosen:
        train(Run.from_dict(named(every["patience"], data_folder / "base", steps=2)), progress=False)
    in_processes(tmp_path, 2, _train, [named(one, data_folder / f"{name}-2") for name, one in tables.items()])
    for name, one in tables.items():
        train(Run.from_dict(named(without_parallel(one), data_folder / f"{name}-1")), progress=False)
        alone, two = data_folder / f"{name}-1", data_folder / f"{name}-2"
        assert losses(two.parent, two.name) == pytest.approx(losses(alone.parent, alone.name), rel=1e-5), name
        assert {path.name for path in alone.iterdir()} == {path.name for path in two.iterdir()}
        for file in ("metrics.jsonl", "probes.jsonl", "samples.jsonl"):
            assert [line["step"] for line in logged(alone, file)] == [line["step"] for line in logged(two, file)]
        torch.testing.assert_close(
            weights(two.parent, two.name), weights(alone.parent, alone.name), rtol=1e-3, atol=1e-4
        )


def _train_too_large(rank: int, world_size: int, settings: dict[str, Any]) -> dict[str, float]:
    """Train a model that is said to be too large for one device; return the final metrics."""
    device.measure_peak_flops = lambda *_, **__: 1e12
    plots.draw = lambda *_: []
    parallel.SHARE = 1e-9
    return train(Run.from_dict(settings), progress=False).report.metrics


@pytest.mark.long
def test_a_model_that_no_device_can_hold_is_evaluated_in_all_processes(data_folder: Path, tmp_path: Path) -> None:
    settings = runs(data_folder)["ema"]
    found = in_processes(tmp_path, 2, _train_too_large, named(settings, data_folder / "two"))
    alone = train(Run.from_dict(named(without_parallel(settings), data_folder / "one")), progress=False)
    assert found[0] == found[1] == pytest.approx(alone.report.metrics, rel=1e-4)
    assert not (data_folder / "two" / "samples.jsonl").exists()
    assert not (data_folder / "two" / "probes.jsonl").exists()


def _nan_in_rank_1(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[str, list[int]]:
    """Train with a module that returns NaN in the second process, at the third step."""
    device.measure_peak_flops = lambda *_, **__: 1e12
    calls = 0

    def spoil(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        nonlocal calls
        calls += module.training
        return output * torch.nan if rank == 1 and calls > 2 and module.training else None

    before = GatedFeedForward.__init__

    def init(self: GatedFeedForward, *arguments: Any) -> None:  # noqa: ANN401
        before(self, *arguments)
        self.register_forward_hook(spoil)

    GatedFeedForward.__init__ = init  # type: ignore[method-assign]
    try:
        train(Run.from_dict(settings), progress=False)
    except gh.GlasshouseError as error:
        return str(error), []
    return "", []


def test_nan_in_one_process_stops_all_and_names_it(data_folder: Path, tmp_path: Path) -> None:
    settings = runs(data_folder)["ema"]
    settings = named(settings, data_folder / "run", grad_accum=1, save_every=1, eval_every=100)
    (first, _), (second, _) = in_processes(tmp_path, 2, _nan_in_rank_1, settings)
    assert first == second
    assert "at step 3, batch 2, the loss is nan" in first
    assert "the output of module stack.blocks.0.feedforward.layer, in process 1" in first
    assert "No weight was updated" in first
    assert json.loads((data_folder / "run" / "nonfinite.json").read_text())["step"] == 3
    assert max(losses(data_folder)) == 2


@pytest.mark.long
def test_torchrun_shows_one_run_and_resumes_in_one_process(data_folder: Path) -> None:
    settings = named(runs(data_folder)["ema"], data_folder / "run", steps=6, schedule="constant")
    (data_folder / "run.toml").write_text(to_toml(settings))
    arguments = ["-m", "glasshouse", "train", str(data_folder / "run.toml"), "--no-baselines"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    shown = subprocess.run(
        [*launch, *arguments], capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert shown.stderr.count("building the model") == 1
    assert shown.stderr.count("2 x cpu (1 thread), 2 shards, float32") == 1
    assert shown.stdout.count("the run is in") == 1
    assert len(losses(data_folder)) == 6
    assert gh.training.is_run(data_folder / "run")

    train(Run.from_dict(named(settings, data_folder / "run", steps=9)), progress=False)
    train(Run.from_dict(named(settings, data_folder / "alone", steps=9)), progress=False)
    assert losses(data_folder) == pytest.approx(losses(data_folder, "alone"), rel=1e-5)


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_data(tmp_path)
    return tmp_path
