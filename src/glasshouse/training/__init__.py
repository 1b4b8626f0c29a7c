"""From a spec and data to a trained model: one step that can be trusted, and a loop around it that loses nothing."""

from glasshouse.hub.runs import is_run
from glasshouse.training.display import Display
from glasshouse.training.loop import Result, Trainer, train
from glasshouse.training.material import Material, reopen, units_of
from glasshouse.training.moments import Moment, moments
from glasshouse.training.run import Data, Run, Train, recipes
from glasshouse.training.signals import StoppedError
from glasshouse.training.watch import Silent, Watch

__all__ = [
    "Data",
    "Display",
    "Material",
    "Moment",
    "Result",
    "Run",
    "Silent",
    "StoppedError",
    "Train",
    "Trainer",
    "Watch",
    "is_run",
    "moments",
    "recipes",
    "reopen",
    "train",
    "units_of",
]
