"""`train`: a run from its settings to its result.

Resolve the settings, lock the run folder, prepare the data, build the trainer, and run the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from glasshouse import device as machine
from glasshouse.errors import InputError
from glasshouse.models import Model
from glasshouse.objectives import Objective
from glasshouse.objectives.loss.cross_entropy import LossFn
from glasshouse.text import Tokenizer
from glasshouse.training.budget import MOST_EPOCHS, Budget, clock
from glasshouse.training.checkpoint.folder import lock_run, run_folder, with_choice, write_run
from glasshouse.training.distributed.failures import watch_agent, watched
from glasshouse.training.distributed.processes import is_main_process, join_processes
from glasshouse.training.logging.progress import Display, ProgressReporter, SilentReporter
from glasshouse.training.result import Result, save_result
from glasshouse.training.run import Run
from glasshouse.training.setup.build import build_trainer, describe
from glasshouse.training.setup.choice import best, find_candidates
from glasshouse.training.setup.custom import AnyDatasets, Custom, MakeOptimizer, custom_datasets
from glasshouse.training.setup.datasets import describe_files, prepare_datasets, units_of
from glasshouse.training.setup.resolve import Resolved, resolve
from glasshouse.training.signals import Signals, StoppedError
from glasshouse.training.trainer import Callback

STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


def train(
    run: Run | str | Path,
    progress: ProgressReporter | bool = True,
    *,
    callbacks: Sequence[Callback] = (),
    objective: Objective[Any] | LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    dataset: Any = None,  # noqa: ANN401 - any class with a length and items
    model: Model | tuple[Model, Tokenizer] | None = None,
) -> Result:
    """Train a model, or resume its training, and save it to the run folder.

    The run may be the name of a recipe or the path of a TOML file. Progress is shown on stderr, or passed to your own
    `ProgressReporter`; `progress=False` shows nothing. Ctrl-C, SIGTERM and SIGHUP save and raise `StoppedError`.

    `callbacks` are called by the training loop. `objective` is an `Objective`, or a loss of model, batch and label
    smoothing that is summed over the targets; `optimizer` takes the model and returns a torch optimizer; `dataset` is
    a map-style dataset, such as torch's, or a pair of them for training and validation, whose items are described by
    `gh.data.MapDataset`. `model` is one of your own in place of that of the settings, its weights made or edited in
    Python, with its tokenizer unless `dataset` has ids or `data.tokenizer` names it. All are used instead of what the
    settings choose, and a resumed run must be given the same.

    >>> import tempfile, glasshouse as gh
    >>> folder = tempfile.mkdtemp()
    >>> _ = Path(f"{folder}/a.txt").write_text("to be or not to be, that is the question. " * 50)
    >>> table = {
    ...     "model": {"preset": "tiny-decoder"},
    ...     "data": {"path": f"{folder}/a.txt", "seq_len": 16, "vocab_size": 270},
    ...     "train": {"steps": 3, "batch_tokens": 64, "out": f"{folder}/run"},
    ... }
    >>> result = train(Run.from_dict(table), progress=False)
    >>> {"checkpoints", "metrics.jsonl", "model", "samples.jsonl"} <= {path.name for path in result.folder.iterdir()}
    True
    """
    began = clock()
    if isinstance(run, str | Path):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise InputError(
            f"run is {run!r}, but it must be a Run, the name of a recipe or the path of a TOML file; see gh.Run.load."
        )
    if isinstance(progress, bool):
        shows = progress and is_main_process()
        with Display(units_of(run.data)).open() if shows else nullcontext(SilentReporter()) as shown:
            return train(
                run,
                shown,
                callbacks=callbacks,
                objective=objective,
                optimizer=optimizer,
                dataset=dataset,
                model=model,
            )
    if unknown := [one for one in callbacks if not isinstance(one, Callback)]:
        raise InputError(f"callbacks has {unknown[0]!r}, but each must be a gh.training.Callback.")
    custom = Custom(objective, optimizer, dataset, model)
    run = custom.with_model(with_choice(run))
    device = machine.resolve(run.train.device, "train.device")
    with (
        watch_agent(),
        join_processes(run.train.parallel, device) as (processes, device),
        watched(processes),
    ):
        progress = progress if processes.is_main else SilentReporter()
        resolved = resolve(run, custom, processes, device, progress)
        with lock_run(run) if processes.is_main else nullcontext(run_folder(run)) as folder:
            return _train_in(folder, resolved, progress, callbacks, began)


def _train_in(
    folder: Path, resolved: Resolved, progress: ProgressReporter, callbacks: Sequence[Callback], began: float
) -> Result:
    """Prepare the data in the run folder, which the main process alone locks and writes; build the trainer, train."""
    run, dataset = resolved.run, resolved.custom.dataset
    for note in run.notes:
        progress.log(note)
    progress.log(f"folder   {folder}")
    progress.log(f"data     {describe_files(run.data) if dataset is None else 'a dataset of your own'}")
    progress.log("stop     Ctrl-C saves a checkpoint and stops; run the same command again to resume")
    if dataset is not None:
        datasets: AnyDatasets = custom_datasets(dataset, run, resolved.tokenizer)
    else:
        with resolved.processes.main_first():
            datasets = prepare_datasets(resolved.data, folder, resolved.tokenizer, progress.stage)
    with Signals(lambda: progress.log(STOPPING)) as signals:
        budget = None if run.train.minutes is None else Budget(run.train.minutes, began)
        if budget is not None and run.unchosen is not None:
            resolved = _choose(resolved, datasets, budget, folder, progress, signals)
        progress.stage("building the model", 0, 0)
        trainer = build_trainer(resolved, datasets, folder, progress, signals, callbacks, budget)
        for line in describe(trainer):
            progress.log(line)
        try:
            trainer.resume()
            trainer.fit()
            result = save_result(trainer)
        except StoppedError as stopped:
            raise StoppedError(stopped.number, trainer.state.step) from None
        if budget is not None:
            progress.log(f"time     {_minutes(budget.used)} of {_minutes(budget.seconds)} minutes")
        return result


def _choose(
    resolved: Resolved,
    datasets: AnyDatasets,
    budget: Budget,
    folder: Path,
    progress: ProgressReporter,
    signals: Signals,
) -> Resolved:
    """Choose model, batch and steps for the lowest loss in the time, and write them to run.toml."""
    candidates = find_candidates(resolved, datasets, budget, signals, progress)
    chosen = best(candidates)
    run = chosen.apply(resolved.run)
    if resolved.processes.is_main:
        write_run(run, folder)
    others = ", ".join(f"depth {one.depth}: {one.loss:.3f}" for one in candidates if one is not chosen)
    speed = f"{chosen.tokens_per_second:,.0f} tokens/s {'measured' if chosen.timed else 'expected'} on this machine"
    progress.log(
        f"choice   depth {chosen.depth}, with the lowest loss predicted for {_minutes(budget.seconds)} minutes, "
        f"{chosen.loss:.3f}: {speed}, {chosen.epochs:.2g} epochs{f' ({others})' if others else ''}"
    )
    if chosen.epochs > MOST_EPOCHS - 1:
        progress.log(
            f"         at most {MOST_EPOCHS} epochs, as more would overfit; more text would use all of the time"
        )
    return replace(resolved, run=run)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
