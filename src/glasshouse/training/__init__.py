"""From a spec and data to a trained model: one step that can be trusted, and a loop around it that loses nothing."""

from glasshouse.training.folder import is_run
from glasshouse.training.loop import Result, Trainer, train
from glasshouse.training.material import Material, reopen
from glasshouse.training.moments import Moment, moments
from glasshouse.training.run import Data, Run, Train, recipes
from glasshouse.training.signals import StoppedError
from glasshouse.training.watch import Watch

__all__ = [
    "Data",
    "Material",
    "Moment",
    "Result",
    "Run",
    "StoppedError",
    "Train",
    "Trainer",
    "Watch",
    "is_run",
    "moments",
    "recipes",
    "reopen",
    "train",
]
