"""What a caller brings to `train`: callbacks, a loss or an objective, an optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, table, weights, write_data
from torch import Tensor, nn
from torch.utils.data import DataLoader

import glasshouse as gh
from glasshouse import InputError
from glasshouse.data import Batch, Batches
from glasshouse.errors import StoreError
from glasshouse.objectives import CausalLM
from glasshouse.objectives.loss.cross_entropy import compute_loss
from glasshouse.training import Callback, Run, Trainer, train
from glasshouse.training.step import TrainStep


@pytest.fixture
def data_folder(tmp_path: Path) -> Path:
    """A folder with data."""
    write_data(tmp_path)
    return tmp_path


def run(folder: Path, name: str = "run", **choices: object) -> Run:
    settings = {**table(folder, steps=6), "model": {"preset": "tiny-decoder", "n_layers": 1}}
    return Run.from_dict({**settings, "train": {**settings["train"], "out": str(folder / name), **choices}})


class Log(Callback):
    """Writes down every call, and adds a metric."""

    def __init__(self, last: int = 10**6) -> None:
        self.calls: list[tuple[str, int]] = []
        self.last = last

    def on_train_begin(self, trainer: Trainer) -> None:
        self.calls.append(("begin", trainer.state.step))

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        self.calls.append(("step", step))
        metrics["embedding_norm"] = float(trainer.model.token_embedding.table.weight.detach().norm())  # type: ignore[union-attr]
        if step == self.last:
            trainer.stop()

    def on_validation_end(self, trainer: Trainer, step: int, metrics: dict[str, float]) -> None:
        assert metrics["loss"] > 0
        self.calls.append(("validation", step))

    def on_checkpoint(self, trainer: Trainer, step: int) -> None:
        self.calls.append(("checkpoint", step))

    def on_train_end(self, trainer: Trainer) -> None:
        self.calls.append(("end", trainer.state.step))


def test_callbacks_are_called_in_order_and_change_nothing(data_folder: Path) -> None:
    log = Log()
    train(run(data_folder, eval_every=3, save_every=3), progress=False, callbacks=[log])
    steps = [[("step", step)] for step in range(1, 7)]
    for step in (3, 6):
        steps[step - 1] += [("validation", step), ("checkpoint", step)]
    assert log.calls == [("begin", 0), *(call for calls in steps for call in calls), ("end", 6)]
    lines = [json.loads(line) for line in (data_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["embedding_norm"] > 0 for line in lines)
    train(run(data_folder, "alone", eval_every=3, save_every=3), progress=False)
    assert losses(data_folder) == losses(data_folder, "alone")


@pytest.mark.long
@pytest.mark.parametrize("ahead", [False, True])  # as on a GPU, where a step is launched before the last is read
def test_a_callback_stops_the_run_and_a_resume_goes_on(
    ahead: bool, data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ahead:
        own = TrainStep.__init__

        def init(step: TrainStep, *given: Any, **named: Any) -> None:  # noqa: ANN401
            own(step, *given, **named)
            step.runs_ahead = True

        monkeypatch.setattr(TrainStep, "__init__", init)
    result = train(run(data_folder, eval_every=6, save_every=6), progress=False, callbacks=[Log(last=2)])
    assert result.steps == (3 if ahead else 2)
    assert list(losses(data_folder)) == list(range(1, result.steps + 1))
    again = Log()
    train(run(data_folder, eval_every=6, save_every=6), progress=False, callbacks=[again])
    assert again.calls[0] == ("begin", result.steps)
    train(run(data_folder, "alone", eval_every=6, save_every=6), progress=False)
    assert losses(data_folder) == losses(data_folder, "alone")


def double(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
    return 2 * compute_loss(model, batch, smoothing)


class Doubled(CausalLM):
    """The objective with that loss."""

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        return double(model, batch, smoothing)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def test_a_loss_an_objective_and_an_optimizer_of_ones_own(data_folder: Path) -> None:
    # Twice the loss, not clipped, is twice the learning rate of SGD.
    choices = {"grad_clip": 0, "schedule": "constant"}
    train(run(data_folder, "loss", **choices), progress=False, objective=double, optimizer=sgd)
    train(run(data_folder, "objective", **choices), progress=False, objective=Doubled(), optimizer=sgd)

    def faster(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)

    train(run(data_folder, "faster", **choices), progress=False, optimizer=faster)
    torch.testing.assert_close(weights(data_folder, "loss"), weights(data_folder, "objective"), rtol=0, atol=0)
    torch.testing.assert_close(weights(data_folder, "loss"), weights(data_folder, "faster"), rtol=1e-5, atol=1e-6)
    for step, value in losses(data_folder, "faster").items():
        assert losses(data_folder, "loss")[step] == pytest.approx(2 * value, rel=1e-5)


def test_functions_of_other_arguments_are_refused(data_folder: Path) -> None:
    def short(model: nn.Module, batch: Batch) -> Tensor:
        return compute_loss(model, batch)

    with pytest.raises(InputError, match=r"takes other arguments; it must be .* of model, batch and label smoothing"):
        train(run(data_folder), progress=False, objective=short)
    with pytest.raises(InputError, match="takes other arguments; it must be a function that takes the model"):
        train(run(data_folder), progress=False, optimizer=lambda: None)


def test_a_loss_of_ones_own_is_given_logits(data_folder: Path) -> None:
    def checked(model: nn.Module, batch: Batch, smoothing: float) -> Tensor:
        assert isinstance(model(batch.ids), Tensor)  # in low precision, the head of a built-in loss makes none
        return compute_loss(model, batch, smoothing)

    train(run(data_folder, precision="bfloat16", steps=1, schedule="constant"), progress=False, objective=checked)


def test_what_was_brought_must_be_brought_again(data_folder: Path) -> None:
    short = run(data_folder, schedule="constant", save_every=3)
    train(short, progress=False, objective=double, optimizer=sgd, callbacks=[Log(last=3)])
    with pytest.raises(StoreError, match=r"objective=.*double and optimizer=.*sgd and is resumed with its settings"):
        train(short, progress=False)
    with pytest.raises(StoreError, match=r"is resumed with optimizer=.*\.sgd"):
        train(short, progress=False, optimizer=sgd)
    train(short, progress=False, objective=double, optimizer=sgd)
    train(run(data_folder, "alone", schedule="constant"), progress=False, objective=double, optimizer=sgd)
    assert losses(data_folder) == losses(data_folder, "alone")


@pytest.mark.parametrize(
    "given",
    [
        {"callbacks": [print]},
        {"objective": CausalLM},
        {"objective": "dpo"},
        {"optimizer": torch.optim.SGD},
        {"optimizer": lambda model: None},
    ],
)
def test_other_things_are_refused_in_one_sentence(given: dict[str, Any], data_folder: Path) -> None:
    with pytest.raises(InputError, match=f"^{next(iter(given))} .*must"):
        train(run(data_folder), progress=False, **given)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_a_dataset_of_torch(workers: int) -> None:
    class Samples:
        def __len__(self) -> int:
            return 10

        def batch(self, indices: Any) -> Batch:  # noqa: ANN401
            ids = torch.tensor([[index] for index in indices])
            return Batch(ids, ids + 1, torch.ones_like(ids, dtype=torch.bool))

    batches = Batches(Samples(), 4)  # type: ignore[arg-type]
    loaded = [batch.ids.flatten().tolist() for batch in DataLoader(batches, batch_size=None, num_workers=workers)]  # type: ignore[arg-type]
    assert loaded == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert [batch.ids.flatten().tolist() for batch in batches] == loaded
    with pytest.raises(IndexError, match="steps 0 to 2"):
        batches[3]
    assert gh.training.Callback is Callback
