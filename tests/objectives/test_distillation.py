"""Knowledge distillation: its loss by hand and against a slow reference; its teacher, metrics and runs."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import glasshouse as gh
from glasshouse import ConfigError, InputError
from glasshouse.data import Batch, Corpus
from glasshouse.errors import StoreError
from glasshouse.objectives import CausalLM, Distillation, compute_loss, find_objective
from glasshouse.objectives.distillation import distillation_loss
from glasshouse.training import Callback, Run, Trainer
from glasshouse.training.plan.hardware import find_gpu
from glasshouse.training.plan.training import plan_training

TEXT = "to be or not to be, that is the question whether it is nobler. "


def test_divergence_worked_by_hand() -> None:
    # At temperature 2 the logits 2 log 3 and 0 are the probabilities 3/4 and 1/4, and equal ones are halves.
    student = torch.tensor([[[0.0, 0.0], [5.0, 1.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[2 * math.log(3), 0.0], [1.0, 5.0]]], dtype=torch.float64)
    mask = torch.tensor([[True, False]])
    expected = 4 * (0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5))
    assert distillation_loss(student, teacher, mask, 2.0).item() == pytest.approx(expected, abs=1e-12)


def test_gradient_of_the_divergence_by_finite_differences() -> None:
    torch.manual_seed(0)
    teacher, mask = torch.randn(2, 3, 5, dtype=torch.float64), torch.rand(2, 3) < 0.5
    student = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda logits: distillation_loss(logits, teacher, mask, 3.0), student)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, a tokenizer for it, and two teachers."""
    place = tmp_path_factory.mktemp("distillation")
    (place / "a.txt").write_text(TEXT * 40)
    tok = gh.Tokenizer.train(texts=[TEXT], vocab_size=270)
    tok.save(place / "tokenizer")
    for seed in (0, 1):
        save_teacher(place / f"teacher-{seed}", tok, seed)
    return place


def save_teacher(path: Path, tok: gh.Tokenizer, seed: int = 0, preset: str = "tiny-decoder", **fields: Any) -> None:  # noqa: ANN401
    torch.manual_seed(seed)
    gh.save(gh.build(gh.preset(preset, vocab_size=len(tok), **fields)), tok, path)


def run(folder: Path, out: Path, **choices: Any) -> Run:  # noqa: ANN401
    objective = {"kind": "distillation", "teacher": str(folder / "teacher-0"), "mixing": 0.3}
    table = {
        "model": {"preset": "tiny-decoder", "n_layers": 1, "d_model": 32, "n_heads": 2, "dropout": 0.1},
        "data": {"path": str(folder / "a.txt"), "tokenizer": str(folder / "tokenizer"), "seq_len": 16},
        "train": {
            **{"steps": 6, "batch_tokens": 96, "eval_every": 3, "save_every": 3, "lr": 0.01, "schedule": "constant"},
            **{"out": str(out), "grad_accum": 2, "objective": objective, **choices},
        },
    }
    return Run.from_dict(table)


@pytest.fixture(scope="module")
def corpus(folder: Path) -> Corpus:
    return gh.data.prepare(folder / "a.txt", gh.Tokenizer.load(folder / "tokenizer"), folder / "ids")


def batch_and_models(folder: Path, corpus: Corpus) -> tuple[Batch, Any, Any]:
    batch = CausalLM().make_dataset(corpus, batch_size=2, seq_len=16).batch([0, 1])
    batch = replace(batch, loss_mask=torch.rand(2, 16, generator=torch.Generator().manual_seed(3)) < 0.5)
    student, teacher = (gh.load(folder / name)[0].double() for name in ("teacher-1", "teacher-0"))
    return batch, student, teacher


def test_loss_is_a_mixture_and_equals_a_slow_reference(folder: Path, corpus: Corpus) -> None:
    batch, student, teacher = batch_and_models(folder, corpus)
    choice = Distillation(str(folder / "teacher-0"), temperature=3.0, mixing=0.25)
    objective = choice.prepare(student, corpus, 16)
    objective.teacher.double()  # type: ignore[attr-defined]
    expected = torch.zeros((), dtype=torch.float64)
    for row, column in batch.loss_mask.nonzero().tolist():
        given = {"documents": None if batch.documents is None else batch.documents[row : row + 1]}
        ours = student(batch.ids[row : row + 1], **given)[0, column]
        theirs = teacher(batch.ids[row : row + 1], **given)[0, column].detach()
        p, q = (theirs / 3).softmax(-1), (ours / 3).softmax(-1)
        soft = sum(p[k] * (p[k].log() - q[k].log()) for k in range(len(p)))
        hard = -ours.log_softmax(-1)[batch.targets[row, column]]
        expected = expected + 0.75 * hard + 0.25 * 9 * soft
    loss = objective.loss(student, batch)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-9)
    weights = list(student.parameters())
    for ours, theirs in zip(torch.autograd.grad(loss, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    sums = objective.evaluate_batch(student, batch)
    assert sums.loss == pytest.approx(float(compute_loss(student, batch).detach()))
    assert sums.metrics()["teacher_loss"] == pytest.approx(
        float(compute_loss(teacher, batch).detach()) / sums.n_targets
    )


def test_limits_of_the_mixture(folder: Path, corpus: Corpus) -> None:
    batch, student, teacher = batch_and_models(folder, corpus)
    path = str(folder / "teacher-0")
    hard = Distillation(path, mixing=0.0).prepare(student, corpus, 16)
    assert hard.loss(student, batch, 0.1).item() == pytest.approx(compute_loss(student, batch, 0.1).item(), abs=1e-9)
    own = Distillation(path, mixing=1.0).prepare(teacher, corpus, 16)
    assert own.loss(teacher, batch).item() == pytest.approx(0.0, abs=1e-9)  # the student is the teacher


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": "x", "temperature": 0.0}, r"distillation\.temperature is 0\.0, but it must be above 0"),
        ({"teacher": "x", "mixing": 1.5}, r"distillation\.mixing is 1\.5, but it must be from 0 to 1"),
        ({}, r"train\.objective \(distillation\) lacks teacher; set it"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], message: str) -> None:
    table = {"model": {"preset": "tiny-decoder"}, "train": {"objective": {"kind": "distillation", **settings}}}
    with pytest.raises(ConfigError, match=message):
        Run.from_dict(table)


def test_a_teacher_that_predicts_something_else_is_refused(folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    student = gh.load(folder / "teacher-1")[0]
    tok, other = corpus.tokenizer, gh.Tokenizer.train(texts=["another text altogether"], vocab_size=270)
    save_teacher(tmp_path / "other", other)
    with pytest.raises(InputError, match=r"has another tokenizer than the student \(\w{12}, not \w{12}\)"):
        Distillation(str(tmp_path / "other")).prepare(student, corpus, 16)
    save_teacher(tmp_path / "encoder", tok, preset="tiny-encoder")
    with pytest.raises(
        InputError, match=r"the kind of the teacher .* is 'encoder' and that of the student 'decoder'"
    ):
        Distillation(str(tmp_path / "encoder")).prepare(student, corpus, 16)
    save_teacher(tmp_path / "short", tok, position="learned", max_len=8)
    with pytest.raises(InputError, match=r"data\.seq_len is 16, but the teacher has positions for 8"):
        Distillation(str(tmp_path / "short")).prepare(student, corpus, 16)
    with pytest.raises(InputError, match="call prepare with the student first"):
        gh.evaluate(student, tok, corpus, objective=Distillation(str(folder / "teacher-0")))


class Stop(Callback):
    """Ends the run after step 3."""

    def on_step_end(self, trainer: Trainer, step: int, metrics: dict[str, Any]) -> None:
        if step == 3:
            trainer.stop()


def lines(out: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_second"} for line in found]


@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one_and_keeps_its_teacher(folder: Path, tmp_path: Path) -> None:
    gh.train(run(folder, tmp_path / "whole"), progress=False)
    gh.train(run(folder, tmp_path / "parts"), progress=False, callbacks=[Stop()])
    original = (folder / "teacher-0" / "model.safetensors").read_bytes()
    (folder / "teacher-0" / "model.safetensors").write_bytes(
        (folder / "teacher-1" / "model.safetensors").read_bytes()
    )
    try:
        with pytest.raises(StoreError, match=r"was trained with teacher=\w{12} and is resumed with teacher=\w{12}"):
            gh.train(run(folder, tmp_path / "parts"), progress=False)
    finally:
        (folder / "teacher-0" / "model.safetensors").write_bytes(original)
    result = gh.train(run(folder, tmp_path / "parts"), progress=False)
    assert lines(tmp_path / "whole") == lines(tmp_path / "parts")
    assert lines(tmp_path / "whole")[-1]["validation_teacher_loss"] > 0
    models = [gh.load(tmp_path / name / "model")[0].state_dict() for name in ("whole", "parts")]
    assert all(models[0][name].equal(models[1][name]) for name in models[0])
    # The teacher's loss is that of the teacher evaluated alone, and the saved model is a plain one.
    teacher, tok = gh.load(folder / "teacher-0")
    alone = gh.evaluate(teacher, tok, result.datasets.validation, seq_len=16).metrics["loss"]
    assert result.report.metrics["teacher_loss"] == pytest.approx(alone, rel=1e-5)
    assert isinstance(find_objective(result.model.spec, result.datasets.train), CausalLM)


def test_other_kinds_of_data_are_distilled(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("source\ttarget\n" + "".join(f"{n}\t{n + 1}\n" for n in range(60)))
    tok = gh.Tokenizer.load(folder / "tokenizer")
    save_teacher(tmp_path / "seq2seq", tok, preset="tiny-seq2seq")
    table = run(folder, tmp_path / "run", steps=1, grad_accum=1).to_dict()
    table["model"] = {"preset": "tiny-seq2seq", "n_layers": 1}
    table["data"] |= {"path": [str(tmp_path / "a.tsv")]}
    table["train"]["objective"]["teacher"] = str(tmp_path / "seq2seq")
    metrics = gh.train(Run.from_dict(table), progress=False).report.metrics
    assert {"teacher_loss", "exact_match"} <= metrics.keys()


def test_the_plan_counts_the_teacher(folder: Path, tmp_path: Path) -> None:
    plain, taught = (
        plan_training(one, find_gpu("h200")) for one in (run(folder, tmp_path, objective=None), run(folder, tmp_path))
    )
    teacher = gh.load(folder / "teacher-0")[0]
    assert taught.memory.parts["objective"] == 4 * sum(weight.numel() for weight in teacher.parameters())
    assert "objective" not in plain.memory.parts
    assert taught.memory.peak > plain.memory.peak
