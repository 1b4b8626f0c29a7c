"""From a spec and data to a trained model: one step that can be trusted, and a loop around it that loses nothing."""

from glasshouse.hub.runs import is_run
from glasshouse.training.display import Display
from glasshouse.training.loop import Result, Trainer, train
from glasshouse.training.material import Datasets, open_datasets, units_of
from glasshouse.training.moments import SavedCheckpoint, list_checkpoints
from glasshouse.training.run import Data, Run, Train, recipes
from glasshouse.training.signals import StoppedError
from glasshouse.training.watch import SilentReporter, ProgressReporter

__all__ = [
    "Data",
    "Display",
    "Datasets",
    "SavedCheckpoint",
    "Result",
    "Run",
    "SilentReporter",
    "StoppedError",
    "Train",
    "Trainer",
    "ProgressReporter",
    "is_run",
    "list_checkpoints",
    "recipes",
    "open_datasets",
    "train",
    "units_of",
]
