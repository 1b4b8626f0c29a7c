"""When `train.compile = "auto"` compiles a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import RecordingReporter, table

import glasshouse as gh
from glasshouse.objectives import CausalLM, MaskedLM, Seq2SeqLM
from glasshouse.training import Run, train
from glasshouse.training.setup.execution import can_capture, fastest_execution

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
