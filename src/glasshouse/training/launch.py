"""A run from its settings to its result: the device and the processes, the data, the model, the loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from glasshouse import device as machine
from glasshouse.errors import InputError
from glasshouse.objectives import Objective
from glasshouse.objectives.loss.cross_entropy import LossFn
from glasshouse.training.checkpoint.folder import lock_run, run_folder
from glasshouse.training.distributed.failures import watch_agent, watched
from glasshouse.training.distributed.processes import Processes, is_main_process, join_processes
from glasshouse.training.logging.progress import Display, ProgressReporter, SilentReporter
from glasshouse.training.logging.trackers import Trackers
from glasshouse.training.recovery import Recovery
from glasshouse.training.result import Result, save_result
from glasshouse.training.run import Pretrained, Run
from glasshouse.training.setup.components import Setup, check_objective, describe, make_setup, resolve_precision
from glasshouse.training.setup.custom import AnyDatasets, Callback, Custom, MakeOptimizer, custom_datasets
from glasshouse.training.setup.datasets import describe_files, prepare_datasets, units_of, with_kind
from glasshouse.training.setup.model import check_new_model, data_kind, load_base
from glasshouse.training.signals import Signals, StoppedError
from glasshouse.training.trainer import Trainer

STOPPING = "stopping after this step, with a checkpoint; Ctrl-C again stops at once"


def train(
    run: Run | str | Path,
    progress: ProgressReporter | bool = True,
    *,
    callbacks: Sequence[Callback] = (),
    objective: Objective[Any] | LossFn | None = None,
    optimizer: MakeOptimizer | None = None,
    dataset: Any = None,  # noqa: ANN401 - any class with a length and items
) -> Result:
    """Train a model, or resume its training, and save it to the run folder.

    The run may be the name of a recipe or the path of a TOML file. Progress is shown on stderr, or passed to your own
    `ProgressReporter`; `progress=False` shows nothing. Ctrl-C, SIGTERM and SIGHUP save and raise `StoppedError`.

    `callbacks` are called by the training loop. `objective` is an `Objective`, or a loss of model, batch and label
    smoothing that is summed over the targets; `optimizer` takes the model and returns a torch optimizer; `dataset` is
    a map-style dataset, such as torch's, or a pair of them for training and validation, whose items are described by
    `gh.data.MapDataset`. All are used instead of what the settings choose, and a resumed run must be given the same.

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
    if isinstance(run, str | Path):
        run = Run.load(run)
    if not isinstance(run, Run):
        raise InputError(
            f"run is {run!r}, but it must be a Run, the name of a recipe or the path of a TOML file; see gh.Run.load."
        )
    if isinstance(progress, bool):
        shows = progress and is_main_process()
        with Display(units_of(run.data)).open() if shows else nullcontext(SilentReporter()) as shown:
            return train(run, shown, callbacks=callbacks, objective=objective, optimizer=optimizer, dataset=dataset)
    custom = Custom(tuple(callbacks), objective, optimizer, dataset)
    device = machine.resolve(run.train.device, "train.device")  # fails before the data are prepared
    if not isinstance(run.model, Pretrained):
        check_new_model(run)  # likewise
    resolve_precision(run.train.precision, device)  # likewise
    with (
        watch_agent(),
        join_processes(run.train.parallel, device) as (processes, device),
        watched(processes),
    ):
        return _train_in(run, custom, processes, device, progress if processes.is_main else SilentReporter())


def _train_in(
    run: Run, custom: Custom, processes: Processes, device: torch.device, progress: ProgressReporter
) -> Result:
    """Prepare the data in the run folder, which the main process alone locks and writes, and train."""
    chosen = custom.choose_objective(run.train.objective)
    if chosen is not None:
        check_objective(chosen, run.train, processes)  # before the data are prepared
    if custom.dataset is not None and run.train.objective is not None:
        raise InputError(
            f"train.objective is {run.train.objective.kind!r} and dataset is given, but that objective takes its own "
            "data; leave one of them out."
        )
    with lock_run(run) if processes.is_main else nullcontext(run_folder(run)) as folder:
        for note in run.notes:
            progress.log(note)
        progress.log(f"folder   {folder}")
        progress.log(f"data     {describe_files(run.data) if custom.dataset is None else 'a dataset of your own'}")
        progress.log("stop     Ctrl-C saves a checkpoint and stops; run the same command again to resume")
        base = None
        if isinstance(run.model, Pretrained):
            progress.stage("loading the model to start from", 0, 0)
            base = load_base(run.model.source, run.data, needs_tokenizer=custom.dataset is None)
        choice = with_kind(run.data, data_kind(run.model.to_dict(), base[0] if base else None, chosen))
        known = base[1] if base else chosen.tokenizer() if chosen else None
        if custom.dataset is not None:
            datasets: AnyDatasets = custom_datasets(custom.dataset, run, known)
        else:
            with processes.main_first():
                datasets = prepare_datasets(choice, folder, known, progress.stage)
        with Signals(lambda: progress.log(STOPPING)) as signals:
            progress.stage("building the model", 0, 0)
            setup = make_setup(run, folder, device, datasets, base, progress, signals, processes, custom)
            return _train(setup, custom.callbacks)


def _train(setup: Setup, callbacks: Sequence[Callback]) -> Result:
    """Resume, run the remaining steps and save the result."""
    for line in describe(setup):
        setup.reporter.log(line)
    recovery = Recovery(setup)
    recovery.resume()
    folder = setup.folder
    start, writes = setup.state.unwritten, setup.processes.is_main
    trackers = Trackers(folder, setup.run.train.wandb, folder.name, start, writes=writes)
    try:
        Trainer(setup, recovery, trackers, callbacks).fit()
        return save_result(setup)
    except StoppedError as stopped:
        raise StoppedError(stopped.number, setup.state.step) from None
    finally:
        trackers.close()
