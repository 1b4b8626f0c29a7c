"""Training: run settings, datasets, the training step, the loop, checkpoints and resuming."""

from glasshouse.hub.run_checkpoints import is_run
from glasshouse.training import plan, sweep
from glasshouse.training.checkpoint.store import SavedCheckpoint, list_checkpoints
from glasshouse.training.distributed.processes import Parallel, is_main_process
from glasshouse.training.launch import train
from glasshouse.training.logging.progress import Display, ProgressReporter, SilentReporter
from glasshouse.training.logging.trackers import MetricsLogger, TrackedRun, Tracker
from glasshouse.training.optimizer import Optimizer
from glasshouse.training.result import Result
from glasshouse.training.run import Data, Run, Train, recipes
from glasshouse.training.schedule import Schedule
from glasshouse.training.setup.choice import Candidate, plan_minutes
from glasshouse.training.setup.datasets import Datasets, open_datasets, units_of
from glasshouse.training.signals import StoppedError
from glasshouse.training.trainer import Callback, Trainer

__all__ = [
    "Callback",
    "Candidate",
    "Data",
    "Datasets",
    "Display",
    "MetricsLogger",
    "Optimizer",
    "Parallel",
    "ProgressReporter",
    "Result",
    "Run",
    "SavedCheckpoint",
    "Schedule",
    "SilentReporter",
    "StoppedError",
    "TrackedRun",
    "Tracker",
    "Train",
    "Trainer",
    "is_main_process",
    "is_run",
    "list_checkpoints",
    "open_datasets",
    "plan",
    "plan_minutes",
    "recipes",
    "sweep",
    "train",
    "units_of",
]
