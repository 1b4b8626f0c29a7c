"""When `train.compile = "auto"` compiles a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import RecordingReporter, table

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.objectives import CausalLM, MaskedLM, Seq2SeqLM
from glasshouse.objectives.loss.cross_entropy import LossFn, compute_loss
from glasshouse.training import Run, train
from glasshouse.training.setup.custom import Custom
from glasshouse.training.setup.execution import can_capture, fastest_execution, has_own_loss
from glasshouse.training.step import TrainStep

H200 = 7e14  # FLOPS


@pytest.mark.parametrize(
    ("run", "execution"),
    [
        # 6 * 124M * 65,536 / (0.4 * 7e14) = 0.17 s a step: 35 s of steps, or an hour of them
        ({"n_parameters": 124_000_000, "n_blocks": 12, "batch_tokens": 65_536, "steps": 200}, "eager"),
        ({"n_parameters": 124_000_000, "n_blocks": 12, "batch_tokens": 65_536, "steps": 20_000}, "compiled"),
        # 6 * 10.7M * 16,384 / 2.8e14 = 3.8 ms of arithmetic, where six blocks take 15 ms to launch
        ({"n_parameters": 10_700_000, "n_blocks": 6, "batch_tokens": 16_384, "steps": 10**6}, "graphs"),
        ({"n_parameters": 9_400_000, "n_blocks": 8, "batch_tokens": 12_000, "steps": 2200}, "graphs"),
    ],
    ids=["gpt2-short", "gpt2-long", "shakespeare", "translation"],
)
def test_compiling_must_repay_its_time_and_graphs_launch_small_steps(run: dict[str, int], execution: str) -> None:
    assert fastest_execution(**run, flops=H200) == execution


class OwnGelu(torch.nn.GELU):
    """A module that is not this package's."""


def test_only_what_was_compared_on_a_gpu_is_captured() -> None:
    plain = gh.build(gh.preset("tiny-decoder"))
    assert can_capture(plain, CausalLM())
    assert can_capture(gh.build(gh.preset("tiny-seq2seq")), Seq2SeqLM())
    assert not can_capture(gh.build(gh.preset("tiny-encoder")), MaskedLM())
    assert not can_capture(gh.build(gh.preset("tiny-decoder", windows=(8, 0))), CausalLM())
    plain.stack.drop = OwnGelu()
    assert not can_capture(plain, CausalLM())


def own_loss(model: torch.nn.Module, batch: Batch, label_smoothing: float) -> torch.Tensor:
    return compute_loss(model, batch, label_smoothing)


class OwnObjective(CausalLM):
    """An objective with a loss that is not this package's."""

    loss = staticmethod(own_loss)


def test_a_loss_of_the_caller_is_not_captured() -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    assert has_own_loss(CausalLM())
    assert has_own_loss(MaskedLM())
    for objective in (Custom(objective=own_loss).with_loss(CausalLM()), OwnObjective()):
        assert not has_own_loss(objective)
        assert not can_capture(model, objective)


@pytest.mark.parametrize(("objective", "aligns"), [(None, True), (own_loss, False)])
def test_a_loss_of_the_caller_gets_batches_as_they_are(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, objective: LossFn | None, aligns: bool
) -> None:
    made, plain = [], TrainStep
    monkeypatch.setattr(
        "glasshouse.training.setup.execution.TrainStep",
        lambda *given, **more: [made.append(more["aligns"]), plain(*given, **more)][1],
    )
    train(Run.from_dict(table(data_folder, steps=1)), RecordingReporter(), objective=objective)
    assert made == [aligns]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ({"objective": own_loss}, "CUDA graphs are not made of steps with this model, this objective"),
        ({"train": {"activation_checkpointing": True}}, "CUDA graphs are not made of steps with this model"),
        ({"train": {"precision": "float16"}}, "CUDA graphs need another precision than float16"),
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1)}, "and an optimizer that itself"),
    ],
    ids=["loss", "checkpointing", "float16", "optimizer"],
)
def test_the_log_says_why_a_step_bound_by_launches_has_no_graph(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], wanted: str
) -> None:
    monkeypatch.setattr("glasshouse.device.compiles_by_default", lambda device: True)
    monkeypatch.setattr("glasshouse.device.nominal_flops", lambda device: H200)
    reporter = RecordingReporter()
    run = Run.from_dict(table(data_folder, steps=2, **changed.pop("train", {})))
    train(run, reporter, **changed)
    reasons = [text for text in reporter.messages if text.startswith("not compiled")]
    assert len(reasons) == 1
    assert "launches take most of a step" in reasons[0]
    assert wanted in reasons[0]


@pytest.mark.parametrize("flops", [1e9, 1.0])
def test_a_run_compiles_by_default_where_it_pays(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, flops: float
) -> None:
    """On a device that does two steps in less than a minute, and on one so slow that they take years."""
    monkeypatch.setattr("glasshouse.device.compiles_by_default", lambda device: True)
    monkeypatch.setattr("glasshouse.device.compile_obstacle", lambda device: None)
    monkeypatch.setattr("glasshouse.device.nominal_flops", lambda device: flops)
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda loss: compiled.append(loss) or (lambda *args: loss(*args)))
    reporter = RecordingReporter()
    train(Run.from_dict(table(data_folder, steps=2)), reporter)
    waste = "not compiled: in 2 steps it would take longer than it saves (train.compile=yes to compile all the same)"
    assert (waste in reporter.messages) == (flops > 1)
    assert bool(compiled) == (flops == 1)
    assert any(text.startswith("device") and text.endswith("compiled") for text in reporter.messages) == bool(
        compiled
    )
