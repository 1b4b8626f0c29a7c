"""Runs of LoRA on quantized weights (QLoRA): what is saved, resumed and merged, and where adapters can be loaded."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import PutRun, RecordingReporter, assert_same, killed, table, weights

import glasshouse as gh
from glasshouse import InputError, store
from glasshouse.data import Batch
from glasshouse.layers import lora
from glasshouse.layers.linear.frozen_quantized import frozen_quantized_layers
from glasshouse.layers.lora import FrozenWeights, LoRA
from glasshouse.objectives import DPO
from glasshouse.training import Run, StoppedError, train
from glasshouse.training.optimizer import AdamW, make_optimizer
from glasshouse.training.step import TrainStep


def settings(folder: Path, out: str, weights: FrozenWeights, kind: str = "decoder", **more: Any) -> dict[str, Any]:  # noqa: ANN401
    made = table(folder, kind, out, lora={"rank": 2, "weights": weights}, **{"lr": 0.05, "save_every": 6, **more})
    return {**made, "model": {"from": str(folder / "base" / "model")}}


def with_adapter(folder: Path, out: str, weights: FrozenWeights) -> gh.models.Model:
    model, _ = gh.load(folder / "base" / "model")
    assert gh.hub.load_adapter(model, folder / out / "adapter", weights).weights == weights
    return model


def test_a_run_saves_what_it_trained_and_resumes(data_folder: Path, put_run: PutRun) -> None:
    put_run("base")
    result = train(Run.from_dict(settings(data_folder, "whole", "int4")))
    on_quantized = with_adapter(data_folder, "whole", "int4")
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        # float32: sums of at most 128 numbers in another order through one layer, some hundred roundings of 6e-8.
        torch.testing.assert_close(result.model(ids), on_quantized(ids), rtol=1e-4, atol=1e-5)
    lora.merge(on_quantized)
    tuned = weights(data_folder, "whole")
    assert all(weight.equal(tuned[name]) for name, weight in on_quantized.state_dict().items())

    # On the weights of the base model it is merged as any adapter, which leaves those that have none as they are.
    on_own, base = with_adapter(data_folder, "whole", "own"), weights(data_folder, "base")
    lora.merge(on_own)
    changed = {name for name, weight in on_own.state_dict().items() if not weight.equal(base[name])}
    assert changed == {name for name in base if ".query." in name or ".value." in name}
    header = store.read_metadata(data_folder / "whole" / "adapter" / "adapter_model.safetensors")
    assert header["base_weights"] == "int4"

    stopped = settings(data_folder, "run", "int4")
    with pytest.raises(StoppedError):
        train(Run.from_dict(stopped), RecordingReporter(5, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(InputError, match=r"train\.lora\.weights was 'int4' and is 'int8'"):
        train(Run.from_dict(settings(data_folder, "run", "int8")))
    train(Run.from_dict(stopped))
    assert_same(data_folder, "whole", "run")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["decoder", "encoder", "seq2seq"])
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_with_everything_else(kind: str, base: FrozenWeights, data_folder: Path, put_run: PutRun) -> None:
    """Probes and samples, an EMA, checkpointed activations, dropout and modules trained whole."""
    put_run("base", kind)
    more = {"probes": None, "sample_prompts": 1, "ema": 0.9, "activation_checkpointing": True}
    for out in ("whole", "run"):
        made = settings(data_folder, out, base, kind, **more)
        made["train"]["lora"] |= {"dropout": 0.1, "targets": ["*"]}
        if out == "run":
            killed(made)
        train(Run.from_dict(made))
    assert_same(data_folder, "whole", "run")


@pytest.mark.long
@pytest.mark.parametrize("base", ["int8", "int4"])
def test_a_compiled_step_is_an_eager_one(base: FrozenWeights) -> None:
    ids = torch.arange(66).view(2, 33) * 7 % 256
    batch = Batch(ids[:, :-1], ids[:, 1:], torch.ones(2, 32, dtype=torch.bool))
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = gh.build(gh.preset("tiny-decoder", dropout=0.0)).train()
        lora.attach(model, LoRA(targets=("*",), weights=base))
        step = TrainStep(model, make_optimizer(model, AdamW(lr=1e-2)))
        if compiled:
            step.compile()
        found.append([step(batch).loss for _ in range(5)])
        assert step.compiled == compiled
    assert found[0][-1] < found[0][0]
    # float32, sums of at most 192 numbers in another order, through two layers: some thousand roundings of 6e-8.
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_dpo_reference_shares_the_quantized_weights() -> None:
    model = gh.build(gh.preset("tiny-decoder", n_layers=1))
    lora.attach(model, LoRA(weights="int4"))
    ready: Any = DPO().prepare(model, None, 8)  # type: ignore[arg-type]
    ours, theirs = (frozen_quantized_layers(one) for one in (model, ready.reference))
    assert ours.keys() == theirs.keys()
    assert all(theirs[name].values.data_ptr() == one.values.data_ptr() for name, one in ours.items())
