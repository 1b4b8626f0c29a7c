"""Which objective a model has on which data; and a new objective, which nothing else knows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import glasshouse as gh
from glasshouse import InputError
from glasshouse.cli import evaluation as eval_command
from glasshouse.data import Batch, Corpus
from glasshouse.objectives import Evaluation, Objective, compute_loss, find_objective, registry
from glasshouse.objectives.metrics import MetricSums, Report

PAIRS = "source\ttarget\n" + "".join(f"{number}\t{number + 1}\n" for number in range(40))


class PrefixDataset:
    """Source and target as one sequence, with loss on the target."""

    def __init__(self, corpus: Corpus, width: int) -> None:
        self.corpus, self.width, self.end = corpus, width, corpus.manifest["end_id"]

    def __len__(self) -> int:
        return len(self.corpus)

    def batch(self, indices: Sequence[int]) -> Batch:
        rows, masks = [], []
        for index in indices:
            source, target = (part.tolist() for part in self.corpus.item(index % len(self)))
            row = [*source, self.end, *target, self.end]
            rows.append(row + [0] * (self.width + 1 - len(row)))
            masks.append([len(source) <= at < len(row) - 1 for at in range(self.width)])
        ids = torch.tensor(rows)
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), torch.tensor(masks))

    def origin(self, index: int) -> str:
        return f"item {index}"


class PrefixLM(Objective[PrefixDataset]):
    """Targets after their sources in a decoder, with twice the loss and a metric of its own."""

    models = "prefix language models"
    model_kinds = ("decoder",)
    head_kind = "next_token"
    data_kind = "pairs"

    def __init__(self) -> None:
        self.losses: list[float] = []

    def make_dataset(self, corpus: Corpus, *, seq_len: int, **_: Any) -> PrefixDataset:  # noqa: ANN401
        return PrefixDataset(corpus, seq_len)

    def samples_for_tokens(self, corpus: Corpus, tokens: int, seq_len: int) -> int:
        return tokens // seq_len

    def loss(self, model: nn.Module, batch: Batch, smoothing: float = 0.0) -> Tensor:
        loss = 2 * compute_loss(model, batch, smoothing)
        self.losses.append(float(loss.detach()))
        return loss

    def evaluate_batch(self, model: nn.Module, batch: Batch, token_bytes: Tensor | None = None) -> MetricSums:
        sums = super().evaluate_batch(model, batch, token_bytes)
        return replace(sums, loss=2 * sums.loss)

    def evaluate(self, evaluation: Evaluation, samples: PrefixDataset) -> Report:
        report = super().evaluate(evaluation, samples)
        return replace(report, metrics=report.metrics | {"half_loss": report.metrics["loss"] / 2})


def test_a_new_objective_trains_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    toy = PrefixLM()
    monkeypatch.setattr(registry, "OBJECTIVES", (*registry.OBJECTIVES, toy))
    (tmp_path / "a.tsv").write_text(PAIRS)
    settings = {
        "model": {"preset": "tiny-decoder"},
        "data": {"path": str(tmp_path / "a.tsv"), "seq_len": 8, "vocab_size": 263, "kind": "pairs"},
        "train": {"steps": 1, "batch_tokens": 64, "grad_accum": 1, "probes": [], "out": str(tmp_path / "run")},
    }
    result = gh.train(gh.Run.from_dict(settings), progress=False)
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert len(toy.losses) == 1
    assert line["loss"] * line["n_targets"] == pytest.approx(toy.losses[0], rel=1e-6)

    samples = PrefixDataset(result.datasets.validation, 8)
    with torch.no_grad():
        batch = samples.batch(range(len(samples)))
        expected = float(compute_loss(result.model, batch) / batch.loss_mask.sum())
    assert line["validation_loss"] == pytest.approx(2 * expected, rel=1e-5)
    assert result.report.metrics["half_loss"] == pytest.approx(expected, rel=1e-5)
    assert result.report.n_targets == int(batch.loss_mask.sum())
    report = gh.evaluate(result.model, result.datasets.tok, tmp_path / "a.tsv", kind="pairs")
    assert report.n_items == 40
    eval_command.show(report, {})
    assert f"{report.metrics['half_loss']:.4f}" in capsys.readouterr().out
    with pytest.raises(
        InputError, match=r"encoder-decoders pairs, .* text encoders pairs and prefix language models pairs"
    ):
        find_objective(gh.preset("tiny-encoder"), result.datasets.train)


def test_a_mismatch_says_what_each_model_takes(tmp_path: Path) -> None:
    tok = gh.Tokenizer.train(texts=["x"], vocab_size=263)
    (tmp_path / "a.tsv").write_text(PAIRS)
    corpus = gh.data.prepare(tmp_path / "a.tsv", tok, tmp_path / "ids", kind="pairs")
    with pytest.raises(InputError) as raised:
        find_objective(gh.preset("tiny-decoder"), corpus)
    assert str(raised.value) == (
        "the corpus is of kind pairs, on which a model of kind decoder with the head next_token cannot be trained: "
        "causal language models take text, chat and preferences, masked language models text, encoder-decoders "
        "pairs, sequence classification labelled, token classification tagged and text encoders pairs."
    )
