"""The result of a run: the final model, saved, plotted and evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from glasshouse import hub
from glasshouse.errors import ConfigError
from glasshouse.evaluation import Report, evaluate
from glasshouse.hub.run_checkpoints import MODEL
from glasshouse.inspection.html_display import HtmlDisplay, shown
from glasshouse.layers import lora
from glasshouse.models import Model
from glasshouse.training.checkpoint.folder import ADAPTER
from glasshouse.training.logging import plots
from glasshouse.training.run import Pretrained
from glasshouse.training.setup.components import Setup
from glasshouse.training.setup.custom import AnyDatasets, CustomDatasets
from glasshouse.training.trainer import shared_sums

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

    def _html_body(self) -> str:
        values = {"step of the model": f"{self.saved_step:,} of {self.steps:,}"}
        values |= {name.replace("_", " "): f"{value:.4f}" for name, value in self.report.metrics.items()}
        lines = "".join(f"<tr><th>{shown(name)}</th><td>{shown(value)}</td></tr>" for name, value in values.items())
        return f"<table><caption>{shown(str(self.folder))}, on the validation set</caption>{lines}</table>"


def save_result(setup: Setup) -> Result:
    """Save the final model, draw the plots and evaluate on the whole validation set."""
    setup.reporter.stage("saving the model", 0, 0)
    setup.processes.wait()  # for the last checkpoint, which the main process writes
    saved_step, is_last = _load_best(setup)
    with setup.ema.applied() if setup.ema is not None and is_last else nullcontext():
        model = setup.checkpointer.save_model(setup.folder / MODEL, setup.objective.finish)
        _save_adapter(setup)
        by_parts = not setup.gathers or isinstance(setup.datasets, CustomDatasets)
        report = _shared_report(setup) if by_parts else None
    if setup.processes.is_main:
        setup.reporter.stage("drawing plots", 0, 0)
        with setup.checkpointer.report_write_errors():
            plots.draw(setup.metrics, setup.folder)
        report = report or _report(setup, model)
    (report, *_) = setup.processes.gather(report)  # the others wait for it
    assert report is not None
    coverage = setup.eval_samples, len(setup.val_samples)
    return Result(setup.folder, model.eval(), setup.datasets, setup.state.step, report, saved_step, coverage)


def _load_best(setup: Setup) -> tuple[int, bool]:
    """With patience, load the best weights; return the step of the weights, and whether it is the last."""
    best, checkpointer = setup.state.best, setup.checkpointer
    if not setup.run.train.patience or best is None or best[0] not in checkpointer.checkpoints.steps():
        return setup.state.step, True
    checkpointer.load_weights(best[0])  # the EMA, if there is one
    return best[0], False


def _report(setup: Setup, model: Model) -> Report:
    """Evaluate the saved model, and generate answers, in one process."""
    assert not isinstance(setup.datasets, CustomDatasets)

    def progress(stage: str, done: int, total: int) -> None:
        setup.signals.check()
        setup.reporter.stage(stage, done, total)

    return evaluate(
        model.to(setup.device).eval(),
        setup.datasets.tok,
        setup.datasets.validation,
        seq_len=setup.run.data.seq_len,
        batch_size=setup.micro_batch_size,
        generate=ANSWERS,
        objective=setup.objective,
        progress=progress,
    )


def _shared_report(setup: Setup) -> Report:
    """Evaluate in all processes, without answers: a model that no device can hold, or samples of no corpus."""
    count, datasets = len(setup.val_samples), setup.datasets
    kind = setup.objective.data_kind if isinstance(datasets, CustomDatasets) else datasets.validation.kind
    sums = shared_sums(setup, count, setup.token_bytes)
    return Report(kind or "text", sums.metrics(), sums.n_targets, [], n_items=count, n_evaluated=count)


def _save_adapter(setup: Setup) -> None:
    """Save the LoRA weights alone, in PEFT's format."""
    run, log = setup.run, setup.reporter.log
    if run.train.lora is None or not isinstance(run.model, Pretrained):
        return
    if setup.resized:
        log("no adapter files: the head or the vocabulary differs from the base model's")
        return
    if (model := setup.plain_model()) is None or (attached := lora.attached(model)) is None:
        return
    try:
        with setup.checkpointer.report_write_errors():
            hub.save_adapter(model, attached, setup.folder / ADAPTER, run.model.source)
    except ConfigError as error:
        log(f"no adapter files: {error}")
