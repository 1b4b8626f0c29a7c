"""`train.objective`: its settings, what takes precedence, where it is refused, and the commands that follow it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse import ConfigError, InputError
from glasshouse.cli import main
from glasshouse.objectives import DPO, Distillation
from glasshouse.objectives.metrics import MetricSums
from glasshouse.training import Run, launch
from glasshouse.training.distributed.processes import Processes
from glasshouse.training.plan.hardware import find_gpu
from glasshouse.training.plan.training import plan_training
from glasshouse.training.setup.custom import Custom


def settings(folder: Path, **choices: Any) -> Run:  # noqa: ANN401
    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n - 1}"} for n in range(1, 60)]
    (folder / "a.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1},
        "data": {"path": str(folder / "a.jsonl"), "seq_len": 32, "vocab_size": 266, "val_fraction": 0.2},
        "train": {
            "steps": 1,
            "batch_tokens": 200,
            "probes": [],
            "sample_prompts": 0,
            "out": str(folder / "run"),
            **choices,
        },
    }
    return Run.from_dict(table)


def test_settings_are_a_line_of_toml() -> None:
    given = 'train.objective={ kind = "distillation", teacher = "runs/big", mixing = 0.25 }'
    run = Run.load("stdlib", given)
    assert run.train.objective == Distillation("runs/big", temperature=2.0, mixing=0.25)
    assert Run.from_dict(run.to_dict()) == run
    assert Run.load("dpo", "train.objective.beta=0.3").train.objective == DPO(beta=0.3)
    assert Run.load("stdlib", "train.objective=dpo").train.objective == DPO(beta=0.1)
    assert "objective" not in Run.load("stdlib").to_dict()["train"]  # so run files of before do not change
    with pytest.raises(ConfigError, match=r"train\.objective\.kind is 'ppo', but it must be one of 'dpo', 'dist"):
        Run.load("stdlib", "train.objective=ppo")
    with pytest.raises(ConfigError, match=r"dpo\.beta is 0\.0, but it must be above 0"):
        Run.load("dpo", "train.objective.beta=0")


def test_another_objective_is_another_run() -> None:
    one, other = (Run.load("dpo", f"train.objective.beta={beta}") for beta in (0.1, 0.2))
    assert one.differences(other) == ["train.objective.beta was 0.1 and is 0.2"]
    assert not one.differences(one)


def test_an_objective_given_in_python_takes_precedence(tmp_path: Path) -> None:
    assert Custom(objective=DPO(beta=2.0)).choose_objective(DPO()) == DPO(beta=2.0)
    assert Custom().choose_objective(DPO()) == DPO()
    assert Custom(objective=lambda *_: torch.zeros(())).choose_objective(DPO()) == DPO()
    run = settings(tmp_path, objective={"kind": "distillation", "teacher": "not there"})
    report = gh.train(run, progress=False, objective=DPO(beta=2.0)).report
    assert "margin" in report.metrics


def test_preferences_are_not_distilled(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    gh.save(gh.build(gh.preset("tiny-decoder", vocab_size=263)), tok, tmp_path / "teacher")
    run = settings(tmp_path, objective={"kind": "distillation", "teacher": str(tmp_path / "teacher")})
    with pytest.raises(InputError, match="the objective is distillation, but the data are preferences; use dpo"):
        gh.train(run, progress=False)


def test_a_loss_of_ones_own_takes_the_place_of_the_objectives(tmp_path: Path) -> None:
    def doubled(model: Any, batch: Any, smoothing: float) -> torch.Tensor:  # noqa: ANN401
        return 2 * DPO().loss(model, batch, smoothing)

    gh.train(settings(tmp_path, objective="dpo"), progress=False, objective=doubled)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["loss"] != pytest.approx(0.6931, abs=1e-3)  # of the objective itself, at the first step
    assert line["validation_loss"] > 0


def test_several_processes_are_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def two(*_: object) -> Iterator[tuple[Processes, torch.device]]:
        yield Processes(world_size=2, is_parallel=True), torch.device("cpu")

    monkeypatch.setattr(launch, "join_processes", two)
    monkeypatch.setattr(launch, "watched", lambda _: nullcontext())  # leaves word to the others
    with pytest.raises(InputError, match="2 processes were started, but one alone can train with the objective dpo"):
        gh.train(settings(tmp_path, objective="dpo"), progress=False)
    assert not (tmp_path / "run").exists()


def test_commands_follow_the_objective_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = gh.train(settings(tmp_path, objective={"kind": "dpo", "beta": 3.0}), progress=False)

    def call(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["glasshouse", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    own = json.loads(call("eval", str(tmp_path / "run"), "--json"))
    expected = gh.evaluate(result.model, result.datasets.tok, result.datasets.validation, objective=DPO(beta=3.0))
    assert own["metrics"] == pytest.approx(expected.metrics)
    other = json.loads(call("eval", str(tmp_path / "run"), str(tmp_path / "a.jsonl"), "--json", "--generate", "0"))
    assert (other["kind"], other["n_items"]) == ("preferences", 59)
    printed = call("eval", str(tmp_path / "run"))
    for shown in ("nats per pair", "of pairs", "chosen answers", "rejected answers", "margin"):
        assert shown in printed
    shown = call("data", "show", str(tmp_path / "run" / "data" / "train"), "--batch-size", "2")
    assert shown.count("  chosen") == shown.count("  rejected") == 2
    assert "2 pairs in the loss" in shown
    assert "[+]" not in shown  # the prompt is not in the loss
    assert "[<|end|>]" in shown


def test_the_plan_counts_the_reference(tmp_path: Path) -> None:
    plain, preferred = (
        plan_training(settings(tmp_path, objective=choice), find_gpu("h200")) for choice in (None, "dpo")
    )
    assert preferred.memory.parts["objective"] == 4 * preferred.n_parameters
    assert "objective" not in plain.memory.parts


def test_sums_of_several_processes_carry_every_metric() -> None:
    sums = MetricSums(2.0, 1.5, 3, others={"margin": (4.0, 3), "chosen_loss": (5.0, 7)}, is_likelihood=False)
    both = sums.reduced(lambda values: 2 * values)
    assert both == sums + sums
    assert both.metrics() == pytest.approx({"loss": 2 / 3, "accuracy": 0.5, "margin": 4 / 3, "chosen_loss": 5 / 7})
