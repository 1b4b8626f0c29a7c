"""Probes: by hand and against the inspection tools, without an effect on training."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import KINDS, RecordingReporter, assert_same, killed, logged_table, losses, write_data

import glasshouse as gh
from glasshouse.data import Batch
from glasshouse.errors import ConfigError, InputError
from glasshouse.inspection.geometry import residual_norms
from glasshouse.inspection.head_scoring import head_scores, repeated_tokens
from glasshouse.inspection.logit_lens import lens
from glasshouse.layers import lora
from glasshouse.layers.module_swap import HOOK_ATTRIBUTES
from glasshouse.models import Decoder
from glasshouse.objectives import Objective, make_dataset
from glasshouse.objectives.metrics import evaluate_batch
from glasshouse.training import Run, StoppedError, train
from glasshouse.training.logging import checkpoint_log
from glasshouse.training.logging.checkpoint_log import Probes, first_texts
from glasshouse.training.result import Result

pytestmark = pytest.mark.slow

NAMES = {
    "decoder": ["entropy", "induction", "previous_token", "resid_norms", "logit_lens"],
    "encoder": ["entropy", "resid_norms", "logit_lens"],
    "seq2seq": ["entropy", "resid_norms", "logit_lens"],
}
LENGTH = 16  # of a sequence in `table`


def read(data_folder: Path, out: str = "run") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data_folder / out / "probes.jsonl").read_text().splitlines()]


def steps(data_folder: Path, out: str = "run") -> list[int]:
    return [line["step"] for line in read(data_folder, out)]


def checkpoints(data_folder: Path, out: str = "run") -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (data_folder / out / "checkpoints").glob("step-*"))


def begins_from(settings: dict[str, Any], model: Path, **data: Any) -> dict[str, Any]:  # noqa: ANN401
    return {**settings, "model": {"from": str(model)}, "data": {**settings["data"], **data}}


def flat(values: Any) -> list[float]:  # noqa: ANN401 - numbers in lists, in lists
    return [one for inner in values for one in flat(inner)] if isinstance(values, list) else [values]


def tools(model: gh.models.Model, result: Result) -> dict[str, Any]:
    """The same metrics by the inspection tools, one sequence at a time if there is padding."""
    batch = make_dataset(model.spec, result.datasets.validation, batch_size=1, seq_len=LENGTH).batch(range(4))
    model = model.eval()
    rows = range(len(batch))
    given: list[tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = []
    for row in rows:
        length = LENGTH if batch.lengths is None else int(batch.lengths[row])
        ids = batch.ids[row : row + 1, :length]
        documents = None if batch.documents is None else batch.documents[row : row + 1]
        if batch.source is None or batch.source_lengths is None:
            given.append(((ids,), {"documents": documents}))
        else:
            given.append(((batch.source[row : row + 1, : int(batch.source_lengths[row])], ids), {}))
    sizes = torch.tensor([inputs[-1].shape[1] for inputs, _ in given], dtype=torch.float64)
    entropies = torch.stack([head_scores(model, *inputs, **call).entropy for inputs, call in given]).double()
    lengths = [residual_norms(model, *inputs, **call)[:, 0] for inputs, call in given]
    found = {
        "entropy": torch.einsum("b,blh->lh", sizes, entropies) / sizes.sum(),
        "resid_norms": torch.cat(lengths, 1).mean(1),
    }
    if hasattr(model.spec.head, "tied"):
        losses_per_layer = []
        for row, (inputs, call) in enumerate(given):
            targets, counts = (one[row : row + 1, : inputs[-1].shape[1]] for one in (batch.targets, batch.loss_mask))
            losses_per_layer.append(lens(model, *inputs, targets=targets, **call).loss[:, counts])
        found["logit_lens"] = torch.cat(losses_per_layer, 1).mean(1)
    if isinstance(model, Decoder):
        scores = head_scores(model, repeated_tokens(model.spec.vocab_size, LENGTH // 2))
        found |= {"induction": scores.induction, "previous_token": scores.previous}
    return {name: value.tolist() for name, value in found.items()}


def assert_like(metrics: dict[str, Any], expected: dict[str, Any], digits: float = 1e-5) -> None:
    """By default for six digits, with an error of half a unit at most, and a few roundings of float32."""
    assert metrics.keys() - {"step"} == expected.keys()
    for name, values in expected.items():
        assert flat(metrics[name]) == pytest.approx(flat(values), rel=digits, abs=1e-6), name


# By hand


def uniform_decoder(**choices: object) -> Decoder:
    """A decoder with uniform attention whose layers add nothing to the residual stream."""
    model = gh.build(gh.preset("tiny-decoder", vocab_size=8, head={"kind": "next_token", "tied": False}, **choices))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("query.weight", "out.weight", "down.weight", "bias")) or name == "head.weight":
                weight.zero_()
        model.token_embedding.table.weight.copy_(
            torch.arange(8.0)[:, None].expand(8, 64)
        )  # token t: 64 times t, of length 8 t
    return model


def test_probes_by_hand() -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 7]])  # the last is padding
    texts = Batch(ids, targets=ids, loss_mask=ids < 5, lengths=torch.tensor([3, 2]))
    model = uniform_decoder()
    found = Probes(model, texts, length=6).take(model)
    entropy = (2 * math.log(1) + 2 * math.log(2) + math.log(3)) / 5  # the query at position i sees i + 1 keys
    previous = sum(1 / (position + 1) for position in range(1, 6)) / 5  # of six tokens, the first has no previous one
    for name, value in (("entropy", entropy), ("previous_token", previous)):
        assert flat(found[name]) == pytest.approx([value] * 8, rel=1e-5)
        assert [len(layer) for layer in found[name]] == [4, 4]
    assert found["resid_norms"] == pytest.approx([8 * (1 + 2 + 3 + 4 + 5) / 5] * 3, rel=1e-5)
    assert found["logit_lens"] == pytest.approx([math.log(8)] * 3, rel=1e-5)  # every logit is 0


def test_documents_by_hand() -> None:
    ids = torch.tensor([[1, 2, 3, 4]])
    model = uniform_decoder()
    texts = Batch(ids, ids, ids > 0, documents=torch.tensor([[0, 0, 1, 1]]))
    found = Probes(model, texts).take(model)
    assert flat(found["entropy"]) == pytest.approx([math.log(2) / 2] * 8, rel=1e-5)  # one key, two, one, two


def test_induction_by_hand() -> None:
    model = uniform_decoder()
    found = Probes(model, Batch(torch.tensor([[1]]), torch.tensor([[1]]), torch.tensor([[True]])), length=6).take(
        model
    )
    weights = []
    for row in repeated_tokens(8, 3).tolist():
        for position, token in enumerate(row):
            if token in row[:position]:
                after = sum(row[earlier] == token for earlier in range(position))
                weights.append(after / (position + 1))
    assert flat(found["induction"]) == pytest.approx([sum(weights) / len(weights)] * 8, rel=1e-5)


def test_six_digits_and_none_where_not_finite() -> None:
    ids = torch.tensor([[1, 2]])
    model = uniform_decoder()
    with torch.no_grad():
        model.token_embedding.table.weight[2] = 1 / 3
    found = Probes(model, Batch(ids, ids, loss_mask=ids > 5), length=1).take(model)  # no target, no previous token
    assert found["logit_lens"] == [None] * 3
    assert flat(found["previous_token"]) == [None] * 8
    assert found["resid_norms"] == [5.33333] * 3  # (8 + 8/3) / 2
    json.loads(json.dumps(found, allow_nan=False))


class Rows:
    """Samples of known numbers: row n holds n * 1000, n * 1000 + 1, ..."""

    def __init__(self, count: int, *, pairs: bool) -> None:
        self.count, self.pairs = count, pairs

    def __len__(self) -> int:
        return self.count

    def batch(self, numbers: range) -> Batch:
        ids = torch.tensor(numbers)[:, None] * 1000 + torch.arange(200)
        lengths = torch.tensor([200, 7, 200, 3])[: len(numbers)]
        if self.pairs:
            return Batch(ids, ids, ids > 0, lengths=lengths, source=-ids, source_lengths=lengths.flip(0))
        return Batch(ids, torch.tensor(numbers), torch.tensor(numbers) > 0, documents=ids // 10)

    def origin(self, number: int) -> str:
        return str(number)


def test_first_texts_are_truncated() -> None:
    batch = first_texts(Rows(9, pairs=True))
    for rows, sign in ((batch.ids, 1), (batch.targets, 1), (batch.source, -1)):
        assert rows is not None
        assert rows.shape == (4, 126)
        assert (sign * rows[:, 0]).tolist() == [0, 1000, 2000, 3000]
    assert batch.loss_mask.shape == (4, 126)
    assert batch.lengths is not None
    assert batch.lengths.tolist() == [126, 7, 126, 3]
    assert batch.source_lengths is not None
    assert batch.source_lengths.tolist() == [3, 126, 7, 126]
    few = first_texts(Rows(2, pairs=False))
    assert few.ids.shape == (2, 126)
    assert few.documents is not None
    assert few.documents.shape == (2, 126)
    assert few.targets.tolist() == [0, 1]


# No side effects


@pytest.mark.few(2)
@pytest.mark.parametrize("autocast_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["tiny-decoder", "tiny-encoder", "tiny-seq2seq"])
def test_the_model_is_unchanged(kind: str, autocast_dtype: torch.dtype) -> None:
    head = {"head": "masked_token"} if kind == "tiny-encoder" else {}
    torch.manual_seed(0)
    model = gh.build(gh.preset(kind, dropout=0.3, attention_dropout=0.3, **head)).train()
    model.head.eval()
    lora.attach(model, lora.LoRA(dropout=0.5))
    ids = torch.randint(0, 256, (4, 12))
    sides = {"source": ids, "source_lengths": torch.tensor([12, 3, 7, 5])} if kind == "tiny-seq2seq" else {}
    lengths = torch.tensor([5, 12, 9, 4])
    texts = Batch(ids, ids, torch.arange(12) < lengths[:, None], lengths=lengths, **sides)
    watched = Probes(model, texts, length=12, autocast_dtype=autocast_dtype)

    def state() -> list[Any]:
        return [
            [module.training for module in model.modules()],
            [weight.requires_grad for weight in model.parameters()],
            [weight.grad is None for weight in model.parameters()],
            [len(getattr(module, hooks)) for module in model.modules() for hooks in HOOK_ATTRIBUTES],
            torch.get_rng_state().tolist(),
        ]

    before, weights = state(), {name: weight.clone() for name, weight in model.state_dict().items()}
    found = watched.take(model)
    assert state() == before
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())
    assert found == watched.take(model)
    assert all(math.isfinite(value) for values in found.values() for value in flat(values))
    exact = Probes(model, texts, length=12).take(model)
    # A bfloat16 is off by 2**-9 of itself at most; two layers are some dozen roundings deep, softmax included.
    for name, values in exact.items():
        assert flat(found[name]) == pytest.approx(
            flat(values), rel=2**-4 if autocast_dtype == torch.bfloat16 else 0
        ), name
    assert (found == exact) == (autocast_dtype == torch.float32)


PLAIN, CHECKPOINTING = {}, {"activation_checkpointing": True, "ema": 0.9}


@pytest.mark.long
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "choices"),
    [
        ("decoder", CHECKPOINTING),
        ("encoder", PLAIN),
        ("seq2seq", CHECKPOINTING),
        pytest.param("decoder", PLAIN, marks=pytest.mark.long),
        pytest.param("encoder", CHECKPOINTING, marks=pytest.mark.long),
        pytest.param("seq2seq", PLAIN, marks=pytest.mark.long),
    ],
)
def test_training_is_the_same_with_and_without_probes(kind: str, choices: dict[str, Any], data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, kind, keep_checkpoints=100, **choices)))
    train(Run.from_dict(logged_table(data_folder, kind, "without", probes=[], **choices)))
    assert_same(data_folder, "run", "without")
    assert not (data_folder / "without" / "probes.jsonl").exists()
    assert steps(data_folder) == [0, *checkpoints(data_folder)]
    assert all(list(line) == ["step", *NAMES[kind]] for line in read(data_folder))


# Content


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_probes_equal_the_inspection_tools_on_checkpoints(kind: str, data_folder: Path) -> None:
    settings = logged_table(data_folder, kind, keep_checkpoints=100, ema=0.9)  # probes use the weights, not their EMA
    result = train(Run.from_dict(settings))
    lines = {line["step"]: line for line in read(data_folder)}
    for step in (3, 12):
        model, _ = gh.load(data_folder / "run" / "checkpoints" / f"step-{step:08}")
        assert_like(lines[step], tools(model, result))
    torch.manual_seed(0)
    assert_like(lines[0], tools(gh.build(result.model.spec), result))
    assert lines[0] != lines[3] != lines[12]


@pytest.mark.long
def test_last_logit_lens_loss_is_the_validation_loss(data_folder: Path) -> None:
    result = train(Run.from_dict(logged_table(data_folder)))
    batch = make_dataset(result.model.spec, result.datasets.validation, batch_size=1, seq_len=LENGTH).batch(range(4))
    assert read(data_folder)[-1]["logit_lens"][-1] == pytest.approx(
        evaluate_batch(result.model, batch).metrics()["loss"], rel=1e-5
    )


@pytest.mark.long
def test_lora_is_included(data_folder: Path) -> None:
    base = train(Run.from_dict(logged_table(data_folder, out="base")))
    settings = begins_from(
        logged_table(data_folder, lora={"rank": 2, "dropout": 0.2}, lr=0.05), data_folder / "base" / "model"
    )
    result = train(Run.from_dict(settings))
    assert_like(read(data_folder)[0], tools(base.model, base))
    # Merged, W + BA is rounded once more than Wx + BAx is, and softmax and norms pass that on a few times.
    assert_like(read(data_folder)[-1], tools(gh.load(data_folder / "run" / "model")[0], result), digits=1e-4)
    assert read(data_folder)[0]["entropy"] != read(data_folder)[-1]["entropy"]


def test_classifiers_have_no_logit_lens(data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, "encoder", out="base", steps=1)))
    data = {"path": str(data_folder / "labels.tsv"), "kind": "labelled"}
    result = train(
        Run.from_dict(begins_from(logged_table(data_folder, "encoder"), data_folder / "base" / "model", **data))
    )
    assert_like(read(data_folder)[-1], tools(result.model, result))
    assert list(read(data_folder)[-1]) == ["step", "entropy", "resid_norms"]
    with pytest.raises(
        InputError,
        match=r"train\.probes has 'logit_lens'.*language-model head.*sequence_classification; leave it out",
    ):
        train(
            Run.from_dict(
                begins_from(
                    logged_table(data_folder, out="no", probes="logit_lens"), data_folder / "base" / "model", **data
                )
            )
        )


def test_probes_can_be_chosen_and_changed_on_resume(data_folder: Path) -> None:
    train(Run.from_dict(logged_table(data_folder, probes=["resid_norms", "induction"], steps=3)))
    assert [list(line) for line in read(data_folder)] == [["step", "resid_norms", "induction"]] * 2
    before = read(data_folder)
    train(Run.from_dict(logged_table(data_folder, probes=["logit_lens"], steps=3)))  # does not change training
    assert read(data_folder) == before


def test_unknown_names_are_refused(data_folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        Run.from_dict(logged_table(data_folder, probes=["entrpy"]))
    assert str(error.value) == "train.probes has 'entrpy', which is unknown; did you mean entropy?"
    for kind in ("encoder", "seq2seq"):
        message = rf"train\.probes has 'induction', but it needs a decoder, and the model is of kind {kind}"
        with pytest.raises(InputError, match=message):
            train(Run.from_dict(logged_table(data_folder, kind, probes=["resid_norms", "induction"])))
    for choice in ({}, {"probes": []}, {"probes": ["logit_lens"]}):
        run = Run.from_dict(logged_table(data_folder, **choice))
        assert Run.from_dict(run.to_dict()) == run


# Whatever happens


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The lines of a run that nothing happens to."""
    data_folder = tmp_path_factory.mktemp("unbroken")
    write_data(data_folder)
    train(Run.from_dict(logged_table(data_folder)))
    assert steps(data_folder) == sorted(set(steps(data_folder)))
    return (data_folder / "run" / "probes.jsonl").read_bytes()


@pytest.mark.long
def test_killed_and_resumed_it_has_the_same_lines(data_folder: Path, unbroken: bytes) -> None:
    settings = logged_table(data_folder)
    killed(settings)
    assert steps(data_folder)[-1] < 12
    newest = checkpoints(data_folder)[-1]
    (data_folder / "run" / "checkpoints" / f"step-{newest:08}" / "model.safetensors").write_bytes(
        b""
    )  # its line is there
    train(Run.from_dict(settings))
    assert (data_folder / "run" / "probes.jsonl").read_bytes() == unbroken


@pytest.mark.long
def test_killed_before_its_first_checkpoint(data_folder: Path, unbroken: bytes) -> None:
    settings = logged_table(data_folder, save_every=100, eval_every=100)
    killed(settings)
    assert steps(data_folder) == [0]
    train(Run.from_dict(settings))
    assert steps(data_folder) == [0, 12]
    assert read(data_folder) == [json.loads(line) for line in (unbroken.splitlines()[0], unbroken.splitlines()[-1])]


@pytest.mark.long
@pytest.mark.parametrize("at", [1, 5])
def test_stopped_by_a_signal_it_has_the_same_lines(at: int, data_folder: Path, unbroken: bytes) -> None:
    run = Run.from_dict(logged_table(data_folder))
    with pytest.raises(StoppedError):
        train(run, RecordingReporter(at, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    train(run)
    assert (data_folder / "run" / "probes.jsonl").read_bytes() == unbroken


@pytest.mark.long
def test_stopped_before_the_first_step(data_folder: Path, monkeypatch: pytest.MonkeyPatch, unbroken: bytes) -> None:
    real = Probes.take

    def take(self: Probes, model: gh.models.Model) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(self, model)

    monkeypatch.setattr(Probes, "take", take)
    with pytest.raises(StoppedError, match="after step 0"):
        train(Run.from_dict(logged_table(data_folder)))
    monkeypatch.undo()
    assert checkpoints(data_folder) == [0]
    train(Run.from_dict(logged_table(data_folder)))
    assert (data_folder / "run" / "probes.jsonl").read_bytes() == unbroken


@pytest.mark.long
def test_a_run_that_rolls_back_has_one_line_per_step(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Objective.loss, []

    def compute_loss(*arguments: Any) -> torch.Tensor:  # noqa: ANN401
        calls.append(1)
        loss = real(*arguments)
        if len(calls) != 8:
            return loss
        damaged = data_folder / "run" / "checkpoints" / "step-00000006" / "model.safetensors"
        while not damaged.is_file():  # written in the background
            time.sleep(0.01)
        damaged.write_bytes(b"")  # so that it rolls back past a line that it wrote
        return loss * torch.nan

    monkeypatch.setattr(Objective, "loss", compute_loss)
    reporter = RecordingReporter()
    train(
        Run.from_dict(
            logged_table(data_folder, grad_accum=1, on_nonfinite="skip", eval_every=100, keep_checkpoints=100)
        ),
        reporter,
    )
    assert "rolled back to step 3" in reporter.messages
    assert steps(data_folder) == [0, 3, 6, 9, 12]


def test_an_error_is_logged_and_training_continues(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = checkpoint_log.residual_norms, []

    def fails(*arguments: Any, **call: Any) -> torch.Tensor:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory\nand a page about it")
        return real(*arguments, **call)

    monkeypatch.setattr(checkpoint_log, "residual_norms", fails)
    reporter = RecordingReporter()
    train(Run.from_dict(logged_table(data_folder, eval_every=100)), reporter)
    assert [text for text in reporter.messages if text.startswith("no probes")] == [
        "no probes at step 3 (OutOfMemoryError: CUDA out of memory); training continues"
    ]
    assert steps(data_folder) == [0, 6, 9, 12]
    monkeypatch.undo()
    train(Run.from_dict(logged_table(data_folder, out="whole", eval_every=100)))
    assert losses(data_folder) == losses(data_folder, "whole")
    assert_same(data_folder, "run", "whole")
