"""From a spec and data to a trained model: one step that can be trusted, and a loop around it that loses nothing."""

from glasshouse.training.loop import Result, Trainer, train
from glasshouse.training.material import Material, reopen
from glasshouse.training.run import Data, Run, Train, recipes
from glasshouse.training.signals import StoppedError
from glasshouse.training.watch import Watch

__all__ = [
    "Data",
    "Material",
    "Result",
    "Run",
    "StoppedError",
    "Train",
    "Trainer",
    "Watch",
    "recipes",
    "reopen",
    "train",
]
