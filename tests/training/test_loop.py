"""The training loop: killed, stopped, out of memory or disk, or with NaN losses, it resumes exactly."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from examples import first_of
from runs import SAYING, PutRun, RecordingReporter, assert_same, killed, losses, signalled, table, weights
from torch import nn

import glasshouse as gh
from glasshouse import config, store
from glasshouse.errors import ConfigError, GlasshouseError, InputError, StoreError
from glasshouse.layers import lora
from glasshouse.objectives import Objective
from glasshouse.training import Run, StoppedError, recipes, train
from glasshouse.training import trainer as loop
from glasshouse.training import trainer as validation
from glasshouse.training.logging.progress import SilentReporter
from glasshouse.training.nonfinite import locate_nonfinite
from glasshouse.training.step import TrainStep

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("kind", "workers"),
    first_of([("decoder", 1), ("decoder", 0), *((kind, n) for kind in ("encoder", "seq2seq") for n in (0, 1))]),
)
def test_killed_and_resumed_equals_uninterrupted(kind: str, workers: int, data_folder: Path, put_run: PutRun) -> None:
    put_run(kind=kind, workers=workers)
    settings = table(data_folder, kind, workers=workers)
    killed(settings)
    assert max(losses(data_folder)) < 12
    reporter = RecordingReporter()
    train(Run.from_dict(settings), reporter)
    assert any("resuming from step" in text for text in reporter.messages)
    assert_same(data_folder, "whole", "run")


@pytest.mark.parametrize("number", first_of([signal.SIGTERM, signal.SIGINT]))
def test_a_signal_saves_and_stops(number: signal.Signals, data_folder: Path, put_run: PutRun) -> None:
    put_run()
    run = Run.from_dict(table(data_folder))
    before = signal.getsignal(number)
    reporter = RecordingReporter(5, lambda: os.kill(os.getpid(), number))
    with pytest.raises(StoppedError, match=rf"{number.name} after step 5") as stopped:
        train(run, reporter)
    assert sum(text.startswith("stopping after this step") for text in reporter.messages) == 1
    assert stopped.value.number == number
    assert signal.getsignal(number) is before
    assert (data_folder / "run" / "checkpoints" / "step-00000005").is_dir()
    result = train(run)
    assert_same(data_folder, "whole", "run")
    assert repr(result).startswith(f"Result({str(result.folder)!r}, {result.steps} steps, loss ")
    assert "\n" not in repr(result)
    assert f"<td>{result.report.metrics['loss']:.4f}</td>" in result._repr_html_()


def test_a_signal_during_a_step_undoes_the_step(
    data_folder: Path, put_run: PutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_run()
    real, calls = Objective.loss, []

    def compute_loss(*arguments: Any) -> torch.Tensor:  # noqa: ANN401
        calls.append(1)
        if len(calls) == 5:  # the second micro-batch of the second step
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    monkeypatch.setattr(Objective, "loss", compute_loss)
    with pytest.raises(StoppedError, match="after step 1"):
        train(Run.from_dict(table(data_folder)))
    assert len(calls) == 5
    monkeypatch.undo()
    train(Run.from_dict(table(data_folder)))
    assert_same(data_folder, "whole", "run")


@pytest.mark.long
def test_a_second_ctrl_c_exits_at_once(data_folder: Path) -> None:
    signalled(table(data_folder, save_every=100), signal.SIGINT, times=2)
    assert not (data_folder / "run" / "checkpoints" / "step-00000008").exists()


def test_a_changed_setting_is_refused_with_the_difference(data_folder: Path) -> None:
    train(Run.from_dict(table(data_folder)))
    with pytest.raises(InputError, match=r"train\.lr was 0\.01 and is 0\.02; .*train\.out=FOLDER"):
        train(Run.from_dict(table(data_folder, lr=0.02)))
    settings = table(data_folder)
    settings["model"]["n_layers"] = 2
    with pytest.raises(InputError, match=r"model\.n_layers was 1 and is 2"):
        train(Run.from_dict(settings))
    reporter = RecordingReporter()
    train(Run.from_dict(table(data_folder, keep_checkpoints=5, workers=0)), reporter)  # which do not change training
    assert any("resuming from step 12 of 12" in text for text in reporter.messages)


def test_a_folder_that_is_not_a_run_is_not_touched(data_folder: Path) -> None:
    (data_folder / "run").mkdir()
    (data_folder / "run" / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="not a run folder"):
        train(Run.from_dict(table(data_folder)))
    assert [path.name for path in (data_folder / "run").iterdir()] == ["thesis.txt"]


def test_a_damaged_newest_checkpoint_is_named_and_skipped(data_folder: Path, put_run: PutRun) -> None:
    put_run()
    settings = table(data_folder)
    killed(settings)
    newest = max((data_folder / "run" / "checkpoints").glob("step-*"))
    (newest / "model.safetensors").write_bytes(b"")
    reporter = RecordingReporter()
    train(Run.from_dict(settings), reporter)
    assert any("model.safetensors" in text and "skipped a damaged checkpoint" in text for text in reporter.messages)
    assert_same(data_folder, "whole", "run")


def test_out_of_memory_raises_grad_accum_and_trains_the_same(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = table(data_folder, out="whole", grad_accum=1)
    settings["model"]["dropout"] = 0.0
    train(Run.from_dict(settings))
    real = Objective.loss

    def compute_loss(self: Objective, model: nn.Module, batch: Any, *rest: Any) -> torch.Tensor:  # noqa: ANN401
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, model, batch, *rest)

    monkeypatch.setattr(Objective, "loss", compute_loss)
    reporter = RecordingReporter()
    settings["train"]["out"] = str(data_folder / "run")
    train(Run.from_dict(settings), reporter)
    assert [text for text in reporter.messages if text.startswith("out of memory")] == [
        "out of memory: gradient accumulation raised to 2 micro-batches of 3 sequences",
        "out of memory: gradient accumulation raised to 4 micro-batches of 2 sequences",
    ]
    one, other = losses(data_folder, "whole"), losses(data_folder)
    for step, loss in one.items():  # another order of summation: float32 rounding, amplified over 12 steps
        assert other[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.long
def test_rng_is_restored_after_out_of_memory(
    data_folder: Path, put_run: PutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_run(grad_accum=2)
    real = Objective.loss

    def compute_loss(self: Objective, model: nn.Module, batch: Any, *rest: Any) -> torch.Tensor:  # noqa: ANN401
        loss = real(self, model, batch, *rest)  # dropout uses random numbers
        if len(batch) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    monkeypatch.setattr(Objective, "loss", compute_loss)
    train(Run.from_dict(table(data_folder, grad_accum=1)))
    assert_same(data_folder, "whole", "run")


def test_out_of_memory_in_the_optimizer_is_an_error(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    with pytest.raises(InputError, match="out of memory for the optimizer's state"):
        train(Run.from_dict(table(data_folder)))


def test_out_of_memory_with_one_sequence_is_an_error(data_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compute_loss(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Objective, "loss", compute_loss)
    with pytest.raises(InputError, match=r"one sequence of 16 tokens.*data\.seq_len"):
        train(Run.from_dict(table(data_folder)))


def inject_nan(monkeypatch: pytest.MonkeyPatch, bad: torch.Tensor) -> None:
    """Make the loss of one batch NaN."""
    real = Objective.loss

    def compute_loss(self: Objective, model: nn.Module, batch: Any, *rest: Any) -> torch.Tensor:  # noqa: ANN401
        loss = real(self, model, batch, *rest)
        return loss * torch.nan if batch.ids.shape == bad.shape and batch.ids.equal(bad) else loss

    monkeypatch.setattr(Objective, "loss", compute_loss)


def batch_of(run: Run, data_folder: Path, number: int) -> torch.Tensor:
    train(Run.from_dict(table(data_folder, out="scout", steps=1)))
    samples = gh.data.CausalLMDataset(gh.data.Corpus.open(data_folder / "scout" / "data" / "train").split(0.1)[0], 16)
    return gh.data.Batches(samples, 6).at(number).ids


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read each step's metrics after the next is launched, as on a GPU."""
    real = TrainStep.__init__

    def init(self: TrainStep, *given: Any, **settings: Any) -> None:  # noqa: ANN401
        real(self, *given, **settings)
        self.runs_ahead = True

    monkeypatch.setattr(TrainStep, "__init__", init)


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [False, True])
def test_nan_loss_stops_before_the_update(data_folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool) -> None:
    run = Run.from_dict(table(data_folder, grad_accum=1))
    inject_nan(monkeypatch, batch_of(run, data_folder, 4))
    if ahead:
        run_ahead(monkeypatch)
    with pytest.raises(GlasshouseError, match=r"at step 5, batch 4, the loss is nan.*No weight was updated"):
        train(run)
    found = json.loads((data_folder / "run" / "nonfinite.json").read_text())
    assert found["batch"] == 4
    assert len(found["sources"]) == 6
    assert found["sources"][0].startswith("text 0, ids ")
    assert max(losses(data_folder)) == 4


def test_running_ahead_changes_nothing(data_folder: Path, put_run: PutRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither do a signal, which ends the run between two steps of which one is not read yet, and resuming."""
    put_run()
    run_ahead(monkeypatch)
    with pytest.raises(StoppedError):
        train(
            Run.from_dict(table(data_folder)),
            RecordingReporter(at=5, act=lambda: signal.raise_signal(signal.SIGTERM)),
        )
    assert max(losses(data_folder)) == 6
    train(Run.from_dict(table(data_folder)))
    assert_same(data_folder, "run", "whole")


@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [False, True])
def test_on_nonfinite_skip_rolls_back_and_skips_the_batch(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    run = Run.from_dict(table(data_folder, grad_accum=1, on_nonfinite="skip", eval_every=100))
    inject_nan(monkeypatch, batch_of(run, data_folder, 4))
    if ahead:
        run_ahead(monkeypatch)
    seen: list[int] = []
    real = loop.Trainer._finish

    def finish(self: loop.Trainer, launched: loop.Launched) -> bool:
        was_updated = real(self, launched)
        if was_updated:
            seen.append(launched.number)
        return was_updated

    monkeypatch.setattr(loop.Trainer, "_finish", finish)
    reporter = RecordingReporter()
    train(run, reporter)
    assert seen == [0, 1, 2, 3, 3, 5, 6, 7, 8, 9, 10, 11, 12]  # back to the checkpoint of step 3, then forward
    assert "rolled back to step 3" in reporter.messages
    assert sorted(losses(data_folder)) == list(range(1, 13))
    assert all(weight.isfinite().all() for weight in weights(data_folder).values())


@pytest.mark.parametrize("ahead", [False, True])
def test_a_nan_batch_before_the_first_checkpoint_is_skipped(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch, ahead: bool
) -> None:
    """There is nothing to roll back to, and the other batches follow in their order."""
    run = Run.from_dict(
        table(data_folder, grad_accum=1, on_nonfinite="skip", save_every=100, eval_every=100, steps=3)
    )
    inject_nan(monkeypatch, batch_of(run, data_folder, 1))
    if ahead:
        run_ahead(monkeypatch)
    train(run)
    lines = [json.loads(line) for line in (data_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    seen = [line["epoch"] / lines[0]["epoch"] for line in lines]  # batches seen, skipped ones included
    assert seen == pytest.approx([1, 3, 4])


def test_nonfinite_embedding_is_located() -> None:
    model = gh.build(gh.preset("tiny-decoder"))
    ids = torch.tensor([[1, 2]])
    with torch.no_grad():
        model.token_embedding.table.weight[1] = torch.inf
    assert "token_embedding.table" in locate_nonfinite(model, gh.data.Batch(ids, ids, ids > 0))


def test_a_full_disk_keeps_the_last_intact_checkpoint(
    data_folder: Path, put_run: PutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, saves = store.commit_folder, []

    def commit_folder(folder: Path) -> None:
        saves.extend([folder] if folder.parent.name == "checkpoints" else [])
        if len(saves) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        real(folder)

    monkeypatch.setattr(store, "commit_folder", commit_folder)
    with pytest.raises(
        StoreError, match=r"No space left on device.*last intact checkpoint is step 3.*free disk space"
    ):
        train(Run.from_dict(table(data_folder)))
    monkeypatch.undo()
    gh.load(data_folder / "run" / "checkpoints" / "step-00000003")
    train(Run.from_dict(table(data_folder)))
    put_run()
    assert_same(data_folder, "whole", "run")


class LimitingReporter(SilentReporter):
    """Limits the size of files after step 2."""

    def on_step_end(self, step: int, *_: object) -> None:
        if step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def train_within_a_limit(settings: dict[str, Any], connection: Connection) -> None:
    with pytest.raises(StoreError) as error:
        train(Run.from_dict(settings), LimitingReporter())
    connection.send(str(error.value))


@pytest.mark.long
def test_a_file_size_limit_is_reported_as_one_error(data_folder: Path) -> None:
    with processes.started(train_within_a_limit, table(data_folder, eval_every=100)) as (_, connection):
        (message,) = processes.received(connection)
    assert "\n" not in message
    assert message.startswith("the run could not be saved")
    assert "there is no checkpoint yet: free disk space" in message


def test_two_runs_do_not_share_a_folder(data_folder: Path) -> None:
    def again() -> None:
        with pytest.raises(StoreError, match="another process is training"):
            train(Run.from_dict(table(data_folder)))

    train(Run.from_dict(table(data_folder)), RecordingReporter(2, again))
    assert sorted(losses(data_folder)) == list(range(1, 13))


def test_validation_uses_smaller_batches_when_out_of_memory(
    data_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = validation.evaluate_samples

    def evaluate_samples(model: nn.Module, samples: Any, batch_size: int, **rest: Any) -> Any:  # noqa: ANN401
        if batch_size > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(model, samples, batch_size, **rest)

    monkeypatch.setattr(validation, "evaluate_samples", evaluate_samples)
    reporter = RecordingReporter()
    train(Run.from_dict(table(data_folder)), reporter)
    assert any("6 micro-batches of 1 sequences" in text for text in reporter.messages)


def test_early_stopping_keeps_the_best(data_folder: Path) -> None:
    settings = table(data_folder, steps=60, patience=2, eval_every=2, lr=1.0, save_every=1000)
    reporter = RecordingReporter()
    result = train(Run.from_dict(settings), reporter)
    lines = [json.loads(line) for line in (data_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    tried = {line["step"]: line["validation_loss"] for line in lines if "validation_loss" in line}
    best = min(tried, key=lambda step: tried[step])
    assert max(tried) == best + 4 == result.steps < 60
    assert any("early stopping" in text for text in reporter.messages)
    saved = gh.load(data_folder / "run" / "checkpoints" / f"step-{best:08}")[0].state_dict()
    for name, weight in weights(data_folder).items():
        assert weight.equal(saved[name])


@pytest.mark.long
def test_the_ema_is_validated_and_saved(data_folder: Path, put_run: PutRun) -> None:
    put_run("plain")
    run = Run.from_dict(table(data_folder, ema=0.9))
    train(run)
    assert losses(data_folder) == losses(data_folder, "plain")  # training uses the weights themselves
    last = gh.load(data_folder / "run" / "checkpoints" / "step-00000012")[0].state_dict()
    for name, weight in weights(data_folder).items():
        assert weight.equal(last[name]) == (
            not weight.is_floating_point() or weight.equal(weights(data_folder, "plain")[name])
        )
    settings = table(data_folder, out="resumed", ema=0.9)
    killed(settings)
    train(Run.from_dict(settings))
    assert_same(data_folder, "run", "resumed")


def test_lora_trains_adapters_only_and_resumes(data_folder: Path, put_run: PutRun) -> None:
    put_run("base")
    settings = table(data_folder, out="whole", lora={"rank": 2}, lr=0.05)
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    train(Run.from_dict(settings))
    base, tuned = weights(data_folder, "base"), weights(data_folder, "whole")
    changed = {name for name, weight in tuned.items() if not weight.equal(base[name])}
    assert changed == {name for name in base if ".query." in name or ".value." in name}
    alone, _ = gh.load(data_folder / "base" / "model")
    gh.hub.load_adapter(alone, data_folder / "whole" / "adapter")
    lora.merge(alone)
    for name, weight in alone.state_dict().items():
        assert weight.equal(tuned[name]), name
    settings["train"]["out"] = str(data_folder / "run")
    killed(settings)
    train(Run.from_dict(settings))
    assert_same(data_folder, "whole", "run")


@pytest.mark.long
def test_the_ema_of_an_adapter_is_that_of_the_model(data_folder: Path, put_run: PutRun) -> None:
    put_run("base")
    for out, more in (("mean", {"ema": 0.9}), ("best", {"ema": 0.9, "patience": 1, "eval_every": 1})):
        settings = table(data_folder, out=out, lora={"rank": 2}, lr=0.5, **more)
        settings["model"] = {"from": str(data_folder / "base" / "model")}
        result = train(Run.from_dict(settings))
        alone, _ = gh.load(data_folder / "base" / "model")
        gh.hub.load_adapter(alone, data_folder / out / "adapter")
        lora.merge(alone)
        for name, weight in alone.state_dict().items():
            assert weight.equal(weights(data_folder, out)[name]), (out, name)
    lines = [json.loads(line) for line in (data_folder / "best" / "metrics.jsonl").read_text().splitlines()]
    assert result.report.metrics["loss"] == pytest.approx(min(line["validation_loss"] for line in lines), rel=1e-5)
    with pytest.raises(ConfigError, match=r"give one by model\.from"):
        train(Run.from_dict(table(data_folder, out="none", lora={"rank": 2})))


def test_a_new_head_saves_no_adapter(data_folder: Path, put_run: PutRun) -> None:
    put_run("base", "encoder")
    settings = table(data_folder, "encoder", lora={"rank": 2})
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    settings["data"] |= {"path": str(data_folder / "labels.tsv"), "kind": "labelled"}
    reporter = RecordingReporter()
    model = train(Run.from_dict(settings), reporter).model
    assert any("no adapter files" in text for text in reporter.messages)
    assert not (data_folder / "run" / "adapter").exists()
    base, _ = gh.load(data_folder / "base" / "model")
    changed = {name for name, weight in model.state_dict().items() if not name.startswith("head.")} & {
        name for name, weight in base.state_dict().items() if not weight.equal(model.state_dict().get(name, weight))
    }
    assert changed == {name for name in base.state_dict() if ".query.weight" in name or ".value.weight" in name}


def test_frozen_modules_are_unchanged(data_folder: Path, put_run: PutRun) -> None:
    put_run("base", steps=1)
    settings = table(data_folder, freeze=["token_embedding", "stack.blocks.*.attention"])
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    train(Run.from_dict(settings))
    before, after = weights(data_folder, "base"), weights(data_folder)
    for name, weight in after.items():
        assert weight.equal(before[name]) == (name.startswith("token_embedding.") or ".attention." in name), name
    settings["train"] |= {"freeze": ["tokn_embedding"], "out": str(data_folder / "other")}
    with pytest.raises(InputError, match=r"'tokn_embedding'.*did you mean token_embedding\?"):
        train(Run.from_dict(settings))


def test_activation_checkpointing_trains_the_same(data_folder: Path, put_run: PutRun) -> None:
    put_run()
    train(Run.from_dict(table(data_folder, activation_checkpointing=True)))
    assert_same(data_folder, "whole", "run")


def test_a_compile_error_falls_back_to_eager(
    data_folder: Path, put_run: PutRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.exc import BackendCompilerFailed

    def broken(*_: object) -> torch.Tensor:
        raise BackendCompilerFailed(torch.compile, RuntimeError("no such instruction"), None)

    put_run()
    monkeypatch.setattr(torch, "compile", lambda forward: broken)
    monkeypatch.setattr("glasshouse.device.compile_obstacle", lambda device: None)
    reporter = RecordingReporter()
    train(Run.from_dict(table(data_folder, compile="yes")), reporter)
    assert any("not compiled" in text and "no such instruction" in text for text in reporter.messages)
    assert losses(data_folder) == losses(data_folder, "whole")


def test_labels_get_a_classifier_and_a_new_tokenizer_keeps_known_embeddings(
    data_folder: Path, put_run: PutRun
) -> None:
    put_run("base", "encoder")
    settings = table(data_folder, "encoder")
    settings["model"] = {"from": str(data_folder / "base" / "model")}
    settings["data"] |= {"path": str(data_folder / "labels.tsv"), "kind": "labelled", "seq_len": 24}
    with pytest.raises(InputError, match=r"data\.seq_len is 24, but the model has positions for 16"):
        train(Run.from_dict(settings))
    settings["data"]["seq_len"] = 16
    result = train(Run.from_dict(settings))
    assert result.model.spec.head.n_labels == 2
    assert "accuracy" in result.report.metrics
    other = gh.Tokenizer.train(texts=[SAYING], vocab_size=280)
    other.save(data_folder / "tok")
    settings["data"]["tokenizer"] = str(data_folder / "tok")
    settings["train"]["out"] = str(data_folder / "other")
    assert train(Run.from_dict(settings)).model.spec.vocab_size == 280


@pytest.mark.parametrize(
    ("model", "choice", "sentence"),
    [
        ({"d_model": 63}, {}, "d_model is 63, but it must be a multiple of n_heads"),
        ({}, {"lora": {"rank": 2}}, r"train\.lora needs a pretrained model"),
    ],
)
def test_wrong_sizes_are_found_before_data_are_prepared(
    model: dict[str, object], choice: dict[str, object], sentence: str, data_folder: Path
) -> None:
    settings = table(data_folder, **choice)
    settings["model"] |= model
    with pytest.raises(gh.ConfigError, match=sentence):
        train(Run.from_dict(settings))
    assert not (data_folder / "run").exists()


def test_a_model_without_a_tokenizer_never_gets_a_new_one(data_folder: Path, put_run: PutRun) -> None:
    put_run("base", steps=1)
    shutil.copytree(data_folder / "base" / "model", data_folder / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (data_folder / "bare" / name).unlink()
    settings = table(data_folder, lr=1e-9)
    settings["model"] = {"from": str(data_folder / "bare")}
    with pytest.raises(InputError, match=r"no tokenizer in '.*bare'.*data\.tokenizer=FOLDER"):
        train(Run.from_dict(settings))
    assert not (data_folder / "run" / "data").exists()  # an error before the data are prepared
    for vocab_size, sentence in (
        (280, "has 280 tokens, but vocab_size is 270"),
        (269, "is not the one that the model"),
    ):
        gh.Tokenizer.train(texts=[SAYING], vocab_size=vocab_size).save(data_folder / f"tok-{vocab_size}")
        settings["data"]["tokenizer"] = str(data_folder / f"tok-{vocab_size}")
        with pytest.raises(InputError, match=sentence):
            train(Run.from_dict(settings))
    settings["data"]["tokenizer"] = str(data_folder / "base" / "model")
    result = train(Run.from_dict(settings))
    assert result.datasets.tok.fingerprint == gh.load(data_folder / "base" / "model")[1].fingerprint
    prepared = table(data_folder, out="prepared", steps=1)
    prepared["model"] = settings["model"]
    gh.data.prepare(data_folder / "a.txt", result.datasets.tok, data_folder / "ids")
    prepared["data"]["path"] = str(data_folder / "ids")
    assert train(Run.from_dict(prepared)).datasets.tok.fingerprint == result.datasets.tok.fingerprint


def test_recipes_load() -> None:
    expected = {
        "stdlib",
        "dates",
        "translate",
        "langid",
        "classify",
        "masked-lm",
        "paraphrases",
        "finetune-chat",
        "finetune-classifier",
        "vaswani-base",
        "modern-base",
        "python-3m",
        "english-4m",
        "demo",
        "dpo",
    }
    assert set(recipes()) == expected
    for name in recipes():
        run = Run.load(name)
        assert run.train.out == f"runs/{name}"
        assert Run.from_dict(run.to_dict()) == run


@pytest.mark.parametrize(("task", "data"), [("translate", "dates"), ("classify", "langid")])
def test_a_recipe_by_task_is_that_of_its_sample_without_data(task: str, data: str) -> None:
    assert Run.load(task) == Run.load(data, f"train.out=runs/{task}")
    assert Run.load(task, "train.seed=1") == Run.load(data, "train.seed=1", f"train.out=runs/{task}")


def test_a_recipe_by_task_is_for_data_of_ones_own() -> None:
    classify, translate = (Run.load(task, "data.path=my/pairs.tsv") for task in ("classify", "translate"))
    assert classify == Run.load("langid", "data.path=my/pairs.tsv")
    assert (translate.train.out, translate.data.kind, translate.train.epochs) == ("runs/pairs", "pairs", 80)
    few = Run.load("translate", "data.path=my/pairs.tsv", "train.steps=100")
    assert (few.train.steps, few.train.epochs, few.train.schedule.warmup) == (100, None, 10)
    assert few.notes == (
        "the warm-up is shortened from 2000 steps to 10, as train.steps is 100 instead of train.epochs 80",
    )


def test_adjusted_settings_are_logged(data_folder: Path) -> None:
    settings = table(data_folder)
    (data_folder / "a.toml").write_text(config.to_toml(settings))
    reporter = RecordingReporter()
    train(Run.load(data_folder / "a.toml", "train.steps=1"), reporter)
    assert reporter.messages[0] == "the warm-up is shortened from 2 steps to 0, as train.steps is 1 instead of 12"
    again = RecordingReporter()
    train(Run.load(data_folder / "run" / "run.toml"), again)  # run.toml has the adjusted settings
    assert not any("warm-up" in text for text in again.messages)


def test_mistakes_in_a_run_file_are_named(tmp_path: Path) -> None:
    for settings, message in (
        (["train.stepz=3"], "train.stepz is not a setting of 'Train'; did you mean steps?"),
        (["data.path=[]"], "data.path is"),
        (["trian.steps=3"], "trian is not a table of a run; did you mean train?"),
        (["train.steps=0"], "train.steps is 0, but it must be at least 1."),
        (["train=3"], "train is 3, but it must be a table of settings."),
    ):
        with pytest.raises(ConfigError) as error:
            Run.load("stdlib", *settings)
        assert message in str(error.value)
    with pytest.raises(ConfigError, match=r"there is no recipe or file 'stdlb'.*did you mean stdlib"):
        Run.load("stdlb")
    with pytest.raises(ConfigError, match=r"there is no file .*none\.toml"):
        Run.load(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="neither preset, nor from"):
        Run.from_dict({"train": {"steps": 3}})
