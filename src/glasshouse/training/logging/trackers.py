"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, and those that others register."""

from __future__ import annotations

import importlib.util
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from glasshouse import registry
from glasshouse.config import JsonDict, Settings, flat
from glasshouse.errors import InputError

# Settings ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tracker(Settings, registry.Kind):
    """Base class of a tracker's settings; what is built for it is a `MetricsLogger`."""

    build_arguments = "its settings and a TrackedRun"
    extra: ClassVar[str] = ""  # of pyproject.toml, and the module that it needs


@dataclass(frozen=True)
class TensorBoard(Tracker):
    """Event files in the run folder's `tensorboard`, which `tensorboard --logdir` shows."""

    kind: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"


@dataclass(frozen=True)
class Wandb(Tracker):
    """Weights & Biases; its environment variables say where and as whom."""

    kind: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"
    project: str | None = None  # None: WANDB_PROJECT, or wandb's own default


@dataclass(frozen=True)
class MLflow(Tracker):
    """MLflow; MLFLOW_TRACKING_URI says where the runs are."""

    kind: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"
    experiment: str = "glasshouse"  # which the run belongs to; created if there is none


registry.add(TensorBoard, Wandb, MLflow)

# Loggers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrackedRun:
    """What a logger is told of the run."""

    folder: Path  # of the run; what a logger keeps there a resumed run finds
    name: str = ""
    start: int = 0  # the first step to be written; a run that is resumed may have written later ones
    settings: JsonDict = field(default_factory=dict)  # as in run.toml


class MetricsLogger:
    """Sends the metrics of a run to where people look at them. What it raises disables it, with a warning."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Send the metrics of a step; those of the validation set are named `validation/...`."""
        raise NotImplementedError

    def close(self) -> None:
        """Send what is left, at the end of the run or where it stops."""


class Trackers:
    """Sends the metrics of each step to the trackers; one that fails is disabled with a warning.

    `choices` None is TensorBoard if it is installed.

    >>> import tempfile
    >>> trackers = Trackers(None, TrackedRun(Path(tempfile.mkdtemp()), name="tiny"))
    >>> trackers.log(0, {"loss": 5.1, "validation_loss": 5.2})
    >>> trackers.close()
    """

    def __init__(self, choices: Sequence[Tracker] | None, run: TrackedRun, *, writes: bool = True) -> None:
        self._loggers: list[tuple[Tracker, MetricsLogger]] = []
        if not writes:  # left to another process
            return
        if choices is None:
            choices = [TensorBoard()] if importlib.util.find_spec("tensorboard") else []
        for choice in choices:
            _require_installed(choice)
        for choice in choices:
            with self._disabling(choice):
                self._loggers.append((choice, make_logger(choice, run)))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Send the numbers; validation_loss becomes validation/loss, which groups validation metrics."""
        numbers = {
            name.replace("validation_", "validation/", 1) if name.startswith("validation_") else name: float(value)
            for name, value in values.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for choice, logger in list(self._loggers):
            with self._disabling(choice):
                logger.log(step, numbers)

    def close(self) -> None:
        """Flush and close; later metrics are ignored."""
        loggers = list(self._loggers)
        for choice, logger in loggers:
            with self._disabling(choice):
                logger.close()
        self._loggers.clear()

    @contextmanager
    def _disabling(self, choice: Tracker) -> Iterator[None]:
        """Turn an error of a tracker into a warning, after which nothing is sent to it."""
        try:
            yield
        except Exception as error:
            # First, since a warning may be turned into an error.
            self._loggers = [one for one in self._loggers if one[0] is not choice]
            warnings.warn(
                f"the tracker {choice.kind} failed ({type(error).__name__}: {error}) and is disabled; training "
                "continues.",
                stacklevel=4,
            )


def make_logger(choice: Tracker, run: TrackedRun) -> MetricsLogger:
    """Build the logger of a tracker's settings: what was registered for them, or ours."""
    if (made := registry.build(choice, MetricsLogger, choice, run)) is not None:
        return made
    match choice:
        case TensorBoard():
            return _TensorBoardLogger(run)
        case Wandb():
            return _WandbLogger(choice, run)
        case MLflow():
            return _MLflowLogger(choice, run)
    raise InputError(f"nothing is built for the tracker {choice.kind!r}; register it with build.")


def _require_installed(choice: Tracker) -> None:
    if not choice.extra:
        return
    try:
        importlib.import_module(choice.extra)
    except ImportError:
        raise InputError(
            f"train.trackers has {choice.kind!r}, but {choice.extra} is not installed; run pip install "
            f"'glasshouse[{choice.extra}]' or leave it out."
        ) from None


class _TensorBoardLogger(MetricsLogger):
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # From `start` on it purges what the run had written before it was resumed.
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.start)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # a killed run has logged every step, as in metrics.jsonl

    def close(self) -> None:
        self._writer.close()


class _WandbLogger(MetricsLogger):
    def __init__(self, choice: Wandb, run: TrackedRun) -> None:
        wandb = importlib.import_module("wandb")
        known = run.folder / "wandb.id"  # a resumed run keeps its id; repeated steps are logged once
        if not known.is_file():
            known.write_text(secrets.token_hex(8), encoding="utf-8")
        number = known.read_text(encoding="utf-8")
        self._run: Any = wandb.init(
            dir=run.folder,
            project=choice.project,
            name=run.name,
            id=number,
            resume="allow",
            config=run.settings,
            allow_val_change=True,  # a resumed run may have more steps
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()


class _MLflowLogger(MetricsLogger):
    """By MLflow's client, which leaves a run that the caller has active alone."""

    def __init__(self, choice: MLflow, run: TrackedRun) -> None:
        mlflow = importlib.import_module("mlflow")
        self._metric, self._client = mlflow.entities.Metric, mlflow.MlflowClient()
        known = run.folder / "mlflow.id"
        if known.is_file():
            self._id = known.read_text(encoding="utf-8")
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(choice.experiment)
        experiment_id = (
            self._client.create_experiment(choice.experiment) if experiment is None else experiment.experiment_id
        )
        self._id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        known.write_text(self._id, encoding="utf-8")
        # Parameters are never changed, so what a resumed run sets otherwise is in its run.toml alone.
        parameters = [mlflow.entities.Param(name, str(value)) for name, value in flat(run.settings)]
        for begin in range(0, len(parameters), 100):  # the most that a request may have
            self._client.log_batch(self._id, params=parameters[begin : begin + 100])

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        rows = [self._metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=rows)

    def close(self) -> None:
        self._client.set_terminated(self._id)
