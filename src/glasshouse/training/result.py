"""The result of a run: the final model, saved, plotted and evaluated."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from glasshouse import hub
from glasshouse.errors import ConfigError
from glasshouse.evaluation import Report, evaluate
from glasshouse.hub.run_checkpoints import MODEL
from glasshouse.models import Model
from glasshouse.training import plots
from glasshouse.training.datasets import Datasets
from glasshouse.training.folder import ADAPTER
from glasshouse.training.run import Pretrained
from glasshouse.training.setup import Setup

ANSWERS = 200  # generated for the final report on pairs and conversations; generation is slow


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    folder: Path
    model: Model  # in eval mode, as saved in `folder / "model"`; in processes other than the first, without weights
    datasets: Datasets
    steps: int
    report: Report  # on the whole validation set
    saved_step: int  # step of the saved model: the last, or with patience the best
    val_coverage: tuple[int, int]  # samples of an evaluation during training, and of the whole validation set


def save_result(setup: Setup) -> Result:
    """Save the final model, draw the plots and evaluate on the whole validation set."""
    setup.reporter.stage("saving the model", 0, 0)
    setup.processes.wait()  # for the last checkpoint, which the main process writes
    model, saved_step = _save_model(setup)
    report = _report(setup, model) if setup.processes.is_main else None
    (report, *_) = setup.processes.gather(report)  # the others wait for it
    assert report is not None
    coverage = setup.eval_samples, len(setup.val_samples)
    return Result(setup.folder, model.eval(), setup.datasets, setup.state.step, report, saved_step, coverage)


def _report(setup: Setup, model: Model) -> Report:
    """Draw the plots and evaluate the saved model; by the main process alone, as it generates."""
    setup.reporter.stage("drawing plots", 0, 0)
    with setup.checkpointer.report_write_errors():
        plots.draw(setup.metrics, setup.folder)

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
        progress=progress,
    )


def _save_model(setup: Setup) -> tuple[Model, int]:
    """Save the last model, or with patience the best, and its EMA if there is one; return it and its step."""
    best, checkpointer, saved_step = setup.state.best, setup.checkpointer, setup.state.step
    is_last = not setup.run.train.patience or best is None or best[0] not in checkpointer.checkpoints.steps()
    if best is not None and not is_last:
        saved_step = best[0]
        checkpointer.load_weights(saved_step)  # the EMA, if there is one
    with setup.ema.applied() if setup.ema is not None and is_last else nullcontext():
        model = checkpointer.save_model(setup.folder / MODEL)
        _save_adapter(setup)
    return model, saved_step


def _save_adapter(setup: Setup) -> None:
    """Save the LoRA weights alone, in PEFT's format."""
    run, log = setup.run, setup.reporter.log
    if run.train.lora is None or not isinstance(run.model, Pretrained):
        return
    if setup.resized:
        log("no adapter files: the head or the vocabulary differs from the base model's")
        return
    if (model := setup.plain_model()) is None:
        return
    try:
        with setup.checkpointer.report_write_errors():
            hub.save_adapter(model, run.train.lora, setup.folder / ADAPTER, run.model.source)
    except ConfigError as error:
        log(f"no adapter files: {error}")
