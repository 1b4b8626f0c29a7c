"""The result of a run: the final model, saved, plotted and evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from glasshouse import hub
from glasshouse.errors import ConfigError
from glasshouse.evaluation import Report, evaluate
from glasshouse.hub.run_checkpoints import MODEL
from glasshouse.inspection.display.html import Drawing, HtmlDisplay, Table
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.training.checkpoint.folder import ADAPTER
from glasshouse.training.logging import plots
from glasshouse.training.run import Pretrained
from glasshouse.training.setup.custom import AnyDatasets, CustomDatasets
from glasshouse.training.trainer import Trainer

ANSWERS = 200  # generated for the final report on pairs and conversations; generation is slow


@dataclass(frozen=True, repr=False)
class Result(HtmlDisplay):
    """The outcome of a run; a notebook shows its metrics."""

    folder: Path
    model: Model  # in eval mode, as saved in `folder / "model"`; in processes other than the first, without weights
    datasets: AnyDatasets
    steps: int
    report: Report  # on the whole validation set
    saved_step: int  # step of the saved model: the last, or with patience the best
    val_coverage: tuple[int, int]  # samples of an evaluation during training, and of the whole validation set

    def __repr__(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.report.metrics.items())
        return f"Result({str(self.folder)!r}, {self.steps:,} step{'s' * (self.steps != 1)}{metrics})"

    def _drawings(self) -> list[Drawing]:
        values = {"step of the model": f"{self.saved_step:,} of {self.steps:,}"}
        values |= {name.replace("_", " "): f"{value:.4f}" for name, value in self.report.metrics.items()}
        return [Table(values, f"{self.folder}, on the validation set")]


def save_result(trainer: Trainer) -> Result:
    """Save the final model, draw the plots and evaluate on the whole validation set."""
    trainer.reporter.stage("saving the model", 0, 0)
    trainer.processes.wait()  # for the last checkpoint, which the main process writes
    saved_step, is_last = _load_best(trainer)
    with trainer.ema.applied() if trainer.ema is not None and is_last else nullcontext():
        model = trainer.checkpointer.save_model(trainer.folder / MODEL, trainer.objective.finish)
        _save_adapter(trainer)
        by_parts = not trainer.gathers or isinstance(trainer.datasets, CustomDatasets)
        report = _shared_report(trainer) if by_parts else None
    if trainer.processes.is_main:
        trainer.reporter.stage("drawing plots", 0, 0)
        with trainer.checkpointer.report_write_errors():
            plots.draw(trainer.metrics, trainer.folder)
        report = report or _report(trainer, model)
    (report, *_) = trainer.processes.gather(report)  # the others wait for it
    assert report is not None
    coverage = trainer.eval_samples, len(trainer.val_samples)
    return Result(trainer.folder, model.eval(), trainer.datasets, trainer.state.step, report, saved_step, coverage)


def _load_best(trainer: Trainer) -> tuple[int, bool]:
    """With patience, load the best weights; return the step of the weights, and whether it is the last."""
    best, checkpointer = trainer.state.best, trainer.checkpointer
    if not trainer.run.train.patience or best is None or best[0] not in checkpointer.checkpoints.steps():
        return trainer.state.step, True
    checkpointer.load_weights(best[0])  # the EMA, if there is one
    return best[0], False


def _report(trainer: Trainer, model: Model) -> Report:
    """Evaluate the saved model, and generate answers, in one process."""
    assert not isinstance(trainer.datasets, CustomDatasets)

    def progress(stage: str, done: int, total: int) -> None:
        trainer.signals.check()
        trainer.reporter.stage(stage, done, total)

    return evaluate(
        model.to(trainer.device).eval(),
        trainer.datasets.tok,
        trainer.datasets.validation,
        seq_len=trainer.run.data.seq_len,
        batch_size=trainer.micro_batch_size,
        limit=trainer.state.report_samples or None,
        generate=ANSWERS,
        objective=trainer.objective,
        progress=progress,
    )


def _shared_report(trainer: Trainer) -> Report:
    """Evaluate in all processes, without answers: a model that no device can hold, or samples of no corpus."""
    count, datasets = len(trainer.val_samples), trainer.datasets
    kind = trainer.objective.data_kind if isinstance(datasets, CustomDatasets) else datasets.validation.kind
    sums = trainer.validation_sums(count)
    return Report(kind or "text", sums.metrics(), sums.n_targets, [], n_items=count, n_evaluated=count)


def _save_adapter(trainer: Trainer) -> None:
    """Save the LoRA weights alone, in PEFT's format."""
    run, log = trainer.run, trainer.reporter.log
    if run.train.lora is None or not isinstance(run.model, Pretrained):
        return
    if trainer.resized:
        log("no adapter files: the head or the vocabulary differs from the base model's")
        return
    if (model := trainer.plain_model()) is None or (attached := lora.attached(model)) is None:
        return
    try:
        with trainer.checkpointer.report_write_errors():
            hub.save_adapter(model, attached, trainer.folder / ADAPTER, run.model.source)
    except ConfigError as error:
        log(f"no adapter files: {error}")
