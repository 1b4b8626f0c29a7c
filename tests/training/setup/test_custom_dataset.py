"""Datasets that a caller brings to `train`: torch's, ours, with and without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import losses, weights
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import glasshouse as gh
from glasshouse import InputError
from glasshouse.data import Batch, CausalLMDataset, MapDataset
from glasshouse.data.stream_dataset import StreamDataset
from glasshouse.errors import StoreError
from glasshouse.training import Callback, Run, Trainer, train

VOCABULARY, LENGTH = 12, 8


class Counting(Dataset[list[int]]):
    """Sequences that count up from any number, modulo the vocabulary."""

    def __init__(self, count: int = 60, shift: int = 0) -> None:
        self.count, self.shift = count, shift

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> list[int]:
        length = 3 + index % 6  # of different lengths
        return [(self.shift + index + place) % VOCABULARY for place in range(length)]


def run(folder: Path, name: str = "run", model: dict[str, Any] | None = None, **choices: object) -> Run:
    (folder / "unused.txt").write_text("to be or not to be " * 20)
    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1, "vocab_size": VOCABULARY, **(model or {})},
        "data": {"seq_len": LENGTH, "path": str(folder / "unused.txt"), "vocab_size": 263},
        "train": {"steps": 6, "batch_tokens": 40, "out": str(folder / name), "device": "cpu", **choices},
    }
    return Run.from_dict(table)


class Stop(Callback):
    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            trainer.stop()


@pytest.mark.long
def test_a_torch_dataset_is_learned_and_resumed_and_no_other_is(tmp_path: Path) -> None:
    choices = {"schedule": "constant", "save_every": 3}
    train(run(tmp_path, **choices), progress=False, dataset=Counting(), callbacks=[Stop()])
    for given in ({}, {"dataset": Counting(shift=1)}, {"dataset": Counting(61)}):
        with pytest.raises(StoreError, match=r"dataset=test_custom_dataset.Counting \(57 samples \w{12}\) and is"):
            train(run(tmp_path, **choices), progress=False, **given)
    train(run(tmp_path, **choices), progress=False, dataset=Counting())
    train(run(tmp_path, "alone", **choices), progress=False, dataset=Counting())
    assert losses(tmp_path) == losses(tmp_path, "alone")
    result = train(run(tmp_path, "long", steps=150, lr=0.01), progress=False, dataset=Counting())
    assert result.report.metrics["accuracy"] == 1.0  # of numbers that follow each other
    assert result.report.n_items == len(result.datasets.validation) == 3  # the last twentieth of 60
    model, tok = gh.load(tmp_path / "long")
    assert tok is None
    assert gh.generate(model, None, [[5, 6, 7]], max_new_tokens=4)[0].ids == [8, 9, 10, 11]


def test_the_items_of_validation_are_held_out(tmp_path: Path) -> None:
    read: list[int] = []

    class Spied(Counting):
        def __getitem__(self, index: int) -> list[int]:
            read.append(index)
            return super().__getitem__(index)

    result = train(run(tmp_path, steps=12, eval_every=12, workers=0), progress=False, dataset=Spied())
    validation = result.datasets.validation
    assert sorted(validation.numbers(range(3))) == [57, 58, 59]  # type: ignore[attr-defined]
    trained = result.datasets.train
    assert {n for step in range(12) for n in trained.numbers(range(step, step + 1))} <= set(range(57))  # type: ignore[attr-defined]
    assert {*read} >= {57, 58, 59}


def test_a_batch_by_hand() -> None:
    items: list[Any] = [
        torch.tensor([5, 6, 7]),
        ([1, 2, 3], [-100, 9, 4]),
        {"ids": [8], "targets": [2]},
    ]
    batch = MapDataset(items).batch(range(3))
    rows = {
        tuple(ids): (targets, mask, length)
        for ids, targets, mask, length in zip(
            batch.ids.tolist(), batch.targets.tolist(), batch.loss_mask.tolist(), batch.lengths.tolist(), strict=True
        )
    }
    assert rows == {
        (5, 6, 0): ([6, 7, 0], [True, True, False], 2),
        (1, 2, 3): ([0, 9, 4], [False, True, True], 3),
        (8, 0, 0): ([2, 0, 0], [True, False, False], 1),
    }
    labels = MapDataset([([1, 2], 3), ([4, 5], 0)]).batch(range(2))
    assert sorted(zip(labels.ids.tolist(), labels.targets.tolist(), strict=True)) == [([1, 2], 3), ([4, 5], 0)]
    assert labels.lengths is None
    pair = MapDataset([{"source": [7, 8, 9], "ids": [1], "targets": [2]}]).batch([0])
    assert (pair.source.tolist(), pair.source_lengths.tolist()) == ([[7, 8, 9]], [3])


def test_every_epoch_has_every_item_once_in_another_order() -> None:
    dataset = MapDataset([[n, n] for n in range(20)], seed=3)
    first, second = (dataset.numbers(range(start, start + 20)) for start in (0, 20))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert dataset.origin(4) == f"item {first[4]}"


def test_a_dataset_of_ours_trains_as_the_settings_would(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("to be or not to be, that is the question. " * 40)
    table = run(tmp_path, "settings", schedule="constant").to_dict()
    table["model"].pop("vocab_size")
    table["data"] |= {"path": [str(tmp_path / "a.txt")], "vocab_size": 270}
    usual = train(Run.from_dict(table), progress=False)
    pair = tuple(CausalLMDataset(one, LENGTH, seed=0) for one in (usual.datasets.train, usual.datasets.validation))  # type: ignore[arg-type]
    given = Run.from_dict({**table, "train": {**table["train"], "out": str(tmp_path / "given")}})
    given.data.__dict__["tokenizer"] = str(tmp_path / "settings/tokenizer")
    result = train(given, progress=False, dataset=pair)
    torch.testing.assert_close(weights(tmp_path, "given"), weights(tmp_path, "settings"), rtol=0, atol=0)
    assert result.report.metrics == pytest.approx(usual.report.metrics)
    with pytest.raises(InputError, match="dataset is a CausalLMDataset, whose samples cannot be split; give a pair"):
        train(run(tmp_path, "one"), progress=False, dataset=pair[0])


@pytest.mark.long
def test_a_tensor_dataset_trains_a_classifier(tmp_path: Path) -> None:
    ids = torch.randint(0, VOCABULARY, (60, 5), generator=torch.Generator().manual_seed(0))
    choice = {"preset": "tiny-encoder", "head": {"kind": "sequence_classification", "n_labels": 2}}
    labels = (ids[:, 0] > 5).long()
    result = train(run(tmp_path, model=choice, steps=60, lr=0.01), progress=False, dataset=TensorDataset(ids, labels))
    assert result.report.metrics["accuracy"] == 1.0


def test_a_base_without_a_tokenizer_is_trained_on(tmp_path: Path) -> None:
    first = train(run(tmp_path), progress=False, dataset=Counting())
    table = run(tmp_path, "more", steps=1).to_dict() | {"model": {"from": str(first.folder)}}
    more = train(Run.from_dict(table), progress=False, dataset=Counting())
    assert more.report.metrics["loss"] < first.report.metrics["loss"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("abc.txt", "but it must be a dataset with a length and items"),
        (iter([[1, 2]]), "dataset is a list_iterator, a stream, which cannot be split; give a pair of datasets"),
        (3, "but it must be a dataset with a length and items"),
        (Counting, "but it must be a dataset with a length and items"),
        ([[1, 2]], "the dataset has 1 items, which are too few"),
        ([[1] * 20] * 30, "item .* of the dataset has 19 ids, but data.seq_len is 8; shorten it"),
        ([{"input_ids": [1], "labels": [1]}] * 30, "item .* has input_ids, labels, but it must have ids and targets"),
        ([[1.0, 2.0, 3.0]] * 30, r"item .* has ids of type torch\.float32, but token ids and labels are integers"),
        ([[1, True]] * 29 + [([1], [True])], r"item .* has targets of type torch\.bool, but token ids"),
        ([["a", "b"]] * 30, r"item .* of the dataset has ids that are no numbers"),
        (
            [[1, 12, 3]] * 30,
            "item .* has 12 among its ids, but the model has 12 tokens .* 0 to 11",
        ),
        ([[1, -3, 3]] * 30, "item .* has -3 among its ids, but the model has 12 tokens in its vocabulary"),
        ([([1, 2], [3, 99])] * 30, "item .* has 99 among its targets, .* from 0 to 11, or -100"),
        ((iter([]), Counting()), "the dataset has no items after 0; give an iterable with items"),
        (([([1, 2], [3])] * 2, [[1, 2]] * 3), r"item .* has ids of shape \[2\] and targets of shape \[1\], but"),
        ([([1, 2], [3])] * 30, r"item .* has ids of shape \[2\] and targets of shape \[1\], but"),
    ],
)
def test_other_things_are_refused_in_one_sentence(given: Any, sentence: str, tmp_path: Path) -> None:  # noqa: ANN401
    if given == "abc.txt":
        given = Path("abc.txt")
    with pytest.raises(InputError, match=sentence):
        train(run(tmp_path), progress=False, dataset=given)


def test_an_objective_with_data_of_its_own_is_refused(tmp_path: Path) -> None:
    chosen = {"kind": "distillation", "teacher": "nowhere"}
    with pytest.raises(InputError, match=r"train.objective is 'distillation' and dataset is given"):
        train(run(tmp_path, objective=chosen), progress=False, dataset=Counting())


def test_a_loss_of_ones_own_gets_its_batches(tmp_path: Path) -> None:
    shapes: set[tuple[int, ...]] = set()

    def loss(model: torch.nn.Module, batch: Batch, smoothing: float) -> Tensor:
        shapes.add(tuple(batch.ids.shape))
        assert {field.name for field in fields(batch)} >= {"ids", "targets", "loss_mask"}
        return model(batch.ids, lengths=batch.lengths).square().sum()

    train(run(tmp_path, steps=2), progress=False, dataset=Counting(), objective=loss)
    assert shapes


# Streams


class Stream(IterableDataset[list[int]]):
    """The same sequences one after the other, from where the state says, in another order each epoch."""

    def __init__(self, count: int = 50) -> None:
        self.count, self.at, self.epoch = count, 0, 0

    def __iter__(self) -> Iterator[list[int]]:
        while self.at < self.count:
            self.at += 1
            yield Counting()[(self.at * 7 + self.epoch) % self.count]
        self.at = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Saved(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def test_samples_of_a_stream_are_its_items_in_order() -> None:
    expected = [item for epoch in range(3) for item in _epoch(epoch)]
    for size in (1, 7, 64):  # 64 is more than an epoch
        stream = StreamDataset(Saved())
        for start in range(0, 120, size):
            batch = stream.batch(range(start, start + size))
            rows = [row[:n] for row, n in zip(batch.ids, _lengths(batch), strict=True)]
            assert [row.tolist() for row in rows] == [item[:-1] for item in expected[start : start + size]]
            state = stream.state_at(start + size)
            again = StreamDataset(Saved())
            again.seek(start + size, state)
            after = again.batch([start + size])
            assert after.ids[0].tolist() == expected[start + size][:-1]


def test_a_stream_keeps_what_threads_may_still_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("glasshouse.data.stream_dataset.KEPT_ITEMS", 8)
    monkeypatch.setattr("glasshouse.data.stream_dataset.KEPT_STATES", 2)
    stream = StreamDataset([[number, number] for number in range(5)])
    assert len(stream) == 5
    assert stream.origin(7) == "item 7 of the stream"
    later, earlier = stream.batch([8, 9]), stream.batch([4, 5])
    assert later.ids.flatten().tolist() == [3, 4]
    assert earlier.ids.flatten().tolist() == [4, 0]
    stream.batch([20])
    with pytest.raises(InputError, match="item 4 of the dataset is gone; the samples of a stream are read in order"):
        stream.batch([4])
    saved = StreamDataset(Saved())
    for number in range(6):
        saved.batch([number])
    assert saved.state_at(5) is not None
    assert saved.state_at(1) is None  # only the last states are kept


def _epoch(epoch: int) -> list[list[int]]:
    stream = Stream()
    stream.set_epoch(epoch)
    return list(stream)


def _lengths(batch: Batch) -> list[int]:
    return [batch.ids.shape[1]] * len(batch) if batch.lengths is None else batch.lengths.tolist()


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_stream_is_trained_on_and_resumed_where_it_was(workers: int, tmp_path: Path) -> None:
    choices = {"schedule": "constant", "save_every": 3, "steps": 20, "workers": workers}
    train(run(tmp_path, "whole", **choices), progress=False, dataset=(Saved(), Counting(6)))
    train(run(tmp_path, **choices), progress=False, dataset=(Saved(), Counting(6)), callbacks=[Stop()])
    result = train(run(tmp_path, **choices), progress=False, dataset=(Saved(), Counting(6)))
    assert losses(tmp_path) == losses(tmp_path, "whole")
    assert all(
        one.equal(other)
        for one, other in zip(weights(tmp_path).values(), weights(tmp_path, "whole").values(), strict=True)
    )
    assert result.report.n_items == 6


def test_a_stream_without_state_is_not_resumed(tmp_path: Path) -> None:
    choices = {"schedule": "constant", "save_every": 3}
    train(run(tmp_path, **choices), progress=False, dataset=(Stream(), iter([[1, 2, 3]])), callbacks=[Stop()])
    assert len(losses(tmp_path)) == 3
    with pytest.raises(InputError, match=r"goes on at item \d+ of Stream, .* give it state_dict and load_state"):
        train(run(tmp_path, **choices), progress=False, dataset=(Stream(), iter([[1, 2, 3]])))


def test_epochs_of_a_stream_need_a_length(tmp_path: Path) -> None:
    given = run(tmp_path, steps=None, epochs=2.0)
    with pytest.raises(InputError, match=r"a stream without a length; give train\.steps instead of train\.epochs"):
        train(given, progress=False, dataset=(Stream(), Counting(6)))


def test_a_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    class Odd(Saved):
        def state_dict(self) -> dict[str, Any]:
            return {"at": torch.tensor(1)}

    with pytest.raises(InputError, match=r"state_dict\(\) of the dataset cannot be saved .* return numbers, texts"):
        train(run(tmp_path), progress=False, dataset=(Odd(), Counting(6)))
